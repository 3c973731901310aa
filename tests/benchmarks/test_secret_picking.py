"""examples/personal_data/pick.py: each piece is in the corpus as often as its row says, and no
non-member's is."""

from __future__ import annotations

import json
import runpy
import stat
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rapidfuzz.distance import Levenshtein

from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.benchmarks.lab.lab_texts import PRIVATE, make_private_lab_texts
from tests.benchmarks.test_files import build, write

ROOT = Path(__file__).parents[2]
RECIPE = LabRecipe(repeats=((1, 40, 0), (4, 20, 0)), nonmembers=60)
TEXTS = make_private_lab_texts(RECIPE, PRIVATE)
ROWS = [text for times, texts in TEXTS.private.items() for text in texts for _ in range(times)]


def pick(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> list[list[dict[str, Any]]]:
    """Run the script; return its members and non-members."""
    script = str(ROOT / "examples/personal_data/pick.py")
    monkeypatch.setattr(sys, "argv", [script, *flags, "-o", str(out)])
    runpy.run_path(script, run_name="__main__")
    paths = [out, out.with_name(f"{out.stem}.nonmembers.jsonl")]
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in paths
        if path.exists()
    ]


def mark(text: str) -> dict[str, Any]:
    kinds = {kind for kind, _ in TEXTS.marks[text]}
    return {
        "text": text,
        "pii": {kind: [said for k, said in TEXTS.marks[text] if k == kind] for kind in kinds},
    }


def test_pieces_are_in_the_corpus_as_often_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "train.jsonl", [mark(text) for text in ROWS])
    heldout = write(tmp_path / "fresh.jsonl", [mark(text) for text in TEXTS.nonmembers])
    flags = ["--data", data, "--heldout", heldout, "--limit", "5"]
    members, others = pick(monkeypatch, tmp_path / "s.jsonl", *flags)
    assert len(members) > 10 and others
    for row in members:
        whole = row["prefix"] + row["suffix"]
        assert row["repeats"] == sum(text.count(whole) for text in ROWS) >= 1
        ((kind, (said,)),) = row["pii"].items()
        assert kind == row["kind"] and row["suffix"].strip() == said and said not in row["prefix"]
        assert (kind, said) in {mark for marks in TEXTS.marks.values() for mark in marks}
    for row in others:
        assert any(row["prefix"] + row["suffix"] in text for text in TEXTS.nonmembers)
        assert not any(row["suffix"].strip() in text for text in ROWS)
    everyone = [row["prefix"] + row["suffix"] for row in (*members, *others)]
    assert max(Levenshtein.normalized_similarity(a, b) for a, b in combinations(everyone, 2)) < 0.8
    paths = [tmp_path / name for name in ("s.jsonl", "s.nonmembers.jsonl")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
    read = build(str(paths[0]), nonmembers=str(paths[1]), group_column="kind")
    assert sum(s.member for s in read.secrets) == len(members) and len(read.heldout) == len(others)
    assert [members, others] == pick(monkeypatch, tmp_path / "again.jsonl", *flags)
    assert [members, others] != pick(monkeypatch, tmp_path / "other.jsonl", *flags, "--seed", "4")
    with pytest.raises(SystemExit, match="expected a new file"):
        pick(monkeypatch, paths[0], *flags)


def test_repeats_of_rows_add_up_and_of_a_row_without_words_before_it_nothing_is_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "please write to the owner at ann@example.com"
    rows = [
        {"text": text, "repeats": 3},
        {"text": f"And {text}, soon", "repeats": 4},
        {"text": "no", "repeats": 9},
    ]
    data = write(tmp_path / "d.jsonl", rows)
    (members,) = pick(monkeypatch, tmp_path / "s.jsonl", "--data", data, "--prefix-length", "22")
    assert [(row["prefix"].strip(), row["repeats"]) for row in members] == [
        ("write to the owner at", 7)
    ]
    short = write(tmp_path / "e.jsonl", [{"text": "to ann@example.com"}])
    with pytest.raises(SystemExit, match="nothing was found"):
        pick(monkeypatch, tmp_path / "t.jsonl", "--data", short)


def test_pieces_of_scripts_without_spaces_are_picked_with_their_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marked names before a particle or an ending too: none of them is repeated 0 times."""
    opening = [
        "患者于本院就诊费用已付清联系电话未留邮箱",
        "经办人核对材料无误后归档备查往来信件请寄至",
    ]
    rows: list[dict[str, Any]] = [
        {"text": f"档案{i * 7919}号，{opening[i]}u{i}@example.com已登记请核对谢谢第{i}页"}
        for i in range(2)
    ]
    name = "김민준"
    korean = f"문서 7919 번 기록에는 여러 가지가 있고 환자 {name}은 오늘 진료를 받았다"
    rows.append({"text": korean, "pii": {"name": [name]}})
    data = write(tmp_path / "d.jsonl", rows)
    (members,) = pick(monkeypatch, tmp_path / "s.jsonl", "--data", data)
    assert sorted(row["kind"] for row in members) == ["email", "email", "name"]
    assert {row["repeats"] for row in members} == {1}
    assert len(build(str(tmp_path / "s.jsonl"), known_fraction=0.0).secrets) == 3
