"""The picture of a training's course: the same bytes each time, whatever a label holds."""

from __future__ import annotations

import re

from auditor.reports.blocks import PlotPoint, Series
from auditor.reports.training_curve import Panel, draw_training_curve


def test_the_same_curve_is_the_same_file() -> None:
    points = [
        PlotPoint(0, 0.2, 0.2 + 1e-17, 0.2 - 1e-12),  # its ends rounded
        PlotPoint(9, 0.5, 0.4, 0.6),
    ]
    panels = [
        Panel("Recall of $x", (Series("members", points), Series("<b>", points))),
        Panel("Loss", (Series("a", points),)),
    ]
    picture = draw_training_curve(panels, stopped_at=9)
    assert picture == draw_training_curve(panels, stopped_at=9)  # ids and dates differ otherwise
    assert {"Recall of $x", "members", "&lt;b&gt;", "stopped"} <= set(
        re.findall(r">([^<>]+)</text>", picture)
    )
    # the colours of a file of its own, not those that a page replaces
    assert "#0102" not in picture
