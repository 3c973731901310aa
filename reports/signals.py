"""Describe a run's leak signals (`conclusions.signals`) as sentences, lists and a table.

A leak signal is a measured number of one kind of leak on one model. The texts say which signals are
shown (significant), which are not shown up to a bound, and which are not tested.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import filterfalse, groupby

from auditor.conclusions import signals
from auditor.conclusions.leak_kinds import LeakKind
from auditor.conclusions.leak_readings import (
    EPSILON,
    GREEDILY,
    PERSONAL,
    PROBABLE,
    VIOLATIONS,
)
from auditor.conclusions.signals import LeakAssessment, LeakSignal, assess_leak_signals
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Doubt, Measurement
from auditor.reports import personal, phrases
from auditor.reports.blocks import Block, Bullets, Forest, ForestSpan, Group, Table
from auditor.reports.topics import build_forest_span
from auditor.statistics.memorised import RECORDS
from auditor.statistics.metrics import (
    ADJUSTED_AUC,
    DISCOVERABLE,
    EXPECTED_ANY_OF,
    EXTRACTED,
    SHARES,
    name_auc,
)
from auditor.statistics.roc import AUC

NEVER_DRAWN = "this decoding draws none of these suffixes; another may"
_UNITS = {"bits": " bits", "nats": " nats", "per 1,000": " per 1,000"}
_HEAD = ("Signal", "Measured", "Baseline", "Result")
_RESULTS = {signals.SHOWN: "leak shown", signals.NOT_SHOWN: "no leak shown"}
GLOSSARY = (
    (
        "Picture",
        "dot: the measured number; bar: its two-sided 95% interval, corrected for several tests; "
        "ring: the baseline",
    ),
    (
        "Baseline",
        "the same attack on records that were never trained on (non-members), or chance",
    ),
    (
        "Shown",
        "significantly above the baseline; for greedy decoding one record is enough, unless some "
        "non-member is recited",
    ),
    ("Text-only", "the attacker sees only tokens from ancestral sampling, as an API gives them"),
    ("White-box", "the attacker also has gradients and log-probabilities and sets the decoding"),
    ("PPL", "perplexity on held-out text; lower is more useful"),
    ("Excess", "members minus non-members"),
)


# --- one signal ---


def describe_signal_number(signal: LeakSignal) -> str:
    """Return `166/320 (52% [46–57]) extracted verbatim` or `membership AUC 0.642 [0.577–0.704]`."""
    m = signal.measured
    assert m is not None  # callers pass tested signals only
    if is_excess_decisive(signal):
        # Drop its interval: the deciding interval is next to the baseline.
        m = replace(m, low=math.nan, high=math.nan)
    if signal.kind is PERSONAL:
        return f"{personal.format_personal_kind(signal.part)} {phrases.format_counted_share(m)}"
    if signal.count:
        part = f"of records trained on {format_count(int(signal.count), 'time')}"
    else:
        part = signal.part
    at = f", {part}" if part else ""
    if m.name in signal.kind.counted:
        return f"{phrases.format_share(m)} {signal.kind.counted[m.name]}{at}"
    if m.name == RECORDS:
        records = format_count(round(m.value), "training record")
        return f"{records} in {format_count(m.n, 'drawn text')}"
    if m.name.startswith(EPSILON):
        return f"audited ε at least {phrases.format_number(m.value)}"
    if m.name == VIOLATIONS:
        return (
            f"its claim is VIOLATED {format_count(round(m.value), 'time')} in "
            f"{format_count(m.n, 'query', 'queries')}"
        )
    if tries := EXPECTED_ANY_OF.parse_numbers(m.name):
        samples = format_count(int(tries[0]), "sample")
        lengths = phrases.format_suffix_lengths(m)
        share = phrases.format_measurement_value(m)
        return f"{samples} per member would extract {share} of members{lengths}"
    if surely := DISCOVERABLE.parse_numbers(m.name) or EXTRACTED.parse_numbers(m.name):
        samples = format_count(int(surely[0]), "sample")
        sure = phrases.format_percent(float(surely[1]))
        return (
            f"{phrases.format_share(m)} extracted by {samples} with a probability of "
            f"{sure}% or more"
        )
    chosen = ""
    if m.name in (name_auc(""), ADJUSTED_AUC) and m.note:
        chosen = f" ({m.note})"
    name = phrases.lower_first(phrases.format_metric(m.name))
    number = f"{name} {phrases.format_measurement_value(m)}"
    return f"{number}{chosen}{phrases.format_suffix_lengths(m)}{at}"


def is_excess_decisive(signal: LeakSignal) -> bool:
    """Test if a signal shows no leak, and its difference from non-members (`excess`) decided this.

    If a leak is shown, the signal's own interval decided, so return False.
    """
    return signal.status == signals.NOT_SHOWN and signal.excess is not None


def format_suspicion(signal: LeakSignal) -> str:
    """Return why a suspected leak is not shown: not significant, or only a hint."""
    if signal.can_show_leak:
        return "not significant"
    return "only a hint: this number alone cannot show a leak"


def format_corrected_interval(signal: LeakSignal) -> str:
    """Return `interval corrected for 5 tests`, or "" if not corrected."""
    if signal.n_tests > 1:
        return f"interval corrected for {signal.n_tests} tests"
    return ""


def describe_signal_baseline(signal: LeakSignal) -> str:
    """Return a signal's baseline: `non-members 0/160`, or `chance 0.5, blind baseline 0.52`.

    If the baseline is missing, say so.
    """
    b = signal.baseline
    if isinstance(b, Measurement):
        return f"non-members {_format_baseline(b)}{_format_difference(signal)}"
    if b is None:
        return "not compared with non-members"
    if signal.blind:
        blind = f", blind baseline {phrases.format_value(signal.blind)}"
    else:
        blind = ", no blind baseline"
    if b:
        return f"chance {phrases.format_number(b)}{blind if signal.kind.alike else ''}"
    return ""


def _bracket_text(text: str) -> str:
    return f" ({text})" if text else ""


def describe_signal_kind(of_a_kind: Sequence[LeakSignal]) -> str:
    """Describe a model's signals of one kind, at text-only and white-box access together.

    `none of 60 extracted verbatim, text-only or white-box (up to 6% not ruled out)`
    """
    shown_signals = []
    suspected = []
    settings = []
    for s in of_a_kind:
        if s.status == signals.SHOWN:
            shown_signals.append(s)
        if s.suspected:
            suspected.append(s)
        if s.setting:
            settings.append(s.setting)
    if shown_signals or suspected:
        best = pick_strongest_signal(shown_signals or suspected)
        access = f", {best.setting}" if best.setting else ""
        remarks = (
            "" if shown_signals else format_suspicion(best),
            describe_signal_baseline(best),
            format_corrected_interval(best),
        )
        remark = "; ".join(filter(None, remarks))
        return f"{describe_signal_number(best)}{access}{_bracket_text(remark)}"
    access = f", {' or '.join(settings)}" if settings else ""
    worst = max(of_a_kind, key=lambda s: s.measured.high if s.measured else 0.0)
    m = worst.measured
    assert m is not None  # it was tested
    if m.name == VIOLATIONS:
        return f"no violation of its claim in {format_count(m.n, 'query', 'queries')}"
    if not all(map(_has_empty_count, of_a_kind)):
        # no bound: the number itself
        never = ""
        if m.name == PROBABLE.main and m.value == 0:
            never = f"; {NEVER_DRAWN}"
        corrected = format_corrected_interval(worst)
        never += f"; {corrected}" if corrected else ""
        baseline = describe_signal_baseline(worst)
        if worst.baseline is None:
            compared = baseline
        else:
            compared = f"not above {baseline or 'zero'}"
        return f"{describe_signal_number(worst)}{access} ({compared}{never})"
    subject = f"{worst.kind.counted[m.name]}{access}"
    return f"none of {m.n:,} {subject} (up to {phrases.format_percent(m.high)}% not ruled out)"


def format_upper_bound(signal: LeakSignal) -> str:
    """Return the upper limit of a signal that found no secret: `verbatim up to 6.0% (0/60)`."""
    m = signal.measured
    assert m is not None  # it was tested
    if signal.kind is PERSONAL:
        title = personal.format_personal_kind(signal.part)
    else:
        title = signal.kind.short
    return f"{title} up to {phrases.format_percent(m.high)}% (0/{m.n:,})"


def format_still_possible(assessment: LeakAssessment, target: str) -> str:
    """Return `still possible: verbatim up to 6.0% (0/60)`, or "" if no count of secrets is zero.

    Name only the first kind of leak with a zero count, and this kind's highest upper limit.
    """
    zero_signals = list(filter(_has_empty_count, assessment.list_tested_signals(target)))
    if not zero_signals:
        return ""
    first = group_signals(zero_signals)[0]
    widest = max(first, key=lambda s: s.measured.high if s.measured else 0.0)
    return f"still possible: {format_upper_bound(widest)}"


def _has_empty_count(signal: LeakSignal) -> bool:
    m = signal.measured
    return m is not None and m.name in signal.kind.counted and m.value == 0


def suggest_gate_command(
    assessment: LeakAssessment, target_signals: Sequence[LeakSignal], run: str
) -> str:
    """Return a command for a gate that checks these signals of one model in later runs.

    Add --target unless the gate would check this model anyway. run: the name of the gated run.
    """
    targets = set(assessment.targets)
    judged = targets - {UNDEFENDED} or targets
    target = target_signals[0].target
    only = ""
    if judged != {target}:
        only = f" --target {shlex.quote(target)}"
    # Quote the parentheses of rules such as `recall(kind=card)`, which a shell would interpret.
    limits = " ".join(f"--max {shlex.quote(signal.gate_rule)}" for signal in target_signals)
    return f"audit gate {run} {limits}{only}"


def pick_strongest_signal(signals: Sequence[LeakSignal]) -> LeakSignal:
    """Return the strongest of several signals, all of one kind of leak."""

    def strength(signal: LeakSignal) -> float:
        m = signal.measured
        assert m is not None  # it was tested
        # An AUC below 1/2 separates members too, with the score reversed.
        return abs(m.value - 0.5) if m.unit == AUC else m.value

    return max(signals, key=strength)


# --- one target ---


def format_no_leakage(assessment: LeakAssessment, target: str) -> str:
    """Return the sentence that no leak was found.

    Call this only if `LeakAssessment.shows_no_leakage` is true of this target.
    """
    if assessment.list_tested_signals(target) != assessment.list_target_signals(target):
        return "no leakage seen in what was tested"
    return "no leakage seen"


def group_signals(signals: Sequence[LeakSignal]) -> list[list[LeakSignal]]:
    # groupby joins only neighbours; an assessment has a target's signals kind by kind.
    return [list(group) for _, group in groupby(signals, key=lambda s: s.kind.name)]


def format_proof(signals: Sequence[LeakSignal], suspected: Sequence[LeakSignal]) -> str:
    """Return the strongest number, and the names of the other signals.

    `14% verbatim, white-box; also near-verbatim`
    """
    first, *others = group_signals(signals)
    best = pick_strongest_signal(first)
    kinds = {best.kind}
    also = []
    for group in others:
        kinds.add(group[0].kind)
        if group[0].kind is not PERSONAL:  # the reason mentions personal data separately
            also.append(group[0].kind.short)
    few = []
    for group in group_signals(suspected):
        if group[0].kind not in kinds:
            few.append(group[0].kind.short)
    access = f", {best.setting}" if best.setting else ""
    parts = [f"{_format_brief_number(best)}{access}"]
    if also:
        parts.append(f"also {', '.join(also)}")
    if few:
        parts.append(f"not significant: {', '.join(few)}")
    return "; ".join(parts)


def _format_brief_number(signal: LeakSignal) -> str:
    """Return a number in few words: `14% verbatim`, `names 21%`, `membership AUC 0.642`."""
    m = signal.measured
    assert m is not None  # a signal that was tested
    if signal.kind is PERSONAL:
        return f"{personal.format_personal_kind(signal.part)} {phrases.format_value(m)}"
    if m.name in signal.kind.counted and signal.kind.text:
        by = "by " if signal.kind is GREEDILY else ""
        return f"{phrases.format_value(m)} {by}{signal.kind.short}"
    brief = replace(m, low=math.nan, high=math.nan, note="")
    return describe_signal_number(replace(signal, measured=brief))


def format_least_detectable(signal: LeakSignal) -> str:
    """Return the smallest number that would have shown a leak: `3.1%`, `0.56`, `all 4`."""
    m = signal.measured
    if m is None or signal.status != signals.NOT_SHOWN or not signal.can_show_leak:
        return phrases.NOTHING
    # No share and no AUC is above 1. NaN: not even all of the records would be enough.
    if m.unit in (*SHARES, AUC) and not signal.smallest_detectable <= 1:
        return "no value of so few records"
    if math.isnan(signal.smallest_detectable):
        return phrases.NOTHING
    if m.unit in SHARES and signal.smallest_detectable == 1:
        return f"all {m.n:,}"
    text = phrases.format_value(
        Measurement(m.name, signal.smallest_detectable, math.nan, math.nan, m.n, m.unit)
    )
    return f"{text}{_UNITS.get(m.unit, '')}"


def group_untested_kinds(
    assessment: LeakAssessment,
) -> dict[tuple[str, ...], list[LeakKind]]:
    """Return untested kinds of leak, keyed by the models on which these kinds are untested.

    The key () means every model.
    """
    measured = list(filter(assessment.list_tested_signals, assessment.targets))
    tested: dict[LeakKind, set[str]] = {}
    for s in assessment.signals:
        targets = tested.setdefault(s.kind, set())
        if s.status != signals.NOT_TESTED:
            targets.add(s.target)
    everywhere = []
    kinds_by_targets: dict[tuple[str, ...], list[LeakKind]] = {}
    for kind, targets in tested.items():
        missing = tuple(filterfalse(targets.__contains__, measured))
        if not targets:
            everywhere.append(kind)
        elif missing:
            kinds_by_targets.setdefault(missing, []).append(kind)
    return {(): everywhere, **kinds_by_targets} if everywhere else kinds_by_targets


def list_doubts(assessment: LeakAssessment) -> tuple[Doubt, ...]:
    """Return all models' distinct reasons to distrust the result, contradictions first."""
    doubts: list[Doubt] = []
    for doubts_by_target in (assessment.contradictions, assessment.doubts):
        for name in assessment.targets:
            doubts += doubts_by_target.get(name, ())
    return tuple(dict.fromkeys(doubts))


