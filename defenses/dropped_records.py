"""Records left out of the training: copies beyond a limit, near-duplicates, those that are listed or come too often."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from datasketch import MinHash, MinHashLSH

from auditor.core.errors import AuditError
from auditor.models.shards import read_shard_record_list, record_digests
from auditor.plugins.options import require_options_at_least
from auditor.plugins.trainer import TrainingJob
from auditor.training.variants import DataVariant


@dataclass(frozen=True)
class CopyCap(DataVariant):
    """Fine-tune on at most `most` copies of each record: what `audit advise` predicts; no claim.

    most: copies of one text that stay. Near-duplicates count as other texts: `dedup` finds those.
    """

    name: ClassVar[str] = "cap"
    title: ClassVar[str] = "Capped copies"
    main: ClassVar[str] = "most"
    most: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options_at_least(self, 1, "most")

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        seen, left = Counter[str](), list[int]()
        for index, text in enumerate(texts):
            seen[text] += 1
            if seen[text] <= self.most:
                left.append(index)
        over = sum(count > self.most for count in seen.values())
        return left, (
            f"of {len(texts):,} records {len(texts) - len(left):,} were dropped, copies beyond the first {self.most:,} "
            f"of {over:,} texts: {len(left):,} are left"
        )

    def count_remaining_copies(self, copies: int) -> int:
        return min(copies, self.most)


_SHINGLE = 5  # characters: as texts without spaces between words have them too
_PERMUTATIONS = 128  # hashes of a MinHash sketch
_FOUND = 0.99  # of pairs at the threshold


@dataclass(frozen=True)
class Dedup(DataVariant):
    """Fine-tune on the data without their exact and near-duplicate copies: the first of each is kept; no claim.

    threshold: the Jaccard similarity of two texts' 5-character shingles from which on the later one is a copy of the
    earlier one (Lee et al. 2022 take 0.8, of 5-token shingles). MinHash finds candidate pairs, one at the threshold
    with probability 0.99, and these are compared exactly: no text below the threshold goes. exact: equal texts only.
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

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        first: dict[str, int] = {}
        for index, text in enumerate(texts):
            first.setdefault(text, index)
        left = list(first) if self.exact else drop_near_duplicate_texts(list(first), self.threshold)
        exact, near = len(texts) - len(first), len(first) - len(left)
        also = "" if self.exact else f" and {near:,} near-duplicates (similarity {self.threshold:g} or more)"
        told = f"of {len(texts):,} records {exact:,} exact copies{also} were dropped: {len(left):,} are left"
        return [first[text] for text in left], told

    def count_remaining_copies(self, copies: int) -> int:
        return min(copies, 1)


def drop_near_duplicate_texts(texts: Sequence[str], threshold: float) -> list[str]:
    """The texts in order, without near-duplicates (Jaccard similarity >= threshold) of a text kept earlier."""
    # Equal texts alone: different ones may have the same set of shingles, "aaaaaa" and "aaaaaaa".
    if threshold == 1:
        return list(dict.fromkeys(texts))
    # MinHash finds candidates alone: every pair is compared exactly below, so that none is dropped by chance.
    index = MinHashLSH(num_perm=_PERMUTATIONS, params=_near_duplicate_lsh_bands_and_rows(threshold))
    left, kept = list[str](), dict[int, frozenset[str]]()
    for number, text in enumerate(texts):
        own = near_duplicate_shingles(text)
        # The library seeds its hashes by a constant: the same texts stay in every run.
        sketch = MinHash(num_perm=_PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in own])
        # Jaccard's similarity
        if any(len(own & kept[other]) / len(own | kept[other]) >= threshold for other in index.query(sketch)):
            continue
        index.insert(number, sketch)
        kept[number] = own
        left.append(text)
    return left


def _near_duplicate_lsh_bands_and_rows(threshold: float) -> tuple[int, int]:
    """(bands, rows of a band), the fewest candidates with which pairs at the threshold are found.

    Two texts of similarity J agree in some band with probability 1 - (1 - J^rows)^bands. (The library's own choice for
    a threshold finds half of the pairs at it, or fewer.)
    """
    for rows in range(_PERMUTATIONS // 2, 1, -1):
        bands = _PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= _FOUND:
            return bands, rows
    return _PERMUTATIONS, 1


def near_duplicate_shingles(text: str) -> frozenset[str]:
    """Its runs of 5 characters; a shorter text is one of its own."""
    return frozenset(text[i : i + _SHINGLE] for i in range(max(1, len(text) - _SHINGLE + 1)))


@dataclass(frozen=True)
class DropRecords(DataVariant):
    """Fine-tune without records seen `times` times or more, or `listed`; no claim.

    times: of a record with so many copies or more none is kept (0: the number does not count). listed: a folder with
    a shard.json that names the records to drop; `audit mitigate --by drop` lists those that the audit extracted.
    Dropping what was extracted says nothing of what was not attacked, and may uncover other records (Carlini et al.
    2022, the privacy onion effect).
    """

    name: ClassVar[str] = "drop"
    title: ClassVar[str] = "Dropped records"
    main: ClassVar[str] = "times"
    times: int = 0
    listed: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.times < 0 or self.times == 1:
            raise AuditError(f"expected times >= 2 (0: none by their number), got {self.times}")

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if not self.times and not self.listed:
            raise AuditError("expected drop to be told which records, by -D times=N or -D listed=DIR, got neither")

    def options(self) -> dict[str, Any]:
        """`listed` as a digest of the names in the list: wherever the folder lies, the model is the same."""
        if not self.listed:
            return super().options()
        names = "".join(sorted(self._listed_record_names()))
        return {**super().options(), "listed": hashlib.sha256(names.encode()).hexdigest()[:16]}

    def _listed_record_names(self) -> frozenset[str]:
        """Raises AuditError where there is no list."""
        if not self.listed:
            return frozenset()
        found = read_shard_record_list(Path(self.listed))
        if not found:
            raise AuditError(f"expected -D listed= as a folder whose shard.json names records, got {self.listed!r}")
        return frozenset(found)

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        # A shard.json names a record by the digest of its text.
        names, copies = self._listed_record_names(), Counter(texts)
        gone = {
            text
            for text, count in copies.items()
            if (self.times and count >= self.times) or (names and names.issuperset(record_digests([text])))
        }
        left = [index for index, text in enumerate(texts) if text not in gone]
        return left, (
            f"of {len(texts):,} records {len(texts) - len(left):,} were dropped, all copies of {len(gone):,} texts: "
            f"{len(left):,} are left"
        )

    def count_remaining_copies(self, copies: int) -> int | None:
        """None where single records are listed: they were chosen by what the audit found of them."""
        return None if self.listed else (0 if copies >= self.times else copies)
