"""Published claims at the queries that are hardest on them: known answers, controls that hold, the
page as it is."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.core.errors import AuditError
from auditor.privacy.gaussian import compute_noise_scale_divergence
from auditor.studies import papers, published_promises
from auditor.studies.published_promises import PromiseCheck, PublishedPromise
from tests.conftest import check_command

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
with (EVIDENCE / "data" / "claims.csv").open(encoding="utf-8", newline="") as _lines:
    DATA = [tuple(row) for row in csv.reader(_lines)][1:]
PLANS = {
    name: PublishedPromise.from_published_table(plan["title"], plan["published"])
    for name, plan in papers.load_paper("claims").plans.items()
}
QUICK = [name for name in PLANS if name != "pmixed"]
Found = Mapping[str, Sequence[PromiseCheck]]


@pytest.fixture(scope="module")
def found() -> Found:
    """All that is found of each claim; of PMixed, which takes longest, of one member and of
    sixteen."""
    few = [
        dataclasses.replace(query, settings=(query.setting,))
        for query in PLANS["pmixed"].queries
        if query.setting["members"] in (1, 16)
    ]
    pmixed = dataclasses.replace(PLANS["pmixed"], query=tuple(few))
    return {
        name: (pmixed if name == "pmixed" else claim).check_all_queries()
        for name, claim in PLANS.items()
    }


def rows(
    found: Sequence[PromiseCheck], query: str, setting: str, *, ours: bool = False
) -> list[PromiseCheck]:
    chosen = [
        one for one in found if (one.query.name, one.setting, one.ours) == (query, setting, ours)
    ]
    assert chosen
    return chosen


def test_every_control_holds(found: Found) -> None:
    for name, all_of_it in found.items():
        ours = [one for one in all_of_it if one.ours]
        assert all(one.verdict == "holds" for one in ours) and bool(ours) == (
            name in ("dp-fusion", "pmixed", "adp")
        )


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
def test_dp_fusion_costs_more_than_it_charges(
    found: Found, alpha: int, beta: float, realised: float | None, ratio: float
) -> None:
    """Formulas C5: two private contexts that favour opposite tokens."""
    setting = f"α {alpha}, β {beta}"
    replaced, emptied = rows(found["dp-fusion"], "opposite phrases", setting)[:2]
    assert replaced.claimed == pytest.approx(4 * beta) and replaced.order == alpha
    assert (
        replaced.loss_ratio == pytest.approx(ratio, abs=5e-3) and "neighbour 0" in replaced.location
    )
    assert realised is None or replaced.realised == pytest.approx(realised, abs=5e-6)
    # as far from the redacted distribution as it may be
    assert emptied.realised == pytest.approx(alpha * beta, rel=1e-4)
    assert (emptied.verdict == "holds") == (alpha <= 4)
    (more,) = rows(found["dp-fusion"], "opposite phrases", f"{setting}, charged 4 D")
    assert (
        more.claimed == pytest.approx(4 * alpha * beta)
        and more.verdict == "holds"
        and more.is_uncounted
    )


@pytest.mark.parametrize(
    ("alpha", "beta", "tokens", "claimed", "exact"),
    [
        (2, 0.01, 1000, 51.5, 76.6),
        (4, 0.1, 100, 43.8, 79.1),
        (16, 0.1, 100, 40.8, 223.5),
        (2, 0.01, 100, 15.5, 15.0),
    ],
)
def test_dp_fusion_over_many_tokens(
    found: Found, alpha: int, beta: float, tokens: int, claimed: float, exact: float
) -> None:
    """Formulas C5, delta 1e-5: the last one holds."""
    of_it = rows(found["dp-fusion"], "opposite phrases", f"α {alpha}, β {beta}")
    (together,) = [one for one in of_it if one.order is None and one.count == tokens]
    assert (together.claimed, together.realised) == pytest.approx((claimed, exact), abs=0.06)
    assert (together.verdict == "holds") == (exact < claimed)


def test_dp_fusion_has_no_bound_by_its_radius_where_a_word_is_rare(found: Found) -> None:
    """The triangle inequality fails at one order: neither 4 D / alpha nor 4 D is enough; the rarer,
    the less. By hand: both weights are 1."""
    name = "a word that is rare behind the redacted text"
    replaced, _, together = rows(found["dp-fusion"], name, "α 2, β 0.01")
    (more,) = rows(found["dp-fusion"], name, "α 2, β 0.01, charged 4 D")
    low, high = 1.4e-3, 5e-7
    assert replaced.realised == pytest.approx(
        math.log(low**2 / high + (1 - low) ** 2 / (1 - high)), rel=1e-9
    )
    assert (
        replaced.claimed * 2 == pytest.approx(more.claimed)
        and more.loss_ratio > 15
        and together.loss_ratio > 1.9
    )


@pytest.mark.parametrize(
    ("query", "members", "added", "emptied", "composed"),
    [
        ("one member, sure of a token", 1, 0.005674770991, 0.005674770991, 9.802131547),
        (
            "the others sure of the other token",
            16,
            0.004304407474,
            1.2328 * 0.003123348,
            8.333150756,
        ),
    ],
)
def test_pmixed_as_published_at_its_worst_queries(
    found: Found, query: str, members: int, added: float, emptied: float, composed: float
) -> None:
    """Values computed with 50 digits."""
    of_it = rows(found["pmixed"], query, f"N {members}, q 0.03")
    tokens = {one.neighbour: one for one in of_it if one.order is not None}
    assert tokens["add remove"].realised == pytest.approx(added, rel=1e-8)
    assert tokens["zero out"].realised == pytest.approx(emptied, rel=1e-4)
    assert all(one.claimed == pytest.approx(0.00312334816402061) for one in tokens.values())
    together = next(one for one in of_it if one.order is None and one.neighbour == "add remove")
    assert together.realised == pytest.approx(composed, rel=1e-5) and together.claimed == 8


@pytest.mark.parametrize(
    ("scale", "parameters", "divergence"),
    [
        (0.5, 151e6, 18.0),
        (0.3, 151e6, 98),
        (0.1, 151e6, 1468),
        (0.8, 151e6, 1.13),
        (0.5, 1e6, 0.119),
    ],
)
def test_what_the_scale_of_adps_noise_gives_away(
    scale: float, parameters: float, divergence: float
) -> None:
    """Formulas B4 (i): one example with rho = 1 removed from a batch of 4,096."""
    without = (scale * 4096 - 1) / 4095
    found = max(
        compute_noise_scale_divergence(2, int(parameters), *pair)
        for pair in ((scale, without), (without, scale))
    )
    assert found == pytest.approx(divergence, rel=6e-3)


def test_claims_that_are_attained_are_said_to_hold(found: Found) -> None:
    mixed, ink = found["uniform-mixing"], found["invisible-ink"]
    assert {one.verdict for one in (*mixed, *ink)} == {"holds"}
    assert [one.loss_ratio for one in mixed] == pytest.approx([1] * len(mixed))
    token, spread, together = rows(ink, "a reference that is sure of one token", "ε 10, B 7")
    assert (
        0.99 < token.loss_ratio < spread.loss_ratio == pytest.approx(1)
        and 0.9 < together.loss_ratio < 1
    )


def list_data_rows(role: str, name: str, checks: Sequence[PromiseCheck]) -> list[tuple[str, ...]]:
    """Return checks as rows of `data/claims.csv`."""
    table = published_promises.build_published_promise_table(PLANS[name], checks)
    roles = ["another charge" if check.is_uncounted else role for check in checks]
    return [(PLANS[name].title, role, *row) for role, row in zip(roles, table.rows, strict=True)]


def test_the_data_are_what_is_found(found: Found) -> None:
    """Of PMixed, the rows of the queries that are looked at here."""
    for name, checks in found.items():
        data = [row for row in DATA if row[0] == PLANS[name].title]
        published, controls = ([c for c in checks if c.ours == ours] for ours in (False, True))
        rows = list_data_rows("published", name, published)
        rows += list_data_rows("control", name, controls) if controls else []
        assert set(rows) <= set(data) and len(rows) > 3
        assert name == "pmixed" or len(rows) == len(data)


def test_the_page_tells_the_worst_of_the_data() -> None:
    page = (EVIDENCE / "claims.md").read_text(encoding="utf-8")
    counted = [row for row in DATA if row[1] != "another charge"]
    for title, role in dict.fromkeys(row[:2] for row in counted):
        checks = [row for row in counted if row[:2] == (title, role)]
        n_failures = sum(row[-1] != "holds" for row in checks)
        begin = f"| {'control: ' * (role == 'control')}{title} | {n_failures} of {len(checks)} | "
        (line,) = (line for line in page.splitlines() if line.startswith(begin))
        query, realised, claimed, ratio = line.removeprefix(begin).strip(" |").split(" | ")
        told = [row for row in checks if query in f"{row[2]}, {row[3]}"]
        told = [row for row in told if row[-3:-1] == (realised, claimed)]
        worst = max(map(read_ratio, checks))
        assert told and read_ratio(told[0]) == pytest.approx(worst, rel=1e-3), line
        assert ratio == ("–" if worst == 0 else f"{worst:.3g}")


def read_ratio(row: tuple[str, ...]) -> float:
    realised, claimed = (float(number.replace(",", "")) for number in row[-3:-1])
    return realised / claimed


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One plan now, one later: the page has both, in the order of the paper."""
    for plan in ("invisible-ink", "uniform-mixing"):
        check_command("reproduce", "claims", "--plan", plan, "-o", tmp_path)
    assert "claims.md" in capsys.readouterr().out
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert page.startswith(published_promises.INTRO) and 0 < page.index(
        "## Uniform mixing"
    ) < page.index("## InvisibleInk")
    written = [row for row in DATA if row[0] in ("Uniform mixing", "InvisibleInk")]
    assert len(written) == 13
    assert all(f"| {' | '.join(row[2:])} |" in page.splitlines() for row in written)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"mechanism": "dp-fussion"}, "did you mean 'dp-fusion'"),
        ({"mechanism": "adp", "hold": ""}, "did you mean 'holds'"),
        (
            {"mechanism": "pmixed", "query": [{"name": "q", "public": [0.5, 0.6]}]},
            "total mass 1 in the query 'q'",
        ),
        (
            {"mechanism": "pmixed", "query": [{"public": [0.5, 0.5], "private": [1.0]}]},
            "expected distributions of one width",
        ),
    ],
)
def test_plans_that_say_something_else_are_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(AuditError, match=said):
        PublishedPromise.from_published_table("a claim", raw)


def test_what_a_claim_does_not_look_at_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command(
        "reproduce", "claims", "--model", "gpt2", "--limit", "3", "-o", tmp_path / "out", code=2
    )
    assert (
        "expected no --limit, --model for claims/dp-fusion, whose distributions are given"
        in capsys.readouterr().err
    )
    check_command("reproduce", "claims", "--plan", "pmixd", "-o", tmp_path / "out", code=2)
    assert "did you mean 'pmixed'" in capsys.readouterr().err and not (tmp_path / "out").exists()
