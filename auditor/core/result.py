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

    Attributes:
        name: name of the metric.
        value: the number.
        low: lower end of the interval, two-sided 95% unless the note differs.
        high: upper end of the interval.
        n: sample size.
        unit: unit of the number.
        note: remark for readers.
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
    """A lower bound of epsilon, in nats, with its inputs (statistics/audited.py).

    The bound exceeds the true epsilon with probability at most `level`, for this `delta`,
    `relation` and `unit` only.

    Attributes:
        estimator: method of the bound. "one_run" and "games" bound (epsilon, delta)-DP. "fdp"
        bounds mu-GDP, reported as (epsilon, delta). "shape" assumes that canaries' likelihood
        ratios are distributed as in DP-SGD.
        epsilon: the bound.
        delta: delta of the bound.
        level: error probability.
        canaries: number of canaries, each inserted by a fair coin; for games, the number of valid
        games.
        guesses: number of most confident canaries whose guesses give the largest bound.
        right: number of correct guesses.
        best: bound that all-correct guesses would give.
        rights: number of correct guesses for each tested number of guesses.
        sampling: sampling rate and number of steps that "shape" assumes.
        copies: times that each canary was inserted.
        relation: neighbouring relation.
        unit: unit of protection.
        table: true positives, false negatives, false positives and true negatives of games.
        tokens: tokens drawn in each game.
        covered: tokens that the claim covers; None for any number or no claim.
        exact: epsilon of these games, from both next-token distributions.
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
        """The number of canaries or games with its noun: `1,000 canaries`, `768 games`."""
        return f"{self.canaries:,} {'canaries' if self.table is None else 'games'}"


@dataclass(frozen=True)
class ChainStep:
    """A step of a chain, from a target to the next target, which differs by the step's causes.

    Attributes:
        causes: description of each change, by its name. The effect of several changes cannot be
        divided.
        before: name of the first target.
        after: name of the second target; "" if it was not measured.
        difference: number of `after` minus number of `before`; None if undefined.
        note: reason why the difference is undefined.
    """

    causes: dict[str, str]  # description of each change, by its name
    before: str
    after: str
    difference: Measurement | None = None
    note: str = ""


@dataclass(frozen=True)
class Chain:
    """Steps from the undefended target to a defended target, on the secrets that all targets
    answered.

    Attributes:
        steps: the steps, each with its difference.
        whole: number of the defended target minus that of the undefended target, the sum of the
        steps.
    """

    steps: tuple[ChainStep, ...]
    whole: Measurement


@dataclass(frozen=True)
class StoppedEarly:
    """End of the queries to a target in random order (`--until`). Intervals are valid at any stop.

    Attributes:
        asked: queried secrets, members and non-members.
        of: all secrets, members and non-members.
        why: reason such as "recall <= 0.05: failed", or that nothing was decided.
    """

    asked: int
    of: int
    why: str

    @property
    def early_stop_sentence(self) -> str:
        return f"asked {self.asked:,} of {self.of:,} secrets in random order, {self.why}"


@dataclass(frozen=True)
class Stratum:
    """The records with a given number of copies in the training data.

    Attributes:
        copies: number of copies, near copies included; None if unknown.
        population: records that could be attacked.
        extracted: extracted share of the attacked records. A record is extracted if any of its
        parts is.
    """

    copies: int | None
    population: int
    extracted: Measurement  # n: number of queried records


@dataclass(frozen=True)
class Finding:
    """Result of an attack or probe on a target in an access setting.

    A finding has measurements, or the reason for having none.

    Attributes:
        target: name of the target.
        setting: access setting.
        attack: name of the attack or probe.
        options: options of the attack or probe.
        access: kinds of access that the attack or probe used.
        decoding: decoding of the samples.
        claim_applies: whether the target's claim covers this access; None without a claim.
        claim_reason: reason for `claim_applies`.
        measurements: the numbers, the main number first.
        by_repeats: main number by repeat count.
        by_kind: share of personal data in first guesses, by kind.
        by_kind_nonmembers: the same share for non-members, as a baseline.
        by_group: recall by group of the data; empty for fewer than two groups.
        curve: pairs of the number of wrong guesses allowed and the recall.
        not_applicable: reason if nothing was measured; otherwise "".
        notes: remarks for readers.
        violations: observed violations of the claim, a sentence each.
        seconds: duration.
        drawn: tokens drawn from the target.
        samples: samples drawn of each prefix if the prefix is the whole prompt; 0 if none were
            drawn or a soft prompt was used.
        rows: sequences run through the target, shared passes included.
        chain: the part of a defense's effect that each cause explains; empty if its controls were
            not measured.
        audits: bounds of epsilon; the (epsilon, delta) bound first.
        strata: records by number of copies, most copies first; empty if copies were not counted.
        scores_tried: number of membership scores of which `membership_auc` is the strongest; 0 in
        older records.
        stopped: how the queries stopped early; None if all secrets were to be queried.
    """

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
        """The main number of the finding: the recall of an attack, or a probe's first
        measurement.
        """
        if self.measurements:
            return self.measurements[0]
        return None

    def measurement(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)


@dataclass(frozen=True)
class Doubt:
    """A reason why zero extraction is no evidence: something that may have hidden a leak.

    Attributes:
        kind: "text form", "answers", "non-members", "likelihood" or "contradiction".
        sentence: the observation, for a report.
    """

    kind: str
    sentence: str


@dataclass(frozen=True)
class TargetRecord:
    """An attacked model: description, cost and privacy claim.

    Attributes:
        name: name of the target.
        title: title in reports.
        description: sentence on the model.
        perplexity: held-out perplexity of the model's own distribution.
        milliseconds_per_token: time to draw a token.
        peak_memory_mb: peak memory in MB.
        training_seconds: seconds of training; None if unknown.
        claim: privacy claim.
        nominal_epsilon: epsilon as printed in a paper. It promises nothing; the notes explain why.
        notes: remarks for readers.
        other_perplexities: perplexities of the same texts, as papers count them.
        companion: whether the target is a control that the user did not name.
        likelihood: chain of causes for the likelihood of members' true tokens.
        doubts: doubts about this target's answers only.
    """

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
    """A number of a group of secrets, for a model before and after unlearning and for its
    baselines.

    Attributes:
        attack: name of the attack or probe.
        name: name of the metric.
        group: "forgotten", "retained" or "nonmembers".
        values: number of each model. The keys are `before`, `after`, `relearned`, and `retrained`
        and `retrained_relearned` for models that never saw the forgotten records.
        changes: differences over equal secrets. `unlearned` is after minus before, `left` is after
        minus retrained, and `relearned` is relearned minus after. `came_back` is `relearned` minus
        the effect of the same steps on the retrained model. `share_back` is the share of
        unlearning's effect that relearning reverses.
    """

    attack: str
    name: str
    group: str
    values: dict[str, Measurement]
    changes: dict[str, Measurement]


@dataclass(frozen=True)
class Unlearning:
    """Remaining leakage of the records that a model was to forget.

    Attributes:
        target: name of the unlearned target.
        models: target name by role, such as "before" and "after", the roles of `GroupRecall`.
        setting: access setting.
        forgotten: number of records to forget.
        retained: number of other members.
        numbers: value of each metric for each group of records.
        perplexity: held-out perplexity by role; the key "ratio" is after divided by before,
            paired by text.
        steps: training steps of relearning; 0 without relearning.
        rate: learning rate of relearning.
        texts: number of other records that relearning trains on.
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
    """Number of items of personal data of a kind in suffixes. A text in two secrets counts twice.

    Attributes:
        members: complete items of members outside the prefix, which guesses are searched for.
        nonmembers: complete items of non-members outside the prefix.
        held: items of members that are already in the prefix.
        cut: items of members cut by an end of prefix or suffix.
        trained: items of non-members that are in the training data, so useless as a baseline.
    """

    members: int = 0
    nonmembers: int = 0
    held: int = 0
    cut: int = 0
    trained: int = 0


