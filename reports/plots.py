"""Findings and series as inline SVG: recall against wrong guesses, repetitions, samples, lengths, costs; calibration.

Colours are CSS variables of the page (`--series-1` …, `currentColor`), so a plot follows the theme around it; marker
and line style say the same as colour. The output is deterministic, and its ids carry the plot's name, so several plots
can share a page. Knows findings and matplotlib, which it imports only when a plot is drawn. `save_curve` and
`save_tradeoff` draw a file of its own, in the page's light colours.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.result import Finding
from auditor.reports import inert, words
from auditor.reports.blocks import Figure as Block
from auditor.reports.blocks import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = 6  # colours the page defines; markers tell further targets apart
_INK = "#010203"  # stand-ins that become CSS variables
_GRID = "#010204"
_COLOURS = [f"#0102{0x10 + i:02x}" for i in range(SERIES)]
_THEME = [
    (_INK, "currentColor"),
    (_GRID, "var(--rule)"),
    *((c, f"var(--series-{i + 1})") for i, c in enumerate(_COLOURS)),
]
_ON_WHITE = ("#1f5fa8", "#b4470c", "#187a4c", "#8a3f86", "#8a6500", "#4d5866")  # as in style.css
_LIGHT = {_INK: "#1b2330", _GRID: "#d5dae1", **dict(zip(_COLOURS, _ON_WHITE, strict=True))}  # for a file of its own
_TRADEOFF = ("#1f5fa8", "#b4472e", "#3c7a4d")  # lines of a file of its own
PROVED, MEASURED, CORNERS = "filled: an ε is proved", "hollow: it only measures well", "convex frontier"
_METADATA: dict[str, dict[str, None]] = {
    ".svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ".png": {"Software": None},
}  # nothing that differs from one machine or day to the next
_MARKERS = "osD^vPX*"
_LINES = ["-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1))]
_CORNERS: Any = {"color": _INK, "linestyle": (0, (4, 2)), "linewidth": 0.9, "marker": "o", "markersize": 10}
_CORNERS |= {"markerfacecolor": "none", "markeredgewidth": 0.8}
_RATIOS = (
    0.2,
    0.5,
    0.7,
    0.8,
    0.9,
    0.95,
    1,
    1.05,
    1.1,
    1.2,
    1.5,
    2,
    3,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
)  # of perplexities
_FLOOR: Any = {"linestyle": (0, (1.2, 1.6)), "marker": ""}
_TICKS = 5  # dates that find room beside each other under a plot
_POINTS = 900  # over all lines of a plot: what keeps it under 60 KB
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "audit",
    "text.parse_math": False,  # a `$` in a title is a dollar
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "text.color": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def svg(block: Block, titles: Mapping[str, str]) -> str:
    """The block as one `<svg>` element. titles: of the targets, by name."""
    with _drawing(_STYLE) as (figure, axes):
        PLOTS[block.plot](axes, block)
        named = {**titles, **dict(block.labels)}
        if PLOTS[block.plot] is _frontier:
            handles, labels = _keys_of_frontier([block])
        else:
            handles, labels = _keys_of_series(block) if block.series else _keys_of_findings(block, named)
        _legend(figure, handles, labels)
        text = io.StringIO()
        nothing = _METADATA[".svg"]
        figure.savefig(text, format="svg", transparent=True, metadata=nothing, bbox_inches="tight", pad_inches=0.04)
    return _inline(text.getvalue(), block)


def save_curve(path: Path, points: Sequence[tuple[int, float]], title: str) -> None:
    """(wrong guesses, recall) as .svg or .png, on a logarithmic axis from 0. Raises AuditError for another ending."""
    with _file(path) as (_, axes):
        axes.step(*zip(*points, strict=True), where="post", color=_LIGHT[_COLOURS[0]])
        _mark_100(axes, _LIGHT[_GRID])
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0, right=max(1, points[-1][0]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("Wrong guesses allowed")
        axes.set_title(title)
        _share_axis(axes)


@dataclass(frozen=True)
class TradeoffLine:
    """Points (x, y, low, high) under one name; `faint`: beside the matter."""

    name: str
    points: tuple[tuple[float, float, float, float], ...]
    faint: bool = False


def save_tradeoff(path: Path, lines: Sequence[TradeoffLine], axis: str, undefended: float, title: str) -> None:
    """Perplexity, logarithmic, against epsilon (nats) or an option, as .svg or .png; undefended: the dotted line."""
    with _file(path) as (figure, axes):
        for i, line in enumerate(line for line in lines if line.points):
            x, y, low, high = zip(*line.points, strict=True)
            colour = "#8b95a3" if line.faint else _TRADEOFF[i % len(_TRADEOFF)]
            reach = [[max(0.0, v - bound) for v, bound in zip(y, low, strict=True)]]
            reach += [[max(0.0, bound - v) for v, bound in zip(y, high, strict=True)]]
            axes.errorbar(
                x, y, yerr=reach, color=colour, marker=_MARKERS[i % len(_MARKERS)], capsize=2, label=line.name
            )
        axes.axhline(undefended, color=_LIGHT[_INK], linewidth=0.9, linestyle=_FLOOR["linestyle"], label="undefended")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xlabel("ε (nats)" if axis == "ε" else axis)
        axes.set_ylabel("Perplexity")
        axes.set_title(title)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)


def save_frontier(path: Path, blocks: Sequence[Block], alt: str) -> None:
    """The pictures side by side under one legend, as .svg or .png. alt: what a reader who sees none is told."""

    def paint(colour: str) -> str:
        return _LIGHT.get(colour, colour)

    columns = min(2, len(blocks))
    lines = -(-len(blocks) // columns)
    with _file(path) as (figure, first):
        first.remove()
        figure.set_size_inches(5.2 * columns, 3.6 * lines)
        for i, block in enumerate(blocks):
            axes = figure.add_subplot(lines, columns, i + 1)
            _frontier(axes, block, paint)
        figure.tight_layout(h_pad=1.6, w_pad=2.0)
        handles, labels = _keys_of_frontier(blocks, paint)
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=1 + columns)
    if path.suffix.lower() == ".svg":
        opening, svg, body = path.read_text(encoding="utf-8").partition("<svg ")
        attributes, _, rest = body.partition(">")
        told = f'<title id="alt">{inert.html(alt)}</title>'
        disk.replace(path, f'{opening}{svg}role="img" aria-labelledby="alt" {attributes}>{told}{rest}')


@contextmanager
def _file(path: Path) -> Iterator[tuple[Figure, Axes]]:
    """Axes in the page's light colours, written when done. Raises AuditError for another ending than .svg or .png."""
    if path.suffix.lower() not in _METADATA:
        raise AuditError(f"expected --plot to end in {' or '.join(_METADATA)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise AuditError(f"cannot write {str(path)!r}: no such folder as {str(path.parent)!r}")
    with _drawing({name: _LIGHT.get(value, value) for name, value in _STYLE.items()}) as (figure, axes):
        yield figure, axes
        ending = path.suffix.lower()
        with disk.replacing(path) as scratch:  # its owner's only, and whole
            figure.savefig(
                scratch, format=ending[1:], dpi=200, facecolor="white", metadata=_METADATA[ending], bbox_inches="tight"
            )


@contextmanager
def _drawing(style: Any) -> Iterator[tuple[Figure, Axes]]:
    """One pair of axes in our style, without pyplot's state and whatever a user's matplotlibrc says."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        warnings.simplefilter("ignore", UserWarning)  # glyphs the layout font lacks: the browser has its own
        figure = Figure(figsize=(5, 3.2))
        FigureCanvasSVG(figure)
        yield figure, figure.subplots()


# --- the plots ------------------------------------------------------------------------------------------------------


def _errors(axes: Axes, block: Block) -> None:
    """One line a finding: recall while so many wrong guesses are allowed, guesses taken surest first."""
    findings = block.findings
    budget = max(12, min(200, _POINTS // len(findings)))
    for finding, style in zip(findings, _styles(findings), strict=True):
        points = _thinned(finding.curve, budget)
        every = max(1, len(points) // (6 if len(findings) <= 12 else 2))
        axes.plot(*zip(*points, strict=True), markevery=every, **style)
    _mark_100(axes, _GRID)
    axes.set_xlim(left=0)
    axes.set_xlabel("Wrong guesses allowed")
    axes.set_ylabel("Recall")
    _share_axis(axes)


def _mark_100(axes: Axes, colour: str) -> None:
    if axes.get_xlim()[1] > 100:
        axes.axvline(100, color=colour, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)


def _repeats(axes: Axes, block: Block) -> None:
    """One line a finding with its intervals, the findings a little apart so that error bars stand side by side."""
    _beside_each_other(axes, block.findings)
    axes.set_xlabel("Repetitions in the training data")
    shares = all(m.unit == "share" for f in block.findings for m in f.by_repeats.values())
    axes.set_ylabel("Recall" if shares else "Mean")
    _share_axis(axes)


def _insertions(axes: Axes, block: Block) -> None:
    """One line a target over the number of insertions, from no bit to the most there are."""
    findings = block.findings
    _beside_each_other(axes, findings)
    axes.axhline(1 / math.log(2), color=_INK, linewidth=0.9, linestyle=_FLOOR["linestyle"], zorder=0)
    axes.set_ylim(-0.4, max(m.high for f in findings for m in f.by_repeats.values()) + 0.4)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("Insertions into the training data")
    axes.set_ylabel("Exposure, bits")


def _beside_each_other(axes: Axes, findings: Sequence[Finding]) -> None:
    """The numbers by repeat count with their intervals."""
    names = sorted({name for f in findings for name in f.by_repeats}, key=words.repeats_key)
    apart = min(0.1, 0.7 / len(findings))
    for i, (finding, style) in enumerate(zip(findings, _styles(findings), strict=True)):
        shift = apart * (i - (len(findings) - 1) / 2)
        measured = words.by_repeats(finding.by_repeats)
        x = [names.index(name) + shift for name, _ in measured]
        y = [m.value for _, m in measured]
        reach = [[max(0.0, m.value - m.low) for _, m in measured], [max(0.0, m.high - m.value) for _, m in measured]]
        axes.errorbar(x, y, yerr=reach, elinewidth=1.1, capsize=2, **style)
    axes.set_xticks(range(len(names)), [words.shorten(name, 10) for name in names])


def _any_of_n(axes: Axes, block: Block) -> None:
    """Two lines a finding, members and non-members, over a logarithmic number of samples."""
    for finding, style in zip(block.findings, _styles(block.findings), strict=True):
        for measured, own in (
            (words.any_of_n(finding), style),
            (words.any_of_n(finding, "_nonmembers"), {**style, **_FLOOR}),
        ):
            axes.plot(list(measured), [m.value for m in measured.values()], **own)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("Samples")
    axes.set_ylabel("Expected recall")
    _share_axis(axes)


def _shares(axes: Axes, block: Block) -> None:
    """One line of shares a series, with intervals where its points have them, over a number of tokens."""
    from matplotlib.ticker import MaxNLocator

    _draw(axes, block)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _share_axis(axes)


def _calibration(axes: Axes, block: Block) -> None:
    """Shares right over the scores that foretold them: on the diagonal a score keeps its word."""
    from matplotlib.ticker import PercentFormatter

    axes.plot([0, 1], [0, 1], color=_INK, **_FLOOR)
    _draw(axes, block)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    _share_axis(axes)


def _exposure(axes: Axes, block: Block) -> None:
    """Share of canaries of at least so many bits, on a logarithmic axis, beside its null and what chance leaves it."""
    if block.null is not None:
        bits, chance, band = zip(*((p.x, p.y, p.high) for p in block.null.points), strict=True)
        axes.plot(bits, chance, color=_INK, **_FLOOR)
        axes.fill_between(bits, chance, band, color=_GRID, linewidth=0)
    for series, style in zip(block.series, _series_styles(block.series), strict=True):
        x, y = [0.0, *(p.x for p in series.points)], [1.0, *(p.y for p in series.points)]
        axes.step(x, y, where="pre", markevery=max(1, len(x) // 12), **style)
    least = min((point.y for series in block.series for point in series.points), default=0.1)
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 1.3)
    axes.set_xlim(left=0)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(block.axes[0])
    axes.set_ylabel(block.axes[1])


def _tradeoff(axes: Axes, block: Block) -> None:
    """A point a row: what comes out over what the model costs in perplexity; hollow where no claim covers it."""
    _draw(axes, block, linestyle="")
    costs = [point.x for series in block.series for point in series.points]
    if max(costs) > 10 * min(costs) > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,.4g}")
    _share_axis(axes)


def _course(axes: Axes, block: Block) -> None:
    """One line a series over runs in their order, a little apart so that error bars stand side by side."""
    apart = min(0.12, 0.6 / len(block.series))
    for i, (series, style) in enumerate(zip(block.series, _series_styles(block.series), strict=True)):
        shift = apart * (i - (len(block.series) - 1) / 2)
        x, y = [p.x + shift for p in series.points], [p.y for p in series.points]
        reach = [[max(0.0, p.y - p.low) for p in series.points], [max(0.0, p.high - p.y) for p in series.points]]
        axes.errorbar(x, y, yerr=reach, elinewidth=1.1, capsize=2, **style)
    every = -(-len(block.ticks) // _TICKS)
    shown = range((len(block.ticks) - 1) % every, len(block.ticks), every)  # the newest among them
    axes.set_xticks(list(shown), [words.shorten(block.ticks[i], 16) for i in shown])
    axes.set_xlim(-0.5, len(block.ticks) - 0.5)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(block.axes[0])
    axes.set_ylabel(block.axes[1])


def _course_of_shares(axes: Axes, block: Block) -> None:
    """The same from zero, as high as the intervals reach: a leak of a hundredth is seen too."""
    from matplotlib.ticker import PercentFormatter

    _course(axes, block)
    reached = max((p.high for s in block.series for p in s.points if not math.isnan(p.high)), default=1.0)
    axes.set_ylim(0, min(1.02, 1.1 * max(reached, 0.01)))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _roc(axes: Axes, block: Block) -> None:
    """Staircases on two logarithmic axes; a step at no false positive begins where one of them would be too many."""
    least = min((p.x for s in block.series for p in s.points if p.x > 0), default=0.01) / 2
    lowest = min((p.y for s in block.series for p in s.points if p.y > 0), default=0.01) / 2
    axes.plot([least, 1], [least, 1], color=_GRID)
    for series, style in zip(block.series, _series_styles(block.series), strict=True):
        points = series.points[:: max(1, len(series.points) * len(block.series) // _POINTS)]
        x, y = [max(p.x, least) for p in points], [max(p.y, lowest) for p in points]
        axes.step(x, y, where="post", markevery=max(1, len(x) // 8), **style)
    for axis, low, label in ((axes.xaxis, least, block.axes[0]), (axes.yaxis, min(least, lowest), block.axes[1])):
        axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, 1.1)})
        axis.axes.set(**{f"{axis.axis_name}label": label})
        axis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.minorticks_off()
    axes.grid(True)
    axes.set_axisbelow(True)


def _frontier(axes: Axes, block: Block, paint: Callable[[str], str] = str) -> None:
    """A line a defense over its knob, intervals both ways; ringed and joined: the frontier; shaded: as useful."""
    names = _distinct(s.label for s in block.series if s.kind != CORNERS)
    for i, name in enumerate(names):
        own = [s for s in block.series if s.label == name and s.kind != CORNERS]
        points, style = [p for s in own for p in s.points], _target_style(i)
        colour = paint(style["color"])
        axes.plot([p.x for p in points], [p.y for p in points], color=colour, linewidth=0.9, alpha=0.55)
        for s in own:
            reach = [[[max(0.0, p.x - p.left) for p in s.points], [max(0.0, p.right - p.x) for p in s.points]]]
            reach += [[[max(0.0, p.y - p.low) for p in s.points], [max(0.0, p.high - p.y) for p in s.points]]]
            face = colour if s.kind == PROVED else "none"
            xy = [p.x for p in s.points], [p.y for p in s.points]
            axes.errorbar(*xy, yerr=reach[1], xerr=reach[0], fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.7)
            axes.plot(*xy, linestyle="", marker=style["marker"], color=colour, markerfacecolor=face, markersize=5.5)
    corners = [(p.x, p.y) for s in block.series if s.kind == CORNERS for p in s.points]
    shape = {**_CORNERS, "color": paint(_INK)}
    axes.plot(*zip(*_straight(corners), strict=True), zorder=0.5, **{**shape, "marker": ""})
    axes.plot(*zip(*corners, strict=True), zorder=0.5, **{**shape, "linestyle": ""})
    _ratio_axis(axes, block)
    axes.axvspan(axes.get_xlim()[0], block.until, color=paint(_GRID), alpha=0.45, linewidth=0, zorder=0)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if block.plot == "frontier_of_shares":
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(block.axes[0])
    axes.set_ylabel(block.axes[1])


def _straight(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points on the lines between them over the logarithm of x, on which lots drawn between two models lie."""
    found = [corners[0]]
    for (x0, y0), (x1, y1) in pairwise(corners):
        found += [(x0 * (x1 / x0) ** (i / 24), y0 + (y1 - y0) * i / 24) for i in range(1, 25)]
    return found


def _spread(ratio: Any) -> Any:
    """Where a ratio stands: the root of its logarithm, as most models are near 1 and some far from it."""
    import numpy as np

    logs = np.log(np.maximum(ratio, 1e-9))
    return np.sign(logs) * np.sqrt(np.abs(logs))


def _unspread(place: Any) -> Any:
    import numpy as np

    return np.exp(np.sign(place) * np.square(place))


def _ratio_axis(axes: Axes, block: Block) -> None:
    ends = [end for s in block.series for p in s.points for end in (p.x, p.left, p.right) if math.isfinite(end)]
    low, high = float(_spread(min(*ends, 0.99))), float(_spread(max(*ends, block.until)))
    room, far = 0.03 * (high - low), 0.075 * (high - low)  # beside the outermost; between two marks
    axes.set_xscale("function", functions=(_spread, _unspread))
    axes.set_xlim(float(_unspread(low - room)), float(_unspread(high + room)))
    kept: list[float] = []
    for mark in sorted(_RATIOS, key=lambda mark: (mark != 1, mark != block.until, abs(math.log(mark)))):
        place = float(_spread(mark))
        if low - room <= place <= high + room and all(abs(place - float(_spread(other))) > far for other in kept):
            kept.append(mark)
    axes.set_xticks(kept, [f"{mark:g}" for mark in kept])
    axes.minorticks_off()


PLOTS: dict[str, Callable[[Axes, Block], None]] = {
    "errors": _errors,
    "repeats": _repeats,
    "any_of_n": _any_of_n,
    "shares": _shares,
    "calibration": _calibration,
    "exposure": _exposure,
    "insertions": _insertions,
    "tradeoff": _tradeoff,
    "course": _course,
    "course_of_shares": _course_of_shares,
    "roc": _roc,
    "frontier": _frontier,
    "frontier_of_shares": _frontier,
}


def _draw(axes: Axes, block: Block, **more: Any) -> None:
    for series, style in zip(block.series, _series_styles(block.series), strict=True):
        points = series.points[:: max(1, len(series.points) * len(block.series) // _POINTS)]
        x, y = [p.x for p in points], [p.y for p in points]
        if all(math.isnan(p.low) for p in points):
            axes.plot(x, y, **{**style, **more}, markevery=max(1, len(x) // 12))
            continue
        reach = [[max(0.0, p.y - p.low) for p in points], [max(0.0, p.high - p.y) for p in points]]
        axes.errorbar(x, y, yerr=reach, elinewidth=1.1, capsize=2, **{**style, **more})
    axes.set_xlabel(block.axes[0])
    axes.set_ylabel(block.axes[1])


def _thinned(curve: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points of the curve, evenly spaced, the first and the last among them."""
    if len(curve) <= most:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (most - 1))] for i in range(most)]


# --- what they share ------------------------------------------------------------------------------------------------


def _share_axis(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _styles(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Colour and marker say the target, the line says the attack."""
    targets, attacks = _distinct(f.target for f in findings), _distinct(f.attack for f in findings)
    return [
        {**_target_style(targets.index(f.target)), "linestyle": _line_style(attacks.index(f.attack))} for f in findings
    ]


def _target_style(i: int) -> dict[str, Any]:
    return {"color": _COLOURS[i % SERIES], "marker": _MARKERS[i % len(_MARKERS)]}


def _line_style(i: int) -> Any:
    return _LINES[i % len(_LINES)]


def _series_styles(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Colour and marker say the label, line and hollow markers the kind."""
    labels, kinds = _distinct(s.label for s in series), _distinct(s.kind for s in series)
    return [{**_target_style(labels.index(s.label)), **_kind_style(kinds.index(s.kind))} for s in series]


def _kind_style(i: int) -> dict[str, Any]:
    return {"linestyle": _line_style(i), **({"markerfacecolor": "none"} if i else {})}


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _keys_of_series(block: Block) -> tuple[list[Any], list[str]]:
    """Labels by colour and marker and, where there are several, kinds by line."""
    from matplotlib.lines import Line2D

    labels, kinds = _distinct(s.label for s in block.series), _distinct(s.kind for s in block.series)
    line = {"linestyle": ""} if block.plot == "tradeoff" else {}
    handles = [Line2D([], [], **{**_target_style(i), **line}) for i in range(len(labels))]
    if len(kinds) > 1:
        marked = {"marker": "o"} if line else {}
        handles += [Line2D([], [], color=_INK, **{**_kind_style(i), **line, **marked}) for i in range(len(kinds))]
        labels += kinds
    if block.plot == "exposure":
        handles.append(Line2D([], [], color=_INK, **_FLOOR))
        labels.append("nothing memorised: 2^-x and its band")
    if block.plot == "roc":
        handles.append(Line2D([], [], color=_GRID))
        labels.append("chance")
    if block.plot == "calibration":
        handles.append(Line2D([], [], color=_INK, **_FLOOR))
        labels.append("a score that keeps its word")
    return handles, labels


def _keys_of_frontier(blocks: Sequence[Block], paint: Callable[[str], str] = str) -> tuple[list[Any], list[str]]:
    """Defenses by colour and marker, then what filled, hollow and ringed say, of pictures with the same lines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def key(**style: Any) -> Line2D:
        return Line2D([], [], **{**style, "color": paint(style["color"])})

    names = _distinct(s.label for block in blocks for s in block.series if s.kind != CORNERS)
    kinds = {s.label: s.kind for block in blocks for s in block.series if s.points}
    shown = [name for name in names if name in kinds]
    handles: list[Any] = []
    for i, name in enumerate(names):
        if name not in shown:
            continue
        hollow = {} if kinds[name] == PROVED else {"markerfacecolor": "none"}
        handles.append(key(**_target_style(i), **hollow, linewidth=0.9))
    ink: Any = {"color": _INK, "marker": "o", "linestyle": ""}
    handles += [key(**ink), key(**ink, markerfacecolor="none"), key(**_CORNERS)]
    handles.append(Patch(color=paint(_GRID), alpha=0.45, linewidth=0))
    most = f"perplexity within {words.percent(blocks[0].until - 1)}% of undefended"
    return handles, [*shown, PROVED, MEASURED, CORNERS, most]


def _keys_of_findings(block: Block, titles: Mapping[str, str]) -> tuple[list[Any], list[str]]:
    """Targets by colour and marker and, where there are several, attacks by line."""
    from matplotlib.lines import Line2D

    targets, attacks = (_distinct(names) for names in zip(*((f.target, f.attack) for f in block.findings), strict=True))
    handles = [Line2D([], [], **_target_style(i)) for i in range(len(targets))]
    labels = [titles.get(name, name) for name in targets]
    if len(attacks) > 1:
        handles += [Line2D([], [], color=_INK, linestyle=_line_style(i)) for i in range(len(attacks))]
        labels += attacks
    if block.plot == "any_of_n" and any(words.any_of_n(f, "_nonmembers") for f in block.findings):
        handles.append(Line2D([], [], color=_INK, **_FLOOR))
        labels.append("non-members")
    if block.plot == "insertions":
        handles.append(Line2D([], [], color=_INK, **_FLOOR))
        labels.append("never inserted, on average")
    return handles, labels


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Under the axes."""
    shown = [" " + words.shorten(label, 60) for label in labels]  # matplotlib hides labels that open with `_`
    columns = 2 if max(map(len, shown), default=0) <= 26 else 1  # wider than the axes, it would shrink them
    figure.legend(handles, shown, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=columns, handlelength=2.6)


def _inline(file: str, block: Block) -> str:
    """matplotlib's file as an element of a page: named, with its own ids, themed, in two decimals."""
    opening, body = file[file.index("<svg") :].split(">", 1)
    view_box = re.search(r'viewBox="([^"]+)"', opening)
    assert view_box is not None  # matplotlib always writes one
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _themed(tag.group(), block.id), body)
    body = re.sub(r">\s*\n\s*<", "><", body).strip()
    id, title, description = block.id, inert.html(block.title), inert.html(block.description)
    labelled = f'role="img" aria-labelledby="{id}-title {id}-desc" {view_box.group()}'
    names = f'<title id="{id}-title">{title}</title><desc id="{id}-desc">{description}</desc>'
    return f'<svg class="plot" {labelled}>{names}{body}'


def _themed(tag: str, id: str) -> str:
    """One tag; the text between tags is the user's and is left alone."""
    tag = re.sub(r"\s*\n\s*", " ", tag).replace("xlink:href", "href")
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{id}-\1"', tag)
    tag = re.sub(r'(href="|url\()#', rf"\1#{id}-", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    tag = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", tag)
    for stand_in, colour in _THEME:
        tag = tag.replace(stand_in, colour)
    return tag
