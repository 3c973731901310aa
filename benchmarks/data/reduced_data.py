"""Write a user's rows, except rows that a mitigation drops, to a file of equal format."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from auditor.benchmarks.data.columns import COLUMNS, REPEATS, list_row_repeat_counts
from auditor.benchmarks.data.conversation_rows import Conversation, get_message_text
from auditor.benchmarks.data.tables import (
    format_csv_rows,
    read_csv_table_rows,
    read_json_table_objects,
    read_record_table,
)
from auditor.benchmarks.data.whole_texts import read_unit_texts, repeat_rows
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.training.variants import DataVariant


def format_data_row(row: str | Conversation) -> str:
    """Return the text by which copies of a row are recognised.

    The text of a conversation is the text of its messages.
    """
    if isinstance(row, str):
        return row
    texts = (
        text if (text := get_message_text(message["content"])) is not None else str(message)
        for message in row.messages
    )
    return "\n".join([*texts, *row.plain])


def write_kept_data(
    trainer: DataVariant, data: str, to: Path, text_column: str | None = None
) -> str:
    """Write the rows that a mitigation keeps, in the same format, readable by the owner only.

    trainer: the mitigation. data: the user's file. to: the new file. The rows are unchanged except
    for `repeats`. Return a sentence about the dropped rows. Raise AuditError if no row stays.
    """
    texts, _ = read_unit_texts(data, text_column)
    rows = repeat_rows(list_row_repeat_counts(read_record_table("--data", data, COLUMNS)))
    kept_copies, summary = trainer.choose_records([format_data_row(text) for text in texts])
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
    disk.replace_atomically(to, WRITERS[to.suffix](f"--data {data!r}", Path(data), counts_of_rows))
    return summary


def _reduce_json_text(where: str, path: Path, copies_by_row: Mapping[int, int]) -> str:
    objects, lines = read_json_table_objects(where, path)
    counted = any(REPEATS in value for value in objects)
    # Without the column every row counts once, so its line can stay unchanged, byte for byte.
    if lines is not None and not counted:
        return "".join(f"{lines[row]}\n" for row in sorted(copies_by_row))
    reduced = []
    for row, count in sorted(copies_by_row.items()):
        reduced.append({**objects[row], **({REPEATS: count} if counted else {})})
    if lines is None:
        return json.dumps(reduced, ensure_ascii=False) + "\n"
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in reduced)


def _reduce_csv_text(where: str, path: Path, copies_by_row: Mapping[int, int]) -> str:
    head, *rows = read_csv_table_rows(where, path)
    reduced = (
        [
            str(count) if name == REPEATS else cell
            for name, cell in zip(head, rows[row], strict=True)
        ]
        for row, count in sorted(copies_by_row.items())
    )
    return format_csv_rows([head, *reduced])


def _reduce_parquet_bytes(where: str, path: Path, copies_by_row: Mapping[int, int]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(path).take(sorted(copies_by_row))
    if REPEATS in table.column_names:
        at = table.column_names.index(REPEATS)
        table = table.set_column(
            at, REPEATS, pyarrow.array([copies_by_row[row] for row in sorted(copies_by_row)])
        )
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


WRITERS: Mapping[str, Callable[[str, Path, Mapping[int, int]], str | bytes]] = {
    ".jsonl": _reduce_json_text,
    ".json": _reduce_json_text,
    ".csv": _reduce_csv_text,
    ".parquet": _reduce_parquet_bytes,
}
