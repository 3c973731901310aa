"""Load the models that a plan outside the lab names, each through its provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import psutil

from auditor.core import safe_mode
from auditor.core.errors import AuditError
from auditor.core.plan import format_field_flag, list_ruled_fields
from auditor.core.plan_fields import AUTO, PLACED
from auditor.core.plan_parts import LoadingOptions, TargetPlan
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins import registry
from auditor.plugins.provider import Provider, RequestedModel
from auditor.runs.reporter import Reporter
from auditor.runs.sweep_cache import SweepCache


class ModelLoader:
    """Loader of a plan's models.

    `live` holds models in memory by role (model, public, reference), which replace the plan's
    models. `attacked` is the attacked model, or None before loading.
    """

    run = ""  # the run that pays for queries over a network
    attacked: LanguageModel | None = None  # the attacked model, after loading

    def __init__(
        self,
        target: TargetPlan,
        loading: LoadingOptions,
        reporter: Reporter,
        shared: SweepCache,
        live: Mapping[str, LanguageModel],
    ) -> None:
        self.target = target
        self.loading = loading
        self.reporter = reporter
        self.shared = shared
        self.live = live

    @property
    def _provider_and_request(self) -> tuple[Provider, RequestedModel]:
        """Provider of the attacked model, then the request that this provider receives."""
        target = self.target
        loading = self.loading
        provider, name = registry.resolve_model_provider(str(target.model), loading.model_args)
        return provider, RequestedModel(
            name, loading, target.base_url, target.tokenizer, self.run, target.max_tokens_total
        )

    @property
    def is_attacked_model_over_network(self) -> bool:
        return self.target.model is not None and self._provider_and_request[0].network

    @property
    def has_next_token_distributions(self) -> bool:
        """True if the attacked model returns full next-token distributions."""
        if "model" in self.live:
            return "distribution" in self.live["model"].capabilities
        return self._provider_and_request[0].distribution

    @property
    def attacked_model_description(self) -> str:
        provider, request = self._provider_and_request
        return provider.describe_model(request)

    @cached_property
    def live_model_digests(self) -> dict[str, str]:
        """Digests of the models in memory by role, computed once because weights do not change."""
        return {
            f"{role}/in memory": digest
            for role, live in self.live.items()
            if (digest := live.digest())
        }

    def check_model_obtainable(self, fields: Sequence[str]) -> None:
        """Raise AuditError if the plan's options do not suit the provider of the attacked model.

        fields: the plan's fields that say how to reach models.
        """
        if "model" in self.live:
            return
        provider, request = self._provider_and_request
        has_companions = self.target.public is not None or self.target.reference is not None
        forms = []
        for form in self.target.forms:
            if "://" in form:
                forms.append(self._resolve_form(form)[0])
        form_fields = []
        for form_provider in forms:
            if form_provider.network:
                for name in form_provider.takes:
                    form_fields.append(name)
        for name in fields:
            if name not in (*provider.takes, *form_fields) and not (
                has_companions and name in list_ruled_fields(PLACED)
            ):
                flags = ", ".join(map(format_field_flag, provider.takes)) or "none of the kind"
                raise AuditError(
                    f"{format_field_flag(name)} does not apply to a model of the provider "
                    f"{provider.name}, which takes {flags}; got it with --model {self.target.model}"
                )
        provider.check(request)

    def load_role_model(
        self, kind: str, name: str, options: LoadingOptions | None = None
    ) -> LanguageModel:
        """Load the model of a role, such as `public`. kind: the role. name: the model's folder or
        hub id.

        options: loading options; if None, the attacked model's options that suit a companion model.
        """
        if kind in self.live:
            return self.live[kind]
        if kind == "model":
            return self._load_once_if_memory_suffices(kind, *self._provider_and_request)
        options = options or self.loading.for_companion_model()
        if options.dtype == AUTO and isinstance(
            self.attacked, HuggingFaceModel
        ):  # precision must not distinguish two models
            options = replace(options, dtype=str(self.attacked.model.dtype).removeprefix("torch."))
        provider, name = registry.resolve_model_provider(name, options.model_args)
        if provider.network:
            raise AuditError(
                f"expected --{kind} as a model that is loaded here, got {provider.name}:{name}"
            )
        request = RequestedModel(name, options)
        provider.check(request)
        return self._load_once_if_memory_suffices(kind, provider, request)

    def load_deployed_form(self, place: str) -> LanguageModel:
        """Load a form of the attacked model from any provider, with the attacked model's tokenizer.

        place: folder, hub id or address of the form.
        """
        provider, request = self._resolve_form(place)
        provider.check(request)
        return self._load_once_if_memory_suffices("form", provider, request)

    def _resolve_form(self, place: str) -> tuple[Provider, RequestedModel]:
        provider, name = registry.resolve_model_provider(place, {})
        tokenizer = self.target.tokenizer or str(self.target.model)
        if "tokenizer" in provider.takes:
            tokenizer_option = tokenizer
        else:
            tokenizer_option = None
        return provider, RequestedModel(
            name,
            self.loading.for_companion_model(),
            None,
            tokenizer_option,
            self.run,
            self.target.max_tokens_total,
        )

    def _load_once_if_memory_suffices(
        self, kind: str, provider: Provider, model: RequestedModel
    ) -> LanguageModel:
        first = []

        def fresh() -> LanguageModel:
            if provider.network:
                safe_mode.refuse_unsafe(
                    f"{model.name or model.base_url} would be asked over the network"
                )
            # Compare with total memory, not free memory: refuse only models that can never fit.
            least = provider.estimate_least_bytes(model)
            total = psutil.virtual_memory().total
            if least is not None and least > total:
                sizes = f"{least / 1e9:.1f} GB at least, got a machine with {total / 1e9:.1f} GB"
                raise AuditError(f"expected memory for {model.name}, {sizes}")
            first.append(provider.load(model))
            for note in first[0].notes:
                self.reporter.note(note)
            return first[0]

        loaded = self.shared.get_or_make(kind, (provider, model), fresh)
        if kind == "model":
            self.attacked = loaded
        if not first:  # the cached model of an earlier run of the sweep
            provider.prepare_for_next_run(loaded, model)
        return loaded