def list_doubt_sentences(assessment: LeakAssessment) -> tuple[str, ...]:
    """Return the doubts as sentences that can follow each other."""
    sentences = []
    for doubt in list_doubts(assessment):
        sentence = doubt.sentence
        if doubt.kind == "text form":  # written as the end of a line
            sentence = f"{sentence[:1].upper()}{sentence[1:].removesuffix('.')}."
        sentences.append(sentence)
    return tuple(sentences)


# --- the section ---


def _draw_signals_forest(result: AuditResult, assessment: LeakAssessment) -> Forest:
    """Return a forest plot with a row per signal, grouped by model."""
    groups = []
    spans = []
    for target in assessment.targets:
        # Merge signals that differ only in their access into one row.
        settings: dict[tuple[str, ...], list[LeakSignal]] = {}
        for signal in assessment.list_tested_signals(target):
            settings.setdefault(_build_signal_table_row(signal), []).append(signal)
        rows = []
        for (title, *cells), merged in settings.items():
            access = " or ".join(filter(None, (signal.setting for signal in merged)))
            rows.append((f"{title}, {access}" if access else title, *cells))
            spans.append(_signal_forest_span(merged[0]))
        if rows:
            groups.append(Group(phrases.title_target_costs(result, target), rows))
    caption = "95% intervals against the baseline"
    table = Table("signals-table", caption, _HEAD, tuple(groups), {1, 2})
    reach = max((max(span.high, span.floor or 0.0) for span in filter(None, spans)), default=1.0)
    # The scale ends at the next tenth: most shares are small.
    return Forest(table, tuple(spans), high=max(1, math.ceil(10 * reach)) / 10)


