"""Released text beside the records it may have come from: files as word ids, and the passage
nearest to each record.

Words are those of `words.split_into_words`. Knows text; no tokenizer, model or torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rapidfuzz.distance import Levenshtein

from auditor.benchmarks.data import columns, ngrams
from auditor.benchmarks.data.conversation_rows import UnusableConversation, message_text
from auditor.benchmarks.data.ngrams import NGramIndex
from auditor.benchmarks.data.tables import (
    RecordTable,
    read_record_table,
    require_nonempty_record_table,
)
from auditor.benchmarks.data.words import join_words, split_into_words
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark, Tokens
from auditor.statistics import memorised
from auditor.statistics.judging import compute_near_verbatim_limit
from auditor.statistics.memorised import MemorisedTokens

_AT_ONCE = 1000  # texts looked up at once
_SEEDS = 64  # places that a record is aligned at, at most


@dataclass
class WordIds:
    """Words by id, from 1, in the order in which they were first seen."""

    ids: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> Tokens:
        return tuple(
            self.ids.setdefault(word, len(self.ids) + 1) for word in split_into_words(text)
        )

    def words_of_ids(self, tokens: Sequence[int]) -> str:
        """Return words with a space between, but for scripts that have none."""
        # In the order of their ids: a dict keeps the order of insertion.
        names = list(self.ids)
        return join_words(names[token - 1] for token in tokens)


@dataclass(frozen=True)
class ReleasedRecord:
    """A record that may be in released text. times: how often it was trained on; marks: as its file
    has them."""

    row: int
    text: str
    tokens: Tokens
    member: bool
    times: int | None = None
    marks: tuple[Mark, ...] = ()


def read_table_with_row_texts(flag: str, name: str) -> tuple[RecordTable, list[str]]:
    """A file's rows as texts: of a conversation what each turn says, line by line. Raises
    AuditError."""
    table = require_nonempty_record_table(read_record_table(flag, name, columns.COLUMNS))
    layout = columns.detect_column_layout(table)
    if layout in columns.PLAIN:
        return table, columns.joined_layout_texts(table, layout)
    lines: list[list[str]] = [[] for _ in range(table.rows)]
    for row, said in columns.parse_row_conversations(table, layout):
        messages = () if isinstance(said, UnusableConversation) else said.messages
        contents = [message_text(message.get("content")) for message in messages]
        # Both sides of a preference begin with the same prompt.
        lines[row] += [content for content in contents if content and content not in lines[row]]
    return table, ["\n".join(texts) for texts in lines]


def read_members_and_nonmembers(
    data: str, nonmembers: str, words: WordIds, without: Iterable[str] = ()
) -> tuple[list[ReleasedRecord], list[str]]:
    """Members and non-members, each text once, and what was left out, a sentence each.

    without: texts that are no records, as canaries. A non-member that is in the private data is
    none. Raises AuditError where nobody is left.
    """
    found, said = dict[Tokens, ReleasedRecord](), list[str]()
    others = {words(text) for text in without}
    for flag, name, member in (("--data", data, True), ("--nonmembers", nonmembers, False)):
        table, texts = read_table_with_row_texts(flag, name)
        repeats = columns.row_repeat_counts(table) if member else [0] * table.rows
        plain = columns.detect_column_layout(table) in columns.PLAIN
        marks = columns.row_personal_data_marks(table) if plain else [()] * table.rows
        left = Counter[str]()
        for row, (text, times, marked) in enumerate(zip(texts, repeats, marks, strict=True)):
            tokens = words(text)
            if not tokens or tokens in others:
                left["a canary" if tokens else "no words"] += 1
            elif (before := found.get(tokens)) is None:
                found[tokens] = ReleasedRecord(
                    row, text, tokens, member, times if member else None, marked
                )
            elif before.member and member:
                # A mark stands in its row's own text: both are kept of one row, the first that has
                # any.
                kept = (
                    before
                    if before.marks or not marked
                    else replace(before, text=text, marks=marked)
                )
                found[tokens] = replace(kept, times=(before.times or 0) + times)
            else:
                left["the same as a row before, or as one of --data"] += 1
        said += [f"{table.where}: left out {count:,} rows: {why}" for why, count in left.items()]
        if not any(one.member == member for one in found.values()):
            raise AuditError(
                f"{table.where}: expected records with words in them, got none that is its own"
            )
    return list(found.values()), said


@dataclass(frozen=True)
class CopiedSpan:
    """n words of a record, or more where they stand word for word in released text, and what stands
    there instead.

    text: which released text it stands in, -1: none. length: of the longest run in common.
    """

    own: Tokens
    there: Tokens
    text: int = -1
    length: int = 0

    @property
    def edit_distance(self) -> int:
        return Levenshtein.distance(self.own, self.there)


def find_nearest_passages(
    records: Sequence[ReleasedRecord], texts: Sequence[Tokens], n: int
) -> tuple[list[CopiedSpan], list[MemorisedTokens], NGramIndex]:
    """The nearest passage to each record; and of each text what it holds. Records have n words at
    least, members first.

    Verbatim: a run of n words or more that no other record has, of either kind, so that members and
    non-members count alike. Near-verbatim: n words that take `compute_near_verbatim_limit`, found
    where half as many stand word for word.
    """
    members = [one for one in records if one.member]
    # Members first and each once, as in the index: a record and its text there have one number.
    index = ngrams.build_ngram_index(
        ((one.tokens, one.times) for one in members),
        (one.tokens for one in records if not one.member),
    )
    every, best = list[MemorisedTokens](), dict[int, CopiedSpan]()
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        for i, seen in enumerate(index.match_ngrams(some, n), start):
            every.append(memorised.count_memorised_ngrams(seen, n))
            for record, run in memorised.find_longest_memorised_runs(
                seen, seen.trained | seen.heldout, n
            ).items():
                if record not in best or run.length > best[record].length:
                    out = texts[i][run.start : run.start + run.length]
                    best[record] = CopiedSpan(out, out, i, run.length)
    near = _near_verbatim_released_passages(records, texts, n, index, set(best))
    none = [CopiedSpan(one.tokens[:n], ()) for one in records]
    return [best.get(i) or near.get(i) or none[i] for i in range(len(records))], every, index


def _near_verbatim_released_passages(
    records: Sequence[ReleasedRecord],
    texts: Sequence[Tokens],
    n: int,
    index: NGramIndex,
    found: set[int],
) -> Mapping[int, CopiedSpan]:
    """Of each record that was not found, the passage with fewest edits, aligned at what stands word
    for word."""
    half, seeds, best = max(1, n // 2), Counter[int](), dict[int, CopiedSpan]()
    allowed = compute_near_verbatim_limit(n)
    for start in range(0, len(texts), _AT_ONCE):
        for i, seen in enumerate(index.match_ngrams(texts[start : start + _AT_ONCE], half), start):
            for at, record in zip(seen.at.tolist(), seen.record.tolist(), strict=True):
                if record < 0 or record in found or seeds[record] >= _SEEDS:
                    continue
                seeds[record] += 1
                one = _best_aligned_released_passage(records[record].tokens, texts[i], at, half, n)
                if one.edit_distance <= allowed and (
                    record not in best or one.edit_distance < best[record].edit_distance
                ):
                    best[record] = CopiedSpan(one.own, one.there, i, half)
    return best


def _best_aligned_released_passage(
    record: Tokens, text: Tokens, at: int, half: int, n: int
) -> CopiedSpan:
    """n words of the record around those that stand at this place of the text, with fewest
    edits."""
    seed = text[at : at + half]
    # Where the record says it first; one that says it again is not aligned there.
    place = next(i for i in range(len(record)) if record[i : i + half] == seed)
    # From each of these the n words hold the seed, and the record has as many.
    begins = range(max(0, place - n + half), min(place, len(record) - n) + 1)
    ways = (
        CopiedSpan(record[i : i + n], text[max(0, at - place + i) : at - place + i + n])
        for i in begins
    )
    return min(ways, key=lambda way: way.edit_distance)
