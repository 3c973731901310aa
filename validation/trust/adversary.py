"""Search for distributions that break a defense's claim; report realised over claimed divergence.

    python -m validation.trust.adversary [--settings 24] [--starts 200] [--steps 80] [--seed 0]  (10 minutes)

Distributions of a few tokens are drawn at random, from mild to nearly certain, and the worst are
made worse (Nelder-Mead over their logits). `protect` serves each neighbour separately. PMixED's
released distribution is enumerated over all subsets of its members and must equal the one it
reports. Divergences are compared with the claim for one token at every claimed order, and the
exact delta of a few tokens with the whole claim, in both directions, in single and double
precision. For DP training, the exact delta of the Gaussian mechanism is used, if it has a formula,
at the reported epsilon. Exits with 1 if a claim that is called sound is exceeded; PMixED's
published accounting is known to be exceeded.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm
from torch import Tensor

from auditor.benchmarks.data.fixed_distributions import FixedDistribution, build_fixed_ensemble
from auditor.defenses.invisible_ink import InvisibleInk, InvisibleInkModel
from auditor.defenses.pmixed import PMixed
from auditor.defenses.pmixed_model import PMixedModel
from auditor.defenses.uniform_mixing import ANY_TWO, UniformMixing
from auditor.models.ensemble import Ensemble
from auditor.models.masked import MaskedModel
from auditor.plugins.defense import MaskedScenario, Prompt, Scenario
from auditor.privacy.accounting import (
    compute_bounded_range_rho,
    realised_pure_dp,
    realised_renyi,
)
from auditor.privacy.gaussian import compute_tightest_epsilon
from validation.harness import Page, run

Array = NDArray[np.float64]
# (cases, distributions, V) probabilities -> (cases,) realised over claimed
Ratios = Callable[[Tensor], Array]

# Relative tolerance: divergences of 1e-3 nats are computed from double-precision distributions.
_ROUNDING = 1e-6
# Tolerance in probability, between the reported distribution and the distribution of the draws.
_DISTRIBUTION = 1e-6
_SCALES = (1.0, 4.0, 10.0, 25.0, 60.0)  # of the logits


@dataclass(frozen=True)
class Effort:
    """The search effort: settings tried per claim, and random starts and Nelder-Mead steps per
    setting.
    """

    settings: int
    starts: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Claimed:
    """A claim of a defense. worst: returns the largest ratio of realised to claimed, and its
    setting.
    """

    defense: str
    promise: str
    sound: bool
    worst: Callable[[Effort], tuple[float, str]]


class ToldSetting:
    """A setting of a defense; `words` names its fields, except the last: whether in double
    precision.
    """

    words: ClassVar[tuple[str, ...]]

    def __str__(self) -> str:
        *values, double = vars(self).values()
        told = [f"{word} {value:,g}" for word, value in zip(self.words, values, strict=True)]
        return ", ".join([*told, "double" if double else "single"])


def most(ratios: Ratios, distributions: int, vocab_size: int, effort: Effort) -> float:
    """Return the largest ratio found among distributions (cases, distributions, vocab_size).

    Random starts of every scale come first, then Nelder-Mead from the worst.
    """
    rng = np.random.default_rng(effort.seed)
    scales = np.resize(_SCALES, effort.starts)[:, None]
    starts = rng.standard_normal((effort.starts, distributions * vocab_size)) * scales

    def at(logits: Array) -> Array:
        return ratios(
            torch.from_numpy(np.atleast_2d(logits)).view(-1, distributions, vocab_size).softmax(-1)
        )

    found = at(starts)
    options = {"maxfev": effort.steps}
    better = minimize(
        lambda x: -at(x)[0], starts[found.argmax()], method="Nelder-Mead", options=options
    )
    return max(float(found.max()), -float(better.fun))


def over_settings(
    settings: Sequence[Any], worst_of: Callable[[Any, Effort], float], effort: Effort
) -> tuple[float, str]:
    """Return the largest ratio over `effort.settings` settings, drawn without replacement, and its
    setting.
    """
    order = (
        np.random.default_rng(effort.seed).permutation(len(settings))[: effort.settings].tolist()
    )
    efforts = (dataclasses.replace(effort, seed=effort.seed + i) for i in order)
    return max(
        (worst_of(settings[i], own), str(settings[i]))
        for i, own in zip(order, efforts, strict=True)
    )


def delta_at(epsilon: float, p: Array, q: Array) -> Array:
    """Return the least delta, (cases,), at which p and q (cases, V) are epsilon-close both ways."""
    return np.maximum(
        *(np.maximum(a - math.exp(epsilon) * b, 0.0).sum(-1) for a, b in ((p, q), (q, p)))
    )


def either_way(log_p: Array, log_r: Array, order: float) -> Array:
    """Return the larger of the Renyi divergences in both directions, (cases,)."""
    return np.maximum(realised_renyi(log_p, log_r, order), realised_renyi(log_r, log_p, order))


def several(p: Array, tokens: int) -> Array:
    """Return the joint distribution (cases, V^tokens) of independent tokens from p (cases, V)."""
    many = p
    for _ in range(tokens - 1):
        many = (many[:, :, None] * p[:, None]).reshape(len(p), -1)
    return many


# --- PMixed ---


@dataclass(frozen=True)
class EnsembleSetting(ToldSetting):
    words: ClassVar = ("N", "alpha", "q", "T")
    members: int
    alpha: int
    q: float
    tokens: int
    double: bool


ENSEMBLE_SETTINGS = [
    EnsembleSetting(*values)
    for values in itertools.product(
        (1, 2, 3, 6), (2, 4, 8), (0.03, 0.5, 1.0), (1, 3, 1024), (True, False)
    )
]


def drawn(model: PMixedModel, distributions: Tensor) -> Array:
    """Return PMixED's output distribution (cases, V), enumerated over subsets of the members.

    distributions: (cases, 1 + N, V), the public one first.
    """
    logs = distributions.log()
    exact = distributions.double()
    members, distribution = distributions.shape[1] - 1, torch.zeros_like(exact[:, 0])
    weights = partial(model.projection.mixing_weights_within_radius, logs[:, 1:], logs[:, :1])
    by_size = [weights(float(radius)).unsqueeze(-1) for radius in model.radii[1:]]
    for inside in itertools.product((False, True), repeat=members):
        chosen, size = torch.tensor(inside), sum(inside)
        chance = model.q**size * (1 - model.q) ** (members - size)
        if size:
            mixed = by_size[size - 1] * exact[:, 1:] + (1 - by_size[size - 1]) * exact[:, :1]
            distribution += chance * mixed[:, chosen].mean(1)
        else:
            distribution += chance * exact[:, 0]
    return (distribution / distribution.sum(-1, keepdim=True)).numpy()


def released(defense: PMixed, distributions: Tensor, tokens: int) -> Array:
    """Return the distribution (cases, V) that `protect` serves.

    distributions: (cases, 1 + N, V), the public one first.
    """
    if distributions.shape[1] == 1:
        return distributions[:, 0].double().numpy()
    held = build_fixed_ensemble(*distributions.unbind(1))
    model = defense.protect(_scenario(held, tokens))
    assert isinstance(model, PMixedModel)
    distribution = drawn(model, distributions)
    says = (
        model.log_probs(torch.arange(len(distributions)).unsqueeze(-1), 1)[:, 0]
        .double()
        .exp()
        .numpy()
    )
    assert np.abs(says - distribution).max() <= _DISTRIBUTION, (
        "the distribution that is read is not the one drawn from"
    )
    return distribution


def _scenario(held: Ensemble, tokens: int) -> Scenario:
    return Scenario(held.public, held.public, held, tokens, 1)


def ensemble_ratio(defense: PMixed, setting: EnsembleSetting, relation: str) -> Ratios:
    """Return the ratio function of a PMixED claim.

    Its distributions are the public one, the members' and, for `replace`, one more; member 0
    changes.
    """
    case = _scenario(
        build_fixed_ensemble([0.5, 0.5], *[[0.5, 0.5]] * setting.members), setting.tokens
    )
    model, claim = defense.protect(case), defense.claim(case, setting.tokens)
    assert isinstance(model, PMixedModel) and model.promise is not None
    claimed = {
        order: rdp for (name, order), rdp in model.promise.query_rdp.items() if name == relation
    }
    epsilon = claim.epsilon.get(relation, claim.epsilon[claim.relation])

    def ratios(distributions: Tensor) -> Array:
        distributions = distributions if setting.double else distributions.float()
        public, mine, others, other = distributions.split([1, 1, setting.members - 1, 1], 1)
        changed = {"add_remove": [], "zero_out": [public], "replace": [other]}[relation]
        p = released(defense, torch.cat([public, mine, others], 1), setting.tokens)
        r = released(defense, torch.cat([public, *changed, others], 1), setting.tokens)
        with np.errstate(divide="ignore"):
            log_p, log_r = np.log(p), np.log(r)
        shares = [either_way(log_p, log_r, order) / rdp for order, rdp in claimed.items()]
        if setting.tokens <= 3:
            shares.append(
                delta_at(epsilon, several(p, setting.tokens), several(r, setting.tokens))
                / claim.delta
            )
        return np.max(shares, axis=0)

    return ratios


def worst_ensemble(
    options: dict[str, Any], relation: str, setting: EnsembleSetting, effort: Effort
) -> float:
    defense = PMixed(epsilon=16.0, alpha=setting.alpha, q=setting.q, **options)
    return most(ensemble_ratio(defense, setting, relation), setting.members + 2, 3, effort)


def ensembles() -> Iterator[Claimed]:
    for options, words, relations in (
        ({"adjacency": "zero_out"}, "set up for zero_out", ("zero_out", "replace")),
        ({"adjacency": "replace"}, "set up for replace", ("zero_out", "replace")),
        (
            {"adjacency": "add_remove"},
            "set up for add_remove",
            ("zero_out", "add_remove", "replace"),
        ),
        ({"accounting": "published"}, "as published", ("zero_out", "add_remove")),
    ):
        for relation in relations:
            of = partial(worst_ensemble, options, relation)
            yield Claimed(
                "pmixed",
                f"{relation}, {words}",
                "accounting" not in options,
                partial(over_settings, ENSEMBLE_SETTINGS, of),
            )


def overlapping(effort: Effort) -> tuple[float, str]:
    """Check that nothing is promised for a record in two of three shards, as two members depend on
    it.
    """
    held = build_fixed_ensemble([0.5, 0.5], *[[0.5, 0.5]] * 3)
    held.unit, held.shards = "record", [["a", "b"], ["a", "c"], ["d"]]
    claim = PMixed().claim(_scenario(held, 1024), 1024)
    assert math.isinf(claim.epsilon["replace"]) and claim.unit == "shard"
    return 0.0, f"nothing promised: {claim.status}"


# --- InvisibleInk ---


@dataclass(frozen=True)
class InkSetting(ToldSetting):
    words: ClassVar = ("B", "C", "tau", "top-k", "T")
    batch: int
    clip: float
    temperature: float
    top_k: int
    tokens: int
    double: bool


INK_SETTINGS = [
    InkSetting(*values)
    for values in itertools.product(
        (1, 2, 5), (0.01, 0.5, 5.0), (0.7, 1.1), (0, 2), (1, 3), (True, False)
    )
]


def ink_ratio(setting: InkSetting, relation: str) -> Ratios:
    """Return the ratio function of an InvisibleInk claim.

    Its distributions are the public one, the records' and, for `replace`, one more; record 0
    changes.
    """
    defense = InvisibleInk(
        clip=setting.clip, batch=setting.batch, temperature=setting.temperature, top_k=setting.top_k
    )
    records = tuple(Prompt(str(i), (i,), (i, i)) for i in range(setting.batch))
    scenario = Scenario(
        FixedDistribution([0.5, 0.5]),
        FixedDistribution([0.5, 0.5]),
        None,
        setting.tokens,
        1,
        prompts=records,
    )
    claim, model = defense.claim(scenario, 0), defense.protect(scenario)
    assert isinstance(model, InvisibleInkModel) and model.promise is not None
    spread = model.promise[relation]
    rho = compute_bounded_range_rho(spread)

    def ratios(distributions: Tensor) -> Array:
        distributions = distributions if setting.double else distributions.float()
        other = distributions[:, -1] if relation == "replace" else distributions[:, 0]
        changed = torch.cat([distributions[:, :1], other.unsqueeze(1), distributions[:, 2:-1]], 1)

        def served(parts: Tensor) -> Array:
            ink = InvisibleInkModel(build_fixed_ensemble(*parts.unbind(1)), model.ink, model.name)
            return ink.log_probs(torch.arange(len(parts)).unsqueeze(-1), 1)[:, 0].numpy()

        p, r = served(distributions[:, :-1]), served(changed)
        shares = [either_way(p, r, order) / (order * rho) for order in (1.1, 2, 8)]
        shares.append((realised_renyi(p, r, math.inf) + realised_renyi(r, p, math.inf)) / spread)
        both = (several(np.exp(logs), setting.tokens) for logs in (p, r))
        shares.append(delta_at(claim.epsilon[relation], *both) / claim.delta)
        return np.max(shares, axis=0)

    return ratios


def worst_ink(relation: str, setting: InkSetting, effort: Effort) -> float:
    return most(ink_ratio(setting, relation), setting.batch + 2, 3, effort)


def inks() -> Iterator[Claimed]:
    for relation in ("zero_out", "replace"):
        worst = partial(over_settings, INK_SETTINGS, partial(worst_ink, relation))
        yield Claimed("invisible-ink", f"{relation}, one record of a batch", True, worst)


# --- uniform mixing ---


@dataclass(frozen=True)
class MixingSetting(ToldSetting):
    words: ClassVar = ("weight",)
    weight: float
    double: bool


class FixedGaps(MaskedModel):
    """A masked model whose every masked token in text i has distribution i."""

    name, max_positions, device = "fixed", None, torch.device("cpu")

    def __init__(self, distributions: Tensor) -> None:
        self.distributions, self.vocab_size = distributions.log(), distributions.shape[-1]

    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        return self.distributions[:, None].expand(-1, positions.shape[1], -1)


def mixing_ratio(setting: MixingSetting, masked: bool, options: dict[str, Any]) -> Ratios:
    """Return the ratio function of a mixing claim for two private distributions and the public
    one.
    """
    defense = UniformMixing(weight=setting.weight, **options)

    def distribution_and_epsilon(target: Tensor, public: Tensor) -> tuple[Array, float]:
        cases = torch.arange(len(target)).unsqueeze(-1)
        if masked:
            filler, claim = defense.protect_masked(
                MaskedScenario(FixedGaps(target), FixedGaps(public), 1)
            )
            distribution = filler.log_probs(cases, torch.zeros_like(cases))
        else:
            scenario = Scenario(FixedDistribution(target), FixedDistribution(public), None, 1, 1)
            distribution, claim = (
                defense.protect(scenario).log_probs(cases, 1),
                defense.claim(scenario, 1),
            )
        return distribution[:, 0].double().numpy(), claim.epsilon[ANY_TWO]

    def ratios(distributions: Tensor) -> Array:
        one, other, public = (distributions if setting.double else distributions.float()).unbind(1)
        (p, epsilon), (r, _) = (
            distribution_and_epsilon(one, public),
            distribution_and_epsilon(other, public),
        )
        return realised_pure_dp(p, r) / epsilon

    return ratios


def worst_mixing(
    masked: bool, options: dict[str, Any], setting: MixingSetting, effort: Effort
) -> float:
    """Return the largest ratio for one setting.

    The search includes private models certain of different tokens with a uniform public model.
    """
    ratio, vocab_size = mixing_ratio(setting, masked, options), 4 if options else 50_257
    opposite = torch.full((1, 3, vocab_size), 1 / vocab_size, dtype=torch.float64)
    opposite[0, :2] = torch.eye(2, vocab_size)
    return max(most(ratio, 3, 4, effort), float(ratio(opposite)[0]))


def mixings() -> Iterator[Claimed]:
    settings = [
        MixingSetting(*values)
        for values in itertools.product((1e-6, 1e-3, 0.5, 0.9), (True, False))
    ]
    for masked in (False, True):
        for options in ({}, {"public_top_k": 2}, {"public_top_k": 2, "tail": "public"}):
            words = ", ".join(
                ["masked" if masked else "causal", *(f"{k}={v}" for k, v in options.items())]
            )
            worst = partial(over_settings, settings, partial(worst_mixing, masked, options))
            yield Claimed("uniform-mixing", f"any two models: {words}", True, worst)


# --- DP training ---


@dataclass(frozen=True)
class GaussianSetting:
    """A Gaussian mechanism: sigma, sampling rate and steps.

    The exact delta has a formula without sampling (q = 1), or for at most two steps.
    """

    sigma: float
    q: float
    steps: int

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}, q {self.q:g}, {self.steps:,} steps"


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return delta of N(mu, 1) against N(0, 1) (Balle and Wang 2018, Theorem 5)."""
    return float(
        norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    )


