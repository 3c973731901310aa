"""SQLite: what a deletion leaves in free pages, word indexes and the log, and what removes it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from auditor.erasure.layers import Layer, PartlyReadError, Piece, judge_erasure_layer
from auditor.erasure.records import read_erasure_records
from auditor.erasure.stores.sqlite import read_trigrams
from tests.erasure.stored import (
    Row,
    count_leftovers,
    examine,
    make_rows,
    split_rows,
    vector_bytes,
    verdicts_by_layer,
    write_rows,
)

FILE, ROWS, INDEX = "bytes of notes.db", "rows", "word index found"
VOCABULARY = f"vocabulary of {INDEX}"


def make_database(path: Path, rows: list[Row], secure: bool, journal: str = "delete") -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA secure_delete = {secure}")
        database.execute(f"PRAGMA journal_mode = {journal}")
        database.execute("CREATE TABLE notes (id TEXT, text TEXT, vector BLOB)")
        values = [(row["id"], row["text"], vector_bytes(row)) for row in rows]
        database.executemany("INSERT INTO notes VALUES (?, ?, ?)", values)
        database.commit()


def run_statements(path: Path, *statements: str, secure: bool = False) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA secure_delete = {secure}")
        for statement in statements:
            database.execute(statement)


def delete_statement(deleted: list[Row], table: str = "notes") -> str:
    ids = ", ".join(f"'{row['id']}'" for row in deleted)
    return f"DELETE FROM {table} WHERE id IN ({ids})"


def test_deleted_rows_stay_in_free_space_until_vacuum(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=False)
    run_statements(path, delete_statement(deleted))
    before = path.read_bytes()
    left = examine(tmp_path, deleted, kept, str(path))
    verdicts = verdicts_by_layer(left)
    assert verdicts[FILE, "text"] == verdicts[FILE, "vectors"] == "still there"
    assert verdicts[ROWS, "text"] == verdicts[ROWS, "vectors"] == "gone"
    assert count_leftovers(left)[FILE, "text"] >= 10
    assert path.read_bytes() == before
    (remedy,) = {one.remedy for one in left.verdicts if one.leftovers}
    assert "VACUUM" in remedy
    run_statements(path, "VACUUM")
    assert examine(tmp_path, deleted, kept, str(path)).verdict == "gone"


def test_rows_that_are_deleted_securely_are_gone(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    run_statements(path, delete_statement(deleted), secure=True)
    clean = examine(tmp_path, deleted, kept, str(path))
    assert clean.verdict == "gone"
    assert all(one.recall_lower_bound > 0.9 for one in clean.verdicts)


@pytest.mark.parametrize("checkpoint", ["PASSIVE", "TRUNCATE"])
def test_the_log_keeps_deleted_rows_until_it_is_truncated(tmp_path: Path, checkpoint: str) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("PRAGMA journal_mode = wal")
        reader.execute("CREATE TABLE other (n INT)")  # it has the log open: nobody removes it
        make_database(path, rows, secure=True, journal="wal")
        run_statements(path, delete_statement(deleted), "VACUUM", secure=True)
        reader.execute(f"PRAGMA wal_checkpoint({checkpoint})")
        verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, str(path)))
    assert verdicts[FILE, "text"] == "gone"
    log = verdicts.get(("bytes of notes.db-wal", "text"))
    assert log == ("still there" if checkpoint == "PASSIVE" else None)


def test_a_word_index_keeps_words_until_it_is_optimised_before_vacuum(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, [], secure=True)
    run_statements(path, "CREATE VIRTUAL TABLE found USING fts5(id, text)", secure=True)
    with closing(sqlite3.connect(path)) as database:
        database.executemany(
            "INSERT INTO found VALUES (?, ?)", [(r["id"], r["text"]) for r in rows]
        )
        database.commit()
    run_statements(path, delete_statement(deleted, "found"), "VACUUM", secure=True)
    left = examine(tmp_path, deleted, kept, str(path))
    verdicts = verdicts_by_layer(left)
    (index,) = [one for one in left.verdicts if one.layer == INDEX]
    assert len(index.leftovers) == 12  # though segments hold only the ends of words like others
    assert index.n_control_seen == index.n_control == len(kept)
    assert verdicts[VOCABULARY, "words"] == verdicts[FILE, "text"] == "gone"
    (remedy,) = {one.remedy for one in left.verdicts if one.leftovers}
    assert remedy == "INSERT INTO found(found) VALUES ('optimize'), then VACUUM"
    run_statements(path, "INSERT INTO found(found) VALUES ('optimize')", "VACUUM", secure=True)
    assert count_leftovers(examine(tmp_path, deleted, kept, str(path)))[INDEX, "words"] == 0


def test_a_row_that_is_still_returned_is_still_there(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    run_statements(path, delete_statement(deleted[1:]), secure=True)
    erasure = examine(tmp_path, deleted, kept, str(path))
    assert {tuple(one.leftovers) for one in erasure.verdicts} == {(deleted[0]["id"],)}
    assert "table notes" in erasure.verdicts[0].places[0]


@pytest.mark.parametrize(("n_words", "n_found"), [(2, 0), (3, 1)])
def test_a_summary_of_a_deleted_row_is_near_verbatim(
    tmp_path: Path, n_words: int, n_found: int
) -> None:
    """Ten words in a row are, of which two may differ: 5 + 3 are the row's."""
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, kept, secure=True)
    words = deleted[3]["text"].split()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE summaries (text TEXT)")
        # A line for each word, one word changed: no window of 32 bytes is in it.
        more = words[14 : 14 + n_words]
        summary = "\n".join(["In", "short", *words[8:13], "and", *more, "so", "on"])
        database.execute("INSERT INTO summaries VALUES (?)", [summary])
        database.commit()
    left = count_leftovers(examine(tmp_path, deleted, kept, str(path)))
    assert left[ROWS, "near-verbatim text"] == n_found and left[ROWS, "text"] == 0


