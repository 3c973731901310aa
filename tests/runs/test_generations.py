"""Untargeted extraction from end to end: what is drawn is held against all that was trained on, and
nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.core import machine_memory
from auditor.core.nouns import CellKey
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.generation.sample import sample_candidates
from auditor.models.decoding import Decoding
from auditor.models.loading import load_causal_lm
from auditor.records.table import RECORDS, read_secrets_table
from tests.conftest import check_command, save_tiny

Said = pytest.CaptureFixture[str]
LENGTH = 12
KNOWN = "a known line"  # so many tokens
OPTIONS = {"generations": 60, "length": LENGTH, "n": 6, "cooling": 0, "top_k": 2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, arrays of what it writes of its own accord beside others (members), and of noise
    (non-members)."""
    folder = tmp_path_factory.mktemp("untargeted")
    save_tiny(folder / "model")
    model = load_causal_lm(str(folder / "model"))
    begin = np.zeros((1, 1), dtype=np.int64)
    drawn = sample_candidates(
        model,
        _tensor(begin),
        LENGTH,
        Decoding(top_k=2),
        draw_secret_uniforms(40, LENGTH, "of its own")[None],
    )[0]
    own = drawn.suffixes[:10].numpy()
    noise = np.random.default_rng(0)
    known = model.tokenizer([KNOWN])["input_ids"]
    arrays(folder / "data", np.concatenate([own, known, noise.integers(1, 257, (9, LENGTH))]))
    arrays(folder / "others", noise.integers(1, 257, (6, LENGTH)))
    return folder


def _tensor(values: Any) -> Any:
    import torch

    return torch.from_numpy(values)


def arrays(folder: Path, rows: Any) -> None:
    folder.mkdir()
    for part, half in (("prefix", rows[:, :6]), ("suffix", rows[:, 6:])):
        np.save(folder / f"val_{part}.npy", half.astype(np.uint16))


def audit(inputs: Path, out: str, *more: str, prefix_token: str = "eos", **options: Any) -> int:
    given = (f"untargeted.{name}={value}" for name, value in {**OPTIONS, **options}.items())
    chosen = [part for one in given for part in ("-A", one)]
    where = [
        "--model",
        str(inputs / "model"),
        "--data",
        str(inputs / "data"),
        "--nonmembers",
        str(inputs / "others"),
    ]
    return run_command_line(
        [
            "run",
            *where,
            "--attack",
            "untargeted",
            "--prefix-token",
            prefix_token,
            *chosen,
            "-o",
            str(inputs / out),
            *more,
        ]
    )


