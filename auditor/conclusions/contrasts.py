"""Compute means over seeds and differences of runs that attacked the same secrets.

All runs and seeds of a contrast use the same resamples of the secrets (a paired bootstrap), so that
variation that they share cancels. The seeds are not resampled: they change the attack's draws but
not the target. An interval therefore says how the result may differ for other secrets, if the seeds
stay the same. Functions are pure and need neither torch nor files.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from auditor.conclusions.replicates import Replicates
from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.result import Measurement
from auditor.core.secret_table import STRINGS
from auditor.statistics import bootstrap, metrics
from auditor.statistics.bootstrap import Draws
from auditor.statistics.bounds import make_measurement
from auditor.statistics.compare import compare_paired_values, resample_paired_means
from auditor.statistics.intervals import (
    clopper_pearson,
    combine_independent_intervals,
    estimate_mean_share,
)
from auditor.statistics.ranking import mark_solved_secrets

_RESAMPLES = 2000
_MOST_UNDEFINED = 0.05  # share of resamples; if more have no value, there is no interval


@dataclass(frozen=True)
class WeightedMetric:
    """Term of a contrast: a coefficient times a metric.

    A contrast is a weighted sum of metrics, such as the recall of one attack minus the recall of
    another attack.

    Args:
        coefficient: factor of the metric.
        metric: name of the metric.
        cell: results that have the metric, of one target, setting, and attack or probe, with a
            result for each seed.
    """

    coefficient: float
    metric: str
    cell: Replicates


def measure_seed_contrast(name: str, parts: Sequence[WeightedMetric]) -> Measurement:
    """Return the weighted sum of several metrics with its 95% interval.

    The sum is averaged over the seeds that all terms have. Shares of the same secrets, and their
    differences, have exact intervals, or for a mean over seeds the intervals of a single run. If
    all terms are about the same secrets or the same held-out texts, other intervals come from a
    paired bootstrap, which resamples these secrets or texts. Otherwise, as for epsilons, the
    intervals of the terms are combined as if the terms were independent (MOVER).

    Args:
        name: name of the sum.
        parts: the terms.

    Raises:
        AuditError: if a term lacks its metric, or if the terms have no seed in common.
    """
    of_members = []
    for part in parts:
        of_members.append(metrics.find_metric(part.metric).is_of_member_guesses)
    values_by_seed = []
    for part, is_of_members in zip(parts, of_members, strict=True):
        values_by_seed.append(
            part.cell.member_outcomes_by_seed if is_of_members else part.cell.measured
        )
    seeds = sorted(set.intersection(*map(set, values_by_seed)))
    if not seeds:
        raise AuditError(f"no seed was run at every point that {name} compares")
    if all(of_members):
        sides = _average_paired_shares(parts, seeds)
        if sides is None:
            return _measure_attack_contrast(name, parts, seeds)
        plus, minus = sides
        if any(part.coefficient < 0 for part in parts):
            exact = make_measurement(name, compare_paired_values(plus, minus, "share"))
        else:
            exact = replace(estimate_mean_share(name, plus), unit="share")
        if all(metrics.find_metric(part.metric).errors is None for part in parts):
            return exact
        # Which wrong guess is the last one varies too, so the bootstrap may be wider.
        m = _measure_attack_contrast(name, parts, seeds)
        return replace(m, low=min(m.low, exact.low), high=max(m.high, exact.high))
    texts = set()
    for part in parts:
        for seed in seeds:
            texts.add(_heldout_token_counts(part, seed))
    if len(texts) == 1 and any(texts):
        return _measure_perplexity_contrast(name, parts, seeds)
    secret_sets = set()
    for part in parts:
        for seed in seeds:
            secret_sets.add(frozenset(_map_metric_values(part, seed)))
    if len(parts) > 1 and len(secret_sets) == 1 and any(secret_sets):
        return _measure_probe_contrast(name, parts, seeds)
    return _measure_unpaired_contrast(name, parts, seeds)


def _average_paired_shares(
    parts: Sequence[WeightedMetric], seeds: Sequence[int]
) -> tuple[Floats, Floats] | None:
    """Return the terms that are added and those that are subtracted, (secrets,) each.

    Each is a mean of shares, by secret. Return None if a metric is not the mean of a share over its
    secrets, or if terms or seeds have different secrets.
    """
    sides = {1.0: np.zeros(0), -1.0: np.zeros(0)}
    ids = None
    for part in parts:
        metric = metrics.find_metric(part.metric)
        sign = math.copysign(1.0, part.coefficient)
        for seed in seeds:
            outcome = part.cell.member_outcomes_by_seed[seed]
            if metric.among or metric.trait or metric.unit != "share":
                return None
            if metric.errors is not None:
                limit = metric.compute_wrong_guess_limit(len(outcome.ids))
                values: Floats | Bools = mark_solved_secrets(outcome.hit, outcome.score, limit)
            elif metric.values:
                values = metric.values(outcome)
            else:
                return None
            order = np.argsort(np.asarray(outcome.ids, STRINGS))
            ordered = np.asarray(outcome.ids, STRINGS)[order]
            if ids is None:
                ids = ordered
                sides = {key: np.zeros(len(ids)) for key in sides}
            if not np.array_equal(ordered, ids):
                return None
            sides[sign] += abs(part.coefficient) / len(seeds) * values[order]
    # Rounded, because three thirds may not be exactly 1.
    plus, minus = (np.round(side, 12) for side in sides.values())
    if not len(plus) or max(plus.max(), minus.max()) > 1:
        return None
    return plus, minus


def _measure_attack_contrast(
    name: str, parts: Sequence[WeightedMetric], seeds: Sequence[int]
) -> Measurement:
    secrets = set[str]()
    units = set()
    for part in parts:
        units.add(metrics.find_metric(part.metric).unit)
        for seed in seeds:
            secrets.update(part.cell.member_outcomes_by_seed[seed].ids)
    n = len(secrets)
    column_by_id = dict(zip(sorted(secrets), range(n), strict=True))
    draws = _draw_resample_counts(n)
    values = np.zeros(len(draws))
    for part in parts:
        for seed in seeds:
            outcome = part.cell.member_outcomes_by_seed[seed]
            # (1 + resamples, secrets of this outcome): count of each secret in each resample
            outcome_draws = draws[:, list(map(column_by_id.__getitem__, outcome.ids))]
            values += (
                part.coefficient
                / len(seeds)
                * metrics.find_metric(part.metric).compute_resampled_values(outcome, outcome_draws)
            )
    unit = units.pop() if len(units) == 1 else ""
    value, resampled = float(values[0]), values[1:]  # the first row of draws is the sample itself
    if math.isnan(value) or np.isnan(resampled).mean() > _MOST_UNDEFINED:
        return Measurement(
            name, value, math.nan, math.nan, n, unit, "too few guesses to take a mean of"
        )
    low, high = bootstrap.compute_percentile_interval(resampled[~np.isnan(resampled)])
    if low == high and unit == "share":
        # All resamples are equal, so the bootstrap has no width: bound a share, or a paired
        # difference of shares, exactly.
        half_width = clopper_pearson(0, n)[1]
        single = len(parts) == 1
        low, high = (
            clopper_pearson(round(value * n), n)
            if single
            else (value - half_width, value + half_width)
        )
    return Measurement(name, value, low, high, n, unit)


def _heldout_token_counts(part: WeightedMetric, seed: int) -> tuple[float, ...]:
    """Return the token count of each held-out text if the metric is a perplexity; otherwise ()."""
    losses = part.cell.heldout.get(seed, {})
    if part.metric in losses and part.metric != "tokens":
        return tuple(losses["tokens"])
    return ()


def _measure_perplexity_contrast(
    name: str, parts: Sequence[WeightedMetric], seeds: Sequence[int]
) -> Measurement:
    tokens = np.array([_heldout_token_counts(parts[0], seeds[0])])
    # (parts x seeds, texts), in the order of `weights`
    rows = []
    coefficients = []
    for part in parts:
        for seed in seeds:
            rows.append(part.cell.heldout[seed][part.metric])
            coefficients.append(part.coefficient / len(seeds))
    nll = np.array(rows)
    weights = np.array(coefficients)

    def of(nlls: Floats) -> tuple[Floats, Floats]:
        # (resamples, parts x seeds); exp is its own derivative
        return np.exp(nlls) @ weights, np.exp(nlls) * weights  # the sum, and its gradient

    value, low, high = bootstrap.estimate_rate_statistic(nll, tokens, of, "contrast", _RESAMPLES)
    return Measurement(name, value, low, high, tokens.shape[1], "perplexity")


def _map_metric_values(part: WeightedMetric, seed: int) -> dict[str, float]:
    """Return a probe's value for each member, keyed by secret id; {} if values are missing.

    The mean of these values is the metric, for example `exposure(count=16)`.
    """
    # Limit the digits: `int` raises for more than 4,300.
    match = re.fullmatch(r"(\w+)(?:\(count=(\d{1,15})\))?", part.metric)
    row = part.cell.values_by_seed.get(seed)
    if match is None or row is None or row.is_judged:
        return {}
    values = row.values_by_secret(match[1], True, None if match[2] is None else int(match[2]))
    if all(map(math.isfinite, values.values())):
        return values
    return {}


def _measure_probe_contrast(
    name: str, parts: Sequence[WeightedMetric], seeds: Sequence[int]
) -> Measurement:
    """Return the contrast of probes' means over these seeds, called `name`.

    A contrast is a weighted sum of metrics, the terms `parts`. The interval uses the bootstrap of
    auditor/runs/chain_steps.py.
    """
    secrets = sorted(_map_metric_values(parts[0], seeds[0]))
    plus, minus = np.zeros(len(secrets)), np.zeros(len(secrets))
    for part in parts:
        for seed in seeds:
            value_by_secret = _map_metric_values(part, seed)
            values = np.array(list(map(value_by_secret.__getitem__, secrets)))
            values *= part.coefficient / len(seeds)
            if part.coefficient > 0:
                plus += values
            else:
                minus -= values
    return make_measurement(
        name,
        resample_paired_means(plus, minus),
        _find_replicate_measurement(parts[0], seeds[0]).unit,
    )


# Cache few matrices: over 10,000 secrets a matrix takes 160 MB.
@functools.lru_cache(maxsize=4)
def _draw_resample_counts(n: int) -> Draws:
    """Return how often each of n secrets occurs in each bootstrap resample.

    The array has the shape (1 + resamples, n). Row 0 is the original sample, so all its counts are
    1. Every contrast over n secrets uses this same array, so that contrasts are paired.
    """
    return np.vstack(
        [
            np.ones((1, n), dtype=np.int64),
            *bootstrap.draw_resample_blocks(n, "contrast", _RESAMPLES),
        ]
    )


def _measure_unpaired_contrast(
    name: str, parts: Sequence[WeightedMetric], seeds: Sequence[int]
) -> Measurement:
    terms = []
    sizes = []
    units = set()
    for part in parts:
        ends = []
        for seed in seeds:
            m = _find_replicate_measurement(part, seed)
            ends.append((m.value, m.low, m.high))
        # Average the ends instead of combining them: seeds share the secrets, so more seeds do
        # not narrow the interval.
        value, low, high = np.mean(ends, axis=0).tolist()
        first = _find_replicate_measurement(part, seeds[0])
        terms.append((part.coefficient, replace(first, value=value, low=low, high=high)))
        sizes.append(first.n)
        units.add(first.unit)
    unit = units.pop() if len(units) == 1 else ""
    interval = combine_independent_intervals(terms)
    return Measurement(name, *interval, max(sizes), unit, "not paired")


def _find_replicate_measurement(part: WeightedMetric, seed: int) -> Measurement:
    measurements = part.cell.measured[seed]
    kind = f"metric of {part.cell.attack} on {part.cell.target}:"
    refuse_unknown_names(kind, [part.metric], measurements)
    return measurements[part.metric]
