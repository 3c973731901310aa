"""The JSON Schema of `result.json`, made from the records themselves: `schema.json` beside this file holds it.

    python -m auditor.reports.schema        (writes that file anew)

A field added with a default keeps SCHEMA_VERSION: an older result still fits. Anything else that changes what fits is
a new version, and results of another one are refused. Knows types; no result, and no validator.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from auditor.core.result import SCHEMA_VERSION, AuditResult

PATH = Path(__file__).with_name("schema.json")
_PLAIN = {str: "string", int: "integer", bool: "boolean"}
_NUMBER = {
    "description": "A finite number, or the name of one that JSON has no word for.",
    "anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}],
}


def schema() -> dict[str, Any]:
    """The whole schema, draft 2020-12: what `from_json` takes for an AuditResult of this SCHEMA_VERSION."""
    defs: dict[str, Any] = {"number": _NUMBER}
    _kind(AuditResult, defs)
    whole = defs.pop("AuditResult")
    whole["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    whole["required"].append("schema_version")  # an older record without one is of no version that could be read
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:audit-lm:result:{SCHEMA_VERSION}",
        "title": f"result.json of audit, schema version {SCHEMA_VERSION}",
        **whole,
        "$defs": dict(sorted(defs.items())),
    }


def text() -> str:
    """The file, as it is published."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _kind(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of an annotation, case by case as `auditor.core.jsonable.from_json`; records go to `defs` by name."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return {}
    if origin is types.UnionType or origin is typing.Union:
        (inner,) = (a for a in args if a is not type(None))
        return {"anyOf": [_kind(inner, defs), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(args)}
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind), defs)
    if origin is tuple:
        return _tuple(args, defs)
    if origin is dict:
        return {"type": "object", "additionalProperties": _kind(args[1], defs)}
    if kind is float:
        return {"$ref": "#/$defs/number"}
    return {"type": _PLAIN[kind]}


def _record(kind: type, defs: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in defs:
        hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
        defs[kind.__name__] = {
            "description": inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " "),
            "type": "object",
            "properties": {f.name: _kind(hints[f.name], defs) for f in fields},
            "required": [
                f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            ],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _tuple(args: tuple[Any, ...], defs: dict[str, Any]) -> dict[str, Any]:
    if len(args) == 2 and args[1] is Ellipsis:
        return {"type": "array", "items": _kind(args[0], defs)}
    items = [_kind(a, defs) for a in args]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
