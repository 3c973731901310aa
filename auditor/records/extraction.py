"""Ways to leak that are about the secrets themselves: extracted, nearly so, by greedy decoding, in probability; and the
personal data in them."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.core.result import Finding
from auditor.records.disagreements import ANY, EXACT, is_measured
from auditor.records.leak_kinds import Kind, Reading, readings_against_nonmembers, readings_by_repeat_count
from auditor.statistics.intervals import mean_excess_over_nonmembers
from auditor.statistics.metrics import (
    AT_LEAST,
    DISCOVERABLE,
    EXPECTED_ANY_OF,
    RECALL,
    excess_metric_name,
    nonmember_metric_name,
)

NEAR, PROBABLY_NEAR, GREEDY = "near_verbatim_recall", "near_verbatim_probability", "greedy"


def _verbatim_readings(finding: Finding) -> Iterator[Reading]:
    yield from readings_against_nonmembers(finding, RECALL)
    yield from readings_against_nonmembers(finding, "document_recall")
    yield from readings_against_nonmembers(finding, ANY, alone=False)


def _near_verbatim_readings(finding: Finding) -> Iterator[Reading]:
    yield from readings_against_nonmembers(finding, NEAR)
    yield from readings_against_nonmembers(finding, PROBABLY_NEAR, bounds=True)


def _probability_readings(finding: Finding) -> Iterator[Reading]:
    """The mean of one sample and of any of n; and whether single secrets are likely, which a mean may hide."""
    any_of = (
        m.name for m in finding.measurements if EXPECTED_ANY_OF.numbers_in_metric_name(m.name.removesuffix(AT_LEAST))
    )
    for name in (EXACT, f"{EXACT}{AT_LEAST}", *any_of):
        yield from readings_against_nonmembers(finding, name)
    for m in finding.measurements:
        levels = DISCOVERABLE.numbers_in_metric_name(m.name)
        if levels and (levels[0] == "1" or float(levels[1]) >= _SURELY) and is_measured(m):
            yield Reading(m, 0.0, row=finding.key, alone=False)
    yield from readings_by_repeat_count(finding, finding.measurement(nonmember_metric_name(EXACT)), EXACT)


def _personal_data_readings(finding: Finding) -> Iterator[Reading]:
    for kind, m in finding.by_kind.items():
        floor = finding.by_kind_nonmembers.get(kind)
        if is_measured(m):
            floor = floor if is_measured(floor) else None
            excess = None if floor is None else mean_excess_over_nonmembers(excess_metric_name(m.name), m, floor)
            baseline = 0.0 if floor is None else floor  # a mean of shares, and no tiny probability
            yield Reading(m, baseline, excess, finding.key, part=kind)


_SURELY = 0.9  # a record that so many samples hold with this probability is extracted by whoever draws them
VERBATIM = Kind(
    "verbatim",
    "Verbatim extraction",
    "verbatim",
    ((RECALL, 0.05), (ANY, 0.05)),
    ("verbatim",),
    _verbatim_readings,
    counted={
        RECALL: "extracted verbatim",
        ANY: "extracted by one of the guesses",
        "document_recall": "documents extracted in part",
    },
    text=True,
)
NEARLY = Kind(
    "near-verbatim",
    "Near-verbatim extraction",
    "near-verbatim",
    ((NEAR, 0.05), (PROBABLY_NEAR, 0.05)),
    ("near-verbatim",),
    _near_verbatim_readings,
    counted={NEAR: "extracted near-verbatim"},
    text=True,
)
GREEDILY = Kind(
    GREEDY, "Greedy decoding", "greedy decoding", counted={GREEDY: "extracted by greedy decoding"}, text=True
)
PROBABLE = Kind(
    "probability",
    "Exact extraction probability",
    "extraction probability",
    ((EXACT, 0.01),),
    ("probability",),
    _probability_readings,
    main=EXACT,
)
PERSONAL = Kind(
    "personal data",
    "Personal data",
    "personal data",
    ((RECALL, 0.05),),
    ("verbatim",),
    _personal_data_readings,
    text=True,
)
