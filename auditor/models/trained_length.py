"""How many tokens of a row a trainer kept: what a model folder says of that, read without running
anything in it."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "training_args.bin"  # of transformers' Trainer, and so of TRL's: its arguments, pickled
_MOST_BYTES = 4 * 2**20  # such a file takes some 6 kB
# TRL's ways to pack that train on all of a long row
_WHOLE = (
    "bfd_split",
    "bfd-requeue",
    "wrapped",
)


@dataclass(frozen=True)
class TrainedLength:
    """The tokens of each row that were trained on: its first ones, or its last.

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
        """Return why a part of a row is left out."""
        which = "last" if self.from_end else "first"
        return (
            f"beyond the {which} {self.tokens:,} tokens of a row, which were trained on "
            f"({self.source})"
        )

    def span_of(self, n_tokens: int, templated: bool = False) -> tuple[int, int]:
        """Return which tokens of a row were trained on, as (start, end). templated: as a chat
        template writes it."""
        if self.from_end:
            return max(
                0, n_tokens - max(0, self.tokens - (0 if templated else self.after))
            ), n_tokens
        return 0, min(n_tokens, max(0, self.tokens - (0 if templated else self.before)))


def read_trained_length(folder: Path) -> tuple[TrainedLength | None, str]:
    """Return the `max_length` of a trainer's arguments in a model folder, if it has one; and what a
    reader must know.

    TRL's `SFTConfig` (1.16) has 1,024 by default; rows are cut at their end, or with
    `truncation_mode="keep_end"` at their start; packing cuts rows at their end (`bfd`) or not at
    all. DPO and other trainers name it alike. The arguments of a trainer that cuts nothing itself
    have no such field.
    """
    path = folder / FILE
    if not path.is_file():
        return None, ""
    try:
        fields = _read_pickled_fields(path)
    except (
        Exception
    ) as error:  # a foreign file: whatever is wrong with it, the audit goes on without it
        why = f"cannot be read safely ({type(error).__name__})"
        return (
            None,
            f"{FILE} beside the model {why}: --trained-length N names the trainer's max_length",
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
    """Return the arguments of the trainer that saved a model folder; None without a file of them
    that can be read."""
    try:
        return _read_pickled_fields(folder / FILE)
    except Exception:  # a foreign file: `read_trained_length` says what is wrong with it
        return None


def _read_pickled_fields(path: Path) -> dict[str, Any]:
    """Return the fields of the pickled object of a file of torch's, without importing or calling
    anything it names."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > _MOST_BYTES:
            raise ValueError("too large")
        with archive.open(name) as file:
            arguments = _InertUnpickler(file).load()
    return dict(vars(arguments))


class _Inert:
    """Stands for any class or function that a pickle names: it takes whatever it is given, and does
    nothing."""

    def __new__(cls, *given: Any, **named: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take anything."""


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> None:
        return None
