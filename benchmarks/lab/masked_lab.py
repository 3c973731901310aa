"""Provide the small lab's masked language model, which learns to fill gaps in text.

The model is trained on public text, then on private text, which adds two parts to the lab's cache.

The encoder is a small ModernBERT, with rotary positions and normalisation before each layer. A BERT
of this size, with learned positions, would still guess by token frequency when this model already
uses the context.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from auditor.benchmarks.lab.lab import END, Lab
from auditor.benchmarks.lab.lab_recipe import require_small_lab_recipe
from auditor.models.masked import HuggingFaceMaskedModel

MASK = "<mask>"
_IGNORED = -100  # label without a loss, as in torch's cross entropy
_PUBLIC = "masked-public"


@dataclass(frozen=True)
class MaskedLabRecipe:
    """Settings of the masked models, in addition to the lab's recipe.

    The lab's recipe gives the width and the number of heads. share: share of tokens to hide. The
    hash of this recipe names the folders of the models.
    """

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


def add_mask_token(tokenizer: PreTrainedTokenizerFast, end: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer with a mask token.

    It also puts `end` before and after each text, as in packed blocks.
    """
    # The constructor copies the object: the lab's tokenizer gets no mask and no ends.
    masked_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=end, mask_token=MASK
    )
    ends = [(end, masked_tokenizer.convert_tokens_to_ids(end))]
    masked_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=ends
    )
    return masked_tokenizer


@dataclass(frozen=True)
class MaskedLoss:
    """Compute the loss of a masked LM: the mean negative log-likelihood (nats) of hidden tokens.

    share: share of tokens to hide, drawn at every step; mask, end: token ids.

    The mask replaces every hidden token, as in `HuggingFaceMaskedModel`; BERT's recipe would keep
    or exchange a fifth of them.
    """

    share: float
    mask: int
    end: int
    noise: torch.Generator

    def __call__(self, model: Any, blocks: Tensor) -> Tensor:
        # With no token hidden the mean would be NaN: of eight blocks at 15% some always are.
        hidden = (torch.rand(blocks.shape, generator=self.noise) < self.share) & (
            blocks != self.end
        )
        inputs = blocks.masked_fill(hidden, self.mask)
        labels = blocks.masked_fill(~hidden, _IGNORED)
        loss: Tensor = model(input_ids=inputs, labels=labels).loss
        return loss


@dataclass(frozen=True)
class MaskedLab:
    """Load the small lab's masked models; raise AuditError for any other lab."""

    lab: Lab
    recipe: MaskedLabRecipe = field(default_factory=MaskedLabRecipe)

    def public_masked_model(self) -> HuggingFaceMaskedModel:
        """Return the masked LM trained only on public text."""
        return self._load_masked_model(self._public_folder(), "lab masked public model")

    def target_masked_model(self) -> HuggingFaceMaskedModel:
        """Return the public masked LM fine-tuned on the private records."""
        self._public_folder()
        folder = self.lab.parts.build_once(f"masked-{self.recipe.digest}", self._train_target)
        return self._load_masked_model(folder, "lab masked target")

    def _public_folder(self) -> Path:
        return self.lab.parts.build_once(f"{_PUBLIC}-{self.recipe.digest}", self._train_public)

    @staticmethod
    def _load_masked_model(path: Path, name: str) -> HuggingFaceMaskedModel:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        return HuggingFaceMaskedModel(ModernBertForMaskedLM.from_pretrained(path), tokenizer, name)

    def _train_public(self, path: Path) -> None:
        recipe = self.recipe
        network = require_small_lab_recipe(self.lab.recipe)
        tokenizer = add_mask_token(self.lab.tokenizer, END)
        # seed of the weights, which transformers draws from torch's global generator
        torch.manual_seed(network.seed)
        # The end of text, first in the vocabulary, serves as all special tokens.
        ends: dict[str, Any] = {}
        for kind in ("pad", "bos", "eos", "cls", "sep"):
            ends[f"{kind}_token_id"] = 0
        model = ModernBertForMaskedLM(
            ModernBertConfig(
                vocab_size=len(tokenizer),
                hidden_size=network.hidden,
                num_hidden_layers=recipe.layers,
                num_attention_heads=network.heads,
                intermediate_size=2 * network.hidden,
                max_position_embeddings=512,
                sparse_prediction=True,  # training asks for the distribution of hidden tokens only
                **ends,
            )
        )
        texts = self.lab.texts.public
        self._fit(model, texts, recipe.public_epochs, recipe.public_rate, "masked public model")
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    def _train_target(self, path: Path) -> None:
        public = self._public_folder()
        model = ModernBertForMaskedLM.from_pretrained(public)
        texts = self.lab.texts.private_text_copies()
        self._fit(
            model, texts, self.recipe.private_epochs, self.recipe.private_rate, "masked target"
        )
        model.save_pretrained(path)
        PreTrainedTokenizerFast.from_pretrained(public).save_pretrained(path)

    def _fit(
        self, model: Any, texts: Sequence[str], epochs: int, rate: float, description: str
    ) -> None:
        recipe = self.recipe
        noise = torch.Generator().manual_seed(self.lab.recipe.seed)
        # The mask's id is the last: it was added after all other tokens.
        loss = MaskedLoss(recipe.share, len(self.lab.tokenizer), end=0, noise=noise)
        sizes: dict[str, Any] = {"rate": rate, "batch": recipe.batch, "block": recipe.block}
        self.lab.fit(model, texts, description, epochs=epochs, loss=loss, **sizes)
