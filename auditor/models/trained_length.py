"""Read a trainer's maximum row length from a model folder without running the folder's code."""

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
    """Number of tokens that a trainer uses of each data row: only its first or last `tokens`.

    Attributes:
        tokens: the largest number of tokens, including those that the trainer adds.
        from_end: whether the last tokens are used.
        source: the setting, for messages.
        tokens_before: number of special tokens that the trainer adds before a text without a chat
            template.
        tokens_after: number of special tokens that the trainer adds after such a text.
    """

    tokens: int
    from_end: bool = False
    source: str = "--trained-length"
    tokens_before: int = 0
    tokens_after: int = 0

    @property
    def beyond_phrase(self) -> str:
        """Phrase for messages that says why part of a row is left out."""
        side = "last" if self.from_end else "first"
        return (
            f"beyond the {side} {self.tokens:,} tokens of a row, which were trained on "
            f"({self.source})"
        )

    def span_of(self, n_tokens: int, templated: bool = False) -> tuple[int, int]:
        """Return the start and end of the trained tokens in a row of `n_tokens` tokens.

        `templated` says whether a chat template formatted the row.
        """
        if self.from_end:
            return max(
                0, n_tokens - max(0, self.tokens - (0 if templated else self.tokens_after))
            ), n_tokens
        return 0, min(n_tokens, max(0, self.tokens - (0 if templated else self.tokens_before)))


def read_trained_length(folder: Path) -> tuple[TrainedLength | None, str]:
    """Read from a trainer's saved arguments how many tokens of each row were used.

    The argument is `max_length`. Its default in TRL's `SFTConfig` (1.16) is 1,024; other trainers,
    such as DPO, have the same argument. Longer rows lose their end, or their start with
    `truncation_mode="keep_end"`. If rows are packed, only the packing strategy `bfd` cuts rows.

    Returns:
        The length, or None if the folder has no such arguments or no rows were cut.
        A note if the file cannot be read, otherwise "".
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
            f"{FILE} next to the model {reason}: --trained-length N gives the trainer's max_length",
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
    """Return the trainer's arguments in a model folder, or None if the file cannot be read."""
    try:
        return _read_pickled_fields(folder / FILE)
    except Exception:  # a foreign file: `read_trained_length` reports its error
        return None


def _read_pickled_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a pickled object in a torch file, without importing or calling code."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > _MOST_BYTES:
            raise ValueError("too large")
        with archive.open(name) as file:
            arguments = _InertUnpickler(file).load()
    return dict(vars(arguments))


class _Inert:
    """A stand-in for any class or function in a pickle; it accepts all arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept all arguments."""


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> None:
        return None
