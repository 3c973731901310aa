"""Bound epsilon from below by one training run with m canaries, each included by a fair coin.

Of the r surest guesses about the coins, v(r) are right. The bounds use each r in
`list_guess_counts(m)`: all guesses, half, a quarter and so on, which depend only on m. Each bound
exceeds the true epsilon with probability at most `level`. This requires that the coins are fair and
independent and the mechanism is of the kind that the bound tests. Any guesses and any scores are
allowed. Epsilons are in nats, at delta; neighbours differ in whether one canary is present. For
scores, see `audited`.

- `epsilon_one_run` refutes (epsilon, delta)-DP. Source: the proof below; for a single r, Steinke,
  Nasr and Jagielski 2023.
- `epsilon_fdp` refutes that every canary has mu-GDP given the others, expressed as (epsilon,
  delta). Source: Mahloujifar et al. 2024.
- `audit_by_shape.bound_shape_epsilon` refutes that canaries have one shape and are independent
  except for a common coin. Source: `audit_by_shape`.

Proof of `compute_one_run_p_value`. Take the coins one by one, with an order and guesses that the
release determines. Given the release and the earlier coins, a guess is right with probability at
most p + (1 - p) d. Here p = e^epsilon / (1 + e^epsilon), and d = max(0, P[right] - e^epsilon
P[wrong]). Averaged over releases and coins, a canary's d is at most delta: half for each of the two
guesses. Draw each guess by one uniform number. The right guesses are then those of a sequence B of
independent coins with probability p, plus on average at most (1 - p) m delta more. Take a statistic
that increases with the right guesses. It reaches any value at most as often as it would for B with
that many more right guesses, placed where they help most.

copies: the number of insertions of each included canary. Bounds are on one record's epsilon, but
the guesses are about a group of k copies, which has (k epsilon, delta (e^(k epsilon) - 1) /
(e^epsilon - 1))-DP, or k mu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice, pairwise, repeat, takewhile

import numpy as np
import scipy

from auditor.core.arrays import Floats, Ints
from auditor.core.errors import AuditError
from auditor.statistics.distributions import (
    compute_binomial_sf,
    compute_log_choose,
    find_binomial_upper_quantile,
)

_CLOSE = 1e-12  # width of a bisection's last interval; the result is its refuted end
_FAR = 12.0  # standard deviations beyond which a binomial has no mass
_ROUNDED = 1e-9
# Logs of probabilities.
_UNLIKELIEST = -700.0
_FINE = 1e-3
_LARGE = 2**20  # products; above this, convolution by Fourier transform is faster
_MOST_MU = 256.0
_FEWEST = 16  # fewest guesses of a part: fewer prove hardly anything
_FDP_HALVINGS = (0, 1, 3, 5)
_AT_ONCE = 64  # epsilons of a grid whose tails are computed together

# Correction steps have size 1 up to this number, and then about a 16th of it.
_COARSE = 16

Counts = tuple[int, ...]  # one count for each of `list_guess_counts(m)`


@cache
def list_guess_counts(m: int) -> tuple[int, ...]:
    """Return the numbers of guesses to test with m canaries, in decreasing order.

    The numbers are m, m/2, m/4 and so on, down to 16.
    """
    return tuple(m >> i for i in range(m.bit_length()) if not i or m >> i >= _FEWEST)


@lru_cache(maxsize=2**16)
def epsilon_one_run(
    m: int, right: Counts, delta: float, level: float = 0.05, copies: int = 1
) -> float:
    """Return the largest epsilon for which the guesses refute (epsilon, delta)-DP; 0 for none.

    right: the number of right guesses among the r surest, for each r in `list_guess_counts(m)`.

    The search tests the epsilons of `yield_epsilon_grid` in ascending order, and stops at the first
    that is not refuted. Bisection would be wrong, because a larger epsilon may have a smaller
    p-value. The bound can exceed the true epsilon only if the search passes the first grid point
    that is at least the true epsilon. This happens with probability at most `level`."""
    # The best single r at delta 0 and the full level. `compute_one_run_p_value`, which uses all r,
    # never proves more.
    logits = map(bound_share_logit, list_guess_counts(m), right, repeat(level))
    most = max(logits, default=0.0) / copies
    grid = takewhile(lambda epsilon: epsilon <= most, yield_epsilon_grid())
    proved = 0.0
    while epsilons := tuple(islice(grid, _AT_ONCE)):
        least = _compute_least_tails(m, right, [copies * epsilon for epsilon in epsilons])
        for epsilon, tail in zip(epsilons, least, strict=True):
            group_delta = compute_group_delta(epsilon, delta, copies)
            if _bound_p_value(m, tail, copies * epsilon, group_delta, level) >= level:
                return proved
            proved = epsilon
    return proved


def is_epsilon_refuted(
    m: int, right: Counts, epsilon: float, delta: float, level: float, copies: int
) -> bool:
    """Return whether the guesses refute that one record, inserted `copies` times, has this epsilon.

    Other parameters: see `compute_one_run_p_value`.
    """
    group_delta = compute_group_delta(epsilon, delta, copies)
    return compute_one_run_p_value(m, right, copies * epsilon, group_delta, level) < level


def yield_epsilon_grid() -> Iterator[float]:
    """Yield epsilons (nats): 0 to 2 in steps of 0.01, then onwards in steps of half a percent."""
    yield from (k / 100 for k in range(200))
    epsilon = 2.0
    while True:
        yield epsilon
        epsilon *= 1.005


def compute_one_run_p_value(
    m: int, right: Counts, epsilon: float, delta: float, enough: float = 1.0
) -> float:
    """Return an upper bound on P[guesses at least as good as these] under (epsilon, delta)-DP.

    The statistic is min_r P[Binomial(r, p) >= v(r)], where p = e^epsilon / (1 + e^epsilon) is the
    probability of a right guess. Its distribution is computed as if each guess were right
    independently with probability p; delta adds to it.

    Args:
        m: number of canaries.
        right: v(r), the number of right guesses among the r surest, for each r in
            `list_guess_counts(m)`.
        epsilon: in nats.
        delta: delta of the claim.
        enough: significance level of the test. If a looser bound already decides the test, that
            bound is returned.
    """
    (least,) = _compute_least_tails(m, right, [epsilon])
    return _bound_p_value(m, least, epsilon, delta, enough)


def _compute_least_tails(m: int, right: Counts, epsilons: Sequence[float]) -> list[float]:
    """Return min_r P[Binomial(r, p) >= v(r)] for each epsilon; see `compute_one_run_p_value`."""
    chances = np.array([1 / (1 + math.exp(-epsilon)) for epsilon in epsilons])
    tails = compute_binomial_sf(np.array(right) - 1, list_guess_counts(m), chances[:, np.newaxis])
    least: list[float] = tails.min(axis=1, initial=1.0).tolist()
    return least


def find_refuting_right_counts(
    m: int, epsilon: float, delta: float, level: float, copies: int
) -> Counts:
    """Return how many of the r surest guesses must be right to refute (epsilon, delta)-DP.

    There is one number for each r in `list_guess_counts(m)`; r + 1 if even r right guesses are too
    few. A canary is inserted `copies` times, so the guesses test the claim for a group of `copies`
    records.
    """
    counts = list_guess_counts(m)
    delta = compute_group_delta(epsilon, delta, copies)
    epsilon = copies * epsilon
    p = 1 / (1 + math.exp(-epsilon))
    # Logs of a probability that passes, and of one that does not.
    low = _UNLIKELIEST
    high = math.log(level)
    while high - low > _FINE:
        middle = (low + high) / 2
        refuted = _bound_p_value(m, math.exp(middle), epsilon, delta, level) < level
        low, high = (middle, high) if refuted else (low, middle)
    return tuple(_find_fewest_unlikely_right(counts, p, math.exp(low)).tolist())


def _bound_p_value(m: int, least: float, epsilon: float, delta: float, enough: float) -> float:
    """Return an upper bound on P[for some r, surprisingly many of the r surest guesses are right].

    A number v is surprising if P[at least v of r guesses are right] is at most `least`. Other
    parameters: see `compute_one_run_p_value`.
    """
    # log p and log(1 - p), which keep their digits if p is near 1.
    counts = list_guess_counts(m)
    log_chances = (-np.logaddexp(0, -epsilon), -np.logaddexp(0, epsilon))
    # (1 - p) m delta: see the docstring of this file.
    spare = m * delta * math.exp(log_chances[1])
    more = 0
    # A union bound over the counts, plus Markov's bound for the part of delta.
    if least >= enough or len(counts) * least + spare < enough < 1:
        if least >= enough:
            return least
        return len(counts) * least + spare
    needed = _find_fewest_unlikely_right(counts, math.exp(log_chances[0]), least)
    # Distributions of the right guesses that each count adds to the next smaller count.
    steps = []
    for before, r in pairwise((0, *reversed(counts))):
        steps.append(_compute_truncated_binomial_pmf(r - before, log_chances))
    chance = _compute_enough_right_probability(needed, steps)
    # Delta's share goes to the cheapest outcomes first: those that lack one right guess, then those
    # that lack two, and so on.
    while spare > 0 and chance < enough:
        if chance + spare / (more + 1) < enough < 1:  # each remaining outcome would need more
            return chance + spare / (more + 1)
        next_more = more + 1 + more // _COARSE
        # No help can make r + 1 of r right.
        helped = np.where(needed > counts, needed, np.maximum(needed - next_more, 0))
        reached = _compute_enough_right_probability(helped, steps)
        # Outcomes that lack at least this many right guesses and receive them.
        used = min(spare, (more + 1) * max(0.0, reached - chance))
        chance = chance + used / (more + 1)
        spare = spare - used
        more = next_more
        if reached >= 1 - _ROUNDED:
            break
    return min(1.0, chance)


def _find_fewest_unlikely_right(counts: Counts, p: float, chance: float) -> Ints:
    """Return the smallest v with P[v or more of r guesses are right] <= `chance`, for each count r.

    The result is r + 1 if every v is too likely. p: the probability of a right guess.
    """
    return find_binomial_upper_quantile(chance * (1 + _ROUNDED), counts, p) + 1


Step = tuple[int, Floats]


def _compute_enough_right_probability(needed: Ints, steps: Sequence[Step]) -> float:
    """Return P[for some r, at least `needed` of the r surest guesses are right].

    Guesses are independent. needed: one number per r; steps: the distribution of the right guesses
    that each r adds to those of the next smaller r.
    """
    mass = np.ones(1)
    first = 0
    reached = 0.0
    for fewest, (lowest, step) in zip(needed[::-1].tolist(), steps, strict=True):
        if len(mass) * len(step) < _LARGE:
            mass = np.convolve(mass, step)
        else:
            mass = scipy.signal.fftconvolve(mass, step)
        first = first + lowest
        # Outcomes with enough right guesses are counted and removed, so that no later count repeats
        # them.
        keep = max(0, min(len(mass), fewest - first))
        reached += float(mass[keep:].sum())
        mass = mass[:keep]
        if not keep:
            break
    return reached


def _compute_truncated_binomial_pmf(n: int, log_chances: tuple[float, float]) -> Step:
    """Return (first, pmf), where pmf[i] is the probability of `first` + i successes in n draws.

    Counts beyond `_FAR` standard deviations are omitted. log_chances: the log-probabilities of a
    success and of a failure.
    """
    right, wrong = log_chances  # log p and log(1 - p)
    mean = n * math.exp(right)
    spread = math.sqrt(n * math.exp(right + wrong))
    k = np.arange(
        max(0, int(mean - _FAR * spread) - 30), min(n, int(mean + _FAR * spread) + 30) + 1
    )
    return int(k[0]), np.exp(compute_log_choose(n, k) + k * right + (n - k) * wrong)


@lru_cache(maxsize=2**16)
def epsilon_fdp(m: int, right: Counts, delta: float, level: float = 0.05, copies: int = 1) -> float:
    """Return the epsilon at `delta` of the largest mu for which the guesses refute mu-GDP.

    Under mu-GDP, telling whether a canary was included is at least as hard as telling a Gaussian
    draw from N(0, 1) from a draw from N(mu, 1). There are four tests: with all guesses, a half, an
    eighth and a 32nd of them. They share the significance level equally."""
    counts = list_guess_counts(m)
    tried = [i for i in _FDP_HALVINGS if i < len(counts)]
    mu = max(find_largest_refuted_mu(m, counts[i], right[i], level / len(tried)) for i in tried)
    return compute_gaussian_epsilon(mu / copies, delta)


@lru_cache(maxsize=2**16)
def find_largest_refuted_mu(m: int, r: int, v: int, level: float = 0.05) -> float:
    """Return the largest mu for which v right guesses of r refute mu-GDP; 0 if no mu is refuted.

    The r guesses are the surest of the m guesses on all canaries.
    """

    def falsified(mu: float) -> bool:
        """Return whether v right guesses of r refute mu-GDP (formulas.md A10).

        They do if no mechanism with this trade-off has P[v right of r] >= level.
        """
        # Both only grow.
        right = level * v / m
        wrong = level * (r - v) / m
        for i in range(v - 1, -1, -1):
            raised = max(wrong, float(scipy.special.ndtr(scipy.special.ndtri(right) - mu)))
            if raised == wrong:
                break
            right = min(1.0, right + i / (r - i) * (raised - wrong))
            wrong = raised
            if right + wrong > r / m:
                return True
        return right + wrong > r / m

    high = 1.0
    while high < _MOST_MU and falsified(high):
        high *= 2
    return find_largest_refuted_value(falsified, high)


# --- epsilon, delta and mu ---


def compute_gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon at `delta` of the Gaussian mechanism with mu = sensitivity / noise.

    See Balle and Wang 2018, Theorem 8.
    """
    if mu <= 0 or compute_gaussian_delta(0.0, mu) <= delta:
        return 0.0
    # At this upper end, the first term of `compute_gaussian_delta` equals delta, and the second
    # term only subtracts.
    return find_largest_refuted_value(
        lambda epsilon: compute_gaussian_delta(epsilon, mu) > delta,
        mu * mu / 2 + mu * float(-scipy.special.ndtri(delta)),
    )


