"""What is looked for, what is refused, and how the control decides."""

from __future__ import annotations

import csv
import json
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from auditor.core.errors import AuditError
from auditor.erasure.examine import Erasure, examine_erased_stores
from auditor.erasure.layers import LayerVerdict
from auditor.erasure.records import read_erasure_records
from auditor.erasure.store import Store, list_store_kinds
from auditor.erasure.stores.files import FileStore
from auditor.erasure.windows import VECTORS, WindowIndex, write_vector_forms
from tests.conftest import check_command
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


def find_by_hand(windows: WindowIndex, content: bytes) -> set[tuple[int, bytes]]:
    """Look at every place with `bytes.find`."""
    places = set()
    for window in windows.origins:
        start = content.find(window)
        while start >= 0:
            places.add((start, window))
            start = content.find(window, start + 1)
    return places


def test_windows_are_found_at_every_place(tmp_path: Path) -> None:
    rows, windows = make_rows(20), WindowIndex()
    for i, row in enumerate(rows):
        windows.add_text(i, row["text"])
        windows.add_vector(i, np.array(row["embedding"]))
    windows.add_text(20, "A text of 20 bytes..")
    content = b"".join(
        b"x" * i + row["text"].encode() + vector_bytes(row) for i, row in enumerate(rows)
    )
    content += b"A text of 20 bytes.." + content[5:] + bytes(7)
    places = {(start, window) for start, window, _ in windows.find(content)}
    assert places == find_by_hand(windows, content)
    assert {windows.origins[window].record for _, window in places} == set(range(21))
    for size in range(40):
        assert not list(windows.find(bytes(size)))


def test_what_two_records_share_is_no_sign_of_either() -> None:
    windows = WindowIndex()
    start = "These first words of 64 bytes are the same in both these texts. "
    assert len(start) == 64
    texts = [start + "Here the first goes on in its own way.", start + "And this is of the second."]
    for i, text in enumerate(texts):
        windows.add_text(i, text)
    windows.mark_shared([texts[0]], 0)
    windows.mark_shared([texts[1]], 1)
    windows.mark_shared([f"A kept text that says: {texts[0]}"])
    windows.finish()
    assert windows.list_records("text") == {1}
    assert not list(windows.find(start.encode()))


def test_each_form_of_a_vector_is_found_in_a_file(tmp_path: Path) -> None:
    rows = make_rows()
    for row in rows:
        row["embedding"] = [3 * value for value in row["embedding"]]
    deleted, kept = split_rows(rows, 12)
    (tmp_path / "store").mkdir()
    written = [write_vector_forms(np.array(row["embedding"])) for row in rows]
    for form in written[0]:
        content = b"#".join(forms[form] for forms in written)
        (tmp_path / "store" / f"{form}.bin").write_bytes(content)
    left = count_leftovers(examine(tmp_path, deleted, kept, str(tmp_path / "store")))
    counts = {form: left[f"bytes of {form}.bin", "vectors"] for form in written[0]}
    assert len(counts) >= 14 and set(counts.values()) == {12}


def test_a_store_of_kept_records_alone_is_clean_and_an_unreadable_one_cannot_tell(
    tmp_path: Path,
) -> None:
    deleted, kept = split_rows(make_rows(), 12)
    clean, sealed = tmp_path / "clean", tmp_path / "sealed"
    for folder in (clean, sealed):
        folder.mkdir()
    write_rows(clean / "rows.json", kept)
    (sealed / "rows.bin").write_bytes(
        bytes(255 - byte for byte in (clean / "rows.json").read_bytes())
    )
    assert examine(tmp_path, deleted, kept, str(clean)).verdict == "gone"
    erasure = examine(tmp_path, deleted, kept, str(sealed))
    assert set(verdicts_by_layer(erasure).values()) == {"cannot tell"}
    # 80% of the control: what is not seen may be there
    few = tmp_path / "few"
    few.mkdir()
    write_rows(few / "rows.json", kept[: len(kept) * 4 // 5])
    verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, str(few)))
    assert set(verdicts.values()) == {"cannot tell"}


def test_fewer_than_20_kept_records_tell_nothing(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(31), 12)
    write_rows(tmp_path / "rows.json", kept)
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "rows.json"))
    assert erasure.verdict == "cannot tell"
    assert "19 kept records" in erasure.verdicts[0].why


