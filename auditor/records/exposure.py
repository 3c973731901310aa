"""Canaries that are more likely than chance allows, as a way to leak."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from auditor.core.result import Finding
from auditor.records.disagreements import is_measured
from auditor.records.leak_kinds import Kind, Reading, readings_against_nonmembers

CHANCE_BITS = 1 / math.log(2)  # mean exposure of a canary that was never inserted: -log2 of a uniform number
EXPOSURE, EXPOSED = "exposure", "exposed_share"


def _exposure_readings(finding: Finding) -> Iterator[Reading]:
    exposed = finding.measurement(EXPOSED)
    if exposed is not None and is_measured(exposed):
        yield Reading(exposed, 0.0, row=finding.key)  # corrected over the canaries: one is one too many
    for reading in readings_against_nonmembers(finding, EXPOSURE):
        yield reading if reading.baseline is not None else replace(reading, baseline=CHANCE_BITS)


KIND = Kind(
    EXPOSURE,
    "Exposure of canaries",
    "exposure of canaries",
    ((EXPOSURE, 10.0), (EXPOSED, 0.05)),
    (EXPOSURE,),
    _exposure_readings,
    EXPOSURE,
    {EXPOSED: "canaries more exposed than chance allows"},
)
