"""Define the record of an audit, `result.json`: measurements, findings, targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Claim

SCHEMA_VERSION = 4


@dataclass(frozen=True)
class Measurement:
    """A number with its interval and sample size.

    `low`/`high`: two-sided 95% unless the note differs.
    """

    name: str
    value: float
    low: float
    high: float
    n: int
    unit: str = "share"
    note: str = ""


@dataclass(frozen=True)
class Audited:
    """A lower bound of epsilon by a rule, with its inputs (statistics/audited.py), in nats.

    It exceeds the truth with probability at most `level`, for this `delta`, `relation` and `unit`
    only.
    """

    # "one_run", "games": (epsilon, delta)-DP; "fdp": mu-GDP, reported as (eps, delta); "shape".
    estimator: str
    epsilon: float
    delta: float
    level: float
    canaries: int  # each inserted by a fair coin
    guesses: int  # the most confident canaries: the number that proves most
    right: int
    best: float  # the proof of all-correct guesses by the same rule
    # Number of correct guesses for each tested number of guesses.
    rights: tuple[int, ...] = ()
    # Sampling rate and steps of the shape that "shape" assumes, and for which its power is known.
    sampling: tuple[float, int] | None = None
    copies: int = 1  # how often each canary was inserted
    relation: str = "add_remove"
    unit: str = "record"
    # Of games: tp, fn, fp, tn; canaries is then the number of valid games.
    table: tuple[int, int, int, int] | None = None
    tokens: int | None = None  # drawn in each game
    # Tokens covered by the claim; None: any number, or no claim.
    covered: int | None = None
    exact: float | None = None  # epsilon of these games, from both next-token distributions

    @property
    def canaries_or_games_label(self) -> str:
        """The count with its noun: `1,000 canaries`, `768 games`."""
        return f"{self.canaries:,} {'canaries' if self.table is None else 'games'}"


@dataclass(frozen=True)
class ChainStep:
    """A step from a target to the next in a chain that changes one thing at a time.

    causes: the changes of the step; the effect of several changes cannot be divided. before, after:
    names of the two targets; after is "" if the second was not measured. difference: the number of
    `after` minus that of `before`; None if undefined, with the reason in `note`.
    """

    causes: dict[str, str]  # description of each change, by its name
    before: str
    after: str
    difference: Measurement | None = None
    note: str = ""


@dataclass(frozen=True)
class Chain:
    """Stepwise differences from the undefended row to this row, on secrets that all rows answered.

    whole: this row minus the undefended row: the sum of the steps.
    """

    steps: tuple[ChainStep, ...]
    whole: Measurement


@dataclass(frozen=True)
class StoppedEarly:
    """Record how far a row was queried in random order (`--until`); intervals are anytime-valid.

    asked, of: asked and all secrets, members and non-members; why: "recall <= 0.05: failed", or
    that nothing was decided.
    """

    asked: int
    of: int
    why: str

    @property
    def early_stop_sentence(self) -> str:
        return f"asked {self.asked:,} of {self.of:,} secrets in random order, {self.why}"


@dataclass(frozen=True)
class Stratum:
    """The records of one copy count: how many could be attacked, and the share extracted.

    copies: near copies included; None: unknown. A record of several parts is extracted if a part
    is.
    """

    copies: int | None
    population: int
    extracted: Measurement  # n: number of queried records


@dataclass(frozen=True)
class Finding:
    """A (target, setting, attack or probe) cell: measurements, or the reason for having none."""

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
    # Personal data in first guesses.
    by_kind: dict[str, Measurement] = field(default_factory=dict)
    by_kind_nonmembers: dict[str, Measurement] = field(default_factory=dict)  # the floor
    # Recall by group of the data, counted as in `Stratum`; empty: fewer than two groups.
    by_group: dict[str, Measurement] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()  # (wrong guesses allowed, recall)
    not_applicable: str = ""
    notes: tuple[str, ...] = ()
    # Observed violations of the claim, a sentence each.
    violations: tuple[str, ...] = ()
    seconds: float = 0.0
    drawn: int = 0
    # Samples of each prefix, drawn after only the prefix; 0: none, or after a soft prompt.
    samples: int = 0
    rows: int = 0  # rows run through the target, shared passes included: makes methods comparable
    # Causes of a defended row's effect, if its control rows were measured.
    chain: Chain | None = None
    # Of a row that bounds epsilon; the (epsilon, delta) bound first.
    audits: tuple[Audited, ...] = ()
    strata: tuple[Stratum, ...] = ()  # most copies first; empty: the data are not counted by copies
    # Number of membership scores, in all rows, of which `membership_auc` is the strongest; 0: older
    # record.
    scores_tried: int = 0
    # None: all secrets were planned, and intervals are of a fixed size.
    stopped: StoppedEarly | None = None

    @property
    def decodes_greedily(self) -> bool:
        """True if the attack's only sample takes the likeliest token at every step."""
        return self.decoding == "greedy"

    @property
    def cell_key(self) -> CellKey:
        return CellKey(self.target, self.setting, self.attack)

    @property
    def main(self) -> Measurement | None:
        """The main number of the row: the recall of an attack, or a probe's first measurement."""
        if self.measurements:
            return self.measurements[0]
        return None

    def measurement(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)


