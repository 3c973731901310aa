"""Parquet: values of dropped rows that stay in the dictionary of a column."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from auditor.erasure.layers import Layer, Piece, judge_erasure_layer
from auditor.erasure.records import read_erasure_records
from auditor.erasure.stores.lancedb import read_arrow
from auditor.erasure.windows import TEXT
from tests.erasure.stored import (
    count_leftovers,
    examine,
    make_rows,
    split_rows,
    verdicts_by_layer,
    write_rows,
)

TEXTS = (pyarrow.string(), pyarrow.string())


def test_a_dictionary_keeps_values_of_dropped_rows(tmp_path: Path) -> None:
    rows = make_rows()
    deleted, kept = split_rows(rows, 12)
    path = tmp_path / "notes.parquet"
    frame = pd.DataFrame(rows).astype({"text": "category"})
    frame = frame[frame["id"].isin([row["id"] for row in kept])]
    frame.to_parquet(path)
    erasure = examine(tmp_path, deleted, kept, str(path))
    left = count_leftovers(erasure)
    verdicts = verdicts_by_layer(erasure)
    assert left["dictionaries", "text"] == 12
    assert verdicts["rows", "text"] == verdicts["rows", "vectors"] == "gone"
    (dictionaries,) = [v for v in erasure.verdicts if v.leftovers and v.layer == "dictionaries"]
    assert "remove_unused_categories" in dictionaries.remedy
    frame.assign(text=frame["text"].cat.remove_unused_categories()).to_parquet(path)
    clean = examine(tmp_path, deleted, kept, str(path))
    assert not clean.n_left
    assert verdicts_by_layer(clean)["dictionaries", "text"] == "gone"
    plain = tmp_path / "plain.parquet"
    frame.assign(text=frame["text"].astype(object)).to_parquet(plain, compression=None)
    assert examine(tmp_path, deleted, kept, str(plain)).verdict == "gone"


def test_rows_that_are_still_in_a_folder_of_files_are_named(tmp_path: Path) -> None:
    rows = make_rows(60)
    deleted, kept = split_rows(rows, 6)
    folder = tmp_path / "notes"
    folder.mkdir()
    pd.DataFrame(rows).to_parquet(folder / "part.parquet")
    erasure = examine(tmp_path, deleted, kept, str(folder))
    left = count_leftovers(erasure)
    assert left["rows", "text"] == left["rows", "vectors"] == 6


def test_texts_inside_records_and_lists_are_read(tmp_path: Path) -> None:
    rows = make_rows(60)
    deleted, kept = split_rows(rows, 6)
    messages = [[{"role": "user", "content": {"parts": [row["text"], None]}}, None] for row in rows]
    table = pyarrow.table({"messages": messages, "n": list(range(60))})
    parquet.write_table(table, tmp_path / "chats.parquet")
    left = examine(tmp_path, deleted, kept, str(tmp_path / "chats.parquet"))
    (in_rows,) = [v for v in left.verdicts if (v.layer, v.kind) == ("rows", "text")]
    assert len(in_rows.leftovers) == 6 and in_rows.n_control_seen == in_rows.n_control == 54


@pytest.mark.parametrize("kind", ["binary", "numbers", "map", "union", "run ends"])
def test_texts_in_bytes_maps_and_unions_are_read(tmp_path: Path, kind: str) -> None:
    rows = make_rows(60)
    deleted, kept = split_rows(rows, 6)
    gone = [row["text"] for row in deleted]
    columns = {
        "binary": pyarrow.array([text.encode() for text in gone]),
        "numbers": pyarrow.array([list(text.encode()) for text in gone]),
        "map": pyarrow.array([[("note", text)] for text in gone], pyarrow.map_(*TEXTS)),
        "union": pyarrow.UnionArray.from_sparse(
            pyarrow.array([1] * 6, pyarrow.int8()), [pyarrow.array([0] * 6), pyarrow.array(gone)]
        ),
        "run ends": pyarrow.RunEndEncodedArray.from_arrays([1, 2, 3, 4, 5, 6], gone),
    }
    pieces = [Piece("rows", [row["text"] for row in kept])]
    pieces += read_arrow("rows", pyarrow.table({"other": columns[kind]}))
    write_rows(tmp_path / "gone.jsonl", deleted)
    write_rows(tmp_path / "kept.jsonl", kept)
    records = read_erasure_records(tmp_path / "gone.jsonl", tmp_path / "kept.jsonl")
    verdicts = judge_erasure_layer("store", Layer("rows", lambda: pieces, (TEXT,)), records)
    assert len(verdicts[0].leftovers) == 6


def test_texts_in_views_and_long_lists_are_read(tmp_path: Path) -> None:
    rows = make_rows(60)
    deleted, kept = split_rows(rows, 6)
    table = pyarrow.Table.from_pylist(rows)
    texts = table.column("text").cast(pyarrow.string_view())
    place = table.schema.get_field_index("text")
    table = table.set_column(place, "text", texts)
    vectors = table.column("embedding").cast(pyarrow.large_list(pyarrow.float32()))
    table = table.set_column(table.schema.get_field_index("embedding"), "embedding", vectors)
    parquet.write_table(table, tmp_path / "notes.parquet")
    left = count_leftovers(examine(tmp_path, deleted, kept, str(tmp_path / "notes.parquet")))
    assert left["rows", "text"] == left["dictionaries", "text"] == 6
    assert left["rows", "vectors"] == 6
