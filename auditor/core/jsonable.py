"""Records as JSON values and back, by their annotations, and JSON files. Knows no record.

pydantic validates and describes them. Two things are ours: a float that JSON has no word for goes
by its name, and what does not fit is refused in one sentence. It is imported when a record is read:
`audit --help` reads none.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
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
    """The inverse of `to_json` for an annotated type. Raises AuditError with the path of what does
    not fit.

    private: whether the values may be private text, and are called by their kind only.
    """
    from pydantic_core import ValidationError

    try:
        return _type_validator(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    # outside the except: as its context, pydantic's error would show the value, which may be
    # private
    raise AuditError(
        _validation_error_sentence(
            first, where, list(_record_field_names(_core_schema(kind))), private
        )
    )


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of what `from_json` takes for an annotated type."""
    from pydantic.json_schema import GenerateJsonSchema

    return GenerateJsonSchema().generate(_core_schema(kind))


@cache
def _type_validator(kind: Any) -> SchemaValidator:
    from pydantic_core import SchemaValidator

    return SchemaValidator(_core_schema(kind), {"strict": True})


def _core_schema(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return _schema_of_written_json(TypeAdapter(kind).core_schema)


# Keys of a core schema below which other schemas stand.
_INNER = {
    "schema",
    "fields",
    "definitions",
    "choices",
    "items_schema",
    "keys_schema",
    "values_schema",
}


def _schema_of_written_json(schema: Any) -> Any:
    """pydantic's schema of a type, as `to_json` writes it: floats by name, lists for tuples, and no
    further fields."""
    if isinstance(schema, list):
        return [_schema_of_written_json(item) for item in schema]
    if not isinstance(schema, dict):  # the name of a field
        return schema
    found = {
        key: _schema_of_written_json(item) if key in _INNER else item
        for key, item in schema.items()
    }
    match found["type"]:
        case "float":
            # the number first: a string is looked at only where it is none
            by_name = {"type": "no-info", "function": float}
            named = {
                "type": "function-after",
                "function": by_name,
                "schema": {"type": "literal", "expected": NAMED},
            }
            said = {"custom_error_type": "number", "custom_error_message": "float"}
            return {"type": "union", "choices": [found, named], **said}
        case "tuple":
            found["strict"] = False  # JSON has lists alone, which strict mode refuses for a tuple
        case "dataclass":
            # strict mode would ask for an instance; by the configuration its fields stay strict
            found |= {
                "strict": False,
                "config": {"strict": True, "extra_fields_behavior": "forbid"},
            }
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


def _validation_error_sentence(
    error: ErrorDetails, where: str, fields: Collection[str], private: bool
) -> str:
    """One sentence: where it is, what was expected, what came. fields: all that there are."""
    *path, last = error["loc"] or ("",)
    parent, came = _json_path_label(where, path, fields, private), error["input"]
    if error["type"] == "missing":
        return f"{parent}: missing field {last!r}"
    if error["type"] == "unexpected_keyword_argument":
        others = [name for name in fields if name != last]  # that name is one elsewhere
        near = difflib.get_close_matches(str(last), others, n=1, cutoff=0.5)
        named = "(it may be private)" if private else repr(last)
        return f"{parent}: unknown field {named}" + "".join(
            f"; did you mean {name!r}?" for name in near
        )
    words = error["msg"].removeprefix("Input should be ")
    expected = _EXPECTED.get(error["type"], words[0].lower() + words[1:])
    got = type(came).__name__ if private or isinstance(came, dict | list) else repr(came)
    return (
        f"{_json_path_label(where, error['loc'], fields, private)}: expected {expected}, got {got}"
    )


def _json_path_label(
    where: str, steps: Iterable[int | str], fields: Collection[str], private: bool
) -> str:
    """`result.json.targets[1].claim`; of private values no key of a dictionary."""
    keys = (
        "..." if private and isinstance(step, str) and step not in fields else step
        for step in steps
    )
    return where + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)


def _record_field_names(schema: Any) -> Iterator[str]:
    """The names of all fields of a record and those in it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _record_field_names(item)
    elif isinstance(schema, dict):
        if schema["type"] == "dataclass-field":
            yield schema["name"]
        for key in _INNER & schema.keys():
            yield from _record_field_names(schema[key])


# --- files ---


def read_json(path: Path, what: str) -> Any:
    """The value in a file. Raises AuditError, which calls it `what` and quotes none of it: it may
    be private."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditError(f"cannot read {what} {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # from None: a JSONDecodeError holds the whole document
        raise AuditError(
            f"cannot read {what} {str(path)!r}: it is not JSON ({type(error).__name__})"
        ) from None


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """`read_json` of a file that has to hold an object. Raises AuditError for any other value,
    too."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise AuditError(
            f"cannot read {what} {str(path)!r}: expected an object, got {type(value).__name__}"
        )
    return value
