"""Fine-tune without privacy: all weights, all but the embeddings, or an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from auditor.plugins.options import Count
from auditor.plugins.trainer import TrainingJob
from auditor.training.members import Layers, LoraAdapterRecipe, add_lora_adapter
from auditor.training.variants import FineTuning, Variant


@dataclass(frozen=True)
class NoDefense(FineTuning):
    """Fine-tune on packed blocks with AdamW, without any privacy claim.

    The learning rate decays linearly from learning_rate to 0.
    """

    name = "none"


@dataclass(frozen=True)
class Full(Variant):
    """Fine-tune every parameter: the control for `lora` and `freeze-embeddings`.

    This training makes no privacy claim.
    """

    name = "full"
    title = "Full fine-tuning"
    whole = True


@dataclass(frozen=True)
class FreezeEmbeddings(Variant):
    """Fine-tune all weights but the embeddings on the same data; `full` is the control.

    This training makes no privacy claim. If the model's head is tied to its embeddings, the head is
    frozen too, and a note says so. --lora is rejected, because adapters leave the embeddings frozen
    anyway.
    """

    name = "freeze-embeddings"
    title = "Frozen embeddings"
    whole = True

    def prepare_model(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        model = job.load()
        embeddings = model.get_input_embeddings()
        head = model.get_output_embeddings()
        embeddings.requires_grad_(False)
        # A tied matrix counts once here, as in `num_parameters`.
        n_frozen = sum(p.numel() for p in embeddings.parameters())
        layers = "the embeddings are frozen"
        if head is not None and head.weight is embeddings.weight:
            layers += ", and with them the head, which is tied to them"
        return model, (f"{layers}: {n_frozen:,} of {model.num_parameters():,} parameters",)


@dataclass(frozen=True)
class Lora(Variant):
    """Fine-tune a LoRA adapter (Hu et al. 2022) on the same data; `full` is the control.

    This training makes no privacy claim.

    rank, alpha: the adapter's rank and scale.
    layers: what to adapt, the `attention` projection or `all` linear layers.
    """

    name = "lora"
    title = "LoRA"
    adapters = True
    whole = True
    rank: Count = 8
    alpha: Count = 16
    layers: Layers = "all"

    def prepare_model(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        model = add_lora_adapter(job.load(), LoraAdapterRecipe(self.rank, self.alpha, self.layers))
        n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # `num_parameters` includes the adapter.
        share = n_trained / (model.num_parameters() - n_trained)
        size = f"{n_trained:,} parameters, {share:.1%} of the model's"
        return model, (f"an adapter of rank {self.rank}: {size}",)
