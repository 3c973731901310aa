"""Compare released text with private records: find the passage closest to each record, by words.

Texts are split by `words.split_into_words`, and each word has an id.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rapidfuzz.distance import Levenshtein

from auditor.benchmarks.data import ngrams
from auditor.benchmarks.data.columns import read_data_table
from auditor.benchmarks.data.ngrams import NGramIndex
from auditor.benchmarks.data.words import join_words, split_into_words
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark, Tokens
from auditor.statistics import memorised
from auditor.statistics.judging import compute_near_verbatim_limit
from auditor.statistics.memorised import MemorisedTokens, NGramMatches

_AT_ONCE = 1000  # texts looked up at once
_SEEDS = 64  # most places where a record is aligned


@dataclass
class WordIds:
    """Number words from 1, in order of first occurrence."""

    ids: dict[str, int] = field(default_factory=lambda: defaultdict(itertools.count(1).__next__))

    def __call__(self, text: str) -> Tokens:
        return tuple(map(self.ids.__getitem__, split_into_words(text)))

    def words_of_ids(self, tokens: Sequence[int]) -> str:
        """Return the words of these ids, joined by spaces except in scripts without spaces."""
        # In the order of their ids: a dict keeps the order of insertion.
        names = list(self.ids)
        return join_words(names[token - 1] for token in tokens)


@dataclass(frozen=True)
class ReleasedRecord:
    """Hold a record to search for in released text.

    row: row number in its file.
    tokens: ids of its words.
    member: whether the record was trained on.
    times: number of copies in training; marks: its personal data.
    """

    row: int
    text: str
    tokens: Tokens
    member: bool
    times: int | None = None
    marks: tuple[Mark, ...] = ()


def read_released_records(
    data: str, nonmembers: str, words: WordIds, without: Iterable[str]
) -> tuple[list[ReleasedRecord], list[str]]:
    """Return distinct members and non-members, and a sentence for each reason why rows are omitted.

    data, nonmembers: files. words: numbers the words. without: texts to omit, such as canaries. A
    non-member that equals a private text is omitted. Raise AuditError if a file has no record.
    """
    records = dict[Tokens, ReleasedRecord]()
    sentences = list[str]()
    excluded = set(map(words, without))
    for flag, name, member in (("--data", data, True), ("--nonmembers", nonmembers, False)):
        table = read_data_table(flag, name)
        texts = table.list_shown_texts()
        sentences += table.list_unread_notes()
        repeats = table.list_repeat_counts() if member else [0] * table.rows
        marks: Sequence[tuple[Mark, ...]] = [()] * table.rows
        if not table.has_conversations:
            marks = table.list_personal_data_marks()
        dropped = Counter[str]()
        for row, (text, times, marked) in enumerate(zip(texts, repeats, marks, strict=True)):
            tokens = words(text)
            if not tokens or tokens in excluded:
                dropped["a canary" if tokens else "no words"] += 1
            elif (before := records.get(tokens)) is None:
                records[tokens] = ReleasedRecord(
                    row, text, tokens, member, times if member else None, marked
                )
            elif before.member and member:
                # A mark refers to its row's text: take both from the first row with marks.
                if marked and not before.marks:
                    before = replace(before, text=text, marks=marked)
                records[tokens] = replace(before, times=(before.times or 0) + times)
            else:
                dropped["the same as an earlier row, or as one of --data"] += 1
        for reason, count in dropped.items():
            sentences.append(f"{table.label}: left out {count:,} rows: {reason}")
        if member not in {record.member for record in records.values()}:
            reasons = "; ".join(f"{count:,} rows: {reason}" for reason, count in dropped.items())
            raise AuditError(
                f"{table.label}: expected records with words, got none: left out {reasons}"
            )
    return list(records.values()), sentences


@dataclass(frozen=True)
class CopiedSpan:
    """Hold a passage of a record, and the corresponding words in released text.

    record_words: ids of n words of the record, or more if a longer run matches verbatim.
    released_words: ids of the corresponding words in the released text.
    text: index of the released text (-1: none).
    length: number of words in the longest common run.
    """

    record_words: Tokens
    released_words: Tokens
    text: int = -1
    length: int = 0

    @property
    def edit_distance(self) -> int:
        return Levenshtein.distance(self.record_words, self.released_words)


def find_nearest_passages(
    records: Sequence[ReleasedRecord], texts: Sequence[Tokens], n: int
) -> tuple[list[CopiedSpan], list[MemorisedTokens], NGramIndex]:
    """Return the passage closest to each record, the matches of each released text, and the index.

    records: members first, each of at least n words. texts: word ids of each released text. A
    verbatim passage is a sequence of at least n words that occurs in no second record, so that
    members and non-members are treated alike. A near-verbatim passage has n words within
    `compute_near_verbatim_limit` edits. It is searched for only next to n/2 words that match
    verbatim.
    """
    trained = []
    heldout = []
    for entry in records:
        if entry.member:
            trained.append((entry.tokens, entry.times))
        else:
            heldout.append(entry.tokens)
    # Distinct members first, as in the index, so that a record and its text have the same number.
    index = ngrams.build_ngram_index(trained, heldout)
    counts_of_texts = list[MemorisedTokens]()
    best = dict[int, CopiedSpan]()
    for i, matches in _match_texts(index, texts, n):
        counts_of_texts.append(memorised.count_memorised_ngrams(matches, n))
        for record, run in memorised.find_longest_memorised_runs(
            matches, matches.trained | matches.heldout, n
        ).items():
            if record not in best or run.length > best[record].length:
                out = texts[i][run.start : run.start + run.length]
                best[record] = CopiedSpan(out, out, i, run.length)
    near = _find_near_verbatim_passages(records, texts, n, index, set(best))
    nearest = []
    for i, entry in enumerate(records):
        nearest.append(best.get(i) or near.get(i) or CopiedSpan(entry.tokens[:n], ()))
    return nearest, counts_of_texts, index


def _match_texts(
    index: NGramIndex, texts: Sequence[Tokens], n: int
) -> Iterator[tuple[int, NGramMatches]]:
    for start in range(0, len(texts), _AT_ONCE):
        yield from enumerate(index.match_ngrams(texts[start : start + _AT_ONCE], n), start)


def _find_near_verbatim_passages(
    records: Sequence[ReleasedRecord],
    texts: Sequence[Tokens],
    n: int,
    index: NGramIndex,
    records_found: set[int],
) -> Mapping[int, CopiedSpan]:
    """Return the passage with the fewest edits, for each record without a verbatim passage.

    records_found: indices of the records with a verbatim passage. Passages are aligned at a
    verbatim match of n/2 words.
    """
    half = max(1, n // 2)
    seeds = Counter[int]()
    best = dict[int, CopiedSpan]()
    allowed = compute_near_verbatim_limit(n)
    for i, matches in _match_texts(index, texts, half):
        for at, record in zip(matches.starts.tolist(), matches.record.tolist(), strict=True):
            if record < 0 or record in records_found or seeds[record] >= _SEEDS:
                continue
            seeds[record] += 1
            passage = _find_best_alignment(records[record].tokens, texts[i], at, half, n)
            if passage.edit_distance <= allowed and (
                record not in best or passage.edit_distance < best[record].edit_distance
            ):
                best[record] = replace(passage, text=i, length=half)
    return best


def _find_best_alignment(record: Tokens, text: Tokens, at: int, half: int, n: int) -> CopiedSpan:
    """Return the n words of the record, around a verbatim match, that need the fewest edits.

    at, half: the match's position in the text and its length, in words.
    """
    seed = text[at : at + half]
    # The first occurrence in the record; later occurrences are not aligned there.
    place = next(i for i in range(len(record)) if record[i : i + half] == seed)
    # From each of these starts, n words of the record contain the seed.
    ways = []
    for i in range(max(0, place - n + half), min(place, len(record) - n) + 1):
        begin = at - place + i
        ways.append(CopiedSpan(record[i : i + n], text[max(0, begin) : begin + n]))
    return min(ways, key=lambda way: way.edit_distance)
