"""Store the results of an attack or probe by secret, and pair the results of two runs by secret.

The means of these results are the measurements. The results are in `secrets.parquet`
(`records/table.py`), because they are too large for the result file that every report loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Floats, Ints, Strings
from auditor.core.nouns import CellKey, Secret
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.core.secret_table import STRINGS, build_secret_table
from auditor.records import result_file
from auditor.records.attacked_secrets import (
    NOT_KEPT,
    AnsweredSecrets,
    read_answered_secrets,
)
from auditor.records.journal import SecretNumbers
from auditor.records.manifest import NO_EDITS, FolderEdits, find_folder_edits
from auditor.records.table import (
    MEASURED,
    TABLE,
    Column,
    convert_table_errors,
    read_secrets_table,
)
from auditor.statistics import documents, metrics, roc
from auditor.statistics.anytime import bound_betting_excess, bound_betting_mean
from auditor.statistics.bounds import BoundedNumber, make_measurement, share_level
from auditor.statistics.compare import compare_paired_values, resample_paired_recall
from auditor.statistics.intervals import estimate_mean_share
from auditor.statistics.judging import PROBABILITY, SCORE, Outcome
from auditor.statistics.metrics import (
    EXCESS,
    RECALL,
    SHARES,
    Metric,
    find_metric,
    name_nonmember_metric,
)
from auditor.statistics.recomputed import list_strongest_score_columns, repeat_measurement

# share of parts -> share of records with such a part
OF_RECORDS = {RECALL: documents.RECALL, "near_verbatim_recall": documents.NEAR}
_FLAGS = ("hit", "any_hit")
_COUNTS = ("distance", "tolerance")
_OF_KIND = f"{RECALL}(kind="  # the recall of a kind of personal data
_ASKED = "asked"  # column of secrets without any other number


def select_main_number(main: Measurement, finding: Finding) -> Measurement:
    """Return the number of records if the finding's main number is of their parts, else `main`."""
    return finding.measurement(OF_RECORDS.get(main.name, "")) or main


def list_secret_attributes(
    secrets: Sequence[Secret],
) -> tuple[Strings, Bools, tuple[int | None, ...]]:
    """Return the id, the membership and the repeat count of each secret, in three sequences.

    The repeat count is the number of copies in the training data; None if unknown.
    """
    table = build_secret_table(secrets)
    return table.ids, table.find_column("member"), tuple(table.list_values("repeats"))


