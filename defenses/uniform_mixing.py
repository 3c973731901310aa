"""Uniform mixing: every next-token law is mixed with the uniform one (Majmudar et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from auditor.defenses.accounting import realised_pure_dp, uniform_mixing_epsilon
from auditor.errors import AuditError
from auditor.models import Check, LanguageModel, Rows
from auditor.types import Claim, Defense, Scenario


@dataclass(frozen=True)
class UniformMixing(Defense):
    """Mix the target's law with the uniform law: q' = weight q + (1 - weight)/|V| (Majmudar et al. 2022, Eq. 2)."""

    name: ClassVar[str] = "uniform-mixing"
    title: ClassVar[str] = "Uniform mixing"
    claims: ClassVar[str] = "pure epsilon, any two models, per token drawn under ancestral decoding"
    weight: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise AuditError(f"expected weight in [0, 1], got {self.weight}")

    def protect(self, scenario: Scenario) -> LanguageModel:
        claimed = uniform_mixing_epsilon(self.weight, scenario.target.vocab_size)
        return UniformMixingModel(scenario.target, self.weight, claimed, scenario.public)

    def claim(self, scenario: Scenario, spent: int) -> Claim:
        vocab_size = scenario.target.vocab_size
        per_token = uniform_mixing_epsilon(self.weight, vocab_size)
        return Claim(
            epsilon={"any two models": uniform_mixing_epsilon(self.weight, vocab_size, scenario.queries)},
            delta=0.0,
            relation="any two models",
            unit="the whole training set",
            queries=scenario.queries,
            theorem="Majmudar et al. 2022, Theorem 1, composed over the tokens drawn",
            status="sound; neighbouring data sets are never used, which is why it is so large",
            spent_queries=spent,
            spent_epsilon={"any two models": uniform_mixing_epsilon(self.weight, vocab_size, spent)},
            details={
                "epsilon_per_token": per_token,
                "epsilon_per_answer": uniform_mixing_epsilon(self.weight, vocab_size, scenario.answer_length),
                "weight": self.weight,
                "vocab_size": float(vocab_size),
            },
        )


class UniformMixingModel(LanguageModel):
    """A model that holds another. The law is explicit, so log-probabilities and gradients pass through it.

    claimed: epsilon of one token (nats), as the accounting has it; None: nothing is claimed. public: a neighbour.
    """

    def __init__(
        self,
        target: LanguageModel,
        weight: float,
        claimed: float | None = None,
        public: LanguageModel | None = None,
    ) -> None:
        self.target, self.weight, self.claimed, self.public = target, weight, claimed, public
        self.name = f"{target.name} under uniform mixing"
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.eos, self.device = target.eos, target.device

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, law: bool = True) -> Rows:
        return _MixedRows(self.target.start(prefixes, length, prompt=prompt, law=law), self.weight, self.vocab_size)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return mix_with_uniform(self.target.log_probs(contexts, last, prompt=prompt), self.weight, self.vocab_size)

    @torch.no_grad()
    def check_claim(self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0) -> Sequence[Check]:
        """Neighbours: a model that is certain of the least likely token, the worst there is; and the public model.

        Divergences are pure, which bounds every order.
        """
        if self.claimed is None:
            return super().check_claim(contexts, last, at, order)
        law = self.log_probs(contexts, last)[:, at]
        certain = torch.full_like(law, -math.inf).scatter(-1, law.argmin(-1, keepdim=True), 0.0)
        others = [certain] if self.public is None else [certain, self.public.log_probs(contexts, last)[:, at]]
        neighbours = torch.stack([mix_with_uniform(other, self.weight, self.vocab_size) for other in others], dim=-2)
        realised = realised_pure_dp(law.unsqueeze(-2).cpu().numpy(), neighbours.cpu().numpy())
        return [Check("any_two_models", math.inf, self.claimed, torch.from_numpy(realised))]

    def row_bytes(self, positions: int, law: bool = True) -> int:
        return self.target.row_bytes(positions, law) + super().row_bytes(positions, law)

    def embedding_rows(self, count: int) -> Tensor:
        return self.target.embedding_rows(count)


class _MixedRows(Rows):
    def __init__(self, rows: Rows, weight: float, vocab_size: int) -> None:
        self.rows, self.weight, self.vocab_size = rows, weight, vocab_size

    def __len__(self) -> int:
        return len(self.rows)

    def log_probs(self) -> Tensor:
        return mix_with_uniform(self.rows.log_probs(), self.weight, self.vocab_size)

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        return mix_with_uniform(self.rows.token_log_probs(row_of_token, tokens), self.weight, self.vocab_size)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.rows.advance(parents, tokens)


def mix_with_uniform(log_probs: Tensor, weight: float, vocab_size: int) -> Tensor:
    """log(weight q + (1 - weight)/|V|) in nats of each log-probability of q; weight 0 and 1 are exact."""
    if weight == 1:
        return log_probs
    floor = math.log1p(-weight) - math.log(vocab_size)
    if weight == 0:
        return torch.full_like(log_probs, floor)
    return torch.logaddexp(log_probs + math.log(weight), log_probs.new_tensor(floor))
