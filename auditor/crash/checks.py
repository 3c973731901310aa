"""What a training's steps say against its claim: one check a fault, each with its number and what it could have seen.

Every p-value is one-sided against what the claim promises, and the checks share one level by Bonferroni's rule, so an
honest training is called broken with at most that probability. Estimates are approximately normal: sums over thousands
of elements of noise.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from auditor.crash.claim import LoopClaim, epsilon
from auditor.crash.subject import RECORDS
from auditor.crash.watch import ReadStep, Trace
from auditor.privacy.gaussian import scale_epsilon

LEVEL = 0.05  # of calling an honest training broken, over all checks
POWER = 0.8
BROKEN, NO_FAULT, UNKNOWN = "broken", "no fault seen", "cannot tell"
_SINGULAR = 1e10  # the condition number of a fit that determines nothing
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """The trainings that were watched: several under different seeds, on two models by turns; one on a record fewer."""

    claim: LoopClaim
    traces: tuple[Trace, ...]
    fewer: Trace  # under the first one's seed, on its model

    @property
    def first(self) -> Trace:
        return self.traces[0]

    @property
    def steps(self) -> list[ReadStep]:
        return [step for trace in self.traces for step in trace.steps]

    @property
    def drawn(self) -> list[ReadStep]:
        """All but each training's first: what is read before that may be a trial of the model."""
        return [step for trace in self.traces for step in trace.steps[1:]]

    @property
    def noisy(self) -> list[ReadStep]:
        return [step for step in self.steps if step.scale]


@dataclass(frozen=True)
class LoopCheck:
    """One check's verdict. epsilon: what the training really has by this check alone; inf: unbounded."""

    name: str
    verdict: str
    said: str
    would_see: str  # the smallest violation that this check catches with 80% probability
    p: float = 1.0
    epsilon: float | None = None


def all_checks(runs: Runs) -> list[LoopCheck]:
    """Every check of these trainings, in the order of a report."""
    return [check(runs) for check in CHECKS]


def _tested(
    name: str, p: float, fault: str, fine: str, would_see: str, epsilon: Callable[[], float] | None = None
) -> LoopCheck:
    """epsilon: works out what the training really has, where it is broken; accounting takes a second."""
    if p < LEVEL / len(CHECKS):
        return LoopCheck(name, BROKEN, fault, would_see, p, epsilon and epsilon())
    return LoopCheck(name, NO_FAULT, fine, would_see, p)


def _unbounded() -> float:
    return math.inf


def _z() -> float:
    """How many standard errors a violation needs to be caught with 80% probability."""
    return float(stats.norm.isf(LEVEL / len(CHECKS)) + stats.norm.ppf(POWER))


def _really(runs: Runs, noise: float) -> float:
    """Epsilon of the sampling and steps that were seen, with this noise multiplier."""
    return epsilon(noise, _rate(runs), len(runs.first.steps), runs.claim.delta)


def _rate(runs: Runs) -> float:
    seen = sum(len(step.records) for step in runs.drawn)
    return min(1.0, max(seen / max(1, runs.first.n * len(runs.drawn)), 1e-9))


# --- noise ------------------------------------------------------------------------------------------------------------


def noise(runs: Runs) -> LoopCheck:
    """Every tensor has the noise that the others have: forgotten on one, it hides nothing of it."""
    would = f"a tensor of 16 numbers with {100 * (1 - math.sqrt(_least_share(len(runs.steps)))):.0f}% less noise"
    silent = {name for step in runs.noisy for name, (one, _) in step.scales.items() if not one}
    if not runs.noisy:
        said = "no noise at all in any gradient that reached the optimizer"
        return LoopCheck("noise in every tensor", BROKEN, said, would, 0.0, math.inf)
    if silent:
        said = f"no noise on {len(silent)} of {len(runs.first.shapes)} tensors: {', '.join(sorted(silent)[:3])}"
        return LoopCheck("noise in every tensor", BROKEN, said, would, 0.0, math.inf)
    shares = {name: _share(runs.noisy, name) for name in runs.first.shapes}
    ps = {name: float(stats.chi2.cdf(share * free, free)) for name, (share, free) in shares.items() if free}
    worst = min(ps, key=ps.__getitem__)
    least = math.sqrt(shares[worst][0])
    return _tested(
        "noise in every tensor", min(1.0, ps[worst] * len(ps)),
        f"{worst} has {least:.2f} times the noise of the others",
        f"every one of {len(ps)} tensors has its noise (least: {least:.2f} times the mean)", would,
    )  # fmt: skip