def list_untested_signals(
    result: AuditResult, assessment: LeakAssessment
) -> Iterator[tuple[str, str]]:
    """Yield (suffix, kinds): models such as ` on PMixED`, and the kinds of leak not tested on them.

    The suffix is "" for kinds that no model was tested for. Each kind has the attack that would
    test it, or the reason why this attack did not run.
    """
    for targets, untested in group_untested_kinds(assessment).items():
        labels = []
        for kind in untested:
            # The attacks on verbatim text measure personal data, and are listed for verbatim.
            methods = (
                () if kind is PERSONAL else result.list_measuring_methods(*kind.measured_by[:1])
            )
            # Give the reason for a planned test that did not run; else advise the test.
            reasons = dict[str, None]()  # an ordered set
            for s in assessment.signals:
                if s.kind is kind and s.target in (targets or assessment.targets) and s.reason:
                    reasons[s.reason] = None
            flags = ""
            if methods:
                flags = f"--attack {' or '.join(methods)}"
            labels.append(f"{kind.short}{_bracket_text('; '.join(reasons) or flags)}")
        titles = dict.fromkeys(phrases.title_target(result, target) for target in targets)
        yield f" on {', '.join(titles)}" if titles else "", ", ".join(labels)


def _build_signal_table_row(s: LeakSignal) -> tuple[str, ...]:
    """Return the table row of a signal: name, number, baseline, and whether a leak is shown."""
    is_personal = s.kind is PERSONAL
    if is_personal:
        title = personal.title_personal_kind(s.part)
    else:
        title = s.kind.short
    status = format_suspicion(s) if s.suspected else _RESULTS[s.status]
    difference = _format_difference(s)
    least = format_least_detectable(s)
    would = ""
    if least != phrases.NOTHING:
        would = f"; {least} would show one"
        if s.suspected:
            would = f"; {least} would be significant"
    title = f"{title[:1].upper()}{title[1:]}"
    return (
        title,
        _format_measured_signal(s),
        _format_baseline(s.baseline),
        f"{status}{difference}{would}",
    )


