"""Insert canaries into a copy of a data set: JSONL, CSV, Parquet or a Hugging Face data set.

The original stays unchanged. Rows keep their order. Each copy of a canary is a separate row at a
random position. All copies have one text, so sharding by content keeps them together. A group
column gets the canary's id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest, CoinedCanary
from auditor.benchmarks.canaries.exposure_canaries import ExposureCanaryManifest, ManifestEntry
from auditor.benchmarks.data.columns import REPEATS, describe_table_columns
from auditor.benchmarks.data.tables import (
    format_csv_rows,
    open_dataset_split,
    read_csv_table_rows,
    read_json_table_objects,
)
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator

Writer = Callable[["CanaryInsertionPlan", str, str, Path], None]


@dataclass(frozen=True)
class CanaryInsertionPlan:
    """The settings for inserting canaries into a data set.

    text: the column of texts; group: the column with a row's person or group, or "". seed:
    determines the order.
    """

    manifest: ExposureCanaryManifest | AuditCanaryManifest
    text: str = "text"
    group: str = ""
    seed: int = 0

    def place_copies(
        self,
        where: str,
        columns: Sequence[str],
        texts: Callable[[], Sequence[Any]],
        names: Sequence[str] | None = None,
        absent: Any = None,
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the canary copies as new rows, in a random order, and the order of all rows.

        names: the columns of the new rows (None: all of the data). absent: the value of columns
        that a copy does not fill. See `check_insertable` and `order_rows`.
        """
        n_rows = self.check_insertable(where, columns, texts)
        copies: Sequence[ManifestEntry | CoinedCanary] = self.manifest.list_inserted_copies()
        new = []
        for i in make_keyed_generator("canaries", "order", self.seed).permutation(len(copies)):
            cells = {REPEATS: 1, self.group: copies[i].id, self.text: copies[i].text}
            new.append({column: cells.get(column, absent) for column in names or columns})
        return new, self.order_rows(n_rows)

    def order_rows(self, rows: int) -> list[int]:
        """Return a new order of all rows and canary copies, as numbers.

        The data's `rows` rows have the first numbers and keep their order. The copies follow in
        number and get random positions.
        """
        copies = len(self.manifest.list_inserted_copies())
        # The first entries of a random permutation: every set of places is equally likely.
        at = set(
            make_keyed_generator("canaries", "places", self.seed)
            .permutation(rows + copies)[:copies]
            .tolist()
        )
        old = iter(range(rows))
        new = iter(range(rows, rows + copies))
        return [next(new) if place in at else next(old) for place in range(rows + copies)]

    def check_insertable(
        self, where: str, columns: Sequence[str], texts: Callable[[], Sequence[Any]]
    ) -> int:
        """Return the number of rows. Raise AuditError if canaries cannot be inserted into the data.

        The reason is a missing column, a text that is no string, or a canary in the data. where:
        names the data in messages; texts: returns the values of the text column.
        """
        for column in filter(None, (self.text, self.group)):
            if columns.count(column) != 1:
                flag = "--group"
                if column == self.text:
                    flag = "--column"
                raise AuditError(
                    f"{where}: expected one column {column!r} ({flag}), got "
                    f"{describe_table_columns(columns)}"
                )
        # excluded canaries must not be in the data either
        known = {entry.text for entry in self.manifest.canaries}
        values = texts()
        for row, text in enumerate(values):
            if not isinstance(text, str):
                raise AuditError(
                    f"{where}, row {row} (counted from 0), column {self.text!r}: expected text"
                )
            if text in known:
                raise AuditError(
                    f"{where} already contains a canary (row {row}): insert into the original data"
                )

        return len(values)


def write_canary_data(copies: CanaryInsertionPlan, data: str, out: Path) -> int:
    """Write the data and the canary copies to `out`, in the data's format; return the number of
    copies.

    Raise AuditError, and write nothing, if the data cannot be read or `out` exists.
    """
    path = Path(data)
    label = f"--data {data!r}"
    writer: Writer | None = _write_canary_dataset
    if path.is_file():
        writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        got = path.suffix or "no ending"
        raise AuditError(f"{label}: expected a file ending in {', '.join(_WRITERS)}, got {got!r}")
    if out.exists():
        raise AuditError(f"expected a new path for -o, but {str(out)!r} exists")
    if writer is not _write_canary_dataset and out.suffix.lower() != path.suffix.lower():
        raise AuditError(f"expected -o to end in {path.suffix} like the data, got {out.name!r}")
    count = len(copies.manifest.list_inserted_copies())
    try:
        writer(copies, label, data, out)
    except OSError as error:
        raise AuditError(
            f"cannot write {str(out)!r}: {error.strerror or type(error).__name__}"
        ) from error
    return count


