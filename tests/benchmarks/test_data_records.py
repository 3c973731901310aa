"""Records as columns: they give back what they were built from, in little memory."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from auditor.benchmarks.data.cut_places import CutPlace
from auditor.benchmarks.data.data_records import DataRecord, build_data_record_table
from auditor.benchmarks.data.splitting import SEVERAL, merge_duplicate_records
from auditor.core.nouns import Wording

WORDING = Wording("one two three four", 4, 8, 13, (2, 5), (("name", "two"),))
PLAIN = DataRecord(0, (1, 2, 3, 4, 5), CutPlace(1, 3, 5), suffix_start=3)
RECORDS = [
    PLAIN,
    replace(PLAIN, row=7, part=0, repeats=0, group="a", n_shared=3, suffix_start=2),
    replace(PLAIN, row=7, part=12, repeats=3, user="u", wording=WORDING, n_shared=9),
    replace(PLAIN, row=8, tokens=(9, 9, 9, 8), cut=CutPlace(0, 3, 4), n_context=2, row_text="t"),
    replace(PLAIN, row=9, wording=WORDING, system_length=1, answer_tokens=40, n_shared=5),
]


def test_a_table_gives_back_the_records_that_it_was_built_from() -> None:
    table = build_data_record_table(iter(RECORDS))
    assert build_data_record_table(table) is table
    for record, first in zip(table, RECORDS, strict=True):
        same = replace(record, tokens=first.tokens, cut=first.cut)
        assert (same, record.prefix, record.suffix) == (first, first.prefix, first.suffix)
        assert record.own_tokens == first.own_tokens
    assert table[2].wording == WORDING
    assert [record.row for record in table[np.array([4, 1])]] == [9, 7]
    assert table.digests.tolist() == [record.digest for record in RECORDS]
    assert table.has_own_tokens.tolist() == [bool(record.own_tokens) for record in RECORDS]
    assert table.distinct_rows == [0, 7, 8, 9]


def test_equal_records_become_one_with_all_repeats_and_no_single_group_or_user() -> None:
    one = replace(PLAIN, repeats=2, group="a", user="u")
    two = replace(PLAIN, tokens=(7, 7, 7), cut=CutPlace(0, 1, 3), repeats=5)
    records = [two, one, replace(one, row=4, repeats=3), replace(two, row=5, repeats=None), one]
    merged = list(merge_duplicate_records(build_data_record_table(records)))
    assert [(r.row, r.repeats, r.group, r.user) for r in merged] == [
        (0, None, None, None),
        (0, 7, "a", "u"),
    ]
    other = replace(one, group="b", user="v")
    (only,) = merge_duplicate_records(build_data_record_table([one, other, one]))
    assert (only.repeats, only.group, only.user) == (6, SEVERAL, None)


def test_records_take_a_third_of_the_memory_of_objects() -> None:
    tokens = np.random.default_rng(0).integers(1000, 50_000, (20_000, 12)).tolist()

    def read() -> Iterator[DataRecord]:
        for row, ids in enumerate(tokens):
            wording = Wording(
                f"a text of some 60 characters, the {row}th of them all", 0, 9, 22, ()
            )
            yield DataRecord(row, array("i", ids), CutPlace(0, 4, 8), 1, wording=wording)

    tracemalloc.start()
    table = build_data_record_table(read())
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A record as an object takes 550 bytes.
    assert len(table) == 20_000 and held < 270 * 20_000
