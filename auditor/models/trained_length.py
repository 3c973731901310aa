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
AXOLOTL = "axolotl"
# By the package of a trainer's arguments: its setting that decides whether rows beyond `max_length`
# are left out of the training, as by default, or cut. The file does not hold this setting.
_LEAVES_OUT = {AXOLOTL: "excess_length_strategy", "swift": "truncation_strategy"}


@dataclass(frozen=True)
class TrainedLength:
    """Number of tokens that a trainer uses of each data row: only its first or last `tokens`.

    Attributes:
        tokens: the largest number of tokens, including those that the trainer adds.
        from_end: whether the last tokens are used; otherwise the first.
        source: name of the setting that gives the length, for messages.
        tokens_before: number of special tokens that the trainer adds before a text without a chat
            template.
        tokens_after: number of special tokens that the trainer adds after such a text.
        left_out_by: name of the trainer if it trains on no token of a longer row; "" if longer rows
            are cut.
    """

    tokens: int
    from_end: bool = False
    source: str = "--trained-length"
    tokens_before: int = 0
    tokens_after: int = 0
    left_out_by: str = ""

    @property
    def rule(self) -> str:
        """Sentence that says which tokens count as trained on."""
        if self.left_out_by:
            return (
                f"{self.left_out_by} trains on no row of more than {self.tokens:,} tokens "
                f"({self.source}), unless {_LEAVES_OUT[self.left_out_by]} is set: such rows are "
                f"left out; --trained-length {self.tokens} keeps their first tokens, "
                "--trained-length none all"
            )
        side = "last" if self.from_end else "first"
        return (
            f"of each row the {side} {self.tokens:,} tokens were trained on ({self.source}): "
            "the tokens beyond are left out; --trained-length none includes them"
        )

    @property
    def beyond_phrase(self) -> str:
        """Phrase for messages that says why part of a row is left out."""
        if self.left_out_by:
            return (
                f"longer than the {self.tokens:,} tokens of a row that {self.left_out_by} trains "
                f"on ({self.source})"
            )
        side = "last" if self.from_end else "first"
        return (
            f"beyond the {side} {self.tokens:,} tokens of a row, which were trained on "
            f"({self.source})"
        )

    def span_of(self, n_tokens: int, templated: bool = False) -> tuple[int, int]:
        """Return the start and end of the trained tokens in a row of `n_tokens` tokens.

        The end is exclusive. Both are 0 if the trainer leaves the row out. `templated` says whether
        a chat template formatted the row; the trainer then adds no special tokens.
        """
        if self.left_out_by:
            n_added = self.tokens_before + self.tokens_after
            if templated:
                n_added = 0
            if n_tokens + n_added > self.tokens:
                return 0, 0
            return 0, n_tokens
        n_added = self.tokens_after if self.from_end else self.tokens_before
        if templated:
            n_added = 0
        n_trained = min(n_tokens, max(0, self.tokens - n_added))
        if self.from_end:
            return n_tokens - n_trained, n_tokens
        return 0, n_trained


def read_trained_length(folder: Path) -> tuple[TrainedLength | None, str]:
    """Read from a trainer's saved arguments how many tokens of each row were used.

    The argument is `max_length`. Its default in TRL's `SFTConfig` (1.16) is 1,024; other trainers,
    such as DPO, have the same argument. Longer rows lose their end, or their start with
    `truncation_mode="keep_end"`. If rows are packed, only the packing strategy `bfd` cuts rows. By
    default, axolotl and ms-swift leave longer rows out.

    Returns:
        The length, or None if the folder has no such arguments or no rows were cut.
        A note if the file cannot be read, otherwise "".
    """
    path = folder / FILE
    if not path.is_file():
        return None, ""
    try:
        arguments = _read_pickled_object(path)
        fields = vars(arguments)
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
    source = f"max_length of {FILE}"
    package = type(arguments).__module__.split(".")[0]
    if package in _LEAVES_OUT:
        return TrainedLength(length, source=source, left_out_by=package), ""
    from_end = fields.get("truncation_mode") == "keep_end" and not packs
    return TrainedLength(length, from_end, source), ""


def read_trainer_arguments(folder: Path) -> dict[str, Any] | None:
    """Return the trainer's arguments in a model folder, or None if the file cannot be read."""
    try:
        return dict(vars(_read_pickled_object(folder / FILE)))
    except Exception:  # a foreign file: `read_trained_length` reports its error
        return None


def _read_pickled_object(path: Path) -> Any:
    """Return the pickled object of a torch file, without importing or calling its code.

    Its class has the name and module that the file gives.
    """
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > _MOST_BYTES:
            raise ValueError("too large")
        with archive.open(name) as file:
            return _InertUnpickler(file).load()


class _Inert:
    """A stand-in for any class or function in a pickle; it accepts all arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept all arguments."""


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> None:
        return None
