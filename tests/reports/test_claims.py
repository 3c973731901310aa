"""What a report says of a claim: the sentence for each way it can stand, wherever a report says
it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from auditor.core.nouns import Claim
from auditor.core.result import Audited, AuditResult, Finding, TargetRecord
from auditor.reports import claims, html, markdown, phrases, terminal
from auditor.statistics import games
from auditor.statistics.audited import audit_epsilon_bounds, audit_measurements

CLAIM = Claim(
    {"add_remove": 1.0}, 1e-5, "add_remove", "record", None, "theorem", "sound", any_access=True
)


def audit(m: int = 1000, right: float = 0.95) -> tuple[Audited, ...]:
    rng = np.random.default_rng(0)
    coins = rng.random(m) < 0.5
    return audit_epsilon_bounds(
        (coins == (rng.random(m) < right)) + rng.random(m) / 10, coins, 1e-5
    )


def row(found: tuple[Audited, ...], **changed: object) -> Finding:
    measured = tuple(audit_measurements(found)) if found else ()
    made = Finding(
        "dp",
        "white-box",
        "epsilon-audit",
        {},
        ("distribution",),
        "",
        True,
        "",
        measured,
        audits=found,
    )
    return replace(made, **changed)


def run(
    result: AuditResult, epsilon: float | None, *rows: Finding, nominal: float | None = None
) -> AuditResult:
    """A lab run with one more target, which was trained privately and audited by these rows."""
    claim = None if epsilon is None else replace(CLAIM, epsilon={"add_remove": epsilon})
    dp = TargetRecord("dp", "DP-SGD", "", claim=claim, nominal_epsilon=nominal)
    return replace(result, targets=(*result.targets, dp), findings=(*result.findings, *rows))


def said(result: AuditResult) -> str:
    return next(
        claims.describe_claim_verdict(stands)
        for stands in claims.select_reported_claims(result)
        if stands.target.name == "dp"
    )


FOUND = (
    "audited ε ≥ 2.48 (epsilon-audit, add/remove, record, δ 1e-5, 474 of 500 guesses right, 1,000 "
    "canaries"
)
MU = "of a Gaussian mechanism and these scores, μ is 1.68 to 2.09 (95%, two-sided)"
BY = f"{FOUND}, one-sided 95%), provable at best 5.79, and {MU}"


POWER = (
    "ε 15.6 of a Gaussian mechanism that its scores see in full would have been caught with 80% "
    "probability"
)
CAUGHT = f"consistent ({POWER})"


@pytest.mark.parametrize(
    ("epsilon", "verdict"),
    [(1.0, "claim contradicted"), (4.0, CAUGHT), (8.0, "audit too weak to tell")],
)
def test_the_sentence(result: AuditResult, epsilon: float, verdict: str) -> None:
    found = said(run(result, epsilon, row(audit())))
    assert (
        found == f"DP-SGD: claimed ε {epsilon:.0f} (add/remove, record, δ 1e-5); {BY}: {verdict}."
    )


def test_consistent_states_its_power_wherever_it_is_said(result: AuditResult) -> None:
    """The screen, the page, Markdown, and the answers to the EDPB's questions."""
    audited_run = run(result, 4.0, row(audit()))
    (dp,) = (
        stands
        for stands in claims.select_reported_claims(audited_run)
        if stands.target.name == "dp"
    )
    page, plain = (
        html.render_html_report(audited_run),
        " ".join(markdown.render_markdown_report(audited_run).replace("\\", "").split()),
    )
    for said_there in (
        claims.describe_claim_verdict(dp),
        claims.summarise_claim(dp),
        page,
        plain,
    ):
        assert POWER in said_there and "consistent" not in said_there.replace(CAUGHT, "").replace(
            "is consistent wh", ""
        )


def test_what_an_audit_could_show_is_beside_its_bound(result: AuditResult) -> None:
    """In the sentence and in the table, of a claim whose mechanism is known."""
    details = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 50.0}
    dp = TargetRecord("dp", "DP-SGD", "", claim=replace(CLAIM, details=details))
    audited_run = replace(
        result, targets=(dp,), findings=(*result.findings, row(audit(300, right=0.55)))
    )
    sentence = said(audited_run)
    assert "and of the claimed ε 1 this audit could show at most about 0.69 (median" in sentence
    table = claims.build_claim_audit_table(audited_run)
    assert table is not None
    assert table.groups[0].rows[0][table.head.index("Could show (median)")] == "0.69"
    assert "0.69" in markdown.render_markdown_report(audited_run)


def test_what_was_not_audited_says_which_command_would(result: AuditResult) -> None:
    assert said(run(result, 1.0)) == (
        "DP-SGD: claimed ε 1 (add/remove, record, δ 1e-5); this claim was not audited: `audit run "
        "--attack epsilon-audit` would audit it."
    )
    missing = said(run(result, 1.0, row((), not_applicable="no coins")))
    assert "was not audited (epsilon-audit: no coins): `audit run" in missing
    served = next(
        claims.describe_claim_verdict(s)
        for s in claims.select_reported_claims(result)
        if s.target.name == "pmixed"
    )
    assert served.endswith(
        "this claim was not audited: `audit run --attack prediction-audit` would audit it."
    )


