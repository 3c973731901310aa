"""Test if the judged model is the deployed model, and report the age of the run.

The test compares file digests and dates, and loads no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from auditor.core.plan_parts import TargetPlan
from auditor.core.result import AuditResult
from auditor.gate.policy import Required
from auditor.gate.rulings import Ruling, make_gate_ruling
from auditor.records.file_digests import find_changed_files, list_model_roles

_MODEL = "model"  # the target's name in the digests, and in the objects passed from Python
# The name of its digest if it was queried over a network: its weights cannot be read.
ANSWERS = "model/answer to the handshake"
_SHOWN = 3  # files named in a sentence


@dataclass(frozen=True)
class DeployedModelMatch:
    """Result of comparing the deployed files with the audited files.

    Args:
        statement: sentences about the model, the run's date and age, and the model's location.
        is_local: whether the model is on this machine.
        age: days since the run.
        differs: differing files; "" if there are none.
    """

    statement: str
    is_local: bool
    age: float
    differs: str = ""


def compare_deployed_files(
    result: AuditResult,
    target: TargetPlan,
    now: Mapping[str, str],
    place: str,
    run_time: datetime,
    at: datetime,
) -> DeployedModelMatch:
    """Compare the files of the deployed model with the files that the run read.

    Args:
        result: result of the run.
        target: the plan's fields about the audited model.
        now: SHA-256 of each file of the deployed model, keyed by `role/file`.
        place: folder or hub id of the deployed model.
        run_time: time of the run.
        at: time of this comparison.
    """
    age = (at - run_time).total_seconds() / 86400
    in_memory = _MODEL in result.plan.get("objects", {})
    is_here = _MODEL in list_model_roles(result.weights) & list_model_roles(now) and not in_memory
    changes = []
    if is_here:
        changes = list(map(" ".join, find_changed_files(result.weights, now)))
    differs = ", ".join(changes[:_SHOWN])
    if len(changes) > _SHOWN:
        differs += f" and {len(changes) - _SHOWN} more"
    name = f"model {place}"
    if target.uses_builtin_lab:
        name = "the built-in lab"
    date = f"judged {run_time:%Y-%m-%d %H:%M} UTC ({_format_run_age(age)})"
    is_remote = ANSWERS in result.weights
    state = _describe_deployed_model(
        in_memory, target.uses_builtin_lab, is_remote, is_here, differs
    )
    return DeployedModelMatch(f"{name}, {date}: {state}", is_here, age, differs)


def _describe_deployed_model(
    in_memory: bool, lab: bool, model: bool, local_files: bool, differs: str
) -> str:
    """Return a phrase that says whether the deployed model is the audited model.

    Args:
        in_memory: whether the audited model was an object in the memory of a process.
        lab: whether the model is the built-in lab.
        model: whether the model is behind an API.
        local_files: whether the model's files are on this machine.
        differs: the differing files; "" if there are none.
    """
    if in_memory:
        return (
            "in the memory of a process: it cannot be checked that the deployed model is the "
            "judged one"
        )
    if lab:
        return "trained for the run and not deployed"
    if model:
        return "behind an API: it cannot be checked that it still uses the judged weights"
    if not local_files:
        return (
            "not on this machine: it cannot be checked here that the deployed model is the judged "
            "one"
        )
    if differs:
        return f"another model is there now: {differs}"
    return "unchanged since"


def _format_run_age(days: float) -> str:
    if days < 0:
        return "in the future"
    for length, unit in ((1.0, "day"), (1 / 24, "hour"), (1 / 1440, "minute")):
        if (count := math.floor(days / length)) >= 1:
            return f"{count:,} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def judge_deployed_model(match: DeployedModelMatch, require: Required) -> Iterator[Ruling]:
    """Yield a failed ruling for a different model, and a ruling for each policy requirement on the
    model.
    """
    if match.differs:
        reason = f"the judged model is not the deployed one: {match.statement}"
        yield make_gate_ruling(reason, "the judged model is deployed")
    if require.model_here:
        yield make_gate_ruling(
            match.statement, "model_here", "held" if match.is_local else "failed"
        )
    if require.max_age is not None:
        # below 0: one of the two clocks is wrong, so the age is unknown
        rule = f"max_age = {require.max_age:g} days"
        is_recent = 0 <= match.age <= require.max_age
        yield make_gate_ruling(match.statement, rule, "held" if is_recent else "failed")
