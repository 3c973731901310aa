"""Provide the models of a plan, each loaded on first use. The built-in lab trains its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from auditor.benchmarks.data.large_tables import TableCounting
from auditor.benchmarks.lab.lab import REFERENCES, Lab
from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe
from auditor.benchmarks.lab.real_lab import RealLab
from auditor.core import safe_mode
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import Tokens
from auditor.core.plan import Plan, format_field_flag, list_ruled_fields
from auditor.core.plan_fields import AUTO, NONE, PLACED
from auditor.core.plan_parts import SMALL, LoadingOptions, TargetPlan
from auditor.gate.deployed import ANSWERS
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import read_adapter_base
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins import registry
from auditor.plugins.defense import TrainedModel
from auditor.plugins.options import build_plugin
from auditor.plugins.provider import Provider, RequestedModel
from auditor.plugins.trainer import Trainer, read_recorded_prefix, read_training_summary
from auditor.privacy import gradient_canaries, promises
from auditor.records.folder import RunFolder
from auditor.runs.reporter import Reporter
from auditor.runs.sweep_cache import SweepCache
from auditor.training.variants import Variant

LABS: Mapping[str, type[Lab]] = {SMALL: Lab, "smollm2": RealLab}  # by `--lab`
# number of canaries in the lab of an epsilon audit: they can prove an epsilon above 5
AUDIT_CANARIES = 1000


def choose_lab_defaults(
    lab: type[Lab], recipe: BaseLabRecipe, attacks: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the default options of each defense for this lab's size, keyed by defense.

    Some defenses train like the target, except for one option. They get the target's training
    options as defaults. With the options, trainings include the canaries that `attacks` need.
    """
    defaults = {}
    for name, options in lab.defense_defaults.items():
        defaults[name] = dict(options)
    for name, kind in registry.list_trainers().items():
        if issubclass(kind, Variant):
            defaults[name] = recipe.target_training_options | defaults.get(name, {})
    for attack in attacks:
        for name, planted in lab.planted_for.get(attack, {}).items():
            defaults[name] |= planted
    return defaults


def build_mitigation_trainer(target: TargetPlan, recipe: BaseLabRecipe) -> Trainer | None:
    """Build the trainer of the plan's mitigation for the lab's target, or return None.

    A mitigation is a training that leaks less. Raise AuditError if the trainer does not make a
    single model from the lab's records.

    Args:
        target: the plan's fields about the target, with the mitigation's name and options.
        recipe: recipe of the lab.
    """
    options = dict(target.mitigation)
    if not options:
        return None
    name = options.pop("method", None)
    if not isinstance(name, str):
        raise AuditError(
            f"expected mitigation with a method ({', '.join(registry.list_mitigations())}), got "
            f"{name!r}"
        )
    defaults = choose_lab_defaults(LABS[target.lab], recipe).get(name, {})
    trainer: Trainer = build_plugin(
        "mitigation", registry.list_mitigations(), name, {**defaults, **options}
    )
    return trainer


def parse_reference_model_count(text: str) -> int:
    """Parse the option `-A references=`, the number of reference models to train in the lab.

    Raise AuditError for an invalid number.
    """
    least, most = REFERENCES
    if not text.isdecimal() or not least <= int(text) <= most:
        raise AuditError(
            f"expected -A references= in the lab as a number of models to train, from {least} to "
            f"{most}, got {text!r}"
        )
    return int(text)


def build_lab_recipe(plan: Plan) -> BaseLabRecipe:
    """Build the recipe of the plan's lab. Raise AuditError for an unknown field.

    For an epsilon audit, the lab inserts audit canaries into the training data of all models; a
    coin decides for each canary. If the lab's seed is "run", the run's seed also decides the texts
    and the trained models.
    """
    fields: dict[str, Any] = dict(plan.target.lab_recipe)
    if fields.get("seed") == "run":
        fields["seed"] = plan.seed
    probes = registry.list_probes()
    if any(probes[name].of == "coins" for name in plan.attacks.attack if name in probes):
        # In this order, so that the user's number wins.
        fields = {"audit_canaries": AUDIT_CANARIES, **fields}
    lengths = {"prefix_length": plan.data.prefix_length, "suffix_length": plan.data.suffix_length}
    fields |= {name: length for name, length in lengths.items() if length is not None}
    kind = LABS[plan.target.lab].recipe_kind
    default = to_json(kind())
    refuse_unknown_names("field of lab_recipe:", fields, default)
    recipe = from_json(kind, {**default, **fields}, "lab_recipe")
    recipe.check()
    return recipe