def test_an_index_beside_its_table_keeps_words_until_it_is_rebuilt(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    run_statements(
        path,
        "CREATE VIRTUAL TABLE found USING fts5(text, content='notes')",
        "INSERT INTO found(found) VALUES ('rebuild')",
        delete_statement(deleted),
        "INSERT INTO found(found) VALUES ('optimize')",
        "VACUUM",
        secure=True,
    )
    left = examine(tmp_path, deleted, kept, str(path))
    assert count_leftovers(left)[VOCABULARY, "words"] == 12
    assert verdicts_by_layer(left)[ROWS, "text"] == "gone"
    (remedy,) = {one.remedy for one in left.verdicts if one.layer == VOCABULARY}
    assert "VALUES ('rebuild')" in remedy
    rebuild = "INSERT INTO found(found) VALUES ('rebuild')"
    run_statements(path, rebuild, "VACUUM", secure=True)
    assert examine(tmp_path, deleted, kept, str(path)).verdict == "gone"


@pytest.mark.parametrize("module", ["fts3(id, text)", "fts4(id, text)"])
def test_older_word_indexes_keep_words_until_they_are_optimised(
    tmp_path: Path, module: str
) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, [], secure=True)
    run_statements(path, f"CREATE VIRTUAL TABLE found USING {module}", secure=True)
    with closing(sqlite3.connect(path)) as database:
        values = [(row["id"], row["text"]) for row in rows]
        database.executemany("INSERT INTO found VALUES (?, ?)", values)
        database.commit()
    run_statements(path, delete_statement(deleted, "found"), "VACUUM", secure=True)
    left = examine(tmp_path, deleted, kept, str(path))
    assert count_leftovers(left)[INDEX, "words"] >= 10
    assert verdicts_by_layer(left)[VOCABULARY, "words"] == "gone"
    (remedy,) = {one.remedy for one in left.verdicts if one.leftovers}
    run_statements(path, remedy.split(", then")[0], "VACUUM", secure=True)
    clean = verdicts_by_layer(examine(tmp_path, deleted, kept, str(path)))
    assert clean[INDEX, "words"] == clean[VOCABULARY, "words"] == "gone"


@pytest.mark.parametrize("tokenizer", ["porter", "unicode61 remove_diacritics 2"])
def test_a_word_index_beside_its_table_is_seen_if_it_changes_words(
    tmp_path: Path, tokenizer: str
) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    run_statements(
        path,
        f"CREATE VIRTUAL TABLE found USING fts5(text, content='notes', tokenize='{tokenizer}')",
        "INSERT INTO found(found) VALUES ('rebuild')",
        delete_statement(deleted),
        "VACUUM",
    )
    left = examine(tmp_path, deleted, kept, str(path))
    assert count_leftovers(left)[VOCABULARY, "words"] == 12


