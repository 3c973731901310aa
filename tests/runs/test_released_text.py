"""`audit synthetic`: what released text holds of records, as a run folder that every reader
takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from auditor.benchmarks.canaries import audit_canaries, manifests
from auditor.benchmarks.data.released_passages import (
    ReleasedRecord,
    WordIds,
    find_nearest_passages,
    read_released_records,
)
from auditor.cli import run_command_line
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.nouns import UNDEFENDED
from auditor.records.result_file import read_result
from tests.conftest import check_command

WORDS = list("ABCDEFGHIJKLMNOP")


def records(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        f"mail{seed}x{i}@corp.org {' '.join(rng.choice(WORDS, 14))} {seed}{i}" for i in range(count)
    ]


def test_marks_of_rows_with_the_same_words_are_kept(tmp_path: Path) -> None:
    """Of the first row that has any, with its text; how often both were trained on is added up."""
    data, other = tmp_path / "data.jsonl", write(tmp_path / "other.jsonl", ["somebody else"])
    rows = [
        {"text": "call Ann now"},
        {"text": "call  Ann now", "pii": {"name": "Ann"}},
        {"text": "call Ann now "},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (member, _), _ = read_released_records(str(data), other, WordIds(), without=())
    assert (member.row, member.times, member.text) == (0, 3, "call  Ann now")
    assert member.marks == (("name", "Ann"),)


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Of 30 private records 10 are released whole, two more with a word changed; beside text of
    others."""
    private, fresh, other = (records(30, seed) for seed in (1, 2, 3))
    nearly = [" ".join([*text.split()[:6], "zenith", *text.split()[7:]]) for text in private[10:12]]
    out = write(
        tmp_path / "out.jsonl", [*(f"So: {text} End." for text in private[:10]), *nearly, *other]
    )
    data, fresh_file = (
        write(tmp_path / "private.jsonl", private),
        write(tmp_path / "fresh.jsonl", fresh),
    )
    return [out, "--data", data, "--nonmembers", fresh_file, "-o", str(tmp_path / "run")]


