"""Provide the site of an audit: the undefended model, models related to this model, and the data.

The lab's site (`lab_site.py`) trains models that a user's site loads. No other module distinguishes
kinds of sites.
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
from auditor.core.secret_randomness import make_keyed_generator
from auditor.gate.deployed import ANSWERS
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import read_adapter_base
from auditor.models.lora import load_control_adapter, load_lora_ensemble
from auditor.models.references import ReferenceModels, load_reference_models
from auditor.models.shards import (
    find_control_adapter,
    read_shard_record_list,
    record_digests,
)
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, TrainedModel
from auditor.privacy import gradient_canaries, promises
from auditor.records.aliases import alias_secrets, load_alias_salt
from auditor.records.folder import RunFolder
from auditor.runs.loader import ModelLoader
from auditor.runs.own_data import load_own_benchmark
from auditor.runs.own_defenses import (
    check_controls_trained_like_defense,
    check_defense_inputs_given,
    format_missing_input,
    load_trained_defense,
)
from auditor.runs.per_secret_results import make_token_decoder
from auditor.runs.reporter import Reporter, SilentReporter
from auditor.runs.sweep_cache import SweepCache


class SiteModels:
    """Models of a plan: the attacked model and related models, each loaded on first use.

    live: models in memory by role, as in `ModelLoader`. The folder of such a model is ignored,
    because its weights may have changed. Its privacy promise is therefore not read. Its digest is
    that of the weights in memory, if the model reports a digest.
    """

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter | None = None,
        shared: SweepCache | None = None,
        live: Mapping[str, LanguageModel] = MappingProxyType({}),
    ) -> None:
        self.target = plan.target
        self.data_plan = plan.data
        self.attack_plan = plan.attacks
        self.seed = plan.seed
        self.subject = plan.model_and_secrets_fields
        self.reporter, self.shared = reporter or SilentReporter(), shared or SweepCache()
        self.models = ModelLoader(plan.target, plan.loading, self.reporter, self.shared, live)
        self.table_counting = TableCounting()
        self._folder: RunFolder | None = None
        self._ensembles: dict[str, Ensemble] = {}

    @property
    def is_model_asked_over_network(self) -> bool:
        """True if the model is queried over a network.

        A single process then holds the query budget and the answers.
        """
        return self.models.is_attacked_model_over_network

    @property
    def attacked_adapter_base_name(self) -> str:
        """Name of an attacked adapter's base model; "" for a complete model."""
        if self._adapter_base_and_revision is None:
            return ""
        return self._adapter_base_and_revision[0]

    @property
    def names_reference_model(self) -> bool:
        """True if there will be a reference model, as far as the plan shows before models are
        loaded.
        """
        if "reference_model" in self.__dict__:  # already loaded: an adapter's base may be unfit
            return self.reference_model is not None
        if {"reference", "public"} & self.models.live.keys():
            return True
        if self.target.reference is not None:
            return self.target.reference != NONE
        return self.target.public is not None or self._adapter_base_and_revision is not None

    def read_auto_dtype_as_float32(self) -> None:
        """Make `--dtype auto` mean float32, which some attacks need. Call this before models are
        loaded.
        """
        self.models.loading = self.models.loading.resolve_auto_dtype()

    def check_plan_model_is_obtainable(self, fields: Sequence[str]) -> None:
        """Raise AuditError, before loading, for a model that the plan's options cannot reach.

        fields: the plan's fields that say how to reach models.
        """
        self.models.check_model_obtainable(fields)

    def digest_fileless_models(self) -> dict[str, str]:
        """Return the digest of each loaded model without files, by `role/...`."""
        # `__dict__` holds a cached property after its first use: this must not load the model.
        if self.is_model_asked_over_network and "model" in self.__dict__:
            digests = {ANSWERS: self.model.digest()}
        else:
            digests = {}
        return digests | self.models.live_model_digests

    @cached_property
    def model(self) -> LanguageModel:
        """Attacked model, without a defense."""
        return self.models.load_role_model("model", str(self.target.model))

    @property
    def undefended_model_description(self) -> str:
        """Description of the undefended model, as a sentence without full stop."""
        return self.models.attacked_model_description

    @property
    def undefended_trained_model(self) -> TrainedModel:
        """Undefended model, with the known promises, canaries and messages (`notes`) of its
        training.
        """
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
        """Model trained without private data; None if the plan names no such model."""
        return self._load_matching_model("public", self.target.public)

    @cached_property
    def reference_model(self) -> LanguageModel | None:
        """Model whose likelihoods attacks compare with the target's; None without such a model."""
        if self.target.reference not in (None, NONE):
            return self._load_matching_model("reference", self.target.reference)
        if (
            self.target.reference == NONE
            or self.public_model is not None
            or self._adapter_base_and_revision is None
        ):
            if self.target.reference == NONE:
                return None
            return self.public_model
        # Load the attacked model first, so that its failure is reported under its role.
        size = self.model.vocab_size
        name, revision = self._adapter_base_and_revision
        base = self.models.load_role_model(
            "reference", name, replace(self.models.loading, revision=revision, base=None)
        )
        return base if base.vocab_size == size else None

    @cached_property
    def _adapter_base_and_revision(self) -> tuple[str, str | None] | None:
        """Name of the base model of an attacked adapter, and its revision; None for a complete
        model.
        """
        if self.target.model is None:
            return None
        recorded = read_adapter_base(self.target.model)
        base = self.models.loading.base
        if recorded is None or base is None:
            return recorded
        return (base, None)

    def notes_on_models(self) -> tuple[str, ...]:
        """Sentences on the models for readers."""
        models = (self.model, self.public_model, self.reference_model)
        notes = []
        for model in models:
            if model is not None:
                for note in model.notes:
                    notes.append(note)
        if (
            self._adapter_base_and_revision is not None
            and self.target.reference is None
            and self.target.public is None
        ):
            notes.append(
                _describe_adapter_base(
                    self._adapter_base_and_revision[0], self.reference_model is not None
                )
            )
        return tuple(dict.fromkeys(notes))

    def model_before_or_retrained(self, kind: str) -> LanguageModel:
        """Load a baseline of unlearning.

        kind: `before` for the model before unlearning, or `retrained` for a model trained without
        the records to forget. Raise AuditError for a model of another family or vocabulary, and for
        the attacked model itself.
        """
        if kind == "before":
            name = self.target.before
        else:
            name = self.target.retrained
        target = self.model
        folder = Path(str(name))
        if (
            folder.is_dir()
            and Path(str(self.target.model)).is_dir()
            and folder.samefile(str(self.target.model))
        ):
            raise AuditError(f"expected --{kind} as another model than --model, got {name} as both")
        other = self._load_matching_model(kind, name)
        assert other is not None  # a row needs a name
        if other.family != target.family:
            raise AuditError(
                f"expected --{kind} as {target.family}, as --model is, got {other.name}: "
                f"{other.family}"
            )
        return _require_same_vocabulary(kind, target, other)

    def load_deployed_form(self, place: str) -> LanguageModel:
        """Load a deployed form of the attacked model. place: folder, hub id or address of the form.

        Raise AuditError if its vocabulary differs.
        """
        other = self.models.load_deployed_form(place)
        target = self.model
        if {"distribution"} <= target.capabilities & other.capabilities:
            check_same_vocabulary_size(
                "--forms", other.name, other.vocab_size, "the target's", target.vocab_size
            )
        return _require_same_vocabulary("forms", target, other)

    def _load_matching_model(self, kind: str, name: str | None) -> LanguageModel | None:
        """Load the model of this role; None without a name.

        Raise AuditError if its vocabulary size differs from the attacked model's.
        """
        if name is None:
            return None
        target = self.model
        other = self.models.load_role_model(kind, name)
        # Unknown padding may explain a larger vocabulary.
        may_be_padded = (
            "distribution" not in target.capabilities and other.vocab_size > target.vocab_size
        )
        if not may_be_padded:
            check_same_vocabulary_size(
                f"--{kind}", other.name, other.vocab_size, "the target's", target.vocab_size
            )
        return other


