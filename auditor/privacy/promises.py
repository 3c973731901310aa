"""Read and write `privacy.json`: the promise of a privately trained model, stored with its weights.

This module also derives the claim in reports from this promise. It computes no epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from auditor.core.jsonable import read_record, write_json
from auditor.core.nouns import Claim

FILE = "privacy.json"
ANY_ACCESS = "any access, the weights included"
CANARIES = "gradient_canaries"  # key in `details`: number of planted canaries, if any
SENSITIVITY = "sensitivity"  # key in `details`: C with its rounding; the noise is sigma times this
# Keys in `details`: the settings by which rare records are clipped harder, with those of equal
# clipping, which a record leaves out.
RARITY_CLIPPING = {"kappa_least": 1.0, "lowest_perplexity": 0.0, "highest_perplexity": 0.0}
# Key of the nominal epsilon that papers print; it promises nothing.
NOMINAL = "if its scale were constant, the mean"


@dataclass(frozen=True)
class Mechanism:
    """A subsampled Gaussian mechanism, and for how many steps it was applied to the records."""

    noise_multiplier: float  # sigma
    sampling_rate: float  # q
    steps: int


@dataclass(frozen=True)
class PrivacyRecord:
    """Mechanism, promise and unit of one private training; epsilons are in nats.

    `epsilon` covers this training and the `earlier` trainings together. Without a promise, it is
    None, `status` gives the reason, and `nominal` has the epsilons that a paper might print anyway,
    keyed by their meaning.
    """

    method: str
    epsilon: float | None
    delta: float
    status: str
    noise_multiplier: float  # sigma
    # C: apart from rounding (`SENSITIVITY` in `details`), no unit changes the sum of gradients by
    # more.
    clip: float
    sampling_rate: float  # q
    steps: int  # T, as counted during training
    unit: str
    noise: Literal["secret", "seeded", "none"]
    sampling: str = "poisson"
    adjacency: str = "add_remove"
    accountant: str = "dp-accounting PLD"
    epsilon_rdp: float | None = None  # by RDP; epsilon is the smaller of this and PLD's
    # Promise of this model together with a second one trained in the same way on the same records.
    epsilon_twice: float | None = None
    earlier: tuple[Mechanism, ...] = ()  # earlier private trainings of the base model
    # n, a public number that determines q = batch / n and sigma; None in an older record.
    units: int | None = None
    # Whether the user set n (`-D units=`); otherwise it is the number found in the data.
    units_given: bool = False
    optimizer: str = ""  # "" in an older record
    nominal: dict[str, float] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    sound: bool = False  # whether the guarantee follows from the procedure
    schema_version: int = 2

    @property
    def nominal_epsilon(self) -> float | None:
        """Nominal epsilon that a paper would print."""
        return self.nominal.get(NOMINAL, next(iter(self.nominal.values()), None))

    def claim(self) -> Claim | None:
        """Return the claim, which the training has fully spent, or None if there is no promise."""
        if self.epsilon is None:
            return None
        counted = "" if self.units is None else f", on a public number of {self.unit}s"
        details = {
            "noise_multiplier": self.noise_multiplier,
            "clip": self.clip,
            "sampling_rate": self.sampling_rate,
            "steps": float(self.steps),
        }
        optional = {
            "units": self.units,
            "epsilon_by_rdp": self.epsilon_rdp,
            "epsilon_with_another_like_it": self.epsilon_twice,
        }
        for name, value in optional.items():
            if value is not None:
                details[name] = float(value)
        mechanism = f"subsampled Gaussian mechanism, {self.steps:,} steps{counted}"
        return Claim(
            epsilon={self.adjacency: self.epsilon},
            delta=self.delta,
            relation=self.adjacency,
            unit=self.unit,
            queries=None,
            theorem=f"{mechanism} ({self.accountant})",
            status=self.status,
            sound=self.sound,
            access=ANY_ACCESS,
            any_access=True,
            decoding="any",
            spent_epsilon={self.adjacency: self.epsilon},
            details=details | self.details,
        )

    def notes(self) -> tuple[str, ...]:
        """Return sentences that readers need in addition to the claim."""
        if self.epsilon is None:
            numbers = "; ".join(
                f"{mechanism}: ε {value:.3g}" for mechanism, value in self.nominal.items()
            )
            status_note = f"{self.method}: {self.status}" + (
                f" (nominal, no guarantee: {numbers})" if numbers else ""
            )
            return (status_note, *self._note_gradient_canaries())
        scope_note = "the claim is for one user or group: for all of its records together"
        if self.unit == "record":
            scope_note = (
                "the claim is for one record: a text that occurs k times is protected at the group "
                "size k only"
            )
        return (scope_note, *self._note_accounting_premises(), *self._note_gradient_canaries())

    def _note_accounting_premises(self) -> Iterator[str]:
        if self.units_given and self.units is not None:
            yield (
                f"sampling rate and noise are computed from {self.units:,} {self.unit}s, a "
                "number given as public"
            )
        elif self.units is not None:
            yield (
                f"the number of {self.unit}s, {self.units:,}, is taken as public: sampling rate "
                "and noise depend on it (-D units= names a public number instead)"
            )
        if self.earlier:
            yield (
                "its base was trained privately too: ε covers both, "
                f"{len(self.earlier) + 1} trainings, for a {self.unit} in all of them"
            )
        if self.epsilon_twice is not None:
            yield (
                f"another training on the same {self.unit}s adds to it: two models like this one "
                f"promise ε {self.epsilon_twice:.3g} together"
            )

    def _note_gradient_canaries(self) -> tuple[str, ...]:
        if not (planted := self.details.get(CANARIES)):
            return ()
        return (
            f"it was trained with {planted:,.0f} gradient canaries, units without text, each "
            "included by a fair coin: a model to audit, not to release",
        )


def list_training_differences(
    record: PrivacyRecord, control: PrivacyRecord
) -> Iterator[tuple[str, object, object]]:
    """Yield (setting, model's value, control's value) for each setting that must agree.

    The optimizer is omitted if a record lacks it, and clipping if the control does not clip.
    """
    for name in ("sampling_rate", "steps", "unit", "sampling"):
        yield name, getattr(record, name), getattr(control, name)
    if record.optimizer and control.optimizer:
        yield "optimizer", record.optimizer, control.optimizer
    for name in ("expected_batch", "learning_rate"):
        yield name, record.details.get(name), control.details.get(name)
    if math.isfinite(control.clip):
        yield "clip", record.clip, control.clip
        for name, usual in RARITY_CLIPPING.items():
            yield name, record.details.get(name, usual), control.details.get(name, usual)


def write_privacy_record(folder: Path, record: PrivacyRecord) -> None:
    """Write the record atomically."""
    write_json(folder / FILE, record, sync=True)


def read_privacy_record(folder: Path) -> PrivacyRecord | None:
    """Return the promise for the model in the folder, or None if there is no file.

    Raise AuditError if the file has a different structure.
    """
    return read_record(folder / FILE, PrivacyRecord, "the privacy record")
