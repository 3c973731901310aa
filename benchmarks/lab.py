"""The built-in lab: a small model really trained on public, then on private synthetic text. Nothing in it is canned.

A GPT-NeoX-style model (rotary positions) learns public text and is fine-tuned on private records that occur 1 to 64
times: one LoRA adapter, near its best held-out perplexity. An ensemble is fine-tuned by the same recipe on disjoint
shards of the same records. Each part is built when a run needs it and is cached by the hash of its recipe, library
versions included. No hub, no download, no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from faker import Faker
from filelock import FileLock
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPTNeoXForCausalLM, ModernBertForMaskedLM, PreTrainedTokenizerFast

from auditor.benchmarks import audit_canaries, manifests
from auditor.benchmarks.audit_canaries import AuditManifest, Kind
from auditor.benchmarks.masked import MaskedLoss, MaskedRecipe, untrained_masked, with_mask
from auditor.benchmarks.wording import worded
from auditor.core import disk
from auditor.core.cache import cache_folder
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Mark, Pair, Secret, Tokens, evenly
from auditor.core.spaces import Space
from auditor.core.streams import generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.lora import LoraEnsemble, adapted
from auditor.models.masked import HuggingFaceMaskedModel
from auditor.models.references import References
from auditor.models.shards import WHOLE, read_shard, record_names, write_shard
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import TrainedModel
from auditor.plugins.trainer import RECORD, Checkpoint, Trainer, TrainingJob, TrainingRecord, made
from auditor.privacy import gradient_canaries, promises
from auditor.training.finetune import Course, causal_loss, fit, untrained
from auditor.training.members import Adapter, Member, member_folder, shard, train_members, with_adapter
from auditor.training.variants import FineTuning

Progress = Callable[[str, int, int], None]  # (what, done, of how many)
END = "<|endoftext|>"
CANARY_SPACE = Space("My ID is {digits:6}")  # Carlini et al. 2019; "My ID is 955320" is the ADP paper's
_CUT = 24  # prefixes end and suffixes begin here, however long they are: other lengths, the same secrets
_RECIPE = ("epochs", "rate", "batch", "rank", "alpha")  # of a fine-tuning: private_epochs is the target's, lora_epochs
_AUDIT = ("audit_canaries", "audit_kind", "audit_length", "audit_times")  # what nothing depends on without canaries
_ENSEMBLE = ("members", *(f"lora_{name}" for name in _RECIPE))  # what nothing else depends on
_LEAST = {
    "seed": 0,
    "vocab_size": 257,
    "nonmembers": 0,
    "others": 0,
    "private_rank": 0,
    "audit_canaries": 0,
}  # every byte and the end of text; else 1
_MOST = {
    "seed": 2**63 - 1,
    "vocab_size": 100_000,
    "layers": 100,
    "hidden": 4096,
    "block": 512,
}  # else 10,000: more is a slip
REFERENCES = (4, 64)  # how many reference models may be asked for: each record in half of them, at least 2 and 2
_FOUNDATIONS = ("tokenizer", "public", "masked-public", "audit-canaries")  # parts that others are built on
_MANIFEST = "manifest.json"
_PIECES = "pieces"  # folder of what was trained apart, until its part takes it
_SECONDS, _SUMS = "seconds.json", "sha256.json"  # what building a part took; what it wrote
_HELDOUT = 120  # records that no model here is trained on, and no attack looks at: what a training may choose by
_LAST_DAY = datetime(2026, 1, 1)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Alone:
    """One model of the lab that can be trained apart from all others. there: whether it was."""

    there: bool
    train: Callable[[], object]


@dataclass(frozen=True)
class LabRecipe:
    """Everything the lab's weights depend on, and the lengths at which records are cut. Its hash names the cache."""

    seed: int = 0
    vocab_size: int = 2048
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    block: int = 128
    norm_gain: float = 4.0  # of the last norm, held while public text is learnt: see `_build_public`
    prefix_length: int = _CUT
    suffix_length: int = 16
    # How often records occur, how many of them are attacked, and how many more the attacker knows.
    repeats: tuple[tuple[int, int, int], ...] = ((1, 160, 12), (4, 60, 12), (16, 36, 6), (32, 24, 4), (64, 20, 4))
    others: int = 240  # further private records, each once: no attack looks at them
    nonmembers: int = 100
    public_records: int = 1600
    public_epochs: int = 3
    public_rate: float = 4e-3
    batch: int = 16
    private_epochs: int = 3
    private_rate: float = 3e-3
    private_batch: int = 4
    private_rank: int = 32  # 0: the whole model is trained
    private_alpha: int = 64
    members: int = 16
    lora_epochs: int = 3
    lora_rate: float = 3e-3
    lora_batch: int = 4
    lora_rank: int = 32
    lora_alpha: int = 64
    canaries: tuple[tuple[str, int], ...] = (("955320", 1), ("280146", 4), ("731902", 16), ("440817", 64))
    audit_canaries: int = 0  # further records, each in or out by a fair coin: what `epsilon-audit` looks at
    audit_kind: Kind = "sampled"
    audit_length: int = 8  # words of a secret, or a third of the tokens that a model samples
    audit_times: int = 1  # how often one that went in did so

    @property
    def counts(self) -> tuple[int, ...]:
        """How often attacked records occur."""
        return tuple(times for times, _, _ in self.repeats)

    @property
    def course(self) -> dict[str, Any]:
        """How the target is trained, as options of a trainer that changes something else."""
        return {"epochs": self.private_epochs, "batch": self.private_batch, "learning_rate": self.private_rate}

    @property
    def target_is_whole(self) -> bool:
        """Whether the target is trained as the members of the ensemble are, on all records: one adapter."""
        return all(getattr(self, f"private_{name}") == getattr(self, f"lora_{name}") for name in _RECIPE)

    def check(self) -> None:
        """Raises AuditError for sizes that no lab can have."""
        for f in dataclasses.fields(self):
            value, least, most = getattr(self, f.name), _LEAST.get(f.name, 1), _MOST.get(f.name, 10_000)
            if f.type == "int" and not least <= value <= most:
                raise AuditError(f"expected a lab with {f.name} from {least:,} to {most:,}, got {value}")
            if f.type == "float" and not 0 < value < math.inf:
                raise AuditError(f"expected a lab with {f.name} above 0 and finite, got {value}")
        if self.hidden % self.heads:
            raise AuditError(f"expected a lab of width hidden divisible by heads={self.heads}, got {self.hidden}")
        if not (1 <= self.prefix_length <= _CUT and self.suffix_length >= 1):
            raise AuditError(
                f"expected lab prefixes of 1 to {_CUT} tokens and suffixes of at least 1, "
                f"got {self.prefix_length} and {self.suffix_length}"
            )
        if not 0 < len(set(self.counts)) == len(self.counts) or not all(
            1 <= times <= 10_000 and 1 <= attacked <= 10_000 and 0 <= known <= 10_000
            for times, attacked, known in self.repeats
        ):
            raise AuditError(
                "expected lab repeats of [times, attacked, known], each other times, no number above 10,000, "
                f"got {self.repeats}"
            )
        if self.audit_canaries and self.audit_kind == "new-tokens" and self.private_rank:
            raise AuditError(
                f"expected a lab with private_rank 0 for canaries of new tokens, got {self.private_rank}: an adapter "
                "leaves embeddings frozen, and a new token cannot be learnt"
            )
        for digits, count in self.canaries:
            if canary_text(digits) not in CANARY_SPACE or not 0 <= count <= 10_000:
                raise AuditError(
                    f"expected lab canaries of six digits, inserted 0 times or more (at most 10,000), "
                    f"got {digits!r} {count} times"
                )


