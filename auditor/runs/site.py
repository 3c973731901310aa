"""Where an audit takes place: the model without a defense, what stands around it, and the data.

Knows no attack. The lab (`lab_site.py`) trains what a user's model and folders bring along; nothing
else asks which of them it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from auditor.benchmarks.data.large_tables import TableCounting
from auditor.benchmarks.lab.lab import Lab
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.plan import Plan
from auditor.core.plan_fields import NONE
from auditor.core.secret_randomness import keyed_random_generator
from auditor.gate.deployed import ANSWERS
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import adapter_base_and_revision
from auditor.models.lora import load_control_adapter, load_lora_ensemble
from auditor.models.references import ReferenceModels, load_reference_models
from auditor.models.shards import (
    ensemble_control_adapter_folder,
    read_shard_record_list,
    record_digests,
)
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, TrainedModel
from auditor.privacy import gradient_canaries, promises
from auditor.records.aliases import load_alias_salt, secrets_with_aliases
from auditor.records.folder import RunFolder
from auditor.runs.loader import ModelLoader
from auditor.runs.own_data import load_own_benchmark
from auditor.runs.own_defenses import (
    check_controls_trained_like_defense,
    check_defense_inputs_given,
    load_trained_defense,
    missing_defense_input_phrase,
)
from auditor.runs.per_secret_results import make_token_decoder
from auditor.runs.reporter import Reporter, SilentReporter
from auditor.runs.sweep_cache import SweepCache


class SiteModels:
    """The model of a plan and those around it, each loaded when it is asked for.

    live: models in memory, by role, as `ModelLoader` takes them. The folder that one was once
    loaded from is not believed, as the weights may have moved since: no promise of privacy is read
    there, and the digest is that of the weights in memory, where the model tells one.
    """

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter | None = None,
        shared: SweepCache | None = None,
        live: Mapping[str, LanguageModel] = MappingProxyType({}),
    ) -> None:
        self.target, self.data_plan, self.attack_plan = plan.target, plan.data, plan.attacks
        self.seed, self.subject = plan.seed, plan.model_and_secrets_fields
        self.reporter, self.shared = reporter or SilentReporter(), shared or SweepCache()
        self.models = ModelLoader(plan.target, plan.loading, self.reporter, self.shared, live)
        self.table_counting = TableCounting()
        self._folder: RunFolder | None = None
        self._ensembles: dict[str, Ensemble] = {}

    @property
    def is_model_asked_over_network(self) -> bool:
        """Whether the model is asked over a network: its budget and its answers have one owner."""
        return self.models.is_attacked_model_over_network

    @property
    def attacked_adapter_base_name(self) -> str:
        """The base of an attacked adapter; "" for a whole model."""
        return "" if self._adapter_base_and_revision is None else self._adapter_base_and_revision[0]

    @property
    def names_reference_model(self) -> bool:
        """Whether there is to be a reference model, as far as is known before anything is
        loaded."""
        if "reference_model" in self.__dict__:  # it was loaded: an adapter's base may be unfit
            return self.reference_model is not None
        if {"reference", "public"} & self.models.live.keys():
            return True
        if self.target.reference is not None:
            return self.target.reference != NONE
        return self.target.public is not None or self._adapter_base_and_revision is not None

    def read_auto_dtype_as_float32(self) -> None:
        """Called before anything is loaded: `--dtype auto` is float32, for methods that are right
        in it alone."""
        self.models.loading = self.models.loading.with_float32_for_auto()

    def check_plan_model_is_obtainable(self, given: Sequence[str]) -> None:
        """Refuses a model that cannot be had as the plan says, before anything is loaded. Raises
        AuditError.

        given: fields of the plan that say how models are had.
        """
        self.models.check_model_obtainable(given)

    def digests_of_models_in_no_file(self) -> dict[str, str]:
        """`role/...` -> digest of the models that are read from no file, as far as they are at
        hand."""
        # In `__dict__` once the cached property was asked for: this must not load the model.
        asked = (
            {ANSWERS: self.model.digest()}
            if self.is_model_asked_over_network and "model" in self.__dict__
            else {}
        )
        return asked | self.models.live_model_digests

    @cached_property
    def model(self) -> LanguageModel:
        """What is attacked, without a defense."""
        return self.models.load_model_of_role("model", str(self.target.model))

    @property
    def undefended_model_description(self) -> str:
        """What the undefended model is: a sentence without its full stop."""
        return self.models.attacked_model_description

    @property
    def undefended_trained_model(self) -> TrainedModel:
        """The undefended model, with what its training promised and kept, as far as known (what it
        told: `notes`)."""
        if "model" in self.models.live:
            return TrainedModel(self.model, None)
        folder = Path(str(self.target.model))
        return TrainedModel(
            self.model,
            promises.read_privacy_record(folder),
            gradient_canaries.read_gradient_canaries(folder),
        )

    @cached_property
    def public_model(self) -> LanguageModel | None:
        """One that has seen no private data; None where there is none."""
        return self._load_model_with_same_vocabulary("public", self.target.public)

    @cached_property
    def reference_model(self) -> LanguageModel | None:
        """What attacks hold likelihoods against; None where there is none."""
        if self.target.reference not in (None, NONE):
            return self._load_model_with_same_vocabulary("reference", self.target.reference)
        if (
            self.target.reference == NONE
            or self.public_model is not None
            or self._adapter_base_and_revision is None
        ):
            return None if self.target.reference == NONE else self.public_model
        # first, so that a model that does not load is refused as the attacked one
        size = self.model.vocab_size
        name, revision = self._adapter_base_and_revision
        base = self.models.load_model_of_role(
            "reference", name, replace(self.models.loading, revision=revision, base=None)
        )
        return base if base.vocab_size == size else None

    @cached_property
    def _adapter_base_and_revision(self) -> tuple[str, str | None] | None:
        """The base of an attacked adapter, and that base's revision; None for a whole model."""
        if self.target.model is None:
            return None
        named = adapter_base_and_revision(self.target.model)
        base = self.models.loading.base
        return named if named is None or base is None else (base, None)

    def notes_on_models(self) -> tuple[str, ...]:
        """What a reader must know of the models beside the data: sentences."""
        models = (self.model, self.public_model, self.reference_model)
        found = [note for model in models if model is not None for note in model.notes]
        if (
            self._adapter_base_and_revision is not None
            and self.target.reference is None
            and self.target.public is None
        ):
            found.append(
                _adapter_base_sentence(
                    self._adapter_base_and_revision[0], self.reference_model is not None
                )
            )
        return tuple(dict.fromkeys(found))

    def model_before_or_retrained(self, kind: str) -> LanguageModel:
        """`before`: the model before it was to forget; `retrained`: the same, without what was to
        be forgotten.

        Raises AuditError for a model of another family or vocabulary, and for the attacked one.
        """
        name = self.target.before if kind == "before" else self.target.retrained
        own, here = self.model, Path(str(name))
        if (
            here.is_dir()
            and Path(str(self.target.model)).is_dir()
            and here.samefile(str(self.target.model))
        ):
            raise AuditError(f"expected --{kind} as another model than --model, got {name} as both")
        other = self._load_model_with_same_vocabulary(kind, name)
        assert other is not None  # there is no row of it without a name
        if other.family != own.family:
            raise AuditError(
                f"expected --{kind} as {own.family}, as --model is, got {other.name}: "
                f"{other.family}"
            )
        return _require_same_vocabulary(kind, own, other)

    def load_deployed_form(self, place: str) -> LanguageModel:
        """The model that is named as a form of the one that is attacked. Raises AuditError for one
        of other tokens."""
        other, own = self.models.load_deployed_form(place), self.model
        if {"distribution"} <= own.capabilities & other.capabilities:
            check_same_vocabulary_size(
                "--forms", other.name, other.vocab_size, "the target's", own.vocab_size
            )
        return _require_same_vocabulary("forms", own, other)

    def _load_model_with_same_vocabulary(self, kind: str, name: str | None) -> LanguageModel | None:
        """A model that is asked about the same tokens. Raises AuditError for one of another
        vocabulary."""
        if name is None:
            return None
        own, other = self.model, self.models.load_model_of_role(kind, name)
        # by unknown padding
        at_least = "distribution" not in own.capabilities and other.vocab_size > own.vocab_size
        if not at_least:
            check_same_vocabulary_size(
                f"--{kind}", other.name, other.vocab_size, "the target's", own.vocab_size
            )
        return other


