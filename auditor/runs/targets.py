"""Build the targets of an audit: the undefended model, then each defense with its controls.

Workers build the same targets. Check that an attack or probe can run on a target, before the first
query and before each cell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from platform import node
from typing import Any

import numpy as np

from auditor.benchmarks.data.columns import UnreadRows
from auditor.benchmarks.data.large_tables import TableCounting
from auditor.core.errors import AuditError, NotApplicable, TargetLacks
from auditor.core.nouns import (
    UNDEFENDED,
    PrefixToken,
    Secret,
    Tokens,
)
from auditor.core.plan import Plan
from auditor.core.plan_parts import name_deployed_form
from auditor.core.secret_table import SecretTable, select_members
from auditor.gate.comparability import digest_comparable_secrets
from auditor.models import self_check
from auditor.models.base import LanguageModel, number_long_texts
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, Prompt, Scenario, count_largest_lot
from auditor.plugins.options import describe_plugin
from auditor.plugins.probe import Probe
from auditor.plugins.view import SETTINGS, TEXT_ONLY, Setting, View
from auditor.reports import phrases
from auditor.runs import plan_weights
from auditor.runs.audit import RunContext, Target, list_attack_queries, plan_token_counts
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.runs.reporter import StageClock
from auditor.runs.selection import explain_skipped_method, select_plugins
from auditor.runs.shown_rows import (
    BeforeUnlearning,
    NamedForm,
    RelearnedBaseline,
    RetrainedBaseline,
    ShownRow,
    UnlearningBaseline,
)
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.statistics.unlearning import AFTER
from auditor.training.unlearning import train_relearned_copy


class Targets:
    """An audit's targets: the undefended one, and the one that is attacked now, with its views."""

    def __init__(self, scene: RunContext) -> None:
        self.scene = scene
        site = scene.site
        self.beside = UnlearningBaselines(site)
        self.undefended = Target(
            UNDEFENDED,
            self._title_audited_model(),
            wrap_prefixed_model(site.model, scene.prefix_token.tokens),
            site.undefended_model_description,
            training_seconds=site.training_seconds(None, 0.0),
            secrets=scene.benchmark.secrets,
            trained=site.undefended_trained_model,
        )
        self._set_current_target(self.undefended)

    def _title_audited_model(self) -> str:
        """Return the model's name if only it and its deployed forms are audited."""
        scene = self.scene
        if any(models[AFTER] == UNDEFENDED for models in scene.selection.around):
            return "After unlearning"
        plan = scene.plan.target
        forms = set(map(name_deployed_form, plan.forms))
        if all(row.name in forms for row in scene.selection.rows):
            return phrases.title_only_model(plan.model, scene.benchmark.name)
        return "Undefended"

    def _set_current_target(self, target: Target) -> None:
        self._current = target
        self._views: dict[str, View] = {}

    def check_defense_claims(self) -> None:
        """Raise AuditError for impossible privacy promises and for missing baselines.

        Call this before queries, so that the error does not come hours later.
        """
        if self.scene.site.recipe is None:  # the lab trains a row's inputs when the row is reached
            for row in self.scene.selection.rows:
                if "beside" in row.defense.needs:
                    self.beside.refuse_unobtainable_baseline(row.defense)
                else:
                    row.defense.claim(self.build_defense_scenario(row.defense), 0)

    def build_targets(self, clock: StageClock) -> Iterator[Target]:
        """Yield the targets one after another; each is the current target until the next."""
        yield self.undefended
        for row in self.scene.selection.rows:
            with clock.timed_stage(f"build {row.name}"):
                self._set_current_target(self.build_row_target(row))
            yield self._current

    def get_shared_view(self, target: str, setting: str) -> View:
        """Return the one view that all attacks and probes use on this target in this setting.

        The target becomes the current one; a defended one is built anew. The shared view also
        shares samples: attacks with equal recipes use one pass.
        """
        current = self.find_target(target)
        if setting not in self._views:
            self._views[setting] = self.scene.make_target_view(current, SETTINGS[setting])
        return self._views[setting]

    def find_target(self, name: str) -> Target:
        """Return the target with this name; it becomes the current one."""
        if name != self._current.name:
            rows = {row.name: row for row in self.scene.selection.rows}
            self._set_current_target(
                self.undefended if name == UNDEFENDED else self.build_row_target(rows[name])
            )
        return self._current

    def build_row_target(self, row: ShownRow) -> Target:
        # Time the scenario too: in the lab it trains the defense's models.
        start = time.perf_counter()
        defense = row.defense
        scenario = self.build_defense_scenario(defense)
        model = wrap_prefixed_model(defense.protect(scenario), self.scene.prefix_token.tokens)
        building = time.perf_counter() - start
        return Target(
            row.name,
            row.title,
            model,
            describe_plugin(type(defense)),
            defense,
            scenario,
            training_seconds=self.scene.site.training_seconds(defense, building),
            secrets=self.list_attacked_secrets(defense),
            companion=row.companion,
            trained=scenario.trained,
        )

    def list_attacked_secrets(self, defense: Defense) -> Sequence[Secret]:
        """Return the secrets attacked with this defense.

        Some defenses are slow, because they query all parts of an ensemble, or all records in the
        context, for each token. For these, --ensemble-limit limits the number of secrets. Without
        this flag, the lab's own limit applies, unless the defense fixes the number of ensemble
        members.
        """
        benchmark = self.scene.benchmark
        limit = self.scene.plan.defenses.ensemble_limit
        if defense.required_member_count is None:
            limit = limit or benchmark.ensemble_limit
        if limit is None or not {"ensemble", "records"} & set(defense.needs):
            return benchmark.secrets
        return benchmark.few(limit)

    def build_defense_scenario(self, defense: Defense) -> Scenario:
        """Return the inputs from which the defense builds its model.

        The inputs include the number of tokens that attacks on this target will draw under the
        claim.
        """
        scene = self.scene
        site = scene.site
        view = scene.make_target_view(self.undefended, TEXT_ONLY)
        attacks = scene.selection.list_defense_attacks(defense)
        attacked = self.list_attacked_secrets(defense)
        # Plan with the undefended target, because the defense, which needs these numbers, does not
        # exist yet.
        draws = plan_token_counts(view, attacks, attacked)
        lengths = [1]
        for attack in attacks:
            for query in list_attack_queries(view, attack, attacked):
                lengths.append(query.length)
        for secret in attacked:
            lengths.append(len(secret.suffix))
        inputs: dict[str, Any] = {"ensemble": None}
        if "ensemble" in defense.needs:
            inputs["ensemble"] = site.ensemble_served_by_defense(defense)
        if "trained" in defense.needs:
            inputs["trained"] = site.model_trained_by_defense(defense)
            scene.check_models_self_consistent([inputs["trained"].model])
        if "whole" in defense.needs:
            inputs["whole"] = site.control_adapter_of_ensemble(defense)
        if "records" in defense.needs:
            tokens = scene.prefix_token.tokens
            inputs["prompts"] = tuple(_build_prompt(secret, tokens) for secret in attacked)
        if "corpus" in defense.needs:
            inputs["corpus"] = _list_distinct_texts(scene.benchmark)
        if "beside" in defense.needs:
            inputs["beside"] = self.beside.load_baseline(defense)
        # 0 queries until the defense derives its lots from the scenario.
        scenario = Scenario(
            site.model, site.public_model, queries=0, answer_length=max(lengths), **inputs
        )
        return replace(scenario, queries=count_largest_lot(draws, defense.budget_lots(scenario)))


