"""A user's rows without those that a mitigation leaves out, in a file of the same form."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from auditor.benchmarks.columns import COLUMNS, row_repeat_counts
from auditor.benchmarks.conversation_rows import Conversation, message_text
from auditor.benchmarks.tables import json_objects, read_csv_rows, read_table
from auditor.benchmarks.whole_texts import training_texts
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.training.variants import DataVariant

_REPEATS = "repeats"


def rows_repeated_by_count(repeats: Sequence[int]) -> list[int]:
    """The row of each record that is trained on."""
    return [row for row, count in enumerate(repeats) for _ in range(count)]


def row_as_plain_text(row: str | Conversation) -> str:
    """A row as a text that copies of it share: of a conversation, what was said."""
    if isinstance(row, str):
        return row
    said = (one if (one := message_text(message["content"])) is not None else str(message) for message in row.messages)
    return "\n".join([*said, *row.plain])


def write_mitigated_rows(trainer: DataVariant, data: str, to: Path, text_column: str | None = None) -> str:
    """The rows of a file that a mitigation keeps, as they are but for `repeats`, in the same form; yours to read alone.

    Returns what was left out: a sentence. Raises AuditError where nothing is left.
    """
    texts, _ = training_texts(data, text_column)
    rows = rows_repeated_by_count(row_repeat_counts(read_table("--data", data, COLUMNS)))
    kept, told = trainer.kept([row_as_plain_text(text) for text in texts])
    left = Counter(rows[i] for i in kept)
    if not left:
        raise AuditError(f"expected {trainer.name} to leave records to train on, got none of {len(texts):,}")
    if len(kept) == len(texts):
        raise AuditError(f"{trainer.name} leaves all {len(texts):,} records of {data!r} as they are: nothing to do")
    disk.replace_atomically(to, WRITERS[to.suffix](f"--data {data!r}", Path(data), left))
    return told


def _json_with_kept_rows(where: str, path: Path, left: Mapping[int, int]) -> str:
    objects, lines = json_objects(where, path)
    counted = any(_REPEATS in one for one in objects)
    kept = [
        {**objects[row], **({_REPEATS: count} if counted else {})} if counted or lines is None else lines[row]
        for row, count in sorted(left.items())
    ]
    if lines is None:
        return json.dumps(kept, ensure_ascii=False) + "\n"
    return "".join((one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)) + "\n" for one in kept)


def _csv_with_kept_rows(where: str, path: Path, left: Mapping[int, int]) -> str:
    head, *rows = read_csv_rows(where, path)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row, count in sorted(left.items()):
        writer.writerow([str(count) if name == _REPEATS else own for name, own in zip(head, rows[row], strict=True)])
    return text.getvalue()


def _parquet_with_kept_rows(where: str, path: Path, left: Mapping[int, int]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(path).take(sorted(left))
    if _REPEATS in table.column_names:
        at = table.column_names.index(_REPEATS)
        table = table.set_column(at, _REPEATS, pyarrow.array([left[row] for row in sorted(left)]))
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


WRITERS: Mapping[str, Callable[[str, Path, Mapping[int, int]], str | bytes]] = {
    ".jsonl": _json_with_kept_rows,
    ".json": _json_with_kept_rows,
    ".csv": _csv_with_kept_rows,
    ".parquet": _parquet_with_kept_rows,
}
