"""Define the record of an audit, `result.json`: measurements, findings, targets."""

from __future__ import annotations

import math
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
        low: lower end of the interval, which is two-sided 95% unless the note says otherwise.
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

    @property
    def hits(self) -> int:
        """Number of secrets that a share counts; 0 if the share is unknown."""
        # Records hold the share: times n it equals the count up to rounding.
        return 0 if math.isnan(self.value) else round(self.value * self.n)


@dataclass(frozen=True)
class Audited:
    """A lower bound on epsilon, in nats, and the numbers from which it follows.

    See statistics/audited.py. The bound exceeds the true epsilon with probability at most `level`.
    It holds only for this `delta`, `relation` and `unit`.

    Attributes:
        estimator: method that gives the bound. "one_run" and "games" bound (epsilon, delta)-DP.
            "fdp" bounds mu-GDP, reported as (epsilon, delta). "shape" assumes that canaries'
            likelihood ratios are distributed as in DP-SGD.
        epsilon: the bound.
        delta: delta of the bound.
        level: error probability.
        canaries: number of canaries, each inserted by a fair coin; for games, the number of valid
            games.
        guesses: number r of guesses that are judged. These are the r most confident ones; r is the
            tested number that gives the largest bound.
        right: number of correct guesses among these.
        best: bound that would result if all guesses were correct.
        rights: number of correct guesses for each tested number of guesses.
        sampling: sampling rate and number of steps that "shape" assumes.
        copies: number of times that each canary was inserted.
        relation: neighbouring relation.
        unit: unit of protection.
        table: numbers of true positives, false negatives, false positives and true negatives in
            games.
        tokens: number of tokens drawn in each game.
        covered: number of tokens that the claim covers; None for any number, or if there is no
            claim.
        exact: exact epsilon of these games, computed from the next-token distributions of the
            models with and without the record; None if it was not computed.
    """

    estimator: str
    epsilon: float
    delta: float
    level: float
    canaries: int
    guesses: int
    right: int
    best: float
    rights: tuple[int, ...] = ()
    sampling: tuple[float, int] | None = None
    copies: int = 1
    relation: str = "add_remove"
    unit: str = "record"
    table: tuple[int, int, int, int] | None = None
    tokens: int | None = None
    covered: int | None = None
    exact: float | None = None

    @property
    def canaries_or_games_label(self) -> str:
        """Number of canaries or games with its noun: `1,000 canaries`, `768 games`."""
        return f"{self.canaries:,} {'canaries' if self.table is None else 'games'}"


@dataclass(frozen=True)
class ChainStep:
    """Step of a chain, from one target to the next; the two targets differ by the step's causes.

    Attributes:
        causes: description of each change, keyed by its name. If there are several, their effects
            cannot be separated.
        before: name of the first target.
        after: name of the second target; "" if it was not measured.
        difference: value for `after` minus value for `before`; None if undefined.
        note: reason why the difference is undefined.
    """

    causes: dict[str, str]
    before: str
    after: str
    difference: Measurement | None = None
    note: str = ""


@dataclass(frozen=True)
class Chain:
    """Steps from the undefended to a defended target, on the secrets that all targets answered.

    Attributes:
        steps: the steps, each with its difference.
        whole: value for the defended target minus value for the undefended target; the sum of the
            steps.
    """

    steps: tuple[ChainStep, ...]
    whole: Measurement


@dataclass(frozen=True)
class StoppedEarly:
    """Point at which `--until` stopped the queries to a target, which come in random order.

    The intervals are valid wherever the queries stop.

    Attributes:
        asked: number of queried secrets, members and non-members together.
        of: number of all secrets, members and non-members together.
        why: reason such as "recall <= 0.05: failed", or a note that nothing was decided.
    """

    asked: int
    of: int
    why: str

    @property
    def early_stop_sentence(self) -> str:
        return f"asked {self.asked:,} of {self.of:,} secrets in random order, {self.why}"


@dataclass(frozen=True)
class Stratum:
    """The records that have a given number of copies in the training data.

    Attributes:
        copies: number of copies, including near copies; None if unknown.
        population: number of records that could be attacked.
        extracted: share of the attacked records that was extracted. A record counts if any part of
            it was.
    """

    copies: int | None
    population: int
    extracted: Measurement


