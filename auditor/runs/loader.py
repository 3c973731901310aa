"""Loads the models that a plan names outside the lab, each through its provider. Knows no data and
no defenses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import psutil

from auditor.core import safe_mode
from auditor.core.errors import AuditError
from auditor.core.plan import flag_of_plan_field, plan_field_names_with_rule
from auditor.core.plan_fields import AUTO, PLACED
from auditor.core.plan_parts import LoadingOptions, TargetPlan
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins import registry
from auditor.plugins.provider import Provider, RequestedModel
from auditor.runs.reporter import Reporter
from auditor.runs.sweep_cache import SweepCache


class ModelLoader:
    """live: models in memory, by role (model, public, reference), that stand for what a plan
    names."""

    run = ""  # which run pays for what is asked over a network
    attacked: LanguageModel | None = None  # the model, once it is loaded

    def __init__(
        self,
        target: TargetPlan,
        loading: LoadingOptions,
        reporter: Reporter,
        shared: SweepCache,
        live: Mapping[str, LanguageModel],
    ) -> None:
        self.target, self.loading, self.reporter, self.shared, self.live = (
            target,
            loading,
            reporter,
            shared,
            live,
        )

    @property
    def _provider_and_request(self) -> tuple[Provider, RequestedModel]:
        """Who is asked for the model that is attacked, and for what."""
        target, loading = self.target, self.loading
        provider, name = registry.resolve_model_provider(str(target.model), loading.model_args)
        return provider, RequestedModel(
            name, loading, target.base_url, target.tokenizer, self.run, target.max_tokens_total
        )

    @property
    def is_attacked_model_over_network(self) -> bool:
        return self.target.model is not None and self._provider_and_request[0].network

    @property
    def has_next_token_distributions(self) -> bool:
        """Whether the model gives whole next-token distributions."""
        if "model" in self.live:
            return "distribution" in self.live["model"].capabilities
        return self._provider_and_request[0].distribution

    @property
    def attacked_model_description(self) -> str:
        provider, wanted = self._provider_and_request
        return provider.describe_model(wanted)

    @cached_property
    def live_model_digests(self) -> dict[str, str]:
        """Digests by role, read once: a run asks twice, as a hub may send files in between; weights
        in memory stay."""
        return {
            f"{role}/in memory": digest
            for role, live in self.live.items()
            if (digest := live.digest())
        }

    def check_model_obtainable(self, given: Sequence[str]) -> None:
        """Refuses a model that cannot be had as the plan says. Raises AuditError.

        given: fields of the plan that say how models are had.
        """
        if "model" in self.live:
            return
        provider, wanted = self._provider_and_request
        beside = self.target.public is not None or self.target.reference is not None
        forms = [
            self._form_provider_and_request(form)[0] for form in self.target.forms if "://" in form
        ]
        served = [name for one in forms if one.network for name in one.takes]
        for name in given:
            if name not in (*provider.takes, *served) and not (
                beside and name in plan_field_names_with_rule(PLACED)
            ):
                taken = ", ".join(map(flag_of_plan_field, provider.takes)) or "none of the kind"
                raise AuditError(
                    f"{flag_of_plan_field(name)} says nothing to a model of the provider "
                    f"{provider.name}, which takes {taken}; got it with --model {self.target.model}"
                )
        provider.check(wanted)

    def load_model_of_role(
        self, kind: str, name: str, options: LoadingOptions | None = None
    ) -> LanguageModel:
        """options: how it is loaded; None: as a model beside the attacked one."""
        if kind in self.live:
            return self.live[kind]
        if kind == "model":
            return self._load_once_if_memory_suffices(kind, *self._provider_and_request)
        options = options or self.loading.for_companion_model()
        if options.dtype == AUTO and isinstance(
            self.attacked, HuggingFaceModel
        ):  # precision must tell no two apart
            options = replace(options, dtype=str(self.attacked.model.dtype).removeprefix("torch."))
        provider, name = registry.resolve_model_provider(name, options.model_args)
        if provider.network:
            raise AuditError(
                f"expected --{kind} as a model that is loaded here, got {provider.name}:{name}"
            )
        wanted = RequestedModel(name, options)
        provider.check(wanted)
        return self._load_once_if_memory_suffices(kind, provider, wanted)

    def load_deployed_form(self, place: str) -> LanguageModel:
        """A form of the model that is attacked, of any provider; it reads texts as that model's
        tokenizer does."""
        provider, wanted = self._form_provider_and_request(place)
        provider.check(wanted)
        return self._load_once_if_memory_suffices("form", provider, wanted)

    def _form_provider_and_request(self, place: str) -> tuple[Provider, RequestedModel]:
        provider, name = registry.resolve_model_provider(place, {})
        tokenizer = self.target.tokenizer or str(self.target.model)
        own = tokenizer if "tokenizer" in provider.takes else None
        return provider, RequestedModel(
            name,
            self.loading.for_companion_model(),
            None,
            own,
            self.run,
            self.target.max_tokens_total,
        )

    def _load_once_if_memory_suffices(
        self, kind: str, provider: Provider, wanted: RequestedModel
    ) -> LanguageModel:
        first = []

        def fresh() -> LanguageModel:
            if provider.network:
                safe_mode.refuse_in_safe_mode(
                    f"{wanted.name or wanted.base_url} would be asked over the network"
                )
            # All memory, not what is free now: only what can never fit is refused.
            needed, there = provider.estimate_least_bytes(wanted), psutil.virtual_memory().total
            if needed is not None and needed > there:
                sizes = f"{needed / 1e9:.1f} GB at least, got a machine with {there / 1e9:.1f} GB"
                raise AuditError(f"expected memory for {wanted.name}, {sizes}")
            first.append(provider.load(wanted))
            for note in first[0].notes:
                self.reporter.note(note)
            return first[0]

        loaded = self.shared.get_or_make(kind, (provider, wanted), fresh)
        if kind == "model":
            self.attacked = loaded
        if not first:  # the model of an earlier run of the sweep
            provider.prepare_for_next_run(loaded, wanted)
        return loaded
