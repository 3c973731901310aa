"""Plot leakage against perplexity, with a line per defense and the convex frontier.

Shading marks the range of equally useful models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from auditor.core.arrays import Floats
from auditor.reports import phrases
from auditor.reports.blocks import Figure as Block
from auditor.reports.blocks import PlotPoint, Series
from auditor.reports.plot_style import (
    GRID,
    INK,
    choose_target_style,
    compute_error_bars,
    format_axes,
    split_plot_points,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROVED = "filled: an ε is proved"
MEASURED = "hollow: it only measures well"
CORNERS = "convex frontier"
_CORNERS: Any = {
    "color": INK,
    "linestyle": (0, (4, 2)),
    "linewidth": 0.9,
    "marker": "o",
    "markersize": 10,
}
_CORNERS |= {"markerfacecolor": "none", "markeredgewidth": 0.8}
# Ticks of an axis of perplexity ratios.
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
)


def draw_frontier(axes: Axes, block: Block, paint: Callable[[str], str] = str) -> None:
    """Draw a line with intervals for each defense, and the frontier; shade equally useful models.

    Models at the frontier's corners have a ring, and a line connects them.
    paint: maps a placeholder colour to the colour to draw.
    """
    lines: dict[str, list[Series]] = {}
    corners: list[PlotPoint] = []
    for s in block.series:
        if s.kind == CORNERS:
            corners += s.points
        else:
            lines.setdefault(s.label, []).append(s)
    for i, line in enumerate(lines.values()):
        style = choose_target_style(i)
        _draw_defense(axes, line, paint(style["color"]), style["marker"])
    x, y, *_ = split_plot_points(corners)
    shape = {**_CORNERS, "color": paint(INK)}
    axes.plot(*_build_frontier_line(x, y), zorder=0.5, **{**shape, "marker": ""})
    axes.plot(x, y, zorder=0.5, **{**shape, "linestyle": ""})
    _set_ratio_axis(axes, block)
    # Draw this after the axis has its limits, at which the shade begins.
    axes.axvspan(
        axes.get_xlim()[0], block.shaded_until, color=paint(GRID), alpha=0.45, linewidth=0, zorder=0
    )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if block.plot == "frontier_of_shares":
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    format_axes(axes, *block.axes)


def _draw_defense(axes: Axes, line: Sequence[Series], colour: str, marker: str) -> None:
    """Draw the models of a defense with their intervals, and a line that connects them."""
    points: list[PlotPoint] = []
    for s in line:
        points += s.points
    axes.plot(*split_plot_points(points)[:2], color=colour, linewidth=0.9, alpha=0.55)
    for s in line:
        x, y, low, high, x_low, x_high = split_plot_points(s.points)
        axes.errorbar(
            x,
            y,
            yerr=compute_error_bars(y, low, high),
            xerr=compute_error_bars(x, x_low, x_high),
            fmt="none",
            ecolor=colour,
            elinewidth=0.8,
            alpha=0.7,
        )
        axes.plot(
            x,
            y,
            linestyle="",
            marker=marker,
            color=colour,
            markerfacecolor=colour if s.kind == PROVED else "none",
            markersize=5.5,
        )


def _build_frontier_line(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return points on the frontier, whose corners are joined by straight lines in log x.

    A user who chooses at random between the models at two corners gets a point between them.
    x, y: coordinates of the corners, of shape (corners,).
    """
    # A random choice averages the two leaks and, over held-out texts, the two log-perplexities.
    # Draw it in 24 steps, because a straight line over log x bends on this axis.
    steps = np.arange(1, 25) / 24
    xs = [x[:1]]
    ys = [y[:1]]
    for i, j in pairwise(range(len(x))):
        xs.append(x[i] * (x[j] / x[i]) ** steps)
        ys.append(y[i] + (y[j] - y[i]) * steps)
    return np.concatenate(xs), np.concatenate(ys)


def _scale_ratio(ratio: Any) -> Any:
    """Return sign(log r) sqrt(|log r|) for perplexity ratio r, which spreads ratios close to 1."""
    logs = np.log(np.maximum(ratio, 1e-9))  # matplotlib transforms 0 too, in intermediate steps
    return np.sign(logs) * np.sqrt(np.abs(logs))


def _unscale_ratio(place: Any) -> Any:
    return np.exp(np.sign(place) * np.square(place))


def _set_ratio_axis(axes: Axes, block: Block) -> None:
    x, _, _, _, x_low, x_high = split_plot_points(block.points)
    ends = filter(math.isfinite, (*x, *x_low, *x_high))
    # The undefended model, at 1, and the margin are always visible.
    places = _scale_ratio([*ends, 0.99, block.shaded_until])
    low = float(places.min())
    high = float(places.max())
    # outer margin; gap between marks
    room = 0.03 * (high - low)
    far = 0.075 * (high - low)
    axes.set_xscale("function", functions=(_scale_ratio, _unscale_ratio))
    axes.set_xlim(float(_unscale_ratio(low - room)), float(_unscale_ratio(high + room)))
    marks: list[float] = []
    # Put ticks at 1 and the margin first, then others by their distance from 1.
    for mark in sorted(
        _RATIOS, key=lambda mark: (mark != 1, mark != block.shaded_until, abs(math.log(mark)))
    ):
        place = float(_scale_ratio(mark))
        is_visible = low - room <= place <= high + room
        if is_visible and (abs(place - _scale_ratio(marks)) > far).all():
            marks.append(mark)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()


def build_legend_entries(
    blocks: Sequence[Block], paint: Callable[[str], str] = str
) -> tuple[list[Any], list[str]]:
    """Return legend handles and labels: first the defenses, then the kinds of points.

    Colour and marker show the defense. Points are filled, hollow or ringed.
    paint: maps a placeholder colour to the colour to draw.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def key(**style: Any) -> Line2D:
        return Line2D([], [], **{**style, "color": paint(style["color"])})

    names: dict[str, int] = {}
    kinds = {}
    for block in blocks:
        for s in block.series:
            if s.kind != CORNERS:
                names.setdefault(s.label, len(names))
            if s.points:
                kinds[s.label] = s.kind
    handles = list[Any]()
    labels = []
    for name, i in names.items():
        if name in kinds:
            hollow = {} if kinds[name] == PROVED else {"markerfacecolor": "none"}
            handles.append(key(**choose_target_style(i), **hollow, linewidth=0.9))
            labels.append(name)
    ink: Any = {"color": INK, "marker": "o", "linestyle": ""}
    handles += [key(**ink), key(**ink, markerfacecolor="none"), key(**_CORNERS)]
    handles.append(Patch(color=paint(GRID), alpha=0.45, linewidth=0))
    most = f"perplexity within {phrases.format_percent(blocks[0].shaded_until - 1)}% of undefended"
    return handles, [*labels, PROVED, MEASURED, CORNERS, most]
