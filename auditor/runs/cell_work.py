"""The work of a cell, as it can be done in this process or on a worker elsewhere, and the place it
is done at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from platform import node
from typing import Any, ClassVar, Generic, TypeVar

from auditor.benchmarks.data.large_tables import TableCounting, UnreadRows
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guesses, Observation, PrefixToken, Query, Secret
from auditor.core.plan import Plan
from auditor.engines.engine import WorkerStart
from auditor.gate.comparability import comparable_secrets_digest
from auditor.plugins.probe import Probe
from auditor.plugins.view import SETTINGS, ClaimTokenMeter, View
from auditor.records.folder import batch_finished_secrets
from auditor.runs import plan_weights
from auditor.runs.audit import RunContext
from auditor.runs.lab_site import make_site
from auditor.runs.selection import PluginSelection, select_and_check_plugins
from auditor.runs.site import Site
from auditor.runs.target import Target
from auditor.runs.targets import Targets

_AT_ONCE = 16  # secrets, between two writes to the run folder
Asked = TypeVar("Asked", Query, Secret)
Answer = TypeVar("Answer", Guesses, Observation)


@dataclass(frozen=True)
class CellWorkResult(Generic[Answer]):
    """The answers about some secrets, with the tokens that they drew inside the claim, and the
    seconds they took."""

    of: list[Answer]
    drawn: dict[tuple[str, str], int]  # see `ClaimTokenMeter`
    seconds: float


class Workplace:
    """The targets of a run, of which the last one is kept, with a view for each setting."""

    def __init__(self, scene: RunContext, targets: Targets) -> None:
        self.scene, self.targets = scene, targets
        self._target: Target | None = None
        self._views: dict[str, View] = {}

    def set_current_target(self, target: Target) -> None:
        """Makes a target that is built already the current one; the one before is let go."""
        self._target, self._views = target, {}

    def shared_view_of_target(self, target: str, setting: str) -> View:
        """Shared by all that is asked of one target in one setting: passes with the same recipe are
        run once."""
        if self._target is None or self._target.name != target:
            self.set_current_target(self.targets.find_or_build_target(target))
        assert self._target is not None  # just taken
        if setting not in self._views:
            self._views[setting] = self.scene.make_view_of_target(self._target, SETTINGS[setting])
        return self._views[setting]


@dataclass(frozen=True)
class CellWork(Generic[Asked, Answer]):
    """What one cell asks. allowance: tokens that each (recipe, secret) may still draw, shared out
    by the run's owner.

    meter: what was drawn inside the target's claim until now, and what the claim was charged for
    it. state: what the attack tuned; a probe sees the answers, and tunes nothing.
    """

    key: CellKey
    allowance: Mapping[tuple[str, str], int] | None
    meter: ClaimTokenMeter
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    portion: ClassVar[int] = 64

    def process_items(
        self, place: Workplace, items: Sequence[Asked]
    ) -> Iterator[CellWorkResult[Answer]]:
        view, drawn = (
            place.shared_view_of_target(self.key.target, self.key.setting),
            dict(self.meter.drawn),
        )
        # All cells of a target and setting share the view, so each sets its own allowance. Draws
        # are counted in a copy: in this process the meter is the run's own, to which the cell adds
        # what comes back.
        view.allowance, view.meter = (
            self.allowance,
            ClaimTokenMeter(drawn, self.meter.spent, self.meter.lots),
        )
        start, known = time.perf_counter(), len(drawn)
        method = place.scene.selection.methods_by_name[self.key.attack]
        asked: Any = items  # secrets of a probe, queries of an attack
        answers: Iterator[Any] = (
            method.observe_secrets(view, asked)
            if isinstance(method, Probe)
            else method.guess(view, self.state, asked)
        )
        for batch in batch_finished_secrets(answers, _AT_ONCE):
            now = time.perf_counter()
            # A dict keeps its order: what the meter drew since the last batch stands behind the
            # first `known` entries.
            yield CellWorkResult(batch, dict(islice(drawn.items(), known, None)), now - start)
            start, known = time.perf_counter(), len(drawn)


# --- places of workers
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSite:
    """A worker's own site of a plan, with what the plan chooses: weights, data and plug-ins are
    read on its machine.

    counted: large tables that the run has counted, by flag and name.
    """

    plan: Plan
    there: WorkerStart = field(default_factory=WorkerStart)
    counted: Mapping[str, UnreadRows] = field(default_factory=dict)

    def __call__(self) -> tuple[Site, PluginSelection]:
        self.there.enter_folder()
        # a file on the machine of the run, which would be refused here
        plan = self.plan.with_fields(submission=None)
        site = make_site(plan)
        site.table_counting = TableCounting(counted=dict(self.counted))
        return site, select_and_check_plugins(plan, site)


def fingerprints_of_inputs(plan: Plan, site: Site) -> dict[str, str]:
    """Digests of all inputs, once the model is loaded; a worker whose digests differ is refused."""
    return {
        **plan_weights.weight_digests_of_plan_and_site(plan, site),
        "the data": comparable_secrets_digest(site.benchmark.secrets),
    }


@dataclass(frozen=True)
class WorkerWorkplace:
    """A worker's own `Workplace`, checked to be like the run's. read: digests of what the run read,
    by name."""

    site: WorkerSite
    prefix_token: PrefixToken
    read: Mapping[str, str]

    def __call__(self) -> Workplace:
        """Raises AuditError where the worker reads other weights or data than the run."""
        site, selection = self.site()
        site.may_train = False
        plan = self.site.plan
        scene = RunContext(
            site, selection, self.prefix_token, plan.defenses, plan.compute.batch_size
        )
        # In this order: `Targets` loads the model, and files of a hub have no digest before they
        # were fetched.
        place, found = Workplace(scene, Targets(scene)), fingerprints_of_inputs(plan, site)
        for name, digest in self.read.items():
            if found.get(name) != digest:
                raise AuditError(
                    f"expected every worker to read what the run does, but {name} is another on "
                    f"{node()}"
                )
        return place
