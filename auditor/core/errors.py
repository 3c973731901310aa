"""The errors a user can do something about. Anything else that is raised is a bug of ours (exit
code 3)."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AuditError(Exception):
    """Wrong usage or bad input: one sentence that names what was expected and what came (exit code
    2)."""


class NotApplicable(Exception):
    """This attack cannot run at this access. It becomes a row "not applicable: why", never a
    zero."""


class TargetLacks(NotApplicable):
    """The target does not give what the attack needs. Another target of the run may give it."""


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> AuditError:
    """The refusal of an unknown name, with the nearest known one, or all of them where none is
    near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
    return AuditError(f"unknown {kind} {name!r}; {hint}")


# What the system refuses because of a place: full, read-only, not ours, not what its name says.
_OF_A_PLACE = frozenset(
    getattr(errno, name)
    for name in (
        *(
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
        ),
        *(
            "ENOENT",
            "ENOTDIR",
            "EISDIR",
            "EEXIST",
            "ENOTEMPTY",
            "ENAMETOOLONG",
            "ELOOP",
            "EMFILE",
            "ENFILE",
        ),
    )
    if hasattr(errno, name)
)
# as safetensors and tokenizers tell what the system said
_IN_RUST = re.compile(r"\(os error (\d+)\)")


def file_access_error(error: BaseException, ours: str) -> AuditError | None:
    """The refusal of a place by the system as an error the user can do something about; None for
    any other error.

    The system's refusal may stand behind what a library made of it. ours: the folder of our own
    files, which being missing would be a bug.
    """
    for one in error_and_its_causes(error):
        if isinstance(one, OSError):
            code, path = one.errno, one.filename
        elif found := _IN_RUST.search(str(one)):
            code, path = int(found[1]), None
        else:
            continue
        # whose file it was nobody knows without a path: it is taken for ours
        missing = code == errno.ENOENT and (path is None or str(path).startswith(ours))
        if code is not None and code in _OF_A_PLACE and not missing:
            return AuditError(os.strerror(code) if path is None else f"{path}: {os.strerror(code)}")
    return None


# How torch and the systems below it say that memory is used up.
_MEMORY = re.compile(
    r"out of memory|can't allocate memory|bad_alloc|could not (create|allocate) a memory", re.I
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory is used up, of the machine or of an accelerator."""
    if isinstance(error, MemoryError) or is_onednn_memory_error(error):
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error)))


def is_onednn_memory_error(error: BaseException) -> bool:
    """Whether oneDNN, which torch computes with on a CPU, found no memory for a kernel."""
    return isinstance(error, RuntimeError) and str(error).endswith("could not create a primitive")


def out_of_memory_error(error: BaseException) -> AuditError | None:
    """The refusal where memory does not hold even one text at a time; None for any other error."""
    if not any(map(is_out_of_memory, error_and_its_causes(error))):
        return None
    return AuditError(
        "out of memory, even for one text at a time: give it more, or take a smaller model or "
        "precision (--dtype bfloat16, --quantise 8bit, --device-map auto)"
    )


def error_and_its_causes(error: BaseException) -> list[BaseException]:
    """The error and what led to it, nearest first."""
    chain = [error]  # may close to a ring: an error can be raised from one that it led to
    while (
        cause := chain[-1].__cause__ or chain[-1].__context__
    ) is not None and cause not in chain:
        chain.append(cause)
    return chain


@contextmanager
def wrap_library_errors(failed: str) -> Iterator[None]:
    """Turns whatever a library raises in the block into an AuditError: one sentence that begins
    with `failed`."""
    try:
        yield
    except (AuditError, NotApplicable):
        raise
    except (
        Exception
    ) as error:  # files, formats, configurations, devices: libraries raise dozens of kinds
        raise AuditError(f"{failed}: {_first_sentence_of_error(error)}") from error


def _first_sentence_of_error(error: Exception) -> str:
    """The first sentence of what a library says, and what kind of error it is where that does not
    say it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # a first line that ends in a colon only announces the second
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    # behind a digit or a capital, as in "v1. The" and "U. S.", no sentence ends
    said = re.split(r"(?<=[a-z)])\. (?=[A-Z])", said)[0][:300]
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    return said if said and plain else f"{said} ({type(error).__name__})".lstrip()
