"""Split text in any script into words by Unicode segmentation (UAX 29), and find words in text.

The flag WORD of `regex` implements this segmentation. In scripts without spaces (Han, Kana, Thai,
Lao, Khmer, Myanmar), each character with its marks is a word. Exact occurrences of many strings are
counted in one pass over all texts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import regex
from ahocorasick_rs import AhoCorasick

_BREAK = regex.compile(r"\b", regex.WORD | regex.V1)
_WRITTEN_TOGETHER = (
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}ー"
)
_UNSPACED = regex.compile(rf"[{_WRITTEN_TOGETHER}]", regex.V1)
# Units between spaces: a run without a space or, in a script without spaces, a character with its
# signs.
RUN = regex.compile(rf"(?=[{_WRITTEN_TOGETHER}])\X|[^\s{_WRITTEN_TOGETHER}]+", regex.V1)
# A Latin letter and a letter of another script belong to two words, as do two letters of a script
# without spaces or of Korean, which attaches particles. A mark belongs to the letter before it.
_INSIDE_WORD = regex.compile(
    r"[\p{Latin}\p{N}]{2}"
    rf"|[[\p{{Alphabetic}}]--[\p{{Latin}}\p{{N}}\p{{Hangul}}{_WRITTEN_TOGETHER}]]{{2}}"
    r"|[\p{Alphabetic}\p{N}]\p{M}",
    regex.V1,
)


def split_into_words(text: str) -> list[str]:
    """Return the words of a text, and each symbol outside words, in order and without spaces."""
    return [part for part in _BREAK.split(text) if part and not part.isspace()]


def is_mostly_unspaced(texts: Iterable[str]) -> bool:
    """Return whether most words of the texts are characters of a script without spaces."""
    n_words = n_unspaced = 0
    for text in texts:
        words = split_into_words(text)
        n_words += len(words)
        n_unspaced += sum(_UNSPACED.match(word) is not None for word in words)
    return 2 * n_unspaced > n_words


def join_words(words: Iterable[str]) -> str:
    """Join words with spaces, but not next to a character of a script without spaces."""
    text = ""
    for word in words:
        together = not text or _UNSPACED.match(text, len(text) - 1) or _UNSPACED.match(word)
        text += word if together else f" {word}"
    return text


def is_inside_word(before: str, following: str) -> bool:
    """Return whether `before` ends inside a word if the text `following` comes next."""
    return _INSIDE_WORD.fullmatch(before[-1:] + following[:1]) is not None


def find_whole_word_places(word: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each occurrence that is not part of a longer word or number."""
    start = text.find(word)
    while start >= 0:
        end = start + len(word)
        # At 0 the slice is text[-1:0], which is empty.
        if not is_inside_word(text[start - 1 : start], word) and not is_inside_word(
            word, text[end : end + 1]
        ):
            yield start, end
        start = text.find(word, start + 1)


def is_whole_word_somewhere(word: str, text: str) -> bool:
    return any(find_whole_word_places(word, text))


def find_places(word: str, text: str) -> list[tuple[int, int]]:
    """Return (start, end) of each occurrence of the whole word.

    If there is none, return the occurrences inside longer words.
    """
    if places := list(find_whole_word_places(word, text)):
        return places
    return [match.span() for match in re.finditer(re.escape(word), text)]


_END = 20  # characters at the end of a text to search for; the rest is compared where they occur
_STRINGS_AT_ONCE = 2**18  # strings searched for in one pass: an automaton takes 700 bytes for each


def count_text_occurrences(
    strings: Mapping[str, bool], texts: Iterable[str], normalise: Callable[[str], str] = str
) -> dict[str, int]:
    """Count the occurrences of each string in the texts, including overlapping occurrences.

    strings: the strings to count, as keys. If the value is True, occurrences that end inside a word
        do not count; for example, `code 12` then does not occur in `code 123`.
    texts: the texts, not an iterator: they are read once for every `_STRINGS_AT_ONCE` strings.
    normalise: function that is applied to each text before the search.

    Raise ValueError if a string is empty.
    """
    if "" in strings:
        raise ValueError("expected texts to look for, got an empty one")
    counts: dict[str, int] = {}
    stream = iter(strings)
    while batch := dict.fromkeys(itertools.islice(stream, _STRINGS_AT_ONCE), 0):
        automaton, lengths_of_ends = _build_end_automaton(batch)
        for text in map(normalise, texts):
            for number, _, end in automaton.find_matches_as_indexes(text, overlapping=True):
                for length in lengths_of_ends[number]:
                    # This separates texts that share their end.
                    if length > end or (occurrence := text[end - length : end]) not in batch:
                        continue
                    after = text[end : end + 1]
                    if not (
                        strings[occurrence] and is_occurrence_end_inside_word(occurrence, after)
                    ):
                        batch[occurrence] += 1
        counts |= batch
        del automaton  # or the next one would be made next to it
    return counts


def _build_end_automaton(strings: Iterable[str]) -> tuple[AhoCorasick, list[tuple[int, ...]]]:
    """Build an automaton that finds the strings' ends, and list the strings' lengths by end."""
    lengths: dict[str, tuple[int, ...]] = {}
    for text in strings:
        end = text[-_END:]
        known = lengths.get(end, ())
        if len(text) not in known:
            lengths[end] = (*known, len(text))
    return AhoCorasick(lengths, store_patterns=False), list(lengths.values())


def is_occurrence_end_inside_word(text: str, following: str) -> bool:
    """Return whether `following` continues the last word, number or space of `text`."""
    if not following:
        return False
    return is_inside_word(text, following) or (text[-1].isspace() and not following.isspace())
