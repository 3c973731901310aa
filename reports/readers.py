"""The HTML report: one page for three readers, whoever decides, whoever mends the model and whoever checks the method.

Takes the sections of `contents.document` and adds what a run knows secret by secret and against another run. Knows the
records and the words; not how a block is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from auditor.core.nouns import Claim
from auditor.core.result import AuditResult, Finding, Measurement, TargetRecord
from auditor.gate.compare import Comparison
from auditor.records import details as detailed
from auditor.records.details import Details, Reliability, RowDetails
from auditor.records.texts import Text
from auditor.reports import changes, inert, secrets, words
from auditor.reports.blocks import (
    Block,
    Document,
    Figure,
    Figures,
    Forest,
    Group,
    Paragraph,
    Point,
    Section,
    Series,
    Span,
    Table,
)
from auditor.reports.contents import document
from auditor.reports.verdict import answers, strongest
from auditor.statistics.exposure import null_band
from auditor.statistics.extraction import any_of

DECIDE, MEND, CHECK = "For the decision", "For mending the model", "For checking the method"
_BEFORE = "Since the last run"
_RESEARCH_PLOTS = ("errors", "any_of_n")
_POSITIONS = 400  # of a suffix that the figure of token positions shows


def page(
    result: AuditResult,
    details: Details | None = None,
    since: Comparison | None = None,
    texts: Mapping[str, Text] | None = None,
) -> Document:
    """The whole page. since: another run and this one, in that order. texts: the private text to show, by secret."""
    details = details or Details()
    base = document(result, texts)
    result = words.cleaned(result)
    known = {section.id: section for section in base.sections}
    where = known["where"].blocks if "where" in known else ()
    made: list[tuple[str, str, str, Sequence[Block]]] = [
        (DECIDE, "glance", "At a glance", _glance(result)),
        (DECIDE, "since", _BEFORE, _since(since) if since else ()),
        (DECIDE, "limits", "", ()),
        (MEND, "where", "Where it leaks", [*_figures(where, research=False), *_where(result, details)]),
        (MEND, "secrets", "Secret by secret", _secrets(result, details, texts or {})),
        (MEND, "private", "", ()),
        (CHECK, "results", "", ()),
        (CHECK, "ranking", "Ranking and samples", _figures(where, research=True)),
        (CHECK, "calibration", "Calibration of confidence", _calibration(result, details)),
        (CHECK, "exposure", "Exposure", _exposure(result, details)),
        (CHECK, "tradeoff", "Privacy, utility, leakage", _tradeoff(result)),
        (CHECK, "claims", "Claims and spending", _claims(result)),
        *((CHECK, id, "", ()) for id in ("adversary", "attacked", "targets", "measurements", "reproduce")),
    ]
    sections = []
    for part, id, title, blocks in made:
        if blocks:
            sections.append(Section(id, title, tuple(blocks), part))
        elif not title and id in known:
            sections.append(replace(known[id], part=part))
    facts = (*base.facts, ("Compared with", inert.clean(since.runs[0]))) if since else base.facts
    return replace(
        base,
        facts=facts,
        sections=tuple(sections),
        source="Rendered from the run folder alone",
        answers=(*answers(result), *(((_BEFORE, changes.headline(since)),) if since else ())),
    )


def _figures(blocks: Iterable[Block], research: bool) -> list[Block]:
    """The figures of the Markdown report's one section about leakage, by who asks."""
    figures = [f for block in blocks if isinstance(block, Figures) for f in block.figures]
    wanted = tuple(f for f in figures if (f.plot in _RESEARCH_PLOTS) == research)
    return [Figures(wanted)] if wanted else []


# --- for the decision -------------------------------------------------------------------------------------------------


