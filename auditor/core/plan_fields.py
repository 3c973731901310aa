"""What is said of a field of a plan, beside its type and its default: its help, its flag, the rules
it is under."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

NONE = "none"  # nothing, where the default is something
AUTO = "auto"  # as the program finds best; of a count: not what the plan file says, but the default
Options = dict[str, dict[str, Any]]  # plug-in name ("" for all) -> option -> value
# of --help
PANELS = (
    "target",
    "data",
    "attacks",
    "defenses",
    "privacy",
    "compute",
    "output",
    "advanced",
)


class FieldRule(enum.Flag):
    """What a field takes part in."""

    # the digest of which model is attacked for which secrets: plans that agree in it share both
    SUBJECT = enum.auto()
    # what attackers score with, tune on and look at: compared runs agree in it
    COMPARED = enum.auto()
    ATTACKS = enum.auto()  # attacks and nothing else: who runs none has no use of it
    OWN = enum.auto()  # a model and data of the user's own: the lab has its own
    # the records of --data: there are none where a model is asked for canaries alone
    RECORDS = enum.auto()
    # how the model is loaded: its provider says which of these fields it heeds
    PROVIDED = enum.auto()
    PLACED = enum.auto()  # likewise: device and precision, of models loaded beside it too


SUBJECT, COMPARED, ATTACKS, OWN, RECORDS, PROVIDED, PLACED = FieldRule


@dataclass(frozen=True)
class PlanField:
    """What is said of a field, beside its type, its default and its help, which stands in the
    docstring of its part.

    metavar: how a value is written. flags: where they are not `--its-name`; None: there is none.
        panel: of --help,
    where it is not that of its part. least: the smallest number. risk: what a plan file of somebody
    else's would do by it; the command line has to name it as well. risky: a text that risky values
    hold, where not every value is risky.
    """

    rules: FieldRule | None = None
    metavar: str | None = None
    flags: tuple[str, ...] | None = ()
    panel: str = ""
    least: int | None = None
    risk: str = ""
    risky: str = ""


def plan_field(default: Any, rules: FieldRule | None = None, **said: Any) -> Any:
    """A field of a part with this default, and what is said of it; `dict` stands for an empty
    one."""
    metadata = {PlanField: PlanField(rules, **said)}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
