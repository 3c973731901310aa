"""What is looked for, what is refused, and how the control decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from auditor.core.errors import AuditError
from auditor.erasure.store import Store, list_store_kinds
from auditor.erasure.stores.files import FileStore
from auditor.erasure.windows import WindowIndex, write_vector_forms
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
    windows.mark_shared(["A kept text that says: Here the first goes on in its own way."])
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
        (lambda rows: _bad(rows[:3], text=" "), lambda rows: rows[3:], "expected words"),
        (lambda rows: [{"id": 1, "body": "x"}], lambda rows: rows[3:], "columns 'id', 'body'"),
        (lambda rows: _bad(rows[:3], text=5), lambda rows: rows[3:], "expected words"),
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
