"""Exact: every likely suffix is found, and ranked by its exact probability. Nothing is left to chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from auditor.core.errors import AuditError
from auditor.generation.search import TreeLeaves
from auditor.plugins.attack import SamplingAttack
from auditor.plugins.view import Batch, Search, View


@dataclass(frozen=True)
class Exact(SamplingAttack):
    """Rank every suffix likelier than `threshold` by exact probability; no sampling.

    Ours (formulas A5). The score is log q(suffix) in nats, q the distribution after temperature and truncation
    (Ethicist's: 0.8, top-p 0.7). A sampler at K=100 estimates q by counts and misses a suffix of probability 0.01 in 37
    of 100 cases; the tree reads q off, down to `threshold`, and certifies its first guess as the likeliest suffix there
    is. A sharpened, truncated distribution ranks better than nll: one unlikely token weighs more, as in text that is
    not memorised.
    """

    name: ClassVar[str] = "exact"
    needs: ClassVar[tuple[str, ...]] = ("draw", "distribution")
    deep: ClassVar[bool] = True
    search: Search = "tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search != "tree":
            raise AuditError(f"expected search=tree, which gives exact probabilities, got search={self.search}")
        if self.temperature == 0:
            raise AuditError("expected temperature > 0, got 0: greedy decoding gives every suffix probability 0 or 1")

    def scores(self, view: View, batch: Batch) -> list[Tensor]:
        leaves = [candidates for _, candidates in batch if isinstance(candidates, TreeLeaves)]  # all of them are
        return [candidates.log_q for candidates in leaves]
