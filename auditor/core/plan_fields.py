"""Describe plan fields: the definition holds a field's rules, the docstring its flag and help."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import typing
from collections.abc import Iterator
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
NO_RULE = FieldRule(0)


@dataclass(frozen=True, kw_only=True)
class FlagNotation:
    """Notation of a flag, from a docstring entry `name (-f, --flag NOTATION): help`.

    Args:
        flags: flags to use instead of `--name`.
        metavar: placeholder for the value in --help; "" for the usual placeholder of its type.
        help: help text.
    """

    flags: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanField(FlagNotation):
    """All that is known of a plan field: value, flag, conditions and limits.

    Args:
        part: part of the plan that holds the field; "" if the plan itself does.
        kind: type of the value.
        default: default value.
        rules: conditions under which the field may be used.
        has_flag: whether the command line has a flag for the field.
        panel: group in --help, if it differs from the group of the plan part.
        minimum: smallest valid number.
        risk: why the field is dangerous in a plan file from someone else. A field with a risk must
            also be given on the command line; "" for a harmless field.
        risky: characters that make a value dangerous, such as "://"; "" if every value is.
    """

    part: str
    kind: Any
    default: Any
    rules: FieldRule = NO_RULE
    has_flag: bool = True
    panel: str
    minimum: int | None = None
    risk: str = ""
    risky: str = ""


def plan_field(default: Any, rules: FieldRule = NO_RULE, **options: Any) -> Any:
    """Return a dataclass field with this default and description.

    The default `dict` means an empty dict. `options` are fields of `PlanField`.
    """
    metadata = {"rules": rules, **options}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_ENTRY = re.compile(r"^( *)(\w+)(?: \(([^)]+)\))?: (.+(?:\n\1    .+)*)", re.MULTILINE)


def read_docstring_entries(described: Any) -> dict[str, FlagNotation]:
    """Return the entries in the docstring of a class or function, keyed by name."""
    entries = {}
    for _, name, notation, text in _ENTRY.findall(inspect.cleandoc(described.__doc__ or "")):
        words = [word.strip(",") for word in notation.split()]
        n_flags = sum(word.startswith("-") for word in words)
        entries[name] = FlagNotation(
            flags=tuple(words[:n_flags]),
            metavar=" ".join(words[n_flags:]),
            help=" ".join(text.split()),
        )
    return entries


def list_plan_fields(kind: Any, part: str = "") -> Iterator[tuple[str, PlanField]]:
    """Yield the name and the description of each field of a plan class and of its parts."""
    hints = typing.get_type_hints(kind)  # the annotations themselves are strings (from __future__)
    entries = read_docstring_entries(kind)
    for item in dataclasses.fields(kind):
        name = item.name
        if dataclasses.is_dataclass(hints[name]):
            yield from list_plan_fields(hints[name], name)
            continue
        default = item.default
        if default is dataclasses.MISSING:
            default = {}
        entry = entries.get(name, FlagNotation())
        help = entry.help
        if "[default:" not in help and default not in (None, False, (), {}):
            help += f" [default: {f'--{name}' if default is True else default}]"
        yield (
            name,
            PlanField(
                part=part,
                kind=hints[name],
                default=default,
                flags=entry.flags or (f"--{name.replace('_', '-')}",),
                metavar=entry.metavar,
                help=help,
                **{"panel": kind.panel, **item.metadata},
            ),
        )