def _share(steps: Sequence[ReadStep], name: str) -> tuple[float, int]:
    """A tensor's noise variance over that of all, and its degrees of freedom."""
    held = [(step.scales[name], step.scale) for step in steps if name in step.scales]
    free = sum(free for (_, free), _ in held)
    return (sum((one / scale) ** 2 * free for (one, free), scale in held) / free if free else 1.0), free


def _least_share(steps: int, elements: int = 8) -> float:
    free = max(1, steps * elements)
    return float(stats.chi2.ppf(LEVEL / len(CHECKS) / 16, free) / stats.chi2.ppf(POWER, free))


def normal(runs: Runs) -> LoopCheck:
    """The noise is Gaussian: the accounting holds for no other."""
    parts = [
        step.noise[kept] / step.spread[kept] / step.scale for step in runs.noisy if (kept := step.spread > 0.5).any()
    ]
    if not parts:
        return LoopCheck("Gaussian noise", UNKNOWN, "no noise that could be looked at", "")
    held = np.concatenate(parts)
    found = stats.kstest(held, "norm")
    would = f"a distribution function that is off by {_z() / math.sqrt(len(held)):.3f} anywhere"
    return _tested("Gaussian noise", float(found.pvalue), f"not normal: off by {found.statistic:.3f}",
                   "normal", would)  # fmt: skip


def fresh(runs: Runs) -> LoopCheck:
    """Independent between any two steps of any training, and between tensors; each training has another seed."""
    name = "fresh noise"
    if len(runs.noisy) < 2:
        return LoopCheck(name, UNKNOWN, "no noise that could be looked at", "")
    follow = [(a.noise, b.noise) for trace in runs.traces for a, b in itertools.pairwise(trace.steps)]
    found = {
        "in any two steps": _most_alike([step.noise for step in runs.noisy]),
        "from step to step": _correlation(follow),
        "in tensors of one size": _correlation([pair for step in runs.steps for pair in _alike(step, runs.first)]),
    }
    where = min(found, key=lambda key: found[key][1])
    value, p = found[where]
    return _tested(
        name, min(1.0, len(found) * p), f"the noise repeats {where}: correlation {value:.2f}",
        "no two steps, trainings or tensors share their noise",
        f"a correlation of {6 / math.sqrt(len(runs.noisy[0].noise)):.2f} between any two steps", _unbounded,
    )  # fmt: skip


def _most_alike(noises: Sequence[_Array]) -> tuple[float, float]:
    """The largest correlation of any two, and its p-value among so many pairs."""
    if len({len(one) for one in noises}) > 1:
        return 0.0, 1.0
    held = np.stack(noises)
    held /= np.linalg.norm(held, axis=1, keepdims=True)
    alike = np.abs(np.triu(held @ held.T, 1))
    pairs = len(noises) * (len(noises) - 1) / 2
    most = float(alike.max())
    return most, min(1.0, 2 * pairs * float(stats.norm.sf(most * math.sqrt(held.shape[1]))))


def _alike(step: ReadStep, trace: Trace) -> Iterator[tuple[_Array, _Array]]:
    """Pairs of tensors of one size, of which noise from one generator seeded anew would be equal."""
    spans = sorted(trace.shapes.values(), key=lambda span: span[1] - span[0])
    for (a, b), (c, d) in itertools.pairwise(spans):
        if b - a == d - c:
            yield step.noise[a:b], step.noise[c:d]


def _correlation(pairs: Sequence[tuple[_Array, _Array]]) -> tuple[float, float]:
    """Of all pairs at once -> (correlation, p-value); (0, 1) of none."""
    both = sum(float(a @ b) for a, b in pairs)
    size = sum(math.sqrt(float(a @ a) * float(b @ b)) for a, b in pairs)
    spread = math.sqrt(sum(float(a @ a) * float(b @ b) / len(a) for a, b in pairs))
    return (both / size, 2 * float(stats.norm.sf(abs(both) / spread))) if spread else (0.0, 1.0)


# --- one record's reach -----------------------------------------------------------------------------------------------


