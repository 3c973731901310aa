"""The nouns of an audit. Plain frozen records: no torch, no files, no terminal, nothing else of ours but errors."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from auditor.errors import AuditError

if TYPE_CHECKING:
    from auditor.masked import MaskedModel
    from auditor.models import HuggingFaceModel, LanguageModel
    from auditor.privacy import PrivacyRecord
    from auditor.spaces import Space
    from auditor.training import Checkpoint
    from auditor.view import View

SCHEMA_VERSION = 1
Tokens = tuple[int, ...]
SettingName = Literal["claim", "worst"]
ANY_ACCESS = "any access, the weights included"  # of a claim about a trained model


# --- what is attacked ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canary:
    """A text drawn at random from a space, to be put into training data: what the model ranks it above is memory."""

    text: str
    space: Space


@dataclass(frozen=True)
class Secret:
    """One training record an attacker should not be able to complete. Only the benchmark and the metrics hold it.

    `canary`: where it was not found in the data but put there; `repeats` is then how often.
    """

    id: str
    prefix: Tokens
    suffix: Tokens
    repeats: int | None = None
    member: bool = True
    canary: Canary | None = None
    group: str | None = None  # a value of the column that the user names to have results shown by it


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
class Lead:
    """tokens: what stands before every text that a model is asked about; said: which they are and why, in words."""

    tokens: Tokens
    said: str


@dataclass(frozen=True)
class Challenge:
    """All that an attack is told. Never the answers."""

    known: tuple[Pair, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Guess:
    """One completion; `score`: higher is surer, in every attack; `count`: how many of the samples it was.

    `log_prob` (summed) and `min_log_prob` (its least likely token), nats under the attacked law; None without access.
    """

    suffix: Tokens
    score: float
    count: int = 1
    log_prob: float | None = None
    min_log_prob: float | None = None


@dataclass(frozen=True)
class Certificate:
    """What a tree search knows about the suffixes of one secret that it did not find (probabilities, decoding law)."""

    reached: bool  # whether any suffix reached the threshold; the one that is guessed all the same did not
    certified: bool  # whether the likeliest suffix found is the likeliest of all: always so where one reached it
    leftover: float  # mass of all suffixes that were not found
    pruned: float  # the largest probability of a pruned node: no suffix that was not found is likelier


@dataclass(frozen=True)
class Guesses:
    """An attack's answer for one secret, surest first, with what it cost.

    A search draws nothing, so it spends nothing of a claim: it reads the law, which no claim covers, and its cost is
    in `rows`. `samples` is then the number of candidates found.
    """

    secret: str
    ranked: tuple[Guess, ...]
    samples: int
    drawn: int  # tokens drawn from the target
    near_boundary: int = 0  # draws within 1e-6 of a CDF boundary, where float noise could have decided otherwise
    rows: int = 0  # rows run through the target: distinct partial samples, or nodes of a search
    certificate: Certificate | None = None


class Benchmark:
    """Owns the secrets. An attack gets `challenge()`; only the run compares guesses with the answers."""

    name: ClassVar[str]
    attack_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    defense_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    ensemble_limit: ClassVar[int | None] = None  # members attacked behind an ensemble, by default

    tokenizer: Any = None
    secrets: tuple[Secret, ...]  # members and non-members alike
    canaries: tuple[Secret, ...] = ()  # inserted ones, and, as non-members, controls that never were
    known: tuple[Pair, ...]
    heldout: tuple[Tokens, ...]  # text of the private kind that nothing was trained on, for perplexity
    description: str = ""
    notes: tuple[str, ...] = ()

    def challenge(self) -> Challenge:
        """The public half of the benchmark."""
        queries = tuple(Query(secret.id, secret.prefix, len(secret.suffix)) for secret in self.secrets)
        return Challenge(known=self.known, queries=queries)

    def few(self, limit: int) -> tuple[Secret, ...]:
        """At most so many members, and as large a share of the non-members, evenly spaced: every repeat count stays."""
        members = [secret for secret in self.secrets if secret.member]
        others = [secret for secret in self.secrets if not secret.member]
        kept = min(limit, len(members))
        return (*evenly(members, kept), *evenly(others, math.ceil(len(others) * kept / max(1, len(members)))))


def evenly(secrets: Sequence[Secret], limit: int) -> list[Secret]:
    """At most `limit` secrets, evenly spaced."""
    count = min(limit, len(secrets))
    return [secrets[i * len(secrets) // count] for i in range(count)]


# --- who attacks, who defends ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """Base of all attacks. A frozen dataclass: its fields are its options, its first docstring line its description.

    `needs` names the capabilities without which it cannot run: "draw", "law", "embeddings".
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("draw",)

    def fit(self, view: View, known: Sequence[Pair]) -> dict[str, Any]:
        """Tune on the known pairs. The state (tensors and JSON values) is kept in the run folder; most need none."""
        return {}

    def fit_options(self) -> dict[str, Any]:
        """The options that `fit` depends on, by default all: runs of one sweep that agree in them share a state."""
        return dataclasses.asdict(self)

    def guess(self, view: View, state: dict[str, Any], queries: Sequence[Query]) -> Iterator[Guesses]:
        """Answer the queries one by one, in their order. Results depend on the secret, not on its neighbours."""
        raise NotImplementedError

    def recipes(self, view: View) -> dict[str, int]:
        """Samples this attack draws of each prefix, by sampling recipe: known beforehand, so that a budget can be.

        Attacks with the same recipe share one pass.
        """
        return {}

    def state_name(self, view: View) -> str:
        """Names the state of `fit`: views with the same name share it."""
        return view.target_name

    def score_is_probability(self, view: View) -> bool:
        """Whether a score says how probable it is that the guess is right, so that a report can hold it to that."""
        return False

    def notes(self, view: View, state: dict[str, Any]) -> tuple[str, ...]:
        """What a reader must know about this row: sentences."""
        return ()


