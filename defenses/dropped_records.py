"""Drop records before training.

The records to drop are surplus copies, near-duplicates, listed records or frequent records.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError
from auditor.models.shards import read_shard_record_list, record_digests
from auditor.plugins.options import Count, ShareOrAll
from auditor.plugins.trainer import TrainingJob
from auditor.training.variants import DataVariant


@dataclass(frozen=True)
class CopyCap(DataVariant):
    """Fine-tune on a limited number of copies of each record. No claim.

    `audit advise` predicts the effect of this limit. This training makes no privacy claim. Only
    exact copies count; for near-duplicates use `dedup`.

    most: the number of copies of a text to keep.
    """

    name = "cap"
    title = "Capped copies"
    main = "most"
    most: Count = 1

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        n_copies = Counter[str]()
        indices = list[int]()
        for index, text in enumerate(texts):
            n_copies[text] += 1
            if n_copies[text] <= self.most:
                indices.append(index)
        n_capped = sum(count > self.most for count in n_copies.values())
        return indices, (
            f"of {len(texts):,} records {len(texts) - len(indices):,} were dropped, copies beyond "
            f"the first {self.most:,} of {n_capped:,} texts: {len(indices):,} are left"
        )

    def count_remaining_copies(self, copies: int) -> int:
        return min(copies, self.most)


_SHINGLE = 5  # characters, because some scripts have no spaces between words
_PERMUTATIONS = 128  # hashes of a MinHash sketch
_MIN_RECALL = 0.99  # of pairs at the threshold


@dataclass(frozen=True)
class Dedup(DataVariant):
    """Fine-tune without exact copies and near-duplicates. No claim.

    The first text of each group is kept. This training makes no privacy claim.

    threshold: the smallest Jaccard similarity of 5-character shingles at which a text counts as a
    copy of an earlier text (Lee et al. 2022 use 0.8, with 5-token shingles). MinHash finds
    candidate pairs, which are then compared exactly. A pair at the threshold is found with
    probability 0.99, and no text below the threshold is dropped.
    exact: drop only identical texts.
    """

    name = "dedup"
    title = "Deduplicated"
    main = "threshold"
    threshold: ShareOrAll = 0.8
    exact: bool = False

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        first_indices: dict[str, int] = {}
        for index, text in enumerate(texts):
            first_indices.setdefault(text, index)
        remaining = list(first_indices)
        dropped = f"{len(texts) - len(remaining):,} exact copies"
        if not self.exact:
            remaining = drop_near_duplicate_texts(remaining, self.threshold)
            n_near = len(first_indices) - len(remaining)
            dropped += f" and {n_near:,} near-duplicates (similarity {self.threshold:g} or more)"
        note = f"of {len(texts):,} records {dropped} were dropped: {len(remaining):,} are left"
        return [first_indices[text] for text in remaining], note

    def count_remaining_copies(self, copies: int) -> int:
        return min(copies, 1)


def drop_near_duplicate_texts(texts: Sequence[str], threshold: float) -> list[str]:
    """Return the texts in order, omitting near-duplicates of texts that were kept before.

    A near-duplicate has a Jaccard similarity of at least `threshold`.
    """
    from datasketch import MinHash, MinHashLSH  # imports scipy.stats

    # Drop only equal texts: different texts may have the same shingles, "aaaaaa" and "aaaaaaa".
    if threshold == 1:
        return list(dict.fromkeys(texts))
    # MinHash finds only candidates: every pair is compared exactly, so that no text is dropped by
    # chance.
    index = MinHashLSH(num_perm=_PERMUTATIONS, params=_choose_lsh_bands(threshold))
    remaining = list[str]()
    shingles_by_number = dict[int, frozenset[str]]()
    for number, text in enumerate(texts):
        shingles = split_into_shingles(text)
        # The library seeds its hashes with a constant: all runs keep the same texts.
        sketch = MinHash(num_perm=_PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in shingles])
        candidates = []
        for candidate in index.query(sketch):
            candidates.append(shingles_by_number[candidate])
        # Jaccard similarity
        if any(len(shingles & other) / len(shingles | other) >= threshold for other in candidates):
            continue
        index.insert(number, sketch)
        shingles_by_number[number] = shingles
        remaining.append(text)
    return remaining


def _choose_lsh_bands(threshold: float) -> tuple[int, int]:
    """Return (number of bands, rows per band) with which MinHash finds pairs at the threshold.

    Two texts of similarity J agree in some band with probability 1 - (1 - J^rows)^bands. At the
    threshold, this must be at least 0.99. Of all such choices, the returned one has the fewest
    candidate pairs. The library's default would find at most half of the pairs.
    """
    for rows in range(_PERMUTATIONS // 2, 1, -1):
        bands = _PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= _MIN_RECALL:
            return bands, rows
    return _PERMUTATIONS, 1


def split_into_shingles(text: str) -> frozenset[str]:
    """Return all 5-character sequences in the text; a shorter text is a single shingle."""
    return frozenset(text[i : i + _SHINGLE] for i in range(max(1, len(text) - _SHINGLE + 1)))


@dataclass(frozen=True)
class DropRecords(DataVariant):
    """Fine-tune without listed records, or without frequent records. No claim.

    This training makes no privacy claim. It does not protect records that were not attacked, and
    may even expose further records (Carlini et al. 2022, the privacy onion effect).

    times: drop all copies of a record that has this many copies or more (0: ignore the number).
    listed: a folder with a shard.json that names the records to drop; `audit mitigate --by drop`
    makes one with the records that the audit extracted.
    """

    name = "drop"
    title = "Dropped records"
    main = "times"
    times: int = 0
    listed: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.times < 0 or self.times == 1:
            raise AuditError(f"expected times >= 2 (0: none by their number), got {self.times}")

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if not self.times and not self.listed:
            raise AuditError(
                "expected -D times=N or -D listed=DIR with drop, to choose records, got neither",
            )

    def options(self) -> dict[str, Any]:
        """Return the options, but with a digest of the listed names instead of the folder `listed`.

        The folder's path does not affect the model.
        """
        if not self.listed:
            return super().options()
        names = "".join(sorted(self._read_listed_names()))
        return {**super().options(), "listed": hashlib.sha256(names.encode()).hexdigest()[:16]}

    def _read_listed_names(self) -> frozenset[str]:
        """Return the listed names; raise AuditError if the folder `listed` has no list."""
        if not self.listed:
            return frozenset()
        names = read_shard_record_list(Path(self.listed))
        if not names:
            raise AuditError(
                "expected -D listed= as a folder whose shard.json names records, got "
                f"{self.listed!r}",
            )
        return frozenset(names)

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        listed_names = self._read_listed_names()
        dropped_texts = set[str]()
        for text, n_copies in Counter(texts).items():
            is_frequent = self.times and n_copies >= self.times
            # A shard.json names a record by the digest of its text.
            if is_frequent or (listed_names and listed_names.issuperset(record_digests([text]))):
                dropped_texts.add(text)
        indices = []
        for index, text in enumerate(texts):
            if text not in dropped_texts:
                indices.append(index)
        return indices, (
            f"of {len(texts):,} records {len(texts) - len(indices):,} were dropped, all copies of "
            f"{len(dropped_texts):,} texts: {len(indices):,} are left"
        )

    def count_remaining_copies(self, copies: int) -> int | None:
        """Return how many of a record's `copies` remain after records are dropped.

        Return None if records are listed by name, because the number then depends on the record.
        """
        if self.listed:
            return None
        return 0 if copies >= self.times else copies
