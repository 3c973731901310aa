"""Which runs of tokens stand in which texts, exactly and of any length: a suffix array over all of
them.

libdivsufsort sorts every place of the texts by what follows there (Manber and Myers 1993), so that
all places where a run of tokens stands lie side by side, found by bisection. Knows token ids; no
tokenizer, model or secret.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core import machine_memory
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.statistics.memorised import NGramMatches

INSTALL = "pip install 'audit-lm[untargeted]'"
_AT_ONCE = 2**15  # n-grams looked up at once: what is compared stays in a core's own memory
_PLACES = 2**22  # of the suffix array, gone through at once
_FIRST = 4  # codes of an n-gram that are compared before the others
_INT32 = 2**31 - 1

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class NGramIndex:
    """The index. Texts that were trained on come first, each once, then held-out ones.

    starts: (texts + 1,) where each begins in `codes`, which hold 0 behind each; copies: how often
    each trained text was trained on, None where nobody knows. letters: rising token ids, of which
    codes are the places, from 1. order:
    the suffix array of `codes`.
    """

    starts: Integers
    copies: tuple[int | None, ...]
    letters: Integers
    codes: NDArray[Any]
    order: NDArray[Any]

    @property
    def text_lengths(self) -> Integers:
        """(texts,) tokens of each."""
        return np.diff(self.starts) - 1

    def tokens_of_text(self, index: int) -> Tokens:
        """The tokens of a text."""
        codes = self.codes[self.starts[index] : self.starts[index + 1] - 1]
        return tuple(self.letters[codes.astype(np.int64) - 1].tolist())

    def ngram_place_counts(self, n: int) -> tuple[int, int]:
        """Places at which an n-gram begins, in what was trained on and in held-out text."""
        places = np.maximum(self.text_lengths - n + 1, 0)
        known = len(self.copies)
        return int(places[:known].sum()), int(places[known:].sum())

    def match_ngrams(self, texts: Sequence[Tokens], n: int) -> list[NGramMatches]:
        """For each text, those of its n-grams that stand in the indexed texts."""
        windows, owner, at = self._known_ngram_windows(texts, n)
        first = np.concatenate(
            [self._suffix_array_bound(some, False) for some in _ngram_row_batches(windows)]
        )
        here = np.concatenate(
            [
                *map(
                    self._mask_of_places_matching_ngrams,
                    _ngram_row_batches(first),
                    _ngram_row_batches(windows),
                )
            ]
        )
        behind = np.concatenate(
            [self._suffix_array_bound(some, True) for some in _ngram_row_batches(windows[here])]
        )
        trained, heldout, record = self._trained_heldout_and_only_text_of_ranges(
            first[here], behind
        )
        owner, at = owner[here], at[here]
        ends = np.searchsorted(owner, np.arange(len(texts) + 1))  # windows come text by text
        parts = (slice(start, end) for start, end in pairwise(ends.tolist()))
        return [NGramMatches(at[own], trained[own], heldout[own], record[own]) for own in parts]

    def index_of_only_text_holding(self, texts: Sequence[Tokens]) -> list[int]:
        """For each text, the only indexed text that it stands in as a whole; -1 where there is
        none, or several."""
        found = np.full(len(texts), -1)
        of_length: dict[int, list[int]] = {}
        for i, text in enumerate(texts):
            of_length.setdefault(len(text), []).append(i)
        for n, own in of_length.items():
            for i, seen in zip(own, self.match_ngrams([texts[i] for i in own], n), strict=True):
                found[i] = seen.record[0] if len(seen.record) else -1
        return [int(index) for index in found]

    def _known_ngram_windows(
        self, texts: Sequence[Tokens], n: int
    ) -> tuple[NDArray[Any], Integers, Integers]:
        """(k, n) codes, whose text each is, where it begins. A token that no text here has leaves
        its n-grams out."""
        windows, owner, at = (
            [np.empty((0, n), self.codes.dtype)],
            [np.empty(0, np.int64)],
            [np.empty(0, np.int64)],
        )
        for i, text in enumerate(texts):
            if len(text) < n:
                continue
            every = np.lib.stride_tricks.sliding_window_view(self._token_codes(text), n)
            known = np.flatnonzero(every.all(axis=1))
            windows.append(every[known])
            owner.append(np.full(len(known), i))
            at.append(known)
        return np.concatenate(windows), np.concatenate(owner), np.concatenate(at)

    def _token_codes(self, text: Tokens) -> NDArray[Any]:
        """0 where no text here has the token."""
        tokens = np.array(text, dtype=np.int64)
        place = np.searchsorted(self.letters, tokens).clip(max=len(self.letters) - 1)
        return np.where(self.letters[place] == tokens, place + 1, 0).astype(self.codes.dtype)

    def _suffix_array_bound(self, windows: NDArray[Any], behind: bool) -> Integers:
        """(k,) the first place of `order` whose suffix does not come before the n-gram; behind: the
        first past it."""
        low, high = np.zeros(len(windows), np.int64), np.full(len(windows), len(self.order))
        for _ in range(len(self.order).bit_length()):
            middle = (low + high) // 2
            side = self._compare_suffixes_to_ngrams(middle, windows)
            # Bisection of all at once: where low meets high nothing moves any more.
            past = ((side < 0) | (side == 0) & behind) & (low < high)
            low, high = np.where(past, middle + 1, low), np.where(past, high, middle)
        return low

    def _mask_of_places_matching_ngrams(
        self, places: Integers, windows: NDArray[Any]
    ) -> NDArray[np.bool_]:
        return (places < len(self.order)) & (self._compare_suffixes_to_ngrams(places, windows) == 0)

    def _compare_suffixes_to_ngrams(self, places: Integers, windows: NDArray[Any]) -> Integers:
        """(k,) -1, 0, 1: whether what follows at these places of `order` comes before, begins as,
        or comes after."""
        begins = self.order.take(places, mode="clip").astype(np.int64)
        side, alike = np.zeros(len(windows), np.int64), np.arange(len(windows))
        for start, end in (
            (0, _FIRST),
            (_FIRST, windows.shape[1]),
        ):  # the first codes decide most of the time
            if start >= end:
                break
            # The last code is a 0, which no n-gram has: whatever is cut off there was decided
            # before.
            theirs = self.codes.take(
                begins[alike, None] + np.arange(start, min(end, windows.shape[1])), mode="clip"
            )
            mine = windows[alike, start:end]
            # Of no difference argmax is 0, where both are alike: the sign below is 0, as it should
            # be.
            first = (theirs != mine).argmax(axis=1)
            rows = np.arange(len(alike))
            side[alike] = np.sign(theirs[rows, first].astype(np.int64) - mine[rows, first])
            alike = alike[side[alike] == 0]
        return side

    def _trained_heldout_and_only_text_of_ranges(
        self, low: Integers, high: Integers
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Integers]:
        """Of the suffixes low:high of `order`, (k,) each: whether any is of a trained text, of a
        held-out one; and the text, -1 where they are of several.
        """
        ranges, back = np.unique(np.stack([low, high]), axis=1, return_inverse=True)
        least, most = (np.empty(ranges.shape[1], np.int64) for _ in range(2))
        for own in _suffix_range_slices_of_bounded_size(ranges[1] - ranges[0], _PLACES):
            begin, sizes = ranges[0, own], ranges[1, own] - ranges[0, own]
            # `reduceat` would give a wrong number for an empty range: every n-gram here stands
            # somewhere.
            ends = sizes.cumsum()
            places = np.arange(ends[-1]) + np.repeat(begin - (ends - sizes), sizes)
            owner = np.searchsorted(self.starts, self.order[places], side="right") - 1
            least[own] = np.minimum.reduceat(owner, ends - sizes)
            most[own] = np.maximum.reduceat(owner, ends - sizes)
        # NumPy 2.0 alone gives the inverse along an axis two dimensions. Trained texts come first.
        each, known = back.reshape(-1), len(self.copies)
        return (least < known)[each], (most >= known)[each], np.where(least == most, most, -1)[each]


def build_ngram_index(
    trained: Iterable[tuple[Tokens, int | None]], heldout: Iterable[Tokens]
) -> NGramIndex:
    """The index of what was trained on, with how often, and of held-out text; texts that are the
    same become one.

    Raises AuditError where it does not fit into memory, before it is made, and where libdivsufsort
    is missing.
    """
    try:
        import pydivsufsort
    except ImportError:
        raise AuditError(
            f"expected pydivsufsort installed, to index the training data by: {INSTALL}"
        ) from None
    texts, copies = list[NDArray[Any]](), list[int | None]()
    seen: dict[bytes, int] = {}
    for tokens, times in trained:
        text = np.array(tokens, dtype=np.uint32)
        # By digest: the texts as keys would be in memory twice.
        at = seen.setdefault(hashlib.blake2b(text.tobytes(), digest_size=16).digest(), len(texts))
        if at == len(texts):
            texts.append(text)
            copies.append(times)
        elif times is not None and (before := copies[at]) is not None:
            copies[at] = before + times
        else:
            copies[at] = None
    if not any(map(len, texts)):
        raise AuditError("expected training data to index, got no text")
    texts += [np.array(tokens, dtype=np.uint32) for tokens in heldout]
    starts = np.concatenate([[0], np.cumsum([len(text) + 1 for text in texts])]).astype(np.int64)
    letters = _distinct_tokens(texts)
    # bytes that tell all codes apart
    width = 1 if len(letters) < 2**8 else 2 if len(letters) < 2**16 else 3
    check_ngram_index_fits_memory(int(starts[-1]), width)
    codes = np.zeros(int(starts[-1]), dtype=np.uint16 if width < 3 else np.uint32)
    place = np.zeros(int(letters[-1]) + 1, dtype=codes.dtype)
    place[letters] = np.arange(1, len(letters) + 1)
    for start, text in zip(starts, texts, strict=False):
        codes[start : start + len(text)] = place[text]
    del texts  # the suffix array takes the most memory of all
    order = _build_suffix_array(pydivsufsort.divsufsort, codes, width)
    return NGramIndex(starts, tuple(copies), letters, codes, order)


def ngram_index_memory_bytes(tokens: int, width: int) -> int:
    """Bytes that making the index takes at most: codes, their bytes (`width` each), the suffix
    arrays of both."""
    place = 4 if tokens * width <= _INT32 else 8
    return tokens * ((2 if width < 3 else 4) + width + place * width + place) + _PLACES * (
        place + 2
    )


def check_ngram_index_fits_memory(tokens: int, width: int) -> None:
    """Raises AuditError where there is less memory than making the index takes."""
    wanted, free = (
        ngram_index_memory_bytes(tokens, width),
        machine_memory.free_machine_memory_bytes(),
    )
    if wanted > free:
        raise AuditError(
            f"expected {_ngram_index_size_label(wanted)} of memory for the index of {tokens:,} "
            f"tokens of training data, got {_ngram_index_size_label(free)} free: give it more, or "
            "--data with fewer rows"
        )


def _ngram_index_size_label(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{math.ceil(size / 1e6)} MB"


def _distinct_tokens(texts: Sequence[NDArray[Any]]) -> Integers:
    """Every token of the texts once, rising."""
    most = max(int(text.max()) for text in texts if len(text))
    has = np.zeros(most + 1, dtype=bool)
    for text in texts:
        has[text] = True
    return np.flatnonzero(has)


def _build_suffix_array(divsufsort: Any, codes: NDArray[Any], width: int) -> NDArray[Any]:
    """The suffix array of the codes, from that of their bytes: the highest first, they sort as the
    codes do."""
    raw = codes.astype(">u4" if width == 3 else ">u2" if width == 2 else np.uint8).view(np.uint8)
    if width == 3:
        raw = np.ascontiguousarray(raw.reshape(-1, 4)[:, 1:]).ravel()
    every = divsufsort(raw)
    if width == 1:
        return np.asarray(every)
    order, filled = np.empty(len(codes), dtype=every.dtype), 0
    for some in _ngram_row_batches(every, _PLACES):
        # Suffixes that begin inside a code go; the others keep their order.
        whole = some[some % width == 0] // width
        order[filled : filled + len(whole)] = whole
        filled += len(whole)
    return order


def _suffix_range_slices_of_bounded_size(sizes: Integers, most: int) -> Iterator[slice]:
    """Neighbours whose sizes add up to about so many, one at least."""
    group = np.cumsum(sizes) // most
    for start, end in pairwise(np.flatnonzero(np.diff(group, prepend=-1, append=-1)).tolist()):
        yield slice(start, end)


def _ngram_row_batches(array: NDArray[Any], size: int = _AT_ONCE) -> Iterator[NDArray[Any]]:
    """In so many rows at a time; of an empty array one, as empty."""
    return (array[start : start + size] for start in range(0, max(1, len(array)), size))
