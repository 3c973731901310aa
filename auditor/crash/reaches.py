"""Estimates how far records move a released gradient, in units of its noise: the reach of a group
of records.

A step's reaches are the least squares fit of its released gradient on its records' unit gradients,
so each one's expectation is that record's reach, whatever the others' are. A sum of them with
weights that are not negative therefore stays below the bound times the sum of the weights if every
record does: no assumption that records reach equally far is needed for a test. The weights are
chosen from gradients that came before the step's noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from auditor.crash.verdicts import SHARE, Array
from auditor.crash.watch import ObservedStep, fit_reaches
from auditor.crash.watch import TrainingTrace as Trace

Chosen = NDArray[np.bool_]
ChooseRecords = Callable[[ObservedStep], Chosen]  # a step -> (records,) which of them
Estimate = tuple[float, float]  # a mean reach, and its standard error
_ROUNDING = 1e-9  # of a Gram matrix's largest eigenvalue
_PINV = 1e-15  # of the same, below which `numpy.linalg.pinv` drops a direction


def choose_all_records(step: ObservedStep) -> Chosen:
    """Return (records,) True."""
    return np.ones(len(step.gram), dtype=np.bool_)


def estimate_mean_reach(
    steps: Sequence[ObservedStep], choose: ChooseRecords = choose_all_records
) -> Estimate | None:
    """Estimate the mean reach of the chosen records, whatever the others' reaches are; None: none
    had noise."""
    sums = [
        _sum_chosen_reaches(step.gram, step.reaches, choose(step))
        for step in steps
        if step.scale and step.records
    ]
    return _average_sums_of_reaches([each for each in sums if each])


def _sum_chosen_reaches(gram: Array, reaches: Array, chosen: Chosen) -> tuple[float, float] | None:
    """Return the weights' sum and that of the weighted reaches, each over the latter's deviation;
    None: no record."""
    if not chosen.any():
        return None
    weights, deviation = _weigh_chosen_records(gram, chosen)
    if not deviation > 0:
        return None
    return float(weights.sum()) / deviation, float(weights @ reaches[chosen]) / deviation


def weigh_all_records(gram: Array) -> tuple[Array, float]:
    """Return the weights of the records' most precise mean reach, none negative, and its sum's
    deviation."""
    return _weigh_chosen_records(gram, np.ones(len(gram), dtype=np.bool_))


def _average_sums_of_reaches(sums: Sequence[tuple[float, float]]) -> Estimate | None:
    """Average a sum of each step.

    A step's weighted sum of reaches, over its standard deviation, has variance 1 given all before
    it. So the sum over T steps has variance T exactly, however earlier noise moved the weights.
    """
    total_weight = sum(weight for weight, _ in sums)
    if not total_weight > 0:
        return None
    return sum(reach for _, reach in sums) / total_weight, math.sqrt(len(sums)) / total_weight


def _weigh_chosen_records(gram: Array, chosen: Chosen) -> tuple[Array, float]:
    """Return the weights, none negative, of the chosen records' most precise mean, and that sum's
    deviation.

    gram: (records, records) of unit gradients, the inverse of the reaches' covariance. Where every
    weight of the generalised least squares mean is positive these are the weights; else those of
    the constrained mean.
    """
    precision = gram[np.ix_(chosen, chosen)]
    if not chosen.all():
        across = gram[np.ix_(chosen, ~chosen)]
        precision = (
            precision
            - across @ np.linalg.pinv(gram[np.ix_(~chosen, ~chosen)], hermitian=True) @ across.T
        )
    weights = precision.sum(0)
    if (weights >= 0).all():
        return weights, math.sqrt(max(0.0, float(weights.sum())))
    values, vectors = np.linalg.eigh(precision)
    # Directions that the gradients do not tell apart get a large variance, so that no weight lies
    # on them.
    roots = np.sqrt(np.maximum(values, _ROUNDING * max(float(values[-1]), 1e-300)))
    inverse_root = (vectors / roots) @ vectors.T
    weights = optimize.nnls(inverse_root, (vectors * roots) @ vectors.T @ np.ones(len(roots)))[0]
    # Of the reaches as they were fitted, whose `pinv` keeps more directions than that.
    variances = np.where(values > _PINV * values[-1], 1 / np.where(values > 0, values, 1.0), 0.0)
    return weights, math.sqrt(float(variances @ (vectors.T @ weights) ** 2))


def rank_norms_in_training(traces: Sequence[Trace]) -> dict[int, Array]:
    """Return, by a step's `id`, (records,) the share of norms up to that step, in its training,
    below each one's."""
    ranks = {}
    for trace in traces:
        earlier = np.zeros(0)
        for step in trace.steps:
            earlier = np.sort(np.concatenate([earlier, step.norms]))
            ranks[id(step)] = np.searchsorted(earlier, step.norms) / max(1, len(earlier))
    return ranks


def estimate_reach_by_tensors(
    trainings: Sequence[Sequence[ObservedStep]], noise_shares: Mapping[str, float]
) -> list[Estimate | None]:
    """Estimate a record's reach over tensors that each have a bound of their own: of all trainings,
    then of each.

    Clipped tensor by tensor, what a record adds is no multiple of its gradient, but each tensor's
    part is one of that tensor's gradient. Along a direction u it adds at most b(u), the root of the
    sum over tensors of the squared inner products of u with its unit gradients where positive, if
    its length is at most 1. So the sum of all, along u, is at most the sum of their b(u), whichever
    way they were clipped. noise_shares: each tensor's noise over that of all.
    """
    sums = [_sum_reaches_by_tensors(steps, noise_shares) for steps in trainings]
    together = [each for part in sums for each in part]
    return [_average_sums_of_reaches(part) for part in (together, *sums)]


