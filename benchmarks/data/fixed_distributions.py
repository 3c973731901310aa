"""Provide models with given next-token distributions, for tests without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.models.base import LanguageModel
from auditor.models.ensemble import ModelEnsemble
from auditor.models.rows import Rows


class FixedDistribution(LanguageModel):
    """A language model with given next-token probabilities, for tests.

    distributions: (cases, V) probabilities over V tokens. After a context whose last token is i,
    the model returns row i % cases. An array of shape (V,) applies after every context. Arrays are
    converted to float64 unless a dtype is given.
    """

    capabilities = frozenset({"draw", "distribution"})
    eos = ()
    device = torch.device("cpu")
    max_positions = None
    name = "fixed"

    def __init__(self, distributions: Tensor | Sequence[float]) -> None:
        if not isinstance(distributions, Tensor):
            distributions = torch.tensor(distributions, dtype=torch.float64)
        # The log of 0 is -inf on purpose: such a token is never drawn.
        self.distributions = distributions.view(-1, distributions.shape[-1]).log()
        self.vocab_size = distributions.shape[-1]

    def log_probs_after_tokens(self, tokens: Tensor) -> Tensor:
        return self.distributions[tokens % len(self.distributions)]

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        return _FixedDistributionRows(self, prefixes[:, -1])

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.log_probs_after_tokens(contexts[:, contexts.shape[1] - last :])

    def embedding_rows(self, count: int) -> Tensor:
        return torch.zeros(count, 1)  # reads no soft prompt, whatever its width


@dataclass(eq=False)
class _FixedDistributionRows(Rows):
    model: FixedDistribution
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def log_probs(self) -> Tensor:
        return self.model.log_probs_after_tokens(self.tokens)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.tokens = tokens


def build_fixed_ensemble(
    public: Tensor | Sequence[float], *members: Tensor | Sequence[float]
) -> ModelEnsemble:
    return ModelEnsemble(FixedDistribution(public), list(map(FixedDistribution, members)))
