"""Read and write `secrets.parquet`: the numbers about each secret, with one row per number.

The file holds ids and numbers, but no text. Each number has a kind. MEASURED numbers are results of
attacks and probes; their means are the measurements. OBSERVED numbers are a probe's observations.
TOKENS numbers are the log-probabilities of true tokens under a target, in nats. HELDOUT numbers are
losses of held-out texts. RECORDS numbers describe training records extracted without a prompt.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from auditor.core import disk
from auditor.core.arrays import Bools, Floats, Ints, Strings
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey
from auditor.core.result import SCHEMA_VERSION
from auditor.core.secret_table import STRINGS
from auditor.records.journal import SecretNumbers

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

TABLE = "secrets.parquet"
MEASURED = "measured"
OBSERVED = "observed"
TOKENS = "tokens"
HELDOUT = "heldout"
RECORDS = "records"
# observations of a probe, by configuration and secret
Seen = dict[CellKey, dict[str, dict[str, float]]]
_VERSION = b"audit.schema_version"
_ROWS_AT_ONCE = 2**16  # of a row group, which readers and writers hold in memory
_NAMES = ("kind", "target", "setting", "attack", "quantity")
_FACTS = ("secret", "member", "repeats")


@dataclass(frozen=True)
class Column:
    """Hold the values, (n,), of a quantity for n secrets or for n tokens of secrets.

    Args:
        kind: kind of number (see the module's docstring).
        cell: target, setting, and attack or probe; only the target for a target's quantity.
        quantity: name of the quantity.
        ids: (n,) secret ids; an id repeats for each token, in token order.
        values: (n,) numbers.
        member: (n,) whether the secret is a member; empty, or with None entries, if not applicable.
        repeats: (n,) copies in the training data; empty, or with None entries, if not applicable.
    """

    kind: str
    cell: CellKey
    quantity: str
    ids: Sequence[str] | Strings
    values: Sequence[float] | NDArray[Any]
    member: Sequence[bool | None] | Bools = ()
    repeats: Sequence[int | None] = ()


def write_secrets_table(
    folder: Path, columns: Iterable[Column], token_columns: Iterable[Column] = ()
) -> None:
    """Write all columns to the run folder's table.

    A row group has at most `_ROWS_AT_ONCE` rows, of a single kind and target, so that readers can
    skip row groups.

    Args:
        folder: the run folder.
        columns: columns of all kinds but TOKENS.
        token_columns: columns of kind TOKENS, one target after another, generated during writing.
    """
    import pyarrow.parquet as pq

    schema = _build_secrets_schema()
    # A stable sort: within a kind, columns stay in the order of the run, target by target.
    by_kind = sorted(columns, key=lambda column: column.kind)
    all_columns = itertools.chain(by_kind, token_columns)
    parts = itertools.chain.from_iterable(map(_split_column, all_columns))
    with (
        disk.open_atomic_replacement(folder / TABLE) as scratch,
        pq.ParquetWriter(scratch, schema, compression="zstd") as file,
    ):
        for rows in _batch_column_tables(parts, schema):
            file.write_table(rows)


def _split_column(column: Column) -> Iterator[Column]:
    """Yield parts of the column with at most `_ROWS_AT_ONCE` rows; columns of tokens stay whole."""
    if column.kind == TOKENS:  # a part would not know the positions of its tokens
        yield column
        return
    for begin in range(0, len(column.ids), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        yield replace(
            column,
            ids=column.ids[part],
            values=column.values[part],
            member=column.member[part],
            repeats=column.repeats[part],
        )


def _batch_column_tables(parts: Iterable[Column], schema: pa.Schema) -> Iterator[pa.Table]:
    """Join adjacent columns of a kind and target into tables of at most `_ROWS_AT_ONCE` rows."""
    import pyarrow as pa

    for _, group in itertools.groupby(parts, key=lambda part: (part.kind, part.cell.target)):
        tables = list[pa.Table]()
        n_rows = 0
        for part in group:
            if tables and n_rows + len(part.ids) > _ROWS_AT_ONCE:
                yield pa.concat_tables(tables)
                tables = []
                n_rows = 0
            tables.append(_build_column_table(part, schema))
            n_rows += len(part.ids)
        yield pa.concat_tables(tables)


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
    arrays_by_name = {}
    key = (column.kind, *column.cell, column.quantity)
    for name, value in zip(_NAMES, key, strict=True):
        arrays_by_name[name] = _build_string_array(
            value.encode() * n, np.full(n, len(value.encode()))
        )
    ids = list(map(str.encode, column.ids))
    arrays_by_name["secret"] = _build_string_array(b"".join(ids), np.array([*map(len, ids)]))
    arrays_by_name["value"] = _build_array(pa.float64(), column.values)  # NaN stays NaN
    # Test the length: an array with several values has no truth value.
    if len(column.member):
        arrays_by_name["member"] = _build_array(pa.bool_(), column.member)
    if len(column.repeats):
        arrays_by_name["repeats"] = _build_array(pa.int64(), column.repeats)
    if column.kind == TOKENS:  # position of each token in its suffix, from 1
        places = []
        for _, group in itertools.groupby(column.ids):
            for place, _ in enumerate(group, 1):
                places.append(place)
        arrays_by_name["token"] = _build_array(pa.int64(), places)
    arrays = []
    for field in schema:
        arrays.append(arrays_by_name.get(field.name, pa.nulls(n, field.type)))
    return pa.Table.from_arrays(arrays, schema=schema)


def _build_string_array(data: bytes, lengths: NDArray[np.int64]) -> pa.Array:
    """Build an array of texts from their joined UTF-8 bytes and the length in bytes of each text.

    `pa.array` would import pandas, which takes longer than writing a short audit's table.
    """
    import pyarrow as pa

    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(lengths), [None, pa.py_buffer(ends), pa.py_buffer(data)]
    )


def _build_array(of: pa.DataType, values: Sequence[Any] | NDArray[Any]) -> pa.Array:
    """Build an array of numbers or truth values, with null for None."""
    import pyarrow as pa

    filled = np.asarray(values)
    validity = None
    if filled.dtype == object:
        is_valid = np.array([value is not None for value in filled], dtype=bool)
        filled = np.where(is_valid, filled, 0)
        validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    if of == "bool":
        numbers = np.packbits(filled.astype(bool), bitorder="little")
    else:
        numbers = np.ascontiguousarray(filled, dtype=of.to_pandas_dtype())
    return pa.Array.from_buffers(of, len(values), [validity, pa.py_buffer(numbers)])


def read_secrets_table(folder: Path, kind: str, quantity: str | None = None) -> list[Column]:
    """Return the columns of a kind, in the order written; [] if the folder has no table.

    Raise AuditError if the file is of a different version or has content that no run writes.

    Args:
        folder: the run folder.
        kind: kind of number, such as MEASURED (see the module's docstring).
        quantity: if given, read only columns of this quantity.
    """
    path = folder / TABLE
    if not path.exists():
        return []
    with convert_table_errors(path), _open_current_table(path) as file:
        # a list: a generator would raise only after the block
        return list(_join_column_parts(_list_column_parts(file, kind, quantity)))


@contextmanager
def _open_current_table(path: Path, categories: Sequence[str] = _NAMES) -> Iterator[pq.ParquetFile]:
    """Open the table's file; raise AuditError if it is of a different version.

    Args:
        categories: columns to read as dictionaries.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Arrow's own pool keeps much of the memory that it no longer needs.
    pa.set_memory_pool(pa.system_memory_pool())
    # Not `pq.read_table`, which imports pandas.
    with pq.ParquetFile(path, read_dictionary=[*categories]) as file:
        metadata = file.schema_arrow.metadata or {}
        version = metadata.get(_VERSION, b"none").decode("utf-8", "replace")
        if version != str(SCHEMA_VERSION):
            raise AuditError(
                f"{path}: expected schema_version {SCHEMA_VERSION}, got {version!r}; re-run the "
                "audit"
            )
        yield file


def _holds_kind(metadata: Any, group: int, kind: str) -> bool:
    """Test whether a row group of the file holds numbers of this kind.

    Raise ValueError if the group has two kinds.

    Args:
        group: its index.
    """
    statistics = metadata.row_group(group).column(0).statistics
    if statistics is None or statistics.min != statistics.max:
        raise ValueError("expected a row group of one kind")
    return bool(statistics.min == kind)


def _list_column_parts(
    file: pq.ParquetFile, kind: str, quantity: str | None = None
) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """Yield (key, table) for each stretch of adjacent rows with the same key.

    A key holds the kind, cell names and quantity. Memory holds only one row group at a time. Raise
    ValueError if a row lacks a name or a value.
    """
    for group in range(file.num_row_groups):
        if not _holds_kind(file.metadata, group, kind):
            continue
        names = file.read_row_group(group, [*_NAMES]).unify_dictionaries().combine_chunks()
        words = {}
        for name in _NAMES:
            words[name] = names[name].chunk(0).dictionary.to_pylist()
        if quantity is not None and quantity not in words["quantity"]:
            continue
        rows = file.read_row_group(group, [*_FACTS, "value"])
        columns = (*names.columns, rows["secret"], rows["value"])
        if any(column.null_count for column in columns):
            raise ValueError("rows without a name or a value")
        # Not `to_numpy`, which imports pandas.
        codes = []
        for name in _NAMES:
            codes.append(np.from_dlpack(names[name].chunk(0).indices))
        change = np.any([np.diff(code) != 0 for code in codes], axis=0)
        ends = [*(np.flatnonzero(change) + 1).tolist(), rows.num_rows]
        for begin, end in itertools.pairwise([0, *ends]):
            key = tuple(words[name][code[begin]] for name, code in zip(_NAMES, codes, strict=True))
            if quantity in (None, key[-1]):
                yield key, rows.slice(begin, end - begin)


def _join_column_parts(parts: Iterable[tuple[tuple[str, ...], pa.Table]]) -> Iterator[Column]:
    """Join adjacent parts into columns, and yield the columns.

    Raise ValueError if the rows of a quantity are not adjacent.
    """
    import pyarrow as pa

    keys = set[tuple[str, ...]]()
    previous = None
    for key, group in itertools.groupby(parts, key=operator.itemgetter(0)):
        rows = pa.concat_tables([part for _, part in group])
        if key in keys:
            raise ValueError(f"{key[-1]} in two places")
        keys.add(key)
        facts = rows.select([*_FACTS])
        # if equal, reuse the objects of the previous quantity
        if previous is None or not facts.equals(previous):
            ids = _build_ids(facts["secret"])
            member = facts["member"].to_pylist()
            if not facts["member"].null_count:
                member = np.array(member, dtype=bool)
            repeats = tuple(facts["repeats"].to_pylist())
            previous = facts
        kind, *cell, quantity = key
        values = np.concatenate([np.from_dlpack(chunk) for chunk in rows["value"].chunks])
        yield Column(kind, CellKey(*cell), quantity, ids, values, member, repeats)


def _build_ids(secrets: pa.ChunkedArray) -> Strings:
    ids = np.empty(len(secrets), STRINGS)
    for begin in range(0, len(ids), _ROWS_AT_ONCE):
        part = secrets.slice(begin, _ROWS_AT_ONCE).to_pylist()
        ids[begin : begin + len(part)] = np.array(part, STRINGS)
    return ids


@contextmanager
def convert_table_errors(path: Path) -> Iterator[None]:
    """Turn errors within the block into an AuditError: the file is unreadable or damaged."""
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
    """Return each held-out text's number of tokens and summed nlls (nats), keyed by target.

    The keys for each target are `tokens` and the names of perplexities.
    """
    losses: dict[str, dict[str, list[float]]] = {}
    for column in read_secrets_table(folder, HELDOUT):
        losses.setdefault(column.cell.target, {})[column.quantity] = np.asarray(
            column.values
        ).tolist()
    return losses


@dataclass(frozen=True, eq=False)
class SuffixLogProbs(Mapping[str, tuple[float, ...]]):
    """Map secret ids to the log-probabilities of the true suffix's tokens, in nats.

    Args:
        ids: secret ids.
        ends: (secrets,) index in `nats` at which each secret ends.
        nats: (tokens,) log-probabilities, one secret after another.
    """

    ids: Sequence[str] | Strings
    ends: Ints
    nats: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __getitem__(self, secret: str) -> tuple[float, ...]:
        index = self._numbers.find(secret)
        if index is None:
            raise KeyError(secret)
        return tuple(self.nats[self._begins[index] : self.ends[index]].tolist())

    @cached_property
    def _numbers(self) -> SecretNumbers:
        return SecretNumbers(self.ids)

    @cached_property
    def _begins(self) -> Ints:
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each suffix, of shape (secrets,)."""
        return self.ends - self._begins

    def take_position(self, position: int) -> tuple[Ints, Floats]:
        """Return two arrays about the secrets whose suffix has a token at this position (from
        0).

        The first has the indices of these secrets, the second the log-probabilities of these
        tokens.
        """
        indices = np.flatnonzero(self.lengths > position)
        return indices, self.nats[self._begins[indices] + position]

    @cached_property
    def sums(self) -> Floats:
        """Log-probability of each suffix in nats, of shape (secrets,).

        Tokens are added in their order.
        """
        totals = np.zeros(len(self.ids))
        for position in range(int(self.lengths.max(initial=0))):
            indices, terms = self.take_position(position)
            totals[indices] += terms
        return totals


def read_suffix_token_log_probs(folder: Path) -> dict[str, SuffixLogProbs]:
    """Return the log-probabilities of the true suffixes' tokens, keyed by target.

    Return {} if the folder has no table.
    """
    path = folder / TABLE
    if not path.exists():
        return {}
    with convert_table_errors(path), _open_current_table(path, (*_NAMES, "secret")) as file:
        log_probs: dict[str, SuffixLogProbs] = {}
        parts = _list_column_parts(file, TOKENS)
        for (_, target, *_), group in itertools.groupby(parts, key=operator.itemgetter(0)):
            if target in log_probs:
                raise ValueError(f"tokens of {target} in two places")
            log_probs[target] = _join_suffix_parts(rows for _, rows in group)
        return log_probs


def _join_suffix_parts(parts: Iterable[pa.Table]) -> SuffixLogProbs:
    """Join the parts of the table that hold one target's token log-probabilities."""
    ids = list[Strings]()
    n_tokens = list[Ints]()
    values = list[Floats]()
    for rows in parts:
        encoded = rows["secret"].unify_dictionaries().combine_chunks()
        codes = np.from_dlpack(encoded.indices)
        # A secret's rows are adjacent, in the order of its tokens.
        begins = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1])
        words = np.array(encoded.dictionary.to_pylist(), STRINGS)
        counts = np.diff(begins, append=len(codes))
        if ids and ids[-1][-1] == words[codes[0]]:  # begun in the previous part
            n_tokens[-1][-1] += counts[0]
            begins = begins[1:]
            counts = counts[1:]
        ids.append(words[codes[begins]])
        n_tokens.append(counts)
        for chunk in rows["value"].chunks:
            values.append(np.from_dlpack(chunk).astype(np.float64, copy=False))
    ends = np.cumsum(np.concatenate(n_tokens))
    return SuffixLogProbs(np.concatenate(ids), ends, np.concatenate(values))


