"""Explain why a defended model leaks less, as a chain of paired differences between models.

Each model of the chain adds a possible cause. All functions are pure and take values by secret.
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
    """A model in a chain of causes, with its results.

    Args:
        cause: the cause that this model adds.
        target: name of the model.
        answers: results per secret; None if this model was not measured.
        absent: the missing input if the model was not measured.
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
    """Return the chain of steps from the base model along `chain_rows`, which include the target.

    A step is the difference of members' means between two models. If non-members were also
    measured, the change of their mean, which is not memorisation, is subtracted. A cause without a
    measured model is merged with the next step. Return None if the target was not measured, or if
    no secret has a result on all models.

    base: name and results of the base model. name, unit: the compared number, which is finite for
    every model.
    """
    start, answers = base
    measured = {}
    for chain_row in chain_rows:
        if chain_row.answers is not None:
            measured[chain_row.target] = chain_row.answers
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
    """Measure the members' mean of `new` minus that of `base`, with its paired 95% interval.

    name, unit: the compared number. Only members with this number in `new`, `base` and all `rows`
    count. The same difference over non-members is subtracted if there are non-members.
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
