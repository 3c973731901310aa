"""Define the records that all packages share: secrets, attack inputs and outputs, and claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from auditor.core.canary_space import CanarySpace

Tokens = tuple[int, ...]

SettingName = Literal["text-only", "white-box"]

UNDEFENDED = "undefended"  # the target without a defense
# Characters that are searched after a suffix: a number or a name that goes on there is not longer.
_AFTER = 100


class CellKey(NamedTuple):
    """Key of a cell: a target model, an access setting, and an attack or probe."""

    target: str
    setting: str
    attack: str  # name of an attack or a probe

    def __str__(self) -> str:
        """Return the key as it appears in file names, such as `pmixed/text-only/ethicist`."""
        return "/".join(self)

    @property
    def title(self) -> str:
        """Name for readers, such as `pmixed, text-only, attack ethicist`.

        Empty parts are left out. The word "attack" is needed because an attack and a metric may
        share a name, such as perplexity.
        """
        attack = self.attack and f"attack {self.attack}"
        return ", ".join(filter(None, (self.target, self.setting, attack)))

    @classmethod
    def parse_cell_key(cls, text: str) -> CellKey:
        """Parse a key such as `pmixed/text-only/ethicist`. Raise ValueError for any other text."""
        target, setting, attack = text.split("/")
        return cls(target, setting, attack)


@dataclass(frozen=True)
class Canary:
    """Text made to be inserted into training data, so a model can know it only by memorisation.

    Args:
        text: the text.
        space: all possible texts, for exposure; None if unknown.
        coin: in an epsilon audit, whether the fair coin inserted the canary; None if no coin was
            tossed.
    """

    text: str
    space: CanarySpace | None = None
    coin: bool | None = None


Mark = tuple[str, str]  # a kind of personal data, and a text of it


@dataclass(frozen=True, slots=True)
class Wording:
    """Original text of a secret, split into tokens. It is never decoded from the tokens.

    Args:
        text: text of the record. The secrets of one record share it.
        start: index in `text` of the prefix's first character.
        middle: index in `text` of the suffix's first character.
        end: index in `text` after the suffix.
        ends: for each suffix token, the position in `suffix` where it ends, in characters.
        marks: (kind, text) of each item of personal data marked anywhere in the record.
    """

    text: str
    start: int
    middle: int
    end: int
    ends: tuple[int, ...]
    marks: tuple[Mark, ...] = ()

    @classmethod
    def join(
        cls, prefix: str, suffix: str, ends: tuple[int, ...], marks: tuple[Mark, ...] = ()
    ) -> Wording:
        """Return the wording of a prefix and a suffix with no text around them."""
        text = prefix + suffix
        return cls(text, 0, len(prefix), len(text), ends, marks)

    @property
    def prefix(self) -> str:
        return self.text[self.start : self.middle]

    @property
    def suffix(self) -> str:
        return self.text[self.middle : self.end]

    @property
    def after(self) -> str:
        """The beginning of the record's text after the suffix, which is not attacked."""
        return self.text[self.end : self.end + _AFTER]

    @property
    def prefix_and_suffix_text(self) -> str:
        return self.text[self.start : self.end]

    def with_prefix(self, prefix: str) -> Wording:
        """Return the wording of the same suffix after another prefix."""
        text = prefix + self.text[self.middle :]
        end = len(prefix) + self.end - self.middle
        return Wording(text, 0, len(prefix), end, self.ends, self.marks)

    @property
    def suffix_text_by_token(self) -> tuple[str, ...]:
        """Text of each suffix token. A character that spans several tokens belongs to the last."""
        return tuple(self.suffix[start:end] for start, end in pairwise((0, *self.ends)))


@dataclass(frozen=True, slots=True)
class Secret:
    """A part of a training record that an attacker should not be able to complete.

    Only the benchmark and the metrics hold secrets. Secrets with the same tokens are equal, even if
    their wording differs.

    Args:
        id: key for the secret's randomness and for the files of a run.
        prefix: token ids that the attacker knows.
        suffix: token ids to extract.
        repeats: number of copies in the training data; None if unknown.
        member: whether the record was trained on.
        canary: the canary, if the secret was inserted into the data.
        group: value of the group column, by which results are grouped.
        wording: original text; None if the data consist of token ids only.
        alias: name in reports (`records.aliases`).
        document: id of the record, if the record contains several secrets.
        at: position in that record where the suffix starts, in tokens.
        user: person in the record's user column; None if unknown or several.
        user_trained: whether any record of that person was trained on.
        copies: number of copies of a member's record, including near copies; None if unknown.
    """

    id: str
    prefix: Tokens
    suffix: Tokens
    repeats: int | None = None
    member: bool = True
    canary: Canary | None = None
    group: str | None = None
    wording: Wording | None = field(default=None, compare=False, repr=False)
    alias: str = ""
    document: str | None = None
    at: int = 0
    user: str | None = None
    user_trained: bool = False
    copies: int | None = None

    @property
    def tokens(self) -> Tokens:
        return self.prefix + self.suffix

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of prefix tokens and number of suffix tokens."""
        return len(self.prefix), len(self.suffix)

    @property
    def has_coin(self) -> bool:
        """True for a canary whose insertion a coin decided."""
        return self.canary is not None and self.canary.coin is not None

    @property
    def record(self) -> str:
        """Id of the record, which all secrets from the same document share."""
        return self.document or self.id


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefix and suffix of a record that the attacker knows. Attacks may be tuned on such pairs."""

    prefix: Tokens
    suffix: Tokens

    @property
    def tokens(self) -> Tokens:
        return self.prefix + self.suffix


