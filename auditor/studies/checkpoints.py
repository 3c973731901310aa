"""A training as its saved checkpoints: which there are, and what leaks and what is learnt at each,
as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from auditor.conclusions.contrasts import WeightedMetric, contrast_over_seeds
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.reports import phrases
from auditor.reports.training_curve import Curve, Panel, training_curve_svg
from auditor.studies.ledger import Place

_NAME = re.compile(r"checkpoint-([0-9]{1,12})")
_USEFUL = "perplexity"


def find_checkpoint_paths_to_audit(folder: Path) -> list[str]:
    """The checkpoints that a Hugging Face trainer left in a folder, by their steps. Raises
    AuditError for none."""
    steps = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name))
    }
    if not steps:
        raise AuditError(
            f"expected folders called checkpoint-STEP in --checkpoints {str(folder)!r}, got none"
        )
    # By number: as text, checkpoint-1000 stands before checkpoint-500.
    return [str(steps[step]) for step in sorted(steps)]


def leakage_over_checkpoints_svg(held: Sequence[Place]) -> str:
    """SVG: each row's main number over the steps, and perplexity; "" where the places are no
    checkpoints."""
    at = {step: place for place in held if (step := _checkpoint_step(place)) is not None}
    rows = dict.fromkeys(
        (c.target, c.setting, c.attack) for place in at.values() for c in place.cells if c.measured
    )
    panels: dict[str, list[Curve]] = {}
    for row in rows:
        points = list(_main_metric_by_checkpoint_step(at, row))
        if points:
            panels.setdefault(points[0][1].name, []).append(Curve(", ".join(row), points))
    for target in dict.fromkeys(target for target, _, _ in rows):
        if points := list(_perplexity_by_checkpoint_step(at, target)):
            panels.setdefault(_USEFUL, []).append(Curve(target, points))
    drawn = [Panel(phrases.metric_label(name), tuple(lines)) for name, lines in panels.items()]
    return training_curve_svg(drawn) if drawn else ""


def last_checkpoint_below_bound_sentence(held: Sequence[Place], name: str, most: float) -> str:
    """The last checkpoint up to which every row's upper bound of this number is at most `most`: a
    sentence.

    Raises AuditError where the places are no checkpoints, or no row has the number.
    """
    at = {step: place for place in held if (step := _checkpoint_step(place)) is not None}
    found: dict[int, Measurement] = {}
    for step, place in sorted(at.items()):
        rows = [
            _checkpoint_metric_mean_over_seeds(name, cell)
            for cell in place.cells
            if _is_metric_measured_at_any_seed(name, cell)
        ]
        if rows:
            # The worst row decides.
            found[step] = max(rows, key=lambda m: m.high)
    if not found:
        raise AuditError(f"expected finished checkpoints with {name}, got none that has it")
    # Up to the first that is beyond, not all that are below; a bound that is NaN is not at most
    # anything.
    below = list(takewhile(lambda step: found[step].high <= most, found))
    beyond = [step for step in found if step not in below]
    said = {
        step: f"checkpoint-{step} ({phrases.metric_label(name)} "
        f"{phrases.value_with_interval(found[step])})"
        for step in found
    }
    if not below:
        return f"no checkpoint is below {most:g}: already {said[beyond[0]]} is not shown to be"
    ahead = (
        f"; the next, {said[beyond[0]]}, is not shown to be" if beyond else "; none is beyond it"
    )
    return (
        f"{said[below[-1]]} is the last that is below {most:g} with its whole interval, as all "
        f"before it are{ahead}"
    )


def _is_metric_measured_at_any_seed(name: str, cell: Replicates) -> bool:
    return any(name in measured for measured in cell.measured.values())


def _checkpoint_metric_mean_over_seeds(name: str, cell: Replicates) -> Measurement:
    return contrast_over_seeds(name, [WeightedMetric(1.0, name, cell)])


def _checkpoint_step(place: Place) -> int | None:
    match = _NAME.fullmatch(Path(str(place.at.get("model", ""))).name)
    return int(match[1]) if match else None


def _main_metric_by_checkpoint_step(
    at: dict[int, Place], row: tuple[str, str, str]
) -> Iterator[tuple[int, Measurement]]:
    for step, place in sorted(at.items()):
        for cell in place.cells:
            if (cell.target, cell.setting, cell.attack) == row and cell.measured:
                # The first number of a row is its main one; every seed has the same.
                yield (
                    step,
                    _checkpoint_metric_mean_over_seeds(
                        next(iter(next(iter(cell.measured.values())))), cell
                    ),
                )


def _perplexity_by_checkpoint_step(
    at: dict[int, Place], target: str
) -> Iterator[tuple[int, Measurement]]:
    for step, place in sorted(at.items()):
        known = [
            cell
            for cell in place.cells
            if cell.target == target and _is_metric_measured_at_any_seed(_USEFUL, cell)
        ]
        if known:
            yield step, _checkpoint_metric_mean_over_seeds(_USEFUL, known[0])
