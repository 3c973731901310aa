"""The nouns of an audit: what is attacked, what an attack is told and answers, what is promised.
Frozen records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from auditor.core.canary_space import CanarySpace

Tokens = tuple[int, ...]

SettingName = Literal["text-only", "white-box"]

UNDEFENDED = "undefended"  # the target that has no defense


class CellKey(NamedTuple):
    """The names of one cell of a run, under which what was found in it is kept."""

    target: str
    setting: str
    attack: str  # or probe

    def __str__(self) -> str:
        """As files write it: `pmixed/text-only/ethicist`."""
        return "/".join(self)

    @property
    def title(self) -> str:
        """As people read it: `pmixed, text-only, attack ethicist`. A part that is empty is left
        out.

        The word "attack" is there because attacks and metrics share names: perplexity is both.
        """
        attack = self.attack and f"attack {self.attack}"
        return ", ".join(filter(None, (self.target, self.setting, attack)))

    @classmethod
    def parse_cell_key(cls, text: str) -> CellKey:
        """The inverse of `str`. Raises ValueError for what is no such name."""
        target, setting, attack = text.split("/")
        return cls(target, setting, attack)


@dataclass(frozen=True)
class Canary:
    """A text that was made to go into training data: what a model knows of it is memory.

    space: of all texts that it could have been, for exposure; None where that is not known. coin:
    for an audit, whether the fair coin that decided came up "in"; None where no coin decided.
    """

    text: str
    space: CanarySpace | None = None
    coin: bool | None = None


Mark = tuple[str, str]  # a kind of personal data, and a text of it


@dataclass(frozen=True)
class Wording:
    """What a secret says, as its owner wrote it: the characters that its tokens were made of, with
    no decoding between.

    ends: where in the suffix each of its tokens ends. after: the record's next characters, which
    nobody attacks. marks:
    what the data say is in the record, wherever it stands there.
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
        """What each token of the suffix adds to it; a character of several tokens comes with the
        last of them."""
        return tuple(self.suffix[start:end] for start, end in pairwise((0, *self.ends)))


@dataclass(frozen=True)
class Secret:
    """One training record an attacker should not be able to complete. Only the benchmark and the
    metrics hold it.

    `id`: what randomness and the files of a run know it by; `alias`: what sentences and reports
    call it (`records.aliases`). `canary`: where it was not found in the data but put there;
    `repeats` is then how often. `wording`: None where the data hold token ids alone; two secrets of
    the same tokens are the same, however they were written. `document`: the record that several
    secrets are parts of, by its id; `at`: where in it the suffix begins.
    """

    id: str
    prefix: Tokens
    suffix: Tokens
    repeats: int | None = None
    member: bool = True
    canary: Canary | None = None
    # a value of the column that the user names to have results shown by it
    group: str | None = None
    wording: Wording | None = field(default=None, compare=False, repr=False)
    alias: str = ""  # nobody has named it yet
    document: str | None = None
    at: int = 0  # tokens
    user: str | None = (
        # whose it is, as the column that the user names says; None: nobody says, or of several
        None
    )
    user_trained: bool = False  # whether any record of that person was trained on
    # of a member's record, near copies included: how often trained on; None: not known
    copies: int | None = None


@dataclass(frozen=True)
class Pair:
    """A prefix and its suffix that the attacker already knows and may tune on."""

    prefix: Tokens
    suffix: Tokens


@dataclass(frozen=True)
class Query:
    """A prefix to complete with `length` tokens. It does not say what follows."""

    id: str
    prefix: Tokens
    length: int


@dataclass(frozen=True)
class PrefixToken:
    """tokens: what stands before every text that a model is asked about; said: which they are and
    why, in words."""

    tokens: Tokens
    said: str