class Site(SiteModels):
    """The place of one audit. Making a site costs nothing: each model is loaded, or trained, when
    it is asked for.

    subject: all of a plan that decides which model is attacked for which secrets: runs that agree
    in it share both.
    trains_on_demand: whether what a defense needs is made when its turn comes; else it is there
    before, and what the defense promises can be refused before hours are spent.
    may_train: whether what is not there is made; else it is refused when it is asked for.
    """

    trains_on_demand: ClassVar[bool] = False
    may_train = True
    hurried = False  # whether a prefix token is chosen by as few known pairs as a check can afford
    # rows that the choice of a text form looks at, at most; None: its own number
    form_rows: int | None = None
    # of the longest soft prompt that an attack puts before the texts: they take room in a context
    soft_prompt_rows = 0
    relearn_rate: ClassVar[float] = 5e-5  # of `--relearn`, unless the plan says another

    @property
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of attacks by name, where they are sized to this place."""
        return Lab.attack_defaults if self.attack_plan.sizes == "lab" else {}

    @property
    def default_defense_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of defenses by name, where they are sized to this place."""
        return Lab.defense_defaults if self.attack_plan.sizes == "lab" else {}

    def attach_run_folder(self, folder: RunFolder) -> None:
        """Told which run it serves, before anything is loaded."""
        self._folder, self.models.run = folder, folder.identity

    # --- the data ---

    def load_benchmark_shared_by_runs(self) -> Benchmark:
        """The secrets, the known pairs and the held-out texts, as runs on the same subject share
        them."""
        # Without the limit: the form that was chosen stays, however few of the records are
        # attacked.
        chosen = json.dumps([to_json(self.target), to_json(replace(self.data_plan, limit=None))])
        held = (
            None if self._folder is None else self._folder.text_form()
        ) or self.shared.forms.get(chosen)
        key = [self.subject, held and held.digest, self.soft_prompt_rows]
        benchmark = self.shared.get_or_make(
            "data",
            key,
            lambda: load_own_benchmark(
                self.data_plan,
                str(self.target.model),
                self.seed,
                self.model,
                held,
                self.form_rows,
                self.soft_prompt_rows,
                self.table_counting,
            ),
        )
        if benchmark.text_form is not None:
            self.shared.forms[chosen] = benchmark.text_form
        if self._folder is not None and benchmark.text_form is not None:
            self._folder.save_text_form(benchmark.text_form)
        return benchmark

    @cached_property
    def benchmark(self) -> Benchmark:
        """The data as this run sees them, every secret with the alias that sentences name it by."""
        # A shallow copy is enough: below, tuples are replaced and never changed, which other runs
        # do not see.
        benchmark, key = copy.copy(self.load_benchmark_shared_by_runs()), load_alias_salt()
        benchmark.notes += self.notes_on_models()
        limit_known_pairs(benchmark, self.data_plan.known_limit, self.seed)
        benchmark.secrets = secrets_with_aliases(benchmark.secrets, key)
        benchmark.canaries = secrets_with_aliases(benchmark.canaries, key)
        return benchmark

    def narrow_benchmark(self, benchmark: Benchmark) -> None:
        """Puts a part of the benchmark in its place: from now on the run is about these secrets."""
        self.__dict__["benchmark"] = benchmark  # where the cached property looks first

    @property
    def reference_fault_sentence(self) -> str:
        """Why the reference model cannot serve as one, as it was trained on private data; "" where
        it can."""
        name = self.target.reference or self.target.public or self.attacked_adapter_base_name
        if not name or self.reference_model is None:
            return ""
        folder = Path(name)
        if (record := promises.read_privacy_record(folder)) is not None:
            return (
                f"the reference has seen private data: its privacy.json says that {record.method} "
                "trained it"
            )
        listed = (
            set(names).intersection(self._attacked_ids_by_text_digest)
            if (names := read_shard_record_list(folder))
            else ()
        )
        if listed:
            return (
                f"the reference has seen private data: its shard.json names {len(listed)} of the "
                "attacked records"
            )
        return ""

    def load_reference_models_of_site(self, asked: str) -> ReferenceModels:
        """The reference models that `-A references=` names. Raises AuditError where that names
        none."""

        def load_one(folder: str) -> LanguageModel:
            model = self.models.load_model_of_role("references", folder)
            check_same_vocabulary_size(
                f"-A references={asked}",
                model.name,
                model.vocab_size,
                "the target's",
                self.model.vocab_size,
            )
            return model

        return self.shared.get_or_make(
            "all references",
            (self.subject, asked),
            lambda: load_reference_models(Path(asked), load_one, self._attacked_ids_by_text_digest),
        )

    @cached_property
    def _attacked_ids_by_text_digest(self) -> Mapping[str, Sequence[str]]:
        """Ids of the attacked records by the SHA-256 of their text; of two that say the same,
        both."""
        found: dict[str, list[str]] = {}
        decode = make_token_decoder(self.benchmark.tokenizer)
        for secret in self.benchmark.secrets:
            wording = secret.wording  # as its owner wrote it
            text = (
                decode(secret.prefix + secret.suffix)
                if wording is None
                else wording.prefix_and_suffix_text
            )
            found.setdefault(record_digests([text])[0], []).append(secret.id)
        return found

    # --- what defenses are made of ---

    def missing_input_phrase(self, defense: Defense) -> str:
        """What this defense would have to be given here; "" where it needs nothing more."""
        return missing_defense_input_phrase(defense, self.target.public)

    def refuse_unservable_defense(self, defense: Defense) -> None:
        """Refuses a defense that cannot stand here as it was asked for. Raises AuditError."""
        if not self.models.has_next_token_distributions:
            raise AuditError(
                f"--defense {defense.name} stands before a model whose distributions are read "
                f"here, got {self.target.model}, which gives none: serve the defended model, and "
                "audit that"
            )
        check_defense_inputs_given(defense, self.target.public)
        check_controls_trained_like_defense(defense)

    def is_control_the_undefended_model(self, control: Defense) -> bool:
        """Whether the model without a defense is this control: trained by the recipe of the
        members, on all data."""
        if "whole" not in control.needs:
            return False
        # The user may attack the very adapter that is the control of an ensemble.
        adapter, model = (
            ensemble_control_adapter_folder(Path(control.ensemble_folder)),
            Path(str(self.target.model)),
        )
        return adapter is not None and model.is_dir() and model.samefile(adapter)

    def ensemble_served_by_defense(self, defense: Defense) -> Ensemble:
        """The adapters that this defense serves."""
        folder = defense.ensemble_folder
        if folder not in self._ensembles:
            self._ensembles[folder] = load_lora_ensemble(
                Path(folder), self._public_model_for_adapters
            )
        return self._ensembles[folder]

    def model_trained_by_defense(self, defense: Defense) -> TrainedModel:
        """The model that this defense trains."""
        return load_trained_defense(
            defense,
            lambda folder: self.models.load_model_of_role("trained", folder),
            self.model.vocab_size,
        )

    def control_adapter_of_ensemble(self, defense: Defense) -> LanguageModel:
        """One adapter on all the records of the ensemble, by its members' recipe."""
        return load_control_adapter(Path(defense.ensemble_folder), self._public_model_for_adapters)

    @property
    def _public_model_for_adapters(self) -> HuggingFaceModel:
        """The public model, where adapters can be put on it. Raises AuditError for one that takes
        none."""
        public = self.public_model
        if not isinstance(public, HuggingFaceModel):
            raise AuditError(
                "expected --public as a transformers model, which the adapters of an ensemble are "
                f"put on, got {type(public).__name__}"
            )
        return public

    def training_seconds(self, defense: Defense | None, building: float) -> float | None:
        """Seconds that the models behind a row took to train, as far as known; building: what it
        took just now.

        defense: None for the model without one.
        """
        return None if defense is None else building


