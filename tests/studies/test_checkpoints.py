"""The last checkpoint that leaks little enough."""

from __future__ import annotations

import math
from itertools import permutations

from auditor.conclusions.replicates import Replicates
from auditor.core.result import Measurement
from auditor.studies.checkpoints import describe_last_checkpoint
from auditor.studies.ledger import StudyPoint
from auditor.studies.sweep import build_sweep_table

METRIC = "exposure"


def cell(attack: str, high: float) -> Replicates:
    measured = {0: {METRIC: Measurement(METRIC, 1.0, 0.5, high, 30, "bits")}}
    return Replicates("undefended", "white-box", attack, measured=measured)


def test_an_unknown_bound_is_no_bound_whatever_the_order_of_the_attacks() -> None:
    """Before: an attack with an unknown bound did not count if it came second."""
    for cells in permutations((cell("a", 2.0), cell("b", math.nan))):
        point = StudyPoint("", {"model": "out/checkpoint-5"}, ("a", "b"), cells)
        text = describe_last_checkpoint([point], METRIC, 3.0)
        assert text.startswith("no checkpoint is below 3")


def test_a_grid_over_parts_of_records_says_that_its_intervals_are_too_narrow() -> None:
    """Its recall of parts stood next to the records of each run's screen, without a word."""
    for name, is_told in (("document_recall", True), ("exposure", False)):
        measured = {0: {name: Measurement(name, 0.5, 0.1, 0.9, 6)}}
        cells = (Replicates("undefended", "white-box", "a", measured=measured),)
        table = build_sweep_table("grid", [StudyPoint("", {}, ("a",), cells)])
        assert ("parts of records, taken as independent" in table.note) == is_told


def test_a_row_that_does_not_use_a_swept_option_appears_once() -> None:
    """The undefended model stood at each point of a defense; a fallen point must not merge."""
    points = []
    for weight, value in ((0.5, 2.0), (0.9, 3.0)):
        cells = [cell("exposure", 9.0)]
        measured = {0: {METRIC: Measurement(METRIC, value, 0.5, 9.0, 30, "bits")}}
        cells.append(Replicates("uniform-mixing", "white-box", "exposure", measured=measured))
        at = {"uniform-mixing.weight": weight}
        points.append(StudyPoint("", at, ("exposure",), tuple(cells)))
    for weight in (0.1, 0.2):
        at = {"uniform-mixing.weight": weight}
        points.append(StudyPoint("", at, ("exposure",), failure="expected more"))
    table = build_sweep_table("grid", points)
    assert [row[:2] for row in table.rows] == [
        ("uniform-mixing.weight=any", "undefended, white-box"),
        ("uniform-mixing.weight=0.5", "uniform-mixing, white-box"),
        ("uniform-mixing.weight=0.9", "uniform-mixing, white-box"),
        ("uniform-mixing.weight=0.1", ""),
        ("uniform-mixing.weight=0.2", ""),
    ]
    assert len(table.machine_rows) == 6
