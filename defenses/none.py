"""Plain fine-tuning: no privacy at all, what the private ways of training are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from auditor.errors import AuditError
from auditor.streams import generator
from auditor.training import Checkpoint, fit
from auditor.types import Trainer, TrainingJob


@dataclass(frozen=True)
class NoDefense(Trainer):
    """Plain fine-tuning on packed blocks with AdamW: nothing is promised. learning_rate decays linearly to 0."""

    name: ClassVar[str] = "none"
    epochs: int = 3
    batch: int = 16
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        for option in ("epochs", "batch"):
            if getattr(self, option) < 1:
                raise AuditError(f"expected {option} >= 1, got {getattr(self, option)}")
        if not self.learning_rate > 0:
            raise AuditError(f"expected learning_rate > 0, got {self.learning_rate}")

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        torch.manual_seed(job.seed)  # dropout
        model, checkpoint = job.load(), Checkpoint(job.out / "checkpoint.pt")
        fit(
            model,
            [record.tokens for record in job.records],
            epochs=self.epochs,
            rate=self.learning_rate,
            batch=self.batch,
            block=job.block,
            end=job.end,
            order=generator("train", job.seed),
            progress=lambda done: job.progress("training", done, self.epochs),
            checkpoint=checkpoint,
        )
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        checkpoint.clear()
        return ("nothing is promised: what this model learnt of a record, it may tell",)
