"""DP-SGD (Abadi et al. 2016), with Adam or plain SGD: per-unit clipping, Gaussian noise, Poisson batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.defenses.private_training import PrivateTraining


@dataclass(frozen=True)
class DpSgd(PrivateTraining):
    """Fine-tune with DP-SGD: each record's gradient clipped, Gaussian noise on their sum (Abadi et al. 2016)."""

    name: ClassVar[str] = "dp-sgd"
    title: ClassVar[str] = "DP-SGD"
    claims: ClassVar[str] = "(epsilon, delta) for one record (or user), under any access and decoding"
    promises: ClassVar[bool] = True
