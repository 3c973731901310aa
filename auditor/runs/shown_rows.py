"""List the targets that a run shows: the requested defenses, and controls in their chains of
causes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from auditor.plugins.defense import Defense
from auditor.plugins.options import get_plugin_title


@dataclass(frozen=True)
class ShownRow:
    """Target that a run shows, next to the undefended model.

    Args:
        name: name of the target.
        title: title in reports.
        defense: the defense, or a control.
        companion: whether the target serves only to explain another defense.
    """

    name: str
    title: str
    defense: Defense
    companion: bool


def list_defense_rows(
    defenses: Sequence[Defense],
    is_available: Callable[[Defense], bool],
    others: Sequence[Defense] = (),
) -> list[ShownRow]:
    """Return every defense, each followed by the controls in its chain of causes.

    Equal controls of several defenses appear once. is_available: function that tests if a control
    is available and differs from the undefended target. others: controls that attacks need.
    """
    rows = list[ShownRow]()
    displayed = list(defenses)
    for defense in defenses:
        rows.append(ShownRow(defense.name, get_plugin_title(type(defense)), defense, False))
        for cause in defense.cause_chain():
            control = cause.row
            # `in` compares by value: frozen dataclasses with equal options are the same control.
            if control is None or not is_available(control) or control in displayed:
                continue
            displayed.append(control)
            names = {row.name for row in rows} | {item.name for item in defenses}
            is_unused = control.name not in names
            if is_unused:
                name = control.name
            else:
                name = f"{control.name}-of-{defense.name}"
            title = get_plugin_title(type(control)) + (
                "" if is_unused else f" (of {get_plugin_title(type(defense))})"
            )
            rows.append(ShownRow(name, title, control, True))
    extra_controls = (item for item in others if is_available(item) and item not in displayed)
    return [
        *rows,
        *(ShownRow(item.name, get_plugin_title(type(item)), item, True) for item in extra_controls),
    ]


def name_defense_row(rows: Sequence[ShownRow], defense: Defense) -> str:
    """Return the name of the target with this defense; "" without such a target."""
    return next((row.name for row in rows if row.defense == defense), "")
