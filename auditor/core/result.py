"""The record of an audit, `result.json`: measurements, findings, targets, the whole. Plain frozen
records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Claim

SCHEMA_VERSION = 4


@dataclass(frozen=True)
class Measurement:
    """A number with its interval and sample size. `low`/`high`: two-sided 95% unless the note says
    otherwise."""

    name: str
    value: float
    low: float
    high: float
    n: int
    unit: str = "share"
    note: str = ""


@dataclass(frozen=True)
class Audited:
    """A lower bound of epsilon by one rule, and what it is made of (statistics/audited.py).
    Epsilons in nats.

    It exceeds the truth with probability at most `level`, and is about `delta`, `relation` and
    `unit` alone.
    """

    estimator: (
        str  # "one_run", "games": (epsilon, delta)-DP; "fdp": mu-GDP, said as (eps, delta); "shape"
    )
    epsilon: float
    delta: float
    level: float
    canaries: int  # in or out by a fair coin each
    guesses: int  # the surest of the canaries: so many that by themselves they prove most
    right: int
    best: float  # what all-right guesses would have proved, by the same rule
    rights: tuple[
        int, ...
    ] = ()  # of the surest guesses, for each number of them that was looked at
    # rate and steps of the shape that "shape" assumes, and power is told of
    sampling: tuple[float, int] | None = None
    copies: int = 1  # how often each canary was inserted
    relation: str = "add_remove"
    unit: str = "record"
    # of games: tp, fn, fp, tn; canaries are then the games that count
    table: tuple[int, int, int, int] | None = None
    tokens: int | None = None  # drawn in each game
    # tokens that the claim is for; None: any number, or there is no claim
    covered: int | None = None
    exact: float | None = None  # epsilon of these very games, from both next-token distributions

    @property
    def canaries_or_games_label(self) -> str:
        """`1,000 canaries`, `768 games`."""
        return f"{self.canaries:,} {'canaries' if self.table is None else 'games'}"


@dataclass(frozen=True)
class ChainStep:
    """One step from a target to the next in a chain that changes one thing at a time.

    causes: what the step changes; the effect of several changed together cannot be divided among
    them. before, after: names of the two targets; after is "" where the second was not measured.
    difference: the number of `after` minus that of `before`; None where it cannot be taken, and
    `note` says why.
    """

    causes: dict[str, str]  # what each changes, by its name
    before: str
    after: str
    difference: Measurement | None = None
    note: str = ""


@dataclass(frozen=True)
class Chain:
    """From the undefended row to this one and beyond, step by step, on the secrets that all of the
    rows answered.

    whole: this row minus the undefended one: the sum of the steps up to it.
    """

    steps: tuple[ChainStep, ...]
    whole: Measurement


@dataclass(frozen=True)
class StoppedEarly:
    """How far a row came that was asked in random order (`--until`): its intervals hold at every
    look.

    asked, of: members and non-members together; why: "recall <= 0.05: failed", or that nothing was
    decided.
    """

    asked: int
    of: int
    why: str

    @property
    def early_stop_sentence(self) -> str:
        return f"asked {self.asked:,} of {self.of:,} secrets in random order, {self.why}"


@dataclass(frozen=True)
class Stratum:
    """The records of one number of copies: how many could be attacked, and the share extracted of
    those asked.

    copies: near copies included; None: not known. A record of several parts is extracted if some
    part is.
    """

    copies: int | None
    population: int
    extracted: Measurement  # n: how many were asked


@dataclass(frozen=True)
class Finding:
    """One (target, setting, attack or probe) cell: measurements, or the reason why there are
    none."""

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
    # of personal data: what first guesses hold of it
    by_kind: dict[str, Measurement] = field(default_factory=dict)
    by_kind_nonmembers: dict[str, Measurement] = field(default_factory=dict)  # the floor
    # recall of the data's own groups, records as `Stratum` counts them; empty: fewer than two
    by_group: dict[str, Measurement] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()  # (wrong guesses allowed, recall)
    not_applicable: str = ""
    notes: tuple[str, ...] = ()
    violations: tuple[
        str, ...
    ] = ()  # how the claim was seen to fail, a sentence each; empty: it was not
    seconds: float = 0.0
    drawn: int = 0
    # of each prefix, drawn behind nothing but the prefix; 0: none, or behind a soft prompt
    samples: int = 0
    rows: int = 0  # run through the target, shared passes included: what methods can be compared at
    # of a defended row where its control rows were measured: what its effect is due to
    chain: Chain | None = None
    audits: tuple[Audited, ...] = ()  # of a row that bounds epsilon; the (epsilon, delta) one first
    strata: tuple[Stratum, ...] = ()  # most copies first; empty: the data are not counted by copies
    # membership scores, of all rows, that `membership_auc` is the strongest of; 0: older record
    scores_tried: int = 0
    # None: all secrets were to be asked, and intervals are of a fixed size
    stopped: StoppedEarly | None = None

    @property
    def decodes_greedily(self) -> bool:
        """Whether the attack's one sample is the likeliest token at every step."""
        return self.decoding == "greedy"

    @property
    def cell_key(self) -> CellKey:
        return CellKey(self.target, self.setting, self.attack)

    @property
    def main(self) -> Measurement | None:
        """The number the row is about: recall of an attack, a probe's first."""
        return self.measurements[0] if self.measurements else None

    def measurement(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)


