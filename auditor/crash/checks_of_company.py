"""Checks that a record's gradient is its own: that it does not follow the lengths of the texts it
is read with.

A loss that is a mean over all tokens of a batch weighs a record by its tokens over the batch's.
Clipping hides that where gradients are longer than the clipping norm; where they are shorter, one
long text makes all others' gradients shorter, so that a record moves the sum by more than its own
clipped gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from auditor.crash.training_specimen import Record, make_company_specimen
from auditor.crash.verdicts import (
    SHARE,
    UNKNOWN,
    Array,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    loop_check_from_p_value,
    standard_errors_a_loop_check_detects,
)
from auditor.crash.watch import ObservedStep

OWN_GRADIENT = "own gradient"
_MOST_CONDITION = 1e10  # of normal equations that determine their coefficients


def check_gradient_depends_on_company(runs: WatchedTrainings) -> LoopCheck:
    """A record's clipped gradient is the same whatever the texts that are read with it are."""
    would = "a loss that is a mean over the tokens of a batch"
    if not runs.company:
        return LoopCheck(
            OWN_GRADIENT,
            UNKNOWN,
            "no clipping norm is claimed that gradients could be shorter than",
            would,
        )
    records = make_company_specimen(runs.claim.max_grad_norm).make_crash_test_records(
        runs.company[0].n
    )
    steps = [step for trace in runs.company for step in trace.steps if step.scale and step.records]
    fits = {
        company: fit
        for company, by_pass in (("the texts of its pass", True), ("the texts of its step", False))
        if (fit := _fit_weight_of_company(steps, records, runs.claim.max_grad_norm, by_pass))
    }
    if not fits:
        return LoopCheck(
            OWN_GRADIENT, UNKNOWN, "no record was read in company of other lengths", would
        )
    company = max(fits, key=lambda name: fits[name][0] / fits[name][1])
    slope, error = fits[company]
    unit = runs.claim.noise_multiplier
    needed = standard_errors_a_loop_check_detects(len(fits)) * error * unit
    would += f" (1), or {needed:.2f} of that"
    if needed > 1 and slope / error < float(stats.norm.isf(SHARE / len(fits))):
        said = (
            "gradients are too short next to the noise to show whether they follow other texts' "
            "lengths"
        )
        return LoopCheck(OWN_GRADIENT, UNKNOWN, said, would)
    return loop_check_from_p_value(
        OWN_GRADIENT,
        min(1.0, len(fits) * float(stats.norm.sf(slope / error))),
        f"a record's gradient is weighed by its tokens over those of {company}: one record moves "
        "the others' gradients",
        "a record's gradient does not follow the lengths of the texts it is read with",
        would,
        lambda: WorstViolation(
            f"{slope * unit:.2f} ± {1.96 * error * unit:.2f} of what a mean over tokens does", "0"
        ),
    )


def _fit_weight_of_company(
    steps: Sequence[ObservedStep], records: Sequence[Record], clipping_norm: float, by_pass: bool
) -> tuple[float, float] | None:
    """Fit reaches on what a token mean would add to them -> (coefficient, standard error), in units
    of the noise.

    The other columns are each length's constant and its own clipped norm: what a record's own
    gradient and length decide is no fault. None: no record's company differs.
    """
    n_tokens = np.array([len(record["input_ids"]) - 1 for record in records], dtype=float)
    kinds = sorted(set(n_tokens))
    normal, products = np.zeros(()), np.zeros(())
    for step in steps:
        drawn = sorted(set(step.records))
        weights = _weigh_by_tokens(step.passes if by_pass else [step.records], drawn, n_tokens)
        if weights is None:
            continue
        own = np.minimum(step.norms, clipping_norm) / clipping_norm
        added = np.minimum(weights * step.norms, clipping_norm) / clipping_norm - own
        of_kind = np.stack([n_tokens[drawn] == kind for kind in kinds], axis=1).astype(float)
        columns = np.column_stack([added, of_kind, of_kind * own[:, None]])
        normal = normal + columns.T @ step.gram @ columns
        products = products + columns.T @ step.gram @ step.reaches
    if not normal.ndim:
        return None
    used = np.diag(normal) > 0
    if not used[0] or np.linalg.cond(normal[np.ix_(used, used)]) > _MOST_CONDITION:
        return None
    covariance = np.linalg.inv(normal[np.ix_(used, used)])
    return float((covariance @ products[used])[0]), math.sqrt(float(covariance[0, 0]))


def _weigh_by_tokens(
    parts: Sequence[Sequence[int]], drawn: Sequence[int], n_tokens: Array
) -> Array | None:
    """Return (drawn,) each record's tokens over the mean of those it is read with; None if one was
    read twice."""
    weights = dict[int, float]()
    for part in parts:
        for record in part:
            if record in weights:
                return None
            weights[record] = float(n_tokens[record] / n_tokens[list(part)].mean())
    return np.array([weights[record] for record in drawn]) if set(weights) == set(drawn) else None
