"""Search for candidate suffixes without sampling: in a decoding's threshold tree, or with beams.

Both searches only read next-token distributions. So they also work on a defended model, but claims
about sampled tokens do not cover them. The searches do not use the true suffixes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Certificate
from auditor.generation.sample import SuffixCandidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import Decoding

# Nats: the search keeps a node this little below the threshold, so that rounding loses no node that
# reaches it.
ROUNDING = 1e-5
MAX_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class SearchResult(SuffixCandidates):
    """Candidates found by a search, each with count 1.

    `rows` is the number of inputs that the model read for this secret.
    """

    rows: int

    def count_forward_rows(self) -> int:
        return self.rows


@dataclass(frozen=True, kw_only=True)
class TreeLeaves(SearchResult):
    """The suffixes that a tree search found, most likely first.

    Attributes:
        log_q: log-probability of each suffix under the decoding, (suffixes,), in float64 nats.
        certificate: bounds on the probabilities of all other suffixes.
    """

    log_q: Tensor
    certificate: Certificate

    def select_candidates(self, indices: Tensor) -> Self:
        return replace(super().select_candidates(indices), log_q=self.log_q[indices])


@dataclass
class _TreeSearchPaths:
    """The partial suffixes (nodes) that a tree search will extend, of shape (nodes, depth).

    `scores` are the log-probabilities of their tokens under the attacked model without truncation,
    in nats.
    """

    tokens: Tensor
    scores: Tensor

    @classmethod
    def start_root(cls, nodes: Tensor) -> _TreeSearchPaths:
        n_nodes = len(nodes)
        return cls(nodes.new_empty(n_nodes, 0), torch.empty(n_nodes, 0, device=nodes.device))

    def append_tokens(self, distribution: Tensor, parents: Tensor, chosen: Tensor) -> None:
        token_scores = distribution[parents, chosen].unsqueeze(-1)
        self.tokens = torch.cat([self.tokens[parents], chosen.unsqueeze(-1)], dim=-1)
        self.scores = torch.cat([self.scores[parents], token_scores], dim=-1)


def check_tree_search_threshold(threshold: float) -> None:
    """Raise AuditError if the threshold is outside (0, 1]."""
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
    """Find every suffix of `length` tokens whose decoding probability is >= threshold.

    The search is breadth-first. A node is a partial suffix, which is one input of the model. Nodes
    below the threshold are dropped. Probabilities of one length sum to at most 1, so at most
    1/threshold nodes remain, and no suffix is missed. If a secret would lose all its nodes, its
    most likely node is kept as a guess, and the certificate says so.

    Args:
        model: the attacked model.
        prefixes: token ids (secrets, n_prefix).
        length: number of tokens in a suffix.
        decoding: the decoding whose probabilities count.
        threshold: smallest probability of a suffix.
        prompt: soft prompt (P, d) or None.
        max_rows: largest number of inputs at once. If several prefixes need more, they are searched
            in two halves. A single prefix may need more.

    Raises:
        AuditError: if the threshold is outside (0, 1].
    """
    check_tree_search_threshold(threshold)
    n_secrets = len(prefixes)
    floor = math.log(threshold) - ROUNDING
    rows = model.start(prefixes, length, prompt=prompt)
    secret_of_node = torch.arange(n_secrets, device=model.device)  # ascending
    log_q = torch.zeros(n_secrets, dtype=torch.float64, device=model.device)
    max_pruned = torch.full_like(log_q, -math.inf)
    n_rows = torch.zeros_like(secret_of_node)
    paths = _TreeSearchPaths.start_root(secret_of_node)
    for position in range(length):
        n_rows += torch.bincount(secret_of_node, minlength=n_secrets)
        distribution = rows.log_probs()
        parents, chosen, log_q, step_pruned = _expand_tree(
            decoding, distribution, log_q, secret_of_node, floor, n_secrets
        )
        max_pruned = torch.maximum(max_pruned, step_pruned)
        paths.append_tokens(distribution, parents, chosen)
        secret_of_node = secret_of_node[parents]
        if len(secret_of_node) > max_rows and n_secrets > 1:
            search = partial(find_suffixes_above_threshold, prompt=prompt, max_rows=max_rows)
            first, second = prefixes.tensor_split(2)
            return [
                *search(model, first, length, decoding, threshold),
                *search(model, second, length, decoding, threshold),
            ]
        if position + 1 < length:
            rows.advance(parents, chosen)
    n_leaves = torch.bincount(secret_of_node, minlength=n_secrets).tolist()
    return list(
        map(
            partial(_certify_leaves, floor=floor),
            paths.tokens.cpu().split(n_leaves),
            paths.scores.cpu().split(n_leaves),
            log_q.cpu().split(n_leaves),
            max_pruned.tolist(),
            n_rows.tolist(),
        )
    )


def _expand_tree(
    decoding: Decoding,
    distribution: Tensor,
    log_q: Tensor,
    secret_of_node: Tensor,
    floor: float,
    n_secrets: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expand the nodes (partial suffixes), and drop children with log-probability below `floor`.

    If a secret would lose all its children, its most likely child is kept. Only tokens that the
    decoding can draw are read.

    Args:
        decoding: the decoding whose probabilities count.
        distribution: next-token log-probabilities of each node, (nodes, V).
        log_q: log-probability of each node under the decoding, (nodes,) in nats.
        secret_of_node: index of each node's secret, (nodes,).
        floor: smallest log-probability of a kept child, in nats.
        n_secrets: number of secrets.

    Returns:
        Parents, tokens and log_q (nats) of the remaining children, sorted by parent and token.
        The largest dropped log_q of each secret, (secrets,).
    """
    groups = []
    pruned = log_q.new_full((n_secrets,), -math.inf)
    for nodes, tokens, weights in decoding.group_kept_tokens(distribution):
        step = weights.log() - weights.sum(-1, keepdim=True).log()
        # float32 is enough: `floor` is below the threshold by ROUNDING, more than float32 rounds.
        survives = step >= (floor - log_q[nodes]).to(step.dtype).unsqueeze(-1)
        # Keep the likeliest token too, for a secret in which nothing reaches the floor.
        survives.scatter_(-1, step.argmax(-1, keepdim=True), True)
        best_pruned = log_q[nodes] + step.masked_fill(survives, -math.inf).amax(-1).double()
        pruned = pruned.scatter_reduce(0, secret_of_node[nodes], best_pruned, "amax")
        row, column = survives.nonzero(as_tuple=True)
        token = column
        if tokens is not None:
            token = tokens[row, column]
        child_log_q = log_q[nodes[row]] + step[row, column].double()
        groups.append((nodes[row], token, child_log_q))
    parents, chosen, child_log_q = (torch.cat(column) for column in zip(*groups, strict=True))
    # Groups come in any order. Sorted by parent and token, secrets ascend again, as the split into
    # secrets needs.
    order = torch.argsort(parents * distribution.shape[-1] + chosen)
    parents = parents[order]
    chosen = chosen[order]
    child_log_q = child_log_q[order]
    secret_of_child = secret_of_node[parents]
    survives = _mark_surviving_children(child_log_q, secret_of_child, floor, n_secrets)
    pruned = pruned.scatter_reduce(0, secret_of_child[~survives], child_log_q[~survives], "amax")
    return parents[survives], chosen[survives], child_log_q[survives], pruned


