"""What to do now: each advice follows from the run's outcomes, and what they do not show is not
advised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Stratum
from auditor.records.attacked_secrets import SecretAttributes
from auditor.reports import advice, html, markdown, signals
from auditor.statistics.judging import Outcome
from tests.reports.conftest import share
from tests.rows import judge_columns

TIMES = [1] * 40 + [4] * 20 + [16] * 20
IDS = tuple(f"row-{i:03d}" for i in range(80))


def outcome(hit: Sequence[bool], near: Sequence[bool] | None = None) -> Outcome:
    said, n = np.array(hit), len(hit)
    close = said | np.array(near if near is not None else hit)
    return judge_columns(
        IDS[:n],
        said,
        said,
        np.zeros(n),
        tuple(TIMES[:n]),
        np.ones(n, bool),
        np.where(close, 0, 9),
        np.full(n, 2),
    )


LEAKS = [False] * 40 + [True] * 5 + [False] * 15 + [True] * 20
NOTHING = [False] * 80


def details(result: AuditResult, **rows: Outcome) -> SecretDetails:
    """Outcomes of the strongest undefended row's attack and setting, by target."""
    keys = {name: CellKey(name.replace("_", "-"), "white-box", "ethicist") for name in rows}
    facts = tuple(
        SecretAttributes(id, f"s{i}", True, TIMES[i], 8, "ward" if i >= 60 else "desk")
        for i, id in enumerate(IDS)
    )
    return SecretDetails(
        facts,
        {keys[name]: ValuesBySecret.from_judged_guesses(own) for name, own in rows.items()},
    )


def said(result: AuditResult, **rows: Outcome) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in advice.list_advice(result, details(result, **rows)):
        assert one.row.endswith("white-box · ethicist") or one.kind in (
            advice.LEAKS,
            advice.TEST,
            advice.CLEAR,
        )
        found.setdefault(one.kind, []).append(one.sentence)
    return found


def test_records_of_several_parts_are_told_by_their_copies(result: AuditResult) -> None:
    """Nothing was said of where a leak of conversations is, though the screen counted copies."""
    known = details(result, undefended=outcome(LEAKS))
    parts = replace(known, secrets=tuple(s._replace(document="d") for s in known.secrets))
    strata = tuple(
        Stratum(copies, n, share("document_recall", hits, n))
        for copies, hits, n in ((16, 9, 12), (1, 0, 40))
    )
    findings = tuple(replace(f, strata=strata) for f in result.findings)
    (where,) = (
        one.sentence
        for one in advice.list_advice(replace(result, findings=findings), parts)
        if one.kind == advice.WHERE
    )
    assert where.startswith("records recited by copies: 16 copies: 9 of 12; 1 copy: 0 of 40; ")


def test_where_it_sits_and_what_fewer_copies_leave(result: AuditResult) -> None:
    found = said(result, undefended=outcome(LEAKS))
    sits = found[advice.WHERE]
    assert any(
        text.startswith("all 25 extracted members occur 4 times or more; only ") for text in sits
    )
    assert (
        any("belong to the group ward; only 20 of all 80 members do" in text for text in sits)
        and len(sits) == 2
    )
    (copies,) = found[advice.COPIES]
    assert copies.startswith("predicted recall with at most 1 copy: 0.0% [")
    assert "; 4 copies: 12% [" in copies  # 40 of 80 at 5 of 20
    assert "; now 31%; to measure it: audit mitigate RUN --by dedup" in copies


def test_all_features_of_where_it_sits_share_one_level(result: AuditResult) -> None:
    """Of 300 members that leak at random, one feature seemed to leak in 11% of samples."""
    hits = [i < 3 or 60 <= i < 65 for i in range(80)]  # 5 of the 8 in a quarter: p is 0.04
    assert advice.WHERE not in said(result, undefended=outcome(hits))


def test_what_helps_and_what_only_hides(result: AuditResult) -> None:
    """A defense that changes the words and leaves them near is no help."""
    found = said(
        result,
        undefended=outcome(LEAKS),
        pmixed=outcome(NOTHING),
        uniform_mixing=outcome(NOTHING, LEAKS),
    )
    (helps,), (hides,) = found[advice.HELPS], found[advice.HIDES]
    assert (
        helps.startswith("verbatim −31 points")
        and "held-out perplexity" in helps
        and "times" in helps
    )
    assert hides.startswith("verbatim −31 points") and "near-verbatim 0" in hides
    same = said(result, undefended=outcome(LEAKS), pmixed=outcome(LEAKS))
    assert advice.HELPS not in same and advice.HIDES not in same


def test_a_control_is_no_advice(result: AuditResult) -> None:
    """It promises nothing, as the public model or an ensemble whose models are not mixed."""
    rows = {"undefended": outcome(LEAKS), "uniform_mixing": outcome(NOTHING)}
    control = tuple(replace(one, companion=one.name == "uniform-mixing") for one in result.targets)
    assert advice.HELPS in said(result, **rows)
    assert advice.HELPS not in said(replace(result, targets=control), **rows)


def test_a_gate_that_is_advised_is_about_the_model_that_leaks(result: AuditResult) -> None:
    """Without --target a gate judges the defended models first, of which none need leak."""
    seen = assess_leak_signals(result)
    for target in seen.targets:
        for signal in (s for s in seen.list_shown_signals(target) if s.gate_rule):
            assert signals.suggest_gate_command(seen, [signal], "RUN").endswith(
                f" --target {target}"
            )
    alone = replace(result, targets=result.targets[:1], findings=result.findings[:1])
    judged = assess_leak_signals(alone)
    (only,) = {
        signals.suggest_gate_command(judged, [s], "RUN") for s in judged.signals if s.gate_rule
    }
    assert "--target" not in only


def test_nothing_is_advised_of_nothing(result: AuditResult) -> None:
    assert (
        advice.list_advice(
            replace(result, findings=(), benchmark=replace(result.benchmark, greedy_recall={}))
        )
        == ()
    )
    without = said(result, undefended=outcome(NOTHING))
    assert not {advice.WHERE, advice.COPIES, advice.HELPS} & set(without)
    mended = replace(outcome(LEAKS), repeats=(None,) * 80)
    assert advice.COPIES not in said(result, undefended=mended)


def test_what_leaks_comes_with_the_rule_that_holds_it(result: AuditResult) -> None:
    leaks = next(one for one in advice.list_advice(result) if one.kind == advice.LEAKS)
    assert leaks.command == "audit gate RUN --max recall=0.05 --target undefended"
    assert leaks.line == (
        "leaks (Undefended): training text can be extracted (52% verbatim, white-box; also greedy "
        f"decoding); hold the next model to a limit: {leaks.command}"
    )


def test_the_next_command_names_the_folder_wherever_it_is(
    result: AuditResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "elsewhere" / "my-run"
    run.mkdir(parents=True)
    (tmp_path / "latest").symlink_to(run)
    for here, path in ((tmp_path, "elsewhere/my-run"), (Path("/"), str(run)[1:]), (run, ".")):
        monkeypatch.chdir(here)
        for folder in (run, tmp_path / "latest"):
            page = markdown.render_markdown_report(result, folder=folder)
            assert f"\n  {path} \\\n" in page
            assert f" \\\n  {path} \\\n" in html.render_html_report(result, folder=folder)
