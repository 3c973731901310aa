"""`secrets.parquet`: what a finished run keeps of each secret, one row a configuration, secret and
quantity.

Ids and numbers only, no text. `kind` says what a row is about: MEASURED, what a configuration found
out (the numbers whose means are the measurements); OBSERVED, what a probe saw; TOKENS, the
log-probability of each true token under a target, in nats; HELDOUT, the losses of held-out texts;
RECORDS, training records that were extracted without a prompt.
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
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey
from auditor.core.result import SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TABLE = "secrets.parquet"
MEASURED, OBSERVED, TOKENS, HELDOUT, RECORDS = (
    "measured",
    "observed",
    "tokens",
    "heldout",
    "records",
)
# by configuration and secret, what a probe saw of it
Seen = dict[CellKey, dict[str, dict[str, float]]]
_VERSION = b"audit.schema_version"
_NAMES = ("kind", "target", "setting", "attack", "quantity")


@dataclass(frozen=True)
class Column:
    """One quantity of one configuration, (n,) each. An id may be there several times: a row a
    token, in their order.

    cell: without setting and attack where it is of a target. member, repeats: empty, or None, where
    it means nothing.
    """

    kind: str
    cell: CellKey
    quantity: str
    ids: Sequence[str]
    values: Sequence[float] | NDArray[Any]
    member: Sequence[bool | None] | NDArray[np.bool_] = ()
    repeats: Sequence[int | None] = ()


def write_secrets_table(folder: Path, columns: Iterable[Column]) -> None:
    """All that a run keeps; each kind and target is a row group of its own, so that a reader may
    skip the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, buffer = _secrets_table_schema(), io.BytesIO()
    # Stable: within a kind, columns stay in the order of the run, target by target.
    by_kind = sorted(columns, key=lambda column: column.kind)
    with pq.ParquetWriter(buffer, schema, compression="zstd") as file:
        for _, alike in itertools.groupby(
            by_kind, key=lambda column: (column.kind, column.cell.target)
        ):
            if parts := [_column_as_table(column, schema) for column in alike if len(column.ids)]:
                file.write_table(pa.concat_tables(parts))
    disk.replace_atomically(folder / TABLE, buffer.getvalue())


def _secrets_table_schema() -> pa.Schema:
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


