"""Cache the last hidden states of texts, and the keys and values of texts that were read ahead.

A later query of a cached text computes only the model's head. A completion of a text that was read
ahead reuses the keys and values of its prefix. The weights must not change; changes are not
detected.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from auditor.core.nouns import Tokens
from auditor.models.base import get_max_logits
from auditor.models.memory import BatchSizeLimit, measure_free_device_memory
from auditor.models.slot_cache import SlotLayer

_SHARE = 8  # Share of the free memory that the cache may use: one part in _SHARE.
# Keys and values may use one part in _FOR_STATES of that. If they do not fit, states still may.
_FOR_STATES = 2
# Tokens of the texts read ahead in one pass: a CPU reads more tokens no faster.
_TOGETHER = 1024
_PADDED = 1.25  # longest length of a batch over its shortest, at most
_WORTH_A_PASS = 128  # tokens of a batch that is large enough
RECENT_BYTES = 2**29  # of log-probabilities of a batch of texts that several callers query in turn
# Relative to the largest logit: a larger difference means that more than the head follows the
# states.
_TOLERANCE = 1e-4

# A text (n,), numbers of its last positions to be queried and first tokens to be completed.
TextRange = tuple[Tensor, int, int]
Logits = Callable[[Tensor, int, int, list[SlotLayer] | None], Tensor]


class HiddenStateCache:
    """A cache of the hidden states of texts, from which the model's head computes logits.

    If the head does not reproduce the model's logits (Gemma 2 caps its logits), nothing is cached
    and every query calls the model.

    Args:
        body: returns hidden states (B, m, d) of the last m positions as its first output.
        head: computes logits from hidden states.
        logits: the model, called as logits(texts, last, kept, layers) with texts of token ids (B,
            n). It reads at least the `last` trailing positions, and returns float32 logits of the
            `kept` trailing positions, (B, kept, V). If the list `layers` is given, it appends the
            keys and values of the texts to this list.
        recent_bytes: memory for log-probabilities that several callers query in turn.
        max_bytes: most memory for all else, if a share of the free memory is larger.
    """

    def __init__(
        self,
        body: Any,
        head: Any,
        logits: Logits,
        recent_bytes: int = RECENT_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        self._body = body
        self._head = head
        self._logits = logits
        self._held: dict[bytes, Tensor] = {}
        # By prefix: last state, layers, its slot in them.
        self._begun: dict[bytes, tuple[Tensor, list[SlotLayer], int]] = {}
        self._bytes = 0
        self._recent_bytes = recent_bytes
        self._max_bytes = max_bytes
        self.is_bounded = max_bytes is not None
        # Log-probabilities at the last positions of texts that several callers query in turn.
        self._recent: dict[bytes, Tensor] = {}
        # Whether body and head are the whole model; None until it is measured.
        self.is_exact: bool | None = None if head is not None else False

    def adopt_states(self, outer: HiddenStateCache) -> None:
        """Use the states that another cache of the same model holds, too."""
        self._held.update(outer._held)
        self.is_exact = outer.is_exact

    @torch.no_grad()
    def log_probs(self, texts: Tensor, last: int) -> Tensor:
        """Return log-probabilities at the last positions of texts (B, n), of shape (B, last, V).

        They come from cached hidden states if all texts have them; otherwise the model reads the
        texts.
        """
        names = [_digest_text_key(text) for text in texts.cpu()]
        if all(name in self._recent and len(self._recent[name]) >= last for name in names):
            return torch.stack([self._recent[name][-last:] for name in names])
        log_probs = self._compute_head_logits(texts, last, names).log_softmax(-1)
        if self.is_exact and self._recent_bytes and texts.shape[1] > 1:
            self._remember_log_probs(names, list(log_probs.clone()))
        return log_probs

    @torch.no_grad()
    def read_parts(self, texts: Tensor, parts: Sequence[int], last: int) -> Tensor:
        """Return logits (B, last, V) of texts (B, n), each read by its part of an ensemble.

        They come from cached hidden states if all texts have them. Otherwise the model reads all
        texts, so that their parts stay in the order that the model expects.
        """
        names = []
        for part, text in zip(parts, texts.cpu(), strict=True):
            names.append(b"%d:%b" % (part, _digest_text_key(text)))
        if self.is_exact is False or not all(self._has_states(name, last) for name in names):
            return self._read_and_hold(texts, last, names)
        logits: Tensor = self._head(torch.stack([self._held[name][-last:] for name in names]))
        return logits.float()

    def _remember_log_probs(self, names: Sequence[bytes], log_probs: Sequence[Tensor]) -> None:
        """Keep the log-probabilities of these texts for repeated queries.

        The oldest are dropped if memory is full. `names` are the cache keys of the texts, and
        `log_probs` has shape (last, V) for each text.
        """
        max_bytes = min(self._recent_bytes, self._remaining_bytes(log_probs[0].device, _SHARE))
        if sum(of_text.nbytes for of_text in log_probs) > max_bytes:
            return
        for name, of_text in zip(names, log_probs, strict=True):
            self._recent.pop(name, None)  # the newest are at the end
            self._recent[name] = of_text
        n_bytes = sum(of_text.nbytes for of_text in self._recent.values())
        while n_bytes > max_bytes:
            n_bytes -= self._recent.pop(next(iter(self._recent))).nbytes

    def forget_batch(self) -> None:
        """Free the keys, values and log-probabilities of the current batch of texts."""
        self._recent.clear()
        layers = {}
        for _, text_layers, _ in self._begun.values():
            for layer in text_layers:
                layers[id(layer)] = layer
        self._bytes -= sum(layer.nbytes for layer in layers.values())
        self._begun.clear()

    def _compute_head_logits(self, texts: Tensor, last: int, names: Sequence[bytes]) -> Tensor:
        rows_with_states = [i for i, name in enumerate(names) if self._has_states(name, last)]
        if self.is_exact is False or not rows_with_states:
            return self._read_and_hold(texts, last, names)
        logits: Tensor = self._head(
            torch.stack([self._held[names[i]][-last:] for i in rows_with_states])
        )
        logits = logits.float()
        if missing := sorted(set(range(len(names))).difference(rows_with_states)):
            read_now = self._read_and_hold(texts[missing], last, [names[i] for i in missing])
            order = torch.tensor([*rows_with_states, *missing], device=logits.device).argsort()
            logits = torch.cat([logits, read_now])[order]
        return logits

    @torch.no_grad()
    def find_cached_prefix(
        self, prefixes: Tensor, length: int
    ) -> tuple[Tensor, list[SlotLayer]] | None:
        """Return logits (B, V) after prefixes (B, n), and layers with their keys and values.

        Both come from the cache, which `read_ahead(..., keys=True)` fills. Return None if any of
        the prefixes is missing there. `length` is the capacity of the layers in positions.
        """
        names = [_digest_text_key(prefix) for prefix in prefixes.cpu()]
        if not names or not all(name in self._begun for name in names):
            return None
        states, layers, slots = zip(*(self._begun[name] for name in names), strict=True)
        n_positions = prefixes.shape[1]
        copies = []
        for of_prefixes in zip(*layers, strict=True):
            parts = []
            for layer, slot in zip(of_prefixes, slots, strict=True):
                parts.append((layer, slice(slot, slot + 1), n_positions))
            copies.append(SlotLayer.assemble(parts, length))
        return self._head(torch.stack(states)).float(), copies

    def _remaining_bytes(self, device: torch.device, share: int) -> int:
        """Return how many more bytes may be cached, so that all take 1/share of the free memory."""
        n_bytes = measure_free_device_memory(device) // share
        if self._max_bytes is not None:
            n_bytes = min(n_bytes, self._max_bytes)
        return n_bytes - self._bytes

    @torch.no_grad()
    def read_ahead(
        self,
        texts: Sequence[Tokens],
        last: Sequence[int],
        device: torch.device,
        keys: bool = False,
        prefix_lengths: Sequence[int] | None = None,
    ) -> None:
        """Read texts of different lengths in shared batches, before they are queried.

        Padding is appended, so it does not change a causal model's hidden states of the texts. A
        bounded cache reads only the first texts, as many as it has room for.

        Args:
            texts: token ids of each text.
            last: for each text, the number of trailing positions to be queried.
            device: device of the model.
            keys: whether to cache keys and values too, for completions.
            prefix_lengths: for each text, the length of the prefix that will be completed. None
                means all tokens up to the first queried position.
        """
        if self.is_exact is False:
            return
        n_free = self._count_free_positions(device)
        ranges: dict[Tokens, tuple[int, int]] = {}  # keep each text once
        for i, (text, n_last) in enumerate(zip(texts, last, strict=True)):
            n_free -= n_last
            if n_free < 0:
                break
            ranges[text] = n_last, prefix_lengths[i] if prefix_lengths else len(text) - n_last + 1
        unread = []
        for text, (n_last, begin) in ranges.items():
            tokens = torch.tensor(text)
            if n_last <= len(text) and not self._has_states(_digest_text_key(tokens), n_last):
                unread.append((tokens, n_last, begin))
        if len(unread) < 2:  # a single text is read when it is queried
            return
        for groups in _split_by_length(_group_nested_texts(unread)):
            size = max(1, _TOGETHER // len(groups[-1][-1][0]))
            read = partial(self._read_and_cache_batch, groups, device, keys)
            for _ in BatchSizeLimit(size).run_pieces_within_memory(len(groups), read):
                if not self.is_exact:  # the first batch showed that nothing can be cached
                    return

    def _count_free_positions(self, device: torch.device) -> float:
        """Return how many more positions a bounded cache has room for."""
        if not self.is_bounded:
            return math.inf
        weight = next(self._head.parameters())
        return self._remaining_bytes(device, _SHARE) // (weight.shape[-1] * weight.itemsize)

    def _read_and_cache_batch(
        self,
        all_groups: Sequence[Sequence[TextRange]],
        device: torch.device,
        keys: bool,
        batch: slice,
    ) -> None:
        """Read some groups of texts in one batch, and cache the hidden states of all their texts.

        In each group, every text starts with the previous one, so the model reads only the longest.

        Args:
            all_groups: groups of texts.
            device: device of the model.
            keys: whether to cache keys and values too.
            batch: the groups to read, as a slice of `all_groups`.
        """
        groups = all_groups[batch]
        longest = len(groups[-1][-1][0])
        padded = []
        for *_, (text, *_) in groups:
            padded.append(torch.cat([text, text[-1:].expand(longest - len(text))]))
        first = min(len(text) - last for group in groups for text, last, _ in group)
        layers: list[SlotLayer] | None = [] if keys else None
        # Logits of only one position: the states are needed, and a head over all positions costs
        # the most.
        logits, states = self._logits_and_hidden_states(
            torch.stack(padded).to(device), longest - first, 1, layers
        )
        if states is None or not torch.isfinite(states).all():
            return
        missing = longest - states.shape[1]  # positions that were not read
        texts = []
        for slot, group in enumerate(groups):
            for entry in group:
                texts.append((slot, *entry))
        # Copies: a view of a row would keep the states of the whole batch in memory. They hold only
        # the queried positions, because the windows of a text have most positions in common.
        text_states = []
        for slot, text, last, begin in texts:
            start = max(missing, min(len(text) - last, begin - 1))
            text_states.append(states[slot, start - missing : len(text) - missing].clone())
        names = [_digest_text_key(text) for _, text, *_ in texts]
        self._cache_states(names, text_states)
        last_states = []
        for (_, _, last, _), state in zip(texts, text_states, strict=True):
            last_states.append(state[-last:])
        self._compute_log_probs_ahead(names, last_states, logits.shape[-1])
        if layers and (new := sum(layer.nbytes for layer in layers)) <= self._remaining_bytes(
            device, _SHARE * _FOR_STATES
        ):
            self._bytes += new
            for (slot, text, _, begin), state in zip(texts, text_states, strict=True):
                # The state at this index from the end has read the text through that position.
                self._begun[_digest_text_key(text[:begin])] = (
                    state[begin - 1 - len(text)],
                    layers,
                    slot,
                )

    def _compute_log_probs_ahead(
        self, names: Sequence[bytes], states: Sequence[Tensor], vocab_size: int
    ) -> None:
        """Compute the head for many texts at once, which is faster than one text after another.

        `names` are the cache keys of the texts, and `states` holds (last, d) for each. If memory is
        short, compute nothing, because the results would be dropped before they are queried.
        """
        device = states[0].device
        lengths = torch.tensor(list(map(len, states)))
        n_bytes = 4 * vocab_size * int(lengths.sum())
        most = self._recent_bytes
        if n_bytes > most or self._remaining_bytes(device, _SHARE) < most:
            return
        n_rows = max(1, get_max_logits(device) // vocab_size)
        pieces = (lengths.cumsum(0) // n_rows).tolist()
        for piece in range(pieces[-1] + 1):
            indices = slice(bisect_left(pieces, piece), bisect_right(pieces, piece))
            if pieces[indices]:
                log_probs = self._head(torch.cat(list(states[indices]))).float().log_softmax(-1)
                self._remember_log_probs(names[indices], log_probs.split(lengths[indices].tolist()))

    def _has_states(self, name: bytes, last: int) -> bool:
        return name in self._held and len(self._held[name]) >= last

    def _read_and_hold(self, texts: Tensor, last: int, names: Sequence[bytes]) -> Tensor:
        logits, states = self._logits_and_hidden_states(texts, last, last)
        if states is not None:
            self._cache_states(names, list(states))
        return logits

    def _logits_and_hidden_states(
        self, texts: Tensor, last: int, n_logits: int, layers: list[SlotLayer] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model on texts, and return its logits and the hidden states before its head.

        The hidden states are None if the head does not reproduce the logits.

        Args:
            texts: token ids (B, n).
            last: number of trailing positions whose hidden states are needed. More may be returned.
            n_logits: number of trailing positions whose logits are returned.
            layers: list to which layers with the texts' keys and values are appended.
        """
        if self.is_exact is False:
            return self._logits(texts, last, n_logits, layers), None
        outputs: list[Any] = []
        hook = self._body.register_forward_hook(
            lambda module, inputs, outcome: outputs.append(outcome[0])
        )
        try:
            logits = self._logits(texts, last, n_logits, layers)
        finally:
            hook.remove()
        if self.is_exact is None:
            self.is_exact = bool(outputs) and self._is_input_of_head(outputs[-1], logits)
        # The last states: a shared prefix may have been read in a pass before.
        return logits, outputs[-1] if self.is_exact else None

    def _cache_states(self, names: Sequence[bytes], states: Sequence[Tensor]) -> None:
        """Cache the hidden states of all these texts, or of none if memory is too small."""
        n_bytes = sum(state.nbytes for state in states) + sum(map(len, names))
        if n_bytes <= self._remaining_bytes(states[0].device, _SHARE):
            self._held.update(zip(names, states, strict=True))
            self._bytes += n_bytes

    def _is_input_of_head(self, states: Any, logits: Tensor) -> bool:
        if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != len(logits):
            return False
        # ELECTRA projects its states.
        if getattr(self._head, "in_features", states.shape[-1]) != states.shape[-1]:
            return False
        recomputed = self._head(states[:, -logits.shape[1] :]).float()
        return recomputed.shape == logits.shape and bool(
            (recomputed - logits).abs().max() <= _TOLERANCE * logits.abs().max()
        )