@dataclass(frozen=True, slots=True)
class Query:
    """Prefix for an attack to complete with `length` tokens. The true suffix is not included."""

    id: str
    prefix: Tokens
    length: int

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of prefix tokens and number of tokens to complete."""
        return len(self.prefix), self.length


@dataclass(frozen=True)
class PrefixToken:
    """Tokens that a model expects before every text, such as a begin-of-text token.

    Args:
        tokens: the tokens; usually one, or none.
        said: a phrase for readers that says why these tokens were chosen.
    """

    tokens: Tokens
    said: str


@dataclass(frozen=True)
class TextForm:
    """Rendering of conversations as text: the template and date of `--template` and `--date`.

    Args:
        template: name of the template.
        day: date that the template writes; None if it writes none.
        digest: hex SHA-256 of the template and all other inputs.
        said: a phrase that explains the choice.
        doubts: sentences with reasons why the rendering may hide a leak.
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
    """All inputs of an attack, without the true suffixes.

    Args:
        known: pairs that the attacker knows.
        queries: prefixes to complete.
    """

    known: tuple[Pair, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """An attack's completion of a prefix.

    Args:
        suffix: token ids of the completion.
        score: confidence; higher means more confident, in every attack.
        count: number of samples equal to this suffix.
        log_prob: log-probability of the suffix under the attacked distribution, in nats; None
            without access.
        min_log_prob: log-probability of the suffix's least likely token, in nats; None without
            access.
    """

    suffix: Tokens
    score: float
    count: int = 1
    log_prob: float | None = None
    min_log_prob: float | None = None


@dataclass(frozen=True)
class Certificate:
    """Result of a tree search for suffixes whose probability reaches a threshold.

    It bounds the probabilities of the suffixes that the search did not find.

    Args:
        reached: whether the search found a suffix whose probability reaches the threshold.
        certified: whether the most likely suffix found is proven to be the most likely of all.
        leftover: total probability of all suffixes that were not found.
        pruned: upper bound on the probability of any single suffix that was not found.
    """

    reached: bool
    certified: bool
    leftover: float
    pruned: float


@dataclass(frozen=True, slots=True)
class Guesses:
    """An attack's guesses for a secret, most confident first, and what they cost.

    A tree or beam search reads the next-token distribution and draws no tokens. It therefore uses
    none of a claim's budget: claims cover only drawn tokens.

    Args:
        secret: id of the secret.
        ranked: the guesses.
        samples: number of samples drawn, or of candidates that a search returned.
        drawn: number of tokens drawn from the target.
        near_boundary: number of draws within 1e-6 of a CDF boundary, which float noise could have
            changed.
        rows: number of inputs that the target read.
        certificate: certificate of a tree search.
        rankings: score of the first guess under each other ranking; higher is more confident.
    """

    secret: str
    ranked: tuple[Guess, ...]
    samples: int
    drawn: int
    near_boundary: int = 0
    rows: int = 0
    certificate: Certificate | None = None
    rankings: dict[str, float] = field(default_factory=dict)


def select_evenly_spaced(secrets: Sequence[Secret], limit: int) -> list[Secret]:
    """Return at most `limit` secrets, evenly spaced over the sequence."""
    count = min(limit, len(secrets))
    return [secrets[i * len(secrets) // count] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Observation:
    """Values that a probe measured for a secret, keyed by name.

    Values named `log_...` are in nats, values named `..._bits` in bits.
    """

    secret: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probability, in nats, of each token of a secret's true suffix, given its prefix."""

    secret: str
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Claim:
    """Privacy promise of a defense, and how much of its budget this audit used.

    `unit`, `theorem`, `status`, `access` and `decoding` are text for readers; the program uses only
    the other fields. Epsilons are in nats.

    Attributes:
        epsilon: promised epsilon for each neighbouring relation.
        delta: promised delta.
        relation: neighbouring relation for which the defense was configured.
        unit: unit of protection, such as "shard".
        queries: number of drawn tokens that the epsilons cover; None for any number.
        theorem: source of the promise.
        status: state of the proof, such as "sound" or "claim; proof has gaps".
        sound: whether the promise follows from the procedure; if not, reports say that it is only
            claimed.
        access: access that the promise covers.
        any_access: whether the promise covers any access, including the weights.
        decoding: decoding that the promise covers.
        spent_queries: number of tokens that this audit drew.
        spent_epsilon: epsilon that this audit used for each neighbouring relation.
        any_two: whether the promise holds between any two models. It then holds for every
            neighbouring relation and every unit of protection.
        shard: whether the unit is a shard of records.
        whole: unit that is never split across shards, "record" or "user"; "" if unknown.
        details: further numbers, keyed by name.
    """

    epsilon: dict[str, float]
    delta: float
    relation: str
    unit: str
    queries: int | None
    theorem: str
    status: str
    sound: bool = False
    access: str = "sampled tokens only"
    any_access: bool = False
    decoding: str = "ancestral"
    spent_queries: int = 0
    spent_epsilon: dict[str, float] = field(default_factory=dict)
    any_two: bool = False
    shard: bool = False
    whole: str = ""
    details: dict[str, float] = field(default_factory=dict)
