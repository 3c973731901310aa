"""Stores and released text in one verdict, whose records they are, and how a gate reads it."""

from __future__ import annotations

import base64
import hashlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from auditor.erasure import model
from auditor.erasure import records as erasure_records
from auditor.erasure.layers import LayerVerdict
from tests.conftest import check_command
from tests.erasure.stored import Row, make_rows, split_rows, write_rows
from tests.gate.test_attest import pair


def erase(tmp_path: Path, deleted: list[Row], kept: list[Row], *words: str, code: int) -> None:
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    files = ["--deleted", str(gone), "--kept", str(write_rows(tmp_path / "kept.jsonl", kept))]
    out = ["-o", str(tmp_path / "out"), "--junit", str(tmp_path / "junit.xml"), "--gate"]
    check_command("erase", *words, *files, *out, code=code)


def test_one_verdict_names_people_of_stores_and_released_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows()
    deleted, kept = split_rows(rows, 12)
    for i, row in enumerate(deleted):
        row["user"] = f"person {i // 3}"
    store = str(write_rows(tmp_path / "store.json", kept))
    words = deleted[0]["text"].split()
    words[9] = "changed"  # no window is whole
    passage = {"text": " ".join(words[4:15])}
    released = write_rows(tmp_path / "released.jsonl", [*kept, deleted[4], passage])
    flags = ["--released", str(released), "--user-column", "user"]
    erase(tmp_path, deleted, kept, store, *flags, code=1)
    screen = capsys.readouterr().out
    assert "still there: 2 of 12 deleted records in some layer, of 2 of 4 people" in screen
    assert "PEOPLE  still there of: person 0, person 1" in screen
    written = json.loads((tmp_path / "out" / "erasure.json").read_text())
    assert written["users_left"] == ["person 0", "person 1"]
    left = {(v["store"], v["kind"]): list(v["leftovers"]) for v in written["verdicts"]}
    assert left[f"released:{released}", "text"] == [deleted[4]["id"]]
    assert left[f"released:{released}", "near-verbatim text"] == [deleted[0]["id"]]
    suite = ET.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "2", "0")
    assert not any(row["text"] in (tmp_path / "junit.xml").read_text() for row in rows)


def test_a_release_without_kept_records_cannot_tell(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(60), 6)
    released = write_rows(tmp_path / "released.jsonl", make_rows(40, seed=9))
    erase(tmp_path, deleted, kept, "--released", str(released), code=4)
    cases = ET.parse(tmp_path / "junit.xml").getroot()
    assert (cases.get("errors"), cases.get("failures")) == ("2", "0")


def test_a_record_too_short_to_search_for_is_not_gone_from_a_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands in the released text, and counted as gone."""
    deleted, kept = split_rows(make_rows(60), 6)
    released = write_rows(tmp_path / "released.jsonl", [*kept, {"text": "so it was: PIN 4711"}])
    short = {"id": "short", "text": "PIN 4711"}
    erase(tmp_path, [*deleted, short], kept, "--released", str(released), code=4)
    screen = capsys.readouterr().out
    assert "1 of 7 deleted records cannot be searched for" in screen and "same: short" in screen


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "expected a STORE, --released or --model"),
        (["kept.jsonl", "--nonmembers", "new.jsonl"], "--nonmembers goes with --model"),
        (["kept.jsonl", "--user-column", "who"], "expected a person in the column 'who'"),
        (["--released", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    deleted, kept = split_rows(make_rows(40), 3)
    write_rows(tmp_path / "kept.jsonl", kept)
    erase(tmp_path, deleted, kept, *words, code=2)
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists() and not (tmp_path / "junit.xml").exists()


def test_highest_cosines_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure_records, "_AT_ONCE", 7)
    normal = np.random.default_rng(0)
    vectors = normal.normal(size=(40, 6))
    vectors[3] = 0
    vectors[4] = np.nan
    vectors[30] = vectors[2] + 1e-7  # equal in float32
    owners = np.array([*range(12), *[-1] * 28])
    with np.errstate(invalid="ignore"):
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = units[:12]
    expected = units @ directions.T
    expected[np.arange(12), np.arange(12)] = -1
    expected = np.nan_to_num(expected, nan=0.0).max(axis=0)
    highest = erasure_records.compute_highest_cosines(directions, vectors, owners)
    usable = np.delete(np.arange(12), [3, 4])
    np.testing.assert_allclose(highest[usable], expected[usable], atol=3e-7)
    assert abs(highest[2] - expected[2]) < 1e-15 and np.all(highest[[3, 4]] <= 0)


def test_an_erasure_is_signed_and_a_changed_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deleted, kept = split_rows(make_rows(60), 6)
    store = write_rows(tmp_path / "store.json", kept)
    erase(tmp_path, deleted, kept, str(store), code=0)
    private, public = pair(tmp_path, "ours", 1)
    _, other = pair(tmp_path, "other", 2)
    out = tmp_path / "out"
    check_command("attest", out, "--sign", private)
    check_command("attest", out, "--key", public)
    assert "is unchanged since" in capsys.readouterr().out
    payload = json.loads((out / "attestation.json").read_text())["payload"]
    statement = json.loads(base64.b64decode(payload))
    digest = hashlib.sha256(store.read_bytes()).hexdigest()
    assert {"name": f"files:{store}/store.json", "digest": {"sha256": digest}} in statement[
        "subject"
    ]
    assert len(statement["subject"]) == 3  # with the deleted and the kept records
    assert statement["predicate"]["decision"] == {"verdict": "gone"}
    check_command("attest", out, "--key", other, code=1)
    report = out / "erasure.json"
    report.write_text(report.read_text().replace("gone.jsonl", "none.jsonl"))
    check_command("attest", out, "--key", public, code=1)
    assert "erasure.json has changed since it was signed" in capsys.readouterr().out
    check_command("attest", out, "--key", public, "--sign", private, code=2)


@pytest.mark.parametrize("weights", [{}, {"model/model.safetensors": "5e1f"}])
def test_an_erasure_of_a_model_is_signed_if_its_weights_are_known(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, str],
) -> None:
    verdict = LayerVerdict("model:mine", "completion", "text", "gone", 6, {}, 54, 54)
    judged = model.ModelVerdicts((verdict,), weights)
    monkeypatch.setattr(model, "judge_model_erasure", lambda *_: judged)
    deleted, kept = split_rows(make_rows(60), 6)
    store = write_rows(tmp_path / "store.json", kept)
    erase(tmp_path, deleted, kept, str(store), "--model", "mine", code=0)
    private, public = pair(tmp_path, "ours", 1)
    out = tmp_path / "out"
    check_command("attest", out, "--sign", private, code=0 if weights else 2)
    if not weights:
        assert "'model:mine', of which no weights" in " ".join(capsys.readouterr().err.split())
        assert not (out / "attestation.json").exists()
        return
    check_command("attest", out, "--key", public)
    payload = json.loads((out / "attestation.json").read_text())["payload"]
    subject = json.loads(base64.b64decode(payload))["subject"]
    file = {"name": "model:mine/model/model.safetensors", "digest": {"sha256": "5e1f"}}
    assert file in subject and len(subject) == 4