def test_a_vector_that_a_kept_record_has_too_is_not_looked_for(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(), 12)
    deleted[0]["embedding"] = kept[0]["embedding"]
    write_rows(tmp_path / "rows.json", kept)
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "rows.json"))
    assert erasure.verdict == "gone"
    assert {one.kind: one.n_deleted for one in erasure.verdicts} == {"text": 12, "vectors": 11}


def _bad(rows: list[Row], **changes: object) -> list[Row]:
    return [{**rows[0], **changes}, *rows[1:]]


@pytest.mark.parametrize(
    ("deleted", "kept", "told"),
    [
        (lambda rows: [], lambda rows: rows, "--deleted .* is empty"),
        (lambda rows: rows, lambda rows: [], "--kept .* is empty"),
        (lambda rows: rows[:3], lambda rows: rows, "expected no deleted record among --kept"),
        (lambda rows: _bad(rows[:3], text=" "), lambda rows: rows[3:], r"words in .* got none"),
        (lambda rows: [{"id": 1, "body": "x"}], lambda rows: rows[3:], "columns 'id', 'body'"),
        (lambda rows: _bad(rows[:3], text=5), lambda rows: rows[3:], r"words in .* got a number"),
        (lambda rows: _bad(rows[:3], embedding="no"), lambda rows: rows[3:], "list of finite"),
        (lambda rows: _bad(rows[:3], embedding=[1.0]), lambda rows: rows[3:], "one length"),
        (lambda rows: rows[:3], lambda rows: _bad(rows[3:], embedding=[[1]]), "list of finite"),
    ],
)
def test_bad_records_are_refused(tmp_path: Path, deleted, kept, told: str) -> None:
    rows = make_rows(40)
    write_rows(tmp_path / "store.json", rows)
    with pytest.raises(AuditError, match=told):
        examine(tmp_path, deleted(rows), kept(rows), str(tmp_path / "store.json"))


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("missing", "which does not exist"),
        ("empty", "which is empty"),
        ("sqlite:rows.json", "expected a store of sqlite at 'rows.json'"),
        ("sqlight:rows.json", "unknown store 'sqlight'; did you mean 'sqlite'"),
    ],
)
def test_bad_stores_are_refused_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    deleted, kept = split_rows(make_rows(40), 3)
    write_rows(tmp_path / "gone.jsonl", deleted)
    write_rows(tmp_path / "kept.jsonl", kept)
    write_rows(tmp_path / "rows.json", kept)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    flags = ["--deleted", "gone.jsonl", "--kept", "kept.jsonl", "-o", "out"]
    check_command("erase", store, *flags, code=2)
    assert told in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("with_leftovers", "code"), [(True, 1), (False, 0)])
def test_the_command_writes_a_page_without_text_and_gates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], with_leftovers: bool, code: int
) -> None:
    rows = make_rows()
    deleted, kept = split_rows(rows, 12)
    store = write_rows(tmp_path / "store.json", rows if with_leftovers else kept)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    out, flags = tmp_path / "out", ["--gate", "--kept", str(write_rows(tmp_path / "k.jsonl", kept))]
    arguments = ["erase", str(store), "--deleted", str(gone), *flags, "-o", str(out)]
    check_command(*arguments, code=code)
    screen = capsys.readouterr().out
    written = json.loads((out / "erasure.json").read_text())
    assert written["verdict"] == ("still there" if with_leftovers else "gone")
    for text in (screen, (out / "erasure.html").read_text(), (out / "erasure.md").read_text()):
        assert written["verdict"] in text
        assert not any(row["text"] in text for row in rows)


def test_a_locked_store_is_refused(tmp_path: Path) -> None:
    import fcntl

    if not Path("/proc/locks").exists():
        pytest.skip("this system does not list its locks")
    deleted, kept = split_rows(make_rows(40), 3)
    write_rows(tmp_path / "rows.json", kept)
    with (tmp_path / "rows.json").open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(AuditError, match="is locked by process"):
            examine(tmp_path, deleted, kept, str(tmp_path / "rows.json"))
    assert examine(tmp_path, deleted, kept, str(tmp_path / "rows.json")).verdict == "gone"


