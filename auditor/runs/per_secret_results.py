"""Gathers what cells find out secret by secret, for the run folder and for the chains of causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.nouns import CellKey, Observation, Secret, Tokens
from auditor.core.result import Measurement, StoppedEarly
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.plugins.probe import Observed, Probe, scored_records
from auditor.records import private_texts, table
from auditor.records.folder import RunFolder
from auditor.records.table import Column
from auditor.runs.generations import JudgedGenerations
from auditor.statistics import judging
from auditor.statistics.metrics import RECALL
from auditor.statistics.strongest_score import CandidateScore, ScoredRecords

# By kind of personal data and secret, the share of what it holds of the kind that was extracted
Kinds = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ScoredRow:
    """A row's membership scores by name, of records side by side with `ids`."""

    ids: tuple[str, ...]
    records: ScoredRecords
    candidates: Mapping[str, CandidateScore]


class PerSecretCollector:
    """answers: by cell, the main number of each member, and of non-members where theirs shows what
    is no memory.

    likelihoods: mean log-probability of their true tokens, nats, by target. stopped: rows that
    asked in random order;
    rows: all of them; scored: of the rows that have membership scores, these.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.answers: dict[CellKey, RowValuesBySecret] = {}
        self.likelihoods: dict[str, RowValuesBySecret] = {}
        self.heldout: dict[str, Mapping[str, Sequence[float]]] = {}  # nll of each text, by target
        self.stopped: dict[CellKey, StoppedEarly] = {}
        self.rows: dict[CellKey, RowValuesBySecret] = {}
        self.scored: dict[CellKey, ScoredRow] = {}
        self._columns: list[Column] = []
        self._attacks: list[CellKey] = []
        self._texts: dict[str, Mapping[str, tuple[Tokens, Tokens]]] = {}

    def collect_attack_outcome(
        self, key: CellKey, outcome: judging.Outcome, probable: bool, kinds: Kinds
    ) -> RowValuesBySecret:
        """Takes and returns the row of an attack's cell. probable: its scores are probabilities."""
        row = self._keep_row_of_cell(key, per_secret_row_of_outcome(outcome, kinds, probable))
        self.answers[key] = row.keep_one_metric(RECALL, others=False)
        self._columns += row.columns_for_secrets_table(key)
        self._attacks.append(key)
        return row

    def collect_probe_observations(
        self,
        key: CellKey,
        probe: Probe,
        secrets: Sequence[Secret],
        observations: Observed,
        main: Measurement,
    ) -> None:
        """Takes the row of a probe's cell, and what it observed; main: its first measurement."""
        row = self._keep_row_of_cell(
            key, per_secret_row_of_observations(probe, secrets, observations)
        )
        self._columns += [
            *row.columns_for_secrets_table(key),
            *_observation_columns(key, secrets, observations),
        ]
        if candidates := probe.membership_candidates(secrets, observations):
            self.scored[key] = ScoredRow(row.ids, scored_records(secrets), candidates)
        if main.name in row.values:
            # A canary's exposure is a rank among texts that were never inserted: nothing is to be
            # taken off it.
            answers = row.keep_one_metric(main.name, others=probe.of == "secrets")
            if answers.member.any() and np.isfinite(answers.values[main.name]).all():
                self.answers[key] = answers

    def replace_row_column(self, key: CellKey, quantity: str, values: NDArray[np.float64]) -> None:
        """Puts other values into a column of a row that was taken before."""
        row = self.rows[key]
        self.rows[key] = replace(row, values={**row.values, quantity: values})
        self._columns = [
            replace(column, values=values)
            if (column.kind, column.cell, column.quantity) == (table.MEASURED, key, quantity)
            else column
            for column in self._columns
        ]

    def _keep_row_of_cell(self, key: CellKey, row: RowValuesBySecret) -> RowValuesBySecret:
        self.rows[key] = replace(row, anytime=key in self.stopped)
        return self.rows[key]

    def collect_generations(self, key: CellKey, found: JudgedGenerations) -> None:
        """Takes the columns of a cell of generations, and the texts that it extracted."""
        self._columns += found.columns
        self._texts[str(key)] = found.texts

    def save_tables_and_texts(self, secrets: Sequence[Secret], tokenizer: Any) -> None:
        """Writes to the run folder the columns, and the texts of guesses."""
        table.write_secrets_table(
            self.folder.path, [*self._columns, *self._likelihood_and_heldout_columns()]
        )
        guesses = {str(key): self.folder.guesses.finished_secrets(key) for key in self._attacks}
        private_texts.write_secret_texts(
            self.folder.path, secrets, guesses, make_token_decoder(tokenizer), self._texts
        )

    def _likelihood_and_heldout_columns(self) -> Iterator[Column]:
        for target, row in self.likelihoods.items():
            kept = self.folder.tokens.finished_secrets(target)
            # a check may have stopped within a batch
            scored = {id: kept[id] for id in row.ids if id in kept}
            ids = [id for id, seen in scored.items() for _ in seen.log_probs]
            values = [value for seen in scored.values() for value in seen.log_probs]
            yield Column(table.TOKENS, CellKey(target, "", ""), "log_prob", ids, values)
        for target, losses in self.heldout.items():
            for name, numbers in losses.items():
                ids = [f"heldout-{i}" for i in range(len(numbers))]
                yield Column(table.HELDOUT, CellKey(target, "", ""), name, ids, numbers)


def per_secret_row_of_outcome(
    outcome: judging.Outcome, kinds: Kinds, probable: bool = False
) -> RowValuesBySecret:
    # NaN: the secret holds nothing of the kind, and no mean counts it.
    of_kinds = {
        kind: [held.get(id, math.nan) for id in outcome.ids] for kind, held in kinds.items()
    }
    return RowValuesBySecret.from_judged_guesses(outcome, of_kinds, probable)


def per_secret_row_of_observations(
    probe: Probe, secrets: Sequence[Secret], observations: Observed
) -> RowValuesBySecret:
    kept = probe.per_secret_values(secrets, observations).items()
    numbers = {name: np.array(values, dtype=float) for name, values in kept}
    ids, member, repeats = (
        tuple(getattr(s, name) for s in secrets) for name in ("id", "member", "repeats")
    )
    return RowValuesBySecret(ids, np.array(member, dtype=bool), repeats, numbers)


def _observation_columns(
    key: CellKey, secrets: Sequence[Secret], observations: Sequence[Observation]
) -> Iterator[Column]:
    for name in dict.fromkeys(name for one in observations for name in one.values):
        own = [
            (s, o.values[name])
            for s, o in zip(secrets, observations, strict=True)
            if name in o.values
        ]
        ids, member, repeats = (
            [getattr(s, field) for s, _ in own] for field in ("id", "member", "repeats")
        )
        yield Column(table.OBSERVED, key, name, ids, [value for _, value in own], member, repeats)


def make_token_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Tokens as text, as they are; their ids where there is no tokenizer."""
    if tokenizer is None:
        return lambda tokens: "".join(f"{token} " for token in tokens)
    return partial(decode_keeping_special_tokens, tokenizer)
