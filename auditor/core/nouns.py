"""Define the nouns of an audit as frozen records: secrets, attacks' inputs and outputs, claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from auditor.core.canary_space import CanarySpace

Tokens = tuple[int, ...]

SettingName = Literal["text-only", "white-box"]

UNDEFENDED = "undefended"  # the target without a defense


class CellKey(NamedTuple):
    """Names that identify a cell of a run and the cell's results."""

    target: str
    setting: str
    attack: str  # or probe

    def __str__(self) -> str:
        """Return the cell's name in files, such as `pmixed/text-only/ethicist`."""
        return "/".join(self)

    @property
    def title(self) -> str:
        """The cell's name for readers, such as `pmixed, text-only, attack ethicist`; empty parts
        are left out.

        The word "attack" is needed because an attack and a metric may share a name, such as
        perplexity.
        """
        attack = self.attack and f"attack {self.attack}"
        return ", ".join(filter(None, (self.target, self.setting, attack)))

    @classmethod
    def parse_cell_key(cls, text: str) -> CellKey:
        """Parse the result of `str`. Raise ValueError for an invalid name."""
        target, setting, attack = text.split("/")
        return cls(target, setting, attack)


@dataclass(frozen=True)
class Canary:
    """A text made for insertion into training data; a model can only know it by memorisation.

    space: the possible texts, for exposure (None: unknown). coin: for an audit, True if the fair
    coin included the canary (None: no coin).
    """

    text: str
    space: CanarySpace | None = None
    coin: bool | None = None


Mark = tuple[str, str]  # a kind of personal data, and a text of it


@dataclass(frozen=True)
class Wording:
    """Original text of a secret, split at its tokens; it is never decoded from them.

    ends: where each token ends in the suffix. after: the record's next characters, not attacked.
    marks: personal data marked anywhere in the record.
    """

    prefix: str
    suffix: str
    ends: tuple[int, ...]
    after: str = ""
    marks: tuple[Mark, ...] = ()

    @property
    def prefix_and_suffix_text(self) -> str:
        return self.prefix + self.suffix

    @property
    def suffix_text_by_token(self) -> tuple[str, ...]:
        """Characters of each suffix token; if a character has several tokens, it belongs to the
        last."""
        return tuple(self.suffix[start:end] for start, end in pairwise((0, *self.ends)))


@dataclass(frozen=True)
class Secret:
    """A training record that an attacker should not be able to complete.

    Only the benchmark and the metrics hold secrets.

    `id`: key for randomness and for files of a run; `alias`: name in reports (`records.aliases`).
    `canary`: set if the secret was inserted into the data, `repeats` times. `wording`: None if the
    data are only token ids; secrets with equal tokens are equal, whatever their wording.
    `document`: id of the record that contains several secrets; `at`: start of the suffix in that
    record.
    """

    id: str
    prefix: Tokens
    suffix: Tokens
    repeats: int | None = None
    member: bool = True
    canary: Canary | None = None
    # The value of the column by which the user groups results.
    group: str | None = None
    wording: Wording | None = field(default=None, compare=False, repr=False)
    alias: str = ""  # set later
    document: str | None = None
    at: int = 0  # tokens
    # The person of the record by the user's column; None: unknown, or several.
    user: str | None = None
    user_trained: bool = False  # whether a record of that person was trained on
    # How often a member's record, near copies included, was trained on; None: unknown.
    copies: int | None = None


@dataclass(frozen=True)
class Pair:
    """A prefix and suffix that the attacker knows and may tune on."""

    prefix: Tokens
    suffix: Tokens


@dataclass(frozen=True)
class Query:
    """A prefix that an attack completes with `length` tokens, without the answer."""

    id: str
    prefix: Tokens
    length: int


@dataclass(frozen=True)
class PrefixToken:
    """The tokens before every text of a model. said: a phrase that names and explains them."""

    tokens: Tokens
    said: str


