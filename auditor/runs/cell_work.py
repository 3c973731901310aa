"""Run the queries of a cell, in this process or on a remote worker.

A cell is an attack or probe on a target model in an access setting.
"""

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
from auditor.gate.comparability import digest_comparable_secrets
from auditor.plugins.probe import Probe
from auditor.plugins.view import ClaimTokenMeter
from auditor.records.folder import batch_finished_secrets
from auditor.runs import plan_weights
from auditor.runs.audit import RunContext
from auditor.runs.selection import select_plugins
from auditor.runs.site import Site
from auditor.runs.targets import Targets

_AT_ONCE = 16  # secrets between two writes to the run folder
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
        for batch in batch_finished_secrets(answers, _AT_ONCE):
            now = time.perf_counter()
            # A dict keeps its order: the draws since the last batch follow the first `n_known`
            # entries.
            yield CellWorkResult(batch, dict(islice(draws.items(), n_known, None)), now - start)
            start = time.perf_counter()
            n_known = len(draws)


# --- places of workers
# -----------------------------------------------------------------------------------------------


def fingerprint_inputs(plan: Plan, site: Site) -> dict[str, str]:
    """Return digests of all inputs, keyed by name. The model must be loaded.

    The run refuses a worker whose digests differ.
    """
    return {
        **plan_weights.digest_plan_weights(plan, site),
        "the data": digest_comparable_secrets(site.benchmark.secrets),
    }


@dataclass(frozen=True)
class WorkerTargets:
    """Callable that builds a worker's targets from the files and plug-ins on its machine.

    Args:
        plan: plan of the run.
        counted: statistics of large tables, so that workers need not count their rows again. The
            keys are made of flag and name.
        prefix_token: prefix token of the run.
        input_digests: digests of the run's inputs, keyed by name; the worker's must match.
    """

    plan: Plan
    counted: Mapping[str, UnreadRows]
    prefix_token: PrefixToken
    input_digests: Mapping[str, str]

    def __call__(self) -> Targets:
        """Build the targets.

        Raise AuditError if the worker's weights or data differ from those of the run.
        """
        # A submission is a file on the run's machine; a worker would refuse its path.
        plan = self.plan.with_fields(submission=None)
        site = Site(plan)
        site.table_counting = TableCounting(counted=dict(self.counted))
        selection = select_plugins(plan, site)
        site.may_train = False
        scene = RunContext(site, selection, self.prefix_token, plan.defenses, plan.batch_size)
        # In this order: `Targets` loads the model, and hub files have no digest before they are
        # downloaded.
        targets = Targets(scene)
        digests = fingerprint_inputs(plan, site)
        for name, digest in self.input_digests.items():
            if digests.get(name) != digest:
                raise AuditError(
                    f"expected every worker to read the same data as the run, but {name} differs "
                    f"on {node()}"
                )
        return targets
