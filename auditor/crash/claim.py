"""Read the privacy claim of a training: noise, clipping, sampling, steps and epsilon."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from auditor.core.errors import AuditError
from auditor.privacy import gaussian

# cell width of the accountant, nats: at 3,000 steps epsilon is 0.05% higher than with cells of 1e-4
_CELL = 1e-3
SAMPLING = ("poisson", "shuffled", "allocation")


@dataclass(frozen=True)
class LoopClaim:
    """State the privacy claim of one training, for one record added or removed.

    noise_multiplier: standard deviation of the noise over the clipping norm.
    max_grad_norm: clipping norm of a record's gradient.
    sample_rate: probability that a step reads a given record.
    steps: number of updates of the weights.
    epsilon: the reported epsilon at delta; if None, computed from the other fields.
    sampling: how a batch is drawn, one of `SAMPLING`. Under `allocation`, each record joins a
        random set of steps in each pass, as many as the rate implies, independently of other
        records.
    public_size: whether the number of records is public; epsilon then holds for replacing one
        record by an empty record.
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
        for name in ("noise_multiplier", "max_grad_norm", "sample_rate", "delta", "epsilon"):
            # numbers.Real also includes numpy's numbers, which JSON and the accountant refuse.
            value = getattr(self, name)
            if isinstance(value, numbers.Real):
                object.__setattr__(self, name, float(value))
            elif (name, value) != ("epsilon", None):
                raise AuditError(f"expected a claim's {name} to be a number, got {value!r}")
        if not isinstance(self.steps, numbers.Integral):
            raise AuditError(f"expected a claim's steps to be a whole number, got {self.steps!r}")
        object.__setattr__(self, "steps", int(self.steps))
        for name in ("noise_multiplier", "max_grad_norm"):
            # `not a <= x` instead of `x < a`, here and below, also rejects NaN.
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
    def from_stated_claim(cls, claim_or_pair: Any, with_epsilon: bool = True) -> Self:
        """Build a claim from a LoopClaim, a mapping of its fields, or a pair (model, claim).

        A mapping may have the key `engine`, an Opacus engine whose accountant supplies missing
        fields. with_epsilon: whether to read the engine's epsilon too, which takes about a second.
        Raise AuditError if the claim is invalid.
        """
        if isinstance(claim_or_pair, tuple) and len(claim_or_pair) == 2:
            claim_or_pair = claim_or_pair[1]
        if isinstance(claim_or_pair, cls):
            return claim_or_pair
        if isinstance(claim_or_pair, Mapping) and "engine" in claim_or_pair:
            stated = dict(claim_or_pair)
            delta = stated.get("delta") if with_epsilon else None
            claim_or_pair = _read_opacus_claim(stated.pop("engine"), delta) | stated
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        needed = []
        for name, default in fields.items():
            if default is dataclasses.MISSING:
                needed.append(name)
        if not isinstance(claim_or_pair, Mapping):
            raise AuditError(
                "expected `train` to return (model, claim), a claim being a mapping with "
                f"{', '.join(needed)}; got {type(claim_or_pair).__name__}"
            )
        if unknown := sorted(set(claim_or_pair) - set(fields)):
            raise AuditError(
                f"a claim has no {', '.join(map(repr, unknown))}; it has {', '.join(fields)}"
            )
        if missing := [name for name in needed if name not in claim_or_pair]:
            raise AuditError(
                f"expected a claim with {', '.join(needed)}; {', '.join(missing)} is missing"
            )
        return cls(**claim_or_pair)

    def compute_implied_epsilon(self, quick: bool = False) -> float:
        """Return the epsilon that the claim's noise, rate, steps and sampling imply.

        quick: True to return a value that is about 10% higher, but in less time. Shuffled batches
        do not hide a record among others, so each pass counts as one step on all data. Allocation
        is counted likewise; because it hides records better, this is an upper bound.
        """
        rate = self.sample_rate
        steps = self.steps
        if self.sampling != "poisson":
            # Round first: a product just above a whole number (100 * 0.07) would add a pass.
            rate, steps = 1.0, math.ceil(round(steps * rate, 6))
        if quick and self.noise_multiplier > 0:
            return gaussian.compute_quick_rdp_epsilon(
                self.noise_multiplier, rate, steps, self.delta
            )
        return compute_claimed_epsilon(self.noise_multiplier, rate, steps, self.delta)


def _read_opacus_claim(engine: Any, delta: Any) -> dict[str, Any]:
    """Return the noise, rate, steps and epsilon of an Opacus engine's accountant."""
    history = getattr(getattr(engine, "accountant", None), "history", None)
    if not history:
        raise AuditError(
            "expected a claim's engine to be an Opacus engine that counted steps, got "
            f"{type(engine)!r}"
        )
    if len(history) > 1:  # Opacus merges consecutive steps of one noise and one rate into one entry
        kinds = "; ".join(
            f"{steps} of noise {noise:g} at rate {rate:.3g}" for noise, rate, steps in history
        )
        raise AuditError(
            "expected steps of one noise and one sampling rate in the engine's accountant, got "
            f"{kinds}"
        )
    ((noise, rate, steps),) = history
    fields = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps}
    if delta is not None:
        fields["epsilon"] = float(engine.get_epsilon(delta))
    return fields


def compute_claimed_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return epsilon of a Poisson-subsampled Gaussian mechanism if one record is added or removed.

    Return infinity if the noise is 0.
    """
    if not noise > 0:
        return math.inf
    return gaussian.compute_tightest_epsilon(noise, rate, steps, delta, cell=_CELL)[0]