def _format_measured_signal(s: LeakSignal) -> str:
    """Return a signal's number; omit the metric's name if the kind of leak implies this name."""
    m = s.measured
    assert m is not None  # it was tested
    if is_excess_decisive(s) and m.value:
        m = replace(m, low=math.nan, high=math.nan)
    corrected = _bracket_text(format_corrected_interval(s))
    if s.kind is PERSONAL:
        return phrases.format_counted_share(m) + corrected
    if s.count or s.n_tests > 1 or not (m.name in s.kind.counted or m.name == s.kind.main):
        return describe_signal_number(s) + corrected
    if m.unit == "share":
        return phrases.format_share(m)
    chosen = ""
    if m.name in (name_auc(""), ADJUSTED_AUC) and m.note:
        chosen = f" ({m.note})"
    unit = _UNITS.get(m.unit, "")
    title = "AUC " if m.unit == AUC else ""
    number = f"{title}{phrases.format_measurement_value(m)}{unit}"
    return f"{number}{chosen}{phrases.format_suffix_lengths(m)}"


def _format_difference(signal: LeakSignal) -> str:
    """Return `, difference 3.3 points [−1.9 to 11.2]` if `is_excess_decisive`, else ""."""
    if not is_excess_decisive(signal) or _has_empty_count(signal):
        return ""
    assert signal.excess is not None  # it decides
    return f", difference {phrases.format_difference(signal.excess)}"


