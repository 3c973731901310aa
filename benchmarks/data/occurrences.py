"""Count exact occurrences of strings in texts, in one pass over all texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ahocorasick

from auditor.benchmarks.data.words import is_inside_word

_END = 32  # characters at the end of a text to search for; the rest is compared where they occur


def count_text_occurrences(strings: Mapping[str, bool], texts: Iterable[str]) -> dict[str, int]:
    """Count the occurrences of each string in the texts, including overlapping occurrences.

    strings: the strings to count, as keys. If the value is True, occurrences that end inside a word
        do not count; for example, `code 12` then does not occur in `code 123`.

    Raise ValueError if a string is empty.
    """
    if "" in strings:
        raise ValueError("expected texts to look for, got an empty one")
    counts = dict.fromkeys(strings, 0)
    lengths: dict[str, set[int]] = {}  # of the searched texts, by their end
    for text in strings:
        lengths.setdefault(text[-_END:], set()).add(len(text))
    if not lengths:
        return counts
    automaton = ahocorasick.Automaton()
    for end, lengths_of_end in lengths.items():
        automaton.add_word(end, tuple(lengths_of_end))
    automaton.make_automaton()
    for text in texts:
        for last, lengths_of_end in automaton.iter(text):
            for length in lengths_of_end:
                start = last + 1 - length
                after = text[last + 1 : last + 2]
                # This separates texts that share their end.
                if start < 0 or (occurrence := text[start : last + 1]) not in counts:
                    continue
                if not (strings[occurrence] and is_occurrence_end_inside_word(occurrence, after)):
                    counts[occurrence] += 1
    return counts


def is_occurrence_end_inside_word(text: str, following: str) -> bool:
    """Return whether `following` continues the last word, number or space of `text`."""
    if not following:
        return False
    return is_inside_word(text, following) or (text[-1].isspace() and not following.isspace())
