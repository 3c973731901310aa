"""Families in use: each way of serving attacked end to end, and each method of training on five
architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from auditor.runs import training
from auditor.runs.training import TrainingRequest
from tests.conftest import check_command
from tests.zoo.families import TRAINED, save


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "data.jsonl"
    rows = [{"prefix": f"The code of door {i} is", "suffix": f" {i}{i}{i}."} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    "family", ["mamba2", "jamba", "gemma2", "openai-gpt"]
)  # cache, cache, slots, recompute
def test_an_audit_runs_end_to_end(family: str, data: Path, tmp_path: Path) -> None:
    save(tmp_path / "model", family)
    attack = ["--attack", "perplexity", "-A", "samples=2", "-o", str(tmp_path / "run")]
    check_command("run", "--model", tmp_path / "model", "--data", data, *attack)
    (result,) = tmp_path.glob("run/**/result.json")
    findings = json.loads(result.read_text())["findings"]
    assert any("recall" in str(finding["measurements"]) for finding in findings), findings


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "dp-sgd", "adp", "pmixed"])
@pytest.mark.parametrize("family", TRAINED)
def test_a_family_is_trained(family: str, method: str, data: Path, tmp_path: Path) -> None:
    save(tmp_path / "model", family)
    own = {
        "pmixed": {"members": 2},
        "dp-sgd": {"noise_multiplier": 1.0},
        "adp": {"noise_multiplier": 1.0},
    }
    options: dict[str, Any] = {
        "epochs": 1,
        "batch": 4,
        "learning_rate": 0.01,
        **own.get(method, {}),
    }
    asked = TrainingRequest(
        method=method,
        model=str(tmp_path / "model"),
        data=str(data),
        out=tmp_path / "out",
        block=48,
        options=options,
    )
    training.train_model_into_folder(asked, lambda what, done, total: None)
    assert json.loads((tmp_path / "out" / "training.json").read_text())["finished"]