def one_step_delta(epsilon: float, sigma: float, q: float, removed: bool) -> float:
    """Return delta of one subsampled step.

    removed: the direction, from the data with the unit to the data without it.
    """
    # On the ratio of with to without, which rises with x.
    bound = math.exp(-epsilon if removed else epsilon)
    if bound <= 1 - q:
        return 0.0 if removed else 1 - math.exp(epsilon)
    edge = sigma**2 * math.log((bound - (1 - q)) / q) + 0.5
    tail = norm.cdf if removed else norm.sf
    without, there = tail(edge / sigma), tail((edge - 1) / sigma)
    with_it = (1 - q) * without + q * there
    pair = (without, with_it) if removed else (with_it, without)
    return float(pair[0] - math.exp(epsilon) * pair[1])


def exact_delta(epsilon: float, setting: GaussianSetting) -> float:
    """Return the larger delta of both directions; two steps need quadrature over the first."""
    sigma, q = setting.sigma, setting.q
    if q == 1:
        return gaussian_delta(epsilon, math.sqrt(setting.steps) / sigma)

    def of(removed: bool) -> float:
        if setting.steps == 1:
            return one_step_delta(epsilon, sigma, q, removed)

        def behind(x: float) -> float:
            without, there = norm.pdf(x, 0, sigma), norm.pdf(x, 1, sigma)
            loss = math.log((1 - q) + q * math.exp((2 * x - 1) / (2 * sigma**2)))
            mass = without if removed else (1 - q) * without + q * there
            return float(
                mass * one_step_delta(epsilon - (-loss if removed else loss), sigma, q, removed)
            )

        return float(
            quad(behind, -12 * sigma, 1 + 12 * sigma, limit=400, points=[0.0, 0.5, 1.0])[0]
        )

    return max(of(removed) for removed in (False, True))


