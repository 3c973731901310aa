"""Define the errors that users can resolve. Any other exception is a bug (exit code 3)."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class AuditError(Exception):
    """Error for wrong usage or invalid input (exit code 2).

    The message is one sentence that gives the expected and the actual value.
    """


class NotApplicable(Exception):
    """Error if an attack or probe cannot run with this access to the target.

    The report then shows "not applicable" with the reason, never zero.
    """


class TargetLacks(NotApplicable):
    """Error if the target lacks an ability that the attack needs; other targets may have it."""


def refuse_unknown_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise AuditError for the first of `names` that is not in `known`.

    The message suggests the closest known name, or lists all known names if none is close. `kind`
    is the noun that precedes the name in the message.
    """
    known = sorted(set(known))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            if near:
                hint = f"did you mean {near[0]!r}?"
            else:
                hint = f"known: {', '.join(known) or 'none'}"
            raise AuditError(f"unknown {kind} {name!r}; {hint}")


# Errors of a path: full, read-only, not permitted, of the wrong type.
_OF_A_PLACE = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EFBIG",
        "EROFS",
        "EACCES",
        "EPERM",
        "EIO",
        "ENXIO",
        "ENODEV",
        "EPIPE",
        "ESTALE",
        "ENOENT",
        "ENOTDIR",
        "EISDIR",
        "EEXIST",
        "ENOTEMPTY",
        "ENAMETOOLONG",
        "ELOOP",
        "EMFILE",
        "ENFILE",
    )
    if hasattr(errno, name)
)
# The format in which safetensors and tokenizers report system errors.
_IN_RUST = re.compile(r"\(os error (\d+)\)")


def make_file_access_error(error: BaseException, program_folder: str) -> AuditError | None:
    """Return an AuditError if a path could not be accessed, or None for any other error.

    The system error may also be the cause of a library's error. `program_folder` holds this
    program's own files. A file missing there is a bug, so the result is None.
    """
    for cause in list_causes(error):
        if isinstance(cause, OSError):
            code = cause.errno
            path = cause.filename
        elif os_error := _IN_RUST.search(str(cause)):
            code = int(os_error[1])
            path = None
        else:
            continue
        # Without a path, the missing file may belong to this program.
        missing = code == errno.ENOENT and (path is None or str(path).startswith(program_folder))
        if code is not None and code in _OF_A_PLACE and not missing:
            return AuditError(os.strerror(code) if path is None else f"{path}: {os.strerror(code)}")
    return None


# Messages of torch and its libraries for exhausted memory.
_MEMORY = re.compile(
    r"out of memory|can't allocate memory|bad_alloc|could not (create|allocate) a memory", re.I
)


def is_memory_error(error: BaseException) -> bool:
    """Test whether the error says that the machine or an accelerator is out of memory."""
    if isinstance(error, MemoryError) or is_onednn_memory_error(error):
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error)))


def is_onednn_memory_error(error: BaseException) -> bool:
    """Test whether the error says that oneDNN, torch's CPU library, is out of memory."""
    return isinstance(error, RuntimeError) and str(error).endswith("could not create a primitive")


def make_memory_error(error: BaseException) -> AuditError | None:
    """Return an AuditError that says how to save memory, if the error is caused by lack of memory.

    Return None for any other error. The message says that not even a single text fits, because
    smaller batches have been tried before.
    """
    if not any(map(is_memory_error, list_causes(error))):
        return None
    return AuditError(
        "out of memory, even for one text at a time: give it more, or take a smaller model or "
        "precision (--dtype bfloat16, --quantise 8bit, --device-map auto)"
    )


def list_causes(error: BaseException) -> list[BaseException]:
    """Return the error followed by its causes, the nearest cause first."""
    chain = [error]  # may be a cycle: an error can be raised from its own consequence
    while (
        cause := chain[-1].__cause__ or chain[-1].__context__
    ) is not None and cause not in chain:
        chain.append(cause)
    return chain


@contextmanager
def wrap_library_errors(failed: str) -> Iterator[None]:
    """Replace library errors in the block with AuditErrors whose message starts with `failed`."""
    try:
        yield
    except (AuditError, NotApplicable):
        raise
    except Exception as error:  # libraries raise dozens of classes
        raise AuditError(f"{failed}: {_get_first_sentence(error)}") from error


@contextmanager
def refuse_unreadable_path(path: Path) -> Iterator[None]:
    """Replace an OSError in the block with an AuditError that says `path` cannot be read."""
    try:
        yield
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error


def _get_first_sentence(error: Exception) -> str:
    """Return the first sentence of a library's error message.

    Append the error's class, unless the class is a common one such as ValueError.
    """
    lines = []
    for line in str(error).strip().splitlines():
        if line.strip():
            lines.append(line.strip())
    # A first line that ends in a colon only announces the second.
    sentence = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    # After a digit or a capital, as in "v1. The" and "U. S.", no sentence ends.
    sentence = re.split(r"(?<=[a-z)])\. (?=[A-Z])", sentence)[0][:300]
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    if sentence and plain:
        return sentence
    return f"{sentence} ({type(error).__name__})".lstrip()
