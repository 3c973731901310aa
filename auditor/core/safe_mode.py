"""A command that reads a record runs nothing of anybody's: no program, no network, no plug-in, no
remote code.

Python itself refuses it (an audit hook, PEP 578), so it holds for what a library would do too.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from auditor.core.errors import AuditError

_PROGRAM = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
_NETWORK = ("connect", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr")
_WHAT = dict.fromkeys(_PROGRAM, "a program would be run")
_WHAT |= {f"socket.{event}": "the network would be asked" for event in _NETWORK}
_OFFLINE = "HF_HUB_OFFLINE"
_depth, _hooked = 0, False  # of the process with all its threads; blocks may stand in each other


class RefusedBySafeMode(AuditError, PermissionError):
    """A PermissionError too: a library that can do without the refused thing catches it and goes
    on."""

    def __str__(self) -> str:
        return str(self.strerror)  # an OSError would put "[Errno 1]" before it


def is_safe_mode() -> bool:
    return _depth > 0


def refuse_in_safe_mode(what: str) -> None:
    """Raises AuditError while the block of `safe_mode` lasts."""
    if is_safe_mode():
        raise RefusedBySafeMode(errno.EPERM, f"--safe: {what}, which --no-safe allows")


@contextmanager
def safe_mode() -> Iterator[None]:
    """While the block lasts, nothing of anybody's is run and nobody is asked."""
    global _depth, _hooked
    if not _hooked:
        sys.addaudithook(_refuse_forbidden_audit_event)  # there is no way to take it out again
        _hooked = True
    before = os.environ.get(_OFFLINE)
    # huggingface_hub reads this once, when it is imported; had it been before, the audit hook
    # refuses the network
    os.environ[_OFFLINE] = "1"  # what the hub keeps here is found without asking it
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        os.environ.pop(_OFFLINE)
        if before is not None:
            os.environ[_OFFLINE] = before


def _refuse_forbidden_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if _depth and (what := _WHAT.get(event)):
        refuse_in_safe_mode(what)
