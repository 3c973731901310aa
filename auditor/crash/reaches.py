"""Estimates how far records move a released gradient, in units of its noise: the reach of a group of records.

A step's reaches are the least squares fit of its released gradient on its records' unit gradients, so each one's
expectation is that record's reach, whatever the others' are. A sum of them with weights that are not negative
therefore stays below the bound times the sum of the weights if every record does: no assumption that records reach
equally far is needed for a test. The weights are chosen from gradients that came before the step's noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from auditor.crash.verdicts import Array
from auditor.crash.watch import ObservedStep, fit_reaches
from auditor.crash.watch import TrainingTrace as Trace

Chosen = NDArray[np.bool_]
ChooseRecords = Callable[[ObservedStep], Chosen]  # a step -> (records,) which of them
Estimate = tuple[float, float]  # a mean reach, and its standard error
_ROUNDING = 1e-9  # of a Gram matrix's largest eigenvalue


def choose_all_records(step: ObservedStep) -> Chosen:
    """Return (records,) True."""
    return np.ones(len(step.gram), dtype=np.bool_)


def estimate_mean_reach(steps: Sequence[ObservedStep], choose: ChooseRecords = choose_all_records) -> Estimate | None:
    """Estimate the mean reach of the chosen records, whatever the others' reaches are; None: none had noise.

    A step's weighted sum of reaches, over its standard deviation, has variance 1 given all before it. So the sum over
    T steps has variance T exactly, however earlier noise moved the weights.
    """
    total_weight = total_reach = 0.0
    n_steps = 0
    for step in steps:
        if not step.scale or not step.records:
            continue
        chosen = choose(step)
        if not chosen.any():
            continue
        weights, deviation = _weigh_chosen_records(step.gram, chosen)
        if not deviation > 0:
            continue
        total_weight += float(weights.sum()) / deviation
        total_reach += float(weights @ step.reaches[chosen]) / deviation
        n_steps += 1
    if not total_weight > 0:
        return None
    return total_reach / total_weight, math.sqrt(n_steps) / total_weight


def _weigh_chosen_records(gram: Array, chosen: Chosen) -> tuple[Array, float]:
    """Return the weights, none negative, of the chosen records' most precise mean, and that sum's deviation.

    gram: (records, records) of unit gradients, the inverse of the reaches' covariance. Where every weight of the
    generalised least squares mean is positive these are the weights; else those of the constrained mean.
    """
    precision = gram[np.ix_(chosen, chosen)]
    if not chosen.all():
        across = gram[np.ix_(chosen, ~chosen)]
        precision = precision - across @ np.linalg.pinv(gram[np.ix_(~chosen, ~chosen)], hermitian=True) @ across.T
    weights = precision.sum(0)
    if (weights >= 0).all():
        return weights, math.sqrt(max(0.0, float(weights.sum())))
    values, vectors = np.linalg.eigh(precision)
    # Directions that the gradients do not tell apart get a large variance, so that no weight lies on them.
    roots = np.sqrt(np.maximum(values, _ROUNDING * max(float(values[-1]), 1e-300)))
    inverse_root = (vectors / roots) @ vectors.T
    weights = optimize.nnls(inverse_root, (vectors * roots) @ vectors.T @ np.ones(len(roots)))[0]
    return weights, float(np.linalg.norm(inverse_root @ weights))


def rank_norms_in_training(traces: Sequence[Trace]) -> dict[int, Array]:
    """Return, by a step's `id`, (records,) the share of norms up to that step, in its training, below each one's."""
    ranks = {}
    for trace in traces:
        earlier = np.zeros(0)
        for step in trace.steps:
            earlier = np.sort(np.concatenate([earlier, step.norms]))
            ranks[id(step)] = np.searchsorted(earlier, step.norms) / max(1, len(earlier))
    return ranks


def estimate_reach_of_tensors_together(
    steps: Sequence[ObservedStep], noise_shares: Mapping[str, float]
) -> Estimate | None:
    """Estimate a record's reach over all tensors, each with a bound of its own: the root of the sum of their squares.

    Clipped tensor by tensor, a record's sum of gradients is no multiple of its gradient, but each tensor's part is one
    of that tensor's gradient. The square of a mean is below the mean of squares: the estimate errs downwards only.
    noise_shares: each tensor's noise over that of all.
    """
    square = variance = 0.0
    for name, share in noise_shares.items():
        parts = [part for step in steps if (part := _keep_one_tensor(step, name)) is not None]
        estimate = estimate_mean_reach(parts)
        if estimate is None:
            continue
        mean, error = estimate[0] / share, estimate[1] / share
        square += mean**2 - error**2  # less what noise adds to a square
        variance += 4 * mean**2 * error**2 + 2 * error**4
    if not square > 0:
        return None
    total = math.sqrt(square)
    return total, math.sqrt(variance) / (2 * total)


def _keep_one_tensor(step: ObservedStep, name: str) -> ObservedStep | None:
    """Return the step as this tensor alone shows it, in units of all tensors' noise; None if it does not train it."""
    if name not in step.shapes or not step.scale or not len(step.tensor_grams):
        return None
    at = list(step.shapes).index(name)
    reaches, gram, norms = fit_reaches(step.tensor_grams[at], step.tensor_products[at])
    return replace(step, reaches=reaches, gram=gram, norms=norms) if norms.any() else None


def whiten_step(step: ObservedStep, noise_shares: Mapping[str, float]) -> ObservedStep:
    """Return the step with each tensor divided by its own noise, so that one unit of noise is one everywhere.

    A record's reach is then the length of what it adds in units of the noise that hides it, as the Gaussian mechanism
    counts it. noise_shares: each tensor's noise over that of all tensors.
    """
    if not step.scale or not len(step.tensor_grams):
        return step
    shares = np.array([noise_shares[name] for name in step.shapes])
    sizes = [end - begin for begin, end in step.shapes.values()]
    reaches, gram, norms = fit_reaches(
        np.einsum("t,tij->ij", shares**-2.0, step.tensor_grams),
        np.einsum("t,ti->i", shares**-2.0, step.tensor_products),
    )
    scales = {name: (scale / noise_shares[name], free) for name, (scale, free) in step.scales.items()}
    noise = step.noise / np.repeat(shares, sizes)
    return replace(step, reaches=reaches, gram=gram, norms=norms, noise=noise, scales=scales)
