"""The ledger: the verdict rule, what a claim points at, and what it says when there are no
numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.studies.ledger import (
    HOLDS,
    NOT_RUN,
    REFUTED,
    UNDECIDED,
    StudyPoint,
    build_ledger_row,
    check_claim_points_are_planned,
    format_study_seed_ranges,
    judge_paper_claim,
    parse_paper_claim_expectation,
    parse_paper_claim_statements,
)
from tests.rows import judge_columns


def m(low: float, high: float) -> Measurement:
    return Measurement("x", (low + high) / 2, low, high, 100)


@pytest.mark.parametrize(
    ("expect", "low", "high", "ruling"),
    [
        ("> 0", 0.01, 0.2, HOLDS),
        ("> 0", -0.2, -0.01, REFUTED),
        ("> 0", -0.01, 0.2, UNDECIDED),
        ("> 0", 0.0, 0.2, UNDECIDED),
        ("> 0", -0.2, 0.0, UNDECIDED),
        ("< 0", -0.2, -0.01, HOLDS),
        ("< 0", 0.01, 0.2, REFUTED),
        ("< 0.02", -0.1, 0.019, HOLDS),
        ([0.6, 0.7], 0.61, 0.69, HOLDS),
        ([0.6, 0.7], 0.59, 0.69, UNDECIDED),
        ([0.6, 0.7], 0.71, 0.8, REFUTED),
        ([0.6, 0.7], 0.1, 0.5, REFUTED),
        ("> 0", math.nan, math.nan, UNDECIDED),
    ],
)
def test_the_verdict_rule(expect: Any, low: float, high: float, ruling: str) -> None:
    assert judge_paper_claim(m(low, high), parse_paper_claim_expectation(expect, "here")) == ruling


@pytest.mark.parametrize("bad", ["0", "=> 0", ">= 0", "> 1.2.3", "> .", [1], [2, 1], [0, "1"], 3])
def test_other_expectations_are_refused(bad: Any) -> None:
    with pytest.raises(AuditError, match="here: expected `expect` like"):
        parse_paper_claim_expectation(bad, "here")


def solved(hits: int, n: int = 100, seeds: int = 2) -> dict[int, ValuesBySecret]:
    hit = np.arange(n) < hits
    ids = tuple(f"s{i:03d}" for i in range(n))
    one = judge_columns(
        ids, hit, hit, np.linspace(1, 0, n), (None,) * n, np.ones(n, dtype=bool), ~hit * 1, hit * 0
    )
    return dict.fromkeys(range(seeds), ValuesBySecret.from_judged_guesses(one))


def place(variant: str, hits: int, attacks: tuple[str, ...] = ("a",), **at: Any) -> StudyPoint:
    cells = tuple(
        Replicates("undefended", "white-box", attack, solved(hits), options={"samples": 10})
        for attack in attacks
    )
    return StudyPoint(variant, at, attacks, cells, subject="lab")


def claim(**more: Any) -> Any:
    raw = {
        "id": "c",
        "text": "a beats b",
        "paper": "9 > 8",
        "metric": "recall",
        "expect": "> 0",
        **more,
    }
    return parse_paper_claim_statements([raw], "lab", "paper/plan")[0]


def test_a_claim_from_its_places() -> None:
    places = [place("a", 60), place("b", 30)]
    ruled = build_ledger_row("t", claim(of={"variant": "a"}, minus={"variant": "b"}), places)
    assert (
        ruled.verdict == HOLDS and ruled.ours is not None and ruled.ours.value == pytest.approx(0.3)
    )
    assert ruled.setting == "lab; n 100; K 10; seeds 0, 1"
    assert (
        build_ledger_row("t", claim(of={"variant": "b"}, minus={"variant": "a"}), places).verdict
        == REFUTED
    )
    assert (
        build_ledger_row("t", claim(of={"variant": "a"}, minus={"variant": "a"}), places).verdict
        == UNDECIDED
    )


def test_ends_of_a_sweep_and_sums() -> None:
    places = [place("v", hits, n=i) for i, hits in enumerate((10, 40, 50))]

    def value(of: Any, minus: Any = ()) -> float:
        ruled = build_ledger_row("t", claim(of=of, minus=minus or []), places)
        assert ruled.ours is not None
        return ruled.ours.value

    assert value({"at": "last"}, {"at": "first"}) == pytest.approx(0.4)
    assert value({"n": "middle"}) == pytest.approx(0.4) and value({"n": 2}) == pytest.approx(0.5)
    assert value({"variant": "v"}) == pytest.approx((0.1 + 0.4 + 0.5) / 3)
    curve = ([{"at": "last"}, {"at": "first"}], [{"at": "middle"}, {"at": "middle"}])
    assert value(*curve) == pytest.approx(0.5 + 0.1 - 0.8)


def test_no_numbers_no_verdict() -> None:
    failed = StudyPoint("b", {}, ("a",), failure="it broke")
    ruled = build_ledger_row(
        "t", claim(of={"variant": "a"}, minus={"variant": "b"}), [place("a", 60), failed]
    )
    assert (ruled.verdict, ruled.note, ruled.ours) == (NOT_RUN, "it broke", None)
    row = StudyPoint(
        "b",
        {},
        ("a",),
        (Replicates("undefended", "white-box", "a", not_applicable="no reference"),),
    )
    ruled = build_ledger_row("t", claim(of={"variant": "b"}), [row])
    assert (ruled.verdict, ruled.note) == (NOT_RUN, "not applicable: no reference")


def test_the_last_of_a_sweep_is_the_planned_one_even_if_it_failed() -> None:
    places = [
        place("v", 10, n=1),
        place("v", 40, n=2),
        StudyPoint("v", {"n": 3}, ("a",), failure="out of memory"),
    ]
    assert (
        build_ledger_row("t", claim(of={"at": "last"}, minus={"at": "first"}), places).note
        == "out of memory"
    )


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"variant": "c"}, "unknown variant"),
        ({"variant": "two"}, "name one of them"),
        ({"variant": "two", "attack": "z"}, "unknown attack"),
        ({"size": "last"}, "unknown swept key"),
        ({"n": 9}, "no point at n = 9"),
    ],
)
def test_claims_about_what_is_not_planned_are_refused(term: dict[str, Any], message: str) -> None:
    places = [place("a", 60, n=1), place("two", 30, ("x", "y"), n=2)]
    with pytest.raises(AuditError, match=message):
        check_claim_points_are_planned(claim(of=term), places)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"metrc": "recall"}, "did you mean 'metric'"),
        ({"metric": None}, "names no metric"),
        ({"of": "a"}, "a table or a list of them"),
    ],
)
def test_malformed_claims_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        claim(**{"of": {"variant": "a"}, **raw})


def test_missing_fields_and_ids_used_twice_are_refused() -> None:
    with pytest.raises(AuditError, match="missing field 'text'"):
        parse_paper_claim_statements([{"id": "c"}], "lab", "here")
    raw = {"id": "c", "text": "t", "paper": "p", "metric": "recall", "of": {}, "expect": "> 0"}
    with pytest.raises(AuditError, match="two claims are called 'c'"):
        parse_paper_claim_statements([raw, raw], "lab", "here")
    assert [
        s.id for s in parse_paper_claim_statements([{**raw, "scale": "paper"}, raw], "lab", "here")
    ] == ["c"]


def test_ranges() -> None:
    assert [format_study_seed_ranges(seeds) for seeds in ([0, 1, 2], [0, 2], [3], [])] == [
        "0-2",
        "0, 2",
        "3",
        "",
    ]
