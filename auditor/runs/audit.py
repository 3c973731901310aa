"""One audit, ready to start: the site, the selected attacks and defenses, and the prefix token that
all cells share.

Whatever can be refused before the first query to a model is refused here. `RunContext` is the part
that remote workers have too; the run folder belongs to the main process alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from auditor.benchmarks.data.ngrams import build_ngram_index
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Challenge, Pair, PrefixToken, Secret
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import DataPlan, DefensePlan
from auditor.models import precision, self_check
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.references import ReferenceModels
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from auditor.records.folder import RunFolder
from auditor.runs import generations, packed_rows, personal_data
from auditor.runs.generations import TrainingCorpus
from auditor.runs.personal_data import PersonalDataOfSecrets
from auditor.runs.prefix_token import resolve_prefix_token, with_prefix_token
from auditor.runs.selection import PluginSelection
from auditor.runs.site import Site
from auditor.runs.stopping import StoppingRule
from auditor.runs.target import Target
from auditor.runs.token_allowance import (
    divide_query_budget,
    planned_token_counts,
    queries_of_attack,
)
from auditor.runs.tuned_states import State, load_attack_state, save_attack_state


@dataclass(frozen=True)
class RunContext:
    """What all cells of a run have in common, wherever they are worked at."""

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

    def make_view_of_target(self, target: Target, setting: Setting) -> View:
        """A fresh view, in which nothing is drawn yet; a fixed budget is shared out over the
        secrets."""
        public, reference = (
            other and with_prefix_token(other, self.prefix_token.tokens)
            for other in (self.site.public_model, self.site.reference_model)
        )
        view = View(
            target_name=target.name,
            target=target.model,
            setting=setting,
            seed=self.seed,
            public=public,
            reference=reference,
            reference_fault=self.site.reference_fault_sentence,
            references=self.reference_models_behind_prefix_token,
            tokenizer=self.benchmark.tokenizer,
            batch_size=self.batch_size,
            meter=target.spending.meter,
            training=target.trained.canaries if target.trained else None,
            claim=target.claim,
            progress=self.site.reporter.progress,
        )
        # A budget pays for text alone: what white-box access reads is charged to none.
        if target.query_budget_of_defense is not None and setting is TEXT_ONLY:
            attacks = self.selection.attacks_for_defense(target.defense)
            draws = planned_token_counts(view, attacks, target.secrets)
            view.allowance = divide_query_budget(
                target.query_budget_of_defense, draws, target.lot_number_by_secret
            )
        return view

    def reference_models_behind_prefix_token(self, asked: str) -> ReferenceModels:
        """The reference models of `-A references=`, behind the prefix token. Raises AuditError
        where there are none."""
        found = self.site.load_reference_models_of_site(asked)
        return ReferenceModels(
            tuple(with_prefix_token(model, self.prefix_token.tokens) for model in found.models),
            found.saw,
        )

    def check_models_self_consistent(self, models: Iterable[LanguageModel | None]) -> None:
        """Checks that each gives one distribution however it is asked, up to the longest text of
        this run behind the soft prompt. What a reader must know of them goes to the benchmark's
        notes."""
        texts = [len(query.prefix) + query.length for query in self.challenge.queries]
        texts += [len(canary.prefix + canary.suffix) for canary in self.benchmark.canaries]
        texts += map(len, self.benchmark.heldout)
        # The site's model stands behind no prefix token, so the pairs bring it along.
        before, attacked = (
            self.prefix_token.tokens,
            (*self.benchmark.secrets, *self.benchmark.canaries),
        )
        pairs = [(before + one.prefix, one.suffix) for one in attacked]
        reach = (
            self.selection.longest_soft_prompt_row_count
            + len(self.prefix_token.tokens)
            + max(texts, default=1)
        )
        for model in models:
            if isinstance(model, HuggingFaceModel):
                # First of all: it also settles how the model is served, which everything asked
                # later depends on.
                notes = self_check.check_and_configure_serving(
                    model, reach, pairs, model.choices_kept_in
                )
                if model is self.site.model and self.benchmark.earlier_in_row:
                    notes += self._notes_on_packed_rows()
                if model is self.site.model and (
                    changed := precision.dtype_effect_sentence(model, pairs)
                ):
                    notes += (f"{model.name}: {changed}",)
                self.benchmark.notes += notes
                for note in notes:
                    self.site.reporter.note(note)

    def _notes_on_packed_rows(self) -> tuple[str, ...]:
        """Compare packed records with and without the earlier ones of their row; a doubt goes to
        the benchmark."""
        model = with_prefix_token(self.site.model, self.prefix_token.tokens)
        said, doubts = packed_rows.compare_packed_records(
            model, self.benchmark.secrets, self.benchmark.earlier_in_row
        )
        if not said or said in self.benchmark.notes:
            return ()
        self.benchmark.doubts += doubts
        return (said,)

    def refuse_unanswerable_probes(self) -> None:
        """Refuses what a probe could only refuse after hours. Raises AuditError."""
        for method in self.selection.methods:
            if isinstance(method, Probe) and method.of == "secrets":
                method.check_secrets(self.benchmark.secrets)
        for wanted in self.selection.reference_models_asked_by_probes:
            # loaded, or trained by the lab, now: the site keeps them
            self.reference_models_behind_prefix_token(wanted)

    def check_texts_fit_models(self) -> None:
        """Raises AuditError where a model has no room for the texts of this run behind its prefix
        token and soft prompt."""
        rows, prefix_token = (
            self.selection.longest_soft_prompt_row_count,
            len(self.prefix_token.tokens),
        )
        prompt = torch.empty(rows, 0) if rows else None  # only its number of rows is looked at
        asked = (
            (self.site.model, prompt),
            (self.site.public_model, prompt),
            (self.site.reference_model, None),
        )
        for n_prefix, length in {
            (len(query.prefix), query.length) for query in self.challenge.queries
        }:
            for model, tuned in asked:
                if model is not None:
                    model.check_text_fits(n_prefix, length, tuned, prefix_token)
        for n_prefix, length in {
            (len(canary.prefix), len(canary.suffix)) for canary in self.benchmark.canaries
        }:
            self.site.model.check_text_fits(n_prefix, length, prefix_token=prefix_token)


@dataclass(frozen=True)
class Audit(RunContext):
    """What all cells have in common, with the folder of the run and what is kept in it."""

    folder: RunFolder
    # of the rows that may ask fewer than all
    stops: Mapping[CellKey, StoppingRule] = field(default_factory=dict)
    # ids that may be asked, of a check that asks a part; else empty
    population: frozenset[str] = frozenset()
    _tuned: dict[tuple[str, str], State] = field(default_factory=dict)

    @cached_property
    def secrets_by_id(self) -> dict[str, Secret]:
        return {secret.id: secret for secret in self.benchmark.secrets}

    @cached_property
    def personal_data_of_secrets(self) -> PersonalDataOfSecrets:
        return personal_data.find_personal_data_of_secrets(
            self.benchmark, personal_data.parse_phone_regions(self.data_fields_of_plan.phone_region)
        )

    @property
    def secrets_in_run_fingerprint(self) -> tuple[Secret, ...]:
        """What the run's fingerprint covers: secrets, canaries; of the lab's, which all labs have,
        only an audit's."""
        canaries = self.benchmark.canaries
        own = [one for one in canaries if one.canary and one.canary.coin is not None]
        return (*self.benchmark.secrets, *(canaries if self.data_fields_of_plan.canaries else own))

    @cached_property
    def sweep_cache_key_of_answers(self) -> dict[str, Any]:
        """Key by which runs share answers: which model is attacked for which secrets, behind which
        prefix token."""
        key = {**self.site.subject, "prefix_token": self.prefix_token.tokens}
        # A check asks about more and more: answers about fewer are none of these.
        return {**key, "asked": tuple(self.secrets_by_id)} if self.population else key

    def training_corpus_for_attack(self, attack: CorpusAttack) -> TrainingCorpus:
        """The texts that its generations are held against. Raises AuditError for an n-gram that
        none has room for."""
        corpus = self.benchmark.texts_with_repeat_counts
        index = self.site.shared.get_or_make(
            "n-grams",
            self.site.subject,
            lambda: build_ngram_index(corpus(True), (tokens for tokens, _ in corpus(False))),
        )
        return generations.corpus_with_chosen_ngram_length(attack, self.benchmark, index)

    def check_corpus_attacks_feasible(self, target: Target) -> None:
        """Refuses generations that could otherwise be refused only once the first was drawn. Raises
        AuditError."""
        view = self.make_view_of_target(target, WHITE_BOX)
        for attack in self.selection.attacks:
            if not isinstance(attack, CorpusAttack):
                continue
            self.training_corpus_for_attack(attack)  # made now, before hours of drawing
            for n_prefix, length in {
                (len(query.prefix), query.length) for query in queries_of_attack(view, attack, ())
            }:
                for model in (target.model, view.public, view.reference):
                    if model is not None:
                        model.check_text_fits(n_prefix, length)

    def load_or_fit_attack_state(self, target: Target, view: View, attack: Attack) -> State:
        """What the attack tuned before: in this run, the one that it resumes or the same sweep;
        else it tunes now."""
        key = (attack.name, attack.fitted_state_name(view))
        if key not in self._tuned:
            name, fits = "-".join(key), self.site.shared.fits
            state = load_attack_state(self.folder, name)
            if state is None:
                # All that the state depends on. A defense may be set up for what the row will draw:
                # another number is another model to tune on.
                queries = target.scenario.queries if target.scenario else None
                configured = [
                    self.seed,
                    self.data_fields_of_plan.known_limit,
                    self.defenses.defense_options,
                ]
                known_as = json.dumps(
                    [
                        self.sweep_cache_key_of_answers,
                        *configured,
                        queries,
                        key,
                        attack.fit_options(),
                    ],
                    sort_keys=True,
                )
                # `or`: a state that is empty was not tuned, so that making it anew costs nothing.
                state = fits.get(known_as) or attack.fit(view, self.challenge.known)
                save_attack_state(self.folder, name, state)
                fits[known_as] = state
            self._tuned[key] = state
        return self._tuned[key]