def test_what_was_copied_is_found_and_a_gate_fails(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    check_command("synthetic", *files)
    assert "10/30" in capsys.readouterr().out
    result = read_result(tmp_path / "run")
    told = {m.name: m for finding in result.findings for m in finding.measurements}
    assert told["recall"].value * 30 == pytest.approx(10) and told["recall_nonmembers"].value == 0
    assert told["near_verbatim_recall"].value * 30 == pytest.approx(12)
    assert result.findings[0].by_kind["email"].value * 30 == pytest.approx(12)
    seen = assess_leak_signals(result)
    assert "verbatim" in {signal.kind.name for signal in seen.list_shown_signals(UNDEFENDED)}
    # 12 of 30 stand in the text: as the best of three scores, and one of four questions, that is
    # not significant.
    (membership,) = (s for s in seen.list_tested_signals(UNDEFENDED) if s.kind.name == "membership")
    assert (
        membership.suspected and membership.measured is not None and membership.measured.low < 0.5
    )
    assert "best of 3 scores" in membership.measured.note
    check_command("gate", run, "--max", "recall=0.05", code=1)
    check_command("gate", run, "--max", "recall=0.6", "--max", "recall(kind=email)=0.7")
    capsys.readouterr()
    assert (
        run_command_line(["report", run, "--reveal"]) == 0
        and "mail1x3" in (tmp_path / "run" / "report.html").read_text()
    )
    (tmp_path / "out.jsonl").write_text('{"text": "another"}\n')
    assert (
        run_command_line(["gate", run, "--max", "recall=0.6"]) == 1
        and "has changed" in capsys.readouterr().out
    )


def test_canaries_by_coin_bound_epsilon(files: list[str], tmp_path: Path) -> None:
    manifest = audit_canaries.make_audit_canary_manifest(
        "words", audit_canaries.make_audit_canary_texts("words", 120, 6, 0), 1, 0
    )
    manifests.write_canary_manifest(tmp_path / "canaries.json", manifest)
    with open(tmp_path / "out.jsonl", "a") as file:
        file.writelines(
            json.dumps({"text": one.text}) + "\n" for one in manifest.list_inserted_copies()
        )
    check_command("synthetic", *files, "--canaries", tmp_path / "canaries.json")
    (main, *_) = read_result(tmp_path / "run").findings[-1].audits
    assert (
        main.right == main.guesses == 120
        and main.epsilon == main.best > 2.9
        and main.level == 0.005
    )
    check_command("gate", tmp_path / "run", "--max", "epsilon_lower_bound=1", code=1)


def test_what_it_cannot_tell_is_refused_in_a_sentence(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, why in (
        (["--words", "40"], "records of 40 words or more"),
        (["--words", "1"], "--words >= 2"),
    ):
        assert (
            run_command_line(["synthetic", *files, *more]) == 2 and why in capsys.readouterr().err
        )
    few = write(tmp_path / "few.jsonl", records(3, 9))
    files[4] = few
    check_command("synthetic", *files, code=2)
    assert "at least 4 different records in --nonmembers, got 3" in capsys.readouterr().err


def test_no_torch(files: list[str]) -> None:
    code = (
        "import sys; from auditor.cli import run_command_line; assert "
        "run_command_line(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, "synthetic", *files], check=True, capture_output=True
    )


def test_passages_are_those_that_are_found_by_looking() -> None:
    rng, words = np.random.default_rng(0), WordIds()
    made = [" ".join(rng.choice(WORDS[:6], rng.integers(4, 9))) for _ in range(30)]
    held = [
        ReleasedRecord(i, text, words(text), i < 15) for i, text in enumerate(dict.fromkeys(made))
    ]
    texts = [words(" ".join(rng.choice(WORDS[:6], 12))) for _ in range(40)]
    found, _, _ = find_nearest_passages(held, texts, 4)

    def grams(tokens: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {tokens[i : i + 4] for i in range(len(tokens) - 3)}

    there = set().union(*map(grams, texts))
    for i, (one, passage) in enumerate(zip(held, found, strict=True)):
        alone = grams(one.tokens).difference(
            *(grams(other.tokens) for j, other in enumerate(held) if j != i)
        )
        assert (passage.edit_distance == 0) == bool(alone & there)


@pytest.mark.parametrize(
    ("script", "unit", "least"), [("Chinese", "characters", 20), ("Hindi", "words", 10)]
)
def test_passages_are_found_in_scripts_without_spaces_and_with_signs_on_letters(
    tmp_path: Path, script: str, unit: str, least: int
) -> None:
    """Of 40 records 20 are quoted; of each of the rest three words are, which is no copy."""
    rng, gap = np.random.default_rng(0), " " if script == "Hindi" else ""
    alphabet = list("的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出")
    if script == "Hindi":
        alphabet = [
            stem + sign
            for stem in ("कमल", "राम", "नदी", "घर", "बाल")
            for sign in "\u093e\u093f\u0940\u0941"
        ]
    private, fresh = (rng.choice(alphabet, (40, 45)).tolist() for _ in range(2))
    out = [gap.join(["a", *record[5:40], "b"]) for record in private[:20]] + [
        gap.join(r[:3]) for r in private[20:]
    ]
    texts = {"out": out, "data": map(gap.join, private), "fresh": map(gap.join, fresh)}
    released, *files = (
        write(tmp_path / f"{name}.jsonl", list(some)) for name, some in texts.items()
    )
    run = tmp_path / "run"
    check_command("synthetic", released, "--data", files[0], "--nonmembers", files[1], "-o", run)
    finding = read_result(run).findings[0]
    told = {m.name: m.value for m in finding.measurements}
    assert (
        told["recall"] == 0.5
        and told["recall_nonmembers"] == 0
        and finding.options["words"] == least
    )
    assert f"{least} {unit} or more in a row" in finding.notes[0]
