"""Represent the usable rows of a file as records, and list the unusable rows by reason.

Records are kept as columns, which take a third of the memory of an object for each record.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.columns import UnreadRows
from auditor.benchmarks.data.cut_places import CutPlace
from auditor.core.arrays import Bools, Ints, Strings
from auditor.core.nouns import Secret, Tokens, Wording
from auditor.core.result import RecordCounts
from auditor.core.secret_table import STRINGS, ColumnTable, SecretTable, build_secret_table

BY_LIMIT = "beyond --limit"
AUXILIARY = "known to the attacker as auxiliary data"
# fields of a record that its secret lacks
_NUMBERS = ("row", "part", "n_shared", "n_context", "answer_tokens", "system_length")
WHOLE = -1  # represents None in the column of parts
AT_ONCE = 4096  # records that are objects at once


@dataclass(frozen=True, slots=True)
class DataRecord:
    """Hold a row, or a part of a row, cut into the tokens of a prefix and a suffix.

    row, part: numbers from 0; part is None for a complete row.
    tokens: token ids of the complete row; all parts of a row share them.
    cut: position of prefix and suffix in `tokens`.
    repeats: number of copies in training (None: unknown).
    group, wording, user: see `Secret`.
    suffix_start: index in the row of the suffix's first token.
    n_shared: number of the row's leading tokens that many rows share, such as a notice.
    n_context: number of leading prefix tokens that comparisons of records ignore, because rows
        may share a passage after different beginnings.
    row_text: compared text, unless prefix and suffix are compared: without the context, or after
        the row's own prefix if the attacker gets another one, such as only the system turn.
    answer_tokens: length of the answer, if this is its first window; otherwise 0.
    system_length: number of characters before the first turn that is not the system's.
    """

    row: int
    tokens: Sequence[int] = field(repr=False)
    cut: CutPlace
    repeats: int | None = None
    group: str | None = None
    wording: Wording | None = None
    part: int | None = None
    suffix_start: int = 0
    user: str | None = None
    n_shared: int = 0
    n_context: int = 0
    row_text: str = ""
    answer_tokens: int = 0
    system_length: int = 0

    @property
    def prefix(self) -> Tokens:
        return tuple(self.tokens[self.cut.start : self.cut.middle])

    @property
    def suffix(self) -> Tokens:
        return tuple(self.tokens[self.cut.middle : self.cut.end])

    @property
    def n_prefix(self) -> int:
        return self.cut.middle - self.cut.start

    @property
    def n_suffix(self) -> int:
        return self.cut.end - self.cut.middle

    @property
    def compared_text(self) -> str:
        """Text that comparisons of records use; "" if only tokens exist."""
        if self.wording is None:
            return ""
        return self.row_text or self.wording.prefix_and_suffix_text

    @property
    def text_without_system(self) -> str:
        """Compared text without the system turn."""
        return self.compared_text[self.system_length :]

    @property
    def digest(self) -> bytes:
        """A digest of prefix and suffix. Records with equal digests are equal."""
        return digest_pair(self.prefix, self.suffix)

    @property
    def compared_tokens(self) -> Tokens:
        """Tokens that comparisons of records use: prefix and suffix without context."""
        return tuple(self.tokens[self.cut.start + self.n_context : self.cut.end])

    @property
    def own_tokens(self) -> Tokens:
        """The compared tokens, without leading tokens that many rows share."""
        if not self.n_shared:  # token arrays do not say where their row begins
            return self.compared_tokens
        begin = self.suffix_start - self.n_prefix + self.n_context  # in the row
        return self.compared_tokens[max(0, self.n_shared - begin) :]


@dataclass(frozen=True, eq=False)
class DataRecordTable(ColumnTable[DataRecord]):
    """Records as columns.

    Args:
        secrets: the records' prefixes, suffixes and wordings; `at` is the field `suffix_start`.
        numbers: fields of all records, (records,) each, keyed by name; -1 for the part of a whole
            row.
        row_texts: (records,) fields `row_text`.
    """

    secrets: SecretTable
    numbers: Mapping[str, NDArray[np.int32]]
    row_texts: Strings

    def __len__(self) -> int:
        return len(self.secrets)

    def select_rows(self, place: slice | Ints | Bools) -> DataRecordTable:
        numbers = {name: column[place] for name, column in self.numbers.items()}
        return DataRecordTable(self.secrets[place], numbers, self.row_texts[place])

    def __iter__(self) -> Iterator[DataRecord]:
        return self.make_records(np.arange(len(self)))

    def make_records(self, places: Ints) -> Iterator[DataRecord]:
        """Yield the records at these indices, (records,)."""
        for begin in range(0, len(places), AT_ONCE):
            part = self[places[begin : begin + AT_ONCE]]
            numbers = zip(*(column.tolist() for column in part.numbers.values()), strict=True)
            yield from map(_make_record, part.secrets, part.row_texts.tolist(), numbers)

    @property
    def rows(self) -> NDArray[np.int32]:
        """Row number of each record, (records,)."""
        return self.numbers["row"]

    @property
    def distinct_rows(self) -> list[int]:
        """Row numbers, each once, in the order of the records."""
        return list(dict.fromkeys(self.rows.tolist()))

    @cached_property
    def digests(self) -> NDArray[np.void]:
        """The digest of each record, (records,)."""
        pairs = map(digest_pair, self.secrets.prefixes, self.secrets.suffixes)
        return np.frombuffer(b"".join(pairs), "V16")

    @property
    def has_own_tokens(self) -> Bools:
        """True for each record that has `own_tokens`, (records,)."""
        n_prefix, n_suffix = self.secrets.lengths.T
        n_context = self.numbers["n_context"]
        begins = self.secrets.find_column("at") - n_prefix + n_context  # in the row
        n_shared = np.where(self.numbers["n_shared"], self.numbers["n_shared"] - begins, 0)
        return n_prefix + n_suffix - n_context > np.maximum(0, n_shared)

    def replace_columns(self, **columns: NDArray[Any]) -> DataRecordTable:
        """Return the records with other repeats, groups or users, (records,) each."""
        return replace(self, secrets=self.secrets.replace_columns(**columns))


def _make_record(secret: Secret, row_text: str, numbers: tuple[int, ...]) -> DataRecord:
    row, part, n_shared, n_context, answer_tokens, system_length = numbers
    n_prefix, n_suffix = secret.lengths
    return DataRecord(
        row,
        secret.tokens,
        CutPlace(0, n_prefix, n_prefix + n_suffix),
        secret.repeats,
        secret.group,
        secret.wording,
        None if part == WHOLE else part,
        secret.at,
        secret.user,
        n_shared,
        n_context,
        row_text,
        answer_tokens,
        system_length,
    )


def build_data_record_table(records: Iterable[DataRecord]) -> DataRecordTable:
    """Return the records as a table. A table is returned unchanged."""
    if isinstance(records, DataRecordTable):
        return records
    numbers: dict[str, Any] = {name: array("i") for name in _NUMBERS}
    row_texts: list[str] = []

    def list_secrets() -> Iterator[Secret]:
        for record in records:
            for name, column in numbers.items():
                number = getattr(record, name)
                column.append(WHOLE if number is None else number)
            row_texts.append(record.row_text)
            yield Secret(
                "",
                record.prefix,
                record.suffix,
                record.repeats,
                group=record.group,
                wording=record.wording,
                at=record.suffix_start,
                user=record.user,
            )

    secrets = build_secret_table(list_secrets())
    for name in _NUMBERS:
        numbers[name] = np.array(numbers[name], np.int32)
    return DataRecordTable(secrets, numbers, np.array(row_texts, STRINGS))


@dataclass(frozen=True)
class RecordSource:
    """Hold the records of a file or folder, and the rows that gave no record.

    label: the user's flag and file, such as "--data 'private.csv'".
    unusable: (row number, reason) of each unusable row or part of a row.
    part_noun: what notes call a part of a row.
    form: the rendering of conversations; None if there are no conversations.
    row_tokens: number of tokens in each row; empty if not counted.
    texts: every row's text, if needed again; a large table of conversations lists its sample's.
    not_attacked: usable rows without a record, keyed by reason.
    unread: statistics of the rows of a large table that were only counted.
    counts_occurrences: whether repeats are the records' occurrences in all texts.
    unread_parts: see `RecordTable`.
    """

    label: str
    records: Sequence[DataRecord]
    unusable: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    part_noun: str = "part"
    form: ChatRendering | None = None
    row_tokens: Mapping[int, int] = field(default_factory=dict)
    texts: Iterable[str] = field(default=(), repr=False)
    not_attacked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unread: UnreadRows | None = None
    counts_occurrences: bool = False
    unread_parts: tuple[str, ...] = ()

    @cached_property
    def table(self) -> DataRecordTable:
        return build_data_record_table(self.records)

    @property
    def usable_rows(self) -> Ints:
        """The distinct rows with a record, and the usable rows that are not attacked."""
        return np.unique(np.concatenate([self.table.rows, *self.not_attacked.values()]))

    @property
    def left_out(self) -> dict[str, list[int]]:
        """The distinct rows without any usable part, keyed by the reasons of their parts."""
        reasons: dict[int, dict[str, None]] = {}  # by row: an ordered set
        for (row, reason), is_usable in zip(self.unusable, self._are_usable, strict=True):
            if not is_usable:
                reasons.setdefault(row, {})[reason] = None
        rows = []
        for row in sorted(reasons):
            rows.append((row, ", or ".join(reasons[row])))
        return _group_rows_by_reason(rows)

    @property
    def parts_left_out(self) -> dict[str, list[int]]:
        """The rows with both usable and unusable parts, keyed by the reason why a part is unusable.

        A row is listed once for each unusable part.
        """
        return _group_rows_by_reason(compress(self.unusable, self._are_usable))

    @property
    def _are_usable(self) -> list[bool]:
        """True for each unusable part whose row is usable."""
        rows = [row for row, _ in self.unusable]
        is_usable: list[bool] = np.isin(rows, self.usable_rows).tolist()
        return is_usable

    def count_records(
        self,
        left_out: Mapping[str, int],
        n_known: int,
        n_candidates: int,
        attacked: DataRecordTable,
    ) -> RecordCounts:
        """Return the counts of this source's rows.

        left_out: numbers of rows that the split omits, keyed by reason. The rows that the source
            itself could not use are added.
        n_known: number of usable rows that the attacker knows.
        n_candidates: number of other usable rows, before the limit.
        attacked: the attacked records.
        """
        left_out_rows = self.left_out
        all_left_out = _count_rows(left_out_rows) | +Counter(left_out)
        audited_rows = np.unique(attacked.rows)
        n_beyond_limit = n_candidates - len(audited_rows)
        n_rows = len(self.usable_rows) + sum(map(len, left_out_rows.values()))
        if self.unread is not None:
            all_left_out |= self.unread.left_out
            n_beyond_limit += self.unread.n_distinct
            n_rows = self.unread.n_rows
        rules = {AUXILIARY: n_known, BY_LIMIT: n_beyond_limit}
        by_rule = _count_rows(self.not_attacked) | +Counter(rules)
        copies = n_rows - sum(all_left_out.values()) - sum(by_rule.values()) - len(audited_rows)
        parts = _count_rows(self.parts_left_out)
        tokens = sum(self.row_tokens.get(row, 0) for row in audited_rows.tolist())
        attacked_tokens = 0
        if tokens:
            attacked_tokens = _count_attacked_tokens(attacked)
        context_tokens = 0
        n_prefix = attacked.secrets.lengths[:, 0]
        if (attacked.secrets.find_column("at") > n_prefix).any():
            context_tokens = int(n_prefix.max())
        return RecordCounts(
            *(n_rows, len(audited_rows), copies, all_left_out, by_rule, parts),
            *(tokens, attacked_tokens, context_tokens),
            unread_parts=self.unread_parts,
        )


def digest_pair(prefix: Tokens, suffix: Tokens) -> bytes:
    """Return a digest of the tokens and of the cut between them."""
    numbers = array("q", (len(prefix), *prefix, *suffix))
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


def format_too_long(room: int) -> str:
    """Return the reason for omitting a record of more than `room` tokens."""
    return f"longer than the {max(0, room):,} tokens that the model reads at once"


def _group_rows_by_reason(reasons_of_rows: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Group row numbers by reason, both in the order of `reasons_of_rows`: (row number, reason)."""
    rows: dict[str, list[int]] = {}
    for row, reason in reasons_of_rows:
        rows.setdefault(reason, []).append(row)
    return rows


def _count_rows(rows_by_reason: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {reason: len(rows) for reason, rows in rows_by_reason.items()}


def _count_attacked_tokens(records: DataRecordTable) -> int:
    """Count the tokens in suffixes; a token in overlapping windows counts once."""
    starts = records.secrets.find_column("at")
    order = np.lexsort((starts, records.rows))
    starts = starts[order]
    ends = starts + records.secrets.lengths[order, 1]
    is_same_row = np.diff(records.rows[order], prepend=-1) == 0
    # Each row's ends are above those of the row before, so that one maximum runs over all rows.
    offsets = np.cumsum(~is_same_row) * (ends.max(initial=0) + 1)
    row_ends = np.maximum.accumulate(ends + offsets) - offsets
    previous_ends = np.where(is_same_row, np.roll(row_ends, 1), 0)
    return int(np.maximum(ends - np.maximum(starts, previous_ends), 0).sum())
