"""Collect the results per secret of each attack and probe.

The run folder stores these results, and chains of causes compare them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from auditor.conclusions.outcomes import ValuesBySecret, list_secret_attributes
from auditor.core.arrays import Floats, Ints, Strings
from auditor.core.nouns import CellKey, Secret, Tokens
from auditor.core.result import Finding, Measurement, StoppedEarly
from auditor.core.secret_table import STRINGS
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.plugins.probe import Observed, Probe, score_records
from auditor.records import private_texts, table
from auditor.records.folder import RunFolder, batch_finished_secrets
from auditor.records.table import Column
from auditor.runs.generations import JudgedGenerations
from auditor.statistics import judging
from auditor.statistics.metrics import ADJUSTED_AUC, RECALL, name_score_column
from auditor.statistics.strongest_score import (
    CandidateScore,
    ScoredRecords,
    choose_strongest_score,
    compute_simultaneous_widening,
)

_SECRETS_AT_ONCE = 1000  # number of secrets whose tokens are in memory at once
# extracted share of a secret's personal data, by kind and secret
Kinds = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ScoredRow:
    """Membership scores of a probe on a target in a setting.

    Args:
        ids: record ids, in the order of the scores.
        records: membership and groups of the records.
        candidates: the probe's different scores of these records, keyed by score name.
    """

    ids: Sequence[str] | Strings
    records: ScoredRecords
    candidates: Mapping[str, CandidateScore]


class PerSecretCollector:
    """Collector of the results per secret of all attacks and probes of a run.

    These attributes have a key for each cell (target, setting, attack or probe):

    - `rows`: all results.
    - `scored`: membership scores.
    - `stopped`: how `--until` ended the queries of the cell, which were in random order.

    These attributes have a key for each target:

    - `likelihoods`: each secret's mean log-probability of true tokens, in nats.
    - `heldout`: the nll of each held-out text.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.likelihoods: dict[str, ValuesBySecret] = {}
        self.heldout: dict[str, Mapping[str, Sequence[float]]] = {}  # nll of each text, by target
        self.stopped: dict[CellKey, StoppedEarly] = {}
        self.rows: dict[CellKey, ValuesBySecret] = {}
        self.scored: dict[CellKey, ScoredRow] = {}
        # by cell: the name of the main number, and whether non-members are its baseline
        self._main_numbers: dict[CellKey, tuple[str, bool]] = {}
        # by cell: columns besides those of `rows`
        self._columns: dict[CellKey, tuple[Column, ...]] = {}
        self._texts: dict[str, Mapping[str, tuple[Tokens, Tokens]]] = {}

    def collect_attack_guesses(self, key: CellKey, judged: ValuesBySecret) -> ValuesBySecret:
        """Add an attack's judged guesses to the collection, and return them as collected.

        `key` names target, setting and attack.
        """
        self._main_numbers[key] = (RECALL, False)
        return self._keep_cell_row(key, judged)

    def collect_probe_observations(
        self,
        key: CellKey,
        probe: Probe,
        secrets: Sequence[Secret],
        observations: Observed,
        main: Measurement,
    ) -> None:
        """Collect a probe's observations and results.

        Args:
            key: target, setting and probe.
            probe: the probe.
            secrets: the observed secrets.
            observations: the probe's observation of each secret.
            main: the probe's first measurement.
        """
        row = self._keep_cell_row(key, build_observation_row(probe, secrets, observations))
        self._columns[key] = tuple(_build_observation_columns(key, row, observations))
        if candidates := probe.membership_candidates(secrets, observations):
            self.scored[key] = ScoredRow(row.ids, score_records(secrets), candidates)
        # A canary's exposure is a rank among never inserted texts: it needs no baseline.
        self._main_numbers[key] = (main.name, probe.of == "secrets")

    def find_main_numbers(self, key: CellKey) -> ValuesBySecret | None:
        """Return the main number of each member; None if a secret has none.

        Non-members are included if the probe measures them as a baseline.
        """
        name, has_baseline = self._main_numbers.get(key, ("", False))
        if key not in self.rows or name not in self.rows[key].values:
            return None
        answers = self.rows[key].keep_one_metric(name, keep_nonmembers=has_baseline)
        if answers.member.any() and np.isfinite(answers.values[name]).all():
            return answers
        return None

    def set_row_column(self, key: CellKey, quantity: str, values: Floats) -> None:
        """Set a quantity's values in the collected results of an attack or probe.

        Args:
            key: target, setting, and attack or probe.
            quantity: name of the number.
            values: a number for each secret, in the order of the collected results.
        """
        columns = dict(self.rows[key].columns)
        columns.pop(quantity, None)  # to be the last column, as if it was new
        self.rows[key] = replace(self.rows[key], columns={**columns, quantity: values})

    def _keep_cell_row(self, key: CellKey, row: ValuesBySecret) -> ValuesBySecret:
        self.rows[key] = replace(row, anytime=key in self.stopped)
        self._columns[key] = ()
        return self.rows[key]

    def collect_generations(self, key: CellKey, generations: JudgedGenerations) -> None:
        """Collect the table columns and extracted texts of a corpus attack.

        A corpus attack draws texts and compares them with all training texts. `key` names target,
        setting and attack.
        """
        self._columns[key] = tuple(generations.columns)
        self._texts[str(key)] = generations.texts

    def save_results(self, secrets: Sequence[Secret], tokenizer: Any) -> None:
        """Write the collected columns and the texts of the guesses to the run folder."""
        table.write_secrets_table(
            self.folder.path,
            [*self._list_cell_columns(), *self._list_heldout_columns()],
            self._list_token_columns(),
        )
        guesses = {}
        for key, row in self.rows.items():
            if row.is_judged:
                guesses[str(key)] = self.folder.guesses.finished_secrets(key)
        private_texts.write_secret_texts(
            self.folder.path, secrets, guesses, make_token_decoder(tokenizer), self._texts
        )

    def _list_cell_columns(self) -> Iterator[Column]:
        for key, columns in self._columns.items():
            if key in self.rows:
                yield from self.rows[key].list_columns(key)
            yield from columns

    def _list_heldout_columns(self) -> Iterator[Column]:
        for target, losses in self.heldout.items():
            for name, numbers in losses.items():
                ids = [f"heldout-{i}" for i in range(len(numbers))]
                yield Column(table.HELDOUT, CellKey(target, "", ""), name, ids, numbers)

    def _list_token_columns(self) -> Iterator[Column]:
        """Yield columns of token log-probabilities for a few secrets at a time, to save memory."""
        for target, row in self.likelihoods.items():
            finished = self.folder.tokens.finished_secrets(target)
            # a check may have stopped within a batch
            scored_ids = (id for id in row.ids if id in finished)
            for batch in batch_finished_secrets(
                finished.read_records(scored_ids), _SECRETS_AT_ONCE
            ):
                ids = list[str]()
                values = list[float]()
                for scores in batch:
                    ids += [scores.secret] * len(scores.log_probs)
                    values += scores.log_probs
                yield Column(table.TOKENS, CellKey(target, "", ""), "log_prob", ids, values)


