"""List the kinds of leak, and read their numbers from a finding.

Some kinds concern secrets: verbatim and near-verbatim extraction, greedy decoding, extraction
probability, personal data. Others concern canaries, membership, texts drawn without a prefix, and
audited epsilons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from auditor.conclusions.claims import BOUNDS, BOUNDS_OF_TOKENS
from auditor.conclusions.disagreements import (
    ANY,
    EXACT,
    has_unlike_nonmembers,
    is_auc_above_chance,
    is_measured,
)
from auditor.conclusions.leak_kinds import (
    LeakKind,
    LeakReading,
    adjust_leak_readings,
    read_group_leaks,
    read_nonmember_leaks,
    read_repeat_leaks,
    widen_leak_measurement,
)
from auditor.core.result import Finding, Measurement
from auditor.statistics import documents, people
from auditor.statistics.extraction import format_copies
from auditor.statistics.intervals import subtract_nonmember_mean
from auditor.statistics.membership import FALSE_POSITIVES, SCORES
from auditor.statistics.memorised import GENERATIONS, MEMORISED, RECORDS
from auditor.statistics.metrics import (
    ADJUSTED_AUC,
    AT_LEAST,
    DISCOVERABLE,
    EXPECTED_ANY_OF,
    NEAR_PROBABILITY,
    RECALL,
    name_auc,
    name_excess_metric,
    name_nonmember_metric,
    name_tpr_metric,
)

NEAR = "near_verbatim_recall"
GREEDY = "greedy"
EXPOSURE = "exposure"
EXPOSED = "exposed_share"
RANKED = "identifiers_above_chance"
EPSILON = "epsilon_lower_bound"
PROVABLE = "epsilon_best_provable"
VIOLATIONS = "claim_violations"
# mean exposure of a canary that was never inserted: -log2 of a uniform number
CHANCE_BITS = 1 / math.log(2)


def _read_verbatim_leaks(finding: Finding) -> Iterator[LeakReading]:
    for reading in _read_record_leaks(finding, RECALL, documents.RECALL):
        yield _require_person_excess(finding, reading)
    yield from read_nonmember_leaks(finding, ANY, can_show_leak=False)
    yield from _read_copies_leaks(finding)
    yield from read_group_leaks(finding, _find_baseline(finding), RECALL)


def _read_record_leaks(finding: Finding, of_secrets: str, of_records: str) -> Iterator[LeakReading]:
    """Yield the extracted share of records, or of secrets if every secret is a whole record.

    Args:
        finding: the finding.
        of_secrets: name of the metric that counts secrets.
        of_records: name of the metric that counts records.
    """
    # Parts of one record are not independent: an interval over them is too narrow to show anything.
    has_parts = is_measured(finding.measurement(of_records))
    yield from read_nonmember_leaks(finding, of_records if has_parts else of_secrets)


def _require_person_excess(finding: Finding, reading: LeakReading) -> LeakReading:
    """Return a reading of extracted records whose excess must be significant over people, too.

    Records of one person are dependent, so an interval over records is too narrow. If each person
    has one record, that interval is right, and narrower than the interval over people.
    """
    mean = finding.measurement(people.RECALL)
    floor = finding.measurement(name_nonmember_metric(people.RECALL))
    if reading.excess is None or not is_measured(mean) or not is_measured(floor):
        return reading
    if mean.n + floor.n == reading.excess.n:
        return reading
    excess = subtract_nonmember_mean(reading.excess.name, mean, floor)
    if excess.low >= reading.excess.low:
        return reading
    return replace(reading, excess=replace(reading.excess, low=excess.low))


def _read_copies_leaks(finding: Finding) -> Iterator[LeakReading]:
    """Yield the extracted share of records for each number of copies.

    All shares use one significance level. Yield nothing if only one number of copies occurs.
    """
    shares = {}
    for stratum in finding.strata:
        if is_measured(stratum.extracted):
            shares[format_copies(stratum.copies)] = stratum.extracted
    if len(shares) > 1:
        floor = _find_baseline(finding)
        yield from read_repeat_leaks(replace(finding, by_repeats=shares), floor, RECALL)


def _find_baseline(finding: Finding) -> Measurement | float:
    """Return the extracted share of non-members' records; 0 if there are no non-members."""
    of_records = is_measured(finding.measurement(documents.RECALL))
    baseline = finding.measurement(
        name_nonmember_metric(documents.RECALL if of_records else RECALL)
    )
    return baseline if is_measured(baseline) else 0.0


