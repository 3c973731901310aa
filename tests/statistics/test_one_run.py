"""The bounds of one run against published numbers, slow twins, and mechanisms whose every outcome is enumerated."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import xlog1py, xlogy
from scipy.stats import binom, norm

from auditor.core.errors import AuditError
from auditor.statistics.one_run import (
    epsilon_fdp,
    epsilon_gdp,
    epsilon_one_run,
    fdp_mu,
    gaussian_delta,
    gaussian_epsilon,
    gdp_mu,
    gdp_p_value,
    group_delta,
    p_value,
)

# Our own, 50-digit arithmetic (formulas.md B5); jax_privacy's `_epsilon_one_run` gives them within 3e-7.
STEINKE = [
    ((100, 100, 100, 0.0, 0.05), 3.492965431, 2.48437856e-14),
    ((1000, 1000, 1000, 0.0, 0.05), 5.809068339, 8.95731236e-137),
    ((1000, 1000, 1000, 1e-5, 0.05), 5.782283135, 6.58862231e-5),
    ((1000, 100, 100, 1e-5, 0.05), 3.465376348, 5.63308984e-4),
    ((1000, 200, 180, 1e-5, 0.05), 1.796285071, 4.36224539e-4),
    ((1000, 1000, 600, 0.0, 0.05), 0.297467924, 1.0),
    ((1000, 1000, 600, 1e-5, 0.05), 0.297226954, 1.0),
    ((5000, 500, 450, 1e-5, 0.05), 1.941420432, 9.46303139e-4),
    ((10000, 1000, 990, 1e-6, 0.05), 4.059246922, 6.81765334e-5),
    ((100000, 1500, 1429, 1e-5, 0.05), 2.668754494, 5.33451267e-3),
    ((20, 20, 20, 0.01, 0.05), 0.979042361, 0.0507691474),
    ((1000, 1000, 550, 0.0, 0.01), 0.051057136, 1.0),
    ((10, 3, 3, 0.0, 0.05), 0.0, 0.390711805),
    ((1000, 1000, 500, 1e-5, 0.05), 0.0, 1.0),
]

# Single threshold, significance 0.05, delta 1e-5 (formulas.md A10 and C1; jax_privacy's `epsilon_one_run_fdp`).
FDP = [
    ((1000, 100, 100), 5.549027898),
    ((1000, 100, 95), 3.323300489),
    ((1000, 100, 80), 1.4022),
    ((1000, 1000, 600), 0.583540473),
    ((10000, 1000, 900), 2.802597995),
    ((200, 40, 40), 4.53424757),
    ((100, 100, 100), 8.216185964),
    ((500, 500, 500), 11.144761693),
    ((1000, 1000, 1000), 12.334569481),
    ((1000, 1000, 900), 3.779338333),
]

# Xiang et al. 2025 as opake-auditing 0.16.1 computes it (formulas.md C1): mu, and epsilon at delta 1e-5.
PUBLISHED_GDP = [
    ((1000, 100, 100), 1.45717, 6.81155),
    ((1000, 100, 95), 0.9001, 3.87668),
    ((1000, 100, 80), 0.38655, 1.49716),
    ((1000, 1000, 600), 0.3109, 1.17714),
    ((200, 40, 40), 1.29908, 5.94348),
    ((100, 100, 100), 3.88122, 23.41296),
]


@pytest.mark.parametrize(("case", "bound", "p_at_1"), STEINKE)
def test_known_answers_of_steinke_nasr_jagielski(
    case: tuple[int, int, int, float, float], bound: float, p_at_1: float
) -> None:
    m, r, v, delta, _ = case
    assert epsilon_one_run(*case) == pytest.approx(bound, abs=2e-9)
    assert p_value(m, r, v, 1.0, delta) == pytest.approx(p_at_1, rel=1e-8)


@pytest.mark.parametrize(("case", "bound"), FDP)
def test_known_answers_of_the_f_dp_bound(case: tuple[int, int, int], bound: float) -> None:
    assert epsilon_fdp(*case, 1e-5) == pytest.approx(bound, abs=1e-4 if bound == 1.4022 else 2e-9)


@pytest.mark.parametrize(
    ("case", "bound"), [((1000, 100, 100), 5.5092), ((1000, 100, 95), 3.3234), ((1000, 1000, 600), 0.5829)]
)
def test_privacy_guard_agrees_to_within_a_step_of_its_grid(case: tuple[int, int, int], bound: float) -> None:
    """PrivacyGuard's FDPAnalysisNode looks at noises in steps of 0.01 (formulas.md C1)."""
    noise = 1 / fdp_mu(*case)
    assert gaussian_epsilon(1 / (noise + 0.01), 1e-5) < bound < gaussian_epsilon(1 / (noise - 0.01), 1e-5)


