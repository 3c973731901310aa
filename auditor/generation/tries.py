"""How many texts of a space a model finds at least as likely as a canary: exact by search, or estimated by sampling.

The exact search walks the trie of what the tokenizer makes of every text, from the root: a branch whose accumulated nll
already exceeds the canary's is cut off whole, and a leaf is read from its parent's distribution without a forward of
its own (formulas.md A8). Stands on decoding rows and distributions alone, so a defended model is searched as any other.
nll in nats, of the tokens behind the ones that all texts share. Knows nothing of attacks, files of results or
insertions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core import disk
from auditor.core.canary_space import CanarySpace
from auditor.core.disk import cache_folder
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel, Rows
from auditor.models.decoding import index_batches_of_equal_shape
from auditor.models.memory import BatchSizeLimit, decoding_memory_budget
from auditor.models.vocabulary import check_tokens_within_vocabulary

_TIE = 1e-5  # nats, and a millionth of the nll: closer than this, float32 distributions cannot tell two texts apart
_TEXTS_AT_ONCE = 10_000
_ROWS = 4096  # live nodes at once, where memory allows as many
_ROWS_BYTES = 2**30
_KEPT_ON_DISK = 20_000  # texts: the trie of a smaller space is made as fast as it is read


# --- the trie ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrieLevel:
    """The n inner nodes of one depth. Children of node i: start[i]:start[i + 1], leaves and inner ones apart."""

    leaf_start: Tensor  # (n + 1,)
    leaf_token: Tensor  # (leaves,)
    inner_start: Tensor  # (n + 1,)
    inner_token: Tensor  # (inner nodes of the next depth,), in their order
    leaves: Tensor  # (n,) in the whole branch
    nodes: Tensor  # (n,) inner nodes in the whole branch, itself included


@dataclass(frozen=True)
class Trie:
    """What a tokenizer makes of all texts of a space: `head`, which all share, and a tree with the texts as leaves."""

    head: Tokens
    levels: tuple[TrieLevel, ...]
    largest: int  # token id

    @property
    def leaf_count(self) -> int:
        return int(self.levels[0].leaves[0])

    @property
    def inner_node_count(self) -> int:
        """Inner nodes: as many forward rows as a search without any pruning takes."""
        return int(self.levels[0].nodes[0])


def encode_without_special_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text alone, no special ones added."""
    if not getattr(tokenizer, "is_fast", False):
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, **plain)["input_ids"]
    return ids


@lru_cache(maxsize=4)
def load_or_build_trie(space: CanarySpace, tokenizer: Any) -> Trie:
    """The trie of a space's texts. Large ones are kept in the cache folder: tokenising 10^6 texts takes a minute.

    Raises AuditError where the tokenizer cannot tell two texts apart.
    """
    written_out = getattr(tokenizer, "backend_tokenizer", None)  # its whole behaviour, which others do not tell
    if space.size < _KEPT_ON_DISK or written_out is None or not getattr(tokenizer, "is_fast", False):
        return build_trie(space, tokenizer)
    # 1: the form of the file, to be raised with every change of `TrieLevel`.
    key = hashlib.sha256(repr((1, space.format, space.lists, written_out.to_str())).encode()).hexdigest()[:32]
    path = cache_folder() / "tries" / f"{key}.npz"
    if path.is_file():
        return _load_trie(path)
    made = build_trie(space, tokenizer)
    _save_trie(path, made)
    return made


def build_trie(space: CanarySpace, tokenizer: Any) -> Trie:
    """As `load_or_build_trie`, without the cache folder."""
    texts, parts = space.texts(), []
    while chunk := list(islice(texts, _TEXTS_AT_ONCE)):
        ids = encode_without_special_tokens(tokenizer, chunk)
        lengths = np.array([len(row) for row in ids])
        padded = np.full((len(ids), lengths.max(initial=1)), -1, dtype=np.int32)
        # A boolean mask is filled row by row, in the order of the list.
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = [token for row in ids for token in row]
        parts.append(padded)
    width = max(part.shape[1] for part in parts)
    tokens = np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in parts])
    # lexsort sorts by its last key first. -1 comes first: a text stands before those that it begins.
    tokens = tokens[np.lexsort(tokens.T[::-1])]
    lengths = (tokens >= 0).sum(1)
    same = np.cumprod(tokens[1:] == tokens[:-1], axis=1).sum(1)  # tokens that a text shares with the one before it
    if (same >= lengths[:-1]).any():
        raise AuditError(
            f"the tokenizer ({type(tokenizer).__name__}) writes two texts of the format {space.format!r} alike, or one "
            "as the beginning of another: it lacks some of their characters or normalises them, so that they cannot be "
            "ranked; make canaries of another format for it"
        )
    head = int(min(same.min(), lengths.min() - 1))  # leaves each text a token of its own, for its leaf
    levels = _trie_levels_from_sorted_tokens(tokens[:, head:], lengths - head, same - head)
    return Trie(tuple(tokens[0, :head].tolist()), levels, int(tokens.max()))