def _sum_reaches_by_tensors(
    steps: Sequence[ObservedStep], noise_shares: Mapping[str, float]
) -> list[tuple[float, float]]:
    """Return for each step the sum of bounds and the released gradient, both along a unit vector.

    Each tensor's part of it points along the sum of its records' unit gradients, and is as long as
    earlier steps reach
    there: never chosen by the step's own noise.
    """
    sums = []
    products: dict[str, float] = {}
    squares: dict[str, float] = {}
    for step in steps:
        if not step.scale or not step.records or not len(step.tensor_grams):
            continue
        names = list(step.shapes)
        along, bounds = _project_on_tensor_sums(
            step, np.array([noise_shares.get(name, 1.0) for name in names])
        )
        totals = bounds.sum(1)
        used = totals > 0
        earlier = np.array(
            [products[name] / squares[name] if squares.get(name) else 1.0 for name in names]
        )
        lengths = np.where(used, np.maximum(earlier, 0.0) / np.where(used, totals, 1.0), 0.0)
        length = float(np.linalg.norm(lengths))
        if length > 0:
            weight = float(np.linalg.norm(lengths[:, None] * bounds, axis=0).sum())
            sums.append((weight / length, float(lengths @ along) / length))
        for name, product, total in zip(names, along, totals, strict=True):
            products[name] = products.get(name, 0.0) + float(total * product)
            squares[name] = squares.get(name, 0.0) + float(total**2)
    return sums


def _project_on_tensor_sums(step: ObservedStep, shares: Array) -> tuple[Array, Array]:
    """Return by tensor the released gradient, and each record's unit gradient, along the sum of
    unit gradients.

    shares: (tensors,) -> (tensors,) in units of each tensor's noise, (tensors, records) what is
    negative as 0.
    """
    norms = np.sqrt(np.diagonal(step.tensor_grams, axis1=1, axis2=2))
    inverse = np.where(norms > 0, 1 / np.where(norms > 0, norms, 1.0), 0.0)
    sums = (step.tensor_grams * inverse[:, None, :]).sum(
        2
    ) * inverse  # each unit gradient on the sum of them
    squares = sums.sum(1)
    lengths = np.sqrt(np.maximum(squares, 0.0))
    usable = squares > _ROUNDING * norms.shape[1] ** 2
    scale = np.where(usable, 1 / np.where(usable, lengths, 1.0), 0.0)
    along = (step.tensor_products * inverse).sum(1) * scale / shares
    return along, np.maximum(sums, 0.0) * scale[:, None]


def is_clipped_by_tensors(steps: Sequence[ObservedStep], noise_shares: Mapping[str, float]) -> bool:
    """Return whether steps moved along tensors' gradients in other proportions than records'
    gradients have.

    What the gradients of tensors explain of a step beyond those of records is chi-squared if noise
    is all that it has.
    """
    excess, freedom = 0.0, 0
    for step in steps:
        if not step.scale or not step.records or not len(step.tensor_grams):
            continue
        squares = np.array([noise_shares.get(name, 1.0) for name in step.shapes]) ** -2.0
        grams = step.tensor_grams * squares[:, None, None]
        products = step.tensor_products * squares[:, None]
        apart, apart_rank = _explain_products(grams, products)
        whole, whole_rank = _explain_products(
            grams.sum(0, keepdims=True), products.sum(0, keepdims=True)
        )
        excess += apart - whole
        freedom += apart_rank - whole_rank
    return freedom > 0 and float(stats.chi2.sf(excess, freedom)) < SHARE


def _explain_products(grams: Array, products: Array) -> tuple[float, int]:
    """Return the squared length of a unit-noise gradient in the span of gradients, and the span's
    dimension.

    grams: (parts, records, records); products: (parts, records) the gradient's with them; both
    summed over parts.
    """
    values, vectors = np.linalg.eigh(grams)
    used = values > _ROUNDING * np.maximum(values[:, -1:], 1e-300)
    turned = (vectors.swapaxes(1, 2) @ products[..., None])[..., 0]
    explained = np.where(used, turned**2 / np.where(used, values, 1.0), 0.0)
    return float(explained.sum()), int(used.sum())


def whiten_step(step: ObservedStep, noise_shares: Mapping[str, float]) -> ObservedStep:
    """Return the step with each tensor divided by its own noise, so that one unit of noise is one
    everywhere.

    A record's reach is then the length of what it adds in units of the noise that hides it, as the
    Gaussian mechanism counts it. noise_shares: each tensor's noise over that of all tensors.
    """
    if not step.scale or not len(step.tensor_grams):
        return step
    shares = np.array([noise_shares[name] for name in step.shapes])
    sizes = [end - begin for begin, end in step.shapes.values()]
    reaches, gram, norms = fit_reaches(
        np.einsum("t,tij->ij", shares**-2.0, step.tensor_grams),
        np.einsum("t,ti->i", shares**-2.0, step.tensor_products),
    )
    scales = {
        name: (scale / noise_shares[name], free) for name, (scale, free) in step.scales.items()
    }
    # Pooled again: tensors lose directions to the records' span by turns, and with them their part
    # in a mean size.
    freedom = sum(free for _, free in scales.values())
    unit = math.sqrt(sum(scale**2 * free for scale, free in scales.values()) / freedom) / step.scale
    return replace(
        step,
        scale=step.scale * unit,
        scales=scales,
        reaches=reaches / unit,
        gram=gram,
        norms=norms,
        noise=step.noise / np.repeat(shares, sizes),
        tensor_products=step.tensor_products / unit,
    )
