"""Why a defended model leaks less: the step from each row of a chain to the next, paired by secret.

Pure functions on what rows found out about each secret. Knows neither models nor how rows are
chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from auditor.conclusions.outcomes import RowValuesBySecret, align_rows_by_secret
from auditor.core.result import Chain, ChainStep, Measurement
from auditor.plugins.defense import Cause
from auditor.statistics import compare


@dataclass(frozen=True)
class ChainRow:
    """A row of a chain. answers: as `build_cause_chain` takes them; None where it was not measured,
    for want of `absent`.
    """

    cause: Cause
    target: str
    answers: RowValuesBySecret | None
    absent: str = ""


def build_cause_chain(
    target: str,
    base: tuple[str, RowValuesBySecret],
    chain_rows: Sequence[ChainRow],
    name: str,
    unit: str,
) -> Chain | None:
    """The steps from the base row, by its name, over these chain_rows, one of which is the target's
    own.

    name, unit: of the number that all rows hold of each secret, finite. Members' means are
    compared; where rows hold non-members too, what these changed by is no memory and is taken off.
    Causes whose row is missing are one step with the next one. None where the target's own row was
    not measured, or where no secret was answered in all rows.
    """
    start, answers = base
    measured = {
        chain_row.target: chain_row.answers
        for chain_row in chain_rows
        if chain_row.answers is not None
    }
    rows = {start: answers, **measured}
    if target not in rows or not align_rows_by_secret(rows.values(), name, True)[0]:
        return None

    def minus(after: str, before: str) -> Measurement:
        return measure_row_difference(name, unit, rows[after], rows[before], rows.values())

    steps, at = [], start
    # Causes since the last row that was measured: they are one step with the next.
    waiting: list[ChainRow] = []
    for chain_row in chain_rows:
        waiting.append(chain_row)
        if chain_row.target in rows:
            moved = minus(chain_row.target, at) if chain_row.target != at else None
            note = "" if moved else f"the {at} target is that row"
            if moved and len(waiting) > 1:  # several causes are one step
                note = f"not separated, for want of {_missing_rows_phrase(waiting[:-1])}"
            steps.append(ChainStep(_changes_by_cause(waiting), at, chain_row.target, moved, note))
            at, waiting = chain_row.target, []
    if waiting:
        note = f"not measured, for want of {_missing_rows_phrase(waiting)}"
        steps.append(ChainStep(_changes_by_cause(waiting), at, "", None, note))
    return Chain(tuple(steps), minus(target, start))


def measure_row_difference(
    name: str,
    unit: str,
    new: RowValuesBySecret,
    base: RowValuesBySecret,
    rows: Iterable[RowValuesBySecret] = (),
) -> Measurement:
    """The mean of `new` minus that of `base` over the members that both, and these rows, hold the
    number of, with its paired 95% interval.

    What such non-members changed by is taken off.
    """
    every = [new, base, *rows]
    _, (own, before, *_) = align_rows_by_secret(every, name, True)
    others, (new_floor, floor, *_) = align_rows_by_secret(every, name, False)
    return compare.measure_mean_difference(
        f"{name}_difference", unit, own, before, (new_floor, floor) if others else None
    )


def _changes_by_cause(chain_rows: Sequence[ChainRow]) -> dict[str, str]:
    return {chain_row.cause.name: chain_row.cause.changes for chain_row in chain_rows}


def _missing_rows_phrase(chain_rows: Sequence[ChainRow]) -> str:
    return " and ".join(chain_row.absent for chain_row in chain_rows)
