"""The cells of an audit: one (target, setting, attack or probe) each, which `measure` makes a
finding of."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import to_json
from auditor.core.nouns import UNDEFENDED, CellKey, Guesses, Observation, Query, Secret
from auditor.core.result import Finding, Measurement, Stratum
from auditor.engines.engine import Engine
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.probe import Observed, Probe
from auditor.plugins.view import TEXT_ONLY, Setting, View
from auditor.runs import answer_remarks, chain_steps, generations, stopping
from auditor.runs.applicability import check_method_applies_to_target, secrets_to_probe
from auditor.runs.audit import Audit
from auditor.runs.cell_work import Answer, Asked, CellWork, CellWorkResult, Workplace
from auditor.runs.per_secret_results import (
    Kinds,
    PerSecretCollector,
    make_token_decoder,
    per_secret_row_of_observations,
    per_secret_row_of_outcome,
)
from auditor.runs.target import Target
from auditor.runs.tuned_states import State
from auditor.statistics import documents, extraction, judging
from auditor.statistics.metrics import RECALL, name_nonmember_metric


@dataclass(frozen=True)
class TargetRun:
    """What all cells of a target have in common: who does their work, and where what is found
    goes."""

    audit: Audit
    target: Target
    place: Workplace
    engine: Engine
    collector: PerSecretCollector


@dataclass(frozen=True)
class Cell(TargetRun, ABC):
    """One cell; view: what the attacker of this target and setting sees."""

    setting: Setting
    method: Attack | Probe

    @property
    def view(self) -> View:
        return self.place.shared_view_of_target(self.target.name, self.setting.name)

    @property
    def key(self) -> CellKey:
        return CellKey(self.target.name, self.setting.name, self.method.name)

    @property
    def title(self) -> str:
        return f"{self.target.title}: {self.method.name} ({self.setting.name})"

    def measure(self) -> Finding:
        """Numbers, or the reason why there are none. What was found secret by secret goes to the
        collector."""
        start, blank = time.perf_counter(), self._finding_before_measuring()
        try:
            check_method_applies_to_target(self.method, self.target, self.view, self.audit)
        except NotApplicable as why:
            return dataclasses.replace(blank, not_applicable=str(why))
        try:
            finding = self._measure_and_fill_in_finding(blank)
        except NotApplicable as why:  # by what was answered: the time says that it ran
            return dataclasses.replace(
                blank, not_applicable=str(why), seconds=time.perf_counter() - start
            )
        if stopped := self.collector.stopped.get(self.key):
            finding = stopping.stopped_finding_with_betting_bounds(
                finding, self.collector.rows[self.key], stopped
            )
        return dataclasses.replace(finding, seconds=time.perf_counter() - start)

    def _refuse_answers_about_other_secrets(
        self, done: Collection[str], asked: Collection[str]
    ) -> None:
        """Raises AuditError where the folder holds answers about secrets that this run does not ask
        about."""
        if others := sum(secret not in asked for secret in done):
            raise AuditError(
                "expected answers about the secrets of this run in "
                f"{str(self.audit.folder.path)!r}, got {others} of {self.key.title} about others: "
                "the journal is damaged"
            )

    @abstractmethod
    def ask_ahead(self) -> None:
        """Asks about the target's secrets and keeps the answers, from which `measure` works later.

        Raises NotApplicable if this target is not asked by the method.
        """

    @abstractmethod
    def _measure_and_fill_in_finding(self, blank: Finding) -> Finding:
        """The blank, filled in. Raises NotApplicable where there is nothing to measure."""

    def _stream_answers_from_engine(
        self, work: CellWork[Asked, Answer], items: Sequence[Asked]
    ) -> Iterator[CellWorkResult[Answer]]:
        """The engine's answers about these items, as they come in; the target's meter learns what
        they drew."""
        for found in self.engine.stream_results(work, items):
            self.target.spending.meter.drawn |= found.drawn
            yield found

    def _ask_until_stopping_rule(
        self,
        items: Sequence[stopping.Item],
        ask: stopping.Ask[stopping.Item],
        seen: stopping.Seen[stopping.Item],
    ) -> Sequence[stopping.Item]:
        """Asks about all items, or under `--until` as many as it takes; returns those that it
        asked, in order."""
        if (stop := self.audit.stops.get(self.key)) is None:
            ask(items)
            return items
        self.collector.stopped[self.key], asked = stop.ask_in_random_order(
            items, self.audit.seed, ask, seen
        )
        return [item for item in items if item.id in asked]

    def _report_cell_progress(self, done: int, of: int) -> None:
        self.audit.site.reporter.progress(f"{self.method.name} on {self.target.title}", done, of)

    def _finding_before_measuring(self) -> Finding:
        """What can be said before anything is measured."""
        applies, reason = self.target.claim_coverage_and_reason(self.setting)
        sampling = self.method.sampling()
        return Finding(
            *self.key,
            options=to_json(self.method),
            access=self.view.visible_capabilities,
            decoding=self.view.decoding_description(sampling) if sampling else "",
            claim_applies=applies,
            claim_reason=reason,
            notes=(*self.target.remarks_of_defense(), self.audit.prefix_token.said),
        )


@dataclass(frozen=True)
class AttackCell(Cell):
    """Fits, guesses secret by secret, and is judged."""

    method: Attack

    def ask_ahead(self) -> None:
        check_method_applies_to_target(self.method, self.target, self.view, self.audit)
        self._guess_remaining_secrets(
            self.audit.load_or_fit_attack_state(self.target, self.view, self.method)
        )

    def _measure_and_fill_in_finding(self, blank: Finding) -> Finding:
        state = self.audit.load_or_fit_attack_state(self.target, self.view, self.method)
        asked, answered = self._guess_remaining_secrets(state)
        if not answered:
            raise NotApplicable("the budget pays for no whole answer: 0 secrets covered")
        outcome, costs, kinds = self._judge_guesses_with_costs_and_kinds(answered)
        # Before the row may be refused below: these tokens were drawn.
        if self.setting is TEXT_ONLY:
            self.target.spending.charge_claim_for_answers(self.view, self.method, costs)
        members = outcome.select_secrets(outcome.member)
        if not len(members.ids):
            raise NotApplicable("the budget covers no member")
        plain = (
            self.view.sampling_recipe_name(sampling, "")
            if (sampling := self.method.sampling())
            else ""
        )
        kept = self.collector.collect_attack_outcome(
            self.key, outcome, self.method.score_is_probability(self.view), kinds
        )
        return dataclasses.replace(
            blank,
            measurements=(
                *extraction.measure_extraction(outcome),
                *documents.measure_document_recall(
                    self.target.secrets,
                    dict(zip(outcome.ids, map(bool, outcome.hit), strict=True)),
                    dict(zip(outcome.ids, map(bool, outcome.is_near_verbatim), strict=True)),
                ),
                *self._recall_difference_to_undefended(),
            ),
            by_repeats=extraction.measure_hit_shares("recall", members),
            strata=self._strata_of_members(members),
            by_group=self._group_shares_of_members(members),
            by_kind={kind: m for kind in kinds if (m := kept.remeasure_metric(RECALL, kind=kind))},
            by_kind_nonmembers={
                kind: m
                for kind in kinds
                if (m := kept.remeasure_metric(name_nonmember_metric(RECALL), kind=kind))
            },
            curve=extraction.compute_recall_error_curve(members),
            notes=(
                *blank.notes,
                *self.method.notes(self.view, state),
                *answer_remarks.cell_remarks_on_guesses(
                    costs, self.target.secrets, self.audit.benchmark, len(asked)
                ),
                *answer_remarks.cell_remarks_on_query_budget(self.view, self.method, costs),
                *answer_remarks.cell_remarks_on_single_samples(self.view, self.method),
            ),
            drawn=sum(g.drawn for g in costs),
            samples=self.method.sample_counts_by_recipe(self.view).get(plain, 0),
            rows=sum(g.rows for g in costs),
        )

    def _strata_of_members(self, members: judging.Outcome) -> tuple[Stratum, ...]:
        """Return the records by copies; none for a row that was not asked about the whole sample of
        the run."""
        counts = self.audit.benchmark.record_counts.get("members")
        whole_sample = len(members.ids) == sum(
            secret.member for secret in self.audit.benchmark.secrets
        )
        if counts is None or not whole_sample or self.key in self.audit.stops:
            return ()
        secrets = map(self.audit.secrets_by_id.__getitem__, members.ids)
        return extraction.group_copies_strata(counts.by_copies, secrets, members.hit)

    def _group_shares_of_members(self, members: judging.Outcome) -> dict[str, Measurement]:
        """Return the share extracted by group; none for a row that may stop early, whose intervals
        are not of a fixed size."""
        if self.key in self.audit.stops:
            return {}
        secrets = map(self.audit.secrets_by_id.__getitem__, members.ids)
        return extraction.measure_group_shares(secrets, members.hit)

    def _recall_difference_to_undefended(self) -> Iterator[Measurement]:
        """The paired difference to the undefended target at the same setting, on the members that
        both answered."""
        if self.key in self.collector.stopped:
            return  # its interval is of a fixed size
        # The undefended target comes first in a run, so its answers are there.
        own, base = (
            self.collector.answers.get(key)
            for key in (self.key, self.key._replace(target=UNDEFENDED))
        )
        if own is not None and base is not None and not self.target.is_undefended:
            yield chain_steps.measure_row_difference(RECALL, "share", own, base)

    def _judge_guesses_with_costs_and_kinds(
        self, answered: Sequence[str]
    ) -> tuple[judging.Outcome, list[Guesses], Kinds]:
        """The answers held against the secrets; what each cost, without its candidates; and the
        shares of personal data that they hold. Answers are read one by one: all together they may
        be larger than memory."""
        done, costs = self.audit.folder.guesses.finished_secrets(self.key), list[Guesses]()

        def read() -> Iterator[Guesses]:  # fills `costs` while `judge_guesses` iterates over it
            for guesses in map(done.__getitem__, answered):
                costs.append(dataclasses.replace(guesses, ranked=()))
                yield guesses

        secrets, decode = (
            self.audit.secrets_by_id,
            make_token_decoder(self.audit.benchmark.tokenizer),
        )
        outcome = judging.judge_guesses(read(), secrets)
        return (
            outcome,
            costs,
            self.audit.personal_data_of_secrets.extracted_share_by_kind_and_secret(
                map(done.__getitem__, answered), secrets, decode
            ),
        )

    def _judged_row_of_queries(self, asked: Sequence[Query]) -> RowValuesBySecret:
        """The row of these queries, judged as far as they have an answer."""
        done = self.audit.folder.guesses.finished_secrets(self.key)
        outcome, _, kinds = self._judge_guesses_with_costs_and_kinds(
            [query.id for query in asked if query.id in done]
        )
        return per_secret_row_of_outcome(outcome, kinds)

    def _guess_remaining_secrets(self, state: State) -> tuple[list[str], list[str]]:
        """Attacks what an interrupted run left; returns the ids that were asked, and those of them
        with an answer."""
        # A view of the journal: it grows by what `ask` appends, and reads the file at each look.
        done, target = self.audit.folder.guesses.finished_secrets(self.key), self.target
        attacked = {secret.id for secret in target.secrets}
        known = [query for query in self.audit.challenge.queries if query.id in attacked]
        queries = self.method.queries(self.view, known)
        self._refuse_answers_about_other_secrets(
            done, {query.id for query in queries} | self.audit.population
        )
        n_others = len(done.keys() - {query.id for query in queries})  # of earlier batches
        work: CellWork[Query, Guesses] = CellWork(
            self.key, self.view.allowance, target.spending.meter, state
        )

        def ask(some: Sequence[Query]) -> None:
            for found in self._stream_answers_from_engine(
                work, [query for query in some if query.id not in done]
            ):
                self.audit.folder.guesses.append(self.key, found.of)
                self._report_cell_progress(len(done) - n_others, len(queries))
                if self.setting is TEXT_ONLY:
                    target.spending.seconds += found.seconds
                    target.spending.drawn += sum(guesses.drawn for guesses in found.of)

        asked = [
            query.id
            for query in self._ask_until_stopping_rule(queries, ask, self._judged_row_of_queries)
        ]
        return asked, [id for id in asked if id in done]


@dataclass(frozen=True)
class CorpusCell(AttackCell):
    """Texts that are drawn as guesses are, and held against all that was trained on."""

    method: CorpusAttack

    def _measure_and_fill_in_finding(self, blank: Finding) -> Finding:
        audit, attack, view = self.audit, self.method, self.view
        corpus = audit.training_corpus_for_attack(attack)
        state = audit.load_or_fit_attack_state(self.target, view, attack)
        _, drawn = self._guess_remaining_secrets(state)
        if not drawn:
            raise NotApplicable("the budget pays for no whole generation")
        found = generations.judge_generations_of_cell(
            self.key, attack, audit.folder.guesses.finished_secrets(self.key), drawn, corpus
        )
        if self.setting is TEXT_ONLY:
            self.target.spending.charge_claim_for_answers(view, attack, found.costs)
        self.collector.collect_generations(self.key, found)
        # Of no secrets: what a corpus attack asks follows from itself alone.
        asked = len(attack.queries(view, ()))
        covered = (
            (f"the query budget covered {len(drawn)} of {asked} generations",)
            if len(drawn) < asked
            else ()
        )
        return dataclasses.replace(
            blank,
            measurements=found.measurements,
            notes=(
                *blank.notes,
                *attack.notes(view, state),
                *corpus.notes_on_corpus_and_prompts(attack.user_chosen_beginnings(view)),
                *found.notes,
                *answer_remarks.cell_remarks_on_draws_near_cdf_boundary(found.costs),
                *covered,
                *answer_remarks.cell_remarks_on_query_budget(
                    view, attack, found.costs, "generations"
                ),
            ),
            drawn=sum(g.drawn for g in found.costs),
            rows=sum(g.rows for g in found.costs),
        )


@dataclass(frozen=True)
class ProbeCell(Cell):
    """Observes secret by secret: it sees the answers, and draws nothing that a claim would be
    charged for."""

    method: Probe

    def ask_ahead(self) -> None:
        check_method_applies_to_target(self.method, self.target, self.view, self.audit)
        secrets = secrets_to_probe(self.method, self.target, self.audit.benchmark, self.view)
        self._observe_missing_secrets(secrets, {})

    def _measure_and_fill_in_finding(self, blank: Finding) -> Finding:
        probe, target = self.method, self.target
        every = secrets_to_probe(probe, target, self.audit.benchmark, self.view)
        claim = target.claim
        # A probe of the claim reads `uncharged_token_count`: what attacks drew beyond what the
        # claim was charged for.
        target.spending.meter.spent = (
            claim.spent_queries if claim else target.spending.meter.drawn_token_count
        )
        secrets, observations = self._observe_secrets(every)
        measurements = tuple(probe.measurements(secrets, observations))
        self.collector.collect_probe_observations(
            self.key, probe, secrets, observations, measurements[0]
        )
        few = (
            answer_remarks.cell_remarks_on_attacked_subset(every, self.audit.benchmark)
            if probe.of == "secrets"
            else ()
        )
        return dataclasses.replace(
            blank,
            measurements=measurements,
            by_repeats=probe.main_number_by_repeats(secrets, observations),
            notes=(*blank.notes, *few, *probe.notes(secrets, observations)),
            violations=probe.claim_violations(secrets, observations),
            audits=probe.epsilon_lower_bounds(secrets, observations),
        )

    def _observe_secrets(self, secrets: Sequence[Secret]) -> tuple[Sequence[Secret], Observed]:
        """The secrets that were asked, each with its observation, those of an interrupted run
        included."""
        folder, probe, (seen_before, facts) = (
            self.audit.folder,
            self.method,
            self._shared_undefended_observations(),
        )
        secrets, done = self._observe_missing_secrets(secrets, seen_before)
        seen = [done[secret.id] for secret in secrets]
        # Worked out once: by an earlier run of the sweep, by the run that this one resumes, or now.
        # Added to in place, as `seen_before` is below: all these runs share both dicts. Facts of a
        # part are none of a larger part.
        known = {} if self.audit.population else facts or folder.probe_facts_of_cell(self.key)
        facts |= known or probe.facts(self.view, secrets, seen)
        folder.save_probe_facts(self.key, facts)
        completed = probe.add_joint_values(secrets, seen)
        # In the journal the last record of a secret holds.
        changed = [
            observation for observation in completed if observation != done[observation.secret]
        ]
        if changed:
            folder.observations.append(self.key, changed)
        seen_before |= {observation.secret: observation for observation in completed}
        return secrets, Observed(completed, facts)

    def _observe_missing_secrets(
        self, secrets: Sequence[Secret], seen_before: Mapping[str, Observation]
    ) -> tuple[Sequence[Secret], Mapping[str, Observation]]:
        """Observes what the run folder lacks; returns the secrets that were asked, and the folder's
        observations."""
        folder, done = self.audit.folder, self.audit.folder.observations.finished_secrets(self.key)
        self._refuse_answers_about_other_secrets(
            done, {secret.id for secret in secrets} | self.audit.population
        )
        n_others = len(done.keys() - {secret.id for secret in secrets})  # of earlier batches
        work: CellWork[Secret, Observation] = CellWork(
            self.key, self.view.allowance, self.target.spending.meter
        )

        def ask(some: Sequence[Secret]) -> None:
            if known := [
                seen_before[secret.id]
                for secret in some
                if secret.id in seen_before.keys() - done.keys()
            ]:
                folder.observations.append(self.key, known)
            for found in self._stream_answers_from_engine(
                work, [secret for secret in some if secret.id not in done]
            ):
                folder.observations.append(self.key, found.of)
                self._report_cell_progress(len(done) - n_others, len(secrets))

        return self._ask_until_stopping_rule(secrets, ask, self._observed_row_of_secrets), done

    def _observed_row_of_secrets(self, asked: Sequence[Secret]) -> RowValuesBySecret:
        """The row of these secrets, which all were observed."""
        done = self.audit.folder.observations.finished_secrets(self.key)
        return per_secret_row_of_observations(
            self.method, asked, Observed([done[secret.id] for secret in asked])
        )

    def _shared_undefended_observations(self) -> tuple[dict[str, Observation], dict[str, float]]:
        """What an earlier run of a sweep observed of the undefended model: by secret, and facts of
        no single one.

        Every point of a sweep asks that model the same. The caller adds to both dicts, which all
        these runs share.
        """
        if not self.target.is_undefended:
            return {}, {}
        key = (self.audit.sweep_cache_key_of_answers, self.audit.seed, self.method)
        held: tuple[dict[str, Observation], dict[str, float]] = self.audit.site.shared.get_or_make(
            f"{self.setting.name} {self.method.name}", key, lambda: ({}, {})
        )
        return held


def cells_of_target(target_run: TargetRun) -> Iterator[Cell]:
    """All cells of a target, by setting, then in the order in which methods were asked for."""
    selection, target = target_run.audit.selection, target_run.target
    for setting in selection.settings_for_row(target.companion):
        for method in selection.methods:
            if isinstance(method, Probe):
                yield ProbeCell(**vars(target_run), setting=setting, method=method)
            # Asked before the last branch, as it is an Attack too.
            elif isinstance(method, CorpusAttack):
                yield CorpusCell(**vars(target_run), setting=setting, method=method)
            else:
                yield AttackCell(**vars(target_run), setting=setting, method=method)
