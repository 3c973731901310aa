"""Provide the built-in lab: a small model trained on public text, then on private synthetic text.

A GPT-NeoX-style model (rotary positions) learns public text. A LoRA adapter is fine-tuned on
private records, which occur 1 to 64 times, to about its best held-out perplexity. The same recipe
fine-tunes an ensemble on disjoint shards of these records.

Each part (a model or file) is built when a run needs it, and cached by the hash of its recipe and
library versions. The lab needs no hub, download or GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerFast

from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.lab.lab_folders import (
    digest_lab_cache,
)
from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe, LabRecipe, require_small_lab_recipe
from auditor.benchmarks.lab.lab_secrets import cut_lab_secrets
from auditor.benchmarks.lab.lab_texts import LabTexts, make_lab_texts
from auditor.benchmarks.lab.lab_training import (
    PUBLIC,
    LabTraining,
    load_audit_canary_manifest,
    train_lab_tokenizer,
)
from auditor.benchmarks.lab.parts_cache import LabParts, Progress
from auditor.core.disk import find_cache_folder
from auditor.core.nouns import Tokens, select_evenly_spaced
from auditor.plugins.benchmark import Benchmark

# Allowed numbers of reference models: each record is in half of them, so at least 2 have it and 2
# lack it.
REFERENCES = (
    4,
    64,
)
# by private training, and control of one
PRIVATE_DEFAULTS = {
    name: {"epochs": LabRecipe.private_epochs, "batch": 32, "learning_rate": 2e-3}
    for name in ("dp-sgd", "adp", "adp-sound", "no-noise", "no-clipping")
}
_TOKENIZER = "tokenizer"
# Parts on which other parts are built.
_FOUNDATIONS = (
    _TOKENIZER,
    PUBLIC,
    "masked-public",
    "audit-canaries",
)


class Lab(LabTraining, Benchmark):
    """Synthetic mails, patient notes and payments: train, attack and defend on the spot."""

    name = "lab"
    recipe_kind: ClassVar[type[BaseLabRecipe]] = LabRecipe
    ensemble_limit = 60  # every token queries all members
    marks_all = True
    # Sized for the lab; flags and plans set the sizes of papers.
    attack_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "ethicist": {
                "samples": 5,
                "prompt_length": 10,
                "learning_rate": 1e-2,
                "warmup_steps": 5,
                "batch": 16,
                "epochs": 6,
                "validation": 0.2,
            },
            # Matches of 16 tokens also find records in a model trained on none of them; matches of
            # 20 find none.
            "untargeted": {"length": 64, "cooling": 6, "n": 20},
            **{
                attack: {"samples": 5}
                for attack in ("perplexity", "zlib", "lowercase", "reference")
            },
        }
    )
    # PMixED: at the 6,400 tokens that its text-only row draws, utility hardly depends on q and is
    # best at this value. Private training: as many epochs as the target, in batches so small that
    # its control without noise and clipping leaks (greedy recall 0.75 at 64 repeats, perplexity
    # 13.8); otherwise no row could show the protection of clipping and noise. At epsilon 8 this
    # rate has a perplexity of 12.5, half of it 14.0 (public model 56.9, target 11.6). Unlearning:
    # until greedy decoding returns less than one in forty of the records to forget; ascent only has
    # then removed as much of the other records.
    defense_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "pmixed": {"q": 0.06},
            "npo": {"epochs": 10, "batch": 16, "learning_rate": 5e-4, "retain": 1.0},
            "gradient-ascent": {"epochs": 1, "batch": 16, "learning_rate": 3e-4},
        }
        | PRIVATE_DEFAULTS
    )

    # Data that trainings include if an attack needs it.
    planted_for = MappingProxyType(
        {
            "gradient-audit": {
                name: {"gradient_canaries": 1000}
                for name in ("dp-sgd", "adp", "adp-sound", "no-noise")
            }
        }
    )

    def __init__(
        self,
        recipe: BaseLabRecipe | None = None,
        cache: Path | None = None,
        progress: Progress | None = None,
        limit: int | None = None,
        makes: bool = True,
    ):
        """Open the lab.

        makes: whether to build parts that the cache lacks; if not, such a part is an error.
        """
        self.recipe = recipe or self.recipe_kind()
        self.recipe.check()
        texts = self._make_texts()
        self.folder = (
            (cache or find_cache_folder())
            / self.name
            / digest_lab_cache(self.recipe, texts, self.read_package_versions())
        )
        self.progress = progress or (lambda description, n_done, total: None)
        self.parts = LabParts(
            self.folder, makes, _TOKENIZER, _FOUNDATIONS, self._add_lab_note, self.progress
        )
        self.description = (
            f"{self._lab_description()}; records occur "
            f"{', '.join(map(str, self.recipe.repeat_counts))} times"
        )
        self.tokenizer = self._load_or_train_tokenizer(texts)
        self.texts = texts
        self.cut = cut_lab_secrets(self.recipe, texts, self.tokenizer)
        self.secrets = self.cut.secrets
        self.known = self.cut.known
        self.canaries = self.cut.canaries
        self.forgotten = self.cut.forgotten
        self.whole_texts = self.cut.texts
        # Set before --limit: perplexity covers all non-members.
        self._set_heldout_texts()
        if self.recipe.audit_canaries:
            self._add_audit_canaries()
        if limit is not None:
            members = [secret for secret in self.secrets if secret.member]
            nonmembers = [secret for secret in self.secrets if not secret.member]
            self.secrets = (
                *select_evenly_spaced(members, limit),
                *select_evenly_spaced(nonmembers, limit),
            )
            self._add_lab_note(
                f"limited to {limit} members and non-members, evenly over the repeat counts"
            )

    # --- differences between labs ---

    @classmethod
    def read_package_versions(cls) -> dict[str, str]:
        """Return versions of packages that affect the weights in this lab but not in every lab.

        Raise AuditError if such a package is not installed.
        """
        return {}

    def _make_texts(self) -> LabTexts:
        return make_lab_texts(require_small_lab_recipe(self.recipe))

    def _lab_description(self) -> str:
        recipe = require_small_lab_recipe(self.recipe)
        return (
            f"{recipe.layers}-layer GPT-NeoX of width {recipe.hidden}, trained on the spot on "
            "synthetic mails, patient notes and payments (Faker)"
        )

    def _load_or_train_tokenizer(self, texts: LabTexts) -> PreTrainedTokenizerFast:
        build = partial(
            train_lab_tokenizer, recipe=require_small_lab_recipe(self.recipe), public=texts.public
        )
        return PreTrainedTokenizerFast.from_pretrained(self.parts.build_once(_TOKENIZER, build))

    def _set_heldout_texts(self) -> None:
        """Set the non-member texts on which utility is measured."""
        self.heldout = tuple(
            secret.prefix + secret.suffix for secret in self.secrets if not secret.member
        )

    def _add_lab_note(self, note: str) -> None:
        self.notes += (note,)

    def _add_audit_canaries(self) -> None:
        """Add canaries for auditing epsilon to the canaries for measuring exposure.

        A coin decides whether each audit canary is included. In every training, each copy of an
        included canary is a separate record.
        """
        recipe = self.recipe
        self.coined = load_audit_canary_manifest(
            self.parts.build_once("audit-canaries", self.write_audit_canary_manifest)
        )
        # The digest in the folder's name leaves them out: the recipe and the public model determine
        # them.
        self.texts = dataclasses.replace(
            self.texts,
            coined=tuple(canary.text for canary in self.coined.list_inserted_copies()),
        )
        self.canaries += manifests.build_manifest_secrets(
            self.coined, self.tokenizer, len(self.tokenizer)
        )
        self._add_lab_note(
            f"a lab of its own for the audit of epsilon: {recipe.audit_canaries:,} canaries "
            f"({recipe.audit_kind}) each went into the training of every model here, or stayed "
            "out, by a fair coin (lab_recipe.audit_canaries); "
            f"{len(self.coined.list_inserted_copies()):,} records more"
        )

    # --- texts ---

    @property
    def unattacked_training_tokens(self) -> list[Tokens]:
        """Return all training records that are not attacked, including the known pairs."""
        return [
            *super().unattacked_training_tokens,
            *self.tokenise_lab_texts(self.texts.others),
        ]

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        copies = Counter(self.texts.private_text_copies() if members else self.texts.nonmembers)
        yield from zip(self.tokenise_lab_texts(list(copies)), copies.values(), strict=True)
