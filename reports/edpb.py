"""Answer EDPB Opinion 28/2024 (¶43, 55, 58) and impact assessments (GDPR 35) with a run's numbers.

Each answer is a measured number with its interval and its limits. Without a measurement, the answer
is the command to make it. The page may be published: it shows the model's name, aggregates, hashes
and our own words, but no name of a secret, group or data file. It gives no legal advice, and never
calls a model anonymous.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

from auditor.conclusions.claims import weigh_claim_against_audits
from auditor.conclusions.disagreements import is_measured
from auditor.conclusions.leak_kinds import widen_leak_measurement
from auditor.conclusions.leak_readings import MEMBERSHIP, PERSONAL, RANKED
from auditor.conclusions.outcomes import read_run_outcomes
from auditor.conclusions.signals import NOT_TESTED, LeakAssessment, assess_leak_signals
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json
from auditor.core.result import AuditResult, Finding, Measurement, TargetRecord
from auditor.gate.contradictions import find_result_contradictions
from auditor.gate.decision_log import KeptDecision, load_gate_decisions
from auditor.gate.rulings import Verdict
from auditor.records.result_file import RESULT
from auditor.reports import claims, coverage, personal, phrases, signals, subject_line
from auditor.reports.blocks import Document, Paragraph, Section, make_table
from auditor.reports.topics import title_attack_row
from auditor.statistics import documents
from auditor.statistics.membership import FALSE_POSITIVES
from auditor.statistics.memorised import MEMORISED, RECORDS
from auditor.statistics.metrics import (
    ADJUSTED_AUC,
    SHARES,
    find_metric,
    name_auc,
    name_nonmember_metric,
    name_tpr_metric,
)
from auditor.statistics.roc import AUC

_WHAT_IT_IS = (
    "This page answers questions that a supervisory authority may ask about a model with measured "
    "numbers; the questions are in our words. It is not legal advice, and no number here says that "
    "a model is anonymous: the controller and the authority decide whether a likelihood is "
    "insignificant for every person, considering all means reasonably likely to be used."
)
_ATTACKERS = {
    "white-box": "somebody who has the model's files and the first words of a record",
    "text-only": "somebody who can only ask the model for text and has the first words of a record",
}
_FOR_YOU = "not a measurement; the controller's file answers it"


@dataclass(frozen=True)
class EdpbEvidence:
    """The sources of all answers: the cleaned result, and the stored decisions of gates.

    digest: SHA-256 of the result's file.
    """

    result: AuditResult
    digest: str
    gates: tuple[KeptDecision, ...] = ()

    @cached_property
    def assessment(self) -> LeakAssessment:
        return assess_leak_signals(self.result)


@dataclass(frozen=True)
class EdpbQuestion:
    """A question of the template, in our words, with its source and paragraph.

    A question is answered by a function (`answer`) or, without a function, by the highest values of
    some metrics (`metrics`).

    answer: the key of the function in `ANSWERS`; "" if there is none.
    metrics: names of the metrics.
    limit: the scope of the answer.
    otherwise: the advice if the run has no answer, and no attack or probe would give one.
    measured_by: values of `Method.measures` of attacks and probes that would answer the question.
    """

    source: str
    paragraph: str
    question: str
    answer: str = ""
    metrics: tuple[str, ...] = ()
    limit: str = ""
    otherwise: str = "no attack or probe of audit measures it"
    measured_by: tuple[str, ...] = ()

    def list_answers(self, e: EdpbEvidence) -> list[str]:
        """Return sentences that answer the question; [] if the run cannot answer the question."""
        if self.answer == "main number":
            return _describe_main_numbers(e, self.measured_by[0])
        if self.answer:
            return ANSWERS[self.answer](e)
        return _describe_highest_values(e, self.metrics)

    def answering_command_phrase(self, e: EdpbEvidence) -> str:
        """Return the command that would answer the question, or `otherwise` if there is none."""
        flags = []
        for measure in self.measured_by:
            for name in e.result.list_measuring_methods(measure)[:1]:
                flags.append(f"--attack {name}")
        if flags:
            return f"`audit run {' '.join(flags)}` would answer it"
        return self.otherwise


# --- answers ---


def _exclude_control_targets(e: EdpbEvidence) -> list[TargetRecord]:
    return [target for target in e.result.targets if not target.companion]


def _pair_measurements(
    e: EdpbEvidence,
    target: TargetRecord,
    numbers: Callable[[Finding], Mapping[str, Measurement | None]],
) -> list[tuple[Measurement, str, Finding]]:
    """Return all valid measurements of a model, as (measurement, name of the part, attack result).

    numbers: returns the measurements of an attack result, keyed by part.
    """
    measurements = []
    for f in e.result.select_findings(target.name):
        for part, m in numbers(f).items():
            if is_measured(m):
                measurements.append((m, part, f))
    return measurements


def _find_highest_measurement(
    candidates: Iterable[tuple[Measurement, str, Finding]],
) -> tuple[Measurement, str, Finding]:
    return max(candidates, key=lambda row: (row[0].value, row[0].n))


def _describe_highest_values(e: EdpbEvidence, metrics: Sequence[str]) -> list[str]:
    """Describe each model's highest value of each metric, next to the non-members' value."""
    sentences = []
    for target in _exclude_control_targets(e):
        sentences += [_describe_highest_value(e, target, metric) for metric in metrics]
    return list(filter(None, sentences))


def _describe_extraction_per_query(e: EdpbEvidence) -> list[str]:
    """Describe extraction per query, with a record's prefix and without a prefix."""
    first_guess = (documents.RECALL, "recall", documents.NEAR, "near_verbatim_recall")
    sentences = _describe_highest_values(e, first_guess)
    sentences = sentences or _describe_highest_values(e, ("any_of_k",))
    return [*sentences, *_describe_highest_values(e, (RECORDS, MEMORISED))]


