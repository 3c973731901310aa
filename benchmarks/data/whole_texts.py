"""Read a user's rows as whole texts or conversations, for training, canaries or text checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from auditor.benchmarks.data import columns
from auditor.benchmarks.data.conversation_rows import LAYOUTS, Conversation, UnusableConversation
from auditor.benchmarks.data.files import TableReader
from auditor.benchmarks.data.large_tables import is_large_text_table
from auditor.benchmarks.data.tables import (
    RecordTable,
    read_record_table,
)
from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator

_MOST_COPIES = 10_000_000  # records of a training, in memory together


def read_row_texts(flag: str, name: str) -> list[str]:
    """Return the text of every row once, ignoring `repeats`; prefix and suffix are joined.

    Raise AuditError for any mistake of the user.
    """
    table = read_record_table(flag, name, columns.COLUMNS)
    return columns.list_joined_layout_texts(table, columns.require_text_layout(table))


def read_unit_texts(
    name: str, text_column: str | None = None, unit_column: str | None = None
) -> tuple[Sequence[str | Conversation], list[str] | None]:
    """Return every row's text or conversation, and each row's person.

    Both repeat a row as often as its repeat count says. Prefix and suffix columns are joined. The
    people are None if no `unit_column` is given. Raise AuditError for an unusable file or column.
    """
    extra_columns = tuple(column for column in (text_column, unit_column) if column is not None)
    table = read_record_table("--data", name, (*columns.COLUMNS, *extra_columns))
    for column in extra_columns:
        if (times := table.columns.count(column)) != 1:
            got = times or columns.describe_table_columns(table.columns)
            raise AuditError(f"{table.label}: expected one column {column!r}, got {got}")
    layout = (text_column,) if text_column is not None else columns.detect_column_layout(table)
    if layout in columns.PLAIN or text_column is not None:
        contents: Sequence[str] | Sequence[Conversation] = columns.list_joined_layout_texts(
            table, layout
        )
    else:
        contents = _require_row_conversations(table, layout)
    for row, text in enumerate(contents):
        if not text:
            raise AuditError(
                f"{table.label}, row {row} (counted from 0): expected text, got an empty one"
            )
    repeats = columns.list_row_repeat_counts(table)
    if sum(repeats) > _MOST_COPIES:
        raise AuditError(
            f"{table.label}: expected at most {_MOST_COPIES:,} records to train on, counted by "
            f"`repeats`, got {sum(repeats):,}"
        )
    rows = repeat_rows(repeats)
    texts = [contents[row] for row in rows]
    if unit_column is None:
        return texts, None
    units = columns.list_row_user_names(table, unit_column)
    return texts, [units[row] for row in rows]


def repeat_rows(repeats: Sequence[int]) -> list[int]:
    """Return each row's number as many times as the row is trained on."""
    return np.repeat(range(len(repeats)), repeats).tolist()


def _require_row_conversations(table: RecordTable, layout: Sequence[str]) -> list[Conversation]:
    """Return every row's conversation.

    layout: from `columns.detect_column_layout`. Raise AuditError if a row is unusable, because
    training needs all rows.
    """
    conversations = []
    for row, conversation in columns.parse_row_conversations(table, layout):
        place = f"{table.label}, row {row} (counted from 0)"
        if isinstance(conversation, UnusableConversation):
            raise AuditError(f"{place}: expected a conversation to train on, got {conversation}")
        if conversation.group is not None:
            raise AuditError(
                f"{place}: expected a conversation to train on, got preferences (chosen and "
                "rejected, or a label of true or false), which a trainer of preferences learns "
                "from, as TRL's DPOTrainer and KTOTrainer"
            )
        conversations.append(conversation)
    return conversations


def sample_data_conversations(
    reader: TableReader, flag: str, name: str, count: int
) -> list[Conversation] | None:
    """Return up to `count` conversations of a file that count toward the loss.

    Return None for a file of texts or tokens. The same file always gives the same conversations.
    flag: the option that names the file. reader: the plan's reader, which samples a large table.
    """
    if is_large_text_table(f"{flag} {name!r}", Path(name)):  # too large to read for this
        return None
    table, unread = reader.read(flag, name)
    kinds = None if unread is None else unread.kinds
    if (layout := columns.detect_column_layout(table)) not in LAYOUTS:
        return None
    order = make_keyed_generator("text form", table.rows).permutation(table.rows).tolist()
    usable = []
    for _, conversation in columns.parse_row_conversations(table, layout, order, kinds):
        if not isinstance(conversation, UnusableConversation) and conversation.is_learnt:
            usable.append(conversation)
        if len(usable) == count:
            break
    return usable