def test_a_version_that_was_not_tried_is_refused_and_a_missing_library_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, kept = split_rows(make_rows(), 12)
    store = str(write_rows(tmp_path / "rows.json", kept))
    monkeypatch.setattr(FileStore, "package", "numpy")
    monkeypatch.setattr(FileStore, "tested", ("0.9.",))
    with pytest.raises(AuditError, match=r"expected numpy 0\.9\., whose layers are known; got"):
        examine(tmp_path, deleted, kept, store)
    monkeypatch.setattr(FileStore, "package", "a-package-that-is-nowhere")
    erasure = examine(tmp_path, deleted, kept, store)
    assert erasure.verdict == "cannot tell"
    assert "a-package-that-is-nowhere is not installed" in erasure.verdicts[-1].why
    assert verdicts_by_layer(erasure)["bytes of rows.json", "text"] == "gone"


@pytest.mark.parametrize("kind", list_store_kinds().values())
def test_every_kind_of_store_keeps_the_contract(kind: type[Store], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no store")
    assert kind.__doc__ and kind.name in run_help()
    assert (
        kind.recognises(tmp_path / "a.txt") == kind.recognises(tmp_path) == (kind.name == "files")
    )
    assert bool(kind.package) == bool(kind.tested)
    shutil.rmtree(tmp_path)


def run_help() -> str:
    from auditor.commands.erase import erase

    return erase.__doc__ or ""


def test_a_part_of_a_store_is_refused_and_stores_in_a_folder_are_named(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(60), 6)
    (tmp_path / "data" / "qdrant" / "collection").mkdir(parents=True)
    write_rows(tmp_path / "data" / "qdrant" / "collection" / "notes", kept)
    part = write_rows(tmp_path / "data" / "qdrant" / "meta.json", kept)
    with pytest.raises(AuditError, match=r"in a folder of qdrant: give '.*', or 'files:"):
        examine(tmp_path, deleted, kept, str(part))
    assert examine(tmp_path, deleted, kept, f"files:{part}").verdict == "gone"
    ((_, facts),) = examine(tmp_path, deleted, kept, str(tmp_path / "data")).facts.items()
    assert facts == ("its files only", "give the path of qdrant, too, to read it as qdrant")


# --- situations of valid stores ---


def find_verdict(erasure: Erasure, layer: str, kind: str) -> LayerVerdict:
    (verdict,) = [one for one in erasure.verdicts if (one.layer, one.kind) == (layer, kind)]
    return verdict


def drop_vectors(rows: list[Row]) -> list[Row]:
    return [{"id": row["id"], "text": row["text"]} for row in rows]


def write_texts(path: Path, texts: Iterable[str]) -> str:
    path.write_text("\0".join(texts))
    return str(path)


def test_a_part_of_a_vector_that_kept_ones_have_too_is_no_sign_of_it(tmp_path: Path) -> None:
    rows = make_rows(700)  # more than the control's 400
    categories = np.random.default_rng(0).normal(size=(40, 16)).tolist()
    for i, row in enumerate(rows):
        row["embedding"][16:] = categories[i % 40]
    deleted, kept = rows[:12], rows[12:]
    for present in (kept, rows):
        store = tmp_path / f"{len(present)}.bin"
        store.write_bytes(b"#".join(map(vector_bytes, present)))
        erasure = examine(tmp_path, deleted, kept, str(store))
        verdict = find_verdict(erasure, f"bytes of {store.name}", "vectors")
        assert (len(verdict.leftovers), verdict.n_deleted) == (len(present) - len(kept), 12)
        assert verdict.n_control_seen == verdict.n_control == 400


@pytest.mark.parametrize("cosine", [0.9999, 0.9993, 0.998])
@pytest.mark.parametrize("step", [0, 127])
def test_a_vector_that_resembles_a_kept_one_is_seen_exactly_or_cannot_be_told(
    tmp_path: Path, cosine: float, step: int
) -> None:
    rows = make_rows(500)
    deleted, kept = rows[:6], rows[6:]
    normal = np.random.default_rng(5)
    for row, twin in zip(deleted, kept[3:], strict=False):
        vector = np.array(row["embedding"])
        other = normal.normal(size=len(vector))
        other -= other @ vector * vector
        other *= np.sqrt(1 - cosine**2) / np.linalg.norm(other)
        twin["embedding"] = (cosine * vector + other).tolist()
    store = tmp_path / "rows.parquet"
    for present in (kept, rows):
        vectors = np.array([row["embedding"] for row in present], np.float32)
        if step:
            vectors = np.round(vectors * step)
        pyarrow.parquet.write_table(pyarrow.table({"vector": list(vectors)}), store)
        verdict = find_verdict(examine(tmp_path, deleted, kept, str(store)), "rows", "vectors")
        if present is kept:
            assert verdict.verdict == "cannot tell" and not verdict.n_deleted
        elif not step:
            assert len(verdict.leftovers) == 6


def test_texts_from_one_template_differ_in_a_few_of_many_bytes(tmp_path: Path) -> None:
    rows = make_rows(60)
    body = " ".join(row["text"] for row in make_rows(10, seed=3))[:1_500]
    for i, row in enumerate(rows):
        row["text"] = f"{body[:700]} Dear customer {i * 7919 % 99_991:05d}, {body[700:]}"
    deleted, kept = drop_vectors(rows[:6]), drop_vectors(rows[6:])
    clean = write_texts(tmp_path / "clean.txt", [row["text"] for row in kept])
    assert examine(tmp_path, deleted, kept, clean).verdict == "gone"
    full = write_texts(tmp_path / "full.txt", [row["text"] for row in rows])
    assert examine(tmp_path, deleted, kept, full).n_left == 6


def test_records_without_text_of_their_own_are_named_and_found_as_a_whole(tmp_path: Path) -> None:
    rows = drop_vectors(make_rows(60))
    deleted, kept = rows[:6], rows[6:]
    deleted[0]["text"] = "Ann Lee, 7"
    kept[0]["text"] = f"As was said: {deleted[1]['text']} Agreed."
    for present in (kept, rows):
        store = tmp_path / f"{len(present)}.parquet"
        texts = [row["text"] for row in present]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), store)
        erasure = examine(tmp_path, deleted, kept, str(store))
        if present is rows:
            assert find_verdict(erasure, "rows", "text").n_deleted == erasure.n_left == 6
        else:
            assert erasure.verdict == "cannot tell" and not erasure.n_left
            why = find_verdict(erasure, "all layers", "records").why
            assert why.startswith("2 of 6 deleted records cannot") and why.endswith(": r0, r1")


