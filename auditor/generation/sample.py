"""Draw K samples for each prefix, and group equal samples into candidates with counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import numpy as np
import torch
from torch import Tensor

from auditor.core.arrays import Floats
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import CHANNELS
from auditor.models.base import LanguageModel
from auditor.models.decoding import Decoding
from auditor.models.memory import group_equal_shapes
from auditor.models.rows import Completions, draw_row_completions

_RARE = 64  # rows; a shape with fewer is slower in its own batch than joined with others


@dataclass(frozen=True)
class SuffixCandidates:
    """The distinct suffixes sampled for one secret.

    Attributes:
        suffixes: token ids, (distinct, length).
        counts: number of times that each suffix was sampled, (distinct,).
        token_log_probs: nats under the attacked model at temperature 1 without truncation,
            (distinct, length); None if the attacker cannot see the distribution.
        near_boundary: number of drawn tokens that rounding could have changed.
    """

    suffixes: Tensor
    counts: Tensor
    token_log_probs: Tensor | None
    near_boundary: int = 0

    @property
    def nll(self) -> Tensor:
        """Negative log-likelihood of each suffix, (distinct,) in nats, >= 0."""
        if self.token_log_probs is None:
            raise ValueError("these candidates were drawn without access to the distribution")
        return -self.token_log_probs.double().sum(-1)

    def count_forward_rows(self) -> int:
        """Return the number of inputs that the model read: one per distinct start of a sample.

        The empty start, before any drawn token, counts too.
        """
        length = self.suffixes.shape[1]
        # In sorted order each sample shares most with its predecessor. Its tokens beyond the shared
        # ones are new rows, except the last token, which is never run.
        ordered = np.unique(self.suffixes.numpy(), axis=0)
        n_shared = (ordered[1:] == ordered[:-1]).cumprod(axis=1).sum(axis=1)
        return length + int((length - 1 - n_shared).sum())

    def select_candidates(self, indices: Tensor) -> Self:
        """Return the candidates at these indices, in this order."""
        log_probs = self.token_log_probs
        if log_probs is not None:
            log_probs = log_probs[indices]
        return replace(
            self,
            suffixes=self.suffixes[indices],
            counts=self.counts[indices],
            token_log_probs=log_probs,
        )


def sample_candidates(
    model: LanguageModel,
    prefixes: Tensor,
    length: int,
    decoding: Decoding,
    uniforms: Floats,
    *,
    prompt: Tensor | None = None,
    distribution: bool = True,
) -> list[SuffixCandidates]:
    """Draw K samples for each prefix and group them into candidates, one result for each prefix.

    Args:
        model: the model to draw from.
        prefixes: token ids (secrets, n_prefix).
        length: number of tokens in a suffix.
        decoding: temperature and truncation of the draws.
        uniforms: random numbers in [0, 1), of shape (secrets, K, length, CHANNELS). Channel 0 draws
            the token; randomised defenses use the other channels.
        prompt: soft prompt (P, d) or None.
        distribution: whether the caller may use log-probabilities, or only tokens.
    """
    completions = model.completions(
        prefixes,
        length,
        decoding,
        torch.from_numpy(uniforms),
        prompt=prompt,
        likelihood=distribution,
    )
    return _group_samples(completions, uniforms.shape[1], [length] * len(prefixes))


@torch.no_grad()
def sample_mixed_length_batch(
    model: LanguageModel,
    prefixes: Sequence[Tokens],
    decoding: Decoding,
    uniforms: Sequence[Floats],
    *,
    prompt: Tensor | None = None,
    distribution: bool = True,
) -> list[SuffixCandidates]:
    """Draw candidates like `sample_candidates`, for prefixes and suffixes of different lengths.

    The model must have `can_join_rows`, so that texts of different lengths can share a batch.
    `prefixes` are token ids. `uniforms` has shape (K, suffix length, CHANNELS) for each prefix.
    """
    lengths = [len(noise[0]) for noise in uniforms]
    max_length = max(lengths)
    prefix_lengths = list(map(len, prefixes))
    if len({*zip(prefix_lengths, lengths, strict=True)}) == 1:
        return sample_candidates(
            model,
            torch.tensor(list(prefixes), device=model.device),
            max_length,
            decoding,
            np.stack(uniforms),
            prompt=prompt,
            distribution=distribution,
        )
    by_length = sorted(range(len(prefixes)), key=prefix_lengths.__getitem__)
    groups = []
    for _, indices in groupby(by_length, key=prefix_lengths.__getitem__):
        group = list(indices)
        # Room for these suffixes only: suffixes of other groups may be longer.
        room = max(map(lengths.__getitem__, group))
        group_tokens = torch.tensor([prefixes[i] for i in group], device=model.device)
        groups.append(model.start(group_tokens, room, prompt=prompt, distribution=distribution))
    # Uniforms after the end of a shorter suffix are never read.
    padded = np.zeros((len(prefixes), len(uniforms[0]), max_length, CHANNELS))
    for row, i in enumerate(by_length):
        padded[row, :, : lengths[i]] = uniforms[i]
    suffix_lengths = [lengths[i] for i in by_length]
    completions = draw_row_completions(
        groups[0].joined(groups[1:]),
        torch.from_numpy(padded),
        suffix_lengths,
        decoding,
        distribution,
        model.vocab_size,
        model.device,
    )
    candidates = _group_samples(completions, len(uniforms[0]), suffix_lengths)
    return [candidates[row] for row in np.argsort(by_length)]


def batch_lengths(
    model: LanguageModel, shapes: Sequence[tuple[int, int]], samples: int = 1
) -> Iterator[list[int]]:
    """Yield batches of texts, as indices into `shapes`.

    All texts of a batch have the same shape. There is one exception: if the model can batch texts
    of different lengths, the last batch holds the texts of all rare shapes, sorted by length.

    Args:
        model: the model.
        shapes: (prefix length, suffix length) of each text.
        samples: number of samples per prefix.
    """
    rare = list[int]()
    for indices in group_equal_shapes(shapes):
        if model.can_join_rows and len(indices) * samples < _RARE:
            rare += indices.tolist()
        else:
            yield indices.tolist()
    if rare:
        yield sorted(rare, key=lambda i: shapes[i])


def _group_samples(
    completions: Completions,
    n_samples: int,
    lengths: Sequence[int],
) -> list[SuffixCandidates]:
    """Group equal samples into candidates, ordered by first occurrence; one result for each secret.

    Args:
        completions: the samples of all secrets.
        n_samples: number of samples for each secret.
        lengths: suffix length of each secret.
    """
    candidates = []
    for secret, length in enumerate(lengths):
        start = secret * n_samples
        sample_slice = slice(start, start + n_samples)
        paths = completions.path[sample_slice].cpu().numpy()
        _, first, counts = np.unique(paths, return_index=True, return_counts=True)
        order = np.argsort(first)
        samples = torch.from_numpy(first[order] + start).to(completions.tokens.device)
        log_probs = None
        if completions.log_probs is not None:
            log_probs = completions.log_probs[samples, :length].cpu()
        candidates.append(
            SuffixCandidates(
                suffixes=completions.tokens[samples, :length].cpu(),
                counts=torch.from_numpy(counts[order]),
                token_log_probs=log_probs,
                near_boundary=int(completions.near_boundary[sample_slice].sum()),
            )
        )
    return candidates


def merge_candidates(parts: Sequence[SuffixCandidates]) -> SuffixCandidates:
    """Merge one secret's candidates from several passes, ordered by first occurrence."""
    suffixes = torch.cat([part.suffixes for part in parts])
    counts = torch.cat([part.counts for part in parts])
    _, first, inverse_array = np.unique(
        suffixes.numpy(), axis=0, return_index=True, return_inverse=True
    )
    # numpy 2.0 returns the inverse with one dimension more.
    inverse = torch.from_numpy(inverse_array.reshape(-1))
    total = counts.new_zeros(len(first)).index_add_(0, inverse, counts)
    order = torch.from_numpy(np.argsort(first))
    log_probs = []
    for part in parts:
        if part.token_log_probs is not None:
            log_probs.append(part.token_log_probs)
    samples = SuffixCandidates(
        suffixes,
        counts,
        torch.cat(log_probs) if log_probs else None,
        sum(part.near_boundary for part in parts),
    )
    distinct = samples.select_candidates(torch.from_numpy(first)[order])
    return replace(distinct, counts=total[order])