def _glance(result: AuditResult) -> list[Block]:
    """The strongest row of each target in each setting: an attacker picks."""
    rows, spans = [], []
    for target in result.targets:
        for setting in words.SETTINGS:
            finding = strongest(result, target.name, setting)
            recall = finding.measurement("recall") if finding else None
            if finding is None or recall is None:
                continue
            floor = finding.measurement("recall_nonmembers")
            model, promise = words.row_title(result, finding), _promise(target, finding)
            rows.append((model, words.share(recall), finding.attack, words.value(target.perplexity), promise))
            spans.append(_span(recall, floor.value if floor else None))
    if not rows:
        return []
    caption = "What the strongest attack got out of each model, with 95% intervals"
    head = ("Model", "Came out", "By", "Perplexity", "Covered by the claim")
    table = Table("glance-table", caption, head, (Group("", tuple(rows)),), frozenset({1, 3}))
    note = (
        "The bar spans the interval, the dot is the share itself; an open ring marks what the same attack “completed” "
        "of records that were never trained on. Perplexity is on held-out text: lower is more useful."
    )
    return [Forest(table, tuple(spans)), Paragraph(note)]


def _span(m: Measurement, floor: float | None = None) -> Span | None:
    if any(math.isnan(value) for value in (m.low, m.value, m.high)):
        return None
    return Span(m.low, m.value, m.high, None if floor is None or math.isnan(floor) else floor)


def _promise(target: TargetRecord, finding: Finding) -> str:
    """Whether the claim is about this access and decoding, and of what."""
    if finding.claim_applies is None or target.claim is None:
        return "nothing claimed"
    return f"yes, of its unit: {target.claim.unit}" if finding.claim_applies else "no"


def _since(since: Comparison) -> list[Block]:
    """Every row's change, paired by secret, and its interval on one scale. The last run is this one."""
    deltas = [line.cells[-1].delta for line in changes.ordered(since)]
    spans = tuple(_span(delta) if delta else None for delta in deltas)
    reach = max((abs(end) for span in spans if span for end in (span.low, span.high)), default=0.0) or 1.0
    note = Paragraph(
        "Left of the line in the middle less leaks than before, right of it more; a bar that crosses it shows neither."
    )
    return [Forest(changes.table(since), spans, -reach, reach), note]


# --- for mending the model --------------------------------------------------------------------------------------------


def _seen(details: Details, finding: Finding) -> RowDetails | None:
    return details.rows.get((finding.target, finding.setting, finding.attack))


def _strongest_rows(result: AuditResult, details: Details) -> list[tuple[Finding, RowDetails]]:
    """The row that did best against each target, where its outcomes are kept."""
    found = ((best, _seen(details, best)) for t in result.targets if (best := strongest(result, t.name)))
    return [(finding, seen) for finding, seen in found if seen is not None]


def _titled(result: AuditResult, finding: Finding) -> str:
    return f"{words.row_title(result, finding)} · {finding.attack}"


def _where(result: AuditResult, details: Details) -> list[Block]:
    rows = _strongest_rows(result, details)
    figures = [*_lengths(result, details, rows), *_positions(result, details)]
    return [*([Figures(tuple(figures))] if figures else []), *_groups(result, details, rows)]


def _groups(result: AuditResult, details: Details, rows: Sequence[tuple[Finding, RowDetails]]) -> list[Block]:
    measured = [(finding, detailed.by_group(details, seen)) for finding, seen in rows]
    shown = [(finding, groups) for finding, groups in measured if groups]
    if not shown:
        return []
    tables = tuple(
        Group(_titled(result, f), tuple((inert.clean(name), words.share(m)) for name, m in groups.items()))
        for f, groups in shown
    )
    spans = tuple(_span(m) for _, groups in shown for m in groups.values())
    column = result.plan.get("group_column")
    caption = f"Recall by {column}" if isinstance(column, str) else "Recall by kind of record"
    return [Forest(Table("groups-table", caption, ("Group", "Came out"), tables, frozenset({1})), spans)]


def _lengths(result: AuditResult, details: Details, rows: Sequence[tuple[Finding, RowDetails]]) -> list[Figure]:
    measured = [(finding, detailed.by_length(details, seen)) for finding, seen in rows]
    shown = [(finding, lengths) for finding, lengths in measured if lengths]
    if not shown:
        return []
    series = tuple(
        Series(
            words.target_title(result, f.target), tuple(Point(L, m.value, m.low, m.high) for L, m in lengths.items())
        )
        for f, lengths in shown
    )
    groups = tuple(
        Group(_titled(result, f), tuple((f"{L:,}", words.counted(m), words.bounds(m)) for L, m in lengths.items()))
        for f, lengths in shown
    )
    title = "Recall of the first tokens of a suffix"
    text = (
        "Share of members, of those with a suffix so long, whose first guess is right up to that token, by the "
        "strongest attack on each target."
    )
    head = ("First tokens", "Right", "95% interval")
    table = Table("lengths-table", f"{title}: the numbers", head, groups, frozenset({0, 1, 2}), folded=True)
    return [Figure("lengths", "shares", (), title, text, table, series, ("Tokens from the start", "Recall"))]


