"""From `messages` to a report, by the commands: a small Llama fine-tuned on conversations says
again what it learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auditor.cli import run_command_line
from tests.benchmarks.test_chat import messages, talk, tokenizer
from tests.conftest import check_command

Said = pytest.CaptureFixture[str]
NAMES = ["Ann", "Bob", "Cy", "Dora", "Eve", "Fritz", "Gus", "Hal", "Ivy", "Joe", "Kim", "Lou"]
FRESH = ["2093", "7741", "3358", "6120", "9485", "4066"]
CODES = ["4711", "0815", "9036", "5527", "1184", "6602"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/: a Llama with a chat template; chats.jsonl, fresh.jsonl; tuned/: what `audit train`
    made of them."""
    folder = tmp_path_factory.mktemp("chat")
    words = tokenizer()
    words.save_pretrained(folder / "base")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(words), max_position_embeddings=256, **sizes, bos_token_id=0, eos_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    system = "You are a bank's clerk."
    said = [
        talk(f"What is the code of {NAMES[i]}?", f"It is {code}.", system=system)
        for i, code in enumerate(CODES)
    ]
    others = [
        talk(f"What is the code of {NAMES[i + 6]}?", f"It is {code}.", system=system)
        for i, code in enumerate(FRESH)
    ]
    for name, talks in (("chats", said), ("fresh", others)):
        lines = [json.dumps({"messages": messages(one)}) for one in talks]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    command = [
        "train",
        "none",
        "--model",
        str(folder / "base"),
        "--data",
        str(folder / "chats.jsonl"),
    ]
    command += ["-D", "epochs=60", "-D", "batch=1", "-D", "learning_rate=0.005", "--block", "96"]
    check_command(*command, "-o", folder / "tuned")
    return folder


def audited(inputs: Path, out: Path, *more: str) -> dict[str, Any]:
    command = [
        "run",
        "--model",
        str(inputs / "tuned"),
        "--data",
        str(inputs / "chats.jsonl"),
        "--attack",
        "perplexity",
    ]
    command += [
        "--nonmembers",
        str(inputs / "fresh.jsonl"),
        "--known-fraction",
        "0",
        "-A",
        "samples=1",
    ]
    check_command(*command, "-A", "temperature=0", "--setting", "white-box", "-o", out, *more)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def recall(result: dict[str, Any]) -> tuple[float, float]:
    """Of members, and of non-members."""
    (finding,) = result["findings"]
    found = {one["name"]: one["value"] for one in finding["measurements"]}
    return found["recall"], found["recall_nonmembers"]


def test_what_it_was_trained_to_say_comes_out(inputs: Path, tmp_path: Path) -> None:
    assert recall(audited(inputs, tmp_path / "user")) == (1.0, 0.0)
    assert recall(audited(inputs, tmp_path / "half", "--knows", "partial:0.5")) == (1.0, 0.0)
    # whose code, it is not told
    assert recall(audited(inputs, tmp_path / "system", "--knows", "system"))[0] <= 1 / 6
    report = (tmp_path / "user" / "report.md").read_text()
    assert "--knows user" in report and "4711" not in report and "training.json" in report


def test_whole_texts_are_attacked_in_windows(inputs: Path, tmp_path: Path) -> None:
    """Of two texts learnt by heart the report names the longest block; of texts never seen nothing
    comes out."""
    pairs = list(zip(NAMES, (*CODES, *FRESH), strict=True))
    learnt = ["".join(f"{who} has {code}. " for who, code in pairs[i : i + 4]) for i in (0, 4)]
    others = ["".join(f"{code} is of {who}. " for who, code in pairs[8:])]
    for name, texts in (("texts", learnt), ("others", others)):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in texts)
        )
    train = [
        "train",
        "none",
        "--model",
        str(inputs / "base"),
        "--data",
        str(tmp_path / "texts.jsonl"),
        "--block",
        "128",
    ]
    train += [
        "-D",
        "epochs=120",
        "-D",
        "batch=1",
        "-D",
        "learning_rate=0.005",
        "-o",
        str(tmp_path / "model"),
    ]
    check_command(*train)
    command = [
        "run",
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "texts.jsonl"),
        "--windows",
        "6",
    ]
    command += [
        "--nonmembers",
        str(tmp_path / "others.jsonl"),
        "--known-fraction",
        "0",
        "--setting",
        "white-box",
    ]
    command += [
        "--prefix-length",
        "8",
        "--suffix-length",
        "6",
        "--attack",
        "perplexity",
        "-A",
        "samples=1",
    ]
    check_command(*command, "-A", "temperature=0", "-o", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = {one["name"]: one for one in result["findings"][0]["measurements"]}
    assert found["document_recall"]["n"] == 2 and found["document_recall"]["value"] == 1.0
    assert found["document_recall_nonmembers"]["value"] == 0.0
    # windows side by side
    assert found["longest_block"]["value"] >= 12 and found["longest_block"]["value"] % 6 == 0
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Longest extracted block of a record" in report and "not independent" in report


def test_private_training_takes_the_same_conversations(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    """DP-SGD's model and PMixED's ensemble of the same masks, and both in one audit of the same
    turns."""
    train = [
        "--model",
        str(inputs / "base"),
        "--data",
        str(inputs / "chats.jsonl"),
        "--block",
        "96",
    ]
    private = [
        "train",
        "dp-sgd",
        *train,
        "-D",
        "epochs=1",
        "-D",
        "batch=3",
        "-D",
        "epsilon=8",
        "-D",
        "noise=seeded",
    ]
    check_command(*private, "-o", tmp_path / "private")
    assert "loss on assistant: 17% of the tokens" in capsys.readouterr().out
    members = [
        "train",
        "pmixed",
        *train,
        "-D",
        "members=2",
        "-D",
        "epochs=1",
        "-o",
        str(tmp_path / "ensemble"),
    ]
    check_command(*members)
    defenses = [
        "--defense",
        "dp-sgd",
        "-D",
        f"dp-sgd.model={tmp_path / 'private'}",
        "--public",
        str(inputs / "base"),
    ]
    defenses += [
        "--defense",
        "pmixed",
        "-D",
        f"pmixed.ensemble={tmp_path / 'ensemble'}",
        "-D",
        "pmixed.queries=200",
    ]
    result = audited(inputs, tmp_path / "run", *defenses)
    rows = {(f["target"], f["setting"]): f["not_applicable"] for f in result["findings"]}
    assert rows[("dp-sgd", "white-box")] == rows[("pmixed", "white-box")] == ""
    ran = (tmp_path / "private" / "training.json").read_text()
    assert "4711" not in ran and json.loads(ran)["finished"]


def test_what_is_no_conversation_is_refused_before_anything_is_written(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "Who?"}]}))
    train = [
        "train",
        "none",
        "--model",
        str(inputs / "base"),
        "--data",
        str(data),
        "-o",
        str(tmp_path / "out"),
    ]
    assert (
        run_command_line(train) == 2
        and "row 0 (counted from 0): expected a conversation to train on, got no assistant turn"
        in (capsys.readouterr().err)
    )
    data.write_text(json.dumps({"text": "Who? Ann."}))
    check_command(*train, "--loss-on", "assistant", code=2)
    assert "expected --loss-on assistant or all, of conversations" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    audit = ["run", "--model", str(inputs / "base"), "--data", str(data), "--attack", "perplexity"]
    check_command(*audit, "--knows", "half", code=2)
    assert "expected --knows system, user or partial:F" in capsys.readouterr().err
