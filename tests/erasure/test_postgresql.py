"""PostgreSQL: what a deletion leaves in tables, indexes, statistics and the log, and what removes
it.
"""

from __future__ import annotations

import base64
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from auditor.erasure.examine import Erasure
from tests.conftest import check_command
from tests.erasure.postgresql import (
    Database,
    drop_spare_databases,
    find_programs,
    serve_postgresql,
)
from tests.erasure.stored import (
    count_leftovers,
    examine,
    make_rows,
    split_rows,
    verdicts_by_layer,
    write_rows,
)

TABLES, LOG, STATISTICS = "bytes of tables", "bytes of pg_wal", "bytes of pg_statistic"
WORD_COLUMNS = "words of tsvector columns"
VIEW, WORD_INDEX, ROWS = "planner's statistics", "bytes of index public.notes_words", "rows"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the address of a new server on loopback, without the database."""
    pytest.importorskip("psycopg", reason="pip install 'audit-lm[stores]'")
    programs = find_programs()
    if programs is None:
        pytest.skip("apt-get install postgresql")
    # Each test reads the log and all databases.
    with serve_postgresql(programs, log_file_size=1) as address:
        drop_spare_databases(address)
        yield address


@pytest.fixture
def database(server: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    made = Database(server, f"t{abs(hash(request.node.name))}")
    yield made
    made.drop()


def find_remedy(erasure: Erasure, layer: str) -> str:
    return next(one.remedy for one in erasure.verdicts if one.layer == layer and one.leftovers)


def test_a_single_deleted_row_is_seen_in_each_layer(tmp_path: Path, database: Database) -> None:
    """Which the statistics, made from a sample, need not quote."""
    rows = make_rows(seed=101)
    deleted, kept = split_rows(rows, 1)
    database.insert(rows)
    database.run("CHECKPOINT")
    database.delete(deleted)
    database.run("CHECKPOINT")
    counts = count_leftovers(examine(tmp_path, deleted, kept, database.address))
    for layer in (TABLES, LOG):
        assert counts[layer, "text"] == counts[layer, "vectors"] == 1
    assert counts[WORD_INDEX, "words"] == 1


def test_each_layer_keeps_deleted_rows_until_its_advice_is_followed(
    tmp_path: Path, database: Database
) -> None:
    n_deleted = 12
    rows = make_rows(seed=100 + n_deleted)
    deleted, kept = split_rows(rows, n_deleted)
    database.insert(rows)
    database.run("CHECKPOINT", "ANALYZE notes")
    database.delete(deleted)
    database.run("CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    counts, verdicts = count_leftovers(left), verdicts_by_layer(left)
    for layer in (TABLES, LOG):
        assert counts[layer, "text"] == counts[layer, "vectors"] == n_deleted
    assert counts[WORD_INDEX, "words"] == n_deleted
    assert verdicts[ROWS, "text"] == verdicts[ROWS, "vectors"] == "gone"
    assert counts[VIEW, "text"] >= n_deleted // 2  # the statistics quote a sample
    assert find_remedy(left, VIEW) == "ANALYZE"
    assert "VACUUM FULL of the table" in find_remedy(left, TABLES)
    assert "pg_switch_wal()" in find_remedy(left, LOG)
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    verdicts = verdicts_by_layer(left)
    assert verdicts[TABLES, "text"] == verdicts[TABLES, "vectors"] == "gone"
    assert verdicts[WORD_INDEX, "words"] == "gone"
    assert count_leftovers(left)[LOG, "text"] == n_deleted
    assert count_leftovers(left)[VIEW, "text"] >= n_deleted // 2
    database.run("ANALYZE notes", "VACUUM FULL pg_catalog.pg_statistic", "CHECKPOINT")
    assert verdicts_by_layer(examine(tmp_path, deleted, kept, database.address))[VIEW, "text"] == (
        "gone"
    )
    database.overwrite_log()
    clean = examine(tmp_path, deleted, kept, database.address)
    assert not clean.n_left
    # Nothing of kept rows is in the log either, which then tells nothing.
    assert verdicts_by_layer(clean)[LOG, "text"] == "cannot tell"
    database.run("VACUUM FULL notes", "CHECKPOINT")
    clean = verdicts_by_layer(examine(tmp_path, deleted, kept, database.address))
    assert clean[LOG, "text"] == clean[LOG, "vectors"] == clean[TABLES, "text"] == "gone"


def test_pgvector_keeps_vectors_in_its_index_and_statistics(
    tmp_path: Path, database: Database
) -> None:
    if database.vector != "vector(32)":
        pytest.skip("the server has no pgvector")
    rows = make_rows(seed=200)
    deleted, kept = split_rows(rows, 12)
    database.run("CREATE INDEX near ON notes USING hnsw (embedding vector_l2_ops)")
    database.insert(rows)
    database.run("ANALYZE notes")
    database.delete(deleted)
    database.run("CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert count_leftovers(left)["bytes of index public.near", "vectors"] == 12
    assert count_leftovers(left)[VIEW, "vectors"] >= 6
    assert verdicts_by_layer(left)["nearest neighbours", "vectors"] == "gone"
    database.run("VACUUM notes", "CHECKPOINT", "ANALYZE notes")
    left = count_leftovers(examine(tmp_path, deleted, kept, database.address))
    assert left["bytes of index public.near", "vectors"] == left[VIEW, "vectors"] == 0


def test_compressed_texts_cannot_be_judged_by_short_ones(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=300)
    deleted, kept = split_rows(rows, 12)
    for row in deleted:
        row["text"] = f"{row['text']} " * 40
    database.insert(kept)
    database.run("CHECKPOINT")
    erasure = examine(tmp_path, deleted, kept, database.address)
    long = [one for one in erasure.verdicts if "tables, texts from" in one.layer]
    assert [one.verdict for one in long] == ["cannot tell"]
    assert (TABLES, "text") not in verdicts_by_layer(erasure)


def test_kept_texts_that_do_not_shrink_are_no_control_for_long_texts(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(60, seed=310)
    deleted, kept = split_rows(rows, 12)
    for row in kept:  # base64 of random bytes does not shrink by a fourth
        row["text"] = base64.b64encode(random.Random(row["id"]).randbytes(1_800)).decode()
    for row in deleted:
        row["text"] = f"{row['text']} " * 20
    database.insert(kept)
    database.run("CHECKPOINT")
    erasure = examine(tmp_path, deleted, kept, database.address)
    for layer in (TABLES, LOG):
        (long,) = [one for one in erasure.verdicts if f"{layer}, texts from" in one.layer]
        assert long.verdict == "cannot tell" and "notes.text" in long.why
        assert long.n_control_seen == len(kept)


def test_long_texts_that_are_never_compressed_are_judged_by_kept_ones_of_their_length(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(72, seed=320)
    deleted, kept = split_rows(rows, 12)
    for row in (*deleted, *kept[:50]):  # in TOAST, as the other texts are not
        row["text"] = f"{row['text']} " * 14
    database.run("ALTER TABLE notes ALTER COLUMN text SET STORAGE EXTERNAL")
    database.insert(rows)
    database.delete(deleted)
    database.run("CHECKPOINT")
    layer = f"{TABLES}, texts from 2,032 bytes"
    left = examine(tmp_path, deleted, kept, database.address)
    (long,) = [one for one in left.verdicts if one.layer == layer]
    assert len(long.leftovers) == 12 and long.n_control == 50
    assert set(long.places) == {"UTF-8 in TOAST of table notes"}
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert verdicts_by_layer(left)[layer, "text"] == "gone"


def test_a_log_with_compressed_pages_cannot_tell_whatever_the_setting_is_now(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=330)
    for row in rows:
        row["text"] = " ".join(f"{word} {word} {word}" for word in row["text"].split())
    deleted, kept = split_rows(rows, 12)
    database.insert(rows)
    database.overwrite_log()
    database.run("CHECKPOINT", "SET wal_compression = on")
    database.delete(deleted)  # writes whole pages to the log, as the first change since CHECKPOINT
    database.run("SET wal_compression = off", "VACUUM FULL notes", "CHECKPOINT")
    erasure = examine(tmp_path, deleted, kept, database.address)
    (log,) = [one for one in erasure.verdicts if (one.layer, one.kind) == (LOG, "text")]
    assert log.verdict == "cannot tell" and "compressed" in log.why
    assert log.n_control_seen == len(kept)
    database.overwrite_log()
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert verdicts_by_layer(left)[LOG, "text"] == "gone"
    database.run("ALTER ROLE ALL SET wal_compression = on")
    left = examine(tmp_path, deleted, kept, database.address)
    database.run("ALTER ROLE ALL RESET wal_compression")
    assert verdicts_by_layer(left)[LOG, "text"] == "cannot tell"


def test_a_table_in_another_tablespace_is_examined(tmp_path: Path, database: Database) -> None:
    rows = make_rows(seed=340)
    deleted, kept = split_rows(rows, 12)
    (directory,) = database.run("SHOW data_directory").fetchone()
    folder = Path(directory).parent / "space"
    folder.mkdir()
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
    database.run(f"CREATE TABLESPACE space LOCATION '{folder}'")
    database.run("ALTER TABLE notes SET TABLESPACE space")
    database.insert(rows)
    database.delete(deleted)
    database.run("CHECKPOINT")
    left = count_leftovers(examine(tmp_path, deleted, kept, database.address))
    assert left[TABLES, "text"] == left[TABLES, "vectors"] == 12
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert verdicts_by_layer(left)[TABLES, "text"] == "gone"


@pytest.mark.parametrize(
    ("type", "index"),
    [
        ("halfvec(32)", "hnsw (embedding halfvec_l2_ops)"),
        ("vector(32)", "ivfflat (embedding vector_l2_ops) WITH (lists = 60)"),
    ],
)
def test_vectors_of_half_precision_and_in_ivfflat_indexes_are_found(
    tmp_path: Path, database: Database, type: str, index: str
) -> None:
    if database.vector != "vector(32)":
        pytest.skip("the server has no pgvector")
    rows = make_rows(seed=350)
    deleted, kept = split_rows(rows, 12)
    database.vector = type
    database.run(f"ALTER TABLE notes ALTER COLUMN embedding TYPE {type}")
    database.insert(rows)
    database.run(f"CREATE INDEX near ON notes USING {index}")
    database.delete(deleted)
    database.run("CHECKPOINT")
    near = ("bytes of index public.near", "vectors")
    left = examine(tmp_path, deleted, kept, database.address)
    assert count_leftovers(left)[near] == count_leftovers(left)[TABLES, "vectors"] == 12
    assert verdicts_by_layer(left)["nearest neighbours", "vectors"] == "gone"
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert verdicts_by_layer(left)[near] == verdicts_by_layer(left)[TABLES, "vectors"] == "gone"


def test_older_versions_of_an_updated_row_and_a_dropped_table(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=400)
    deleted, kept = split_rows(rows, 12)
    database.insert(rows)
    for row in deleted:
        database.run("UPDATE notes SET text = 'x' WHERE id = %s", values=(row["id"],))
    database.run("CHECKPOINT")
    left = count_leftovers(examine(tmp_path, deleted, kept, database.address))
    # The server itself reuses the space of some older versions.
    assert left[TABLES, "text"] > 0 and left[LOG, "text"] == 12 and left[ROWS, "text"] == 0
    database.run("CREATE TABLE copies AS SELECT * FROM notes WHERE text <> 'x'")
    database.run("DROP TABLE notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert count_leftovers(left)[TABLES, "text"] == 0
    assert count_leftovers(left)[LOG, "text"] == 12


@pytest.mark.parametrize("configuration", ["simple", "english"])
def test_words_of_deleted_rows_are_seen_in_tsvector_columns_and_statistics(
    tmp_path: Path, database: Database, configuration: str
) -> None:
    rows = make_rows(seed=450)
    deleted, kept = split_rows(rows, 12)
    database.insert(rows)
    database.run(
        f"CREATE TABLE found AS SELECT id, to_tsvector('{configuration}', text) words FROM notes",
        "ANALYZE found",
    )
    database.delete(deleted)
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    counts, verdicts = count_leftovers(left), verdicts_by_layer(left)
    assert counts[WORD_COLUMNS, "words"] == counts[TABLES, "words"] == 12
    assert counts[VIEW, "words"] >= 3 and "ANALYZE" in find_remedy(left, VIEW)
    assert verdicts[ROWS, "text"] == verdicts[TABLES, "text"] == "gone"
    database.run("DELETE FROM found WHERE id NOT IN (SELECT id FROM notes)", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert verdicts_by_layer(left)[WORD_COLUMNS, "words"] == "gone"
    assert count_leftovers(left)[TABLES, "words"] == 12
    assert "VACUUM FULL of the table" in find_remedy(left, TABLES)
    database.run("VACUUM FULL found", "ANALYZE found", "VACUUM FULL pg_catalog.pg_statistic")
    database.run("CHECKPOINT")
    verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, database.address))
    for layer in (WORD_COLUMNS, TABLES, VIEW):
        assert verdicts[layer, "words"] == "gone"


def test_files_that_cannot_be_read_cannot_tell(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from auditor.erasure.stores import postgresql

    deleted, kept = split_rows(make_rows(seed=500), 12)
    database.insert(kept)
    database.run("CREATE ROLE reader LOGIN", "GRANT SELECT ON notes TO reader")
    address = database.address.replace("audit@", "reader@")
    erasure = examine(tmp_path, deleted, kept, address)
    (files,) = [one for one in erasure.verdicts if one.layer == "files of the server"]
    assert files.verdict == "cannot tell" and "data_directory" in files.why
    assert verdicts_by_layer(erasure)[ROWS, "text"] == "gone"
    monkeypatch.setattr(postgresql, "_IDENTIFIER", "SELECT 1")
    erasure = examine(tmp_path, deleted, kept, database.address)
    (files,) = [one for one in erasure.verdicts if one.layer == "files of the server"]
    assert "another server's" in files.why


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda address: "postgresql://audit@127.0.0.1:1/db", "cannot be read"),
        (lambda address: address.replace("audit@", "nobody@"), "cannot be read"),
        (lambda address: f"{address}_missing", "cannot be read"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path,
    database: Database,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    expected: str,
) -> None:
    deleted, kept = split_rows(make_rows(40), 3)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    flags = ["--deleted", gone, "--kept", write_rows(tmp_path / "kept.jsonl", kept)]
    check_command("erase", change(database.address), *flags, code=2)
    told = " ".join(capsys.readouterr().err.split())
    assert expected in told and "Traceback" not in told


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://audit:secret@127.0.0.1:1/db",
        "postgresql://audit@127.0.0.1:1/db?password=secret",
        "postgresql://audit@127.0.0.1:1/db?connect_timeout=1&sslpassword=secret",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    deleted, kept = split_rows(make_rows(40), 3)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    flags = ["--deleted", gone, "--kept", write_rows(tmp_path / "kept.jsonl", kept)]
    check_command("erase", address, *flags, code=2)
    told = " ".join(capsys.readouterr().err.split())
    assert "without a password" in told and "secret" not in told


def test_a_missing_driver_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    deleted, kept = split_rows(make_rows(40), 3)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    flags = ["--deleted", gone, "--kept", write_rows(tmp_path / "kept.jsonl", kept)]
    check_command("erase", "postgresql://audit@127.0.0.1:1/db", *flags, code=2)
    assert "psycopg, which is not installed" in " ".join(capsys.readouterr().err.split())


def test_stores_that_never_had_the_records_raise_no_alarm(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=600)
    database.insert(rows)
    database.run("ANALYZE notes", "CHECKPOINT")
    for n, seed in ((12, 700), (48, 701)):
        never = make_rows(n, seed=seed)
        assert not examine(tmp_path, never, rows, database.address).n_left
