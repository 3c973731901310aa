"""The masked LM of the small lab: two parts more in its cache, made from its texts and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import ModernBertForMaskedLM

from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import require_small_lab_recipe
from auditor.benchmarks.lab_training import END, load_tokenizer
from auditor.benchmarks.masked import MaskedLoss, MaskedRecipe, untrained_masked_language_model, with_mask
from auditor.models.masked import HuggingFaceMaskedModel

MASKED_PUBLIC = "masked-public"


@dataclass(frozen=True)
class MaskedLab:
    """Raises AuditError for another lab, where a model is asked for."""

    lab: Lab
    recipe: MaskedRecipe = field(default_factory=MaskedRecipe)

    def public(self) -> HuggingFaceMaskedModel:
        """A masked LM, trained on public text only."""
        return self._cached_masked_model(MASKED_PUBLIC, self._train_public, "lab masked public model")

    def target(self) -> HuggingFaceMaskedModel:
        """That one, fine-tuned on the private records."""
        self.public()
        return self._cached_masked_model("masked", self._train_target, "lab masked target")

    def _cached_masked_model(self, part: str, build: Callable[[Path], None], name: str) -> HuggingFaceMaskedModel:
        def load(path: Path) -> HuggingFaceMaskedModel:
            return HuggingFaceMaskedModel(ModernBertForMaskedLM.from_pretrained(path), load_tokenizer(path), name)

        made: HuggingFaceMaskedModel = self.lab.parts.get(f"{part}-{self.recipe.digest}", build, load)
        return made

    def _train_public(self, path: Path) -> None:
        recipe, network, tokenizer = (
            self.recipe,
            require_small_lab_recipe(self.lab.recipe),
            with_mask(self.lab.tokenizer, END),
        )
        model = untrained_masked_language_model(
            vocab_size=len(tokenizer),
            layers=recipe.layers,
            hidden=network.hidden,
            heads=network.heads,
            positions=512,
            end=0,
            seed=network.seed,
        )
        texts = self.lab.texts.made.public
        self._fit(model, texts, recipe.public_epochs, recipe.public_rate, "masked public model")
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    def _train_target(self, path: Path) -> None:
        public = self.lab.folder / f"{MASKED_PUBLIC}-{self.recipe.digest}"
        model = ModernBertForMaskedLM.from_pretrained(public)
        texts = self.lab.texts.copies()
        self._fit(model, texts, self.recipe.private_epochs, self.recipe.private_rate, "masked target")
        model.save_pretrained(path)
        load_tokenizer(public).save_pretrained(path)

    def _fit(self, model: Any, texts: Sequence[str], epochs: int, rate: float, what: str) -> None:
        recipe, noise = self.recipe, torch.Generator().manual_seed(self.lab.recipe.seed)
        loss = MaskedLoss(recipe.share, len(self.lab.tokenizer), end=0, noise=noise)
        sizes: dict[str, Any] = {"rate": rate, "batch": recipe.batch, "block": recipe.block}
        self.lab.training.fit(model, texts, what, epochs=epochs, loss=loss, **sizes)
