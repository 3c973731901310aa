"""Trainings that forget: their losses by hand and by their limits, what they move, and what they
refuse."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.core.errors import AuditError
from auditor.defenses.unlearning import NPO, GradientAscent
from auditor.models.loading import load_causal_lm
from auditor.plugins.trainer import read_recorded_prefix
from auditor.runs import training
from auditor.runs.training import TrainingRequest
from auditor.training.unlearning import (
    compute_record_log_probs,
    evaluate_record_log_probs,
    pad_unlearning_records,
)
from tests.conftest import save_tiny, states, tiny

ROWS = [{"text": f"The code of door {i} is {i * i * 7}."} for i in range(8)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the rows, three of which are to be forgotten."""
    folder = tmp_path_factory.mktemp("unlearning")
    save_tiny(folder / "neox")
    for name, rows in {
        "data": [*ROWS, *ROWS[:3]],
        "forget": ROWS[:3],
        "others": [{"text": "Nobody's."}, *ROWS],
        "asked": [{"instruction": row["text"], "output": "Yes."} for row in ROWS],
    }.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    learn = {"epochs": 12, "batch": 2, "learning_rate": 0.01}
    training.train_model_into_folder(
        make_request(folder, folder / "before", "none", model=str(folder / "neox"), options=learn),
        silent,
    )
    return folder


def make_request(inputs: Path, out: Path, method: str, **more: Any) -> TrainingRequest:
    given: dict[str, Any] = {
        "method": method,
        "model": str(inputs / "before"),
        "data": str(inputs / "data.jsonl"),
    }
    if method != "none":
        more = {"forget": str(inputs / "forget.jsonl"), **more}
    return TrainingRequest(**{**given, "out": out, "block": 48, **more})


def silent(what: str, done: int, total: int) -> None:
    pass


def nats(folder: Path, rows: list[dict[str, str]]) -> float:
    """The mean log-probability of these texts."""
    model = load_causal_lm(str(folder))
    ids = model.tokenizer([row["text"] for row in rows])["input_ids"]  # type: ignore[misc]
    return float(
        evaluate_record_log_probs(
            model.model, pad_unlearning_records([tuple(row) for row in ids], 48, 0)
        ).mean()
    )


def test_a_records_log_probability_is_that_of_its_learnt_tokens_behind_an_end() -> None:
    model, sequences = tiny(), [(5, 6, 7, 8, 9), (3, ~4, 5)]
    found = compute_record_log_probs(model.model, pad_unlearning_records(sequences, 6, 0))
    for sequence, own in zip(sequences, found, strict=True):
        # the block holds six, and the first is the end of what stood before
        whole = [*sequence, 0][:5]
        distribution = (
            model.model(torch.tensor([[0, *(t if t >= 0 else ~t for t in whole)]]))
            .logits[0]
            .log_softmax(-1)
        )
        assert float(own) == pytest.approx(
            sum(float(distribution[i, t]) for i, t in enumerate(whole) if t >= 0), abs=1e-4
        )


def test_npo_by_hand() -> None:
    """-2/beta log sigmoid(-beta log ratio): at the start 2/beta log 2; of a record 1,000 times less
    likely less."""
    before = torch.tensor([-10.0, -20.0])
    assert float(NPO(beta=0.5).compute_forgetting_loss(before, before)) == pytest.approx(
        4 * math.log(2)
    )
    now = torch.tensor([-10.0 - math.log(1000)])
    assert float(NPO(beta=1.0).compute_forgetting_loss(now, before[:1])) == pytest.approx(
        2 * math.log1p(1 / 1000)
    )


@pytest.mark.parametrize("beta", [1e-4, 0.1, 2.0])
def test_npo_pulls_as_gradient_ascent_does_and_lets_go_of_what_is_forgotten(beta: float) -> None:
    """Its gradient is ascent's, each record weighted by 2 p^beta / (p^beta + p_before^beta) (Zhang
    et al., Sec. 3)."""
    now = torch.tensor([-10.0, -20.0, -60.0], dtype=torch.float64, requires_grad=True)
    before = torch.tensor([-10.0, -30.0, -20.0], dtype=torch.float64)
    (of_npo,) = torch.autograd.grad(NPO(beta=beta).compute_forgetting_loss(now, before), now)
    (of_ascent,) = torch.autograd.grad(GradientAscent().compute_forgetting_loss(now, before), now)
    weights = 2 / (1 + torch.exp(-beta * (now.detach() - before)))
    torch.testing.assert_close(of_npo, weights * of_ascent)
    assert float(weights[0]) == 1 and (weights[1] > 1 > weights[2])
    if beta < 1e-3:
        torch.testing.assert_close(of_npo, of_ascent, atol=0, rtol=0.003)
        found = (
            NPO(beta=beta).compute_forgetting_loss(now, before) - 2 / beta * math.log(2)
        ).detach()
        limit = (
            GradientAscent().compute_forgetting_loss(now, before) - before.mean()
        ).detach()  # Proposition 1
        torch.testing.assert_close(found, limit, atol=0.05, rtol=0)