def hull_of_deterministic_normals(shift: float) -> list[tuple[int, int]]:
    """Counts (false, true) at the corners of the ROC's hull: 10,000 quantiles of a normal, and the same shifted."""
    n = 10_000
    out = norm.ppf(np.linspace(0, 1, n, endpoint=False) + 1 / (2 * n))
    cuts = np.unique(np.concatenate([out, out + shift]))[::-1]
    false, true = (n - np.searchsorted(side, cuts, "left") for side in (out, out + shift))
    corners: list[tuple[int, int]] = [(0, 0)]
    for x, y in zip(false.tolist(), true.tolist(), strict=True):
        while len(corners) > 1 and _not_concave(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    return corners


def _not_concave(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) >= (b[1] - a[1]) * (c[0] - a[0])


@pytest.mark.parametrize(
    ("shift", "corners", "pure", "at", "fdp", "fdp_at"),
    [
        (1.0, 386, 1.13346, (3376, 2807), 2.164749, (406, 379)),
        (2.0, 374, 2.311945, (4666, 4499), 4.7218075, (938, 934)),
        (4.0, 140, 4.395568, (8233, 8223), 9.133752, (5436, 5436)),
    ],
)
def test_jax_privacy_s_deterministic_normals(
    shift: float, corners: int, pure: float, at: tuple[int, int], fdp: float, fdp_at: tuple[int, int]
) -> None:
    """The vectors of its auditing tests (formulas.md B5, C1): delta 1e-6, 5% shared by the corners of the hull.

    That set depends on the coins, so the rule is not ours; the numbers at its best corners are.
    """
    hull = hull_of_deterministic_normals(shift)
    tried = {(false + true, true) for false, true in hull if true}
    assert len(hull) == corners and {at, fdp_at} <= tried
    level = 0.05 / corners
    assert epsilon_one_run(20_000, *at, 1e-6, level) == pytest.approx(pure, abs=1e-6)
    assert epsilon_fdp(20_000, *fdp_at, 1e-6, level) == pytest.approx(fdp, abs=1e-6)
    for corner in sorted(tried)[:: max(1, corners // 12)]:
        assert epsilon_one_run(20_000, *corner, 1e-6, level) <= pure + 1e-6


# --- twins ------------------------------------------------------------------------------------------------------------


def naive_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    worst = max((sum(mass[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, sum(mass[v:]) + 2 * m * delta * worst)


@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-3])
def test_the_p_value_is_its_definition(delta: float) -> None:
    for m, r, v in [(5, 0, 0), (5, 5, 0), (5, 5, 5), (40, 17, 11), (60, 60, 35), (200, 30, 30)]:
        for epsilon in (0.0, 0.3, 1.0, 4.0, 12.0):
            assert p_value(m, r, v, epsilon, delta) == pytest.approx(naive_p_value(m, r, v, epsilon, delta), rel=1e-9)


@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_no_epsilon_below_the_bound_is_kept(delta: float) -> None:
    """The bisection needs a p-value that only rises up to where the pure bound lies."""
    for m, r, v in [(20, 20, 20), (50, 20, 18), (200, 200, 150), (1000, 50, 50)]:
        bound = epsilon_one_run(m, r, v, delta)
        p = [p_value(m, r, v, epsilon, delta) for epsilon in np.linspace(0, epsilon_one_run(m, r, v, 0.0), 400)]
        assert all(a <= b + 1e-12 for a, b in pairwise(p))
        assert not bound or p_value(m, r, v, bound, delta) <= 0.05 <= p_value(m, r, v, bound + 1e-9, delta)


def naive_falsified(m: int, r: int, v: int, mu: float, level: float) -> bool:
    """formulas.md A10, without leaving early."""
    right, wrong = level * v / m, level * (r - v) / m
    for i in range(v - 1, -1, -1):
        raised = max(wrong, norm.cdf(norm.ppf(right) - mu))
        right, wrong = min(1.0, right + i / (r - i) * (raised - wrong)), raised
    return bool(right + wrong > r / m)


def test_the_f_dp_bound_is_the_whole_recursion() -> None:
    for m, r, v in [(50, 50, 40), (50, 20, 20), (300, 40, 31)]:
        mu = brentq(lambda x, c=(m, r, v): 0.5 - naive_falsified(*c, x, 0.05), 0.0, 20.0, xtol=1e-10)
        assert epsilon_fdp(m, r, v, 1e-4) == pytest.approx(gaussian_epsilon(mu, 1e-4), abs=1e-6)


def test_the_gdp_p_value_is_the_chance_in_a_simulated_game() -> None:
    rng, mu, runs = np.random.default_rng(3), 1.2, 20_000
    for m, r, v in [(12, 12, 10), (12, 5, 5), (40, 8, 7)]:
        x = rng.normal(mu / 2, 1, (runs, m))  # all are in: "out" is the same with its sign turned
        order = np.argsort(-np.abs(x), axis=1)[:, :r]
        seen = (np.take_along_axis(x, order, 1) > 0).sum(1) >= v
        assert gdp_p_value(m, r, v, mu) == pytest.approx(seen.mean(), abs=4 * seen.std() / math.sqrt(runs))


@pytest.mark.parametrize(("r", "v"), [(100, 60), (100, 75), (40, 40), (100, 50), (100, 20), (10, 0)])
def test_where_all_are_guessed_mu_is_refuted_up_to_the_level(r: int, v: int) -> None:
    """Each is right with probability Phi(mu / 2); half right or fewer refute nothing."""
    mu = gdp_mu(r, r, v, 0.05)
    assert (mu > 0) == (binom.sf(v - 1, r, 0.5) < 0.05)
    assert mu == 0 or binom.sf(v - 1, r, norm.cdf(mu / 2)) == pytest.approx(0.05)


def test_the_gdp_p_value_against_adaptive_quadrature() -> None:
    m, r, v, mu = 60, 12, 11, 1.5

    def given(t: float) -> float:
        right, wrong = norm.sf(t - mu / 2), norm.sf(t + mu / 2)
        passed, density = right + wrong, norm.pdf(t - mu / 2) + norm.pdf(t + mu / 2)
        order = (r + 1) * math.comb(m, r + 1) * passed**r * (1 - passed) ** (m - r - 1) * density
        return float(order * binom.sf(v - 1, r, right / passed))

    assert gdp_p_value(m, r, v, mu) == pytest.approx(quad(given, 0, 12, epsabs=1e-13)[0], rel=1e-9)


# --- the published rule of order statistics ---------------------------------------------------------------------------


def published_gdp_p(m: int, r: int, v: int, mu: float) -> float:
    """Xiang et al. 2025: expected error of each of the r surest, put into a Chernoff bound of their sum."""
    t = np.linspace(0, mu / 2 + 12, 20_001)
    density = norm.pdf(t - mu / 2) + norm.pdf(t + mu / 2)
    passed = np.minimum(norm.sf(t - mu / 2) + norm.sf(t + mu / 2), 1.0)
    error = 1 / (1 + np.exp(mu * t))
    errors = []
    for k in range(r):  # the (k+1)-th surest: so many are passed before it
        log_order = math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k)
        mass = density * np.exp(log_order + xlogy(k, passed) + xlog1py(m - 1 - k, -passed))
        errors.append(np.trapezoid(mass * error, t))
    wrong, e = r - v, np.array(errors)
    if wrong >= e.sum():
        return 1.0
    if wrong == 0:
        return float(np.prod(1 - e))
    rate = brentq(lambda s: (e * np.exp(-s) / (1 + e * np.expm1(-s))).sum() - wrong, 0, 60)
    return float(np.exp(rate * wrong + np.log1p(e * np.expm1(-rate)).sum()))


@pytest.mark.parametrize(("case", "mu", "epsilon"), PUBLISHED_GDP)
def test_the_published_rule_is_understood(case: tuple[int, int, int], mu: float, epsilon: float) -> None:
    """Our reading of it gives its numbers: at its mu its p-value is the level."""
    assert published_gdp_p(*case, mu) == pytest.approx(0.05, rel=0.03)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, abs=2e-4)


def test_where_all_guesses_are_right_the_published_rule_exceeds_the_truth_too_often() -> None:
    """100 independent canaries at its own mu, 3.88: all are right with probability 7%, and 5% is what it states."""
    assert norm.cdf(3.88122 / 2) ** 100 == pytest.approx(0.0706, abs=1e-4)
    for case, mu, _ in PUBLISHED_GDP:
        m, r, v = case
        if v == r:
            assert gdp_mu(m, r, v) < mu and gdp_p_value(m, r, v, mu) > 0.05
        else:
            assert gdp_mu(m, r, v) > mu  # exact, where a Chernoff bound is loose


# --- limits -----------------------------------------------------------------------------------------------------------


def test_limits() -> None:
    for bound in (epsilon_one_run, epsilon_fdp, epsilon_gdp):
        assert bound(100, 0, 0, 1e-5) == bound(100, 50, 0, 1e-5) == bound(100, 50, 25, 1e-5) == 0
        assert bound(100, 4, 4, 1e-5) == 0  # 2^-4 > 5%
        assert 0 < bound(100, 20, 20, 1e-5) < bound(100, 20, 20, 1e-5, 0.2) < math.inf
        assert bound(100, 20, 19, 1e-5) < bound(100, 20, 20, 1e-5)
    assert epsilon_one_run(100, 100, 100, 0.0) == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)), rel=1e-12)
    assert epsilon_one_run(10**6, 10**6, 10**6, 0.0) == pytest.approx(math.log(10**6 / -math.log(0.05)), rel=1e-5)