@pytest.mark.parametrize("secure", [False, True])
def test_trigrams_of_deleted_rows_spell_their_texts(tmp_path: Path, secure: bool) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    for i, row in enumerate(rows):
        row["text"] = f"Über {i}: {row['text']}"
    deleted, kept = split_rows(rows, 12)
    make_database(path, [], secure=secure)
    run_statements(
        path, "CREATE VIRTUAL TABLE found USING fts5(id, text, tokenize='trigram')", secure=secure
    )
    with closing(sqlite3.connect(path)) as database:
        values = [(7 - 10**6 * i, r["id"], r["text"]) for i, r in enumerate(rows)]
        for value in values:  # in segments that SQLite merges in part
            database.execute("INSERT INTO found(rowid, id, text) VALUES (?, ?, ?)", value)
            database.commit()
    run_statements(path, delete_statement(deleted, "found"), "VACUUM", secure=secure)
    left = examine(tmp_path, deleted, kept, str(path))
    (index,) = [one for one in left.verdicts if one.layer == INDEX]
    assert len(index.leftovers) >= 6 and index.n_control_seen == len(kept)
    assert verdicts_by_layer(left)[ROWS, "text"] == verdicts_by_layer(left)[FILE, "text"] == "gone"
    assert index.remedy == "INSERT INTO found(found) VALUES ('optimize'), then VACUUM"
    run_statements(path, "INSERT INTO found(found) VALUES ('optimize')", "VACUUM", secure=secure)
    clean = verdicts_by_layer(examine(tmp_path, deleted, kept, str(path)))
    assert clean[INDEX, "text"] == clean[ROWS, "text"] == "gone"


def test_every_text_is_spelled_by_its_trigrams(tmp_path: Path) -> None:
    """Short and long texts, repeated characters, other alphabets, in pages of 64 bytes."""
    texts = ["abc", "aaaaaaaa", "Größe ÄÖ", "日本語のテキスト", "x" * 5_000, "an and an end " * 300]
    texts += [row["text"] for row in make_rows(40)]
    with closing(sqlite3.connect(tmp_path / "notes.db")) as database:
        database.execute("CREATE VIRTUAL TABLE found USING fts5(text, tokenize='trigram')")
        database.execute("INSERT INTO found(found, rank) VALUES ('pgsz', 64)")
        for i, text in enumerate(texts):
            database.execute("INSERT INTO found(rowid, text) VALUES (?, ?)", (i**9, text))
            database.commit()
        database.execute("DELETE FROM found WHERE rowid % 2 = 0")
        database.commit()
        sql = "USING fts5(text, tokenize='trigram')"
        (piece,) = read_trigrams(tmp_path / "notes.db", "found", sql)
        left = set(piece.content)
        assert {text.lower() for text in texts[1::2]} <= left
        database.execute("INSERT INTO found(found) VALUES ('optimize')")
        database.commit()
    (piece,) = read_trigrams(tmp_path / "notes.db", "found", sql)
    assert sorted(piece.content) == sorted(text.lower() for text in texts[1::2])


@pytest.mark.parametrize("option", ["detail=none", "detail = 'column'"])
def test_trigrams_without_positions_cannot_tell(tmp_path: Path, option: str) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, kept, secure=True)
    run_statements(
        path,
        f"CREATE VIRTUAL TABLE found USING fts5(text, content='notes', tokenize=trigram, {option})",
        "INSERT INTO found(found) VALUES ('rebuild')",
    )
    erasure = examine(tmp_path, deleted, kept, str(path))
    (index,) = [one for one in erasure.verdicts if one.layer == INDEX]
    assert index.verdict == "cannot tell" and "no positions" in index.why


def test_words_that_are_no_utf8_do_not_hide_the_others(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    run_statements(
        path,
        "CREATE VIRTUAL TABLE found USING fts5(text, content='notes', tokenize=ascii)",
        "INSERT INTO found(found) VALUES ('rebuild')",
        "INSERT INTO found(rowid, text) VALUES (999, CAST(X'6dff7a' AS TEXT))",
        delete_statement(deleted),
        "VACUUM",
        secure=True,
    )
    assert count_leftovers(examine(tmp_path, deleted, kept, str(path)))[VOCABULARY, "words"] == 12


def test_a_vocabulary_that_cannot_be_read_cannot_tell(tmp_path: Path) -> None:
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, kept, secure=True)
    run_statements(
        path,
        "CREATE VIRTUAL TABLE found USING fts5(text, content='notes')",
        "INSERT INTO found(found) VALUES ('rebuild')",
        "PRAGMA writable_schema = on",
        "UPDATE sqlite_master SET sql = replace(sql, ')', ', tokenize=theirs)') "
        "WHERE name = 'found'",
    )
    (verdict,) = [
        one
        for one in examine(tmp_path, deleted, kept, str(path)).verdicts
        if one.layer == VOCABULARY
    ]
    assert verdict.verdict == "cannot tell"
    assert verdict.why == "it was read only in part: no such fts5 table: main.found"


