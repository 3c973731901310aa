"""Published claims at the queries that are hardest on them: known answers, controls that hold, the page as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import chi2

from auditor.cli import call
from auditor.core.errors import AuditError
from auditor.privacy.gaussian import scale_divergence, scale_epsilon
from auditor.studies import papers, published
from auditor.studies.published import Held, Published, Query

ROOT = Path(__file__).parents[2]
PLANS = papers.load("claims").plans
EVEN, SURE, OPPOSITE = (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)
PMIXED = {"epsilon": 8.0, "delta": 1e-5, "alpha": 3, "queries": 1024}


def held(
    mechanism: str, setting: Mapping[str, Any], options: Mapping[str, Any], *laws: tuple[float, ...]
) -> list[Held]:
    query = Query("a query", setting, *laws, *[()] * (3 - len(laws)), parameters=0)
    found = list(published.MECHANISMS[mechanism](query, options))
    assert all(one.verdict == "holds" for one in found if one.ours)
    return [one for one in found if not one.ours]


@pytest.mark.parametrize(
    ("alpha", "beta", "realised", "ratio"),
    [
        (2, 0.01, 0.07771, 1.94),
        (2, 0.1, None, 1.59),
        (4, 0.01, None, 3.54),
        (8, 0.01, None, 5.63),
        (16, 0.1, None, 5.58),
    ],
)
def test_dp_fusion_costs_more_than_it_charges(alpha: int, beta: float, realised: float | None, ratio: float) -> None:
    """Formulas C5: two private contexts that favour opposite tokens."""
    replaced, emptied, more = held("dp-fusion", {"alpha": alpha, "beta": beta}, {}, EVEN, SURE, OPPOSITE)
    assert replaced.claimed == pytest.approx(4 * beta) and replaced.order == alpha
    assert replaced.ratio == pytest.approx(ratio, abs=5e-3) and "neighbour 0" in replaced.where
    assert realised is None or replaced.realised == pytest.approx(realised, abs=5e-6)
    assert emptied.realised == pytest.approx(alpha * beta, rel=1e-4)  # as far from the redacted law as it may be
    assert (emptied.verdict == "holds") == (alpha <= 4)
    assert more.claimed == pytest.approx(4 * alpha * beta) and more.verdict == "holds"


def test_dp_fusion_has_no_bound_by_its_radius_where_a_word_is_rare() -> None:
    """Formulas B2.2 (F1): neither 4 D / alpha nor 4 D is enough; what Hoelder's inequality gives is (`held`)."""
    ratios = []
    for rare, low, high in ((1e-4, 1.4e-3, 5e-7), (1e-6, 1.4e-4, 5e-11)):
        laws = [(p, 1 - p) for p in (rare, low, high)]
        replaced, _, more, together = held("dp-fusion", {"alpha": 2, "beta": 0.01, "tokens": [1000]}, {}, *laws)
        assert replaced.claimed * 2 == pytest.approx(more.claimed) and together.ratio > 1
        ratios.append(more.ratio)
    assert ratios[1] > 3 * ratios[0] > 30


@pytest.mark.parametrize(
    ("alpha", "beta", "tokens", "claimed", "exact"),
    [(2, 0.01, 1000, 51.5, 76.6), (4, 0.1, 100, 43.8, 79.1), (16, 0.1, 100, 40.8, 223.5), (2, 0.01, 100, 15.5, 15.0)],
)
def test_dp_fusion_over_many_tokens(alpha: int, beta: float, tokens: int, claimed: float, exact: float) -> None:
    """Formulas C5, delta 1e-5: the last one holds."""
    *_, together = held("dp-fusion", {"alpha": alpha, "beta": beta, "tokens": [tokens]}, {}, EVEN, SURE, OPPOSITE)
    assert together.order is None and together.count == tokens
    assert (together.claimed, together.realised) == pytest.approx((claimed, exact), abs=0.06)
    assert (together.verdict == "holds") == (exact < claimed)


@pytest.mark.parametrize(
    ("members", "added", "emptied", "composed"),
    [(1, 0.005674770991, 0.005674770991, 9.802131547), (16, 0.004304407474, 1.2328 * 0.003123348, 8.333150756)],
)
def test_pmixed_as_published_at_its_worst_queries(members: int, added: float, emptied: float, composed: float) -> None:
    """V1 and V3 of formulas B2.3; sound accounting of the same holds (`held`)."""
    found = held("pmixed", {"members": members, "q": 0.03}, PMIXED, (0.145, 0.855), SURE, OPPOSITE)
    tokens = {one.neighbour: one for one in found if one.order is not None}
    assert tokens["add remove"].realised == pytest.approx(added, rel=1e-8)
    assert tokens["zero out"].realised == pytest.approx(emptied, rel=1e-4)
    assert all(one.claimed == pytest.approx(0.00312334816402061) for one in tokens.values())
    together = next(one for one in found if one.order is None and one.neighbour == "add remove")
    assert together.realised == pytest.approx(composed, rel=1e-5) and together.claimed == 8


