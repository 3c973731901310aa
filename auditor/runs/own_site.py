"""A user's own model and data as the place of an audit: what it is given is loaded, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import psutil

from auditor.benchmarks.lab import Lab
from auditor.core import safe
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret
from auditor.core.plan import Plan, flag, ruled
from auditor.core.plan_fields import NONE, PLACED, PROVIDED
from auditor.core.plan_parts import LoadingOptions
from auditor.gate.deployed import ANSWERS
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import base_of
from auditor.models.lora import load_ensemble, load_whole
from auditor.models.references import References, load_references
from auditor.models.shards import read_shard, record_names, whole_adapter
from auditor.models.vocabulary import check_shared
from auditor.plugins import registry
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, TrainedModel
from auditor.plugins.provider import Provider, Wanted
from auditor.plugins.trainer import RECORD, made
from auditor.privacy import gradient_canaries, promises
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord
from auditor.records.folder import RunFolder
from auditor.runs.collector import decoder
from auditor.runs.own_data import load_data
from auditor.runs.reporter import Reporter
from auditor.runs.shared import Shared
from auditor.runs.site import Site
from auditor.training.variants import Variant


class OwnSite(Site):
    """What `--model` and `--data` (or `--canaries`) name, and what `--public`, `--reference` and `-D` put beside it.

    Live objects can stand in: `LiveSite` overrides how a model is loaded, its weights and its promise.
    """

    trains_on_demand: ClassVar[bool] = False

    def __init__(self, plan: Plan, reporter: Reporter, shared: Shared) -> None:
        super().__init__(plan, reporter, shared)
        self._ensembles: dict[str, Ensemble] = {}
        self._folder: RunFolder | None = None

    @property
    def attack_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return Lab.attack_defaults if self.plan.attacks.sizes == "lab" else MappingProxyType({})

    @property
    def defense_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return Lab.defense_defaults if self.plan.attacks.sizes == "lab" else MappingProxyType({})

    def lacks(self, defense: Defense) -> str:
        return lacks(defense, self.plan.target.public)

    def check(self, defense: Defense) -> None:
        if not self.distribution:
            raise AuditError(
                f"--defense {defense.name} stands before a model whose distributions are read here, got "
                f"{self.plan.target.model}, which gives none: serve the defended model, and audit that"
            )
        check_needs(defense, self.plan.target.public)
        check_controls(defense)

    def is_undefended(self, control: Defense) -> bool:
        if "whole" not in control.needs:
            return False
        adapter, model = whole_adapter(Path(control.ensemble_folder)), Path(str(self.plan.target.model))
        return adapter is not None and model.is_dir() and model.samefile(adapter)

    # --- what is loaded ---

    @property
    def _wanted(self) -> tuple[Provider, Wanted]:
        """Who is asked for the model that is attacked, and for what."""
        target, loading = self.plan.target, self.plan.loading
        provider, name = registry.provider_of(str(target.model), loading.model_args)
        run = "" if self._folder is None else self._folder.identity
        return provider, Wanted(name, loading, target.base_url, target.tokenizer, run, target.max_tokens_total)

    @property
    def network(self) -> bool:
        return self._wanted[0].network

    @property
    def base(self) -> str:
        return "" if self._base is None else self._base[0]

    @property
    def distribution(self) -> bool:
        """Whether the model gives whole next-token distributions."""
        return self._wanted[0].distribution

    def check_model(self) -> None:
        provider, wanted = self._wanted
        beside = self.plan.target.public is not None or self.plan.target.reference is not None
        for name in self.plan.given(PROVIDED | PLACED):
            if name not in provider.takes and not (beside and name in ruled(PLACED)):
                taken = ", ".join(map(flag, provider.takes)) or "none of the kind"
                raise AuditError(
                    f"{flag(name)} says nothing to a model of the provider {provider.name}, which takes {taken}; got "
                    f"it with --model {self.plan.target.model}"
                )
        provider.check(wanted)

    def weights(self) -> dict[str, str]:
        asked = {ANSWERS: self.model.digest()} if self.network and "model" in self.__dict__ else {}
        return super().weights() | asked

    @cached_property
    def model(self) -> LanguageModel:
        return self._load("model", str(self.plan.target.model), self.plan.loading)

    @property
    def description(self) -> str:
        provider, wanted = self._wanted
        return provider.said(wanted)

    @property
    def privacy(self) -> PrivacyRecord | None:
        return promises.read(Path(str(self.plan.target.model)))

    @property
    def canaries(self) -> GradientCanaries | None:
        return gradient_canaries.read(Path(str(self.plan.target.model)))

    @cached_property
    def public(self) -> LanguageModel | None:
        return self._beside("public", self.plan.target.public)

    @cached_property
    def reference(self) -> LanguageModel | None:
        if self.plan.target.reference not in (None, NONE):
            return self._beside("reference", self.plan.target.reference)
        if self.plan.target.reference == NONE or self.public is not None or self._base is None:
            return None if self.plan.target.reference == NONE else self.public
        size = self.model.vocab_size  # what does not load is said of the model that is attacked
        name, revision = self._base
        base = self._load("reference", name, replace(self.plan.loading, revision=revision, base=None))
        return base if base.vocab_size == size else None

    @cached_property
    def _base(self) -> tuple[str, str | None] | None:
        """Of an adapter that is attacked, its base and the revision of that; None for a whole model."""
        named = base_of(str(self.plan.target.model))
        return named if named is None or self.plan.loading.base is None else (self.plan.loading.base, None)

    @property
    def reference_fault(self) -> str:
        if self.reference is None:
            return ""
        folder = Path(self.plan.target.reference or self.plan.target.public or (self._base or ("", None))[0])
        if (record := promises.read(folder)) is not None:
            return f"the reference has seen private data: its privacy.json says that {record.method} trained it"
        listed = set(names).intersection(self._attacked) if (names := read_shard(folder)) else ()
        if listed:
            return f"the reference has seen private data: its shard.json names {len(listed)} of the attacked records"
        return ""

    def references(self, asked: str) -> References:
        def load_one(folder: str) -> LanguageModel:
            model = self._load("references", folder)
            check_shared(f"-A references={asked}", model.name, model.vocab_size, "the target's", self.model.vocab_size)
            return model

        made: References = self.shared.get(
            "all references", (self.subject, asked), lambda: load_references(Path(asked), load_one, self._attacked)
        )
        return made

    @cached_property
    def _attacked(self) -> Mapping[str, Sequence[str]]:
        """Ids of the attacked records by the SHA-256 of their text; of two that say the same, both."""
        found: dict[str, list[str]] = {}
        for secret in self.benchmark.secrets:
            found.setdefault(record_names([_text_of(secret, self.benchmark.tokenizer)])[0], []).append(secret.id)
        return found

    def data(self) -> Benchmark:
        held = None if self._folder is None else self._folder.text_form()
        key = [self.subject, held and held.digest]
        benchmark: Benchmark = self.shared.get(
            "data",
            key,
            lambda: load_data(self.plan.data, str(self.plan.target.model), self.plan.seed, self.model, held),
        )
        if self._folder is not None and benchmark.text_form is not None:
            self._folder.save_text_form(benchmark.text_form)
        return benchmark

    def opened(self, folder: RunFolder) -> None:
        self._folder = folder

    def notes(self) -> tuple[str, ...]:
        models = (self.model, self.public, self.reference)
        found = [note for model in models if model is not None for note in model.notes]
        if self._base is not None and self.plan.target.reference is None and self.plan.target.public is None:
            found.append(_of_base(self._base[0], self.reference is not None))
        return tuple(dict.fromkeys(found))

    def ensemble(self, defense: Defense) -> Ensemble:
        folder = defense.ensemble_folder
        if folder not in self._ensembles:
            self._ensembles[folder] = load_ensemble(Path(folder), self._under_adapters)
        return self._ensembles[folder]

    def trained(self, defense: Defense) -> TrainedModel:
        return trained_folder(defense, lambda folder: self._load("trained", folder), self.model.vocab_size)

    def whole(self, defense: Defense) -> LanguageModel:
        return load_whole(Path(defense.ensemble_folder), self._under_adapters)

    @property
    def _under_adapters(self) -> HuggingFaceModel:
        """The public model, where adapters can be put on it. Raises AuditError for one that takes none."""
        if not isinstance(self.public, HuggingFaceModel):
            raise AuditError(
                f"expected --public as a transformers model, which the adapters of an ensemble are put on, got "
                f"{type(self.public).__name__}"
            )
        return self.public

    def training_seconds(self, defense: Defense | None, building: float) -> float | None:
        return None if defense is None else building

    @cached_property
    def before(self) -> LanguageModel:
        return self._alike("before", self.plan.target.before)

    @cached_property
    def retrained(self) -> LanguageModel:
        return self._alike("retrained", self.plan.target.retrained)

    def _alike(self, kind: str, name: str | None) -> LanguageModel:
        """The same model, trained otherwise. Raises AuditError for another one, and for the one that is attacked."""
        own, here = self.model, Path(str(name))
        if here.is_dir() and Path(str(self.plan.target.model)).is_dir() and here.samefile(str(self.plan.target.model)):
            raise AuditError(f"expected --{kind} as another model than --model, got {name} as both")
        other = self._beside(kind, name)
        assert other is not None  # there is no row of it without a name
        if other.family != own.family:
            raise AuditError(f"expected --{kind} as {own.family}, as --model is, got {other.name}: {other.family}")
        ours, theirs = (one.tokenizer and one.tokenizer.get_vocab() for one in (own, other))
        if ours != theirs:
            raise AuditError(
                f"expected --{kind} with the tokenizer of --model, got {other.name} with another vocabulary"
            )
        return other

    def _beside(self, kind: str, name: str | None) -> LanguageModel | None:
        """A model that is asked about the same tokens. Raises AuditError for one of another vocabulary."""
        if name is None:
            return None
        other, own = self._load(kind, name), self.model
        at_least = "distribution" not in own.capabilities and other.vocab_size > own.vocab_size  # padding: nobody says
        if not at_least:
            check_shared(f"--{kind}", other.name, other.vocab_size, "the target's", own.vocab_size)
        return other

    def _load(self, kind: str, name: str, options: LoadingOptions | None = None) -> LanguageModel:
        """options: how, where it is not as a model beside the one that is attacked."""
        provider, wanted = self._wanted if kind == "model" else self._wanted_beside(kind, name, options)
        first = []

        def fresh() -> LanguageModel:
            if provider.network:
                safe.refuse(f"{name} would be asked over the network")
            _check_memory(provider, wanted)
            first.append(provider.load(wanted))
            for note in first[0].notes:
                self.reporter.note(note)
            return first[0]

        loaded: LanguageModel = self.shared.get(kind, (provider, wanted), fresh)
        if not first:
            provider.again(loaded, wanted)
        return loaded

    def _wanted_beside(self, kind: str, name: str, options: LoadingOptions | None) -> tuple[Provider, Wanted]:
        options = options or self.plan.loading.beside()
        provider, name = registry.provider_of(name, options.model_args)
        if provider.network:
            raise AuditError(f"expected --{kind} as a model that is loaded here, got {provider.name}:{name}")
        wanted = Wanted(name, options)
        provider.check(wanted)
        return provider, wanted


def _check_memory(provider: Provider, wanted: Wanted) -> None:
    """Raises AuditError where this machine has less memory than the model takes at least."""
    needed, there = provider.memory(wanted), psutil.virtual_memory().total
    if needed is not None and needed > there:
        sizes = f"{needed / 1e9:.1f} GB at least, got a machine with {there / 1e9:.1f} GB"
        raise AuditError(f"expected memory for {wanted.name}, {sizes}")


def _of_base(name: str, is_reference: bool) -> str:
    """What to say of the base of an adapter, where nobody named a reference."""
    if not is_reference:
        return f"the adapter's base, {name}, has another vocabulary and is no reference: --reference MODEL names one"
    return (
        f"reference: the adapter's base, {name}. It saw no private data only if the adapter alone was trained on them; "
        "--reference MODEL names another, --reference none takes none"
    )


def _text_of(secret: Secret, tokenizer: Any) -> str:
    """Prefix and suffix as their owner wrote them, or as the tokenizer does; the ids where there is none."""
    if secret.wording is not None:
        return secret.wording.prefix + secret.wording.suffix
    return decoder(tokenizer)([*secret.prefix, *secret.suffix])


# --- what defenses must be given --------------------------------------------------------------------------------------


def lacks(defense: Defense, public: str | None) -> str:
    """What this defense would have to be given outside the lab; "" where it has been."""
    ensemble = defense.ensemble_folder
    if {"ensemble", "whole"} & set(defense.needs) and not ensemble:
        return "-D ensemble=DIR, a folder of member adapters"
    if "whole" in defense.needs and whole_adapter(Path(ensemble)) is None:
        return f"an ensemble with its control: audit train pmixed -D control=true makes it in {ensemble!r}"
    if "public" in defense.needs and public is None:
        return "--public MODEL, one that has seen no private data (of an ensemble, the base of its members)"
    if "trained" in defense.needs and not defense.model_folder:
        return f"-D {defense.name}.model=DIR, a folder made by audit train {defense.name}"
    return ""


def check_needs(defense: Defense, public: str | None) -> None:
    """Refuses a defense whose needs only the lab would see to. Raises AuditError."""
    if what := lacks(defense, public):
        raise AuditError(f"--defense {defense.name} outside the lab needs {what}")


def check_controls(defense: Defense) -> None:
    """Refuses a control that was not trained as the model it stands beside. Raises AuditError with what differs."""
    own = promises.read(Path(defense.model_folder))
    for control in (cause.row for cause in defense.chain()):
        folder = "" if control is None else control.model_folder
        record = promises.read(Path(folder)) if folder else None
        if own is None or record is None:
            continue  # what is no folder of the right training is refused by `trained_folder`
        for what, one, other in promises.of_the_recipe(own, record):
            if one != other:
                raise AuditError(
                    f"expected the control {folder!r} to be trained as the {defense.name} model was, "
                    f"with {what} {one}, got {other}"
                )


def trained_folder(defense: Defense, load: Callable[[str], LanguageModel], vocab_size: int) -> TrainedModel:
    """The model that `-D model=` of a trained defense names. Raises AuditError for what it did not train."""
    folder = defense.model_folder
    if not Path(folder).is_dir():
        raise AuditError(f"expected -D model= of {defense.name} to be a folder that was trained, got {folder!r}")
    record, own = promises.read(Path(folder)), made(Path(folder))
    plain = isinstance(defense, Variant)  # nothing is promised of it, so nothing but its training says what it is
    by = own if plain else record
    if by is None or by.method != defense.name:
        found = f"a model trained by {by.method}" if by else f"no {RECORD if plain else promises.FILE}"
        raise AuditError(f"expected {folder!r} to be trained by audit train {defense.name}, got {found}")
    model = load(folder)
    check_shared(repr(folder), "it", model.vocab_size, "the target's", vocab_size)
    return TrainedModel(model, record, gradient_canaries.read(Path(folder)), own.told if own else ())
