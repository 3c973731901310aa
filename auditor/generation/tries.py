"""Count the texts that a model finds at least as likely as a canary.

These texts are in the canary's space, the set of all texts that it could have been. The exact
search traverses a trie (prefix tree) of the tokens of all texts, from the root. It prunes branches
whose nll (negative log-likelihood) exceeds the canary's. A leaf's nll comes from its parent's
distribution, without a forward pass (formulas.md A8). The search only reads next-token
distributions, so it also works on a defended model. nll is in nats and excludes the leading tokens
that all texts share.
"""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core import disk
from auditor.core.arrays import Floats, Ints
from auditor.core.canary_space import CanarySpace
from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel
from auditor.models.memory import BatchSizeLimit, choose_memory_budget, group_equal_shapes
from auditor.models.rows import Rows
from auditor.models.vocabulary import check_tokens_within_vocabulary

# Closer than this in nats, plus a millionth of the nll, float32 cannot tell two texts apart.
_TIE = 1e-5
_TEXTS_AT_ONCE = 10_000
_ROWS = 4096  # live nodes at once, if memory allows
_ROWS_BYTES = 2**30
_COMPRESSION = 1  # the fastest level of gzip
_MIN_TEXTS_CACHED = 20_000  # the trie of a smaller space is built as fast as it is read


# --- the trie ---


@dataclass(frozen=True)
class TrieLevel:
    """The n inner nodes at one depth of a trie, with their children.

    A child is a leaf or an inner node of the next depth. The leaves below node i have the tokens
    leaf_token[leaf_start[i] : leaf_start[i + 1]]. In the same way, its inner children have the
    tokens inner_token[inner_start[i] : inner_start[i + 1]].

    Attributes:
        leaf_start: start of each node's slice of `leaf_token`, (n + 1,).
        leaf_token: token of each leaf.
        inner_start: start of each node's slice of `inner_token`, (n + 1,).
        inner_token: token of each inner node at the next depth.
        leaves: number of leaves below each node, at all depths, (n,).
        nodes: number of inner nodes in each node's branch, counting the node itself, (n,).
    """

    leaf_start: Tensor
    leaf_token: Tensor
    inner_start: Tensor
    inner_token: Tensor
    leaves: Tensor
    nodes: Tensor

    def move_level(self, device: torch.device) -> TrieLevel:
        """Return a copy of this level with its tensors on the device."""
        columns = [getattr(self, field.name) for field in fields(self)]
        return TrieLevel(*(column.to(device) for column in columns))


@dataclass(frozen=True)
class Trie:
    """The tokens of all texts in a canary space, as a tree.

    Attributes:
        head: the leading tokens, which all texts share.
        levels: the tree, from the root down, with a leaf for each text.
        largest: the largest token id.
    """

    head: Tokens
    levels: tuple[TrieLevel, ...]
    largest: int  # token id

    @property
    def inner_node_count(self) -> int:
        """Number of inner nodes, which is the cost of a complete search."""
        return int(self.levels[0].nodes[0])


def encode_without_special_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encode each text separately, without adding special tokens."""
    if not getattr(tokenizer, "is_fast", False):
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoding = tokenizer(list(texts), add_special_tokens=False, **plain)
    ids: list[list[int]] = encoding["input_ids"]
    return ids


@lru_cache(maxsize=4)
def load_or_build_trie(space: CanarySpace, tokenizer: Any) -> Trie:
    """Return the trie of a space's texts; large tries are stored in the cache folder.

    Tokenising 10^6 texts takes a minute. Raise AuditError if the tokenizer maps two texts to the
    same tokens.

    Args:
        space: the canary space, the set of all texts that a canary could have been.
        tokenizer: tokenizer of the attacked model.
    """
    # The serialised backend describes the whole behaviour of a fast tokenizer; others have none.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_fast = getattr(tokenizer, "is_fast", False)
    if space.size < _MIN_TEXTS_CACHED or backend is None or not is_fast:
        return build_trie(space, tokenizer)
    # 2 is the version of the file format: raise it with every change of `TrieLevel`.
    recipe = repr((2, space.format, space.lists, backend.to_str()))
    key = hashlib.sha256(recipe.encode()).hexdigest()[:32]
    path = find_cache_folder() / "tries" / f"{key}.pt.gz"
    if path.is_file():
        return _load_trie(path)
    trie = build_trie(space, tokenizer)
    _save_trie(path, trie)
    return trie


def build_trie(space: CanarySpace, tokenizer: Any) -> Trie:
    """Build the trie of a space's texts, without the cache folder of `load_or_build_trie`."""
    tokens = _encode_space(space, tokenizer)
    # lexsort sorts by its last key first. The padding -1 is smallest: a text comes before the
    # texts that it is a prefix of.
    tokens = tokens[np.lexsort(tokens.T[::-1])]
    lengths = (tokens >= 0).sum(1)
    n_shared = np.cumprod(tokens[1:] == tokens[:-1], axis=1).sum(1)  # with the text before
    if (n_shared >= lengths[:-1]).any():
        raise AuditError(
            f"the tokenizer ({type(tokenizer).__name__}) encodes two texts of the format "
            f"{space.format!r} alike, or one text as the beginning of another: it lacks some of "
            "their characters or normalises them, so that they cannot be ranked; make canaries of "
            "another format for it"
        )
    # Each text needs at least one token after the head, for its leaf.
    head = int(min(n_shared.min(), lengths.min() - 1))
    levels = _build_trie_levels(tokens[:, head:], lengths - head, n_shared - head)
    return Trie(tuple(tokens[0, :head].tolist()), levels, int(tokens.max()))