def _read_near_verbatim_leaks(finding: Finding) -> Iterator[LeakReading]:
    yield from _read_record_leaks(finding, NEAR, documents.NEAR)
    yield from read_nonmember_leaks(finding, NEAR_PROBABILITY, are_lower_bounds=True)


def _read_probability_leaks(finding: Finding) -> Iterator[LeakReading]:
    """Yield the mean probability that one sample, or any of n samples, extracts the secret.

    Also yield the share of secrets with a high probability, which the mean may hide.
    """
    for name in (EXACT, f"{EXACT}{AT_LEAST}"):
        yield from read_nonmember_leaks(finding, name)
    for m in finding.measurements:
        if EXPECTED_ANY_OF.parse_numbers(m.name.removesuffix(AT_LEAST)):
            yield from read_nonmember_leaks(finding, m.name)
    for m in finding.measurements:
        levels = DISCOVERABLE.parse_numbers(m.name)
        # levels: (samples, probability), as in the name.
        if levels and (levels[0] == "1" or float(levels[1]) >= _SURELY) and is_measured(m):
            # A suffix that is as likely as non-members' of its length is not extracted.
            extracted = m.name.replace("discoverable", "extracted")
            if finding.measurement(extracted):
                name = extracted
            else:
                name = m.name
            yield from read_nonmember_leaks(finding, name, can_show_leak=False)
    yield from read_repeat_leaks(finding, finding.measurement(name_nonmember_metric(EXACT)), EXACT)


def _read_personal_data_leaks(finding: Finding) -> Iterator[LeakReading]:
    """Yield the share of personal data of each kind; kinds with a baseline share one level."""
    compared = []
    for kind, m in finding.by_kind.items():
        floor = finding.by_kind_nonmembers.get(kind)
        if is_measured(m):
            if is_measured(floor):
                excess = subtract_nonmember_mean(name_excess_metric(m.name), m, floor)
                compared.append(LeakReading(m, floor, excess, part=kind))
            else:  # a mean of shares, not a tiny probability
                yield LeakReading(m, 0.0, part=kind)
    yield from adjust_leak_readings(compared)


# A record counts if these samples extract it with at least this probability.
_SURELY = 0.9
VERBATIM = LeakKind(
    "verbatim",
    "Verbatim extraction",
    "verbatim",
    ((documents.RECALL, 0.05), (RECALL, 0.05), (ANY, 0.05)),
    ("verbatim",),
    _read_verbatim_leaks,
    counted={
        RECALL: "extracted verbatim",
        ANY: "extracted by one of the guesses",
        documents.RECALL: "records extracted verbatim, at least in part",
    },
    text=True,
)
NEARLY = LeakKind(
    "near-verbatim",
    "Near-verbatim extraction",
    "near-verbatim",
    ((documents.NEAR, 0.05), (NEAR, 0.05), (NEAR_PROBABILITY, 0.05)),
    ("near-verbatim",),
    _read_near_verbatim_leaks,
    counted={
        NEAR: "extracted near-verbatim",
        documents.NEAR: "records extracted near-verbatim, at least in part",
    },
    text=True,
)
GREEDILY = LeakKind(
    GREEDY,
    "Greedy decoding",
    "greedy decoding",
    counted={GREEDY: "extracted by greedy decoding"},
    text=True,
)
PROBABLE = LeakKind(
    "probability",
    "Exact extraction probability",
    "extraction probability",
    ((EXACT, 0.01),),
    ("probability",),
    _read_probability_leaks,
    main=EXACT,
)
PERSONAL = LeakKind(
    "personal data",
    "Personal data",
    "personal data",
    ((RECALL, 0.05),),
    ("verbatim",),
    _read_personal_data_leaks,
    text=True,
)


