"""Compare the leakage of the saved checkpoints of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.gate.history import build_run_history
from auditor.records.result_file import RESULT
from auditor.reports import phrases
from auditor.reports.history import render_history_page
from auditor.studies.ledger import StudyPoint, measure_seed_mean

_NAME = re.compile(r"checkpoint-([0-9]{1,12})")


def find_checkpoints(folder: Path) -> list[str]:
    """Return the paths of the checkpoints of a Hugging Face trainer in a folder, ordered by step.

    Raise AuditError if the folder has no checkpoints.
    """
    steps = {}
    for path in folder.glob("checkpoint-*"):
        if match := _NAME.fullmatch(path.name):
            steps[int(match[1])] = path
    if not steps:
        raise AuditError(
            f"expected folders called checkpoint-STEP in --checkpoints {str(folder)!r}, got none"
        )
    # By number: as text, checkpoint-1000 comes before checkpoint-500.
    return [str(steps[step]) for step in sorted(steps)]


def write_checkpoint_history(folder: Path, points: Sequence[StudyPoint]) -> None:
    """Write `history.html` about a sweep's finished runs, ordered by step.

    Write nothing if the sweep's runs do not audit checkpoints.
    """
    if any(_checkpoint_step(point) is not None and point.cells for point in points):
        runs = [path.parent for path in sorted(folder.glob(f"*/{RESULT}"))]
        page = render_history_page(build_run_history(runs, "checkpoint"), folder)
        disk.replace_atomically(folder / "history.html", page)


def describe_last_checkpoint(points: Sequence[StudyPoint], name: str, most: float) -> str:
    """Return a sentence about the last checkpoint that leaks little enough.

    A checkpoint does if the whole interval of its metric is at most a limit. All earlier
    checkpoints must too. name: name of the metric. most: the limit. Raise AuditError if the sweep's
    runs do not audit checkpoints, or if no run has the metric.
    """
    bounds: dict[int, Measurement] = {}
    for point in points:
        rows = []
        for cell in point.cells:
            if any(name in measured for measured in cell.measured.values()):
                rows.append(measure_seed_mean(name, cell))
        step = _checkpoint_step(point)
        if rows and step is not None:
            # The attack with the most leakage decides; an unknown bound counts as the most.
            bounds[step] = max(rows, key=lambda m: math.inf if math.isnan(m.high) else m.high)
    if not bounds:
        raise AuditError(f"expected finished checkpoints with {name}, got none that has it")
    last = ""
    for step, bound in sorted(bounds.items()):
        value = phrases.format_measurement_value(bound)
        label = f"checkpoint-{step} ({phrases.format_metric(name)} {value})"
        # Stop at the first checkpoint beyond the limit; a NaN bound counts as beyond.
        if not bound.high <= most:
            if not last:
                return f"no checkpoint is below {most:g}: the first, {label}, is not shown to be"
            ahead = f"the next, {label}, is not shown to be"
            break
        last = label
    else:
        ahead = "none is beyond it"
    return (
        f"{last} is the last that is below {most:g} with its whole interval, as all before it are; "
        f"{ahead}"
    )


def _checkpoint_step(point: StudyPoint) -> int | None:
    match = _NAME.fullmatch(Path(str(point.at.get("model", ""))).name)
    return int(match[1]) if match else None
