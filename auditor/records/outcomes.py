"""What each row found out about each secret, as runs are paired by it: the numbers whose means are the measurements.

They lie in `outcomes.json` beside the result, ids and numbers only: ten thousand secrets take some hundred kB a row,
too much for a record that every report loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.errors import AuditError
from auditor.core.jsonfiles import read_object
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Measurement
from auditor.records.listed import NOT_KEPT, Listed
from auditor.records.manifest import NO_EDITS, Edits
from auditor.statistics import metrics, roc
from auditor.statistics.bounds import Evidence
from auditor.statistics.compare import contrast
from auditor.statistics.intervals import share_of_each
from auditor.statistics.judging import Outcome, from_record
from auditor.statistics.metrics import SCORE, find

OUTCOMES = "outcomes.json"


@dataclass(frozen=True)
class PerSecret:
    """One row, (secrets,) each. values: by measurement; of an attack also the "score" of each first guess.

    outcome: of an attack, all that it was judged by. kinds: by kind of personal data, the share of what each secret
    holds of it that its first guess holds; NaN where it holds none.
    """

    ids: tuple[str, ...]
    member: NDArray[np.bool_]
    repeats: tuple[int | None, ...]
    values: Mapping[str, NDArray[np.float64]]
    outcome: Outcome | None = field(default=None, repr=False)
    kinds: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def measure(self, name: str, count: int | None = None, kind: str | None = None) -> Measurement | None:
        """A number of the row with its interval, worked out as it was, of each secret; None where too little is kept.

        count: of the members that stood in the data so often; kind: of personal data. A name for non-members: of those.
        """
        about = find(name)
        if kind is not None:
            held = self.kinds.get(kind, np.empty(0))[self.member == about.members if kind in self.kinds else []]
            held = held[~np.isnan(held)]
            return share_of_each(name, held) if len(held) else None
        if count is not None and (about.signed or not about.members):
            return None
        wanted = self.member & np.array([count in (None, own) for own in self.repeats], dtype=bool)
        if self.outcome is not None and (about.values or about.errors):
            return about.measure(self.outcome.only(wanted), self.outcome.only(~self.member))
        # in the order of the row: a bootstrap draws other places in another one
        return about.remade(*({name: x[side] for name, x in self.values.items()} for side in (wanted, ~self.member)))

    def chosen(self, members: bool, count: int | None) -> dict[str, NDArray[np.float64]]:
        """The values of the members (or the others), of one repeat count if given, in the order of their ids."""
        wanted = [
            i
            for i in sorted(range(len(self.ids)), key=lambda i: self.ids[i])
            if self.member[i] == members and count in (None, self.repeats[i])
        ]
        return {name: values[wanted] for name, values in self.values.items()}


@dataclass(frozen=True)
class Run:
    """A finished run, as it can be held against another."""

    name: str
    result: AuditResult
    outcomes: Mapping[CellKey, PerSecret]  # empty: a run of before they were kept
    listed: Listed = field(default=NOT_KEPT, repr=False)  # who was attacked, as the rest of its folder has it
    edits: Edits | None = NO_EDITS  # of its folder since it ended; None: it has no manifest


def of_folder(folder: Path) -> dict[CellKey, PerSecret]:
    """What a run folder holds; nothing where it holds no such file. Raises AuditError as `read`."""
    path = folder / OUTCOMES
    return read(path, read_object(path, "the judged guesses")) if path.exists() else {}


def read(path: Path, cells: Mapping[str, Any]) -> dict[CellKey, PerSecret]:
    """The rows of `RunFolder.outcomes`. Raises AuditError for what is no such record; path: for its sentence."""
    named = by_cell(path, cells)
    try:
        found = {cell: per_secret(record) for cell, record in named.items()}
        for one in found.values():
            columns: list[Sized] = [one.member, one.repeats, *one.values.values(), *one.kinds.values()]
            if any(len(column) != len(one.ids) for column in columns) or not all(isinstance(id, str) for id in one.ids):
                raise ValueError("columns of other lengths than the ids")
        return found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AuditError(f"{path}: expected what each row found out about each secret, got something else") from error


def by_cell(path: Path, held: Mapping[str, Any]) -> dict[CellKey, Any]:
    """What a file holds under the names of cells. Raises AuditError for other names; path: for its sentence."""
    try:
        return {CellKey.read(cell): record for cell, record in held.items()}
    except ValueError:
        raise AuditError(f"{path}: expected rows called target/setting/attack: the file is damaged") from None


def per_secret(record: Mapping[str, Any]) -> PerSecret:
    """A row of `RunFolder.outcomes`. Raises ValueError and the like for what is none."""
    if "hit" in record:
        o = from_record(record)
        kept = sorted((m for m in metrics.METRICS if m.per_secret and m.values), key=lambda m: m.place or math.inf)
        values = {m.name: m.values(o).astype(float) for m in kept if m.values}
        kinds = {kind: np.array(held, dtype=float) for kind, held in record.get("kinds", {}).items()}
        return PerSecret(o.ids, o.member, o.repeats, {**values, SCORE: o.score.astype(float)}, o, kinds)
    numbers = {name: np.array(values, dtype=float) for name, values in record["values"].items()}
    return PerSecret(tuple(record["ids"]), np.array(record["member"], dtype=bool), tuple(record["repeats"]), numbers)


def found_at_rate(metric: str, row: PerSecret | None) -> Evidence | None:
    """Members found at a rate of false positives, with bounds at any level; None for what is no such number of it."""
    about = find(metric)
    if not about.rate or row is None or about.scores not in row.values:
        return None
    own, others = (row.chosen(members, None)[about.scores] for members in (True, False))
    if len(others) < roc.needed(about.rate) or np.isnan(row.values[about.scores]).any() or not len(own):
        return None
    return roc.FoundRate(own, others, about.rate)


def difference(metric: str, count: int | None, new: PerSecret, base: PerSecret) -> Evidence | str:
    """The metric of `new` minus that of `base`, paired by secret; or why there is none. The secrets are the same.

    count: among the members of this repeat count. `_nonmembers` metrics are taken over the non-members.
    """
    about = find(metric)
    first, second = (rows.chosen(about.members, count) for rows in (new, base))
    if metric == SCORE or any(column not in side for column in about.columns for side in (first, second)):
        if about.scores:
            return f"the scores of {metric} were not kept"
        return f"{metric} is not kept secret by secret (kept: {', '.join(name for name in first if name != SCORE)})"
    n = len(next(iter(first.values())))
    if not n:
        return f"no secret stood in the data {count} times" if count is not None else "no secret to pair"
    one, other = (tuple(side[column] for column in about.columns) for side in (first, second))
    if about.errors is not None:
        return contrast(one, other, errors=about.wrong(n))
    if about.scores:
        one, other = ((*own, rows.chosen(False, None)[about.scores]) for own, rows in ((one, new), (other, base)))
        if np.isnan(np.concatenate([*one, *other])).any():
            return f"{metric} is by a score that is not a number for some secret"
        return contrast(one, other, rate=about.rate)
    if not np.isfinite([*one, *other]).all():
        return f"{metric} is not a number for some secret"
    return contrast(one, other)
