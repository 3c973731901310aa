"""The lab's masked language model: a small encoder that learns to fill gaps in public, then in private text.

ModernBERT in small, for its rotary positions and normalisation before each layer: a BERT of this size with learned
positions is still guessing by frequency when this one has begun to read. Knows no texts and no cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

MASK = "<mask>"
_IGNORED = -100


@dataclass(frozen=True)
class MaskedRecipe:
    """What the masked parts of a lab depend on beside its recipe (width, heads) and texts. Its hash names them."""

    layers: int = 3
    share: float = 0.15
    batch: int = 8
    block: int = 64
    public_epochs: int = 5
    public_rate: float = 2e-3
    private_epochs: int = 8
    private_rate: float = 2e-3

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


def untrained_masked_language_model(
    *, vocab_size: int, layers: int, hidden: int, heads: int, positions: int, end: int, seed: int
) -> Any:
    torch.manual_seed(seed)
    ends: dict[str, Any] = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), end
    )
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=2 * hidden,
            max_position_embeddings=positions,
            sparse_prediction=True,  # training asks for the distribution of hidden tokens only
            **ends,
        )
    )


def with_mask(tokenizer: PreTrainedTokenizerFast, end: str) -> PreTrainedTokenizerFast:
    """The same vocabulary and a mask token; texts stand between two ends, as they do in packed blocks."""
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=end, mask_token=MASK)
    ends = [(end, made.convert_tokens_to_ids(end))]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=f"{end} $A {end}", special_tokens=ends)
    return made


@dataclass(frozen=True)
class MaskedLoss:
    """Mean nll of a random share of the tokens of each block, hidden; other ones at every step."""

    share: float
    mask: int
    end: int
    noise: torch.Generator

    def __call__(self, model: Any, blocks: Tensor) -> Tensor:
        hidden = (torch.rand(blocks.shape, generator=self.noise) < self.share) & (blocks != self.end)
        inputs, labels = blocks.masked_fill(hidden, self.mask), blocks.masked_fill(~hidden, _IGNORED)
        loss: Tensor = model(input_ids=inputs, labels=labels).loss
        return loss
