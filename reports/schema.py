"""Generate `schema.json`, the JSON Schema of `result.json`, next to this file.

    python -m auditor.reports.schema        (rewrites that file)

If a new field has a default, SCHEMA_VERSION stays, because older results still fit. Any other
change to the accepted files needs a new version; results of other versions are rejected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from auditor.core.jsonable import build_json_schema
from auditor.core.result import SCHEMA_VERSION, AuditResult

PATH = Path(__file__).with_name("schema.json")


def build_result_schema() -> dict[str, Any]:
    """Return the full schema, draft 2020-12, of an AuditResult of this SCHEMA_VERSION."""
    schema = build_json_schema(AuditResult)
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    # a record without a version cannot be read
    schema["required"].append("schema_version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:audit-lm:result:{SCHEMA_VERSION}",
        **schema,
        "title": f"result.json of audit, schema version {SCHEMA_VERSION}",
    }


def format_schema_file() -> str:
    """Return the text of the published `schema.json`."""
    return json.dumps(build_result_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(format_schema_file(), encoding="utf-8")
