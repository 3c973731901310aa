"""Save plots as .svg or .png in the page's light colours, with reproducible bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.reports import escaping, plot_frontier
from auditor.reports.blocks import Figure as Block
from auditor.reports.plot_style import (
    COLOURS,
    GRID,
    LIGHT,
    LIGHT_STYLE,
    METADATA,
    draw_wrong_guess_line,
    set_percent_axis,
    styled_figure_context,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_wrong_guesses_curve(path: Path, points: Sequence[tuple[int, float]]) -> None:
    """Save a symlog plot of (wrong guesses, recall) as .svg or .png.

    Raise AuditError for any other suffix.
    """
    with _open_plot_axes(path) as (_, axes):
        axes.step(*zip(*points, strict=True), where="post", color=LIGHT[COLOURS[0]])
        draw_wrong_guess_line(axes, LIGHT[GRID])
        # A logarithm has no 0: the axis is linear up to `linthresh`.
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0, right=max(1, points[-1][0]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("Wrong guesses allowed")
        axes.set_title("Recall by wrong guesses allowed")
        set_percent_axis(axes)


def save_frontier_plot(paths: Sequence[Path], blocks: Sequence[Block], alt: str) -> None:
    """Save plots with a common legend as .svg and .png.

    alt: text for readers who cannot see plots.
    """

    def paint(colour: str) -> str:
        return LIGHT.get(colour, colour)

    columns = min(2, len(blocks))
    lines = -(-len(blocks) // columns)
    with _open_plot_axes(*paths) as (figure, first):
        first.remove()  # the default axes of every styled figure
        figure.set_size_inches(5.2 * columns, 3.6 * lines)
        for i, block in enumerate(blocks):
            axes = figure.add_subplot(lines, columns, i + 1)
            plot_frontier.draw_frontier(axes, block, paint)
        figure.tight_layout(h_pad=1.6, w_pad=2.0)
        handles, labels = plot_frontier.build_legend_entries(blocks, paint)
        figure.legend(
            handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=1 + columns
        )
    # matplotlib writes no alternative text: add it to the SVG afterwards.
    for path in paths:
        if path.suffix.lower() == ".svg":
            opening, svg, body = path.read_text(encoding="utf-8").partition("<svg ")
            attributes, _, rest = body.partition(">")
            title = f'<title id="alt">{escaping.escape_for_html(alt)}</title>'
            disk.replace_atomically(
                path, f'{opening}{svg}role="img" aria-labelledby="alt" {attributes}>{title}{rest}'
            )


@contextmanager
def _open_plot_axes(*paths: Path) -> Iterator[tuple[Figure, Axes]]:
    """Yield axes in light colours and save them in each file on exit.

    Raise AuditError unless all suffixes are .svg or .png.
    """
    for path in paths:
        if path.suffix.lower() not in METADATA:
            raise AuditError(
                f"expected --plot to end in {' or '.join(METADATA)}, got {path.name!r}"
            )
        if not path.parent.is_dir():
            raise AuditError(f"cannot write {str(path)!r}: no such folder as {str(path.parent)!r}")
    with styled_figure_context(LIGHT_STYLE) as (figure, axes):
        yield figure, axes
        for path in paths:
            ending = path.suffix.lower()
            with disk.open_atomic_replacement(path) as scratch:  # private to its owner, and atomic
                # `format`, as the scratch file ends in .tmp.
                figure.savefig(
                    scratch,
                    format=ending[1:],
                    dpi=200,
                    facecolor="white",
                    metadata=METADATA[ending],
                    bbox_inches="tight",
                )
