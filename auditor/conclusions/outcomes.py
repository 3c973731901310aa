"""What each row found out about each secret, as runs are paired by it: the numbers whose means are
the measurements.

They lie in `secrets.parquet` beside the result (`records/table.py`): too much for a record that
every report loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Measurement
from auditor.records.attacked_secrets import NOT_KEPT, AnsweredSecretIds
from auditor.records.manifest import NO_EDITS, FolderEdits
from auditor.records.table import (
    MEASURED,
    TABLE,
    Column,
    blame_errors_on_secrets_table_context,
    read_secrets_table,
)
from auditor.statistics import metrics, roc
from auditor.statistics.anytime import BettingExcess, BettingMean
from auditor.statistics.bounds import BoundedNumber, SharedLevel, make_measurement
from auditor.statistics.compare import compare_columns
from auditor.statistics.intervals import estimate_mean_share
from auditor.statistics.judging import Outcome
from auditor.statistics.metrics import (
    EXCESS,
    RECALL,
    SCORE,
    SHARES,
    Metric,
    find_metric,
    name_nonmember_metric,
)
from auditor.statistics.recomputed import list_strongest_score_columns, repeat_measurement

_FLAGS, _COUNTS = ("hit", "any_hit"), ("distance", "tolerance")
_PROBABILITY = "probability"  # what a score is called that is one
_OF_KIND = f"{RECALL}(kind="  # of personal data
_ASKED = "asked"  # of whom nothing else is kept


@dataclass(frozen=True)
class RowValuesBySecret:
    """What one row found out, (secrets,) each. values: by measurement; of an attack also the
    "score" of first guesses.

    outcome: of an attack, all that it was judged by. kinds: by kind of personal data, the share of
    a secret's own that its first guess holds; NaN where the secret has none. score_is_probability:
    whether an attack's score is one.
    """

    ids: tuple[str, ...]
    member: NDArray[np.bool_]
    repeats: tuple[int | None, ...]
    values: Mapping[str, NDArray[np.float64]]
    outcome: Outcome | None = field(default=None, repr=False)
    kinds: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    score_is_probability: bool = False
    # how many were asked was decided by what was found: only bounds by betting hold
    anytime: bool = False

    @classmethod
    def from_judged_guesses(
        cls,
        judged: Outcome,
        kinds: Mapping[str, Sequence[float] | NDArray[Any]] | None = None,
        score_is_probability: bool = False,
    ) -> RowValuesBySecret:
        """Of an attack's judged guesses, the numbers that the metrics are means of."""
        kept = sorted(
            (m for m in metrics.METRICS if m.per_secret and m.values),
            key=lambda m: m.place or math.inf,
        )
        values = {m.name: m.values(judged).astype(float) for m in kept if m.values}
        parts = {kind: np.array(held, dtype=float) for kind, held in (kinds or {}).items()}
        values[SCORE] = judged.score.astype(float)
        return cls(
            judged.ids, judged.member, judged.repeats, values, judged, parts, score_is_probability
        )

    def columns_for_secrets_table(self, cell: CellKey) -> Iterator[Column]:
        """What the table keeps: of an attack what its guesses were judged by, from which all else
        is worked out."""
        for name, values in self._values_kept_in_secrets_table().items():
            yield Column(MEASURED, cell, name, self.ids, values, self.member, self.repeats)

    def _values_kept_in_secrets_table(self) -> Mapping[str, NDArray[np.float64]]:
        if self.outcome is None:
            return self.values or {_ASKED: np.ones(len(self.ids))}
        kept = {name: getattr(self.outcome, name).astype(float) for name in (*_FLAGS, *_COUNTS)}
        score = {_PROBABILITY if self.score_is_probability else SCORE: self.outcome.score}
        return {
            **kept,
            **score,
            **self.outcome.traits,
            **{f"{_OF_KIND}{k})": held for k, held in self.kinds.items()},
        }

    def remeasure_metric(
        self, name: str, count: int | None = None, kind: str | None = None
    ) -> Measurement | None:
        """A number of the row with its interval, worked out anew from those of the secrets; None:
        too little is kept.

        count: of the members that stood in the data so often; kind: of personal data. A name for
        non-members: of those.
        """
        about = find_metric(name)
        if self.anytime:
            seen = self.anytime_valid_evidence(name, count, kind)
            return None if seen is None else make_measurement(name, seen, about.unit, about.note)
        if kind is not None:
            held = self._personal_data_shares_of_kind(kind, about.members)
            return estimate_mean_share(name, held) if len(held) else None
        # Only members have repeat counts: of one there are neither non-members nor a difference
        # from them.
        if count is not None and (about.signed or not about.members):
            return None
        wanted = self.member & np.array([count in (None, own) for own in self.repeats], dtype=bool)
        if self.outcome is not None and (about.values or about.errors):
            return about.measure(
                self.outcome.select_secrets(wanted), self.outcome.select_secrets(~self.member)
            )
        # in the order of the row: a bootstrap draws other places in another one
        return repeat_measurement(
            about,
            *(
                {name: x[side] for name, x in self.values.items()}
                for side in (wanted, ~self.member)
            ),
        )

    def anytime_valid_evidence(
        self, name: str, count: int | None = None, kind: str | None = None
    ) -> BettingMean | BettingExcess | None:
        """The number with bounds that hold at every look; None for what is no mean of shares, and
        of no secret."""
        about = find_metric(name)
        if about.signed and name.startswith(EXCESS) and count is None:
            base = name.removeprefix(EXCESS)
            own, floor = (
                self.anytime_valid_evidence(base),
                self.anytime_valid_evidence(name_nonmember_metric(base)),
            )
            if isinstance(own, BettingMean) and isinstance(floor, BettingMean):
                return BettingExcess(own, floor)
        if about.errors or about.scores or about.signed or about.unit not in SHARES:
            return None
        if kind is not None:
            values = self._personal_data_shares_of_kind(kind, about.members)
        else:
            values = self.metric_values_in_id_order(about.members, count).get(
                about.per_secret_column_name, np.empty(0)
            )
        # In any order: its bounds depend on how often each value is there.
        return BettingMean(values) if len(values) and np.isfinite(values).all() else None

    def _personal_data_shares_of_kind(self, kind: str, members: bool) -> NDArray[np.float64]:
        """What first guesses hold of a kind of personal data, of the secrets that hold some."""
        held = self.kinds[kind][self.member == members] if kind in self.kinds else np.empty(0)
        return held[~np.isnan(held)]

    def values_by_secret(
        self, name: str, members: bool, count: int | None = None
    ) -> dict[str, float]:
        """The values of the members (or the others), of one repeat count if given, by id; empty
        where none are kept."""
        # Not strict: a number that is not kept gives no rows.
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

    def keep_one_metric(self, name: str, others: bool) -> RowValuesBySecret:
        """This one number of the members; others: of the non-members as well."""
        kept = np.flatnonzero(self.member | others)
        ids, repeats = tuple(self.ids[i] for i in kept), tuple(self.repeats[i] for i in kept)
        return RowValuesBySecret(ids, self.member[kept], repeats, {name: self.values[name][kept]})

    def metric_values_in_id_order(
        self, members: bool, count: int | None
    ) -> dict[str, NDArray[np.float64]]:
        """The values of the members (or the others), of one repeat count if given, in the order of
        their ids."""
        wanted = [
            i
            # By id, so that two runs on the same secrets pair place by place.
            for i in sorted(range(len(self.ids)), key=lambda i: self.ids[i])
            if self.member[i] == members and count in (None, self.repeats[i])
        ]
        return {name: values[wanted] for name, values in self.values.items()}


