"""Write changed copies of tables: rows are added, left out or changed.

A copy has the format of its file; JSONL lines that do not change are copied byte for byte.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from auditor.benchmarks.data.json_rows import stream_json_rows
from auditor.benchmarks.data.tables import read_csv_table_rows
from auditor.core.errors import AuditError

# The number of a row, or None for a new row, and its changed values.
ChangedRow = tuple[int | None, Mapping[str, Any]]
# Called with a table's column names and a function that reads a column; returns the rows to write.
ChooseRows = Callable[[Sequence[str], Callable[[str], Sequence[Any]]], Sequence[ChangedRow]]


def _rewrite_json(where: str, path: Path, choose: ChooseRows) -> str:
    rows = list(stream_json_rows(where, path))
    objects = [value for value, _ in rows]
    names = tuple(dict.fromkeys(chain.from_iterable(objects)))
    texts = []
    for row, changes in choose(names, lambda name: [value.get(name) for value in objects]):
        line = None
        if row is not None and not changes:
            line = rows[row][1]
        if line is not None:
            texts.append(line)
        else:
            old = {} if row is None else objects[row]
            text = json.dumps({**old, **changes}, ensure_ascii=False)
            # Half of a surrogate pair, which UTF-8 cannot write, stays escaped.
            texts.append(re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text))
    if rows and rows[0][1] is None:
        return "[" + ",\n".join(texts) + "]\n"
    return "\n".join([*texts, ""])


def format_csv_rows(rows: Iterable[Sequence[str]]) -> str:
    """Format rows as CSV that `read_csv_table_rows` reads; lines end with a line feed."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _rewrite_csv(where: str, path: Path, choose: ChooseRows) -> str:
    header, *rows = read_csv_table_rows(where, path) or [[]]
    output_rows = [header]
    for row, changes in choose(header, lambda name: [cells[header.index(name)] for cells in rows]):
        cells = [""] * len(header) if row is None else list(rows[row])
        for name, value in changes.items():
            cells[header.index(name)] = str(value)
        output_rows.append(cells)
    return format_csv_rows(output_rows)


def _rewrite_parquet(where: str, path: Path, choose: ChooseRows) -> bytes:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise AuditError(
            f"{where}: not a Parquet file that can be read ({type(error).__name__})"
        ) from None
    names = table.column_names
    chosen = choose(names, lambda name: table.column(name).to_pylist())
    added, order = list_added_rows(chosen, names, table.num_rows)
    for field in table.schema:
        if not field.nullable and None in [row[field.name] for row in added]:
            raise AuditError(
                f"{where}: expected columns that a new row may leave empty, got {field.name!r}, "
                "which takes no nulls"
            )
    with refuse_unfit_rows(where):
        new = pyarrow.Table.from_pylist(added, schema=table.schema)
        new.validate(full=True)
    table = pyarrow.concat_tables([table, new]).take(order)
    changed: dict[str, None] = {}  # an ordered set
    for row, changes in chosen:
        if row is not None:
            changed |= dict.fromkeys(changes)
    for name in changed:
        values = table.column(name).to_pylist()
        for i, (_, changes) in enumerate(chosen):
            values[i] = changes.get(name, values[i])
        table = table.set_column(names.index(name), name, pyarrow.array(values))
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def list_added_rows(
    chosen: Sequence[ChangedRow], names: Sequence[str], n_rows: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows to add, each with every column, and the row numbers in writing order.

    Old rows have the numbers 0 to `n_rows` - 1. New rows, which have None for a number in `chosen`,
    are numbered from `n_rows`.
    """
    added: list[dict[str, Any]] = []
    order = []
    for row, changes in chosen:
        if row is None:
            row = n_rows + len(added)
            added.append({**dict.fromkeys(names), **changes})
        order.append(row)
    return added, order


@contextmanager
def refuse_unfit_rows(where: str) -> Iterator[None]:
    """Raise AuditError if a new row does not fit the columns.

    Arrow's own message is hidden, because it may quote the row.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise AuditError(
            f"{where}: its columns cannot take a new row ({type(error).__name__})"
        ) from None


WRITERS: Mapping[str, Callable[[str, Path, ChooseRows], str | bytes]] = {
    ".jsonl": _rewrite_json,
    ".json": _rewrite_json,
    ".csv": _rewrite_csv,
    ".parquet": _rewrite_parquet,
}