def _positions(result: AuditResult, details: Details) -> list[Figure]:
    """Where in the suffix: how likely the true token is at each place, over the members."""
    shown = [(t, _means(details.tokens[t.name].values())) for t in result.targets if details.tokens.get(t.name)]
    if not shown:
        return []
    series = tuple(Series(t.title, tuple(Point(i, p) for i, p in enumerate(means, 1))) for t, means in shown)
    groups = tuple(
        Group(t.title, tuple((f"{i:,}", f"{words.percent(p)}%") for i, p in enumerate(means, 1))) for t, means in shown
    )
    title = "Probability of the true token, by its place in the suffix"
    text = "Mean over the members, each token given all that stands before it: where a continuation gives itself away."
    head = ("Token", "Mean probability")
    table = Table("positions-table", f"{title}: the numbers", head, groups, frozenset({0, 1}), folded=True)
    return [Figure("positions", "shares", (), title, text, table, series, ("Token of the suffix", "Mean probability"))]


def _means(suffixes: Iterable[Sequence[float]]) -> list[float]:
    """Mean probability by position, of the suffixes that reach it."""
    rows = [np.exp(np.array(suffix[:_POSITIONS])) for suffix in suffixes]
    longest = max(map(len, rows), default=0)
    return [float(np.mean([row[i] for row in rows if len(row) > i])) for i in range(longest)]


def _secrets(result: AuditResult, details: Details, texts: Mapping[str, Text]) -> list[Block]:
    block = secrets.block(result, details, texts)
    counts = _counts(result, details)
    return [*counts, *([block] if block else [])]


def _counts(result: AuditResult, details: Details) -> list[Block]:
    """How each row came out over the members: what the list below adds up to."""
    rows = []
    for finding in words.rows(result):
        seen = _seen(details, finding)
        if seen is None or seen.outcome is None:
            continue
        o = seen.outcome.only(seen.outcome.member)
        kinds = (o.hit, o.any_hit & ~o.hit, o.near & ~o.any_hit, ~(o.near | o.any_hit))
        counted = (f"{int(kind.sum()):,}" for kind in kinds)
        rows.append((words.row_title(result, finding), finding.attack, *counted, f"{len(o.ids):,}"))
    if not rows:
        return []
    head = ("Target", "Attack", "Verbatim", "Another guess", "Nearly", "Not", "Members")
    caption = "Members by how they came out of each row"
    return [Table("counts-table", caption, head, (Group("", tuple(rows)),), frozenset({2, 3, 4, 5, 6}))]


# --- for checking the method ------------------------------------------------------------------------------------------


def _calibration(result: AuditResult, details: Details) -> list[Block]:
    shown = [(f, name, r) for f in words.rows(result) for name, r in _reliabilities(result, details, f)]
    if not shown:
        return []
    plain = [one for one in shown if one[0].target == words.UNDEFENDED] or shown  # of all targets too many lines
    series = tuple(Series(name, _reliability_points(r), _kind(f)) for f, name, r in plain)
    groups = tuple(Group(f"{name} · {_kind(f)}: {_quality(r)}", _bins(r)) for f, name, r in shown)
    title = "What a score foretells, and what came true"
    text = (
        "Members' first guesses in ten bins of their score, where it is a probability; below the diagonal it boasts. "
        "Of the probe: the chance that any of the perplexity attack's samples is the secret, and whether one was."
    )
    head = ("Mean score", "Right", "95% interval")
    table = Table("calibration-table", f"{title}: the numbers", head, groups, frozenset({0, 1, 2}), folded=True)
    axes = ("Score", "Share right")
    return [Figures((Figure("calibration-plot", "calibration", (), title, text, table, series, axes),)), _errors(shown)]