NO_TIME = "not asked for lack of time"  # a rule of `RecordCounts.not_attacked`


@dataclass(frozen=True)
class RecordCounts:
    """Counts of the records (data rows) of members or non-members, from the file to the attack.

    given - sum(left_out) = usable = audited + copies + sum(not_attacked). A record with usable
    parts (answers, windows) is usable; `parts_left_out` counts its other parts.

    Attributes:
        given: records in the file.
        audited: distinct attacked records.
        copies: usable records with the secrets of an earlier record, audited with that record.
        left_out: unusable records, by reason.
        not_attacked: usable distinct records that are not attacked, by reason.
        parts_left_out: unusable parts of usable records, by reason.
        tokens: tokens of the audited records; 0 if not counted.
        attacked_tokens: tokens inside an attacked suffix.
        by_copies: members that could be attacked, by number of copies; key "" if unknown.
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
        """Number of distinct records that could be attacked; auxiliary records are not counted."""
        return sum(self.by_copies.values()) or self.given - self.copies

    @property
    def rows_note(self) -> str:
        """A note like `234 rows given` if the file has more rows than distinct records; otherwise
        "".
        """
        if self.given == self.askable:
            return ""
        return f"{self.given:,} rows given"


@dataclass(frozen=True)
class BenchmarkRecord:
    """Numbers of the attacked data, never the text.

    Attributes:
        name: name of the data.
        description: sentence on the data.
        members: number of members.
        nonmembers: number of non-members.
        known: number of the attacker's known pairs.
        repeats: number of members by repeat count.
        greedy_recall: share of members that greedy decoding of the undefended model recites, by
        repeat count.
        greedy_nonmembers: the same share for non-members; None if no member is recited.
        digest: digest of the secrets that reveals none (auditor/gate/comparability.py); "" in an
        older record.
        near_duplicates: members whose suffix is nearly a known pair's; None if not counted.
        canaries: number of canaries by insertions; "0" for controls.
        notes: remarks for readers.
        kinds: counts of personal data by kind.
        doubts: doubts about the data, and so about every finding.
        text_form: rendering of conversations; "" without conversations.
        unread_columns: columns with text that no secret contains.
        records: counts of records, by "members" and "nonmembers"; empty if not counted.
    """

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
    def unasked(self) -> int:
        """Number of members' records that were not attacked for lack of time."""
        counts = self.records.get("members")
        if counts is None:
            return 0
        return counts.not_attacked.get(NO_TIME, 0)

    @property
    def is_of_builtin_lab(self) -> bool:
        """True if the records are from a built-in lab."""
        return self.name == "lab" or self.name.startswith("lab-")


