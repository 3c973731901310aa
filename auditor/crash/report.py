"""A crash test as lines, Markdown, a page and JUnit XML. Decides nothing."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from auditor.crash.checks import BROKEN, LEVEL, UNKNOWN, LoopCheck
from auditor.crash.trial import CrashTest
from auditor.reports import html, inert, markdown
from auditor.reports.blocks import Bullets, Code, Document, FactList, Group, Section, Table

_ORDER = (BROKEN, UNKNOWN, "no fault seen")
_SAYS = (
    f"An honest training is called broken with a probability of at most {LEVEL:.0%}, over all checks together.",
    "“No fault seen” says what would have been seen, no more: a smaller violation, or one that acts only on models, "
    "records or lengths of training unlike these, may be there. It never says that a training is private.",
    "The training was run unchanged on a tiny model and 48 records that the test made; the gradient of every step was "
    "read where the optimizer gets it.",
)


def lines(test: CrashTest) -> Iterator[str]:
    """The verdict, every check that says more than that nothing was seen, and what is not covered."""
    yield f"RESULT  {headline(test)}"
    for check in _worst_first(test):
        if check.verdict != "no fault seen":
            yield f"        {check.name}: {check.verdict}: {check.said}"
    fine = [check for check in test.checks if check.verdict == "no fault seen"]
    if fine:
        yield f"SEEN    {len(fine)} of {len(test.checks)} checks saw no fault; each would have seen:"
        yield from (f"        {check.name}: {check.would_see}" for check in fine if check.would_see)
    yield from (f"LIMITS  {remark}" for remark in test.remarks)


def headline(test: CrashTest) -> str:
    """One sentence."""
    if not test.broken:
        follows = f"its claim gives epsilon {test.claim.follows():.2f} at delta {test.claim.delta:g}"
        return f"No fault seen; {follows}." if test.verdict != UNKNOWN else f"Cannot tell; {follows}."
    worst = _worst_first(test)[0]
    return f"Broken: {worst.said}. Epsilon: {_number(test.epsilon)}; its claim gives {test.claim.follows():.2f}."


def _number(epsilon: float | None) -> str:
    if epsilon is None:
        return "not known"
    return "unbounded" if math.isinf(epsilon) else f"at least {epsilon:.2f}"


def _worst_first(test: CrashTest) -> list[LoopCheck]:
    return sorted(test.checks, key=lambda check: (_ORDER.index(check.verdict), -(check.epsilon or 0), check.p))


def document(test: CrashTest, source: str) -> Document:
    """What the page and the Markdown show."""
    claim = tuple((name.replace("_", " "), str(value)) for name, value in vars(test.claim).items() if value is not None)
    rows = tuple((c.name, c.verdict, c.said, c.would_see or "-") for c in _worst_first(test))
    head = ("Check", "Verdict", "What was seen", "Smallest violation caught with 80% probability")
    sections = [
        Section("checks", "Checks", (Table("checks", "Every check", head, (Group("", rows),)),)),
        Section("claim", "The claim", (FactList("", claim),)),
        Section("again", "To see it again", (Code("", f"audit dp-loop {source}"),)),
        Section("reading", "How to read it", (Bullets((*test.remarks, *_SAYS)),)),
    ]
    facts = (("Training", inert.clean(source)), ("Took", f"{test.seconds:.0f} s"))
    verdict = _SAYS[0 if test.broken else 1]
    title = "Crash test of a private training"
    return Document(title, facts, headline(test), verdict, tuple(sections), source="Made by audit dp-loop")


def page(test: CrashTest, source: str) -> str:
    return html.page(document(test, source))


def marked(test: CrashTest, source: str) -> str:
    return markdown.page(document(test, source))


def junit(test: CrashTest) -> str:
    """A test case a check: a failure where it is broken, skipped where it cannot tell."""
    count = {verdict: sum(check.verdict == verdict for check in test.checks) for verdict in _ORDER}
    totals = {"tests": str(len(test.checks)), "failures": str(count[BROKEN]), "errors": "0",
              "skipped": str(count[UNKNOWN])}  # fmt: skip
    root = ET.Element("testsuites", {"name": "audit dp-loop", **totals})
    suite = ET.SubElement(root, "testsuite", {"name": "dp-loop", **totals})
    for check in test.checks:
        case = ET.SubElement(suite, "testcase", {"classname": "dp-loop", "name": check.name, "time": "0"})
        if check.verdict == BROKEN:
            ET.SubElement(case, "failure", {"type": BROKEN, "message": check.said})
        elif check.verdict == UNKNOWN:
            ET.SubElement(case, "skipped", {"message": check.said})
        else:
            ET.SubElement(case, "system-out").text = check.said
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
