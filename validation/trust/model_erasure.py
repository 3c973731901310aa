"""Measure how often `audit erase --model` says that a model still knows records it never saw.

    python -m validation.trust.model_erasure [--models 10] [--requests 20] [--seed 0] [--out FOLDER]

Half an hour. A small model, trained on other records with card numbers, is trained further on 24
kept records: honestly without the deleted ones. Then the command's own tests judge requests to
delete 12 records each. One more model is trained with the first request's records.
"""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from stdnum import luhn

from auditor.erasure import model as erasure_model
from auditor.erasure.records import ErasureRecords, read_erasure_records
from auditor.models.huggingface import HuggingFaceModel
from tests.conftest import save_tiny
from validation.harness import Page, run, share, write_rows

TESTS = ("rank of card numbers", "likelihood")
N_DELETED, N_KEPT, N_FRESH = 12, 24, 120
N_PUBLIC = 1_500  # records of the first training
ALTERNATIVES = 99  # values with which a card number is ranked
STEPS = 60
BATCH = 24
Row = dict[str, Any]


def make_card_rows(n_rows: int, seed: int) -> list[Row]:
    """Return rows with four words from a list and a card number that passes its check."""
    draw = random.Random(seed)
    words = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(words.choices(letters, k=words.randint(3, 9))) for _ in range(500)]
    rows = []
    for i in range(n_rows):
        number = f"453201{draw.randrange(10**9):09d}"
        chosen = draw.choices(known, k=4)
        card = number + luhn.calc_check_digit(number)
        text = f"{chosen[0]} {chosen[1]} {chosen[2]} card {card}, {chosen[3]}"
        rows.append({"id": i, "text": text})
    return rows


def train(model: Any, tokenizer: Any, rows: Sequence[Row], n_steps: int, rate: float) -> None:
    """Train a model on rows, in random batches, in place."""
    ids = [torch.tensor(tokenizer(row["text"] + "<end>")["input_ids"]) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, n_steps)
    model.train()
    for _ in range(n_steps):
        batch = torch.randperm(len(rows))[:BATCH]
        optimizer.zero_grad()
        model(input_ids=tokens[batch], labels=labels[batch]).loss.backward()
        optimizer.step()
        schedule.step()


def make_public_model(folder: Path, seed: int) -> tuple[Any, Any]:
    """Return a model trained on other records, and its tokenizer."""
    from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

    save_tiny(folder)
    torch.manual_seed(seed)
    config = GPTNeoXConfig.from_pretrained(
        folder,
        hidden_size=48,
        intermediate_size=128,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=128,
    )
    model = GPTNeoXForCausalLM(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train(model, tokenizer, make_card_rows(N_PUBLIC, 10**9 + seed), 600, 3e-3)
    return model, tokenizer


def judge_requests(
    public: Any, tokenizer: Any, n_requests: int, seed: int, knows_first: bool
) -> dict[str, list[bool]]:
    """Return, by test, whether the command would say *still there* of each request.

    The requests share one run of the command. knows_first: whether the model is trained on the
    records of the first request.
    """
    torch.manual_seed(seed)
    n_deleted = n_requests * N_DELETED
    rows = make_card_rows(n_deleted + N_KEPT + N_FRESH, seed)
    kept = rows[n_deleted : n_deleted + N_KEPT]
    trained = [*kept, *rows[:N_DELETED]] if knows_first else kept
    model = deepcopy(public)
    train(model, tokenizer, trained, STEPS * len(trained) // N_KEPT, 3e-3)
    p_values: list[Mapping[int, Sequence[float]]] = []

    def keep_p_values(
        values: Mapping[int, Sequence[float]], records: ErasureRecords
    ) -> Mapping[int, bool]:
        p_values.append(values)
        return list_discoveries(values, records)

    list_discoveries = erasure_model._list_discoveries
    with tempfile.TemporaryDirectory() as folder, patch_function(keep_p_values):
        top = Path(folder)
        write_rows(top / "gone.jsonl", rows[:n_deleted])
        write_rows(top / "kept.jsonl", kept)
        write_rows(top / "fresh.jsonl", rows[n_deleted + N_KEPT :])
        records = read_erasure_records(top / "gone.jsonl", top / "kept.jsonl")
        retrained = HuggingFaceModel(model, tokenizer, "retrained")
        fresh = str(top / "fresh.jsonl")
        erasure_model.judge_model_erasure(retrained, records, fresh, ALTERNATIVES)
    said = {}
    for test, values in zip(TESTS, p_values, strict=True):
        said[test] = []
        for start in range(0, n_deleted, N_DELETED):
            request = range(start, start + N_DELETED)
            of_request = {record: p for record, p in values.items() if record in request}
            said[test].append(any(list_discoveries(of_request, records).values()))
    return said


@contextmanager
def patch_function(function: Any) -> Iterator[None]:
    """Replace the decision of the command's tests in the block."""
    original = erasure_model._list_discoveries
    erasure_model._list_discoveries = function
    try:
        yield
    finally:
        erasure_model._list_discoveries = original


def main(models: int = 10, requests: int = 20, seed: int = 0, out: Path | None = None) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    page = Page(out / "model-erasure.md" if out else None)
    page.head("trained", "test", "requests", "still there")
    with tempfile.TemporaryDirectory() as folder:
        public, tokenizer = make_public_model(Path(folder), seed)
        said = []
        for i in range(models):
            said.append(judge_requests(public, tokenizer, requests, seed + i, False))
        n_requests = models * requests
        for test in TESTS:
            n_alarms = sum(sum(by_test[test]) for by_test in said)
            page.row("without them", test, n_requests, share(n_alarms, n_requests))
        n_alarms = 0
        for by_test in said:
            n_alarms += sum(map(any, zip(*by_test.values(), strict=True)))
        page.row("without them", "any", n_requests, share(n_alarms, n_requests))
        for test, verdicts in judge_requests(public, tokenizer, 1, seed + models, True).items():
            page.row("with them", test, 1, str(sum(verdicts)))


if __name__ == "__main__":
    raise SystemExit(run(main))
