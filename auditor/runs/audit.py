"""Prepare an audit: its models, data, attacks, defenses and prefix token.

Invalid input is refused here if the fault can be found before the first query to a model. Remote
workers get only a `RunContext`. The run folder belongs to the main process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from auditor.benchmarks.data.ngrams import build_ngram_index
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Challenge, Pair, PrefixToken, Secret
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import DataPlan, DefensePlan
from auditor.core.secret_table import SecretTable, build_secret_table
from auditor.models import precision, self_check
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.references import ReferenceModels
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from auditor.records.folder import RunFolder
from auditor.runs import generations, packed_rows, personal_data
from auditor.runs.generations import TrainingCorpus
from auditor.runs.personal_data import PersonalDataOfSecrets
from auditor.runs.prefix_token import resolve_prefix_token, wrap_prefixed_model
from auditor.runs.selection import PluginSelection
from auditor.runs.site import Site
from auditor.runs.stopping import StoppingRule
from auditor.runs.target import (
    Target,
    divide_query_budget,
    list_attack_queries,
    plan_token_counts,
)

State = dict[str, Any]
_MOST_COMPARED = 10_000  # secrets from which a self-check chooses a few


@dataclass(frozen=True)
class RunContext:
    """Context of all attacks and probes of a run, in the main process and on workers.

    Args:
        site: models and data of the audit.
        selection: attacks, probes, defenses and access settings.
        prefix_token: token that the run puts before every text.
        defenses: plan fields of the defenses.
        batch_size: texts in a forward pass; None for automatic.
    """

    site: Site
    selection: PluginSelection
    prefix_token: PrefixToken
    defenses: DefensePlan
    batch_size: int | None

    @property
    def seed(self) -> int:
        return self.site.seed

    @property
    def data_fields_of_plan(self) -> DataPlan:
        return self.site.data_plan

    @property
    def benchmark(self) -> Benchmark:
        return self.site.benchmark

    @cached_property
    def challenge(self) -> Challenge:
        return self.benchmark.challenge()

    def make_target_view(self, target: Target, setting: Setting) -> View:
        """Return a new view of the target: the attacker's access to the model in this setting.

        The view has drawn no samples yet. If the defense has a fixed query budget, the view divides
        the budget among the secrets.

        Args:
            target: the attacked model.
            setting: access setting, text-only or white-box.
        """
        public, reference = (
            model and wrap_prefixed_model(model, self.prefix_token.tokens)
            for model in (self.site.public_model, self.site.reference_model)
        )
        view = View(
            target_name=target.name,
            target=target.model,
            setting=setting,
            seed=self.seed,
            public=public,
            reference=reference,
            reference_fault=self.site.reference_fault_sentence,
            references=self.load_prefixed_references,
            tokenizer=self.benchmark.tokenizer,
            batch_size=self.batch_size,
            meter=target.spending.meter,
            claim=target.claim,
            progress=self.site.reporter.progress,
        )
        if target.trained is not None:
            view.training = target.trained.canaries
            view.tokens_after = target.trained.tokens_after
        # A budget pays only for text: reads by white-box access are not charged.
        if target.query_budget_of_defense is not None and setting is TEXT_ONLY:
            attacks = self.selection.list_defense_attacks(target.defense)
            draws = plan_token_counts(view, attacks, target.secrets)
            view.allowance = divide_query_budget(
                target.query_budget_of_defense, draws, target.lot_number_by_secret
            )
        return view

    def load_prefixed_references(self, spec: str) -> ReferenceModels:
        """Load the reference models that `-A references=` names.

        A reference model was trained like the target, but on other records. Each is wrapped so that
        it reads the run's prefix token before every text. Raise AuditError if no such models exist.

        Args:
            spec: value of the option: a folder, or in the lab a number of models.
        """
        references = self.site.load_site_references(spec)
        models = []
        for model in references.models:
            models.append(wrap_prefixed_model(model, self.prefix_token.tokens))
        return ReferenceModels(tuple(models), references.saw)

    def check_models_self_consistent(self, models: Iterable[LanguageModel | None]) -> None:
        """Check that each model returns the same distribution for every kind of query.

        The checked texts are as long as this run's longest text with its soft prompt. Remarks of
        the checks are added to the benchmark's notes. `models` may contain None, which is skipped.
        """
        subjects = self.benchmark.subjects
        lengths = list(map(len, self.benchmark.heldout))
        lengths.append(int(subjects.texts.lengths.max(initial=1)))
        # The site's model adds no prefix token, so the pairs include it.
        before = self.prefix_token.tokens
        count = min(len(subjects), _MOST_COMPARED)
        pairs = []
        for secret in subjects[np.arange(count) * len(subjects) // max(1, count)]:
            pairs.append((before + secret.prefix, secret.suffix))
        prompt_rows = self.selection.longest_soft_prompt_row_count
        longest = prompt_rows + len(before) + max(lengths)
        for model in models:
            if isinstance(model, HuggingFaceModel):
                # Check this first: it also configures how the model is served, on which all later
                # queries depend.
                notes = self_check.configure_serving(model, longest, pairs, model.choices_kept_in)
                if model is self.site.model and self.benchmark.earlier_in_row:
                    notes += self._list_packed_row_notes()
                if model is self.site.model and (
                    changed := precision.dtype_effect_sentence(model, pairs)
                ):
                    notes += (f"{model.name}: {changed}",)
                self.benchmark.notes += notes
                for note in notes:
                    self.site.reporter.note(note)

    def _list_packed_row_notes(self) -> tuple[str, ...]:
        """Compare recitation of packed records with and without the records before them.

        A trainer may pack several records into one row. If the model recites records better after
        the earlier records of their row, add a doubt to the benchmark. Return a note with both
        numbers, or () if nothing could be compared.
        """
        model = wrap_prefixed_model(self.site.model, self.prefix_token.tokens)
        remark, doubts = packed_rows.compare_packed_records(
            model, self.benchmark.secrets, self.benchmark.earlier_in_row
        )
        if not remark or remark in self.benchmark.notes:
            return ()
        self.benchmark.doubts += doubts
        return (remark,)

    def refuse_unanswerable_probes(self) -> None:
        """Raise AuditError now if a probe would later refuse its secrets or reference models.

        Otherwise the run would fail only after hours of queries.
        """
        for method in self.selection.methods:
            if isinstance(method, Probe) and method.of == "secrets":
                method.check_secrets(self.benchmark.secrets)
        for references in self.selection.reference_models_asked_by_probes:
            # Load the models, or train them in the lab, now: the site stores them.
            self.load_prefixed_references(references)

    def check_texts_fit_models(self) -> None:
        """Raise AuditError if this run's texts do not fit into a model's context.

        The lengths include prefix token and soft prompt.
        """
        rows = self.selection.longest_soft_prompt_row_count
        prefix_token = len(self.prefix_token.tokens)
        prompt = torch.empty(rows, 0) if rows else None  # only its number of rows matters
        models_with_prompts = (
            (self.site.model, prompt),
            (self.site.public_model, prompt),
            (self.site.reference_model, None),
        )
        for n_prefix, length in {secret.lengths for secret in self.benchmark.secrets}:
            for model, soft_prompt in models_with_prompts:
                if model is not None:
                    model.check_text_fits(n_prefix, length, soft_prompt, prefix_token)
        for n_prefix, length in {canary.lengths for canary in self.benchmark.canaries}:
            self.site.model.check_text_fits(n_prefix, length, prefix_token=prefix_token)


@dataclass(frozen=True)
class Audit(RunContext):
    """Context of all attacks and probes in the main process: a `RunContext` with the run folder.

    Args:
        folder: folder of the run.
        stops: stopping rule of each cell whose queries may end before the last secret.
        population: ids of all secrets of a check, which queries them in batches; empty for a run.
        _tuned: tuned states of attacks that this process has loaded or made.
    """

    folder: RunFolder
    stops: Mapping[CellKey, StoppingRule] = field(default_factory=dict)
    population: frozenset[str] = frozenset()
    _tuned: dict[tuple[str, str], State] = field(default_factory=dict)

    @cached_property
    def secrets_by_id(self) -> dict[str, Secret]:
        return {secret.id: secret for secret in self.benchmark.secrets}

    @cached_property
    def personal_data_of_secrets(self) -> PersonalDataOfSecrets:
        return personal_data.find_personal_data(
            self.benchmark, personal_data.parse_phone_regions(self.data_fields_of_plan.phone_region)
        )

    @property
    def secrets_in_run_fingerprint(self) -> SecretTable:
        """Secrets and canaries that are hashed to the run's fingerprint.

        A resumed run must have the same fingerprint. The user's canaries are included. The lab's
        canaries are included only if coins inserted them, for an epsilon audit.
        """
        canaries = []
        for item in self.benchmark.canaries:
            if self.data_fields_of_plan.canaries or item.has_coin:
                canaries.append(item)
        if not canaries:
            return build_secret_table(self.benchmark.secrets)
        return build_secret_table(itertools.chain(self.benchmark.secrets, canaries))

    @cached_property
    def sweep_cache_key_of_answers(self) -> dict[str, Any]:
        """Cache key of the answers that the runs of a sweep share.

        It is made from model, secrets and prefix token.
        """
        key = {**self.site.subject, "prefix_token": self.prefix_token.tokens}
        # A check attacks more and more secrets: do not share answers about a smaller set.
        if self.population:
            return {**key, "asked": tuple(self.secrets_by_id)}
        return key

    def build_attack_corpus(self, attack: CorpusAttack) -> TrainingCorpus:
        """Return the training texts with which the attack's generations are compared.

        The comparison uses an index of the texts' n-grams; an option of the attack sets n. Raise
        AuditError if every text has fewer than n tokens.
        """
        corpus = self.benchmark.texts_with_repeat_counts
        index = self.site.shared.get_or_make(
            "n-grams",
            self.site.subject,
            lambda: build_ngram_index(corpus(True), (tokens for tokens, _ in corpus(False))),
        )
        return generations.build_training_corpus(attack, self.benchmark, index)

    def check_corpus_attacks_feasible(self, target: Target) -> None:
        """Raise AuditError now for a corpus attack that would fail later.

        Without this check, it would fail only after its generations are drawn, which takes hours.
        """
        view = self.make_target_view(target, WHITE_BOX)
        for attack in self.selection.attacks:
            if not isinstance(attack, CorpusAttack):
                continue
            self.build_attack_corpus(attack)  # build the index before hours of drawing
            queries = list_attack_queries(view, attack, ())
            for n_prefix, length in {query.lengths for query in queries}:
                for model in (target.model, view.public, view.reference):
                    if model is not None:
                        model.check_text_fits(n_prefix, length)

    def load_or_fit_attack_state(self, target: Target, view: View, attack: Attack) -> State:
        """Return the attack's tuned state, such as a soft prompt; {} if the attack tunes nothing.

        The state is loaded if this run or an earlier run of the sweep saved it. Otherwise the
        attack is tuned now.

        Args:
            target: the attacked model.
            view: the attacker's access to the model.
            attack: the attack.
        """
        key = (attack.name, attack.fitted_state_name(view))
        if key not in self._tuned:
            fits = self.site.shared.fits
            saved = TrainerCheckpoint(self.folder.attack_state_path("-".join(key)))
            state = saved.load(target.model.device)
            if state is None:
                # The key holds all inputs of the state. A defense may depend on the number of draws
                # in its cells: a different number then gives a different model to tune on.
                sweep_key = json.dumps(
                    [
                        self.sweep_cache_key_of_answers,
                        self.seed,
                        self.data_fields_of_plan.known_limit,
                        self.defenses.defense_options,
                        target.scenario and target.scenario.queries,
                        key,
                        attack.fit_options(),
                    ],
                    sort_keys=True,
                )
                # `or`: an empty state needed no tuning, so making it again costs nothing.
                state = fits.get(sweep_key) or attack.fit(view, self.challenge.known)
                saved.save(state)
                fits[sweep_key] = state
            self._tuned[key] = state
        return self._tuned[key]


def choose_prefix_token(site: Site, longest: int, folder: RunFolder) -> PrefixToken:
    """Return the prefix token of the run: the token before every queried text.

    It is chosen on the undefended model. A resumed run keeps the prefix token that it chose before.
    Raise AuditError if the plan of a resumed run requests another prefix token.

    Args:
        site: models and data of the run.
        longest: number of tokens of the longest context, without the prefix token.
        folder: folder of the run.
    """
    saved = folder.prefix_token()
    data_plan = site.data_plan
    if saved is not None and data_plan.prefix_token == AUTO:
        return saved
    key = [site.subject, data_plan.prefix_token, data_plan.known_limit, longest]
    prefix_token = site.shared.get_or_make(
        "prefix_token",
        key,
        lambda: resolve_site_prefix(site, site.benchmark.known, longest),
    )
    if saved is None:
        folder.save_prefix_token(prefix_token)
    elif saved.tokens != prefix_token.tokens:
        raise AuditError(
            f"expected the prefix token that {str(folder.path)!r} was started with ({saved.said}), "
            f"got --prefix-token {data_plan.prefix_token}"
        )
    return prefix_token


def resolve_site_prefix(site: Site, known: Sequence[Pair], longest: int) -> PrefixToken:
    """Return the prefix token that the plan names, or choose one.

    Without a name in the plan, it is the prefix that the model's training recorded. If there is no
    record, the choice is the prefix token that makes the attacker's known pairs most likely.

    Args:
        site: models and data of the run.
        known: pairs of a prefix and its suffix that the attacker knows.
        longest: number of tokens of the longest context, without the prefix token.
    """
    benchmark = site.benchmark
    options = (benchmark.canaries, benchmark.framed, benchmark.as_trained, site.hurried)
    recorded = site.recorded_prefix
    # Training put this prefix before whole records only.
    if any(secret.at > len(secret.prefix) for secret in benchmark.secrets):
        recorded = None
    return resolve_prefix_token(
        site.data_plan.prefix_token, site.model, known, longest, *options, recorded=recorded
    )


def count_longest_context(benchmark: Benchmark, prompt_rows: int) -> int:
    """Return the number of tokens of the longest context, without the prefix token.

    Args:
        benchmark: data of the run.
        prompt_rows: number of embedding vectors in the longest soft prompt. Each takes the place of
            a token.
    """
    # Held-out texts and canaries are read without a soft prompt.
    lengths = list(map(len, benchmark.heldout))
    for canary in benchmark.canaries:
        lengths.append(len(canary.tokens))
    for pair in benchmark.known:
        lengths.append(prompt_rows + len(pair.tokens))
    texts = build_secret_table(benchmark.secrets).texts
    lengths.append(int((prompt_rows + texts.lengths).max(initial=0)))
    return max(lengths, default=0)
