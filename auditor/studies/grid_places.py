"""Where in a grid a number stands, as a claim ledger asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.result import Measurement
from auditor.records.replicates import Replicates
from auditor.utility.measure import Utility, UtilityRow
from auditor.utility.sweep_points import DefensePoint
from auditor.utility.tradeoff import NAME


@dataclass(frozen=True)
class Place:
    """A planned place of a grid, its seeds taken together: its cells, or why there are none."""

    variant: str
    at: Mapping[str, Any]
    attacks: tuple[str, ...]
    cells: tuple[Replicates, ...] = ()
    failure: str = ""
    about: str = ""  # what was attacked, for the reader


def planned_places(points: Sequence[DefensePoint], failure: str = "") -> list[Place]:
    """The places of a sweep before it is measured, or why it could not be."""
    keys = {key for point in points for key in point.at}
    return [
        Place("", {key: point.at.get(key) for key in keys}, (NAME,), failure=failure)
        for point in points
        if point.defense
    ]


def utility_places(result: Utility) -> list[Place]:
    """One place a point; its cell holds the row's numbers, epsilons as numbers without an interval."""
    keys = {key for row in result.rows for key in row.at}
    seed = int(result.plan["seed"])
    what = f"{Path(result.model).name} ({result.kind}) on {result.data}"
    made = []
    for row in result.rows:
        if row.options:
            found = {name: m for name, metric in METRICS.items() if (m := metric(row, result.vocab_size)) is not None}
            cell = Replicates(row.target, "", NAME, measured={seed: found}, options=row.options)
            made.append(Place("", {key: row.at.get(key) for key in keys}, (NAME,), (cell,), about=what))
    return made


METRICS: Mapping[str, Callable[[UtilityRow, int], Measurement | None]] = {
    "perplexity": lambda row, vocab_size: row.perplexity,
    "perplexity_ratio": lambda row, vocab_size: row.ratio,
    "perplexity_over_vocabulary": lambda row, vocab_size: _divide_by_vocabulary_size(row.perplexity, vocab_size),
    "covered": lambda row, vocab_size: row.covered,
    "slowdown": lambda row, vocab_size: row.slowdown,
    "epsilon_per_token": lambda row, vocab_size: _epsilon_measurement(row.epsilon_per_token, row),
    "epsilon": lambda row, vocab_size: _epsilon_measurement(row.epsilon, row),
    "epsilon_mean": lambda row, vocab_size: _epsilon_measurement(row.epsilon_mean, row),
}


def _divide_by_vocabulary_size(m: Measurement, size: int) -> Measurement:
    return Measurement(f"{m.name}_over_vocabulary", m.value / size, m.low / size, m.high / size, m.n, "times")


def _epsilon_measurement(value: float | None, row: UtilityRow) -> Measurement | None:
    """A number that is computed, not estimated."""
    return None if value is None else Measurement("epsilon", value, value, value, row.perplexity.n, "nats")
