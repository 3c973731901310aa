"""Leave out non-members that the training data quote or copy: they are no valid baseline."""

from __future__ import annotations

import re
from dataclasses import replace

from auditor.benchmarks.data.data_records import RecordSource
from auditor.benchmarks.data.occurrences import (
    count_text_occurrences,
    is_occurrence_end_inside_word,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Wording

STANDS_IN_MEMBER = "occurs in a member, word for word except for case, spaces and punctuation"


def drop_member_copies(nonmembers: RecordSource, members: RecordSource) -> RecordSource:
    """Return the non-members, in order, without quotations of members.

    A record is a quotation if a member's row contains its words. Only letters and digits are
    compared, because a quotation may be indented, wrapped or in another case. Exact copies stay
    here, because the split drops and counts them. Two records of one template that differ in a word
    both stay. Raise AuditError if no non-member stays.
    """
    pairs = {record.prefix_suffix_pair for record in members.records}
    words_of_record = []
    for record in nonmembers.records:
        words = ""
        if record.wording is not None and record.prefix_suffix_pair not in pairs:
            words = _normalise_wording(record.wording)
        words_of_record.append(words)
    counts = count_text_occurrences(
        # An occurrence need not end at the end of a word: the space after a complete word is in
        # the text.
        dict.fromkeys((words for words in words_of_record if words.strip()), False),
        (f" {_normalise_text_words(text)} " for text in members.texts),
    )
    records = []
    unusable = list(nonmembers.unusable)
    for record, words in zip(nonmembers.records, words_of_record, strict=True):
        if counts.get(words):
            unusable.append((record.row, STANDS_IN_MEMBER))
        else:
            records.append(record)
    if nonmembers.records and not records:
        raise AuditError(
            f"nothing is left of {nonmembers.label}: every row {STANDS_IN_MEMBER}; expected "
            "records that were not trained on"
        )
    return replace(nonmembers, records=tuple(records), unusable=tuple(unusable))


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