def _format_baseline(b: Measurement | float | None) -> str:
    if isinstance(b, Measurement):
        if b.unit == "share":
            return f"{b.hits:,}/{b.n:,}"
        return phrases.format_value(b)
    if b is None:
        return phrases.NOTHING
    return phrases.format_number(b)


def _signal_forest_span(s: LeakSignal) -> ForestSpan | None:
    m = s.measured
    b = s.baseline
    if m is None or m.unit not in ("share", "probability"):
        return None
    if is_excess_decisive(s) and isinstance(b, Measurement) and s.excess is not None and m.value:
        # The bar then reaches the non-members' ring, as the interval of the difference reaches 0.
        m = replace(m, low=max(0.0, b.value + s.excess.low), high=min(1.0, b.value + s.excess.high))
    return build_forest_span(m, b.value if isinstance(b, Measurement) else None)


def build_signals_section_blocks(result: AuditResult) -> list[Block]:
    """Return the section with the plot of all signals; [] if nothing was measured."""
    assessment = assess_leak_signals(result)
    tested = any(map(assessment.list_tested_signals, assessment.targets))
    if tested:
        return build_signal_blocks(result, assessment)
    return []


def build_signal_blocks(result: AuditResult, assessment: LeakAssessment) -> list[Block]:
    """Return a forest plot of all signals, and a list of the untested signals."""
    untested = list_untested_signals(result, assessment)
    items = [f"Not tested{on}: {text}." for on, text in untested]
    return [_draw_signals_forest(result, assessment), Bullets(items)]
