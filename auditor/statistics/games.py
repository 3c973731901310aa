"""Bound epsilon from below, using the scores of independent games.

A fair coin decides whether a game is played with the model or with its neighbour. Independent games
satisfy the assumptions of Clopper and Pearson, so enough games can prove any epsilon, unlike the
canaries of one run. The first quarter of the games is used only to choose a threshold, so that the
threshold is fixed before the games that count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError
from auditor.core.result import Audited
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.one_run import check_audit_parameters, find_largest_refuted_value

# tp, fn, fp, tn: games with the model that were guessed right and wrong; games without it that were
# guessed wrong and right
Table = tuple[int, int, int, int]

FEWEST = 64  # fewest games from which a threshold can be chosen
_TAUGHT = 4  # one game in this many chooses the threshold
_THRESHOLDS = 256  # most thresholds to try


def count_confusion(scores: Floats, included: Bools, delta: float, level: float) -> Table:
    """Return the confusion counts (tp, fn, fp, tn) of the games that are judged.

    The first games only choose the threshold; the later ones are judged with it.

    Args:
        scores: (games,) higher scores mean more confidence that the model was used.
        included: (games,) True if the model was used.
        delta: delta of the epsilon that the threshold should prove.
        level: significance level of this proof.

    Raises:
        AuditError: for too few games or NaN scores.
    """
    if scores.shape != included.shape or scores.ndim != 1 or len(scores) < FEWEST:
        raise AuditError(
            f"expected at least {FEWEST} games with a score and a coin each, got {scores.shape}"
        )
    if np.isnan(scores).any():
        raise AuditError(
            f"expected a score of every game, got NaN for {int(np.isnan(scores).sum())} of "
            f"{len(scores)}"
        )
    taught = len(scores) // _TAUGHT
    cut = _choose_best_threshold(scores[:taught], included[:taught], delta, level)
    return make_confusion_matrix(scores[taught:] >= cut, included[taught:])


def make_confusion_matrix(guessed: Bools, included: Bools) -> Table:
    tp = int((guessed & included).sum())
    fp = int((guessed & ~included).sum())
    return tp, int(included.sum()) - tp, fp, int((~included).sum()) - fp


def audit_games(games: Table, delta: float, level: float) -> Audited:
    """Return an audit: the epsilon proved, and the epsilon that only right guesses would prove.

    games: the confusion counts (tp, fn, fp, tn).
    """
    tp, fn, fp, tn = games
    played = tp + fn + fp + tn
    proved = epsilon_clopper_pearson(tp, fn, fp, tn, delta, level)
    best = epsilon_clopper_pearson(tp + fn, 0, 0, fp + tn, delta, level)
    return Audited("games", proved, delta, level, played, played, tp + tn, best, table=games)


def _choose_best_threshold(scores: Floats, included: Bools, delta: float, level: float) -> float:
    """Return the threshold that would prove the largest epsilon.

    scores, included: of the games that only choose the threshold. Their confusion counts are scaled
    up to the number of games that are judged later.
    """
    if included.all() or not included.any():
        # One side is not enough to choose a threshold: no game is then guessed to be with the
        # model.
        return math.inf
    tried = np.unique(
        [
            *_select_candidate_thresholds(scores[included]),
            *_select_candidate_thresholds(scores[~included]),
        ]
    )

    def proved(cut: float) -> float:
        tp, fn, fp, tn = (n * (_TAUGHT - 1) for n in make_confusion_matrix(scores >= cut, included))
        return epsilon_clopper_pearson(tp, fn, fp, tn, delta, level)

    return float(max(tried, key=proved))


def _select_candidate_thresholds(scores: Floats) -> Sequence[float]:
    """Select at most `_THRESHOLDS` / 2 of the scores.

    The selection is densest at the lowest and highest scores, which can prove the largest epsilon.
    """
    ordered = np.sort(scores)
    steps = np.unique(np.geomspace(1, len(ordered), _THRESHOLDS // 4).astype(int)) - 1
    return [*ordered[steps], *ordered[::-1][steps]]


def epsilon_clopper_pearson(
    tp: int, fn: int, fp: int, tn: int, delta: float, level: float = 0.05
) -> float:
    """Return a lower bound on epsilon (nats), exceeding the truth with probability at most `level`.

    The bound is the larger of log((TPR_lo - delta) / FPR_hi) and log((TNR_lo - delta) / FNR_hi).
    The limits on TPR and on FPR are one-sided Clopper-Pearson limits at level / 2. The other limits
    follow from them: TNR_lo = 1 - FPR_hi and FNR_hi = 1 - TPR_lo. So both ratios hold at `level`
    together (formulas.md B5). Return 0 if nothing is refuted. Raise AuditError if all games are
    with the model, or all without.

    tp, fn, fp, tn: see `Table`. The classifier must be fixed beforehand, and the games independent.
    For canaries that share one run, see `one_run`.
    """
    if min(tp, fn, fp, tn) < 0 or not (tp + fn and fp + tn):
        raise AuditError(
            f"expected trials with the record and without it, got {tp + fn} and {fp + tn}"
        )
    check_audit_parameters(delta, level)
    low_tpr, _ = clopper_pearson(tp, tp + fn, 1 - level)
    _, high_fpr = clopper_pearson(fp, fp + tn, 1 - level)

    def refuted(epsilon: float) -> bool:
        """Return whether a ratio is too large for (epsilon, delta)-DP."""
        most = math.exp(epsilon)
        return low_tpr > most * high_fpr + delta or 1 - high_fpr > most * (1 - low_tpr) + delta

    # Above 0, because Clopper-Pearson's bounds are inside (0, 1), or prove nothing.
    return find_largest_refuted_value(refuted, -math.log(min(high_fpr, 1 - low_tpr)))
