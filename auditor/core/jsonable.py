"""Records as JSON values and back, by their annotations. Knows no record and no file.

pydantic validates and describes them. Two things are ours: a float that JSON has no word for goes by its name, and what
does not fit is refused in one sentence. It is imported when a record is read: `audit --help` reads none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, SchemaValidator

NAMED = ["inf", "-inf", "nan"]  # the floats that JSON has no word for


def to_json(value: Any) -> Any:
    """A record as JSON values. Non-finite floats become their names."""
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
    from pydantic_core import ValidationError

    try:
        return _validator(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        fields = _fields(json_schema(kind)) if private else None
    raise AuditError(_refusal(first, where, fields))


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of what `from_json` takes for an annotated type."""
    from pydantic.json_schema import GenerateJsonSchema

    return GenerateJsonSchema().generate(_core_schema(kind))


@cache
def _validator(kind: Any) -> SchemaValidator:
    from pydantic_core import SchemaValidator

    return SchemaValidator(_core_schema(kind), {"strict": True})


def _core_schema(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return _as_written(TypeAdapter(kind).core_schema)


_INNER = ("schema", "fields", "definitions", "choices", "items_schema", "keys_schema", "values_schema")


def _as_written(schema: Any) -> Any:
    """pydantic's schema of a type, as `to_json` writes it: floats by name, lists for tuples, and no further fields."""
    if isinstance(schema, list):
        return [_as_written(item) for item in schema]
    if not isinstance(schema, dict):  # the name of a field
        return schema
    found = {key: _as_written(item) if key in _INNER else item for key, item in schema.items()}
    match found["type"]:
        case "float":
            by_name = {"type": "no-info", "function": float}
            named = {"type": "function-after", "function": by_name, "schema": {"type": "literal", "expected": NAMED}}
            said = {"custom_error_type": "number", "custom_error_message": "float"}
            return {"type": "union", "choices": [found, named], **said}
        case "tuple":
            found["strict"] = False
        case "dataclass":
            found |= {"strict": False, "config": {"strict": True, "extra_fields_behavior": "forbid"}}
    return found


# What pydantic misses, as JSON calls it; of all else its own words are said.
_EXPECTED = {
    "int_type": "int",
    "int_from_float": "int",
    "bool_type": "bool",
    "string_type": "str",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "too_long": "a shorter list",
}


def _refusal(error: ErrorDetails, where: str, fields: Collection[str] | None) -> str:
    """One sentence: where it is, what was expected, what came. fields: of private values, all that may be named."""
    *path, last = error["loc"] or ("",)
    if error["type"] == "missing":
        return f"{_path(where, path, fields)}: missing field {last!r}"
    if error["type"] == "unexpected_keyword_argument":
        return f"{_path(where, path, fields)}: unknown field {repr(last) if fields is None else '(it may be private)'}"
    came = error["input"]
    plain = fields is not None or isinstance(came, dict | list)
    words = error["msg"].removeprefix("Input should be ")
    expected = _EXPECTED.get(error["type"], words[0].lower() + words[1:])
    return (
        f"{_path(where, error['loc'], fields)}: expected {expected}, got {type(came).__name__ if plain else repr(came)}"
    )


def _path(where: str, steps: Iterable[int | str], fields: Collection[str] | None) -> str:
    """`result.json.targets[1].claim`; of private values no key of a dictionary."""
    keys = (step if isinstance(step, int) or fields is None or step in fields else "..." for step in steps)
    return where + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)


def _fields(schema: Mapping[str, Any]) -> list[str]:
    """The names of all fields of a record and those in it."""
    return [name for one in (schema, *schema.get("$defs", {}).values()) for name in one.get("properties", ())]
