"""A model as a layer: what it still knows of deleted records, with kept ones as the control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from stdnum import luhn
from torch import Tensor

from auditor.erasure.layers import LayerVerdict
from auditor.erasure.model import judge_model_erasure
from auditor.erasure.records import ErasureRecords, read_erasure_records
from auditor.models.base import LanguageModel
from tests.conftest import save_tiny
from tests.erasure.stored import Row, make_rows, split_rows, write_rows

ORDER = 16  # bytes that decide the next one
COMPLETION, RANKS, MEMBERSHIP = ("text", "personal data", "membership")


def make_card_rows(n: int, seed: int = 0) -> list[Row]:
    rows = make_rows(n, seed=seed)
    for i, row in enumerate(rows):
        number = f"453201{np.random.default_rng([seed, i]).integers(10**9):09}"
        words = row["text"].split()[4:]
        card = number + luhn.calc_check_digit(number)
        row["text"] = f"{' '.join(words[:8])} card {card}, {' '.join(words[8:12])}"
    return rows


class Remembering(LanguageModel):
    """A model of bytes that knows what follows in some texts, and nothing else."""

    name, capabilities, eos = "remembering", frozenset({"draw", "distribution"}), (0,)

    def __init__(self, tokenizer: object, texts: Sequence[str]) -> None:
        self.tokenizer, self.vocab_size = tokenizer, len(tokenizer)
        self.noise = torch.randn(self.vocab_size, self.vocab_size) / 4
        ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        keys = torch.cat([torch.zeros(1, dtype=torch.long), *map(make_keys, ids)])
        tokens = torch.cat([torch.zeros(1, dtype=torch.long), *(text[ORDER:] for text in ids)])
        order = keys.argsort()
        self.keys, self.tokens = keys[order], tokens[order]

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        logits = self.noise[contexts[:, -last:]]
        padded = torch.nn.functional.pad(contexts, (ORDER, 1))
        keys = make_keys(padded)[:, -last:].contiguous()
        places = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        known = (self.keys[places] == keys).unsqueeze(-1) * 12.0
        return logits.scatter_add(2, self.tokens[places].unsqueeze(-1), known).log_softmax(-1)


def make_keys(ids: Tensor) -> Tensor:
    """Return a number of each ORDER ids in a row that another id follows, (..., n - ORDER)."""
    windows = ids[..., :-1].unfold(-1, ORDER, 1)
    return (windows * 1_000_003 ** torch.arange(ORDER)).sum(-1).contiguous()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return AutoTokenizer.from_pretrained(folder)


def judge(
    tmp_path: Path,
    tokenizer: object,
    known: Sequence[Row],
    records: ErasureRecords,
    n_fresh: int = 80,
) -> dict[str, LayerVerdict]:
    fresh = write_rows(tmp_path / "fresh.jsonl", make_card_rows(n_fresh, seed=1))
    model = Remembering(tokenizer, [row["text"] for row in known])
    return {one.kind: one for one in judge_model_erasure(model, records, str(fresh), 99).verdicts}


@pytest.mark.parametrize(
    ("knows_deleted", "knows_kept", "verdict"),
    [(True, True, "still there"), (False, True, "gone"), (False, False, "cannot tell")],
)
def test_a_model_still_knows_deleted_records_or_not(
    tmp_path: Path, tokenizer: object, knows_deleted: bool, knows_kept: bool, verdict: str
) -> None:
    deleted, kept = split_rows(make_card_rows(26), 4)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    records = read_erasure_records(gone, write_rows(tmp_path / "kept.jsonl", kept))
    known = [*(deleted if knows_deleted else []), *(kept if knows_kept else [])]
    verdicts = judge(tmp_path, tokenizer, known, records)
    assert {kind: v.verdict for kind, v in verdicts.items()} == dict.fromkeys(
        (COMPLETION, RANKS, MEMBERSHIP), verdict
    )
    if knows_deleted:
        names = {row["id"] for row in deleted}
        assert all(set(v.leftovers) == names for v in verdicts.values())


def test_a_model_is_not_cleared_of_a_record_that_is_in_no_test(
    tmp_path: Path, tokenizer: object
) -> None:
    deleted, kept = split_rows(make_card_rows(26), 4)
    twin = {**deleted[0], "embedding": kept[0]["embedding"][::-1]}
    gone = write_rows(tmp_path / "gone.jsonl", [*deleted, {"id": "s", "text": "PIN 4711"}, twin])
    records = read_erasure_records(gone, write_rows(tmp_path / "kept.jsonl", kept))
    verdicts = judge(tmp_path, tokenizer, kept, records)
    counts = {kind: v.n_deleted for kind, v in verdicts.items() if v.verdict == "gone"}
    assert counts == dict.fromkeys((COMPLETION, RANKS, MEMBERSHIP), 4)
    assert verdicts["records"].why == "1 of 6 deleted records are in no test, as they are short: s"


def test_a_model_is_not_cleared_by_a_test_that_cannot_see_one_record(
    tmp_path: Path, tokenizer: object
) -> None:
    """With 24 non-members no p-value is below 0.04: of four deleted records, one is never seen."""
    deleted, kept = split_rows(make_card_rows(26), 4)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    records = read_erasure_records(gone, write_rows(tmp_path / "kept.jsonl", kept))
    verdict = judge(tmp_path, tokenizer, [deleted[0], *kept], records, 24)[MEMBERSHIP]
    assert (verdict.verdict, dict(verdict.leftovers)) == ("cannot tell", {})
    enough = judge(tmp_path, tokenizer, [deleted[0], *kept], records)[MEMBERSHIP]
    assert list(enough.leftovers) == [deleted[0]["id"]]
