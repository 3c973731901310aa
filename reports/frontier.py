"""Show which models leak least at equal usefulness, as pictures, tables and sentences.

The models are the defenses of a run, or a grid of defense settings. The comparison is
`core.result.Frontier`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from auditor.core import disk
from auditor.core.counts import format_count
from auditor.core.jsonable import encode_json
from auditor.core.result import Frontier, FrontierPoint
from auditor.reports import escaping, phrases, plot_files, tables
from auditor.reports.blocks import (
    Block,
    Bullets,
    Figure,
    Figures,
    Group,
    Paragraph,
    PlotPoint,
    Series,
)
from auditor.reports.plot_frontier import CORNERS, MEASURED, PROVED
from auditor.reports.topics import DECIDE, Topic
from auditor.statistics.metrics import SHARES, find_metric

NAME = "frontier"  # of the files
HEAD = ("Model", "× perplexity", "Within", "Leakage", "Proved", "Leaks least", "Frontier")


# --- the sentence ---


def describe_frontier(f: Frontier) -> str:
    """Describe which equally useful models leak least, if any difference is significant."""
    within = []
    unsure = []
    for p in f.points:
        if p.within == "shown":
            within.append(p)
        elif p.within == "not shown":
            unsure.append(p)
    most = phrases.format_percent(f.margin)
    unproven = ""
    if unsure:
        unproven = (
            f" Neither shown to be within {most}% nor beyond: {_format_defense_models(unsure)}."
        )
    leak = _format_leak_metric(f)
    if within == [f.points[0]]:
        return (
            f"{leak}: only the undefended model is shown to be at perplexity within "
            f"{most}%.{unproven}"
        )
    return (
        f"{leak}: at perplexity within {most}% of undefended, "
        f"{_describe_least_leaking(f, within)}.{unproven}"
    )


def _describe_least_leaking(f: Frontier, points: Sequence[FrontierPoint]) -> str:
    # The first point is the undefended model.
    base, *_ = f.points
    least: list[FrontierPoint] = []
    worse: list[FrontierPoint] = []
    for p in points:
        (least if p.least else worse).append(p)
    first, *equal = sorted(least, key=lambda p: p.leak.value)
    undefended = f"undefended ({phrases.format_measurement_value(base.leak)})"
    lowest = f"{first.label} ({phrases.format_measurement_value(first.leak)})"
    if base.least:
        sentence = f"no defense is shown to leak less than {undefended}"
        if first is not base:
            sentence += f"; lowest: {lowest}"
    elif equal:
        sentence = (
            f"defenses are shown to leak less than {undefended}; lowest: {lowest}, not "
            f"significantly below {_format_defense_models(equal)}"
        )
    else:
        sentence = f"{lowest} leaks least, less than {undefended}"
    if others := [p for p in worse if p is not base]:
        sentence += f"; shown to leak more than the lowest: {_format_defense_models(others)}"
    return sentence


def _format_leak_metric(f: Frontier) -> str:
    metric = find_metric(f.metric)
    title = phrases.format_metric(f.metric)
    if metric.is_of_member_guesses:
        return f"{title} by {f.attack}"
    if metric.rate:
        return f"{title}, its score read either way"
    return title


def _format_defense_models(points: Sequence[FrontierPoint]) -> str:
    """Return the models' names: `Uniform mixing (weight 0.9; weight 0.5) and Public model`."""
    knobs_by_line: dict[str, list[str]] = {}
    for p in points:
        knob = p.label.removeprefix(p.line).removeprefix(", ")
        knobs_by_line.setdefault(p.line, []).append(knob)
    names = []
    for line, knobs in knobs_by_line.items():
        names.append(f"{line} ({'; '.join(knobs)})" if any(knobs) else line)
    return phrases.join_names(names)


def _describe_frontier_basis(f: Frontier) -> str:
    """State how many secrets, seeds and models were compared."""
    seeds = ""
    if len(f.seeds) > 1:
        seeds = f", the mean over seeds {', '.join(map(str, f.seeds))}"
    models = format_count(sum(p.within == "shown" for p in f.points), "model")
    secrets = format_count(f.points[0].leak.n, "secret")
    return f"{secrets} attacked on every model{seeds}; {models} within."