def _encode_space(space: CanarySpace, tokenizer: Any) -> NDArray[np.int32]:
    """Return the tokens of all texts, of shape (texts, width), padded at the end with -1."""
    texts = space.texts()
    parts = []
    while chunk := list(islice(texts, _TEXTS_AT_ONCE)):
        ids = encode_without_special_tokens(tokenizer, chunk)
        lengths = np.array([len(row) for row in ids])
        padded = np.full((len(ids), lengths.max(initial=1)), -1, dtype=np.int32)
        # A boolean mask is filled row by row, in the order of the list.
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = list(chain.from_iterable(ids))
        parts.append(padded)
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in parts],
    )


def _build_trie_levels(
    tokens: NDArray[np.int32], lengths: Ints, n_shared: Ints
) -> tuple[TrieLevel, ...]:
    """Build the levels of a trie.

    Args:
        tokens: token ids of the texts after the shared head, (texts, width), sorted.
        lengths: number of tokens of each text, (texts,).
        n_shared: number of leading tokens that each text shares with the text before it, (texts -
            1,).
    """
    levels: list[TrieLevel] = []
    shared = np.concatenate([[-1], n_shared])
    for depth in range(int(lengths.max())):
        inside = lengths > depth  # texts that pass through a node of this depth
        # A text that shares fewer than `depth` tokens with its predecessor opens a node.
        node_of_text = np.unique(np.cumsum(shared < depth)[inside], return_inverse=True)[1]
        is_leaf = lengths[inside] == depth + 1
        opens_child = ~is_leaf & (shared < depth + 1)[inside]  # first text of each inner child
        n_nodes = int(node_of_text.max()) + 1
        depth_tokens = tokens[inside, depth].astype(np.int64)
        bounds = np.arange(n_nodes + 1)  # `node_of_text` is sorted, like the texts
        levels.append(
            TrieLevel(
                torch.from_numpy(np.searchsorted(node_of_text[is_leaf], bounds)),
                torch.from_numpy(depth_tokens[is_leaf]),
                torch.from_numpy(np.searchsorted(node_of_text[opens_child], bounds)),
                torch.from_numpy(depth_tokens[opens_child]),
                torch.bincount(torch.from_numpy(node_of_text), minlength=n_nodes),
                torch.ones(n_nodes, dtype=torch.long),
            )
        )
    # From the deepest level up, so that the counts of children are complete.
    for child_level, level in pairwise(reversed(levels)):
        parent_of_child = torch.repeat_interleave(
            torch.arange(len(level.nodes)),
            level.inner_start.diff(),
        )
        level.nodes.scatter_add_(0, parent_of_child, child_level.nodes)
    return tuple(levels)


def _save_trie(path: Path, trie: Trie) -> None:
    """Write the trie atomically, because two processes may write it at the same time."""
    levels = list(map(vars, trie.levels))
    buffer = io.BytesIO()
    torch.save((trie.head, levels, trie.largest), buffer)
    with disk.open_atomic_replacement(path) as scratch:
        scratch.write_bytes(gzip.compress(buffer.getvalue(), _COMPRESSION))


def _load_trie(path: Path) -> Trie:
    buffer = io.BytesIO(gzip.decompress(path.read_bytes()))
    head, columns, largest = torch.load(buffer)
    levels = []
    for of_level in columns:
        levels.append(TrieLevel(**of_level))
    return Trie(head, tuple(levels), largest)


# --- nlls ---


@torch.no_grad()
def compute_continuation_nlls(
    model: LanguageModel,
    context: Tokens,
    tails: Sequence[Tokens],
) -> Floats:
    """Return the teacher-forced nll of each tail given the context, (tails,) in nats."""
    nlls = np.zeros(len(tails))
    for indices in group_equal_shapes([(0, len(tail)) for tail in tails], 512):
        suffixes = torch.tensor([tails[i] for i in indices], device=model.device)
        prefix = torch.tensor([context], device=model.device).expand(len(suffixes), -1)
        log_probs = model.token_log_probs(prefix, suffixes).double().sum(-1)
        nlls[indices] = -log_probs.cpu().numpy()
    return nlls


