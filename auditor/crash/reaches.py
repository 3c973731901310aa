"""Estimate each record's reach: the length of its contribution to a gradient, in noise units.

Reaches are coefficients of the least squares fit of a step's released gradient on its records' unit
gradients. Each estimate is unbiased, whatever the reaches of the other records are. If every reach
is within the bound, a sum of reaches with nonnegative weights is at most the bound times the sum of
weights. The reaches need not be equal. Weights depend only on gradients computed before the step's
noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import optimize, stats

from auditor.core.arrays import Bools, Floats
from auditor.crash.verdicts import SHARE
from auditor.crash.watch import ObservedStep, fit_gradient_reaches
from auditor.crash.watch import TrainingTrace as Trace

ChooseRecords = Callable[[ObservedStep], Bools]  # a step -> (records,) mask
Estimate = tuple[float, float]  # a mean reach, and its standard error
_ROUNDING = 1e-9  # relative to a Gram matrix's largest eigenvalue
_PINV = 1e-15  # likewise; `numpy.linalg.pinv` drops a direction below it


def estimate_mean_reach(
    steps: Sequence[ObservedStep],
    choose: ChooseRecords = lambda step: np.ones(len(step.gram), dtype=np.bool_),
) -> Estimate | None:
    """Estimate the chosen records' mean reach and its standard error; None if there is no noise.

    A reach is the length of a record's contribution to a gradient, in units of the noise. The
    estimate is unbiased, whatever the reaches of the other records are.
    """
    sums = []
    for step in steps:
        if not step.scale or not step.records:
            continue
        chosen = choose(step)
        if not chosen.any():
            continue
        weights, deviation = weigh_reached_records(step.gram, chosen)
        if deviation > 0:
            reach = float(weights @ step.reaches[chosen])
            sums.append((float(weights.sum()) / deviation, reach / deviation))
    return _average_reach_sums(sums)


def _average_reach_sums(sums: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the mean reach over all steps, and its standard error.

    sums: (sum of weights, weighted sum of reaches) for each step. Each weighted sum has variance 1
    given the earlier steps, so the total over T steps has variance T.
    """
    if not sums:
        return None
    weight, reach = map(sum, zip(*sums, strict=True))
    if not weight > 0:
        return None
    return reach / weight, math.sqrt(len(sums)) / weight