@dataclass(frozen=True)
class TextForm:
    """The rendering of conversations: template and day, as in `--template` and `--date`.

    digest: hex SHA-256 of the template and all other inputs; said: a phrase that names and explains
    them; doubts: sentences with reasons why the rendering may hide a leak.
    """

    template: str
    day: str | None
    digest: str
    said: str
    doubts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in a run's record, such as `trl, 2026-01-31 (SHA-256 0123456789ab)`."""
        return f"{self.template}{f', {self.day}' if self.day else ''} (SHA-256 {self.digest[:12]})"


@dataclass(frozen=True)
class Challenge:
    """All inputs of an attack, without the answers."""

    known: tuple[Pair, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Guess:
    """A completion of a prefix.

    `score`: higher means more confident, in every attack; `count`: number of equal samples;
    `log_prob` (sum) and `min_log_prob` (least likely token): nats under the attacked distribution,
    None without access.
    """

    suffix: Tokens
    score: float
    count: int = 1
    log_prob: float | None = None
    min_log_prob: float | None = None


@dataclass(frozen=True)
class Certificate:
    """Bounds on the decoding probabilities of the suffixes that a tree search did not find."""

    # Whether a suffix reached the threshold; otherwise the guess did not.
    reached: bool
    # Whether the likeliest suffix found is the likeliest of all, which holds if a suffix reached
    # it.
    certified: bool
    leftover: float  # mass of all suffixes not found
    pruned: float  # upper bound on the probability of any suffix not found: the largest pruned node


@dataclass(frozen=True)
class Guesses:
    """An attack's guesses for one secret, most confident first, and their cost.

    A search draws no tokens and therefore uses no budget of a claim, because no claim covers the
    distribution that it reads. Its cost is `rows`, and `samples` is its number of candidates.
    """

    secret: str
    ranked: tuple[Guess, ...]
    samples: int
    drawn: int  # tokens drawn from the target
    # Draws within 1e-6 of a CDF boundary, which float noise could have changed.
    near_boundary: int = 0
    rows: int = 0  # rows run through the target: distinct partial samples, or nodes of a search
    certificate: Certificate | None = None
    # Scores of the first guess by other rankings, higher is more confident.
    rankings: dict[str, float] = field(default_factory=dict)


def select_evenly_spaced(secrets: Sequence[Secret], limit: int) -> list[Secret]:
    """Return at most `limit` evenly spaced secrets."""
    count = min(limit, len(secrets))
    return [secrets[i * len(secrets) // count] for i in range(count)]


@dataclass(frozen=True)
class Observation:
    """Numbers that a probe observed for one secret, by name: `log_` names in nats, `_bits` names in
    bits."""

    secret: str
    values: dict[str, float]


@dataclass(frozen=True)
class TokenLogProbs:
    """The log-probability, in nats, of each token of a secret's true suffix after its prefix."""

    secret: str
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Claim:
    """The promise of a defense, its unit and access, and the budget used by this audit, in nats.

    `unit`, `theorem`, `status`, `access` and `decoding` are words for readers; the program reads
    only the other fields.
    """

    epsilon: dict[str, float]  # by neighbouring relation
    delta: float
    relation: str  # the relation for which the defense was set up
    unit: str  # of protection: "shard", "any two models"
    # T: the drawn tokens that the epsilons cover; None: any number, queries cost nothing.
    queries: int | None
    theorem: str
    status: str  # "sound" | "claim; proof has gaps" | ...
    # Whether the promise follows from the procedure; otherwise reports call it only claimed.
    sound: bool = False
    access: str = "sampled tokens only"
    any_access: bool = False  # whether it holds for any access, the weights included
    decoding: str = "ancestral"
    spent_queries: int = 0
    spent_epsilon: dict[str, float] = field(default_factory=dict)
    # Whether it holds for any two models: every relation and unit.
    any_two: bool = False
    shard: bool = False  # whether the unit is a shard, which contains single records
    # The unit kept whole in a shard: "record", "user"; "": unknown.
    whole: str = ""
    details: dict[str, float] = field(default_factory=dict)
