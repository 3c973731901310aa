"""Lower bounds of epsilon from one training run: m canaries, each in or out by its own fair coin, r of them guessed.

v of the r guesses are right. Each bound exceeds the truth with probability at most `level`, if what its name says is
true of the mechanism (below), r was fixed without a look at the coins, and the coins were fair and independent. It
holds for any way of guessing, and for any score. Epsilons in nats, at delta, under the relation that the coins play:
a canary in or out. Knows no scores: see `audited`.

| bound | what it refutes | source |
|---|---|---|
| `epsilon_one_run` | (epsilon, delta)-DP | Steinke, Nasr and Jagielski 2023, Theorem 5.2 |
| `epsilon_fdp` | mu-GDP of every canary given the others, said as (epsilon, delta) | Mahloujifar et al. 2024 |
| `epsilon_gdp` | m Gaussian channels of mu, independent of each other | order statistics; Xiang et al. 2025 |

The third refutes less than the second: a mechanism with a coin of its own, by which it leaks all canaries or none, can
be mu-GDP and still be "refuted" by `epsilon_gdp` (tests/statistics/test_one_run.py has one).

copies: every canary that is in was inserted so many times. Then what is played for is a group of so many records:
(k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1))-DP, or k mu. The bound is of one record's epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, log_ndtr, ndtr, ndtri
from scipy.stats import beta

from auditor.core.errors import AuditError

_CLOSE = 1e-12  # width of a bisection's last interval; what is returned is the end that was refuted
_FAR = 40.0  # standard deviations, beyond which a binomial has no mass
_MOST_MU = 256.0
_NODES = 100  # of the integral over an order statistic
_TAIL = 1e-13  # of its distribution, at each end, that counts as rejected by nobody


@lru_cache(maxsize=2**16)
def epsilon_one_run(m: int, r: int, v: int, delta: float, level: float = 0.05, copies: int = 1) -> float:
    """The epsilon below which every (epsilon, delta)-DP is refuted; 0 where none is.

    With delta 0: logit of the Clopper-Pearson bound of v right in r. Raises AuditError for impossible counts.
    """
    _check(m, r, v, delta, level, copies)
    pure = _logit_bound(r, v, level) / copies
    if delta == 0 or pure <= 0:
        return max(pure, 0.0)

    def refuted(epsilon: float) -> bool:
        return p_value(m, r, v, copies * epsilon, group_delta(epsilon, delta, copies)) < level

    return last_refuted(refuted, pure)


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """How likely v or more of r guesses are right under (epsilon, delta)-DP, at most.

    min(1, P[B >= v] + 2 m delta max_{1 <= i <= v} P[v > B >= v - i] / i), B binomial of r and e^epsilon / (1 +
    e^epsilon).
    """
    right, wrong = -np.logaddexp(0, -epsilon), -np.logaddexp(0, epsilon)  # logs of the two probabilities
    mean, spread = r * math.exp(right), math.sqrt(r * math.exp(right + wrong))
    k = np.arange(max(0, int(mean - _FAR * spread) - 100), min(r, int(mean + _FAR * spread) + 100) + 1)
    mass = np.exp(gammaln(r + 1) - gammaln(k + 1) - gammaln(r - k + 1) + k * right + (r - k) * wrong)
    tail = float(mass[k >= v].sum())
    below = k < v
    if delta == 0 or not below.any():
        return min(1.0, tail)
    averages = np.cumsum(mass[below][::-1]) / (v - k[below][::-1])  # P[v > B >= v - i] / i
    return min(1.0, tail + 2 * m * delta * float(averages.max()))


@lru_cache(maxsize=2**16)
def epsilon_fdp(m: int, r: int, v: int, delta: float, level: float = 0.05, copies: int = 1) -> float:
    """Epsilon at delta of the largest mu that is refuted: that each canary's trade-off is at least the Gaussian's.

    Raises AuditError for impossible counts, and at delta 0, where no Gaussian mechanism has a finite epsilon.
    """
    _check_gaussian(m, r, v, delta, level, copies)
    return gaussian_epsilon(fdp_mu(m, r, v, level) / copies, delta)


@lru_cache(maxsize=2**16)
def fdp_mu(m: int, r: int, v: int, level: float = 0.05) -> float:
    """The mu below which mu-GDP is refuted; 0 where none is."""
    return _last_mu(lambda mu: _falsified(m, r, v, mu, level))


def _falsified(m: int, r: int, v: int, mu: float, level: float) -> bool:
    """Whether P[v right of r] >= level can be under no mechanism of this trade-off (formulas.md A10)."""
    right, wrong = level * v / m, level * (r - v) / m  # both only grow
    for i in range(v - 1, -1, -1):
        raised = max(wrong, float(ndtr(ndtri(right) - mu)))
        if raised == wrong:
            break
        right, wrong = min(1.0, right + i / (r - i) * (raised - wrong)), raised
        if right + wrong > r / m:
            return True
    return right + wrong > r / m


@lru_cache(maxsize=2**16)
def epsilon_gdp(m: int, r: int, v: int, delta: float, level: float = 0.05, copies: int = 1) -> float:
    """Epsilon at delta of the largest mu that is refuted: that the canaries pass m independent channels N(0 or mu, 1).

    Exact: the most that can be right are the r surest, and given how sure the next one is they are independent. (The
    published rule puts the expectations of the order statistics into a Chernoff bound. That is looser where some are
    wrong, and where all are right it exceeds the truth more often than `level`: the mean of a product is not the
    product of means.) Raises AuditError as `epsilon_fdp` does.
    """
    _check_gaussian(m, r, v, delta, level, copies)
    return gaussian_epsilon(gdp_mu(m, r, v, level) / copies, delta)


@lru_cache(maxsize=2**16)
def gdp_mu(m: int, r: int, v: int, level: float = 0.05) -> float:
    """The mu below which m independent Gaussian channels are refuted; 0 where none are."""
    if r == m:  # all are guessed: each is right with probability Phi(mu / 2)
        return max(0.0, 2 * float(ndtri(beta.ppf(level, v, r - v + 1)))) if v else 0.0
    return _last_mu(lambda mu: gdp_p_value(m, r, v, mu) < level)


def gdp_p_value(m: int, r: int, v: int, mu: float) -> float:
    """P[at least v of the r surest of m are right], each N(+-mu/2, 1) and taken for what its sign says.

    Sure is what lies far from 0: t is passed with probability S(t) = Phi(mu/2 - t) + Phi(-mu/2 - t), rightly with
    Phi(mu/2 - t). S of the (r+1)-th surest is Beta(r + 1, m - r) distributed, and the r before it are right with
    probability Phi(mu/2 - t) / S(t) each, independently: a binomial tail, integrated over t.
    """
    if r == m:
        return float(_at_least(v, r, ndtr(np.array([mu / 2])))[0])
    least, most = beta.ppf(_TAIL, r + 1, m - r), beta.isf(_TAIL, r + 1, m - r)
    near, far = _passed_inverse(float(most), mu), _passed_inverse(float(least), mu)
    nodes, weights = _legendre()
    t = (near + far) / 2 + (far - near) / 2 * nodes
    passed = ndtr(mu / 2 - t) + ndtr(-mu / 2 - t)
    density = (np.exp(-((t - mu / 2) ** 2) / 2) + np.exp(-((t + mu / 2) ** 2) / 2)) / math.sqrt(2 * math.pi)
    mass = (far - near) / 2 * weights * density * _beta_density(passed, r + 1, m - r)
    return min(1.0, float(mass @ _at_least(v, r, ndtr(mu / 2 - t) / passed)) + 2 * _TAIL)


def _at_least(v: int, r: int, q: NDArray[np.float64]) -> NDArray[np.float64]:
    """P[B >= v] of a binomial of r and q."""
    tail: NDArray[np.float64] = betainc(v, r - v + 1, q) if v else np.ones_like(q)
    return tail


def _passed_inverse(share: float, mu: float) -> float:
    """The t that is passed with this probability."""
    low, high = 0.0, mu / 2 + 40.0
    while high - low > _CLOSE:
        middle = (low + high) / 2
        if ndtr(mu / 2 - middle) + ndtr(-mu / 2 - middle) >= share:
            low = middle
        else:
            high = middle
    return low


def _beta_density(x: NDArray[np.float64], a: int, b: int) -> NDArray[np.float64]:
    constant = float(gammaln(a + b) - gammaln(a) - gammaln(b))
    density: NDArray[np.float64] = np.exp(constant + (a - 1) * np.log(x) + (b - 1) * np.log1p(-x))
    return density


@cache
def _legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


# --- epsilon, delta and mu --------------------------------------------------------------------------------------------


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at delta of the Gaussian mechanism of sensitivity / noise = mu (Balle and Wang 2018, Theorem 8)."""
    if mu <= 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    return last_refuted(lambda epsilon: gaussian_delta(epsilon, mu) > delta, mu * mu / 2 + mu * float(-ndtri(delta)))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def group_delta(epsilon: float, delta: float, copies: int) -> float:
    """Delta of a group of so many records, each (epsilon, delta)-DP: delta (e^(k epsilon) - 1) / (e^epsilon - 1)."""
    if copies == 1:
        return delta
    return delta * sum(math.exp(min(j * epsilon, 700.0)) for j in range(copies))


