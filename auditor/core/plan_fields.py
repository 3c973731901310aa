"""Describe flag, notation and rules of plan fields. Type and default are in the plan itself."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

NONE = "none"  # the value None, if the default differs
AUTO = "auto"  # the program's choice; for a count, the default instead of the plan file's value
Options = dict[str, dict[str, Any]]  # plug-in name ("" for all) -> option -> value
# Panels of --help.
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
    """Rule on when a field of the plan may be used."""

    # Part of the digest of the attacked model and its secrets: plans with equal values share both.
    SUBJECT = enum.auto()
    # Determines scores, tuning and inputs of attackers: compared runs have equal values.
    COMPARED = enum.auto()
    ATTACKS = enum.auto()  # used by attacks only
    OWN = enum.auto()  # a model and data of the user: the lab has its own
    # About the records of --data: unused if a model is audited for canaries only.
    RECORDS = enum.auto()
    # About loading: the model's provider declares which of these fields it honours.
    PROVIDED = enum.auto()
    PLACED = enum.auto()  # likewise: device and precision, also of models loaded next to it


SUBJECT, COMPARED, ATTACKS, OWN, RECORDS, PROVIDED, PLACED = FieldRule


@dataclass(frozen=True)
class PlanField:
    """Description of a plan field, without type, default and help text.

    The docstring of the plan part that holds the field has the help text.

    Args:
        rules: conditions on the use of the field.
        metavar: notation of a value.
        flags: flags instead of `--field-name`; None for no flag.
        panel: group in --help instead of the group of the plan part.
        minimum: smallest valid number.
        risk: danger if a plan file from someone else sets this field. The command line must then
        name the field too.
        risky: text that only dangerous values contain.
    """

    rules: FieldRule | None = None
    metavar: str | None = None
    flags: tuple[str, ...] | None = ()
    panel: str = ""
    minimum: int | None = None
    risk: str = ""
    risky: str = ""


def plan_field(default: Any, rules: FieldRule | None = None, **options: Any) -> Any:
    """Return a dataclass field with this default and description.

    The default `dict` means an empty dict. options: fields of `PlanField`.
    """
    metadata = {PlanField: PlanField(rules, **options)}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