@dataclass(frozen=True)
class Observation:
    """What a probe saw of one secret: numbers by name. `log_` names are in nats, `_bits` names in bits."""

    secret: str
    values: dict[str, float]


@dataclass(frozen=True)
class TokenLogProbs:
    """The log-probability, in nats, of each token of one secret's true suffix, given what stands before it."""

    secret: str
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Probe:
    """Base of the auditor's own measurements, which see the answers. A frozen dataclass like an `Attack`.

    `needs` names the capabilities without which it cannot run: "draw", "law", "embeddings"; `of` what it looks at: the
    benchmark's secrets, or its canaries.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("law",)
    of: ClassVar[Literal["secrets", "canaries"]] = "secrets"

    def measure(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        """Observes the secrets one by one. What is seen of a secret depends on it alone, not on its neighbours."""
        raise NotImplementedError

    def complete(self, secrets: Sequence[Secret], observations: Sequence[Observation]) -> list[Observation]:
        """The observations with what takes all secrets to tell, such as a p-value against the non-members.

        secrets, observations: side by side, in the same order, here and below.
        """
        return list(observations)

    def measurements(self, secrets: Sequence[Secret], observations: Sequence[Observation]) -> list[Measurement]:
        """What it all came to. The first is the row's main number; NAME_nonmembers and excess_NAME go with it."""
        raise NotImplementedError

    def by_repeats(self, secrets: Sequence[Secret], observations: Sequence[Observation]) -> dict[str, Measurement]:
        """The main number by repeat count, members only; empty where no repeat count is known."""
        return {}

    def per_secret(self, secrets: Sequence[Secret], observations: Sequence[Observation]) -> dict[str, list[float]]:
        """By measurement, the numbers of the secrets that it is the mean of over the members: what runs are paired by.

        A measurement left out cannot be held to a baseline.
        """
        return {}

    def notes(self, secrets: Sequence[Secret], observations: Sequence[Observation]) -> tuple[str, ...]:
        """What a reader must know about this row: sentences."""
        return ()