@dataclass(frozen=True)
class FrontierPoint:
    """A model in the plot of leakage against held-out perplexity.

    Attributes:
        label: name of the model with the value of its option.
        line: name of the defense, whose points form a line.
        ratio: held-out perplexity divided by the undefended model's, paired by text.
        leak: leakage.
        within: whether the ratio is within the margin, by its interval: shown, not shown, or shown
        to be beyond.
        least: whether no other point within the margin is shown to leak less; None for points not
        shown within.
        corner: whether the point is a corner of the convex frontier.
        epsilon: proven epsilon in nats; None without a proof.
        delta: delta of the proof.
        unit: unit of protection.
        tokens: drawn tokens that the proof covers; None for any number.
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
    """A metric of leakage against held-out perplexity, for models attacked with the same secrets.

    Attributes:
        metric: name of the leakage metric.
        attack: name of the attack or probe.
        setting: access setting.
        margin: largest perplexity ratio to the undefended model at which leakage is compared.
        level: upper bound on the probability of an error in the comparison.
        points: models; the undefended model is first.
        missing: reason for each model without a point.
        seeds: seeds of the runs.
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
    """A table that a plug-in adds to reports, with formatted cells.

    Raise AuditError for rows of unequal length.
    """

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
    """A section that a plug-in adds to reports: a title, paragraphs, then tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[OwnTable, ...] = ()


RELEASED_TEXT = "released text"  # the family of an audit without a model


@dataclass(frozen=True)
class AuditResult:
    """Record of a whole run, as in `result.json`. Reports also read `secrets.parquet`.

    Attributes:
        name: name of the run.
        created: time of the run (UTC, ISO 8601).
        tool_version: version of this program.
        command: command line.
        plan: fields of the plan.
        benchmark: numbers of the attacked data.
        targets: attacked models.
        findings: result of each target, access setting, and attack or probe.
        environment: software and hardware.
        timings: seconds by stage.
        seed: seed of the run.
        family: architecture and vocabulary of the attacked model; "" in an older record.
        weights: SHA-256 by file name, such as "model/model.safetensors"; empty in the lab.
        base: base model of an attacked adapter; "" for a complete model or in an older record.
        prefix_token: phrase on the tokens before every text; "" in an older record, without such
        tokens.
        frontiers: leakage against perplexity, by metric; empty for fewer than two defenses.
        unlearning: results on unlearned models.
        methods: declared measure of each attack and probe.
        metrics: titles of the metrics that plug-ins declare.
        own_methods: attacks and probes from the user's plug-ins.
        sections: sections that plug-ins add to reports, by name.
        schema_version: version of this record's schema.
    """

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

    def select_findings(
        self, target: str | None = None, setting: str | None = None, attack: str | None = None
    ) -> list[Finding]:
        """Return the findings of this target, setting, and attack or probe; None matches any."""
        scope = (target, setting, attack)
        selected = []
        for finding in self.findings:
            parts = zip(scope, finding.cell_key, strict=True)
            if all(name in (None, part) for name, part in parts):
                selected.append(finding)
        return selected

    def list_measuring_methods(self, *description: str) -> tuple[str, ...]:
        """Return the attacks and probes whose `Method.measures` is any of these values."""
        return tuple(name for name, measured in self.methods.items() if measured in description)
