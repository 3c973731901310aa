"""Read a table, one column at a time, from JSONL, JSON, CSV, Parquet or a Hugging Face data set.

Text remains text (`007320` and `NA` are unchanged). Errors name rows and columns, never their
content.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from auditor.benchmarks.data.compressed import COMPRESSED, find_table_ending
from auditor.benchmarks.data.json_rows import ABSENT, read_utf8_table_text, stream_json_rows
from auditor.benchmarks.data.words import is_mostly_unspaced
from auditor.core.counts import format_count
from auditor.core.disk import find_cache_folder, open_scratch_folder
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    import datasets
    import pyarrow


FIRST = 200  # rows from which the columns with texts are found, in Parquet and data sets
# columns without text that hold content of a person
_MEDIA = {
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
}
_LONGEST_NAME = 80  # characters of a name, a key or an address; longer values are text
_SHORTEST_UNSPACED = 10  # characters of a text in a script without spaces
_NO_UTF8 = "expected UTF-8 text, got something else in a file: save the files as UTF-8"
SAVED = ("dataset_info.json", "dataset_dict.json")  # of `save_to_disk`
_ADVICE = {
    ".ndjson": "rename it to .jsonl",
    ".feather": "rename it to .arrow",
    ".tsv": "give a folder that holds it",
    ".txt": "give a folder that holds it, in which each line is a row",
    ".tar": "unpack it, and write its texts as JSONL",
    ".zip": "unpack it",
    **dict.fromkeys((".xlsx", ".xls"), "save it as CSV"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), "export its table as CSV"),
}
_ROWS = {".jsonl", ".json", ".ndjson", ".csv", ".tsv"}  # of a folder, read like single files
_CONFIGURATIONS = re.compile(r"Config name is missing.*?\[(.*?)\]")
_OTHER_FILES = (
    ".txt",
    ".tsv",
    ".npy",
    ".npz",
    ".feather",
    ".xlsx",
    ".xls",
    ".zip",
    *COMPRESSED,
)


@dataclass(frozen=True)
class RecordTable:
    """A table: its column names, and a function that reads one column without the others.

    label: the name of the table in error messages: the option and the file name.
    columns: the column names.
    rows: number of rows.
    column: returns the values of a column by name.
    texts: names of the columns that may hold what people wrote or recorded: texts of several words
        (also inside lists and objects), images, videos and sound.
    first_row: number of the first row, if the table is a part of a file; errors give row numbers in
        the file.
    unread_parts: phrases about the splits of a data set and files of a folder that are not read.
    folder_notes: sentences about how the files of a folder are read.
    """

    label: str
    columns: tuple[str, ...]
    rows: int
    column: Callable[[str], Sequence[Any]]
    texts: tuple[str, ...] = ()
    first_row: int = 0
    unread_parts: tuple[str, ...] = ()
    folder_notes: tuple[str, ...] = ()

    def list_unread_notes(self) -> list[str]:
        """Return sentences about splits and files, first about those that are not read."""
        return [f"{self.label}: {note}" for note in (*self.unread_parts, *self.folder_notes)]


def read_record_table(flag: str, name: str, columns: Sequence[str]) -> RecordTable:
    """Read a local file, whose suffix determines the format, or a Hugging Face data set.

    flag: the option that names the table. columns: all columns that will be read. Raise AuditError
    if `name` is neither, or if the table has no rows.
    """
    try:
        table = _read_any_table(flag, name, columns)
    except UnicodeDecodeError:  # from None: the error holds the text
        raise AuditError(f"{flag} {name!r}: {_NO_UTF8}") from None
    except OverflowError:
        raise AuditError(
            f"{flag} {name!r}: expected dates of the years 1 to 9999 in the columns to read"
        ) from None
    if not table.rows:
        raise AuditError(f"{table.label} is empty: expected at least one row")
    return table


def _read_any_table(flag: str, name: str, columns: Sequence[str]) -> RecordTable:
    path = Path(name)
    label = f"{flag} {name!r}"
    reader = _READERS.get(find_table_ending(path))
    if not path.exists():
        # No Hub data set has the name of a file or a longer path, and a mistyped path must not go
        # there.
        hub_name = re.fullmatch(
            r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name
        ) and not name.lower().endswith(_OTHER_FILES)
        if reader is not None or not hub_name:
            raise AuditError(f"{label}: no such file")
    if not path.exists() or path.is_dir():
        return _read_dataset_table(label, name, columns)
    if reader is None:
        got = repr(path.suffix or "no ending")
        if advice := _ADVICE.get(path.suffix.lower()):
            got += f": {advice}"
        raise AuditError(
            f"{label}: expected a file ending in {', '.join(_READERS)} (texts also compressed, as "
            f"in .jsonl.gz), got {got}"
        )
    try:
        return reader(label, path, columns)
    except OSError as error:
        raise AuditError(
            f"{label}: cannot be read: {error.strerror or type(error).__name__}"
        ) from None


def find_text_columns(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the columns that may have texts by people, not only names, numbers or token ids."""
    is_text = dict[str, bool]()
    for row in rows:
        for name, value in row.items():
            if not is_text.get(name):
                is_text[name] = bool(value) if name.lower() in _MEDIA else _holds_text(value)
    return tuple(name for name, holds in is_text.items() if holds)