def _describe_comparison_method(f: Frontier) -> str:
    # Subset selection, each side of a pair at level / (2 (models - 1)): see
    # `select_possibly_least_leaking`.
    return (
        f"A model is within {phrases.format_percent(f.margin)}% if the whole 95% interval of its "
        "perplexity ratio to the undefended model is, on the same held-out texts, paired by text. "
        "Each such model is compared with every other one, paired by secret (bootstrap, never "
        "narrower than this number of secrets allows; exact for shares): a model may leak least if "
        "no other is shown to leak less. The tests of all pairs rule out the model that truly "
        f"leaks least in at most {50 * f.level:g}% of cases, and name a single model among equals "
        f"in at most {100 * f.level:g}%."
    )


# --- blocks of a page ---


def build_frontier_report_blocks(frontiers: Sequence[Frontier]) -> list[Block]:
    if not frontiers:
        return []
    left_out = []
    for f in frontiers:
        for label, reason in f.missing.items():
            left_out.append(f"{phrases.format_metric(f.metric)}: no point of {label}: {reason}")
    reading = (
        "Further left is more useful (the axis is stretched around 1), lower leaks less; bars are "
        "95% intervals, a line is one defense over its option. Filled: an ε is proved, for its "
        "unit, access and number of tokens; hollow: it only measures well against these attacks. "
        "Ringed and joined: the convex frontier of the measured values, without a test: neither a "
        "model nor a random choice between two is below it. Pictures are not corrected for each "
        "other. "
        f"{_describe_comparison_method(frontiers[0])}"
    )
    return [
        Figures(draw_frontier_figures(frontiers)),
        Paragraph(reading),
        Bullets(left_out),
    ]


def draw_frontier_figures(frontiers: Sequence[Frontier]) -> tuple[Figure, ...]:
    """Return a figure per frontier; a defense keeps its colour and marker in all figures."""
    lines = dict[str, None]()  # an ordered set
    for f in frontiers:
        lines |= dict.fromkeys(p.line for p in f.points)
    return tuple(_draw_leak_metric_figure(f, lines) for f in frontiers)


def _draw_leak_metric_figure(f: Frontier, lines: Iterable[str]) -> Figure:
    grid = build_frontier_row_table(f)
    return Figure(
        f"frontier-{f.metric}-{f.attack}".replace("_", "-"),
        "frontier_of_shares" if find_metric(f.metric).unit in SHARES else "frontier",
        grid.title,
        describe_frontier(f),
        grid.head,
        (Group("", grid.rows),),
        series=tuple(_build_defense_series(f, lines)),
        text={0, 2, 4, 5, 6},
        subject=f", of {f.points[0].leak.n:,} secrets",
        axes=("Held-out perplexity, × undefended", phrases.format_metric(f.metric)),
        shaded_until=1 + f.margin,
    )


def _build_defense_series(f: Frontier, lines: Iterable[str]) -> Iterator[Series]:
    """Yield the series of a plot: first of the defenses, then of the frontier's corners.

    A defense has several series if only some of its points have a proven epsilon. Points whose
    perplexity is not finite are left out. lines: labels of the defenses in plot order.
    """
    points_by_line: dict[str, list[tuple[str, PlotPoint]]] = {line: [] for line in lines}
    corners = []
    for p in f.points:
        x = p.ratio
        y = p.leak
        if not math.isfinite(x.value):
            continue
        kind = MEASURED if p.epsilon is None else PROVED
        point = PlotPoint(x.value, y.value, y.low, y.high, x.low, x.high)
        points_by_line[p.line].append((kind, point))
        if p.corner:
            corners.append(PlotPoint(x.value, y.value))
    for line, kinds_and_points in points_by_line.items():
        # Colours follow the order of lines, so a line without points keeps its colour.
        if not kinds_and_points:
            yield Series(line, ())
        for kind, stretch in groupby(kinds_and_points, lambda pair: pair[0]):
            yield Series(line, [point for _, point in stretch], kind)
    yield Series(CORNERS, sorted(corners, key=lambda p: p.x), CORNERS)


