"""Explain why a defended model leaks less, by paired differences between the rows of a chain.

All functions are pure and take the values of rows by secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from auditor.conclusions.outcomes import RowValuesBySecret, align_rows
from auditor.core.result import Chain, ChainStep, Measurement
from auditor.plugins.defense import Cause
from auditor.statistics import compare


@dataclass(frozen=True)
class ChainRow:
    """A row of a chain. answers: values as in `build_cause_chain`; None if the row was not measured
    because `absent` is missing."""

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
    """Return the steps from the base row along `chain_rows`, which include the target's row.

    A step is the difference of members' means. If the rows have non-members, the non-members'
    change, which is not memorisation, is subtracted. A cause without a measured row is merged with
    the next step. Return None if the target's row was not measured, or if no secret has an answer
    in all rows.

    base: the base row's name and values. name, unit: the compared number, which is finite in every
    row.
    """
    start, answers = base
    measured = {
        chain_row.target: chain_row.answers
        for chain_row in chain_rows
        if chain_row.answers is not None
    }
    rows = {start: answers, **measured}
    if target not in rows or not align_rows(rows.values(), name, True)[0]:
        return None

    def minus(after: str, before: str) -> Measurement:
        return measure_row_difference(name, unit, rows[after], rows[before], rows.values())

    steps = []
    at = start
    # Causes since the last measured row: they are merged with the next step.
    waiting: list[ChainRow] = []
    for chain_row in chain_rows:
        waiting.append(chain_row)
        if chain_row.target in rows:
            if chain_row.target != at:
                moved = minus(chain_row.target, at)
            else:
                moved = None
            if moved:
                note = ""
            else:
                note = f"the {at} target is that row"
            if moved and len(waiting) > 1:  # several causes in a step
                note = f"not separated, for want of {_format_missing_rows(waiting[:-1])}"
            steps.append(ChainStep(_group_changes(waiting), at, chain_row.target, moved, note))
            at = chain_row.target
            waiting = []
    if waiting:
        note = f"not measured, for want of {_format_missing_rows(waiting)}"
        steps.append(ChainStep(_group_changes(waiting), at, "", None, note))
    return Chain(tuple(steps), minus(target, start))


def measure_row_difference(
    name: str,
    unit: str,
    new: RowValuesBySecret,
    base: RowValuesBySecret,
    rows: Iterable[RowValuesBySecret] = (),
) -> Measurement:
    """Measure the members' mean of `new` minus `base`, with its paired 95% interval.

    Only members with this number in `new`, `base` and all `rows` count. The same difference over
    non-members, if there are any, is subtracted.
    """
    aligned = [new, base, *rows]
    _, (after, before, *_) = align_rows(aligned, name, True)
    nonmember_ids, (new_floor, base_floor, *_) = align_rows(aligned, name, False)
    return compare.measure_mean_difference(
        f"{name}_difference",
        unit,
        after,
        before,
        (new_floor, base_floor) if nonmember_ids else None,
    )


def _group_changes(chain_rows: Sequence[ChainRow]) -> dict[str, str]:
    return {chain_row.cause.name: chain_row.cause.changes for chain_row in chain_rows}


def _format_missing_rows(chain_rows: Sequence[ChainRow]) -> str:
    return " and ".join(chain_row.absent for chain_row in chain_rows)
