"""A training's course as a picture: what was measured at each step, panel by panel."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from auditor.core.result import Measurement


@dataclass(frozen=True)
class Curve:
    """One measurement over steps, with its interval where it has one."""

    label: str
    points: Sequence[tuple[int, Measurement]]


@dataclass(frozen=True)
class Panel:
    """Lines of one unit."""

    title: str
    lines: tuple[Curve, ...]


def training_curve_svg(panels: Sequence[Panel], stopped_at: int | None = None) -> str:
    """SVG. stopped_at: a step to be marked."""
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    FigureCanvasSVG(figure)  # attaches itself to the figure, without pyplot
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        for line, style in zip(panel.lines, ("o-", "s--", "^-.", "v:") * len(panel.lines), strict=False):
            steps, values = [step for step, _ in line.points], [m.value for _, m in line.points]
            reach = [[m.value - m.low for _, m in line.points], [m.high - m.value for _, m in line.points]]
            axes.errorbar(steps, values, yerr=reach, fmt=style, label=line.label, markersize=3, linewidth=1, capsize=2)
        if stopped_at is not None:
            axes.axvline(stopped_at, linestyle=":", color="black", label="stopped")
        axes.set(title=panel.title, xlabel="step", ylim=(0, None))
        axes.title.set_fontsize(9)
        axes.legend(fontsize=7)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
