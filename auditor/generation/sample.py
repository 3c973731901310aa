"""K samples a prefix as candidates: the distinct ones with their counts. Knows not how a model comes by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import CHANNELS
from auditor.models.base import Completions, LanguageModel, Rows, draw_model_completions_from_rows
from auditor.models.decoding import Decoding, index_batches_of_equal_shape

_RARE = 64  # rows; fewer of one shape would be slower alone than beside others


@dataclass(frozen=True)
class SuffixCandidates:
    """The distinct samples of one secret.

    suffixes: (distinct, length); counts: (distinct,), which sum to the samples; token_log_probs: (distinct, length)
    nats under the attacked distribution at temperature 1 and without truncation, None where the access gives no
    distribution.
    """

    suffixes: Tensor
    counts: Tensor
    token_log_probs: Tensor | None
    near_boundary: int = 0

    @property
    def nll(self) -> Tensor:
        """Summed over the suffix, (distinct,) nats, >= 0."""
        if self.token_log_probs is None:
            raise ValueError("these candidates were drawn without access to the distribution")
        return -self.token_log_probs.double().sum(-1)

    def forward_row_count(self) -> int:
        """Rows that were run through the model: one a distinct partial sample, the bare prefix included."""
        length = self.suffixes.shape[1]
        # Sorted, each shares most with the one before it: what it does not share, but for its last token, are new rows.
        ordered = np.unique(self.suffixes.numpy(), axis=0)
        same = (ordered[1:] == ordered[:-1]).cumprod(axis=1).sum(axis=1)  # tokens shared with the one before
        return length + int((length - 1 - same).sum())

    def select_candidates(self, keep: Tensor) -> Self:
        """The candidates at these indices, in this order."""
        scores = None if self.token_log_probs is None else self.token_log_probs[keep]
        return replace(self, suffixes=self.suffixes[keep], counts=self.counts[keep], token_log_probs=scores)


def sample_candidates(
    model: LanguageModel,
    prefixes: Tensor,
    length: int,
    decoding: Decoding,
    uniforms: NDArray[np.float64],
    *,
    prompt: Tensor | None = None,
    distribution: bool = True,
) -> list[SuffixCandidates]:
    """K samples of each prefix, as `LanguageModel.completions` draws them.

    prefixes: (secrets, n_prefix); uniforms: (secrets, K, length, CHANNELS); prompt: (P, d) soft prompt or None.
    distribution: whether the caller may see log-probabilities; without it only tokens come back.
    """
    noise = torch.from_numpy(uniforms)
    drawn = model.completions(prefixes, length, decoding, noise, prompt=prompt, likelihood=distribution)
    return _distinct_candidates(drawn, uniforms.shape[1], [length] * len(prefixes))


@torch.no_grad()
def sample_mixed_length_batch(
    model: LanguageModel,
    prefixes: Sequence[Tokens],
    decoding: Decoding,
    uniforms: Sequence[NDArray[np.float64]],
    *,
    prompt: Tensor | None = None,
    distribution: bool = True,
) -> list[SuffixCandidates]:
    """As `sample_candidates`, of prefixes and suffixes that may differ in length where the model can join rows.

    uniforms: of each prefix, (K, its own length, CHANNELS).
    """
    lengths, longest = [len(own[0]) for own in uniforms], max(len(own[0]) for own in uniforms)
    tokens = [torch.tensor(prefix, device=model.device) for prefix in prefixes]
    if len({*zip(map(len, tokens), lengths, strict=True)}) == 1:
        noise = np.stack(uniforms)
        return sample_candidates(
            model, torch.stack(tokens), longest, decoding, noise, prompt=prompt, distribution=distribution
        )
    by_length = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    groups = [list(alike) for _, alike in groupby(by_length, key=lambda i: len(tokens[i]))]

    def begun(same: list[int]) -> Rows:  # with room for their own suffixes: another's may be longer than theirs
        own = torch.stack([tokens[i] for i in same])
        return model.start(own, max(lengths[i] for i in same), prompt=prompt, distribution=distribution)

    first, *others = [begun(same) for same in groups]
    noise = np.zeros((len(tokens), len(uniforms[0]), longest, CHANNELS))  # never read behind the end of a shorter one
    for row, i in enumerate(by_length):
        noise[row, :, : lengths[i]] = uniforms[i]
    ends = [lengths[i] for i in by_length]
    drawn = draw_model_completions_from_rows(
        model, first.joined(others), torch.from_numpy(noise), ends, decoding, distribution
    )
    found = dict(zip(by_length, _distinct_candidates(drawn, len(uniforms[0]), ends), strict=True))
    return [found[i] for i in range(len(tokens))]


def sampling_batches_by_length(
    model: LanguageModel, shapes: Sequence[tuple[int, int]], samples: int = 1
) -> Iterator[list[int]]:
    """Batches of indices into `shapes`, which are (prefix, suffix) lengths: one batch a shape and, where the model can
    join rows, one for all rare shapes, by rising length. samples: drawn of each prefix."""
    rare = list[int]()
    for alike in index_batches_of_equal_shape(shapes):
        if model.can_join_rows and len(alike) * samples < _RARE:
            rare += alike
        else:
            yield alike
    if rare:
        yield sorted(rare, key=lambda i: shapes[i])


def _distinct_candidates(drawn: Completions, n_samples: int, lengths: Sequence[int]) -> list[SuffixCandidates]:
    """Samples that share a path are one candidate, in the order of their first sample. lengths: of the suffixes."""
    result = []
    for start, length in zip(range(0, len(drawn.path), n_samples), lengths, strict=True):
        mine = slice(start, start + n_samples)
        _, first, counts = np.unique(drawn.path[mine].cpu().numpy(), return_index=True, return_counts=True)
        order = np.argsort(first)
        at = torch.from_numpy(first[order] + start).to(drawn.tokens.device)
        result.append(
            SuffixCandidates(
                suffixes=drawn.tokens[at, :length].cpu(),
                counts=torch.from_numpy(counts[order]),
                token_log_probs=None if drawn.log_probs is None else drawn.log_probs[at, :length].cpu(),
                near_boundary=int(drawn.near_boundary[mine].sum()),
            )
        )
    return result


def merge_candidates(parts: Sequence[SuffixCandidates]) -> SuffixCandidates:
    """The candidates of one secret whose samples were drawn in several passes, in the order of their first sample."""
    suffixes, counts = torch.cat([part.suffixes for part in parts]), torch.cat([part.counts for part in parts])
    _, first, where = np.unique(suffixes.numpy(), axis=0, return_index=True, return_inverse=True)
    # reshape: numpy 2.0 gives the inverse one dimension more.
    total = counts.new_zeros(len(first)).index_add_(0, torch.from_numpy(where.reshape(-1)), counts)
    order = torch.from_numpy(np.argsort(first))
    scores = [part.token_log_probs for part in parts if part.token_log_probs is not None]
    whole = SuffixCandidates(
        suffixes, counts, torch.cat(scores) if scores else None, sum(p.near_boundary for p in parts)
    )
    return replace(whole.select_candidates(torch.from_numpy(first)[order]), counts=total[order])
