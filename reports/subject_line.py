"""Describe the audited model for the first line of a report, from a cleaned result."""

from __future__ import annotations

from datetime import datetime

from auditor.core.result import AuditResult
from auditor.reports import phrases

_MOST = phrases.MOST_OF_NAME


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
        name = phrases.LAB_MODELS.get(result.benchmark.name)
        if name is None:
            return "a model that this record does not name"
        if method := (result.plan.get("mitigation") or {}).get("method"):
            name += f" trained by {method}"
        return f"the {phrases.lower_first(name)}"
    revision = result.plan.get("revision")
    base = result.base or result.plan.get("base")
    more = [f"revision {revision}"] if revision else []
    if base:
        more.append(f"adapter on {phrases.shorten_model_name(str(base))}")
    elif "model/adapter_config.json" in result.weights:
        more.append("an adapter")
    return phrases.shorten_model_name(str(model)) + (
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
            names.append(phrases.shorten_model_name(str(source)))
    return f"records of {' and '.join(names) or phrases.shorten(result.benchmark.name, _MOST)}"
