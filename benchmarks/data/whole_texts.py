"""Read a user's rows as whole texts or conversations, for training, canaries or text checks.

A mitigation that drops records also writes the rows that it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from auditor.benchmarks.data.columns import (
    REPEATS,
    DataTable,
    describe_table_columns,
    read_data_table,
)
from auditor.benchmarks.data.conversation_rows import (
    Conversation,
    UnusableConversation,
    get_message_text,
)
from auditor.benchmarks.data.files import TableReader
from auditor.benchmarks.data.large_tables import is_large_text_table
from auditor.benchmarks.data.tables import WRITERS, ChangedRow
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from auditor.training.variants import DataVariant

_MOST_COPIES = 10_000_000  # records of a training, in memory together


def read_training_rows(
    name: str, text_column: str | None = None, *more: str
) -> tuple[DataTable, Sequence[str] | Sequence[Conversation]]:
    """Return a table, and the text or conversation of every row once, ignoring `repeats`.

    Prefix and suffix columns are joined. more: further columns that the table must have. Raise
    AuditError for an unusable file or column.
    """
    named = (*filter(None, [text_column]), *more)
    table = read_data_table("--data", name, *named)
    for column in named:
        if (times := table.columns.count(column)) != 1:
            got = times or describe_table_columns(table.columns)
            raise AuditError(f"{table.label}: expected one column {column!r}, got {got}")
    if text_column is not None:
        table = replace(table, given_layout=(text_column,))
    if table.has_conversations:
        contents: Sequence[str] | Sequence[Conversation] = _require_row_conversations(table)
    else:
        contents = table.list_texts()
    for row, text in enumerate(contents):
        if not text:
            raise AuditError(
                f"{table.label}, row {row} (counted from 0): expected text, got an empty one"
            )
    return table, contents


def read_unit_texts(
    name: str, text_column: str | None = None, unit_column: str | None = None
) -> tuple[Sequence[str | Conversation], list[str] | None]:
    """Return every row's text or conversation, and each row's person.

    Both repeat a row as often as its repeat count says. The people are None if no `unit_column` is
    given. Raise AuditError for an unusable file or column.
    """
    table, contents = read_training_rows(name, text_column, *filter(None, [unit_column]))
    rows = repeat_rows(table)
    texts = [contents[row] for row in rows]
    if unit_column is None:
        return texts, None
    units = table.list_user_names(unit_column)
    return texts, [units[row] for row in rows]


def repeat_rows(table: DataTable) -> list[int]:
    """Return each row's number as many times as the row is trained on."""
    repeats = table.list_repeat_counts()
    if sum(repeats) > _MOST_COPIES:
        raise AuditError(
            f"{table.label}: expected at most {_MOST_COPIES:,} records to train on, counted by "
            f"`repeats`, got {sum(repeats):,}"
        )
    return np.repeat(range(len(repeats)), repeats).tolist()


def _require_row_conversations(table: DataTable) -> list[Conversation]:
    """Return every row's conversation.

    Raise AuditError if a row is unusable, because training needs all rows.
    """
    conversations = []
    for row, conversation in table.parse_conversations():
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
    table = reader.read(flag, name)
    if not table.has_conversations:
        return None
    order = make_keyed_generator("text form", table.rows).permutation(table.rows).tolist()
    usable = []
    for _, conversation in table.parse_conversations(order):
        if not isinstance(conversation, UnusableConversation) and conversation.is_learnt:
            usable.append(conversation)
        if len(usable) == count:
            break
    return usable


def format_data_row(row: str | Conversation) -> str:
    """Return the text that identifies copies of a row.

    For a conversation, this is the text of its messages.
    """
    if isinstance(row, str):
        return row
    texts = []
    for message in row.messages:
        text = get_message_text(message["content"])
        texts.append(str(message) if text is None else text)
    return "\n".join([*texts, *row.plain])


def write_kept_data(
    trainer: DataVariant, data: str, to: Path, text_column: str | None = None
) -> str:
    """Write the rows that a mitigation keeps, in the same format, readable only by the owner.

    trainer: the mitigation. data: the user's file. to: the new file. The rows are unchanged except
    for `repeats`. Return a sentence about the dropped rows. Raise AuditError if no row remains.
    """
    table, contents = read_training_rows(data, text_column)
    rows = repeat_rows(table)
    texts = [format_data_row(contents[row]) for row in rows]
    kept_copies, summary = trainer.choose_records(texts)
    # The trainer keeps copies, numbered through all of them: map them back to their rows.
    counts_of_rows = Counter(rows[i] for i in kept_copies)
    if not counts_of_rows:
        raise AuditError(
            f"expected {trainer.name} to leave records to train on, got none of {len(texts):,}"
        )
    if len(kept_copies) == len(texts):
        raise AuditError(
            f"{trainer.name} leaves all {len(texts):,} records of {data!r} as they are: nothing to "
            "do"
        )

    def choose_kept(
        names: Sequence[str], read_column: Callable[[str], Sequence[Any]]
    ) -> list[ChangedRow]:
        # Without this column, every row counts once.
        counted = REPEATS in names
        counts = sorted(counts_of_rows.items())
        return [(row, {REPEATS: count} if counted else {}) for row, count in counts]

    text = WRITERS[to.suffix](f"--data {data!r}", Path(data), choose_kept)
    disk.replace_atomically(to, text)
    return summary
