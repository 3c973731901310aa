"""Read the arrays of the Training Data Extraction Challenge: `*_prefix.npy` and `*_suffix.npy`.

Token ids are used unchanged, so no tokenizer is needed. The arrays do not say which vocabulary the
ids are from; a mismatch is noticed only if an id is too large for the attacked model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data.cut_places import CutPlace
from auditor.benchmarks.data.data_records import DataRecord, RecordSource
from auditor.benchmarks.data.splitting import (
    SplitOptions,
    list_data_files,
    split_records_into_benchmark,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.plan_parts import DataPlan
from auditor.plugins.benchmark import Benchmark

_LABEL = "example"
# val_preprefix.npy ends with neither of these.
_PREFIX = "_prefix.npy"
_SUFFIX = "_suffix.npy"


class LMExtraction(Benchmark):
    """The LM-Extraction benchmark's arrays: prefixes and suffixes as token ids, used as they
    are."""

    name = "lm-extraction"

    def __init__(self, plan: DataPlan, vocab_size: int, seed: int = 0):
        """Read all arrays; `--known` and `--nonmembers` are folders of arrays too.

        A prefix is shortened at its start and a suffix at its end, so that they remain adjacent.
        Raise AuditError with one sentence for any mistake of the user.
        """
        split = SplitOptions(plan.known_fraction, plan.limit, seed)
        sizes = (vocab_size, plan.prefix_length, plan.suffix_length)
        folders = list_data_files(plan)
        sources = dict[str, RecordSource]()
        # Rows of token ids by option: the records would take several times the memory.
        self._rows = dict[str, NDArray[Any]]()
        for flag, name in folders.items():
            sources[flag], self._rows[flag] = _read_array_source(flag, name, *sizes)
        counts = split_records_into_benchmark(self, sources, split, _LABEL)
        name = Path(folders["--data"]).resolve().name
        self.description = f"LM-Extraction arrays of {name}: {counts}"

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Yield every row, including rows beyond --limit."""
        for row in self._rows.get("--data" if members else "--nonmembers", ()):
            yield tuple(row.tolist()), None


def find_array_row(secret: str) -> int | None:
    """Return the array row of a secret by its id; None for a non-member."""
    label, _, row = secret.rpartition("-")
    return int(row) if label == _LABEL else None


def has_extraction_arrays(path: Path) -> bool:
    """Return whether a folder has at least one of the two arrays that LMExtraction needs."""
    return path.is_dir() and bool(
        _list_array_stems(path, _PREFIX) | _list_array_stems(path, _SUFFIX)
    )


def _list_array_stems(folder: Path, ending: str) -> set[str]:
    stems = set()
    for path in folder.glob(f"*{ending}"):
        stems.add(path.name.removesuffix(ending))
    return stems


def _read_array_source(
    flag: str, name: str, vocab_size: int, prefix_length: int | None, suffix_length: int | None
) -> tuple[RecordSource, NDArray[Any]]:
    """Read every row of the two arrays, as records and as an array (rows, tokens).

    Repeats are None: the arrays do not say how often a row was trained on.
    """
    folder = Path(name)
    label = f"{flag} {name!r}"
    stem, unpaired = _complete_array_pair(label, folder)
    # (n, prefix tokens)
    prefix = _read_token_id_array(label, folder / f"{stem}{_PREFIX}", vocab_size)
    # (n, suffix tokens)
    suffix = _read_token_id_array(label, folder / f"{stem}{_SUFFIX}", vocab_size)
    if len(prefix) != len(suffix):
        shapes = f"{prefix.shape} and {suffix.shape}"
        raise AuditError(f"{label}: expected as many suffixes as prefixes, got shapes {shapes}")
    p = _check_extraction_array_length(label, "--prefix-length", prefix_length, prefix.shape[1])
    s = _check_extraction_array_length(label, "--suffix-length", suffix_length, suffix.shape[1])
    rows = np.hstack([prefix[:, prefix.shape[1] - p :], suffix[:, :s]])
    place = CutPlace(0, p, p + s)
    records = []
    for row, tokens in enumerate(map(np.ndarray.tolist, rows)):
        # An array takes a seventh of the memory of a tuple of large numbers.
        records.append(DataRecord(row, array("i", tokens), place))
    notes = [
        f"{label}: {stem}, {len(records)} examples, the last {p} of {prefix.shape[1]} prefix "
        f"tokens and the first {s} of {suffix.shape[1]} suffix tokens"
    ]
    if unpaired:
        notes.append(
            f"{label}: not used, since the other half is missing: {', '.join(sorted(unpaired))}"
        )
    return RecordSource(label, tuple(records), notes=tuple(notes)), rows


