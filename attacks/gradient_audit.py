"""Bound epsilon from below by canaries' gradients, as a private training releases them.

The attacker is white-box: they have every noisy sum of gradients and each record's gradient. An
attacker who has only the model learns less. A claim that holds for any access also covers the
white-box attacker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scipy.special import gammaincinv

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Audited, Measurement
from auditor.plugins.probe import DELTA, Observed, Probe, mask_members, value_column
from auditor.plugins.view import View
from auditor.statistics.audited import audit_epsilon_bounds, audit_measurements, plan_epsilon_audit
from auditor.statistics.distributions import compute_binomial_sf

# Fields of `GradientCanaries`: records of the steps, to compare with the accounting.
_STEPS = (
    "steps",
    "releases",
    "drawn",
    "sampling_rate",
    "unevenness",
    "noise_values",
    "noise_size",
    "noise_repeated",
)
_FALSE_ALARM = 1e-9  # false alarm rate for correctly reported steps
_SAME = 0.9  # correlation of two steps' noise, at 64 coordinates: by chance less than once in 10^20
_ENOUGH = 48  # fewest coordinates: with fewer, two steps may agree by chance


@dataclass(frozen=True)
class GradientAudit(Probe):
    """Bound epsilon from below by canaries in the gradients (white-box, so the bound is tight).

    The model must have been trained with such canaries (`audit train dp-sgd -D
    gradient_canaries=1000`). A built-in lab inserts 1,000 of them if the run has this probe.
    delta: the bound's delta; 0 takes the training's delta, or 1e-5 if the training has none.
    score: `likelihood` is the likelihood ratio of each step under the mechanism that the training
    reports. `sum` is the plain sum over the steps.
    """

    name = "gradient-audit"
    page = "how-to/audit-an-epsilon"
    title = "Gradient audit"
    measures = "epsilon"
    needs = ("training",)
    of = "own"
    delta: float = 0.0
    score: Literal["likelihood", "sum"] = "likelihood"

    def __post_init__(self) -> None:
        if not 0 <= self.delta < 1:
            raise AuditError(f"expected delta in [0, 1), got {self.delta:g}")

    def textless_subjects(self, view: View) -> tuple[Secret, ...]:
        coins = view.recorded_gradient_canaries().included
        return tuple(
            Secret(f"gradient-{i:0{len(str(len(coins) - 1))}d}", (), (), int(coin), member=coin)
            for i, coin in enumerate(coins)
        )

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        canaries = view.recorded_gradient_canaries()
        ids = {secret.id for secret in secrets}
        if self.score == "likelihood":
            scores = canaries.scores
        else:
            scores = canaries.sums
        for secret, score in zip(self.textless_subjects(view), scores, strict=True):
            if secret.id in ids:
                yield Observation(secret.id, {"score": score})

    def facts(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, float]:
        canaries = view.recorded_gradient_canaries()
        terms = {
            "delta": self.delta or canaries.delta or DELTA,
            "per_user": float(canaries.unit == "user"),
        }
        steps = {name: float(getattr(canaries, name)) for name in _STEPS}
        return {**terms, **steps, "canaries": float(len(canaries.scores))}

    def epsilon_lower_bounds(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Audited, ...]:
        facts = observations.facts
        scores = value_column(observations, "score")
        unit = "user" if facts["per_user"] else "record"
        # the reported sampling
        sampling = (
            facts["sampling_rate"],
            int(facts["steps"]),
        )
        try:
            bounds = audit_epsilon_bounds(
                scores, mask_members(secrets), facts["delta"], sampling=sampling
            )
        except AuditError as error:  # uninformative scores concern only this row: the run continues
            raise NotApplicable(str(error)) from error
        return tuple(replace(audit, unit=unit) for audit in bounds)

    def plan_audit(self, view: View, secrets: Sequence[Secret]) -> Audited:
        canaries = view.recorded_gradient_canaries()
        sampling = (canaries.sampling_rate, canaries.steps)
        delta = self.facts(view, secrets, ())["delta"]
        return plan_epsilon_audit(len(secrets), delta, sampling=sampling)

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        return audit_measurements(self.epsilon_lower_bounds(secrets, observations))

    def claim_violations(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[str, ...]:
        return tuple(_describe_accounting_faults(observations.facts))

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        inside = sum(secret.member for secret in secrets)
        return (
            f"{len(secrets):,} gradient canaries, {inside:,} of them in the data by fair coins: "
            "the auditor sees every noisy sum of the training, and what the records added to it",
        )


def _describe_accounting_faults(counts: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for each observed value that contradicts the training's accounting.

    counts: observed values about releases, sampling and noise, keyed by name.
    """
    steps, releases, values, size = (
        counts[name] for name in ("steps", "releases", "noise_values", "noise_size")
    )
    if releases > steps:
        yield (
            f"the training released {releases:,.0f} noisy sums, and {steps:,.0f} are accounted for"
        )
    draws = counts["canaries"] * releases
    rate = counts["sampling_rate"]
    # P[X >= drawn], X ~ Binomial(draws, rate): `sf` is strictly above.
    if compute_binomial_sf(counts["drawn"] - 1, draws, rate) < _FALSE_ALARM:
        yield (
            f"units were drawn at a rate of {counts['drawn'] / draws:.3g}, and {rate:.3g} is "
            "accounted for"
        )
    # Below -z with a probability of at most exp(-z^2 / 2) (Maurer 2003, Theorem 2.1).
    if math.exp(-(min(0.0, counts["unevenness"]) ** 2) / 2) < _FALSE_ALARM:
        yield "units were drawn too evenly for Poisson sampling, which the claim assumes"
    # The squares of `values` noise values over the claimed variance add up to a chi-squared
    # variable.
    if values and values * size**2 < 2 * gammaincinv(values / 2, _FALSE_ALARM):
        yield (
            f"the noise has {size:.3g} of the claimed standard deviation, over {values:,.0f} of "
            "its values"
        )
    # What rounding leaves of steps without noise may be alike, too.
    elif values >= _ENOUGH * releases and counts["noise_repeated"] > _SAME:
        yield "two steps have the same noise: their difference contains none"
