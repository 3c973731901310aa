"""A training as its saved checkpoints: which there are, and what leaks and what is learnt at each, as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.records.contrasts import Part, Replicates, contrast
from auditor.reports import words
from auditor.reports.training_curve import Line, Panel, drawn
from auditor.studies.places import Place

_NAME = re.compile(r"checkpoint-([0-9]{1,12})")
_USEFUL = "perplexity"


def found(folder: Path) -> list[str]:
    """The checkpoints that a Hugging Face trainer left in a folder, by their steps. Raises AuditError for none."""
    steps = {int(match[1]): path for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    if not steps:
        raise AuditError(f"expected folders called checkpoint-STEP in --checkpoints {str(folder)!r}, got none")
    return [str(steps[step]) for step in sorted(steps)]


def curve(held: Sequence[Place]) -> str:
    """SVG: each row's main number over the steps, and perplexity; "" where the places are no checkpoints."""
    at = {step: place for place in held if (step := _step(place)) is not None}
    rows = dict.fromkeys((c.target, c.setting, c.attack) for place in at.values() for c in place.cells if c.measured)
    panels: dict[str, list[Line]] = {}
    for row in rows:
        points = list(_main(at, row))
        if points:
            panels.setdefault(points[0][1].name, []).append(Line(", ".join(row), points))
    for target in dict.fromkeys(target for target, _, _ in rows):
        if points := list(_usefulness(at, target)):
            panels.setdefault(_USEFUL, []).append(Line(target, points))
    return drawn([Panel(words.label(name), tuple(lines)) for name, lines in panels.items()]) if panels else ""


def _step(place: Place) -> int | None:
    match = _NAME.fullmatch(Path(str(place.at.get("model", ""))).name)
    return int(match[1]) if match else None


def _cells(at: dict[int, Place], row: tuple[str, str, str]) -> Iterator[tuple[int, Replicates]]:
    for step, place in sorted(at.items()):
        for cell in place.cells:
            if (cell.target, cell.setting, cell.attack) == row and cell.measured:
                yield step, cell


def _main(at: dict[int, Place], row: tuple[str, str, str]) -> Iterator[tuple[int, Measurement]]:
    for step, cell in _cells(at, row):
        name = next(iter(next(iter(cell.measured.values()))))
        yield step, contrast(name, [Part(1.0, name, cell)])


def _usefulness(at: dict[int, Place], target: str) -> Iterator[tuple[int, Measurement]]:
    for step, place in sorted(at.items()):
        cells = (cell for cell in place.cells if cell.target == target)
        known = (cell for cell in cells if any(_USEFUL in measured for measured in cell.measured.values()))
        if (cell := next(known, None)) is not None:
            yield step, contrast(_USEFUL, [Part(1.0, _USEFUL, cell)])