def _describe_highest_value(e: EdpbEvidence, target: TargetRecord, metric: str) -> str:
    if not (candidates := _pair_measurements(e, target, lambda f: {metric: f.measurement(metric)})):
        return ""
    m, _, row = _find_highest_measurement(candidates)
    floor = row.measurement(name_nonmember_metric(metric))
    baseline = ""
    if is_measured(floor):
        baseline = f"; records never trained on: {_format_counted_value(floor)}"
    among = ""
    if len(candidates) > 1:
        among = f"; the highest of {len(candidates)} configurations"
    number = f"{phrases.format_metric(metric)} {_format_counted_value(m)}"
    return f"{title_attack_row(e.result, row)}: {number}{baseline}{among}."


def _format_counted_value(m: Measurement) -> str:
    """Return a value with its count: `43/300 = 14% [11–19]` or `0.3% [0.1–0.9] of 300`."""
    if find_metric(m.name).exact:
        return f"{phrases.format_share_without_interval(m)} {phrases.format_interval(m)}"
    return f"{phrases.format_measurement_value(m)} of {m.n:,}"


def _describe_worst_repeat_count(e: EdpbEvidence) -> list[str]:
    """Describe each model's repeat count with the highest lower bound on the extracted share.

    If no extraction by repeat count was measured, use the membership AUC instead.
    """
    sentences = []
    for target in _exclude_control_targets(e):
        groups = _list_repeat_counts(e, target, SHARES) or _list_repeat_counts(e, target, (AUC,))
        if len({count for _, count, _ in groups}) > 1:  # otherwise it repeats the mean
            # If lower bounds tie at 0, compare the values, then the upper bounds.
            m, count, row = max(groups, key=lambda g: (g[0].low, g[0].value, g[0].high))
            copies = format_count(int(count), "copy", "copies")
            sentences.append(
                f"{title_attack_row(e.result, row)}, records with {copies}: "
                f"{phrases.lower_first(phrases.format_metric(m.name))} {_format_counted_value(m)}."
            )
    return sentences