class Site(SiteModels):
    """Models and data of an audit. A new site loads nothing; models are loaded or trained on first
    use.

    Args:
        subject: plan values that decide the attacked model and the secrets, which runs may share.
        trains_on_demand: True if the inputs of a defense are trained when the run reaches the
        defense. If False, they exist from the start, so that the run can refuse a promise early.
        may_train: train missing models; if False, refuse them on use.
        hurried: choose the prefix token on few known pairs.
        form_rows: most data rows for choosing the text form; None for the default.
        soft_prompt_rows: rows of the longest soft prompt, which use positions of the context.
        relearn_rate: default learning rate of `--relearn`.
    """

    trains_on_demand: ClassVar[bool] = False
    may_train = True
    hurried = False  # choose a prefix token by few known pairs, for a check
    # most rows for the choice of a text form; None: its default
    form_rows: int | None = None
    # rows of the longest soft prompt of an attack: they take room in a context
    soft_prompt_rows = 0
    relearn_rate: ClassVar[float] = 5e-5  # default of `--relearn`

    @property
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Default options of attacks by name, sized for these models and data."""
        if self.attack_plan.sizes == "lab":
            return Lab.attack_defaults
        return {}

    @property
    def default_defense_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Default options of defenses by name, sized for these models and data."""
        if self.attack_plan.sizes == "lab":
            return Lab.defense_defaults
        return {}

    def attach_run_folder(self, folder: RunFolder) -> None:
        """Attach the run folder. Call this before anything is loaded."""
        self._folder = folder
        self.models.run = folder.identity

    # --- the data ---

    def load_benchmark_shared_by_runs(self) -> Benchmark:
        """Load the secrets, known pairs and held-out texts.

        Runs with equal `subject` share these data.
        """
        # Omit the limit: the chosen form stays, even if fewer records are attacked.
        form_key = json.dumps([to_json(self.target), to_json(replace(self.data_plan, limit=None))])
        form = (
            None if self._folder is None else self._folder.text_form()
        ) or self.shared.forms.get(form_key)
        key = [self.subject, form and form.digest, self.soft_prompt_rows]
        benchmark = self.shared.get_or_make(
            "data",
            key,
            lambda: load_own_benchmark(
                self.data_plan,
                str(self.target.model),
                self.seed,
                self.model,
                form,
                self.form_rows,
                self.soft_prompt_rows,
                self.table_counting,
            ),
        )
        if benchmark.text_form is not None:
            self.shared.forms[form_key] = benchmark.text_form
        if self._folder is not None and benchmark.text_form is not None:
            self._folder.save_text_form(benchmark.text_form)
        return benchmark

    @cached_property
    def benchmark(self) -> Benchmark:
        """This run's data, with an alias of each secret for use in sentences."""
        # A shallow copy is enough: replacing tuples below does not affect other runs.
        benchmark = copy.copy(self.load_benchmark_shared_by_runs())
        key = load_alias_salt()
        benchmark.notes += self.notes_on_models()
        limit_known_pairs(benchmark, self.data_plan.known_limit, self.seed)
        benchmark.secrets = alias_secrets(benchmark.secrets, key)
        benchmark.canaries = alias_secrets(benchmark.canaries, key)
        return benchmark

    def narrow_benchmark(self, benchmark: Benchmark) -> None:
        """Replace the benchmark by a part of the benchmark; the run then covers only these
        secrets.
        """
        self.__dict__["benchmark"] = benchmark  # the cached property reads this entry

    @property
    def reference_fault_sentence(self) -> str:
        """Sentence saying that the reference model was trained on private data; "" otherwise."""
        name = self.target.reference or self.target.public or self.attacked_adapter_base_name
        if not name or self.reference_model is None:
            return ""
        folder = Path(name)
        if (record := promises.read_privacy_record(folder)) is not None:
            return (
                f"the reference has seen private data: its privacy.json says that {record.method} "
                "trained it"
            )
        private = (
            set(names).intersection(self._attacked_ids_by_text_digest)
            if (names := read_shard_record_list(folder))
            else ()
        )
        if private:
            return (
                f"the reference has seen private data: its shard.json names {len(private)} of the "
                "attacked records"
            )
        return ""

    def load_reference_models_of_site(self, spec: str) -> ReferenceModels:
        """Load the reference models of `-A references=`. spec: value of this option.

        Raise AuditError if `spec` names no models.
        """

        def load_one(folder: str) -> LanguageModel:
            model = self.models.load_role_model("references", folder)
            check_same_vocabulary_size(
                f"-A references={spec}",
                model.name,
                model.vocab_size,
                "the target's",
                self.model.vocab_size,
            )
            return model

        return self.shared.get_or_make(
            "all references",
            (self.subject, spec),
            lambda: load_reference_models(Path(spec), load_one, self._attacked_ids_by_text_digest),
        )

    @cached_property
    def _attacked_ids_by_text_digest(self) -> Mapping[str, Sequence[str]]:
        """Ids of the attacked records, by the SHA-256 of their text. Records with equal texts share
        a key.
        """
        ids_by_digest: dict[str, list[str]] = {}
        decode = make_token_decoder(self.benchmark.tokenizer)
        for secret in self.benchmark.secrets:
            wording = secret.wording  # in its original spelling
            if wording is None:
                text = decode(secret.prefix + secret.suffix)
            else:
                text = wording.prefix_and_suffix_text
            ids_by_digest.setdefault(record_digests([text])[0], []).append(secret.id)
        return ids_by_digest

    # --- inputs of defenses ---

    def missing_input_phrase(self, defense: Defense) -> str:
        """Return the names of inputs that this defense lacks; "" if none is missing."""
        return format_missing_input(defense, self.target.public)

    def refuse_unservable_defense(self, defense: Defense) -> None:
        """Raise AuditError if these models and data do not suit the defense with its options."""
        if not self.models.has_next_token_distributions:
            raise AuditError(
                f"--defense {defense.name} needs a model whose distributions are read here, "
                f"got {self.target.model}, which gives none: serve the defended model, and "
                "audit that"
            )
        check_defense_inputs_given(defense, self.target.public)
        check_controls_trained_like_defense(defense)

    def is_control_the_undefended_model(self, control: Defense) -> bool:
        """Return whether the undefended model can serve as this control of a defense.

        It can if it is the adapter that was trained on all data by the recipe of the defense's
        ensemble.
        """
        if "whole" not in control.needs:
            return False
        # The user may attack the very adapter that is the control of an ensemble.
        adapter = find_control_adapter(Path(control.ensemble_folder))
        model = Path(str(self.target.model))
        return adapter is not None and model.is_dir() and model.samefile(adapter)

    def ensemble_served_by_defense(self, defense: Defense) -> Ensemble:
        """Load the adapters that this defense combines."""
        folder = defense.ensemble_folder
        if folder not in self._ensembles:
            self._ensembles[folder] = load_lora_ensemble(
                Path(folder), self._public_model_for_adapters
            )
        return self._ensembles[folder]

    def model_trained_by_defense(self, defense: Defense) -> TrainedModel:
        """Load or train the model of this defense."""
        return load_trained_defense(
            defense,
            lambda folder: self.models.load_role_model("trained", folder),
            self.model.vocab_size,
        )

    def control_adapter_of_ensemble(self, defense: Defense) -> LanguageModel:
        """Load the ensemble's control: an adapter trained on all records by the members' recipe."""
        return load_control_adapter(Path(defense.ensemble_folder), self._public_model_for_adapters)

    @property
    def _public_model_for_adapters(self) -> HuggingFaceModel:
        """Return the public model to put adapters on. Raise AuditError if this model accepts no
        adapter.
        """
        public = self.public_model
        if not isinstance(public, HuggingFaceModel):
            raise AuditError(
                "expected --public as a transformers model, which the adapters of an ensemble are "
                f"added to, got {type(public).__name__}"
            )
        return public

    def training_seconds(self, defense: Defense | None, building: float) -> float | None:
        """Return the seconds of training a target's models; None if unknown.

        defense: None for the undefended model. building: seconds that it took to make the models
        just now.
        """
        return None if defense is None else building