def _list_distinct_texts(benchmark: Benchmark) -> tuple[Tokens, ...]:
    """Return the distinct training texts, both as complete texts and as cut for the attacks."""
    # The base class gives the texts as cut for attacks; a benchmark may give complete texts.
    texts = (
        *benchmark.texts_with_repeat_counts(True),
        *Benchmark.texts_with_repeat_counts(benchmark, True),
    )
    return tuple(dict.fromkeys(tokens for tokens, _ in texts))


def _build_prompt(secret: Secret, prefix_token: Tokens) -> Prompt:
    context = (*prefix_token, *secret.prefix)
    return Prompt(secret.id, context, (*context, *secret.suffix) if secret.member else ())


class UnlearningBaselines:
    """Provider of the baselines of unlearned models. Each baseline is loaded or trained once.

    A baseline is a model with which an unlearned model is compared. One of them is relearned: the
    unlearned model after some more steps of training.

    Attributes:
        steps: number of steps of relearning; None for no relearning.
        rate: learning rate of relearning.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.steps = site.plan.defenses.relearn
        self.rate = site.plan.defenses.relearn_rate or (5e-5 if site.recipe is None else 1e-4)
        self._made: dict[UnlearningBaseline, LanguageModel] = {}

    def load_baseline(self, defense: Defense) -> LanguageModel:
        """Return the model of this baseline. Raise AuditError if the model is unavailable."""
        assert isinstance(defense, UnlearningBaseline)  # only they need "beside"
        if defense not in self._made:
            self._made[defense] = self._load_or_train_model(defense)
        return self._made[defense]

    def refuse_unobtainable_baseline(self, defense: Defense) -> None:
        """Raise AuditError if the model of this baseline is unavailable.

        Call this early, before any training.
        """
        if isinstance(defense, RelearnedBaseline) or (
            isinstance(defense, RetrainedBaseline) and defense.relearned
        ):
            self._choose_relearning_texts()
        # Loading is the check, and the row reuses the loaded model.
        if isinstance(defense, BeforeUnlearning | NamedForm):
            self.load_baseline(defense)
        elif isinstance(defense, RetrainedBaseline):
            self.load_baseline(RetrainedBaseline())

    def _load_or_train_model(self, baseline: UnlearningBaseline) -> LanguageModel:
        if isinstance(baseline, NamedForm):
            return self.site.load_deployed_form(baseline.place)
        if isinstance(baseline, BeforeUnlearning):
            return self.site.model_before_or_retrained("before")
        if isinstance(baseline, RetrainedBaseline):
            model = self.site.model_before_or_retrained("retrained")
            if not baseline.relearned:
                return model
        elif isinstance(baseline, RelearnedBaseline) and baseline.of is not None:
            model = self.site.model_trained_by_defense(baseline.of).model
        else:
            model = self.site.model
        return self._relearn_model(model)

    def _choose_relearning_texts(self) -> Sequence[Tokens]:
        """Return training records that are neither attacked nor to be forgotten.

        Raise AuditError if no such records exist.
        """
        if not (texts := self.site.benchmark.unattacked_training_tokens):
            raise AuditError(
                "expected auxiliary data to relearn on (--known or --known-fraction), got none"
            )
        return texts

    def _relearn_model(self, model: LanguageModel) -> LanguageModel:
        steps = self.steps
        assert steps is not None  # a relearned target requires steps
        if not isinstance(model, HuggingFaceModel):
            raise AuditError(
                f"expected a transformers model to relearn, which can be trained, got {model.name}"
            )
        return train_relearned_copy(
            model,
            self._choose_relearning_texts(),
            steps=steps,
            rate=self.rate,
            seed=self.site.plan.seed,
            progress=lambda n_done: self.site.reporter.progress(
                f"relearning of {model.name}", n_done, steps
            ),
        )


def sort_by_lengths(items: Sequence[Any]) -> Sequence[Any]:
    """Sort secrets or queries so that equally long texts follow each other, and share batches.

    The windows of a long text, of which each begins with the one before, stay together.
    """
    numbers = number_long_texts(map(attrgetter("prefix"), items)).tolist()
    last = dict(zip(numbers, map(attrgetter("lengths"), items), strict=True))
    order = sorted(range(len(items)), key=lambda i: (sum(last[numbers[i]]), last[numbers[i]]))
    if isinstance(items, SecretTable):  # objects would take five times its memory
        return items[np.array(order, np.int64)]
    return list(map(items.__getitem__, order))


def split_by_membership(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Split secrets into members and non-members; queries stay together.

    The run reads members' and non-members' texts apart. An engine divides equal lists among its
    workers in the same way, so each worker has these texts in its cache.
    """
    if not items or not isinstance(items[0], Secret):
        return [items]
    return [select_members(items), select_members(items, False)]


