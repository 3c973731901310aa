"""Describe the audited model for the first line of a report, from a cleaned result."""

from __future__ import annotations

from datetime import datetime

from auditor.core.result import AuditResult
from auditor.reports import phrases

_MOST = 80  # characters of a name: the line is a heading


def audit_subject_line(result: AuditResult) -> str:
    """Return `Privacy audit of out/chat with records of data/x.jsonl; 1 June 2026, audit 0.1.0`"""
    audited = f"Privacy audit of {format_model(result)} with {_format_data(result)}"
    return f"{audited}; {format_date(result)}, audit {result.tool_version}"


def format_date(result: AuditResult) -> str:
    """Return the date of the run, in UTC: `1 June 2026`."""
    try:
        date = datetime.fromisoformat(result.created)
        # The month is English unless code calls `setlocale`: Python itself sets only the character
        # locale.
        return f"{date.day} {date:%B %Y}"
    except ValueError:
        return phrases.shorten(result.created, _MOST) or "no date"


def format_model(result: AuditResult) -> str:
    """Return the model, its revision, and the base model of an adapter."""
    objects = result.plan.get("objects") or {}
    model = result.plan.get("model")
    if "model" in objects:
        return phrases.shorten(f"a model given in Python ({objects['model']})", _MOST)
    if model is None:
        if result.benchmark.name == "lab":
            lab_model = "the built-in lab model"
        else:
            lab_model = "the lab's SmolLM2-135M-Instruct"
        if method := (result.plan.get("mitigation") or {}).get("method"):
            lab_model += f" trained by {method}"
        if result.benchmark.is_of_builtin_lab:
            return lab_model
        return "a model that this record does not name"
    revision = result.plan.get("revision")
    base = result.base or result.plan.get("base")
    more = [f"revision {revision}"] if revision else []
    if base:
        more.append(f"adapter on {_shorten_model_name(str(base))}")
    elif "model/adapter_config.json" in result.weights:
        more.append("an adapter")
    return _shorten_model_name(str(model)) + (
        f" ({phrases.shorten('; '.join(more), _MOST)})" if more else ""
    )


def _format_data(result: AuditResult) -> str:
    data = result.plan.get("data")
    canaries = result.plan.get("canaries")
    if "data" in (result.plan.get("objects") or {}):
        return "records given in Python"
    if data is None and result.benchmark.is_of_builtin_lab:
        return "synthetic records"
    names = []
    for source in (data, canaries):
        if source:
            names.append(_shorten_model_name(str(source)))
    return f"records of {' and '.join(names) or phrases.shorten(result.benchmark.name, _MOST)}"


def _shorten_model_name(name: str) -> str:
    """Return a hub id in full, or the last two parts of a path, which identify the model."""
    parts = []
    for part in name.replace("\\", "/").split("/"):
        if part not in ("", "."):
            parts.append(part)
    return phrases.shorten("/".join(parts[-2:]) or name, _MOST)
