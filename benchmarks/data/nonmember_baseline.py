"""Make non-members a valid baseline: without copies of members, and as long as members."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from auditor.benchmarks.data.cut_places import LEAST_SUFFIX
from auditor.benchmarks.data.data_records import DataRecord, DataRecordTable, RecordSource
from auditor.benchmarks.data.splitting import SplitOptions
from auditor.benchmarks.data.words import (
    count_text_occurrences,
    is_occurrence_end_inside_word,
)
from auditor.core.errors import AuditError
from auditor.core.result import Doubt
from auditor.statistics.distributions import compute_homogeneity_p_value

STANDS_IN_MEMBER = "occurs in a member, word for word except for case, spaces and punctuation"
ANSWER_OF_MEMBER = "has the answer of a member, under another question"
UNMATCHED = "more of its length than among the members"
_DIFFERENT_MIX = 0.01  # p-value below which two mixes of lengths differ
_FEW_OF_MEMBERS = 0.1  # share of the number of members
# An answer after more different questions than this is a stock phrase: at most so many questions,
# and so large a share of the members' questions.
_MOST_QUESTIONS = 5
_QUESTION_SHARE = 0.05


def drop_member_copies(
    nonmembers: RecordSource, members: RecordSource, has_answers: bool
) -> RecordSource:
    """Return the non-members, in order, omitting quotations from members and answers of members.

    A record is a quotation if a member's row contains its words. Only letters and digits are
    compared, because a quotation may be indented, wrapped or in different case. System turns are
    not compared, because the same conversation under another one was trained on. Exact copies are
    kept here, because the split drops and counts them. Records from the same template that differ
    in a word are kept, too. Raise AuditError if no non-member remains.

    has_answers: whether the attacked texts are answers to questions.
    """
    is_copy = np.isin(nonmembers.table.digests, members.table.digests).tolist()
    words_of_record = []
    for record, is_equal in zip(nonmembers.table, is_copy, strict=True):
        words = ""
        if record.wording is not None and not is_equal:
            words = _normalise_record_words(record.text_without_system, record.wording.after)
        words_of_record.append(words)
    # An occurrence need not end at the end of a word: the space after a complete word is in the
    # text.
    searched = dict.fromkeys(filter(str.strip, words_of_record), False)
    counts = count_text_occurrences(searched, members.texts, _pad_text_words)
    answers = set[str]()
    if has_answers:
        answers = _list_own_answers(members.table)
    is_usable = []
    unusable = list(nonmembers.unusable)
    for record, words in zip(nonmembers.table, words_of_record, strict=True):
        reason = ""
        if counts.get(words):
            reason = STANDS_IN_MEMBER
        elif words and _normalise_answer(record) in answers:
            reason = ANSWER_OF_MEMBER
        is_usable.append(not reason)
        if reason:
            unusable.append((record.row, reason))
    if is_usable and not any(is_usable):
        reasons = " or ".join(sorted(set(map(operator.itemgetter(1), unusable))))
        raise AuditError(
            f"nothing is left of {nonmembers.label}: every row {reasons}; expected records that "
            "were not trained on"
        )
    records = nonmembers.table[np.array(is_usable, np.bool_)]
    notes = nonmembers.notes
    if has_answers and members.unread is not None:
        sample = f"answers and conversations of {members.label} are compared with in the sample"
        notes = (*notes, f"{nonmembers.label}: {sample} only, equal rows in all of it")
    return replace(nonmembers, records=records, unusable=tuple(unusable), notes=notes)


def _list_own_answers(members: Sequence[DataRecord]) -> set[str]:
    """Return the words of the members' answers, except short answers and stock phrases."""
    questions: dict[str, set[str]] = {}
    all_questions = set()
    for record in members:
        question = record.text_without_system
        all_questions.add(question)
        questions.setdefault(_normalise_answer(record), set()).add(question)
    share = int(_QUESTION_SHARE * len(all_questions))
    most = max(1, min(_MOST_QUESTIONS, share))
    own_answers = set()
    for answer, questions_of_answer in questions.items():
        if answer and len(questions_of_answer) <= most:
            own_answers.add(answer)
    return own_answers


def _normalise_answer(record: DataRecord) -> str:
    """Return the words of the record's attacked text; "" if it has few tokens."""
    if record.wording is None or record.n_suffix < LEAST_SUFFIX:
        return ""
    return _normalise_text_words(record.wording.suffix)


def _normalise_text_words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def _pad_text_words(text: str) -> str:
    return f" {_normalise_text_words(text)} "


def _normalise_record_words(text: str, after: str) -> str:
    """Return the words of a record's text, separated by spaces.

    A space is added at the end unless the last word continues in `after`, the text that follows.
    """
    words = _normalise_text_words(text)
    if is_occurrence_end_inside_word(text, after[:1]):
        return words
    return f"{words} "