@dataclass(frozen=True)
class Doubt:
    """A reason why a zero is no evidence: something that may have hidden a leak.

    kind: "text form", "answers", "non-members", "likelihood" or "contradiction"; sentence: the
    observation, for a report.
    """

    kind: str
    sentence: str


@dataclass(frozen=True)
class TargetRecord:
    """An attacked model: description, cost and claim."""

    name: str
    title: str
    description: str
    perplexity: Measurement | None = None
    milliseconds_per_token: float | None = None
    peak_memory_mb: float | None = None
    training_seconds: float | None = None
    claim: Claim | None = None
    # Epsilon as printed in a paper; promises nothing (the notes explain).
    nominal_epsilon: float | None = None
    notes: tuple[str, ...] = ()
    other_perplexities: tuple[Measurement, ...] = ()  # of the same texts, as papers count them
    companion: bool = False  # a control shown next to a defense, which the user did not name
    # How much likelier members' true tokens are than non-members', row by row.
    likelihood: Chain | None = None
    doubts: tuple[Doubt, ...] = ()  # about its answers only


@dataclass(frozen=True)
class GroupRecall:
    """A number of a group of secrets for the measured models around an unlearning.

    values: of `before`, `after` and `relearned`, and of models that never saw the forgotten
    records, `retrained` and `retrained_relearned`. group: "forgotten", "retained" or "nonmembers".
    changes, over the same secrets: `unlearned`, after minus before; `left`, after minus retrained;
    `relearned`, minus after; `came_back`, that minus the effect of the same steps on the retrained
    model; `share_back`, the share of unlearning's effect that relearning reverses.
    """

    attack: str
    name: str
    group: str
    values: dict[str, Measurement]
    changes: dict[str, Measurement]


