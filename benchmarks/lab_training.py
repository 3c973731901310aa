"""How each model of a lab is trained, into a folder of its own. Knows texts and recipes; not secrets, and no cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPTNeoXForCausalLM, ModernBertForMaskedLM, PreTrainedTokenizerFast

from auditor.benchmarks import audit_canaries, manifests
from auditor.benchmarks.audit_canaries import AuditManifest
from auditor.benchmarks.lab_recipe import TRAINING, LabRecipe
from auditor.benchmarks.lab_texts import PRIVATE_KINDS, TrainingTexts, drawn
from auditor.benchmarks.masked import MaskedLoss, MaskedRecipe, untrained_masked, with_mask
from auditor.core.nouns import Tokens
from auditor.core.streams import generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.shards import WHOLE, record_names, write_shard
from auditor.plugins.defense import TrainedModel
from auditor.plugins.trainer import RECORD, Checkpoint, Trainer, TrainingJob, TrainingRecord, made
from auditor.privacy import gradient_canaries, promises
from auditor.training.finetune import Course, causal_loss, fit, untrained
from auditor.training.members import Adapter, Member, member_folder, train_members, with_adapter
from auditor.training.variants import FineTuning

Progress = Callable[[str, int, int], None]  # (what, done, of how many)
END = "<|endoftext|>"
PUBLIC = "public"  # the part that all fine-tunings begin with
_MANIFEST = "manifest.json"
_HELDOUT = 120  # records that no model here is trained on, and no attack looks at: what a training may choose by


@dataclass(frozen=True)
class LabTraining:
    """Trains on the lab's texts by its recipe. folder: where the parts lie that a training begins with."""

    recipe: LabRecipe
    masked_recipe: MaskedRecipe
    texts: TrainingTexts
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    progress: Progress

    def public(self, path: Path) -> None:
        recipe = self.recipe
        model = untrained(
            vocab_size=len(self.tokenizer),
            layers=recipe.layers,
            hidden=recipe.hidden,
            heads=recipe.heads,
            positions=512,
            end=0,
            seed=recipe.seed,
        )
        model.set_attn_implementation("eager")
        # Tied embeddings behind a norm bound the logits, and adapters move neither. At a gain of 1 an adapter that saw
        # a record 192 times is still 15 nats from sure of it, and held-out text has a sixth more perplexity.
        gain = model.gpt_neox.final_layer_norm.weight.requires_grad_(False)
        gain.fill_(recipe.norm_gain)
        self._fit(model, self.texts.made.public, "public model", epochs=recipe.public_epochs, rate=recipe.public_rate)
        model.save_pretrained(path)

    def target(self, path: Path, texts: Sequence[str] | None = None) -> None:
        """By the target's recipe. texts: None: all private ones, which makes it the target."""
        recipe, learnt = self.recipe, self.texts.copies() if texts is None else texts
        if recipe.private_rank:
            self._train_adapters("target", "private", [(path / WHOLE, learnt)])
            model = self._merged(path / WHOLE)
            shutil.rmtree(path / WHOLE)
        else:
            model = self._to_train(PUBLIC)
            self._fit_private(model, learnt, "target")
        model.save_pretrained(path)

    def retrained(self, path: Path, forgotten: Sequence[str]) -> None:
        """The target had it never seen these texts."""
        left = set(forgotten)
        self.target(path, [text for text in self.texts.copies() if text not in left])

    def ensemble(self, path: Path, only: int | None = None) -> None:
        folders = [(member_folder(path, index), texts) for index, texts in enumerate(self.texts.shards())]
        self._train_adapters("ensemble member", "lora", folders, only)

    def whole(self, path: Path) -> None:
        self._train_adapters("adapter on all data", "lora", [(path / WHOLE, self.texts.copies())])

    def references(self, path: Path, count: int, only: int | None = None) -> None:
        listed = self.texts.references(count)
        folders = [(path / f"reference-{index:03d}", texts) for index, texts in enumerate(listed)]
        if self.recipe.private_rank:
            self._train_adapters("reference model", "private", folders, only)
            return
        for folder, texts in folders if only is None else folders[only : only + 1]:
            if folder.is_dir():
                continue
            model = self._to_train(PUBLIC)
            self._fit_private(model, texts, f"reference model {folder.name}")
            model.save_pretrained(folder)
            write_shard(folder, texts)

    def masked_public(self, path: Path) -> None:
        recipe, tokenizer = self.masked_recipe, with_mask(self.tokenizer, END)
        model = untrained_masked(
            vocab_size=len(tokenizer),
            layers=recipe.layers,
            hidden=self.recipe.hidden,
            heads=self.recipe.heads,
            positions=512,
            end=0,
            seed=self.recipe.seed,
        )
        self._fit_masked(model, self.texts.made.public, recipe.public_epochs, recipe.public_rate, "masked public model")
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    def masked(self, path: Path) -> None:
        recipe, public = self.masked_recipe, self.folder / f"masked-public-{self.masked_recipe.digest}"
        model = ModernBertForMaskedLM.from_pretrained(public)
        self._fit_masked(model, self.texts.copies(), recipe.private_epochs, recipe.private_rate, "masked target")
        model.save_pretrained(path)
        load_tokenizer(public).save_pretrained(path)

    def audit_canaries(self, path: Path, public: Callable[[], HuggingFaceModel]) -> None:
        """No model, but what the trainings after it depend on. public: of which canaries are sampled."""
        recipe = self.recipe
        kind, count, seed = recipe.audit_kind, recipe.audit_canaries, recipe.seed
        texts = audit_canaries.texts_of(
            kind,
            count,
            recipe.audit_length,
            seed,
            texts=list(drawn(seed + 2, count, PRIVATE_KINDS)) if kind in audit_canaries.BEGUN else (),  # nobody's
            model=public() if kind == "sampled" else None,
        )
        manifests.write(path / _MANIFEST, audit_canaries.make(kind, texts, recipe.audit_times, seed))

    # --- by a trainer ---

    def by(self, trainer: Trainer, path: Path, job: TrainingJob) -> None:
        """Raises AuditError for a job that this trainer cannot do."""
        trainer.check(job)
        done = {"configuration": {"method": trainer.name}, "finished": True, "told": list(trainer.train(job))}
        (path / RECORD).write_text(json.dumps(done, indent=1))
        job.checkpoint.clear()

    def job(self, trainer: Trainer, path: Path, public: HuggingFaceModel, forgotten: Sequence[str]) -> TrainingJob:
        """What this trainer is to train on, into that folder: the public model, or what has learnt the records.

        The parameters that are trained are those of the target: a new adapter's, or all; unless it says so itself.
        forgotten: what a trainer that unlearns is to make the model forget.
        """
        recipe = self.recipe
        base = "target" if trainer.unlearns else PUBLIC
        rank = 0 if trainer.whole or trainer.unlearns else recipe.private_rank
        plain = isinstance(trainer, FineTuning)  # as the target is trained

        def to_train() -> Any:
            model = self._to_train(base) if plain else GPTNeoXForCausalLM.from_pretrained(self.folder / base)
            torch.manual_seed(recipe.seed)  # of the adapter's random half
            return (with_adapter(model, Adapter(rank, recipe.private_alpha, "all")) if rank else model).train()

        heldout = list(drawn(recipe.seed + 3, _HELDOUT, PRIVATE_KINDS)) if trainer.chooses else []
        return TrainingJob(
            base=str(self.folder / base),
            load=to_train,
            tokenizer=self.tokenizer,
            end=0,
            block=recipe.block,
            records=tuple(self._records(self.texts.copies())),
            users=False,
            public=public,
            out=path,
            checkpoint=Checkpoint(path / "checkpoint.pt"),
            seed=recipe.seed,
            progress=lambda what, done, total: self.progress(f"{trainer.name}: {what}", done, total),
            half=torch.bfloat16 if plain and has_bfloat16() else None,
            heldout=tuple(self._records(heldout)),
            forget=tuple(self._records(forgotten)) if trainer.unlearns else (),
        )

    def loaded(self, trainer: Trainer, path: Path) -> TrainedModel:
        """What it has trained there."""
        adapter = (path / "adapter_config.json").is_file()
        model = self._merged(path) if adapter else GPTNeoXForCausalLM.from_pretrained(path)
        own, how = HuggingFaceModel(model, self.tokenizer, f"lab model by {trainer.name}"), made(path)
        return TrainedModel(own, promises.read(path), gradient_canaries.read(path), how.told if how else ())

    def _records(self, texts: Sequence[str]) -> Iterator[TrainingRecord]:
        for text, ids in zip(texts, self.tokens(texts), strict=True):
            yield TrainingRecord(text, ids, record_names([text])[0])

    # --- the steps that they share ---

    def model(self, path: Path, name: str) -> HuggingFaceModel:
        return HuggingFaceModel(GPTNeoXForCausalLM.from_pretrained(path), self.tokenizer, name)

    def _merged(self, adapter: Path) -> Any:
        """The public model with this adapter in its weights."""
        public = GPTNeoXForCausalLM.from_pretrained(self.folder / PUBLIC)
        return PeftModel.from_pretrained(public, adapter).merge_and_unload()

    def _to_train(self, part: str) -> Any:
        """Attention in steps: in bfloat16 on a CPU the fused one takes twice as long backwards."""
        return GPTNeoXForCausalLM.from_pretrained(self.folder / part, attn_implementation="eager")

    def _train_adapters(
        self, what: str, whose: str, folders: Sequence[tuple[Path, Sequence[str]]], only: int | None = None
    ) -> None:
        """Adapters on the public model, side by side, by the target's recipe (`private`) or the members' (`lora`).

        only: the one that is trained, as it would be beside the others; None: all whose folders are not there yet.
        """
        recipe = self.recipe
        epochs, rate, batch, rank, alpha = (getattr(recipe, f"{whose}_{name}") for name in TRAINING)
        total = len(folders) * epochs
        train_members(
            self._to_train(PUBLIC),
            Adapter(rank, alpha, "all"),
            [
                Member(folder, texts, self.tokens(texts), recipe.seed + i, ("lab", recipe.seed, f"{what} {i + 1}"))
                for i, (folder, texts) in enumerate(folders)
                if only in (None, i)
            ],
            Course(epochs, rate, batch, recipe.block, end=0),
            half=torch.bfloat16 if has_bfloat16() else None,
            progress=lambda done: self.progress(f"training the {what}", done, total),
        )

    def _fit_private(self, model: Any, texts: Sequence[str], what: str) -> None:
        recipe = self.recipe
        sizes = {"epochs": recipe.private_epochs, "rate": recipe.private_rate, "batch": recipe.private_batch}
        self._fit(model, texts, what, **sizes)  # type: ignore[arg-type]

    def _fit_masked(self, model: Any, texts: Sequence[str], epochs: int, rate: float, what: str) -> None:
        recipe, noise = self.masked_recipe, torch.Generator().manual_seed(self.recipe.seed)
        loss = MaskedLoss(recipe.share, len(self.tokenizer), end=0, noise=noise)
        self._fit(model, texts, what, epochs=epochs, rate=rate, loss=loss, batch=recipe.batch, block=recipe.block)

    def _fit(self, model: Any, texts: Sequence[str], what: str, *, epochs: int, **other: Any) -> None:
        """other: the rate, and options of `fit` that differ from the recipe's."""
        recipe = self.recipe
        options: dict[str, Any] = {"batch": recipe.batch, "block": recipe.block, "loss": quick_loss, **other}
        fit(
            model,
            self.tokens(texts),
            epochs=epochs,
            end=0,
            order=generator("lab", recipe.seed, what),
            progress=lambda done: self.progress(f"training the {what}", done, epochs),
            **options,
        )

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        return [tuple(ids) for ids in self.tokenizer(list(texts))["input_ids"]] if texts else []


def make_tokenizer(path: Path, recipe: LabRecipe, public: Sequence[str]) -> None:
    """From public text only: the vocabulary leaks too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(public, trainer)
    if recipe.audit_canaries and recipe.audit_kind == "new-tokens":
        tokenizer.add_tokens(audit_canaries.token_texts(recipe.audit_canaries))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(path)


def load_audit_canaries(path: Path) -> AuditManifest:
    manifest = manifests.read(path / _MANIFEST)
    assert isinstance(manifest, AuditManifest)  # the cache holds what was built
    return manifest


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(path)


def quick_loss(model: Any, blocks: Tensor) -> Tensor:
    """The model's own loss, its matrix products in bfloat16 where the processor has them; weights stay in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
        return causal_loss(model, blocks)


def has_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16; elsewhere it would be slower than float32."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