def sensitivity(runs: Runs) -> LoopCheck:
    """A record moves the gradient by at most 1 / noise multiplier, in units of the noise; on both models."""
    name, promised = "one record's reach", 1 / runs.claim.noise_multiplier
    turns = [[step for trace in runs.traces[turn::2] for step in trace.steps] for turn in range(2)]
    found = [one for steps in turns if (one := _fitted(steps, _same))]
    if not found:
        return LoopCheck(name, UNKNOWN, "no noise that it could be held against", "")
    mean, error = max(found, key=lambda one: (one[0] - promised) / one[1])
    ratio, least = mean / promised, max(one[0] + _z() * one[1] for one in found) / promised
    would = f"a reach of {1 + _z() * error / promised:.2f} times"
    if least < 1:  # another way of clipping, whose bound this fit of equal reaches does not show
        said = f"records move the gradient by {ratio:.2f} times what the noise is made for: the bound is not seen"
        return LoopCheck(name, UNKNOWN, said, would)
    return _tested(
        name, min(1.0, len(found) * float(stats.norm.sf((mean - promised) / error))),
        f"a record moves the gradient by {ratio:.2f} times what the noise is made for",
        f"a record moves the gradient by {ratio:.2f} ± {1.96 * error / promised:.2f} times what the noise is made for",
        would, lambda: _really(runs, 1 / mean),
    )  # fmt: skip


def kinds(runs: Runs) -> LoopCheck:
    """Long, short, first, last and lone records reach no farther than the others."""
    name, promised = "every kind of record", 1 / runs.claim.noise_multiplier
    found = {kind: one for kind, chosen in _KINDS.items() if (one := _fitted(runs.steps, _chosen(chosen)))}
    if not found:
        return LoopCheck(name, UNKNOWN, "no noise that they could be held against", "")
    worst = max(found, key=lambda kind: (found[kind][0] - promised) / found[kind][1])
    mean, error = found[worst]
    return _tested(
        name, min(1.0, len(found) * float(stats.norm.sf((mean - promised) / error))),
        f"{worst} records reach {mean / promised:.2f} times as far as they may",
        f"none of {', '.join(found)} records reaches too far (most: {worst}, {mean / promised:.2f} times)",
        f"a reach of {1 + _z() * max(e for _, e in found.values()) / promised:.1f} times, for the rarest kind",
        lambda: _really(runs, 1 / mean),
    )  # fmt: skip


_KINDS: dict[str, Callable[[int, ReadStep], bool]] = {
    "first": lambda record, step: record == 0,
    "last": lambda record, step: record >= RECORDS - 2,
    "longest": lambda record, step: record % 4 == 0,
    "shortest": lambda record, step: record % 4 == 1,
    "alone": lambda record, step: len(step.records) <= 2,
}


def clipped(runs: Runs) -> LoopCheck:
    """How far a record reaches follows neither its gradient's norm nor who else is in the batch."""
    name, promised = "clipped by record", 1 / runs.claim.noise_multiplier
    found = {what: one for what, column in _FOLLOWS.items() if (one := _fitted(runs.steps, column))}
    if not found:
        return LoopCheck(name, UNKNOWN, "no noise that it could be held against", "")
    worst = max(found, key=lambda what: found[what][0] / found[what][1])
    slope, error = found[worst]
    return _tested(
        name, min(1.0, len(found) * float(stats.norm.sf(slope / error))),
        f"how far a record reaches follows {worst}: its gradient is not clipped by itself",
        f"how far a record reaches follows neither {' nor '.join(found)}",
        f"a reach that rises by {_z() * max(e for _, e in found.values()) / promised:.2f} times the bound by either",
        _unbounded,
    )  # fmt: skip


_Columns = Callable[[ReadStep], _Array]  # a step -> (records, m); the first column's coefficient is asked for


def _same(step: ReadStep) -> _Array:
    return np.ones((len(step.norms), 1))


def _chosen(chosen: Callable[[int, ReadStep], bool]) -> _Columns:
    def columns(step: ReadStep) -> _Array:
        held = np.array([chosen(record, step) for record in sorted(set(step.records))], dtype=float)
        return np.stack([held, 1 - held], axis=1)

    return columns


_FOLLOWS: dict[str, _Columns] = {
    "the logarithm of its gradient's norm": lambda step: np.stack([np.log(step.norms), np.ones(len(step.norms))], 1),
    "its share of the batch's gradient": lambda step: np.stack(
        [step.norms / step.batch_norm, np.ones(len(step.norms))], 1
    ),
}