def match_nonmember_lengths(
    nonmembers: RecordSource, members: RecordSource, split: SplitOptions
) -> tuple[RecordSource, tuple[Doubt, ...]]:
    """Return non-members whose distribution of lengths equals that of the members, and doubts.

    The length is the number of attacked tokens of a row. Distinct rows are counted by bands of
    length: 8 to 15 tokens, 16 to 31 tokens, and so on. Nothing changes unless the two distributions
    differ beyond chance (chi-square, 1%). If at most half of the non-members would remain, all are
    kept. A `Doubt` then warns that members and non-members differ in length.
    """
    bands = _group_length_bands(nonmembers.table)
    member_rows = _group_length_bands(members.table)
    sizes = {band: len(rows) for band, rows in member_rows.items()}
    nonmember_sizes = {band: len(rows) for band, rows in bands.items()}
    if not _has_unlike_lengths(sizes, nonmember_sizes):
        return nonmembers, ()
    n_members = sum(sizes.values())
    n_nonmembers = sum(map(len, bands.values()))
    # Non-members to keep for each member of a band; bands with few members do not limit the others.
    ratio = math.inf
    for band, n in sizes.items():
        if n >= _FEW_OF_MEMBERS * n_members:
            ratio = min(ratio, nonmember_sizes.get(band, 0) / n)
    n_by_band = {}
    for band, rows in bands.items():
        n_by_band[band] = min(len(rows), round(ratio * sizes.get(band, 0)))
    n_matched = sum(n_by_band.values())
    if 2 * n_matched <= n_nonmembers:
        mix = _format_length_mix(nonmember_sizes)
        sentence = (
            f"members and non-members differ in length ({_format_length_mix(sizes)} of the "
            f"members, {mix} of the non-members), and too few non-members are as long as the "
            "members: a difference in leakage may only be one of length"
        )
        return nonmembers, (Doubt("non-members", sentence),)
    matched_rows: set[int] = set()
    for band, rows in bands.items():
        # A larger number of a band keeps the rows of a smaller number.
        order = split.draw_order(f"non-member of band {band}", len(rows)).tolist()
        for i in order[: n_by_band[band]]:
            matched_rows.add(rows[i])
    note = (
        f"{nonmembers.label}: matched by length: {n_matched} of {n_nonmembers} rows stay, so that "
        "the same share of them is short as of the members"
    )
    return _select_matched_rows(nonmembers, matched_rows, note), ()


def _has_unlike_lengths(members: Mapping[int, int], nonmembers: Mapping[int, int]) -> bool:
    """Test if the two distributions over bands of lengths differ beyond chance."""
    bands = sorted(members.keys() | nonmembers.keys())
    if not members or not nonmembers or len(bands) < 2:
        return False
    table = [[sizes.get(band, 0) for band in bands] for sizes in (members, nonmembers)]
    return compute_homogeneity_p_value(table) < _DIFFERENT_MIX


def _select_matched_rows(source: RecordSource, matched_rows: set[int], note: str) -> RecordSource:
    """Keep the records of these rows and of the rows that equal them."""
    first_rows = _find_first_equal_rows(source.table)
    rows = source.table.rows.tolist()
    is_kept = np.array([first_rows[row] in matched_rows for row in rows], np.bool_)
    unmatched = source.table[~is_kept].distinct_rows
    return replace(
        source,
        records=source.table[is_kept],
        notes=(*source.notes, note),
        not_attacked={**source.not_attacked, UNMATCHED: tuple(unmatched)},
    )


def _group_length_bands(records: DataRecordTable) -> dict[int, list[int]]:
    """Return the distinct rows in each band of lengths, keyed by the band's number."""
    first_rows = _find_first_equal_rows(records)
    tokens: dict[int, int] = {}
    n_suffix = records.secrets.lengths[:, 1].tolist()
    for row, count in zip(records.rows.tolist(), n_suffix, strict=True):
        if first_rows[row] == row:
            tokens[row] = tokens.get(row, 0) + count
    bands: dict[int, list[int]] = {}
    for row, count in tokens.items():
        bands.setdefault(count.bit_length(), []).append(row)
    return bands


def _find_first_equal_rows(records: DataRecordTable) -> dict[int, int]:
    """Map each row to the first row with equal parts, which may be the row itself."""
    digests_of_rows: dict[int, list[bytes]] = {}
    for row, digest in zip(records.rows.tolist(), records.digests.tolist(), strict=True):
        digests_of_rows.setdefault(row, []).append(digest)
    first_rows: dict[tuple[bytes, ...], int] = {}
    return {
        row: first_rows.setdefault(tuple(digests), row) for row, digests in digests_of_rows.items()
    }


def _format_length_mix(sizes: Mapping[int, int]) -> str:
    """Return a phrase with the most frequent band of lengths and its share of the rows.

    sizes: number of rows in each band.
    """
    band = max(sizes, key=lambda band: sizes[band])
    share = sizes[band] / sum(sizes.values())
    if band == 1:
        return f"1 token in {share:.0%}"
    return f"{2 ** (band - 1)} to {2**band - 1} tokens in {share:.0%}"