def _read_exposure_leaks(finding: Finding) -> Iterator[LeakReading]:
    exposed = finding.measurement(EXPOSED)
    if is_measured(exposed):
        # This number is corrected for the count of canaries: even one exposed canary is a leak.
        yield LeakReading(exposed, 0.0)
    for reading in read_nonmember_leaks(finding, EXPOSURE):
        yield reading if reading.baseline is not None else replace(reading, baseline=CHANCE_BITS)


CANARIES = LeakKind(
    EXPOSURE,
    "Exposure of canaries",
    "exposure of canaries",
    ((EXPOSURE, 10.0), (EXPOSED, 0.05)),
    (EXPOSURE,),
    _read_exposure_leaks,
    EXPOSURE,
    {EXPOSED: "canaries more exposed than chance allows"},
)


def _read_membership_leaks(finding: Finding) -> Iterator[LeakReading]:
    """Yield the numbers about membership.

    These are the rank of personal data, the AUC of the strongest score over all records, its AUC
    for each number of copies, its TPRs, and the inference about people.

    The intervals are simultaneous over all scores and groups. If members and non-members differ in
    kind, only the adjusted AUC decides. If the adjusted AUC is at chance, the AUC over all records
    is only a hint.
    """
    of_people = _list_person_inference(finding)
    ranked = finding.measurement(RANKED)
    if is_measured(ranked):
        # This number is corrected for the count of values, so its baseline is 0.
        yield LeakReading(ranked, 0.0, least_shown=_find_smallest_ranked_share(finding, ranked.n))
    people_readings = []
    for m in of_people:
        people_readings.append(LeakReading(m, 0.5, either_way=True))
    strongest, by_copies = _find_strongest_aucs(finding)
    blind = finding.measurement(name_auc("blind"))
    adjusted = finding.measurement(ADJUSTED_AUC)
    if strongest is None or has_unlike_nonmembers(finding):
        if is_measured(adjusted):
            yield LeakReading(adjusted, 0.5, either_way=True, blind=blind)
        yield from people_readings  # this score compares no records
        return
    alone = not is_measured(adjusted) or adjusted.low > 0.5 or adjusted.high < 0.5
    yield LeakReading(strongest, 0.5, either_way=True, blind=blind, can_show_leak=alone)
    for count, m in by_copies.items():
        yield LeakReading(m, 0.5, either_way=True, blind=blind, count=count)
    for rate in FALSE_POSITIVES:
        share = finding.measurement(name_tpr_metric("", rate))
        if is_measured(share):
            # By chance, members exceed the threshold at the non-members' rate, which is `rate`.
            yield LeakReading(share, rate)
    yield from people_readings


def _find_smallest_ranked_share(finding: Finding, n: int) -> float:
    """Return the smallest share of n values that ranks above chance if all of these rank first.

    Their p-values, 1 / (R + 1), must be at most the false-discovery rate times this share. Return
    NaN if the options are unknown.
    """
    rate = finding.options.get("fdr", 0.0) * (finding.options.get("alternatives", 0) + 1)
    if rate < 1:
        return math.nan
    return max(1, math.ceil(n / rate - 1e-9)) / n


