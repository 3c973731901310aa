"""Draw findings and series as inline SVG: recall, exposure, costs, calibration and more.

The output is deterministic. Ids in the SVG contain the plot's name, so several plots can share a
page. matplotlib is imported only to draw a plot.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from auditor.reports import escaping, phrases, plot_frontier
from auditor.reports.blocks import Figure as Block
from auditor.reports.blocks import PlotPoint, Series
from auditor.reports.plot_style import (
    COLOURS,
    FLOOR,
    GRID,
    INK,
    METADATA,
    POINTS,
    STYLE,
    choose_kind_style,
    choose_target_style,
    compute_error_bars,
    draw_wrong_guess_line,
    format_axes,
    pair_series_styles,
    set_percent_axis,
    split_plot_points,
    styled_figure_context,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THEME = [(INK, "currentColor"), (GRID, "var(--rule)")]
_THEME += [(colour, f"var(--series-{i})") for i, colour in enumerate(COLOURS, 1)]
_FLOOR: Any = {"color": INK, **FLOOR}
_REFERENCES: dict[str, tuple[Any, str]] = {  # by plot, the style and name of its reference line
    "exposure": (_FLOOR, "nothing memorised: 2^-x and its band"),
    "roc": ({"color": GRID}, "chance"),
    "calibration": (_FLOOR, "a calibrated score"),
    "any_of_n": (_FLOOR, "non-members"),
    "insertions": (_FLOOR, "never inserted, on average"),
}
_Point = TypeVar("_Point")
_TICKS = 5  # dates that fit side by side under a plot


def render_plot_svg(block: Block) -> str:
    """Render the block as one `<svg>` element."""
    from matplotlib.backends.backend_svg import RendererSVG

    with styled_figure_context(STYLE) as (figure, axes):
        PLOTS[block.plot](axes, block)
        if PLOTS[block.plot] is plot_frontier.draw_frontier:
            handles, labels = plot_frontier.build_legend_entries([block])
        else:
            handles, labels = _build_legend_entries(block)
        # matplotlib hides labels that open with `_`
        legend_labels = [" " + phrases.shorten(label, 60) for label in labels]
        # a legend wider than the axes would shrink them
        columns = 1
        if max(map(len, legend_labels), default=0) <= 26:
            columns = 2
        figure.legend(
            handles,
            legend_labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            ncols=columns,
            handlelength=2.6,
        )
        text = io.StringIO()
        nothing = METADATA[".svg"]
        # "tight" would draw the figure twice.
        figure.dpi = 72
        renderer = RendererSVG(1, 1, io.StringIO(), image_dpi=72)
        box = figure.get_tightbbox(renderer).padded(0.04)
        figure.savefig(text, format="svg", transparent=True, metadata=nothing, bbox_inches=box)
    return _format_inline_svg(text.getvalue(), block)


def _draw_wrong_guess_recall(axes: Axes, block: Block) -> None:
    """Draw recall against the number of allowed wrong guesses, with a line per attack and model.

    The most confident guesses come first.
    """
    n_lines = len(block.series)
    budget = max(12, min(200, POINTS // n_lines))
    for series, style in pair_series_styles(block.series):
        points = _thin_plot_curve(series.points, budget)
        x, y, *_ = split_plot_points(points)
        style |= {"markerfacecolor": style["color"]}
        axes.plot(x, y, markevery=max(1, len(points) // (6 if n_lines <= 12 else 2)), **style)
    draw_wrong_guess_line(axes, GRID)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=4)
    axes.set(xlabel="Wrong guesses allowed", ylabel="Recall")
    set_percent_axis(axes)


def _draw_copies_recall(axes: Axes, block: Block) -> None:
    """Draw recall by copies with intervals, with a line per model."""
    _draw_copies_numbers(axes, block)
    axes.set(xlabel=block.axes[0], ylabel=block.axes[1])
    set_percent_axis(axes)


def _draw_insertion_exposure(axes: Axes, block: Block) -> None:
    """Draw exposure by number of insertions, from zero bits to the maximum, with a line per
    model.
    """
    _draw_copies_numbers(axes, block)
    # Without insertions the rank is uniform: exposure is -log2 U, of mean 1 / ln 2 = 1.44 bits.
    axes.axhline(1 / math.log(2), color=INK, linewidth=0.9, linestyle=FLOOR["linestyle"], zorder=0)
    axes.set_ylim(-0.4, max(point.high for point in block.points) + 0.4)
    format_axes(axes, *block.axes)


def _draw_copies_numbers(axes: Axes, block: Block) -> None:
    _draw_shifted_series(axes, block, 0.1, 0.7)
    axes.set_xticks(range(len(block.ticks)), [phrases.shorten(name, 10) for name in block.ticks])


def _draw_shifted_series(axes: Axes, block: Block, most: float, width: float) -> None:
    """Draw the series with intervals, shifted sideways to separate their error bars.

    most: the largest distance between two series. width: the largest width of all.
    """
    n_lines = len(block.series)
    spacing = min(most, width / n_lines)
    for i, (series, style) in enumerate(pair_series_styles(block.series)):
        _draw_error_bars(axes, series.points, style, spacing * (i - (n_lines - 1) / 2))


def _draw_sample_recall(axes: Axes, block: Block) -> None:
    """Draw recall by number of samples (log axis), with lines for members and non-members per
    model.
    """
    for series, style in pair_series_styles(block.series):
        axes.plot(*split_plot_points(series.points)[:2], **style)
        axes.plot(*split_plot_points(series.baseline)[:2], **{**style, **FLOOR})
    axes.set_xscale("log")
    axes.minorticks_off()
    # Set after the scale, which replaces the formatters.
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="Samples", ylabel="Expected recall")
    set_percent_axis(axes)


def _draw_share_series(axes: Axes, block: Block) -> None:
    """Draw shares by number of tokens, with a line per series, and intervals if given."""
    from matplotlib.ticker import MaxNLocator

    _draw_series(axes, block)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    set_percent_axis(axes)


def _draw_calibration(axes: Axes, block: Block) -> None:
    """Draw the share of right guesses by predicted score; calibrated scores lie on the diagonal."""
    from matplotlib.ticker import PercentFormatter

    axes.plot([0, 1], [0, 1], color=INK, **FLOOR)
    _draw_series(axes, block)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    set_percent_axis(axes)


def _draw_exposure_tail(axes: Axes, block: Block) -> None:
    """Draw the share of canaries with an exposure of at least x bits, on a log axis.

    Behind it are the share expected of a model that memorised nothing, and the range up to the
    largest share that is likely by chance.
    """
    if block.null is not None:
        bits, chance, _, band, *_ = split_plot_points(block.null.points)
        axes.plot(bits, chance, color=INK, **FLOOR)
        axes.fill_between(bits, chance, band, color=GRID, linewidth=0)
    for series, style in pair_series_styles(block.series):
        x, y, *_ = split_plot_points([PlotPoint(0.0, 1.0), *series.points])
        # y is the share with at least x, so the step falls after x.
        axes.step(x, y, where="pre", markevery=max(1, len(x) // 12), **style)
    least = min(split_plot_points(block.points)[1], default=0.1)
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 1.3)
    axes.set_xlim(left=0)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    format_axes(axes, *block.axes)


def _draw_leak_against_perplexity(axes: Axes, block: Block) -> None:
    """Draw extraction against the model's perplexity, with a point per model and attack.

    Points of models without a privacy claim are hollow.
    """
    _draw_series(axes, block, linestyle="")
    costs = split_plot_points(block.points)[0]
    if max(costs) > 10 * min(costs) > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.4g}")
    set_percent_axis(axes)


def _draw_lines_over_runs(axes: Axes, block: Block) -> None:
    """Draw numbers of successive runs, with a line per series."""
    _draw_shifted_series(axes, block, 0.12, 0.6)
    step = -(-len(block.ticks) // _TICKS)
    tick_indices = range((len(block.ticks) - 1) % step, len(block.ticks), step)  # newest included
    axes.set_xticks(list(tick_indices), [phrases.shorten(block.ticks[i], 16) for i in tick_indices])
    axes.set_xlim(-0.5, len(block.ticks) - 0.5)
    format_axes(axes, *block.axes)


def _draw_shares_over_runs(axes: Axes, block: Block) -> None:
    """Draw shares of successive runs on an axis that ends at the highest interval.

    A leak of 1% is then visible.
    """
    from matplotlib.ticker import PercentFormatter

    _draw_lines_over_runs(axes, block)
    high = split_plot_points(block.points)[3]
    reached = max(high[~np.isnan(high)], default=1.0)
    axes.set_ylim(0, min(1.02, 1.1 * max(reached, 0.01)))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _draw_roc(axes: Axes, block: Block) -> None:
    """Draw ROC curves on log axes; draw a rate of 0 at half of the smallest nonzero rate."""
    x, y, *_ = split_plot_points(block.points)
    least = min(x[x > 0], default=0.01) / 2
    lowest = min(y[y > 0], default=0.01) / 2
    axes.plot([least, 1], [least, 1], color=GRID)
    for series, style in pair_series_styles(block.series):
        x, y, *_ = split_plot_points(_thin_plot_points(series, block))
        mark_step = max(1, len(x) // 8)
        # "post": members found at a false positive rate are found up to the next rate.
        axes.step(x.clip(least), y.clip(lowest), where="post", markevery=mark_step, **style)
    for axis, low, label in (
        (axes.xaxis, least, block.axes[0]),
        (axes.yaxis, min(least, lowest), block.axes[1]),
    ):
        axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, 1.1)})
        axis.axes.set(**{f"{axis.axis_name}label": label})
        axis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.minorticks_off()
    axes.grid(True)
    axes.set_axisbelow(True)


def _draw_series(axes: Axes, block: Block, **more: Any) -> None:
    for series, style in pair_series_styles(block.series):
        points = _thin_plot_points(series, block)
        x, y, low, *_ = split_plot_points(points)
        if np.isnan(low).all():
            axes.plot(x, y, **{**style, **more}, markevery=max(1, len(points) // 12))
        else:
            _draw_error_bars(axes, points, {**style, **more})
    axes.set(xlabel=block.axes[0], ylabel=block.axes[1])


def _thin_plot_points(series: Series, block: Block) -> Sequence[PlotPoint]:
    return _thin_plot_curve(series.points, max(2, POINTS // len(block.series)))


def _draw_error_bars(
    axes: Axes, points: Sequence[PlotPoint], style: dict[str, Any], shift: float = 0.0
) -> None:
    x, y, low, high, *_ = split_plot_points(points)
    bars = compute_error_bars(y, low, high)
    axes.errorbar(x + shift, y, yerr=bars, elinewidth=1.1, capsize=2, **style)


def _thin_plot_curve(curve: Sequence[_Point], most: int) -> Sequence[_Point]:
    """Return at most `most` evenly spaced points of the curve, including the first and the last."""
    if len(curve) <= most:
        return curve
    return [curve[round(i * (len(curve) - 1) / (most - 1))] for i in range(most)]


PLOTS: dict[str, Callable[[Axes, Block], None]] = {
    "errors": _draw_wrong_guess_recall,
    "repeats": _draw_copies_recall,
    "any_of_n": _draw_sample_recall,
    "shares": _draw_share_series,
    "calibration": _draw_calibration,
    "exposure": _draw_exposure_tail,
    "insertions": _draw_insertion_exposure,
    "tradeoff": _draw_leak_against_perplexity,
    "course": _draw_lines_over_runs,
    "course_of_shares": _draw_shares_over_runs,
    "roc": _draw_roc,
    "frontier": plot_frontier.draw_frontier,
    "frontier_of_shares": plot_frontier.draw_frontier,
}


def _build_legend_entries(block: Block) -> tuple[list[Any], list[str]]:
    """Return legend handles and labels.

    The first entries explain colours and markers: labels of series. The others explain line styles:
    kinds of series.
    """
    from matplotlib.lines import Line2D

    names = list({s.target or s.label: s.label for s in block.series}.values())
    kinds = dict.fromkeys(s.kind for s in block.series)
    # Without non-members there is no dotted line to explain.
    has_floor = block.plot != "any_of_n" or any(s.baseline for s in block.series)
    line = {"linestyle": "", "marker": "o"} if block.plot == "tradeoff" else {}
    handles = []
    for i in range(len(names)):
        handles.append(Line2D([], [], **{**line, **choose_target_style(i)}))
    if len(kinds) > 1:
        for i in range(len(kinds)):
            handles.append(Line2D([], [], color=INK, **{**choose_kind_style(i), **line}))
        names += kinds
    if block.plot in _REFERENCES and has_floor:
        style, name = _REFERENCES[block.plot]
        handles.append(Line2D([], [], **style))
        names.append(name)
    return handles, names


def _format_inline_svg(file: str, block: Block) -> str:
    """Return matplotlib's SVG in the page's theme, with the plot's name, unique ids and two
    decimals.
    """
    opening, body = file[file.index("<svg") :].split(">", 1)
    view_box = re.search(r'viewBox="([^"]+)"', opening)
    assert view_box is not None  # matplotlib always writes one
    # Keep only the view box of the opening tag: without width and height, CSS decides the size.
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # matplotlib writes a `>` of a text as an entity: all others end a tag.
    body = re.sub(r"<[^>]*>", lambda tag: _theme_svg_tag(tag.group(), block.id), body)
    body = re.sub(r">\s*\n\s*<", "><", body).strip()
    id, title, description = (
        block.id,
        *map(escaping.escape_for_html, (block.title, block.description)),
    )
    labelled = f'role="img" aria-labelledby="{id}-title {id}-desc" {view_box.group()}'
    names = f'<title id="{id}-title">{title}</title><desc id="{id}-desc">{description}</desc>'
    return f'<svg class="plot" {labelled}>{names}{body}'


def _theme_svg_tag(tag: str, id: str) -> str:
    """Return one SVG tag in the page's theme.

    Pass only tags, never the text between tags: it may come from users, and must stay unchanged.
    """
    # The opening tag that declared `xlink` is gone; in SVG 2 `href` needs no namespace.
    tag = re.sub(r"\s*\n\s*", " ", tag).replace("xlink:href", "href")
    # Ids are page-wide: prefix this plot's ids and their references with its name.
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{id}-\1"', tag)
    tag = re.sub(r'(href="|url\()#', rf"\1#{id}-", tag)
    # Two decimals of a point are finer than a screen.
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    # Drop the font family of matplotlib's layout: the page sets its own.
    tag = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", tag)
    for stand_in, colour in _THEME:
        tag = tag.replace(stand_in, colour)
    return tag
