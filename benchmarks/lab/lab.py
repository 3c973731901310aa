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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerFast

from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.lab.lab_folders import (
    digest_lab_cache,
    name_ensemble_suffix,
    name_trained_model_folder,
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
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.lora import LoraEnsemble, load_adapter_model
from auditor.models.references import ReferenceModels
from auditor.models.shards import WHOLE, read_shard_record_list, record_digests
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import TrainedModel
from auditor.plugins.trainer import Trainer, TrainingJob

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


class Lab(Benchmark):
    """Synthetic mails, patient notes and payments: train, attack and defend on the spot."""

    name = "lab"
    recipe_kind: ClassVar[type[BaseLabRecipe]] = LabRecipe
    training_kind: ClassVar[type[LabTraining]] = LabTraining
    ensemble_limit = 60  # every token queries all members
    marks_all = True
    # Sized for the lab; flags and plans set the sizes of papers.
    attack_defaults = MappingProxyType(
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
    defense_defaults = MappingProxyType(
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
            / digest_lab_cache(self.recipe, texts, self._further_package_versions())
        )
        self.progress = progress or (lambda description, n_done, total: None)
        self._models: dict[str, HuggingFaceModel] = {}
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
    def check_packages_installed(cls) -> None:
        """Raise AuditError if a package that the lab needs is not installed."""

    def _make_texts(self) -> LabTexts:
        return make_lab_texts(require_small_lab_recipe(self.recipe))

    def _lab_description(self) -> str:
        recipe = require_small_lab_recipe(self.recipe)
        return (
            f"{recipe.layers}-layer GPT-NeoX of width {recipe.hidden}, trained on the spot on "
            "synthetic mails, patient notes and payments (Faker)"
        )

    def _further_package_versions(self) -> dict[str, str]:
        """Return versions of packages that affect the weights in this lab but not in every lab."""
        return {}

    def _load_or_train_tokenizer(self, texts: LabTexts) -> PreTrainedTokenizerFast:
        build = partial(
            train_lab_tokenizer, recipe=require_small_lab_recipe(self.recipe), public=texts.public
        )
        return self.parts.load_or_build(_TOKENIZER, build, PreTrainedTokenizerFast.from_pretrained)

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
        build = partial(self.training.write_audit_canary_manifest, public=self.lab_public_model)
        self.coined = self.parts.load_or_build("audit-canaries", build, load_audit_canary_manifest)
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
            *self.training.tokenise_lab_texts(self.texts.others),
        ]

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        copies = Counter(self.texts.private_text_copies() if members else self.texts.nonmembers)
        yield from zip(self.training.tokenise_lab_texts(list(copies)), copies.values(), strict=True)

    # --- models, trained on demand ---

    @property
    def training(self) -> LabTraining:
        return self.training_kind(
            self.recipe, self.texts, self.tokenizer, self.folder, self.progress
        )

    def lab_public_model(self) -> HuggingFaceModel:
        """Return the model trained only on public text."""
        return self._load_or_build_model(
            PUBLIC, self.training.train_public_model, "lab public model"
        )

    def lab_target_model(self) -> HuggingFaceModel:
        """Return the attacked model: the public model fine-tuned on the private records."""
        # Built first: the training loads it from the folder.
        self.lab_public_model()
        return self._load_or_build_model("target", self.training.train_target_model, "lab target")

    def model_retrained_without_forgotten(self) -> HuggingFaceModel:
        """Return the public model fine-tuned on all private records except the forgotten ones."""
        self.lab_public_model()
        build = partial(self.training.train_without_forgotten, forgotten=self.cut.forgotten_texts)
        return self._load_or_build_model("retrained", build, "lab model without them")

    def _load_or_build_model(self, part: str, build: Any, name: str) -> HuggingFaceModel:
        if part not in self._models:
            self._models[part] = self.parts.load_or_build(
                part, build, lambda path: self.training.load_lab_model(path, name)
            )
        return self._models[part]

    def ensemble(self, count: int | None = None) -> LoraEnsemble:
        """Return an ensemble of LoRA adapters on the public model, one per shard.

        count: number of shards (None: the recipe's).
        """
        public = self.lab_public_model()
        count = count or self.recipe.members

        def load(path: Path) -> LoraEnsemble:
            return LoraEnsemble(public, sorted(path.glob("member-*")), unit="record")

        return self.parts.load_or_build(
            "ensemble",
            partial(self.training.train_ensemble_members, count=count),
            load,
            name_ensemble_suffix(dataclasses.replace(self.recipe, members=count)),
        )

    def model_with_adapter_on_all_records(self) -> HuggingFaceModel:
        """Return a model with a LoRA adapter on all records, trained like the ensemble's members.

        If the attacked model was trained in this way, this is the attacked model.
        """
        if self.recipe.is_target_trained_like_members:
            return self.lab_target_model()
        public = self.lab_public_model()

        def load(path: Path) -> HuggingFaceModel:
            return load_adapter_model(public, path / WHOLE)

        return self.parts.load_or_build(
            "whole",
            self.training.train_adapter_on_all_records,
            load,
            name_ensemble_suffix(self.recipe),
        )

    def reference_models(self, count: int) -> ReferenceModels:
        """Return `count` models trained like the attacked one, but on half of the attacked records.

        Each model omits a different half.
        """
        # A model's folder lists its records by digest, never their text.
        public = self.lab_public_model()
        name_of = {record_digests([text])[0]: id for id, text in self.cut.texts.items()}
        attacked = {secret.id for secret in self.secrets}

        def model(folder: Path) -> HuggingFaceModel:
            if self.recipe.private_rank:
                return load_adapter_model(public, folder)
            return self.training.load_lab_model(folder, "lab reference")

        def load(path: Path) -> ReferenceModels:
            folders = sorted(path.glob("reference-*"))
            listed = (read_shard_record_list(folder) or () for folder in folders)
            saw = (
                frozenset(name_of[name] for name in names if name in name_of) & attacked
                for names in listed
            )
            return ReferenceModels(tuple(map(model, folders)), tuple(saw))

        build = partial(self.training.train_reference_models, count=count)
        references = self.parts.load_or_build(f"references-{count}", build, load)
        references.check_records_seen_by_references(attacked, "the lab")
        return references

    def model_trained_by_trainer(self, trainer: Trainer) -> TrainedModel:
        """Return the public model fine-tuned by this trainer on private records, with its claim."""

        def build(path: Path) -> None:
            self.training.train_and_record(trainer, path, self.lab_training_job(trainer, path))

        load = partial(self.training.load_model_of_trainer, trainer)
        return self.parts.load_or_build(name_trained_model_folder(trainer), build, load)

    def lab_training_job(self, trainer: Trainer, path: Path) -> TrainingJob:
        """Return the job for this trainer to train a model into the folder `path`."""
        public = self.lab_public_model()
        if trainer.unlearns:
            self.lab_target_model()
        return self.training.lab_training_job(trainer, path, public, self.cut.forgotten_texts)

    def training_seconds_of_trainer(self, trainer: Trainer) -> float:
        """Return the time in seconds that this trainer needed."""
        return self.parts.seconds[name_trained_model_folder(trainer)]
