"""Lowercase: memorised text loses its hold on the model when its case is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from auditor.core.errors import NotApplicable
from auditor.plugins.attack import SamplingAttack, candidate_tokens, cpu_float64_tensor, mean_nll
from auditor.plugins.view import Batch, View


@dataclass(frozen=True)
class Lowercase(SamplingAttack):
    """Rank by perplexity against that of the lower-cased suffix (Carlini et al. 2021); score = -(nll / nll of lower).

    Both nll are means per token, in nats, behind the same prefix; the lower-cased text is tokenised anew, and read as
    far as the model has positions.
    """

    name: ClassVar[str] = "lowercase"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")

    def scores(self, view: View, batch: Batch) -> list[Tensor]:
        if view.tokenizer is None:
            raise NotApplicable("needs a tokenizer to lower-case text, and the model came without one")
        pairs, own = [], []
        for query, candidates in batch:
            room = None if view.target.max_positions is None else view.target.max_positions - len(query.prefix)
            own.append(mean_nll(candidates))
            for suffix in candidate_tokens(candidates):
                lowered = view.tokenizer.decode(suffix).lower()
                tokens = view.tokenizer(lowered, add_special_tokens=False)["input_ids"][:room]
                pairs.append((query.prefix, tuple(tokens) or suffix))
        lower = cpu_float64_tensor(view.mean_nll(view.target, pairs)).split([len(nll) for nll in own])
        return [-(nll / below) for nll, below in zip(own, lower, strict=True)]