def _build_frontier_table_rows(f: Frontier) -> Iterator[tuple[str, ...]]:
    """Yield a table row per model, with the columns of HEAD."""
    for p in f.points:
        promised = phrases.NOTHING
        if p.epsilon is not None:
            covered = "" if p.tokens is None else f"; T {p.tokens:,}"
            promised = f"ε {phrases.format_number(p.epsilon)} ({p.unit}{covered})"
        yield (
            p.label,
            phrases.format_measurement_value(p.ratio),
            {"shown": "yes", "not shown": "not shown", "beyond": "no"}[p.within],
            phrases.format_measurement_value(p.leak),
            promised,
            _format_least_leaking(f, p),
            "corner" if p.corner else "",
        )


def _format_least_leaking(f: Frontier, p: FrontierPoint) -> str:
    """Return in words whether this model leaks least among equally useful models."""
    # None: not shown to be as useful, so not compared.
    if p.least is None:
        return phrases.NOTHING
    if not p.least:
        return "no: another leaks less"
    if sum(bool(q.least) for q in f.points) > 1:
        return "may be"
    return "yes"


TOPICS = (
    Topic(
        "frontier",
        "What leaks least at the same usefulness",
        lambda m: build_frontier_report_blocks(m.result.frontiers),
        DECIDE,
        5,
        turn=4,
    ),
)


# --- files ---


def build_frontier_row_table(f: Frontier) -> tables.RowTable:
    """Return a table with a row per model, for readers and LaTeX; its note names the best model."""
    title = f"{_format_leak_metric(f)}, at what perplexity"
    head = (*HEAD[:3], phrases.format_metric(f.metric), *HEAD[4:])
    return tables.RowTable(
        title,
        head,
        tuple(_build_frontier_table_rows(f)),
        f"{describe_frontier(f)}\n{_describe_frontier_basis(f)}",
    )


_COLUMNS = [
    "metric",
    "attack",
    "setting",
    "seeds",
    "model",
    "line",
    "ratio",
    "ratio_low",
    "ratio_high",
    "within",
    "leakage",
    "low",
    "high",
    "n",
    "unit",
    "epsilon",
    "delta",
    "unit_of_protection",
    "tokens",
    "least",
    "corner",
]


def render_frontier_csv(frontiers: Sequence[Frontier]) -> str:
    """Return CSV with a row per leakage metric and model; shares are fractions, epsilons nats."""
    return escaping.render_csv(_COLUMNS, _build_frontier_csv_rows(frontiers))


def _build_frontier_csv_rows(frontiers: Sequence[Frontier]) -> Iterator[tuple[object, ...]]:
    for f in frontiers:
        for p in f.points:
            about = (f.metric, f.attack, f.setting, " ".join(map(str, f.seeds)), p.label, p.line)
            ratio = (p.ratio.value, p.ratio.low, p.ratio.high, p.within)
            leak = (p.leak.value, p.leak.low, p.leak.high, p.leak.n, p.leak.unit)
            proved = (None,) * 4 if p.epsilon is None else (p.epsilon, p.delta, p.unit, p.tokens)
            least = None if p.least is None else int(p.least)
            yield (*about, *ratio, *leak, *proved, least, int(p.corner))


def write_frontier_files(folder: Path, frontiers: Sequence[Frontier]) -> list[Path]:
    """Write frontier.svg, .png, .md, .csv, .tex and .json atomically, if there is a frontier."""
    if not frontiers:
        return []
    grids = list(map(build_frontier_row_table, frontiers))
    alt = escaping.make_printable_line(" ".join(map(describe_frontier, frontiers)))
    texts = {
        ".md": f"![{escaping.escape_for_markdown(alt)}]({NAME}.svg)\n\n"
        + "\n".join(map(tables.render_markdown_table, grids))
        + f"\n{_describe_comparison_method(frontiers[0])}\n",
        ".csv": render_frontier_csv(frontiers),
        ".tex": tables.LATEX_GAP.join(map(tables.render_latex_table, grids)),
        ".json": encode_json(list(frontiers)),
    }
    paths = [folder / f"{NAME}{ending}" for ending in (".svg", ".png")]
    plot_files.save_frontier_plot(paths, draw_frontier_figures(frontiers), alt)
    for ending, text in texts.items():
        path = folder / f"{NAME}{ending}"
        disk.replace_atomically(path, text)
        paths.append(path)
    return paths