@pytest.mark.parametrize("n_pieces", [1, 2])
def test_a_layer_that_is_read_in_part_is_not_gone(tmp_path: Path, n_pieces: int) -> None:
    """The second piece has the deleted records; the first has the kept ones."""
    deleted, kept = split_rows(make_rows(), 12)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    records = read_erasure_records(gone, write_rows(tmp_path / "kept.jsonl", kept))

    def read_pieces() -> Iterator[Piece]:
        for rows in (kept, deleted)[:n_pieces]:
            yield Piece("there", [row["text"] for row in rows])
        raise PartlyReadError("the disk is broken")

    layer = Layer("rows", read_pieces, other_texts=True)
    verdicts = judge_erasure_layer("store", layer, records)
    text = next(one for one in verdicts if one.kind == "text")
    assert text.n_control_seen == len(kept)
    if n_pieces == 1:
        assert {one.verdict for one in verdicts} == {"cannot tell"}
        assert text.why == "it was read only in part: the disk is broken"
    else:
        assert len(text.leftovers) == 12 and text.verdict == "still there"


def test_a_database_of_others_tells_nothing(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(), 12)
    make_database(tmp_path / "notes.db", make_rows(seed=9), secure=True)
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "notes.db"))
    assert verdicts_by_layer(erasure)[ROWS, "near-verbatim text"] == "cannot tell"
    assert {one.verdict for one in erasure.verdicts} == {"cannot tell"}


@pytest.mark.parametrize(
    "options", ["fts5(text, content='notes'", 'fts4(text, content="notes"', "fts5(text, content=''"]
)
def test_an_index_of_stems_is_not_gone_while_it_has_words_of_no_row(
    tmp_path: Path, options: str
) -> None:
    """Kept records have words without an ending, which a stem would lack."""
    deleted, kept = make_rows(120)[:12], make_rows(120)[12:]
    for i, row in enumerate(deleted):
        row["text"] = f"{row['id']} was seen in a place by the river, xxo{chr(97 + i)}rkling"
    path = tmp_path / "notes.db"
    make_database(path, [*deleted, *kept], secure=True)
    tokenizer = "tokenize='porter')" if "fts5" in options else "tokenize=porter)"
    fill = "INSERT INTO found(rowid, text) SELECT rowid, text FROM notes"
    run_statements(path, f"CREATE VIRTUAL TABLE found USING {options}, {tokenizer}", fill)
    run_statements(path, delete_statement(deleted), "VACUUM", secure=True)
    verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, str(path)))
    assert verdicts[VOCABULARY, "words"] == "cannot tell"
    if "notes" in options:
        run_statements(path, "INSERT INTO found(found) VALUES ('rebuild')", "VACUUM", secure=True)
        verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, str(path)))
        assert verdicts[VOCABULARY, "words"] == "gone"


@pytest.mark.parametrize("column", ["text", "vector"])
def test_statistics_keep_deleted_keys_of_an_index_until_they_are_made_again(
    tmp_path: Path, column: str
) -> None:
    apsw = pytest.importorskip("apsw", reason="the writer needs ENABLE_STAT4")
    if "ENABLE_STAT4" not in apsw.compile_options:
        pytest.skip("this SQLite was built without ENABLE_STAT4")
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    with closing(apsw.Connection(str(path))) as database:
        for statement in (f"CREATE INDEX keys ON notes({column})", "ANALYZE"):
            database.execute(statement)
    run_statements(path, delete_statement(deleted), "VACUUM", secure=True)
    left = [one for one in examine(tmp_path, deleted, kept, str(path)).verdicts if one.leftovers]
    assert [one.layer for one in left] == [FILE, ROWS]
    assert all("table sqlite_stat4" in str(one.places) for one in left)
    assert {one.remedy for one in left} == {"ANALYZE, then VACUUM"}
    run_statements(path, "ANALYZE", "VACUUM")
    assert examine(tmp_path, deleted, kept, str(path)).verdict == "gone"


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    from auditor.core.errors import AuditError

    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, 12)
    make_database(path, rows, secure=True)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(AuditError, match="damaged"):
        examine(tmp_path, deleted, kept, str(path))
    path.write_bytes(content[:100] + b"\xff" * 4_000 + content[4_100:])
    with pytest.raises(AuditError, match="cannot be read as SQLite"):
        examine(tmp_path, deleted, kept, str(path))