def align_rows_by_secret(
    rows: Iterable[RowValuesBySecret], name: str, members: bool
) -> tuple[list[str], NDArray[np.float64]]:
    """The k members (or the others) of whom all rows hold the number, and (rows, k) these."""
    columns = [row.values_by_secret(name, members) for row in rows]
    ids = sorted(set.intersection(*map(set, columns)))
    return ids, np.array([[column[id] for id in ids] for column in columns], dtype=float)


@dataclass(frozen=True)
class RunOutcomes:
    """A finished run, as it can be held against another."""

    name: str
    result: AuditResult
    outcomes: Mapping[CellKey, RowValuesBySecret]  # empty: no table in the folder
    # who was attacked, by the rest of its folder
    listed: AnsweredSecretIds = field(default=NOT_KEPT, repr=False)
    edits: FolderEdits | None = NO_EDITS  # of its folder since it ended; None: it has no manifest


def read_row_values_by_secret(folder: Path) -> dict[CellKey, RowValuesBySecret]:
    """What a run folder holds; nothing where it holds no table. Raises AuditError as
    `table.read_secrets_table`."""
    cells: dict[CellKey, list[Column]] = {}
    for column in read_secrets_table(folder, MEASURED):
        cells.setdefault(column.cell, []).append(column)
    with blame_errors_on_secrets_table_context(folder / TABLE):
        return {cell: _row_values_from_table_columns(columns) for cell, columns in cells.items()}


