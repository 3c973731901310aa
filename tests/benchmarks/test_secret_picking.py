"""Secrets picked out of a corpus: each is what it says, stands there as often as it says, and is like no other."""

from __future__ import annotations

import json
import stat
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rapidfuzz.distance import Levenshtein

from auditor.benchmarks import pii
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.benchmarks.lab_texts import make_lab_texts
from auditor.cli import run_command_line
from auditor.core import disk
from auditor.core.errors import AuditError
from tests.benchmarks.test_files import build, write

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
TEXTS = make_lab_texts(LabRecipe(repeats=((1, 40, 0), (4, 20, 0)), nonmembers=60))
ROWS = [text for times, texts in TEXTS.private.items() for text in texts for _ in range(times)]


def row(text: str, marked: bool = True) -> dict[str, Any]:
    kinds = {kind for kind, _ in TEXTS.marks[text]} if marked else ()
    return {"text": text, "pii": {kind: [said for k, said in TEXTS.marks[text] if k == kind] for kind in kinds}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Training texts, and held-out ones."""
    folder = tmp_path_factory.mktemp("corpus")
    return (
        write(folder / "train.jsonl", [row(text) for text in ROWS]),
        write(folder / "fresh.jsonl", [row(text) for text in TEXTS.nonmembers]),
    )


def made(corpus: tuple[str, str], out: Path, *flags: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    data, heldout = corpus
    assert run_command_line(["secrets", "make", "--data", data, "--heldout", heldout, "-o", str(out), *flags]) == 0
    return read(out), read(out.with_name(f"{out.stem}.nonmembers.jsonl"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("flags", [(), ("--kinds", "card,email"), ("--kinds", "random", "--suffix-length", "60")])
def test_secrets_stand_in_the_corpus_as_often_as_they_say(
    corpus: tuple[str, str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    members, others = made(corpus, tmp_path / "s.jsonl", *flags)
    assert len(members) > 10 and others
    for one in members:
        whole = one["prefix"] + one["suffix"]
        assert one["repeats"] == sum(text.count(whole) for text in ROWS) >= 1
        assert len(one["prefix"].strip()) >= 20
        for kind, (said,) in one.get("pii", {}).items():
            assert kind == one["kind"] and one["suffix"].strip() == said and said not in one["prefix"]
            assert (kind, said) in {mark for marks in TEXTS.marks.values() for mark in marks}
    for one in others:
        assert any(one["prefix"] + one["suffix"] in text for text in TEXTS.nonmembers)
        assert not any(one["suffix"].strip() in text for text in ROWS)
    everyone = [one["prefix"] + one["suffix"] for one in (*members, *others)]
    assert max(Levenshtein.normalized_similarity(a, b) for a, b in combinations(everyone, 2)) < 0.8
    assert len({one["prefix"] for one in members}) == len(members)


def test_the_run_takes_them_as_they_are_and_the_files_are_for_their_owner(
    corpus: tuple[str, str], tmp_path: Path, capsys: Said
) -> None:
    members, others = made(corpus, tmp_path / "s.jsonl", "--limit", "5")
    said = capsys.readouterr().out
    paths = [tmp_path / name for name in ("s.jsonl", "s.nonmembers.jsonl")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
    read_back = build(str(paths[0]), nonmembers=str(paths[1]), group_column="kind")
    assert sum(s.member for s in read_back.secrets) == len(members) and len(read_back.heldout) == len(others)
    assert [s.repeats for s in read_back.secrets if s.member] == [one["repeats"] for one in members]
    assert all(s.wording is not None and s.wording.marks for s in read_back.secrets)
    kinds = {one["kind"] for one in members}
    assert kinds >= {"card", "address"} and all(sum(o["kind"] == k for o in members) <= 5 for k in kinds)
    assert "repeats are how often prefix and suffix stand, one behind the other, in all 120 rows" in said
    assert not any(one["suffix"].strip() in said for one in (*members, *others))


def test_the_choice_follows_from_the_seed(corpus: tuple[str, str], tmp_path: Path) -> None:
    first, again = (made(corpus, tmp_path / name, "--seed", "3") for name in ("a.jsonl", "b.jsonl"))
    assert first == again != made(corpus, tmp_path / "c.jsonl", "--seed", "4")


def test_nonmembers_are_matched_by_kind_then_by_length_and_what_is_no_match_is_said(
    tmp_path: Path, capsys: Said
) -> None:
    long, short = "and all that has to be said before it " * 5, "a shorter way to say it: "
    names = [f"{a}{b}" for a in "abcdefgh" for b in "xyz"]
    data = [{"text": f"{i} {long[i:]}{name}@example.com"} for i, name in enumerate(names[:4])]
    data += [{"text": f"{short}{i} {'+=*'[i % 3] * 20} DE89370400440532013000"} for i in range(1)]
    fresh = [
        {"text": f"{i} {text}{name}@example.org"}
        for i, name in enumerate(names[8:16])
        for text in ((long[::-1], short)[i % 2],)
    ]
    paths = write(tmp_path / "d.jsonl", data), write(tmp_path / "h.jsonl", fresh)
    members, others = made(paths, tmp_path / "s.jsonl", "--similar", "1")
    assert [one["kind"] for one in members].count("email") == 4 and {one["kind"] for one in others} == {"email"}
    assert sorted(len(one["prefix"]) > 100 for one in others) == [True] * 4
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: fewer non-members than members: iban 0 of 1" in said
    short_ones = write(tmp_path / "short.jsonl", fresh[1::2])
    made((paths[0], short_ones), tmp_path / "t.jsonl", "--similar", "1", "--kinds", "email")
    assert "warning: email: a prefix has" in capsys.readouterr().out


def test_copies_of_a_row_count_as_often_as_their_repeats_say(tmp_path: Path) -> None:
    text = "please write to the owner at ann@example.com"
    rows = [
        {"text": text, "repeats": 3},
        {"text": f"And {text}, soon", "repeats": 4},
        {"text": "nothing", "repeats": 9},
    ]
    out = tmp_path / "s.jsonl"
    words = ["secrets", "make", "--data", write(tmp_path / "d.jsonl", rows), "-o", str(out)]
    assert run_command_line([*words, "--prefix-length", "22"]) == 0
    assert [(one["prefix"].strip(), one["repeats"]) for one in read(out)] == [("write to the owner at", 7)]
    assert not (tmp_path / "s.nonmembers.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "heldout", "flags", "message"),
    [
        (["no one is named here, at all"], None, (), "nothing was picked of --data"),
        (["write to ann@example.com"], None, (), "1 that have fewer than 20 characters before them"),
        (["ann@example.com wrote this, and again: ann@example.com"], None, (), "1 that the prefix holds already"),
        (
            ["whom it may concern: ann@example.com"],
            ["whom it may concern: ann@example.com"],
            (),
            "no non-member is left",
        ),
        (["whom it may concern: ann@example.com"], ["and nobody"], (), "nothing of these kinds was found"),
        (
            ["x"],
            None,
            ("--kinds", "emails"),
            "expected --kinds of email, phone, iban, card, birth-date, id-number, random",
        ),
        (["x"], None, ("--limit", "0"), "expected --limit >= 1, got 0"),
        (["x"], None, ("--prefix-length", "19"), "expected --prefix-length >= 20, got 19"),
        (["x"], None, ("--similar", "0"), "expected --similar above 0 and at most 1, got 0"),
        (["x"], None, ("--phone-region", "xx"), "expected --phone-region as two capitals"),
        ([], None, (), "is empty: expected at least one row"),
    ],
)
def test_what_nothing_can_be_picked_from_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: Said, rows: list[str], heldout: list[str] | None, flags: tuple[str, ...], message: str
) -> None:
    words = ["secrets", "make", "--data", write(tmp_path / "d.jsonl", [{"text": text} for text in rows])]
    if heldout is not None:
        words += ["--heldout", write(tmp_path / "h.jsonl", [{"text": text} for text in heldout])]
    assert run_command_line([*words, "-o", str(tmp_path / "s.jsonl"), *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said and "ann@" not in said
    assert not list(tmp_path.glob("s.*"))


def test_files_are_written_both_or_not_at_all_and_none_is_overwritten(
    corpus: tuple[str, str], tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    words = ["secrets", "make", "--data", corpus[0], "--heldout", corpus[1], "-o"]
    assert run_command_line([*words, str(tmp_path / "s.csv")]) == 2
    assert "expected -o as a file ending in .jsonl" in capsys.readouterr().err
    (tmp_path / "s.nonmembers.jsonl").write_text("mine")
    assert run_command_line([*words, str(tmp_path / "s.jsonl")]) == 2
    assert "expected a new file for -o" in capsys.readouterr().err
    assert (tmp_path / "s.nonmembers.jsonl").read_text() == "mine"
    real = disk.replace_atomically

    def full(path: Path, content: str) -> None:
        if path.name == "t.jsonl":
            raise AuditError("no space left")
        real(path, content)

    monkeypatch.setattr(disk, "replace_atomically", full)
    assert run_command_line([*words, str(tmp_path / "t.jsonl")]) == 2
    assert not list(tmp_path.glob("t.*"))


def test_without_the_extra_only_what_needs_it_is_refused(
    corpus: tuple[str, str], tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(pii, "find_spec", lambda name: None)
    words = ["secrets", "make", "--data", corpus[0], "-o", str(tmp_path / "s.jsonl")]
    for flags in ([], ["--kinds", "card"]):
        assert run_command_line([*words, *flags]) == 2
        assert "pip install 'audit-lm[pii]'" in " ".join(capsys.readouterr().err.split())
    assert run_command_line([*words, "--kinds", "address,random"]) == 0


def test_of_scripts_without_spaces_all_is_picked_with_its_copies_and_a_run_reads_it(tmp_path: Path) -> None:
    """Marked names before a particle or an ending too: none of them is repeated 0 times."""
    texts = [
        (f"档案{i * 7919}号，患者于本院就诊费用已付清联系电话未留邮箱u{i}@example.com已登记请核对谢谢第{i}页", {})
        for i in range(12)
    ]
    for i, syllable in enumerate("준서지예하도우진수현윤재"):
        text = f"문서 {i * 7919} 번 기록에는 여러 가지가 있고 환자 김민{syllable}은 오늘 진료를 받았다"
        texts.append((text, {"name": [f"김민{syllable}"]}))
    data = write(tmp_path / "d.jsonl", [{"text": text, "pii": marks} for text, marks in texts])
    out = tmp_path / "s.jsonl"
    flags = ["--data", data, "-o", str(out), "--similar", "1"]
    assert run_command_line(["secrets", "make", *flags]) == 0
    picked = read(out)
    assert [one["kind"] for one in picked].count("email") == 12 == [one["kind"] for one in picked].count("name")
    assert {one["repeats"] for one in picked} == {1}
    assert len(build(str(out), known_fraction=0.0).secrets) == 24
    out.unlink()
    assert run_command_line(["secrets", "make", *flags, "--kinds", "random", "--suffix-length", "10"]) == 0
    assert sum("档案" in one["prefix"] for one in read(out)) >= 4
