"""Decoding distributions and inverse-CDF draws. Knows rows and uniforms; no model, and nothing of who asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.core.errors import AuditError

NEAR_BOUNDARY = 1e-6  # a draw this close to a CDF boundary may fall on the other side under float noise

_POINT_TOP_P = 1e-6  # the likeliest of fewer than a million tokens has more mass, so it is the nucleus
_NUCLEUS_GUESSES = (16, 128, 1024)  # tokens tried for a top-p nucleus; rows that need more are sorted in full
_SORTED_AT_ONCE = 2**22  # entries: on the way each takes some 60 bytes, results of a row do not depend on it


@dataclass(frozen=True)
class Decoding:
    """A decoding distribution: temperature, then top-k, then top-p, in the order Hugging Face applies them.

    Temperature 0 is greedy. `top_k=0` and `top_p=1` switch truncation off. A token stays under top-k iff its logit is
    not below the k-th (ties stay), under top-p iff the mass *before* it, in descending order, is < p; among tokens of
    equal probability at that edge, the lower id comes first. `forbidden` tokens (a masked end of text) have mass 0.
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
        """Whether tokens are drawn from the model's own distribution: the only decoding a private prediction claims."""
        return self.temperature == 1 and self.top_k == 0 and self.top_p == 1 and not self.forbidden

    @property
    def is_point(self) -> bool:
        """Whether every draw after one prefix is the same: all mass is on the likeliest token."""
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
        return ", ".join(words for words, said in parts if said)

    def decoding_at_position(self, position: int) -> Decoding:
        """The distribution of one token of a text, by its place from 0: the same everywhere."""
        return self

    def log_distribution(self, log_probs: Tensor) -> Tensor:
        """The decoding distribution of each row, (rows, V) nats, renormalised; -inf where a token is cut."""
        distribution = torch.full_like(log_probs, -math.inf)
        for rows, tokens, weights in self.kept_tokens_and_weights_by_group(log_probs):
            log_weights = weights.double().log() - weights.sum(-1, keepdim=True, dtype=torch.float64).log()
            if tokens is None:
                distribution[rows] = log_weights.to(distribution.dtype)
            else:
                distribution[rows] = distribution[rows].scatter(-1, tokens, log_weights.to(distribution.dtype))
        return distribution

    def decoded_token_log_probs(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """`log_distribution` of one given token a row, (rows,) -> (rows,) float64 nats; the rest is not written out."""
        if not self._truncates(log_probs.shape[-1]):
            scaled, log_total = self._temperature_scaled(log_probs)
            return (scaled.gather(-1, tokens.unsqueeze(-1)) - log_total).squeeze(-1).double()
        distribution = log_probs.new_empty(len(tokens), dtype=torch.float64)
        for rows, kept, weights in self.kept_tokens_and_weights_by_group(log_probs):
            assert kept is not None  # a truncated distribution always names its tokens
            mine = torch.where(kept == tokens[rows].unsqueeze(-1), weights, 0.0).sum(-1)
            distribution[rows] = mine.log() - weights.sum(-1).log()  # log 0: a token that is cut has -inf
        return distribution

    def ranks(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """(rows,) place of a given token a row, from 1, in the order in which truncation keeps tokens.

        No temperature, top-k or top-p changes this order, and whatever is kept stands before what is not: so a token
        of rank r has at most 1/r of the mass (formulas.md A4).
        """
        place = self.ranks_with_ties_first(log_probs, tokens)
        log_probs = self._mask_forbidden_tokens(log_probs)
        own = log_probs.gather(-1, tokens.unsqueeze(-1))
        ties = ((log_probs == own).count_nonzero(-1) > 1).nonzero().squeeze(-1)
        ids = torch.arange(log_probs.shape[-1], device=log_probs.device)
        place[ties] += ((log_probs[ties] == own[ties]) & (ids < tokens[ties].unsqueeze(-1))).count_nonzero(-1)
        return place

    def ranks_with_ties_first(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """(rows,) as `ranks`, of equal tokens the given one first: another decoder may put it before all of them."""
        log_probs = self._mask_forbidden_tokens(log_probs)
        return 1 + (log_probs > log_probs.gather(-1, tokens.unsqueeze(-1))).count_nonzero(-1)

    def draw(
        self, log_probs: Tensor, row_of_draw: Tensor, uniforms: Tensor, log_total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One token a draw, by inverse CDF in the order of token ids.

        log_probs: (rows, V), with `log_total` as in `kept_tokens_and_weights_by_group`; row_of_draw: (draws,), which
        row each draw reads; uniforms: (draws,) float64 in [0, 1).
        Returns the tokens (draws,) and whether each draw lay within NEAR_BOUNDARY of a CDF boundary (draws,).
        """
        drawn = torch.empty_like(row_of_draw)
        near = torch.zeros_like(row_of_draw, dtype=torch.bool)
        for rows, tokens, weights in self.kept_tokens_and_weights_by_group(log_probs, log_total):
            place = torch.full((len(log_probs),), -1, dtype=torch.long, device=rows.device)
            place[rows] = torch.arange(len(rows), device=rows.device)
            mine = (place[row_of_draw] >= 0).nonzero().squeeze(-1)
            if not len(mine):
                continue
            at = place[row_of_draw[mine]]
            column, near[mine] = draw_token_columns_by_inverse_cdf(weights, at, uniforms[mine])
            drawn[mine] = column if tokens is None else tokens[at, column]
        return drawn, near

    def kept_tokens_and_weights_by_group(
        self, log_probs: Tensor, log_total: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Groups of rows with the tokens that stay, ascending by id, and their weights (not normalised).

        log_total: (rows,) what exp of each row sums to, as a log, where rows are logits; None: 0.
        Yields (rows, tokens (len(rows), k) or None for the whole vocabulary, weights (len(rows), k)); cut tokens that
        pad a group have weight 0. Grouped so that a narrow nucleus pays neither for a sort of the vocabulary nor for a
        copy of the distribution.
        """
        left = torch.arange(len(log_probs), device=log_probs.device)
        vocab_size, distribution = log_probs.shape[-1], self._mask_forbidden_tokens(log_probs)
        if self.temperature == 0:
            best = distribution.argmax(-1, keepdim=True)
            yield left, best, torch.ones_like(best, dtype=torch.float64)
            return
        if not self._truncates(vocab_size):
            scaled, scaled_total = self._temperature_scaled(log_probs, log_total)
            yield left, None, (scaled - scaled_total).exp()
            return
        if self.top_p < 1 and not self.top_k and self.temperature <= 1:
            # The likeliest token fills the nucleus alone where its share does: a temperature below 1 only raises it,
            # and above one half it ties with no other.
            best, token = (x.squeeze(-1) for x in top_k_by_blocks(distribution, 1))
            sure = (best if log_total is None else best - log_total).exp() > max(self.top_p, 0.5)
            if sure.any():
                ones = torch.ones(int(sure.sum()), 1, dtype=torch.float64, device=distribution.device)
                yield left[sure], token[sure].unsqueeze(-1), ones
                left = left[~sure]
        scaled_total = self._tempered_log_normaliser(distribution, left, log_total)
        # Twice top_k: among so many, what ties with the k-th has mostly been seen.
        for width in (*(n for n in _NUCLEUS_GUESSES if 2 * self.top_k <= n < vocab_size), vocab_size):
            if not len(left):
                return
            whole = len(left) == len(distribution)  # then indexing would only copy
            open_rows, at_once = list[Tensor](), max(1, _SORTED_AT_ONCE // width)
            for start in range(0, len(left), at_once):
                some = slice(start, start + at_once)
                settled, tokens, weights = self._truncate(
                    distribution[some] if whole else distribution[left[some]], scaled_total[some], width
                )
                open_rows.append(~settled)
                rows = settled.nonzero().squeeze(-1)
                if len(rows):
                    yield left[some][rows], tokens[rows], weights[rows]
            unsettled = torch.cat(open_rows)
            left, scaled_total = left[unsettled], scaled_total[unsettled]

    def _mask_forbidden_tokens(self, log_probs: Tensor) -> Tensor:
        if not self.forbidden:
            return log_probs
        log_probs = log_probs.clone()
        log_probs[:, list(self.forbidden)] = -math.inf
        return log_probs

    def _temperature_scaled(self, log_probs: Tensor, log_total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """After temperature, before truncation: (rows, V), and (rows, 1), the log of what exp of it sums to."""
        distribution = self._mask_forbidden_tokens(log_probs)
        scaled = distribution if self.temperature == 1 else distribution / self.temperature
        every = torch.arange(len(distribution), device=distribution.device)
        return scaled, self._tempered_log_normaliser(distribution, every, log_total).unsqueeze(-1)

    def _tempered_log_normaliser(self, allowed: Tensor, rows: Tensor, log_total: Tensor | None) -> Tensor:
        """(len(rows),): the log of what exp of these rows of `allowed` sums to after temperature."""
        if self.temperature != 1 or self.forbidden:
            return log_sum_exp_of_logit_rows(allowed, rows, 1 / self.temperature)
        return allowed.new_zeros(len(rows)) if log_total is None else log_total[rows]

    def _truncates(self, vocab_size: int) -> bool:
        return self.temperature == 0 or self.top_p < 1 or 0 < self.top_k < vocab_size

    def _truncate(self, distribution: Tensor, scaled_total: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k then top-p among the `width` likeliest tokens of each row, (rows, V) with forbidden ones masked.

        Returns where no more tokens were needed, (rows,), and tokens and weights as `kept_tokens_and_weights_by_group`.
        scaled_total: (rows,).
        """
        vocab_size = distribution.shape[-1]
        if width < vocab_size:
            values, tokens = _sort_tied_tokens_by_id(*top_k_by_blocks(distribution, width))
        else:  # a stable sort puts the lower id first among equals
            values, tokens = distribution.sort(dim=-1, descending=True, stable=True)
        values = values / self.temperature
        weights = (values - scaled_total.unsqueeze(-1)).double().exp()
        if 0 < self.top_k < vocab_size:
            kth = values[:, self.top_k - 1 : self.top_k]
            weights = torch.where(values >= kth, weights, 0.0)
            # top_p is of the mass that top-k left, as Hugging Face renormalises between them (formulas.md A4).
            total, unseen = weights.sum(-1, keepdim=True), weights[:, -1] > 0
        else:  # the distribution is normalised over the whole vocabulary
            total, unseen = torch.ones_like(weights[:, :1]), torch.zeros_like(weights[:, 0], dtype=torch.bool)
        before = weights.cumsum(-1) - weights
        keep = (weights > 0) & (before < self.top_p * total if self.top_p < 1 else True)
        keep[:, 0] = True  # whatever rounding says: top_p > 0
        weights = torch.where(keep, weights, 0.0)
        last = keep.sum(-1)  # the kept tokens come first
        edge = values.gather(-1, (last - 1).unsqueeze(-1)).squeeze(-1)
        # Settled: a token less likely than the last kept one was seen, so all were that tie with it, and ids have
        # decided between them; under top-k, every token that ties with the k-th was seen too.
        settled = (values[:, -1] < edge) & ~unseen
        if width == vocab_size:
            settled = torch.ones_like(settled)
        # By id, as draws read the CDF; cut tokens get an id behind all others, and are dropped or pad.
        order = torch.where(keep, tokens, vocab_size).argsort(-1)[:, : int(last.max())]
        return settled, tokens.gather(-1, order), weights.gather(-1, order)


@dataclass(frozen=True)
class Cooling(Decoding):
    """A distribution that begins hot: the temperature falls in equal steps from `hot` to `temperature` over `steps`
    tokens.

    Carlini et al. 2021, Section 5.1.1: texts begin in many ways, and go on as the model is sure of. Every token has a
    distribution of its own, so there is none of the whole: `decoding_at_position` says which.
    """

    hot: float = 10.0
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.hot) and self.hot > 0 and self.temperature > 0):
            raise AuditError(f"expected temperatures > 0 to fall, got {self.hot} and {self.temperature}")
        if self.steps < 1:
            raise AuditError(f"expected steps >= 1 of a falling temperature, got {self.steps}")

    @property
    def is_ancestral(self) -> bool:
        return False

    def __str__(self) -> str:
        last = str(Decoding(self.temperature, self.top_k, self.top_p, self.forbidden))
        return f"temperature {self.hot:g} falling over {self.steps} tokens, then {last}"

    def decoding_at_position(self, position: int) -> Decoding:
        left = max(0.0, 1 - position / self.steps)
        return Decoding(self.temperature + left * (self.hot - self.temperature), self.top_k, self.top_p, self.forbidden)

    def kept_tokens_and_weights_by_group(self, *_: object) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        raise TypeError("the distribution differs from token to token: ask `decoding_at_position`")

    def decoded_token_log_probs(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        raise TypeError("the distribution differs from token to token: ask `decoding_at_position`")


ANCESTRAL = Decoding()

GREEDY = Decoding(temperature=0)


def top_k_by_blocks(distribution: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row, falling, and their columns: `topk`, of the blocks that can hold them.

    The largest lie in the `count` blocks whose own largest are the largest, and those take one pass that keeps nothing.
    """
    width = distribution.shape[-1]
    size = math.isqrt(width // count)  # of a block: as many maxima are looked through as tokens after them
    if size < 2:
        return distribution.topk(count, dim=-1)
    blocks = width // size  # block b: columns b, b + blocks, ...; the rest of the columns go on with the first blocks
    inner, rest = distribution[:, : blocks * size].unflatten(1, (size, blocks)), distribution[:, blocks * size :]
    most = inner.amax(1)
    most[:, : rest.shape[1]] = torch.maximum(most[:, : rest.shape[1]], rest)
    block = most.topk(count, dim=-1, sorted=False).indices
    steps = torch.arange(0, width, blocks, device=distribution.device)
    columns = (block.unsqueeze(-1) + steps).flatten(1)
    values = distribution.gather(1, columns.clamp(max=width - 1))
    values, at = torch.where(columns < width, values, -math.inf).topk(count, dim=-1)
    return values, columns.gather(1, at)


def _sort_tied_tokens_by_id(values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Falling values and their columns, as a stable sort has them: of equal ones the lower column first.

    In bfloat16 many logits are equal; without a tie nothing is sorted.
    """
    if not (values[:, 1:] == values[:, :-1]).any():
        return values, tokens
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def log_sum_exp_of_logit_rows(distribution: Tensor, rows: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """(rows,): log of the sum of exp(scale x) over each row of (rows, V), or over these rows, without a copy of it."""
    # Entries summed at once: on a CPU as many as leave what is written on the way in a core's own memory.
    at_once = 2**18 if distribution.device.type == "cpu" else 2**25
    count, step = len(distribution) if rows is None else len(rows), max(1, at_once // distribution.shape[-1])
    whole, total = count == len(distribution), distribution.new_empty(count)
    room = distribution.new_empty(min(step, count), distribution.shape[-1])
    for start in range(0, count, step):
        here = slice(start, start + step)
        some = distribution[here] if whole or rows is None else distribution[rows[here]]
        most = some.amax(-1, keepdim=True)
        shifted = torch.sub(some, most, out=room[: len(some)])  # no fresh pages each time; torch has no gradient of it
        if scale != 1:
            shifted *= scale
        total[here] = shifted.exp_().sum(-1).log_() + scale * most.squeeze(-1)
    return total


def draw_token_columns_by_inverse_cdf(weights: Tensor, row_of_draw: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The column whose CDF interval holds the uniform, one searchsorted for all draws.

    weights: (rows, k) >= 0; row_of_draw, uniforms (float64): (draws,). Returns columns and nearness to a boundary.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[row_of_draw, -1]
    # Rounding must not push a uniform to the total: behind the last token that has weight there is nothing to draw.
    values = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    # Draws of one row side by side, (rows, most draws of a row), as a batched searchsorted wants them.
    order = torch.argsort(row_of_draw, stable=True)
    counts = torch.bincount(row_of_draw, minlength=len(cdf))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[row_of_draw[order]]
    table = values.new_zeros(len(cdf), int(counts.max()))
    table[row_of_draw, rank] = values
    # right: a uniform on a boundary is of the token above it, so that tokens of weight 0 are never drawn.
    column = torch.searchsorted(cdf, table, right=True)[row_of_draw, rank]
    high = cdf[row_of_draw, column]
    low = torch.where(column > 0, cdf[row_of_draw, (column - 1).clamp(min=0)], 0.0)
    scale = NEAR_BOUNDARY * total
    near = ((values - low < scale) & (low > 0)) | ((high - values < scale) & (high < total))
    return column, near


def index_batches_of_equal_shape(
    lengths: Sequence[tuple[int, int]], batch_size: int | None = None
) -> Iterator[list[int]]:
    """Indices in batches of equal (prefix, suffix) length, so that no batch needs padding; None: all of one at once."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(lengths):
        groups.setdefault(shape, []).append(index)
    for members in groups.values():
        step = batch_size or len(members)
        for start in range(0, len(members), step):
            yield members[start : start + step]
