"""From the scores of one run's canaries to lower bounds of epsilon. Knows no model: scores and coins in, bounds out.

A higher score: surer that the canary was in. Guessed are the r/2 highest "in" and the r/2 lowest "out"; equal scores
at a cut count against the guesser, so that no order in which canaries are listed can say anything of their coins.

How many to guess is tried over `guess_counts(m)`: m, m/2, m/8 and m/32, which depend on m alone, and is paid for by a
union bound: each number of guesses gets the same share of the level, and the best bound counts. (Choosing r on one half
of the canaries and bounding on the other costs half of m, which is more. jax_privacy's Bonferroni correction is over
the points of the ROC's hull, a set that the coins chose. A finer grid costs more than it finds: with delta > 0 no bound
passes log(level / (2 delta)), and every further number of guesses divides that level.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from auditor.core.errors import AuditError
from auditor.core.result import Audited, Measurement
from auditor.statistics import games
from auditor.statistics.one_run import epsilon_fdp, epsilon_gdp, epsilon_one_run, group_delta, p_value

LEVEL = 0.05
_PARTS = (1, 2, 8, 32)  # of the canaries are guessed
_FEWEST = 16  # guesses of a part: fewer prove hardly anything
_LEAST = 1e-9  # the epsilon that counts as above 0
_UNFAIR = 1e-9  # how often fair coins are refused
_MOST_CANARIES = 10**6

Bound = Callable[[int, int, int, float, float, int], float]  # m, r, v, delta, level, copies
MAIN = "one_run"
GAMES = "games"  # independent ones, by Clopper-Pearson (statistics/games.py)
ESTIMATORS: dict[str, Bound] = {MAIN: epsilon_one_run, "fdp": epsilon_fdp, "gdp": epsilon_gdp}
METRICS = {
    MAIN: "epsilon_lower_bound",
    GAMES: "epsilon_lower_bound",
    "fdp": "epsilon_lower_bound_fdp",
    "gdp": "epsilon_lower_bound_gdp",
}


def audited(
    scores: NDArray[np.floating],
    included: NDArray[np.bool_],
    delta: float,
    level: float = LEVEL,
    copies: int = 1,
) -> tuple[Audited, ...]:
    """One bound an estimator, the (epsilon, delta) one first; at delta 0 that one alone. Both arrays (canaries,).

    Each is at `level` for itself. Raises AuditError for scores that are NaN or all equal, coins that were not fair,
    and fewer canaries than any bound needs.
    """
    _check(scores, included, delta, level, copies)
    m, order = len(scores), _Guesses(scores, included)
    right = {r: order.right(r) for r in guess_counts(m)}
    share = level / len(right)
    found = []
    for name, bound in ESTIMATORS.items():
        if name != MAIN and delta == 0:
            continue
        bounds = {r: bound(m, r, v, delta, share, copies) for r, v in right.items()}
        r = max(bounds, key=lambda r: bounds[r])
        most = guess_counts(m)[0]
        best = bound(m, most, most, delta, share, copies)
        found.append(Audited(name, bounds[r], delta, level, m, r, right[r], best, copies))
    return tuple(found)


def audit_at_level(audit: Audited, level: float) -> Audited:
    """The same guesses, and the best that could have been, at another level: what several audits of one model share.

    No other number of guesses is looked for, which can only make the bound smaller. Raises AuditError for what
    `audited` cannot have made.
    """
    if audit.estimator == GAMES and audit.table is not None:
        again = games.audit_games(audit.table, audit.delta, level)
        return replace(audit, epsilon=again.epsilon, best=again.best, level=level)
    bound, counts = ESTIMATORS.get(audit.estimator), guess_counts(audit.canaries)
    if bound is None or audit.guesses not in counts:
        raise AuditError(
            f"expected a bound by {', '.join(ESTIMATORS)} from {' or '.join(map(str, counts))} guesses of "
            f"{audit.canaries} canaries, got {audit.estimator} from {audit.guesses}"
        )
    share, most = level / len(counts), counts[0]
    epsilon, best = (
        bound(audit.canaries, r, v, audit.delta, share, audit.copies)
        for r, v in ((audit.guesses, audit.right), (most, most))
    )
    return replace(audit, epsilon=epsilon, best=best, level=level)


def why_powerless(audit: Audited, limit: float) -> str:
    """Why this audit could not have shown an epsilon above the limit, whatever leaks; "" where it could have.

    A game over a part of the tokens that a claim covers is bounded by what that part gives away: unless that exceeds
    the limit by itself, no guess about it speaks to the claim of them all.
    """
    if audit.best <= limit:
        return "the audit had no power to refute it: every guess right would not have exceeded it"
    if audit.table is None:
        return ""
    if audit.tokens is None:
        return "it is not on record how many tokens its games were of: run it anew"
    if audit.covered is not None and audit.tokens >= audit.covered:
        return ""
    if audit.exact is not None and audit.exact > limit:
        return ""
    of = f"of the {audit.covered:,} tokens covered" if audit.covered is not None else "of any number of tokens covered"
    apart = "" if audit.exact is None else f", which give away no more than {audit.exact:.3g} exactly"
    return f"its games look at {audit.tokens:,} {of}{apart}"


def guess_counts(m: int) -> tuple[int, ...]:
    """The numbers of guesses that are tried with m canaries: even, and at least 16 but for the first, which is all."""
    counts = [m // part // 2 * 2 for part in _PARTS]
    return (counts[0], *(r for r in counts[1:] if r >= _FEWEST))


class _Guesses:
    """Which canaries are guessed, for any number of guesses, and how many of the guesses are right."""

    def __init__(self, scores: NDArray[np.floating], included: NDArray[np.bool_]) -> None:
        high = np.lexsort((included, -scores))  # equal scores: those that are out first
        low = np.lexsort((~included, scores))  # equal scores: those that are in first
        self._in = np.concatenate([[0], np.cumsum(included[high])])
        self._out = np.concatenate([[0], np.cumsum(~included[low])])

    def right(self, r: int) -> int:
        return int(self._in[r // 2] + self._out[r // 2])


# --- power ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2**14)
def best_provable(m: int, delta: float, level: float = LEVEL, copies: int = 1) -> float:
    """What m canaries would prove, every guess right, by the rule of `audited`: an audit of a larger claim is idle.

    Of numbers of guesses that are all right the largest proves the most.
    """
    counts = guess_counts(m)
    return epsilon_one_run(m, counts[0], counts[0], delta, level / len(counts), copies)


def canaries_needed(epsilon: float, delta: float, level: float = LEVEL, copies: int = 1) -> int:
    """The least m with best_provable(m) >= epsilon.

    More are not always enough: where the level is shared by one number of guesses more (m = 32, 128, 512), and with
    delta > 0 beyond some ten thousand, the best provable epsilon falls. Raises AuditError where no number of canaries
    up to a million can prove so much: with delta > 0 none can prove log(level / (2 delta)).
    """
    if not 0 < epsilon < math.inf:
        raise AuditError(f"expected an epsilon > 0 to prove, got {epsilon:g}")
    _check_numbers(2, delta, level, copies)

    def enough(half: int) -> bool:
        """Of twice so many canaries: an odd one more is one fewer."""
        m = 2 * half
        counts = guess_counts(m)
        p = p_value(m, m, m, copies * epsilon, group_delta(epsilon, delta, copies))
        return p < level / len(counts)

    steps = [_FEWEST * part // 2 for part in _PARTS[1:]]  # where one more number of guesses is tried
    half = 1
    while half <= _MOST_CANARIES // 2:
        following = min([half + 1 + half // 8, *(step for step in steps if step > half)])
        if enough(half):
            return 2 * half
        last = following - 1  # the same numbers of guesses: more canaries prove more, or all less
        if last > half and enough(last):
            while last - half > 1:
                middle = (half + last) // 2
                half, last = (half, middle) if enough(middle) else (middle, last)
            return 2 * last
        half = following
    most = max(best_provable(int(10 ** (k / 4)) // 2 * 2, delta, level, copies) for k in range(8, 25))
    raise AuditError(
        f"expected an epsilon that up to {_MOST_CANARIES:,} canaries can prove at delta {delta:g}, at most about "
        f"{most:.2g}, got {epsilon:g}; a smaller delta lets more be proved"
    )


def measurements_of(audits: Sequence[Audited]) -> list[Measurement]:
    """A row's numbers, the same for every probe that audits: each bound, the best provable one, and the right guesses.

    A bound's interval is one-sided, [bound, inf), and its n are the canaries. What a claim is held to are the audits
    themselves: a probe hands them over by `Probe.audits` too.
    """
    main = audits[0]
    bounds = [
        Measurement(METRICS[a.estimator], a.epsilon, a.epsilon, math.inf, a.canaries, "nats", _said(a)) for a in audits
    ]
    best = f"of {main.canaries:,} canaries, had every guess been right"
    kept = f"of {main.guesses:,} guesses; the other {main.canaries - main.guesses:,} canaries were not guessed"
    return [
        *bounds,
        Measurement("epsilon_best_provable", main.best, main.best, main.best, main.canaries, "nats", best),
        Measurement("guesses_right", main.right, main.right, main.right, main.guesses, "count", kept),
    ]


def _said(audit: Audited) -> str:
    times = "" if audit.copies == 1 else f"; each inserted {audit.copies} times, so held to groups of {audit.copies}"
    return f"one-sided, {1 - audit.level:.0%}; at delta {audit.delta:g}, {audit.relation}, by {audit.unit}{times}"


def _check(scores: NDArray[np.floating], included: NDArray[np.bool_], delta: float, level: float, copies: int) -> None:
    if scores.shape != included.shape or scores.ndim != 1:
        raise AuditError(f"expected one score a canary, got {scores.shape} scores and {included.shape} coins")
    m, inside = len(scores), int(included.sum())
    _check_numbers(m, delta, level, copies)
    if best_provable(m, delta, level, copies) <= 0:
        raise AuditError(
            f"expected at least {canaries_needed(_LEAST, delta, level, copies)} canaries, "
            f"below which no bound of epsilon exceeds 0, got {m}"
        )
    if np.isnan(scores).any():
        raise AuditError(f"expected a score of every canary, got NaN for {int(np.isnan(scores).sum())} of {m}")
    if (scores == scores[0]).all():
        raise AuditError(f"expected scores that distinguish canaries, got {float(scores[0]):g} for all {m}")
    if binomtest(inside, m).pvalue < _UNFAIR:
        raise AuditError(f"expected canaries that went in by fair coins, got {inside} of {m} in")


def _check_numbers(m: int, delta: float, level: float, copies: int) -> None:
    if not 0 <= delta < 1:
        raise AuditError(f"expected delta in [0, 1), got {delta:g}")
    if not 0 < level < 1:
        raise AuditError(f"expected a level in (0, 1), got {level:g}")
    if m < 0 or copies < 1:
        raise AuditError(f"expected canaries inserted at least once, got {m} canaries and {copies} copies")