@pytest.mark.parametrize(
    ("scale", "parameters", "divergence"),
    [(0.5, 151e6, 18.0), (0.3, 151e6, 98), (0.1, 151e6, 1468), (0.8, 151e6, 1.13), (0.5, 1e6, 0.119)],
)
def test_what_the_scale_of_adps_noise_gives_away(scale: float, parameters: float, divergence: float) -> None:
    """Formulas B4 (i): one example with rho = 1 removed from a batch of 4,096."""
    without = (scale * 4096 - 1) / 4095
    found = max(scale_divergence(2, int(parameters), *pair) for pair in ((scale, without), (without, scale)))
    assert found == pytest.approx(divergence, rel=6e-3)


def test_epsilon_of_two_scales_is_exact() -> None:
    """Against the integral of what exceeds e^epsilon, over the squared norm."""
    one, other, delta = 1.0, 0.8, 1e-3
    epsilon = scale_epsilon(3, one, other, delta)

    def delta_at(a: float, b: float) -> float:
        def above(x: float) -> float:
            p, q = (float(chi2.pdf(x / scale**2, 3)) / scale**2 for scale in (a, b))
            return max(p - math.exp(epsilon) * q, 0.0)

        return float(quad(above, 0, 200, limit=2000, points=np.linspace(1, 60, 40))[0])

    assert max(delta_at(one, other), delta_at(other, one)) == pytest.approx(delta, rel=1e-5)
    assert scale_epsilon(3, 0.7, 0.7, delta) == 0 and scale_epsilon(10**8, 1.0, 0.999, 1e-5) > 40
    assert scale_divergence(2, 5, 1.0, 0.5) == math.inf


def test_claims_that_are_attained_are_said_to_hold() -> None:
    mixed = held(
        "uniform-mixing", {"weight": 0.9, "tokens": [7]}, {}, (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
    )
    assert [one.verdict for one in mixed] == ["holds"] * 2 and [one.ratio for one in mixed] == pytest.approx([1, 1])
    options = {"delta": 1e-6, "temperature": 1.1, "queries": 500}
    token, spread, together = held("invisible-ink", {"epsilon": 10, "batch": 7}, options, EVEN, SURE, EVEN)
    assert 0.99 < token.ratio < spread.ratio == pytest.approx(1) and 0.9 < together.ratio < 1
    assert {one.verdict for one in (token, spread, together)} == {"holds"}


def test_the_page_is_what_the_command_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`audit reproduce claims -o DIR` and its claims.md, all but the section that takes longest: of that, the text."""
    quick = [plan for plan in PLANS if plan != "pmixed"]
    assert (
        call(["reproduce", "claims", "-o", str(tmp_path), *(word for plan in quick for word in ("--plan", plan))]) == 0
    )
    assert "claims.md" in capsys.readouterr().out
    committed = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    made = (tmp_path / "claims.md").read_text(encoding="utf-8")
    intro, *sections = made.split("\n## ")
    assert committed.startswith(intro) and len(sections) == len(quick)
    where = [committed.find(f"\n## {section}".rstrip("\n")) for section in sections]
    assert where == sorted(where) and -1 not in where
    whole = Published.of(PLANS["pmixed"]["title"], PLANS["pmixed"]["published"])
    rows = [line for line in committed.splitlines() if line.startswith("| one member, sure of a token |")]
    found = list(published.pmixed(whole.queries[0], whole.options))
    assert rows == [line for line in published.section(whole, found).splitlines() if line in rows] and len(rows) == 8
    assert all(str(whole.words[name]) in committed for name in ("does", "says", "reading", "holds", "fails"))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"mechanism": "dp-fussion"}, "did you mean 'dp-fusion'"),
        ({"mechanism": "adp", "hold": ""}, "did you mean 'holds'"),
        ({"mechanism": "pmixed", "query": [{"name": "q", "public": [0.5, 0.6]}]}, "total mass 1 in the query 'q'"),
        ({"mechanism": "pmixed", "query": [{"public": [0.5, 0.5], "private": [1.0]}]}, "expected laws of one width"),
    ],
)
def test_plans_that_say_something_else_are_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(AuditError, match=said):
        Published.of("a claim", raw)


def test_what_a_claim_does_not_look_at_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["reproduce", "claims", "--model", "gpt2", "--limit", "3", "-o", str(tmp_path / "out")]) == 2
    assert "expected no --limit, --model for claims/dp-fusion, whose laws are given" in capsys.readouterr().err
    assert call(["reproduce", "claims", "--plan", "pmixd", "-o", str(tmp_path / "out")]) == 2
    assert "did you mean 'pmixed'" in capsys.readouterr().err and not (tmp_path / "out").exists()
