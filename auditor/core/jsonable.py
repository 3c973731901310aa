"""Records as JSON values and back, by their annotations. Knows no record and no file."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from auditor.core.errors import AuditError


def to_json(value: Any) -> Any:
    """A record as JSON values. Non-finite floats become "inf", "-inf", "nan": JSON has no word for them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_json(kind: Any, value: Any, where: str = "result", *, private: bool = False) -> Any:
    """The inverse of `to_json` for an annotated type. Raises AuditError with the path of what does not fit.

    private: whether the values may be private text, and are called by their kind only.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin is types.UnionType or origin is typing.Union:
        if value is None and type(None) in args:
            return None
        return from_json(next(a for a in args if a is not type(None)), value, where, private=private)
    if origin is Literal:
        if value not in args:
            raise AuditError(f"{where}: expected one of {args}, got {_said(value, private)}")
        return value
    if dataclasses.is_dataclass(kind):
        return _record_from_json(typing.cast(type, kind), value, where, private)
    if origin is tuple:
        return _tuple_from_json(args, value, where, private)
    if origin is dict:
        if not isinstance(value, dict):
            raise AuditError(f"{where}: expected an object, got {_kind(value)}")
        own = (f"{where}[{i}]" if private else f"{where}.{key}" for i, key in enumerate(value))
        return {
            key: from_json(args[1], item, at, private=private)
            for at, (key, item) in zip(own, value.items(), strict=True)
        }
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    expected = (int, float) if kind is float else kind
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise AuditError(f"{where}: expected {kind.__name__}, got {_said(value, private)}")
    return float(value) if kind is float else value


def _said(value: Any, private: bool) -> str:
    return _kind(value) if private else repr(value)


def _kind(value: Any) -> str:
    return type(value).__name__


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record_from_json(kind: type, value: Any, where: str, private: bool) -> Any:
    if not isinstance(value, dict):
        raise AuditError(f"{where}: expected an object, got {_kind(value)}")
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    extra = sorted(set(value) - set(fields))
    if extra:
        named = f"beside {', '.join(fields)}" if private else repr(extra[0])
        raise AuditError(f"{where}: unknown field {named}")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise AuditError(f"{where}: missing field {name!r}")
    return kind(
        **{name: from_json(hints[name], item, f"{where}.{name}", private=private) for name, item in value.items()}
    )


def _tuple_from_json(args: tuple[Any, ...], value: Any, where: str, private: bool) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise AuditError(f"{where}: expected a list, got {_kind(value)}")
    kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        raise AuditError(f"{where}: expected {len(kinds)} values, got {len(value)}")
    return tuple(
        from_json(k, item, f"{where}[{i}]", private=private)
        for i, (k, item) in enumerate(zip(kinds, value, strict=True))
    )
