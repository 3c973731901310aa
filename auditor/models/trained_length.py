"""Read how many tokens of a row a trainer kept from a model folder, without running its code."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "training_args.bin"  # arguments of transformers' Trainer, and so of TRL's, pickled
_MOST_BYTES = 4 * 2**20  # such a file has some 6 kB
# TRL's packing strategies that train on all of a long row.
_WHOLE = (
    "bfd_split",
    "bfd-requeue",
    "wrapped",
)


@dataclass(frozen=True)
class TrainedLength:
    """The trained tokens of each row: its first tokens, or its last.

    before, after: special tokens that the trainer puts around a text without a chat template, which
    count.
    """

    tokens: int
    from_end: bool = False
    source: str = "--trained-length"
    before: int = 0
    after: int = 0

    @property
    def beyond_phrase(self) -> str:
        """Return the reason for leaving out part of a row."""
        side = "last" if self.from_end else "first"
        return (
            f"beyond the {side} {self.tokens:,} tokens of a row, which were trained on "
            f"({self.source})"
        )

    def span_of(self, n_tokens: int, templated: bool = False) -> tuple[int, int]:
        """Return the range of trained tokens of a row, as (start, end).

        templated: whether a chat template wrote it.
        """
        if self.from_end:
            return max(
                0, n_tokens - max(0, self.tokens - (0 if templated else self.after))
            ), n_tokens
        return 0, min(n_tokens, max(0, self.tokens - (0 if templated else self.before)))


def read_trained_length(folder: Path) -> tuple[TrainedLength | None, str]:
    """Return the `max_length` of a trainer's arguments in a model folder, if any, and a note.

    TRL's `SFTConfig` (1.16) has 1,024 by default; rows are cut at their end, or with
    `truncation_mode="keep_end"` at their start; packing cuts rows at their end (`bfd`) or not at
    all. DPO and other trainers use the same name. The arguments of a trainer without truncation
    have
    no such field.
    """
    path = folder / FILE
    if not path.is_file():
        return None, ""
    try:
        fields = _read_pickled_fields(path)
    except Exception as error:  # a foreign file: the audit continues without it after any error
        reason = f"cannot be read safely ({type(error).__name__})"
        return (
            None,
            f"{FILE} beside the model {reason}: --trained-length N names the trainer's max_length",
        )
    length = fields.get("max_length", fields.get("max_seq_length"))
    packs = fields.get("packing") is True
    if (
        type(length) is not int
        or length < 1
        or (packs and fields.get("packing_strategy", "bfd") in _WHOLE)
    ):
        return None, ""
    from_end = fields.get("truncation_mode") == "keep_end" and not packs
    return TrainedLength(length, from_end, f"max_length of {FILE}"), ""


def read_trainer_arguments(folder: Path) -> dict[str, Any] | None:
    """Return the trainer's arguments in a model folder; None without a readable file."""
    try:
        return _read_pickled_fields(folder / FILE)
    except Exception:  # a foreign file: `read_trained_length` reports its error
        return None


def _read_pickled_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a pickled object in a torch file without importing or calling code."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > _MOST_BYTES:
            raise ValueError("too large")
        with archive.open(name) as file:
            arguments = _InertUnpickler(file).load()
    return dict(vars(arguments))


class _Inert:
    """A stub for any class or function that a pickle names: accepts all arguments, does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept all arguments."""


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> None:
        return None