def test_a_store_of_vectors_cannot_tell_of_records_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer can hold them, so no layer is judged (this was a traceback)."""
    monkeypatch.setattr(FileStore, "kinds", (VECTORS,))
    deleted, kept = split_rows(drop_vectors(make_rows(60)), 6)
    store = write_rows(tmp_path / "vectors.bin", kept)
    erasure = examine(tmp_path, deleted, kept, f"files:{store}")
    (verdict,) = erasure.verdicts
    assert erasure.verdict == "cannot tell" and "they have no vector" in verdict.why


@pytest.mark.parametrize(
    "write",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: unicodedata.normalize("NFC", text),
        lambda text: json.dumps(text, ensure_ascii=False),
        json.dumps,
    ],
)
def test_short_lines_with_accents_are_found_in_each_form(
    tmp_path: Path, write: Callable[[str], str]
) -> None:
    rows = drop_vectors(make_rows(60))
    for i, row in enumerate(rows[:6]):
        lines = [f"Über {i}{j} Café Ångström señ{i * j}" for j in range(9)]
        row["text"] = unicodedata.normalize("NFC", "\n".join(lines))
    deleted, kept = rows[:6], rows[6:]
    store = write_texts(tmp_path / "notes.txt", [write(row["text"]) for row in rows])
    assert examine(tmp_path, deleted, kept, store).n_left == 6
    for row in deleted:
        row["text"] = unicodedata.normalize("NFD", row["text"])
    assert examine(tmp_path, deleted, kept, store).n_left == 6


def test_links_are_followed_to_the_files_next_to_the_store(tmp_path: Path) -> None:
    rows = drop_vectors(make_rows(60))
    deleted, kept = rows[:6], rows[6:]
    real, linked = tmp_path / "real", tmp_path / "linked"
    (real / "inner").mkdir(parents=True)
    linked.mkdir()
    write_rows(real / "notes.json", kept)
    write_rows(real / "notes.json-log", deleted)
    (linked / "notes.json").symlink_to(real / "notes.json")
    assert examine(tmp_path, deleted, kept, str(linked / "notes.json")).n_left == 6
    (linked / "parts").symlink_to(real)
    (real / "inner" / "around").symlink_to(linked)
    (real / "inner" / "nowhere").symlink_to(tmp_path / "nowhere")
    erasure = examine(tmp_path, deleted, kept, str(linked))
    assert count_leftovers(erasure)["bytes of parts/notes.json-log", "text"] == 6
    assert len(erasure.digests) == 2 + 3


@pytest.mark.parametrize("change", ["append", "add", "remove"])
def test_a_folder_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    rows = drop_vectors(make_rows(60))
    deleted, kept = rows[:6], rows[6:]
    folder = tmp_path / "live"
    folder.mkdir()
    last = write_rows(folder / "b.json", kept)
    write_rows(folder / "a.json", kept)

    real = shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        if change == "remove":
            last.unlink()
        else:
            write_rows(last if change == "append" else folder / "c.json", rows)
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(AuditError, match="was written while it was copied"):
        examine(tmp_path, deleted, kept, str(folder))


def test_each_person_and_each_record_of_one_id_counts(tmp_path: Path) -> None:
    rows = make_rows(60)
    deleted, kept = rows[:6], rows[6:]
    for i, row in enumerate(deleted):
        row["id"] = "document"
        row["user"] = f"person {i % 3}"
    deleted.append({**deleted[0], "user": "another"})
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    records = read_erasure_records(gone, write_rows(tmp_path / "kept.jsonl", kept), "user")
    store = str(write_rows(tmp_path / "store.json", deleted[:4] + kept))
    erasure = examine_erased_stores([store], records, lambda _: None)
    assert (erasure.n_deleted, erasure.n_left, erasure.n_users) == (6, 4, 4)
    assert erasure.users_left == ["another", "person 0", "person 1", "person 2"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_csv_and_parquet_are_read_as_jsonl(tmp_path: Path, suffix: str) -> None:
    """Database exports; a cell of CSV holds a vector as text, as pgvector writes it."""
    rows = make_rows(500)
    for i, row in enumerate(rows):
        row["user"] = f"person {i % 3}"
        row["text"] += ', "quoted"\nline'
    rows[1]["id"] = rows[2]["embedding"] = None

    def save(name: str, chosen: list[Row]) -> Path:
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chosen), path)
            return path
        with path.open("w", newline="") as file:
            lines = csv.DictWriter(file, list(chosen[0]))
            lines.writeheader()
            for row in chosen:
                lines.writerow(
                    {**row, "embedding": row["embedding"] and json.dumps(row["embedding"])}
                )
        return path

    plain = read_erasure_records(
        write_rows(tmp_path / "gone.jsonl", rows[:6]),
        write_rows(tmp_path / "kept.jsonl", rows[6:]),
        "user",
    )
    found = read_erasure_records(save("gone", rows[:6]), save("kept", rows[6:]), "user")
    assert (found.n_kept, found.kept_texts) == (plain.n_kept, plain.kept_texts)
    for one, other in zip(found.targets, plain.targets, strict=True):
        assert (one.name, one.text, one.users) == (other.name, other.text, other.users)
        assert np.array_equal(one.vectors, other.vectors)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("gone.csv", "", "is empty"),
        ("gone.jsonl", '{"text": "a"}\n\n{"text": b}\n', "line 3: not JSON"),
        ("gone.csv", "text,text\na,b\n", "a header of different names"),
        ("gone.csv", "text,vector\na,soon\n", "a list of finite numbers"),
        ("gone.csv", "text\n\n", "is empty"),
        ("gone.parquet", "no", "a readable Parquet file"),
        ("gone.xlsx", "no", "expected a .jsonl, .csv or .parquet file, got .* '.xlsx'"),
    ],
)
def test_unreadable_tables_are_refused(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    kept = write_rows(tmp_path / "kept.jsonl", make_rows(40))
    with pytest.raises(AuditError, match=told):
        read_erasure_records(tmp_path / name, kept)


def test_each_vector_of_rows_of_one_text_is_looked_for(tmp_path: Path) -> None:
    rows = make_rows(60)
    deleted, kept = rows[:6], rows[6:]
    bare = {"id": "bare", "text": deleted[0]["text"]}
    twin = {**deleted[0], "id": "twin", "embedding": deleted[1]["embedding"][::-1]}
    nearly = {**twin, "embedding": [number * (1 + 1e-6) for number in twin["embedding"]]}
    store = tmp_path / "vectors"
    for left, name in ((deleted[0], "bare"), (twin, "twin"), (nearly, "twin")):
        store.write_bytes(b"".join(map(vector_bytes, [*kept, left])))
        erasure = examine(tmp_path, [bare, *deleted, twin, nearly], kept, str(store))
        assert (erasure.n_deleted, erasure.leftovers) == (7, {name})
    store.write_text("".join(row["text"] for row in [*kept, twin]))
    erasure = examine(tmp_path, [bare, *deleted, twin, nearly], kept, str(store))
    assert erasure.leftovers == {"bare"}