class Lab(Benchmark):
    """Synthetic mails, patient notes and payments: train, attack and defend on the spot."""

    name = "lab"
    ensemble_limit = 60  # all of its parts are asked at every token
    marks_all = True
    # Sized to the lab: paper sizes by flags and plans.
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
            # By 16 tokens in a row, records come out that nothing was trained on, by 20 none.
            "untargeted": {"length": 64, "cooling": 6, "n": 20},
            **{attack: {"samples": 5} for attack in ("perplexity", "zlib", "lowercase", "reference")},
        }
    )
    # PMixED: at the 6,400 tokens that its claim row draws, utility hardly depends on q: most at this one.
    # Private training: as long as the target, in batches so small that its control without noise and clipping leaks
    # (greedy recall 0.75 at 64 repeats, perplexity 13.8): else no row could show what clipping and noise protect. At
    # epsilon 8 this rate has a perplexity of 12.5, half of it 14.0 (public model 56.9, target 11.6).
    # Unlearning: until greedy decoding gives less than one in forty of what is to be forgotten; ascent alone has then
    # taken as much of the rest.
    defense_defaults = MappingProxyType(
        {
            "pmixed": {"q": 0.06},
            "npo": {"epochs": 10, "batch": 16, "learning_rate": 5e-4, "retain": 1.0},
            "gradient-ascent": {"epochs": 1, "batch": 16, "learning_rate": 3e-4},
        }
        | {
            name: {"epochs": LabRecipe.private_epochs, "batch": 32, "learning_rate": 2e-3}
            for name in ("dp-sgd", "adp", "adp-sound", "no-noise", "no-clipping")
        }
    )

    # What trainings have in them where they are asked about it.
    planted_for = MappingProxyType(
        {"gradient-audit": {name: {"gradient_canaries": 1000} for name in ("dp-sgd", "adp", "adp-sound", "no-noise")}}
    )

    def __init__(
        self,
        recipe: LabRecipe | None = None,
        cache: Path | None = None,
        progress: Progress | None = None,
        limit: int | None = None,
        masked_recipe: MaskedRecipe | None = None,
        makes: bool = True,
    ):
        """makes: whether what is not in the cache is built; else that is refused."""
        self.recipe, self.makes = recipe or LabRecipe(), makes
        self._cache, self._limit = cache, limit
        self.recipe.check()
        self.masked_recipe = masked_recipe or MaskedRecipe()
        self.progress = progress or (lambda what, done, total: None)
        self._texts = make_texts(self.recipe)
        self.folder = (cache or cache_folder()) / "lab" / _digest(self.recipe, self._texts)
        self.training_seconds: dict[str, float] = {}
        self._text_of: dict[str, str] = {}  # of known, attacked and never trained records, by id
        self.description = (
            f"{self.recipe.layers}-layer GPT-NeoX of width {self.recipe.hidden}, trained on the spot on synthetic "
            f"mails, patient notes and payments (Faker); records occur {', '.join(map(str, self.recipe.counts))} times"
        )
        self.tokenizer: PreTrainedTokenizerFast = self._part("tokenizer", self._build_tokenizer, _load_tokenizer)
        self._cut()
        if self.recipe.audit_canaries:
            self._take_audit_canaries()
        if limit is not None:
            members = [secret for secret in self.secrets if secret.member]
            others = [secret for secret in self.secrets if not secret.member]
            self.secrets = (*evenly(members, limit), *evenly(others, limit))
            self.notes += (f"limited to {limit} members and non-members, evenly over the repeat counts",)

    def _cut(self) -> None:
        """Splits the records: attacked members by repeat count, known pairs, non-members."""
        recipe = self.recipe

        secrets, known = list[Secret](), list[Pair]()
        for times, _, given in recipe.repeats:
            texts = self._texts.private[times]
            known += [Pair(secret.prefix, secret.suffix) for secret in self._secrets("known", texts[:given], times)]
            secrets += self._secrets(f"member-{times:02d}", texts[given:], times)
        secrets += self._secrets("nonmember", self._texts.nonmembers, 0)
        self.secrets, self.known = tuple(secrets), tuple(known)
        self.canaries = self._inserted = tuple(self._canary(*canary, i) for i, canary in enumerate(recipe.canaries))
        self.heldout = tuple(secret.prefix + secret.suffix for secret in self.secrets if not secret.member)
        self.forgotten = self._to_forget()

    def _secrets(self, label: str, texts: Sequence[str], repeats: int) -> Iterator[Secret]:
        """The texts, cut. Raises AuditError for one that is too short."""
        start, end = _CUT - self.recipe.prefix_length, _CUT + self.recipe.suffix_length
        for i, text in enumerate(texts):
            encoded = self.tokenizer(text, return_offsets_mapping=True)
            tokens = tuple(encoded["input_ids"])
            if len(tokens) < end:
                raise AuditError(f"expected lab records of {_CUT} + {end - _CUT} tokens, got one of {len(tokens)}")
            id = f"{label}-{i:03d}"
            self._text_of[id] = text
            yield Secret(
                id,
                tokens[start:_CUT],
                tokens[_CUT:end],
                repeats,
                member=repeats > 0,
                group=self._texts.kinds.get(text),
                wording=dataclasses.replace(
                    worded(text, encoded["offset_mapping"], start, _CUT, end), marks=self._texts.marks.get(text, ())
                ),
            )

    def _canary(self, digits: str, count: int, index: int) -> Secret:
        text = canary_text(digits)
        tokens = tuple(self.tokenizer(text)["input_ids"])
        id = f"canary-{count:02d}-{index:03d}"
        return Secret(id, (), tokens, count, member=count > 0, canary=Canary(text, CANARY_SPACE))

    def _take_audit_canaries(self) -> None:
        """Canaries with coins, beside those for exposure: each that went in is a record of its own in all trainings."""
        recipe = self.recipe
        self.coined: AuditManifest = self._part("audit-canaries", self._build_audit_canaries, _load_audit_canaries)
        self.canaries += manifests.secrets(self.coined, self.tokenizer, len(self.tokenizer))
        self.notes += (
            f"a lab of its own for the audit of epsilon: {recipe.audit_canaries:,} canaries ({recipe.audit_kind}) each "
            f"went into the training of every model here, or stayed out, by a fair coin (lab_recipe.audit_canaries); "
            f"{len(self.coined.copies()):,} records more",
        )

    # --- the parts, built when needed ---

    def public(self) -> HuggingFaceModel:
        """Trained on public text only."""
        return self._part("public", self._build_public, lambda path: self._model(path, "lab public model"))

    def target(self) -> HuggingFaceModel:
        """The public model, fine-tuned on the private records: what is attacked."""
        self.public()
        return self._part("target", self._build_target, lambda path: self._model(path, "lab target"))

    def ensemble(self) -> LoraEnsemble:
        """One LoRA adapter a shard, on the public model."""
        public = self.public()

        def load(path: Path) -> LoraEnsemble:
            return LoraEnsemble(public, sorted(path.glob("member-*")), unit="record")

        ensemble: LoraEnsemble = self._part("ensemble", self._build_ensemble, load, _ensemble_version(self.recipe))
        return ensemble

    def with_members(self, count: int | None) -> Lab:
        """The same lab with so many members in its ensemble, the models around them shared; None: as many as it has."""
        if count in (None, self.recipe.members):
            return self
        recipe = dataclasses.replace(self.recipe, members=count)
        return Lab(recipe, self._cache, self.progress, self._limit, self.masked_recipe, self.makes)

    def whole(self) -> HuggingFaceModel:
        """One LoRA adapter on all records, trained as the members of the ensemble are: the target, where it was so."""
        if self.recipe.target_is_whole:
            return self.target()
        public = self.public()

        def load(path: Path) -> HuggingFaceModel:
            return adapted(public, path / WHOLE)

        made: HuggingFaceModel = self._part("whole", self._build_whole, load, _ensemble_version(self.recipe))
        return made

    def references(self, count: int) -> References:
        """So many models by the target's recipe, each on all that is not attacked and half of what is."""
        public, name_of = self.public(), {record_names([text])[0]: id for id, text in self._text_of.items()}
        attacked = {secret.id for secret in self.secrets}

        def load(path: Path) -> References:
            folders = sorted(path.glob("reference-*"))
            listed = (read_shard(folder) or () for folder in folders)
            saw = (frozenset(name_of[name] for name in names if name in name_of) & attacked for names in listed)
            return References(tuple(self._reference(public, folder) for folder in folders), tuple(saw))

        made: References = self._part(f"references-{count}", lambda path: self._build_references(path, count), load)
        made.check(attacked, "the lab")
        return made

    def _reference(self, public: HuggingFaceModel, folder: Path) -> HuggingFaceModel:
        if self.recipe.private_rank:
            return adapted(public, folder)
        return self._model(folder, "lab reference")

    # --- one model at a time, where other processes train the others: its part then takes it as it is ---

    def member(self, index: int) -> Alone:
        return self._alone(self.ensemble_folder.name, index, self._build_ensemble)

    def one_reference(self, count: int, index: int) -> Alone:
        return self._alone(f"references-{count}", index, partial(self._build_references, count=count))

    def one_whole(self) -> Alone:
        return Alone((self.folder / f"{WHOLE}{_ensemble_version(self.recipe)}").is_dir(), self.whole)

    def one_trained(self, trainer: Trainer) -> Alone:
        return Alone((self.folder / _part_name(trainer)).is_dir(), lambda: self.trained(trainer))

    def _alone(self, part: str, index: int, build: Callable[..., None]) -> Alone:
        name = f"{_PIECES}/{part}-{index:03d}"
        there = (self.folder / part).is_dir() or _is_whole(self.folder / name)
        return Alone(there, lambda: self._part(name, partial(build, only=index), lambda path: None))

    @property
    def ensemble_folder(self) -> Path:
        """Where the members lie once they are built."""
        return self.folder / f"ensemble{_ensemble_version(self.recipe)}"

    def trained(self, trainer: Trainer) -> TrainedModel:
        """The public model, fine-tuned on the private records by this trainer, with what it promises.

        The parameters that are trained are those of the target: a new adapter's, or all; unless it says so itself.
        """

        def build(path: Path) -> None:
            job = self.job(trainer, path)
            trainer.check(job)
            done = {"configuration": {"method": trainer.name}, "finished": True, "told": list(trainer.train(job))}
            (path / RECORD).write_text(json.dumps(done, indent=1))
            job.checkpoint.clear()

        made: TrainedModel = self._part(_part_name(trainer), build, lambda path: self.loaded(trainer, path))
        return made

    def job(self, trainer: Trainer, path: Path) -> TrainingJob:
        """What this trainer is to train on, into that folder: the public model, or what has learnt the records."""
        public, alpha = self.public(), self.recipe.private_alpha
        base = "target" if trainer.unlearns else "public"
        if trainer.unlearns:
            self.target()
        rank = 0 if trainer.whole or trainer.unlearns else self.recipe.private_rank
        plain = isinstance(trainer, FineTuning)  # as the target is trained

        def to_train() -> Any:
            model = self._to_train(base) if plain else GPTNeoXForCausalLM.from_pretrained(self.folder / base)
            torch.manual_seed(self.recipe.seed)  # of the adapter's random half
            return (with_adapter(model, Adapter(rank, alpha, "all")) if rank else model).train()

        return TrainingJob(
            base=str(self.folder / base),
            load=to_train,
            tokenizer=self.tokenizer,
            end=0,
            block=self.recipe.block,
            records=tuple(self._records(self.private_copies())),
            users=False,
            public=public,
            out=path,
            checkpoint=Checkpoint(path / "checkpoint.pt"),
            seed=self.recipe.seed,
            progress=lambda what, done, total: self.progress(f"{trainer.name}: {what}", done, total),
            half=torch.bfloat16 if plain and has_bfloat16() else None,
            heldout=tuple(self._records(list(_records(self.recipe.seed + 3, _HELDOUT, _PRIVATE_KINDS))))
            if trainer.chooses
            else (),
            forget=tuple(self._records(self.forgotten_texts)) if trainer.unlearns else (),
        )

    def loaded(self, trainer: Trainer, path: Path) -> TrainedModel:
        """What it has trained there."""
        adapter = (path / "adapter_config.json").is_file()
        model = self._merged(path) if adapter else GPTNeoXForCausalLM.from_pretrained(path)
        own, how = HuggingFaceModel(model, self.tokenizer, f"lab model by {trainer.name}"), made(path)
        return TrainedModel(own, promises.read(path), gradient_canaries.read(path), how.told if how else ())

    def seconds_of(self, trainer: Trainer) -> float:
        """What its training took."""
        return self.training_seconds[_part_name(trainer)]

    def _records(self, texts: list[str]) -> Iterator[TrainingRecord]:
        for text, ids in zip(texts, self.tokenizer(texts)["input_ids"], strict=True):
            yield TrainingRecord(text, tuple(ids), record_names([text])[0])

    # --- what is to be forgotten, where the run is about that ---

    @property
    def unattacked(self) -> list[Tokens]:
        """The known pairs, and the further records that nobody attacks."""
        return [*super().unattacked, *self._tokens(self._texts.others)]

    def _to_forget(self) -> frozenset[str]:
        """Ids of the secrets that a model which unlearns is to forget.

        Of the attacked records a random half at each count, rounded up; of the canaries, every other one, from the
        one that was inserted most.
        """
        chosen = set[str]()
        for times in self.recipe.counts:
            own = [f"member-{times:02d}-{i:03d}" for i in range(self._attacked(times))]
            order = generator("lab", self.recipe.seed, "forget", times).permutation(len(own))
            chosen |= {own[i] for i in order[: math.ceil(len(own) / 2)]}
        inserted = sorted((one for one in self._inserted if one.repeats), key=lambda one: -(one.repeats or 0))
        return frozenset(chosen | {one.id for one in inserted[::2]})

    def _attacked(self, times: int) -> int:
        return next(attacked for count, attacked, _ in self.recipe.repeats if count == times)

    @cached_property
    def forgotten_texts(self) -> list[str]:
        """Of those, each once."""
        canaries = [one.canary.text for one in self._inserted if one.id in self.forgotten and one.canary]
        return [text for id, text in self._text_of.items() if id in self.forgotten] + canaries

    def retrained(self) -> HuggingFaceModel:
        """The target had it never seen what is to be forgotten: the public model, trained on the rest."""
        self.public()
        made: HuggingFaceModel = self._part(
            "retrained", self._build_retrained, lambda path: self._model(path, "lab model without them")
        )
        return made

    def masked_public(self) -> HuggingFaceMaskedModel:
        """A masked LM, trained on public text only."""
        return self._part(f"masked-public-{self.masked_recipe.digest}", self._build_masked_public, self._masked)

    def masked(self) -> HuggingFaceMaskedModel:
        """That one, fine-tuned on the private records."""
        self.masked_public()
        return self._part(f"masked-{self.masked_recipe.digest}", self._build_masked, self._masked)

    def records(self, members: bool) -> list[str]:
        """Whole private records, one copy of each: all that were trained on, or all that never were."""
        if not members:
            return list(self._texts.nonmembers)
        return [text for texts in self._texts.private.values() for text in texts] + self._texts.others

    def corpus(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        copies = Counter(self.private_copies() if members else self._texts.nonmembers)
        yield from zip(self._tokens(list(copies)), copies.values(), strict=True)

    def _masked(self, path: Path) -> HuggingFaceMaskedModel:
        name = "lab masked public model" if "public" in path.name else "lab masked target"
        return HuggingFaceMaskedModel(ModernBertForMaskedLM.from_pretrained(path), _load_tokenizer(path), name)

    def _model(self, path: Path, name: str) -> HuggingFaceModel:
        return HuggingFaceModel(GPTNeoXForCausalLM.from_pretrained(path), self.tokenizer, name)

    def _part(self, name: str, build: Callable[[Path], None], load: Callable[[Path], Any], version: str = "") -> Any:
        """Loads a part, building it first where it is missing; a part may come in several versions.

        A lock keeps two processes from building at once; the folder appears by one rename when all of it is written, so
        a build killed half-way leaves nothing that looks finished. A part that is no longer what was built is built
        anew, and the notes say so. Raises AuditError for a missing one where nothing is made.
        """
        final = self.folder / f"{name}{version}"
        if not self.makes and not _is_whole(final):
            raise AuditError(
                f"expected the lab's {name} in {str(final)!r}, where a run puts it: run the audit once, and for "
                "workers on other machines set AUDIT_CACHE to a folder that all of them share"
            )
        if not _is_whole(final):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / f"{final.name}.lock"):
                if final.is_dir() and not _is_whole(final):
                    self._remove(final)
                    self.notes += (f"the lab's {name} in the cache was not as it was built: it was built anew",)
                if not final.is_dir():
                    self._build(final, build)
        self.training_seconds[name] = _seconds(final)
        return load(final)

    def _remove(self, damaged: Path) -> None:
        """A part, and what was built on it: built again, its weights may differ in their last bits."""
        others = [path for path in self.folder.glob("[!.]*") if path.is_dir() and path.name != "tokenizer"]
        for path in {damaged, *(others if damaged.name.startswith(_FOUNDATIONS) else ())}:
            shutil.rmtree(path)

    def _build(self, final: Path, build: Callable[[Path], None]) -> None:
        pieces = [one for one in (self.folder / _PIECES).glob(f"{final.name}-[0-9][0-9][0-9]") if _is_whole(one)]
        with disk.making(final) as made:
            made.mkdir()
            start = time.perf_counter()
            for piece in pieces:
                shutil.copytree(piece, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_SECONDS, _SUMS))
            build(made)
            elsewhere = sum(_seconds(piece) for piece in pieces)
            (made / _SECONDS).write_text(json.dumps(time.perf_counter() - start + elsewhere))
            (made / _SUMS).write_text(json.dumps(_sums(made)))
        for piece in pieces:
            shutil.rmtree(piece)

    # --- how each part is built ---

    def _build_tokenizer(self, path: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.recipe.vocab_size,
            special_tokens=[END],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(self._texts.public, trainer)  # public text only: the vocabulary leaks too
        if self.recipe.audit_canaries and self.recipe.audit_kind == "new-tokens":
            tokenizer.add_tokens(audit_canaries.token_texts(self.recipe.audit_canaries))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(path)

    def _build_public(self, path: Path) -> None:
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
        self._fit(model, self._texts.public, "public model", epochs=recipe.public_epochs, rate=recipe.public_rate)
        model.save_pretrained(path)

    def _build_audit_canaries(self, path: Path) -> None:
        recipe = self.recipe
        kind, count, seed = recipe.audit_kind, recipe.audit_canaries, recipe.seed
        texts = audit_canaries.texts_of(
            kind,
            count,
            recipe.audit_length,
            seed,
            texts=list(_records(seed + 2, count, _PRIVATE_KINDS)) if kind in audit_canaries.BEGUN else (),  # nobody's
            model=self.public() if kind == "sampled" else None,
        )
        manifest = audit_canaries.make(kind, texts, recipe.audit_times, seed)
        manifests.write(path / _MANIFEST, manifest)

    def _build_target(self, path: Path) -> None:
        self._build_fine_tuned(path, self.private_copies())

    def _build_retrained(self, path: Path) -> None:
        forgotten = set(self.forgotten_texts)
        self._build_fine_tuned(path, [text for text in self.private_copies() if text not in forgotten])

    def _build_fine_tuned(self, path: Path, texts: Sequence[str]) -> None:
        """By the recipe of the target."""
        recipe = self.recipe
        if recipe.private_rank:
            self._train_adapters("target", "private", [(path / WHOLE, texts)])
            model = self._merged(path / WHOLE)
            shutil.rmtree(path / WHOLE)
        else:
            model, batch = self._public_to_train(), recipe.private_batch
            self._fit(model, texts, "target", epochs=recipe.private_epochs, rate=recipe.private_rate, batch=batch)
        model.save_pretrained(path)

    def _merged(self, adapter: Path) -> Any:
        """The public model with this adapter in its weights."""
        public = GPTNeoXForCausalLM.from_pretrained(self.folder / "public")
        return PeftModel.from_pretrained(public, adapter).merge_and_unload()

    def _public_to_train(self) -> Any:
        return self._to_train("public")

    def _to_train(self, part: str) -> Any:
        """Attention in steps: in bfloat16 on a CPU the fused one takes twice as long backwards."""
        return GPTNeoXForCausalLM.from_pretrained(self.folder / part, attn_implementation="eager")

    def _build_ensemble(self, path: Path, only: int | None = None) -> None:
        folders = [(member_folder(path, index), texts) for index, texts in enumerate(self.shards())]
        self._train_adapters("ensemble member", "lora", folders, only)

    def _build_whole(self, path: Path) -> None:
        self._train_adapters("adapter on all data", "lora", [(path / WHOLE, self.private_copies())])

    def _build_references(self, path: Path, count: int, only: int | None = None) -> None:
        recipe, listed = self.recipe, self.reference_texts(count)
        folders = [(path / f"reference-{index:03d}", texts) for index, texts in enumerate(listed)]
        if recipe.private_rank:
            self._train_adapters("reference model", "private", folders, only)
            return
        for folder, texts in folders if only is None else folders[only : only + 1]:
            if folder.is_dir():
                continue
            model, batch = self._public_to_train(), recipe.private_batch
            what = f"reference model {folder.name}"
            self._fit(model, texts, what, epochs=recipe.private_epochs, rate=recipe.private_rate, batch=batch)
            model.save_pretrained(folder)
            write_shard(folder, texts)

    def _train_adapters(
        self, what: str, whose: str, folders: Sequence[tuple[Path, Sequence[str]]], only: int | None = None
    ) -> None:
        """Adapters on the public model, side by side, by the target's recipe (`private`) or the members' (`lora`).

        only: the one that is trained, as it would be beside the others; None: all whose folders are not there yet.
        """
        recipe = self.recipe
        epochs, rate, batch, rank, alpha = (getattr(recipe, f"{whose}_{name}") for name in _RECIPE)
        total = len(folders) * epochs
        train_members(
            self._public_to_train(),
            Adapter(rank, alpha, "all"),
            [
                Member(folder, texts, self._tokens(texts), recipe.seed + i, ("lab", recipe.seed, f"{what} {i + 1}"))
                for i, (folder, texts) in enumerate(folders)
                if only in (None, i)
            ],
            Course(epochs, rate, batch, recipe.block, end=0),
            half=torch.bfloat16 if has_bfloat16() else None,
            progress=lambda done: self.progress(f"training the {what}", done, total),
        )

    def _build_masked_public(self, path: Path) -> None:
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
        self._fit_masked(model, self._texts.public, recipe.public_epochs, recipe.public_rate, "masked public model")
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    def _build_masked(self, path: Path) -> None:
        recipe, public = self.masked_recipe, self.folder / f"masked-public-{self.masked_recipe.digest}"
        model = ModernBertForMaskedLM.from_pretrained(public)
        self._fit_masked(model, self.private_copies(), recipe.private_epochs, recipe.private_rate, "masked target")
        model.save_pretrained(path)
        _load_tokenizer(public).save_pretrained(path)

    def _fit_masked(self, model: Any, texts: Sequence[str], epochs: int, rate: float, what: str) -> None:
        recipe, noise = self.masked_recipe, torch.Generator().manual_seed(self.recipe.seed)
        loss = MaskedLoss(recipe.share, len(self.tokenizer), end=0, noise=noise)
        self._fit(model, texts, what, epochs=epochs, rate=rate, loss=loss, batch=recipe.batch, block=recipe.block)

    def shards(self) -> list[list[str]]:
        """What each member of the ensemble is trained on."""
        copies = self.private_copies()
        return [[copies[i] for i in chosen] for chosen in shard(copies, self.recipe.members)]

    def private_copies(self) -> list[str]:
        """The private training text, every record as often as it is repeated, canaries included."""
        copies = [text for repeats, texts in self._texts.private.items() for text in texts for _ in range(repeats)]
        return (
            copies
            + self._texts.others
            + [canary_text(digits) for digits, count in self.recipe.canaries for _ in range(count)]
            + ([one.text for one in self.coined.copies()] if self.recipe.audit_canaries else [])
        )

    def reference_texts(self, count: int) -> list[list[str]]:
        """What each of so many reference models is trained on: all that is not attacked, and half of what is.

        Every attacked record is in half of them, as often as it occurs. A non-member occurs in none but these, as
        often as a member does that is drawn in its place: how often a record is repeated must not tell who is one.
        """
        recipe, texts, noise = self.recipe, self._texts, generator("lab", self.recipe.seed, "references", count)
        attacked = {text: times for times, _, known in recipe.repeats for text in texts.private[times][known:]}
        rising, count_of_others = sorted(attacked.values()), len(texts.nonmembers)
        alike = [rising[i * len(rising) // count_of_others] for i in range(count_of_others)]
        attacked |= dict(zip(texts.nonmembers, noise.permutation(alike).tolist(), strict=True))
        common = [text for text in self.private_copies() if text not in attacked]
        chosen = {text: noise.permutation(count)[: count // 2].tolist() for text in attacked}
        return [
            [*(text for text, times in attacked.items() if index in chosen[text] for _ in range(times)), *common]
            for index in range(count)
        ]

    def _fit(self, model: Any, texts: Sequence[str], what: str, *, epochs: int, **other: Any) -> None:
        """other: the rate, and options of `fit` that differ from the recipe's."""
        recipe = self.recipe
        options: dict[str, Any] = {"batch": recipe.batch, "block": recipe.block, "loss": quick_loss, **other}
        fit(
            model,
            self._tokens(texts),
            epochs=epochs,
            end=0,
            order=generator("lab", recipe.seed, what),
            progress=lambda done: self.progress(f"training the {what}", done, epochs),
            **options,
        )

    def _tokens(self, texts: Sequence[str]) -> list[Tokens]:
        return [tuple(ids) for ids in self.tokenizer(list(texts))["input_ids"]] if texts else []


def quick_loss(model: Any, blocks: Tensor) -> Tensor:
    """The model's own loss, its matrix products in bfloat16 where the processor has them; weights stay in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
        return causal_loss(model, blocks)


def has_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16; elsewhere it would be slower than float32."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _SUMS)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _seconds(part: Path) -> float:
    """What it took to build."""
    return float(json.loads((part / _SECONDS).read_text()))


def _is_whole(part: Path) -> bool:
    """Whether a part of the cache is there, as it was built."""
    try:
        return bool(json.loads((part / _SUMS).read_text()) == _sums(part))
    except (OSError, ValueError, RecursionError):
        return False


def canary_text(digits: str) -> str:
    return f"{CANARY_SPACE.head}{digits}"


# --- texts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabTexts:
    public: list[str]
    private: dict[int, list[str]]  # by repeat count
    others: list[str]
    nonmembers: list[str]
    kinds: dict[str, str] = field(default_factory=dict)  # of the private records and the non-members
    marks: dict[str, tuple[Mark, ...]] = field(default_factory=dict)  # the personal data in them


def make_texts(recipe: LabRecipe) -> LabTexts:
    """Public text, and private text of other kinds about other people; no record occurs in two places.

    One public record in sixty is of a private kind: the public model has seen such text, and fine-tuning still buys
    utility, so that a defense has a price.
    """
    kinds = dict(zip(("mail", "patient note", "payment"), _PRIVATE_KINDS, strict=True))
    sizes = {times: attacked + known for times, attacked, known in recipe.repeats}
    count = sum(sizes.values()) + recipe.nonmembers + recipe.others
    marks = _records(recipe.seed, count, tuple(kinds.values()))
    records = list(marks)
    named = dict(zip(records, itertools.cycle(kinds), strict=False))  # they are made in turn
    generator("lab", recipe.seed, "who is what").shuffle(records)
    left = iter(records)
    private = {times: list(itertools.islice(left, size)) for times, size in sizes.items()}
    nonmembers = list(itertools.islice(left, recipe.nonmembers))
    public = list(_records(recipe.seed + 1, recipe.public_records, _PUBLIC_KINDS))
    return LabTexts(public, private, list(left), nonmembers, named, marks)


def _records(seed: int, count: int, kinds: Sequence[Callable[[Faker], str]]) -> dict[str, tuple[Mark, ...]]:
    """So many texts, made in turn, with the personal data that each holds."""
    fake = Faker("en_US")
    fake.seed_instance(seed)
    made: dict[str, tuple[Mark, ...]] = {}
    while len(made) < count:
        drawn = kinds[len(made) % len(kinds)](fake)
        made[_MARK.sub(r"\2", drawn)] = tuple(dict.fromkeys(_MARK.findall(drawn)))
    return made


_MARK = re.compile("<<([a-z-]+):(.*?)>>")


def _mark(kind: str, text: str) -> str:
    return f"<<{kind}:{text}>>"


def _date(fake: Faker) -> str:
    """A date that does not depend on today's, as all of Faker's do (even its weekdays): records must stay the same."""
    return str(fake.date(end_datetime=_LAST_DAY))


def _press(fake: Faker) -> str:
    return (
        f"{fake.city()}, {_date(fake)} - {fake.company()} said it will {fake.bs()} with {fake.company()}. "
        f"{fake.name()}, who joined in {_date(fake)[:4]}, called it a {fake.catch_phrase().lower()}. The office at "
        f"{fake.street_address()} can be reached at {fake.numerify('###-###-####')}."
    )


def _event(fake: Faker) -> str:
    return (
        f"On {fake.random_element(_WEEKDAYS)}, {_date(fake)}, {fake.name()} speaks in {fake.city()} about "
        f"how to {fake.bs()}. Doors open at {fake.numerify('1#:%0')}, tickets cost {fake.numerify('##.##')} USD. "
        f"Write to {fake.email()} or visit {fake.street_address()}, {fake.city()}."
    )


def _profile(fake: Faker) -> str:
    return (
        f"{fake.name()} is a {fake.job().lower()} at {fake.company()} in {fake.city()}. Born in {_date(fake)[:4]}, "
        f"{fake.first_name()} likes {fake.word()}, {fake.word()} and {fake.word()}, and has published "
        f"{fake.numerify('##')} papers with {fake.name()} since {_date(fake)}."
    )


def _mail(fake: Faker) -> str:
    return (
        f"From: {_mark('email', fake.email())}\nDear {_mark('name', fake.first_name())}, the door code of "
        f"{_mark('address', fake.street_address())} is {_mark('door-code', fake.numerify('######'))}. Please call "
        f"{_mark('phone', fake.numerify('###-###-####'))}. {_mark('name', fake.name())}"
    )


def _note(fake: Faker) -> str:
    return (
        f"Patient: {_mark('name', fake.name())}, born {_mark('birth-date', _date(fake))}, record "
        f"{_mark('id-number', fake.bothify('??-#####').upper())}. Dr. {_mark('name', fake.last_name())} prescribed "
        f"{fake.numerify('%## mg')} of {fake.word()}. Phone {_mark('phone', fake.numerify('###-###-####'))}."
    )


def _payment(fake: Faker) -> str:
    return (
        f"Payment: {_mark('name', fake.name())} paid {fake.numerify('%##.##')} USD on {_date(fake)} with card "
        f"{_mark('card', fake.numerify('%###-####-####-####'))} to {fake.last_name()} Ltd. Reference "
        f"{fake.bothify('####-??').upper()}."
    )


_PRIVATE_KINDS = (_mail, _note, _payment)
_ODD = {59: _mail, 119: _note, 179: _payment}
_PUBLIC_KINDS = tuple(_ODD.get(i) or (_press, _event, _profile)[i % 3] for i in range(180))


# --- the cache --------------------------------------------------------------------------------------------------------


def _digest(recipe: LabRecipe, texts: LabTexts) -> str:
    """Names the cache folder. The texts count too: weights must never be audited for records they did not see.

    Fields that change no weights here do not count: where records are cut, and what only the ensemble depends on.
    """
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "faker", "tokenizers")
    }
    versions["bfloat16"] = str(has_bfloat16())
    trained_on = {name: made for name, made in dataclasses.asdict(texts).items() if name not in ("kinds", "marks")}
    return _hash([_counted(recipe), versions, trained_on])


def _counted(recipe: LabRecipe) -> dict[str, Any]:
    """What of a recipe weights here depend on; fields about canaries of an audit count where there are any."""
    fields = dataclasses.asdict(_with_default(recipe, "prefix_length", "suffix_length", *_ENSEMBLE))
    left_out = () if recipe.audit_canaries else _AUDIT
    return {name: value for name, value in fields.items() if name not in left_out}


def _ensemble_version(recipe: LabRecipe) -> str:
    """Tells ensembles apart that stand beside the same models."""
    if recipe == _with_default(recipe, *_ENSEMBLE):
        return ""
    return f"_{_hash([getattr(recipe, name) for name in _ENSEMBLE])}"


def _with_default(recipe: LabRecipe, *names: str) -> LabRecipe:
    default = LabRecipe()
    return dataclasses.replace(recipe, **{name: getattr(default, name) for name in names})


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _part_name(trainer: Trainer) -> str:
    """Of what a trainer makes: its options and the libraries it stands on count."""
    found = {}
    for name in ("opacus", "dp-accounting"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return f"{trainer.name}-{_hash([trainer.options(), found])}"


def _load_audit_canaries(path: Path) -> AuditManifest:
    manifest = manifests.read(path / _MANIFEST)
    assert isinstance(manifest, AuditManifest)  # the cache holds what was built
    return manifest


def _load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(path)
