"""Describe plan fields: the definition holds a field's rules, the docstring its flag and help."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
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
    """Rule about when a plan field may be used."""

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
    """Conditions and limits of a plan field.

    The field's type and default are in the dataclass; its help text is in the docstring.

    Args:
        rules: conditions under which the field may be used.
        has_flag: whether the command line has a flag for the field.
        panel: group in --help, if it differs from the group of the plan part.
        minimum: smallest valid number.
        risk: why the field is dangerous in a plan file from someone else. A field with a risk must
            also be given on the command line; "" for a harmless field.
        risky: characters that make a value dangerous, such as "://"; "" if every value is.
    """

    rules: FieldRule | None = None
    has_flag: bool = True
    panel: str = ""
    minimum: int | None = None
    risk: str = ""
    risky: str = ""


def plan_field(default: Any, rules: FieldRule | None = None, **options: Any) -> Any:
    """Return a dataclass field with this default and description.

    The default `dict` means an empty dict. `options` are fields of `PlanField`.
    """
    metadata = {PlanField: PlanField(rules, **options)}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class DocstringEntry:
    """Docstring entry of a field, written `name (-f, --flag NOTATION): help`.

    Args:
        flags: flags to use instead of `--name`.
        metavar: placeholder for the value in --help; "" for the usual placeholder of its type.
        help: help text.
    """

    flags: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""


_ENTRY = re.compile(r"^( *)(\w+)(?: \(([^)]+)\))?: (.+(?:\n\1    .+)*)", re.MULTILINE)


def read_docstring_entries(described: Any) -> dict[str, DocstringEntry]:
    """Return the entries in the docstring of a class or function, keyed by name."""
    entries = {}
    for _, name, notation, text in _ENTRY.findall(inspect.cleandoc(described.__doc__ or "")):
        words = [word.strip(",") for word in notation.split()]
        n_flags = sum(word.startswith("-") for word in words)
        entries[name] = DocstringEntry(
            tuple(words[:n_flags]), " ".join(words[n_flags:]), " ".join(text.split())
        )
    return entries
