"""Plain fine-tuning: no privacy at all, what the private ways of training are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from auditor.core.errors import AuditError
from auditor.core.streams import generator
from auditor.plugins.trainer import Trainer, TrainingJob
from auditor.training import masks
from auditor.training.finetune import check_schedule, fit


@dataclass(frozen=True)
class NoDefense(Trainer):
    """Plain fine-tuning on packed blocks with AdamW: nothing is promised. learning_rate decays linearly to 0."""

    name: ClassVar[str] = "none"
    epochs: int = 3
    batch: int = 16
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise AuditError(f"expected batch >= 1, got {self.batch}")
        check_schedule(self.epochs, self.learning_rate)

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        torch.manual_seed(job.seed)  # dropout
        model = job.load()
        fit(
            model,
            [masks.sequence(record) for record in job.records],
            epochs=self.epochs,
            rate=self.learning_rate,
            batch=self.batch,
            block=job.block,
            end=job.end,
            order=generator("train", job.seed),
            progress=lambda done: job.progress("training", done, self.epochs),
            checkpoint=job.checkpoint,
        )
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        return ("nothing is promised: what this model learnt of a record, it may tell",)
