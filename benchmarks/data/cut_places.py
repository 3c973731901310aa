"""Choose where to cut a text into prefix and suffix, by the text's length or by given lengths.

Tokens are mapped to text, so that a record's text is cut at the ends of its tokens.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import Any, NamedTuple

from auditor.core.nouns import Tokens, Wording

LENGTH = 50  # most tokens of a prefix and of a suffix, if no length is given
LEAST_PREFIX = 4  # tokens, if the text's length decides the cut
LEAST_SUFFIX = 8
MOST_WINDOWS = 20  # most windows of one text: together they cover about 1,000 tokens
CONTEXT = 1024  # most tokens before a window, if no length is given
# Tokens after a shared beginning that stay in the prefix, if the text is long enough.
_OWN = 16
# Fewest tokens of a shared beginning that counts.
_LEAST_SHARED = 8
_SHARE = 0.1  # fewest texts with the same beginning, as a share
_FEWEST = 5  # fewest texts with the same beginning


class CutPlace(NamedTuple):
    """Describe a cut: tokens start:middle are the prefix, and tokens middle:end are the suffix."""

    start: int
    middle: int
    end: int


@dataclass(frozen=True)
class TextLengths:
    """Hold the user's lengths of prefix and suffix, and the stride of windows, in tokens.

    A length that is None is derived from the length of each text.
    """

    prefix: int | None = None
    suffix: int | None = None
    windows: int | None = None

    @property
    def are_given(self) -> bool:
        return self.prefix is not None or self.suffix is not None

    @property
    def fixed(self) -> tuple[int, int]:
        return self.prefix or LENGTH, self.suffix or LENGTH

    @property
    def rule(self) -> str:
        """Return a phrase that says how texts are cut."""
        prefix, suffix = self.fixed
        if self.windows is not None:
            return f"every {self.windows} tokens of a text, {prefix} of them and the next {suffix}"
        if self.are_given:
            return f"text cut into its first {prefix} and the next {suffix} tokens"
        return (
            f"each text cut by its own length: half of it, at most {LENGTH} tokens, and the next "
            f"{LENGTH} or what is left, at least {LEAST_SUFFIX}; a longer text is attacked all "
            f"along, in at most {MOST_WINDOWS} windows, each after all of the text before it, at "
            f"most {CONTEXT:,} tokens"
        )

    def cut_places(
        self, n_tokens: int, shared: int = 0, room: int | None = None
    ) -> list[CutPlace] | str:
        """Return where to cut a text, in order, or the reason why no cut is possible.

        n_tokens: length of the text.
        shared: number of leading tokens that many other texts have too. The first prefix ends
            after these tokens, so that it differs from the prefixes of other texts.
        room: maximum number of tokens of prefix and suffix together that the model can read (None:
            no limit).
        """
        places = self._cut(n_tokens, shared)
        if isinstance(places, str) or self.are_given:
            return places
        return [_fit_place(place, room) for place in places]

    def _cut(self, n_tokens: int, shared: int) -> list[CutPlace] | str:
        if self.are_given or (self.windows is not None and n_tokens >= sum(self.fixed)):
            prefix, suffix = self.fixed
            return (
                self._cut_given_lengths(n_tokens, shared)
                or f"shorter than {prefix} + {suffix} tokens"
            )
        return (
            self._cut_own_length(n_tokens, shared)
            or f"shorter than {LEAST_PREFIX} + {LEAST_SUFFIX} tokens"
        )

    def _cut_given_lengths(self, n_tokens: int, shared: int) -> list[CutPlace]:
        prefix, suffix = self.fixed
        last = n_tokens - prefix - suffix
        if last < 0:
            return []
        begin = max(0, shared + _OWN - prefix)
        if not shared or begin > last:
            begin = 0
        starts = range(begin, last + 1, self.windows or last + 1)
        return [CutPlace(start, start + prefix, start + prefix + suffix) for start in starts]

    def _cut_own_length(self, n_tokens: int, shared: int) -> list[CutPlace]:
        if n_tokens < LEAST_PREFIX + LEAST_SUFFIX:
            return []
        first = _find_first_middle(n_tokens)
        begin = 0
        size = n_tokens - shared
        if shared and size >= LEAST_PREFIX + LEAST_SUFFIX and first < shared + _OWN:
            # Cut the shared part like a separate text: its windows are the same in all of these
            # texts, and merged.
            begin = shared
            first = max(first, shared + min(_OWN, _find_first_middle(size)))
        places = self._cut_own_length(begin, 0)[: MOST_WINDOWS // 2]
        for at in spread_windows(first, n_tokens, MOST_WINDOWS - len(places)):
            places.append(CutPlace(_find_context_start(at), at, min(n_tokens, at + LENGTH)))
        return places


def spread_windows(first: int, end: int, most: int = MOST_WINDOWS) -> list[int]:
    """Return the starts of adjacent suffixes of at most LENGTH tokens that cover tokens first:end.

    If there would be more than `most` suffixes, return `most` evenly spaced starts.
    """
    middles = list(range(first, end - LEAST_SUFFIX + 1, LENGTH)) or [first]
    if len(middles) <= most:
        return middles
    step = (end - LENGTH - first) / (most - 1)
    return [first + round(i * step) for i in range(most)]


def _find_context_start(middle: int) -> int:
    """Return where the context of a window begins: at the text's start, if it is near enough.

    Otherwise the start is a multiple of half of CONTEXT, so that neighbouring windows begin at the
    same token and the model reads their common context once.
    """
    if middle <= CONTEXT:
        return 0
    half = CONTEXT // 2
    return (middle - half) // half * half


def _fit_place(place: CutPlace, room: int | None) -> CutPlace:
    """Shorten a prefix so that prefix and suffix have at most `room` tokens.

    The prefix keeps at least LENGTH tokens, or all if it has fewer.
    """
    if room is None or place.end - place.start <= room:
        return place
    return place._replace(start=max(place.start, min(place.end - room, place.middle - LENGTH)))


def _find_first_middle(n_tokens: int) -> int:
    return min(LENGTH, n_tokens // 2, n_tokens - LEAST_SUFFIX)


BY_OWN_LENGTH = TextLengths()


@dataclass(frozen=True)
class SharedBeginnings:
    """Hold the sorted prefixes, as tokens, that many texts share, such as a notice."""

    beginnings: tuple[Tokens, ...] = ()

    def length_in(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a text belong to a prefix that many texts share."""
        at = bisect_left(self.beginnings, tuple(tokens))  # the nearest in sorted order share most
        nearest = self.beginnings[max(0, at - 1) : at + 1]
        length = max((count_common_beginning(tokens, text) for text in nearest), default=0)
        return length if length >= _LEAST_SHARED else 0


