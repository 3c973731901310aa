"""The arrays of the Training Data Extraction Challenge: a folder with `*_prefix.npy` and
`*_suffix.npy`.

Token ids are used as they are, so no tokenizer is needed and none is known here. Whether they are
the ids of the attacked model's vocabulary cannot be seen from the arrays; only ids that are too
large give a mismatch away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data.cut_places import check_prefix_and_suffix_lengths
from auditor.benchmarks.data.data_records import DataRecord, RecordSource
from auditor.benchmarks.data.splitting import SplitOptions, split_data_records_into_secrets
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.benchmark import Benchmark

_LABEL = "example"
_PREFIX, _SUFFIX = "_prefix.npy", "_suffix.npy"  # val_preprefix.npy ends in neither


class LMExtraction(Benchmark):
    """The LM-Extraction benchmark's arrays: prefixes and suffixes as token ids, used as they
    are."""

    name = "lm-extraction"

    def __init__(
        self,
        folder: str,
        *,
        vocab_size: int,
        prefix_length: int | None = None,
        suffix_length: int | None = None,
        known: str | None = None,
        known_fraction: float = 0.2,
        nonmembers: str | None = None,
        limit: int | None = None,
        seed: int = 0,
    ):
        """`known` and `nonmembers` are such folders too. Raises AuditError for what a user can
        mend, in one sentence.

        A shorter prefix keeps the last tokens of the prefix, a shorter suffix its first: they stay
        side by side.
        """
        check_prefix_and_suffix_lengths(prefix_length, suffix_length)
        split = SplitOptions(known_fraction, limit, seed)
        sizes = (vocab_size, prefix_length, suffix_length)
        named = {"--data": folder, "--nonmembers": nonmembers, "--known": known}
        self._sources = {
            flag: _read_arrays_as_record_source(flag, name, *sizes)
            for flag, name in named.items()
            if name is not None
        }
        parts = split_data_records_into_secrets(self._sources, split, _LABEL)
        parts.give_to(self)
        self.description = (
            f"LM-Extraction arrays of {Path(folder).resolve().name}: {parts.counts_by_role_text()}"
        )

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Every row, those too that --limit leaves out."""
        source = self._sources.get("--data" if members else "--nonmembers")
        records = () if source is None else source.records
        yield from ((record.prefix + record.suffix, None) for record in records)


def extraction_array_row_of_secret_id(secret: str) -> int | None:
    """The row of the arrays that a secret id of this benchmark stands for; None for a
    non-member's."""
    label, _, row = secret.rpartition("-")
    return int(row) if label == _LABEL else None


def folder_has_extraction_arrays(path: Path) -> bool:
    """Whether this is a folder with at least one of the two arrays; whether both are there is
    LMExtraction's to say."""
    return path.is_dir() and bool(
        _array_file_stems_with_ending(path, _PREFIX) | _array_file_stems_with_ending(path, _SUFFIX)
    )


def _array_file_stems_with_ending(folder: Path, ending: str) -> set[str]:
    return {
        path.name.removesuffix(ending) for path in folder.iterdir() if path.name.endswith(ending)
    }


def _read_arrays_as_record_source(
    flag: str, name: str, vocab_size: int, prefix_length: int | None, suffix_length: int | None
) -> RecordSource:
    """Every row of the two arrays. How often an example occurs in training is not in them: repeats
    stay None."""
    folder, where = Path(name), f"{flag} {name!r}"
    stem, others = _complete_array_pair(where, folder)
    # (n, prefix tokens)
    prefix = _read_token_id_array(where, folder / f"{stem}{_PREFIX}", vocab_size)
    # (n, suffix tokens)
    suffix = _read_token_id_array(where, folder / f"{stem}{_SUFFIX}", vocab_size)
    if len(prefix) != len(suffix):
        shapes = f"{prefix.shape} and {suffix.shape}"
        raise AuditError(f"{where}: expected as many suffixes as prefixes, got shapes {shapes}")
    p = _checked_extraction_array_length(where, "--prefix-length", prefix_length, prefix.shape[1])
    s = _checked_extraction_array_length(where, "--suffix-length", suffix_length, suffix.shape[1])
    rows = zip(prefix[:, prefix.shape[1] - p :].tolist(), suffix[:, :s].tolist(), strict=True)
    records = tuple(
        DataRecord(row, tuple(before), tuple(after)) for row, (before, after) in enumerate(rows)
    )
    notes = [
        f"{where}: {stem}, {len(records)} examples, the last {p} of {prefix.shape[1]} prefix "
        f"tokens and the first {s} of {suffix.shape[1]} suffix tokens"
    ]
    if others:
        notes.append(
            f"{where}: not used, since the other half is missing: {', '.join(sorted(others))}"
        )
    return RecordSource(where, records, notes=tuple(notes))


