"""What is said of data beside the model that they are read for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from auditor.benchmarks.data.files import TableReader
from auditor.core.plan import Plan
from auditor.models.trained_length import TrainedLength
from auditor.runs import own_data
from auditor.runs.own_data import load_own_benchmark


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=by_bytes)


@pytest.mark.parametrize("returns_token_ids", [True, False])
def test_token_ids_cut_within_a_character_are_a_doubt_over_text(
    returns_token_ids: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [tokenizer(text)["input_ids"] for text in ("abcd猫犬", "abcdefgh", "efgh猫犬")]
    lines = [json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    model: Any = SimpleNamespace(
        name="tiny",
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        max_positions=None,
        returns_token_ids=returns_token_ids,
    )
    data = str(tmp_path / "rows.jsonl")
    lengths = {"prefix_length": 4, "suffix_length": 4, "known_fraction": 0.0}
    plan = Plan.from_fields(model="tiny", data=data, **lengths)
    benchmark = load_own_benchmark(TableReader(plan.data), "tiny", model)
    said = [doubt.sentence.partition(" suffixes")[0] for doubt in benchmark.doubts]
    assert said == ([] if returns_token_ids else ["2 of 3"])


@pytest.mark.parametrize(("trainer", "audited"), [("axolotl", 1), ("swift", 0)])
def test_axolotl_makes_several_rows_of_a_long_text_and_leaves_none_out(
    trainer: str,
    audited: int,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["".join(f"{i:04d} " for i in range(40)), "a short text, which any trainer takes"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    length = TrainedLength(60, left_out_by=trainer)
    monkeypatch.setattr(own_data, "read_trained_length", lambda folder: (length, ""))
    model: Any = SimpleNamespace(
        name="tiny",
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        max_positions=None,
        returns_token_ids=True,
    )
    plan = Plan.from_fields(model="tiny", data=str(tmp_path / "d.jsonl"), known_fraction=0.0)
    counts = load_own_benchmark(TableReader(plan.data), "tiny", model).record_counts["members"]
    assert counts.audited == 1 + audited
