"""A user's own model and data as the place of an audit: what it is given is loaded, and nothing is
trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from auditor.benchmarks.lab.lab import Lab
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.plan_fields import NONE
from auditor.core.plan_parts import DataPlan, LoadingOptions, TargetPlan
from auditor.gate.deployed import ANSWERS
from auditor.models.base import LanguageModel
from auditor.models.loading import adapter_base_and_revision
from auditor.models.references import ReferenceModels, load_reference_models
from auditor.models.shards import read_shard_record_list, record_digests
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import TrainedModel
from auditor.privacy import gradient_canaries, promises
from auditor.records.folder import RunFolder
from auditor.runs.loader import ModelLoader
from auditor.runs.own_data import load_own_benchmark
from auditor.runs.own_defenses import OwnDefenseParts
from auditor.runs.per_secret_results import make_token_decoder
from auditor.runs.reporter import Reporter
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache


class OwnSite(Site):
    """What `--model` and `--data` (or `--canaries`) name, and what `--public`, `--reference` and
    `-D` put beside it.

    live: models in memory, by role, as `ModelLoader` takes them. The folder that one was once
    loaded from is not believed, as the weights may have moved since: no promise of privacy is read
    there, and the digest is that of the weights in memory, where the model tells one.
    """

    trains_on_demand: ClassVar[bool] = False

    def __init__(
        self,
        target: TargetPlan,
        loading: LoadingOptions,
        data_plan: DataPlan,
        sizes: str,
        seed: int,
        subject: dict[str, Any],
        reporter: Reporter,
        shared: SweepCache,
        live: Mapping[str, LanguageModel] = MappingProxyType({}),
    ) -> None:
        super().__init__(data_plan, seed, subject, reporter, shared)
        self.target, self.sizes, self.models = (
            target,
            sizes,
            ModelLoader(target, loading, reporter, shared, live),
        )
        self._folder: RunFolder | None = None

    @property
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        return Lab.attack_defaults if self.sizes == "lab" else MappingProxyType({})

    @cached_property
    def defense_parts(self) -> OwnDefenseParts:
        return OwnDefenseParts(self, self.models, self.sizes)

    # --- what is loaded ---

    @property
    def is_model_asked_over_network(self) -> bool:
        return self.models.is_attacked_model_over_network

    @property
    def attacked_adapter_base_name(self) -> str:
        return "" if self._adapter_base_and_revision is None else self._adapter_base_and_revision[0]

    @property
    def names_reference_model(self) -> bool:
        if "reference_model" in self.__dict__:  # it was loaded: an adapter's base may be unfit
            return self.reference_model is not None
        if {"reference", "public"} & self.models.live.keys():
            return True
        if self.target.reference is not None:
            return self.target.reference != NONE
        return self.target.public is not None or self._adapter_base_and_revision is not None

    def read_auto_dtype_as_float32(self) -> None:
        self.models.loading = self.models.loading.with_float32_for_auto()

    def check_plan_model_is_obtainable(self, given: Sequence[str]) -> None:
        self.models.check_model_obtainable(given)

    def digests_of_models_in_no_file(self) -> dict[str, str]:
        # In `__dict__` once the cached property was asked for: this must not load the model.
        asked = (
            {ANSWERS: self.model.digest()}
            if self.is_model_asked_over_network and "model" in self.__dict__
            else {}
        )
        return asked | self.models.live_model_digests

    @cached_property
    def model(self) -> LanguageModel:
        return self.models.load_model_of_role("model", str(self.target.model))

    @property
    def undefended_model_description(self) -> str:
        return self.models.attacked_model_description

    @property
    def undefended_trained_model(self) -> TrainedModel:
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
        return self._load_model_with_same_vocabulary("public", self.target.public)

    @cached_property
    def reference_model(self) -> LanguageModel | None:
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
        named = adapter_base_and_revision(str(self.target.model))
        base = self.models.loading.base
        return named if named is None or base is None else (base, None)

    @property
    def reference_fault_sentence(self) -> str:
        if self.reference_model is None:
            return ""
        folder = Path(
            self.target.reference
            or self.target.public
            or (self._adapter_base_and_revision or ("", None))[0]
        )
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

    def load_benchmark_shared_by_runs(self) -> Benchmark:
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

    def attach_run_folder(self, folder: RunFolder) -> None:
        self._folder, self.models.run = folder, folder.identity

    def notes_on_models(self) -> tuple[str, ...]:
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
        """Raises AuditError for a model of another family or vocabulary, and for the one that is
        attacked."""
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


def load_deployed_form_of_target(site: OwnSite, place: str) -> LanguageModel:
    """The model that is named as a form of the one that is attacked. Raises AuditError for one of
    other tokens."""
    other, own = site.models.load_deployed_form(place), site.model
    if {"distribution"} <= own.capabilities & other.capabilities:
        check_same_vocabulary_size(
            "--forms", other.name, other.vocab_size, "the target's", own.vocab_size
        )
    return _require_same_vocabulary("forms", own, other)


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
