"""Insert canaries into a copy of a data set: JSONL, CSV, Parquet or a Hugging Face data set.

The original is unchanged. Its rows keep their order. Each copy of a canary is a separate row at a
random position. All copies have the same text, so sharding by content keeps them together. A group
column gets the canary's id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest, CoinedCanary
from auditor.benchmarks.canaries.exposure_canaries import ExposureCanaryManifest, ManifestEntry
from auditor.benchmarks.data.changed_tables import (
    WRITERS,
    ChangedRow,
    list_added_rows,
    refuse_unfit_rows,
)
from auditor.benchmarks.data.columns import REPEATS, describe_table_columns
from auditor.benchmarks.data.compressed import find_table_ending
from auditor.benchmarks.data.tables import open_dataset_split
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator


@dataclass(frozen=True)
class CanaryInsertionPlan:
    """Hold the settings for inserting canaries into a data set.

    text: the column of texts; group: the column with a row's person or group, or "". seed:
    determines the order of rows.
    """

    manifest: ExposureCanaryManifest | AuditCanaryManifest
    text: str = "text"
    group: str = ""
    seed: int = 0

    def place_copies(
        self, where: str, columns: Sequence[str], read_column: Callable[[str], Sequence[Any]]
    ) -> list[ChangedRow]:
        """Return all rows of the data, with the canary copies as new rows at random positions.

        Copies fill only existing columns, because a new column would reveal them. where, columns,
        read_column: as in `check_insertable`.
        """
        n_rows = self.check_insertable(where, columns, read_column)
        copies: Sequence[ManifestEntry | CoinedCanary] = self.manifest.list_inserted_copies()
        added: list[ChangedRow] = []
        for i in make_keyed_generator("canaries", "order", self.seed).permutation(len(copies)):
            cells = {REPEATS: 1, self.group: copies[i].id, self.text: copies[i].text}
            added.append((None, {name: cells[name] for name in cells if name in columns}))
        # The first entries of a random permutation: every set of places is equally likely.
        noise = make_keyed_generator("canaries", "places", self.seed)
        n_places = n_rows + len(added)
        places = set(noise.permutation(n_places)[: len(added)].tolist())
        old = iter(range(n_rows))
        new = iter(added)
        rows: list[ChangedRow] = []
        for place in range(n_places):
            if place in places:
                rows.append(next(new))
            else:
                rows.append((next(old), {}))
        return rows

    def check_insertable(
        self, where: str, columns: Sequence[str], read_column: Callable[[str], Sequence[Any]]
    ) -> int:
        """Return the number of rows; raise AuditError if canaries cannot be inserted into the data.

        They cannot if a column is missing, if a text is not a string, or if the data already
        contain a canary.

        where: name of the data in messages; read_column: returns the values of a column.
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
        values = read_column(self.text)
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
    """Write the data and the copies to `out`, in the data's format; return the number of copies.

    Raise AuditError, and write nothing, if the data cannot be read or `out` exists.
    """
    path = Path(data)
    label = f"--data {data!r}"
    ending = find_table_ending(path)
    writer = WRITERS.get(ending)
    if path.is_file() and writer is None:
        got = path.suffix or "no ending"
        raise AuditError(f"{label}: expected a file ending in {', '.join(WRITERS)}, got {got!r}")
    if out.exists():
        raise AuditError(f"expected a new path for -o, but {str(out)!r} exists")
    if path.is_file() and out.suffix.lower() != ending:
        raise AuditError(f"expected -o to end in {ending} like the data, got {out.name!r}")
    count = len(copies.manifest.list_inserted_copies())
    try:
        if path.is_file() and writer is not None:
            choose = partial(copies.place_copies, label)
            disk.replace_atomically(out, writer(label, path, choose))
        else:
            _write_canary_dataset(copies, label, data, out)
    except OSError as error:
        raise AuditError(
            f"cannot write {str(out)!r}: {error.strerror or type(error).__name__}"
        ) from error
    return count


def _write_canary_dataset(copies: CanaryInsertionPlan, where: str, data: str, out: Path) -> None:
    """Save the train split in the format that `datasets.load_from_disk` and `--data` read."""
    import datasets

    with open_dataset_split(where, data) as dataset:
        names = dataset.column_names
        chosen = copies.place_copies(where, names, lambda name: dataset[name][:])
        rows, order = list_added_rows(chosen, names, dataset.num_rows)
        columns = {name: [row[name] for row in rows] for name in names}
        with refuse_unfit_rows(where):
            new = datasets.Dataset.from_dict(columns, features=dataset.features)
        with disk.create_atomically(out) as path:
            joined = datasets.concatenate_datasets([dataset, new])
            joined.select(np.array(order)).save_to_disk(path)