def choose_prefix_token(site: Site, longest: int, folder: RunFolder) -> PrefixToken:
    """The prefix token, chosen once a run on the undefended model; a resumed run keeps the one it
    was started with.

    longest: tokens that a context takes beside the prefix token, at most. Raises AuditError where a
    resumed run is asked for another one.
    """
    held, asked = folder.prefix_token(), site.data_plan
    if held is not None and asked.prefix_token == AUTO:
        return held
    key = [site.subject, asked.prefix_token, asked.known_limit, longest]
    prefix_token = site.shared.get_or_make(
        "prefix_token",
        key,
        lambda: resolve_prefix_token_of_site(site, site.benchmark.known, longest),
    )
    if held is None:
        folder.save_prefix_token(prefix_token)
    elif held.tokens != prefix_token.tokens:
        raise AuditError(
            f"expected the prefix token that {str(folder.path)!r} was started with ({held.said}), "
            f"got --prefix-token {asked.prefix_token}"
        )
    return prefix_token


def resolve_prefix_token_of_site(site: Site, known: Sequence[Pair], longest: int) -> PrefixToken:
    """The prefix token that the plan asks for; where it leaves that open, the one that these known
    pairs choose."""
    told = site.benchmark
    own = (told.canaries, told.framed, told.as_trained, site.hurried)
    return resolve_prefix_token(site.data_plan.prefix_token, site.model, known, longest, *own)


def longest_context_token_count(benchmark: Benchmark, prompt_rows: int) -> int:
    """Tokens that a context takes beside the prefix token, at most."""
    pairs: list[Pair | Secret] = [*benchmark.known, *benchmark.secrets]
    behind_prompt = [prompt_rows + len(one.prefix + one.suffix) for one in pairs]
    # Neither held-out texts nor canaries are read behind a soft prompt.
    others = [
        *map(len, benchmark.heldout),
        *(len(canary.prefix + canary.suffix) for canary in benchmark.canaries),
    ]
    return max([*behind_prompt, *others], default=0)
