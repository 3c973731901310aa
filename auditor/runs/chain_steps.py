"""Why a defended model leaks less: the step from each row of a chain to the next, paired by secret.

Pure functions on what rows found out about each secret. Knows neither models nor how rows are
chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.conclusions.outcomes import RowValuesBySecret, secret_ids_common_to_rows
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
    secrets, others = (
        secret_ids_common_to_rows(rows.values(), name, members) for members in (True, False)
    )
    if target not in rows or not secrets:
        return None

    def minus(after: str, before: str) -> Measurement:
        return paired_mean_difference_of_run_rows(
            name, unit, rows[after], rows[before], secrets, others
        )

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


def paired_mean_difference_of_run_rows(
    name: str,
    unit: str,
    new: RowValuesBySecret,
    base: RowValuesBySecret,
    secrets: Sequence[str],
    others: Sequence[str] = (),
) -> Measurement:
    """The mean of `new` minus that of `base` over these members, with its paired 95% interval.

    others: non-members of both; what they changed by is taken off.
    """

    def sides(members: bool, ids: Sequence[str]) -> NDArray[np.float64]:
        return np.array(
            [
                [held[id] for id in ids]
                for held in (row.values_by_secret(name, members) for row in (new, base))
            ]
        )

    # (2, ids) each: the new row above the base. With floors it is a difference in differences.
    (own, before), floors = sides(True, secrets), sides(False, others)
    floor = (floors[0], floors[1]) if others else None
    return compare.measure_mean_difference(f"{name}_difference", unit, own, before, floor)


def _changes_by_cause(chain_rows: Sequence[ChainRow]) -> dict[str, str]:
    return {chain_row.cause.name: chain_row.cause.changes for chain_row in chain_rows}


def _missing_rows_phrase(chain_rows: Sequence[ChainRow]) -> str:
    return " and ".join(chain_row.absent for chain_row in chain_rows)
