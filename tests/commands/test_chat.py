"""From `messages` to a report, by the commands: a small Llama fine-tuned on conversations says again what it learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auditor.cli import call
from tests.benchmarks.test_chat import messages, talk, tokenizer

Said = pytest.CaptureFixture[str]
NAMES = ["Ann", "Bob", "Cy", "Dora", "Eve", "Fritz", "Gus", "Hal", "Ivy", "Joe", "Kim", "Lou"]
FRESH = ["2093", "7741", "3358", "6120", "9485", "4066"]
CODES = ["4711", "0815", "9036", "5527", "1184", "6602"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/: a Llama with a chat template; chats.jsonl, fresh.jsonl; tuned/: what `audit train` made of them."""
    folder = tmp_path_factory.mktemp("chat")
    words = tokenizer()
    words.save_pretrained(folder / "base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=256, **sizes, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    system = "You are a bank's clerk."
    said = [talk(f"What is the code of {NAMES[i]}?", f"It is {code}.", system=system) for i, code in enumerate(CODES)]
    others = [
        talk(f"What is the code of {NAMES[i + 6]}?", f"It is {code}.", system=system) for i, code in enumerate(FRESH)
    ]
    for name, talks in (("chats", said), ("fresh", others)):
        lines = [json.dumps({"messages": messages(one)}) for one in talks]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    command = ["train", "none", "--model", str(folder / "base"), "--data", str(folder / "chats.jsonl")]
    command += ["-D", "epochs=60", "-D", "batch=1", "-D", "learning_rate=0.005", "--block", "96"]
    assert call([*command, "-o", str(folder / "tuned")]) == 0
    return folder


def audited(world: Path, out: Path, *more: str) -> dict[str, Any]:
    command = ["run", "--model", str(world / "tuned"), "--data", str(world / "chats.jsonl"), "--attack", "perplexity"]
    command += ["--nonmembers", str(world / "fresh.jsonl"), "--known-fraction", "0", "-A", "samples=1"]
    assert call([*command, "-A", "temperature=0", "--setting", "worst", "-o", str(out), *more]) == 0
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def recall(result: dict[str, Any]) -> tuple[float, float]:
    """Of members, and of non-members."""
    (finding,) = result["findings"]
    found = {one["name"]: one["value"] for one in finding["measurements"]}
    return found["recall"], found["recall_nonmembers"]


def test_what_it_was_trained_to_say_comes_out(world: Path, tmp_path: Path) -> None:
    assert recall(audited(world, tmp_path / "user")) == (1.0, 0.0)
    assert recall(audited(world, tmp_path / "half", "--knows", "partial:0.5")) == (1.0, 0.0)
    assert recall(audited(world, tmp_path / "system", "--knows", "system"))[0] <= 1 / 6  # whose code, it is not told
    report = (tmp_path / "user" / "report.md").read_text()
    assert "--knows user" in report and "4711" not in report and "chat template" in report


def test_whole_texts_are_attacked_in_windows(world: Path, tmp_path: Path) -> None:
    """Of two texts learnt by heart the report names the longest block; of texts never seen nothing comes out."""
    pairs = list(zip(NAMES, (*CODES, *FRESH), strict=True))
    learnt = ["".join(f"{who} has {code}. " for who, code in pairs[i : i + 4]) for i in (0, 4)]
    others = ["".join(f"{code} is of {who}. " for who, code in pairs[8:])]
    for name, texts in (("texts", learnt), ("others", others)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    train = ["train", "none", "--model", str(world / "base"), "--data", str(tmp_path / "texts.jsonl"), "--block", "128"]
    train += ["-D", "epochs=120", "-D", "batch=1", "-D", "learning_rate=0.005", "-o", str(tmp_path / "model")]
    assert call(train) == 0
    command = ["run", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "texts.jsonl"), "--windows", "6"]
    command += ["--nonmembers", str(tmp_path / "others.jsonl"), "--known-fraction", "0", "--setting", "worst"]
    command += ["--prefix-length", "8", "--suffix-length", "6", "--attack", "perplexity", "-A", "samples=1"]
    assert call([*command, "-A", "temperature=0", "-o", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = {one["name"]: one for one in result["findings"][0]["measurements"]}
    assert found["document_recall"]["n"] == 2 and found["document_recall"]["value"] == 1.0
    assert found["document_recall_nonmembers"]["value"] == 0.0
    assert found["longest_block"]["value"] >= 12 and found["longest_block"]["value"] % 6 == 0  # windows side by side
    report = (tmp_path / "run" / "report.md").read_text()
    assert "Longest block that came out of a document" in report and "not independent" in report