def add_tie_margin(nll: Floats) -> Floats:
    """Return each nll plus a small margin, in nats: an nll up to this sum counts as a tie.

    Rounding errors between equally likely texts are smaller than the margin.
    """
    return nll + _TIE * (1 + nll / 10)  # formulas.md B6: the rank is of loss(s') <= loss(s)


# --- the search ---


@dataclass(frozen=True)
class LeafCount:
    """The leaves that a search counted.

    Attributes:
        at_most: for each limit, the number of visited leaves whose nll does not exceed it,
            (limits,).
        unseen: number of leaves that were not visited because the node budget was spent.
        rows: number of visited nodes.
    """

    at_most: Ints
    unseen: int
    rows: int


@dataclass(frozen=True)
class _TrieBranches:
    """Inner nodes of one depth at which the search continues, and the token paths to them."""

    depth: int
    node: Tensor  # (live,) in their level
    nll: Tensor  # (live,) float64
    path: Tensor  # (live, depth)

    def __len__(self) -> int:
        return len(self.node)

    def slice_branches(self, index: slice) -> _TrieBranches:
        return _TrieBranches(self.depth, self.node[index], self.nll[index], self.path[index])


@torch.no_grad()
def count_leaves_within_nll(
    model: LanguageModel,
    tree: Trie,
    context: Tokens,
    limits: Sequence[float],
    *,
    nodes: int = 0,
    max_rows: int | None = None,
    progress: Callable[[int, int], None] = lambda n_nodes, total: None,
) -> LeafCount:
    """Count the leaves whose nll given the context is at most each limit.

    A leaf is a text of the canary space. The search is depth-first in batches of nodes, most likely
    first.

    Args:
        model: the attacked model.
        tree: the trie of all texts.
        context: token ids that end with the trie's head.
        limits: nll in nats.
        nodes: largest number of visited nodes; 0 for no limit.
        max_rows: largest number of nodes in memory, by default as many as fit. The counts do not
            depend on it.
        progress: callback(nodes visited or dropped, all nodes).

    Raises:
        AuditError: if the trie has tokens outside the model's vocabulary.
    """
    check_model_has_trie_tokens(model, tree)
    if max_rows is None:
        row_bytes = model.row_bytes(len(context) + len(tree.levels))
        memory_rows = choose_memory_budget(model.device, _ROWS_BYTES) // row_bytes
        max_rows = min(_ROWS, max(1, memory_rows))

    def count_leaves(max_rows: int) -> LeafCount:
        search = _TrieLeafSearch(tree, limits, nodes, model.device)

        def report_progress() -> None:
            progress(search.n_visited + search.n_cut, tree.inner_node_count)

        search.walk_branches(model, context, max_rows, report_progress)
        at_most = torch.cumsum(search.leaves_by_limit[:-1], 0).cpu().numpy()
        # The search sorts its limits: the rank of each limit restores the caller's order.
        ranks = np.argsort(np.argsort(limits, kind="stable"), kind="stable")
        return LeafCount(at_most[ranks], search.n_unseen_leaves, search.n_visited)

    # A search that ran out of memory starts again: its partial counts are not an answer.
    return BatchSizeLimit(max_rows).run_within_memory(count_leaves)[1]