@dataclass(frozen=True)
class Claim:
    """What a defense promises, for whom, against what access; and what this audit spent of it. Epsilons in nats."""

    epsilon: dict[str, float]  # by neighbouring relation
    delta: float
    relation: str  # the relation the defense was set up for
    unit: str  # of protection: "shard", "any two models"
    queries: int | None  # T: the drawn tokens the epsilons cover; None: any number, nothing is spent by asking
    theorem: str
    status: str  # "sound" | "claim; proof has gaps" | ...
    access: str = "sampled tokens only"
    decoding: str = "ancestral"
    spent_queries: int = 0
    spent_epsilon: dict[str, float] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """What a defense may hold: the models around the target, and the queries it will have to answer."""

    target: LanguageModel
    public: LanguageModel | None
    ensemble: Any  # auditor.ensemble.Ensemble, or None
    queries: int  # tokens the claim row will draw
    answer_length: int  # tokens of one answer
    trained: TrainedModel | None = None
    whole: LanguageModel | None = None  # one adapter on all the ensemble's records, by its members' recipe


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained to be private, and what it promises (`privacy.json`), as far as it says."""

    model: LanguageModel
    privacy: PrivacyRecord | None


@dataclass(frozen=True)
class MaskedScenario:
    """The same for a masked LM: what stands around it, and how many gaps it fills at most in one text."""

    target: MaskedModel
    public: MaskedModel | None
    queries: int


@dataclass(frozen=True)
class Defense:
    """Base of all defenses. `protect` returns a model that holds others; `claim` says what it promises.

    `needs` names what the scenario must hold beyond the target: "public", "ensemble", "trained", "whole".
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what people read in a table
    needs: ClassVar[tuple[str, ...]] = ()
    claims: ClassVar[str] = "none"  # one line for `audit list`

    def protect(self, scenario: Scenario) -> LanguageModel:
        raise NotImplementedError

    def claim(self, scenario: Scenario, spent: int) -> Claim | None:
        """What is promised, with `spent` drawn tokens accounted for; None where nothing is."""
        return None

    def protect_masked(self, scenario: MaskedScenario) -> tuple[MaskedModel, Claim | None]:
        """The same in front of a masked LM, and what is promised of it. Raises AuditError where there is no such."""
        raise AuditError(f"expected a causal LM behind {self.name}, which draws token by token, got a masked one")

    def budget(self, scenario: Scenario) -> Budget | None:
        """The fixed number of tokens this defense answers, None where it answers as many as the row will draw."""
        return None

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        """What a reader of every row must know about how the defense was set up: sentences."""
        return ()

    def chain(self) -> tuple[Cause, ...]:
        """Why this model leaks less than the undefended one: the rows between the two, each one cause further.

        A run shows the other rows beside this one and credits each cause with its own step. What is behind this
        defense's own row is no part of its effect: what less still would leak.
        """
        return ()


@dataclass(frozen=True)
class Cause:
    """A step of a defense's chain: what its row changes against the row before it, and nothing else.

    row: the control that is shown for it; None: the defense itself. needs: what must be given where there is no row.
    """

    name: str  # "splitting"
    changes: str  # what is different, in words that go on from it: "splitting: each adapter sees one shard only"
    row: Defense | None = None
    needs: str = ""


@dataclass(frozen=True)
class TrainingRecord:
    """One private record to fine-tune on; copies are records of their own."""

    text: str
    tokens: Tokens  # of the whole text, without special tokens
    unit: str  # whose it is: the user or group column, else the name of the record's own content


@dataclass(frozen=True)
class TrainingJob:
    """What `audit train` hands to a `Trainer`: the data as tokens, a way to load the base, and where to write."""

    base: str  # hub id or folder
    load: Callable[[], Any]  # a fresh transformers model, its parameters (LoRA: the adapter's) free to train
    tokenizer: Any
    end: int  # the token that ends a record
    block: int  # tokens of a training sequence, at most
    records: tuple[TrainingRecord, ...]
    users: bool  # whether the data say whose each record is; else a record's unit is its own content
    public: HuggingFaceModel  # judges records for trainers that ask; the base where no other was named
    out: Path
    checkpoint: Checkpoint  # where an interrupted training goes on; cleared by whoever records that it is finished
    seed: int
    progress: Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass(frozen=True)
