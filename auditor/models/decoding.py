"""Compute decoding distributions and draw tokens from them by inverse CDF, without a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError

# A draw this close to a CDF boundary may fall on the other side under float noise.
NEAR_BOUNDARY = 1e-6

# The likeliest of fewer than a million tokens has more mass than this, so it is the nucleus.
_POINT_TOP_P = 1e-6
# Numbers of tokens tried for a top-p nucleus; rows that need more are sorted in full.
_NUCLEUS_GUESSES = (16, 128, 1024)
# Entries, each with about 60 bytes of temporary memory; the results do not depend on this number.
_SORTED_AT_ONCE = 2**22


@dataclass(frozen=True)
class Decoding:
    """A decoding distribution: temperature, then top-k, then top-p, as in Hugging Face's library.

    Temperature 0 is greedy. `top_k=0` and `top_p=1` do not truncate. Top-k keeps every token whose
    logit is at least the k-th largest. Top-p sorts tokens by descending probability (ties by id)
    and keeps a token if the tokens before it have less than p of the mass. `forbidden` tokens (such
    as a masked end of text) have probability 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise AuditError(f"expected temperature >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise AuditError(f"expected top_k >= 0 (0: off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise AuditError(f"expected top_p in (0, 1], got {self.top_p}")

    @property
    def is_ancestral(self) -> bool:
        """True if tokens are drawn from the model's unmodified distribution.

        Claims of private prediction cover only this decoding.
        """
        is_truncated = self.top_k != 0 or self.top_p != 1
        return self.temperature == 1 and not is_truncated and not self.forbidden

    @property
    def is_point(self) -> bool:
        """True if every draw takes the most likely token."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p <= _POINT_TOP_P

    def __str__(self) -> str:
        if self.is_ancestral:
            return "ancestral"
        if self.is_point:
            return "greedy"
        parts = (
            (f"top-k {self.top_k}", self.top_k > 0),
            (f"top-p {self.top_p:g}", self.top_p < 1),
            (f"temperature {self.temperature:g}", self.temperature != 1),
            ("end of text masked", bool(self.forbidden)),
        )
        return ", ".join(words for words, applies in parts if applies)

    def get_step_decoding(self, position: int) -> Decoding:
        """Return the decoding for this position of a text, counted from 0.

        This class returns itself for every position; subclasses may differ.
        """
        return self

    def log_distribution(self, log_probs: Tensor) -> Tensor:
        """Return the renormalised distribution after temperature and truncation, (rows, V) in nats.

        Removed tokens have -inf. `log_probs` (rows, V) are the model's log-probabilities.
        """
        distribution = torch.full_like(log_probs, -math.inf)
        for rows, tokens, weights in self.group_kept_tokens(log_probs):
            log_total = weights.sum(-1, keepdim=True, dtype=torch.float64).log()
            log_weights = (weights.double().log() - log_total).to(distribution.dtype)
            if tokens is None:
                distribution[rows] = log_weights
            else:
                distribution[rows] = distribution[rows].scatter(-1, tokens, log_weights)
        return distribution

    def score_decoded_tokens(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probability of one token per row after temperature and truncation.

        This is faster than `log_distribution`, which scores the whole vocabulary. `log_probs`
        (rows, V) are the model's, and `tokens` is (rows,). The result is (rows,), in float64 nats;
        -inf for a token that truncation removes.
        """
        if not self._truncates(log_probs.shape[-1]):
            scaled, log_total = self._scale_by_temperature(log_probs)
            return (scaled.gather(-1, tokens.unsqueeze(-1)) - log_total).squeeze(-1).double()
        distribution = log_probs.new_empty(len(tokens), dtype=torch.float64)
        for rows, kept_tokens, weights in self.group_kept_tokens(log_probs):
            assert kept_tokens is not None  # a truncated distribution always lists its tokens
            is_token = kept_tokens == tokens[rows].unsqueeze(-1)
            token_weights = torch.where(is_token, weights, 0.0).sum(-1)
            # The log of 0: a cut token has -inf.
            distribution[rows] = token_weights.log() - weights.sum(-1).log()
        return distribution

    def ranks(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Return the rank, from 1, of one given token per row, of shape (rows,).

        No decoding changes this order: a removed token follows all tokens that are kept. So a token
        of rank r has a probability of at most 1/r (formulas.md A4). `log_probs` is (rows, V), and
        `tokens` is (rows,).
        """
        ranks = self.rank_ties_first(log_probs, tokens)
        log_probs = self._mask_forbidden_tokens(log_probs)
        token_log_probs = log_probs.gather(-1, tokens.unsqueeze(-1))
        tied_rows = ((log_probs == token_log_probs).count_nonzero(-1) > 1).nonzero().squeeze(-1)
        ids = torch.arange(log_probs.shape[-1], device=log_probs.device)
        is_tie = log_probs[tied_rows] == token_log_probs[tied_rows]
        comes_first = ids < tokens[tied_rows].unsqueeze(-1)
        ranks[tied_rows] += (is_tie & comes_first).count_nonzero(-1)
        return ranks

    def rank_ties_first(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Return `ranks`, but with the given token first among equally likely tokens."""
        log_probs = self._mask_forbidden_tokens(log_probs)
        token_log_probs = log_probs.gather(-1, tokens.unsqueeze(-1))
        return 1 + (log_probs > token_log_probs).count_nonzero(-1)

    def draw(
        self,
        log_probs: Tensor,
        row_of_draw: Tensor,
        uniforms: Tensor,
        log_total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens from the decoding distribution by inverse CDF, in the order of token ids.

        Args:
            log_probs: log-probabilities (rows, V), or logits if `log_total` is given.
            row_of_draw: the row of each draw, (draws,).
            uniforms: float64 in [0, 1), of shape (draws,).
            log_total: log of the sum of exp over each row of logits, (rows,); None means 0.

        Returns:
            The tokens, (draws,).
            Whether each uniform was within NEAR_BOUNDARY of a CDF boundary, (draws,).
        """
        draw_tokens = torch.empty_like(row_of_draw)
        near = torch.zeros_like(row_of_draw, dtype=torch.bool)
        for rows, tokens, weights in self.group_kept_tokens(log_probs, log_total):
            row_in_group = torch.full((len(log_probs),), -1, dtype=torch.long, device=rows.device)
            row_in_group[rows] = torch.arange(len(rows), device=rows.device)
            draws = (row_in_group[row_of_draw] >= 0).nonzero().squeeze(-1)
            if not len(draws):
                continue
            group_rows = row_in_group[row_of_draw[draws]]
            columns, near[draws] = draw_columns(weights, group_rows, uniforms[draws])
            draw_tokens[draws] = columns if tokens is None else tokens[group_rows, columns]
        return draw_tokens, near

    def group_kept_tokens(
        self, log_probs: Tensor, log_total: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield groups of rows with the tokens that truncation keeps, and the tokens' weights.

        Tokens are in id order. For rows that keep few tokens, the vocabulary is not sorted.

        Args:
            log_probs: log-probabilities (rows, V), or logits if `log_total` is given.
            log_total: log of the sum of exp over each row of logits, (rows,); None means 0.

        Yields:
            rows: indices of the rows in the group.
            tokens: (len(rows), k); None for the whole vocabulary.
            weights: (len(rows), k), unnormalised; 0 for removed tokens that pad a group.
        """
        pending = torch.arange(len(log_probs), device=log_probs.device)
        vocab_size = log_probs.shape[-1]
        distribution = self._mask_forbidden_tokens(log_probs)
        if self.temperature == 0:
            best = distribution.argmax(-1, keepdim=True)
            yield pending, best, torch.ones_like(best, dtype=torch.float64)
            return
        if not self._truncates(vocab_size):
            scaled, scaled_total = self._scale_by_temperature(log_probs, log_total)
            yield pending, None, (scaled - scaled_total).exp()
            return
        if self.top_p < 1 and not self.top_k and self.temperature <= 1:
            # The likeliest token is the whole nucleus if its share is above p. A temperature below
            # 1 only raises the share, and above one half no other token ties with it.
            best, token = (column.squeeze(-1) for column in select_top_k(distribution, 1))
            log_share = best
            if log_total is not None:
                log_share = best - log_total
            is_nucleus = log_share.exp() > max(self.top_p, 0.5)
            if is_nucleus.any():
                n_rows = int(is_nucleus.sum())
                unit_column = torch.ones(n_rows, 1, dtype=torch.float64, device=distribution.device)
                yield pending[is_nucleus], token[is_nucleus].unsqueeze(-1), unit_column
                pending = pending[~is_nucleus]
        scaled_total = self._compute_log_normaliser(distribution, pending, log_total)
        yield from self._group_truncated_tokens(distribution, pending, scaled_total)

    def _group_truncated_tokens(
        self, distribution: Tensor, pending: Tensor, scaled_total: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the groups of `group_kept_tokens` for some rows, sorting only a few tokens.

        Args:
            distribution: log-probabilities or logits (rows, V), with forbidden tokens masked.
            pending: indices of the rows to group.
            scaled_total: log-normaliser of each pending row after temperature, (pending,).
        """
        vocab_size = distribution.shape[-1]
        # Among twice top_k tokens, mostly all ties with the k-th are included.
        widths = []
        for n in _NUCLEUS_GUESSES:
            if 2 * self.top_k <= n < vocab_size:
                widths.append(n)
        for width in (*widths, vocab_size):
            if not len(pending):
                return
            all_pending = len(pending) == len(distribution)  # then indexing would only copy
            unsettled_parts = list[Tensor]()
            batch_size = max(1, _SORTED_AT_ONCE // width)
            for start in range(0, len(pending), batch_size):
                part = slice(start, start + batch_size)
                if all_pending:
                    part_rows = distribution[part]
                else:
                    part_rows = distribution[pending[part]]
                settled, tokens, weights = self._truncate(part_rows, scaled_total[part], width)
                unsettled_parts.append(~settled)
                rows = settled.nonzero().squeeze(-1)
                if len(rows):
                    yield pending[part][rows], tokens[rows], weights[rows]
            unsettled = torch.cat(unsettled_parts)
            pending = pending[unsettled]
            scaled_total = scaled_total[unsettled]

    def _mask_forbidden_tokens(self, log_probs: Tensor) -> Tensor:
        if not self.forbidden:
            return log_probs
        log_probs = log_probs.clone()
        log_probs[:, list(self.forbidden)] = -math.inf
        return log_probs

    def _scale_by_temperature(
        self,
        log_probs: Tensor,
        log_total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the rows divided by the temperature, and their log-normalisers.

        The shapes are (rows, V) and (rows, 1).
        """
        distribution = self._mask_forbidden_tokens(log_probs)
        all_rows = torch.arange(len(distribution), device=distribution.device)
        log_normaliser = self._compute_log_normaliser(distribution, all_rows, log_total)
        if self.temperature != 1:
            distribution = distribution / self.temperature
        return distribution, log_normaliser.unsqueeze(-1)

    def _compute_log_normaliser(
        self,
        distribution: Tensor,
        rows: Tensor,
        log_total: Tensor | None,
    ) -> Tensor:
        """Return the log-normaliser of each of these rows after temperature, of shape (len(rows),).

        For `distribution` and `log_total`, see `group_kept_tokens`.
        """
        if self.temperature != 1 or self.forbidden:
            return compute_log_sum_exp(distribution, rows, 1 / self.temperature)
        if log_total is None:
            return distribution.new_zeros(len(rows))
        return log_total[rows]

    def _truncates(self, vocab_size: int) -> bool:
        return self.temperature == 0 or self.top_p < 1 or 0 < self.top_k < vocab_size

    def _truncate(
        self,
        distribution: Tensor,
        scaled_total: Tensor,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply top-k, then top-p, to the `width` most likely tokens of each row.

        Args:
            distribution: (rows, V), with forbidden tokens masked.
            scaled_total: log-normalisers after temperature, (rows,).
            width: number of most likely tokens to sort; V for all.

        Returns:
            Whether the kept tokens of each row are all among these `width`, (rows,).
            Tokens and weights, as in `group_kept_tokens`.
        """
        vocab_size = distribution.shape[-1]
        if width == vocab_size:
            return self._truncate_whole_rows(distribution, scaled_total)
        values, tokens = _sort_tied_tokens(*select_top_k(distribution, width))
        weights, keep = self._weigh_kept_tokens(values, scaled_total, vocab_size)
        n_kept = keep.sum(-1)
        edge = values.gather(-1, (n_kept - 1).unsqueeze(-1)).squeeze(-1)
        # A row is settled if it includes a token less likely than the last kept one: then it
        # includes all ties with that one, and ids have decided among them. Under top-k it must
        # include all ties with the k-th, too.
        settled = values[:, -1] / self.temperature < edge / self.temperature
        if 0 < self.top_k < vocab_size:
            settled &= weights[:, -1] == 0
        weights = torch.where(keep, weights, 0.0)
        # Draws read the CDF by id. Cut tokens get an id after all others: dropped, or padding.
        order = torch.where(keep, tokens, vocab_size).argsort(-1)[:, : int(n_kept.max())]
        return settled, tokens.gather(-1, order), weights.gather(-1, order)

    def _truncate_whole_rows(
        self, distribution: Tensor, scaled_total: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do `_truncate` for all tokens. Only values are sorted, which is faster than tokens."""
        values = _sort_values(distribution)
        n_kept = self._weigh_kept_tokens(values, scaled_total, distribution.shape[-1])[1].sum(-1)
        edge = values.gather(-1, (n_kept - 1).unsqueeze(-1))
        is_likelier = distribution > edge
        is_tie = distribution == edge
        # of the tokens tied with the last kept one, those with the lowest ids
        n_kept_ties = n_kept - is_likelier.count_nonzero(-1)
        keep = is_likelier | (is_tie & (is_tie.cumsum(-1) <= n_kept_ties.unsqueeze(-1)))
        weights = self._weigh_tokens(distribution, scaled_total)
        tokens = _list_kept_columns(keep, int(n_kept.max()))
        settled = torch.ones_like(n_kept, dtype=torch.bool)
        return settled, tokens, torch.where(keep, weights, 0.0).gather(-1, tokens)

    def _weigh_tokens(self, values: Tensor, scaled_total: Tensor) -> Tensor:
        """Return the probabilities after temperature, before truncation, (rows, k) in float64."""
        return (values / self.temperature - scaled_total.unsqueeze(-1)).double().exp()

    def _weigh_kept_tokens(
        self, values: Tensor, scaled_total: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of tokens after top-k, and whether top-k and top-p keep each of them.

        `values` (rows, k) are sorted in descending order, so the kept tokens come first.
        """
        weights = self._weigh_tokens(values, scaled_total)
        if 0 < self.top_k < vocab_size:
            logits = values / self.temperature
            weights = torch.where(logits >= logits[:, self.top_k - 1 : self.top_k], weights, 0.0)
            # top_p is a share of the mass after top-k: Hugging Face renormalises between them
            # (formulas.md A4).
            total = weights.sum(-1, keepdim=True)
        else:  # the distribution is normalised over the whole vocabulary
            total = torch.ones_like(weights[:, :1])
        keep = weights > 0
        if self.top_p < 1:
            mass_before = weights.cumsum(-1) - weights
            keep &= mass_before < self.top_p * total
        keep[:, 0] = True  # in spite of rounding: top_p > 0
        return weights, keep


@dataclass(frozen=True)
class Cooling(Decoding):
    """A decoding whose temperature falls in equal steps from `hot` to `temperature`.

    It falls over the first `steps` tokens of a text and stays at `temperature` afterwards. Texts
    therefore start diversely and continue with confident tokens (Carlini et al. 2021, Section
    5.1.1). `get_step_decoding` returns the decoding at a position.
    """

    hot: float = 10.0
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.hot) and self.hot > 0 and self.temperature > 0):
            raise AuditError(
                f"expected temperatures > 0 to fall, got {self.hot} and {self.temperature}",
            )
        if self.steps < 1:
            raise AuditError(f"expected steps >= 1 of a falling temperature, got {self.steps}")

    @property
    def is_ancestral(self) -> bool:
        return False

    def __str__(self) -> str:
        last = str(Decoding(self.temperature, self.top_k, self.top_p, self.forbidden))
        return f"temperature {self.hot:g} falling over {self.steps} tokens, then {last}"

    def get_step_decoding(self, position: int) -> Decoding:
        remaining = max(0.0, 1 - position / self.steps)
        temperature = self.temperature + remaining * (self.hot - self.temperature)
        return Decoding(temperature, self.top_k, self.top_p, self.forbidden)

    def group_kept_tokens(self, *_: object) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        raise TypeError("the distribution depends on the position: use `get_step_decoding`")


ANCESTRAL = Decoding()

GREEDY = Decoding(temperature=0)


def select_top_k(distribution: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row, in descending order, and their columns.

    This is a faster `topk`. It searches only the `count` blocks of a row that have the largest
    maxima; they contain these values.
    """
    width = distribution.shape[-1]
    # This block size balances the number of maxima and of tokens searched after them.
    block_size = math.isqrt(width // count)
    if block_size < 2:
        return distribution.topk(count, dim=-1)
    # Block b has columns b, b + n_blocks, ...; the remaining columns belong to the first blocks.
    n_blocks = width // block_size
    n_regular = n_blocks * block_size
    remainder = distribution[:, n_regular:]
    n_remaining = remainder.shape[1]
    maxima = distribution[:, :n_regular].unflatten(1, (block_size, n_blocks)).amax(1)
    maxima[:, :n_remaining] = torch.maximum(maxima[:, :n_remaining], remainder)
    blocks = maxima.topk(count, dim=-1, sorted=False).indices
    steps = torch.arange(0, width, n_blocks, device=distribution.device)
    columns = (blocks.unsqueeze(-1) + steps).flatten(1)
    values = distribution.gather(1, columns.clamp(max=width - 1))
    values, indices = torch.where(columns < width, values, -math.inf).topk(count, dim=-1)
    return values, columns.gather(1, indices)


def _sort_values(distribution: Tensor) -> Tensor:
    """Return the values of each row in descending order, (rows, V)."""
    if distribution.device.type == "cpu" and distribution.dtype in (torch.float32, torch.float64):
        # 20 times as fast as torch, which also returns the columns
        return -torch.from_numpy(np.sort(-distribution.numpy(), axis=-1))
    return distribution.sort(dim=-1, descending=True).values


def _list_kept_columns(keep: Tensor, count: int) -> Tensor:
    """Return `count` columns of each row, (rows, count): the kept ones first, in order."""
    if keep.device.type == "cpu":  # as for `_sort_values`
        columns = torch.from_numpy(np.argsort(~keep.numpy(), axis=-1, kind="stable"))
    else:
        columns = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)
    return columns[:, :count]


def _sort_tied_tokens(values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Order equal values within each row by column, lowest first.

    `values` are sorted in descending order. In bfloat16 many logits are equal. Rows without ties
    are left unchanged.
    """
    if not (values[:, 1:] == values[:, :-1]).any():
        return values, tokens
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def compute_log_sum_exp(
    distribution: Tensor,
    rows: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return log(sum(exp(scale * row))) for each row of `distribution` (rows, V), shape (rows,).

    `rows` are the indices of the rows to use; None for all of them.
    """
    # On a CPU, the buffer of this many entries stays in a core's own cache.
    max_entries = 2**25
    if distribution.device.type == "cpu":
        max_entries = 2**18
    vocab_size = distribution.shape[-1]
    if rows is not None and len(rows) == len(distribution):  # then indexing would only copy
        rows = None
    n_rows = len(distribution) if rows is None else len(rows)
    step = max(1, max_entries // vocab_size)
    total = distribution.new_empty(n_rows)
    buffer = distribution.new_empty(min(step, n_rows), vocab_size)
    for start in range(0, n_rows, step):
        part = slice(start, start + step)
        part_rows = distribution[part]
        if rows is not None:
            part_rows = distribution[rows[part]]
        largest = part_rows.amax(-1, keepdim=True)
        # The buffer avoids fresh pages in each pass; torch has no gradient through it.
        shifted = torch.sub(part_rows, largest, out=buffer[: len(part_rows)])
        if scale != 1:
            shifted *= scale
        total[part] = shifted.exp_().sum(-1).log_() + scale * largest.squeeze(-1)
    return total


def draw_columns(weights: Tensor, row_of_draw: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a column for each uniform by inverse CDF, with one searchsorted for all draws.

    Args:
        weights: nonnegative, of shape (rows, k).
        row_of_draw: the row of each draw, (draws,).
        uniforms: float64, of shape (draws,).

    Returns:
        The columns, (draws,).
        Whether each uniform was near a CDF boundary, (draws,).
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[row_of_draw, -1]
    # Rounding must not move a uniform to the total: after the last token with weight there is
    # nothing to draw.
    values = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    # A batched searchsorted needs the draws of a row in one row, (rows, most draws of a row).
    order = torch.argsort(row_of_draw, stable=True)
    counts = torch.bincount(row_of_draw, minlength=len(cdf))
    row_starts = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - row_starts[row_of_draw[order]]
    table = values.new_zeros(len(cdf), int(counts.max()))
    table[row_of_draw, rank] = values
    # right: a uniform on a boundary draws the token above it, so that tokens of weight 0 are never
    # drawn.
    column = torch.searchsorted(cdf, table, right=True)[row_of_draw, rank]
    high = cdf[row_of_draw, column]
    low = torch.where(column > 0, cdf[row_of_draw, (column - 1).clamp(min=0)], 0.0)
    margin = NEAR_BOUNDARY * total
    near_low = (values - low < margin) & (low > 0)
    near_high = (high - values < margin) & (high < total)
    return column, near_low | near_high
