"""The report as one HTML file that loads nothing. Knows blocks, templates and plots; not what they say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from auditor.reports import inert
from auditor.reports.blocks import Document, Figure
from auditor.reports.contents import document
from auditor.reports.plots import svg
from auditor.reports.texts import Text
from auditor.types import AuditResult


def render(result: AuditResult, texts: Mapping[str, Text] | None = None) -> str:
    """The whole report; styles and plots are inline, and a content security policy forbids everything else.

    texts: the private text to show, by alias; none by default.
    """
    return page(
        document(result, texts), {inert.clean(target.name): inert.clean(target.title) for target in result.targets}
    )


def page(doc: Document, titles: Mapping[str, str] | None = None) -> str:
    """A document as one page. titles: of the targets, for its plots."""
    shown = dict(titles or {})

    def plot(figure: Figure) -> Markup:
        return Markup(svg(figure, shown))  # matplotlib escapes the text it writes

    return _environment().get_template("report.html").render(doc=doc, plot=plot)


@cache
def _environment() -> Environment:
    loader = PackageLoader("auditor.reports", "templates")
    return Environment(
        loader=loader,
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: object) -> object:
    """What every expression of a template goes through, so that none can be forgotten; escaping comes after it."""
    return inert.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
