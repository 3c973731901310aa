"""Candidates without chance: the threshold-complete tree of a decoding distribution, and beam search.

Both stand on decoding rows alone, so a defended model is searched as any other. They read the distribution: no claim
about sampled tokens covers them. Knows nothing of who asks, nor of answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Certificate
from auditor.generation.sample import SuffixCandidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import Decoding

ROUNDING = 1e-5  # nats: a node so little below the threshold is kept, so that rounding cannot lose one that reaches it
MAX_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class SearchResult(SuffixCandidates):
    """Candidates that were found, not drawn: each counts once. `rows`: forward rows spent on this secret."""

    rows: int

    def forward_row_count(self) -> int:
        return self.rows


@dataclass(frozen=True, kw_only=True)
class TreeLeaves(SearchResult):
    """What a tree found, likeliest first. log_q: (found,) nats under the decoding distribution, float64."""

    log_q: Tensor
    certificate: Certificate

    def select_candidates(self, keep: Tensor) -> Self:
        return replace(super().select_candidates(keep), log_q=self.log_q[keep])


@dataclass
class _TreeSearchPaths:
    """The live nodes: tokens (nodes, depth), and their nats under the attacked distribution, which is not truncated."""

    tokens: Tensor
    scores: Tensor

    @classmethod
    def at_root(cls, nodes: Tensor) -> _TreeSearchPaths:
        return cls(nodes.new_empty(len(nodes), 0), torch.empty(len(nodes), 0, device=nodes.device))

    def append_chosen_tokens(self, distribution: Tensor, parents: Tensor, chosen: Tensor) -> None:
        self.tokens = torch.cat([self.tokens[parents], chosen.unsqueeze(-1)], dim=-1)
        self.scores = torch.cat([self.scores[parents], distribution[parents, chosen].unsqueeze(-1)], dim=-1)


def check_tree_search_threshold(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise AuditError(f"expected threshold in (0, 1], got {threshold}")


@torch.no_grad()
def find_suffixes_above_threshold(
    model: LanguageModel,
    prefixes: Tensor,
    length: int,
    decoding: Decoding,
    threshold: float,
    *,
    prompt: Tensor | None = None,
    max_rows: int = MAX_ROWS,
) -> list[TreeLeaves]:
    """Every suffix of `length` tokens whose probability under the decoding distribution is >= threshold, of each
    prefix.

    prefixes: (secrets, n_prefix); prompt: (P, d) soft prompt or None. Breadth-first, one row a live node: a node stays
    while its probability reaches the threshold, so that at most 1/threshold are live (formulas A5), and nothing that
    reaches it is missed. Where no child of a secret does, its likeliest one stays all the same, alone: the one leaf it
    leads to is the guess, and the certificate says that it did not reach the threshold. A batch whose live rows exceed
    `max_rows` is searched anew in two halves, down to a single prefix, which may exceed them; `rows` counts what a
    secret needs, however it was batched.
    Raises AuditError for a threshold outside (0, 1].
    """
    check_tree_search_threshold(threshold)
    secrets, floor = len(prefixes), math.log(threshold) - ROUNDING
    rows = model.start(prefixes, length, prompt=prompt)
    owner = torch.arange(secrets, device=model.device)  # the secret of each live node, ascending
    log_q = torch.zeros(secrets, dtype=torch.float64, device=model.device)
    pruned = torch.full_like(log_q, -math.inf)
    spent = torch.zeros_like(owner)
    paths = _TreeSearchPaths.at_root(owner)
    for position in range(length):
        spent += torch.bincount(owner, minlength=secrets)
        distribution = rows.log_probs()
        parents, chosen, log_q, lost = _surviving_tree_children(decoding, distribution, log_q, owner, floor, secrets)
        pruned = torch.maximum(pruned, lost)
        paths.append_chosen_tokens(distribution, parents, chosen)
        owner = owner[parents]
        if len(owner) > max_rows and secrets > 1:
            halves = prefixes.tensor_split(2)
            return [
                leaves
                for half in halves
                for leaves in find_suffixes_above_threshold(
                    model, half, length, decoding, threshold, prompt=prompt, max_rows=max_rows
                )
            ]
        if position + 1 < length:
            rows.advance(parents, chosen)
    sizes = torch.bincount(owner, minlength=secrets).tolist()
    parts = (x.cpu().split(sizes) for x in (paths.tokens, paths.scores, log_q))
    return [
        _leaves_with_certificate(suffixes, token_scores, of_leaf, most, cost, floor)
        for suffixes, token_scores, of_leaf, most, cost in zip(*parts, pruned.tolist(), spent.tolist(), strict=True)
    ]


def _surviving_tree_children(
    decoding: Decoding, distribution: Tensor, log_q: Tensor, owner: Tensor, floor: float, secrets: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The children that stay: those that reach the floor, or the likeliest of a secret where none does.

    Returns parents, tokens and log_q of the children, ordered by parent and token; and the largest log_q that was
    pruned, (secrets,). Reads the support of the decoding distribution only: a nucleus is some tokens, a vocabulary
    50,000.
    """
    parts, pruned = [], log_q.new_full((secrets,), -math.inf)
    for nodes, tokens, weights in decoding.kept_tokens_and_weights_by_group(distribution):
        step = weights.log() - weights.sum(-1, keepdim=True).log()
        # In float32 too: ROUNDING, by which `floor` lies below the threshold, is more than that rounds.
        keep = step >= (floor - log_q[nodes]).to(step.dtype).unsqueeze(-1)
        keep.scatter_(-1, step.argmax(-1, keepdim=True), True)  # for a secret in which nothing reaches the floor
        lost = log_q[nodes] + step.masked_fill(keep, -math.inf).amax(-1).double()
        pruned = pruned.scatter_reduce(0, owner[nodes], lost, "amax")
        row, column = keep.nonzero(as_tuple=True)
        token = column if tokens is None else tokens[row, column]
        parts.append((nodes[row], token, log_q[nodes[row]] + step[row, column].double()))
    parents, chosen, child = (torch.cat(part) for part in zip(*parts, strict=True))
    # Groups come in any order; by parent and token, owners ascend again, as the split into secrets needs.
    order = torch.argsort(parents * distribution.shape[-1] + chosen)
    parents, chosen, child = parents[order], chosen[order], child[order]
    stays = _surviving_tree_children_mask(child, owner[parents], floor, secrets)
    pruned = pruned.scatter_reduce(0, owner[parents[~stays]], child[~stays], "amax")
    return parents[stays], chosen[stays], child[stays], pruned