def _find_arrow_text_columns(
    first: pyarrow.Table, column: Callable[[str], pyarrow.ChunkedArray]
) -> tuple[str, ...]:
    """Return the text columns of an Arrow table, judging by the values in its first rows.

    first: the first rows. column: reads a complete column by its name. A column that is empty in
    the first rows is judged by its first non-empty values.
    """
    rows = list_arrow_rows(first)
    later = []
    for name in rows[0] if rows else ():
        if not any(row[name] for row in rows):
            for value in column(name).drop_null()[:FIRST].to_pylist():
                later.append({name: value})
    return find_text_columns([*rows, *later])


def list_arrow_rows(first: pyarrow.Table | pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """Return rows without their numbers and dates, as Python has no date beyond the year 9999."""
    import pyarrow

    names = [field.name for field in first.schema if not pyarrow.types.is_primitive(field.type)]
    rows: list[dict[str, Any]] = first.select(names).to_pylist()
    return rows


def _holds_text(value: Any, nested: bool = False) -> bool:
    if isinstance(value, str):
        return nested or _is_text(value)
    if isinstance(value, bytes):
        return bool(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(_holds_text(part, nested=True) for part in value)


def _is_text(value: str) -> bool:
    """Return whether a text in a table is more than a name.

    Such a text has several words, is JSON, or has many characters without spaces.
    """
    if len(value.split(None, 1)) > 1 or len(value) > _LONGEST_NAME or value.startswith(("[", "{")):
        return True
    return len(value) >= _SHORTEST_UNSPACED and not value.isascii() and is_mostly_unspaced([value])


# --- CSV ---


def _read_csv_table(where: str, path: Path, columns: Sequence[str]) -> RecordTable:
    return _make_csv_table(where, read_csv_table_rows(where, path))


def _make_csv_table(where: str, rows: Sequence[Sequence[str]]) -> RecordTable:
    header = tuple(rows[0]) if rows else ()
    texts = find_text_columns(dict(zip(header, row, strict=True)) for row in rows[1:])
    return RecordTable(
        where,
        header,
        max(0, len(rows) - 1),
        lambda name: [row[header.index(name)] for row in rows[1:]],
        texts,
    )


def read_csv_table_rows(where: str, path: Path, separator: str = ",") -> list[list[str]]:
    """Return the header and all rows of a CSV file, except blank lines.

    where: how error messages start. All rows must have the same number of fields.
    """
    lines = io.StringIO(read_utf8_table_text(where, path), newline="")
    return list(stream_csv_table_rows(where, lines, separator))


def stream_csv_table_rows(
    where: str, text: Iterable[str], separator: str = ","
) -> Iterator[list[str]]:
    """Yield the header and each row that is not blank; text: lines with their line ends.

    Raise AuditError, with the line, if the CSV is invalid or a row has a different length.
    """
    # The standard library's reader, since it is strict: pandas fills a short row with "", takes the
    # first column of a long row for an index and reads on after a stray quote; pyarrow accepts a
    # quote that never closes.
    lines = csv.reader(text, strict=True, delimiter=separator)
    # The default limit refuses texts of more than 128 KiB.
    old_limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    line = 1
    header: list[str] = []
    try:
        for fields in lines:
            if fields:  # [] is a blank line
                header = header or fields
                if len(fields) != len(header):
                    expected = format_count(len(header), "field")
                    instead = ""
                    if len(header) == 1 and ";" in header[0]:
                        instead = " instead of ;"
                    noun = {",": "comma", "\t": "tab"}.get(separator, "separator")
                    raise AuditError(
                        f"{where}, line {line}: expected {expected}, got {len(fields)}: "
                        f"write a {noun} between fields{instead}, and quotes around a text with a "
                        f"{noun}"
                    )
                yield fields
            line = lines.line_num + 1
    except csv.Error as error:
        advice = "write each quote inside a text twice"
        if len(header) == 1 and ";" in header[0]:
            advice = "write a comma between fields instead of ;"
        raise AuditError(
            f"{where}: not CSV in the record that starts at line {line}: {error}: {advice}"
        ) from None
    finally:
        csv.field_size_limit(old_limit)


# --- JSON ---


def _read_json_table(where: str, path: Path, columns: Sequence[str]) -> RecordTable:
    values_by_name: dict[str, list[Any]] = {}
    n_rows = 0

    def add_rows() -> Iterator[dict[str, Any]]:  # no object outlives its row
        nonlocal n_rows
        for value, _ in stream_json_rows(where, path):
            for name in value:
                if name not in values_by_name:
                    values_by_name[name] = [ABSENT] * n_rows
            for name, values in values_by_name.items():
                values.append(value.get(name, ABSENT))
            n_rows += 1
            yield value

    texts = find_text_columns(add_rows())
    return RecordTable(where, tuple(values_by_name), n_rows, values_by_name.__getitem__, texts)


# --- Parquet ---


def _read_parquet_table(where: str, path: Path, columns: Sequence[str]) -> RecordTable:
    import pyarrow
    from pyarrow import parquet

    if path.stat().st_size == 0:
        raise AuditError(f"{where} is empty: expected a Parquet file")
    try:
        with parquet.ParquetFile(path) as file:
            first = pyarrow.Table.from_batches(
                list(islice(file.iter_batches(FIRST), 1)), file.schema_arrow
            )
            return _make_arrow_record_table(
                where,
                first,
                file.metadata.num_rows,
                columns,
                lambda name: file.read(columns=[name]).column(0),
            )
    except UnicodeDecodeError:
        raise AuditError(f"{where}: expected UTF-8 text, got something else") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise AuditError(
            f"{where}: not a Parquet file that can be read ({type(error).__name__})"
        ) from None


def _make_arrow_record_table(
    where: str,
    first: pyarrow.Table,
    rows: int,
    columns: Sequence[str],
    column: Callable[[str], pyarrow.ChunkedArray],
) -> RecordTable:
    """Return a table of `rows` rows; first: its first rows; column: reads a column by its name."""
    names = tuple(first.column_names)
    # Skip repeated names: they are refused later, by name.
    values = {name: column(name).to_pylist() for name in columns if names.count(name) == 1}
    texts: tuple[str, ...] = ()
    if len(set(names)) == len(names):
        texts = _find_arrow_text_columns(first, column)
    return RecordTable(where, names, rows, values.__getitem__, texts)


def _read_arrow_table(where: str, path: Path, columns: Sequence[str]) -> RecordTable:
    """Read an Arrow file, either a stream (as `datasets` writes) or a file with a footer."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as mapped:
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(mapped).read_all()
            return _make_arrow_record_table(
                where, table.slice(0, FIRST), table.num_rows, columns, table.column
            )
    except (pyarrow.ArrowException, OSError) as error:
        raise AuditError(
            f"{where}: not an Arrow file that can be read ({type(error).__name__})"
        ) from None


_READERS: dict[str, Callable[[str, Path, Sequence[str]], RecordTable]] = {
    ".jsonl": _read_json_table,
    ".json": _read_json_table,
    ".csv": _read_csv_table,
    ".parquet": _read_parquet_table,
    ".arrow": _read_arrow_table,
}


# --- Hugging Face data sets ---


def _read_dataset_table(where: str, name: str, columns: Sequence[str]) -> RecordTable:
    """Read a folder or a data set on the Hub: the train split."""
    path = Path(name)
    builder = _load_folder_builder(where, path)
    unread_parts, folder_notes = _list_folder_notes(path, builder)
    table = _join_folder_files(where, path, builder)
    if table is None:
        with _open_loaded_split(where, name, builder) as dataset:
            values = {}
            for column in columns:
                if column in dataset.column_names:
                    values[column] = dataset[column][:]
            plain = dataset.with_format("arrow")
            texts = _find_arrow_text_columns(
                plain.select(range(min(FIRST, dataset.num_rows)))[:],
                lambda column: plain.select_columns([column])[:].column(0),
            )
            names = tuple(dataset.column_names)
            table = RecordTable(where, names, dataset.num_rows, values.__getitem__, texts)
            if builder is None:
                unread_parts = _list_unread_splits(_list_split_names(path, dataset))
    return replace(table, unread_parts=unread_parts, folder_notes=folder_notes)


def _list_split_names(folder: Path, train: datasets.Dataset) -> list[str]:
    if not _is_saved_dataset(folder):
        return list(train.info.splits or ())
    saved = folder / "dataset_dict.json"  # `info` may name splits of its origin
    return json.loads(saved.read_text())["splits"] if saved.is_file() else []


def _is_saved_dataset(folder: Path) -> bool:
    return any((folder / file).is_file() for file in SAVED)


def _load_folder_builder(where: str, folder: Path) -> datasets.DatasetBuilder | None:
    """Return the builder that finds the files of a folder; None for other data sets."""
    import datasets

    if not folder.is_dir() or _is_saved_dataset(folder):
        return None
    _refuse_mixed_files(where, folder)
    with _dataset_cache_context(True) as cache, _explain_load_errors(where, folder):
        builder = datasets.load_dataset_builder(str(folder), cache_dir=str(cache))
    for file in chain.from_iterable((builder.config.data_files or {}).values()):
        if Path(file).suffix.lower() == ".zip":
            # `datasets` would read numbers and dates in it, and rename a repeated column.
            raise AuditError(f"{where}: expected files that are not packed, got a .zip: unpack it")
    return builder


def _join_folder_files(
    where: str, folder: Path, builder: datasets.DatasetBuilder | None
) -> RecordTable | None:
    """Join the CSV or JSON files of a folder's train split, each read like a single file.

    `datasets` would take texts such as 007320 and 2020-01-01 for numbers and dates. Return None if
    it has to read the folder: its files have another format, or its README.md sets options.
    """
    if builder is None or _list_reading_options(builder.config):
        return None
    files = list(map(Path, (builder.config.data_files or {}).get("train", ())))
    if not files or not {*map(find_table_ending, files)} <= _ROWS:
        return None
    tables = dict[str, RecordTable]()
    for path in files:
        name = str(path.relative_to(folder.resolve()))
        place = f"{where}, file {name!r}"
        if builder.info.builder_name == "csv":
            rows = read_csv_table_rows(place, path, builder.config.sep)
            tables[name] = _make_csv_table(place, rows)
        else:
            tables[name] = _read_json_table(place, path, ())
    _refuse_different_columns(where, tables)
    texts = dict.fromkeys(chain.from_iterable(table.texts for table in tables.values()))
    return RecordTable(
        where,
        tables[name].columns,
        sum(table.rows for table in tables.values()),
        lambda column: [*chain.from_iterable(table.column(column) for table in tables.values())],
        tuple(texts),
    )


def _refuse_different_columns(where: str, tables: Mapping[str, RecordTable]) -> None:
    (first, table), *others = tables.items()
    for name, other in others:
        if set(other.columns) != set(table.columns):
            raise AuditError(
                f"{where}: cannot be loaded as a data set: {first!r} and {name!r} have different "
                "columns: give one file, or files with the same columns"
            )


def _list_reading_options(config: Any) -> list[str]:
    """Return the options of a folder's README.md for reading its files, except the separator."""
    default = vars(type(config)())
    names = default.keys() - {"name", "version", "data_dir", "data_files", "description", "sep"}
    return sorted(name for name in names if getattr(config, name) != default[name])


@contextmanager
def open_dataset_split(where: str, name: str) -> Iterator[datasets.Dataset]:
    """Open the train split of a data set.

    Use the split only inside the with-block. At its end, the files that `datasets` made from a
    folder are deleted, because they contain private text.

    where: the beginning of error messages. name: a data set's name on the Hub, a folder written by
    `save_to_disk`, or a folder of files that `load_dataset` reads.
    """
    import datasets

    path = Path(name)
    builder = _load_folder_builder(where, path)
    table = _join_folder_files(where, path, builder)
    if table is None:
        with _open_loaded_split(where, name, builder) as split:
            yield split
        return
    with _explain_load_errors(where, path):
        columns = {}
        for column in table.columns:
            values = table.column(column)
            columns[column] = [None if value is ABSENT else value for value in values]
        split = datasets.Dataset.from_dict(columns)
    yield split


@contextmanager
def _open_loaded_split(
    where: str, name: str, builder: datasets.DatasetBuilder | None
) -> Iterator[datasets.Dataset]:
    import datasets

    path = Path(name)
    reading = {}
    if builder is not None and builder.info.builder_name == "csv":
        reading = {"na_filter": False}  # else texts such as NA and null would be missing values
    with _dataset_cache_context(path.is_dir()) as cache:
        with _explain_load_errors(where, path):
            if _is_saved_dataset(path):
                split = datasets.load_from_disk(name)
                if isinstance(split, datasets.DatasetDict):
                    if "train" not in split:
                        folders = ", ".join(str(path / split_name) for split_name in split)
                        raise AuditError(f"{where}: expected a split train, or one of {folders}")
                    split = split["train"]
                split = split.with_format(None)  # a saved format makes arrays of values
            else:
                split = datasets.load_dataset(name, split="train", cache_dir=str(cache), **reading)
        yield split


@contextmanager
def _explain_load_errors(where: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except AuditError:
        raise
    except (
        Exception
    ) as error:  # the libraries raise dozens of types, all about the data or the network
        _raise_dataset_load_error(where, folder, error)


def _refuse_mixed_files(where: str, folder: Path) -> None:
    """Raise AuditError if the folder has data files of several formats.

    `datasets` would read the files of only one format.
    """
    endings = set(map(find_table_ending, _list_visible_files(folder)))
    endings &= {".tsv", *_READERS} - {".json"}
    if len(endings) > 1:
        raise AuditError(
            f"{where}: expected data files of one format in this folder, got "
            f"{', '.join(sorted(endings))}: give one file, or a folder for each format"
        )


def _list_visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its folders, except hidden ones."""
    files = []
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            files.append(path)
    return files


def _list_folder_notes(
    folder: Path, builder: datasets.DatasetBuilder | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say which splits and files of a folder are not read; then, how its files are read."""
    if builder is None:
        return (), ()
    files_by_split = builder.config.data_files or {}
    read_files = {Path(file).resolve() for file in chain(*files_by_split.values())}
    files = _list_visible_files(folder)
    unread_files = [file for file in files if file.resolve() not in read_files]
    unread_parts = [*_list_unread_splits(files_by_split)]
    notes = []
    if unread_files:
        unread_parts.append(
            f"files of the folder that are not read: {_count_endings(unread_files)}"
        )
    if options := _list_reading_options(builder.config):
        notes.append(
            f"read with {', '.join(options)} of README.md: rows and text that they leave out are "
            "not audited"
        )
    elif builder.info.builder_name == "text":
        notes.append("each line of the .txt files is a row (a text of several lines: use JSONL)")
    return tuple(unread_parts), tuple(notes)


def _count_endings(files: Iterable[Path]) -> str:
    """Count files by ending, without names, which may be private."""
    counts = Counter(file.suffix or "without an ending" for file in files)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items()))


def _list_unread_splits(names: Iterable[str]) -> tuple[str, ...]:
    """Name a data set's splits other than `train`, in one phrase; () without them."""
    others = [str(name) for name in names if name != "train"]
    return (f"only the split train is read, not {', '.join(others)}",) if others else ()


@contextmanager
def _dataset_cache_context(local: bool) -> Iterator[Path]:
    """Yield the cache folder of `datasets`, which is temporary if the data set is local."""
    import datasets
    from huggingface_hub import utils

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs rows that it cannot read
    utils.logging.set_verbosity_error()  # it misses metadata in a folder's README.md
    datasets.disable_progress_bars()
    cache = find_cache_folder()
    if local:
        with open_scratch_folder(cache, "datasets") as scratch:
            yield scratch
        return
    (cache / "datasets").mkdir(exist_ok=True, mode=0o700)
    (cache / "datasets").chmod(0o700)  # gated data may be there, whoever made the folder
    yield cache / "datasets"


def _raise_dataset_load_error(where: str, folder: Path, error: Exception) -> NoReturn:
    """Raise AuditError with one sentence about a failed load.

    The library's message is included only if it cannot quote a row.
    """
    kind = type(error).__name__
    local = folder.is_dir()
    if isinstance(error, FileNotFoundError):
        problem = "no such file here and no such data set on the Hub"
        if local:
            counts = _count_endings(_list_visible_files(folder)) or "no file"
            problem = (
                "this folder contains no data file that can be read: expected only "
                f"{', '.join(_READERS)} or .txt, got {counts}"
            )
    elif (
        type(error) is ValueError
    ):  # about splits and configurations; its subclasses, as pyarrow's, quote rows
        problem = _explain_value_error(" ".join(str(error).split()))
    elif isinstance(error, OSError) and not local:
        problem = f"no such file here, and the Hugging Face Hub cannot be reached ({kind})"
    elif local and UnicodeDecodeError in (type(error), type(error.__cause__)):
        problem = _NO_UTF8
    elif kind == "DatasetGenerationError" and local:
        problem = f"cannot be loaded as a data set: {_find_folder_fault(where, folder)}"
    else:
        problem = f"cannot be loaded as a data set ({kind})"
    raise AuditError(f"{where}: {problem}") from None


def _explain_value_error(message: str) -> str:
    """Say how to choose one of several configurations; any other message is quoted."""
    if match := _CONFIGURATIONS.match(message):
        names = match[1].replace("'", "")[:200]
        return (
            f"expected a data set with one configuration, got {names}: give --data the file or "
            "the folder of one, because no option chooses"
        )
    return f"cannot be loaded as a data set: {message[:200]}"


def _find_folder_fault(where: str, folder: Path) -> str:
    """Say why the files of a folder are no data set.

    Raise AuditError if a file is broken, with its name and the line.
    """
    first: tuple[str, set[str]] | None = None
    for path in sorted(_list_visible_files(folder)):
        reader = _READERS.get(find_table_ending(path))
        if reader is None:
            continue
        name = str(path.relative_to(folder))
        columns = set(reader(f"{where}, file {name!r}", path, ()).columns)
        if first is not None and columns != first[1]:
            return (
                f"{first[0]!r} and {name!r} have different columns: give one file, or files with "
                "the same columns"
            )
        first = first or (name, columns)
    return "give one file, or files whose columns have the same types"