@dataclass(frozen=True)
class Finding:
    """Result of an attack or probe on a target in an access setting.

    It has measurements, or the reason why there are none.

    Attributes:
        target: name of the target.
        setting: access setting.
        attack: name of the attack or probe.
        options: options of the attack or probe.
        access: kinds of access that the attack or probe used.
        decoding: decoding of the samples.
        claim_applies: whether the target's claim covers this access; None if it makes no claim.
        claim_reason: reason for `claim_applies`.
        measurements: the numbers, the main number first.
        by_repeats: main number for each repeat count.
        by_kind: share of personal data that first guesses contain, by kind.
        by_kind_nonmembers: the same share for non-members, as a baseline.
        by_group: recall by group of the data; empty for fewer than two groups.
        curve: pairs of an allowed number of wrong guesses and the recall.
        not_applicable: reason if nothing was measured; otherwise "".
        notes: remarks for readers.
        violations: observed violations of the claim, one sentence each.
        seconds: duration; 0 if unknown, because earlier sessions gave some of the answers.
        drawn: number of tokens drawn from the target.
        samples: number of samples drawn for each prefix. It is 0 if no samples were drawn, or if a
            soft prompt preceded the prefix.
        rows: number of inputs that the target read. An input that several attacks share counts
            for each of them.
        chain: the part of a defense's effect that each cause explains; empty if the controls were
            not measured.
        audits: lower bounds on epsilon; the (epsilon, delta) bound first.
        strata: records grouped by number of copies, most copies first; empty if copies were not
            counted.
        scores_tried: number of membership scores of which `membership_auc` is the strongest; 0 in
            older records.
        stopped: where and why the queries stopped early; None without `--until`.
    """

    target: str
    setting: str
    attack: str
    options: dict[str, Any]
    access: tuple[str, ...]
    decoding: str
    claim_applies: bool | None
    claim_reason: str
    measurements: tuple[Measurement, ...] = ()
    by_repeats: dict[str, Measurement] = field(default_factory=dict)
    by_kind: dict[str, Measurement] = field(default_factory=dict)
    by_kind_nonmembers: dict[str, Measurement] = field(default_factory=dict)
    by_group: dict[str, Measurement] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    not_applicable: str = ""
    notes: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    seconds: float = 0.0
    drawn: int = 0
    samples: int = 0
    rows: int = 0
    chain: Chain | None = None
    audits: tuple[Audited, ...] = ()
    strata: tuple[Stratum, ...] = ()
    scores_tried: int = 0
    stopped: StoppedEarly | None = None

    @property
    def decodes_greedily(self) -> bool:
        """True if the attack draws one sample that takes the most likely token at every step."""
        return self.decoding == "greedy"

    @property
    def draws_its_own_way(self) -> bool:
        """True if no other attack draws in the same way, for example behind a soft prompt."""
        return self.drawn > 0 and not self.samples

    @property
    def cell_key(self) -> CellKey:
        return CellKey(self.target, self.setting, self.attack)

    @property
    def main(self) -> Measurement | None:
        """Main number of the finding: an attack's recall, or the first measurement of a probe."""
        if self.measurements:
            return self.measurements[0]
        return None

    def measurement(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)


@dataclass(frozen=True)
class Doubt:
    """Reason why an extraction rate of zero is no evidence: something that may have hidden a leak.

    Attributes:
        kind: "text form", "answers", "non-members", "likelihood", "contradiction" or "base".
        sentence: the observation, as a sentence for a report.
    """

    kind: str
    sentence: str


@dataclass(frozen=True)
class TargetRecord:
    """An attacked model: description, cost and privacy claim.

    Attributes:
        name: name of the target.
        title: title in reports.
        description: sentence about the model.
        perplexity: held-out perplexity of the model's own distribution.
        milliseconds_per_token: time to draw a token.
        peak_memory_mb: peak memory in MB.
        training_seconds: seconds of training; None if unknown.
        claim: privacy claim.
        nominal_epsilon: epsilon printed in a paper. It is no promise; the notes explain why.
        notes: remarks for readers.
        other_perplexities: perplexities of the same held-out texts, computed as in the paper of the
            target's defense.
        companion: whether the target is a control that the user did not name.
        likelihood: mean likelihood of members' true suffixes, from the undefended to this target,
            step by step; None if the controls were not measured.
        doubts: doubts that concern only this target's answers.
    """

    name: str
    title: str
    description: str
    perplexity: Measurement | None = None
    milliseconds_per_token: float | None = None
    peak_memory_mb: float | None = None
    training_seconds: float | None = None
    claim: Claim | None = None
    nominal_epsilon: float | None = None
    notes: tuple[str, ...] = ()
    other_perplexities: tuple[Measurement, ...] = ()
    companion: bool = False
    likelihood: Chain | None = None
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True)
class GroupRecall:
    """A metric for one group of secrets: values before and after unlearning, and of baselines.

    Attributes:
        attack: name of the attack or probe.
        name: name of the metric.
        group: "forgotten", "retained" or "nonmembers".
        values: value for each model. The keys are `before`, `after` and `relearned`, and
            `retrained` and `retrained_relearned` for models that never saw the forgotten records.
        changes: differences over the same secrets. `unlearned` is after minus before, `left` is
            after minus retrained, and `relearned` is relearned minus after. `came_back` is
            (relearned minus after) minus (retrained_relearned minus retrained): how much more the
            unlearned model gains from relearning than the retrained model. `share_back` is the
            share of unlearning's effect that relearning reverses.
    """

    attack: str
    name: str
    group: str
    values: dict[str, Measurement]
    changes: dict[str, Measurement]


