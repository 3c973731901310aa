"""Private text stays private: what `audit` makes of it is its owner's only, does not stay, and is
never quoted."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from auditor.benchmarks.canaries import exposure_canaries, insertion, manifests
from auditor.benchmarks.data.columns import read_data_table
from auditor.core.disk import open_scratch_folder
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.records import aliases
from tests.conftest import check_command

Said = pytest.CaptureFixture[str]
PRIVATE = "quokkaberry"  # part of every record


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that `datasets` reads, a manifest, an empty cache; whoever made the process lets
    others read."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [{"text": f"{PRIVATE} {i}"} for i in range(5)]
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifests.write_canary_manifest(
        tmp_path / "m.json",
        exposure_canaries.make_exposure_canary_manifest(["My ID is {digits:6}"], (1,), 2),
    )
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def holding(folder: Path, text: str) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("data", ["set", "set/train.jsonl"])
def test_a_copy_with_canaries_is_its_owners_only(inputs: Path, data: str) -> None:
    out = inputs / ("out" if data == "set" else "out.jsonl")
    check_command("canaries", "insert", f"{inputs}/m.json", f"{inputs}/{data}", "-o", out)
    made = [out, *out.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} <= {0o700, 0o600}
    assert not holding(inputs / "cache", PRIVATE)


def test_a_folder_of_data_leaves_nothing_in_the_cache(inputs: Path) -> None:
    assert read_data_table("--data", str(inputs / "set")).list_texts() == [
        f"{PRIVATE} {i}" for i in range(5)
    ]
    assert not [path for path in (inputs / "cache").rglob("*") if path.is_file()]


def _die(parent: str) -> None:
    with open_scratch_folder(Path(parent), "out.jsonl") as scratch:
        (scratch / "half").write_text(PRIVATE)
        os._exit(9)  # as kill -9: no clean-up


def test_what_a_killed_process_left_goes_with_the_next_one_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    other = tmp_path / ".out.jsonl-mine"
    other.mkdir()
    with open_scratch_folder(tmp_path, "out.jsonl") as held:
        killed = get_context("fork").Process(target=_die, args=(str(tmp_path),))
        killed.start()
        killed.join()
        assert holding(tmp_path, PRIVATE)
        with open_scratch_folder(tmp_path, "out.jsonl") as second:
            assert held.is_dir() and second.is_dir()  # in use: not taken for a dead one's
            assert not holding(tmp_path, PRIVATE)
    assert list(tmp_path.iterdir()) == [other]


def mistyped() -> list[Any]:
    """A manifest with one field of a canary, or of the manifest, of another kind: the text itself
    is the likeliest."""
    made = []
    for name in ("id", "text", "space", "count"):
        for value in (PRIVATE, [PRIVATE], {PRIVATE: PRIVATE}, None):
            if (name, value) == ("id", PRIVATE):  # an id is what is shown
                continue
            made.append(
                ((name, value), lambda raw, n=name, v=value: raw["canaries"][0].update({n: v}))
            )
    made.append((("name", PRIVATE), lambda raw: raw["canaries"][0].update({PRIVATE: 1})))
    for name in ("schema_version", "seed", "formats", "canaries"):
        made.append(((name, PRIVATE), lambda raw, n=name: raw.update({n: PRIVATE})))
        made.append(((name, {}), lambda raw, n=name: raw.update({n: [{PRIVATE: PRIVATE}]})))
    lists = {"format": "{n}", "lists": {PRIVATE: PRIVATE}}
    made.append((("lists", PRIVATE), lambda raw: raw.update({"formats": [lists]})))
    return [
        pytest.param(change, id=f"{name}={type(value).__name__}") for (name, value), change in made
    ]


@pytest.mark.parametrize("change", mistyped())
def test_a_mistyped_manifest_is_refused_without_its_texts(
    inputs: Path, change: Any, capsys: Said
) -> None:
    raw = json.loads((inputs / "m.json").read_text())
    raw["canaries"][0]["text"] = PRIVATE
    change(raw)
    (inputs / "m.json").write_text(json.dumps(raw))
    data = [f"{inputs}/m.json", f"{inputs}/set/train.jsonl", "-o", f"{inputs}/o.jsonl"]
    check_command("canaries", "insert", *data, code=2)
    told = capsys.readouterr()
    assert "error: " in told.err and PRIVATE not in told.err + told.out


@pytest.mark.parametrize("kept", ["", " " * 40 + "\n", "short"])
def test_a_salt_that_can_be_guessed_is_refused(
    inputs: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(aliases.SALT)
    (inputs / "cache").mkdir()
    (inputs / "cache" / "salt").write_text(kept)
    with pytest.raises(
        AuditError, match=r"expected a salt in .* of at least 16 characters, got [05]$"
    ):
        aliases.load_alias_salt()
    monkeypatch.setenv(aliases.SALT, " " * 20)
    with pytest.raises(AuditError, match=r"of at least 16 characters, got 0$"):
        aliases.load_alias_salt()


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_inserting_into_100_000_rows_takes_a_moment(tmp_path: Path, ending: str) -> None:
    """CPU time: quadratic in the rows it was 80 s."""
    texts = [f"row {i}" for i in range(100_000)]
    lines = {
        "jsonl": (json.dumps({"text": text}) for text in texts),
        "json": iter([json.dumps([{"text": text} for text in texts])]),
        "csv": iter(["text", *texts]),
    }
    data, out = tmp_path / f"data.{ending}", tmp_path / f"out.{ending}"
    data.write_text("\n".join(lines[ending]) + "\n")
    manifest = exposure_canaries.make_exposure_canary_manifest(["My ID is {digits:6}"], (1, 16), 8)
    start = time.process_time()
    assert (
        insertion.write_canary_data(insertion.CanaryInsertionPlan(manifest), str(data), out)
        == 8 * 17
    )
    assert time.process_time() - start < 3
    assert read_data_table("--data", str(out)).list_texts().count(manifest.canaries[8].text) == 16
    assert to_json(manifest)["canaries"][8]["count"] == 16