def weigh_reached_records(gram: Floats, chosen: Bools) -> tuple[Floats, float]:
    """Return the weights that make the chosen records' mean reach most precise.

    Weights are at least 0. gram: (records, records) Gram matrix of the unit gradients, which is the
    inverse of the reaches' covariance. Also return the standard deviation of the weighted sum.
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
    # Give directions that the gradients do not separate a large variance, so that they get no
    # weight.
    roots = np.sqrt(np.maximum(values, _ROUNDING * max(float(values[-1]), 1e-300)))
    inverse_root = (vectors / roots) @ vectors.T
    weights = optimize.nnls(inverse_root, (vectors * roots) @ vectors.T @ np.ones(len(roots)))[0]
    # The variance of the fitted reaches, whose `pinv` keeps more directions.
    variances = np.where(values > _PINV * values[-1], 1 / np.where(values > 0, values, 1.0), 0.0)
    return weights, math.sqrt(float(variances @ (vectors.T @ weights) ** 2))


def rank_training_norms(traces: Sequence[Trace]) -> dict[int, Floats]:
    """Return the ranks of each step's gradient norms, (records,), keyed by the step's `id`.

    A rank is the share of norms in the training so far that are smaller.
    """
    ranks = {}
    for trace in traces:
        earlier = np.zeros(0)
        for step in trace.steps:
            earlier = np.sort(np.concatenate([earlier, step.norms]))
            ranks[id(step)] = np.searchsorted(earlier, step.norms) / max(1, len(earlier))
    return ranks


def estimate_tensor_reaches(
    trainings: Sequence[Sequence[ObservedStep]], noise_shares: Mapping[str, float]
) -> list[Estimate | None]:
    """Estimate the mean reach of records if a training clips each tensor separately.

    Return an estimate for all trainings together, followed by one for each training. noise_shares:
    each tensor's noise over that of all tensors.

    Such clipping scales the record's gradient in each tensor t by a factor of its own. Let g_t be
    the record's unit gradient in t, and u_t the part of a unit vector u in t. A contribution of
    length 1 or less then adds at most b(u) along u, where b(u)^2 = sum_t max(0, u_t @ g_t)^2.
    """
    sums = [_sum_tensor_reaches(steps, noise_shares) for steps in trainings]
    together = list(itertools.chain.from_iterable(sums))
    return list(map(_average_reach_sums, (together, *sums)))


def _sum_tensor_reaches(
    steps: Sequence[ObservedStep], noise_shares: Mapping[str, float]
) -> list[tuple[float, float]]:
    """Return (sum of the records' bounds b(u), released gradient along u) for each step.

    For b(u), see `estimate_tensor_reaches`. Within a tensor, u points along the sum of the records'
    unit gradients. The lengths of u in the tensors depend only on earlier steps, so u does not
    depend on the step's noise.
    """
    sums = []
    products: dict[str, float] = {}
    squares: dict[str, float] = {}
    for step in steps:
        if not step.scale or not step.records or not len(step.tensor_grams):
            continue
        names = list(step.tensor_ranges)
        along, bounds = _project_tensor_sums(
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


def _project_tensor_sums(step: ObservedStep, shares: Floats) -> tuple[Floats, Floats]:
    """Project gradients onto the sum of the records' unit gradients, separately in each tensor.

    shares: (tensors,) size of each tensor's noise.

    Returns:
        The projections of the released gradient, (tensors,), over the tensor's noise.
        The projections of the unit gradients, (tensors, records); negative ones are set to 0.
    """
    norms = np.sqrt(np.diagonal(step.tensor_grams, axis1=1, axis2=2))
    inverse = np.where(norms > 0, 1 / np.where(norms > 0, norms, 1.0), 0.0)
    sums = (step.tensor_grams * inverse[:, None, :]).sum(
        2
    ) * inverse  # each unit gradient projected on their sum
    squares = sums.sum(1)
    lengths = np.sqrt(np.maximum(squares, 0.0))
    usable = squares > _ROUNDING * norms.shape[1] ** 2
    scale = np.where(usable, 1 / np.where(usable, lengths, 1.0), 0.0)
    along = (step.tensor_products * inverse).sum(1) * scale / shares
    return along, np.maximum(sums, 0.0) * scale[:, None]


def is_clipping_per_tensor(
    steps: Sequence[ObservedStep], noise_shares: Mapping[str, float]
) -> bool:
    """Test whether the training clips each tensor separately.

    Two fits explain a step by the records' gradients: one with a factor per record, and one with a
    factor per record and tensor. If the training clips whole gradients, the second fit explains
    only more noise, so the additional squared length is chi-squared. A significantly larger value
    shows separate clipping.
    """
    excess = 0.0
    freedom = 0
    for step in steps:
        if not step.scale or not step.records or not len(step.tensor_grams):
            continue
        squares = np.array([noise_shares.get(name, 1.0) for name in step.tensor_ranges]) ** -2.0
        grams = step.tensor_grams * squares[:, None, None]
        products = step.tensor_products * squares[:, None]
        by_tensor, by_tensor_rank = _explain_products(grams, products)
        joint, joint_rank = _explain_products(
            grams.sum(0, keepdims=True), products.sum(0, keepdims=True)
        )
        excess += by_tensor - joint
        freedom += by_tensor_rank - joint_rank
    return freedom > 0 and float(stats.chi2.sf(excess, freedom)) < SHARE


def _explain_products(grams: Floats, products: Floats) -> tuple[float, int]:
    """Return the squared length of a gradient's projection onto other gradients' span.

    Also return the dimension of the span. Both are sums over parts. The projected gradient has
    noise of size 1.

    grams: (parts, records, records) inner products of the gradients that span the space; products:
        (parts, records) their inner products with the projected gradient.
    """
    values, vectors = np.linalg.eigh(grams)
    used = values > _ROUNDING * np.maximum(values[:, -1:], 1e-300)
    turned = (vectors.swapaxes(1, 2) @ products[..., None])[..., 0]
    explained = np.where(used, turned**2 / np.where(used, values, 1.0), 0.0)
    return float(explained.sum()), int(used.sum())


def whiten_step(step: ObservedStep, noise_shares: Mapping[str, float]) -> ObservedStep:
    """Return the step with each tensor divided by its own noise.

    A reach is then in units of the noise that hides the contribution, as for the Gaussian
    mechanism. noise_shares: each tensor's noise over that of all tensors.
    """
    if not step.scale or not len(step.tensor_grams):
        return step
    shares = np.array([noise_shares[name] for name in step.tensor_ranges])
    sizes = [end - begin for begin, end in step.tensor_ranges.values()]
    reaches, gram, norms = fit_gradient_reaches(
        np.einsum("t,tij->ij", shares**-2.0, step.tensor_grams),
        np.einsum("t,ti->i", shares**-2.0, step.tensor_products),
    )
    scales = {}
    for name, (scale, free) in step.scales.items():
        scales[name] = (scale / noise_shares[name], free)
    # Pool again: tensors lose directions to the records' span by turns, and with them their part of
    # a mean size.
    deviations, freedoms = np.array(list(scales.values())).T
    unit = math.sqrt(np.average(deviations**2, weights=freedoms)) / step.scale
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
