"""Real loops under the whole test, and the command."""

from __future__ import annotations

import html
import json
import math
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from auditor.cli import call
from auditor.commands import dp_loop
from auditor.core.errors import AuditError
from auditor.crash import report, subject, trial
from auditor.crash.claim import LoopClaim
from auditor.crash.one_run import one_run
from auditor.crash.subject import Gradients
from auditor.crash.trial import CrashTest, LoopSeen, crash_test
from auditor.crash.verdicts import NO_FAULT, LoopCheck
from benchmarks.checks.trust import loop_faults

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_ENOUGH", 1)  # two trainings, and the one with a record fewer


def test_gradients_are_those_of_single_backward_passes() -> None:
    model, records = subject.model(0), subject.records(0)
    names = [name for name, _ in model.named_parameters()]
    found = Gradients(model, records).at(dict(model.named_parameters()), [1, 5, 0], names)
    for row, record in enumerate((1, 5, 0)):
        ids = torch.tensor([records[record]["input_ids"]])
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
        for name, own in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(found[name][row], own, rtol=1e-4, atol=1e-6)


def test_a_record_is_known_wherever_its_row_is_read() -> None:
    records = subject.records(0)
    assert subject.read(subject.padded(records, [3, 0, 47])) == [3, 0, 47]
    assert subject.read(torch.tensor([[1, 2, 3]])) == [None]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("no clipping", "clipped by record"),
        ("Opacus 1.6.0 as it is: divides by the number of records", "number of records"),
        ("Opacus, shuffled and said so, with the epsilon that it tells", "accounting"),
        ("resumed with its seed anew", "fresh noise"),
        ("released gradients overflow in float16", "finite gradients"),
        ("ours, a resumed training's noise again", "fresh noise"),
    ],
)
def test_a_planted_fault_is_caught(name: str, check: str) -> None:
    found = loop_faults.tested(loop_faults.FAULTS[name])
    assert check in [one.name for one in found.broken]
    assert found.verdict == "broken"


def test_another_seed_is_another_draw_of_every_training() -> None:
    """Two seeds that shared trainings would tell the same chance twice."""
    own = [trial.own_seed(seed, training) for seed in range(50) for training in range(trial._MOST + 1)]
    assert len(set(own)) == len(own)


def test_a_bound_of_one_training_stands_beside_what_it_could_have_shown() -> None:
    honest, broken = (
        one_run(train, None, 5, math.inf) for train in (loop_faults.plain(), loop_faults.FAULTS["no clipping"])
    )
    assert honest.epsilon < honest.claimed == pytest.approx(4.4, abs=0.05)
    assert honest.canaries == broken.canaries == subject.RECORDS and broken.right == broken.guesses
    assert honest.epsilon < 1 < broken.epsilon < broken.best == honest.best


