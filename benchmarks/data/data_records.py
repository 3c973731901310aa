"""Represent the usable rows of a file as records, and list the unusable rows by reason."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.columns import UnreadRows
from auditor.benchmarks.data.cut_places import CutPlace
from auditor.core.nouns import Tokens, Wording
from auditor.core.result import RecordCounts

BY_LIMIT = "beyond --limit"
AUXILIARY = "known to the attacker as auxiliary data"


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


@dataclass(frozen=True)
class RecordSource:
    """Hold the records of a file or folder, and the rows that gave no record.

    label: the user's flag and file, such as "--data 'private.csv'".
    unusable: (row number, reason) of each unusable row or part of a row.
    part_noun: what notes call a part of a row.
    form: the rendering of conversations; None if there are no conversations.
    row_tokens: number of tokens in each row; empty if not counted.
    texts: the rows' texts, if needed again.
    not_attacked: usable rows without a record, keyed by reason.
    unread: statistics of the rows of a large table that were only counted.
    counts_occurrences: whether repeats are the records' occurrences in all texts.
    """

    label: str
    records: tuple[DataRecord, ...]
    unusable: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    part_noun: str = "part"
    form: ChatRendering | None = None
    row_tokens: Mapping[int, int] = field(default_factory=dict)
    texts: Sequence[str] = field(default=(), repr=False)
    not_attacked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unread: UnreadRows | None = None
    counts_occurrences: bool = False

    @cached_property
    def usable_rows(self) -> set[int]:
        """The rows with a record, and the usable rows that are not attacked."""
        return {record.row for record in self.records}.union(*self.not_attacked.values())

    @property
    def left_out(self) -> dict[str, list[int]]:
        """The distinct rows without any usable part, keyed by reason."""
        # Reversed, so that the first reason of a row stays.
        first_reasons = {}
        for row, reason in reversed(self.unusable):
            if row not in self.usable_rows:
                first_reasons[row] = reason
        return _group_rows_by_reason(sorted(first_reasons.items()))

    @property
    def parts_left_out(self) -> dict[str, list[int]]:
        """The rows with both usable and unusable parts, keyed by the reason why a part is unusable.

        A row is listed once for each unusable part.
        """
        return _group_rows_by_reason(
            [(row, reason) for row, reason in self.unusable if row in self.usable_rows]
        )

    def count_records(
        self,
        left_out: Mapping[str, int],
        n_known: int,
        n_candidates: int,
        attacked: Sequence[DataRecord],
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
        audited_rows = {record.row for record in attacked}
        n_beyond_limit = n_candidates - len(audited_rows)
        n_rows = len(self.usable_rows.union(*left_out_rows.values()))
        if self.unread is not None:
            n_beyond_limit += self.unread.n_distinct
            n_rows = self.unread.n_rows
        rules = {AUXILIARY: n_known, BY_LIMIT: n_beyond_limit}
        by_rule = _count_rows(self.not_attacked) | +Counter(rules)
        copies = n_rows - sum(all_left_out.values()) - sum(by_rule.values()) - len(audited_rows)
        parts = _count_rows(self.parts_left_out)
        tokens = sum(self.row_tokens.get(row, 0) for row in audited_rows)
        attacked_tokens = 0
        if tokens:
            attacked_tokens = _count_attacked_tokens(attacked)
        context_tokens = 0
        if any(record.suffix_start > record.n_prefix for record in attacked):
            context_tokens = max(record.n_prefix for record in attacked)
        return RecordCounts(
            *(n_rows, len(audited_rows), copies, all_left_out, by_rule, parts),
            *(tokens, attacked_tokens, context_tokens),
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


def _count_attacked_tokens(records: Iterable[DataRecord]) -> int:
    """Count the tokens in suffixes; a token in overlapping windows counts once."""
    covered = 0
    last = (-1, 0)  # row and end
    for record in sorted(records, key=lambda record: (record.row, record.suffix_start)):
        begin = record.suffix_start
        if record.row == last[0]:
            begin = max(begin, last[1])
        last = (record.row, max(begin, record.suffix_start + record.n_suffix))
        covered += last[1] - begin
    return covered
