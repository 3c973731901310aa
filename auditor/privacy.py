"""`privacy.json`: what a privately trained model promises, beside its weights; and the claim a report makes of it.

Knows records of numbers and words; computes no epsilon.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from auditor import disk
from auditor.errors import AuditError
from auditor.types import ANY_ACCESS, Claim, from_json, to_json

FILE = "privacy.json"
NOMINAL = "if its scale were constant, the mean"  # of the epsilons that promise nothing, the one that papers print


@dataclass(frozen=True)
class PrivacyRecord:
    """One private training: its mechanism, what it promises and for whom. Epsilons in nats.

    epsilon is None where nothing is promised; `status` then says why, and `nominal` holds the numbers that some paper
    would print all the same, by what they would mean.
    """

    method: str
    epsilon: float | None
    delta: float
    status: str
    noise_multiplier: float  # sigma
    clip: float  # C: no unit moves the sum of gradients by more
    sampling_rate: float  # q
    steps: int  # T, as they were counted
    unit: str
    noise: Literal["secret", "seeded"]
    sampling: str = "poisson"
    adjacency: str = "add_remove"
    accountant: str = "dp-accounting PLD"
    epsilon_rdp: float | None = None  # the cross-check; at least epsilon
    nominal: dict[str, float] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = 1

    def claim(self) -> Claim | None:
        """The claim, spent in full by the training; None where nothing is promised."""
        if self.epsilon is None:
            return None
        return Claim(
            epsilon={self.adjacency: self.epsilon},
            delta=self.delta,
            relation=self.adjacency,
            unit=self.unit,
            queries=None,
            theorem=f"subsampled Gaussian mechanism, {self.steps:,} steps ({self.accountant})",
            status=self.status,
            access=ANY_ACCESS,
            decoding="any",
            spent_epsilon={self.adjacency: self.epsilon},
            details={
                "noise_multiplier": self.noise_multiplier,
                "clip": self.clip,
                "sampling_rate": self.sampling_rate,
                "steps": float(self.steps),
                **({} if self.epsilon_rdp is None else {"epsilon_by_rdp": self.epsilon_rdp}),
                **self.details,
            },
        )

    def notes(self) -> tuple[str, ...]:
        """What a reader must know beside the claim: sentences."""
        if self.epsilon is None:
            numbers = "; ".join(f"{what}: ε {value:.3g}" for what, value in self.nominal.items())
            return (f"{self.method}: {self.status}" + (f" (nominal, no guarantee: {numbers})" if numbers else ""),)
        if self.unit == "record":
            return ("the claim is for one record: a text that occurs k times is protected at the group size k only",)
        return ("the claim is for one user or group: for all of its records together",)


def write(folder: Path, record: PrivacyRecord) -> None:
    """Writes it whole or not at all."""
    disk.replace(folder / FILE, json.dumps(to_json(record), indent=1) + "\n", sync=True)


def read(folder: Path) -> PrivacyRecord | None:
    """What the folder's model promises; None where it does not say. Raises AuditError for another form."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AuditError(f"expected a privacy record in {str(path)!r}, got {type(error).__name__}") from None
    record: PrivacyRecord = from_json(PrivacyRecord, values, str(path))
    return record