class _TrieLeafSearch:
    """State of a trie search, with the counts so far.

    Attributes:
        n_visited: number of visited nodes.
        n_cut: number of nodes in pruned branches.
        n_unseen_leaves: number of leaves that were not visited because the node budget was spent.
    """

    def __init__(
        self,
        tree: Trie,
        limits: Sequence[float],
        nodes: int,
        device: torch.device,
    ) -> None:
        self.levels = [level.move_level(device) for level in tree.levels]
        self.limits = torch.tensor(sorted(limits), dtype=torch.float64, device=device)
        # Leaves by the first limit that is not below their nll.
        self.leaves_by_limit = torch.zeros(len(limits) + 1, dtype=torch.long, device=device)
        self.budget = nodes
        self.n_visited = 0
        self.n_cut = 0
        self.n_unseen_leaves = 0

    def walk_branches(
        self,
        model: LanguageModel,
        context: Tokens,
        max_rows: int,
        report_progress: Callable[[], None],
    ) -> None:
        """Search the trie depth-first, with at most `max_rows` nodes in memory."""
        head = torch.tensor([context], device=model.device)
        root = self.leaves_by_limit.new_zeros(1)
        stack = [_TrieBranches(0, root, root.double(), root.new_empty(1, 0))]
        while stack:
            live = self.limit_branches(stack.pop())
            if not len(live):
                continue
            prefixes = torch.cat([head.expand(len(live), -1), live.path], dim=1)
            rows = model.start(prefixes, len(self.levels) - live.depth)
            while len(live):
                children, parents = self.expand_branches(live, rows)
                report_progress()
                if not len(children):  # also below the deepest level, which has no sizes
                    break
                sizes = self.levels[children.depth].nodes[children.node]
                if int(sizes.sum()) > max_rows:
                    # Reversed: the likeliest must come off the stack first.
                    stack += reversed(_split_branches(children, sizes, max_rows))
                    break
                live = self.limit_branches(children)
                if len(live):
                    # The budget drops branches from the end only.
                    rows.advance(parents[: len(live)], live.path[:, -1])

    def limit_branches(self, live: _TrieBranches) -> _TrieBranches:
        """Return the branches within the node budget; the leaves of all others count as unseen."""
        n_affordable = max(0, self.budget - self.n_visited)
        if self.budget == 0 or n_affordable >= len(live):
            return live
        n_leaves = self.levels[live.depth].leaves[live.node[n_affordable:]]
        self.n_unseen_leaves += int(n_leaves.sum())
        return live.slice_branches(slice(n_affordable))

    def expand_branches(
        self,
        live: _TrieBranches,
        rows: Rows,
    ) -> tuple[_TrieBranches, Tensor]:
        """Expand the nodes of `live` by one level, and count the children that are leaves.

        The leaves are added to `leaves_by_limit`. Children that are too unlikely to lead to a leaf
        within the limits are dropped.

        Args:
            live: the nodes.
            rows: the model's state for the texts of `live`.

        Returns:
            The remaining inner children, most likely first.
            The index in `live` of each child's parent.
        """
        self.n_visited += len(live)
        level = self.levels[live.depth]
        leaf_parents, leaves = _index_children(level.leaf_start, live.node)
        inner_parents, inner = _index_children(level.inner_start, live.node)
        parents = torch.cat([leaf_parents, inner_parents])
        tokens = torch.cat([level.leaf_token[leaves], level.inner_token[inner]])
        nll = live.nll[parents] - rows.token_log_probs(parents, tokens).double()
        # The first limit >= nll: ties are within it.
        first_limits = torch.searchsorted(self.limits, nll[: len(leaves)])
        self.leaves_by_limit += torch.bincount(first_limits, minlength=len(self.leaves_by_limit))
        inner_nll = nll[len(leaves) :]
        inner_tokens = tokens[len(leaves) :]
        order = torch.argsort(inner_nll, stable=True)
        too_unlikely = inner_nll > self.limits[-1]
        survivors = order[~too_unlikely[order]]
        if bool(too_unlikely.any()):
            self.n_cut += int(self.levels[live.depth + 1].nodes[inner[too_unlikely]].sum())
        parents = inner_parents[survivors]
        paths = torch.cat([live.path[parents], inner_tokens[survivors].unsqueeze(-1)], dim=1)
        children = _TrieBranches(live.depth + 1, inner[survivors], inner_nll[survivors], paths)
        return children, parents


def check_model_has_trie_tokens(model: LanguageModel, tree: Trie) -> None:
    """Raise AuditError if the trie has tokens outside the model's vocabulary."""
    check_tokens_within_vocabulary("the canaries", [(tree.largest,)], model.vocab_size, model.name)


def _index_children(start: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
    """Return two indices for each child of these nodes, both of shape (children,).

    The first is the index in `node` of the child's parent. The second is the child's index among
    all children at its depth.
    """
    first = start[node]
    sizes = start[node + 1] - first
    parent = torch.repeat_interleave(torch.arange(len(node), device=node.device), sizes)
    child_offsets = torch.cumsum(sizes, 0) - sizes
    within_parent = torch.arange(len(parent), device=node.device) - child_offsets[parent]
    return parent, first[parent] + within_parent


def _split_branches(
    live: _TrieBranches,
    sizes: Tensor,
    max_nodes: int,
) -> list[_TrieBranches]:
    """Split the branches into groups of at most `max_nodes` nodes.

    `sizes` is the number of nodes in each branch, at all depths. A branch that is too large becomes
    a group of its own.
    """
    total = 0
    cuts = [0]
    for i, n_nodes in enumerate(sizes.tolist()):
        if total + n_nodes > max_nodes and i > cuts[-1]:
            cuts.append(i)
            total = 0
        total += n_nodes
    return [live.slice_branches(slice(a, b)) for a, b in pairwise([*cuts, len(live)])]