@dataclass(frozen=True)
class ValuesBySecret(Outcome):
    """Results of one cell (target, setting, attack or probe), with a value for each secret.

    The columns are those of the table. For an attack, these are only its guesses' scores and
    judgements, such as whether a guess is right: all other numbers follow from them.

    Args:
        anytime: True if the sample size depended on the results. Only betting bounds are then
            valid.
    """

    anytime: bool = False

    @classmethod
    def from_judged_guesses(
        cls,
        judged: Outcome,
        kinds: Mapping[str, Sequence[float] | NDArray[Any]] | None = None,
        score_is_probability: bool = False,
    ) -> ValuesBySecret:
        """Build the results from an attack's judged guesses.

        Args:
            judged: the judged guesses.
            kinds: for each kind of personal data, the share of each secret's data that its first
                guess has; NaN if the secret has no such data.
            score_is_probability: whether the attack's score is a probability.
        """
        columns = {}
        for name, values in judged.columns.items():
            columns[PROBABILITY if score_is_probability and name == SCORE else name] = values
        for kind, shares in (kinds or {}).items():
            columns[f"{_OF_KIND}{kind})"] = np.array(shares, dtype=float)
        return cls(judged.ids, judged.member, judged.repeats, columns)

    @cached_property
    def values(self) -> Mapping[str, NDArray[Any]]:
        """The numbers, keyed by metric; for an attack also the "score" of first guesses.

        They include every metric that is a mean over secrets. What is true or false of each secret
        may be bools.
        """
        if not self.is_judged:
            return {name: values for name, values in self.columns.items() if name != _ASKED}
        per_secret_metrics = sorted(
            (m for m in metrics.METRICS if m.per_secret and m.values),
            key=lambda m: m.place or math.inf,
        )
        values = {m.name: m.values(self).astype(float) for m in per_secret_metrics if m.values}
        return {**values, SCORE: self.score.astype(float)}

    @property
    def kinds(self) -> Mapping[str, Floats]:
        """The share of each secret's data of a kind of personal data that the first guess has.

        It is NaN if the secret has no such data.
        """
        kinds = {}
        for name, shares in self.columns.items():
            if self.is_judged and name.startswith(_OF_KIND):
                kinds[name[len(_OF_KIND) : -1]] = shares
        return kinds

    def list_columns(self, cell: CellKey) -> Iterator[Column]:
        """Yield the columns that store these results in the table."""
        columns = self.columns or {_ASKED: np.ones(len(self.ids))}
        for name, values in columns.items():
            yield Column(MEASURED, cell, name, self.ids, values, self.member, self.repeats)

    def remeasure_kinds(self, name: str, kinds: Iterable[str]) -> dict[str, Measurement]:
        """Return a metric for each of these kinds of personal data, keyed by kind.

        `name` is the metric. Kinds without values are omitted.
        """
        measured = {}
        for kind in kinds:
            if m := self.remeasure_metric(name, kind=kind):
                measured[kind] = m
        return measured

    def remeasure_metric(
        self, name: str, count: int | None = None, kind: str | None = None
    ) -> Measurement | None:
        """Recompute a metric with its interval; None if values are missing.

        Args:
            name: name of the metric. A metric of non-members, such as `recall_nonmembers`, uses the
                non-members.
            count: use only members with this repeat count; None for all.
            kind: use only this kind of personal data; None for all text.
        """
        metric = find_metric(name)
        if self.anytime:
            evidence = self.build_anytime_evidence(name, count, kind)
            if evidence is None:
                return None
            return make_measurement(name, evidence, metric.unit, metric.note)
        if kind is not None:
            shares = self._list_kind_shares(kind, metric)
            if len(shares):
                return estimate_mean_share(name, shares)
            return None
        # Only members have repeat counts: a count has neither non-members nor a difference from
        # them.
        if count is not None and (metric.signed or not metric.members):
            return None
        is_selected = self.member
        if count is not None:
            is_selected = is_selected & np.array([times == count for times in self.repeats])
        if self.is_judged and (metric.values or metric.errors):
            return metric.measure(
                self.select_secrets(is_selected), self.select_secrets(~self.member)
            )
        # Keep the order of the secrets: a bootstrap depends on it.
        return repeat_measurement(
            metric,
            *(
                {name: x[side].astype(float) for name, x in self.values.items()}
                for side in (is_selected, ~self.member)
            ),
        )

    def build_anytime_evidence(
        self, name: str, count: int | None = None, kind: str | None = None
    ) -> BoundedNumber | None:
        """Return the metric with bounds that stay valid if recomputed after every secret.

        Return None if the metric is not a mean of shares, or if no secrets exist.

        Args:
            name: name of the metric.
            count: use only members with this repeat count; None for all.
            kind: use only this kind of personal data; None for all text.
        """
        metric = find_metric(name)
        if metric.signed and name.startswith(EXCESS) and count is None:
            base = name.removeprefix(EXCESS)
            member_mean = self.build_anytime_evidence(base)
            nonmember_mean = self.build_anytime_evidence(name_nonmember_metric(base))
            if member_mean is not None and nonmember_mean is not None:
                return bound_betting_excess(member_mean, nonmember_mean)
        if metric.errors or metric.scores or metric.signed or metric.unit not in SHARES:
            return None
        if kind is not None:
            values = self._list_kind_shares(kind, metric)
        else:
            values = self.order_metric_values(metric.members, count).get(
                metric.per_secret_column_name, np.empty(0)
            )
        # Order does not matter: the bounds depend on how often each value occurs.
        if len(values) and np.isfinite(values).all():
            return bound_betting_mean(values)
        return None

    def _list_kind_shares(self, kind: str, metric: Metric) -> Floats:
        """Return the extracted share of each secret's personal data of this kind, (secrets,).

        Secrets without such data are omitted. If the metric counts records, return one share per
        record: the highest among the record's secrets.
        """
        shares = self.kinds.get(kind, np.full(len(self.ids), np.nan))
        is_selected = (self.member == metric.members) & ~np.isnan(shares)
        if metric.trait != documents.RECORD:
            return shares[is_selected]
        if not self.is_judged or metric.trait not in self.columns:
            return np.empty(0)
        return documents.take_highest_per_record(
            shares[is_selected], self.columns[metric.trait][is_selected]
        )

    def values_by_secret(
        self, name: str, members: bool, count: int | None = None
    ) -> dict[str, float]:
        """Return the values of this metric, keyed by secret id; {} if no values exist.

        Args:
            name: name of the metric.
            members: True for members, False for non-members.
            count: select only secrets with this repeat count; None for all.
        """
        # Not strict: a missing number gives no rows.
        rows = zip(
            self.ids,
            self.member,
            self.repeats,
            self.values.get(name, np.empty(0)).tolist(),
            strict=False,
        )
        return {
            id: x for id, member, times, x in rows if member == members and count in (None, times)
        }

    def keep_one_metric(self, name: str, keep_nonmembers: bool) -> ValuesBySecret:
        """Return the results with only this metric.

        `name` is the metric. Non-members are left out unless `keep_nonmembers` is True.
        """
        indices = np.flatnonzero(self.member | keep_nonmembers)
        ids = np.asarray(self.ids, STRINGS)[indices]
        repeats = tuple(self.repeats[i] for i in indices)
        return ValuesBySecret(
            ids, self.member[indices], repeats, {name: self.values[name][indices].astype(float)}
        )

    def order_metric_values(self, members: bool, count: int | None) -> dict[str, Floats]:
        """Return the values of each metric in order of secret id, keyed by metric name.

        Args:
            members: True for members, False for non-members.
            count: select only secrets with this repeat count; None for all.
        """
        is_selected = self.mark_secrets(members, count)
        # Ordered by id, so that equal indices of two runs mean the same secret.
        indices = self._order_by_id[is_selected[self._order_by_id]]
        return {name: values[indices].astype(float) for name, values in self.values.items()}

    def mark_secrets(self, members: bool, count: int | None) -> Bools:
        """Return a mask (secrets,) of the secrets that `order_metric_values` selects."""
        is_selected: Bools = self.member == members
        if count is not None:
            is_selected &= np.array([times == count for times in self.repeats], dtype=bool)
        return is_selected

    @property
    def has_repeated_secret(self) -> bool:
        ordered = np.asarray(self.ids, STRINGS)[self._order_by_id]
        return bool((ordered[1:] == ordered[:-1]).any())

    @cached_property
    def _order_by_id(self) -> Ints:
        return np.argsort(np.asarray(self.ids, STRINGS), kind="stable")


