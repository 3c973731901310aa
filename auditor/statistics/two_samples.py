"""Bound epsilon by independent trials, each with or without the record.

A trial is a separate training or a separate game. tp, fn: the numbers of trials with the record
that were classified as with it and as without it. fp, tn: likewise for trials without the record.
The classifier must be fixed beforehand. Canaries that share one run are not independent trials; for
these, see `one_run`. Epsilons are in nats. copies: as in `one_run`.
"""

from __future__ import annotations

import math

from auditor.core.errors import AuditError
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.one_run import (
    check_audit_parameters,
    compute_group_delta,
    find_largest_refuted_value,
)


def epsilon_clopper_pearson(
    tp: int, fn: int, fp: int, tn: int, delta: float, level: float = 0.05, copies: int = 1
) -> float:
    """Return a lower bound on epsilon, which exceeds the truth with probability at most `level`.

    The bound is the larger of log((TPR_lo - delta) / FPR_hi) and log((TNR_lo - delta) / FNR_hi).
    The limits on TPR and on FPR are one-sided Clopper-Pearson limits at level / 2. The other limits
    follow from them: TNR_lo = 1 - FPR_hi and FNR_hi = 1 - TPR_lo. So both ratios hold at `level`
    together (formulas.md B5). Return 0 if nothing is refuted. Raise AuditError if all trials are
    with the record, or all without.
    """
    tpr, fpr = _compute_rate_intervals(tp, fn, fp, tn, delta, level)

    def refuted(epsilon: float) -> bool:
        """Return whether a ratio is too large for (epsilon, delta)-DP.

        A canary is inserted `copies` times, so the claim is tested for a group of `copies` records.
        """
        most = math.exp(copies * epsilon)
        slack = compute_group_delta(epsilon, delta, copies)
        # The second condition uses complements: TNR_lo = 1 - FPR_hi and FNR_hi = 1 - TPR_lo.
        return tpr[0] > most * fpr[1] + slack or 1 - fpr[1] > most * (1 - tpr[0]) + slack

    # Above 0, because Clopper-Pearson's bounds are inside (0, 1), or prove nothing.
    smallest = min(fpr[1], 1 - tpr[0])
    return find_largest_refuted_value(refuted, -math.log(smallest) / copies)


def _compute_rate_intervals(
    tp: int, fn: int, fp: int, tn: int, delta: float, level: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the intervals for TPR and FPR, each end at half the significance level.

    Raise AuditError for impossible counts, delta or level.
    """
    if min(tp, fn, fp, tn) < 0 or not (tp + fn and fp + tn):
        raise AuditError(
            f"expected trials with the record and without it, got {tp + fn} and {fp + tn}",
        )
    check_audit_parameters(delta, level)
    return clopper_pearson(tp, tp + fn, 1 - level), clopper_pearson(fp, fp + tn, 1 - level)