GAUSSIANS = [
    *(
        GaussianSetting(s, 1.0, t)
        for s in (0.2, 0.5, 1.0, 4.0, 20.0)
        for t in (1, 100, 10_000)
        if t <= 1e4 * s * s
    ),
    *(GaussianSetting(s, q, t) for s in (0.5, 1.0, 3.0) for q in (1e-3, 0.05, 0.5) for t in (1, 2)),
]


def worst_training(setting: GaussianSetting, effort: Effort) -> float:
    delta = 1e-5
    epsilon, _ = compute_tightest_epsilon(setting.sigma, setting.q, setting.steps, delta)
    return exact_delta(epsilon, setting) / delta


def claims() -> list[Claimed]:
    """Return all claims."""
    training, how = (
        partial(over_settings, GAUSSIANS, worst_training),
        "the Gaussian mechanism as accounted",
    )
    return [
        *ensembles(),
        Claimed("pmixed", "record in two shards", True, overlapping),
        *inks(),
        *mixings(),
        *(
            Claimed(name, f"add_remove, record or user: {how}", True, training)
            for name in ("dp-sgd", "adp-sound")
        ),
    ]


def main(settings: int = 24, starts: int = 200, steps: int = 80, seed: int = 0) -> int:
    effort, page, exceeded = Effort(settings, starts, steps, seed), Page(), False
    page.head("defense", "promise", "realised / claimed", "verdict", "worst at")
    for row in claims():
        ratio, where = row.worst(effort)
        over = not ratio <= 1 + _ROUNDING
        exceeded |= over and row.sound
        verdict = ("EXCEEDED" if row.sound else "exceeded, as known") if over else "holds"
        page.row(row.defense, row.promise, f"{ratio:.6g}", verdict, where)
    return int(exceeded)


if __name__ == "__main__":
    raise SystemExit(run(main))
