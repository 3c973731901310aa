"""Query masked language models for the distributions of masked tokens.

There are no decoding rows, because a masked LM does not continue texts. Only plans of papers, and
defenses with `Defense.protect_masked`, accept such a model. Other modules choose the texts and the
masked positions.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.models.base import check_logits_finite
from auditor.models.configuration import max_positions
from auditor.models.consistency import SEED, compute_largest_distance
from auditor.models.loading import (
    DEFAULTS,
    load_tokenizer_if_present,
    translate_load_errors,
)
from auditor.models.self_check import AT_LOAD
from auditor.models.self_check_facts import compute_rounding_tolerance, list_tested_lengths
from auditor.models.weights import read_weights

_LONGEST = 1024  # tokens of the longest test text when a model is loaded


class MaskedModel(ABC):
    """A model that predicts masked tokens.

    Shapes: contexts are token ids (B, n); positions (B, m) are those of the m masked tokens in each
    context.
    """

    name: str
    vocab_size: int
    max_positions: int | None
    device: torch.device
    notes: tuple[str, ...] = ()  # facts on loading that its user must know

    @abstractmethod
    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        """Return the distribution of each masked token, (B, m, V) in nats.

        The model masks the tokens itself, so callers need not do so.
        """

    def token_log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        """Return the log-probability of the original token at each masked position, (B, m) nats."""
        hidden = contexts.to(self.device).gather(1, positions.to(self.device))
        return self.log_probs(contexts, positions).gather(-1, hidden.unsqueeze(-1)).squeeze(-1)


class HuggingFaceMaskedModel(MaskedModel):
    """A Hugging Face masked LM with a mask token, in eval mode, parameters frozen."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "model",
        notes: tuple[str, ...] = (),
    ) -> None:
        if tokenizer.mask_token_id is None:
            raise AuditError(
                f"expected a masked LM with a mask token, got {name!r}, whose tokenizer has none"
            )
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.mask = int(tokenizer.mask_token_id)
        self.name = name
        self.notes = notes
        head = model.get_output_embeddings()
        self.vocab_size = int(model.config.vocab_size)
        if head is not None:
            self.vocab_size = int(head.weight.shape[0])
        self.max_positions = max_positions(model)
        self.device = next(model.parameters()).device
        self._takes_mask = "attention_mask" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        contexts = contexts.to(self.device)
        positions = positions.to(self.device)
        model_inputs = {"input_ids": contexts.scatter(1, positions, self.mask)}
        # Without it XLM treats a padding token inside a text as the end of the text.
        if self._takes_mask:
            model_inputs["attention_mask"] = torch.ones_like(contexts)
        logits = self.model(**model_inputs).logits
        indices = positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        hidden = logits.gather(1, indices).float()
        check_logits_finite(hidden, self.name)
        return hidden.log_softmax(-1)


def check_masked_distribution(model: HuggingFaceMaskedModel) -> None:
    """Raise AuditError if the model's distributions on random tokens are inconsistent.

    The distribution of a masked token must be the same if its text is scored alone or in a batch.
    It must also depend on the tokens after the masked position. Texts of several lengths are
    tested: a short one, the longest one, and lengths just above those in the model's configuration,
    such as a window. Above such a length, the model may read texts differently.
    """
    noise = torch.Generator().manual_seed(SEED)
    special = torch.tensor(model.tokenizer.all_special_ids)
    ids = torch.arange(min(model.vocab_size, len(model.tokenizer)))
    ids = ids[~torch.isin(ids, special)]
    max_length = min(model.max_positions or _LONGEST, _LONGEST)
    lengths = {AT_LOAD}
    for mark in list_tested_lengths(model.model.config, max_length):
        lengths |= {mark + 3, max_length}
    got = f"{model.name!r} ({model.model.config.model_type})"
    kind = f"expected a masked LM, got {got}, whose distribution of a hidden token"
    for length in sorted({min(length, max_length) for length in lengths}):
        texts = ids[torch.randint(len(ids), (3, length), generator=noise)]
        gap = torch.full((3, 1), length // 2 - 1)
        texts[1] = texts[0]  # except for the token after the gap
        texts[1, length // 2] = ids[ids != texts[0, length // 2]][0]
        distribution = model.log_probs(texts, gap)
        rounding = compute_rounding_tolerance(model.model, distribution)
        distance = compute_largest_distance(model.log_probs(texts[:1], gap[:1]), distribution[:1])
        if distance > rounding:
            raise AuditError(
                f"{kind} in a text of {length} changes by {distance:.2g} nats when it is scored "
                "alone"
            )
        if compute_largest_distance(distribution[1], distribution[0]) <= rounding:
            raise AuditError(f"{kind} does not depend on the tokens after it")


def load_masked(name: str, options: LoadingOptions = DEFAULTS) -> HuggingFaceMaskedModel:
    """Load a masked LM from a local folder or hub id.

    Raise AuditError if there is no masked LM, if it has no mask token, or if its distributions are
    inconsistent (`check_masked_distribution`).
    """
    with translate_load_errors(name, "masked LM", options):
        if (Path(name) / "adapter_config.json").is_file():
            raise AuditError(f"expected a masked LM, got {name!r}, an adapter of a causal one")
        model, notes = read_weights("masked", name, options)
        tokenizer = load_tokenizer_if_present(name, options)
        if tokenizer is None:
            raise AuditError(
                f"expected a masked LM with its tokenizer, got {name!r}, which has none"
            )
        target = HuggingFaceMaskedModel(model, tokenizer, name, notes)
        check_masked_distribution(target)
        return target