@dataclass(frozen=True)
class Unlearning:
    """Leakage that remains of the records that a model was trained to forget.

    Attributes:
        target: name of the unlearned target.
        models: target name for each role, such as "before" and "after", the roles of `GroupRecall`.
        setting: access setting.
        forgotten: number of records to forget.
        retained: number of other members.
        numbers: value of each metric for each group of records.
        perplexity: held-out perplexity for each role; "ratio" is after divided by before, paired by
            text.
        steps: number of training steps of relearning; 0 without relearning.
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
    """Numbers of items of one kind of personal data, such as e-mail addresses, in the secrets.

    An item that occurs in two secrets counts twice, except in `cut`.

    Attributes:
        members: items of members that are wholly in the suffix. The audit tests whether guesses
            contain them.
        nonmembers: items of non-members that are wholly in the suffix.
        held: items of members that are already in the prefix.
        cut: items of members that are cut by the end of the prefix or suffix, and in no other part
            of the record whole.
        trained: items of non-members that are also in the training data. They are no baseline.
    """

    members: int = 0
    nonmembers: int = 0
    held: int = 0
    cut: int = 0
    trained: int = 0


NO_TIME = "not asked for lack of time"  # a rule of `RecordCounts.not_attacked`


@dataclass(frozen=True)
class RecordCounts:
    """Counts of the records (data rows) of members or non-members, from file to attack.

    given - sum(left_out) = usable = audited + copies + sum(not_attacked). A record is usable if any
    of its parts (answers, windows) is; `parts_left_out` counts its other parts.

    Attributes:
        given: number of records in the file.
        audited: number of distinct attacked records.
        copies: usable records with the same secrets as an earlier record, which are audited with
            it.
        left_out: number of unusable records, by reason.
        not_attacked: number of usable distinct records left unattacked, by reason.
        parts_left_out: number of unusable parts of usable records, by reason.
        tokens: number of tokens in the audited records; 0 if not counted.
        attacked_tokens: number of tokens that are inside an attacked suffix.
        context_tokens: length of the longest prefix, if the attacker knows less than all that
            precedes some suffix; else 0.
        by_copies: number of members that could be attacked, by number of copies ("" if unknown).
        unread_parts: phrases about splits and files of the data that are not read.
    """

    given: int
    audited: int
    copies: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    not_attacked: dict[str, int] = field(default_factory=dict)
    parts_left_out: dict[str, int] = field(default_factory=dict)
    # Of the audited records: all tokens of texts, or those of suffixes and answers; 0: not counted.
    tokens: int = 0
    attacked_tokens: int = 0
    context_tokens: int = 0
    by_copies: dict[str, int] = field(default_factory=dict)
    unread_parts: tuple[str, ...] = ()

    @property
    def askable(self) -> int:
        """Number of distinct records that could be attacked.

        Records that the attacker already has (auxiliary data) are not counted.
        """
        return sum(self.by_copies.values()) or self.given - self.copies

    @property
    def rows_note(self) -> str:
        """Note with the number of rows in the file, such as `234 rows given`.

        The note is "" if every row is a record that could be attacked.
        """
        if self.given == self.askable:
            return ""
        return f"{self.given:,} rows given"


@dataclass(frozen=True)
class BenchmarkRecord:
    """Numbers about the attacked data, never its text.

    Attributes:
        name: name of the data.
        description: sentence about the data.
        members: number of members.
        nonmembers: number of non-members.
        known: number of pairs that the attacker knows.
        repeats: number of members by repeat count.
        greedy_recall: share of members that the undefended model recites under greedy decoding, by
            repeat count.
        greedy_nonmembers: the same share of non-members; None if no member is recited.
        digest: digest of the secrets, which reveals none of them (auditor/gate/comparability.py);
            "" in an older record.
        near_duplicates: number of members whose suffix nearly equals that of a known pair; None if
            not counted.
        canaries: number of canaries by number of insertions; "0" for controls.
        notes: remarks for readers.
        kinds: counts of personal data by kind.
        doubts: doubts about the data, which affect every finding.
        text_form: how conversations are rendered; "" if there are none.
        unread_columns: columns whose text no secret contains.
        records: counts of records for "members" and "nonmembers"; empty if not counted.
    """

    name: str
    description: str
    members: int
    nonmembers: int
    known: int
    repeats: dict[str, int] = field(default_factory=dict)
    greedy_recall: dict[str, Measurement] = field(default_factory=dict)
    greedy_nonmembers: Measurement | None = None
    digest: str = ""
    near_duplicates: int | None = None
    canaries: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kinds: dict[str, KindCount] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()
    text_form: str = ""
    unread_columns: tuple[str, ...] = ()
    records: dict[str, RecordCounts] = field(default_factory=dict)

    @property
    def unasked(self) -> int:
        """Number of members' records that were not attacked because time ran out."""
        counts = self.records.get("members")
        if counts is None:
            return 0
        return counts.not_attacked.get(NO_TIME, 0)

    @property
    def is_of_builtin_lab(self) -> bool:
        return self.name == "lab" or self.name.startswith("lab-")


