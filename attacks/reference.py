"""Reference: what the target finds likely and a model that never saw the data does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.plugins.attack import SamplingAttack, candidate_tokens, cpu_float64_tensor, mean_nll
from auditor.plugins.view import Batch, View

FORMS = ("ratio", "difference", "perplexity-ratio")


@dataclass(frozen=True)
class Reference(SamplingAttack):
    """Rank by perplexity against a reference model's (Carlini et al. 2021; Ethicist's "Comparing (LM)").

    form: `ratio` -(nll / nll_ref), `difference` -(nll - nll_ref), `perplexity-ratio` -(ppl / ppl_ref); nll are means
    per token, in nats.
    """

    name: ClassVar[str] = "reference"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")
    form: Literal["ratio", "difference", "perplexity-ratio"] = "ratio"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in FORMS:
            raise AuditError(f"expected form in {FORMS}, got {self.form!r}")

    def scores(self, view: View, batch: Batch) -> list[Tensor]:
        return reference_scores(view, batch, self.form)


def reference_scores(view: View, batch: Batch, form: str = "ratio") -> list[Tensor]:
    """Higher surer, for each candidate of each query, (distinct,). NotApplicable without a reference model."""
    if view.reference is None:
        raise NotApplicable("needs a reference model: give --reference MODEL")
    pairs = [(query.prefix, suffix) for query, candidates in batch for suffix in candidate_tokens(candidates)]
    sizes = [len(candidates.counts) for _, candidates in batch]
    reference = cpu_float64_tensor(view.mean_nll(view.reference, pairs)).split(sizes)
    own = [mean_nll(candidates) for _, candidates in batch]
    return [reference_score(nll, below, form) for nll, below in zip(own, reference, strict=True)]


def reference_score(nll: Tensor, reference: Tensor, form: str) -> Tensor:
    """The score, higher surer, from two mean nll (nats a token) of the same text."""
    if form == "difference":
        return -(nll - reference)
    if form == "perplexity-ratio":
        return -torch.exp(nll - reference)
    return -(nll / reference)