@contextmanager
def _unfit_canary_row_refusal_context(where: str) -> Iterator[None]:
    """Raise AuditError if a canary's row does not fit the columns.

    Arrow's own message is hidden, because it may quote a canary.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise AuditError(
            f"{where}: its columns cannot take a canary's row ({type(error).__name__})"
        ) from None


def _write_canary_json(copies: CanaryInsertionPlan, where: str, data: str, out: Path) -> None:
    """Write JSON lines unchanged, byte for byte; rewrite a JSON array."""
    objects, lines = read_json_table_objects(where, Path(data))
    columns = tuple(dict.fromkeys(name for value in objects for name in value))
    # Only columns of the data: keys of JSON objects may differ, and a new key would reveal the
    # copies.
    new, order = copies.place_copies(
        where,
        columns,
        lambda: [value.get(copies.text) for value in objects],
        [name for name in (REPEATS, copies.group, copies.text) if name in columns],
    )
    if lines is None:
        json_objects = [*objects, *new]
        text = json.dumps([json_objects[i] for i in order], ensure_ascii=False, indent=1)
    else:
        output_lines = [*lines, *(json.dumps(row, ensure_ascii=False) for row in new)]
        text = "\n".join(output_lines[i] for i in order)
    with disk.create_atomically(out) as path:
        # newline="": Windows would make "\r\r\n" of the "\r\n" that a kept line ends with.
        path.write_text(text + "\n", encoding="utf-8", newline="")


def _write_canary_csv(copies: CanaryInsertionPlan, where: str, data: str, out: Path) -> None:
    header, *rows = read_csv_table_rows(where, Path(data)) or [[]]
    new, order = copies.place_copies(
        where, header, lambda: [row[header.index(copies.text)] for row in rows], absent=""
    )
    rows += [list(row.values()) for row in new]
    text = format_csv_rows([header, *(rows[i] for i in order)])
    with disk.create_atomically(out) as path:
        path.write_text(text, encoding="utf-8", newline="")


def _write_canary_parquet(copies: CanaryInsertionPlan, where: str, data: str, out: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(data)
    except (pyarrow.ArrowException, OSError) as error:
        raise AuditError(
            f"{where}: not a Parquet file that can be read ({type(error).__name__})"
        ) from None
    rows, order = copies.place_copies(
        where, table.column_names, lambda: table.column(copies.text).to_pylist()
    )
    for field in table.schema:
        if not field.nullable and any(row[field.name] is None for row in rows):
            raise AuditError(
                f"{where}: expected columns that a canary's row may leave empty beside "
                f"{copies.text!r}, got {field.name!r}, which takes no nulls"
            )
    with _unfit_canary_row_refusal_context(where):
        new = pyarrow.Table.from_pylist(rows, schema=table.schema)
        new.validate(full=True)
    with disk.create_atomically(out) as path:
        parquet.write_table(pyarrow.concat_tables([table, new]).take(order), path)


def _write_canary_dataset(copies: CanaryInsertionPlan, where: str, data: str, out: Path) -> None:
    """Save the train split in the format of `datasets`, which `load_from_disk` and `--data`
    read.
    """
    import datasets

    with open_dataset_split(where, data) as dataset:
        rows, order = copies.place_copies(
            where, dataset.column_names, lambda: dataset[copies.text][:]
        )
        columns: Mapping[str, list[Any]] = {
            name: [row[name] for row in rows] for name in dataset.column_names
        }
        with _unfit_canary_row_refusal_context(where):
            new = datasets.Dataset.from_dict(columns, features=dataset.features)
        with disk.create_atomically(out) as path:
            joined = datasets.concatenate_datasets([dataset, new])
            joined.select(np.array(order)).save_to_disk(path)


_WRITERS: dict[str, Writer] = {
    ".jsonl": _write_canary_json,
    ".json": _write_canary_json,
    ".csv": _write_canary_csv,
    ".parquet": _write_canary_parquet,
}
