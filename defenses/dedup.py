"""Deduplication before training (Lee et al. 2022, Kandpal et al. 2022): copies of a record are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from datasketch import MinHash, MinHashLSH

from auditor.core.errors import AuditError
from auditor.training.variants import DataVariant

_SHINGLE = 5  # characters: as texts without spaces between words have them too
_PERMUTATIONS = 128
_FOUND = 0.99  # of pairs at the threshold


@dataclass(frozen=True)
class Dedup(DataVariant):
    """Fine-tune on the data without their exact and near-duplicate copies: the first of each is kept; no claim.

    threshold: the Jaccard similarity of two texts' 5-character shingles from which on the later one is a copy of the
    earlier one (Lee et al. 2022 take 0.8, of 5-token shingles). MinHash finds the candidates, a pair at the threshold
    with probability 0.99, which are then compared exactly: none is dropped below it. exact: equal texts only.
    """

    name: ClassVar[str] = "dedup"
    title: ClassVar[str] = "Deduplicated"
    main: ClassVar[str] = "threshold"
    threshold: float = 0.8
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold <= 1:
            raise AuditError(f"expected threshold in (0, 1], got {self.threshold}")

    def kept(self, texts: Sequence[str]) -> tuple[list[int], str]:
        first: dict[str, int] = {}
        for index, text in enumerate(texts):
            first.setdefault(text, index)
        left = list(first) if self.exact else without_near_duplicates(list(first), self.threshold)
        exact, near = len(texts) - len(first), len(first) - len(left)
        also = "" if self.exact else f" and {near:,} near-duplicates (similarity {self.threshold:g} or more)"
        told = f"of {len(texts):,} records {exact:,} exact copies{also} were dropped: {len(left):,} are left"
        return [first[text] for text in left], told

    def left(self, copies: int) -> int:
        return min(copies, 1)


def without_near_duplicates(texts: Sequence[str], threshold: float) -> list[str]:
    """The texts in order, without near-duplicates (Jaccard similarity >= threshold) of a text kept earlier."""
    if threshold == 1:
        return list(dict.fromkeys(texts))
    index = MinHashLSH(num_perm=_PERMUTATIONS, params=_lsh_band_parameters(threshold))
    left, kept = list[str](), dict[int, frozenset[str]]()
    for number, text in enumerate(texts):
        own = shingles(text)
        sketch = MinHash(num_perm=_PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in own])
        if any(jaccard_similarity(own, kept[other]) >= threshold for other in index.query(sketch)):
            continue
        index.insert(number, sketch)
        kept[number] = own
        left.append(text)
    return left


def _lsh_band_parameters(threshold: float) -> tuple[int, int]:
    """(bands, rows of a band), the fewest candidates with which pairs at the threshold are found.

    Two texts of similarity J agree in some band with probability 1 - (1 - J^rows)^bands. (The library's own choice for
    a threshold finds half of the pairs at it, or fewer.)
    """
    for rows in range(_PERMUTATIONS // 2, 1, -1):
        bands = _PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= _FOUND:
            return bands, rows
    return _PERMUTATIONS, 1


def shingles(text: str) -> frozenset[str]:
    """Its runs of 5 characters; a shorter text is one of its own."""
    return frozenset(text[i : i + _SHINGLE] for i in range(max(1, len(text) - _SHINGLE + 1)))


def jaccard_similarity(first: frozenset[str], second: frozenset[str]) -> float:
    """Jaccard's."""
    return len(first & second) / len(first | second)
