"""What a private training says of itself: noise, clipping, sampling, steps, and the epsilon that
follows."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from auditor.core.errors import AuditError
from auditor.privacy import gaussian

# of the accountant, nats: at 3,000 steps epsilon is a two-thousandth higher than in cells of 1e-4
_CELL = 1e-3
SAMPLING = ("poisson", "shuffled", "allocation")


@dataclass(frozen=True)
class LoopClaim:
    """One training's claim, for one record added or removed.

    noise_multiplier: the noise's standard deviation over the clipping norm; max_grad_norm: the
    clipping norm of one record's gradient; sample_rate: the probability that a step reads a given
    record; steps: updates of the weights;
    epsilon: at delta, what is told to others; None: whatever follows from the rest. sampling: how a
    batch is drawn; `allocation`: each record in so many steps of a pass as the rate says, chosen at
    random for it alone.
    public_size: the number of records is no secret (epsilon then holds for one record replaced by
    an empty one).
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    steps: int
    delta: float
    epsilon: float | None = None
    sampling: str = "poisson"
    public_size: bool = False

    def __post_init__(self) -> None:
        for name in (
            "noise_multiplier",
            "max_grad_norm",
            "sample_rate",
            "steps",
            "delta",
            "epsilon",
        ):
            # Abstract classes: numpy's numbers are of these too.
            kind = numbers.Integral if name == "steps" else numbers.Real
            value = getattr(self, name)
            if not isinstance(value, kind) and (name, value) != ("epsilon", None):
                what = "whole number" if name == "steps" else "number"
                raise AuditError(f"expected a claim's {name} to be a {what}, got {value!r}")
        for name in ("noise_multiplier", "max_grad_norm"):
            # `not a <= x` and not `x < a`, here and below: NaN is refused as well.
            if not 0 <= getattr(self, name) < math.inf:
                raise AuditError(
                    f"expected a claim's {name} of at least 0, got {getattr(self, name)!r}"
                )
        for name in ("sample_rate", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise AuditError(
                    f"expected a claim's {name} above 0 and at most 1, got {getattr(self, name)!r}"
                )
        if self.steps < 1:
            raise AuditError(f"expected a claim's steps of at least 1, got {self.steps!r}")
        if self.epsilon is not None and not self.epsilon >= 0:
            raise AuditError(f"expected a claim's epsilon of at least 0, got {self.epsilon!r}")
        if self.sampling not in SAMPLING:
            raise AuditError(
                f"expected a claim's sampling among {', '.join(SAMPLING)}, got {self.sampling!r}"
            )

    @classmethod
    def from_stated_claim(cls, given: Any, with_epsilon: bool = True) -> Self:
        """A claim as it is stated: one of these, or a mapping of its fields; or (model, claim).
        Raises AuditError.

        `engine` in a mapping: Opacus's engine, whose accountant says all that the mapping does not.
        with_epsilon: its epsilon too, which takes it a second.
        """
        if isinstance(given, tuple) and len(given) == 2:
            given = given[1]
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping) and "engine" in given:
            own = {name: value for name, value in given.items() if name != "engine"}
            delta = own.get("delta") if with_epsilon else None
            given = {**_claim_from_opacus_accountant(given["engine"], delta), **own}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
        if not isinstance(given, Mapping):
            raise AuditError(
                "expected `train` to return (model, claim), a claim being a mapping with "
                f"{', '.join(needed)}; got {type(given).__name__}"
            )
        if unknown := sorted(set(given) - set(fields)):
            raise AuditError(
                f"a claim has no {', '.join(map(repr, unknown))}; it has {', '.join(fields)}"
            )
        if missing := [name for name in needed if name not in given]:
            raise AuditError(
                f"expected a claim with {', '.join(needed)}; {', '.join(missing)} is missing"
            )
        return cls(**given)

    def implied_epsilon(self, quick: bool = False) -> float:
        """The epsilon that the claim's own noise, rate, steps and sampling give at its delta.
        quick: some 10% above it.

        Shuffled batches hide no record among the others: each pass over the data is one step that
        reads all of it. So does allocation here, though it hides more than that: this is then an
        upper bound of what follows.
        """
        rate, steps = self.sample_rate, self.steps
        if self.sampling != "poisson":
            # Rounded first: a product just above a whole number (100 * 0.07) would be one pass too
            # many.
            rate, steps = 1.0, math.ceil(round(steps * rate, 6))
        if quick and self.noise_multiplier > 0:
            return gaussian.quick_rdp_epsilon(self.noise_multiplier, rate, steps, self.delta)
        return epsilon_of_claimed_noise_and_steps(self.noise_multiplier, rate, steps, self.delta)


def _claim_from_opacus_accountant(engine: Any, delta: Any) -> dict[str, Any]:
    """What the accountant of an Opacus engine counted: its noise, rate and steps, and the epsilon
    that it tells."""
    history = getattr(getattr(engine, "accountant", None), "history", None)
    if not history:
        raise AuditError(
            "expected a claim's engine to be an Opacus engine that counted steps, got "
            f"{type(engine)!r}"
        )
    if len(history) > 1:  # Opacus counts steps in a row of one noise and one rate as one entry
        kinds = "; ".join(
            f"{steps} of noise {noise:g} at rate {rate:.3g}" for noise, rate, steps in history
        )
        raise AuditError(
            "expected steps of one noise and one sampling rate in the engine's accountant, got "
            f"{kinds}"
        )
    ((noise, rate, steps),) = history
    found = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps}
    return found if delta is None else {**found, "epsilon": float(engine.get_epsilon(delta))}


def epsilon_of_claimed_noise_and_steps(
    noise: float, rate: float, steps: int, delta: float
) -> float:
    """Epsilon of the Poisson-subsampled Gaussian mechanism, one record added or removed; infinite
    without noise."""
    if not noise > 0:
        return math.inf
    return gaussian.epsilon_by_tightest_accountant(noise, rate, steps, delta, cell=_CELL)[0]
