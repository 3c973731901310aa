"""Records that several secrets are parts of, as windows of a text or answers of a conversation: what came out of each.

Parts of one record are not independent, so that an interval of single secrets is too narrow: records are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from auditor.core.nouns import Secret
from auditor.core.result import Measurement
from auditor.statistics.intervals import share

RECALL, LONGEST = "document_recall", "longest_block"


def longest_block(parts: Sequence[tuple[int, int]]) -> int:
    """Tokens of the longest unbroken block of these (start, length), which may overlap or touch; 0 of none."""
    longest = start = end = 0
    for at, length in sorted(parts):
        if at > end or not longest:
            start = at
        end = max(end, at + length)
        longest = max(longest, end - start)
    return longest


def blocks(secrets: Sequence[Secret], hit: Mapping[str, bool]) -> dict[str, int]:
    """By document, the tokens of the longest block that came out; of those secrets that were asked for."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for secret in secrets:
        if secret.document is not None and secret.id in hit:
            out = parts.setdefault(secret.document, [])
            if hit[secret.id]:
                out.append((secret.at, len(secret.suffix)))
    return {document: longest_block(out) for document, out in parts.items()}


def measured(secrets: Sequence[Secret], hit: Mapping[str, bool]) -> tuple[Measurement, ...]:
    """The share of documents of which something came out, with its floor, and the longest block of a member; or ()."""
    members = blocks([secret for secret in secrets if secret.member], hit)
    others = blocks([secret for secret in secrets if not secret.member], hit)
    if not members:
        return ()
    found = [share(RECALL, np.array([block > 0 for block in members.values()]))]
    if others:
        found.append(share(f"{RECALL}_nonmembers", np.array([block > 0 for block in others.values()])))
    longest = max(members.values())
    return (*found, Measurement(LONGEST, float(longest), n=len(members)))
