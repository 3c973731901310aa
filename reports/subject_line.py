"""What was audited, in one line: the first that a reader sees. Knows a result; its strings are
cleaned by then."""

from __future__ import annotations

from datetime import datetime

from auditor.core.result import AuditResult
from auditor.reports import phrases

_MOST = 80  # characters of a name: the line is a heading


def audit_subject_line(result: AuditResult) -> str:
    """`Privacy audit of out/chat (adapter on org/base) with records of data/mails.jsonl; 1 June
    2026, audit 0.1.0`"""
    audited = f"Privacy audit of {model_phrase(result)} with {_data_phrase(result)}"
    return f"{audited}; {date_phrase(result)}, audit {result.tool_version}"


def date_phrase(result: AuditResult) -> str:
    """Return `1 June 2026`, in UTC."""
    try:
        made = datetime.fromisoformat(result.created)
        # The month is English where nobody calls `setlocale`: Python itself does so for characters
        # alone.
        return f"{made.day} {made:%B %Y}"
    except ValueError:
        return phrases.shorten(result.created, _MOST) or "no date"


def model_phrase(result: AuditResult) -> str:
    """The model, its revision, and of an adapter the model that it is for."""
    objects, named = result.plan.get("objects") or {}, result.plan.get("model")
    if "model" in objects:
        return phrases.shorten(f"a model given in Python ({objects['model']})", _MOST)
    if named is None:
        own = (
            "the built-in lab model"
            if result.benchmark.name == "lab"
            else "the lab's SmolLM2-135M-Instruct"
        )
        if method := (result.plan.get("mitigation") or {}).get("method"):
            own += f" trained by {method}"
        return (
            own if result.benchmark.is_of_builtin_lab else "a model that this record does not name"
        )
    revision, base = result.plan.get("revision"), result.base or result.plan.get("base")
    more = [f"revision {revision}"] if revision else []
    if base:
        more.append(f"adapter on {_short_model_name(str(base))}")
    elif "model/adapter_config.json" in result.weights:
        more.append("an adapter")
    return _short_model_name(str(named)) + (
        f" ({phrases.shorten('; '.join(more), _MOST)})" if more else ""
    )


def _data_phrase(result: AuditResult) -> str:
    data, canaries = result.plan.get("data"), result.plan.get("canaries")
    if "data" in (result.plan.get("objects") or {}):
        return "records given in Python"
    if data is None and result.benchmark.is_of_builtin_lab:
        return "synthetic records"
    named = [_short_model_name(str(one)) for one in (data, canaries) if one]
    return f"records of {' and '.join(named) or phrases.shorten(result.benchmark.name, _MOST)}"


def _short_model_name(name: str) -> str:
    """A hub id whole, of a path what tells it from its neighbours: its last two parts."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    return phrases.shorten("/".join(parts[-2:]) or name, _MOST)