def result(inputs: Path, out: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((inputs / out / "result.json").read_text())
    return read


def row(
    inputs: Path, out: str, target: str = "undefended", setting: str = "white-box"
) -> dict[str, Any]:
    found = (
        f
        for f in result(inputs, out)["findings"]
        if (f["target"], f["setting"]) == (target, setting)
    )
    return next(found)


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {m["name"]: m for m in found["measurements"]}


def kept(run: Path) -> dict[str, dict[str, float]]:
    """By quantity, what the undefended model's row at the widest access says of each record."""
    own = [
        one
        for one in read_secrets_table(run, RECORDS)
        if one.cell == CellKey("undefended", "white-box", "untargeted")
    ]
    return {one.quantity: dict(zip(one.ids, one.values, strict=True)) for one in own}


@pytest.fixture(scope="module")
def run(inputs: Path) -> Path:
    assert audit(inputs, "run") == 0
    return inputs / "run"


def test_what_it_counts_is_what_looking_at_every_generation_counts(inputs: Path, run: Path) -> None:
    halves = [np.load(inputs / "data" / f"val_{part}.npy") for part in ("prefix", "suffix")]
    records = [tuple(record) for record in np.concatenate(halves, axis=1).tolist()]
    runs = {record[at : at + 6] for record in records for at in range(LENGTH - 5)}
    lines = [json.loads(line) for line in (run / "guesses.jsonl").read_text().splitlines()]
    drawn = [
        tuple(line["ranked"][0][0])
        for line in lines
        if line["cell"] == "undefended/white-box/untargeted"
    ]
    hits = [any(text[at : at + 6] in runs for at in range(LENGTH - 5)) for text in drawn]
    found = numbers(row(inputs, "run"))
    assert len(drawn) == 60 and 5 < sum(hits) < 60
    assert found["memorised_generations"]["value"] == sum(hits) / 60
    apart = sum(
        1 + (text[:6] in runs and text[6:] in runs)
        for text, hit in zip(drawn, hits, strict=True)
        if hit
    )
    assert 1000 * sum(hits) / 60 <= found["memorised_per_1000"]["value"] <= 1000 * apart / 60 + 1e-9
    assert (
        found["memorised_per_1000_nonmembers"]["value"] == 0
        and found["excess_memorised_per_1000"]["low"] > -400
    )
    out = kept(run)
    assert (
        found["records_out"]["value"] == len(out["generations"]) > 2
        and min(out["longest"].values()) >= 6
    )
    assert found["records_to_come_out"]["value"] >= found["records_out"]["value"]
    assert len(out["record"]) >= len(out["generations"]) / 2  # others are known pairs
    drawn_tokens = row(inputs, "run")["drawn"]
    assert drawn_tokens == 60 * LENGTH


def test_numbers_depend_neither_on_the_batch_size_nor_on_where_a_run_was_cut_off(
    inputs: Path, run: Path
) -> None:
    assert audit(inputs, "batched", "--batch-size", "7") == 0
    assert audit(inputs, "resumed") == 0
    path = inputs / "resumed" / "guesses.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:70], lines[70][:40]]))
    (inputs / "resumed" / "result.json").unlink()
    check_command("run", "--resume", inputs / "resumed")
    for name in ("batched", "resumed"):
        for setting in ("text-only", "white-box"):
            one, other = (
                row(inputs, out, setting=setting)["measurements"] for out in ("run", name)
            )
            assert one == other
        assert kept(inputs / name) == kept(run)


def test_reports_tell_of_it_without_what_came_out(inputs: Path, run: Path) -> None:
    alias = next(iter(kept(run)["generations"]))
    page, brief = (run / "report.html").read_text(), (run / "report.md").read_text()
    assert "Untargeted extraction" in page and "Untargeted extraction" in brief
    assert alias in page and "New in 1,000 more generations" in page and "n 6" in page
    out = numbers(row(inputs, "run"))["records_out"]["value"]
    assert f"/model, white-box | {out:.0f} of 20 trained on |" in brief
    assert "Non-members: 0 of 6 held out" in brief
    texts = [json.loads(line) for line in (run / "texts.jsonl").read_text().splitlines()]
    said = next(text["pieces"][0] for text in texts if text["alias"] == alias)
    assert len(said) > 3
    check_command("report", run, "--reveal")
    assert "This report shows private text" in (run / "report.md").read_text()
    check_command("report", run)
    assert (run / "report.md").read_text() == brief


def test_a_gate_holds_it_to_a_limit(inputs: Path, run: Path, capsys: Said) -> None:
    check_command("gate", run, "--max", "memorised_per_1000=5", "--setting", "white-box", code=1)
    check_command("gate", run, "--max", "memorised_per_1000=2000")
    check_command(
        "gate", run, "--max", "memorised_generations=0.01", "--setting", "white-box", code=1
    )


def test_generations_of_a_defense_are_charged_to_its_claim(inputs: Path) -> None:
    defended = ("--public", str(inputs / "model"), "--defense", "uniform-mixing")
    assert audit(inputs, "mixed", *defended, generations=10) == 0
    claim = next(t for t in result(inputs, "mixed")["targets"] if t["name"] == "uniform-mixing")[
        "claim"
    ]
    assert claim["spent_queries"] == claim["queries"] == 10 * LENGTH
    inside = row(inputs, "mixed", "uniform-mixing", "text-only")
    assert inside["decoding"] == "ancestral"
    assert "not ranked: in this setting only sampled tokens come back" in inside["notes"]
    assert not any(name.startswith("memorised_in_top") for name in numbers(inside))
    assert "memorised_in_top_100_perplexity" in numbers(row(inputs, "mixed", "uniform-mixing"))
    # the control, though no defense asks for it
    assert row(inputs, "mixed", "public")["attack"] == "untargeted"


def test_what_reads_records_as_it_is_asked_about_them_has_learnt_none(inputs: Path) -> None:
    inking = (
        "--public",
        str(inputs / "model"),
        "--defense",
        "invisible-ink",
        "-D",
        "batch=4",
        "--attack",
        "perplexity",
    )
    assert audit(inputs, "ink", *inking, "-A", "perplexity.samples=2", generations=8) == 0
    target = next(t for t in result(inputs, "ink")["targets"] if t["name"] == "invisible-ink")
    assert 0 < target["claim"]["queries"] < 8 * LENGTH  # of the other attack alone
    found = (f for f in result(inputs, "ink")["findings"] if f["target"] == "invisible-ink")
    why = [f["not_applicable"] for f in found if f["attack"] == "untargeted"]
    assert len(why) == 2 and all(
        "needs a model that was trained on the data" in reason for reason in why
    )


def test_a_text_that_lower_case_makes_too_long_is_ranked_by_what_there_is_room_for(
    inputs: Path,
) -> None:
    """Bytes that are no text are written as several, in small letters too."""
    assert audit(inputs, "long", "--setting", "white-box", generations=4, length=80) == 0
    assert "memorised_in_top_100_lowercase" in numbers(row(inputs, "long"))


def test_the_public_model_is_the_control_of_an_undefended_run(inputs: Path) -> None:
    assert (
        audit(
            inputs,
            "control",
            "--public",
            str(inputs / "model"),
            "--setting",
            "white-box",
            generations=5,
        )
        == 0
    )
    assert [(f["target"], f["setting"]) for f in result(inputs, "control")["findings"]] == [
        ("undefended", "white-box"),
        ("public", "white-box"),
    ]


def refused(
    inputs: Path, capsys: Said, *more: str, prefix_token: str = "eos", **options: Any
) -> str:
    """What a refused run says; it leaves nothing behind."""
    assert audit(inputs, "refused", *more, prefix_token=prefix_token, **options) == 2
    assert not (inputs / "refused").exists()
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"n": 13}, "expected n in 0..12, the tokens of a generation, got 13"),
        (
            {"n": 0, "length": 3},
            "expected -A untargeted.length of at least 6, the tokens of an n-gram, got 3",
        ),
        (
            {"n": 13, "length": 20},
            "expected -A untargeted.n of at most 12, the longest training record, got 13",
        ),
        ({"length": 200}, "tokens, but"),
        ({"generations": 0}, "expected generations >= 1 and at most 1,000,000, got 0"),
        ({"cooling": 5, "hot": 0}, "expected temperatures > 0 to fall, got 0.0 and 1.0"),
        ({"top_k": -1}, "expected top_k >= 0 (0: off), got -1"),
        (
            {"prompts": "nowhere.txt"},
            "prompts=nowhere.txt: cannot be read: No such file or directory",
        ),
    ),
)
def test_options_that_cannot_be_are_refused(
    inputs: Path, capsys: Said, options: dict[str, Any], said: str
) -> None:
    assert said in refused(inputs, capsys, **options)