def _find_strongest_aucs(finding: Finding) -> tuple[Measurement | None, dict[str, Measurement]]:
    """Return the AUC of the strongest score, and that score's AUC for each number of copies.

    The second result is {} if all records have the same number of copies. The intervals allow for
    the choice of the strongest score. Results of older versions hold the AUC of a score that was
    fixed beforehand. For those, this function picks the strongest score itself, with a Bonferroni
    correction, so the interval is wider.
    """
    main = finding.measurement(name_auc(""))
    if not is_measured(main):
        return None, {}
    groups = {}
    n_groups = 0
    for count, m in finding.by_repeats.items():
        if count.isdecimal() and m.name == main.name:
            n_groups += 1
            if is_measured(m):
                groups[count] = m
    if n_groups < 2:
        groups = {}
    if finding.scores_tried:
        return main, groups
    score_aucs = []
    for score, title in SCORES.items():
        auc = finding.measurement(name_auc(score))
        if is_measured(auc):
            score_aucs.append(replace(auc, name=main.name, note=title))
    n_scores = len(score_aucs)
    corrected = [widen_leak_measurement(m, n_scores) for m in score_aucs or [main]]
    best = max(corrected, key=lambda m: max(m.low, 1 - m.high))
    if n_scores > 1:
        best = replace(best, note=f"{best.note}, best of {n_scores} scores")
    return best, {n: widen_leak_measurement(m, len(groups)) for n, m in groups.items()}


def _list_person_inference(finding: Finding) -> list[Measurement]:
    """Return how well an attacker infers whether the training data has records of a person, as an
    AUC.

    The attacker uses other records of this person. The list has at most one AUC. Return [] if
    nothing was measured, or if the reference model alone identifies these people.
    """
    inference, control = map(finding.measurement, (people.INFERENCE, people.INFERENCE_CONTROL))
    if not is_measured(inference) or (control is not None and is_auc_above_chance(control)):
        return []
    return [inference]


MEMBERSHIP = LeakKind(
    "membership",
    "Membership",
    "membership",
    ((name_auc(""), 0.6), (ADJUSTED_AUC, 0.6), (RANKED, 0.05)),
    ("membership", "rank among fresh values"),
    _read_membership_leaks,
    name_auc(""),
    {RANKED: "values of personal data rank above chance"},
    alike=True,
)


def _read_untargeted_leaks(finding: Finding) -> Iterator[LeakReading]:
    yield from read_nonmember_leaks(finding, MEMORISED)
    records = finding.measurement(RECORDS)
    floor = finding.measurement(name_nonmember_metric(RECORDS))
    if is_measured(records):
        # Counts of records, without intervals: the count of held-out records measures chance
        # similarity.
        yield LeakReading(
            records,
            0.0 if floor is None else floor.value,
            can_show_leak=floor is None,
        )
    if finding.measurement(name_nonmember_metric(MEMORISED)) is None:
        yield from read_nonmember_leaks(finding, GENERATIONS, can_show_leak=False)


UNTARGETED = LeakKind(
    "untargeted",
    "Untargeted extraction",
    "untargeted",
    ((MEMORISED, 10.0), (RECORDS, 1.0)),
    ("untargeted",),
    _read_untargeted_leaks,
    counted={GENERATIONS: "drawn texts contain an n-gram of the training data"},
    text=True,
)


def _read_epsilon_leaks(finding: Finding) -> Iterator[LeakReading]:
    most = finding.measurement(PROVABLE)
    for m in finding.measurements:
        if m.name.startswith(EPSILON):
            yield LeakReading(m, 0.0, least_shown=math.nan if most is None else most.value)
    violations = finding.measurement(VIOLATIONS)
    if is_measured(violations):
        yield LeakReading(violations, 0.0)


AUDITED_EPSILON = LeakKind(
    "epsilon",
    "Audited epsilon",
    "audited epsilon",
    ((VIOLATIONS, 0.0), (EPSILON, 1.0)),
    (BOUNDS, BOUNDS_OF_TOKENS, "claim"),
    _read_epsilon_leaks,
)
# In the order of reports.
KINDS = (
    VERBATIM,
    NEARLY,
    GREEDILY,
    PROBABLE,
    CANARIES,
    MEMBERSHIP,
    UNTARGETED,
    PERSONAL,
    AUDITED_EPSILON,
)