def _list_repeat_counts(
    e: EdpbEvidence, target: TargetRecord, units: Sequence[str]
) -> list[tuple[Measurement, str, Finding]]:
    """Return (measurement, repeat count, attack result) for measurements in one of these units.

    Intervals are corrected as for signals, because all repeat counts of an attack result share the
    significance level.
    """
    groups = []
    for m, count, row in _pair_measurements(e, target, lambda f: f.by_repeats):
        # Non-numeric names may come from the data and must not be published.
        if count.isdecimal() and m.unit in units:
            n_counts = sum(map(str.isdecimal, row.by_repeats))
            groups.append((widen_leak_measurement(m, n_counts), count, row))
    return groups


def _describe_membership(e: EdpbEvidence) -> list[str]:
    """Describe membership inference over all records.

    Add records with a certain number of copies if these decide whether a leak is shown.
    """
    sentences = [
        *_describe_highest_values(e, (name_auc(""), name_tpr_metric("", FALSE_POSITIVES[0]))),
        *_describe_highest_values(e, (ADJUSTED_AUC, RANKED)),
    ]
    for s in e.assessment.signals:
        if s.kind is MEMBERSHIP and s.count:
            title = phrases.title_target(e.result, s.target)
            sentences.append(f"{title}: {signals.describe_signal_number(s)}.")
    return sentences


def _describe_greedy_recall(e: EdpbEvidence) -> list[str]:
    recalls = phrases.sort_repeats(e.result.benchmark.greedy_recall)
    parts = []
    for count, m in recalls:
        if not is_measured(m):
            continue
        if count.isdecimal():
            copies = format_count(int(count), "copy", "copies")
            parts.append(f"records with {copies} {_format_counted_value(m)}")
        elif count == "all":
            parts.append(f"all records {_format_counted_value(m)}")
    if parts:
        return [f"Greedy decoding after the start of each record: {'; '.join(parts)}."]
    return []


def _build_leak_signals_section(e: EdpbEvidence) -> Section:
    """Return a section with reasons why a leak may be hidden, then the signals of all models."""
    against = " ".join(signals.list_doubt_sentences(e.assessment))
    publishable = []
    for s in e.assessment.signals:
        publishable.append(
            replace(
                s,
                reason="",
                part=_generalise_personal_kind(s.part) if s.kind is PERSONAL else s.part,
            )
        )
    assessment = replace(e.assessment, signals=tuple(publishable))
    blocks = signals.build_signal_blocks(e.result, assessment)
    title = "Leaks shown, not shown and not tested"
    if against:
        blocks.insert(0, Paragraph(f"What may hide a leak: {against}"))
    return Section("signals", title, tuple(blocks))


def _signal_counts_paragraph(e: EdpbEvidence) -> str:
    """Return a paragraph with one sentence per model.

    The sentence names the kinds of leak that the audit found. If it found none, the sentence counts
    the tested and untested kinds.
    """
    sentences = []
    for target in e.assessment.targets:
        sentences.append(_describe_signal_count(e, target))
    return " ".join(sentences)


def _describe_signal_count(e: EdpbEvidence, target: str) -> str:
    assessment = e.assessment
    title = phrases.title_target(e.result, target)
    titles = []
    for group in signals.group_signals(assessment.list_shown_signals(target)):
        titles.append(group[0].kind.title.lower())
    if titles:
        return f"{title}: leakage is shown by {', '.join(titles)}."
    untested_signals = []
    for s in assessment.list_target_signals(target):
        if s.status == NOT_TESTED:
            untested_signals.append(s)
    tested = len(signals.group_signals(assessment.list_tested_signals(target)))
    untested = len(signals.group_signals(untested_signals))
    if assessment.shows_no_leakage(target):
        verdict = signals.format_no_leakage(assessment, target)
    else:
        verdict = "inconclusive"
    return f"{title}: {verdict} ({format_count(tested, 'signal')} tested, {untested:,} not tested)."


