"""Which rows a run shows: the defenses that were asked for, and the controls of their chains under
names of their own.

Knows defenses; not how a row is built or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from auditor.plugins.defense import Defense
from auditor.plugins.options import get_plugin_title


@dataclass(frozen=True)
class ShownRow:
    """A row: under which name and title a defense is shown, and whether that is for another one's
    sake."""

    name: str
    title: str
    defense: Defense
    companion: bool


def defense_rows_with_controls(
    defenses: Sequence[Defense], there: Callable[[Defense], bool], others: Sequence[Defense] = ()
) -> list[ShownRow]:
    """Every defense with the controls of its chain behind it; equal controls of several defenses
    are one row.

    there: whether a control can be had, and is not the undefended target itself. others: controls
    that attacks want.
    """
    rows, shown = list[ShownRow](), list(defenses)
    for defense in defenses:
        rows.append(ShownRow(defense.name, get_plugin_title(type(defense)), defense, False))
        for cause in defense.cause_chain():
            control = cause.row
            # `in` compares by value: frozen dataclasses of equal options are one control.
            if control is None or not there(control) or control in shown:
                continue
            shown.append(control)
            taken = {row.name for row in rows} | {one.name for one in defenses}
            own = control.name not in taken
            name = control.name if own else f"{control.name}-of-{defense.name}"
            title = get_plugin_title(type(control)) + (
                "" if own else f" (of {get_plugin_title(type(defense))})"
            )
            rows.append(ShownRow(name, title, control, True))
    wanted = (one for one in others if there(one) and one not in shown)
    return [*rows, *(ShownRow(one.name, get_plugin_title(type(one)), one, True) for one in wanted)]


def row_name_of_defense(rows: Sequence[ShownRow], defense: Defense) -> str:
    """The name of the row that shows this defense; "" where none does."""
    return next((row.name for row in rows if row.defense == defense), "")
