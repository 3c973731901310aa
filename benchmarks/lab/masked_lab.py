"""The small lab's masked language model: a small encoder that learns to fill gaps in public, then
in private text.

Two parts more in its cache. ModernBERT in small, for its rotary positions and normalisation before
each layer: a BERT of this size with learned positions is still guessing by frequency when this one
has begun to read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.lab_recipe import require_small_lab_recipe
from auditor.benchmarks.lab.lab_training import END
from auditor.models.masked import HuggingFaceMaskedModel

MASK = "<mask>"
_IGNORED = -100  # of a label: no loss here, as torch's cross entropy has it
_PUBLIC = "masked-public"


@dataclass(frozen=True)
class MaskedLabRecipe:
    """What the masked parts of a lab depend on beside its recipe (width, heads) and texts. Its hash
    names them."""

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


def lab_tokenizer_with_mask_token(
    tokenizer: PreTrainedTokenizerFast, end: str
) -> PreTrainedTokenizerFast:
    """The same vocabulary and a mask token; texts stand between two ends, as they do in packed
    blocks."""
    # It copies the object: the lab's own tokenizer gets no mask and no ends.
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=end, mask_token=MASK
    )
    ends = [(end, made.convert_tokens_to_ids(end))]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=ends
    )
    return made


@dataclass(frozen=True)
class MaskedLoss:
    """Mean nll (nats) of hidden tokens: a random share of each block, drawn anew at every step.

    The mask stands for every one, as in `HuggingFaceMaskedModel`; BERT's recipe leaves or exchanges
    a fifth of them.
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
        inputs, labels = (
            blocks.masked_fill(hidden, self.mask),
            blocks.masked_fill(~hidden, _IGNORED),
        )
        loss: Tensor = model(input_ids=inputs, labels=labels).loss
        return loss


@dataclass(frozen=True)
class MaskedLab:
    """The masked models of the small lab. Asking for one of another lab raises AuditError."""

    lab: Lab
    recipe: MaskedLabRecipe = field(default_factory=MaskedLabRecipe)

    def public_masked_model(self) -> HuggingFaceMaskedModel:
        """A masked LM, trained on public text only."""
        return self._cached_masked_model(_PUBLIC, self._train_public, "lab masked public model")

    def target_masked_model(self) -> HuggingFaceMaskedModel:
        """The masked public model, fine-tuned on the private records."""
        self.public_masked_model()
        return self._cached_masked_model("masked", self._train_target, "lab masked target")

    def _cached_masked_model(
        self, part: str, build: Callable[[Path], None], name: str
    ) -> HuggingFaceMaskedModel:
        def load(path: Path) -> HuggingFaceMaskedModel:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
            return HuggingFaceMaskedModel(
                ModernBertForMaskedLM.from_pretrained(path), tokenizer, name
            )

        return self.lab.parts.load_or_build(f"{part}-{self.recipe.digest}", build, load)

    def _train_public(self, path: Path) -> None:
        recipe, network = self.recipe, require_small_lab_recipe(self.lab.recipe)
        tokenizer = lab_tokenizer_with_mask_token(self.lab.tokenizer, END)
        # of the weights, which transformers draws from torch's own generator
        torch.manual_seed(network.seed)
        # The end of text, first in the vocabulary, stands for all of them.
        ends: dict[str, Any] = {
            f"{kind}_token_id": 0 for kind in ("pad", "bos", "eos", "cls", "sep")
        }
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
        texts = self.lab.texts.made.public
        self._fit(model, texts, recipe.public_epochs, recipe.public_rate, "masked public model")
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    def _train_target(self, path: Path) -> None:
        public = self.lab.folder / f"{_PUBLIC}-{self.recipe.digest}"
        model = ModernBertForMaskedLM.from_pretrained(public)
        texts = self.lab.texts.private_text_copies()
        self._fit(
            model, texts, self.recipe.private_epochs, self.recipe.private_rate, "masked target"
        )
        model.save_pretrained(path)
        PreTrainedTokenizerFast.from_pretrained(public).save_pretrained(path)

    def _fit(self, model: Any, texts: Sequence[str], epochs: int, rate: float, what: str) -> None:
        recipe, noise = self.recipe, torch.Generator().manual_seed(self.lab.recipe.seed)
        # The mask's id: it was added behind all others.
        loss = MaskedLoss(recipe.share, len(self.lab.tokenizer), end=0, noise=noise)
        sizes: dict[str, Any] = {"rate": rate, "batch": recipe.batch, "block": recipe.block}
        self.lab.training.fit(model, texts, what, epochs=epochs, loss=loss, **sizes)
