"""Plot measurements against training steps, or against a different number, in panels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from auditor.reports.blocks import Series
from auditor.reports.plot_style import (
    COLOURS,
    INK,
    LIGHT,
    LIGHT_STYLE,
    METADATA,
    SERIES,
    compute_error_bars,
    split_plot_points,
    styled_figure_context,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS_AND_LINES = ("o-", "s--", "^-.", "v:")


@dataclass(frozen=True)
class Panel:
    """Series that share a unit. axis: the label of the x axis."""

    title: str
    lines: tuple[Series, ...]
    axis: str = "step"


def draw_training_curve(panels: Sequence[Panel], stopped_at: int | None = None) -> str:
    """Return an SVG of the panels. stopped_at: a training step to mark."""
    text = io.StringIO()
    with styled_figure_context(LIGHT_STYLE) as (figure, first):
        first.remove()  # the default axes of every styled figure
        figure.set_size_inches(4.2 * len(panels), 3.2)
        figure.set_layout_engine("constrained")
        for number, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(1, len(panels), number), panel, stopped_at)
        figure.savefig(text, format="svg", facecolor="white", metadata=METADATA[".svg"])
    return text.getvalue()


def _draw_panel(axes: Axes, panel: Panel, stopped_at: int | None) -> None:
    for number, line in enumerate(panel.lines):
        steps, values, low, high, *_ = split_plot_points(line.points)
        look = _POINTS_AND_LINES[number % 4]
        colour = LIGHT[COLOURS[number % SERIES]]
        axes.errorbar(
            steps,
            values,
            compute_error_bars(values, low, high),
            fmt=look,
            color=colour,
            label=line.label,
            markersize=3,
            linewidth=1,
            capsize=2,
        )
    if stopped_at is not None:
        axes.axvline(stopped_at, linestyle=":", color=LIGHT[INK], label="stopped")
    axes.set(title=panel.title, xlabel=panel.axis, ylim=(0, None))
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7)
