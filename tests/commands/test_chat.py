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
