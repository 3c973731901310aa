"""Fine-tuning with the embeddings frozen: no vector of a rare word moves towards the record that it stood in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from auditor.plugins.trainer import TrainingJob
from auditor.training.variants import Variant


@dataclass(frozen=True)
class FreezeEmbeddings(Variant):
    """Fine-tune all but the embeddings on the same data, and no claim; `full` is its control.

    Where the model's head is tied to its embeddings they are one matrix, so that the head is frozen too, and it says
    so. An adapter leaves embeddings frozen anyway: --lora is refused.
    """

    name: ClassVar[str] = "freeze-embeddings"
    title: ClassVar[str] = "Frozen embeddings"
    whole: ClassVar[bool] = True

    def to_train(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        model = job.load()
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        embeddings.requires_grad_(False)
        frozen = sum(p.numel() for p in embeddings.parameters())
        tied = head is not None and head.weight is embeddings.weight
        also = ", and with them the head, which is tied to them" if tied else ""
        return model, (f"the embeddings are frozen{also}: {frozen:,} of {model.num_parameters():,} parameters",)
