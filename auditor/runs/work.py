"""The work of a cell, as it can be done in this process or on a worker elsewhere, and the place it is done at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from auditor.core.nouns import CellKey, Guesses, Lead, Observation, Query, Secret
from auditor.core.plan import Plan
from auditor.plugins.attack import Attack
from auditor.plugins.probe import Probe
from auditor.plugins.view import SETTINGS, Meter, View
from auditor.records.folder import batched
from auditor.runs.audit import Scene
from auditor.runs.reporter import Silence
from auditor.runs.selection import select
from auditor.runs.shelf import Shelf
from auditor.runs.sites import site_of
from auditor.runs.target import Target
from auditor.runs.targets import Targets

_AT_ONCE = 16  # secrets, between two writes to the run folder


@dataclass(frozen=True)
class Found:
    """What came of some secrets, with the tokens drawn inside the claim for it and the seconds that it took."""

    of: tuple[Guesses, ...] | tuple[Observation, ...]
    drawn: int
    seconds: float


class Workplace:
    """The targets of a scene, of which the last one is kept, with a view for each setting."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self.scene, self.targets = scene, targets
        self._target: Target | None = None
        self._views: dict[str, View] = {}

    def take(self, target: Target) -> None:
        """A target that is built already; the one before goes."""
        self._target, self._views = target, {}

    def method(self, name: str) -> Attack | Probe:
        return next(method for method in self.scene.selection.methods if method.name == name)

    def view(self, target: str, setting: str) -> View:
        """Shared by all that is asked of one target in one setting: passes with the same recipe are run once."""
        if self._target is None or self._target.name != target:
            self.take(self.targets.named(target))
        assert self._target is not None  # just taken
        if setting not in self._views:
            self._views[setting] = self.scene.view(self._target, SETTINGS[setting])
        return self._views[setting]


@dataclass(frozen=True)
class CellWork:
    """What one cell asks. allowance: tokens that each (recipe, secret) may still draw, shared out by the run's owner.

    drawn, spent: what was drawn inside the target's claim until now, and what the claim was charged for it.
    state: what the attack tuned; None for a probe.
    """

    key: CellKey
    allowance: Mapping[tuple[str, str], int] | None
    drawn: int
    spent: int
    state: dict[str, Any] | None = field(default=None, repr=False)
    portion: ClassVar[int] = 64

    def at(self, place: Workplace, items: Sequence[Query] | Sequence[Secret]) -> Iterator[Found]:
        """items: the queries of an attack, the secrets of a probe."""
        view, method = place.view(self.key.target, self.key.setting), place.method(self.key.attack)
        view.allowance, view.meter = self.allowance, Meter(self.drawn, self.spent)
        found: Iterator[Any]
        found = method.measure(view, items) if isinstance(method, Probe) else method.guess(view, self.state, items)
        start, drawn = time.perf_counter(), self.drawn
        for batch in batched(found, _AT_ONCE):
            now = time.perf_counter()
            yield Found(tuple(batch), view.meter.drawn - drawn, now - start)
            start, drawn = time.perf_counter(), view.meter.drawn


@dataclass(frozen=True)
class Elsewhere:
    """What a worker needs to open a place of its own, at which everything is as it is at the owner's."""

    plan: Plan
    lead: Lead

    def __call__(self) -> Workplace:
        # Weights, data and plug-ins are read where the plan says, on the worker's machine.
        plan, reporter, shelf = replace(self.plan, submission=None), Silence(), Shelf()
        site = site_of(plan, reporter, shelf)
        scene = Scene(plan, site, select(plan, site), reporter, shelf, self.lead)
        return Workplace(scene, Targets(scene))