def _describe_claimed_epsilon(e: EdpbEvidence) -> list[str]:
    """Describe each claim's epsilon and terms, and whether an audit contradicts the claim."""
    sentences = []
    for target in _exclude_control_targets(e):
        stands = weigh_claim_against_audits(e.result, target)
        claim = target.claim
        if claim is None or stands.claimed is None:
            continue
        least = max((bound.audit.epsilon for bound in stands.bounds), default=None)
        audited = ""
        if least is not None:
            audited = f", audited ε at least {phrases.format_number(least)}"
        sentences.append(
            f"{target.title}: claimed ε {phrases.format_promised_epsilon(claim)}, "
            f"{phrases.format_relation(claim.relation)}, δ {phrases.format_number(claim.delta)}, "
            f"{phrases.format_covered_tokens(claim)}{audited}: "
            f"{claims.format_claim_verdict(stands)}."
        )
    return sentences


def _describe_provenance(e: EdpbEvidence) -> list[str]:
    # Hash the sorted digests of all weight files, without their names.
    weights = json.dumps(sorted(e.result.weights.values())).encode()
    weights_phrase = ""
    if e.result.weights:
        weights_phrase = f"weights {hashlib.sha256(weights).hexdigest()}; "
    public = e.result.benchmark.digest.partition("-")[0]  # the rest holds bits of the answers
    secrets = f"secrets {public}; " if public else ""
    return [
        f"audit {e.result.tool_version}, {e.result.created}, seed {e.result.seed}; SHA-256: "
        f"{weights_phrase}{secrets}"
        f"{RESULT} {e.digest}."
    ]


def _describe_defense_effect(e: EdpbEvidence) -> list[str]:
    """Describe each defense's cost, and the defense's effect on the attack with highest recall."""
    sentences = []
    for target in _exclude_control_targets(e):
        differences = _pair_measurements(
            e, target, lambda f: {"recall": f.measurement("recall_difference")}
        )
        if differences:
            # Compare recall itself, not its difference from non-members.
            change, _, row = max(differences, key=lambda difference: _find_recall(difference[2]))
            lost = target.perplexity
            cost = ""
            if lost:
                cost = f"; held-out perplexity {phrases.format_measurement_value(lost)}"
            sentences.append(
                f"{title_attack_row(e.result, row)}: "
                f"{phrases.format_difference(change)} against no defense{cost}."
            )
    return sentences


def _find_recall(finding: Finding) -> float:
    recall = finding.measurement("recall")
    return recall.value if recall else -1.0


def _describe_personal_data_kind(e: EdpbEvidence) -> list[str]:
    """Describe extraction of each kind of personal data, by each model's most successful attack."""
    sentences = []
    for target in _exclude_control_targets(e):
        by_kind: dict[str, list[tuple[Measurement, str, Finding]]] = {}
        for measurement in _pair_measurements(e, target, lambda f: f.by_kind):
            kind = _generalise_personal_kind(measurement[1])
            by_kind.setdefault(kind, []).append(measurement)
        for kind, measurements in by_kind.items():
            m, _, row = _find_highest_measurement(measurements)
            number = f"{personal.format_personal_kind(kind)} {phrases.format_counted_share(m)}"
            sentences.append(f"{title_attack_row(e.result, row)}: {number}.")
    return sentences


def _generalise_personal_kind(kind: str) -> str:
    """Return `kind` if it is one of our own kinds of personal data, else "other personal data".

    Users' data may name further kinds, and these names must stay private.
    """
    if kind in personal.TITLES:
        return kind
    return "other personal data"


_SHOWN = 5  # rulings listed with the smallest leak each would miss


