"""Render a crash test as lines, Markdown, HTML, JSON and JUnit XML."""

from __future__ import annotations

import json
import math
import platform
import shlex
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

from auditor.crash import training_specimen
from auditor.crash.trial import CrashTest, derive_training_seed
from auditor.crash.verdicts import BROKEN, LEVEL, NO_FAULT, UNKNOWN, LoopCheck
from auditor.reports import escaping
from auditor.reports.blocks import Bullets, Code, Document, FactList, Group, Section, Table
from auditor.reports.decision import render_junit_xml

_ORDER = (BROKEN, UNKNOWN, NO_FAULT)
# packages whose versions a reproduction names
_PACKAGES = ("torch", "transformers", "opacus", "trl", "accelerate")
_SAYS = (
    f"An honest training is called broken with a probability of at most {LEVEL:.0%}, over all "
    "checks together.",
    "“No fault seen” names a fault that the check would have caught with 80% probability, and the "
    "source of this figure: the check's own statistic in the watched trainings, a count, or a "
    "planted fault. A smaller violation, or one that acts only on other models, records or lengths "
    "of training, is possible. The verdict never says that a training is private.",
    "The training was run unchanged on a tiny model and 48 records that the test made; the "
    "gradient of every step was read as the optimizer received it.",
)


def format_crash_test_lines(test: CrashTest, again: str) -> Iterator[str]:
    """Yield the lines of a report: verdict, broken checks, detectable violations, and limits.

    again: the command of this test. Every broken check comes with the command that repeats it.
    """
    yield f"RESULT  {write_crash_test_headline(test)}"
    yield f"LOOP    {describe_observed_loop(test)}"
    yield f"BOUND   {describe_one_run_bound(test)}"
    for check in _sort_worst_first(test):
        if check.verdict == UNKNOWN:
            yield f"        {check.name}: {check.verdict}: {check.said}"
        elif check.verdict == BROKEN:
            yield f"BROKEN  {check.name}: {check.said}. To paste into an issue:"
            yield textwrap.indent(describe_crash_reproduction(test, check, again), " " * 8)
    fine = [check for check in test.checks if check.verdict == NO_FAULT]
    if fine:
        yield (
            f"SEEN    {len(fine)} of {len(test.checks)} checks saw no fault; each would have seen:"
        )
        for check in fine:
            if check.would_see:
                yield f"        {check.name}: {_describe_detectable_violation(check)}"
    for remark in test.remarks:
        yield f"LIMITS  {remark}"


def _describe_detectable_violation(check: LoopCheck) -> str:
    if check.would_see:
        return f"{check.would_see} ({check.source})"
    return "-"


def describe_observed_loop(test: CrashTest) -> str:
    """Describe the loop's observed noise, sampling rate and steps, and the epsilon they imply."""
    loop = test.loop
    noise = "not seen"
    if loop.noise_multiplier is not None:
        noise = f"{loop.noise_multiplier:.2f}"
    numbers = f"noise multiplier {noise}, sampling rate {loop.sample_rate:.3f}, {loop.steps} steps"
    if loop.epsilon is None:
        return f"seen: {numbers}; the resulting epsilon is not known."
    if math.isinf(loop.epsilon):
        return f"seen: {numbers}; with this fault, epsilon is unbounded."
    if test.epsilon is not None and test.epsilon >= loop.epsilon:
        return f"seen: {numbers}; with this fault, epsilon is {_format_epsilon(test.epsilon)}."
    sentence = (
        f"seen: {numbers}; they give epsilon {loop.epsilon:.2f} [{loop.low:.2f}-{loop.high:.2f}]"
    )
    if not test.exceeds_claim_without_fault:
        return f"{sentence}."
    return f"{sentence}: above the claim's at 95%, as in one honest loop of 20. Try another --seed."


def describe_one_run_bound(test: CrashTest) -> str:
    """Describe the lower bound on epsilon from one training, and what it could have shown."""
    bound = test.one_run
    if bound is None:
        return "no time was left for a bound of epsilon from one training."
    possible = f"{bound.best:.2f} if every guess were right"
    if bound.ceiling is not None:
        possible += f", and about {bound.ceiling:.2f} (median) if the loop is as it claims"
    return (
        f"one training, {bound.canaries} records each in by a fair coin, {bound.right} of "
        f"{bound.guesses} guesses right: epsilon is at least {bound.epsilon:.2f} (95%). It could "
        f"have shown {possible}; for so few records the claim gives {bound.claimed:.2f}."
    )


def describe_crash_reproduction(test: CrashTest, check: LoopCheck, again: str) -> str:
    """Describe a broken check for a bug report: command, worst violation, epsilon and versions."""
    witness = check.witness
    facts = {"check": f"{check.name}: {check.verdict}"}
    if witness is not None:
        if witness.training is not None:
            facts["where"] = (
                f"training {witness.training + 1} (seed "
                f"{derive_training_seed(test.seed, witness.training)})"
            )
        if witness.step is not None:
            facts["where"] = f"{facts['where']}, step {witness.step + 1}"
        if witness.record is not None:
            records = training_specimen.build_training_specimen(
                witness.training or 0
            ).make_crash_test_records()
            facts["record"] = f"{witness.record}: {records[witness.record]['input_ids']}"
        if witness.tensor is not None:
            facts["tensor"] = witness.tensor
        facts |= {"measured": witness.measured, "expected": witness.expected}
    facts["epsilon"] = (
        f"{_format_epsilon(check.epsilon)}; the claim gives "
        f"{test.claim.compute_implied_epsilon():.2f} at {test.claim.delta:g}"
    )
    facts["loop"] = describe_observed_loop(test)
    facts["versions"] = ", ".join(
        (f"Python {platform.python_version()}", *_list_package_versions())
    )
    width = max(map(len, facts)) + 2
    command = f"{again} --seed {test.seed} --check {shlex.quote(check.name)}"
    return "\n".join((command, *(f"{name:{width}}{value}" for name, value in facts.items())))