@dataclass(frozen=True)
class Unlearning:
    """The remaining leakage of records that a model was to forget.

    models: names of targets, with the keys of `GroupRecall`. steps, rate, texts: of relearning, on
    this many other records; 0: no relearning. perplexity: held out, by model; `ratio`: after over
    before, paired by text.
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
    """The number of personal data of a kind in suffixes; a text in two secrets counts twice.

    members, nonmembers: complete and not in the prefix, so searched for in guesses. Other data of
    members: `held`, already in the prefix; `cut`, cut by an end of prefix or suffix. trained: of
    non-members, but in the training data: no floor.
    """

    members: int = 0
    nonmembers: int = 0
    held: int = 0
    cut: int = 0
    trained: int = 0


NO_TIME = "not asked for lack of time"  # a rule of `RecordCounts.not_attacked`


@dataclass(frozen=True)
class RecordCounts:
    """Count the records (rows) of members or non-members, from the file to the attack.

    given - sum(left_out) = usable = audited + copies + sum(not_attacked). A record with usable
    parts (answers, windows) is usable; `parts_left_out` counts its other parts.
    """

    given: int
    audited: int  # distinct attacked records
    copies: int = 0  # usable, with the secrets of an earlier record: audited with that record
    left_out: dict[str, int] = field(default_factory=dict)  # unusable records, by reason
    # Usable and distinct records, by rule: auxiliary data, --limit.
    not_attacked: dict[str, int] = field(default_factory=dict)
    # Parts of usable records, by reason.
    parts_left_out: dict[str, int] = field(default_factory=dict)
    # Of the audited records: all tokens of texts, or those of suffixes and answers; 0: not counted.
    tokens: int = 0
    attacked_tokens: int = 0  # of them, tokens inside an attacked suffix
    # Members that could be attacked, by copies; "": unknown.
    by_copies: dict[str, int] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        return self.given - sum(self.left_out.values())

    @property
    def askable(self) -> int:
        """Return the distinct records that could be attacked, without those that are auxiliary."""
        return sum(self.by_copies.values()) or self.given - self.copies

    @property
    def rows_note(self) -> str:
        """Return `234 rows given` if rows are more than distinct records; else ""."""
        if self.given == self.askable:
            return ""
        return f"{self.given:,} rows given"


@dataclass(frozen=True)
class BenchmarkRecord:
    """Numbers of the attacked data, never the text."""

    name: str
    description: str
    members: int
    nonmembers: int
    known: int
    repeats: dict[str, int] = field(default_factory=dict)
    # On the undefended target, by repeat count.
    greedy_recall: dict[str, Measurement] = field(default_factory=dict)
    greedy_nonmembers: Measurement | None = None  # measured if greedy decoding extracts a member
    # Of the secrets, without revealing any (auditor/gate/comparability.py); "": an older record.
    digest: str = ""
    # Members whose suffix is nearly a known pair's; None: not counted.
    near_duplicates: int | None = None
    # Number of canaries, by insertions; "0": controls.
    canaries: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kinds: dict[str, KindCount] = field(default_factory=dict)  # of personal data
    doubts: tuple[Doubt, ...] = ()  # about the data, and so about every row
    # Rendering of conversations: template, day and digest; "": no conversations.
    text_form: str = ""
    # Columns of texts or turns in the data without a secret.
    unread_columns: tuple[str, ...] = ()
    # Of "members" and "nonmembers"; empty: not counted.
    records: dict[str, RecordCounts] = field(default_factory=dict)

    @property
    def is_of_builtin_lab(self) -> bool:
        """True if the records are from a built-in lab."""
        return self.name == "lab" or self.name.startswith("lab-")


@dataclass(frozen=True)
class FrontierPoint:
    """A model in the plot of leakage against usefulness.

    ratio: held-out perplexity over the undefended model's, paired by text. within: whether the
    ratio is within the margin, by its interval: shown, not shown, or shown to be beyond. least: for
    points shown within, whether no other is shown to leak less; None for other points.
    """

    label: str  # with the setting of its option
    line: str  # the defense; its points form a line
    ratio: Measurement
    leak: Measurement
    within: Literal["shown", "not shown", "beyond"]
    least: bool | None = None
    corner: bool = False  # of the convex frontier
    epsilon: float | None = None  # proven epsilon in nats, None if there is no proof
    delta: float = 0.0
    unit: str = ""  # of protection
    tokens: int | None = None  # drawn tokens that it covers; None: any number


@dataclass(frozen=True)
class Frontier:
    """Leakage, by one number, against usefulness, of models queried about the same secrets.

    The undefended model is first. margin: of perplexity over the undefended model's, within which
    leakage is compared. missing: models without a point, and the reason.
    """

    metric: str
    attack: str
    setting: str
    margin: float
    level: float  # upper bound on the probability of an error of the comparison
    points: tuple[FrontierPoint, ...]
    missing: dict[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnTable:
    """A table of a plug-in's section, with final cells. Raises AuditError for unequal rows."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if unequal_row := next((row for row in self.rows if len(row) != len(self.head)), None):
            raise AuditError(
                f"expected {len(self.head)} cells in every row of the table {self.caption!r}, got "
                f"{len(unequal_row)}"
            )


@dataclass(frozen=True)
class OwnSection:
    """A plug-in's section of the reports: a title, paragraphs, then tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[OwnTable, ...] = ()


RELEASED_TEXT = "released text"  # the family of an audit without a model


@dataclass(frozen=True)
class AuditResult:
    """The record of a whole run, as in `result.json`; reports read `secrets.parquet` as well."""

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
    # File name -> SHA-256, e.g. "model/model.safetensors"; empty in the lab.
    weights: dict[str, str] = field(default_factory=dict)
    # The base of an attacked adapter; "": a whole model, or an older record.
    base: str = ""
    # A phrase on the tokens before every text, and why; "": an older record, without such tokens.
    prefix_token: str = ""
    # By measure of leakage; empty if fewer than two defenses were measured.
    frontiers: tuple[Frontier, ...] = ()
    unlearning: tuple[Unlearning, ...] = ()
    # The declared measure of each attack and probe.
    methods: dict[str, str] = field(default_factory=dict)
    # Titles of the numbers that plug-ins declare.
    metrics: dict[str, str] = field(default_factory=dict)
    own_methods: tuple[str, ...] = ()  # attacks and probes from the user's plug-ins
    # Sections that plug-ins add to the reports, by name.
    sections: dict[str, OwnSection] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def target(self, name: str) -> TargetRecord:
        return next(target for target in self.targets if target.name == name)

    def list_measuring_methods(self, *description: str) -> tuple[str, ...]:
        """Return the attacks and probes with any of these values of `Method.measures`."""
        return tuple(name for name, measured in self.methods.items() if measured in description)
