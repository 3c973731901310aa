"""A limit on copies: no record is trained on more than so many times (copies drive leakage: Kandpal et al. 2022)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from auditor.core.errors import AuditError
from auditor.training.variants import DataVariant


@dataclass(frozen=True)
class Cap(DataVariant):
    """Fine-tune on at most `most` copies of each record: what `audit advise` predicts; no claim.

    most: copies of one text that stay. Near-duplicates count as other texts: `dedup` finds those.
    """

    name: ClassVar[str] = "cap"
    title: ClassVar[str] = "Capped copies"
    main: ClassVar[str] = "most"
    most: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most < 1:
            raise AuditError(f"expected most >= 1, got {self.most}")

    def kept(self, texts: Sequence[str]) -> tuple[list[int], str]:
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

    def left(self, copies: int) -> int:
        return min(copies, self.most)