@dataclass(frozen=True)
class Doubt:
    """Why a zero is no evidence: something that may have hidden a leak from this audit.

    kind: "text form", "answers", "non-members", "likelihood" or "contradiction"; sentence: what was
    seen, for a report.
    """

    kind: str
    sentence: str


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
    # as a paper prints it; promises nothing (the notes say why)
    nominal_epsilon: float | None = None
    notes: tuple[str, ...] = ()
    other_perplexities: tuple[Measurement, ...] = ()  # of the same texts, as papers count them
    companion: bool = False  # a control, shown beside a defense and not asked for by name
    # how much more likely members' true tokens are than non-members', row by row
    likelihood: Chain | None = None
    doubts: tuple[Doubt, ...] = ()  # about its answers alone


@dataclass(frozen=True)
class GroupRecall:
    """One number of one group of secrets, of the models around an unlearning, as far as they were
    measured.

    values: of `before`, `after` and `relearned`, and of a model that never saw what was to be
    forgotten, `retrained` and `retrained_relearned`. group: "forgotten", "retained" or
    "nonmembers". changes, over the same secrets: `unlearned`, after minus before; `left`, after
    minus retrained; `relearned`, minus after; `came_back`, that minus what the same steps do to the
    retrained model; `share_back`, what relearning brings back of what unlearning took.
    """

    attack: str
    name: str
    group: str
    values: dict[str, Measurement]
    changes: dict[str, Measurement]


@dataclass(frozen=True)
class Unlearning:
    """What is left of records that a model was to forget. models: names of targets, as
    `GroupRecall` calls them.

    steps, rate, texts: of relearning, on so many other records; 0: there was none. perplexity: held
    out, by model; `ratio`: after by before, paired by text.
    """

    target: str
    models: dict[str, str]
    setting: str
    forgotten: int
    retained: int
    numbers: tuple[GroupRecall, ...]
    perplexity: dict[str, Measurement] = field(default_factory=dict)
    steps: int = 0
    rate: float = 0.0
    texts: int = 0


@dataclass(frozen=True)
class KindCount:
    """How many personal data of one kind suffixes hold; the same text in two secrets counts twice.

    members, nonmembers: whole, and not in the prefix: these are followed into the guesses. The
    members' others: held: the prefix holds them already; cut: the prefix or the suffix ends within
    them. trained: of non-members, but it stands in what was trained on: no floor.
    """

    members: int = 0
    nonmembers: int = 0
    held: int = 0
    cut: int = 0
    trained: int = 0


NO_TIME = "not asked for lack of time"  # a rule of `RecordCounts.not_attacked`


@dataclass(frozen=True)
class RecordCounts:
    """Count the records (rows) of one side, members or non-members, from the file to the attack.

    given - sum(left_out) = usable = audited + copies + sum(not_attacked). A record of which some
    parts (answers, windows) can be used is usable; `parts_left_out` counts its other parts.
    """

    given: int
    audited: int  # distinct records that are attacked
    copies: int = 0  # usable, the same secrets as an earlier record: audited with that record
    left_out: dict[str, int] = field(default_factory=dict)  # records that cannot be used, by reason
    # usable and distinct, by rule: auxiliary data, --limit
    not_attacked: dict[str, int] = field(default_factory=dict)
    # parts of usable records, by reason
    parts_left_out: dict[str, int] = field(default_factory=dict)
    # of the audited records: of texts all tokens, else those of suffixes and answers; 0: not
    # counted
    tokens: int = 0
    attacked_tokens: int = 0  # of them, tokens inside some attacked suffix
    # members that could be attacked, by copies; "": not known
    by_copies: dict[str, int] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        return self.given - sum(self.left_out.values())