def _describe_gate_verdict(e: EdpbEvidence) -> list[str]:
    sentences = []
    for gate in e.gates:
        rulings = gate.decision.rulings
        counts: dict[Verdict, int] = dict.fromkeys(("failed", "inconclusive", "held"), 0)
        missed = []
        for r in rulings:
            counts[r.verdict] += 1
            if r.missed is not None:
                missed.append(f"{r.cell_title}: {r.metric} {r.missed:.4g}")
        text = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
        text = text or "nothing was judged"
        if missed:
            more = ""
            if len(missed) > _SHOWN:
                more = f" (and {len(missed) - _SHOWN} more)"
            text += f"; found in at least 95% of cases from {'; '.join(missed[:_SHOWN])} on{more}"
        sentences.append(f"Gate {gate.decision.verdict}, decided {gate.decided}: {text}.")
    return sentences


def _describe_main_numbers(e: EdpbEvidence, measure: str) -> list[str]:
    """Describe the main number of each attack and probe whose `measures` includes this measure."""
    sentences = []
    for f in e.result.findings:
        if f.attack in e.result.list_measuring_methods(measure) and is_measured(f.main):
            number = f"{phrases.format_metric(f.main.name)} {_format_counted_value(f.main)}"
            sentences.append(f"{title_attack_row(e.result, f)}: {number}.")
    return sentences


def _format_attacked_records(result: AuditResult, side: str, noun: str) -> str:
    """Return the number of attacked members or non-members: `41 members`.

    If parts of records were attacked, return `33 members (52 parts)`.
    """
    n_parts = getattr(result.benchmark, side)
    counts = result.benchmark.records.get(side)
    if counts is None or counts.audited == n_parts:
        return format_count(n_parts, noun)
    return f"{format_count(counts.audited, noun)} ({format_count(n_parts, 'part')})"


def _describe_scope(e: EdpbEvidence) -> list[str]:
    """Return sentences about attacked records, methods and cost; [] if nothing was measured."""
    r = e.result
    attacks = dict[str, None]()  # ordered sets
    settings = dict[str, None]()
    n_measured = 0
    n_drawn = 0
    n_rows = 0
    idle = 0
    for f in r.findings:
        if f.not_applicable:
            idle += 1
        elif f.measurements:
            attacks[f.attack] = None
            settings[f.setting] = None
            n_measured += 1
            n_drawn += f.drawn
            n_rows += f.rows
    if not n_measured:
        return []
    rest = f"; {idle} more did not apply" if idle else ""
    return [
        f"{_format_attacked_records(r, 'members', 'member')} and "
        f"{_format_attacked_records(r, 'nonmembers', 'non-member')} attacked, "
        f"{phrases.format_known_pairs(r.benchmark)} known to the attacker; "
        f"{format_count(n_measured, 'configuration')} of model, access and attack "
        f"({', '.join(attacks)}; {' and '.join(settings)}){rest}; "
        f"{format_count(n_drawn, 'token')} drawn, {format_count(n_rows, 'forward row')}."
    ]


ANSWERS: Mapping[str, Callable[[EdpbEvidence], list[str]]] = {
    "extraction per query": _describe_extraction_per_query,
    "worst repeat count": _describe_worst_repeat_count,
    "scope": _describe_scope,
    "membership": _describe_membership,
    "greedy recall": _describe_greedy_recall,
    "defense effect": _describe_defense_effect,
    "claimed epsilon": _describe_claimed_epsilon,
    "provenance": _describe_provenance,
    "personal data": _describe_personal_data_kind,
    "gate verdict": _describe_gate_verdict,
}


@cache
def list_edpb_questions() -> tuple[EdpbQuestion, ...]:
    """Return the questions of the template, in order."""
    template = importlib.resources.files("auditor.reports") / "templates" / "edpb.toml"
    tables = tomllib.loads(template.read_text(encoding="utf-8"))["question"]
    return from_json(tuple[EdpbQuestion, ...], tables, "edpb.toml")


# --- the page ---