def limit_known_pairs(benchmark: Benchmark, limit: int | None, seed: int) -> None:
    """Leaves the attacker so many of the known pairs; a larger number, same seed, keeps all of a
    smaller one."""
    known = benchmark.known
    if limit is None or limit >= len(known):
        return
    kept = sorted(
        keyed_random_generator("benchmark", "known limit", seed).permutation(len(known))[:limit]
    )
    benchmark.known = tuple(known[i] for i in kept)
    benchmark.notes += (
        f"--known-limit left the attacker {limit} of {len(known)} auxiliary records",
    )


def _require_same_vocabulary(kind: str, own: LanguageModel, other: LanguageModel) -> LanguageModel:
    """The other model. Raises AuditError where it reads a text as other tokens than our own
    does."""
    ours, theirs = (one.tokenizer and one.tokenizer.get_vocab() for one in (own, other))
    if ours != theirs:
        raise AuditError(
            f"expected --{kind} with the tokenizer of --model, got {other.name} with another "
            "vocabulary"
        )
    return other


def _adapter_base_sentence(name: str, is_reference: bool) -> str:
    """What to say of the base of an adapter, where nobody named a reference."""
    if not is_reference:
        return (
            f"the adapter's base, {name}, has another vocabulary and is no reference: --reference "
            "MODEL names one"
        )
    return (
        f"reference: the adapter's base, {name}. It saw no private data only if the adapter alone "
        "was trained on them; --reference MODEL names another, --reference none takes none"
    )
