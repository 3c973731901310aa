"""Measure leakage per record if secrets are parts of records, such as windows or answers.

Parts of one record are not independent, so an interval over secrets is too narrow. This module
therefore counts records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.nouns import Secret
from auditor.core.result import Measurement

RECALL = "document_recall"
NEAR = "document_near_verbatim_recall"
LONGEST = "longest_block"
# trait of an outcome: the code of each member's record, if members are parts of records
RECORD = "record"


@dataclass(frozen=True)
class DocumentPart:
    """Locate a secret that is a part of a document.

    start: the token position in the document at which the suffix starts.
    length: the number of tokens of the suffix.
    out: True if the suffix was extracted.
    """

    document: str
    start: int
    length: int
    out: bool


def measure_longest_extracted_blocks(parts: Iterable[DocumentPart]) -> dict[str, int]:
    """Return the length in tokens of each document's longest extracted block, keyed by document.

    Suffixes that overlap or touch form one block.
    """
    longest = dict[str, int]()
    blocks = dict[str, tuple[int, int]]()  # start and end of the latest block
    for part in sorted(parts, key=lambda part: part.start):
        longest.setdefault(part.document, 0)
        if part.out:
            start, end = blocks.get(part.document, (part.start, part.start))
            if part.start > end:  # parts that touch form one block
                start = part.start
            end = max(end, part.start + part.length)
            blocks[part.document] = start, end
            longest[part.document] = max(longest[part.document], end - start)
    return longest


def encode_records(secrets: Sequence[Secret]) -> Floats:
    """Return a number that identifies each secret's record, of shape (secrets,)."""
    # A record with a single secret needs a code too: otherwise the shares would cover only long
    # records.
    names = [secret.document or secret.id for secret in secrets]
    codes = np.unique(np.array(names, dtype=object), return_inverse=True)[1]
    return codes.astype(float)


def take_highest_per_record(values: Floats | Bools, record: Floats | Ints) -> Floats:
    """Return the highest value among the secrets of each record, of shape (records,).

    If the values are hits, the result is 1 for a record of which any secret was extracted. values:
    (secrets,). record: (secrets,) the index of each secret's record.
    """
    records, places = np.unique(record, return_inverse=True)
    highest = np.zeros(len(records))
    np.maximum.at(highest, places, values.astype(float))
    return highest


def measure_longest_block(
    secrets: Iterable[Secret], hit: Mapping[str, bool]
) -> tuple[Measurement, ...]:
    """Measure the longest extracted block of any member, in tokens.

    Return () if no member is part of a document. hit: whether each secret was extracted verbatim,
    keyed by its id; missing secrets do not count.
    """
    members = [secret for secret in secrets if secret.member and secret.id in hit]
    if all(secret.document is None for secret in members):
        return ()
    parts = [DocumentPart(s.document or s.id, s.at, len(s.suffix), hit[s.id]) for s in members]
    blocks = measure_longest_extracted_blocks(parts)
    longest = float(max(blocks.values()))
    return (Measurement(LONGEST, longest, longest, longest, len(blocks), "tokens"),)
