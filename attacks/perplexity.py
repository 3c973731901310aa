"""Perplexity: the candidate the model finds least surprising."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from auditor.plugins.attack import SamplingAttack, mean_nll
from auditor.plugins.view import Batch, View


@dataclass(frozen=True)
class Perplexity(SamplingAttack):
    """Rank sampled suffixes by the target's perplexity (Carlini et al. 2021); score = -mean nll, nats a token."""

    name: ClassVar[str] = "perplexity"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")
    quick: ClassVar[Mapping[str, Any]] = {"samples": 1, "temperature": 0}  # greedy decoding: one candidate to rank

    def scores(self, view: View, batch: Batch) -> list[Tensor]:
        return [-mean_nll(candidates) for _, candidates in batch]