def _group_nested_texts(texts: Sequence[TextRange]) -> list[list[TextRange]]:
    """Group texts so that each text in a group starts with the previous one.

    Groups are sorted by the length of their last text, which is the longest.
    """
    groups: list[list[TextRange]] = []
    before: list[int] = []
    # In lexicographic order, a text directly follows its own prefixes.
    for tokens, entry in sorted(((entry[0].tolist(), entry) for entry in texts), key=itemgetter(0)):
        if before and tokens[: len(before)] == before:
            groups[-1].append(entry)
        else:
            groups.append([entry])
        before = tokens
    return sorted(groups, key=lambda group: len(group[-1][0]))


def _split_by_length(groups: Sequence[list[TextRange]]) -> list[list[list[TextRange]]]:
    """Split groups of texts into batches whose texts differ in length by at most a quarter.

    `groups` are sorted by length. Small batches are not split, because each forward pass has a
    fixed cost.
    """
    batches: list[list[list[TextRange]]] = []
    n_tokens = shortest = 0
    for group in groups:
        length = len(group[-1][0])
        if batches and (n_tokens < _WORTH_A_PASS or length <= _PADDED * shortest):
            batches[-1].append(group)
        else:
            batches.append([group])
            shortest = length
            n_tokens = 0
        n_tokens += length
    return batches


def _digest_text_key(text: Tensor) -> bytes:
    """Return the cache key of a text, given as token ids (n,) on the CPU."""
    return text.numpy().tobytes()