def describe_serving(site: Site) -> list[dict[str, Any]]:
    """Return how the loaded models are served, which the run's self-checks have chosen."""
    return list(map(self_check.describe_findings, _list_checked_models(site)))


def _list_checked_models(site: Site) -> list[HuggingFaceModel]:
    models = (site.model, site.public_model, site.reference_model)
    return [model for model in models if isinstance(model, HuggingFaceModel)]


def fingerprint_inputs(site: Site) -> dict[str, str]:
    """Return digests of all inputs, keyed by name. The model must be loaded.

    The run refuses a worker whose digests differ.
    """
    return {
        **plan_weights.digest_site_weights(site),
        **plan_weights.digest_plugin_files(site.plan),
        "the data": digest_comparable_secrets(site.benchmark.secrets),
    }


_worker_models = SweepCache()  # of this worker


@dataclass(frozen=True)
class WorkerModel:
    """Callable that loads the audited model of a plan on a worker, for its `WorkerTargets`."""

    plan: Plan

    def __call__(self) -> None:
        site = _build_worker_site(self.plan)
        with suppress(AuditError):  # `WorkerTargets` reports it
            select_plugins(site)  # it chooses the precision
            site.model  # noqa: B018 - this loads it


def _build_worker_site(plan: Plan) -> Site:
    # A submission is a file on the run's machine; a worker would refuse its path.
    site = Site(plan.with_fields(submission=None), shared=_worker_models)
    site.may_train = False
    return site