def _column_as_table(column: Column, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    n = len(column.ids)
    known = {
        **{
            name: pa.repeat(pa.scalar(value), n)
            for name, value in zip(_NAMES, _column_key(column), strict=True)
        },
        "secret": pa.array(column.ids, pa.string()),
        "value": pa.array(np.asarray(column.values, dtype=float)),  # NaN stays one
        # By length: an array of several has no truth value.
        **({"member": pa.array(column.member, pa.bool_())} if len(column.member) else {}),
        **({"repeats": pa.array(column.repeats, pa.int64())} if column.repeats else {}),
    }
    if column.kind == TOKENS:  # of each token in its suffix, from 1
        places = [
            place for _, own in itertools.groupby(column.ids) for place, _ in enumerate(own, 1)
        ]
        known["token"] = pa.array(places, pa.int64())
    arrays = [known.get(field.name, pa.nulls(n, field.type)) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column_key(column: Column) -> tuple[str, ...]:
    return (column.kind, *column.cell, column.quantity)


def read_secrets_table(folder: Path, kind: str) -> list[Column]:
    """What the folder keeps of a kind, in the order in which it was written; empty where it has no
    such file.

    Raises AuditError for a file of another version, and for one that a run does not write.
    """
    path = folder / TABLE
    if not path.exists():
        return []
    with blame_errors_on_secrets_table_context(
        path
    ):  # a list: a generator would raise when the block is long left
        return list(
            _columns_from_secrets_table(
                _read_secrets_table_of_this_version(
                    path, filters=[("kind", "=", kind)]
                ).combine_chunks()
            )
        )


def _read_secrets_table_of_this_version(path: Path, **how: Any) -> pa.Table:
    """Raises AuditError for a file of another version."""
    import pyarrow.parquet as pq

    # First: given a schema, pyarrow fills columns that the file lacks with nulls and says nothing.
    found = (pq.read_schema(path).metadata or {}).get(_VERSION, b"none").decode("utf-8", "replace")
    if found != str(SCHEMA_VERSION):
        raise AuditError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {found!r}; re-run the audit"
        )
    return pq.read_table(path, schema=_secrets_table_schema(), **how)


def _columns_from_secrets_table(table: pa.Table) -> Iterator[Column]:
    """Rows that stand together. Raises ValueError for a quantity of a configuration in two
    places."""
    if not table.num_rows:
        return
    # In one chunk: every chunk would have a dictionary, and so codes, of its own.
    names = {name: table[name].combine_chunks().dictionary_encode() for name in (*_NAMES, "secret")}
    if any(table[name].null_count for name in (*names, "value")):
        raise ValueError("rows without a name or a value")
    codes = {name: array.indices.to_numpy() for name, array in names.items()}
    words = {
        name: np.array(array.dictionary.to_pylist(), dtype=object) for name, array in names.items()
    }
    change = np.any([np.diff(codes[name]) != 0 for name in _NAMES], axis=0)
    ends = [*(np.flatnonzero(change) + 1).tolist(), table.num_rows]
    values, seen = table["value"].to_numpy(), set[tuple[str, ...]]()
    of, before = table.select(["secret", "member", "repeats"]), None
    for begin, end in itertools.pairwise([0, *ends]):
        kind, *cell, quantity = (str(words[name][codes[name][begin]]) for name in _NAMES)
        about = of.slice(begin, end - begin)
        if before is None or not about.equals(
            before
        ):  # else the same objects as of the quantity before
            ids = tuple(words["secret"][codes["secret"][begin:end]].tolist())
            member, repeats = (about[name].to_pylist() for name in ("member", "repeats"))
            before = about
        column = Column(kind, CellKey(*cell), quantity, ids, values[begin:end], member, repeats)
        if _column_key(column) in seen:
            raise ValueError(f"{quantity} in two places")
        seen.add(_column_key(column))
        yield column


@contextmanager
def blame_errors_on_secrets_table_context(path: Path) -> Iterator[None]:
    """Raises AuditError where the block finds in the file what no run writes there."""
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
    ) as error:  # pyarrow's are of these
        raise AuditError(
            f"{path}: expected the table of numbers by secret that a run writes, got something "
            "else: it is damaged"
        ) from error


def read_heldout_losses(folder: Path) -> dict[str, dict[str, list[float]]]:
    """By target, of each held-out text: `tokens` predicted, and the summed nll behind each kind of
    perplexity."""
    found: dict[str, dict[str, list[float]]] = {}
    for column in read_secrets_table(folder, HELDOUT):
        found.setdefault(column.cell.target, {})[column.quantity] = np.asarray(
            column.values
        ).tolist()
    return found


def read_suffix_token_log_probs(folder: Path) -> dict[str, dict[str, tuple[float, ...]]]:
    """By target and secret, the log-probability of each token of its true suffix, in nats."""
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    for column in read_secrets_table(folder, TOKENS):
        rows = zip(column.ids, np.asarray(column.values).tolist(), strict=True)
        # A secret's rows stand together, in the order of its tokens.
        alike = itertools.groupby(rows, key=operator.itemgetter(0))
        found[column.cell.target] = {
            secret: tuple(value for _, value in own) for secret, own in alike
        }
    return found


def read_probe_observations(folder: Path) -> Seen:
    """What probes saw, numbers by name."""
    found: Seen = {}
    for column in read_secrets_table(folder, OBSERVED):
        for secret, value in zip(column.ids, np.asarray(column.values).tolist(), strict=True):
            found.setdefault(column.cell, {}).setdefault(secret, {})[column.quantity] = value
    return found


def read_table_as_dataframe(folder: Path, aliases: Mapping[str, str]) -> pd.DataFrame:
    """The whole file, with aliases for secrets. Raises AuditError as `read_secrets_table`, and
    where there is none."""
    path = folder / TABLE
    with blame_errors_on_secrets_table_context(path):
        found = _read_secrets_table_of_this_version(
            path, read_dictionary=[*_NAMES, "secret"]
        ).to_pandas()
        # A categorical column: `map` is called once for each secret, not for each row.
        named = found["secret"].map(lambda id: aliases.get(id, id))
        # Nullable types: pandas turns columns with gaps into objects and floats.
        return found.assign(secret=named).astype(
            {"member": "boolean", "repeats": "Int64", "token": "Int64"}
        )