@dataclass(frozen=True)
class FrontierPoint:
    """A model in the plot of leakage against held-out perplexity.

    Attributes:
        label: name of the model, with the value of its option.
        line: name of the defense; its points form a line.
        ratio: held-out perplexity divided by the undefended model's, paired by text.
        leak: leakage.
        within: "shown" if the whole interval of the ratio is within the margin, "beyond" if the
            whole interval is above it, and otherwise "not shown".
        least: whether this point may leak least of all points whose `within` is "shown"; None for
            any other point.
        corner: whether the point is a corner of the convex frontier.
        epsilon: proven epsilon in nats; None without a proof.
        delta: delta of the proof.
        unit: unit of protection.
        tokens: number of drawn tokens that the proof covers; None for any number.
    """

    label: str
    line: str
    ratio: Measurement
    leak: Measurement
    within: Literal["shown", "not shown", "beyond"]
    least: bool | None = None
    corner: bool = False
    epsilon: float | None = None
    delta: float = 0.0
    unit: str = ""
    tokens: int | None = None


@dataclass(frozen=True)
class Frontier:
    """Leakage against held-out perplexity, for models attacked with the same secrets.

    Attributes:
        metric: name of the leakage metric.
        attack: name of the attack or probe.
        setting: access setting.
        margin: largest perplexity ratio, to the undefended model, at which leakage is compared.
        level: upper bound on the probability of an error in the comparison.
        points: the models, the undefended one first.
        missing: for each model without a point, the reason why.
        seeds: seeds of the runs.
    """

    metric: str
    attack: str
    setting: str
    margin: float
    level: float
    points: tuple[FrontierPoint, ...]
    missing: dict[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnTable:
    """A table that a plug-in adds to reports, with formatted cells.

    Raise AuditError if rows have different lengths.
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
    """A section that a plug-in adds to reports: a title, then paragraphs, then tables."""

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
        findings: one result per target, access setting, and attack or probe.
        environment: software and hardware.
        timings: seconds by stage.
        seed: seed of the run.
        family: architecture and vocabulary of the attacked model; "" in an older record.
        weights: SHA-256 of each weight file, keyed by a name such as "model/model.safetensors";
            empty in the lab.
        base: base model of an attacked adapter; "" for a complete model or in an older record.
        prefix_token: phrase about the tokens before every text; "" if there are none, or in an
            older record.
        frontiers: leakage against perplexity, by metric; empty for fewer than two defenses.
        unlearning: results on unlearned models.
        methods: what each attack and probe declares that it measures.
        metrics: titles of the metrics that plug-ins declare.
        own_methods: attacks and probes that come from the user's plug-ins.
        sections: sections that plug-ins add to reports, keyed by name.
        schema_version: version of this record's schema.
    """

    name: str
    created: str
    tool_version: str
    command: str
    plan: dict[str, Any]
    benchmark: BenchmarkRecord
    targets: tuple[TargetRecord, ...]
    findings: tuple[Finding, ...]
    environment: dict[str, str]
    timings: dict[str, float]
    seed: int
    family: str = ""
    weights: dict[str, str] = field(default_factory=dict)
    base: str = ""
    prefix_token: str = ""
    frontiers: tuple[Frontier, ...] = ()
    unlearning: tuple[Unlearning, ...] = ()
    methods: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    own_methods: tuple[str, ...] = ()
    sections: dict[str, OwnSection] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def target(self, name: str) -> TargetRecord:
        return next(target for target in self.targets if target.name == name)

    def select_findings(
        self, target: str | None = None, setting: str | None = None, attack: str | None = None
    ) -> list[Finding]:
        """Return the findings for this target, setting, and attack or probe; None matches any."""
        scope = (target, setting, attack)
        selected = []
        for finding in self.findings:
            parts = zip(scope, finding.cell_key, strict=True)
            if all(name in (None, part) for name, part in parts):
                selected.append(finding)
        return selected

    def list_measuring_methods(self, *description: str) -> tuple[str, ...]:
        """Return the attacks and probes whose `Method.measures` is any of the given values."""
        return tuple(name for name, measured in self.methods.items() if measured in description)
