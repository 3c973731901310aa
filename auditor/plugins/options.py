"""What a plug-in class says of itself, and its options as a command line or TOML gives them.
Imports no plug-in."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from auditor.core.errors import AuditError, unknown_name_error

Plugin = TypeVar("Plugin")
ENTRY_POINTS = "audit.plugins"  # where other distributions name plug-ins of theirs


def build_plugin(
    kind: str, known: Mapping[str, type[Plugin]], name: str, options: Mapping[str, Any]
) -> Plugin:
    """An attack or defense by name with its options. Raises AuditError with the nearest name for an
    unknown one."""
    if name not in known:
        raise unknown_name_error(kind, name, known)
    cls = known[name]
    # Resolved, as `from __future__ import annotations` leaves strings in `field.type`.
    hints = typing.get_type_hints(cls)
    fields = set(plugin_option_defaults(cls))
    values = {}
    for option, value in options.items():
        if option not in fields:
            raise unknown_name_error(f"option of {kind} {name}:", option, fields)
        values[option] = parse_plugin_option_value(f"{name}.{option}", hints[option], value)
    return cls(**values)


def parse_plugin_option_value(where: str, kind: Any, value: Any) -> Any:
    """A command-line or TOML value as the annotated type. No value is guessed at: `samples=ten` is
    refused."""
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise AuditError(f"expected {where} in {typing.get_args(kind)}, got {value!r}")
        return value
    if kind is bool:
        words = {"true": True, "false": False}
        if str(value).lower() not in words:
            raise AuditError(f"expected {where} to be true or false, got {value!r}")
        return words[str(value).lower()]
    fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    try:
        if (
            not isinstance(value, str) and not fits
        ):  # from TOML: 2.7 is no whole number, true is no number
            raise TypeError
        made = kind(value)
        if kind is float and not math.isfinite(
            made
        ):  # no option means anything by an infinite number
            raise ValueError
        return made
    except (TypeError, ValueError, OverflowError) as error:
        raise AuditError(
            f"expected {where} to be {_WORDS.get(kind, kind.__name__)}, got {value!r}"
        ) from error


_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", str: "text"}


def require_options_at_least(plugin: Any, least: int, *options: str) -> None:
    """Refuses a plug-in with one of these options below `least`. Raises AuditError."""
    for option in options:
        if getattr(plugin, option) < least:
            raise AuditError(f"expected {option} >= {least}, got {getattr(plugin, option)}")


def require_listed_options(plugin: Any) -> None:
    """Refuses a plug-in one of whose `Literal` options has a value that is not listed there. Raises
    AuditError."""
    for option, kind in typing.get_type_hints(type(plugin)).items():
        if typing.get_origin(kind) is Literal and getattr(plugin, option) not in typing.get_args(
            kind
        ):
            raise AuditError(
                f"expected {option} in {typing.get_args(kind)}, got {getattr(plugin, option)!r}"
            )


def plugin_option_defaults(cls: type) -> dict[str, Any]:
    """Option names and defaults of a plug-in, in the order of declaration."""
    # `dataclasses.MISSING` for an option without a default.
    return {field.name: field.default for field in dataclasses.fields(cls)}


def allowed_option_values(cls: type) -> dict[str, tuple[Any, ...]]:
    """Of the options that take one of a few values, these."""
    few = {bool: ("true", "false")}
    hints = typing.get_type_hints(cls)
    found = {
        name: few.get(hints[name], typing.get_args(hints[name]))
        for name in plugin_option_defaults(cls)
    }
    return {name: values for name, values in found.items() if values}


def plugin_description(cls: type) -> str:
    """Return the first paragraph of the docstring."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n", 1)[0].split())


def plugin_title(cls: Any) -> str:
    """What people read in a table: the class's `title`, else its name."""
    title: str = cls.title or cls.name
    return title