@pytest.mark.parametrize(
    "bad", [(10, 11, 3, 0.0), (10, 3, 4, 0.0), (10, 3, -1, 0.0), (10, 3, 3, 1.0), (10, 3, 3, -0.1)]
)
def test_impossible_counts_are_refused(bad: tuple[int, int, int, float]) -> None:
    for bound in (epsilon_one_run, epsilon_fdp, epsilon_gdp):
        with pytest.raises(AuditError, match="expected"):
            bound(*bad)
    with pytest.raises(AuditError, match="no Gaussian mechanism"):
        epsilon_gdp(10, 10, 10, 0.0)


def test_epsilon_of_a_gaussian_mechanism() -> None:
    """dp-accounting's exact Gaussian (formulas.md B4): sigma 5; sigma 20 a hundred times, mu = 10 / 20."""
    assert gaussian_epsilon(1 / 5, 1e-5) == pytest.approx(0.725521750858, abs=1e-10)
    assert gaussian_epsilon(10 / 20, 1e-5) == pytest.approx(1.993091404415, abs=1e-10)
    assert gaussian_delta(gaussian_epsilon(30.0, 1e-5), 30.0) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(1e-5, 1e-3) == 0


# --- groups -----------------------------------------------------------------------------------------------------------


def test_copies_speak_for_groups() -> None:
    assert epsilon_one_run(500, 500, 500, 0.0, 0.05, 3) == pytest.approx(epsilon_one_run(500, 500, 500, 0.0) / 3)
    assert group_delta(0.7, 1e-5, 4) == pytest.approx(1e-5 * math.expm1(4 * 0.7) / math.expm1(0.7))
    assert group_delta(0.0, 1e-5, 4) == pytest.approx(4e-5)
    bound = epsilon_one_run(500, 500, 480, 1e-5, 0.05, 4)
    p = [p_value(500, 500, 480, 4 * e, group_delta(e, 1e-5, 4)) for e in (bound - 1e-6, bound + 1e-6)]
    assert p[0] < 0.05 < p[1]
    assert bound < epsilon_one_run(500, 500, 480, 1e-5) / 4  # a group's delta is more than a record's
    assert epsilon_gdp(500, 500, 480, 1e-5, 0.05, 4) == pytest.approx(gaussian_epsilon(gdp_mu(500, 500, 480) / 4, 1e-5))


