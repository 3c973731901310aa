"""How often texts occur in others, letter for letter: one pass over all of them. Knows no rows,
files or tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import ahocorasick

from auditor.benchmarks.data.words import is_inside_word

_END = 32  # characters of a text that are looked for; the rest is looked at where they are found


def count_text_occurrences(
    wanted: Mapping[str, bool], texts: Iterable[str], times: Sequence[int] | None = None
) -> dict[str, int]:
    """How often each wanted text stands in the texts, overlaps included. times: how often each text
    counts; None: once.

    wanted: also whether a text is to end where it ends, so that `code 12` is not found in `code
    123`. Raises ValueError for an empty one. Aho and Corasick 1975 on the ends of what is wanted:
    an automaton of whole records takes ten times the memory.
    """
    if "" in wanted:
        raise ValueError("expected texts to look for, got an empty one")
    counts = dict.fromkeys(wanted, 0)
    lengths: dict[str, set[int]] = {}  # of the wanted texts, by their end
    for text in wanted:
        lengths.setdefault(text[-_END:], set()).add(len(text))
    if not lengths:
        return counts
    automaton = ahocorasick.Automaton()
    for end, found in lengths.items():
        automaton.add_word(end, tuple(found))
    automaton.make_automaton()
    for i, text in enumerate(texts):
        for last, found in automaton.iter(text):
            for length in found:
                start, behind = last + 1 - length, text[last + 1 : last + 2]
                # Texts that share their end are told apart here.
                if start < 0 or (whole := text[start : last + 1]) not in counts:
                    continue
                if not (wanted[whole] and is_occurrence_end_inside_word(whole, behind)):
                    counts[whole] += 1 if times is None else times[i]
    return counts


def is_occurrence_end_inside_word(text: str, behind: str) -> bool:
    """Whether the last word, number or space of a text is only a part of one, from the character
    behind it."""
    if not behind:
        return False
    return is_inside_word(text, behind) or (text[-1].isspace() and not behind.isspace())
