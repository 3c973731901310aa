"""Measure the cells of an audit. A cell is an attack or probe on a target in an access setting."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, Generic, TypeVar, cast

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import to_json
from auditor.core.nouns import (
    UNDEFENDED,
    CellKey,
    Guesses,
    Observation,
    Query,
    Secret,
)
from auditor.core.result import Finding, Measurement
from auditor.core.secret_table import build_secret_table, select_members
from auditor.engines.engine import Engine
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.probe import Observed, Probe
from auditor.plugins.view import TEXT_ONLY, ClaimTokenMeter, Setting, View
from auditor.records.folder import batch_finished_secrets
from auditor.records.journal import CellJournal, FinishedSecrets
from auditor.runs import answer_remarks, chain_steps, generations, stopping
from auditor.runs.audit import Audit, State, Target
from auditor.runs.per_secret_results import (
    PerSecretCollector,
    build_observation_row,
    build_outcome_row,
    make_token_decoder,
)
from auditor.runs.targets import (
    Targets,
    check_method_applies,
    select_probed_secrets,
    sort_by_lengths,
    split_by_membership,
)
from auditor.statistics import documents, extraction, judging
from auditor.statistics.metrics import RECALL, name_nonmember_metric

_ANSWERED_AT_ONCE = 16  # secrets between two writes to the run folder
_AT_ONCE = 1000  # completed observations between two such writes
Asked = TypeVar("Asked", Query, Secret)
Answer = TypeVar("Answer", Guesses, Observation)


@dataclass(frozen=True)
class CellWorkResult(Generic[Answer]):
    """Answers of an attack or probe about some secrets.

    Args:
        answers: guesses of an attack, or observations of a probe.
        tokens_drawn: number of tokens drawn from a model with a privacy claim, keyed by (sampling
            recipe, secret id).
        seconds: time spent on these answers.
    """

    answers: list[Answer]
    tokens_drawn: dict[tuple[str, str], int]
    seconds: float


@dataclass(frozen=True)
class CellWork(Generic[Asked, Answer]):
    """Queries of a cell, to run in this process or on a worker.

    Args:
        key: target, setting, and attack or probe of the cell.
        allowance: number of tokens that the query budget pays for, keyed by (sampling recipe,
            secret id); None if there is no budget.
        meter: counter of the tokens drawn so far under the target's privacy claim.
        state: an attack's tuned state; {} for a probe.
    """

    key: CellKey
    allowance: Mapping[tuple[str, str], int] | None
    meter: ClaimTokenMeter
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    portion: ClassVar[int] = 64

    def process_items(
        self, place: Targets, items: Sequence[Asked]
    ) -> Iterator[CellWorkResult[Answer]]:
        view = place.get_shared_view(self.key.target, self.key.setting)
        draws = dict(self.meter.drawn)
        # All cells of a target and setting share the view, so each cell sets its allowance. Draws
        # are counted in a copy: in this process the cell adds the returned draws to the run's
        # meter.
        view.allowance, view.meter = (
            self.allowance,
            ClaimTokenMeter(draws, self.meter.spent, self.meter.lots),
        )
        start = time.perf_counter()
        n_known = len(draws)
        method = place.scene.selection.methods_by_name[self.key.attack]
        inputs: Any = items  # secrets of a probe, queries of an attack
        if isinstance(method, Probe):
            answers: Iterator[Any] = method.observe_secrets(view, inputs)
        else:
            answers = method.guess(view, self.state, inputs)
        for batch in batch_finished_secrets(answers, _ANSWERED_AT_ONCE):
            now = time.perf_counter()
            # A dict keeps its order: the draws since the last batch follow the first `n_known`
            # entries.
            yield CellWorkResult(batch, dict(islice(draws.items(), n_known, None)), now - start)
            start = time.perf_counter()
            n_known = len(draws)


@dataclass(frozen=True)
class TargetRun:
    """Context of all attacks and probes on a target.

    Args:
        audit: the audit.
        target: the attacked target.
        targets: provider of the target's views.
        engine: executor of the queries.
        collector: store of the results per secret.
    """

    audit: Audit
    target: Target
    targets: Targets
    engine: Engine
    collector: PerSecretCollector


@dataclass(frozen=True)
class Cell(TargetRun, ABC):
    """An attack or probe on a target in an access setting.

    `view` is the attacker's access to the target in this setting.
    """

    setting: Setting
    method: Attack | Probe

    @property
    def view(self) -> View:
        return self.targets.get_shared_view(self.target.name, self.setting.name)

    @property
    def key(self) -> CellKey:
        return CellKey(self.target.name, self.setting.name, self.method.name)

    @property
    def title(self) -> str:
        return f"{self.target.title}: {self.method.name} ({self.setting.name})"

    def measure(self) -> Finding:
        """Return a finding with measurements, or with the reason why nothing can be measured.

        A finding is the result of one cell. The results per secret are added to the collector.
        """
        start = time.perf_counter()
        folder = self.audit.folder
        journals = (folder.guesses, folder.observations)
        is_resumed = any(journal.finished_secrets(self.key) for journal in journals)
        blank = self._build_finding()
        try:
            check_method_applies(self.method, self.target, self.view, self.audit)
        except NotApplicable as why:
            return dataclasses.replace(blank, not_applicable=str(why))
        try:
            finding = self._complete_finding(blank)
        except NotApplicable as why:  # from the answers' time, which shows that the cell ran
            return dataclasses.replace(
                blank, not_applicable=str(why), seconds=time.perf_counter() - start
            )
        if stopped := self.collector.stopped.get(self.key):
            row = self.collector.rows[self.key]
            finding = stopping.bound_stopped_finding(finding, row, stopped)
        if is_resumed:
            return finding  # the time of its earlier answers is unknown
        return dataclasses.replace(finding, seconds=time.perf_counter() - start)

    @abstractmethod
    def ask_ahead(self) -> None:
        """Query the target's secrets, and store the answers for a later call of `measure`.

        Raise NotApplicable if the attack or probe does not apply to this target.
        """

    @abstractmethod
    def _complete_finding(self, blank: Finding) -> Finding:
        """Return the finding with its measurements.

        Raise NotApplicable if nothing can be measured.

        Args:
            blank: the finding without measurements.
        """

    def _ask_remaining(
        self,
        items: Sequence[stopping.Item],
        journal: CellJournal[CellKey, Any],
        build_results: stopping.Seen[stopping.Item],
        state: State,
        earlier: Mapping[str, Observation],
    ) -> Sequence[stopping.Item]:
        """Query the items that have no answer in the journal, and append the answers to it.

        With `--until`, query only as many items as the stopping rule needs. Raise AuditError if the
        journal has answers about secrets that this run does not query.

        Args:
            items: all queries of an attack, or all secrets of a probe.
            journal: stored answers in the run folder.
            build_results: function from queried items to their results, for the stopping rule.
            state: an attack's tuned state; {} for a probe.
            earlier: observations from earlier runs of the sweep. Their items are not queried again.

        Returns:
            The answered items, in the order of `items`.
        """
        # A view of the journal: it grows when `ask` appends, and reads the file at each access.
        finished = journal.finished_secrets(self.key)
        others = set[str]()  # answers of earlier batches
        if finished:
            others = set(finished).difference(item.id for item in items)
        if extra := others - self.audit.population:
            raise AuditError(
                "expected answers about the secrets of this run in "
                f"{str(self.audit.folder.path)!r}, got {len(extra)} of {self.key.title} about "
                "others: the journal is damaged"
            )
        work: CellWork[Any, Any] = CellWork(
            self.key, self.view.allowance, self.target.spending.meter, state
        )
        title = f"{self.method.name} on {self.target.title}"

        def ask(batch: Sequence[stopping.Item]) -> None:
            if earlier:
                shared = [item.id for item in batch if item.id in earlier]
                saved = [earlier[id] for id in shared if id not in finished]
                journal.append(self.key, saved)
            missing = batch
            if finished:
                missing = [item for item in batch if item.id not in finished]
            parts = [missing]
            if self.engine.workers:
                parts = list(map(sort_by_lengths, split_by_membership(missing)))
            for result in chain.from_iterable(
                self.engine.stream_results(work, part) for part in parts
            ):
                self.target.spending.meter.drawn |= result.tokens_drawn
                journal.append(self.key, result.answers)
                n_done = len(finished) - len(others)
                self.audit.site.reporter.progress(title, n_done, len(items))
                self._count_cost(result)

        if (stop := self.audit.stops.get(self.key)) is None:
            ask(items)
            return items
        self.collector.stopped[self.key], ids = stop.ask_randomly(
            items, self.audit.plan.seed, ask, build_results
        )
        return [item for item in items if item.id in ids]

    def _count_cost(self, result: CellWorkResult[Any]) -> None:
        """Add the cost of an attack's answers. A probe's answers cost nothing."""

    def _build_finding(self) -> Finding:
        """Return a finding without measurements.

        It describes the target, the setting, and the attack or probe.
        """
        applies, reason = self.target.judge_claim_coverage(self.setting)
        sampling = self.method.sampling()
        return Finding(
            *self.key,
            options=to_json(self.method),
            access=self.view.visible_capabilities,
            decoding=self.view.decoding_description(sampling) if sampling else "",
            claim_applies=applies,
            claim_reason=reason,
            notes=(*self.target.list_defense_remarks(), self.audit.prefix_token.said),
        )


@dataclass(frozen=True)
class AttackCell(Cell):
    """Attack on a target in a setting.

    The attack is tuned, it guesses each secret, and the guesses are judged.
    """

    method: Attack

    def ask_ahead(self) -> None:
        check_method_applies(self.method, self.target, self.view, self.audit)
        self._guess_remaining_secrets(
            self.audit.load_or_fit_attack_state(self.target, self.view, self.method)
        )

    def _complete_finding(self, blank: Finding) -> Finding:
        state = self.audit.load_or_fit_attack_state(self.target, self.view, self.method)
        queried, ids = self._guess_remaining_secrets(state)
        if not ids:
            raise NotApplicable("the budget pays for no whole answer: 0 secrets covered")
        judged, costs = self._judge_guesses(ids)
        # Charge the tokens, which were drawn, before the attack may be refused below.
        if self.setting is TEXT_ONLY:
            self.target.spending.charge_claim(self.view, self.method, costs)
        members = judged.select_secrets(judged.member)
        if not len(members.ids):
            raise NotApplicable("the budget covers no member")
        sampling = self.method.sampling()
        recipe = ""
        if sampling:
            recipe = self.view.sampling_recipe_name(sampling, "")
        judged = self.collector.collect_attack_guesses(self.key, judged)
        return dataclasses.replace(
            blank,
            measurements=(
                *extraction.measure_extraction(judged),
                *documents.measure_longest_block(
                    self.target.secrets,
                    dict(zip(judged.ids, judged.hit.tolist(), strict=True)),
                ),
                *self._measure_undefended_difference(),
            ),
            **self._group_members(members),
            by_repeats=extraction.measure_hit_shares("recall", members),
            by_kind=judged.remeasure_kinds(RECALL, judged.kinds),
            by_kind_nonmembers=judged.remeasure_kinds(name_nonmember_metric(RECALL), judged.kinds),
            curve=extraction.compute_recall_error_curve(members),
            notes=(
                *blank.notes,
                *self.method.notes(self.view, state),
                *answer_remarks.list_guess_remarks(
                    costs, self.target.secrets, self.audit.benchmark, len(queried)
                ),
                *answer_remarks.list_budget_remarks(self.view, self.method, costs),
                *answer_remarks.list_single_sample_remarks(self.view, self.method),
            ),
            drawn=sum(g.drawn for g in costs),
            samples=self.method.sample_counts_by_recipe(self.view).get(recipe, 0),
            rows=sum(g.rows for g in costs),
        )

    def _group_members(self, members: judging.Outcome) -> dict[str, Any]:
        """Return the finding's fields about groups of the attacked members.

        Return {} if `--until` may stop the queries early, because the intervals need a fixed sample
        size. Strata by number of copies need all members.
        """
        if self.key in self.audit.stops:
            return {}
        benchmark = self.audit.benchmark
        secrets = list(map(self.audit.secrets_by_id.__getitem__, members.ids))
        fields: dict[str, Any] = {"by_group": extraction.measure_group_shares(secrets, members.hit)}
        counts = benchmark.record_counts.get("members")
        if counts is not None and len(secrets) == len(select_members(benchmark.secrets)):
            fields["strata"] = extraction.group_copies_strata(
                counts.by_copies, secrets, members.hit
            )
        return fields

    def _measure_undefended_difference(self) -> Iterator[Measurement]:
        """Yield the paired difference between this target's recall and the undefended target's.

        Both recalls are of this attack and setting. Only members attacked on both targets are
        compared.
        """
        if self.key in self.collector.stopped:
            return  # the interval needs a fixed sample size
        # The undefended target comes first in a run, so its answers exist.
        row = self.collector.find_main_numbers(self.key)
        base_row = self.collector.find_main_numbers(self.key._replace(target=UNDEFENDED))
        if row is not None and base_row is not None and not self.target.is_undefended:
            yield chain_steps.measure_row_difference(RECALL, "share", row, base_row)

    def _judge_guesses(self, ids: Sequence[str]) -> tuple[ValuesBySecret, list[Guesses]]:
        """Judge the stored guesses about these secrets, one secret at a time to save memory.

        Returns:
            The judged guesses.
            The guesses without their candidates, from which costs are computed.
        """
        finished = self.audit.folder.guesses.finished_secrets(self.key)
        costs = list[Guesses]()

        def read() -> Iterator[Guesses]:  # fills `costs` while `judge_guesses` iterates over it
            for guesses in finished.read_records(ids):
                costs.append(dataclasses.replace(guesses, ranked=()))
                yield guesses

        secrets = self.audit.secrets_by_id
        decode = make_token_decoder(self.audit.benchmark.tokenizer)
        outcome = judging.judge_guesses(read(), secrets)
        kinds = self.audit.personal_data_of_secrets.measure_extracted_shares(
            finished.read_records(ids), secrets, decode
        )
        is_probability = self.method.score_is_probability(self.view)
        return build_outcome_row(outcome, kinds, is_probability), costs

    def _build_judged_row(self, queries: Sequence[Query]) -> ValuesBySecret:
        """Judge the stored guesses of these queries, and return the results per secret.

        Queries without a stored guess are skipped.
        """
        finished = self.audit.folder.guesses.finished_secrets(self.key)
        ids = filter(finished.__contains__, (query.id for query in queries))
        return self._judge_guesses(list(ids))[0]

    def _guess_remaining_secrets(self, state: State) -> tuple[list[str], list[str]]:
        """Attack the secrets that have no stored guesses yet.

        Args:
            state: the attack's tuned state.

        Returns:
            The ids of all queries.
            The ids of the queries that now have guesses.
        """
        attacked = {secret.id for secret in self.target.secrets}
        known = [query for query in self.audit.challenge.queries if query.id in attacked]
        queries = self.method.queries(self.view, known)
        journal = self.audit.folder.guesses
        queried = self._ask_remaining(queries, journal, self._build_judged_row, state, {})
        ids = [query.id for query in queried]
        finished = journal.finished_secrets(self.key)
        return ids, [id for id in ids if id in finished]

    def _count_cost(self, result: CellWorkResult[Guesses]) -> None:
        if self.setting is TEXT_ONLY:
            self.target.spending.seconds += result.seconds
            for guesses in result.answers:
                self.target.spending.n_drawn += guesses.drawn


@dataclass(frozen=True)
class CorpusCell(AttackCell):
    """Corpus attack on a target in a setting.

    The attack draws generations, which are compared with all training texts.
    """

    method: CorpusAttack

    def _complete_finding(self, blank: Finding) -> Finding:
        audit = self.audit
        attack = self.method
        view = self.view
        corpus = audit.build_attack_corpus(attack)
        state = audit.load_or_fit_attack_state(self.target, view, attack)
        _, ids = self._guess_remaining_secrets(state)
        if not ids:
            raise NotApplicable("the budget pays for no whole generation")
        judged = generations.judge_generations(
            self.key, attack, audit.folder.guesses.finished_secrets(self.key), ids, corpus
        )
        if self.setting is TEXT_ONLY:
            self.target.spending.charge_claim(view, attack, judged.costs)
        self.collector.collect_generations(self.key, judged)
        # No secrets: the queries of a corpus attack depend only on its options.
        n_queries = len(attack.queries(view, ()))
        budget_remarks = []
        if len(ids) < n_queries:
            budget_remarks.append(f"the query budget covered {len(ids)} of {n_queries} generations")
        return dataclasses.replace(
            blank,
            measurements=judged.measurements,
            notes=(
                *blank.notes,
                *attack.notes(view, state),
                *corpus.list_corpus_notes(attack.user_chosen_beginnings(view)),
                *judged.notes,
                *answer_remarks.list_sampling_boundary_remarks(judged.costs),
                *budget_remarks,
                *answer_remarks.list_budget_remarks(view, attack, judged.costs, "generations"),
            ),
            drawn=sum(g.drawn for g in judged.costs),
            rows=sum(g.rows for g in judged.costs),
        )


@dataclass(frozen=True)
class ProbeCell(Cell):
    """Probe on a target in a setting: observe each secret, knowing the true answer.

    A probe's queries are not charged to a privacy claim.
    """

    method: Probe

    def ask_ahead(self) -> None:
        check_method_applies(self.method, self.target, self.view, self.audit)
        secrets = select_probed_secrets(self.method, self.target, self.audit.benchmark, self.view)
        self._observe_missing_secrets(secrets, {})

    def _complete_finding(self, blank: Finding) -> Finding:
        probe = self.method
        target = self.target
        candidates = select_probed_secrets(probe, target, self.audit.benchmark, self.view)
        claim = target.claim
        # A probe of the claim reads `uncharged_token_count`: the number of drawn tokens that the
        # claim was not charged for.
        meter = target.spending.meter
        meter.spent = claim.spent_queries if claim else meter.drawn_token_count
        secrets, observations = self._observe_secrets(candidates)
        measurements = tuple(probe.measurements(secrets, observations))
        self.collector.collect_probe_observations(
            self.key, probe, secrets, observations, measurements[0]
        )
        subset_remarks: tuple[str, ...] = ()
        if probe.of == "secrets":
            subset_remarks = answer_remarks.list_subset_remarks(candidates, self.audit.benchmark)
        return dataclasses.replace(
            blank,
            measurements=measurements,
            by_repeats=probe.main_number_by_repeats(secrets, observations),
            notes=(*blank.notes, *subset_remarks, *probe.notes(secrets, observations)),
            violations=probe.claim_violations(secrets, observations),
            audits=probe.epsilon_lower_bounds(secrets, observations),
        )

    def _observe_secrets(self, secrets: Sequence[Secret]) -> tuple[Sequence[Secret], Observed]:
        """Observe the secrets, and return the queried secrets and all their observations.

        Observations that an interrupted run stored are included.
        """
        folder = self.audit.folder
        probe = self.method
        earlier, facts = self._pair_undefended_observations()
        secrets, finished = self._observe_missing_secrets(secrets, earlier)
        ids = build_secret_table(secrets).ids
        values = Observed(finished.read_records(ids))
        # Computed once: by an earlier run of the sweep, by the resumed run, or now. `facts` is
        # updated in place, like `earlier` below, because all these runs share both. Facts about
        # some of the secrets do not hold for more secrets.
        saved_facts = {}
        if not self.audit.population:
            saved_facts = facts or folder.read_probe_numbers(self.key)
        facts |= saved_facts or probe.facts(self.view, secrets, values)
        folder.save_probe_numbers(self.key, facts)
        observations = probe.add_joint_values(self.view, secrets, values)
        # In the journal the last record of a secret counts.
        if probe.queries_for_joint_values and observations is not values:
            for batch in batch_finished_secrets(iter(observations), _AT_ONCE):
                folder.observations.append(self.key, batch)
        if any(id not in earlier for id in ids):
            # A ChainMap's type wants mutable maps; nothing is written to these.
            earlier.maps.insert(0, cast(MutableMapping[str, Observation], finished))
        return secrets, Observed(observations, facts)

    def _observe_missing_secrets(
        self, secrets: Sequence[Secret], earlier: Mapping[str, Observation]
    ) -> tuple[Sequence[Secret], FinishedSecrets[Observation]]:
        """Observe the secrets that have no observation in the run folder.

        Args:
            secrets: all secrets of the probe.
            earlier: observations from earlier runs of the sweep, which are reused.

        Returns:
            All queried secrets.
            All observations in the folder, keyed by secret id.
        """
        journal = self.audit.folder.observations
        queried = self._ask_remaining(secrets, journal, self._build_observed_row, {}, earlier)
        return queried, journal.finished_secrets(self.key)

    def _build_observed_row(self, secrets: Sequence[Secret]) -> ValuesBySecret:
        """Return the results per secret of these observed secrets."""
        finished = self.audit.folder.observations.finished_secrets(self.key)
        return build_observation_row(
            self.method, secrets, Observed(finished.read_records(build_secret_table(secrets).ids))
        )

    def _pair_undefended_observations(
        self,
    ) -> tuple[ChainMap[str, Observation], dict[str, float]]:
        """Return the two mappings that all runs of a sweep share for this probe.

        They hold observations of the undefended model, so that no run of the sweep repeats them.
        The caller adds its own observations to both mappings. For a defended model, return two
        empty mappings that are not shared.

        Returns:
            Observations, keyed by secret id.
            Numbers about all secrets together, keyed by name.
        """
        if not self.target.is_undefended:
            return ChainMap(), {}
        key = (self.audit.sweep_cache_key_of_answers, self.audit.plan.seed, self.method)
        title = f"{self.setting.name} {self.method.name}"
        return self.audit.site.shared.get_or_make(title, key, lambda: (ChainMap(), {}))


def list_target_cells(target_run: TargetRun) -> Iterator[Cell]:
    """Yield all cells of a target, setting by setting; attacks and probes keep the plan's order."""
    selection = target_run.audit.selection
    target = target_run.target
    kind: Any
    for setting in selection.list_target_settings(target.companion):
        for method in selection.methods:
            if isinstance(method, Probe):
                kind = ProbeCell
            # Checked before the last branch, because a CorpusAttack is an Attack too.
            elif isinstance(method, CorpusAttack):
                kind = CorpusCell
            else:
                kind = AttackCell
            yield kind(**vars(target_run), setting=setting, method=method)
