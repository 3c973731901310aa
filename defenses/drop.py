"""Records left out of the training altogether: those with many copies, or those that an audit extracted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from auditor.core.errors import AuditError
from auditor.models.shards import read_shard_record_list, text_digests
from auditor.plugins.trainer import TrainingJob
from auditor.training.variants import DataVariant


@dataclass(frozen=True)
class Drop(DataVariant):
    """Fine-tune without records seen `times` times or more, or `listed`; no claim.

    times: records with so many copies or more are dropped, all of them (0: by their number none). listed: a folder with
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
        """The list counts by what it names, wherever it lies."""
        listed = (
            hashlib.sha256("".join(sorted(self._listed_record_names())).encode()).hexdigest()[:16]
            if self.listed
            else ""
        )
        return {**super().options(), "listed": listed}

    def _listed_record_names(self) -> frozenset[str]:
        """Raises AuditError where there is no list."""
        if not self.listed:
            return frozenset()
        found = read_shard_record_list(Path(self.listed))
        if not found:
            raise AuditError(f"expected -D listed= as a folder whose shard.json names records, got {self.listed!r}")
        return frozenset(found)

    def kept(self, texts: Sequence[str]) -> tuple[list[int], str]:
        names, copies = self._listed_record_names(), Counter(texts)
        gone = {
            text
            for text, count in copies.items()
            if (self.times and count >= self.times) or (names and names.issuperset(text_digests([text])))
        }
        left = [index for index, text in enumerate(texts) if text not in gone]
        return left, (
            f"of {len(texts):,} records {len(texts) - len(left):,} were dropped, all copies of {len(gone):,} texts: "
            f"{len(left):,} are left"
        )

    def left(self, copies: int) -> int | None:
        """None where single records are listed: they were chosen by what the audit found of them."""
        return None if self.listed else (0 if copies >= self.times else copies)
