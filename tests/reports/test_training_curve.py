"""The picture of a training's course: the same bytes each time, whatever a label holds."""

from __future__ import annotations

import re

from auditor.core.result import Measurement
from auditor.reports.training_curve import Curve, Panel, draw_training_curve


def test_the_same_curve_is_the_same_file() -> None:
    points = [
        (step, Measurement("recall", share, share - 0.1, share + 0.1, 50, "share"))
        for step, share in ((0, 0.2), (9, 0.5))
    ]
    # its ends rounded
    points[0] = (
        0,
        Measurement("recall", 0.2, 0.2 + 1e-17, 0.2 - 1e-12, 50, "share"),
    )
    panels = [
        Panel("Recall of $x", (Curve("members", points), Curve("<b>", points))),
        Panel("Loss", (Curve("a", points),)),
    ]
    picture = draw_training_curve(panels, stopped_at=9)
    assert picture == draw_training_curve(panels, stopped_at=9)  # ids and dates differ otherwise
    assert {"Recall of $x", "members", "&lt;b&gt;", "stopped"} <= set(
        re.findall(r">([^<>]+)</text>", picture)
    )
    # the colours of a file of its own, not those that a page replaces
    assert "#0102" not in picture