def _trie_levels_from_sorted_tokens(
    tokens: NDArray[np.int32], lengths: NDArray[np.int64], same: NDArray[np.int64]
) -> tuple[TrieLevel, ...]:
    """tokens: (texts, width), sorted; same: (texts - 1,) tokens shared with the text before."""
    made: list[TrieLevel] = []
    shared = np.concatenate([[-1], same])
    for depth in range(int(lengths.max())):
        inside = lengths > depth  # texts that pass through a node of this depth
        # A text that shares fewer than `depth` tokens with the one before it opens a node.
        node = np.unique(np.cumsum(shared < depth)[inside], return_inverse=True)[1]  # of each text
        last = lengths[inside] == depth + 1
        child = ~last & (shared < depth + 1)[inside]  # the first text of each inner child
        count, own = int(node.max()) + 1, tokens[inside, depth]
        bounds = np.arange(count + 1)  # `node` is sorted, as the texts are
        made.append(
            TrieLevel(
                torch.from_numpy(np.searchsorted(node[last], bounds)),
                torch.from_numpy(own[last].astype(np.int64)),
                torch.from_numpy(np.searchsorted(node[child], bounds)),
                torch.from_numpy(own[child].astype(np.int64)),
                torch.bincount(torch.from_numpy(node), minlength=count),
                torch.ones(count, dtype=torch.long),
            )
        )
    # From the deepest level up, so that the counts of children are complete.
    for level, below in zip(made[-2::-1], made[:0:-1], strict=True):
        owner = torch.repeat_interleave(torch.arange(len(level.nodes)), level.inner_start.diff())
        level.nodes.scatter_add_(0, owner, below.nodes)
    return tuple(made)


def _save_trie(path: Path, made: Trie) -> None:
    """Atomically: two processes may write the same trie at once."""
    levels, columns = enumerate(made.levels), fields(TrieLevel)
    arrays = {f"{f.name}-{i}": getattr(level, f.name).numpy() for i, level in levels for f in columns}
    with disk.atomic_replacement_file(path) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, head=np.array(made.head, dtype=np.int64), largest=made.largest, **arrays)


def _load_trie(path: Path) -> Trie:
    with np.load(path) as held:
        depth = sum(name.startswith("nodes-") for name in held.files)
        levels = [
            TrieLevel(*(torch.from_numpy(held[f"{f.name}-{i}"]) for f in fields(TrieLevel))) for i in range(depth)
        ]
        return Trie(tuple(held["head"].tolist()), tuple(levels), int(held["largest"]))


# --- nlls -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def continuation_nlls(model: LanguageModel, context: Tokens, tails: Sequence[Tokens]) -> NDArray[np.float64]:
    """(tails,): nll in nats of each tail behind the context, teacher-forced."""
    found = np.zeros(len(tails))
    for indices in index_batches_of_equal_shape([(0, len(tail)) for tail in tails], 512):
        own = torch.tensor([tails[i] for i in indices], device=model.device)
        prefix = torch.tensor([context], device=model.device).expand(len(own), -1)
        found[indices] = -model.token_log_probs(prefix, own).double().sum(-1).cpu().numpy()
    return found