def _compare_paired_records(
    metric: str, count: int | None, new: ValuesBySecret, base: ValuesBySecret
) -> BoundedNumber | str:
    """Return the share of records with an extracted part in `new` minus that in `base`."""
    (of_parts,) = (name for name, of_records in OF_RECORDS.items() if of_records == metric)
    ids, values = align_secret_values((new, base), of_parts, True, count)
    if not len(ids) or documents.RECORD not in new.columns:
        return "no record to pair"
    code_by_secret = dict(zip(new.ids, new.columns[documents.RECORD], strict=True))
    codes = np.array([code_by_secret[secret] for secret in ids])
    new_records, base_records = (documents.take_highest_per_record(v, codes) for v in values)
    return compare_paired_values(new_records, base_records, find_metric(metric).unit)


def align_secret_values(
    results: Iterable[ValuesBySecret], name: str, members: bool, count: int | None = None
) -> tuple[Strings, Floats]:
    """Return a metric's values for the secrets that have this metric in all of several results.

    Args:
        results: the results of several cells or runs.
        name: name of the metric.
        members: True for members, False for non-members.
        count: select only secrets with this repeat count; None for all.

    Returns:
        The ids of the k secrets that all results have, in their order.
        The values, of shape (results, k).
    """
    first, *others = results
    numbers = SecretNumbers(first.ids)
    places = []  # by the secret's number; -1 without a value
    for result in (first, *others):
        indices = np.flatnonzero(result.mark_secrets(members, count) & (name in result.values))
        secrets = numbers.add_all(result.ids)[indices]
        places.append(np.full(len(numbers), -1))
        places[-1][secrets] = indices
    # The first result has no secret with a later number.
    of_all = np.array([place[: len(places[0])] for place in places])
    of_all = of_all[:, (of_all >= 0).all(0)]
    ids = np.asarray(first.ids, STRINGS)[of_all[0]]
    order = np.argsort(ids, kind="stable")
    values = []
    for result, indices in zip((first, *others), of_all[:, order], strict=True):
        values.append(result.values.get(name, np.empty(0))[indices])
    return ids[order], np.array(values, dtype=float)


