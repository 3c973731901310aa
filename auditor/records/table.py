"""Read and write `secrets.parquet`: the numbers of each secret, a row per configuration, secret and
quantity.

The file holds ids and numbers, no text. `kind` is the subject of a row: MEASURED, results of a
configuration (the numbers whose means are the measurements); OBSERVED, observations of a probe;
TOKENS, the log-probability of each true token under a target, in nats; HELDOUT, the losses of
held-out texts; RECORDS, training records extracted without a prompt.
"""

from __future__ import annotations

import io
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from auditor.core import disk
from auditor.core.arrays import Bools
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey
from auditor.core.result import SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TABLE = "secrets.parquet"
MEASURED = "measured"
OBSERVED = "observed"
TOKENS = "tokens"
HELDOUT = "heldout"
RECORDS = "records"
# observations of a probe, by configuration and secret
Seen = dict[CellKey, dict[str, dict[str, float]]]
_VERSION = b"audit.schema_version"
_NAMES = ("kind", "target", "setting", "attack", "quantity")


@dataclass(frozen=True)
class Column:
    """A quantity of a configuration, (n,). An id repeats if it has a row per token, in token order.

    cell: without setting and attack for a quantity of a target. member, repeats: empty, or None for
    an entry, if not applicable.
    """

    kind: str
    cell: CellKey
    quantity: str
    ids: Sequence[str]
    values: Sequence[float] | NDArray[Any]
    member: Sequence[bool | None] | Bools = ()
    repeats: Sequence[int | None] = ()


def write_secrets_table(folder: Path, columns: Iterable[Column]) -> None:
    """Write all columns; each kind and target is a separate row group, so that readers can skip row
    groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _build_secrets_schema()
    buffer = io.BytesIO()
    # A stable sort: within a kind, columns stay in the order of the run, target by target.
    by_kind = sorted(columns, key=lambda column: column.kind)
    with pq.ParquetWriter(buffer, schema, compression="zstd") as file:
        for _, group in itertools.groupby(
            by_kind, key=lambda column: (column.kind, column.cell.target)
        ):
            if parts := [
                _build_column_table(column, schema) for column in group if len(column.ids)
            ]:
                file.write_table(pa.concat_tables(parts))
    disk.replace_atomically(folder / TABLE, buffer.getvalue())


def _build_secrets_schema() -> pa.Schema:
    import pyarrow as pa

    names = [(name, pa.string()) for name in (*_NAMES[:-1], "secret")]
    rest = [
        ("member", pa.bool_()),
        ("repeats", pa.int64()),
        ("quantity", pa.string()),
        ("token", pa.int64()),
    ]
    fields = [*names, *rest, ("value", pa.float64())]
    return pa.schema(fields, metadata={_VERSION: str(SCHEMA_VERSION).encode()})


def _build_column_table(column: Column, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    n = len(column.ids)
    arrays_by_name = {
        name: _build_string_array(value.encode() * n, np.full(n, len(value.encode())))
        for name, value in zip(_NAMES, _build_column_key(column), strict=True)
    }
    ids = list(map(str.encode, column.ids))
    arrays_by_name["secret"] = _build_string_array(b"".join(ids), np.array([*map(len, ids)]))
    arrays_by_name["value"] = _build_array(pa.float64(), column.values)  # NaN stays NaN
    # Test the length: an array with several values has no truth value.
    if len(column.member):
        arrays_by_name["member"] = _build_array(pa.bool_(), column.member)
    if len(column.repeats):
        arrays_by_name["repeats"] = _build_array(pa.int64(), column.repeats)
    if column.kind == TOKENS:  # position of each token in its suffix, from 1
        places = [
            place for _, group in itertools.groupby(column.ids) for place, _ in enumerate(group, 1)
        ]
        arrays_by_name["token"] = _build_array(pa.int64(), places)
    arrays = [arrays_by_name.get(field.name, pa.nulls(n, field.type)) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _build_string_array(data: bytes, lengths: NDArray[np.int64]) -> pa.Array:
    """Build an array of texts from their UTF-8, end to end, and their lengths in bytes.

    `pa.array` would import pandas, which takes longer than all writing of a short audit.
    """
    import pyarrow as pa

    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(lengths), [None, pa.py_buffer(ends), pa.py_buffer(data)]
    )


def _build_array(of: pa.DataType, values: Sequence[Any] | NDArray[Any]) -> pa.Array:
    """Build an array of numbers or truth values, with null for None."""
    import pyarrow as pa

    objects = np.array(values, dtype=object)
    is_valid = np.array([value is not None for value in objects], dtype=bool)
    filled = np.where(is_valid, objects, 0)
    if of == "bool":
        numbers = np.packbits(filled.astype(bool), bitorder="little")
    else:
        numbers = filled.astype(of.to_pandas_dtype())
    validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    return pa.Array.from_buffers(of, len(values), [validity, pa.py_buffer(numbers)])


def _build_column_key(column: Column) -> tuple[str, ...]:
    return (column.kind, *column.cell, column.quantity)


def read_secrets_table(folder: Path, kind: str) -> list[Column]:
    """Read the columns of a kind, in the order of writing; empty if the folder has no table.

    Raise AuditError for a file of another version, and for content that no run writes.
    """
    path = folder / TABLE
    if not path.exists():
        return []
    with attribute_table_errors(path):
        # a list: a generator would raise only after the block
        return list(_read_columns(_read_current_table(path, kind).combine_chunks()))


def _read_current_table(path: Path, kind: str | None = None) -> pa.Table:
    """Read the rows of a kind, or all rows. Raise AuditError for a file of another version."""
    import pyarrow.parquet as pq

    names = _build_secrets_schema().names
    # Not `pq.read_table`, which imports pandas.
    with pq.ParquetFile(path, read_dictionary=[*_NAMES, "secret"]) as file:
        metadata = file.schema_arrow.metadata or {}
        version = metadata.get(_VERSION, b"none").decode("utf-8", "replace")
        if version != str(SCHEMA_VERSION):
            raise AuditError(
                f"{path}: expected schema_version {SCHEMA_VERSION}, got {version!r}; re-run the "
                "audit"
            )
        if kind is None:
            return file.read(names)
        groups = [i for i in range(file.num_row_groups) if _holds_kind(file.metadata, i, kind)]
        # One dictionary of all row groups, and thus one code of each name.
        return file.read_row_groups(groups, names).unify_dictionaries()


def _holds_kind(metadata: Any, group: int, kind: str) -> bool:
    """Return whether a row group holds this kind. Raise ValueError for a group of two kinds."""
    statistics = metadata.row_group(group).column(0).statistics
    if statistics is None or statistics.min != statistics.max:
        raise ValueError("expected a row group of one kind")
    return bool(statistics.min == kind)


def _read_columns(table: pa.Table) -> Iterator[Column]:
    """Yield columns from adjacent rows. Raise ValueError if the rows of a quantity are not
    adjacent."""
    if not table.num_rows:
        return
    names = {name: table[name].combine_chunks() for name in (*_NAMES, "secret")}
    if any(table[name].null_count for name in (*names, "value")):
        raise ValueError("rows without a name or a value")
    # Not `to_numpy`, which imports pandas.
    codes = {name: np.from_dlpack(array.indices) for name, array in names.items()}
    words = {
        name: np.array(array.dictionary.to_pylist(), dtype=object) for name, array in names.items()
    }
    change = np.any([np.diff(codes[name]) != 0 for name in _NAMES], axis=0)
    ends = [*(np.flatnonzero(change) + 1).tolist(), table.num_rows]
    values = np.from_dlpack(table["value"].combine_chunks())
    keys = set[tuple[str, ...]]()
    facts = table.select(["secret", "member", "repeats"])
    previous = None
    for begin, end in itertools.pairwise([0, *ends]):
        kind, *cell, quantity = (str(words[name][codes[name][begin]]) for name in _NAMES)
        batch = facts.slice(begin, end - begin)
        # if equal, reuse the objects of the previous quantity
        if previous is None or not batch.equals(previous):
            ids = tuple(words["secret"][codes["secret"][begin:end]].tolist())
            member, repeats = (batch[name].to_pylist() for name in ("member", "repeats"))
            previous = batch
        column = Column(kind, CellKey(*cell), quantity, ids, values[begin:end], member, repeats)
        if _build_column_key(column) in keys:
            raise ValueError(f"{quantity} in two places")
        keys.add(_build_column_key(column))
        yield column


@contextmanager
def attribute_table_errors(path: Path) -> Iterator[None]:
    """Turn errors in the block into an AuditError that calls the file unreadable or damaged."""
    try:
        yield
    except OSError as error:
        raise AuditError(f"{path}: cannot be read ({type(error).__name__})") from error
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        NotImplementedError,
    ) as error:  # pyarrow raises these too
        raise AuditError(
            f"{path}: expected the table of numbers by secret that a run writes, got something "
            "else: it is damaged"
        ) from error


def read_heldout_losses(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return `tokens` and the summed nll of each kind of perplexity for each held-out text, by
    target."""
    losses: dict[str, dict[str, list[float]]] = {}
    for column in read_secrets_table(folder, HELDOUT):
        losses.setdefault(column.cell.target, {})[column.quantity] = np.asarray(
            column.values
        ).tolist()
    return losses


