"""Leave out non-members that the training data quote or copy: they are no valid baseline."""

from __future__ import annotations

import re
from dataclasses import replace

from auditor.benchmarks.data.data_records import RecordSource, group_reason_rows
from auditor.benchmarks.data.occurrences import (
    count_text_occurrences,
    is_occurrence_end_inside_word,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Wording

STANDS_IN_MEMBER = "occurs in a member, word for word except for case, spaces and punctuation"


def drop_member_copies(nonmembers: RecordSource, members: RecordSource) -> RecordSource:
    """Return the non-members, in order, without records whose words occur in a member's row.

    Only letters and digits are compared, because a quotation may be indented, wrapped or in another
    case. Exact copies of a member, token for token, stay, because the split counts them. Two
    records of one template that differ in a word both stay. Raise AuditError if no non-member
    stays.
    """
    phrases: dict[str, bool] = {}  # whether the occurrence must end at the end of a word
    pairs = {record.prefix_suffix_pair for record in members.records}
    words_of_record = []
    for record in nonmembers.records:
        words_of_record.append(
            None
            if record.wording is None or record.prefix_suffix_pair in pairs
            else _normalise_wording(record.wording)
        )
    for words in words_of_record:
        if words is not None and words.strip():
            phrases[words] = False  # the space after a complete word is in the text
    counts = count_text_occurrences(
        phrases, (f" {_normalise_text_words(text)} " for text in members.texts)
    )
    is_copy = []
    for words in words_of_record:
        is_copy.append(words is not None and counts.get(words, 0) > 0)
    if not any(is_copy):
        return nonmembers
    records = tuple(
        record for record, copied in zip(nonmembers.records, is_copy, strict=True) if not copied
    )
    if not records:
        raise AuditError(
            f"nothing is left of {nonmembers.label}: every row {STANDS_IN_MEMBER}; expected "
            "records that were not trained on"
        )
    rows = {record.row for record in records}
    copied_rows = []
    for record, copied in zip(nonmembers.records, is_copy, strict=True):
        if copied:
            copied_rows.append(record.row)
    dropped_rows = []
    for row in dict.fromkeys(copied_rows):
        if row not in rows:
            dropped_rows.append((row, STANDS_IN_MEMBER))
    parts = []
    for row in copied_rows:
        if row in rows:
            parts.append((row, STANDS_IN_MEMBER))
    return replace(
        nonmembers,
        records=records,
        left_out=(*nonmembers.left_out, *group_reason_rows(dropped_rows)),
        parts_left_out=(*nonmembers.parts_left_out, *group_reason_rows(parts)),
    )


def _normalise_text_words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def _normalise_wording(wording: Wording) -> str:
    """Return the words of prefix and suffix, separated by spaces.

    A final space follows unless the suffix ends inside a word.
    """
    text = wording.prefix_and_suffix_text
    words = _normalise_text_words(text)
    if is_occurrence_end_inside_word(text, wording.after[:1]):
        return words
    return f"{words} "