@dataclass(frozen=True)
class RunOutcomes:
    """Finished run with its results by secret, ready to be compared with another run.

    Args:
        name: name of the run.
        result: the run's `result.json`.
        outcomes: results by target, setting, and attack or probe; empty if the folder has no table.
        listed: ids of the attacked secrets, read from other files of the folder.
        edits: changes to the folder since the run ended; None if the folder has no manifest.
    """

    name: str
    result: AuditResult
    outcomes: Mapping[CellKey, ValuesBySecret]
    listed: AnsweredSecrets = field(default=NOT_KEPT, repr=False)
    edits: FolderEdits | None = NO_EDITS


def read_run_outcomes(folder: Path) -> RunOutcomes:
    """Read a finished run from its folder. Raise AuditError if the folder holds no finished run."""
    result = result_file.read_result(folder)
    rows = read_secret_values(folder)
    for finding in result.findings:
        cell = finding.cell_key
        if finding.stopped and cell in rows:
            # The results decided when the run stopped: only anytime-valid bounds are valid.
            rows[cell] = replace(rows[cell], anytime=True)
    answered_ids = read_answered_secrets(folder)
    edits = find_folder_edits(folder)
    return RunOutcomes(str(folder), result, rows, answered_ids, edits)


def read_secret_values(folder: Path) -> dict[CellKey, ValuesBySecret]:
    """Read the results by secret of a run folder; {} if the folder has no table.

    A key names target, setting, and attack or probe. Raise AuditError like
    `table.read_secrets_table`.
    """
    cells: dict[CellKey, list[Column]] = {}
    for column in read_secrets_table(folder, MEASURED):
        cells.setdefault(column.cell, []).append(column)
    with convert_table_errors(folder / TABLE):
        return {cell: _build_secret_values(columns) for cell, columns in cells.items()}


def _have_equal_secrets(column: Column, other: Column) -> bool:
    return (
        np.array_equal(column.ids, other.ids)
        and list(column.member) == list(other.member)
        and tuple(column.repeats) == tuple(other.repeats)
    )


def _build_secret_values(columns: Sequence[Column]) -> ValuesBySecret:
    """Build the results of one cell from the columns of `ValuesBySecret.list_columns`.

    Columns that no run writes raise ValueError, KeyError or another error of that kind.
    """
    first = columns[0]
    values_by_name = {}
    for column in columns:
        values_by_name[column.quantity] = np.asarray(column.values)
    for column in columns:
        # Adjacent columns of equal secrets share these objects.
        if column.ids is not first.ids and not _have_equal_secrets(column, first):
            raise ValueError("quantities about other secrets than the first one")
    if None in first.member:
        raise ValueError("secrets that are neither members nor non-members")
    member = np.asarray(first.member, dtype=bool)
    if "hit" in values_by_name:
        flags, counts = ([values_by_name[name] for name in names] for names in (_FLAGS, _COUNTS))
        # NaN and infinities fail either test.
        if not np.isin(flags, (0, 1)).all() or not np.equal(np.mod(counts, 1), 0).all():
            raise ValueError("hits that are neither 0 nor 1, or edits that are no whole number")
        if values_by_name.keys().isdisjoint((SCORE, PROBABILITY)):
            raise ValueError("guesses without a score")
        for name in _FLAGS:
            values_by_name[name] = values_by_name[name].astype(bool)
        for name in _COUNTS:
            values_by_name[name] = values_by_name[name].astype(np.int64)
    return ValuesBySecret(first.ids, member, tuple(first.repeats), values_by_name)


def bound_roc_metric(metric: str, row: ValuesBySecret | None) -> BoundedNumber | None:
    """Return a TPR or a partial AUC as a number that has bounds at every significance level.

    Return None for other metrics, or if there are too few scores.

    Args:
        metric: name of the metric.
        row: results by secret; None if there are none.
    """
    recorded_metric = find_metric(metric)
    max_fpr = recorded_metric.rate or recorded_metric.below
    if not max_fpr or row is None or recorded_metric.scores not in row.values:
        return None
    member_scores, nonmember_scores = (
        row.order_metric_values(members, None)[recorded_metric.scores] for members in (True, False)
    )
    if (
        len(nonmember_scores) < roc.count_threshold_nonmembers(max_fpr)
        or np.isnan(row.values[recorded_metric.scores]).any()
        or not len(member_scores)
    ):
        return None
    if recorded_metric.rate:
        bounds = roc.bound_tpr(member_scores, nonmember_scores, max_fpr)
    else:
        bounds = roc.bound_partial_auc(member_scores, nonmember_scores, max_fpr)
    if recorded_metric.scores != metrics.name_score_column(""):
        return bounds
    return share_level(bounds, len(list_strongest_score_columns(row.values)))


