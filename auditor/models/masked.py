"""Masked language models: what a sentence with some tokens hidden may be asked.

A separate small type: it fills gaps and continues nothing, so there are no decoding rows. Only the
papers' plans and defenses that say so (`Defense.protect_masked`) accept one. Knows nothing of
texts, masking shares or files.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.models.base import check_logits_finite
from auditor.models.configuration import max_positions
from auditor.models.consistency import SEED, compute_largest_distance
from auditor.models.loading import (
    DEFAULTS,
    load_tokenizer_if_present,
    translating_model_load_errors,
)
from auditor.models.self_check import AT_LOAD
from auditor.models.self_check_facts import rounding_tolerance, text_lengths_to_test
from auditor.models.weights import read_weights

_LONGEST = 1024  # tokens of a text that a model is tried on when it is loaded


class MaskedModel(ABC):
    """Fills gaps. Shapes: contexts (B, n) token ids; positions (B, m), where each context is
    masked: m gaps each."""

    name: str
    vocab_size: int
    max_positions: int | None
    device: torch.device
    notes: tuple[str, ...] = ()  # what its user must know of how it was loaded

    @abstractmethod
    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        """(B, m, V): the distribution in nats of each hidden token. The model hides them: no caller
        can forget to."""

    def token_log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        """(B, m): the log-probability in nats of each token that was hidden."""
        hidden = contexts.to(self.device).gather(1, positions.to(self.device))
        return self.log_probs(contexts, positions).gather(-1, hidden.unsqueeze(-1)).squeeze(-1)


class HuggingFaceMaskedModel(MaskedModel):
    """Any Hugging Face masked LM whose tokenizer has a mask token, in eval mode, parameters
    frozen."""

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
        self.name, self.notes = name, notes
        head = model.get_output_embeddings()
        self.vocab_size = (
            int(head.weight.shape[0]) if head is not None else int(model.config.vocab_size)
        )
        self.max_positions = max_positions(model)
        self.device = next(model.parameters()).device
        self._takes_mask = "attention_mask" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        contexts, positions = contexts.to(self.device), positions.to(self.device)
        read = {"input_ids": contexts.scatter(1, positions, self.mask)}
        if (
            self._takes_mask
        ):  # else XLM takes a padding token that a text spells out for the end of the text
            read["attention_mask"] = torch.ones_like(contexts)
        logits = self.model(**read).logits
        wanted = positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        hidden = logits.gather(1, wanted).float()
        check_logits_finite(hidden, self.name)
        return hidden.log_softmax(-1)


def check_masked_distribution(model: HuggingFaceMaskedModel) -> None:
    """Tries the model on random tokens: its distribution is the same in other company and when it
    is asked again, and sees what stands behind a gap; just past each length from which on it may
    read texts otherwise, and at the longest.

    Raises AuditError for a model whose distribution is not so.
    """
    noise = torch.Generator().manual_seed(SEED)
    special = torch.tensor(model.tokenizer.all_special_ids)
    ids = torch.arange(min(model.vocab_size, len(model.tokenizer)))
    ids = ids[~torch.isin(ids, special)]
    room = min(model.max_positions or _LONGEST, _LONGEST)
    otherwise = [mark + 3 for mark in text_lengths_to_test(model.model.config, room)]
    lengths = [AT_LOAD, *otherwise, *([room] if otherwise else [])]
    got = f"{model.name!r} ({model.model.config.model_type})"
    kind = f"expected a masked LM, got {got}, whose distribution of a hidden token"
    for length in sorted({min(length, room) for length in lengths}):
        texts = ids[torch.randint(len(ids), (3, length), generator=noise)]
        gap = torch.full((3, 1), length // 2 - 1)
        texts[1] = texts[0]  # but for the token behind the gap
        texts[1, length // 2] = ids[ids != texts[0, length // 2]][0]
        distribution = model.log_probs(texts, gap)
        rounding = rounding_tolerance(model.model, distribution)
        far = compute_largest_distance(model.log_probs(texts[:1], gap[:1]), distribution[:1])
        if far > rounding:
            raise AuditError(
                f"{kind} in a text of {length} changes by {far:.2g} nats when it is asked for "
                "again alone"
            )
        if compute_largest_distance(distribution[1], distribution[0]) <= rounding:
            raise AuditError(f"{kind} does not change with what comes after it")


def load_masked(name: str, options: LoadingOptions = DEFAULTS) -> HuggingFaceMaskedModel:
    """A masked LM by local folder or hub id.

    Raises AuditError where there is none, none with a mask token, or one whose distributions
    disagree (`check_masked_distribution`).
    """
    with translating_model_load_errors(name, "masked LM", options):
        read = read_weights("masked", name, options)
        tokenizer = load_tokenizer_if_present(name, options)
        if tokenizer is None:
            raise AuditError(
                f"expected a masked LM with its tokenizer, got {name!r}, which has none"
            )
        model = HuggingFaceMaskedModel(read.model, tokenizer, name, read.notes)
        check_masked_distribution(model)
        return model


def require_masked_model(name: str, options: LoadingOptions = DEFAULTS) -> None:
    """Raise AuditError for a model that its configuration does not call a masked LM."""
    expected = f"expected a masked LM, got {name!r}"
    if (Path(name) / "adapter_config.json").is_file():
        raise AuditError(f"{expected}, an adapter of a causal one")
    with translating_model_load_errors(name, "model", options):
        config = AutoConfig.from_pretrained(name, **options.from_pretrained_arguments)
    if getattr(config, "is_encoder_decoder", False):
        raise AuditError(f"{expected}, an encoder-decoder ({config.model_type})")
    architectures = " ".join(getattr(config, "architectures", None) or ())
    # XLM and FlauBERT have one class for both kinds, and say in `causal` which it is.
    is_both = getattr(config, "causal", True) is False
    is_masked = "MaskedLM" in architectures or "ForPreTraining" in architectures or is_both
    if not is_masked or getattr(config, "is_decoder", False):
        raise AuditError(
            f"{expected}, which its configuration does not call one ({architectures or 'nothing'})"
        )
