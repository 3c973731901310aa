"""Fine-tuning on the same data without any privacy: of all parameters, all but the embeddings, or an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from auditor.plugins.options import require_options_at_least
from auditor.plugins.trainer import TrainingJob
from auditor.training.members import Layers, LoraAdapterRecipe, add_lora_adapter
from auditor.training.variants import FineTuning, Variant


@dataclass(frozen=True)
class NoDefense(FineTuning):
    """Plain fine-tuning on packed blocks with AdamW: nothing is promised. learning_rate decays linearly to 0."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True)
class Full(Variant):
    """Fine-tune every parameter on the same data: the control of `lora` and `freeze-embeddings`, and no claim."""

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "Full fine-tuning"
    whole: ClassVar[bool] = True


@dataclass(frozen=True)
class FreezeEmbeddings(Variant):
    """Fine-tune all but the embeddings on the same data, and no claim; `full` is its control.

    Where the model's head is tied to its embeddings they are one matrix, so that the head is frozen too, and it says
    so. An adapter leaves embeddings frozen anyway: --lora is refused.
    """

    name: ClassVar[str] = "freeze-embeddings"
    title: ClassVar[str] = "Frozen embeddings"
    whole: ClassVar[bool] = True

    def prepare_model(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        model = job.load()
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        embeddings.requires_grad_(False)
        # A tied matrix counts once, here and in `num_parameters`.
        frozen = sum(p.numel() for p in embeddings.parameters())
        tied = head is not None and head.weight is embeddings.weight
        also = ", and with them the head, which is tied to them" if tied else ""
        return model, (f"the embeddings are frozen{also}: {frozen:,} of {model.num_parameters():,} parameters",)


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
        require_options_at_least(self, 1, "rank", "alpha")

    def prepare_model(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        model = add_lora_adapter(job.load(), LoraAdapterRecipe(self.rank, self.alpha, self.layers))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        share = trained / (model.num_parameters() - trained)  # it counts the adapter's too
        return model, (f"an adapter of rank {self.rank}: {trained:,} parameters, {share:.1%} of the model's",)