@dataclass(frozen=True)
class WorkerTargets:
    """Callable that builds a worker's targets from the files and plug-ins on its machine.

    Args:
        plan: plan of the run.
        counted: statistics of large tables, so that workers need not count their rows again. The
            keys are made of flag and name.
        prefix_token: prefix token of the run.
        serving: how the run's models are served, from `describe_serving`.
        input_digests: digests of the run's inputs, keyed by name; the worker's must match.
    """

    plan: Plan
    counted: Mapping[str, UnreadRows]
    prefix_token: PrefixToken
    serving: Sequence[Mapping[str, Any]]
    input_digests: Mapping[str, str]

    def __call__(self) -> Targets:
        """Build the targets.

        Raise AuditError if the worker's weights or data differ from those of the run.
        """
        site = _build_worker_site(self.plan)
        site.table_counting = TableCounting(counted=dict(self.counted))
        selection = select_plugins(site)
        scene = RunContext(site, selection, self.prefix_token)
        # In this order: `Targets` loads the model, and hub files have no digest before they are
        # downloaded.
        targets = Targets(scene)
        digests = fingerprint_inputs(site)
        for name, digest in self.input_digests.items():
            if digests.get(name) != digest:
                raise AuditError(
                    f"expected every worker to read the same data as the run, but {name} differs "
                    f"on {node()}"
                )
        for model, findings in zip(_list_checked_models(site), self.serving, strict=True):
            self_check.apply_findings(model, findings)
            model.enable_hidden_state_cache(bounded=True)
        return targets


def check_method_applies(
    method: Attack | Probe, target: Target, view: View, scene: RunContext
) -> None:
    """Raise NotApplicable if the attack or probe skips this target or an input is missing.

    Args:
        method: the attack or probe.
        target: the attacked model.
        view: the attacker's access to this model.
        scene: context of the run.
    """
    if reason := explain_skipped_method(method, target.defense):
        raise NotApplicable(reason)
    view.require_capability(*method.required_capabilities)
    if isinstance(method, Probe):
        method.check_inputs(view, select_probed_secrets(method, target, scene.benchmark, view))
    else:
        method.check_inputs(view, scene.challenge.known)


def select_probed_secrets(
    probe: Probe, target: Target, benchmark: Benchmark, view: View
) -> Sequence[Secret]:
    """Return the secrets or canaries that the probe observes.

    Raise NotApplicable if the data contain none.

    Args:
        probe: the probe, whose attribute `of` names the observed items.
        target: the observed model.
        benchmark: data of the run.
        view: access to the model.
    """
    if probe.of == "secrets":
        return target.secrets
    if probe.of == "own":
        return probe.textless_subjects(view)
    if not benchmark.canaries:
        raise NotApplicable(
            "the data contain no canaries: give --canaries MANIFEST (see `audit canaries`)"
        )
    coins = probe.of == "coins"
    chosen = tuple(canary for canary in benchmark.canaries if canary.has_coin == coins)
    if not chosen and coins:
        raise NotApplicable(
            "no coin decided which of these canaries went in: make them with canaries make --audit"
        )
    if not chosen:
        raise NotApplicable(
            "these canaries were made for an audit: the other possible texts of each are not "
            "recorded"
        )
    return chosen


def refuse_methods_that_cannot_run(
    scene: RunContext, undefended: Target, only_if_none_can: bool = False
) -> None:
    """Raise AuditError if a requested attack or probe would measure nothing in this run.

    An attack or probe is not refused if it may run on a defended model, which may offer the access
    that it needs.

    Args:
        scene: context of the run.
        undefended: the model without a defense.
        only_if_none_can: raise only if no attack or probe can run. A check (`audit check`) sets
            this, because it selects all cheap attacks and probes, and some of them may not apply.
    """
    refusals = []
    for method in scene.selection.methods:
        reasons = []
        for at in scene.selection.settings:
            reasons.append(_explain_inapplicable_method(method, undefended, scene, at))
        if None not in reasons:
            # Report the widest access, which comes last: it has the capabilities of all others.
            refusals.append(f"--attack {method.name} cannot run: {reasons[-1]}")
    if refusals and not (only_if_none_can and len(refusals) < len(scene.selection.methods)):
        raise AuditError("; ".join(refusals))


def _explain_inapplicable_method(
    method: Attack | Probe, undefended: Target, scene: RunContext, setting: Setting
) -> str | None:
    """Return why the attack or probe cannot run on the undefended model in this setting.

    Return None if it can run, or if a defended model may offer the missing access.
    """
    view = scene.make_target_view(undefended, setting)
    try:
        check_method_applies(method, undefended, view, scene)
    except TargetLacks as why:
        return None if scene.selection.rows else str(why)
    except NotApplicable as why:
        return str(why)
    return None
