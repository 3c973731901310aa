"""Define the style of all plots: colours, markers, lines, and axes of shares.

Colours are placeholders for CSS variables of the page (`--series-1` …, `currentColor`), so a plot
follows the page's theme. A standalone file has the page's light colours. Marker and line style
repeat the meaning of colour.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from auditor.core.arrays import Floats
from auditor.reports.blocks import PlotPoint, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = 6  # colours defined by the page; markers separate further targets
INK = "#010203"  # placeholders that become CSS variables
GRID = "#010204"
COLOURS = [f"#0102{0x10 + i:02x}" for i in range(SERIES)]
_ON_WHITE = ("#1f5fa8", "#b4470c", "#187a4c", "#8a3f86", "#8a6500", "#4d5866")  # as in style.css
# for a standalone file
LIGHT = {
    INK: "#1b2330",
    GRID: "#d5dae1",
    **dict(zip(COLOURS, _ON_WHITE, strict=True)),
}
# With 8 markers and 6 colours, the 25th target is the first to repeat a style.
MARKERS = "osD^vPX*"
LINES = ["-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1))]
FLOOR: Any = {"linestyle": (0, (1.2, 1.6)), "marker": ""}
POINTS = 900  # over all lines of a plot: keeps it under 60 KB
# No metadata that depends on the machine or the day.
METADATA: dict[str, dict[str, None]] = {
    ".svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ".png": {"Software": None},
}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, searchable and readable aloud
    "svg.hashsalt": "audit",  # without a salt ids are random, and no two files are equal
    "text.parse_math": False,  # a `$` in a title is a dollar
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "text.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
LIGHT_STYLE: Any = {name: LIGHT.get(value, value) for name, value in STYLE.items()}


@contextmanager
def styled_figure_context(style: Any) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure and axes in our style, independent of pyplot and of the user's
    matplotlibrc.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Both are process-wide: two threads must not draw at once.
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        # Ignore glyphs missing from the layout font: browsers use their own fonts.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(5, 3.2))
        FigureCanvasSVG(figure)  # attaches itself to the figure; saving as .png replaces it
        yield figure, figure.subplots()


def draw_wrong_guess_line(axes: Axes, colour: str) -> None:
    # Beyond the limits `axvline` would widen them.
    if axes.get_xlim()[1] > 100:
        axes.axvline(100, color=colour, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)


def set_percent_axis(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.5, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    format_axes(axes)


def format_axes(axes: Axes, x: str | None = None, y: str | None = None) -> None:
    """Label the axes, and draw grid lines behind the plot. x, y: axis labels."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if x is not None:
        axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)


def split_plot_points(points: Sequence[PlotPoint]) -> Floats:
    """Return an array of (6, points), whose rows are the fields of `PlotPoint`."""
    return np.array(points, dtype=float).reshape(-1, 6).T


def compute_error_bars(value: Floats, low: Floats, high: Floats) -> Floats:
    """Return the distance from each value to its lower and upper limit, of shape (2, points).

    If a limit is NaN, its distance is 0.
    """
    # matplotlib rejects negative lengths, which rounding creates
    return np.fmax(0.0, [value - low, high - value])


def choose_target_style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % SERIES], "marker": MARKERS[i % len(MARKERS)]}


def pair_series_styles(series: Sequence[Series]) -> Iterator[tuple[Series, dict[str, Any]]]:
    """Yield each series with its style.

    Colour and marker show `target` or `label`, line style and fill `kind`.
    """
    labels: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for s in series:
        style = choose_target_style(labels.setdefault(s.target or s.label, len(labels)))
        yield s, style | choose_kind_style(kinds.setdefault(s.kind, len(kinds)))


def choose_kind_style(i: int) -> dict[str, Any]:
    return {"linestyle": LINES[i % len(LINES)], **({"markerfacecolor": "none"} if i else {})}