@pytest.mark.parametrize(
    ("content", "said"),
    ((b"\n  \n", "expected a prompt a line, got no text"), (b"ab\xff", "something else at byte 2")),
)
def test_a_file_without_prompts_is_refused(
    inputs: Path, capsys: Said, content: bytes, said: str
) -> None:
    (inputs / "prompts.txt").write_bytes(content)
    assert said in refused(inputs, capsys, prompts=inputs / "prompts.txt")


def test_an_index_that_does_not_fit_is_refused_before_anything_is_drawn(
    inputs: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "measure_free_memory", lambda: 10**7)
    assert "of memory for the index of 312 tokens of training data, got 10 MB free" in refused(
        inputs, capsys
    )


def test_canaries_alone_are_no_training_data(inputs: Path, capsys: Said) -> None:
    where = ["--model", str(inputs / "model"), "--canaries", "nowhere.json"]
    check_command("run", *where, "--attack", "untargeted", "-o", inputs / "refused", code=2)
    assert "--attack untargeted attacks records: give --data" in " ".join(
        capsys.readouterr().err.split()
    )


def test_prompts_stand_before_generations_and_those_of_the_training_data_are_told_of(
    inputs: Path,
) -> None:
    (inputs / "some.txt").write_text(f"{KNOWN[:7]}\n\na public prompt\n{KNOWN[:7]}\n")
    assert (
        audit(
            inputs, "prompted", "--setting", "white-box", prompts=inputs / "some.txt", generations=6
        )
        == 0
    )
    notes = row(inputs, "prompted")["notes"]
    assert "texts begin with 2 prompts in turn" in notes
    assert any(
        note.startswith("1 of 2 prompts occur in the training data themselves") for note in notes
    )
    begun = [
        json.loads(line)["secret"][-8:]
        for line in (inputs / "prompted" / "guesses.jsonl").read_text().splitlines()
    ]
    assert len(set(begun)) == 2 and begun.count(begun[0]) == 3
