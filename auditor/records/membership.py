"""Members that are told from non-members, as a way to leak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from auditor.core.result import Finding, Measurement
from auditor.records.disagreements import auc_beyond_chance, control_aucs, is_measured
from auditor.records.leak_kinds import Kind, Reading, readings_by_repeat_count
from auditor.statistics import people
from auditor.statistics.membership import FALSE_POSITIVES, SCORES
from auditor.statistics.metrics import auc_name, tpr_name


def _membership_readings(finding: Finding) -> Iterator[Reading]:
    """The main score, chosen beforehand; the other scores and single repeat counts at a level shared among them."""
    main, of_people = finding.measurement(auc_name("")), _person_inference_measurements(finding)
    if main is None or not is_measured(main) or any(map(auc_beyond_chance, control_aucs(finding))):
        yield from (Reading(m, 0.5, row=finding.key, either_way=True) for m in of_people)  # it compares no records
        return
    blind = finding.measurement(auc_name("blind"))
    yield Reading(main, 0.5, either_way=True, row=finding.key, blind=blind)
    for rate in FALSE_POSITIVES:
        found = finding.measurement(tpr_name("", rate))
        if found is not None and is_measured(found):
            yield Reading(found, rate, row=finding.key)
    others = [m for score in SCORES if (m := finding.measurement(auc_name(score))) is not None and is_measured(m)]
    looks = len(others) + len(of_people)
    for m in others:
        yield Reading(m, 0.5, row=finding.key, either_way=True, looks=looks, blind=blind)
    yield from (Reading(m, 0.5, row=finding.key, either_way=True, looks=looks) for m in of_people)
    yield from (
        replace(one, either_way=True, blind=blind) for one in readings_by_repeat_count(finding, 0.5, auc_name(""))
    )


def _person_inference_measurements(finding: Finding) -> list[Measurement]:
    """Whether people are told by records that were not trained on; nothing where the reference alone tells them."""
    found, control = map(finding.measurement, (people.INFERENCE, people.INFERENCE_CONTROL))
    if found is None or not is_measured(found) or (control is not None and auc_beyond_chance(control)):
        return []
    return [found]


KIND = Kind(
    "membership",
    "Membership",
    "membership",
    ((auc_name(""), 0.6),),
    ("membership",),
    _membership_readings,
    auc_name(""),
    alike=True,
)
