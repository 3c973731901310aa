"""The word for how severe it is: what is shown decides, and whatever is open forbids the reassuring
one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from auditor.conclusions.leak_kinds import LeakKind
from auditor.conclusions.leak_readings import (
    AUDITED_EPSILON,
    GREEDILY,
    KINDS,
    MEMBERSHIP,
    NEARLY,
    PERSONAL,
    UNTARGETED,
    VERBATIM,
)
from auditor.conclusions.signals import (
    NOT_SHOWN,
    NOT_TESTED,
    SETTINGS,
    SHOWN,
    LeakAssessment,
    LeakSignal,
    Status,
)
from auditor.core.result import AuditResult, Doubt, Measurement
from auditor.reports import html, markdown, severity
from auditor.reports.severity import GLOSSARY, HIGH, MODERATE, NONE, OPEN, WORDS

MEASURED = Measurement("any", 0.1, 0.0, 0.2, 60)

TEXT = {VERBATIM, NEARLY, GREEDILY, UNTARGETED, PERSONAL}  # whose signals are text of the data


def signal(
    kind: LeakKind,
    status: Status,
    setting: str = "white-box",
    suspected: bool = False,
    target: str = "t",
) -> LeakSignal:
    measured = None if status == NOT_TESTED else MEASURED
    return LeakSignal(
        kind, target, setting, status, measured, suspected=suspected and status == NOT_SHOWN
    )


def seen(
    *signals: LeakSignal, doubts: tuple[Doubt, ...] = (), contradictions: tuple[Doubt, ...] = ()
) -> LeakAssessment:
    return LeakAssessment(signals, {"t": contradictions}, {"t": doubts})


def signals(*statuses: Status) -> st.SearchStrategy[LeakSignal]:
    where = st.sampled_from((*SETTINGS, ""))
    return st.builds(
        signal, st.sampled_from(KINDS), st.sampled_from(statuses), where, st.booleans()
    )


def assessed(of: st.SearchStrategy[LeakSignal]) -> st.SearchStrategy[LeakAssessment]:
    return st.builds(
        lambda signals, doubts, contradictions: seen(
            *signals, doubts=doubts, contradictions=contradictions
        ),
        st.lists(of, max_size=8),
        DOUBTS,
        DOUBTS,
    )


SIGNALS = signals(SHOWN, NOT_SHOWN, NOT_TESTED)
DOUBTS = st.lists(st.just(Doubt("answers", "A filter.")), max_size=1).map(tuple)
ASSESSED = assessed(SIGNALS)
CLEAN = seen(*(signal(kind, NOT_SHOWN) for kind in KINDS))


def rank(found: LeakAssessment) -> int:
    return WORDS.index(severity.rate_severity(found, "t").word)


@given(ASSESSED)
@example(CLEAN)
def test_the_reassuring_word_stands_only_where_all_was_tested_and_nothing_is_open(
    found: LeakAssessment,
) -> None:
    stands = severity.rate_severity(found, "t").word == NONE
    clean = all(s.status == NOT_SHOWN and not s.suspected for s in found.signals)
    assert stands == (clean and bool(found.signals) and not found.list_target_doubts("t"))
    assert not stands or found.shows_no_leakage("t")


@given(ASSESSED)
def test_what_is_shown_decides_and_text_before_all_else(found: LeakAssessment) -> None:
    shown = {s.kind for s in found.list_shown_signals("t")}
    assert (severity.rate_severity(found, "t").word == HIGH) == bool(shown & TEXT)
    assert (severity.rate_severity(found, "t").word == MODERATE) == bool(shown and not shown & TEXT)


@given(ASSESSED, SIGNALS, st.booleans())
def test_nothing_that_is_added_makes_it_milder(
    found: LeakAssessment, more: LeakSignal, doubt: bool
) -> None:
    assume(found.signals)  # of nothing nothing follows: one clean signal may say more than none
    worse = replace(found, signals=(*found.signals, more))
    assert rank(worse) >= rank(found)
    if doubt:
        assert rank(replace(worse, doubts={"t": (Doubt("answers", "A filter."),)})) >= max(
            rank(worse), 1
        )


@given(ASSESSED, st.permutations(range(8)))
def test_neither_the_order_nor_another_target_matters(
    found: LeakAssessment, order: list[int]
) -> None:
    mixed = [found.signals[i] for i in order if i < len(found.signals)]
    beside = signal(VERBATIM, SHOWN, target="another")
    assert (
        severity.rate_severity(replace(found, signals=(beside, *mixed)), "t").word
        == severity.rate_severity(found, "t").word
    )


@given(assessed(signals(NOT_SHOWN, NOT_TESTED)))
def test_an_open_result_says_all_that_is_open(found: LeakAssessment) -> None:
    stands = severity.rate_severity(found, "t")
    assume(stands.word == OPEN and found.list_tested_signals("t"))
    untested = len({s.kind for s in found.signals if s.status == NOT_TESTED})
    assert (f"{untested} of " in stands.clause) == bool(untested)
    assert ("is in doubt" in stands.clause) == bool(found.list_target_doubts("t"))
    assert ("not significant" in stands.clause) == any(s.suspected for s in found.signals)


@pytest.mark.parametrize(
    ("found", "word", "why"),
    [
        (
            seen(signal(VERBATIM, SHOWN)),
            HIGH,
            "training text can be extracted",
        ),
        (
            seen(signal(GREEDILY, SHOWN, ""), signal(PERSONAL, SHOWN, "text-only")),
            HIGH,
            "training text can be extracted, including personal data",
        ),
        (
            seen(
                signal(VERBATIM, NOT_SHOWN),
                signal(MEMBERSHIP, SHOWN),
                signal(AUDITED_EPSILON, SHOWN, "text-only"),
            ),
            MODERATE,
            "no extraction of text is shown; another signal is above its baseline",
        ),
        (
            seen(signal(VERBATIM, NOT_SHOWN, suspected=True), signal(MEMBERSHIP, NOT_TESTED, "")),
            OPEN,
            "no leak is shown, but a signal above its baseline is not significant (verbatim), "
            "1 of 2 signals untested",
        ),
        (
            seen(signal(VERBATIM, NOT_TESTED, "")),
            OPEN,
            "no leak is shown, but nothing was measured",
        ),
        (
            CLEAN,
            NONE,
            "no leakage seen: every signal was tested",
        ),
    ],
)
def test_what_is_said(found: LeakAssessment, word: str, why: str) -> None:
    severe = severity.rate_severity(found, "t")
    assert (severe.word, severe.clause) == (word, why)


def test_the_rule_stands_beside_the_word_in_both_reports(result: AuditResult) -> None:
    page, text = html.render_html_report(result), markdown.render_markdown_report(result)
    assert "<strong>HIGH</strong><p>Training text can be extracted." in page
    assert "- Undefended: **HIGH**. Training text can be extracted." in text
    for word, meaning in GLOSSARY:
        assert f"<dt>{word}</dt><dd>{meaning}</dd>" in page and f"- {word}: {meaning}" in text
    assert {word.capitalize() for word in WORDS} <= {word for word, _ in GLOSSARY}
    for said in (page[page.index("<main>") :], text):
        assert (
            said.index("Training text can be")
            < said.index("What to do now")
            < said.index("Signal by signal")
        )