def _row_values_from_table_columns(columns: Sequence[Column]) -> RowValuesBySecret:
    """The inverse of `RowValuesBySecret.columns_for_secrets_table`. Raises ValueError and the like
    for what is none."""
    first, kept = columns[0], {column.quantity: np.asarray(column.values) for column in columns}
    # Mostly the very same objects (`table._columns_from_secrets_table`), which compare at once.
    if any(
        (one.ids, one.member, one.repeats) != (first.ids, first.member, first.repeats)
        for one in columns
    ):
        raise ValueError("quantities of other secrets than the first is of")
    if None in first.member:
        raise ValueError("secrets that are neither members nor non-members")
    ids, member, repeats = (
        tuple(first.ids),
        np.array(first.member, dtype=bool),
        tuple(first.repeats),
    )
    if "hit" not in kept:
        return RowValuesBySecret(
            ids, member, repeats, {name: values for name, values in kept.items() if name != _ASKED}
        )
    flags, counts = ({name: kept.pop(name) for name in names} for names in (_FLAGS, _COUNTS))
    # NaN and infinities fail either test.
    if (
        not np.isin([*flags.values()], (0, 1)).all()
        or not np.equal(np.mod([*counts.values()], 1), 0).all()
    ):
        raise ValueError("hits that are neither 0 nor 1, or edits that are no whole number")
    probable = _PROBABILITY in kept
    score = kept.pop(_PROBABILITY if probable else SCORE)
    kinds = {
        name[len(_OF_KIND) : -1]: kept.pop(name) for name in [*kept] if name.startswith(_OF_KIND)
    }
    hit, any_hit = (values.astype(bool) for values in flags.values())
    distance, tolerance = (values.astype(np.int64) for values in counts.values())
    judged = Outcome(ids, hit, any_hit, score, repeats, member, distance, tolerance, kept)
    return RowValuesBySecret.from_judged_guesses(judged, kinds, probable)


def tpr_bounds_of_row(metric: str, row: RowValuesBySecret | None) -> BoundedNumber | None:
    """Members found at rates of false positives, with bounds at any level; None for other metrics,
    or no scores."""
    about = find_metric(metric)
    most = about.rate or about.below
    if not most or row is None or about.scores not in row.values:
        return None
    own, others = (
        row.metric_values_in_id_order(members, None)[about.scores] for members in (True, False)
    )
    if (
        len(others) < roc.count_nonmembers_for_threshold(most)
        or np.isnan(row.values[about.scores]).any()
        or not len(own)
    ):
        return None
    bounds = (
        roc.BoundedTprAtFpr(own, others, most) if about.rate else roc.PartialAuc(own, others, most)
    )
    if about.scores != metrics.name_score_column(""):
        return bounds
    return SharedLevel(bounds, len(list_strongest_score_columns(row.values)))


def paired_row_difference_or_reason(
    metric: str, count: int | None, new: RowValuesBySecret, base: RowValuesBySecret
) -> BoundedNumber | str:
    """The metric of `new` minus that of `base`, paired by secret; or why there is none. The secrets
    are the same.

    count: among the members of this repeat count. `_nonmembers` metrics are taken over the
    non-members.
    """
    about = find_metric(metric)
    if new.anytime or base.anytime:
        return _anytime_valid_row_difference_or_reason(about, count, new, base)
    first, second = (rows.metric_values_in_id_order(about.members, count) for rows in (new, base))
    if metric == SCORE or any(
        column not in side for column in about.columns_to_recompute for side in (first, second)
    ):
        if about.scores:
            return f"the scores of {metric} were not kept"
        return (
            f"{metric} is not kept secret by secret (kept: "
            f"{', '.join(name for name in first if name != SCORE)})"
        )
    n = len(next(iter(first.values())))
    if not n:
        return (
            f"no secret stood in the data {count} times"
            if count is not None
            else "no secret to pair"
        )
    one, other = (
        tuple(side[column] for column in about.columns_to_recompute) for side in (first, second)
    )
    if about.errors is not None:
        return compare_columns(one, other, errors=about.compute_wrong_guess_limit(n))
    if about.below:
        return f"{metric} has no difference with bounds: hold a share at one rate to the baseline"
    if about.scores:
        # Of each run (scores of the members, scores of the non-members).
        one, other = (
            (*own, rows.metric_values_in_id_order(False, None)[about.scores])
            for own, rows in ((one, new), (other, base))
        )
        if np.isnan(np.concatenate([*one, *other])).any():
            return f"{metric} is by a score that is not a number for some secret"
        if not about.rate:
            one, other = roc.orient_scores(*one), roc.orient_scores(*other)
        return compare_columns(one, other, rate=about.rate)
    if not np.isfinite([*one, *other]).all():
        return f"{metric} is not a number for some secret"
    return compare_columns(one, other)


def _anytime_valid_row_difference_or_reason(
    about: Metric, count: int | None, new: RowValuesBySecret, base: RowValuesBySecret
) -> BoundedNumber | str:
    """Of the secrets that both were asked for: those of the one that stopped first."""
    if about.errors or about.scores or about.signed or about.unit not in SHARES:
        return (
            f"{about.name} has no bounds that hold at every look, and --until stopped one of the "
            "two"
        )
    one, other = (
        rows.values_by_secret(about.per_secret_column_name, about.members, count)
        for rows in (new, base)
    )
    deltas = np.array([one[id] - other[id] for id in sorted(one.keys() & other.keys())])
    if not len(deltas) or not np.isfinite(deltas).all():
        return f"{about.name} is kept of no secret, or is not a number for some"
    return BettingMean(deltas, least=-1.0)  # one share minus another lies in [-1, 1]