def _list_package_versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def write_crash_test_headline(test: CrashTest) -> str:
    if not test.broken_checks:
        follows = (
            f"its claim gives epsilon {test.claim.compute_implied_epsilon():.2f} at delta "
            f"{test.claim.delta:g}"
        )
        if test.verdict == UNKNOWN:
            return f"Cannot tell; {follows}."
        return (
            f"No fault seen{', but a doubt' if test.exceeds_claim_without_fault else ''}; "
            f"{follows}."
        )
    worst = _sort_worst_first(test)[0]
    return (
        f"Broken: {worst.said}. Epsilon: {_format_epsilon(test.epsilon)}; its claim "
        f"gives {test.claim.compute_implied_epsilon():.2f}."
    )


def _format_epsilon(epsilon: float | None) -> str:
    if epsilon is None:
        return "not known"
    if math.isinf(epsilon):
        return "unbounded"
    return f"at least {epsilon:.2f}"


def _sort_worst_first(test: CrashTest) -> list[LoopCheck]:
    return sorted(
        test.checks, key=lambda check: (_ORDER.index(check.verdict), -(check.epsilon or 0), check.p)
    )


def build_crash_test_document(test: CrashTest, source: str, again: str) -> Document:
    """Build the report's document, from which the page and the Markdown file are rendered.

    again: the command of this test.
    """
    claim = tuple(
        (name.replace("_", " "), str(value))
        for name, value in vars(test.claim).items()
        if value is not None
    )
    rows = tuple(
        (c.name, c.verdict, c.said, _describe_detectable_violation(c))
        for c in _sort_worst_first(test)
    )
    head = ("Check", "Verdict", "What was seen", "Smallest violation caught with 80% probability")
    reproductions = tuple(
        Code(check.name, describe_crash_reproduction(test, check, again))
        for check in _sort_worst_first(test)
        if check.verdict == BROKEN
    )
    remarks = (f"End to end: {describe_one_run_bound(test)}", *test.remarks, *_SAYS)
    table = Table("checks", "Every check", head, (Group("", rows),))
    sections = [Section("checks", "Checks", (table,))]
    if reproductions:
        sections.append(Section("reproductions", "To paste into an issue", reproductions))
    sections += [
        Section("claim", "The claim", (FactList("", claim),)),
        Section("again", "To see it again", (Code("", f"{again} --seed {test.seed}"),)),
        Section("reading", "How to read it", (Bullets(remarks),)),
    ]
    facts = (("Training", escaping.make_printable_line(source)), ("Took", f"{test.seconds:.0f} s"))
    verdict = f"The loop as {describe_observed_loop(test)} {_SAYS[0 if test.broken_checks else 1]}"
    return Document(
        "Crash test of a private training",
        facts,
        write_crash_test_headline(test),
        tuple(sections),
        verdict,
        source="Made by audit dp-loop",
    )


def render_crash_test_json(test: CrashTest, again: str) -> str:
    """Render the test as JSON: verdict, claim, observations of the loop, and all checks.

    A failed check also has a reproduction: code that shows the fault. `again` is the command that
    repeats the test.
    """
    checks = []
    for check in test.checks:
        reproduction = None
        if check.verdict == BROKEN:
            reproduction = describe_crash_reproduction(test, check, again)
        checks.append({**asdict(check), "reproduction": reproduction})
    report = {
        "verdict": test.verdict,
        "headline": write_crash_test_headline(test),
        "claim": asdict(test.claim),
        "claim_gives": test.claim.compute_implied_epsilon(),
        "seen": asdict(test.loop),
        "seed": test.seed,
        "one_run": test.one_run and asdict(test.one_run),
        "checks": checks,
        "remarks": test.remarks,
        "seconds": test.seconds,
    }
    return json.dumps(_replace_infinities(report), indent=2, allow_nan=False) + "\n"


def _replace_infinities(value: Any) -> Any:
    """Replace infinity by `unbounded`, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _replace_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_replace_infinities, value))
    if isinstance(value, float) and math.isinf(value):
        return "unbounded"
    return value


def render_crash_test_junit(test: CrashTest, again: str) -> str:
    """Render JUnit XML with a test case per check: failed if broken, skipped if undecided."""
    cases = []
    for check in test.checks:
        case = ET.Element("testcase", {"classname": "dp-loop", "name": check.name, "time": "0"})
        cases.append(case)
        if check.verdict == BROKEN:
            failure = ET.SubElement(case, "failure", {"type": BROKEN, "message": check.said})
            failure.text = f"{check.said}\n\n{describe_crash_reproduction(test, check, again)}"
        elif check.verdict == UNKNOWN:
            ET.SubElement(case, "skipped", {"message": check.said}).text = check.said
        else:
            ET.SubElement(case, "system-out").text = check.said
    return render_junit_xml("audit dp-loop", "dp-loop", cases)
