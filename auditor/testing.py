"""What a report prints, as functions of plain numbers: so that anybody can simulate how often an interval holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.statistics import roc


def tpr_interval(members: ArrayLike, nonmembers: ArrayLike, rate: float = 0.01, seed: int = 0) -> Measurement:
    """The share of the members found at this rate of false positives, with its 95% interval, as the report has it.

    members, nonmembers: scores (members,) and (non-members,), higher is surer. value: at the threshold that these
    non-members set, which `rate` of others exceed in expectation; low, high: of the share above the threshold that
    `rate` of all non-members exceed (statistics/roc.py). Nothing is drawn, so every seed gives the same. Raises
    AuditError for scores that are NaN or of another shape, and for fewer non-members than set a threshold.
    """
    own, others = (np.asarray(scores, dtype=np.float64) for scores in (members, nonmembers))
    if own.ndim != 1 or others.ndim != 1 or not len(own):
        raise AuditError(f"expected one score a record, got arrays of {own.shape} and {others.shape}")
    if np.isnan(own).any() or np.isnan(others).any():
        raise AuditError("expected a score of every record, got NaN")
    if not 0 < rate < 1:
        raise AuditError(f"expected a rate in (0, 1), got {rate:g}")
    found = roc.rate_measured(f"tpr_at_{100 * rate:g}pct_fpr", own, others, rate)
    if found is None:
        raise AuditError(
            f"expected at least {roc.needed(rate):,} non-members for a rate of {rate:.3g}, got {len(others):,}"
        )
    return found