def _complete_array_pair(where: str, folder: Path) -> tuple[str, set[str]]:
    """The stem that has both arrays, and the files that lack their other half. Raises AuditError
    unless it is one."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing of that name"
        raise AuditError(f"{where}: expected a folder with *{_PREFIX} and *{_SUFFIX}, got {got}")
    prefixes, suffixes = (
        _array_file_stems_with_ending(folder, _PREFIX),
        _array_file_stems_with_ending(folder, _SUFFIX),
    )
    both = prefixes & suffixes
    others = {stem + _PREFIX for stem in prefixes - both} | {
        stem + _SUFFIX for stem in suffixes - both
    }
    if not both:
        got = ", ".join(sorted(others)) or "neither"
        raise AuditError(f"{where}: expected a pair *{_PREFIX} and *{_SUFFIX}, got {got}")
    if len(both) > 1:
        got = ", ".join(sorted(both))
        raise AuditError(
            f"{where}: expected one pair *{_PREFIX} and *{_SUFFIX}, got several: {got}"
        )
    return both.pop(), others


def _read_token_id_array(where: str, path: Path, vocab_size: int) -> NDArray[Any]:
    """(examples, tokens) ids in [0, vocab_size). Raises AuditError for anything else."""
    array = read_extraction_array(where, path)
    for row in np.flatnonzero(((array < 0) | (array >= vocab_size)).any(axis=1))[:1]:
        raise AuditError(
            f"{where}: vocabulary mismatch: expected token ids in [0, {vocab_size}), the model's "
            f"vocabulary, got {array.min()} to {array.max()} in {path.name} (first in row {row}, "
            "counted from 0)"
        )
    return array


def read_extraction_array(where: str, path: Path) -> NDArray[Any]:
    """(examples, tokens) whole numbers, as they are. Raises AuditError for anything else; `where`
    opens its words."""
    try:
        with path.open(
            "rb"
        ) as file:  # not np.load: it also opens archives, and leaves a broken one open
            _check_array_not_truncated(where, path, file)
            array = np.lib.format.read_array(file, allow_pickle=False)  # a pickle could run code
    except OSError as error:
        raise AuditError(
            f"{where}: cannot read {path.name}: {error.strerror or type(error).__name__}"
        ) from None
    except (
        ValueError,
        EOFError,
        SyntaxError,
        TokenError,
    ) as error:  # all that a damaged header can raise
        raise AuditError(
            f"{where}: {path.name} is not a .npy array of numbers ({type(error).__name__})"
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


def _check_array_not_truncated(where: str, path: Path, file: BinaryIO) -> None:
    """Raises AuditError where the header promises more than the file holds: memory is taken on its
    word."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    promised, held = math.prod(shape) * dtype.itemsize, path.stat().st_size - file.tell()
    if promised > held and not dtype.hasobject:  # a pickle is refused by its own name
        raise AuditError(
            f"{where}: {path.name} is cut off: its header tells of {promised:,} bytes, it holds "
            f"{held:,}"
        )
    file.seek(0)


def _checked_extraction_array_length(where: str, flag: str, asked: int | None, width: int) -> int:
    if asked is not None and asked > width:
        raise AuditError(
            f"{where}: expected {flag} <= {width}, the width of the array, got {asked}"
        )
    return asked or width