NOTHING_SHARED = SharedBeginnings()


def find_shared_beginnings(texts: Sequence[Sequence[int]]) -> SharedBeginnings:
    """Return the prefixes that many texts share.

    They are shared by at least five distinct texts and at least a tenth of all texts. texts: token
    ids.
    """
    distinct = sorted(set(map(tuple, texts)))
    together = max(_FEWEST, round(_SHARE * len(distinct)))
    shared = []
    for text, after in pairwise(distinct):
        shared.append(count_common_beginning(text, after))
    beginnings = set()
    for i in range(len(distinct) - together + 1):
        length = min(shared[i : i + together - 1])
        if length >= _LEAST_SHARED:
            beginnings.add(distinct[i][:length])
    # A beginning that continues another for a few tokens, such as a frequent first name, does not
    # count.
    told_apart = []
    for text in beginnings:
        if not any(text[:-n] in beginnings for n in range(1, min(_LEAST_SHARED, len(text)))):
            told_apart.append(text)
    return SharedBeginnings(tuple(sorted(told_apart)))


def count_common_beginning(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of leading elements that two sequences share."""
    pairs = zip(first, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


CUT_WITHIN_CHARACTER = "less than one character in the prefix or the suffix"
Offsets = Sequence[tuple[int, int]]  # by token: its first character, and the index after its last


def find_token_ends(offsets: Offsets, length: int) -> list[int]:
    """Return where each token ends in a text of `length` characters.

    The tokens are made to cover the whole text: a space outside all offsets, or a character that
    two tokens share, is given to the later token. offsets: (start, end) characters of each token.
    """
    ends = []
    so_far = 0
    for (_, end), (start, _) in pairwise([*offsets, (length, length)]):
        so_far = max(so_far, min(end, start))
        ends.append(so_far)
    return [*ends[:-1], length] if ends else []


def split_byte_runs(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Return the offsets, giving each byte token only the character that it encodes.

    The Unigram models of tokenizers 0.23 with byte_fallback encode unknown characters as bytes.
    They give each byte the offsets of the whole run of such characters.
    """
    if text.isascii():
        return list(offsets)
    split = list[tuple[int, int]]()
    for (start, end), run in groupby(offsets):
        n_tokens = len(list(run))
        n_bytes = [len(character.encode()) for character in text[start:end]]
        if len(n_bytes) > 1 and sum(n_bytes) == n_tokens:
            split += [(start + i, start + i + 1) for i, n in enumerate(n_bytes) for _ in range(n)]
        else:
            split += [(start, end)] * n_tokens
    return split


def move_cut_between_characters(offsets: Offsets, place: CutPlace) -> CutPlace:
    """Return the cut without tokens at its edges that encode only part of a character.

    Servers that do not accept tokens get text, which cannot express half a character. The returned
    prefix or suffix may be empty.
    """
    return _make_cut_place(
        _find_character_boundary(offsets, place.start, 1),
        _find_character_boundary(offsets, place.middle, -1),
        _find_character_boundary(offsets, place.end, -1),
    )


_make_cut_place = functools.lru_cache(2**12)(CutPlace)  # records with equal cuts share one


def _find_character_boundary(offsets: Offsets, at: int, step: int) -> int:
    """Return the first token index that splits no character, from `at` in steps of `step`."""
    while 0 < at < len(offsets) and offsets[at][0] < offsets[at - 1][1]:
        at += step
    return at


def cut_wording(text: str, ends: Sequence[int], start: int, cut: int, end: int) -> Wording:
    """Return the text of tokens start:cut as prefix and of tokens cut:end as suffix.

    ends: where each token of `text` ends (`find_token_ends`).
    """
    first, middle = (ends[at - 1] if at else 0 for at in (start, cut))
    last = ends[end - 1]
    in_suffix = tuple(at - middle for at in ends[cut:end])
    return Wording(text, first, middle, last, in_suffix)
