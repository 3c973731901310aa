"""Plot leakage against perplexity, with a line per defense and the convex frontier.

A shade marks equally useful models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from auditor.reports import phrases
from auditor.reports.blocks import Figure as Block
from auditor.reports.plot_style import (
    GRID,
    INK,
    choose_target_style,
    compute_error_bars,
    format_axes,
    list_distinct,
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
# Marks of an axis of perplexity ratios.
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
    """Draw a line with intervals per defense, the frontier, and a shade over equally useful models.

    The models at the frontier's corners have a ring, and a line connects them.
    paint: maps a colour to the colour that is drawn.
    """
    names = list_distinct(s.label for s in block.series if s.kind != CORNERS)
    for i, name in enumerate(names):
        group = []
        for s in block.series:
            if s.label == name and s.kind != CORNERS:
                group.append(s)
        points = []
        for s in group:
            for p in s.points:
                points.append(p)
        style = choose_target_style(i)
        colour = paint(style["color"])
        axes.plot(
            [p.x for p in points], [p.y for p in points], color=colour, linewidth=0.9, alpha=0.55
        )
        for s in group:
            across = [
                [max(0.0, p.x - p.left) for p in s.points],
                [max(0.0, p.right - p.x) for p in s.points],
            ]
            face = colour if s.kind == PROVED else "none"
            xy = [p.x for p in s.points], [p.y for p in s.points]
            axes.errorbar(
                *xy,
                yerr=compute_error_bars(s.points),
                xerr=across,
                fmt="none",
                ecolor=colour,
                elinewidth=0.8,
                alpha=0.7,
            )
            axes.plot(
                *xy,
                linestyle="",
                marker=style["marker"],
                color=colour,
                markerfacecolor=face,
                markersize=5.5,
            )
    corners = []
    for s in block.series:
        if s.kind == CORNERS:
            for p in s.points:
                corners.append((p.x, p.y))
    shape = {**_CORNERS, "color": paint(INK)}
    axes.plot(
        *zip(*_build_frontier_line(corners), strict=True),
        zorder=0.5,
        **{**shape, "marker": ""},
    )
    axes.plot(*zip(*corners, strict=True), zorder=0.5, **{**shape, "linestyle": ""})
    _set_ratio_axis(axes, block)
    # After the axis has its limits, where the shade begins.
    axes.axvspan(
        axes.get_xlim()[0], block.shaded_until, color=paint(GRID), alpha=0.45, linewidth=0, zorder=0
    )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if block.plot == "frontier_of_shares":
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    format_axes(axes, *block.axes)


def _build_frontier_line(
    corners: Sequence[tuple[float, float]],
) -> list[tuple[float, float]]:
    """Return points on the frontier, which joins its corners by straight lines in log x.

    A random choice between the models at two corners reaches the points between them.
    """
    points = [corners[0]]
    # A random choice averages the leaks of the two and, over held-out texts, their
    # log-perplexities. In 24 steps: straight over log x is a bend on this axis.
    for (x0, y0), (x1, y1) in pairwise(corners):
        points += [(x0 * (x1 / x0) ** (i / 24), y0 + (y1 - y0) * i / 24) for i in range(1, 25)]
    return points


def _scale_ratio(ratio: Any) -> Any:
    """Return the signed square root of a perplexity ratio's logarithm, which separates ratios close
    to 1.
    """
    import numpy as np

    logs = np.log(np.maximum(ratio, 1e-9))  # matplotlib transforms 0 too, in intermediate steps
    return np.sign(logs) * np.sqrt(np.abs(logs))


def _unscale_ratio(place: Any) -> Any:
    import numpy as np

    return np.exp(np.sign(place) * np.square(place))


def _set_ratio_axis(axes: Axes, block: Block) -> None:
    ends = []
    for s in block.series:
        for p in s.points:
            for end in (p.x, p.left, p.right):
                if math.isfinite(end):
                    ends.append(end)
    # The undefended model, at 1, and the margin are always visible.
    low = float(_scale_ratio(min(*ends, 0.99)))
    high = float(_scale_ratio(max(*ends, block.shaded_until)))
    # outer margin; gap between marks
    room = 0.03 * (high - low)
    far = 0.075 * (high - low)
    axes.set_xscale("function", functions=(_scale_ratio, _unscale_ratio))
    axes.set_xlim(float(_unscale_ratio(low - room)), float(_unscale_ratio(high + room)))
    marks: list[float] = []
    # Place 1 and the margin first, then marks by their distance to 1.
    for mark in sorted(
        _RATIOS, key=lambda mark: (mark != 1, mark != block.shaded_until, abs(math.log(mark)))
    ):
        place = float(_scale_ratio(mark))
        if low - room <= place <= high + room and all(
            abs(place - float(_scale_ratio(other))) > far for other in marks
        ):
            marks.append(mark)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()


def build_legend_entries(
    blocks: Sequence[Block], paint: Callable[[str], str] = str
) -> tuple[list[Any], list[str]]:
    """Return legend handles and labels: first defenses by colour and marker, then kinds of points.

    Points are filled, hollow or ringed. paint: maps a colour to the colour that is drawn.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def key(**style: Any) -> Line2D:
        return Line2D([], [], **{**style, "color": paint(style["color"])})

    names = list_distinct(s.label for block in blocks for s in block.series if s.kind != CORNERS)
    kinds = {}
    for block in blocks:
        for s in block.series:
            if s.points:
                kinds[s.label] = s.kind
    labels = [name for name in names if name in kinds]
    handles = list[Any]()
    for name in labels:
        if kinds[name] == PROVED:
            hollow = {}
        else:
            hollow = {"markerfacecolor": "none"}
        handles.append(key(**choose_target_style(names.index(name)), **hollow, linewidth=0.9))
    ink: Any = {"color": INK, "marker": "o", "linestyle": ""}
    handles += [key(**ink), key(**ink, markerfacecolor="none"), key(**_CORNERS)]
    handles.append(Patch(color=paint(GRID), alpha=0.45, linewidth=0))
    most = f"perplexity within {phrases.format_percent(blocks[0].shaded_until - 1)}% of undefended"
    return handles, [*labels, PROVED, MEASURED, CORNERS, most]
