"""Measurements of extraction attacks: recall, recall at errors, curves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.intervals import excess, mean, share
from auditor.statistics.judging import _NEAR, Outcome


def errors_before(hit: NDArray[np.bool_], score: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Hits by falling score (equal scores: wrong ones first: ties never flatter), and wrong ones before each."""
    order = np.lexsort((hit, -score))
    ranked = hit[order]
    return ranked, np.cumsum(~ranked) - ~ranked


def recall_at_errors(name: str, outcome: Outcome, errors: int) -> Measurement:
    """Share of secrets solved by guesses that rank before the `errors`-th wrong one (Recall@100: errors=100)."""
    hit, _ = errors_before(outcome.hit, outcome.score)
    return recall_of_guesses(name, np.arange(len(hit)), hit, len(hit), errors)


def recall_of_guesses(
    name: str, secret: NDArray[np.int64], right: NDArray[np.bool_], n: int, errors: int
) -> Measurement:
    """Share of n secrets that a right guess with fewer than `errors` wrong ones before it solves.

    secret, right: (guesses,), surest first: whose guess it is, as an index below n, and whether it is the answer.
    A secret may have none or several; it is solved once, while each wrong guess is an error.
    Interval: bootstrap over secrets, each with all its guesses; where it has no width, or fewer errors exist,
    Clopper-Pearson of the same count.
    """
    solver = first_right(secret, right)  # (solved secrets,) the guess that solves each

    def solvers(weight: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those that still count when secret i stands weight[i] times in the list."""
        wrong = weight[secret] * ~right
        kept: NDArray[np.int64] = solver[(np.cumsum(wrong) - wrong)[solver] < errors]
        return kept

    solved = np.zeros(n, dtype=bool)
    solved[secret[solvers(np.ones(n, dtype=np.int64))]] = True
    if int((~right).sum()) < errors:
        whole = "recall" if len(np.unique(secret)) == len(secret) else "the recall of all guesses"
        return share(name, solved, f"fewer than {errors} errors: equals {whole}")
    recalls = bootstrap.resampled(n, lambda draws: [draw[secret[solvers(draw)]].sum() / n for draw in draws], name)
    low, high = bootstrap.interval(recalls)
    if low == high:
        return share(name, solved)
    return Measurement(name, float(solved.mean()), low, high, n)


def first_right(secret: NDArray[np.int64], right: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions, in the order of the guesses, of the first right guess of every secret that has one."""
    hits = np.flatnonzero(right)
    return hits[np.sort(np.unique(secret[hits], return_index=True)[1])]


def solved_before(hit: NDArray[np.bool_], draws: NDArray[Any], errors: int) -> NDArray[np.float64]:
    """Recall at `errors` errors of each resample. hit: (n,) by falling rank; draws: (resamples, n), how often each."""
    wrong = draws * ~hit
    solved: NDArray[np.float64] = (draws * hit * ((np.cumsum(wrong, axis=1) - wrong) < errors)).sum(1) / draws.sum(1)
    return solved


def error_curve(outcome: Outcome, points: int = 60) -> tuple[tuple[int, float], ...]:
    """(wrong guesses allowed, recall) along the ranking."""
    hit, before = errors_before(outcome.hit, outcome.score)
    wrong = int((~hit).sum())
    allowed = sorted({round(x) for x in np.linspace(0, wrong, points)})
    # With `e` wrong guesses allowed, a right one counts while at most e wrong ones stand before it.
    return tuple((e, float((hit & (before <= e)).sum() / len(hit))) for e in allowed)


def any_of(log_p: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """1 - (1 - p)^n: the probability that at least one of n samples is right; keeps its digits where p is tiny."""
    p = np.minimum(np.exp(log_p), 1.0)  # the logarithm of a sum may round to just above 0
    with np.errstate(divide="ignore"):  # p = 1
        result: NDArray[np.float64] = -np.expm1(n * np.log1p(-p))
    return result


def by_repeats(name: str, outcome: Outcome) -> dict[str, Measurement]:
    """The share of hits for each repeat count, where repeat counts are known."""
    counts = sorted({r for r in outcome.repeats if r is not None})
    repeats = np.array([-1 if r is None else r for r in outcome.repeats])
    return {str(r): share(name, outcome.hit[repeats == r]) for r in counts}


def extraction(outcome: Outcome) -> list[Measurement]:
    """A cell: Recall, verbatim and near, any-of-K, Recall@100 and at n/10 errors on members; the floors; excess."""
    members, others = outcome.only(outcome.member), outcome.only(~outcome.member)
    n = len(members.ids)
    measured = [
        share("recall", members.hit),
        share("near_verbatim_recall", members.near, _NEAR),
        share("any_of_k", members.any_hit),
        recall_at_errors("recall_at_100_errors", members, 100),
        recall_at_errors("recall_at_10pct_errors", members, max(1, n // 10)),
    ]
    if len(others.ids):
        measured += [
            share("recall_nonmembers", others.hit, "the floor"),
            share("near_verbatim_recall_nonmembers", others.near, f"the floor; {_NEAR}"),
            excess(members.hit, others.hit),
        ]
    return measured + candidates(members)


def candidates(members: Outcome) -> list[Measurement]:
    """Where the true suffix ranks, and how right and wrong first guesses differ (Ethicist, Table 4, Figures 6 and 7).

    Means with bootstrap intervals over the guesses they are taken of; left out where nothing is known of them.
    """
    if not members.traits:
        return []
    hit, traits = members.hit, members.traits
    rows = [
        ("count", traits["count"], "samples"),
        ("score", members.score, "score"),
        ("min_probability", np.exp(traits["min_log_prob"]), "probability"),
    ]
    measured = [share("recall_top_3", traits["rank"] <= 3)]
    for name, values, unit in rows:
        for side, chosen in (("right", values[hit]), ("wrong", values[~hit])):
            if len(chosen) and np.isfinite(chosen).all():
                measured.append(mean(f"{name}_{side}", chosen, unit))
    passed = traits["passed_over"]
    if np.isfinite(passed).all():
        note = "right first guesses that are not the likeliest candidate"
        measured.append(share("right_against_likelihood", hit & (passed == 1), note))
    return measured
