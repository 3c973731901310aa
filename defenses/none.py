"""Plain fine-tuning: no privacy at all, what the private ways of training are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.training.variants import FineTuning


@dataclass(frozen=True)
class NoDefense(FineTuning):
    """Plain fine-tuning on packed blocks with AdamW: nothing is promised. learning_rate decays linearly to 0."""

    name: ClassVar[str] = "none"