def build_outcome_row(outcome: judging.Outcome, kinds: Kinds, probable: bool) -> ValuesBySecret:
    """Return the judged guesses with their shares of personal data.

    Args:
        outcome: the judged guesses.
        kinds: for each kind of personal data, the share of a secret's data that its guess contains,
            keyed by secret id.
        probable: whether the attack's scores of its guesses are probabilities.
    """
    # NaN: the secret has no data of the kind; means skip it.
    of_kinds = {}
    for kind, share_by_id in kinds.items():
        of_kinds[kind] = [share_by_id.get(id, math.nan) for id in outcome.ids]
    return ValuesBySecret.from_judged_guesses(outcome, of_kinds, probable)


def build_observation_row(
    probe: Probe, secrets: Sequence[Secret], observations: Observed
) -> ValuesBySecret:
    numbers = {}
    for name, values in probe.per_secret_values(secrets, observations).items():
        numbers[name] = np.asarray(values)
    return ValuesBySecret(*list_secret_attributes(secrets), numbers)


def _build_observation_columns(
    key: CellKey, row: ValuesBySecret, observations: Observed
) -> Iterator[Column]:
    """Yield a table column for each observed number.

    A column holds only the secrets with this number. Their membership and copies come from `row`,
    which holds all secrets in the same order.
    """
    for name in observations.names:
        values, present = observations.find_column(name)
        ids = row.ids
        member = row.member
        repeats = row.repeats
        if not present.all():
            values = values[present]
            ids = np.asarray(ids, STRINGS)[present]
            member = member[present]
            repeats = tuple(compress(repeats, present))
        yield Column(table.OBSERVED, key, name, ids, values, member, repeats)