def _surviving_tree_children_mask(child: Tensor, owner: Tensor, floor: float, secrets: int) -> Tensor:
    """(children,) whether each reaches the floor, or is the likeliest of a secret in which none does."""
    reached = child >= floor
    starving = torch.ones(secrets, dtype=torch.bool, device=child.device)
    starving[owner[reached]] = False
    best = child.new_full((secrets,), -math.inf).scatter_reduce(0, owner, child, "amax")
    champions = ((child == best[owner]) & starving[owner]).nonzero().squeeze(-1)
    first = torch.full((secrets,), len(child), device=child.device)
    first.scatter_reduce_(0, owner[champions], champions, "amin")  # of equals, the first
    reached[first[starving]] = True
    return reached


def _leaves_with_certificate(
    suffixes: Tensor, scores: Tensor, log_q: Tensor, pruned: float, rows: int, floor: float
) -> TreeLeaves:
    order = torch.argsort(log_q, descending=True, stable=True)
    log_q = log_q[order]
    best = float(log_q[0])
    certificate = Certificate(
        reached=best >= floor,
        certified=best >= pruned,  # what was pruned only loses probability with each further token (formulas.md A5)
        leftover=max(0.0, 1 - float(log_q.exp().sum())),
        pruned=math.exp(pruned),
    )
    ones = torch.ones_like(order)
    return TreeLeaves(suffixes[order], ones, scores[order], rows=rows, log_q=log_q, certificate=certificate)


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    prefixes: Tensor,
    length: int,
    beams: int,
    *,
    forbidden: tuple[int, ...] = (),
    prompt: Tensor | None = None,
) -> list[SearchResult]:
    """Beam search of width `beams` for exactly `length` tokens, as `generate(num_beams=...)` does it.

    Candidates of highest total log-probability under the distribution at temperature 1, untruncated, likeliest first;
    beams=1 is greedy. prefixes: (secrets, n_prefix); forbidden: tokens that are never taken (the distribution is not
    renormalised). Raises AuditError for beams < 1.
    """
    if beams < 1:
        raise AuditError(f"expected beams >= 1, got {beams}")
    secrets, spent = len(prefixes), 0
    rows = model.start(prefixes, length, prompt=prompt)
    first = torch.arange(secrets, device=model.device).unsqueeze(-1)
    total = torch.zeros(secrets, 1, dtype=torch.float64, device=model.device)
    paths = _TreeSearchPaths.at_root(first.flatten())
    for position in range(length):
        width = total.shape[1]  # the same of every secret
        spent += width
        distribution = rows.log_probs()
        if forbidden:
            distribution = distribution.clone()
            distribution[:, list(forbidden)] = -math.inf
        sums = total.unsqueeze(-1) + distribution.double().unflatten(0, (secrets, width))  # (secrets, width, V)
        total, at = sums.flatten(1).topk(min(beams, width * model.vocab_size), dim=-1)
        parents = (first * width + at // model.vocab_size).flatten()
        chosen = (at % model.vocab_size).flatten()
        paths.append_chosen_tokens(distribution, parents, chosen)
        if position + 1 < length:
            rows.advance(parents, chosen)
    possible = total.isfinite().sum(-1).tolist()  # impossible ones come last; they fill a beam wider than the support
    parts = (x.cpu().unflatten(0, (secrets, -1)) for x in (paths.tokens, paths.scores))
    return [
        SearchResult(suffixes[:count], torch.ones_like(suffixes[:count, 0]), token_scores[:count], rows=spent)
        for suffixes, token_scores, count in zip(*parts, possible, strict=True)
    ]
