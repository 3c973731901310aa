"""Plot leakage and perplexity over the saved checkpoints of a training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from auditor.conclusions.contrasts import WeightedMetric, measure_seed_contrast
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.reports import phrases
from auditor.reports.training_curve import Curve, Panel, draw_training_curve
from auditor.studies.ledger import Place

_NAME = re.compile(r"checkpoint-([0-9]{1,12})")
_USEFUL = "perplexity"


def find_checkpoints(folder: Path) -> list[str]:
    """Return the checkpoints of a Hugging Face trainer in a folder, ordered by step.

    Raise AuditError if the folder has no checkpoints.
    """
    steps = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name))
    }
    if not steps:
        raise AuditError(
            f"expected folders called checkpoint-STEP in --checkpoints {str(folder)!r}, got none"
        )
    # By number: as text, checkpoint-1000 comes before checkpoint-500.
    return [str(steps[step]) for step in sorted(steps)]


def draw_checkpoint_leakage(places: Sequence[Place]) -> str:
    """Return an SVG of each row's main number and of perplexity over the training steps.

    Return "" if the places are not checkpoints.
    """
    place_by_step = {
        step: place for place in places if (step := _checkpoint_step(place)) is not None
    }
    rows = dict.fromkeys(
        (c.target, c.setting, c.attack)
        for place in place_by_step.values()
        for c in place.cells
        if c.measured
    )
    panels: dict[str, list[Curve]] = {}
    for row in rows:
        points = list(_list_step_metrics(place_by_step, row))
        if points:
            panels.setdefault(points[0][1].name, []).append(Curve(", ".join(row), points))
    for target in dict.fromkeys(target for target, _, _ in rows):
        if points := list(_list_step_perplexities(place_by_step, target)):
            panels.setdefault(_USEFUL, []).append(Curve(target, points))
    plot_panels = [
        Panel(phrases.format_metric(name), tuple(lines)) for name, lines in panels.items()
    ]
    return draw_training_curve(plot_panels) if plot_panels else ""


def describe_last_checkpoint(places: Sequence[Place], name: str, most: float) -> str:
    """Return a sentence naming the last checkpoint before any upper bound of `name` exceeds `most`.

    Raise AuditError if the places are not checkpoints, or no row has the metric `name`.
    """
    place_by_step = {
        step: place for place in places if (step := _checkpoint_step(place)) is not None
    }
    bounds: dict[int, Measurement] = {}
    for step, place in sorted(place_by_step.items()):
        rows = [
            _average_seed_metrics(name, cell)
            for cell in place.cells
            if _is_metric_measured(name, cell)
        ]
        if rows:
            # The worst row decides.
            bounds[step] = max(rows, key=lambda m: m.high)
    if not bounds:
        raise AuditError(f"expected finished checkpoints with {name}, got none that has it")
    # Until the first beyond, not all below; a NaN bound is not at most anything.
    before = list(takewhile(lambda step: bounds[step].high <= most, bounds))
    beyond = [step for step in bounds if step not in before]
    labels = {
        step: f"checkpoint-{step} ({phrases.format_metric(name)} "
        f"{phrases.format_measurement_value(bounds[step])})"
        for step in bounds
    }
    if not before:
        return f"no checkpoint is below {most:g}: already {labels[beyond[0]]} is not shown to be"
    if beyond:
        ahead = f"; the next, {labels[beyond[0]]}, is not shown to be"
    else:
        ahead = "; none is beyond it"
    return (
        f"{labels[before[-1]]} is the last that is below {most:g} with its whole interval, as all "
        f"before it are{ahead}"
    )


def _is_metric_measured(name: str, cell: Replicates) -> bool:
    return any(name in measured for measured in cell.measured.values())


def _average_seed_metrics(name: str, cell: Replicates) -> Measurement:
    return measure_seed_contrast(name, [WeightedMetric(1.0, name, cell)])


def _checkpoint_step(place: Place) -> int | None:
    match = _NAME.fullmatch(Path(str(place.at.get("model", ""))).name)
    return int(match[1]) if match else None


def _list_step_metrics(
    at: dict[int, Place], row: tuple[str, str, str]
) -> Iterator[tuple[int, Measurement]]:
    for step, place in sorted(at.items()):
        for cell in place.cells:
            if (cell.target, cell.setting, cell.attack) == row and cell.measured:
                # The first number of a row is its main number, equal for all seeds.
                yield (
                    step,
                    _average_seed_metrics(next(iter(next(iter(cell.measured.values())))), cell),
                )


def _list_step_perplexities(at: dict[int, Place], target: str) -> Iterator[tuple[int, Measurement]]:
    for step, place in sorted(at.items()):
        known = [
            cell
            for cell in place.cells
            if cell.target == target and _is_metric_measured(_USEFUL, cell)
        ]
        if known:
            yield step, _average_seed_metrics(_USEFUL, known[0])