def read_probe_observations(folder: Path) -> Seen:
    """Return the numbers that probes observed: {cell: {secret id: {name: number}}}.

    A cell is (target, setting, probe).
    """
    observations: Seen = {}
    for column in read_secrets_table(folder, OBSERVED):
        for secret, value in zip(column.ids, np.asarray(column.values).tolist(), strict=True):
            observations.setdefault(column.cell, {}).setdefault(secret, {})[column.quantity] = value
    return observations


def read_dataframe(folder: Path, aliases: Mapping[str, str]) -> pd.DataFrame:
    """Return the whole table as a data frame, with aliases instead of ids.

    `aliases` holds the name of each secret in reports, keyed by secret id. Raise AuditError if the
    file is missing, of a different version or damaged.
    """
    path = folder / TABLE
    categories = [*_NAMES, "secret"]
    with convert_table_errors(path), _open_current_table(path, categories) as file:
        frame = file.read(_build_secrets_schema().names).to_pandas()
        # A categorical column: `map` calls the function once per secret, not per row.
        row_aliases = frame["secret"].map(lambda id: aliases.get(id, id))
        # Nullable types: pandas turns columns with gaps into objects and floats.
        return frame.assign(secret=row_aliases).astype(
            {"member": "boolean", "repeats": "Int64", "token": "Int64"}
        )
