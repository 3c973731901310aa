"""Training data in texts that are drawn without any prefix, as a way to leak."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.core.result import Finding
from auditor.records.disagreements import is_measured
from auditor.records.leak_kinds import Kind, Reading, readings_against_nonmembers
from auditor.statistics.memorised import GENERATIONS, MEMORISED, RECORDS
from auditor.statistics.metrics import nonmember_metric_name


def _memorisation_readings(finding: Finding) -> Iterator[Reading]:
    yield from readings_against_nonmembers(finding, MEMORISED)
    records, floor = finding.measurement(RECORDS), finding.measurement(nonmember_metric_name(RECORDS))
    if records is not None and is_measured(records):
        # Counts of records, without intervals: held-out ones that stand there say how many are merely alike.
        yield Reading(records, 0.0 if floor is None else floor.value, alone=floor is None, row=finding.key)
    if finding.measurement(nonmember_metric_name(MEMORISED)) is None:
        yield from readings_against_nonmembers(finding, GENERATIONS, alone=False)


KIND = Kind(
    "untargeted",
    "Untargeted extraction",
    "untargeted",
    ((MEMORISED, 10.0), (RECORDS, 1.0)),
    ("untargeted",),
    _memorisation_readings,
    counted={GENERATIONS: "drawn texts hold an n-gram of the training data"},
    text=True,
)
