"""Convert records to JSON values and back by their annotations, and read JSON and TOML files.

pydantic validates records and describes their schema. This module adds names for the floats that
JSON cannot express, and error messages of one sentence. pydantic is imported only when a record is
read, because `audit --help` reads none.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from auditor.core import disk
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, SchemaValidator

Record = TypeVar("Record")

NAMED = ["inf", "-inf", "nan"]  # floats without a JSON notation


def to_json(value: Any) -> Any:
    """Return a record as JSON values.

    JSON has no infinite or undefined numbers, so they become the texts "inf", "-inf" and "nan".
    """
    # Numbers and texts first, because most values are.
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(to_json, value))
    return value


def from_json(
    kind: type[Record], value: Any, where: str = "result", *, private: bool = False
) -> Record:
    """Convert JSON values to the annotated type `kind`, the inverse of `to_json`.

    `where` names the values in messages. If `private` is True, the values may be private text, so
    messages give only their types. Raise AuditError with the path of any wrong value.
    """
    from pydantic_core import ValidationError

    try:
        # mypy does not know that every type is hashable.
        record: Record = _build_type_validator(kind).validate_python(value)  # type: ignore[arg-type]
        return record
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    # Outside the except: as its context, pydantic's error would show the value, which may be
    # private.
    raise AuditError(
        _describe_validation_error(
            first, where, list(_record_field_names(_build_core_schema(kind))), private
        )
    )


def build_json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of the values that `from_json` accepts for the type `kind`."""
    from pydantic.json_schema import GenerateJsonSchema

    return GenerateJsonSchema().generate(_build_core_schema(kind))


@cache
def _build_type_validator(kind: Any) -> SchemaValidator:
    from pydantic_core import SchemaValidator

    return SchemaValidator(_build_core_schema(kind), {"strict": True})


def _build_core_schema(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return _build_written_schema(TypeAdapter(kind).core_schema)


# Keys of a core schema that contain other schemas.
_INNER = {
    "schema",
    "fields",
    "definitions",
    "choices",
    "items_schema",
    "keys_schema",
    "values_schema",
}


def _build_written_schema(schema: Any) -> Any:
    """Adapt pydantic's schema to the values that `to_json` writes.

    A float may be one of the texts "inf", "-inf" and "nan". A tuple is written as a list. Unknown
    fields are refused.
    """
    if isinstance(schema, list):
        return list(map(_build_written_schema, schema))
    if not isinstance(schema, dict):  # the name of a field
        return schema
    adapted = {}
    for key, item in schema.items():
        adapted[key] = _build_written_schema(item) if key in _INNER else item
    match adapted["type"]:
        case "float":
            # The number first: a string is examined only if it is not a number.
            by_name = {"type": "no-info", "function": float}
            by_name_schema = {
                "type": "function-after",
                "function": by_name,
                "schema": {"type": "literal", "expected": NAMED},
            }
            custom_error = {"custom_error_type": "number", "custom_error_message": "float"}
            return {"type": "union", "choices": [adapted, by_name_schema], **custom_error}
        case "tuple":
            adapted["strict"] = False  # JSON has only lists, which strict mode refuses for a tuple
        case "dataclass":
            # Strict mode would require an instance; the configuration keeps its fields strict.
            adapted |= {
                "strict": False,
                "config": {"strict": True, "extra_fields_behavior": "forbid"},
            }
    return adapted


# JSON's names of missing types, instead of pydantic's messages.
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


def _describe_validation_error(
    error: ErrorDetails, where: str, fields: Collection[str], private: bool
) -> str:
    """Return a sentence with the path of the error, the expected value and the actual value.

    `where` names the values, and `fields` are all valid field names. If `private` is True, do not
    quote any value.
    """
    *path, last = error["loc"] or ("",)
    parent = _format_json_path(where, path, fields, private)
    value = error["input"]
    if error["type"] == "missing":
        return f"{parent}: missing field {last!r}"
    if error["type"] == "unexpected_keyword_argument":
        # The unexpected name belongs to a different record.
        other_fields = [name for name in fields if name != last]
        near = difflib.get_close_matches(str(last), other_fields, n=1, cutoff=0.5)
        if private:
            label = "(it may be private)"
        else:
            label = repr(last)
        return f"{parent}: unknown field {label}" + "".join(
            f"; did you mean {name!r}?" for name in near
        )
    words = error["msg"].removeprefix("Input should be ")
    expected = _EXPECTED.get(error["type"], words[0].lower() + words[1:])
    if private or isinstance(value, dict | list):
        got = type(value).__name__
    else:
        got = repr(value)
    return (
        f"{_format_json_path(where, error['loc'], fields, private)}: expected {expected}, got {got}"
    )


def _format_json_path(
    where: str, steps: Iterable[int | str], fields: Collection[str], private: bool
) -> str:
    """Return a path such as `result.json.targets[1].claim`.

    Args:
        where: start of the path, such as `result.json`.
        steps: the keys and list indices that follow, such as "targets", 1, "claim".
        fields: names that may be shown even if `private` is True.
        private: whether to show any other key as "...".
    """
    keys = (
        "..." if private and isinstance(step, str) and step not in fields else step
        for step in steps
    )
    return where + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)


def _record_field_names(schema: Any) -> Iterator[str]:
    """Yield the field names of a record and of its nested records, from pydantic's schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _record_field_names(item)
    elif isinstance(schema, dict):
        if schema["type"] == "dataclass-field":
            yield schema["name"]
        for key in _INNER & schema.keys():
            yield from _record_field_names(schema[key])


# --- files ---


def read_json(path: Path, description: str) -> Any:
    """Return the JSON value in a file, which messages call `description`.

    Raise AuditError if the file is invalid. The message quotes nothing from the file, which may be
    private.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditError(f"cannot read {description} {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # From None: a JSONDecodeError contains the whole document.
        raise AuditError(
            f"cannot read {description} {str(path)!r}: it is not JSON ({type(error).__name__})"
        ) from None


def read_record(path: Path, kind: type[Record], description: str) -> Record | None:
    """Return the record of type `kind` in a JSON file, or None if there is no file.

    Raise AuditError if the file is invalid; messages call it `description`.
    """
    if not path.is_file():
        return None
    return from_json(kind, read_json_object(path, description), str(path))


def read_toml(path: Path, description: str) -> dict[str, Any]:
    """Return the values of a TOML file, which messages call `description`.

    Raise AuditError if the file is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditError(f"cannot read {description} {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AuditError(f"{path} is not TOML: {error}") from error


def write_json(path: Path, value: Any, *, indent: int | None = 1, sync: bool = False) -> None:
    """Write a value as a JSON file that `read_json` reads. For `sync`, see `disk`."""
    disk.replace_atomically(path, encode_json(value, indent), sync=sync)


def encode_json(value: Any, indent: int | None = 1) -> str:
    """Return a value as the text of a JSON file. `to_json` names NaN; a missed NaN raises."""
    return json.dumps(to_json(value), indent=indent, allow_nan=False) + "\n"


def read_json_object(path: Path, description: str) -> dict[str, Any]:
    """Return the JSON object in a file, which messages call `description`.

    Raise AuditError if the file is invalid or holds a JSON value that is not an object.
    """
    value = read_json(path, description)
    if not isinstance(value, dict):
        raise AuditError(
            f"cannot read {description} {str(path)!r}: expected an object, got "
            f"{type(value).__name__}"
        )
    return value