@pytest.mark.parametrize("method", ["gradient-ascent", "npo"])
def test_what_is_to_be_forgotten_becomes_unlikely_and_retain_keeps_the_rest(
    inputs: Path, tmp_path: Path, method: str
) -> None:
    options = {"epochs": 4, "batch": 2, "learning_rate": 1e-3}
    for name, retain in (("alone", 0.0), ("kept", 2.0)):
        told = training.train_model_into_folder(
            make_request(inputs, tmp_path / name, method, options={**options, "retain": retain}),
            silent,
        )
        assert states(told, "3", "5")
    assert read_recorded_prefix(tmp_path / "alone") is None  # the records were learnt before
    before = [nats(inputs / "before", rows) for rows in (ROWS[:3], ROWS[3:])]
    alone, kept = (
        [nats(tmp_path / name, rows) for rows in (ROWS[:3], ROWS[3:])] for name in ("alone", "kept")
    )
    assert alone[0] < before[0] - 5 and kept[0] < before[0] - 2
    # it is the records, and not the model, that suffer
    assert kept[0] - before[0] < kept[1] - before[1] - 2
    assert kept[1] > alone[1] + 1


def test_an_interrupted_one_goes_on(inputs: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    more = {"options": {"epochs": 4, "batch": 2, "learning_rate": 1e-3, "retain": 1.0}}
    told = training.train_model_into_folder(
        make_request(inputs, tmp_path / "whole", "npo", **more), silent
    )
    with pytest.raises(KeyboardInterrupt):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "cut", "npo", **more), stop
        )
    assert (
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "cut", "npo", **more), silent
        )
        == told
    )
    one, other = (
        load_causal_lm(str(tmp_path / name)).model.state_dict() for name in ("whole", "cut")
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-4)


def test_records_that_a_block_cuts_are_said(inputs: Path, tmp_path: Path) -> None:
    def train(block: int) -> tuple[str, ...]:
        more = {"options": {"epochs": 1, "batch": 2}, "block": block}
        return training.train_model_into_folder(
            make_request(inputs, tmp_path / str(block), "npo", **more), silent
        )

    tokenizer = load_causal_lm(str(inputs / "before")).tokenizer
    assert tokenizer is not None
    longest = max(len(tokenizer(row["text"])["input_ids"]) for row in ROWS[:3])
    assert not states(train(longest + 1), "--block")
    assert states(train(longest - 4), "3", "--block")


def test_an_adapter_can_forget_too(inputs: Path, tmp_path: Path) -> None:
    options = {"epochs": 4, "batch": 2, "learning_rate": 5e-3}
    told = training.train_model_into_folder(
        make_request(inputs, tmp_path / "out", "npo", lora=True, options=options), silent
    )
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    before, after = map(float, re.findall(r"[0-9.]+", told[-2]))  # nats a token
    assert after > before + 0.1


@pytest.mark.parametrize(
    ("method", "more", "sentence"),
    [
        (
            "npo",
            {"forget": None},
            "expected --forget FILE with npo, which forgets records, got none",
        ),
        (
            "npo",
            {"forget": "{}/others.jsonl"},
            "of --data, got 1 of 9 that are not in it (row 0, counted from 0)",
        ),
        (
            "none",
            {"forget": "{}/forget.jsonl"},
            "--forget names records that a model should forget, but none forgets",
        ),
        (
            "npo",
            {"data": "{}/asked.jsonl", "forget": "{}/asked.jsonl"},
            "expected --block to reach the answers of the records to forget, got 48 tokens",
        ),
        ("npo", {"options": {"beta": 0}}, "expected beta > 0, got 0"),
        ("npo", {"options": {"retain": -1}}, "expected retain >= 0, got -1"),
        ("npo", {"options": {"model": "x"}}, "-D model= names a trained npo model for audit run"),
        (
            "gradient-ascent",
            {"options": {"retain": 1}, "forget": "{}/data.jsonl"},
            "expected records of --data to retain with retain=1, got none",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_left(
    inputs: Path, tmp_path: Path, method: str, more: dict[str, Any], sentence: str
) -> None:
    more = {
        name: value.format(inputs) if isinstance(value, str) else value
        for name, value in more.items()
    }
    with pytest.raises(AuditError) as refused:
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "out", method, **more), silent
        )
    assert sentence in str(refused.value) and not (tmp_path / "out").exists()
