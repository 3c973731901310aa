"""The JSON Schema of `result.json`, made from the records themselves: `schema.json` beside this
file holds it.

    python -m auditor.reports.schema        (writes that file anew)

A field added with a default keeps SCHEMA_VERSION: an older result still fits. Anything else that
changes what fits is a new version, and results of another one are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from auditor.core.jsonable import json_schema
from auditor.core.result import SCHEMA_VERSION, AuditResult

PATH = Path(__file__).with_name("schema.json")


def result_json_schema() -> dict[str, Any]:
    """The whole schema, draft 2020-12: what `from_json` takes for an AuditResult of this
    SCHEMA_VERSION."""
    whole = json_schema(AuditResult)
    whole["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    # an older record without one is of no version that could be read
    whole["required"].append("schema_version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:audit-lm:result:{SCHEMA_VERSION}",
        **whole,
        "title": f"result.json of audit, schema version {SCHEMA_VERSION}",
    }


def schema_file_text() -> str:
    """The text of `schema.json`, as it is published."""
    return json.dumps(result_json_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(schema_file_text(), encoding="utf-8")
