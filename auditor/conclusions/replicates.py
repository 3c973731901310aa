"""Collect the results of runs that differ only in their seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from auditor.conclusions.outcomes import ValuesBySecret, read_secret_values
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Chain, Finding, Measurement, TargetRecord
from auditor.records.table import read_heldout_losses
from auditor.statistics.judging import Outcome

Runs = Mapping[int, tuple[AuditResult, Path]]  # one point of a grid with its folder, by seed


@dataclass(frozen=True)
class Replicates:
    """Results of a target, setting, and attack or probe over the seeds of a configuration.

    Args:
        target: name of the target.
        setting: access setting.
        attack: name of the attack or probe.
        values_by_seed: results of each secret, keyed by seed.
        measured: measurements of the finding and its target, keyed by seed and name.
        heldout: token counts and nll of the target's held-out texts, keyed by seed and column.
        options: options of the attack or probe.
        not_applicable: reason if nothing was measured; otherwise "".
    """

    target: str
    setting: str
    attack: str
    values_by_seed: Mapping[int, ValuesBySecret] = field(default_factory=dict)
    measured: Mapping[int, Mapping[str, Measurement]] = field(default_factory=dict)
    heldout: Mapping[int, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    not_applicable: str = ""

    @cached_property
    def member_outcomes_by_seed(self) -> Mapping[int, Outcome]:
        """An attack's judged guesses for the members, keyed by seed."""
        outcomes = {}
        for seed, row in self.values_by_seed.items():
            if row.is_judged:
                outcomes[seed] = row.select_secrets(row.member)
        return outcomes


def read_replicates(runs: Runs) -> Iterator[Replicates]:
    """Yield the results of each combination of target, setting, and attack or probe.

    Seeds without numbers are left out. `runs` holds the result and folder of each run, keyed by
    seed.
    """
    by_key: dict[CellKey, dict[int, Finding]] = {}
    for seed, (result, _) in runs.items():
        for finding in result.findings:
            by_key.setdefault(finding.cell_key, {})[seed] = finding
    judged = {}
    heldout = {}
    for seed, (_, folder) in runs.items():
        judged[seed] = read_secret_values(folder)
        heldout[seed] = read_heldout_losses(folder)
    for key, findings in by_key.items():
        target = key.target
        first_finding = next(iter(findings.values()))
        rows = {}
        measured = {}
        for seed, finding in findings.items():
            if finding.not_applicable:
                continue
            measured[seed] = _map_measurements(finding, runs[seed][0].target(target))
            if key in judged[seed]:
                rows[seed] = judged[seed][key]
        yield Replicates(
            *key,
            values_by_seed=rows,
            measured=measured,
            heldout={seed: losses[target] for seed, losses in heldout.items() if target in losses},
            options=first_finding.options,
            not_applicable="" if measured else first_finding.not_applicable,
        )


def _map_measurements(finding: Finding, target: TargetRecord) -> dict[str, Measurement]:
    """Return all measurements of the finding and its target, keyed by name.

    A measurement for a repeat count has a name like `exposure(count=16)`.
    """
    measurements = {}
    for m in (
        *finding.measurements,
        *_list_model_measurements(target),
        *_measure_cause_differences(finding.chain),
    ):
        measurements[m.name] = m
    for count, m in finding.by_repeats.items():
        measurements[f"{m.name}(count={count})"] = m
    return measurements


def _list_model_measurements(target: TargetRecord) -> Iterator[Measurement]:
    """Yield the target's perplexities on held-out texts, its claimed epsilons, and likelihood
    changes.

    Epsilons are exact, so their intervals have no width. A defense may lower the likelihood of
    members more than the likelihood of non-members. Each likelihood change is the part of this
    effect with a single cause: `likelihood_mixing` is caused by mixing.
    """
    if target.perplexity:
        yield target.perplexity
    yield from target.other_perplexities
    if target.claim:
        claimed = target.claim.epsilon.get(target.claim.relation)
    else:
        claimed = None
    for name, epsilon in (("epsilon", claimed), ("nominal_epsilon", target.nominal_epsilon)):
        if epsilon is not None:
            yield Measurement(name, epsilon, epsilon, epsilon, 1, "nats")
    yield from _measure_cause_differences(target.likelihood)


def _measure_cause_differences(chain: Chain | None) -> Iterator[Measurement]:
    """Yield the effect of each step of a chain, named by metric and causes (`recall_splitting`).

    A chain leads from the undefended target over control models to a defended target.
    """
    for step in chain.steps if chain else ():
        if step.difference:
            metric_name = step.difference.name.removesuffix("_difference")
            yield replace(
                step.difference, name="_".join([metric_name, *step.causes]).replace(" ", "_")
            )