class Trainer:
    """Base of what `audit train` offers: one way to fine-tune. A frozen dataclass like an `Attack`.

    `train` writes a model folder (or a folder of them) to `job.out`; where part of it is already there, it goes on.
    `audit train` has seen to it that what is there was made with the same configuration.
    """

    name: ClassVar[str] = ""
    claims: ClassVar[str] = "none"  # one line for `audit list`
    immaterial: ClassVar[frozenset[str]] = frozenset()  # options that its results do not depend on: of memory and speed

    def check(self, job: TrainingJob) -> None:
        """Refuses, before anything is written, what this trainer cannot train on. Raises AuditError."""

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        """Trains. Returns what the user must know of it: sentences."""
        raise NotImplementedError


@dataclass(frozen=True)
class Budget:
    """A fixed allowance of drawn tokens and what happens when it is spent: the row stops, or the public answers."""

    tokens: int
    on_exhaustion: Literal["stop", "public"]


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A number with its interval and sample size. `low`/`high`: two-sided 95% unless the note says otherwise."""

    name: str
    value: float
    low: float
    high: float
    n: int
    unit: str = "share"
    note: str = ""


@dataclass(frozen=True)
class Step:
    """One step of a chain of rows: what is credited to these causes, and to no single one of several.

    difference: the row's number minus that of the row before it; None where there is nothing to take it of: `note` says
    why. Names of targets; after: "" where no row shows what the step would be.
    """

    causes: dict[str, str]  # what each changes, by its name
    before: str
    after: str
    difference: Measurement | None = None
    note: str = ""


@dataclass(frozen=True)
class Chain:
    """From the undefended row to this one and beyond, step by step, on the secrets that all of the rows answered.

    whole: this row minus the undefended one: the sum of the steps up to it.
    """

    steps: tuple[Step, ...]
    whole: Measurement


@dataclass(frozen=True)
class Finding:
    """One (target, setting, attack or probe) cell: measurements, or the reason why there are none."""

    target: str
    setting: str
    attack: str
    options: dict[str, Any]
    access: tuple[str, ...]
    decoding: str
    claim_applies: bool | None  # None: the target claims nothing
    claim_reason: str
    measurements: tuple[Measurement, ...] = ()
    by_repeats: dict[str, Measurement] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()  # (wrong guesses allowed, recall)
    not_applicable: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    drawn: int = 0
    rows: int = 0  # run through the target, shared passes included: what methods can be compared at
    chain: Chain | None = None  # of a defended row where its control rows were measured: what its effect is due to

    @property
    def main(self) -> Measurement | None:
        """The number the row is about: recall of an attack, a probe's first."""
        return self.measurements[0] if self.measurements else None

    def measurement(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)


@dataclass(frozen=True)
class TargetRecord:
    """One attacked model: what it is, what it costs, what it claims."""

    name: str
    title: str
    description: str
    perplexity: Measurement | None = None
    milliseconds_per_token: float | None = None
    peak_memory_mb: float | None = None
    training_seconds: float | None = None
    claim: Claim | None = None
    nominal_epsilon: float | None = None  # as a paper prints it; promises nothing (the notes say why)
    notes: tuple[str, ...] = ()
    other_perplexities: tuple[Measurement, ...] = ()  # of the same texts, as papers count them
    companion: bool = False  # a control, shown beside a defense and not asked for by name
    likelihood: Chain | None = None  # how much likelier members' true tokens are than non-members', row by row