def _mark_surviving_children(
    child_log_q: Tensor,
    secret_of_child: Tensor,
    floor: float,
    n_secrets: int,
) -> Tensor:
    """Return a mask (children,) of the children whose log-probability is at least the floor.

    If a secret has no such child, its most likely one is marked.
    """
    survives = child_log_q >= floor
    device = child_log_q.device
    below_floor = torch.ones(n_secrets, dtype=torch.bool, device=device)
    below_floor[secret_of_child[survives]] = False
    lowest = child_log_q.new_full((n_secrets,), -math.inf)
    best = lowest.scatter_reduce(0, secret_of_child, child_log_q, "amax")
    is_champion = (child_log_q == best[secret_of_child]) & below_floor[secret_of_child]
    champions = is_champion.nonzero().squeeze(-1)
    # The first of equally likely children.
    first = torch.full((n_secrets,), len(child_log_q), device=device)
    first.scatter_reduce_(0, secret_of_child[champions], champions, "amin")
    survives[first[below_floor]] = True
    return survives


def _certify_leaves(
    suffixes: Tensor, scores: Tensor, log_q: Tensor, pruned: float, rows: int, floor: float
) -> TreeLeaves:
    """Return one secret's suffixes, most likely first, with a certificate for the search.

    Args:
        suffixes: token ids of the suffixes found, (suffixes, length).
        scores: log-probability of each token at temperature 1 without truncation, (suffixes,
            length).
        log_q: log-probability of each suffix under the decoding, (suffixes,) in nats.
        pruned: the largest dropped log_q, in nats.
        rows: number of inputs that the model read for this secret.
        floor: smallest log_q that counts as reaching the threshold, in nats.
    """
    order = torch.argsort(log_q, descending=True, stable=True)
    log_q = log_q[order]
    best = float(log_q[0])
    return TreeLeaves(
        suffixes[order],
        torch.ones_like(order),
        scores[order],
        rows=rows,
        log_q=log_q,
        certificate=Certificate(
            reached=best >= floor,
            # Pruned nodes only lose probability with each further token (formulas.md A5).
            certified=best >= pruned,
            leftover=max(0.0, 1 - float(log_q.exp().sum())),
            pruned=math.exp(pruned),
        ),
    )


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    prefixes: Tensor,
    length: int,
    beams: int,
    *,
    forbidden: tuple[int, ...],
    prompt: Tensor | None = None,
) -> list[SearchResult]:
    """Search for the most likely suffixes, as `generate(num_beams=beams)` does.

    Candidates are ranked by total log-probability at temperature 1 without truncation. The result
    has the candidates of each prefix, most likely first.

    Args:
        model: the attacked model.
        prefixes: token ids (secrets, n_prefix).
        length: number of tokens in a suffix.
        beams: number of partial suffixes kept at each step; 1 is greedy decoding.
        forbidden: tokens that are never chosen; the distribution is not renormalised.
        prompt: soft prompt (P, d) or None.

    Raises:
        AuditError: if beams < 1.
    """
    if beams < 1:
        raise AuditError(f"expected beams >= 1, got {beams}")
    n_secrets = len(prefixes)
    n_rows = 0
    rows = model.start(prefixes, length, prompt=prompt)
    first = torch.arange(n_secrets, device=model.device).unsqueeze(-1)
    total = torch.zeros(n_secrets, 1, dtype=torch.float64, device=model.device)
    paths = _TreeSearchPaths.start_root(first.flatten())
    for position in range(length):
        width = total.shape[1]  # the same for every secret
        n_rows += width
        distribution = rows.log_probs()
        if forbidden:
            distribution = distribution.clone()
            distribution[:, list(forbidden)] = -math.inf
        step = distribution.double().unflatten(0, (n_secrets, width))
        child_totals = total.unsqueeze(-1) + step  # (secrets, width, V)
        n_beams = min(beams, width * model.vocab_size)
        total, children = child_totals.flatten(1).topk(n_beams, dim=-1)
        parents = (first * width + children // model.vocab_size).flatten()
        chosen = (children % model.vocab_size).flatten()
        paths.append_tokens(distribution, parents, chosen)
        if position + 1 < length:
            rows.advance(parents, chosen)
    # Impossible candidates come last: they fill a beam that is wider than the support.
    n_possible = total.isfinite().sum(-1).tolist()
    return _collect_beams(paths, n_possible, n_rows)


def _collect_beams(
    paths: _TreeSearchPaths, n_possible: Sequence[int], n_rows: int
) -> list[SearchResult]:
    """Return the beams of each secret, without those that have probability 0.

    `n_possible` holds, for each secret, the number of beams with a positive probability; they come
    first. `n_rows` is the number of inputs that the model read for each secret.
    """
    tokens = paths.tokens.cpu().unflatten(0, (len(n_possible), -1))
    token_scores = paths.scores.cpu().unflatten(0, (len(n_possible), -1))
    results = []
    for suffixes, scores, count in zip(tokens, token_scores, n_possible, strict=True):
        counts = torch.ones_like(suffixes[:count, 0])
        results.append(SearchResult(suffixes[:count], counts, scores[:count], rows=n_rows))
    return results
