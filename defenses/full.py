"""Full fine-tuning: what training fewer parameters is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.training.variants import Variant


@dataclass(frozen=True)
class Full(Variant):
    """Fine-tune every parameter on the same data: the control of `lora` and `freeze-embeddings`, and no claim."""

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "Full fine-tuning"
    whole: ClassVar[bool] = True
