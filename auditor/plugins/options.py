"""Describe plug-in classes and parse their options from a command line or TOML.

This module does not import plug-ins.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from auditor.core.errors import AuditError, refuse_unknown_names

Plugin = TypeVar("Plugin")
ENTRY_POINTS = "audit.plugins"  # other distributions name their plug-ins here


_SIGNS = {"[": ">=", "(": ">"}


@dataclass(frozen=True)
class Limits:
    """An interval of valid numbers for an option: `Annotated[float, Limits(0, 1, "()")]`.

    `ends` has a square bracket for each end that is valid, and a parenthesis for each end that is
    not.
    """

    low: float
    high: float = math.inf
    ends: str = "[)"

    def __contains__(self, value: float) -> bool:
        is_above = value > self.low or (value == self.low and self.ends[0] == "[")
        return is_above and (value < self.high or (value == self.high and self.ends[1] == "]"))

    def __str__(self) -> str:
        if self.high == 1:
            return f"in {self.ends[0]}{self.low:g}, 1{self.ends[1]}"
        least = f"{_SIGNS[self.ends[0]]} {self.low:g}"
        if self.high == math.inf:
            return least
        return f"{least} and at most {self.high:,.12g}"


# Kinds of options.
Count = Annotated[int, Limits(1)]
CountOrZero = Annotated[int, Limits(0)]
Nonnegative = Annotated[float, Limits(0)]
Positive = Annotated[float, Limits(0, ends="()")]
Share = Annotated[float, Limits(0, 1, "()")]
ShareOrAll = Annotated[float, Limits(0, 1, "(]")]


# `from __future__ import annotations` leaves strings in `field.type`. To compile those of a class
# takes a millisecond, and a run makes hundreds of plug-ins.
_resolve_annotations: Callable[..., dict[str, Any]] = functools.cache(typing.get_type_hints)


class Configured:
    """Base class of plug-ins: frozen dataclasses whose fields are their options."""

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # shown in tables; "": its name

    def __post_init__(self) -> None:
        """Raise AuditError if an option has a value that its annotation excludes.

        Annotations with `Literal` or `Limits` exclude values.
        """
        hints = _resolve_annotations(type(self), include_extras=True)
        for option in get_option_defaults(type(self)):
            kind = hints[option]
            value = getattr(self, option)
            if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
                raise AuditError(f"expected {option} in {typing.get_args(kind)}, got {value!r}")
            for limits in getattr(kind, "__metadata__", ()):
                if isinstance(limits, Limits) and value not in limits:
                    raise AuditError(f"expected {option} {limits}, got {value:,}")


def build_plugin(
    kind: str, known: Mapping[str, type[Plugin]], name: str, options: Mapping[str, Any]
) -> Plugin:
    """Build the plug-in `name` with its options.

    `kind` is a noun such as attack or defense, and `known` maps names to plug-ins. If the name is
    unknown, raise AuditError with the closest known name.
    """
    refuse_unknown_names(kind, [name], known)
    cls = known[name]
    hints = _resolve_annotations(cls)
    refuse_unknown_names(f"option of {kind} {name}:", options, get_option_defaults(cls))
    values = {}
    for option, value in options.items():
        values[option] = parse_plugin_option_value(f"{name}.{option}", hints[option], value)
    return cls(**values)


def parse_plugin_option_value(where: str, kind: Any, value: Any) -> Any:
    """Convert a value from the command line or TOML to the annotated type `kind`.

    `where` is the start of the error message. Raise AuditError if the value has a different type,
    such as `samples=ten`.
    """
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
        # Values from TOML: 2.7 is not a whole number, and true is not a number.
        if not isinstance(value, str) and not fits:
            raise TypeError
        parsed = kind(value)
        # An infinite number has a meaning for no option.
        if kind is float and not math.isfinite(parsed):
            raise ValueError
        return parsed
    except (TypeError, ValueError, OverflowError) as error:
        raise AuditError(
            f"expected {where} to be {_WORDS.get(kind, kind.__name__)}, got {value!r}"
        ) from error


_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", str: "text"}


def get_option_defaults(cls: type) -> dict[str, Any]:
    """Return the option names and defaults of a plug-in, in order of declaration."""
    # `dataclasses.MISSING` for an option without a default.
    return {field.name: field.default for field in dataclasses.fields(cls)}


def list_allowed_values(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of each option that has a fixed set of values."""
    values_by_type = {bool: ("true", "false")}
    hints = _resolve_annotations(cls)
    allowed = {}
    for name in get_option_defaults(cls):
        values = values_by_type.get(hints[name], typing.get_args(hints[name]))
        if values:
            allowed[name] = values
    return allowed


def describe_plugin(cls: type) -> str:
    """Return the first paragraph of the class's docstring."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n", 1)[0].split())


def get_plugin_title(cls: Any) -> str:
    """Return the class's name for tables: its `title` or, if it has none, its `name`."""
    title: str = cls.title or cls.name
    return title
