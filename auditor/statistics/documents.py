"""Measure leakage by record if secrets are parts of a record, such as windows or answers.

Parts of one record are not independent, so an interval over secrets is too narrow. This module
counts records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auditor.core.nouns import Secret
from auditor.core.result import Measurement
from auditor.statistics.intervals import measure_share

RECALL = "document_recall"
NEAR = "document_near_verbatim_recall"
LONGEST = "longest_block"


@dataclass(frozen=True)
class DocumentPart:
    """A secret that is a part of a document.

    start: the token position in the document at which the suffix starts.
    length: the number of tokens of the suffix.
    out: whether the suffix was extracted.
    """

    document: str
    start: int
    length: int
    out: bool


def measure_longest_extracted_blocks(parts: Iterable[DocumentPart]) -> dict[str, int]:
    """Return the length in tokens of each document's longest extracted block.

    Suffixes that overlap or touch form one block.
    """
    parts_by_document: dict[str, list[DocumentPart]] = {}
    for part in parts:
        parts_by_document.setdefault(part.document, []).append(part)
    return {
        document: _count_longest_covered_tokens([part for part in document_parts if part.out])
        for document, document_parts in parts_by_document.items()
    }


def _count_longest_covered_tokens(out: Sequence[DocumentPart]) -> int:
    longest = start = end = 0
    for part in sorted(out, key=lambda part: part.start):
        if part.start > end:  # at the very end it touches what came before: one block
            start = part.start
        end = max(end, part.start + part.length)
        longest = max(longest, end - start)
    return longest


def measure_document_recall(
    secrets: Iterable[Secret], hit: Mapping[str, bool], near: Mapping[str, bool]
) -> tuple[Measurement, ...]:
    """Return the shares of documents with an extracted part, and members' longest extracted block.

    Args:
        hit, near: by secret id, whether the secret was extracted verbatim, or near-verbatim;
        secrets missing from `hit` do not count.

    Returns:
        The verbatim share of members and of non-members, the longest block in tokens, and the
        near-verbatim shares; () if no member is a part of a document.
    """
    attacked = [secret for secret in secrets if secret.id in hit]
    if all(secret.document is None for secret in attacked if secret.member):
        return ()
    # A record that is one secret is a document as well: without it the share would be of long
    # records only.
    attacked_parts = [(s.member, s.document or s.id, s) for s in attacked]
    members, others = (
        measure_longest_extracted_blocks(
            DocumentPart(document, s.at, len(s.suffix), hit[s.id])
            for member, document, s in attacked_parts
            if member == is_member
        )
        for is_member in (True, False)
    )
    if not members:
        return ()
    measurements = [
        measure_share(RECALL, np.array([block > 0 for block in members.values()])),
    ]
    if others:
        measurements.append(
            measure_share(
                f"{RECALL}_nonmembers",
                np.array([block > 0 for block in others.values()]),
            ),
        )
    longest = float(max(members.values()))
    measurements.append(Measurement(LONGEST, longest, longest, longest, len(members), "tokens"))
    for is_member, suffix in ((True, ""), (False, "_nonmembers")):
        extracted: dict[str, bool] = {}
        for member, document, s in attacked_parts:
            if member == is_member:
                extracted[document] = extracted.get(document, False) or near[s.id]
        if extracted:
            measurements.append(
                measure_share(f"{NEAR}{suffix}", np.array(list(extracted.values()))),
            )
    return tuple(measurements)