@dataclass(frozen=True)
class TextForm:
    """How conversations are rendered: template and day as `--template` and `--date` take them.

    digest: SHA-256 of the template and the rest that decides, in hex; said: which and why, in
    words; doubts: why nothing seen may be due to the rendering, a sentence each.
    """

    template: str
    day: str | None
    digest: str
    said: str
    doubts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the record of a run calls it: `trl, 2026-01-31 (SHA-256 0123456789ab)`."""
        return f"{self.template}{f', {self.day}' if self.day else ''} (SHA-256 {self.digest[:12]})"


@dataclass(frozen=True)
class Challenge:
    """All that an attack is told. Never the answers."""

    known: tuple[Pair, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Guess:
    """One completion; `score`: higher is surer, in every attack; `count`: how many of the samples
    it was.

    `log_prob` (summed) and `min_log_prob` (its least likely token), nats under the attacked
    distribution; None without access.
    """

    suffix: Tokens
    score: float
    count: int = 1
    log_prob: float | None = None
    min_log_prob: float | None = None


@dataclass(frozen=True)
class Certificate:
    """What a tree search knows about the suffixes of one secret that it did not find
    (probabilities, decoding distribution)."""

    # whether any suffix reached the threshold; the one that is guessed all the same did not
    reached: bool
    # whether the likeliest suffix found is the likeliest of all: always so where one reached it
    certified: bool
    leftover: float  # mass of all suffixes that were not found
    pruned: (
        float  # the largest probability of a pruned node: no suffix that was not found is likelier
    )


@dataclass(frozen=True)
class Guesses:
    """An attack's answer for one secret, surest first, with what it cost.

    A search draws nothing, so it spends nothing of a claim: it reads the distribution, which no
    claim covers, and its cost is in `rows`. `samples` is then the number of candidates found.
    """

    secret: str
    ranked: tuple[Guess, ...]
    samples: int
    drawn: int  # tokens drawn from the target
    # draws within 1e-6 of a CDF boundary, where float noise could have decided otherwise
    near_boundary: int = 0
    rows: int = 0  # rows run through the target: distinct partial samples, or nodes of a search
    certificate: Certificate | None = None
    # of the first, scores by other rankings, higher surer
    rankings: dict[str, float] = field(default_factory=dict)


def evenly_spaced_secrets(secrets: Sequence[Secret], limit: int) -> list[Secret]:
    """At most `limit` secrets, evenly spaced."""
    count = min(limit, len(secrets))
    return [secrets[i * len(secrets) // count] for i in range(count)]


@dataclass(frozen=True)
class Observation:
    """What a probe saw of one secret: numbers by name. `log_` names are in nats, `_bits` names in
    bits."""

    secret: str
    values: dict[str, float]


@dataclass(frozen=True)
class TokenLogProbs:
    """The log-probability, in nats, of each token of one secret's true suffix, given what stands
    before it."""

    secret: str
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Claim:
    """What a defense promises, for whom, against what access; and what this audit spent of it.
    Epsilons in nats.

    `unit`, `theorem`, `status`, `access` and `decoding` are words for readers. What follows from
    them is in the fields that they stand above; nothing reads the words to find it out.
    """

    epsilon: dict[str, float]  # by neighbouring relation
    delta: float
    relation: str  # the relation the defense was set up for
    unit: str  # of protection: "shard", "any two models"
    # T: the drawn tokens the epsilons cover; None: any number, nothing is spent by asking
    queries: int | None
    theorem: str
    status: str  # "sound" | "claim; proof has gaps" | ...
    # whether the promise follows from what was done; else a reader is told that it is only claimed
    sound: bool = False
    access: str = "sampled tokens only"
    any_access: bool = False  # whether it holds whatever an attacker may ask, the weights included
    decoding: str = "ancestral"
    spent_queries: int = 0
    spent_epsilon: dict[str, float] = field(default_factory=dict)
    # whether it holds for any two models whatever: for every relation and unit there is
    any_two: bool = False
    shard: bool = False  # whether the unit is a shard, of which single records are a part
    # of a shard, what lies in one as a whole: "record", "user"; "": nobody can tell
    whole: str = ""
    details: dict[str, float] = field(default_factory=dict)
