"""`audit train`: what it reads, that it goes on where it stopped, and what it refuses with nothing
half written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from auditor.benchmarks.data.files import read_unit_texts
from auditor.core.errors import AuditError
from auditor.plugins.trainer import read_recorded_prefix
from auditor.runs import training
from auditor.runs.training import TrainingRequest
from auditor.training import finetune
from tests.conftest import check_command, refuses, save_tiny, states

Said = pytest.CaptureFixture[str]
ROWS = [
    {"prefix": f"The code of door {i} is", "suffix": f" {i}{i}{i}.", "who": f"user {i % 3}"}
    for i in range(12)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """neox/, gpt2/: tiny models with a tokenizer; data.jsonl."""
    folder = tmp_path_factory.mktemp("train")
    for kind in ("neox", "gpt2"):
        save_tiny(folder / kind, kind)
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


def make_request(inputs: Path, out: Path, **more: Any) -> TrainingRequest:
    given: dict[str, Any] = {
        "method": "none",
        "model": str(inputs / "neox"),
        "data": str(inputs / "data.jsonl"),
    }
    return TrainingRequest(
        **{**given, "out": out, "block": 32, "options": {"epochs": 2, "batch": 2}, **more}
    )


def silent(what: str, done: int, total: int) -> None:
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def test_it_trains_what_the_command_says(inputs: Path, tmp_path: Path, capsys: Said) -> None:
    out = tmp_path / "model"
    command = [
        "train",
        "none",
        "--model",
        str(inputs / "neox"),
        "--data",
        str(inputs / "data.jsonl"),
        "-o",
        str(out),
    ]
    command += ["-D", "epochs=2", "-D", "none.batch=2", "--block", "32", "--user-column", "who"]
    check_command(*command)
    assert "12 records of 3 users or groups" in capsys.readouterr().out
    before, after = weights(inputs / "neox"), weights(out)
    assert all(not torch.equal(before[name], after[name]) for name in before if "embed" in name)
    record = json.loads((out / "training.json").read_text())
    assert record["finished"] and record["configuration"]["options"] == {
        "epochs": 2,
        "batch": 2,
        "learning_rate": 1e-4,
    }
    assert not (out / "checkpoint.pt").exists() and (out.stat().st_mode & 0o777) == 0o700
    check_command(*command)
    assert "already trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "options"),
    [("none", {}), ("dp-sgd", {"noise_multiplier": 3.0}), ("pmixed", {"members": 2})],
)
def test_the_record_holds_what_precedes_and_follows_each_record(
    inputs: Path, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    """The tests of each trainer show that it puts the end token there."""
    options = {"epochs": 1, "batch": 2, **options}
    request = make_request(inputs, tmp_path / "out", method=method, options=options)
    training.train_model_into_folder(request, silent)
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    end = AutoTokenizer.from_pretrained(inputs / "neox").eos_token_id
    assert record["tokens_before_each_record"] == record["tokens_after_each_record"] == [end]
    assert read_recorded_prefix(tmp_path / "out") == (end,)


def test_data_comes_as_prefix_and_suffix_or_text_in_any_format(tmp_path: Path) -> None:
    joined = [row["prefix"] + row["suffix"] for row in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    frame = pd.DataFrame({"note": joined, "who": range(12), "repeats": [1] * 11 + [3]})
    frame.to_csv(tmp_path / "b.csv", index=False)
    frame.to_parquet(tmp_path / "c.parquet")
    assert read_unit_texts(str(tmp_path / "a.jsonl")) == (joined, None)
    who = [str(i) for i in range(12)]
    for name in ("b.csv", "c.parquet"):
        # `repeats` says how often it is trained on
        copies = (
            joined + joined[-1:] * 2,
            [*who, "11", "11"],
        )
        assert read_unit_texts(str(tmp_path / name), "note", "who") == copies


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_lora_trains_an_adapter(inputs: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "adapter"
    training.train_model_into_folder(
        make_request(inputs, out, model=str(inputs / kind), lora=True), silent
    )
    assert (out / "adapter_model.safetensors").is_file() and not (
        out / "model.safetensors"
    ).exists()
    base, tuned = weights(inputs / kind), weights(out)
    changed = {name for name in tuned if "lora_B" in name and float(tuned[name].abs().max()) > 0}
    assert len(changed) == sum("lora_B" in name for name in tuned) > 4
    same = {name.replace(".base_layer", "") for name in tuned if "lora" not in name}
    assert same == set(base)


def test_an_interrupted_training_goes_on(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    training.train_model_into_folder(make_request(inputs, whole), silent)

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train_model_into_folder(make_request(inputs, tmp_path / "cut"), stop)
    assert (tmp_path / "cut" / "checkpoint.pt").stat().st_mode & 0o777 == 0o600
    epochs = count_calls(monkeypatch, finetune, "compute_causal_loss")
    training.train_model_into_folder(make_request(inputs, tmp_path / "cut"), silent)
    blocks = sum(len(ids) + 1 for ids in tokens(inputs)) // 32 + 1
    assert epochs() == -(-blocks // 2)  # one epoch of the two
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(tmp_path / "cut")[name], tensor, atol=1e-5, rtol=1e-4)


def tokens(inputs: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs / "neox")
    ids: list[list[int]] = tokenizer([row["prefix"] + row["suffix"] for row in ROWS])["input_ids"]
    return ids


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Callable[[], int]:
    calls: list[int] = []
    real = getattr(module, name)

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(module, name, counted)
    return lambda: len(calls)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "nine"}, "unknown training method 'nine'; did you mean 'none'"),
    "option": (
        {"options": {"epoch": 2}},
        "unknown option of training method none: 'epoch'; did you mean 'epochs'",
    ),
    "epochs": ({"options": {"epochs": 0}}, "expected epochs >= 1 and at most 100,000, got 0"),
    "endless": (
        {"options": {"epochs": 10**9}},
        "expected epochs >= 1 and at most 100,000, got 1,000,000,000",
    ),
    "rate": (
        {"options": {"learning_rate": 0}},
        "expected learning_rate > 0 and at most 1,000,000, got 0",
    ),
    "infinite rate": (
        {"options": {"learning_rate": float("inf")}},
        "learning_rate to be a finite number, got inf",
    ),
    "no rate": (
        {"options": {"learning_rate": float("nan")}},
        "learning_rate to be a finite number, got nan",
    ),
    "infinite rate of members": (
        {"method": "pmixed", "options": {"learning_rate": float("inf")}},
        "learning_rate to be a finite number, got inf",
    ),
    "diverged": (
        {"options": {"learning_rate": 1e5, "epochs": 8}},
        "its weights are not finite: lower learning_rate",
    ),
    "absurd rate": (
        {"options": {"learning_rate": 1e30}},
        "expected learning_rate > 0 and at most 1,000,000, got 1e+30",
    ),
    "seed": ({"seed": 2**70}, "expected --seed between 0 and 2^63 - 1"),
    "wide adapter": (
        {"lora": True, "lora_rank": 10**6},
        "a LoRA rank of at most the model's width of 32, got 1000000",
    ),
    "rank": ({"lora": True, "lora_rank": 0}, "expected a LoRA rank and alpha >= 1"),
    "block": ({"block": 1000}, "expected --block between 2 and the 96 positions"),
    "no such column": (
        {"text_column": "body"},
        "expected one column 'body', got prefix, suffix, who",
    ),
    "no such user column": (
        {"user_column": "user"},
        "expected one column 'user', got prefix, suffix, who",
    ),
    "no such model": ({"model": "/nowhere"}, "no such folder"),
    "no such data": ({"data": "nowhere.jsonl"}, "no such file"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_refusal_leaves_nothing_behind(
    inputs: Path, tmp_path: Path, case: tuple[dict[str, Any], str]
) -> None:
    more, sentence = case
    with pytest.raises(AuditError) as error:
        training.train_model_into_folder(make_request(inputs, tmp_path / "out", **more), silent)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_another_configuration_is_refused_by_what_differs(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    training.train_model_into_folder(make_request(inputs, out), silent)
    (tmp_path / "other.jsonl").write_text(json.dumps(ROWS[0]))
    for more, sentence in (
        ({"seed": 3}, "seed: 0 there, 3 now"),
        ({"options": {"epochs": 2, "batch": 4}}, "batch: 2 there, 4 now"),
        ({"data": str(tmp_path / "other.jsonl")}, "other records"),
        ({"lora": True}, "lora: None there, [8, 16] now"),
    ):
        with pytest.raises(AuditError, match="another configuration") as error:
            training.train_model_into_folder(make_request(inputs, out, **more), silent)
        assert sentence in str(error.value)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(AuditError, match="new or empty folder"):
        training.train_model_into_folder(make_request(inputs, tmp_path / "mine"), silent)


def test_a_method_that_has_changed_since_is_another_configuration(
    inputs: Path, tmp_path: Path
) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "out"
    mine.write_text("# a version\n")
    request = make_request(inputs, out, plugin=(str(mine),))
    training.train_model_into_folder(request, silent)
    assert "nothing was done" in training.train_model_into_folder(request, silent)[0]
    mine.write_text("# another version\n")
    with pytest.raises(AuditError, match=r"another configuration \(mine.py: '"):
        training.train_model_into_folder(request, silent)


def test_an_adapter_is_no_model_to_start_from(inputs: Path, tmp_path: Path) -> None:
    training.train_model_into_folder(make_request(inputs, tmp_path / "adapter", lora=True), silent)
    with pytest.raises(AuditError, match="is an adapter: give its base, or merge"):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "out", model=str(tmp_path / "adapter")), silent
        )


def test_a_frozen_model_is_refused() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(AuditError, match="frozen model: none of its 2 parameters"):
        finetune.list_trainable_parameters(model)


def test_a_folder_whose_name_no_tokenizer_can_write_is_refused_before_anything_is_there(
    inputs: Path, tmp_path: Path
) -> None:
    with pytest.raises(AuditError):
        training.train_model_into_folder(make_request(inputs, tmp_path / "model\udcff"), silent)
    assert not list(tmp_path.iterdir())


def test_a_promise_on_a_base_that_learnt_any_of_the_records_is_refused(
    inputs: Path, tmp_path: Path
) -> None:
    """Under another column of users, with a record left out, and two trainings ago."""
    rows = pd.DataFrame(ROWS)
    rows[1:].to_json(tmp_path / "fewer.jsonl", orient="records", lines=True)
    rows.assign(suffix=" red.").to_json(tmp_path / "others.jsonl", orient="records", lines=True)
    base, later = (tmp_path / name for name in ("base", "later"))
    others = str(tmp_path / "others.jsonl")
    training.train_model_into_folder(make_request(inputs, base), silent)
    training.train_model_into_folder(
        make_request(inputs, later, model=str(base), data=others), silent
    )

    def train_privately(model: Path, **more: Any) -> tuple[str, ...]:
        options = {"epochs": 1, "batch": 2, "noise_multiplier": 3.0}
        request = make_request(
            inputs,
            tmp_path / "private",
            **{"method": "dp-sgd", "model": str(model), "options": options, **more},
        )
        return training.train_model_into_folder(request, silent)

    with refuses(str(base), "12"):
        train_privately(base, user_column="who")
    with refuses(str(base), "11"):
        train_privately(base, data=str(tmp_path / "fewer.jsonl"))
    with refuses(str(base), "12"):
        train_privately(later)
    assert states(train_privately(base, data=others), str(base))
    (tmp_path / "others.jsonl").unlink()
    with refuses(str(later), others):
        train_privately(later)
