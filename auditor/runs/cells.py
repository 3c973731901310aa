"""The cells of an audit: one (target, setting, attack or probe) each, which `measure` makes a finding of."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.core.errors import NotApplicable
from auditor.core.jsonable import to_json
from auditor.core.nouns import UNDEFENDED, CellKey, Guesses, Observation, Secret
from auditor.core.result import Finding, Measurement
from auditor.plugins.attack import Attack
from auditor.plugins.probe import Probe
from auditor.plugins.view import CLAIM, View
from auditor.records.folder import batched
from auditor.runs import causes, remarks
from auditor.runs.allowance import planned, share_out
from auditor.runs.audit import Audit
from auditor.runs.collector import Collector, decoder
from auditor.runs.states import State
from auditor.runs.target import Target
from auditor.statistics import documents, extraction, judging


@dataclass(frozen=True)
class Cell(ABC):
    """One cell; view: shared by the cells of one target and setting, whose sampling passes are shared in it."""

    audit: Audit
    target: Target
    view: View
    collector: Collector

    @property
    @abstractmethod
    def method(self) -> Attack | Probe:
        """What is measured with."""

    @property
    def key(self) -> CellKey:
        return CellKey(self.target.name, self.view.setting.name, self.method.name)

    @property
    def title(self) -> str:
        return f"{self.target.title}: {self.method.name} ({self.view.setting.name})"

    def measure(self) -> Finding:
        """Numbers, or the reason why there are none. What was found secret by secret goes to the collector."""
        start, blank = time.perf_counter(), self._blank()
        try:
            for capability in self.method.required:
                self.view.need(capability)
            finding = self._measured(blank)
        except NotApplicable as why:
            return dataclasses.replace(blank, not_applicable=str(why))
        return dataclasses.replace(finding, seconds=time.perf_counter() - start)

    @abstractmethod
    def _measured(self, blank: Finding) -> Finding:
        """The blank, filled in. Raises NotApplicable where there is nothing to measure."""

    def _blank(self) -> Finding:
        """What can be said before anything is measured."""
        applies, reason = self.target.applies(self.view.setting)
        sampling = self.method.sampling()
        return Finding(
            *self.key,
            options=to_json(self.method),
            access=self.view.access,
            decoding=self.view.words(sampling) if sampling else "",
            claim_applies=applies,
            claim_reason=reason,
            notes=(*self.target.remarks(), self.audit.lead.said),
        )


@dataclass(frozen=True)
class AttackCell(Cell):
    """Fits, guesses secret by secret, and is judged."""

    attack: Attack

    @property
    def method(self) -> Attack:
        return self.attack

    def _measured(self, blank: Finding) -> Finding:
        state = self.audit.states.of(self.target, self.view, self.attack)
        guesses = self._guess(state)
        if not guesses:
            raise NotApplicable("the budget pays for no whole answer: 0 secrets covered")
        outcome = judging.judge(guesses, self.audit.secrets)
        members = outcome.only(outcome.member)
        if not len(members.ids):
            raise NotApplicable("the budget covers no member")
        self.collector.judged(self.key, outcome, guesses, self.attack.score_is_probability(self.view))
        decode = decoder(self.audit.benchmark.tokenizer)
        by_kind, by_kind_nonmembers = self.audit.personal.came_out(guesses, self.audit.secrets, decode)
        return dataclasses.replace(
            blank,
            measurements=(
                *extraction.extraction(outcome),
                *documents.measured(self.target.secrets, dict(zip(outcome.ids, map(bool, outcome.hit), strict=True))),
                *self._against_undefended(),
            ),
            by_repeats=extraction.by_repeats("recall", members),
            by_kind=by_kind,
            by_kind_nonmembers=by_kind_nonmembers,
            curve=extraction.error_curve(members),
            notes=(
                *blank.notes,
                *self.attack.notes(self.view, state),
                *remarks.of_guesses(guesses, self.target.secrets, self.audit.benchmark),
                *remarks.of_budget(self.view, self.attack, guesses),
            ),
            drawn=sum(g.drawn for g in guesses),
            rows=sum(g.rows for g in guesses),
        )

    def _against_undefended(self) -> Iterator[Measurement]:
        """The paired difference to the undefended target at the same setting, on the members that both answered."""
        own, base = (self.collector.answers.get(key) for key in (self.key, self.key._replace(target=UNDEFENDED)))
        if own is not None and base is not None and not self.target.is_undefended:
            yield causes.difference(own, base, [secret for secret in own.values if secret in base.values])

    def _guess(self, state: State) -> list[Guesses]:
        """The guesses of all secrets, those of an interrupted run included; what was drawn in the claim is charged."""
        folder, target = self.audit.folder, self.target
        done = folder.done(self.key)
        attacked = {secret.id for secret in target.secrets}
        queries = self.audit.challenge.queries
        waiting = [query for query in queries if query.id in attacked and query.id not in done]
        start, drawn = time.perf_counter(), 0
        for batch in batched(self.attack.guess(self.view, state, waiting), 16):
            folder.append(self.key, batch)
            drawn += sum(g.drawn for g in batch)
            self.audit.reporter.progress(f"{self.attack.name} on {target.title}", len(done), len(attacked))
        if self.view.setting is CLAIM:
            target.seconds += time.perf_counter() - start
            target.drawn += drawn
            target.charge(self.view, self.attack, done)
        return list(done.values())


@dataclass(frozen=True)
class ProbeCell(Cell):
    """Observes secret by secret: it sees the answers, and draws nothing that a claim would be charged for."""

    probe: Probe

    @property
    def method(self) -> Probe:
        return self.probe

    def _measured(self, blank: Finding) -> Finding:
        probe, target = self.probe, self.target
        secrets = self._secrets()
        claim = target.claim
        target.meter.spent = claim.spent_queries if claim else target.meter.drawn
        observations = self._observe(secrets)
        measurements = tuple(probe.measurements(secrets, observations))
        self.collector.probed(self.key, probe, secrets, observations, measurements[0])
        few = remarks.of_the_few(secrets, self.audit.benchmark) if probe.of == "secrets" else ()
        return dataclasses.replace(
            blank,
            measurements=measurements,
            by_repeats=probe.by_repeats(secrets, observations),
            notes=(*blank.notes, *few, *probe.notes(secrets, observations)),
            violations=probe.violations(secrets, observations),
            audits=probe.audits(secrets, observations),
        )

    def _secrets(self) -> tuple[Secret, ...]:
        """What the probe looks at."""
        if self.probe.of == "secrets":
            return self.target.secrets
        if self.probe.of == "own":
            return self.probe.subjects(self.view)
        canaries = self.audit.benchmark.canaries
        if not canaries:
            raise NotApplicable("the data hold no canaries: give --canaries MANIFEST (see `audit canaries`)")
        coins = self.probe.of == "coins"
        chosen = tuple(one for one in canaries if (one.canary is not None and one.canary.coin is not None) == coins)
        if not chosen and coins:
            raise NotApplicable("no coin decided which of these canaries went in: make them by canaries make --audit")
        if not chosen:
            raise NotApplicable("these canaries are of an audit: what else each could have been is not known of them")
        return chosen

    def _observe(self, secrets: Sequence[Secret]) -> list[Observation]:
        """An observation of every secret, in their order, those of an interrupted run included."""
        folder, probe = self.audit.folder, self.probe
        done = folder.observed(self.key)
        waiting = [secret for secret in secrets if secret.id not in done]
        for batch in batched(probe.measure(self.view, waiting), 16):
            folder.observe(self.key, batch)
            self.audit.reporter.progress(f"{probe.name} on {self.target.title}", len(done), len(secrets))
        seen = probe.revisit(self.view, secrets, [done[secret.id] for secret in secrets])
        completed = probe.complete(secrets, seen)
        changed = [observation for observation in completed if observation != done[observation.secret]]
        if changed:
            folder.observe(self.key, changed)
        return completed


def cells(audit: Audit, target: Target, collector: Collector) -> Iterator[Cell]:
    """All cells of a target, in the order of the settings and of what was asked for."""
    for setting in audit.selection.settings_of(target.companion):
        view = audit.view(target, setting)
        if target.budget is not None and setting is CLAIM:
            view.allowance = share_out(target.budget, planned(view, audit.selection.attacks, target.secrets))
        for method in audit.selection.methods:
            if isinstance(method, Probe):
                yield ProbeCell(audit, target, view, collector, method)
            else:
                yield AttackCell(audit, target, view, collector, method)
