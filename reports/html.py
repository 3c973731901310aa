"""Render the report as one self-contained HTML file, from blocks, templates and plots."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import escaping, table_of_contents
from auditor.reports.blocks import Document, Figure, Secrets
from auditor.reports.plots import render_plot_svg


def render_html_report(
    result: AuditResult,
    details: SecretDetails | None = None,
    since: Comparison | None = None,
    texts: Mapping[str, SecretText] | None = None,
    folder: Path | None = None,
) -> str:
    """Render the report with inline resources; a content security policy forbids other resources.

    details: values stored per secret. since: a comparison of an earlier run with this run.
    texts: private text to show, keyed by secret id; none by default. folder: the run, for commands.
    """
    return render_html_document(
        table_of_contents.build_page_document(result, details, since, texts, folder)
    )


def render_html_document(doc: Document) -> str:
    """Render a document as one page."""

    def plot(figure: Figure) -> Markup:
        return Markup(render_plot_svg(figure))  # matplotlib escapes the text it writes

    script = ""
    if any(isinstance(block, Secrets) for section in doc.sections for block in section.blocks):
        path = resources.files("auditor.reports").joinpath("templates", "secrets.js")
        script = path.read_text(encoding="utf-8")
    # The content security policy names the script by its hash: no other script runs, even if a text
    # smuggles it in.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _build_template_environment().get_template("report.html")
    return template.render(
        doc=doc, plot=plot, data=_encode_script_json, script=Markup(script), script_hash=digest
    )


def _encode_script_json(values: Mapping[str, Any]) -> Markup:
    """Return JSON in which an HTML parser finds no markup such as `</script`."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for (
        character
    ) in "<>&\u2028\u2029":  # the last two end a line in JavaScript before 2019, not in JSON
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def _build_template_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("auditor.reports", "templates"),
        autoescape=True,
        finalize=_finalize_template_value,
        # A misspelt name in a template raises, while jinja would print nothing by default.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["flags"] = _keep_flags_whole
    return environment


def _keep_flags_whole(text: str) -> Markup:
    """Escape the text and prevent line breaks inside options such as `--attack`."""
    escaped = str(Markup.escape(escaping.strip_unprintable(text)))
    return Markup(re.sub(r"--[a-z][a-z-]*", r'<span class="flag">\g<0></span>', escaped))


def _finalize_template_value(value: object) -> object:
    """Remove unprintable characters from a template expression's value before it is escaped."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escaping.strip_unprintable(value)
    return value
