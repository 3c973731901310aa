"""Provide the built-in lab: a small model trained on public text, then on private synthetic text.

A GPT-NeoX-style model (rotary positions) learns public text. A LoRA adapter is fine-tuned on
private records, which occur 1 to 64 times, to about its best held-out perplexity. The same recipe
fine-tunes an ensemble on disjoint shards of these records.

Each part (a model or file) is built when a run needs it, and cached by the hash of its recipe and
library versions. The lab needs no hub, download or GPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from auditor.benchmarks.canaries import audit_canaries, manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.lab.lab_folders import (
    digest_lab_cache,
    name_ensemble_suffix,
    name_trained_model_folder,
)
from auditor.benchmarks.lab.lab_recipe import (
    TRAINING,
    BaseLabRecipe,
    LabRecipe,
    require_small_lab_recipe,
)
from auditor.benchmarks.lab.lab_texts import (
    PRIVATE_KINDS,
    LabSecrets,
    LabTexts,
    cut_lab_secrets,
    make_fake_texts,
    make_lab_texts,
)
from auditor.benchmarks.lab.parts_cache import LabParts, Progress
from auditor.core import threads
from auditor.core.disk import find_cache_folder
from auditor.core.nouns import Tokens, select_evenly_spaced
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.precision import CPU, has_native_bfloat16
from auditor.models.shards import (
    WHOLE,
    record_digests,
    write_ensemble_metadata,
    write_shard_record_list,
)
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense
from auditor.plugins.trainer import (
    RECORD,
    Trainer,
    TrainerCheckpoint,
    TrainingJob,
    TrainingRecord,
)
from auditor.training import loss_masks
from auditor.training.finetune import (
    FineTuningRecipe,
    compute_causal_loss,
    make_untrained_gpt_neox,
    train_packed_blocks,
)
from auditor.training.members import (
    LoraAdapterRecipe,
    MemberToTrain,
    add_lora_adapter,
    get_member_folder,
    train_private_members,
)
from auditor.training.variants import FineTuning

if TYPE_CHECKING:
    from faker import Faker

END = "<|endoftext|>"
PUBLIC = "public"  # the part from which all fine-tuning starts
TARGET = "target"
_ADAPTER = "adapter_config.json"
_PROMISE = "each record, with all its copies, trained one member"
MANIFEST = "manifest.json"
# Records that no model is trained on and no attack reads; trainings may be tuned on them.
_HELDOUT = 120
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


class LabTraining:
    """Train the models of a lab on its texts with its recipe, each into a folder.

    folder: the lab's folder. It has the models from which a training starts.
    parts: cache of the trained models.
    cut: all records, cut into prefixes and suffixes.
    kinds: functions that make private text.
    together: maximum number of adapters trained at once; with 0, the number that trains fastest.
    threads: maximum number of threads of a training (None: all). A step of the small lab takes 33
        ms with one thread and 45 ms with two.
    """

    kinds: ClassVar[tuple[Callable[[Faker], str], ...]] = PRIVATE_KINDS
    together: ClassVar[int] = 0
    threads: ClassVar[int | None] = 1

    recipe: BaseLabRecipe
    texts: LabTexts
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    progress: Progress
    parts: LabParts
    cut: LabSecrets

    # --- folders of models, trained on demand ---

    def public_folder(self) -> Path:
        """Return the folder of the model trained only on public text, the base of all others."""
        return self.parts.build_once(PUBLIC, self.train_public_model)

    def target_folder(self, mitigation: Trainer | None = None) -> Path:
        """Return the folder of the attacked model: the public model fine-tuned on private text.

        mitigation: training to use instead of the plain training.
        """
        if mitigation is not None:
            return self.trained_folder(mitigation)
        self.public_folder()
        return self.parts.build_once(TARGET, self.train_target_model)

    def retrained_folder(self) -> Path:
        """Return the folder of the model fine-tuned on private records but the forgotten ones."""
        self.public_folder()
        return self.parts.build_once("retrained", self.train_without_forgotten)

    def ensemble_folder(self, count: int | None = None) -> Path:
        """Return the folder of an ensemble: LoRA adapters of the public model, one per shard.

        count: number of shards (None: the recipe's).
        """
        self.public_folder()
        build = partial(self.train_ensemble_members, count=count or self.recipe.members)
        return self.parts.build_once(name_ensemble(self.recipe, count), build)

    def control_folder(self) -> Path:
        """Return the folder of an adapter on all records, trained like the ensemble's members."""
        self.public_folder()
        control = f"{WHOLE}{name_ensemble_suffix(self.recipe)}"
        return self.parts.build_once(control, self.train_control_adapter)

    def references_folder(self, count: int) -> Path:
        """Return the folder of `count` models, each trained without half of the attacked records.

        They are trained like the attacked model. Each model omits a different half.
        """
        self.public_folder()
        return self.parts.build_once(
            f"references-{count}", partial(self.train_reference_models, count=count)
        )

    def trained_folder(self, trainer: Trainer) -> Path:
        """Return the folder of the public model fine-tuned by this trainer on private records."""
        self.public_folder()
        return self.parts.build_once(
            name_trained_model_folder(trainer), partial(self.train_by_trainer, trainer)
        )

    def training_seconds(self, defense: Defense | Trainer | None) -> float:
        """Return the seconds that trained a defense's models and the public model, their base.

        defense: None for the attacked model.
        """
        if isinstance(defense, Trainer):
            parts = [PUBLIC, name_trained_model_folder(defense)]
        elif defense is None:
            parts = [PUBLIC, TARGET]
        else:
            ensemble = name_ensemble(self.recipe, defense.required_member_count)
            control = f"{WHOLE}{name_ensemble_suffix(self.recipe)}"
            names = {"public": PUBLIC, "ensemble": ensemble, "whole": control}
            parts = [name for need, name in names.items() if need in defense.needs]
        return sum(self.parts.seconds[part] for part in parts)

    # --- trainings ---

    def train_public_model(self, path: Path) -> None:
        recipe = require_small_lab_recipe(self.recipe)
        model = make_untrained_gpt_neox(
            vocab_size=len(self.tokenizer),
            layers=recipe.layers,
            hidden=recipe.hidden,
            heads=recipe.heads,
            positions=512,
            end=0,
            seed=recipe.seed,
        )
        model.set_attn_implementation("eager")
        # Tied embeddings after a norm bound the logits, and adapters move neither. At a gain of 1
        # an adapter that saw a record 192 times is still 15 nats from certain of it, and held-out
        # text has a sixth more perplexity.
        gain = model.gpt_neox.final_layer_norm.weight.requires_grad_(False)
        gain.fill_(recipe.norm_gain)
        self.fit(
            model,
            self.texts.public,
            "public model",
            epochs=recipe.public_epochs,
            rate=recipe.public_rate,
            batch=recipe.batch,
            block=recipe.block,
        )
        self._save_model(model, path)

    def train_target_model(self, path: Path, texts: Sequence[str] | None = None) -> None:
        """Train a model with the recipe of the attacked model.

        texts: the training texts; None to train the attacked model itself, on all private texts.
        """
        if texts is None:
            texts = self.texts.private_text_copies()
        if self.recipe.private_rank:
            self._train_adapters("target", "private", [(path / WHOLE, texts)])
            model = _merge_adapter(self.public_folder(), path / WHOLE)
            shutil.rmtree(path / WHOLE)
        else:
            model = self._fit_on_private_texts(texts, "target")
        self._save_model(model, path)

    def train_without_forgotten(self, path: Path) -> None:
        """Train a model like the attacked one, but without the texts to forget."""
        forgotten = set(self.cut.forgotten_texts)
        self.train_target_model(
            path, [text for text in self.texts.private_text_copies() if text not in forgotten]
        )

    def train_ensemble_members(self, path: Path, count: int) -> None:
        folders = []
        for index, texts in enumerate(self.texts.texts_by_ensemble_member(count)):
            folders.append((get_member_folder(path, index), texts))
        self._train_adapters("ensemble member", "lora", folders)
        write_ensemble_metadata(
            path, method="pmixed", promise=_PROMISE, unit="record", members=count
        )

    def train_control_adapter(self, path: Path) -> None:
        texts = self.texts.private_text_copies()
        self._train_adapters("adapter on all data", "lora", [(path / WHOLE, texts)])

    def train_reference_models(self, path: Path, count: int) -> None:
        folders = []
        for index, texts in enumerate(self.texts.texts_by_reference_model(count)):
            folders.append((path / f"reference-{index:03d}", texts))
        if self.recipe.private_rank:
            self._train_adapters("reference model", "private", folders)
            return
        for folder, texts in folders:
            model = self._fit_on_private_texts(texts, f"reference model {folder.name}")
            self._save_model(model, folder)
            write_shard_record_list(folder, texts)

    def write_audit_canary_manifest(self, path: Path) -> None:
        """Write the manifest of the audit canaries to `path`."""
        recipe = self.recipe
        kind, count, seed = recipe.audit_kind, recipe.audit_canaries, recipe.seed
        texts = audit_canaries.make_audit_canary_texts(
            kind,
            count,
            recipe.audit_length,
            seed,
            texts=list(make_fake_texts(seed + 2, count, self.kinds))
            if kind in audit_canaries.BEGUN
            else (),  # fresh texts of no person
            model=self._load_public_model() if kind in audit_canaries.BY_MODEL else None,
        )
        manifest = audit_canaries.make_audit_canary_manifest(kind, texts, recipe.audit_times, seed)
        manifests.write_canary_manifest(path / MANIFEST, manifest)

    # --- trainers ---

    def train_by_trainer(self, trainer: Trainer, path: Path) -> None:
        """Train a model by a defense's or mitigation's trainer, and save it whole.

        Merge an adapter into its base: it is then attacked like the target.
        """
        job = self.lab_training_job(trainer, path)
        trainer.check(job)
        record = {
            "configuration": {"method": trainer.name},
            "finished": True,
            "told": list(trainer.train(job)),
        }
        if (path / _ADAPTER).is_file():
            model = _merge_adapter(self.public_folder(), path)
            for adapter_file in path.glob("adapter_*"):
                adapter_file.unlink()
            model.save_pretrained(path)
        # Clear the checkpoint only after writing the record: a build that stops before resumes
        # there.
        (path / RECORD).write_text(json.dumps(record, indent=1))
        job.checkpoint.clear()

    def lab_training_job(self, trainer: Trainer, path: Path) -> TrainingJob:
        """Return the job for this trainer to train a model into the folder `path`.

        An unlearning starts from the attacked model and trains all parameters. Any other training
        starts from the public model. It trains all parameters if `trainer.whole` is true or if the
        attacked model was trained in this way. Otherwise it trains a new adapter, like that of the
        attacked model.
        """
        recipe = self.recipe
        base = self.public_folder()
        rank = recipe.private_rank
        forgotten: list[str] = []
        if trainer.unlearns:
            base = self.target_folder()
            forgotten = self.cut.forgotten_texts
        if trainer.whole or trainer.unlearns:
            rank = 0
        plain = isinstance(trainer, FineTuning)  # as the target is trained

        def to_train() -> Any:
            if plain:
                model = _load_model_to_train(base)
            else:
                model = AutoModelForCausalLM.from_pretrained(base)
            torch.manual_seed(recipe.seed)  # of the adapter's random half
            if rank:
                model = add_lora_adapter(
                    model, LoraAdapterRecipe(rank, recipe.private_alpha, "all")
                )
            return model.train()

        heldout: list[str] = []
        if trainer.chooses:  # another seed makes records of other people
            heldout = list(make_fake_texts(recipe.seed + 3, _HELDOUT, self.kinds))
        return TrainingJob(
            base=str(base),
            load=to_train,
            tokenizer=self.tokenizer,
            end=0,
            block=recipe.block,
            records=tuple(self._training_records(self.texts.private_text_copies())),
            users=False,
            public=self._load_public_model(),
            out=path,
            checkpoint=TrainerCheckpoint(path / "checkpoint.pt"),
            seed=recipe.seed,
            progress=lambda description, n_done, total: self.progress(
                f"{trainer.name}: {description}", n_done, total
            ),
            half=torch.bfloat16 if plain and has_native_bfloat16(CPU) else None,
            heldout=tuple(self._training_records(heldout)),
            forget=tuple(self._training_records(forgotten)),
        )

    def _training_records(self, texts: Sequence[str]) -> Iterator[TrainingRecord]:
        for text, ids, n_untrained in zip(
            texts,
            self.tokenise_lab_texts(texts),
            self.untrained_leading_token_counts(texts),
            strict=True,
        ):
            loss_mask = None
            if n_untrained:
                loss_mask = tuple(i >= n_untrained for i in range(len(ids)))
            yield TrainingRecord(text, ids, record_digests([text])[0], loss_mask)

    # --- shared steps ---

    def _load_public_model(self) -> HuggingFaceModel:
        model = AutoModelForCausalLM.from_pretrained(self.public_folder())
        return HuggingFaceModel(model, self.tokenizer, "lab public model")

    def _save_model(self, model: Any, path: Path) -> None:
        model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def _train_adapters(
        self,
        description: str,
        recipe_prefix: str,
        folders: Sequence[tuple[Path, Sequence[str]]],
    ) -> None:
        """Train an adapter of the public model into each folder, several adapters at once.

        recipe_prefix: prefix of the names of the recipe's settings: `private` for the attacked
            model's, `lora` for the ensemble's.
        """
        recipe, seed = self.recipe, self.recipe.seed
        epochs, rate, batch, rank, alpha = (
            getattr(recipe, f"{recipe_prefix}_{name}") for name in TRAINING
        )
        course = FineTuningRecipe(epochs, rate, batch, recipe.block, end=0)
        adapter = LoraAdapterRecipe(rank, alpha, "all")
        trained = [
            asdict(course),
            asdict(adapter),
            *(record_digests(texts) for _, texts in folders),
        ]
        digest = hashlib.sha256(json.dumps(trained).encode()).hexdigest()[:16]
        # Kept outside the unfinished part, which an interruption removes.
        checkpoint = TrainerCheckpoint(self.folder / f"checkpoint-{digest}.pt")
        with threads.limit_torch_threads(self.threads):
            train_private_members(
                _load_model_to_train(self.public_folder()),
                adapter,
                [
                    MemberToTrain(
                        folder,
                        texts,
                        list(map(loss_masks.apply_loss_mask, self._training_records(texts))),
                        seed + i,
                        ("lab", seed, f"{description} {i + 1}"),
                    )
                    for i, (folder, texts) in enumerate(folders)
                ],
                course,
                together=self.together,
                half=torch.bfloat16 if has_native_bfloat16(CPU) else None,
                stepped=partial(self.progress, f"training the {description}"),
                checkpoint=checkpoint,
            )
        checkpoint.clear()

    def _fit_on_private_texts(self, texts: Sequence[str], description: str) -> Any:
        """Fine-tune all parameters of the public model on the texts, and return the model."""
        model = _load_model_to_train(self.public_folder())
        recipe = self.recipe
        self.fit(
            model,
            texts,
            description,
            epochs=recipe.private_epochs,
            rate=recipe.private_rate,
            batch=recipe.private_batch,
            block=recipe.block,
        )
        return model

    def fit(
        self, model: Any, texts: Sequence[str], description: str, *, epochs: int, **other: Any
    ) -> None:
        """Train the model on packed blocks of the texts.

        other: rate, batch, block and further options of `train_packed_blocks`.
        """
        with threads.limit_torch_threads(self.threads):
            train_packed_blocks(
                model,
                list(map(loss_masks.apply_loss_mask, self._training_records(texts))),
                epochs=epochs,
                end=0,
                # A different `description` would give a different order, and different weights.
                order=make_keyed_generator("lab", self.recipe.seed, description),
                progress=lambda n_done: self.progress(
                    f"training the {description}", n_done, epochs
                ),
                **{"loss": compute_bfloat16_lab_causal_loss, **other},
            )

    def tokenise_lab_texts(self, texts: Sequence[str]) -> list[Tokens]:
        if texts:
            return [tuple(ids) for ids in self.tokenizer(list(texts))["input_ids"]]
        return []

    def untrained_leading_token_counts(self, texts: Sequence[str]) -> list[int]:
        """Count the leading tokens of each text that are excluded from the training loss."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), return_offsets_mapping=True)
        return list(
            map(self.recipe.untrained_leading_token_count, texts, encoded["offset_mapping"])
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
            self.folder, makes, _TOKENIZER, _FOUNDATIONS, self.add_note, self.progress
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
            self.add_note(
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

    def add_note(self, note: str) -> None:
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
        self.add_note(
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


def name_ensemble(recipe: BaseLabRecipe, count: int | None) -> str:
    recipe = replace(recipe, members=count or recipe.members)
    return f"ensemble{name_ensemble_suffix(recipe)}"


def _merge_adapter(public: Path, adapter: Path) -> Any:
    """Return the public model with this adapter merged into its weights."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(public)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def _load_model_to_train(folder: Path) -> Any:
    """Load a model with eager attention.

    With fused attention, the backward pass in bfloat16 on a CPU would take twice as long. The model
    has no name, so that its adapters name no folder: the cache may be moved.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.name_or_path = ""
    return model


def train_lab_tokenizer(path: Path, recipe: LabRecipe, public: Sequence[str]) -> None:
    """Train the tokenizer only on public text, because a vocabulary can leak text too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        # The first id: `end=0` everywhere relies on it, as in SmolLM2's vocabulary.
        special_tokens=[END],
        show_progress=False,
        # Every byte, so that any text can be written.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(public, trainer)
    if recipe.audit_canaries and recipe.audit_kind == "new-tokens":
        tokenizer.add_tokens(audit_canaries.new_canary_token_texts(recipe.audit_canaries))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(path)


def load_audit_canary_manifest(path: Path) -> AuditCanaryManifest:
    manifest = manifests.read_canary_manifest(path / MANIFEST)
    assert isinstance(manifest, AuditCanaryManifest)  # the cache holds the manifest as built
    return manifest


def compute_bfloat16_lab_causal_loss(model: Any, blocks: Tensor) -> Tensor:
    """Compute the causal loss of a model with float32 weights.

    Matrix products use bfloat16 if the processor supports it natively.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=has_native_bfloat16(CPU)):
        return compute_causal_loss(model, blocks)