# --- what each refutes ------------------------------------------------------------------------------------------------


def common_coin(chance: float, right: float, r: int) -> np.ndarray:
    """P[v right of r], v = 0..r: with this chance all bits are told, each rightly with this probability; else none."""
    v = np.arange(r + 1)
    return chance * binom.pmf(v, r, right) + (1 - chance) * binom.pmf(v, r, 0.5)


def test_a_mechanism_with_a_coin_of_its_own_is_no_set_of_independent_channels() -> None:
    """It is 1-GDP for every canary given the others, yet 10% of its audits "refute" 1.7 by order statistics.

    So that bound is about independent channels; those of f-DP and of (epsilon, delta)-DP hold here.
    """
    chance, right, m, level = 0.1, 0.9, 100, 0.05
    alpha = np.linspace(0, 1, 2001)
    best = np.minimum(alpha / ((1 - right) * chance), 1) * right * chance  # power: told bits first, then the others
    rest = np.clip((alpha - (1 - right) * chance) / (1 - chance), 0, None)
    power = best + np.minimum(rest, 1) * (1 - chance)
    late = np.clip((alpha - (1 - right) * chance - (1 - chance)) / (right * chance), 0, 1) * (1 - right) * chance
    assert (power + late <= norm.cdf(norm.ppf(alpha) + 1) + 1e-9).all()  # 1-GDP

    distribution = common_coin(chance, right, m)
    truth = gaussian_epsilon(1.0, 1e-5)
    exceeds = {
        bound: [bound(m, m, v, 1e-5, level) > truth for v in range(m + 1)] for bound in (epsilon_fdp, epsilon_gdp)
    }
    assert distribution[exceeds[epsilon_gdp]].sum() > 0.09 > level >= distribution[exceeds[epsilon_fdp]].sum()
