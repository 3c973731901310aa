"""K samples a prefix, by count splitting; and the log-probabilities of given suffixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.models.base import LanguageModel
from auditor.models.decoding import Decoding


@dataclass(frozen=True)
class Candidates:
    """The distinct samples of one secret.

    suffixes: (distinct, length); counts: (distinct,), which sum to the samples; token_log_probs: (distinct, length)
    nats under the attacked law at temperature 1 and without truncation, None where the access gives no law.
    """

    suffixes: Tensor
    counts: Tensor
    token_log_probs: Tensor | None
    near_boundary: int = 0

    @property
    def nll(self) -> Tensor:
        """Summed over the suffix, (distinct,) nats, >= 0."""
        if self.token_log_probs is None:
            raise ValueError("these candidates were drawn without access to the law")
        return -self.token_log_probs.double().sum(-1)

    def forward_rows(self) -> int:
        """Rows that were run through the model: one a distinct partial sample, the bare prefix included."""
        length = self.suffixes.shape[1]
        ordered = np.unique(self.suffixes.numpy(), axis=0)
        same = (ordered[1:] == ordered[:-1]).cumprod(axis=1).sum(axis=1)  # tokens shared with the one before
        return length + int((length - 1 - same).sum())

    def cut(self, keep: Tensor) -> Self:
        """The candidates at these indices, in this order."""
        scores = None if self.token_log_probs is None else self.token_log_probs[keep]
        return replace(self, suffixes=self.suffixes[keep], counts=self.counts[keep], token_log_probs=scores)


@torch.no_grad()
def sample(
    model: LanguageModel,
    prefixes: Tensor,
    length: int,
    decoding: Decoding,
    uniforms: NDArray[np.float64],
    *,
    prompt: Tensor | None = None,
    law: bool = True,
) -> list[Candidates]:
    """K samples of each prefix by count splitting: one row a distinct partial sequence, one forward a row and token.

    Each sample reads its own uniform at each position, so the result equals, draw for draw, that of K separate rows.
    prefixes: (secrets, n_prefix); uniforms: (secrets, K, length, CHANNELS); prompt: (P, d) soft prompt or None.
    law: whether the caller may see log-probabilities; without it only tokens come back.
    """
    n_secrets, n_samples = uniforms.shape[:2]
    noise = torch.from_numpy(uniforms).to(model.device).flatten(0, 1)  # (draws, length, CHANNELS)
    rows = model.start(prefixes, length, prompt=prompt, law=law)
    row_of_draw = torch.arange(n_secrets, device=model.device).repeat_interleave(n_samples)
    tokens, scores, near = [], [], torch.zeros(n_secrets * n_samples, dtype=torch.long, device=model.device)
    for position in range(length):
        drawn, close = rows.draw(row_of_draw, noise[:, position], decoding)
        near += close
        tokens.append(drawn)
        if law:
            scores.append(rows.token_log_probs(row_of_draw, drawn))
        children, row_of_draw = torch.unique(row_of_draw * model.vocab_size + drawn, return_inverse=True)
        if position + 1 < length:
            rows.advance(children // model.vocab_size, children % model.vocab_size)
    return _distinct(row_of_draw, torch.stack(tokens, -1), torch.stack(scores, -1) if law else None, near, n_samples)


def _distinct(leaf: Tensor, tokens: Tensor, scores: Tensor | None, near: Tensor, n_samples: int) -> list[Candidates]:
    """Samples that share a leaf are one candidate; candidates come in the order of their first sample."""
    result = []
    for start in range(0, len(leaf), n_samples):
        mine = slice(start, start + n_samples)
        _, first, counts = np.unique(leaf[mine].cpu().numpy(), return_index=True, return_counts=True)
        order = np.argsort(first)
        at = torch.from_numpy(first[order] + start).to(leaf.device)
        result.append(
            Candidates(
                suffixes=tokens[at].cpu(),
                counts=torch.from_numpy(counts[order]),
                token_log_probs=None if scores is None else scores[at].cpu(),
                near_boundary=int(near[mine].sum()),
            )
        )
    return result


@torch.no_grad()
def suffix_log_probs(
    model: LanguageModel, prefixes: Tensor, owner: Sequence[int], suffixes: Sequence[Sequence[int]]
) -> list[float]:
    """The log-probability, in nats, of each suffix behind the prefix that `owner` names, at temperature 1.

    prefixes: (B, n). Each prefix is read once, and so is what suffixes of one prefix begin with: a forward row for each
    distinct partial suffix, as in `sample`. Suffixes may differ in length.
    """
    lengths = torch.tensor([len(suffix) for suffix in suffixes], device=model.device)
    longest = int(lengths.max())
    padded = [[*suffix, *[0] * (longest - len(suffix))] for suffix in suffixes]
    tokens, row = torch.tensor(padded, device=model.device), torch.tensor(owner, device=model.device)
    total = torch.zeros(len(suffixes), dtype=torch.float64, device=model.device)
    rows = model.start(prefixes, longest)
    for position in range(longest):
        live = (lengths > position).nonzero().squeeze(-1)
        total[live] += rows.token_log_probs(row[live], tokens[live, position]).double()
        live = (lengths > position + 1).nonzero().squeeze(-1)
        if len(live):
            children, row[live] = torch.unique(
                row[live] * model.vocab_size + tokens[live, position], return_inverse=True
            )
            rows.advance(children // model.vocab_size, children % model.vocab_size)
    return total.tolist()


def joined(parts: Sequence[Candidates]) -> Candidates:
    """The candidates of one secret whose samples were drawn in several passes, in the order of their first sample."""
    suffixes, counts = torch.cat([part.suffixes for part in parts]), torch.cat([part.counts for part in parts])
    _, first, where = np.unique(suffixes.numpy(), axis=0, return_index=True, return_inverse=True)
    total = torch.zeros(len(first), dtype=counts.dtype).index_add_(0, torch.from_numpy(where.reshape(-1)), counts)
    order = torch.from_numpy(np.argsort(first))
    scores = [part.token_log_probs for part in parts if part.token_log_probs is not None]
    whole = Candidates(suffixes, counts, torch.cat(scores) if scores else None, sum(p.near_boundary for p in parts))
    return replace(whole.cut(torch.from_numpy(first)[order]), counts=total[order])