class SiteModels:
    """Models of a plan: the attacked model and related models, each loaded on first use.

    Args:
        live: models in memory, keyed by role (model, public, reference), which replace the plan's
            models. Their folders are not read, because the weights may have changed since they were
            saved; the privacy promise in the folder is also ignored. If such a model reports a
            digest, it is the digest of the weights in memory.
        objects: Python objects that the plan uses instead of names, keyed by role.

    Attributes:
        loading: the plan's options for loading, with the precision that the plug-ins need.
        recipe: recipe of the built-in lab, whose folders take the place of those that a user names;
            None for the user's own model.
        mitigation: training that makes the lab's attacked model; None for plain training.
        may_train: whether the lab trains missing models; otherwise they are refused on use.
    """

    folder: RunFolder | None = None  # of the run that pays for queries over a network
    recipe: BaseLabRecipe | None = None
    mitigation: Trainer | None = None
    may_train = True

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter | None = None,
        shared: SweepCache | None = None,
        live: Mapping[str, LanguageModel] = MappingProxyType({}),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.reporter, self.shared = reporter or Reporter(), shared or SweepCache()
        self.loading = plan.loading
        self.live = live
        self.objects = objects
        self.table_counting = TableCounting()
        self._ensembles: dict[str, Ensemble] = {}
        if plan.target.uses_builtin_lab:
            self.recipe = build_lab_recipe(plan)
            self.mitigation = build_mitigation_trainer(plan.target, self.recipe)

    @property
    def lab(self) -> Lab:
        """The plan's built-in lab, which trains models into folders."""
        recipe = self.recipe
        assert recipe is not None  # the caller asks for the lab of a plan without a model
        kind = LABS[self.plan.target.lab]
        limit = self.plan.data.limit
        return self.shared.get_or_make(
            "lab",
            (recipe, limit),
            lambda: kind(recipe, None, self.reporter.progress, limit, makes=self.may_train),
        )

    def find_model(self, name: str | None, train: Callable[[Lab], Path]) -> str | None:
        """Return the model that the plan names; in the lab, the folder of a model trained now."""
        return name if self.recipe is None else str(train(self.lab))

    @property
    def model_place(self) -> str:
        """Folder, hub id or address of the attacked model."""
        return str(
            self.find_model(self.plan.target.model, lambda lab: lab.target_folder(self.mitigation))
        )

    @property
    def is_model_asked_over_network(self) -> bool:
        """True if the model is queried over a network.

        If so, a single process holds the query budget and the answers.
        """
        return resolve_attacked_provider(self.plan.target, self.loading).network

    @property
    def attacked_adapter_base_name(self) -> str:
        """Name of an attacked adapter's base model; "" for a complete model."""
        if self._adapter_base_and_revision is None:
            return ""
        return self._adapter_base_and_revision[0]

    @property
    def names_reference_model(self) -> bool:
        """True if the run will have a reference model, as far as known before models are loaded."""
        if "reference_model" in self.__dict__:  # loaded: None if unsuitable
            return self.reference_model is not None
        if {"reference", "public"} & self.live.keys():
            return True
        target = self.plan.target
        if target.reference is not None:
            return target.reference != NONE
        return (
            self.recipe is not None
            or target.public is not None
            or self._adapter_base_and_revision is not None
        )

    def check_plan_model_is_obtainable(self, fields: Sequence[str]) -> None:
        """Raise AuditError if a model cannot be loaded with the plan's options.

        The model is not loaded for this check.

        Args:
            fields: the plan's fields that say where models are.
        """
        target = self.plan.target
        if "model" in self.live:
            return
        if self.recipe is not None:
            LABS[target.lab].read_package_versions()  # raises without them
            return
        provider, request = self._provider_and_request
        allowed = {*provider.takes}
        for form in target.forms:
            if "://" in form:
                form_provider = self._resolve_form(form)[0]
                if form_provider.network:
                    allowed |= {*form_provider.takes}
        if target.public is not None or target.reference is not None:
            allowed |= {*list_ruled_fields(PLACED)}
        for name in fields:
            if name not in allowed:
                flags = ", ".join(map(format_field_flag, provider.takes)) or "none of the kind"
                raise AuditError(
                    f"{format_field_flag(name)} does not apply to a model of the provider "
                    f"{provider.name}, which takes {flags}; got it with --model {target.model}"
                )
        provider.check(request)

    def digest_fileless_models(self) -> dict[str, str]:
        """Return the digest of each loaded model that has no files, keyed by `role/...`."""
        # `__dict__` holds a cached property after its first use: this must not load the model.
        if self.is_model_asked_over_network and "model" in self.__dict__:
            digests = {ANSWERS: self.model.digest()}
        else:
            digests = {}
        return digests | self._live_model_digests

    @cached_property
    def model(self) -> LanguageModel:
        """Attacked model, without a defense."""
        return self.load_role_model("model", self.model_place)

    @property
    def undefended_model_description(self) -> str:
        """Description of the undefended model, as a sentence without full stop."""
        if self.recipe is not None:
            instead = f", by {self.mitigation.name} instead of plainly" if self.mitigation else ""
            return f"the lab's target: the public model fine-tuned on private text{instead}"
        provider, request = self._provider_and_request
        return provider.describe_model(request)

    @property
    def undefended_trained_model(self) -> TrainedModel:
        """Undefended model, with the records of its training in its folder.

        These records are the privacy promise and the gradient canaries, if there are any. A model
        in memory has no such records.
        """
        if "model" in self.live:
            return TrainedModel(self.model, None)
        folder = Path(self.model_place)
        return TrainedModel(
            self.model,
            promises.read_privacy_record(folder),
            gradient_canaries.read_gradient_canaries(folder),
            tokens_after=read_training_summary(folder).tokens_after,
        )

    @property
    def recorded_prefix(self) -> Tokens | None:
        """Tokens before every record in the attacked model's training; None if unknown."""
        if "model" in self.live or self.plan.target.model is None:
            return None
        return read_recorded_prefix(Path(self.plan.target.model))

    @cached_property
    def public_model(self) -> LanguageModel | None:
        """Model trained without private data; None if the plan names no such model."""
        name = self.find_model(self.plan.target.public, lambda lab: lab.public_folder())
        return self._load_matching_model("public", name)

    @cached_property
    def reference_model(self) -> LanguageModel | None:
        """Model with whose likelihoods attacks compare those of the target.

        None if the run has no such model.
        """
        name = self.plan.target.reference
        if name == NONE:
            return None
        if name is not None:
            return self._load_matching_model("reference", name)
        if self.public_model is not None or self._adapter_base_and_revision is None:
            return self.public_model
        # Load the attacked model first, so that its failure is reported under its role.
        size = self.model.vocab_size
        base_name, revision = self._adapter_base_and_revision
        base = self.load_role_model(
            "reference", base_name, replace(self.loading, revision=revision, base=None)
        )
        return base if base.vocab_size == size else None

    @cached_property
    def _adapter_base_and_revision(self) -> tuple[str, str | None] | None:
        """Name and revision of the attacked adapter's base model; None for a complete model."""
        if self.plan.target.model is None:
            return None
        recorded = read_adapter_base(self.plan.target.model)
        base = self.loading.base
        if recorded is None or base is None:
            return recorded
        return (base, None)

    def notes_on_models(self) -> tuple[str, ...]:
        """Sentences about the models for readers."""
        notes: list[str] = []
        for model in filter(None, (self.model, self.public_model, self.reference_model)):
            notes += model.notes
        if self.mitigation is not None:
            notes += read_training_summary(Path(self.model_place)).told
        if (
            self._adapter_base_and_revision is not None
            and self.plan.target.reference is None
            and self.plan.target.public is None
        ):
            notes.append(
                _describe_adapter_base(
                    self._adapter_base_and_revision[0], self.reference_model is not None
                )
            )
        return tuple(dict.fromkeys(notes))

    def load_deployed_form(self, place: str) -> LanguageModel:
        """Load a deployed form of the attacked model, such as a quantised copy.

        Raise AuditError if its vocabulary differs from that of the attacked model.

        Args:
            place: folder, hub id or address of this copy.
        """
        provider, request = self._resolve_form(place)
        provider.check(request)
        other = self._load_once_if_memory_suffices("form", provider, request)
        target = self.model
        if {"distribution"} <= target.capabilities & other.capabilities:
            check_same_vocabulary_size(
                "--forms", other.name, other.vocab_size, "the target's", target.vocab_size
            )
        return require_same_vocabulary("forms", target, other)

    def _load_matching_model(self, kind: str, name: str | None) -> LanguageModel | None:
        """Load the model of this role; return None if `name` is None.

        Raise AuditError if its vocabulary size differs from that of the attacked model.
        """
        if name is None:
            return None
        target = self.model
        other = self.load_role_model(kind, name)
        # Without distributions, unknown padding may explain a larger vocabulary.
        if "distribution" in target.capabilities or other.vocab_size <= target.vocab_size:
            check_same_vocabulary_size(
                f"--{kind}", other.name, other.vocab_size, "the target's", target.vocab_size
            )
        return other

    @property
    def _provider_and_request(self) -> tuple[Provider, RequestedModel]:
        """Provider of the attacked model, then the request that this provider receives."""
        target = self.plan.target
        provider, name = registry.resolve_model_provider(self.model_place, self.loading.model_args)
        return provider, RequestedModel(
            name,
            self.loading,
            target.base_url,
            target.tokenizer,
            _identify_run(self.folder),
            target.max_tokens_total,
        )

    @cached_property
    def _live_model_digests(self) -> dict[str, str]:
        """Digests of the models in memory, keyed by role; computed once."""
        return {
            f"{role}/in memory": digest
            for role, live in self.live.items()
            if (digest := live.digest())
        }

    def load_role_model(
        self, kind: str, name: str, options: LoadingOptions | None = None
    ) -> LanguageModel:
        """Load the model of a role.

        Args:
            kind: the role, such as `public`.
            name: the model's folder or hub id.
            options: loading options. If None, use the attacked model's options, except those that
                suit only that model.
        """
        if kind in self.live:
            return self.live[kind]
        if kind == "model":
            return self._load_once_if_memory_suffices(kind, *self._provider_and_request)
        options = options or self.loading.for_companion_model()
        attacked = self.__dict__.get("model")  # the attacked model, if it is loaded
        if options.dtype == AUTO and isinstance(attacked, HuggingFaceModel):
            # Two models must not differ in precision.
            options = replace(options, dtype=str(attacked.model.dtype).removeprefix("torch."))
        provider, name = registry.resolve_model_provider(name, options.model_args)
        if provider.network:
            raise AuditError(
                f"expected --{kind} as a model that is loaded here, got {provider.name}:{name}"
            )
        request = RequestedModel(name, options)
        provider.check(request)
        return self._load_once_if_memory_suffices(kind, provider, request)

    def _resolve_form(self, place: str) -> tuple[Provider, RequestedModel]:
        provider, name = registry.resolve_model_provider(place, {})
        tokenizer = None
        if "tokenizer" in provider.takes:
            tokenizer = self.plan.target.tokenizer or str(self.plan.target.model)
        return provider, RequestedModel(
            name,
            self.loading.for_companion_model(),
            None,
            tokenizer,
            _identify_run(self.folder),
            self.plan.target.max_tokens_total,
        )

    def _load_once_if_memory_suffices(
        self, kind: str, provider: Provider, model: RequestedModel
    ) -> LanguageModel:
        is_fresh = False

        def fresh() -> LanguageModel:
            if provider.network:
                safe_mode.refuse_safe_mode_action(
                    f"{model.name or model.base_url} would be asked over the network"
                )
            # Compare with total memory, not free memory: refuse only models that can never fit.
            least = provider.estimate_least_bytes(model)
            total = psutil.virtual_memory().total
            if least is not None and least > total:
                sizes = f"{least / 1e9:.1f} GB at least, got a machine with {total / 1e9:.1f} GB"
                raise AuditError(f"expected memory for {model.name}, {sizes}")
            nonlocal is_fresh
            is_fresh = True
            new = provider.load(model)
            if self.recipe is not None:
                new.name = f"lab {Path(model.name).name}"  # reports name no folder of the cache
            for note in new.notes:
                self.reporter.note(note)
            return new

        loaded = self.shared.get_or_make(kind, (provider, model), fresh)
        if not is_fresh:  # the cached model of an earlier run of the sweep
            provider.prepare_for_next_run(loaded, model)
        return loaded


def _identify_run(folder: RunFolder | None) -> str:
    return "" if folder is None else folder.identity


def resolve_attacked_provider(target: TargetPlan, loading: LoadingOptions) -> Provider:
    """Return the provider of the attacked model; the lab's models are folders."""
    return registry.resolve_model_provider(target.model or "", loading.model_args)[0]


def require_same_vocabulary(
    kind: str, subject: LanguageModel, other: LanguageModel
) -> LanguageModel:
    """Return the other model. Raise AuditError if its vocabulary differs from that of `subject`.

    Args:
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
    """Return a sentence about whether the adapter's base model is used as the reference model.

    The base model is considered only if the user named no reference model.

    Args:
        name: the base model.
        is_reference: whether it is used.
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