def _complete_array_pair(where: str, folder: Path) -> tuple[str, set[str]]:
    """Find the pair of array files, of prefixes and of suffixes, in a folder.

    Return the start of the name that both files share, and the names of array files without a
    partner. `where` names the folder in error messages. Raise AuditError unless there is exactly
    one pair.
    """
    if not folder.is_dir():
        if folder.exists():
            got = "a file"
        else:
            got = "nothing of that name"
        raise AuditError(f"{where}: expected a folder with *{_PREFIX} and *{_SUFFIX}, got {got}")
    prefixes = _list_array_stems(folder, _PREFIX)
    suffixes = _list_array_stems(folder, _SUFFIX)
    paired = prefixes & suffixes
    unpaired = set()
    for stems, ending in ((prefixes, _PREFIX), (suffixes, _SUFFIX)):
        for stem in stems - paired:
            unpaired.add(stem + ending)
    if not paired:
        got = ", ".join(sorted(unpaired)) or "neither"
        raise AuditError(f"{where}: expected a pair *{_PREFIX} and *{_SUFFIX}, got {got}")
    if len(paired) > 1:
        got = ", ".join(sorted(paired))
        raise AuditError(
            f"{where}: expected one pair *{_PREFIX} and *{_SUFFIX}, got several: {got}"
        )
    return paired.pop(), unpaired


def _read_token_id_array(where: str, path: Path, vocab_size: int) -> NDArray[Any]:
    """Read (examples, tokens) ids in [0, vocab_size); raise AuditError for any other values."""
    array = read_extraction_array(where, path)
    for row in np.flatnonzero(((array < 0) | (array >= vocab_size)).any(axis=1))[:1]:
        raise AuditError(
            f"{where}: vocabulary mismatch: expected token ids in [0, {vocab_size}), the model's "
            f"vocabulary, got {array.min()} to {array.max()} in {path.name} (first in row {row}, "
            "counted from 0)"
        )
    return array.astype(np.int32)  # of two different types, a join could make floats


def read_extraction_array(where: str, path: Path) -> NDArray[Any]:
    """Read whole numbers of shape (examples, tokens); raise AuditError for any other array.

    where: how the error message starts.
    """
    try:
        # Not np.load, which also opens archives. A memory map refuses a pickle, which could run
        # code, and allocates nothing if a damaged header announces more than the file has.
        array = np.array(np.lib.format.open_memmap(path, mode="r"))
    except OSError as error:
        raise AuditError(
            f"{where}: cannot read {path.name}: {error.strerror or type(error).__name__}"
        ) from None
    except (
        ValueError,
        EOFError,
        OverflowError,
        SyntaxError,
        TokenError,
    ) as error:  # all that a damaged header can raise
        raise AuditError(
            f"{where}: {path.name} is not a .npy array of numbers, or its end is missing "
            f"({type(error).__name__})"
        ) from None
    if array.dtype.kind not in "iu":  # to NumPy's hierarchy a timedelta is an integer
        raise AuditError(
            f"{where}: expected whole numbers (token ids) in {path.name}, got {array.dtype}"
        )
    if array.ndim != 2:
        raise AuditError(
            f"{where}: expected shape (examples, tokens) in {path.name}, got {array.shape}"
        )
    if array.size == 0:
        raise AuditError(f"{where}: {path.name} is empty, its shape is {array.shape}")
    return array


def _check_extraction_array_length(where: str, flag: str, length: int | None, width: int) -> int:
    if length is not None and length > width:
        raise AuditError(
            f"{where}: expected {flag} <= {width}, the width of the array, got {length}"
        )
    return length or width