def read_edpb_document(folder: Path) -> Document:
    """Return the document that answers the EDPB's questions for a finished run.

    Raise AuditError if the run is missing or inconsistent.
    """
    run = read_run_outcomes(folder)
    for row, fault in find_result_contradictions(run.result, run.outcomes):
        raise AuditError(
            f"{folder}: the result contradicts itself ({row.title}: {fault}), so it is no evidence"
        )
    digest = hashlib.sha256((folder / RESULT).read_bytes()).hexdigest()
    return build_edpb_document(
        EdpbEvidence(phrases.make_result_printable(run.result), digest, load_gate_decisions(folder))
    )


def build_edpb_document(e: EdpbEvidence) -> Document:
    answers = []
    counts = Counter[str]()
    for question in list_edpb_questions():
        answer = " ".join(question.list_answers(e))
        remedy = "" if answer else question.answering_command_phrase(e)
        answers.append((question, answer, remedy))
        counts[remedy] += 1
    n_measured = counts[""]
    n_controller = counts[_FOR_YOU]
    n_untested = len(answers) - n_measured - n_controller
    sections = [
        Section("limits", "What this is not", (Paragraph(_WHAT_IT_IS),)),
        _build_leak_signals_section(e),
        _build_coverage_section(answers),
    ]
    # A group of groupby ends when the next begins: read each in turn.
    for n, (title, of_source) in enumerate(
        groupby(answers, key=lambda answer: answer[0].source), 1
    ):
        head = ("Where", "Question", "Measured in this run", "Limits of the answer")
        rows = []
        for question, answer, remedy in of_source:
            cells = (answer, question.limit)
            if remedy:
                cells = (f"Not evaluated: {remedy}.", phrases.NOTHING)
            rows.append((question.paragraph, question.question, *cells))
        table = make_table(f"questions-{n}", title, head, rows)
        sections.append(Section(f"part-{n}", title, (table,)))
    model = subject_line.format_model(e.result)
    date = subject_line.format_date(e.result)
    members = f"{e.result.benchmark.members:,} records attacked"
    audited = coverage.format_coverage(e.result) or members
    return Document(
        title=f"Test results for the impact assessment of {model}, tested {date}",
        facts=(("Date of the run", e.result.created), ("SHA-256 of its result", e.digest)),
        headline=f"{_signal_counts_paragraph(e)} {audited}.",
        verdict=f"{_describe_threat(e.result)} Of {len(answers)} questions, "
        f"{n_measured} have a measured "
        f"answer, {n_controller} are for the controller, {n_untested} were not tested. Brackets "
        "hold 95% intervals.",
        sections=tuple(sections),
        kind="Privacy audit of a language model",
        lead="Result",
    )


def _describe_threat(result: AuditResult) -> str:
    """Describe the attackers that the run simulated; return "" if nothing was measured."""
    measured = set()
    for f in result.findings:
        if f.measurements and not f.not_applicable:
            measured.add(f.setting)
    attackers = []
    for setting, attacker in _ATTACKERS.items():
        if setting in measured:
            attackers.append(attacker)
    if attackers:
        return f"Attacker: {'; or '.join(attackers)}."
    return ""


def _build_coverage_section(answers: Sequence[tuple[EdpbQuestion, str, str]]) -> Section:
    """Return a table of the Opinion's paragraphs that this test answers or leaves open.

    answers: (question, answer, "" or the reason why an answer is missing).
    """
    by_paragraph: dict[str, tuple[list[str], list[str]]] = {}
    for question, _, reason in answers:
        measured, missing = by_paragraph.setdefault(question.paragraph, ([], []))
        if reason:
            missing.append(f"{question.question} – {reason}.")
        else:
            measured.append(question.question)
    rows = []
    for paragraph, (measured, missing) in by_paragraph.items():
        rows.append((paragraph, " · ".join(measured) or "nothing", " ".join(missing) or "nothing"))
    head = ("Paragraph", "In scope of this test", "Out of scope, and why")
    caption = "What this test covers, by paragraph of the opinion"
    table = make_table("coverage", caption, head, rows)
    return Section("coverage", "What is in scope and what is not", (table,))
