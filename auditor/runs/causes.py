"""Why a defended model leaks less: the step from each row of a chain to the next, paired by secret.

Pure functions on what rows found out about each secret. Knows neither models nor how rows are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from auditor.core.result import Chain, Measurement, Step
from auditor.plugins.defense import Cause
from auditor.statistics import compare


@dataclass(frozen=True)
class Answers:
    """A row's main number, the members' mean, taken apart: finite values by secret.

    floor: values of non-members, whose mean is no memory and is taken off; empty: nothing is.
    """

    name: str
    unit: str
    values: Mapping[str, float]
    floor: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ChainRow:
    """A row of a chain. answers: None where it was not measured, `absent` then says what is missing."""

    cause: Cause
    target: str
    answers: Answers | None
    absent: str = ""


def chain(target: str, base: tuple[str, Answers], chain_rows: Sequence[ChainRow]) -> Chain | None:
    """The steps from the base row, by its name, over these chain_rows, one of which is the target's own.

    Causes whose row is missing are one step with the next one. None where the target's own row was not measured, or
    where no secret was answered in all rows.
    """
    start, answers = base
    rows = {
        start: answers,
        **{chain_row.target: chain_row.answers for chain_row in chain_rows if chain_row.answers is not None},
    }
    secrets = sorted(set.intersection(*(set(row.values) for row in rows.values())))
    others = sorted(set.intersection(*(set(row.floor) for row in rows.values())))
    if target not in rows or not secrets:
        return None

    def minus(after: str, before: str) -> Measurement:
        return difference(rows[after], rows[before], secrets, others)

    steps, at = [], start
    waiting: list[ChainRow] = []
    for chain_row in chain_rows:
        waiting.append(chain_row)
        if chain_row.target in rows:
            moved = minus(chain_row.target, at) if chain_row.target != at else None
            note = _apart(waiting) if moved else f"the {at} target is that row"
            steps.append(Step(_changes(waiting), at, chain_row.target, moved, note))
            at, waiting = chain_row.target, []
    if waiting:
        steps.append(Step(_changes(waiting), at, "", None, f"not measured, for want of {_wanted(waiting)}"))
    return Chain(tuple(steps), minus(target, start))


def difference(new: Answers, base: Answers, secrets: Sequence[str], others: Sequence[str] = ()) -> Measurement:
    """The mean of `new` minus that of `base` over these secrets, with its paired 95% interval.

    others: non-members of both floors; what they changed by is taken off.
    """
    sides = [np.array([row.values[secret] for secret in secrets]) for row in (new, base)]
    floors = np.array([[row.floor[secret] for secret in others] for row in (new, base)])
    floor = (floors[0], floors[1]) if others else None
    return compare.difference(f"{base.name}_difference", base.unit, sides[0], sides[1], floor)


def _changes(chain_rows: Sequence[ChainRow]) -> dict[str, str]:
    return {chain_row.cause.name: chain_row.cause.changes for chain_row in chain_rows}


def _apart(chain_rows: Sequence[ChainRow]) -> str:
    """That several causes are one step, and what would tell them apart."""
    return f"not separated, for want of {_wanted(chain_rows[:-1])}" if len(chain_rows) > 1 else ""


def _wanted(chain_rows: Sequence[ChainRow]) -> str:
    return " and ".join(chain_row.absent for chain_row in chain_rows)
