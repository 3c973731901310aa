"""What runs that differ in their seed alone found out, configuration by configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from auditor.conclusions.outcomes import RowValuesBySecret, read_row_values_by_secret
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Chain, Finding, Measurement, TargetRecord
from auditor.records.table import read_heldout_losses
from auditor.statistics.judging import Outcome

Runs = Mapping[int, tuple[AuditResult, Path]]  # one point of a grid with its folder, by seed


@dataclass(frozen=True)
class Replicates:
    """One (target, setting, attack) at one point of a grid, by seed: what its row found out, and
    what was measured."""

    target: str
    setting: str
    attack: str
    rows: Mapping[int, RowValuesBySecret] = field(default_factory=dict)
    # of the finding and its target
    measured: Mapping[int, Mapping[str, Measurement]] = field(default_factory=dict)
    # nll by target's text
    heldout: Mapping[int, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    not_applicable: str = ""

    @cached_property
    def member_outcomes_by_seed(self) -> Mapping[int, Outcome]:
        """Of an attack, its judged guesses for the members."""
        return {
            seed: one.select_secrets(one.member)
            for seed, row in self.rows.items()
            if (one := row.outcome) is not None
        }


def read_replicates(runs: Runs) -> Iterator[Replicates]:
    """Each (target, setting, attack or probe), over the seeds at which it has numbers."""
    by_key: dict[CellKey, dict[int, Finding]] = {}
    for seed, (result, _) in runs.items():
        for finding in result.findings:
            by_key.setdefault(finding.cell_key, {})[seed] = finding
    judged = {seed: read_row_values_by_secret(folder) for seed, (_, folder) in runs.items()}
    heldout = {seed: read_heldout_losses(folder) for seed, (_, folder) in runs.items()}
    for key, findings in by_key.items():
        target, one = key.target, next(iter(findings.values()))
        applied = {
            seed: finding for seed, finding in findings.items() if not finding.not_applicable
        }
        yield Replicates(
            *key,
            rows={seed: row for seed in applied if (row := judged[seed].get(key)) is not None},
            measured={
                seed: _measurements_by_name(finding, runs[seed][0].target(target))
                for seed, finding in applied.items()
            },
            heldout={seed: held[target] for seed, held in heldout.items() if target in held},
            options=one.options,
            not_applicable="" if applied else one.not_applicable,
        )


def _measurements_by_name(finding: Finding, target: TargetRecord) -> dict[str, Measurement]:
    """By name, what the finding and its target hold; by repeat count as `exposure(count=16)`."""
    named = {
        m.name: m
        for m in (
            *finding.measurements,
            *_attacked_model_measurements(target),
            *_difference_by_each_cause(finding.chain),
        )
    }
    return named | {f"{m.name}(count={count})": m for count, m in finding.by_repeats.items()}


def _attacked_model_measurements(target: TargetRecord) -> Iterator[Measurement]:
    """Its held-out perplexities, what it claims (epsilons, which are exact, as intervals of no
    width), and what each cause takes of the members' advantage in likelihood: `likelihood_mixing`.
    """
    if target.perplexity:
        yield target.perplexity
    yield from target.other_perplexities
    claimed = target.claim.epsilon.get(target.claim.relation) if target.claim else None
    for name, epsilon in (("epsilon", claimed), ("nominal_epsilon", target.nominal_epsilon)):
        if epsilon is not None:
            yield Measurement(name, epsilon, epsilon, epsilon, 1, "nats")
    yield from _difference_by_each_cause(target.likelihood)


def _difference_by_each_cause(chain: Chain | None) -> Iterator[Measurement]:
    """The effect of each cause, named after metric and cause: `likelihood_mixing`,
    `recall_splitting`."""
    for step in chain.steps if chain else ():
        if step.difference:
            of = step.difference.name.removesuffix("_difference")
            yield replace(step.difference, name="_".join([of, *step.causes]).replace(" ", "_"))