def limit_known_pairs(benchmark: Benchmark, limit: int | None, seed: int) -> None:
    """Limit the attacker's known pairs to `limit`.

    With an equal seed, a larger limit keeps all pairs of a smaller limit.
    """
    known = benchmark.known
    if limit is None or limit >= len(known):
        return
    indices = sorted(
        make_keyed_generator("benchmark", "known limit", seed).permutation(len(known))[:limit]
    )
    benchmark.known = tuple(known[i] for i in indices)
    benchmark.notes += (
        f"--known-limit left the attacker {limit} of {len(known)} auxiliary records",
    )


def _require_same_vocabulary(
    kind: str, subject: LanguageModel, other: LanguageModel
) -> LanguageModel:
    """Return the other model. Raise AuditError if its vocabulary differs from that of `subject`.

    kind: role of the other model in the error message.
    """
    target_vocab, other_vocab = (
        model.tokenizer and model.tokenizer.get_vocab() for model in (subject, other)
    )
    if target_vocab != other_vocab:
        raise AuditError(
            f"expected --{kind} with the tokenizer of --model, got {other.name} with another "
            "vocabulary"
        )
    return other


def _describe_adapter_base(name: str, is_reference: bool) -> str:
    """Explain whether the base model of an adapter is the reference model, if the user named
    none.
    """
    if not is_reference:
        return (
            f"the adapter's base, {name}, has another vocabulary and cannot be the reference: "
            "--reference MODEL names one"
        )
    return (
        f"reference: the adapter's base, {name}. It saw no private data only if nothing but the "
        "adapter was trained on them; --reference MODEL names another, --reference none takes none"
    )