def leaf_nll_limit_with_tie_margin(nll: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest nll that counts as equal to this: ties, and what rounding may have parted, count against exposure."""
    return nll + _TIE * (1 + nll / 10)  # formulas.md B6: the rank is of loss(s') <= loss(s)


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafCount:
    """at_most: (limits,) leaves whose nll is at most each limit, of those that were seen; unseen: leaves that were not,
    for want of nodes; rows: nodes that were looked at.
    """

    at_most: NDArray[np.int64]
    unseen: int
    rows: int


@dataclass(frozen=True)
class _TrieBranches:
    """Live inner nodes of one depth, with the tokens that lead to them."""

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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LeafCount:
    """How many leaves have an nll of at most each limit, behind the context, which ends in the trie's head.

    Branches are walked depth-first, likeliest first, many nodes at once. nodes: look at no more than so many, 0: as
    many as it takes. max_rows: live nodes at once, by default what memory allows; the counts do not depend on it.
    progress: told how many nodes are looked at or cut off, of all.
    Raises AuditError where the trie has tokens that the model does not.
    """
    check_model_has_trie_tokens(model, tree)
    if max_rows is None:
        row = model.row_bytes(len(context) + len(tree.levels))
        max_rows = min(_ROWS, max(1, decoding_memory_budget(model.device, _ROWS_BYTES) // row))

    def count(max_rows: int) -> LeafCount:
        search = _TrieLeafSearch(tree, limits, nodes, model.device)
        search.walk(model, context, max_rows, lambda: progress(search.spent + search.cut, tree.inner_node_count))
        at_most = torch.cumsum(search.found[:-1], 0).cpu().numpy()
        # The search sorts its limits: the rank of each limit brings the counts back into the order given.
        places = np.argsort(np.argsort(limits, kind="stable"), kind="stable")
        return LeafCount(at_most[places], search.unseen, search.spent)

    # A search that outgrew memory begins anew: what it had counted until then is no answer.
    return BatchSizeLimit(max_rows).run_within_memory(count)[1]


class _TrieLeafSearch:
    """What a walk has found out so far. `spent`: nodes it has looked at; `cut`: those of branches that it need not look
    at; `unseen`: leaves it could not pay for.
    """

    def __init__(self, tree: Trie, limits: Sequence[float], nodes: int, device: torch.device) -> None:
        self.levels = [
            TrieLevel(*(getattr(level, f.name).to(device) for f in fields(TrieLevel))) for level in tree.levels
        ]
        self.limits = torch.tensor(sorted(limits), dtype=torch.float64, device=device)
        self.found = torch.zeros(len(limits) + 1, dtype=torch.long, device=device)  # leaves by the first limit reached
        self.budget, self.spent, self.cut, self.unseen = nodes, 0, 0, 0

    def walk(self, model: LanguageModel, context: Tokens, max_rows: int, progress: Callable[[], None]) -> None:
        """Depth-first, `max_rows` live nodes at once."""
        head, root = torch.tensor([context], device=model.device), self.found.new_zeros(1)
        waiting = [_TrieBranches(0, root, root.double(), root.new_empty(1, 0))]
        while waiting:
            live = self.branches_within_node_budget(waiting.pop())
            if not len(live):
                continue
            prefixes = torch.cat([head.expand(len(live), -1), live.path], dim=1)
            rows = model.start(prefixes, len(self.levels) - live.depth)
            while len(live):
                children, parents = self.count_leaves_and_expand(live, rows)
                progress()
                # Below the deepest level there is no level to look up.
                sizes = self.levels[children.depth].nodes[children.node] if len(children) else children.node
                if int(sizes.sum()) > max_rows:
                    # A stack: the likeliest are to come off it first.
                    waiting += reversed(_split_trie_branches_by_node_count(children, sizes, max_rows))
                    break
                live = self.branches_within_node_budget(children)
                if len(live):
                    rows.advance(parents[: len(live)], live.path[:, -1])  # the budget drops from the end alone

    def branches_within_node_budget(self, live: _TrieBranches) -> _TrieBranches:
        """The branches that the nodes left pay for; the others stay unseen."""
        left = max(0, self.budget - self.spent)
        if self.budget == 0 or left >= len(live):
            return live
        self.unseen += int(self.levels[live.depth].leaves[live.node[left:]].sum())
        return live.slice_branches(slice(left))

    def count_leaves_and_expand(self, live: _TrieBranches, rows: Rows) -> tuple[_TrieBranches, Tensor]:
        """Counts the leaves below the live nodes; their inner children that may lead to more, likeliest first, and the
        place of the parent of each.
        """
        self.spent += len(live)
        level = self.levels[live.depth]
        leaf_of, leaf = _trie_parent_and_child_indices(level.leaf_start, live.node)
        inner_of, inner = _trie_parent_and_child_indices(level.inner_start, live.node)
        parents, tokens = torch.cat([leaf_of, inner_of]), torch.cat([level.leaf_token[leaf], level.inner_token[inner]])
        nll = live.nll[parents] - rows.token_log_probs(parents, tokens).double()
        reached = torch.searchsorted(self.limits, nll[: len(leaf)])  # the first limit >= nll: ties are within it
        self.found += torch.bincount(reached, minlength=len(self.found))
        nll, tokens = nll[len(leaf) :], tokens[len(leaf) :]
        order = torch.argsort(nll, stable=True)
        far = nll > self.limits[-1]
        stays = order[~far[order]]
        if bool(far.any()):
            self.cut += int(self.levels[live.depth + 1].nodes[inner[far]].sum())
        parents = inner_of[stays]
        paths = torch.cat([live.path[parents], tokens[stays].unsqueeze(-1)], dim=1)
        return _TrieBranches(live.depth + 1, inner[stays], nll[stays], paths), parents


def check_model_has_trie_tokens(model: LanguageModel, tree: Trie) -> None:
    """Raises AuditError where the trie has tokens that the model does not."""
    check_tokens_within_vocabulary("the canaries", [(tree.largest,)], model.vocab_size, model.name)


def _trie_parent_and_child_indices(start: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
    """Of the chosen nodes: the place of each child's parent among them, and of the child in its level."""
    first, sizes = start[node], start[node + 1] - start[node]
    parent = torch.repeat_interleave(torch.arange(len(node), device=node.device), sizes)
    within = torch.arange(len(parent), device=node.device) - (torch.cumsum(sizes, 0) - sizes)[parent]
    return parent, first[parent] + within


def _split_trie_branches_by_node_count(live: _TrieBranches, size: Tensor, most: int) -> list[_TrieBranches]:
    """The branches in runs whose nodes, all depths together, are at most `most`; a larger one stands alone."""
    total, cuts = 0, [0]
    for i, nodes in enumerate(size.tolist()):
        if total + nodes > most and i > cuts[-1]:
            cuts.append(i)
            total = 0
        total += nodes
    return [live.slice_branches(slice(a, b)) for a, b in zip(cuts, [*cuts[1:], len(live)], strict=True)]