def test_an_audit_of_something_else(result: AuditResult) -> None:
    outside = said(
        run(result, 1.0, row(audit(), claim_applies=False, claim_reason="log-probabilities"))
    )
    assert (
        "epsilon-audit proves ε ≥ 2.48, outside the claim (log-probabilities); this claim was not "
        "audited" in outside
    )


def test_a_nominal_epsilon_is_shown_and_is_no_claim(result: AuditResult) -> None:
    found = said(run(result, None, row(audit(), claim_applies=None), nominal=1.0))
    assert found.startswith(
        "DP-SGD: it claims no ε; nominal ε 1, which is no claim; audited ε ≥ 2.48"
    )
    assert found.endswith(f"{MU}: nominal ε 1 contradicted.")
    weak = said(run(result, None, row(audit(), claim_applies=None), nominal=6.35))
    assert weak.endswith(": nominal ε 6.35: audit too weak to tell.")
    assert said(run(result, None, nominal=6.35)).endswith(
        "this ε was not audited: `audit run --attack epsilon-audit` would audit it."
    )
    assert said(run(result, None, row(audit()))).endswith(
        "; there is no claim to compare the audit with."
    )
    unclaimed = run(result, None, row(audit()))
    summaries = list(map(claims.summarise_claim, claims.select_reported_claims(unclaimed)))
    assert "DP-SGD: it claims no ε; audited ε ≥ 2.48" in summaries
    endless = said(run(result, float("inf"), row(audit())))
    assert endless.startswith(
        "DP-SGD: it claims no finite ε (add/remove, record, δ 1e-5); audited ε ≥ 2.48"
    )


def test_claim_check_contradicts(result: AuditResult) -> None:
    found = said(
        run(result, 1.0, row((), attack="claim-check", violations=("a record is in two shards",)))
    )
    assert found.endswith("; refuted (a record is in two shards): claim contradicted.")


def test_each_of_several_audits_is_stated_with_the_level_that_it_shares(
    result: AuditResult,
) -> None:
    found = said(run(result, 1.0, row(audit()), row(audit(right=0.6), attack="gradient-audit")))
    assert found.count("one-sided 97.5%, one of 2 audits") == 2 and found.endswith(
        ": claim contradicted."
    )
    assert "(epsilon-audit," in found and "(gradient-audit," in found


def test_games_are_not_called_canaries(result: AuditResult) -> None:
    played = replace(games.audit_games((90, 10, 12, 88), 1e-5, 0.05), unit="record")
    found = said(run(result, 1.0, row((played,), attack="prediction-audit")))
    assert "178 of 200 guesses right, 200 games, one-sided 95%" in found and "canaries" not in found


def test_every_report_carries_it(result: AuditResult) -> None:
    audited_run = run(result, 1.0, row(audit()))
    sentence = said(audited_run)
    assert sentence in html.render_html_report(audited_run)
    plain = " ".join(markdown.render_markdown_report(audited_run).replace("\\", "").split())
    assert sentence in plain and "Claims against evidence" in html.render_html_report(audited_run)
    console = Console(file=io.StringIO(), width=200)
    console.print(*terminal.build_report_screen(audited_run, Path("runs/own")), sep="\n")
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert sentence in shown


def test_the_table(result: AuditResult) -> None:
    table = claims.build_claim_audit_table(run(result, 1.0, row(audit())))
    assert table is not None and "Claims against evidence" in table.caption
    lines = {group.title: group.rows for group in table.groups}
    assert tuple(lines["DP-SGD"]) == (
        (
            "1",
            phrases.NOTHING,
            "epsilon-audit, δ 1e-5",
            "2.48",
            "5.79",
            phrases.NOTHING,
            "1,000",
            "claim contradicted",
        ),
    )
    # Claims without an audit are a sentence next to the table, not rows of it.
    assert list(lines) == ["DP-SGD"]
    missing = "PMixED (sound): this claim was not audited: `audit run"
    assert missing in html.render_html_report(result)
    assert not claims.build_claim_audit_table(replace(result, targets=(), findings=())).groups


def test_no_report_calls_a_model_private(result: AuditResult) -> None:
    for epsilon in (1.0, 4.0, 8.0, None):
        assert "private" not in said(run(result, epsilon, row(audit()))).lower()


def test_a_transcript_is_no_private_release(result: AuditResult) -> None:
    """Said where claims about drawn tokens stand; weights were drawn by secret randomness."""
    said = "Samples of this audit are not private releases: they depend on"
    assert said in html.render_html_report(result)
    assert said not in html.render_html_report(run(replace(result, targets=()), 1.0))


def test_a_short_report_keeps_the_contradicted_claim_and_counts_the_others(
    result: AuditResult,
) -> None:
    """Before: a pull request saw the first three claims, not that the fourth is contradicted."""
    others = []
    for i in range(4):
        others.append(TargetRecord(f"other-{i}", f"Other {i}", "", claim=CLAIM))
    plain = replace(result, targets=(result.targets[0], *others))
    text = markdown.render_markdown_report(run(plain, 1.0, row(audit())))
    visible = text.partition("<details>")[0]
    assert "claim contradicted" in visible and "- DP-SGD: claimed" in visible
    assert "… and 2 more claims, in report.html." in visible
