"""A claim against its audits: the four ways it can stand, by hand-made records."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.conclusions.claims import (
    CONSISTENT,
    CONTRADICTED,
    TOO_WEAK,
    ClaimEvidence,
    find_promised_epsilon,
    weigh_claim_against_audits,
)
from auditor.core.nouns import Claim
from auditor.core.result import Audited, AuditResult, BenchmarkRecord, Finding, TargetRecord
from auditor.statistics import games
from auditor.statistics.audited import (
    audit_epsilon_bounds,
    audit_measurements,
    repeat_epsilon_audit,
)
from tests.conftest import methods


def claim(epsilon: float | dict[str, float] = 1.0, **changed: Any) -> Claim:
    by_relation = epsilon if isinstance(epsilon, dict) else {"add_remove": epsilon}
    made = Claim(
        by_relation, 1e-5, "add_remove", "record", None, "theorem", "sound", any_access=True
    )
    return replace(made, **changed)


def proof(m: int, right: float, seed: int = 0, delta: float = 1e-5, level: float = 0.05) -> Audited:
    """An audit of m canaries whose score is right in so large a share."""
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5
    return audit_epsilon_bounds(
        (coins == (rng.random(m) < right)) + rng.random(m) / 10, coins, delta, level
    )[0]


def row(audit: Audited | None, **changed: Any) -> Finding:
    made = Finding("dp", "white-box", "epsilon-audit", {}, ("distribution",), "", True, "")
    if audit is not None:
        made = replace(made, audits=(audit,), measurements=tuple(audit_measurements((audit,))))
    return replace(made, **changed)


def stands(
    target: Claim | None, *rows: Finding, nominal: float | None = None, **narrowed: Any
) -> ClaimEvidence:
    dp = TargetRecord("dp", "DP", "", claim=target, nominal_epsilon=nominal)
    benchmark = BenchmarkRecord("b", "", 0, 0, 0)
    result = AuditResult(
        "r",
        "2026",
        "0",
        "",
        {"defense": ["dp"]},
        benchmark,
        (dp,),
        rows,
        {},
        {},
        0,
        methods=methods(),
    )
    return weigh_claim_against_audits(result, dp, **narrowed)


LEAKS, FAINT, FEW = proof(1000, 0.95), proof(1000, 0.55), proof(24, 0.9)


def test_the_audits_of_this_file() -> None:
    assert LEAKS.epsilon > 2 and 0 <= FAINT.epsilon < 0.5 < 5 < FAINT.best and FEW.best < 2.5


def test_the_four_ways() -> None:
    assert stands(claim(1.0), row(LEAKS)).verdict == CONTRADICTED
    assert stands(claim(4.0), row(LEAKS)).verdict == CONSISTENT
    assert stands(claim(1.0), row(FAINT)).verdict == CONSISTENT
    assert stands(claim(8.0), row(LEAKS)).verdict == TOO_WEAK
    assert stands(claim(4.0), row(FEW)).verdict == TOO_WEAK
    assert stands(claim(1.0)).verdict is None and stands(claim(1.0)).has_anything_to_report


def test_at_the_edges() -> None:
    """A claim of just the bound is not contradicted; one of just the best that is provable could
    not have been."""
    assert stands(claim(LEAKS.epsilon), row(LEAKS)).verdict == CONSISTENT
    assert stands(claim(LEAKS.best), row(LEAKS)).verdict == TOO_WEAK


def test_no_bound_that_assumes_a_shape_is_held_against_a_claim() -> None:
    shaped = replace(LEAKS, estimator="shape", epsilon=7.0)
    assert stands(claim(4.0), row(LEAKS, audits=(shaped, LEAKS))).verdict == CONSISTENT
    assert stands(claim(4.0), row(LEAKS, audits=(shaped,))).verdict is None


def test_several_audits_share_the_level() -> None:
    one, other = row(LEAKS), row(proof(1000, 0.6, seed=1), attack="gradient-audit")
    found = stands(claim(1.0), one, other)
    assert [bound.audit.level for bound in found.bounds] == [
        0.025,
        0.025,
    ] and found.verdict == CONTRADICTED
    assert (
        found.bounds[0].audit == repeat_epsilon_audit(LEAKS, 0.025)
        and found.bounds[0].audit.epsilon < LEAKS.epsilon
    )
    just = claim((LEAKS.epsilon + found.bounds[0].audit.epsilon) / 2)
    assert (
        stands(just, one).verdict == CONTRADICTED and stands(just, one, other).verdict == CONSISTENT
    )
    assert stands(just, one, other, attack="epsilon-audit").verdict == CONTRADICTED


def test_an_audit_at_a_level_of_its_own_is_not_made_looser() -> None:
    strict = proof(1000, 0.95, level=0.01)
    assert stands(claim(1.0), row(strict)).bounds[0].audit == strict
    assert stands(claim(1.0), row(LEAKS), level=0.001).bounds[0].audit.level == 0.001


def test_the_same_audit_under_two_settings_is_one() -> None:
    twice = stands(claim(1.0), row(LEAKS, setting="text-only"), row(LEAKS))
    assert [bound.audit for bound in twice.bounds] == [LEAKS]
    outside = row(LEAKS, setting="text-only", claim_applies=False, claim_reason="distribution")
    assert stands(claim(1.0), outside, row(LEAKS)).bounds[0].cell.setting == "white-box"


@pytest.mark.parametrize(
    ("promise", "changed", "why"),
    [
        (
            claim(),
            {"claim_applies": False, "claim_reason": "log-probabilities"},
            "outside the claim",
        ),
        (claim(delta=1e-3), {}, "at delta 1e-05, and the claim is at 0.001"),
        (claim(unit="shard", shard=True), {}, "about one record, and the claim is about one shard"),
        (claim({"replace": 1.0}, relation="replace"), {}, "about add_remove neighbours"),
    ],
)
def test_what_is_about_something_else_speaks_to_no_claim(
    promise: Claim, changed: dict[str, Any], why: str
) -> None:
    found = stands(promise, row(LEAKS, **changed))
    assert found.verdict is None and not found.bounds and why in found.unheld[0].reason


def test_what_a_claim_covers() -> None:
    # a user's claim covers each record
    assert find_promised_epsilon(claim(2.0, unit="user"), "add_remove", "record") == 2.0
    assert "about one user" in str(find_promised_epsilon(claim(2.0), "add_remove", "user"))
    shards = claim({"add_remove": 3.0, "replace": 5.0}, unit="shard of whole records", shard=True)
    assert find_promised_epsilon(shards, "add_remove", "shard") == 3.0
    assert "about one record" in str(find_promised_epsilon(shards, "add_remove", "record"))
    # another shard, as a whole
    assert find_promised_epsilon(replace(shards, whole="record"), "add_remove", "record") == 5.0
    anything = claim(
        unit="the whole training set",
        any_two=True,
        relation="any two models",
        epsilon={"any two models": 9.0},
    )
    assert find_promised_epsilon(anything, "add_remove", "record") == 9.0
    # a claim at delta 0 is one at 1e-5
    assert stands(claim(1.0, delta=0.0), row(LEAKS)).verdict == CONTRADICTED


def test_independent_games_are_held_to_the_claim_of_a_shard() -> None:
    played = replace(games.audit_games((900, 100, 120, 880), 1e-5, 0.05), tokens=64, covered=64)
    shards = claim(
        {"add_remove": 1.0, "zero_out": 3.0}, unit="shard", shard=True, queries=64, any_access=False
    )
    prediction = row(replace(played, unit="shard"), attack="prediction-audit")
    assert (
        stands(shards, prediction).verdict == CONTRADICTED
        and stands(shards, prediction).bounds[0].audit.best > 5
    )
    zeroed = row(replace(played, unit="shard", relation="zero_out"), attack="prediction-audit")
    assert stands(shards, zeroed).verdict == CONSISTENT
    shared = stands(shards, prediction, zeroed)
    assert [bound.audit.level for bound in shared.bounds] == [
        0.025
    ] * 2 and shared.verdict == CONTRADICTED
    assert shared.bounds[0].audit.epsilon < played.epsilon


@pytest.mark.parametrize(
    ("tokens", "covered", "exact", "verdict"),
    [
        (
            1,
            1024,
            0.234,
            TOO_WEAK,
        ),  # one token of so many gives next to nothing away, whoever guesses
        (1023, 1024, 7.9, TOO_WEAK),
        (1024, 1024, 0.234, CONSISTENT),
        (1, 1024, 8.1, CONSISTENT),  # one token alone would have contradicted it
        (1024, None, 7.9, TOO_WEAK),  # any number of tokens is covered
        (None, None, None, TOO_WEAK),  # a record of before this was kept
    ],
)
def test_games_of_a_part_of_the_tokens_speak_to_no_claim_of_them_all(
    tokens: int | None, covered: int | None, exact: float | None, verdict: str
) -> None:
    """75,000 games, guessed by chance: right guesses would have proved 9, of tokens that cannot
    give away as much."""
    found = games.audit_games((18_750, 18_750, 18_750, 18_750), 1e-5, 0.05)
    assert found.epsilon == 0 and found.best > 9
    shards = claim(8.0, unit="shard", shard=True, queries=covered, any_access=False)
    audit = replace(found, unit="shard", tokens=tokens, covered=covered, exact=exact)
    assert stands(shards, row(audit, attack="prediction-audit")).verdict == verdict


def test_claim_check_contradicts_on_its_own() -> None:
    checked = row(None, attack="claim-check", violations=("3 records are in more than one shard",))
    assert stands(claim(1.0), checked).verdict == CONTRADICTED
    assert stands(claim(1.0), checked, row(FAINT)).verdict == CONTRADICTED
    # that none was seen is no audit
    assert stands(claim(1.0), replace(checked, violations=())).verdict is None


def test_a_nominal_epsilon_is_held_to_the_bound_and_is_no_claim() -> None:
    for nominal, verdict in ((1.0, CONTRADICTED), (4.0, CONSISTENT), (6.35, TOO_WEAK)):
        found = stands(None, row(LEAKS, claim_applies=None), nominal=nominal)
        assert found.verdict == verdict and found.claimed is None
    assert (
        stands(None, row(LEAKS)).verdict is None and stands(None, row(LEAKS)).has_anything_to_report
    )
    assert not stands(None).has_anything_to_report
    endless = claim(math.inf)
    assert (
        stands(endless, row(LEAKS)).claimed is None and stands(endless, row(LEAKS)).verdict is None
    )


def test_an_audit_that_could_not_run_is_no_audit() -> None:
    found = stands(claim(), row(None, not_applicable="the manifest has no coins"))
    assert found.verdict is None and found.unmeasured == (
        "epsilon-audit: the manifest has no coins",
    )


def test_what_no_audit_can_have_made_is_not_used() -> None:
    found = stands(claim(1.0), row(replace(LEAKS, rights=(77,))))
    assert found.verdict is None and "1 such counts" in found.unheld[0].reason
