"""`audit check` from the command line: one screen on a model of one's own or a demonstration, and
what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from auditor.cli import run_command_line
from auditor.core.secret_randomness import make_keyed_generator
from tests.conftest import check_command, fits_schema, save_tiny

Said = pytest.CaptureFixture[str]
SIZES = {"private": 20, "fresh": 14, "three": 3}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    save_tiny(folder / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted: Any = get_peft_model(
        base, LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
    )
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "model")
    adapted.save_pretrained(folder / "adapter")
    for name, count in SIZES.items():
        texts = (
            f"code {make_keyed_generator(name, i).integers(2**62):x} of {i}" for i in range(count)
        )
        rows = (json.dumps({"prefix": text[:12], "suffix": text[12:]}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def check(given: Path, *more: str, model: str = "model", fresh: str = "fresh") -> int:
    beside = ["--nonmembers", str(given / f"{fresh}.jsonl")] if fresh else []
    return run_command_line(
        ["check", str(given / model), "--data", str(given / "private.jsonl"), *beside, *more]
    )


def result() -> Any:
    return json.loads(Path("runs/latest/result.json").read_text())


def screen(capsys: Said) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_model_of_ones_own_is_told_of_on_one_screen_and_one_page(
    given: Path, capsys: Said
) -> None:
    assert check(given, "--seed", "3") == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 100
    assert next(line.split()[0] for line in lines if line[:1].isalpha()) == "RESULT"
    assert "LIMITS" in printed and "NEXT" in printed
    assert run_command_line(["show"]) == 0 and capsys.readouterr().out == printed
    folder = Path("runs/latest")
    assert fits_schema(folder) and (folder / "report.html").is_file()
    found = result()
    assert found["seed"] == 3 and found["command"].startswith("audit ")
    assert [finding["attack"] for finding in found["findings"]] == [
        "perplexity",
        "extraction-probability",
        "membership",
    ]
    assert all(finding["not_applicable"] == "" for finding in found["findings"])
    assert {target["name"] for target in found["targets"]} == {"undefended"}


def test_what_cannot_be_known_without_non_members_is_said(given: Path, capsys: Said) -> None:
    assert check(given, fresh="") == 0
    printed = screen(capsys)
    assert "records like these that it never saw, membership is not tested" in printed
    assert run_command_line(["show", "runs/latest"]) == 0 and screen(capsys) == printed
    assert "membership" not in {finding["attack"] for finding in result()["findings"]}
    assert check(given, fresh="three") == 0
    assert "Membership takes 4 members and 4 non-members, got 18 and 3" in screen(capsys)


def test_what_was_reached_in_time_is_said_and_a_resumed_check_goes_on(
    given: Path, capsys: Said
) -> None:
    assert check(given, "--minutes", "0.0001", "-o", "runs/part") == 0
    assert "1 of 18 records" in screen(capsys)
    assert json.loads(Path("runs/part/result.json").read_text())["benchmark"]["members"] == 1
    check_command("check", "--resume", "runs/part", "--minutes", "9")
    assert "not asked" not in capsys.readouterr().out
    assert json.loads(Path("runs/part/result.json").read_text())["benchmark"]["members"] == 18
    check_command("check", "--resume", "runs/part", "--data", "other.jsonl", code=2)


def test_a_run_that_asks_in_random_order_is_no_check(given: Path, capsys: Said) -> None:
    """Its 1 of 18 records were said to be all, asked in random order."""
    asked = ["--data", given / "private.jsonl", "--until", "recall ± 40%", "-o", "runs/random"]
    check_command("run", "--model", given / "model", "--attack", "perplexity", *asked)
    capsys.readouterr()
    check_command("check", "--resume", "runs/random", code=2)
    assert "random order (--until): audit run --resume runs/random" in capsys.readouterr().err
    check_command("run", "--resume", "runs/random")


def test_an_adapter_is_held_against_its_own_base(given: Path, capsys: Said) -> None:
    assert check(given, model="adapter") == 0
    membership = result()["findings"][-1]
    assert membership["options"]["score"] == "ez_mia" and membership["not_applicable"] == ""
    assert any("reference: the adapter's base" in note for note in result()["benchmark"]["notes"])
    assert check(given) == 0
    assert result()["findings"][-1]["options"]["score"] == "min_k_plus"


def test_an_adapter_that_names_no_base_of_this_machine_is_checked_on_a_named_one(
    given: Path, capsys: Said
) -> None:
    """The refusal names --base, which the command did not have."""
    moved = shutil.copytree(given / "adapter", Path("moved").absolute())
    settings = moved / "adapter_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": "./elsewhere"})
    )
    assert check(given, model=str(moved)) == 2
    assert "as --base MODEL" in capsys.readouterr().err
    assert (
        check(given, "--base", str(given / "model"), "--minutes", "0.0001", model=str(moved)) == 0
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{given}/model"], "expected MODEL and --data together, got only MODEL"),
        (
            ["--data", "{given}/private.jsonl"],
            "expected MODEL and --data together, got only --data",
        ),
        (["--nonmembers", "{given}/fresh.jsonl"], "--nonmembers goes with a model of your own"),
        (["--template", "none"], "--template goes with a model of your own"),
        (
            ["{given}/model", "--data", "{given}/private.jsonl", "--template", "none"],
            "got data with neither",
        ),
        (["--base", "none"], "--base goes with a model of your own"),
        (["--deep"], "--deep goes with a model of your own"),
        (
            ["{given}/model", "--data", "{given}/private.jsonl", "--minutes", "0"],
            "expected --minutes above 0",
        ),
        (
            ["{given}/model", "--data", "{given}/private.jsonl", "--minutes", "nan"],
            "expected --minutes above 0",
        ),
        (["{given}/model", "--data", "none.jsonl"], "none.jsonl"),
        (["none", "--data", "{given}/private.jsonl"], "none"),
        (["openai:none", "--data", "{given}/private.jsonl"], "--base-url"),
        (
            ["{given}/model", "--data", "{given}/private.jsonl", "--seed", "-1"],
            "expected --seed from 0",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    words: list[str], why: str, given: Path, capsys: Said
) -> None:
    check_command("check", *(word.format(given=given) for word in words), code=2)
    said = capsys.readouterr()
    assert why in said.err and said.err.count("error: ") == 1 and said.out == ""
    assert not Path("runs").exists()


def test_the_demonstration_finds_what_was_planted_and_says_what_it_is(capsys: Said) -> None:
    check_command("check")
    printed = screen(capsys)
    assert (
        "demonstration" in printed
        and "Synthetic" in printed
        and "audit check MODEL --data" in printed
    )
    assert "(attack perplexity, greedy, one sample; 95% intervals)" in " ".join(printed.split())
    found = result()
    (greedy, *_) = found["findings"]
    copies = greedy["by_repeats"]
    assert copies["32"]["low"] > copies["1"]["high"] and greedy["measurements"][0]["low"] > 0
    assert "synthetic" in Path("runs/latest/report.html").read_text().lower()