def read_suffix_token_log_probs(folder: Path) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return the log-probability of each token of the true suffix, in nats, by target and
    secret."""
    log_probs: dict[str, dict[str, tuple[float, ...]]] = {}
    for column in read_secrets_table(folder, TOKENS):
        rows = zip(column.ids, np.asarray(column.values).tolist(), strict=True)
        # A secret's rows are adjacent, in the order of its tokens.
        groups = itertools.groupby(rows, key=operator.itemgetter(0))
        log_probs[column.cell.target] = {
            secret: tuple(value for _, value in group) for secret, group in groups
        }
    return log_probs


def read_probe_observations(folder: Path) -> Seen:
    """Return the numbers that probes observed, by name."""
    observations: Seen = {}
    for column in read_secrets_table(folder, OBSERVED):
        for secret, value in zip(column.ids, np.asarray(column.values).tolist(), strict=True):
            observations.setdefault(column.cell, {}).setdefault(secret, {})[column.quantity] = value
    return observations


def read_dataframe(folder: Path, aliases: Mapping[str, str]) -> pd.DataFrame:
    """Read the full file, with aliases instead of ids. Raise AuditError like `read_secrets_table`,
    and if there is no file."""
    path = folder / TABLE
    with attribute_table_errors(path):
        frame = _read_current_table(path).to_pandas()
        # A categorical column: `map` calls the function once per secret, not per row.
        row_aliases = frame["secret"].map(lambda id: aliases.get(id, id))
        # Nullable types: pandas turns columns with gaps into objects and floats.
        return frame.assign(secret=row_aliases).astype(
            {"member": "boolean", "repeats": "Int64", "token": "Int64"}
        )
