"""How much of a conversation an attacker knows who wants the rest: words for it. Knows no conversations."""

from __future__ import annotations

import math

from auditor.core.errors import AuditError

SYSTEM, USER, PARTIAL = "system", "user", "partial"
TURNS, ALL = ("assistant", USER, SYSTEM, "tool"), "all"  # whose turns may be attacked


def known_answer_share(knows: str) -> float:
    """The share of an answer that stands before what is attacked: 0 for `system` and `user`, F for `partial:F`.

    Raises AuditError for anything else.
    """
    kind, _, share = knows.partition(":")
    if knows in (SYSTEM, USER):
        return 0.0
    try:
        found = float(share) if kind == PARTIAL else math.nan
    except ValueError:
        found = math.nan
    if not 0 < found < 1:
        raise AuditError(f"expected --knows {SYSTEM}, {USER} or {PARTIAL}:F with 0 < F < 1, got {knows!r}")
    return found
