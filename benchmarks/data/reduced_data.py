"""Write a user's rows, except those that a mitigation drops, to a file of the same format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from auditor.benchmarks.data.columns import REPEATS
from auditor.benchmarks.data.conversation_rows import Conversation, get_message_text
from auditor.benchmarks.data.rewriting import WRITERS, ChangedRow
from auditor.benchmarks.data.whole_texts import read_training_rows, repeat_rows
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.training.variants import DataVariant


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