def test_a_training_in_several_processes_is_refused() -> None:
    """One of them is watched: the others' records would be taken for noise."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(AuditError, match="2 processes"):
            crash_test(loop_faults.plain(steps=2))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "plain, resumed with its generator",
        "plain, a model in bfloat16",
        "plain, a model in float16",
        "plain, its model read inside vmap",
        "Opacus, size public",
    ],
)
def test_an_honest_loop_has_no_fault(name: str) -> None:
    found = loop_faults.tested(loop_faults.CONTROLS[name])
    assert found.verdict == "no fault seen" and found.epsilon is None


EXAMPLES = {
    ("with_opacus", "train"): ("broken", "number of records"),
    ("with_trainer", "train"): ("broken", "Poisson sampling"),
    ("with_sft", "train"): ("no fault seen", None),
    ("with_opake", "train"): ("no fault seen", None),
    ("opacus_ways", "with_epsilon"): ("no fault seen", None),
    ("opacus_ways", "ghost"): ("no fault seen", None),
    ("opacus_ways", "small_batches"): ("no fault seen", None),
    ("opacus_ways", "shuffled"): ("no fault seen", None),
    ("ours", "dp_sgd"): ("no fault seen", None),
    ("ours", "adp_sound"): ("no fault seen", None),
}


@pytest.mark.parametrize(("name", "function"), EXAMPLES)
def test_the_examples_are_judged_with_the_real_packages(name: str, function: str) -> None:
    """Its own verdict of each; an honest one has no epsilon beside its claim."""
    verdict, broken = EXAMPLES[name, function]
    if name == "with_opake":
        pytest.importorskip("opake")  # in `dev` where it has a wheel
    found = loop_faults.tested(dp_loop._named(ROOT / "examples" / "dp_loop" / f"{name}.py", function))
    assert found.verdict == verdict
    assert [check.name for check in found.broken] == ([] if broken is None else [broken])
    assert found.seen.noise_multiplier is not None


def test_every_example_is_judged() -> None:
    written = {path.stem for path in (ROOT / "examples" / "dp_loop").glob("*.py")} - {"plain"}  # which the command runs
    assert written == {name for name, _ in EXAMPLES}


def test_what_opacus_counted_is_the_claim_where_none_is_given() -> None:
    engine = SimpleNamespace(
        accountant=SimpleNamespace(history=[(1.1, 0.2, 30)]), get_epsilon=lambda delta: 100 * delta
    )
    found = trial.LoopClaim.read({"engine": engine, "delta": 0.05, "max_grad_norm": 1.0})
    assert (found.noise_multiplier, found.sample_rate, found.steps, found.epsilon) == (1.1, 0.2, 30, 5.0)
    assert trial.LoopClaim.read({"engine": engine, "delta": 0.05, "max_grad_norm": 1.0, "steps": 7}).steps == 7
    engine.accountant.history.append((0.5, 0.2, 1))
    for one in (engine, object()):
        with pytest.raises(AuditError):
            trial.LoopClaim.read({"engine": one, "delta": 0.05, "max_grad_norm": 1.0})


def test_at_least_thirty_faults_stand_in_the_table() -> None:
    assert len(loop_faults.FAULTS) >= 30


def ignores(model: Any, records: Any) -> Any:
    return model, loop_faults.CLAIM


def another(model: Any, records: Any) -> Any:
    return loop_faults.plain()(subject.model(1), records)


def claims_nothing(model: Any, records: Any) -> Any:
    loop_faults.plain(steps=2)(model, records)
    return model


def without_noise(model: Any, records: Any) -> Any:
    loop_faults.plain(steps=2)(model, records)
    return model, {**loop_faults.CLAIM, "noise_multiplier": 0.0}


@pytest.mark.parametrize("train", [ignores, another, claims_nothing, without_noise])
def test_what_cannot_be_tested_is_refused(train: Any) -> None:
    with pytest.raises(AuditError):
        crash_test(train)


def test_a_training_longer_than_its_budget_is_ended() -> None:
    with pytest.raises(AuditError, match="budget"):
        crash_test(loop_faults.plain(), minutes=1e-6)


def shorter(folder: Path) -> Path:
    """The example with a third of its steps."""
    script = folder / "mine.py"
    text = (ROOT / "examples" / "dp_loop" / "plain.py").read_text()
    assert "STEPS, RATE = 1.0, 1.0, 8, 30, 1 / 6" in text
    script.write_text(text.replace("8, 30, 1 / 6", "8, 10, 1 / 6"))
    return script


@pytest.mark.parametrize(("above", "doubted"), [(-0.1, False), (0.1, True)])
def test_no_fault_is_not_said_alone_beside_an_epsilon_above_the_claim(above: float, doubted: bool) -> None:
    claim = LoopClaim.read(loop_faults.CLAIM)
    low = claim.implied_epsilon() + above
    seen = LoopSeen(0.9, 1 / 6, 30, low + 0.1, low, low + 0.2)
    found = CrashTest(claim, (LoopCheck("one record's reach", NO_FAULT, "", ""),), (), 1.0, seen)
    assert found.doubted == doubted
    assert ("doubt" in report.headline(found)) == ("another --seed" in report.observed(found)) == doubted


def test_the_command_writes_its_reports_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, junit = tmp_path / "out", tmp_path / "checks.xml"
    script = shorter(tmp_path)
    assert call(["dp-loop", str(script), "--gate", "-o", str(out), "--junit", str(junit)]) == 0
    assert capsys.readouterr().out.startswith("RESULT  No fault seen")
    assert "Every check" in (out / "dp-loop.html").read_text() and "| Check |" in (out / "dp-loop.md").read_text()
    assert int(ET.fromstring(junit.read_text()).attrib["failures"]) == 0


def test_the_command_fails_a_broken_loop_and_says_how_to_see_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = shorter(tmp_path)
    script.write_text(script.read_text().replace("NOISE * CLIP * torch.randn_like(p)", "0"))
    junit, out = tmp_path / "checks.xml", tmp_path / "out"
    assert call(["dp-loop", str(script), "--gate", "--junit", str(junit), "-o", str(out)]) == 1
    assert int(ET.fromstring(junit.read_text()).attrib["failures"]) >= 1
    found = json.loads((out / "dp-loop.json").read_text())
    assert found["verdict"] == "broken" and found["seen"]["epsilon"] == "unbounded"
    assert 0 <= found["one_run"]["epsilon"] <= found["one_run"]["best"]
    (broken,) = (check for check in found["checks"] if check["name"] == "noise in every tensor")
    again, *facts = broken["reproduction"].splitlines()
    assert again == f"audit dp-loop {script} --seed 0 --check 'noise in every tensor'"
    assert [fact.split()[0] for fact in facts] == [
        "check",
        "where",
        "measured",
        "expected",
        "epsilon",
        "loop",
        "versions",
    ]
    said = capsys.readouterr().out
    for text in (said, (out / "dp-loop.md").read_text(), html.unescape((out / "dp-loop.html").read_text())):
        assert again in text
    assert call([*shlex.split(again)[1:], "--gate"]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("BROKEN")] == [
        line for line in said.splitlines() if line.startswith("BROKEN  noise in every tensor")
    ]
    assert call(["dp-loop", str(script), "--check", "noise"]) == 2


@pytest.mark.parametrize(
    "text",
    ["def other(model, records): ...", "raise ValueError('mine')", "def train(model, records): raise KeyError(1)"],
)
def test_a_file_that_cannot_be_run_is_refused(text: str, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(text)
    assert call(["dp-loop", str(script)]) == 2
    assert call(["dp-loop", str(tmp_path / "none.py")]) == 2


def test_a_claim_reads_as_json_does(tmp_path: Path) -> None:
    assert trial.LoopClaim.read(json.loads(json.dumps(loop_faults.CLAIM))).steps == loop_faults.STEPS