@dataclass(frozen=True)
class BenchmarkRecord:
    """What was attacked, in numbers: never the text itself."""

    name: str
    description: str
    members: int
    nonmembers: int
    known: int
    repeats: dict[str, int] = field(default_factory=dict)
    # undefended target, by repeat count
    greedy_recall: dict[str, Measurement] = field(default_factory=dict)
    greedy_nonmembers: Measurement | None = None  # measured where greedy decoding gives some member
    # of the secrets, without telling one (auditor/gate/comparability.py); "": an older record
    digest: str = ""
    # members whose suffix is nearly a known pair's; None: not counted
    near_duplicates: int | None = None
    canaries: dict[str, int] = field(default_factory=dict)  # how many, by insertions; "0": controls
    notes: tuple[str, ...] = ()
    kinds: dict[str, KindCount] = field(default_factory=dict)  # of personal data
    doubts: tuple[Doubt, ...] = ()  # about the data, and so about every row
    # how conversations are rendered: template, day and digest; "": there are none
    text_form: str = ""
    unread_columns: tuple[
        str, ...
    ] = ()  # of the data, that hold texts or turns and that no secret is made of
    # of "members" and "nonmembers"; empty: not counted
    records: dict[str, RecordCounts] = field(default_factory=dict)

    @property
    def is_of_builtin_lab(self) -> bool:
        """Whether the records are those of a built-in lab."""
        return self.name == "lab" or self.name.startswith("lab-")


@dataclass(frozen=True)
class FrontierPoint:
    """One model in the picture of what leaks least at the same usefulness.

    ratio: held-out perplexity over the undefended model's, paired by text. within: whether that is
    within the margin, by its interval: shown, not shown, or shown to be beyond. least: of those
    shown within, whether nothing shows that another of them leaks less; None of others.
    """

    label: str  # with the setting of its knob
    line: str  # the defense; points of one are a line
    ratio: Measurement
    leak: Measurement
    within: Literal["shown", "not shown", "beyond"]
    least: bool | None = None
    corner: bool = False  # of the convex frontier
    epsilon: float | None = None  # what is proved of it, in nats; None: nothing is
    delta: float = 0.0
    unit: str = ""  # of protection
    tokens: int | None = None  # drawn ones that it covers; None: any number


@dataclass(frozen=True)
class Frontier:
    """Leakage by one number against usefulness, of models asked for the same secrets; the
    undefended one first.

    margin: of perplexity over the undefended model's, within which is compared what leaks least.
    missing: models that have no point, and why.
    """

    metric: str
    attack: str
    setting: str
    margin: float
    level: float  # the probability of an error of the comparison, at most
    points: tuple[FrontierPoint, ...]
    missing: dict[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnTable:
    """A table of a plug-in's section, all of its cells as they are to be read. Raises AuditError
    for a ragged one."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if ragged := next((row for row in self.rows if len(row) != len(self.head)), None):
            raise AuditError(
                f"expected {len(self.head)} cells in every row of the table {self.caption!r}, got "
                f"{len(ragged)}"
            )


@dataclass(frozen=True)
class OwnSection:
    """What a plug-in adds to the reports: a title, paragraphs, then tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[OwnTable, ...] = ()


RELEASED_TEXT = "released text"  # the family of an audit that asks no model


@dataclass(frozen=True)
class AuditResult:
    """The whole of a run, as `result.json` holds it. Baselines and reports read `secrets.parquet`
    too."""

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
    # "model/model.safetensors" -> SHA-256; empty in the lab
    weights: dict[str, str] = field(default_factory=dict)
    # of an adapter that is attacked, the model that it is for; "": a whole model, or an older
    # record
    base: str = ""
    # what stood before every text, and why, in words; "": an older record, where nothing did
    prefix_token: str = ""
    frontiers: tuple[
        Frontier, ...
    ] = ()  # by measure of leakage; none where fewer than two defenses were measured
    unlearning: tuple[Unlearning, ...] = ()
    # what each attack and probe there was declares to measure
    methods: dict[str, str] = field(default_factory=dict)
    # titles of the numbers that plug-ins declare as their own
    metrics: dict[str, str] = field(default_factory=dict)
    own_methods: tuple[str, ...] = ()  # attacks and probes that are the user's plug-ins
    # what plug-ins add to the reports, by their names
    sections: dict[str, OwnSection] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def target(self, name: str) -> TargetRecord:
        return next(target for target in self.targets if target.name == name)

    def methods_measuring(self, *what: str) -> tuple[str, ...]:
        """Names of the attacks and probes that measure any of this."""
        return tuple(name for name, measured in self.methods.items() if measured in what)