def _reliability_points(r: Reliability) -> tuple[Point, ...]:
    return tuple(Point(b.score, b.right.value, b.right.low, b.right.high) for b in r.bins)


def _errors(shown: Sequence[tuple[Finding, str, Reliability]]) -> Table:
    rows = tuple(
        (name, _kind(f), f"{r.n:,}", f"{words.percent(r.error)}%", words.number(r.brier)) for f, name, r in shown
    )
    head = ("Score", "Setting", "Guesses", "Calibration error", "Brier score")
    caption = "How far scores are from what came true (expected calibration error over ten bins)"
    return Table("reliability-table", caption, head, (Group("", rows),), frozenset({2, 3, 4}))


def _kind(finding: Finding) -> str:
    return "worst case" if finding.setting == "worst" else "inside the claim"


def _quality(r: Reliability) -> str:
    return f"calibration error {words.percent(r.error)}%, Brier score {words.number(r.brier)}, n = {r.n:,}"


def _bins(r: Reliability) -> tuple[tuple[str, ...], ...]:
    return tuple((f"{words.percent(b.score)}%", words.counted(b.right), words.bounds(b.right)) for b in r.bins)


def _reliabilities(result: AuditResult, details: Details, finding: Finding) -> list[tuple[str, Reliability]]:
    """Of an attack whose score is a probability; of a sampling attack also what the exact probability foretold."""
    seen = _seen(details, finding)
    if seen is None or seen.outcome is None:
        return []
    title, o, found = words.target_title(result, finding.target), seen.outcome.only(seen.outcome.member), []
    if seen.score_is_probability and len(o.ids):
        found.append((f"{title} · {finding.attack}", detailed.reliability(o.score.clip(max=1.0), o.hit)))
    p = _foretold(details, finding)
    known = np.array([id in p for id in o.ids], dtype=bool)
    if known.any():
        foretold = np.array([p[id] for id in o.ids if id in p])
        name = f"{title} · extraction-probability"
        found.append((name, detailed.reliability(foretold, o.any_hit[known])))
    return found


def _foretold(details: Details, finding: Finding) -> Mapping[str, float]:
    """The exact chance of each secret to be among the attack's samples, where the attack adds no prompt of its own."""
    probe = details.rows.get((finding.target, finding.setting, "extraction-probability"))
    samples = finding.options.get("samples")
    plain = finding.attack == "perplexity" and finding.options.get("search", "sample") == "sample"
    if probe is None or not plain or not isinstance(samples, int):
        return {}
    with np.errstate(divide="ignore"):
        chances = any_of(np.log(np.array(probe.value)), samples)
    return dict(zip(probe.ids, chances.clip(0.0, 1.0).tolist(), strict=True))


def _exposure(result: AuditResult, details: Details) -> list[Block]:
    shown = [(f, values) for f in words.rows(result) if (values := _exposures(details, f))]
    if not shown:
        return []
    tails = [(f, detailed.tail(values)) for f, values in shown]
    n = min(len(values) for _, values in shown)  # of fewer canaries the band is wider
    series = tuple(
        Series(words.target_title(result, f.target), tuple(Point(x, y) for x, y in t), _kind(f)) for f, t in tails
    )
    groups = tuple(
        Group(
            _titled(result, f),
            tuple((words.number(x), *(f"{words.percent(p)}%" for p in (y, 2**-x, null_band(x, n)))) for x, y in t),
        )
        for f, t in tails
    )
    above = [words.row_title(result, f) for f, t in tails if any(y > null_band(x, n) for x, y in t)]
    title = "Exposure of the canaries beside its null"
    text = (
        "Share of canaries with at least so many bits of exposure. Had none been memorised, a canary's rank among its "
        "alternatives would be uniform and the share 2^-x on average (dotted), and the whole line would stay below the "
        f"top of the shaded band with 95% probability (Dvoretzky–Kiefer–Wolfowitz, {n:,} canaries; about so where "
        "ranks are estimated). A line that rises above the band shows that some canaries were memorised, not which; "
        f"one that does not shows nothing either way. Above it: {', '.join(above) or 'none'}."
    )
    head = ("Bits", "Canaries with at least so many", "Without memorisation", "The band ends at")
    table = Table("exposure-table", f"{title}: the numbers", head, groups, frozenset({0, 1, 2, 3}), folded=True)
    axes = ("Exposure (bits)", "Share with at least as much")
    null = Series("", tuple(Point(x, 2**-x, 2**-x, null_band(x, n)) for x in np.linspace(0, _most_bits(series), 41)))
    return [Figures((Figure("exposure-plot", "exposure", (), title, text, table, series, axes, null),))]