def _fitted(steps: Sequence[ReadStep], columns: _Columns) -> tuple[float, float] | None:
    """Generalised least squares of all reaches on these columns -> (first coefficient, its standard error).

    A step's reaches have the inverse Gram matrix of its records' unit gradients for covariance. None: not determined.
    """
    held = [(columns(step), step.gram, step.reaches) for step in steps if step.scale and step.records]
    if not held:
        return None
    a = sum((x.T @ gram @ x for x, gram, _ in held), np.zeros(()))
    b = sum((x.T @ gram @ reaches for x, gram, reaches in held), np.zeros(()))
    used = np.diag(a) > 0
    if not used[0] or np.linalg.cond(a[used][:, used]) > _SINGULAR:
        return None
    covariance = np.linalg.inv(a[used][:, used])
    return float((covariance @ b[used])[0]), float(covariance[0, 0] ** 0.5)


# --- what is read, and how often --------------------------------------------------------------------------------------


def twice(runs: Runs) -> LoopCheck:
    """No record goes into one step twice."""
    found = [max(Counter(step.records).values()) for step in runs.drawn if step.records]
    most = max(found, default=0)
    if most > 1:
        said = f"a record was read {most} times in {sum(one > 1 for one in found)} of {len(found)} steps"
        return LoopCheck(
            "once a step", BROKEN, said, "one such step", 0.0, _really(runs, runs.claim.noise_multiplier / most)
        )
    return LoopCheck("once a step", NO_FAULT, f"no record twice in any of {len(found)} steps", "one such step")


def rate(runs: Runs) -> LoopCheck:
    """Records are read as often as the claimed rate says."""
    asked = runs.first.n * len(runs.drawn)
    seen = sum(len(set(step.records)) for step in runs.drawn)
    q = runs.claim.sample_rate
    error = math.sqrt(max(q * (1 - q), 1e-12) / asked)
    return _tested(
        "sampling rate", float(stats.binom.sf(seen - 1, asked, q)) if q < 1 else 1.0,
        f"a record is read in {seen / asked:.3f} of the steps, claimed is {q:.3f}",
        f"a record is read in {seen / asked:.3f} of the steps (claimed {q:.3f})",
        f"{1 + _z() * error / q:.2f} times the rate",
        lambda: epsilon(runs.claim.noise_multiplier, min(1.0, seen / asked), len(runs.first.steps), runs.claim.delta),
    )  # fmt: skip


def sampling(runs: Runs) -> LoopCheck:
    """Batches vary as Poisson sampling's do. Shuffled ones, all of one size, hide less than is accounted."""
    q, n = runs.claim.sample_rate, runs.first.n
    sizes = np.array([len(step.records) for step in runs.drawn])
    if runs.claim.sampling != "poisson" or q >= 1:
        return LoopCheck("Poisson sampling", UNKNOWN, f"claimed is {runs.claim.sampling} sampling", "")
    varies = float(((sizes - n * q) ** 2).sum() / (n * q * (1 - q)))
    return _tested(
        "Poisson sampling", float(stats.chi2.cdf(varies, len(sizes))),
        f"batches of {sizes.min()} to {sizes.max()} records vary less than Poisson sampling's: "
        "epsilon was accounted for another kind of sampling",
        f"batches of {sizes.min()} to {sizes.max()} records, as Poisson sampling draws them",
        "batches of one size",
        lambda: epsilon(runs.claim.noise_multiplier, 1.0, max(1, round(len(runs.first.steps) * q)), runs.claim.delta),
    )  # fmt: skip


def even(runs: Runs) -> LoopCheck:
    """Every record is read about as often as the others."""
    times = Counter(record for step in runs.drawn for record in set(step.records))
    q, t = min(_rate(runs), 1 - 1e-9), len(runs.drawn)
    counts = np.array([times[i] for i in range(runs.first.n)])
    most = int(counts.argmax())
    p = min(1.0, runs.first.n * float(stats.binom.sf(counts[most] - 1, t, max(runs.claim.sample_rate, q))))
    return _tested(
        "no record favoured", p, f"record {most} was read in {counts[most]} of {t} steps, expected are {t * q:.1f}",
        f"no record was read more often than by chance ({counts.min()} to {counts.max()} of {t} steps)",
        "a record that is read in half of the steps",
        lambda: epsilon(runs.claim.noise_multiplier, counts[most] / t, len(runs.first.steps), runs.claim.delta),
    )  # fmt: skip