def has_stored_auc(row: ValuesBySecret, count: int | None, value: float) -> bool:
    """Return whether one of the stored membership scores has this AUC.

    Args:
        row: results by secret.
        count: use only members with this repeat count; None for all.
        value: the AUC.
    """
    members = row.order_metric_values(True, count)
    others = row.order_metric_values(False, None)
    for column in list_strongest_score_columns(row.values):
        if column not in members:
            continue
        auc = roc.auc(members[column], others[column])
        if math.isclose(auc, value, rel_tol=1e-9):
            return True
    return False


def measure_paired_change(
    metric: str, unit: str, new: ValuesBySecret | None, base: ValuesBySecret | None
) -> Measurement | str:
    """Return the metric of `new` minus the metric of `base`, paired by secret, with its interval.

    `unit` is the metric's unit. If the difference cannot be computed, return the reason as text.
    """
    if new is None or base is None:
        return "nothing to pair"
    difference = compare_paired_metric(metric, None, new, base)
    if isinstance(difference, str):
        return difference
    return make_measurement(f"{metric}_difference", difference, unit)


def compare_paired_metric(
    metric: str, count: int | None, new: ValuesBySecret, base: ValuesBySecret
) -> BoundedNumber | str:
    """Return the metric of `new` minus the metric of `base`, paired by secret.

    If the difference cannot be computed, return the reason as text.

    Args:
        metric: name of the metric. If it ends in `_nonmembers`, the non-members are used.
        count: use only members with this repeat count; None for all.
        new: results by secret.
        base: results of the same secrets to compare with.
    """
    about = find_metric(metric)
    column = about.columns_to_recompute[0]
    pair = (new, base)
    is_anytime = new.anytime or base.anytime
    if about.name in OF_RECORDS.values() and not is_anytime:
        return _compare_paired_records(metric, count, new, base)
    if is_anytime and (about.errors or about.scores or about.signed or about.unit not in SHARES):
        return (
            f"{metric} has no bounds that are valid at every look, and --until stopped one of the "
            "two"
        )
    ids, values = align_secret_values(pair, column, about.members, count)
    if is_anytime:
        # The secrets that both runs queried.
        if not len(ids) or not np.isfinite(values).all():
            return f"{metric} is stored for no secret, or is not a number for some secret"
        # One share minus another lies in [-1, 1].
        return bound_betting_mean(values[0] - values[1], minimum=-1.0)
    if metric == SCORE or not {column} <= new.values.keys() & base.values.keys():
        if about.scores:
            return f"the scores of {metric} were not stored"
        return (
            f"{metric} is not stored for each secret (stored: "
            f"{', '.join(name for name in new.values if name != SCORE)})"
        )
    if not len(ids):
        if count is not None:
            return f"no secret occurred in the data {count} times"
        return "no secret to pair"
    if about.errors is not None:
        scores = align_secret_values(pair, SCORE, about.members, count)[1]
        errors = about.compute_wrong_guess_limit(len(ids))
        new_guesses, base_guesses = zip(values == 1, scores, strict=True)
        return resample_paired_recall(new_guesses, base_guesses, errors)
    if about.below:
        return (
            f"a difference of {metric} has no bounds: compare a share at one rate with the baseline"
        )
    is_unknown = np.isnan if about.scores else lambda numbers: ~np.isfinite(numbers)
    if is_unknown(values).any():
        return f"{metric} is not a number for some secret"
    if about.unit != roc.AUC and not about.scores:
        return compare_paired_values(values[0], values[1], about.unit)
    other_values = align_secret_values(pair, column, False)[1]
    if is_unknown(other_values).any():
        return f"{metric} is not a number for some secret"
    new_sides, base_sides = zip(values, other_values, strict=True)
    if about.rate:
        return roc.bound_tpr_difference(new_sides, base_sides, about.rate)
    if about.scores:
        new_sides, base_sides = starmap(roc.compute_delong_placements, (new_sides, base_sides))
    return roc.bound_auc_distance_change(new_sides, base_sides)
