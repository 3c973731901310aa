"""Map tokens to text: cut a record's text at the ends of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from auditor.benchmarks.data.cut_places import CutPlace
from auditor.core.nouns import Wording

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
    return CutPlace(
        _find_character_boundary(offsets, place.start, 1),
        _find_character_boundary(offsets, place.middle, -1),
        _find_character_boundary(offsets, place.end, -1),
    )


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