def compute_gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the Gaussian mechanism's delta at `epsilon` (Balle and Wang 2018, Theorem 8).

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).
    """
    # In logs, because e^epsilon overflows if Phi vanishes.
    log_false_positive = scipy.special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(scipy.special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_false_positive))


def compute_group_delta(epsilon: float, delta: float, copies: int) -> float:
    """Return the delta of a group of k = `copies` records if each record has (epsilon, delta)-DP.

    The result is delta (e^(k epsilon) - 1) / (e^epsilon - 1).
    """
    if copies == 1:
        return delta
    # The largest float is about e^709; a delta so large refutes nothing.
    return delta * sum(math.exp(min(j * epsilon, 700.0)) for j in range(copies))


# --- solving ---


def find_largest_refuted_value(
    refuted: Callable[[float], bool], high: float, close: float = _CLOSE, low: float = 0.0
) -> float:
    """Return the largest refuted value in [low, high], rounded down; `low` if none is refuted.

    refuted: returns whether a value is refuted; then every smaller value must be refuted too.
    close: the accuracy at which bisection stops (relative for values above 1).
    """
    if not refuted(low):
        return low
    while high - low > close * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def bound_share_logit(r: int, v: int, level: float) -> float:
    """Return the logit of the Clopper-Pearson lower bound on the share of right guesses, v of r.

    For v = r the bound is level^(1/r).
    """
    if v == 0:
        return 0.0
    if v == r:
        return math.log(level) / r - math.log(-math.expm1(math.log(level) / r))
    # The mirrored beta distribution gives 1 minus the bound, with all digits if the bound is near
    # 1.
    bound = scipy.special.betaincinv(v, r - v + 1, level)
    complement = scipy.special.betainccinv(r - v + 1, v, level)
    return float(np.log(bound) - np.log(complement))


def check_audit_parameters(delta: float, level: float, copies: int = 1) -> None:
    """Raise AuditError for delta outside [0, 1), level outside (0, 1), or no copy of a canary."""
    if not 0 <= delta < 1:
        raise AuditError(f"expected delta in [0, 1), got {delta:g}")
    if not 0 < level < 1:
        raise AuditError(f"expected level in (0, 1), got {level:g}")
    if copies < 1:
        raise AuditError(f"expected every canary to be inserted at least once, got {copies} copies")


def check_right_counts(m: int, right: Counts) -> None:
    """Raise AuditError for impossible numbers of right guesses."""
    counts = list_guess_counts(m)
    if len(right) != len(counts) or not all(
        0 <= v <= r for r, v in zip(counts, right, strict=False)
    ):
        raise AuditError(
            f"expected the right ones of {', '.join(map(str, counts))} guesses, got {right}"
        )
    if any(not 0 <= v - w <= r - s for (r, v), (s, w) in pairwise(zip(counts, right, strict=True))):
        raise AuditError(
            f"expected the surest of the guesses among the others: {right} are right of {counts}"
        )