def steps(runs: Runs) -> LoopCheck:
    """As many steps as were accounted, and no more."""
    seen, claimed = max(len(trace.steps) for trace in runs.traces), runs.claim.steps
    if seen > claimed:
        really = epsilon(runs.claim.noise_multiplier, runs.claim.sample_rate, seen, runs.claim.delta)
        return LoopCheck(
            "steps", BROKEN, f"{seen} steps were taken, {claimed} are claimed", "one step more", 0.0, really
        )
    return LoopCheck("steps", NO_FAULT, f"{seen} steps were taken, {claimed} are claimed", "one step more")


def accounting(runs: Runs) -> LoopCheck:
    """The epsilon that is told follows from the noise, rate and steps that are claimed."""
    if runs.claim.epsilon is None:
        return LoopCheck("accounting", UNKNOWN, f"no epsilon is claimed; the rest gives {runs.claim.follows():.2f}", "")
    follows = runs.claim.follows()
    if follows > runs.claim.epsilon * 1.02:
        said = f"claimed is epsilon {runs.claim.epsilon:g}; its own noise, rate and steps give {follows:.2f}"
        return LoopCheck("accounting", BROKEN, said, "2% of epsilon", 0.0, follows)
    return LoopCheck(
        "accounting",
        NO_FAULT,
        f"claimed is epsilon {runs.claim.epsilon:g}, which follows ({follows:.2f})",
        "2% of epsilon",
    )


# --- one record fewer -------------------------------------------------------------------------------------------------


def number(runs: Runs) -> LoopCheck:
    """One record fewer shows in nothing but its gradient: not in steps, learning rates, or the size of the noise."""
    a, b = runs.first, runs.fewer
    if runs.claim.public_size:
        return LoopCheck("number of records", UNKNOWN, "the claim says that it is public", "")
    would = "noise whose size differs by 1 in a thousand"
    if len(a.steps) != len(b.steps):
        said = f"{len(a.steps)} steps with {a.n} records, {len(b.steps)} with {b.n}"
        return LoopCheck("number of records", BROKEN, said, would, 0.0, math.inf)
    if any(x.rate != y.rate for x, y in zip(a.steps, b.steps, strict=True)):
        return LoopCheck(
            "number of records", BROKEN, f"other learning rates with {b.n} records than {a.n}", would, 0.0, math.inf
        )
    one, other = _median_scale(a), _median_scale(b)
    if not one or not other:
        return LoopCheck("number of records", UNKNOWN, "no noise whose size could be compared", would)
    free = len(a.steps[0].noise) * len(a.steps)
    error = math.sqrt(1 / free) * 1.25  # of the logarithm of two medians' ratio
    p = 2 * float(stats.norm.sf(abs(math.log(one / other)) / error))
    return _tested(
        "number of records", p,
        f"the noise is {other / one:.3f} times as large with {b.n} records as with {a.n}: it tells how many there are",
        f"noise, steps and rates are the same with {a.n} and {b.n} records", would,
        lambda: scale_epsilon(free, one, other, runs.claim.delta),
    )  # fmt: skip


def _median_scale(trace: Trace) -> float:
    return float(np.median([step.scale for step in trace.steps]))


def batch(runs: Runs) -> LoopCheck:
    """The size of a batch, which is secret, does not show in the size of the noise."""
    held = [(len(step.records), step.scale) for step in runs.noisy if step.records]
    sizes, scales = np.array(held, dtype=float).reshape(-1, 2).T
    name, would = "batch size stays secret", "noise divided by the size of its batch"
    if len(set(sizes)) < 2:
        return LoopCheck(name, UNKNOWN, "all batches had one size", would)
    x, y = np.log(sizes), np.log(scales)
    found = stats.linregress(x, y)
    p = float(found.pvalue) if abs(abs(found.slope) - 1) < 0.1 else 1.0
    return _tested(name, p, "the noise is divided by the number of records that a batch happens to have",
                   "the size of the noise does not follow that of the batch", would, _unbounded)  # fmt: skip


CHECKS: tuple[Callable[[Runs], LoopCheck], ...] = (
    sensitivity, clipped, kinds, noise, normal, fresh, rate, sampling, even, twice, steps, accounting, number, batch,
)  # fmt: skip
