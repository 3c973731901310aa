"""What a trainer's `training_args.bin`, which lies next to the model that it saved, says of the loss."""

from __future__ import annotations

import pickletools
import zipfile
from itertools import pairwise
from pathlib import Path

FILE = "training_args.bin"
_NAMES = ("completion_only_loss", "assistant_only_loss")
_VALUES = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_NO_VALUE = ("MEMOIZE", "BINPUT", "LONG_BINPUT")  # between a name and its value: where a pickle notes what it has read


def read_training_arguments(folder: Path) -> dict[str, bool | None] | None:
    """Return the arguments that say where TRL took a loss; None without a file that says so.

    The file is a pickle, which runs whatever it says when it is loaded: its opcodes are read, and nothing is loaded.
    """
    try:
        with zipfile.ZipFile(folder / FILE) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            opcodes = [(code.name, value) for code, value, _ in pickletools.genops(archive.read(name))]
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError):
        return None
    written = [(code, value) for code, value in opcodes if code not in _NO_VALUE]
    found = {value: _VALUES[code] for (_, value), (code, _) in pairwise(written) if value in _NAMES and code in _VALUES}
    return found or None
