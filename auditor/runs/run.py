"""Walks a plan: benchmark, targets (the undefended first), then every target x setting x attack. Results in a record.

Fit, guess (a probe: observe) secret by secret, append, measure. Knows nothing of terminals: it speaks to a `Reporter`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from auditor import __version__
from auditor.benchmarks import canaries as manifests
from auditor.benchmarks.files import Files
from auditor.benchmarks.lab import Lab, LabRecipe
from auditor.benchmarks.lm_extraction import LMExtraction, is_lm_extraction
from auditor.core import threads
from auditor.core.errors import AuditError, NotApplicable, unknown
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import Certificate, Claim, Guesses, Lead, Observation, Secret, TokenLogProbs, Tokens
from auditor.core.plan import AUTO, SUBJECT, Plan, about
from auditor.core.result import AuditResult, BenchmarkRecord, Chain, Finding, Measurement, TargetRecord
from auditor.core.streams import CHANNELS, generator
from auditor.gate.comparable import fingerprint
from auditor.generation.sample import sample
from auditor.models import self_check
from auditor.models.base import LanguageModel, perplexity_nll
from auditor.models.decoding import GREEDY, by_shape
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load
from auditor.models.lora import load_ensemble, load_whole
from auditor.models.shards import whole_adapter
from auditor.plugins import registry
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Budget, Cause, Defense, Scenario, TrainedModel
from auditor.plugins.probe import Probe, probe_record
from auditor.plugins.trainer import Trainer
from auditor.plugins.view import CLAIM, SETTINGS, Meter, Setting, View
from auditor.privacy import promises
from auditor.privacy.promises import PrivacyRecord
from auditor.records import details, texts, weights
from auditor.records.folder import RunFolder, batched, cell_name
from auditor.records.names import fingerprint as salt_fingerprint
from auditor.records.names import named, refuse_ids, salt
from auditor.records.outcomes import Row
from auditor.runs import causes, companions, plan_weights, tuned
from auditor.runs.lead import choose, led
from auditor.runs.plan import check_general, options_for
from auditor.runs.submission import check_submission
from auditor.statistics import extraction, intervals, judging

UNDEFENDED = "undefended"


class Reporter(Protocol):
    """Where a run says what it is doing."""

    def stage(self, name: str) -> Any:
        """A context manager around a stage, which is timed."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        """What a user should know at once; the record holds it too."""

    def greedy(self, recall: Mapping[str, Measurement]) -> None:
        """The first real number: greedy recall by repeat count."""


@dataclass
class Target:
    """A model under attack, with the defense in front of it, if any."""

    name: str
    title: str
    model: LanguageModel
    description: str
    defense: Defense | None = None
    scenario: Scenario | None = None
    training_seconds: float | None = None
    secrets: tuple[Secret, ...] = ()  # that are attacked on it
    companion: bool = False  # shown beside a defense, not asked for by name
    spent: dict[tuple[str, str], int] = field(default_factory=dict)  # tokens drawn inside the claim: (recipe, secret)
    meter: Meter = field(default_factory=Meter)
    seconds: float = 0.0
    drawn: int = 0
    privacy: PrivacyRecord | None = None  # of an undefended model that was trained privately

    def budget(self) -> Budget | None:
        return self.defense.budget(self.scenario) if self.defense and self.scenario else None

    def claim(self) -> Claim | None:
        if self.defense and self.scenario:
            return self.defense.claim(self.scenario, sum(self.spent.values()))
        return self.privacy.claim() if self.privacy else None

    def trained(self) -> PrivacyRecord | None:
        """What the training of this model promised, if it was private."""
        held = self.scenario.trained if self.scenario else None
        return held.privacy if held else self.privacy

    def remarks(self) -> tuple[str, ...]:
        return self.defense.remarks(self.scenario) if self.defense and self.scenario else ()


class Shelf:
    """What consecutive runs of a sweep share: the last thing of each kind, so that two big models never coexist."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}
        self.fits: dict[str, dict[str, Any]] = {}  # soft prompts and the like: small, and worth minutes each

    def get(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        """The thing of this kind if the last one had this key, else a new one; the last one goes first."""
        if kind not in self._held or self._held[kind][0] != key:
            self._held.pop(kind, None)
            self._held[kind] = (key, make())
        return self._held[kind][1]


def run(plan: Plan, folder: RunFolder, reporter: Reporter, shelf: Shelf | None = None) -> AuditResult:
    """The whole audit. Everything that could be refused is refused before the first model is asked anything."""
    return _Run(plan, folder, reporter, shelf or Shelf()).walk()


class _Run:
    def __init__(self, plan: Plan, folder: RunFolder, reporter: Reporter, shelf: Shelf) -> None:
        self.plan, self.folder, self.reporter, self.shelf = plan, folder, reporter, shelf
        self.timings: dict[str, float] = {}
        self.states: dict[tuple[str, str], dict[str, Any]] = {}
        self.ensembles: dict[str, Ensemble] = {}
        self.outcomes: dict[str, Any] = {}  # what each cell found out about each secret
        self.answers: dict[Row, causes.Answers] = {}  # of them, the main number of each member
        self.likelihoods: dict[str, causes.Answers] = {}  # of true tokens, by target
        self.heldout: dict[str, Mapping[str, Sequence[float]]] = {}  # nll of each text, by target
        self.guessed: dict[str, dict[str, Tokens]] = {}  # the first guess of each cell and secret

    def walk(self) -> AuditResult:
        attack_types, defense_types = check(self.plan)
        before = plan_weights.of_plan(self.plan)
        self.folder.check_weights(before)  # before minutes of loading
        with self._stage("prepare"):
            self.benchmark, self.public, self.reference, undefended = self._prepare()
            self._limit_known()
        asked: list[Attack | Probe] = _chosen("attack", self.plan, attack_types, self.benchmark)
        self.attacks = [attack for attack in asked if isinstance(attack, Attack)]
        defenses = _chosen("defense", self.plan, defense_types, self.benchmark)
        key = salt()
        self.benchmark.secrets = named(self.benchmark.secrets, key)
        self.benchmark.canaries = named(self.benchmark.canaries, key)
        self.secrets = {secret.id: secret for secret in self.benchmark.secrets}
        self.challenge = self.benchmark.challenge()
        undefended.secrets = self.benchmark.secrets
        self.lead = self._choose_lead(undefended.model)
        self.folder.pin(fingerprint(_subjects(self.plan, self.benchmark)))
        everyone = (*self.benchmark.secrets, *self.benchmark.canaries)
        self.folder.save_secrets(details.facts(everyone, salt_fingerprint(key)))
        self._check_room(undefended)
        self.bare, undefended.model = undefended.model, led(undefended.model, self.lead.tokens)
        shown = companions.shown(defenses, partial(_is_row, self.plan))
        if not self.plan.lab:
            for row in shown:
                row.defense.claim(self._scenario(undefended, row.defense), 0)  # refused now rather than after hours
        self.weights = plan_weights.of_plan(self.plan)  # again: the hub may just have sent them
        weights.check(before, self.weights, "what was loaded just now")
        self.folder.pin_weights(self.weights)
        with self._stage("greedy recall"):
            secrets = self.benchmark.secrets
            greedy = self.shelf.get("greedy", self._asked_key(), lambda: greedy_recall(undefended.model, secrets))
        if greedy:
            self.reporter.greedy(greedy)
        targets, findings, judged = [], [], {}
        for target in self._targets(undefended, shown):
            _reset_peak_memory()
            with self._stage(f"perplexity of {target.title}"):
                held = self._perplexities(target)
            if "law" in target.model.capabilities:
                with self._stage(f"tokens of the secrets under {target.title}"):
                    self.likelihoods[target.name] = self._score_tokens(target)
            for setting in self._settings(target):
                for attack in asked:
                    with self._stage(f"{target.title}: {attack.name} ({setting.name})"):
                        if isinstance(attack, Probe):
                            findings.append(self._probe_cell(target, setting, attack))
                            refuse_ids(findings[-1], self.benchmark.secrets)
                            continue
                        finding, outcome = self._cell(target, setting, attack)
                        refuse_ids(finding, self.benchmark.secrets)
                    judged[target.name, setting.name, attack.name] = outcome
                    base = judged.get((UNDEFENDED, setting.name, attack.name))
                    findings.append(_compared(finding, outcome, base) if target is not undefended else finding)
            targets.append(_record(target, held, self.lead))
        self.folder.save_outcomes(self.outcomes)
        self.folder.save_heldout(self.heldout)
        texts.write_texts(self.folder.path, self.benchmark.secrets, self.guessed, _decoder(self.benchmark.tokenizer))
        findings = [self._explained(finding, shown) for finding in findings]
        likelier = {row.name: self._chain(row, shown, self.likelihoods.get) for row in shown if not row.companion}
        targets = [dataclasses.replace(target, likelihood=likelier.get(target.name)) for target in targets]
        return self._result(targets, findings, greedy, undefended.model.family)

    # --- what is attacked ---

    def _prepare(self) -> tuple[Benchmark, LanguageModel | None, LanguageModel | None, Target]:
        plan = self.plan
        if plan.lab:
            recipe, shelf = lab_recipe(plan), self.shelf
            key = (recipe, plan.limit)
            lab = copy.copy(shelf.get("lab", key, lambda: Lab(recipe, None, self.reporter.progress, plan.limit)))
            base, tuned = shelf.get("public", key, lab.public), shelf.get("model", key, lab.target)
            seconds = lab.training_seconds
            undefended = Target(
                UNDEFENDED, "Undefended", tuned, "the lab's target: the public model fine-tuned on private text"
            )
            undefended.training_seconds = seconds["public"] + seconds["target"]
            return lab, base, base, undefended
        assert plan.model is not None
        model = self._load("model", plan.model, main=True)
        public: LanguageModel | None = self._load("public", plan.public) if plan.public else None
        reference = self._load("reference", plan.reference) if plan.reference else public
        benchmark = copy.copy(self.shelf.get("data", self._data_key(), lambda: _load_data(plan, model)))
        told = (note for loaded in (model, public, reference) if loaded is not None for note in loaded.notes)
        benchmark.notes += tuple(dict.fromkeys(told))
        for other, flag in ((public, "--public"), (reference, "--reference")):
            if other is not None and other.vocab_size != model.vocab_size:
                raise AuditError(
                    f"expected {flag} to share the target's vocabulary of {model.vocab_size}, "
                    f"but {other.name} has {other.vocab_size}"
                )
        undefended = Target(UNDEFENDED, "Undefended", model, f"{plan.model}, as it is")
        undefended.privacy = promises.read(Path(plan.model))
        return benchmark, public, reference, undefended

    def _load(self, kind: str, name: str, main: bool = False) -> HuggingFaceModel:
        plan = self.plan
        options: dict[str, Any] = {
            "revision": plan.revision if main else None,
            "device": plan.device,
            "dtype": plan.dtype,
            "trust_remote_code": plan.trust_remote_code,
            "model_args": dict(plan.model_args) if main else None,
        }

        def fresh() -> HuggingFaceModel:
            model = load(name, **options)
            for note in model.notes:
                self.reporter.note(note)
            return model

        loaded: HuggingFaceModel = self.shelf.get(kind, (name, options), fresh)
        return loaded

    def _data_key(self) -> dict[str, Any]:
        """All of the plan that decides which model is attacked for which secrets."""
        values = to_json(self.plan)
        return {name: values[name] for name in about(SUBJECT) if name != "seed" or not self.plan.lab}

    def _asked_key(self) -> dict[str, Any]:
        """With what stands before every text: what is asked about it."""
        return {**self._data_key(), "lead": self.lead.tokens}

    def _choose_lead(self, model: LanguageModel) -> Lead:
        """Once a run, on the model without a defense; a resumed run keeps the one it was started with."""
        asked, held = self.plan.lead, self.folder.lead()
        if held is not None and asked == AUTO:
            return held
        assert isinstance(model, HuggingFaceModel)  # defenses come later
        known, canaries, longest = self.benchmark.known, self.benchmark.canaries, self._longest()
        key = [self._data_key(), asked, self.plan.known_limit, longest]
        lead: Lead = self.shelf.get("lead", key, lambda: choose(asked, model, known, longest, canaries))
        if held is None:
            self.folder.save_lead(lead)
        elif held.tokens != lead.tokens:
            raise AuditError(
                f"expected the lead that {str(self.folder.path)!r} was started with ({held.said}), got --lead {asked}"
            )
        return lead

    def _longest(self) -> int:
        """Tokens that a context takes beside the lead, at most."""
        prompt = self._prompt_length()
        known, secrets = self.benchmark.known, self.benchmark.secrets
        texts = [(pair.prefix, pair.suffix) for pair in known] + [(secret.prefix, secret.suffix) for secret in secrets]
        others = [*map(len, self.benchmark.heldout), *(len(canary.suffix) for canary in self.benchmark.canaries)]
        return max([*(prompt + len(prefix) + len(suffix) for prefix, suffix in texts), *others], default=0)

    def _limit_known(self) -> None:
        """Leaves the attacker so many of the known pairs; a larger number, same seed, keeps all of a smaller one."""
        known, limit = self.benchmark.known, self.plan.known_limit
        if limit is None or limit >= len(known):
            return
        kept = sorted(generator("benchmark", "known limit", self.plan.seed).permutation(len(known))[:limit])
        self.benchmark.known = tuple(known[i] for i in kept)
        self.benchmark.notes += (f"--known-limit left the attacker {limit} of {len(known)} known pairs",)

    def _prompt_length(self) -> int:
        """Rows of the longest soft prompt that an attack tunes."""
        return max((attack.prompt_rows() for attack in self.attacks), default=0)

    def _check_room(self, target: Target) -> None:
        longest = self._prompt_length()
        prompt = torch.empty(longest, 0) if longest else None
        lead = len(self.lead.tokens)
        for n_prefix, length in {(len(query.prefix), query.length) for query in self.challenge.queries}:
            target.model.check_room(n_prefix, length, prompt, lead)
            if self.public is not None:
                self.public.check_room(n_prefix, length, prompt, lead)
            if self.reference is not None:
                self.reference.check_room(n_prefix, length, lead=lead)
        for length in {len(canary.suffix) for canary in self.benchmark.canaries}:
            target.model.check_room(0, length, lead=lead)
        for model in (target.model, self.public, self.reference):
            self._self_check(model, longest)

    def _self_check(self, model: LanguageModel | None, prompt: int) -> None:
        """Whether it gives one law however it is asked, up to the longest text of this run behind the soft prompt."""
        if not isinstance(model, HuggingFaceModel):
            return
        texts = [len(query.prefix) + query.length for query in self.challenge.queries]
        texts += [len(canary.suffix) for canary in self.benchmark.canaries] + [*map(len, self.benchmark.heldout)]
        notes = self_check.check(model, prompt + len(self.lead.tokens) + max(texts, default=1))
        self.benchmark.notes += notes
        for note in notes:
            self.reporter.note(note)

    def _settings(self, target: Target) -> list[Setting]:
        """The plan's settings; a companion row is shown where the attacker is strongest, and nowhere else."""
        settings = _settings(self.plan)
        return settings[-1:] if target.companion else settings

    def _targets(self, undefended: Target, shown: Sequence[companions.Shown]) -> Iterator[Target]:
        """The undefended model first; then each defense with its companions, built when its turn comes."""
        yield undefended
        for row in shown:
            defense = row.defense
            with self._stage(f"build {row.name}"):
                start = time.perf_counter()
                scenario = self._scenario(undefended, defense)
                model = led(defense.protect(scenario), self.lead.tokens)
                seconds = time.perf_counter() - start
            if isinstance(self.benchmark, Lab):
                seconds = self._trained_for(self.benchmark, defense)
            description = registry.description(type(defense))
            yield Target(
                row.name,
                row.title,
                model,
                description,
                defense,
                scenario,
                seconds,
                self._attacked(defense),
                row.companion,
            )

    def _attacked(self, defense: Defense) -> tuple[Secret, ...]:
        """Fewer behind an ensemble, where --ensemble-limit or the lab says so: it asks all its parts at every token."""
        limit = self.plan.ensemble_limit or self.benchmark.ensemble_limit
        if limit is None or "ensemble" not in defense.needs:
            return self.benchmark.secrets
        return self.benchmark.few(limit)

    def _trained_for(self, lab: Lab, defense: Defense) -> float:
        """Seconds that the lab's models behind this row took to train."""
        whole = "target" if lab.recipe.target_is_whole else "whole"
        parts = {"public": "public", "ensemble": "ensemble", "whole": whole}
        seconds = sum(lab.training_seconds[part] for need, part in parts.items() if need in defense.needs)
        if isinstance(defense, Trainer):
            return lab.training_seconds["public"] + lab.seconds_of(defense)
        return seconds

    def _scenario(self, undefended: Target, defense: Defense) -> Scenario:
        queries = sum(self._planned(undefended, CLAIM, self._attacked(defense)).values())
        length = max((query.length for query in self.challenge.queries), default=1)
        ensemble = self._ensemble(defense) if "ensemble" in defense.needs else None
        trained = self._trained(undefended, defense) if "trained" in defense.needs else None
        whole = self._whole(defense) if "whole" in defense.needs else None
        return Scenario(self.bare, self.public, ensemble, queries, length, trained, whole)

    def _trained(self, undefended: Target, defense: Defense) -> TrainedModel:
        """The model that this defense trains: in the lab on demand, elsewhere from its folder."""
        if isinstance(self.benchmark, Lab):
            assert isinstance(defense, Trainer)
            made: TrainedModel = self.shelf.get("trained", (self._data_key(), defense), self._train(defense))
            return made
        held = trained_folder(defense, lambda folder: self._load("trained", folder), undefended.model.vocab_size)
        self._self_check(held.model, self._prompt_length())
        return held

    def _train(self, defense: Trainer) -> Callable[[], TrainedModel]:
        assert isinstance(self.benchmark, Lab)
        return partial(self.benchmark.trained, defense)

    def _ensemble(self, defense: Defense) -> Ensemble:
        if isinstance(self.benchmark, Lab):
            ensemble: Ensemble = self.shelf.get("ensemble", self._data_key(), self.benchmark.ensemble)
            return ensemble
        folder = defense.ensemble_folder
        if folder not in self.ensembles:
            assert isinstance(self.public, HuggingFaceModel)  # `check` has seen to it
            self.ensembles[folder] = load_ensemble(Path(folder), self.public)
        return self.ensembles[folder]

    def _whole(self, defense: Defense) -> LanguageModel:
        """One adapter on all the records of the ensemble, by its members' recipe."""
        if isinstance(self.benchmark, Lab):
            made: LanguageModel = self.shelf.get("whole", self._data_key(), self.benchmark.whole)
            return made
        assert isinstance(self.public, HuggingFaceModel)  # `check` has seen to it
        return load_whole(Path(defense.ensemble_folder), self.public)

    # --- one cell ---

    def _view(self, target: Target, setting: Setting) -> View:
        public, reference = (other and led(other, self.lead.tokens) for other in (self.public, self.reference))
        return View(
            target_name=target.name,
            target=target.model,
            setting=setting,
            seed=self.plan.seed,
            public=public,
            reference=reference,
            tokenizer=self.benchmark.tokenizer,
            batch_size=self.plan.batch_size,
            meter=target.meter,
        )

    def _planned(self, target: Target, setting: Setting, secrets: Sequence[Secret]) -> dict[tuple[str, str], int]:
        """Tokens each (recipe, secret) will draw in this setting, in the order of attacks and secrets."""
        view, planned = self._view(target, setting), {}
        for attack in self.attacks:
            if not set(attack.required) <= setting.capabilities:
                continue
            try:
                recipes = attack.recipes(view)
            except NotApplicable:
                continue
            for recipe, samples in recipes.items():
                planned.update({(recipe, secret.id): samples * len(secret.suffix) for secret in secrets})
        return planned

    def _shared_view(self, target: Target, setting: Setting) -> View:
        """One view a target and setting: its sampling passes are shared, and a budget is shared out beforehand."""
        key = (target.name, setting.name)
        if getattr(self, "_view_key", None) != key:
            self._view_key, self._current = key, self._view(target, setting)
            budget = target.budget()
            if budget is not None and setting is CLAIM:
                self._current.allowance = share_out(budget, self._planned(target, setting, target.secrets))
        return self._current

    def _cell(self, target: Target, setting: Setting, attack: Attack) -> tuple[Finding, judging.Outcome | None]:
        view = self._shared_view(target, setting)
        finding = _empty(target, setting, attack, view, self.lead)
        start = time.perf_counter()
        try:
            for capability in attack.required:
                view.need(capability)
            state = self._state(target, view, attack)
            guesses = self._guess(target, view, attack, state)
        except NotApplicable as why:
            return dataclasses.replace(finding, not_applicable=str(why)), None
        if not guesses:
            reason = "the budget pays for no whole answer: 0 secrets covered"
            return dataclasses.replace(finding, not_applicable=reason), None
        outcome = judging.judge(guesses, self.secrets)
        members = outcome.only(outcome.member)
        if not len(members.ids):
            return dataclasses.replace(finding, not_applicable="the budget covers no member"), None
        cell = cell_name(target.name, setting.name, attack.name)
        self.outcomes[cell] = {
            **judging.to_record(outcome),
            "score_is_probability": attack.score_is_probability(view),
        }
        own = dict(zip(members.ids, members.hit.astype(float).tolist(), strict=True))
        self.answers[target.name, setting.name, attack.name] = causes.Answers("recall", "share", own)
        self.guessed[cell] = {g.secret: g.ranked[0].suffix for g in guesses}
        return dataclasses.replace(
            finding,
            measurements=tuple(extraction.extraction(outcome)),
            by_repeats=extraction.by_repeats("recall", members),
            curve=extraction.error_curve(members),
            notes=finding.notes
            + attack.notes(view, state)
            + _remarks(guesses, target.secrets, self.benchmark)
            + _paid(view, attack, guesses),
            seconds=time.perf_counter() - start,
            drawn=sum(g.drawn for g in guesses),
            rows=sum(g.rows for g in guesses),
        ), outcome

    def _probe_cell(self, target: Target, setting: Setting, probe: Probe) -> Finding:
        view = self._shared_view(target, setting)
        finding = _empty(target, setting, probe, view, self.lead)
        start = time.perf_counter()
        try:
            for capability in probe.required:
                view.need(capability)
            secrets = self._of(probe, target)
            claim = target.claim()
            target.meter.spent = claim.spent_queries if claim else target.meter.drawn
            observations = self._observe(target, view, probe, secrets)
        except NotApplicable as why:
            return dataclasses.replace(finding, not_applicable=str(why))
        few = _few(secrets, self.benchmark) if probe.of == "secrets" else ()
        cell = cell_name(target.name, setting.name, probe.name)
        self.outcomes[cell] = probe_record(probe, secrets, observations)
        measured = tuple(probe.measurements(secrets, observations))
        by_secret = probe.per_secret(secrets, observations).get(measured[0].name, [])
        own = {s.id: x for s, x in zip(secrets, by_secret, strict=False) if s.member}
        if own and np.isfinite(list(own.values())).all():
            found = causes.Answers(measured[0].name, measured[0].unit, own)
            self.answers[target.name, setting.name, probe.name] = found
        return dataclasses.replace(
            finding,
            measurements=measured,
            by_repeats=probe.by_repeats(secrets, observations),
            notes=finding.notes + few + probe.notes(secrets, observations),
            violations=probe.violations(secrets, observations),
            seconds=time.perf_counter() - start,
        )

    def _of(self, probe: Probe, target: Target) -> tuple[Secret, ...]:
        """What the probe looks at."""
        if probe.of == "secrets":
            return target.secrets
        if not self.benchmark.canaries:
            raise NotApplicable("the data hold no canaries: give --canaries MANIFEST (see `audit canaries`)")
        return self.benchmark.canaries

    def _observe(self, target: Target, view: View, probe: Probe, secrets: Sequence[Secret]) -> list[Observation]:
        """An observation of every secret, in their order."""
        cell = cell_name(target.name, view.setting.name, probe.name)
        done = self.folder.observed(cell)
        waiting = [secret for secret in secrets if secret.id not in done]
        for batch in batched(probe.measure(view, waiting), 16):
            self.folder.observe(cell, batch)
            self.reporter.progress(f"{probe.name} on {target.title}", len(done), len(secrets))
        completed = probe.complete(secrets, [done[secret.id] for secret in secrets])
        changed = [observation for observation in completed if observation != done[observation.secret]]
        if changed:
            self.folder.observe(cell, changed)
        return completed

    def _score_tokens(self, target: Target) -> causes.Answers:
        """Where the model gives each member away: its true suffix token by token, for whoever mends the model.

        One teacher-forced pass a target, of the auditor and not of an attacker: it charges no claim. Returns the mean
        log-probability of each secret's tokens, non-members' as the floor.
        """
        done = {} if target.companion else self.folder.scored(target.name)  # a companion is no model to mend
        for scored in self._scored(target, [s for s in target.secrets if s.member and s.id not in done]):
            if target.companion:
                done |= {one.secret: one for one in scored}
            else:
                self.folder.score(target.name, scored)
        others = itertools.chain(*self._scored(target, [s for s in target.secrets if not s.member]))
        own, floor = (
            {one.secret: float(np.mean(one.log_probs)) for one in scored if one.log_probs}
            for scored in (done.values(), others)
        )
        return causes.Answers("likelihood", "nats a token", own, floor)

    def _scored(self, target: Target, waiting: Sequence[Secret]) -> Iterator[list[TokenLogProbs]]:
        for indices in by_shape([(len(s.prefix), len(s.suffix)) for s in waiting], self.plan.batch_size or 64):
            batch = [waiting[i] for i in indices]
            prefixes = torch.tensor([secret.prefix for secret in batch], device=target.model.device)
            suffixes = torch.tensor([secret.suffix for secret in batch], device=target.model.device)
            with torch.no_grad():
                seen = target.model.token_log_probs(prefixes, suffixes).double().tolist()
            yield [TokenLogProbs(s.id, tuple(row)) for s, row in zip(batch, seen, strict=True)]

    def _state(self, target: Target, view: View, attack: Attack) -> dict[str, Any]:
        name = f"{attack.name}-{attack.state_name(view)}"
        key = (attack.name, attack.state_name(view))
        if key not in self.states:
            saved = tuned.load(self.folder, name)
            if saved is None:
                plan = self.plan
                # A defense may be set up for what the row will draw: another number is another model to tune on.
                queries = target.scenario.queries if target.scenario else None
                made_of = [plan.seed, plan.known_limit, plan.defense_options, queries, key, attack.fit_options()]
                shared = json.dumps([self._asked_key(), *made_of], sort_keys=True)
                saved = self.shelf.fits.get(shared) or attack.fit(view, self.challenge.known)
                tuned.save(self.folder, name, saved)
                self.shelf.fits[shared] = saved
            self.states[key] = saved
        return self.states[key]

    def _guess(self, target: Target, view: View, attack: Attack, state: dict[str, Any]) -> list[Guesses]:
        cell = cell_name(target.name, view.setting.name, attack.name)
        done = self.folder.done(cell)
        asked = {secret.id for secret in target.secrets}
        waiting = [query for query in self.challenge.queries if query.id in asked and query.id not in done]
        start, drawn = time.perf_counter(), 0
        for batch in batched(attack.guess(view, state, waiting), 16):
            self.folder.append(cell, batch)
            drawn += sum(g.drawn for g in batch)
            self.reporter.progress(f"{attack.name} on {target.title}", len(done), len(asked))
        if view.setting is CLAIM:
            target.seconds += time.perf_counter() - start
            target.drawn += drawn
            self._charge(target, view, attack, done)
        return list(done.values())

    def _charge(self, target: Target, view: View, attack: Attack, done: Mapping[str, Guesses]) -> None:
        """Every token drawn inside the claim is charged once: attacks that share a pass share its charge."""
        for recipe in attack.recipes(view):
            for secret, guesses in done.items():
                paid = guesses.drawn if view.allowance is None else view.allowance[recipe, secret]
                target.spent[recipe, secret] = paid

    # --- what it all came to ---

    def _explained(self, finding: Finding, shown: Sequence[companions.Shown]) -> Finding:
        """With the steps of its defense's chain, in the setting that the controls were attacked in."""
        row = next((row for row in shown if row.name == finding.target and not row.companion), None)
        if row is None or finding.setting != _settings(self.plan)[-1].name:
            return finding
        chain = self._chain(row, shown, lambda name: self.answers.get((name, finding.setting, finding.attack)))
        return dataclasses.replace(finding, chain=chain)

    def _chain(
        self, row: companions.Shown, shown: Sequence[companions.Shown], answers: Callable[[str], causes.Answers | None]
    ) -> Chain | None:
        """answers: of a target, by its name."""
        base = answers(UNDEFENDED)
        if base is None or not (steps := row.defense.chain()):
            return None
        rungs = [self._rung(row, cause, shown, answers) for cause in steps]
        return causes.chain(row.name, (UNDEFENDED, base), rungs)

    def _rung(
        self,
        row: companions.Shown,
        cause: Cause,
        shown: Sequence[companions.Shown],
        answers: Callable[[str], causes.Answers | None],
    ) -> causes.Rung:
        control = cause.row
        if control is None:
            name = row.name
        elif _is_target(self.plan, control):
            name = UNDEFENDED
        else:
            name = companions.name_of(shown, control)
        found = answers(name)
        title = registry.title(type(control or row.defense))
        absent = f"{title!r} ({'not measured' if name else cause.needs})"
        return causes.Rung(cause, name, found, "" if found else absent)

    def _perplexities(self, target: Target) -> tuple[Measurement, ...]:
        """Of the held-out texts, the law's own first; none where there are no such texts."""
        if not self.benchmark.heldout:
            return ()

        def scored() -> dict[str, Sequence[float]]:
            nll, tokens = zip(*perplexity_nll(target.model, self.benchmark.heldout), strict=True)
            return {
                "tokens": tokens,
                "perplexity": nll,
                **target.model.other_nll(self.benchmark.heldout, self.plan.seed),
            }

        found = scored() if target.defense else self.shelf.get("perplexity", self._asked_key(), scored)
        self.heldout[target.name] = found
        tokens = [int(count) for count in found["tokens"]]
        return tuple(
            intervals.perplexity(list(zip(nll, tokens, strict=True)), name)
            for name, nll in found.items()
            if name != "tokens"
        )

    def _result(
        self, targets: list[TargetRecord], findings: list[Finding], greedy: dict[str, Measurement], family: str
    ) -> AuditResult:
        return AuditResult(
            name=self.folder.path.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tool_version=__version__,
            command=self.plan.command,
            plan=to_json(self.plan),
            benchmark=_benchmark_record(self.benchmark, _subjects(self.plan, self.benchmark), greedy),
            targets=tuple(targets),
            findings=tuple(findings),
            environment=environment(self.plan.device),
            timings=self.timings,
            seed=self.plan.seed,
            family=family,
            weights=self.weights,
            lead=self.lead.said,
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.reporter.stage(name):
            yield
        self.timings[name] = time.perf_counter() - start


def check(plan: Plan) -> tuple[dict[str, type[Attack] | type[Probe]], dict[str, type[Defense]]]:
    """Names and options of a plan, checked before anything is built. Raises AuditError."""
    for path in plan.plugin:
        registry.load_file(Path(path))
    check_submission(plan)
    attacks, defenses = registry.attacks_and_probes(), registry.defenses()
    if plan.lab:
        lab_recipe(plan)
    for attack in _chosen("attack", plan, attacks, None):
        if plan.canaries_alone and attack.of == "secrets":
            raise AuditError(f"--attack {attack.name} looks at records: give --data; --canaries alone are for exposure")
    for defense in _chosen("defense", plan, defenses, None):
        if not plan.lab:
            check_needs(defense, plan.public)
            _check_controls(defense)
    return attacks, defenses


def _settings(plan: Plan) -> list[Setting]:
    return [s for name, s in SETTINGS.items() if plan.setting in (name, "both")]


def _is_row(plan: Plan, control: Defense) -> bool:
    """Whether a control of a chain is a row of its own: it can be had, and is not what stands undefended."""
    return not (_lacks(plan, control) or _is_target(plan, control))


def _is_target(plan: Plan, control: Defense) -> bool:
    """Whether the undefended model is this control: it was trained by the recipe of the members, on all data."""
    if "whole" not in control.needs:
        return False
    if plan.lab:
        return lab_recipe(plan).target_is_whole
    adapter, model = whole_adapter(Path(control.ensemble_folder)), Path(str(plan.model))
    return adapter is not None and model.is_dir() and model.samefile(adapter)


def rows(plan: Plan) -> list[Row]:
    """Every row (target, setting, attack) the plan will have, known before anything is built. Raises as `check`."""
    attacks, defenses = check(plan)
    asked = [attack.name for attack in _chosen("attack", plan, attacks, None)]
    shown = companions.shown(_chosen("defense", plan, defenses, None), partial(_is_row, plan))
    settings = [setting.name for setting in _settings(plan)]
    where = {UNDEFENDED: settings, **{row.name: settings[-1:] if row.companion else settings for row in shown}}
    return [(target, name, attack) for target, names in where.items() for name in names for attack in asked]


def check_needs(defense: Defense, public: str | None) -> None:
    """Refuses a defense whose needs only the lab would see to. Raises AuditError."""
    if lacks := _needs(defense, public):
        raise AuditError(f"--defense {defense.name} outside the lab needs {lacks}")


def _lacks(plan: Plan, defense: Defense) -> str:
    return "" if plan.lab else _needs(defense, plan.public)


def _needs(defense: Defense, public: str | None) -> str:
    """What this defense would have to be given outside the lab; "" where it has been."""
    ensemble = defense.ensemble_folder
    if {"ensemble", "whole"} & set(defense.needs) and not ensemble:
        return "-D ensemble=DIR, a folder of member adapters"
    if "whole" in defense.needs and whole_adapter(Path(ensemble)) is None:
        return f"an ensemble with its control: audit train pmixed -D control=true makes it in {ensemble!r}"
    if "public" in defense.needs and public is None:
        return "--public MODEL, the base of its members"
    if "trained" in defense.needs and not defense.model_folder:
        return f"-D {defense.name}.model=DIR, a folder made by audit train {defense.name}"
    return ""


def trained_folder(defense: Defense, load: Callable[[str], HuggingFaceModel], vocab_size: int) -> TrainedModel:
    """The model that `-D model=` of a trained defense names. Raises AuditError for what it did not train."""
    folder = defense.model_folder
    if not Path(folder).is_dir():
        raise AuditError(f"expected -D model= of {defense.name} to be a folder that was trained, got {folder!r}")
    record = promises.read(Path(folder))
    if record is None or record.method != defense.name:
        found = "no privacy.json" if record is None else f"a model trained by {record.method}"
        raise AuditError(f"expected {folder!r} to be trained by audit train {defense.name}, got {found}")
    model = load(folder)
    if model.vocab_size != vocab_size:
        raise AuditError(
            f"expected {folder!r} to share the target's vocabulary of {vocab_size}, but it has {model.vocab_size}"
        )
    return TrainedModel(model, record)


def _check_controls(defense: Defense) -> None:
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


def lab_recipe(plan: Plan) -> LabRecipe:
    """The lab the plan asks for. Raises AuditError for a field that a lab does not have."""
    given: dict[str, Any] = dict(plan.lab_recipe)
    lengths = {"prefix_length": plan.prefix_length, "suffix_length": plan.suffix_length}
    given |= {name: length for name, length in lengths.items() if length is not None}
    default = to_json(LabRecipe())
    for name in given:
        if name not in default:
            raise unknown("field of lab_recipe:", name, default)
    recipe: LabRecipe = from_json(LabRecipe, {**default, **given}, "lab_recipe")
    recipe.check()
    return recipe


def _chosen(kind: str, plan: Plan, known: Mapping[str, type], benchmark: Benchmark | None) -> list[Any]:
    """The plan's attacks or defenses with their options: the benchmark's defaults, then the user's."""
    names = list(dict.fromkeys(getattr(plan, kind)))
    options = getattr(plan, f"{kind}_options")
    if kind == "attack" and plan.samples is not None:
        options = {**options, "": {"samples": plan.samples, **options.get("", {})}}
    sized: Any = Lab if plan.sizes == "lab" else benchmark
    defaults = {} if benchmark is None else getattr(sized, f"{kind}_defaults")
    fields = {name: list(registry.options_of(known[name])) for name in names if name in known}
    chosen = []
    for name in names:
        own = options_for(name, options, defaults.get(name, {}), fields.get(name, []))
        chosen.append(registry.build(kind, known, name, own))
    if kind == "attack" and plan.samples is not None and not any(attack.draws_samples for attack in chosen):
        raise AuditError(f"expected an attack that draws samples beside --samples, got {', '.join(names)}")
    check_general(f"-{kind[0].upper()}", getattr(plan, f"{kind}_options"), fields)
    return chosen


def _load_data(plan: Plan, model: HuggingFaceModel) -> Benchmark:
    """The records and canaries of a plan outside the lab."""
    canaries: tuple[Secret, ...] = ()
    if plan.canaries is not None:
        canaries = manifests.secrets(manifests.read(Path(plan.canaries)), model.tokenizer, model.vocab_size)
    if plan.data is None:
        return manifests.Canaries(
            canaries, model.tokenizer, f"{Path(str(plan.canaries)).name}: {len(canaries)} canaries"
        )
    benchmark = _load_records(plan, plan.data, model)
    benchmark.canaries = canaries
    return benchmark


def _load_records(plan: Plan, data: str, model: HuggingFaceModel) -> Benchmark:
    common: dict[str, Any] = {
        "known": plan.known,
        "known_fraction": plan.known_fraction,
        "nonmembers": plan.nonmembers,
        "limit": plan.limit,
        "seed": plan.seed,
    }
    prefix, suffix = plan.prefix_length, plan.suffix_length
    if is_lm_extraction(Path(data)):
        if plan.group_column is not None:
            raise AuditError(f"--group-column names a column, which the arrays of {data!r} do not have")
        arrays = LMExtraction(data, vocab_size=model.vocab_size, prefix_length=prefix, suffix_length=suffix, **common)
        arrays.tokenizer = model.tokenizer
        benchmark: Benchmark = arrays
    else:
        benchmark = Files(
            data,
            model.tokenizer,
            prefix_length=50 if prefix is None else prefix,
            suffix_length=50 if suffix is None else suffix,
            group_column=plan.group_column,
            **common,
        )
    if model.tokenizer is not None and len(model.tokenizer) != model.vocab_size:
        _check_vocabulary(model, benchmark)
        more = len(model.tokenizer) > model.vocab_size
        benchmark.notes += (
            f"the model's law has {model.vocab_size} entries, its tokenizer {len(model.tokenizer)} tokens: "
            + ("the data use none of those beyond" if more else "the rest is padding"),
        )
    return benchmark


def _check_vocabulary(model: HuggingFaceModel, benchmark: Benchmark) -> None:
    """Refuses data with tokens that the model gives no probability to."""
    secrets, known = ([(pair.prefix, pair.suffix) for pair in pairs] for pairs in (benchmark.secrets, benchmark.known))
    texts = (*itertools.chain(*secrets, *known), *benchmark.heldout)
    largest = max((max(tokens) for tokens in texts if tokens), default=0)
    if largest >= model.vocab_size:
        raise AuditError(
            f"vocabulary mismatch: the tokenizer writes the data with token {largest}, "
            f"but {model.name} gives probabilities to {model.vocab_size}"
        )


def greedy_recall(model: LanguageModel, secrets: Sequence[Secret]) -> dict[str, Measurement]:
    """Verbatim recall of greedy decoding by repeat count ("all" where none is known); members only."""
    members = [secret for secret in secrets if secret.member]
    hits = np.zeros(len(members), dtype=bool)
    for batch in by_shape([(len(s.prefix), len(s.suffix)) for s in members], 256):
        length = len(members[batch[0]].suffix)
        prefixes = torch.tensor([members[i].prefix for i in batch], device=model.device)
        found = sample(model, prefixes, length, GREEDY, np.zeros((len(batch), 1, length, CHANNELS)), law=False)
        for i, candidates in zip(batch, found, strict=True):
            hits[i] = tuple(candidates.suffixes[0].tolist()) == members[i].suffix
    groups = sorted({s.repeats for s in members}, key=lambda r: -1 if r is None else r)
    return {
        "all" if r is None else str(r): intervals.share("greedy", hits[[s.repeats == r for s in members]])
        for r in groups
    }


def share_out(budget: Budget, planned: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """A fixed budget over (recipe, secret) in their order, beforehand, so that it does not depend on scheduling.

    `stop`: only answers that are paid for in full, up to the first that is not; `public`: the rest is answered by the
    public model.
    """
    left, allowance = budget.tokens, {}
    for key, tokens in planned.items():
        if budget.on_exhaustion == "stop" and tokens > left:
            break
        allowance[key] = min(tokens, left)
        left -= allowance[key]
    return allowance


def _empty(target: Target, setting: Setting, attack: Attack | Probe, view: View, lead: Lead) -> Finding:
    applies, reason = _applies(target, setting)
    sampling = attack.sampling()
    return Finding(
        target=target.name,
        setting=setting.name,
        attack=attack.name,
        options=to_json(attack),
        access=tuple(name for name in ("draw", "law", "embeddings") if name in setting.capabilities),
        decoding=view.words(sampling) if sampling else "",
        claim_applies=applies,
        claim_reason=reason,
        notes=(*target.remarks(), lead.said),
    )


def _applies(target: Target, setting: Setting) -> tuple[bool | None, str]:
    claim = target.claim()
    if claim is None:
        return None, "no claim is made"
    if claim.any_access:
        return True, f"{claim.access}; {claim.status}"
    if setting is CLAIM:
        return True, f"text access, ancestral; {claim.status}"
    return False, "gradients, log-probabilities, the attack's own decoding"


def _remarks(guesses: Sequence[Guesses], asked: Sequence[Secret], benchmark: Benchmark) -> tuple[str, ...]:
    remarks = [*_few(asked, benchmark)]
    near = sum(g.near_boundary for g in guesses)
    if near:
        drawn = sum(g.drawn for g in guesses)
        remarks.append(f"{near} of {drawn} draws lay within 1e-6 of a CDF boundary")
    if len(guesses) < len(asked):
        remarks.append(f"the query budget covered {len(guesses)} of {len(asked)} secrets")
    return (*remarks, *_certificates([g.certificate for g in guesses if g.certificate]))


def _few(asked: Sequence[Secret], benchmark: Benchmark) -> tuple[str, ...]:
    """That not everyone was attacked: differences to other rows are taken on those who were."""
    if len(asked) == len(benchmark.secrets):
        return ()
    members, of = (sum(secret.member for secret in secrets) for secrets in (asked, benchmark.secrets))
    return (f"{members} of {of} members attacked, evenly spaced (--ensemble-limit)",)


def _paid(view: View, attack: Attack, guesses: Sequence[Guesses]) -> tuple[str, ...]:
    """How far a fixed budget went, where the public model answered what it did not pay for."""
    if view.allowance is None:
        return ()
    allowed = view.allowance
    paid = sum(all(allowed[recipe, g.secret] >= g.drawn for recipe in attack.recipes(view)) for g in guesses)
    if paid == len(guesses):
        return ()
    return (f"the query budget paid for {paid} of {len(guesses)} secrets in full; the public model answered the rest",)


def _certificates(found: Sequence[Certificate]) -> tuple[str, ...]:
    """What a tree search knows for certain, over all secrets."""
    if not found:
        return ()
    reached, certified = sum(c.reached for c in found), sum(c.certified for c in found)
    leftover = sum(c.leftover for c in found) / len(found)
    return (
        f"{reached} of {len(found)} secrets have a suffix that reaches the threshold, "
        f"{certified} a certified likeliest suffix; mean probability mass not found {leftover:.3f}",
    )


def _compared(finding: Finding, outcome: judging.Outcome | None, base: judging.Outcome | None) -> Finding:
    """Adds the paired difference to the undefended target at the same setting, on the members both answered."""
    if outcome is None or base is None:
        return finding
    own = {i: bool(h) for i, h, m in zip(outcome.ids, outcome.hit, outcome.member, strict=True) if m}
    other = dict(zip(base.ids, base.hit, strict=True))
    both = [secret for secret in own if secret in other]
    delta = intervals.difference(
        "recall_difference", np.array([own[s] for s in both]), np.array([bool(other[s]) for s in both])
    )
    return dataclasses.replace(finding, measurements=(*finding.measurements, delta))


def _record(target: Target, perplexities: Sequence[Measurement], lead: Lead) -> TargetRecord:
    trained = target.trained()
    return TargetRecord(
        name=target.name,
        title=target.title,
        description=target.description,
        perplexity=perplexities[0] if perplexities else None,
        other_perplexities=tuple(perplexities[1:]),
        milliseconds_per_token=1000 * target.seconds / target.drawn if target.drawn else None,
        peak_memory_mb=_peak_memory_mb(target.model.device),
        training_seconds=target.training_seconds,
        companion=target.companion,
        claim=target.claim(),
        nominal_epsilon=trained.nominal_epsilon if trained else None,
        notes=(
            *(trained.notes() if trained else ()),
            f"asked behind the same lead in every row, for perplexity too: {lead.said}",
            *(() if perplexities else ("no held-out perplexity: give --nonmembers FILE",)),
        ),
    )


def _subjects(plan: Plan, benchmark: Benchmark) -> tuple[Secret, ...]:
    """All that a run is about, for its fingerprint. The lab's canaries follow from its recipe."""
    return (*benchmark.secrets, *(benchmark.canaries if plan.canaries else ()))


def _benchmark_record(
    benchmark: Benchmark, subjects: Sequence[Secret], greedy: dict[str, Measurement]
) -> BenchmarkRecord:
    members = [secret for secret in benchmark.secrets if secret.member]
    counts: dict[str, int] = {}
    for secret in members:
        if secret.repeats is not None:
            counts[str(secret.repeats)] = counts.get(str(secret.repeats), 0) + 1
    return BenchmarkRecord(
        name=benchmark.name,
        description=benchmark.description,
        members=len(members),
        nonmembers=len(benchmark.secrets) - len(members),
        known=len(benchmark.known),
        repeats=counts,
        greedy_recall=greedy,
        digest=fingerprint(subjects),
        near_duplicates=len(judging.near_duplicates(members, benchmark.known)),
        canaries={str(count): n for count, n in sorted(Counter(c.repeats for c in benchmark.canaries).items())},
        notes=benchmark.notes,
    )


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Tokens as text, as they are; their ids where there is no tokenizer."""
    if tokenizer is None:
        return lambda tokens: "".join(f"{token} " for token in tokens)
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def environment(device: str) -> dict[str, str]:
    """What the numbers may depend on."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "numpy")}
    place = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{os.cpu_count()} cores"
    return {
        "python": platform.python_version(),
        **versions,
        "machine": f"{platform.system()} {platform.machine()}, {place}",
        "threads": threads.told(torch.get_num_threads()),
        "gemm": f"{threads.rate():.0f} GFLOP/s in float32 on the processor, by which timings of machines compare",
        "device": device,
    }


def _reset_peak_memory() -> None:
    """Starts a new high-water mark, where the system has one to reset."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux: the mark is then that of the whole run


def _peak_memory_mb(device: torch.device) -> float:
    """Highest resident memory since the last reset, in MB; of the GPU where the model is on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
        return float(line.split()[1]) / 1000
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
