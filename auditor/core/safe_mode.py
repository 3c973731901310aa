"""Block programs, network, plug-ins and remote code in commands that only read a run's record.

A Python audit hook (PEP 578) blocks these actions even if a library attempts them.
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
# State of the whole process, with all its threads; blocks may be nested.
_depth = 0
_hooked = False


class RefusedBySafeMode(AuditError, PermissionError):
    """Error for an action that safe mode blocks.

    It is also a PermissionError. A library that can work without the action catches that error and
    continues.
    """

    def __str__(self) -> str:
        return str(self.strerror)  # an OSError would put "[Errno 1]" before it


def is_safe_mode() -> bool:
    return _depth > 0


def refuse_safe_mode_action(description: str) -> None:
    """Raise AuditError if called inside a `safe_mode` block. `description` names the action."""
    if is_safe_mode():
        raise RefusedBySafeMode(errno.EPERM, f"--safe: {description}, which --no-safe allows")


@contextmanager
def safe_mode() -> Iterator[None]:
    """Block foreign code and queries to servers during the `with` block.

    A blocked action raises `RefusedBySafeMode`.
    """
    global _depth, _hooked
    if not _hooked:
        sys.addaudithook(_refuse_forbidden_audit_event)  # an audit hook cannot be removed
        _hooked = True
    before = os.environ.get(_OFFLINE)
    # huggingface_hub reads this once at import; if it was imported before, the audit hook refuses
    # the network.
    os.environ[_OFFLINE] = "1"  # the hub's local cache works without the network
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        os.environ.pop(_OFFLINE)
        if before is not None:
            os.environ[_OFFLINE] = before


def _refuse_forbidden_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if _depth and (action := _WHAT.get(event)):
        refuse_safe_mode_action(action)
