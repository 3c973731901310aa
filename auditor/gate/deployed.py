"""Whether the model that a run judged is the one that lies where it is deployed, and how old the
run is.

A run is about the bytes that it read. Knows digests and dates; reads no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from auditor.core.plan_parts import TargetPlan
from auditor.core.result import AuditResult
from auditor.gate.policy import Required
from auditor.gate.rulings import Ruling, make_ruling
from auditor.records.file_digests import changed_model_files, roles_of_model_files

_MODEL = "model"  # the target among the digests, and among the objects that Python gave
# its digest, where it was asked over a network: nobody reads its weights
ANSWERS = "model/answer to the handshake"
_SHOWN = 3  # files named in a sentence


@dataclass(frozen=True)
class DeployedModelMatch:
    """said: the model, the date and the age of the run, and whether its model is here. differs: how
    its files do."""

    said: str
    here: bool
    age: float  # days
    differs: str = ""


def compare_judged_with_deployed_files(
    result: AuditResult,
    target: TargetPlan,
    now: Mapping[str, str],
    place: str,
    made: datetime,
    at: datetime,
) -> DeployedModelMatch:
    """What lies at `place` (now: `role/file` -> SHA-256) against what the run read. made, at: when
    it ran, and now."""
    age = (at - made).total_seconds() / 86400
    in_memory = _MODEL in result.plan.get("objects", {})
    here = (
        _MODEL in roles_of_model_files(result.weights) & roles_of_model_files(now) and not in_memory
    )
    found = (
        [f"{name} {how}" for name, how in changed_model_files(result.weights, now)] if here else []
    )
    differs = ", ".join(found[:_SHOWN]) + (
        f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    )
    name = "the built-in lab" if target.uses_builtin_lab else f"model {place}"
    date = f"judged {made:%Y-%m-%d %H:%M} UTC ({_format_run_age(age)})"
    asked = ANSWERS in result.weights
    stands = _describe_deployed_model(in_memory, target.uses_builtin_lab, asked, here, differs)
    return DeployedModelMatch(f"{name}, {date}: {stands}", here, age, differs)


def _describe_deployed_model(
    in_memory: bool, lab: bool, model: bool, local_files: bool, differs: str
) -> str:
    if in_memory:
        return (
            "in the memory of a process: nobody can say whether what is deployed is what was judged"
        )
    if lab:
        return "trained for the run, and deployed nowhere"
    if model:
        return (
            "behind an API: nobody can say whether it still answers by the weights that were judged"
        )
    if not local_files:
        return (
            "not on this machine: nobody can say here whether what is deployed is what was judged"
        )
    return f"another model lies there now: {differs}" if differs else "unchanged since"


def _format_run_age(days: float) -> str:
    if days < 0:
        return "in the future"
    for length, unit in ((1.0, "day"), (1 / 24, "hour"), (1 / 1440, "minute")):
        if (count := math.floor(days / length)) >= 1:
            return f"{count:,} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def judge_deployed_model(found: DeployedModelMatch, require: Required) -> Iterator[Ruling]:
    """A ruling for another model, and for each thing that the policy requires of it."""
    if found.differs:
        why = f"the judged model is not the deployed one: {found.said}"
        yield make_ruling(why, "the judged model is deployed")
    if require.model_here:
        yield make_ruling(found.said, "model_here", "held" if found.here else "failed")
    if require.max_age is not None:
        # below 0: the clock is wrong here or was there, so nobody knows how old the run is
        rule, held = f"max_age = {require.max_age:g} days", 0 <= found.age <= require.max_age
        yield make_ruling(found.said, rule, "held" if held else "failed")