# --- solving ----------------------------------------------------------------------------------------------------------


def last_refuted(refuted: Callable[[float], bool], high: float) -> float:
    """Where what is refuted from 0 on ends, at `high` at the latest: by bisection, from below. 0: nothing is."""
    low = 0.0
    if not refuted(low):
        return 0.0
    while high - low > _CLOSE * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _last_mu(refuted: Callable[[float], bool]) -> float:
    high = 1.0
    while high < _MOST_MU and refuted(high):
        high *= 2
    return last_refuted(refuted, high)


def _logit_bound(r: int, v: int, level: float) -> float:
    """Logit of the Clopper-Pearson lower bound of v right in r; v = r: of level^(1/r)."""
    if v == 0:
        return 0.0
    if v == r:
        return math.log(level) / r - math.log(-math.expm1(math.log(level) / r))
    return float(np.log(beta.ppf(level, v, r - v + 1)) - np.log(beta.isf(level, r - v + 1, v)))


def _check(m: int, r: int, v: int, delta: float, level: float, copies: int) -> None:
    if not 0 <= v <= r <= m:
        raise AuditError(f"expected 0 <= right <= guesses <= canaries, got {v}, {r} and {m}")
    if not 0 <= delta < 1:
        raise AuditError(f"expected delta in [0, 1), got {delta:g}")
    if not 0 < level < 1:
        raise AuditError(f"expected a level in (0, 1), got {level:g}")
    if copies < 1:
        raise AuditError(f"expected every canary to be inserted at least once, got {copies} copies")


def _check_gaussian(m: int, r: int, v: int, delta: float, level: float, copies: int) -> None:
    _check(m, r, v, delta, level, copies)
    if delta == 0:
        raise AuditError("expected delta > 0: at delta 0 no Gaussian mechanism has a finite epsilon")