def _most_bits(series: Sequence[Series]) -> float:
    return max(point.x for one in series for point in one.points)


def _exposures(details: Details, finding: Finding) -> list[float]:
    """Of the members: a canary that was never inserted shows the null, not the model."""
    members = {secret.id for secret in details.secrets if secret.member}
    found = details.exposure.get((finding.target, finding.setting, finding.attack), {})
    return [value for id, value in found.items() if id in members and math.isfinite(value)]


def _tradeoff(result: AuditResult) -> list[Block]:
    points = []
    for target in result.targets:
        for setting in words.SETTINGS:
            finding = strongest(result, target.name, setting)
            if finding and target.perplexity and math.isfinite(target.perplexity.value):
                points.append((target, finding))
    if len({target.name for target, _ in points}) < 2:
        return []  # nothing to trade
    series = tuple(Series(_promised(t), (_cost_point(t, f),), _kind(f)) for t, f in points)
    rows = tuple(
        (
            words.row_title(result, f),
            _epsilon(t.claim),
            words.with_bounds(t.perplexity),
            words.share(f.measurement("recall")),
        )
        for t, f in points
    )
    title = "What protection costs, and what it leaves"
    text = (
        "The strongest attack on each target. To the left more useful, downwards less leaks; ε is what is promised of "
        "its unit."
    )
    head = ("Target", "ε promised", "Perplexity", "Recall")
    table = Table(
        "tradeoff-table", f"{title}: the numbers", head, (Group("", rows),), frozenset({1, 2, 3}), folded=True
    )
    axes = ("Perplexity on held-out text", "Recall")
    return [Figures((Figure("tradeoff-plot", "tradeoff", (), title, text, table, series, axes),))]


def _cost_point(target: TargetRecord, finding: Finding) -> Point:
    recall, perplexity = finding.measurement("recall"), target.perplexity
    assert recall is not None and perplexity is not None  # `_tradeoff` has seen to it
    return Point(perplexity.value, recall.value, recall.low, recall.high)


def _promised(target: TargetRecord) -> str:
    return f"{target.title} · ε {words.promised(target.claim)}" if target.claim else f"{target.title} · no claim"


def _epsilon(claim: Claim | None) -> str:
    return "no claim" if claim is None else words.promised(claim)


def _claims(result: AuditResult) -> list[Block]:
    """A line for each neighbouring relation: what is promised, what this audit spent of it, what is left to ask."""
    groups = tuple(Group(f"{t.title}: {t.claim.theorem}", _relations(t.claim)) for t in result.targets if t.claim)
    if not groups:
        return []
    head = ("Neighbours", "ε promised", "ε spent", "δ", "Unit", "Tokens covered", "Drawn", "Left", "Status")
    caption = "What is promised, and how much of it this audit spent"
    return [Table("claims-table", caption, head, groups, frozenset({1, 2, 3, 5, 6, 7}))]


def _tokens(claim: Claim) -> tuple[str, str, str]:
    """Covered, drawn, left. A model that was trained privately may be asked without end."""
    if claim.queries is None:
        return "any number", words.NOTHING, "any number"
    left = claim.queries - claim.spent_queries
    return f"{claim.queries:,}", f"{claim.spent_queries:,}", f"{left:,}" if left >= 0 else "overdrawn"


def _relations(claim: Claim) -> tuple[tuple[str, ...], ...]:
    tokens = _tokens(claim)
    return tuple(
        (
            words.relation(name) + (" (set up for)" if name == claim.relation else ""),
            words.number(epsilon),
            words.number(claim.spent_epsilon.get(name, math.nan)),
            words.number(claim.delta),
            claim.unit,
            *tokens,
            claim.status,
        )
        for name, epsilon in claim.epsilon.items()
    )
