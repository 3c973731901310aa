"""LoRA (Hu et al. 2022) as a defense that people have without knowing: fewer parameters hold less of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from auditor.core.errors import AuditError
from auditor.plugins.trainer import TrainingJob
from auditor.training.members import Adapter, Layers, with_adapter
from auditor.training.variants import Variant


@dataclass(frozen=True)
class Lora(Variant):
    """Fine-tune a low-rank adapter on the same data, and no claim; `full` is its control (LoRA, Hu et al. 2022).

    rank, alpha: of the adapter; layers: on the `attention` projection, or on `all` linear layers.
    """

    name: ClassVar[str] = "lora"
    title: ClassVar[str] = "LoRA"
    adapters: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    rank: int = 8
    alpha: int = 16
    layers: Layers = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("rank", "alpha"):
            if getattr(self, option) < 1:
                raise AuditError(f"expected {option} >= 1, got {getattr(self, option)}")

    def to_train(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        model = with_adapter(job.load(), Adapter(self.rank, self.alpha, self.layers))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        share = trained / (model.num_parameters() - trained)
        return model, (f"an adapter of rank {self.rank}: {trained:,} parameters, {share:.1%} of the model's",)