@dataclass(frozen=True)
class BenchmarkRecord:
    """What was attacked, in numbers: never the text itself."""

    name: str
    description: str
    members: int
    nonmembers: int
    known: int
    repeats: dict[str, int] = field(default_factory=dict)
    greedy_recall: dict[str, Measurement] = field(default_factory=dict)  # undefended target, by repeat count
    digest: str = ""  # of the secrets, without telling one (auditor/comparable.py); "": an older record
    near_duplicates: int | None = None  # members whose suffix is nearly a known pair's; None: not counted
    canaries: dict[str, int] = field(default_factory=dict)  # how many, by insertions; "0": controls
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AuditResult:
    """The whole of a run, as `result.json` holds it. Reports read nothing else; baselines `outcomes.json` too."""

    name: str
    created: str  # UTC, ISO 8601
    tool_version: str
    command: str
    plan: dict[str, Any]
    benchmark: BenchmarkRecord
    targets: tuple[TargetRecord, ...]
    findings: tuple[Finding, ...]
    environment: dict[str, str]
    timings: dict[str, float]  # seconds by stage
    seed: int
    family: str = ""  # architecture and vocabulary of the attacked model; "": an older record
    weights: dict[str, str] = field(default_factory=dict)  # "model/model.safetensors" -> SHA-256; empty in the lab
    lead: str = ""  # what stood before every text, and why, in words; "": an older record, where nothing did
    schema_version: int = SCHEMA_VERSION

    def target(self, name: str) -> TargetRecord:
        return next(target for target in self.targets if target.name == name)


# --- JSON in, JSON out ----------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """A record as JSON values. Non-finite floats become "inf", "-inf", "nan": JSON has no word for them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_json(kind: Any, value: Any, where: str = "result", *, private: bool = False) -> Any:
    """The inverse of `to_json` for an annotated type. Raises AuditError with the path of what does not fit.

    private: whether the values may be private text, and are called by their kind only.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    said = _kind(value) if private else repr(value)
    if kind is Any or kind is object:
        return value
    if origin is types.UnionType or origin is typing.Union:
        if value is None and type(None) in args:
            return None
        return from_json(next(a for a in args if a is not type(None)), value, where, private=private)
    if origin is Literal:
        if value not in args:
            raise AuditError(f"{where}: expected one of {args}, got {said}")
        return value
    if dataclasses.is_dataclass(kind):
        return _record_from_json(typing.cast(type, kind), value, where, private)
    if origin is tuple:
        return _tuple_from_json(args, value, where, private)
    if origin is dict:
        if not isinstance(value, dict):
            raise AuditError(f"{where}: expected an object, got {_kind(value)}")
        own = (f"{where}[{i}]" if private else f"{where}.{key}" for i, key in enumerate(value))
        return {
            key: from_json(args[1], item, at, private=private)
            for at, (key, item) in zip(own, value.items(), strict=True)
        }
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    expected = (int, float) if kind is float else kind
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise AuditError(f"{where}: expected {kind.__name__}, got {said}")
    return float(value) if kind is float else value


def _kind(value: Any) -> str:
    return type(value).__name__


def _record_from_json(kind: type, value: Any, where: str, private: bool) -> Any:
    if not isinstance(value, dict):
        raise AuditError(f"{where}: expected an object, got {_kind(value)}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    extra = sorted(set(value) - set(fields))
    if extra:
        named = f"beside {', '.join(fields)}" if private else repr(extra[0])
        raise AuditError(f"{where}: unknown field {named}")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise AuditError(f"{where}: missing field {name!r}")
    return kind(
        **{name: from_json(hints[name], item, f"{where}.{name}", private=private) for name, item in value.items()}
    )


def _tuple_from_json(args: tuple[Any, ...], value: Any, where: str, private: bool) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise AuditError(f"{where}: expected a list, got {_kind(value)}")
    kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        raise AuditError(f"{where}: expected {len(kinds)} values, got {len(value)}")
    return tuple(
        from_json(k, item, f"{where}[{i}]", private=private)
        for i, (k, item) in enumerate(zip(kinds, value, strict=True))
    )