def make_token_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text.

    Without a tokenizer, the text is the list of ids.
    """
    if tokenizer is None:
        return lambda tokens: "".join(f"{token} " for token in tokens)
    return partial(decode_keeping_special_tokens, tokenizer)


def add_strongest_membership(
    findings: Sequence[Finding], collector: PerSecretCollector
) -> list[Finding]:
    """Return a target's findings, with the AUC of the strongest score in each membership finding.

    A membership probe has several scores, and the strongest is chosen by its result. The intervals
    are corrected for this choice; findings with the same setting and records share one correction.

    In the collector, the strongest score replaces the values of the main score, so that the AUC can
    be recomputed from the table.

    Args:
        findings: all findings about one target.
        collector: the results per secret, which this function changes.
    """
    changed = {}
    for family in _group_row_families(findings, collector.scored):
        scores = list(_align_scores(family))
        widening = compute_simultaneous_widening(scores, next(iter(family.values())).records)
        for key, row in family.items():
            strongest = choose_strongest_score(row.candidates, row.records, widening, len(scores))
            collector.set_row_column(key, name_score_column(""), strongest.values)
            measured = {}
            for m in (*strongest.measurements, *strongest.corrected):
                measured[m.name] = m
            finding = next(f for f in findings if f.cell_key == key)
            measurements = [measured.get(m.name, m) for m in finding.measurements]
            if strongest.adjusted is not None:
                adjusted, parts = strongest.adjusted
                if adjusted.n:
                    collector.set_row_column(key, ADJUSTED_AUC, parts)
                measurements.insert(1, adjusted)
            del collector.scored[key]
            changed[key] = replace(
                finding,
                measurements=tuple(measurements),
                by_repeats=strongest.by_copies,
                scores_tried=len(scores),
                notes=(
                    *finding.notes,
                    *_list_strongest_notes(strongest.measurements[0].note, len(scores)),
                ),
            )
    return [changed.get(finding.cell_key, finding) for finding in findings]


def _group_row_families(
    findings: Sequence[Finding], scored: Mapping[CellKey, ScoredRow]
) -> Iterator[dict[CellKey, ScoredRow]]:
    """Yield groups of membership results that have the same setting and scored the same records.

    Keys name target, setting and probe.
    """
    families = list[tuple[str, ScoredRow, dict[CellKey, ScoredRow]]]()
    for finding in findings:
        row = scored.get(finding.cell_key)
        if row is None or finding.not_applicable:
            continue
        for setting, first, family in families:
            if setting == finding.setting and _are_same_records(first, row):
                family[finding.cell_key] = row
                break
        else:
            families.append((finding.setting, row, {finding.cell_key: row}))
    for _, _, family in families:
        yield family


def _are_same_records(first: ScoredRow, second: ScoredRow) -> bool:
    """Return whether two results are about the same records, in any order."""
    if first.ids is second.ids:
        return True
    return len(first.ids) == len(second.ids) and set(first.ids) == set(second.ids)


def _align_scores(family: Mapping[CellKey, ScoredRow]) -> Iterator[CandidateScore]:
    """Yield the membership scores of all results in `family`.

    All scores are in the order of the first result's records. Keys name target, setting and probe.
    """
    first = next(iter(family.values()))
    for row in family.values():
        order: Ints | slice = slice(None)
        if row.ids is not first.ids:
            place = {secret: i for i, secret in enumerate(row.ids)}
            order = np.array([place[secret] for secret in first.ids])
        for score in row.candidates.values():
            yield replace(score, values=score.values[order])


def _list_strongest_notes(title: str, tried: int) -> tuple[str, ...]:
    if tried < 2:
        return ()
    return (
        f"the membership AUC is of the strongest score ({title}), over all members and by "
        f"copies; the intervals of all AUCs are valid for the {tried} scores and all "
        "groups of copies together (bootstrap of the maximum)",
    )
