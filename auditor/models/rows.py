"""Define decoding rows, the state of incremental decoding, and draw samples from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.models.decoding import Decoding


class Rows(ABC):
    """The state of incremental decoding: one row for each distinct partial sequence of tokens.

    Rows draw their tokens themselves, so a randomised defense can use separate randomness for each
    draw.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def log_probs(self) -> Tensor:
        """Return the next-token distribution of each row, (rows, V) in nats."""

    @abstractmethod
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """Extend the rows: new row i is old row parents[i] followed by tokens[i].

        An old row may have several children, or none.
        """

    def draw(
        self,
        row_of_draw: Tensor,
        uniforms: Tensor,
        decoding: Decoding,
    ) -> tuple[Tensor, Tensor]:
        """Draw one token from row row_of_draw[i] for each draw i.

        Args:
            row_of_draw: the row of each draw, (draws,).
            uniforms: numbers in [0, 1), (draws, CHANNELS). Channel 0 draws the token; randomised
                defenses use the other channels.
            decoding: temperature and truncation of the draws.

        Returns:
            The tokens, (draws,).
            Whether each uniform was so near a CDF boundary that rounding could change the token,
                (draws,).
        """
        # The other channels are for randomised defenses.
        return decoding.draw(self.log_probs(), row_of_draw, uniforms[:, 0])

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probability of each token in its row's distribution, (tokens,) nats.

        `row_of_token` (tokens,) gives the row of each token.
        """
        return self.log_probs()[row_of_token, tokens]

    def joined(self, others: Sequence[Rows]) -> Rows:
        """Return these rows followed by the rows of `others`; all of them then advance together.

        All rows must be of one model that has `can_join_rows`, and none may have advanced yet.
        Prefixes may differ in length.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Completions:
    """Sampled suffixes, grouped by prefix, with the same number of samples for each prefix.

    Attributes:
        tokens: token ids, (draws, length).
        log_probs: nats at temperature 1 without truncation, (draws, length); None if not requested.
        path: an id that is the same for equal samples of a prefix, (draws,).
        near_boundary: number of tokens that rounding could have changed, (draws,).
    """

    tokens: Tensor
    log_probs: Tensor | None
    path: Tensor
    near_boundary: Tensor


@torch.no_grad()
def draw_row_completions(
    rows: Rows,
    uniforms: Tensor,
    lengths: Sequence[int],
    decoding: Decoding,
    likelihood: bool,
    vocab_size: int,
    device: torch.device,
) -> Completions:
    """Sample completions of B prefixes from their decoding rows.

    The result is that of `LanguageModel.completions`, with K samples for each prefix. Tokens and
    log-probabilities after the end of a shorter suffix are 0.

    Args:
        rows: one row for each prefix.
        uniforms: numbers in [0, 1), of shape (B, K, length, CHANNELS), as in `Rows.draw`.
        lengths: number of tokens to draw after each prefix, (B,).
        decoding: temperature and truncation of the draws.
        likelihood: whether to return log-probabilities.
        vocab_size: vocabulary size of the rows' model.
        device: device of the rows' model.
    """
    n_prefixes, n_samples, longest = uniforms.shape[:3]
    noise = uniforms.to(device).flatten(0, 1)  # (draws, length, CHANNELS)
    row_of_draw = torch.arange(n_prefixes, device=device).repeat_interleave(n_samples)
    ends = torch.tensor(lengths, device=device).repeat_interleave(n_samples)
    tokens = torch.zeros(len(noise), longest, dtype=torch.long, device=device)
    near = torch.zeros_like(ends)
    log_probs: Tensor | None = None
    live: Tensor | slice = slice(None)  # the draws that have not ended
    for position in range(longest):
        live_rows = row_of_draw[live]
        step_decoding = decoding.get_step_decoding(position)
        step_tokens, step_near = rows.draw(live_rows, noise[live, position], step_decoding)
        near[live] += step_near
        tokens[live, position] = step_tokens
        if likelihood:
            step_log_probs = rows.token_log_probs(live_rows, step_tokens)
            if log_probs is None:
                log_probs = step_log_probs.new_zeros(tokens.shape)
            log_probs[live, position] = step_log_probs
        # (row, token) as one number: draws that agree so far share a child, and so a forward row
        # (formulas.md A5).
        steps = live_rows * vocab_size + step_tokens
        children, row_of_draw[live] = torch.unique(steps, return_inverse=True)
        continues = ends[live] > position + 1
        if not continues.all():
            live = torch.arange(len(ends), device=device)[live][continues]
            # Drop the rows of ended draws.
            live_children, row_of_draw[live] = torch.unique(row_of_draw[live], return_inverse=True)
            children = children[live_children]
        if len(children):
            rows.advance(children // vocab_size, children % vocab_size)
    # Draws of a prefix end together: their last rows distinguish them, whatever other draws do.
    return Completions(tokens, log_probs, row_of_draw, near)
