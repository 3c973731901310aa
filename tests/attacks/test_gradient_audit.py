"""The gradient audit from end to end: a training that is what it says keeps its claim, one without
noise does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.attacks.gradient_audit import GradientAudit
from auditor.core.errors import NotApplicable
from auditor.core.plan import Plan
from auditor.core.result import Audited
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.runs.site import Site
from auditor.testing import KEPT
from auditor.training.dp_loop import ScaledOptimizer
from tests.conftest import check_command, refuses, save_tiny, states, tiny

ROWS = [{"text": f"The code of door {i} is {i * i * 7}."} for i in range(32)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    save_tiny(folder / "base")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


def trained(inputs: Path, name: str, *more: str, method: str = "dp-sgd") -> Path:
    """A tiny model, its gradient canaries in half of the batches: epsilon 2.6 as it is
    accounted."""
    recipe = ["epochs=5", "batch=16", "learning_rate=0.01", "gradient_canaries=400"]
    if method != "no-noise":
        recipe += ["noise_multiplier=3.0"]
    options = [word for option in (*recipe, *more) for word in ("-D", option)]
    data = ["--model", str(inputs / "base"), "--data", str(inputs / "data.jsonl"), "--block", "48"]
    check_command("train", method, *data, "-o", inputs / name, *options)
    return inputs / name


def audit(inputs: Path, out: Path, *more: str) -> dict[str, Any]:
    data = ["--data", str(inputs / "data.jsonl"), "--prefix-length", "4", "--suffix-length", "4"]
    check_command("run", *data, "--attack", "gradient-audit", "-o", out, *more)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def findings(result: dict[str, Any], target: str) -> dict[str, dict[str, Any]]:
    return {
        finding["setting"]: finding for finding in result["findings"] if finding["target"] == target
    }


def bound(finding: dict[str, Any]) -> dict[str, float]:
    return {measured["name"]: measured["value"] for measured in finding["measurements"]}


def test_a_training_that_is_what_it_says_keeps_its_claim(inputs: Path, tmp_path: Path) -> None:
    folder = trained(inputs, "honest")
    result = audit(inputs, tmp_path / "run", "--model", str(folder))
    found = findings(result, "undefended")
    claimed = next(t for t in result["targets"] if t["name"] == "undefended")["claim"]["epsilon"][
        "add_remove"
    ]
    worst = found["white-box"]
    assert 0 < bound(worst)["epsilon_lower_bound"] < claimed < bound(worst)["epsilon_best_provable"]
    audits = [Audited(**one) for one in worst["audits"]]
    assert [one.estimator for one in audits] == ["one_run", "fdp", "shape"]
    assert {(one.delta, one.relation, one.unit, one.canaries) for one in audits} == {
        (1e-5, "add_remove", "record", 400)
    }
    assert (
        worst["claim_applies"] is True
        and worst["violations"] == []
        and states(worst["notes"], "400")
    )
    assert states([found["text-only"]["not_applicable"]], "sampled")


def test_a_training_without_its_noise_contradicts_its_claim(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            ScaledOptimizer,
            "add_noise",
            lambda self: [setattr(p, "grad", p.summed_grad.to(p)) for p in self.params],
        )
        folder = trained(inputs, "silent")
    more = ["--model", str(inputs / "base"), "--defense", "dp-sgd", "-D", f"model={folder}"]
    result = audit(inputs, tmp_path / "run", *more)
    claimed = next(t for t in result["targets"] if t["name"] == "dp-sgd")["claim"]["epsilon"][
        "add_remove"
    ]
    finding = findings(result, "dp-sgd")["white-box"]
    assert bound(finding)["epsilon_lower_bound"] > 1.2 * claimed
    (seen,) = finding["violations"]
    assert "of the claimed standard deviation" in seen
    other = findings(result, "undefended")["white-box"]
    assert states([other["not_applicable"]], "canaries", "gradients")


@pytest.mark.parametrize("method", ["no-noise", "adp-sound"])
def test_every_training_by_clipped_gradients_can_be_audited(
    inputs: Path, tmp_path: Path, method: str
) -> None:
    folder = trained(inputs, method, method=method)
    options = ["-A", "delta=1e-4", "-A", "score=sum"]
    found = findings(
        audit(inputs, tmp_path / "run", "--model", str(folder), *options), "undefended"
    )["white-box"]
    certain = bound(found)["epsilon_lower_bound"] == pytest.approx(
        bound(found)["epsilon_best_provable"]
    )
    assert certain == (method == "no-noise") and found["audits"][0]["delta"] == 1e-4


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, ""),
        ({"releases": 11}, "the training released 11 noisy sums, and 10 are accounted for"),
        ({"unevenness": -7.0}, "too evenly for Poisson sampling, which the claim assumes"),
        ({"unevenness": -6.0}, ""),
        ({"unevenness": 50.0}, ""),
        ({"drawn": 100}, "units were drawn at a rate of 0.25, and 0.1 is accounted for"),
        ({"drawn": 50}, ""),
        (
            {"noise_size": 0.8},
            "the noise has 0.8 of the claimed standard deviation, over 640 of its values",
        ),
        ({"noise_size": 0.95}, ""),  # 640 values say no more of it
        ({"noise_size": 1.3}, ""),  # more noise breaks no claim
        ({"noise_repeated": 0.99}, "two steps have the same noise"),
        (
            {"noise_size": 4e-10, "noise_repeated": 0.99},
            "the noise has 4e-10 of the claimed standard deviation",
        ),
        (
            {"noise_repeated": 0.99, "noise_values": 160},
            "",
        ),  # 16 values a step may be alike by chance
    ],
)
def test_steps_that_are_not_what_they_are_said_to_be_are_violations(
    more: dict[str, Any], sentence: str
) -> None:
    probe, view = (
        GradientAudit(),
        View("target", tiny(), WHITE_BOX, 0, training=replace(KEPT, **more)),
    )
    secrets = probe.textless_subjects(view)
    found = probe.claim_violations(secrets, observe_all_secrets(probe, view, secrets))
    assert len(found) == bool(sentence) and all(sentence in one for one in found)


@pytest.mark.parametrize(
    ("kept", "facts"),
    [
        (
            replace(KEPT, included=(True, False), scores=(1.0, 0.0), sums=(1.0, 0.0)),
            ("canaries", "2"),
        ),
        (replace(KEPT, scores=(1.0,) * 40), ("scores", "1", "40")),
        (replace(KEPT, scores=(math.nan,) * 40), ("NaN", "40")),
    ],
)
def test_what_no_audit_can_be_made_of_is_said_in_its_row(
    kept: GradientCanaries, facts: tuple[str, ...]
) -> None:
    probe, view = GradientAudit(), View("target", tiny(), WHITE_BOX, 0, training=kept)
    secrets = probe.textless_subjects(view)
    with refuses(*facts, error=NotApplicable):
        probe.measurements(secrets, observe_all_secrets(probe, view, secrets))


def test_the_lab_plants_canaries_where_they_are_asked_about() -> None:
    def planted(*attacks: str) -> dict[str, Any]:
        site = Site(Plan.from_fields(attack=attacks, defense=("dp-sgd",)))
        return {
            name: options.get("gradient_canaries", 0)
            for name, options in site.default_defense_options.items()
        }

    assert set(planted("exposure").values()) == {0}
    assert {
        name for name, count in planted("exposure", "gradient-audit").items() if count == 1000
    } == {*("dp-sgd", "adp", "adp-sound", "no-noise")}
