"""Real loops under the whole test, and the command."""

from __future__ import annotations

import contextlib
import copy
import functools
import html
import json
import math
import multiprocessing
import queue
import shlex
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from opacus import privacy_engine
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp
from torch.testing._internal.distributed.fake_pg import FakeStore

from auditor.commands import dp_loop
from auditor.core.errors import AuditError
from auditor.crash import claim, report, training_specimen, trial, watch
from auditor.crash.checks import OWN_GRADIENT
from auditor.crash.checks_of_company import check_company_dependence
from auditor.crash.claim import LoopClaim
from auditor.crash.time_limit import list_training_processes, training_time_limit_context
from auditor.crash.training_specimen import SpecimenRecordGradients
from auditor.crash.trial import (
    CrashTest,
    ObservedLoop,
    bound_loop_epsilon,
    crash_test,
)
from auditor.crash.verdicts import BROKEN, NO_FAULT, LoopCheck, WatchedTrainings
from auditor.crash.watch import _project_out_record_gradients, run_watched_training
from auditor.privacy import gaussian
from auditor.statistics.audit_power import estimate_median_epsilon
from tests.conftest import check_command, refuses
from validation.trust import loop_faults, loop_packages, loop_plain, loop_variants
from validation.trust.loop_faults import _SLOW, written_out

ROOT = Path(__file__).parents[2]
IN_DIVIDED_COMPANY = trial._IN_DIVIDED_COMPANY
STEPS = 12  # of a whole test's trainings: two passes over the records


# of one order: Opacus asks for the same 150 after every training
ACCOUNTED_ONCE = functools.cache(rdp._compute_rdp)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two trainings, the one with a record fewer, a first step again, and two in company; our own
    model's layers written out.

    Opacus minimises over whole orders only: a fractional one takes thirty times as long.
    """
    monkeypatch.setattr(trial, "_ENOUGH", 1)
    monkeypatch.setattr(trial, "_IN_DIVIDED_COMPANY", 2)
    monkeypatch.setattr(trial, "_LEAST", 2)
    monkeypatch.setattr(rdp, "_compute_rdp", ACCOUNTED_ONCE)
    monkeypatch.setattr(RDPAccountant, "DEFAULT_ALPHAS", [*range(2, 64)])
    for module in (loop_packages, loop_plain, loop_variants):
        monkeypatch.setattr(module, "STEPS", STEPS)
    with written_out():
        yield


def judge_few_steps(loop: loop_plain.Loop) -> CrashTest:
    """Judge a loop of validation's tables, or one that counts its steps itself."""
    if isinstance(loop, loop_plain.Plain):
        loop = replace(loop, steps=STEPS, claim={**loop.claim, "steps": STEPS})
    return loop_faults.tested(loop)


def shorten_example(folder: Path, name: str) -> Path:
    """Copy an example, and what it may import, with fewer steps."""
    shutil.copytree(ROOT / "examples" / "dp_loop", folder, dirs_exist_ok=True)
    for script in folder.glob("*.py"):
        text = script.read_text()
        for many, few in (
            ("8, 30, 1 / 6", f"8, {STEPS}, 1 / 6"),
            ("8, 5\n", "8, 2\n"),
            ("1.0, 1.0, 5", "1.0, 1.0, 2"),
        ):
            text = text.replace(many, few)
        script.write_text(text)
    return folder / f"{name}.py"


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick accountant: no epsilon that is told is held against it."""
    monkeypatch.setattr(claim, "compute_claimed_epsilon", gaussian.compute_quick_rdp_epsilon)


def test_gradients_are_those_of_single_backward_passes() -> None:
    model, records = (
        training_specimen.build_tiny_specimen_model(0),
        training_specimen.Specimen(alike=False).make_crash_test_records(),
    )
    names = [name for name, _ in model.named_parameters()]
    weights = dict(model.named_parameters())
    with torch.no_grad():  # as a training may take its steps
        found = _SLOW(SpecimenRecordGradients(model, records), weights, [1, 5, 0], names)
    for row, record in enumerate((1, 5, 0)):
        ids = torch.tensor([records[record]["input_ids"]])
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
        for name, own in zip(
            names, torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(found[name][row], own, rtol=1e-4, atol=1e-6)


def test_a_record_is_known_wherever_its_row_is_read() -> None:
    records = training_specimen.Specimen(alike=False).make_crash_test_records()
    assert training_specimen.find_row_records(
        training_specimen.pad_specimen_tokens(records, [3, 0, 47])
    ) == [
        3,
        0,
        47,
    ]
    assert training_specimen.find_row_records(torch.tensor([[1, 2, 3]])) == [None]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("no clipping", "clipped by record"),
        ("Opacus 1.6.0 as it is: divides by the number of records", "number of records"),
        ("Opacus, shuffled and said so, with the epsilon that it tells", "accounting"),
        ("resumed with its seed anew", "fresh noise"),
        ("released gradients overflow in float16", "finite gradients"),
        ("ours, a resumed training's noise again", "fresh noise"),
        ("the best checkpoint by private records", "evaluation on private records"),
        ("an update by hand between two steps", "weights follow the steps"),
        ("a batch norm", "each record by itself"),
        ("padded to the longest of the batch, without a mask", "each record by itself"),
        ("a record alone in its batch not clipped", "every kind of record"),
        ("the last, smaller batch divided by its own size", "batch size stays secret"),
        ("empty batches left out", "empty batches"),
        ("a mean over the batch's records, not undone", "own gradient"),
        ("noise of a seed below 10,000", "secret noise"),
        ("the loss of a batch printed", "printed text"),
        ("Opacus, a mean over the tokens of the batch", "own gradient"),
        ("Opacus, a made-up record in an empty batch", "empty batches"),
    ],
)
@pytest.mark.usefixtures("quickly")
def test_a_planted_fault_is_caught(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if check == OWN_GRADIENT:
        monkeypatch.setattr(trial, "_IN_DIVIDED_COMPANY", IN_DIVIDED_COMPANY)
    else:
        monkeypatch.setattr(trial, "_train_companies", lambda *given: ())
    found = judge_few_steps(loop_faults.FAULTS[name])
    assert check in [one.name for one in found.broken_checks]
    assert found.verdict == "broken"


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("the batch clipped, not its records", "clipped by record"),
        ("bias of attention not in the norm", "one record's reach"),
        ("norms of every other number", "one record's reach"),
    ],
)
@pytest.mark.usefixtures("quickly")
def test_a_fault_that_shows_on_one_of_our_models_alone_is_caught(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_LEAST", len(training_specimen.SPECIMENS))
    monkeypatch.setattr(trial, "_train_companies", lambda *given: ())
    assert check in [one.name for one in judge_few_steps(loop_faults.FAULTS[name]).broken_checks]


def test_a_gradient_lies_by_a_tenth_in_each_tensor_of_one_of_our_models() -> None:
    """So one that is left out of the norm shows there."""
    most: dict[str, float] = {}
    for one in training_specimen.SPECIMENS:
        model = one.build_crash_test_model()
        weights = dict(model.named_parameters())
        found = SpecimenRecordGradients(
            model, one.make_crash_test_records()
        ).record_gradients_at_weights(weights, list(range(8)), list(weights))
        squares = {name: value.flatten(1).square().sum(1) for name, value in found.items()}
        whole = torch.stack(list(squares.values())).sum(0)
        most = {
            name: max(most.get(name, 0), float((own / whole).mean()))
            for name, own in squares.items()
        }
    assert min(most.values()) > 0.1, most


def test_a_mean_that_nothing_undoes_is_broken_under_random_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four trainings missed it under this seed: the batches' sizes vary little."""
    monkeypatch.setattr(trial, "_IN_DIVIDED_COMPANY", IN_DIVIDED_COMPANY)
    train = loop_plain.plain(
        {"sampling": "allocation"},
        summed=loop_variants._record_mean,
        drawn=loop_variants.allocate,
    )
    stated = LoopClaim(**train.claim)
    traces = trial._train_companies(functools.partial(run_watched_training, train), stated, 0)
    given = WatchedTrainings(stated, traces, traces[0], company=traces)
    assert check_company_dependence(given).verdict == BROKEN


def test_what_lies_outside_the_records_gradients_is_what_least_squares_leave() -> None:
    made = torch.Generator().manual_seed(0)
    sizes = [30, 12, 5]
    released, own = (
        torch.randn(47, generator=made).double(),
        torch.randn(47, 4, generator=made).double(),
    )
    own[:, 3] = own[:, 0]  # one direction less
    left, free, spread = _project_out_record_gradients(released, own, sizes)
    at = 0
    for size, dimensions in zip(sizes, free, strict=True):
        part, mine = released[at : at + size], own[at : at + size]
        solved = torch.linalg.lstsq(mine[:, :3], part).solution
        torch.testing.assert_close(left[at : at + size], part - mine[:, :3] @ solved)
        assert dimensions == size - 3 == pytest.approx(float(spread[at : at + size].square().sum()))
        at += size


def test_another_seed_is_another_draw_of_every_training() -> None:
    """Two seeds that shared trainings would tell the same chance twice."""
    own = [
        trial.derive_training_seed(seed, training)
        for seed in range(50)
        for training in range(trial._MOST + 1)
    ]
    assert len(set(own)) == len(own)


def test_a_bound_of_one_training_stands_beside_what_it_could_have_shown() -> None:
    honest, broken = (
        bound_loop_epsilon(functools.partial(run_watched_training, train), None, 5)
        for train in (loop_plain.plain(), loop_faults.FAULTS["no clipping"])
    )
    assert (
        honest.epsilon
        < honest.claimed
        == LoopClaim.from_stated_claim(loop_plain.CLAIM).compute_implied_epsilon()
    )
    assert (
        honest.canaries == broken.canaries == training_specimen.RECORDS
        and broken.right >= broken.guesses - 2
    )
    assert honest.epsilon < 1 < broken.epsilon < broken.best == honest.best
    # (noise multiplier, sampling rate and steps, delta) of the claim
    ceiling = estimate_median_epsilon(48, 1.0, (1 / 6, 30), 1e-3, 0.05)
    assert 0 < honest.ceiling == broken.ceiling == ceiling < honest.best


def test_the_ceiling_of_a_bound_is_of_poisson_sampling_and_is_said() -> None:
    claims = [{**loop_plain.CLAIM, "sampling": sampling} for sampling in ("poisson", "shuffled")]
    watch = functools.partial(run_watched_training, loop_plain.plain())
    bounds = [bound_loop_epsilon(watch, claim, 5) for claim in claims]
    tests: list[Any] = [SimpleNamespace(one_run=bound) for bound in bounds]
    of_poisson, of_shuffled = map(report.describe_one_run_bound, tests)
    said = f"if every guess were right, and about {bounds[0].ceiling:.2f} (median) if the loop is"
    assert said in of_poisson
    assert bounds[1].ceiling is None and "median" not in of_shuffled


def test_a_step_that_calls_its_base_class_counts_once_with_the_gradient_that_is_used() -> None:
    """As of pyvacy's DPSGD, which adds noise in `step`; torch hooks a base class's once one was
    made."""

    class Shifting(torch.optim.ASGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.grad.fill_(7.0)
            return super().step(closure)

    train = loop_plain.plain(
        steps=3, make_optimizer=lambda self, parameters, rate: Shifting(parameters.values(), rate)
    )
    trace, _ = run_watched_training(train, 1, 12, math.inf)
    assert len(trace.steps) == len(trace.released) == 3
    assert all(
        bool((value == 7.0).all()) for released in trace.released for value in released.values()
    )
    assert any(step.records for step in trace.steps)
    first = run_watched_training(train, 1, 12, math.inf, most=1)[0]
    assert bool((first.released[0]["lm_head.weight"] == 7.0).all()) and len(first.steps) == 1


def test_a_first_step_on_an_empty_batch_is_a_step() -> None:
    train = loop_plain.plain(steps=2, drawn=lambda self, step, n: [step] * step)
    first = run_watched_training(train, 1, 12, math.inf, most=1)[0]
    assert [step.records for step in first.steps] == [()] and first.steps[0].scale > 0


def test_a_later_training_whose_batches_are_all_empty_is_no_fault() -> None:
    """At a rate of 1%, ten steps read none of 48 records in one training of 120."""
    n_trainings = 0

    def train(model: Any, records: Any) -> Any:
        nonlocal n_trainings
        n_trainings += 1
        first = n_trainings == 1
        batches = loop_plain.plain(steps=2, drawn=lambda self, step, n: [step] * first)
        return batches(model, records)

    assert run_watched_training(train, 1, 12, math.inf)[0].measured_steps
    empty = run_watched_training(train, 1, 12, math.inf)[0]
    assert [step.records for step in empty.steps] == [(), ()]


def test_one_query_gives_the_gradients_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a training unfreezes a tensor: its steps before and after are queried apart."""
    query, counts = SpecimenRecordGradients.record_gradients_at_weights, list[int]()

    def count(own: Any, weights: Any, indices: list[int], names: list[str]) -> Any:
        if weights["lm_head.weight"].ndim == 3:  # weights of each record, as the watch asks
            counts.append(len(names))
        return query(own, weights, indices, names)

    monkeypatch.setattr(SpecimenRecordGradients, "record_gradients_at_weights", count)
    train = loop_plain.plain(steps=6, base=loop_variants.WithUnfreezing)
    together = run_watched_training(train, 1, 12, math.inf)[0].steps
    n_tensors = len(together[-1].tensor_ranges)
    assert counts == [n_tensors - 1, n_tensors]
    monkeypatch.setattr(watch, "_TOGETHER", 1)
    for step, single in zip(
        together, run_watched_training(train, 1, 12, math.inf)[0].steps, strict=True
    ):
        assert step.records == single.records and step.tensor_ranges == single.tensor_ranges
        np.testing.assert_allclose(step.norms, single.norms, rtol=1e-4)
        np.testing.assert_allclose(step.reaches, single.reaches, rtol=1e-3, atol=1e-3)


def test_a_training_in_several_processes_is_refused() -> None:
    """One of them is watched: the others' records would be taken for noise."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(AuditError, match="2 processes"):
            crash_test(loop_plain.plain(steps=2))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "plain, resumed with its generator",
        "plain, a model in bfloat16",
        "plain, a model in float16",
        "plain, its model read inside vmap",
        "plain, shuffled, with a smaller last batch",
        "plain, padded in front, with a mask",
        "plain, the mean of its weights given back",
        "plain, the released gradient printed",
        "random allocation",
        "a bound of 1 times the median norm",
        "Opacus, size public",
    ],
)
def test_an_honest_loop_has_no_fault(name: str) -> None:
    found = judge_few_steps(loop_faults.CONTROLS[name])
    assert found.verdict == "no fault seen" and found.epsilon is None


@pytest.mark.usefixtures("quickly")
def test_bounds_of_each_tensor_are_seen_on_one_of_our_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the others some tensors' gradients are shorter than their bounds."""
    monkeypatch.setattr(trial, "_LEAST", len(training_specimen.SPECIMENS))
    found = judge_few_steps(loop_faults.CONTROLS["a bound and noise for each tensor"])
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
    ("opacus_ways", "lora"): ("no fault seen", None),
    ("opacus_ways", "weighted"): ("broken", "once a step"),
    ("script", None): ("no fault seen", None),
    ("ours", "dp_sgd"): ("no fault seen", None),
    ("ours", "adp_sound"): ("no fault seen", None),
}


# Opacus's accountant is tight, so is what its epsilon is held against
TIGHTLY = {"opacus_ways": pytest.mark.accounted}


@pytest.mark.parametrize(
    ("name", "function"), [pytest.param(*one, marks=TIGHTLY.get(one[0], ())) for one in EXAMPLES]
)
def test_the_examples_are_judged_with_the_real_packages(
    name: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own verdict of each; an honest one has no epsilon beside its claim. Opacus solves for its
    noise once."""
    monkeypatch.chdir(tmp_path)  # a Trainer makes the folder of its model
    monkeypatch.setattr(
        privacy_engine, "get_noise_multiplier", functools.cache(privacy_engine.get_noise_multiplier)
    )
    verdict, broken = EXAMPLES[name, function]
    if name == "with_opake":
        pytest.importorskip("opake")  # in `dev` where it has a wheel
    script = shorten_example(tmp_path, name)
    found = loop_faults.tested(dp_loop._load_dp_loop_training_function(script, function))
    assert found.loop.steps == found.claim.steps <= STEPS
    assert found.verdict == verdict
    assert [check.name for check in found.broken_checks] == ([] if broken is None else [broken])
    assert found.loop.noise_multiplier is not None


def test_every_example_is_judged() -> None:
    # which the command runs
    written = {path.stem for path in (ROOT / "examples" / "dp_loop").glob("*.py")} - {"plain"}
    assert written == {name for name, _ in EXAMPLES}


def test_what_opacus_counted_is_the_claim_where_none_is_given() -> None:
    engine = SimpleNamespace(
        accountant=SimpleNamespace(history=[(1.1, 0.2, 30)]), get_epsilon=lambda delta: 100 * delta
    )
    found = trial.LoopClaim.from_stated_claim(
        {"engine": engine, "delta": 0.05, "max_grad_norm": 1.0}
    )
    assert (found.noise_multiplier, found.sample_rate, found.steps, found.epsilon) == (
        1.1,
        0.2,
        30,
        5.0,
    )
    assert (
        trial.LoopClaim.from_stated_claim(
            {"engine": engine, "delta": 0.05, "max_grad_norm": 1.0, "steps": 7}
        ).steps
        == 7
    )
    engine.accountant.history.append((0.5, 0.2, 1))
    for one in (engine, object()):
        with pytest.raises(AuditError):
            trial.LoopClaim.from_stated_claim({"engine": one, "delta": 0.05, "max_grad_norm": 1.0})


def test_at_least_thirty_faults_stand_in_the_table() -> None:
    assert len(loop_faults.FAULTS) >= 30


def ignores(model: Any, records: Any) -> Any:
    return model, loop_plain.CLAIM


def another(model: Any, records: Any) -> Any:
    return loop_plain.plain()(training_specimen.build_tiny_specimen_model(1), records)


def claims_nothing(model: Any, records: Any) -> Any:
    loop_plain.plain(steps=2)(model, records)
    return model


def without_noise(model: Any, records: Any) -> Any:
    loop_plain.plain(steps=2)(model, records)
    return model, {**loop_plain.CLAIM, "noise_multiplier": 0.0}


def gives_back_another(model: Any, records: Any) -> Any:
    loop_plain.plain(steps=2)(model, records)
    return copy.deepcopy(model), loop_plain.CLAIM


def not_again(model: Any, records: Any) -> Any:
    torch.seed()
    return loop_plain.plain(steps=2)(model, records)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (ignores, "saw 0 steps"),
        (another, "saw 0 steps"),
        (gives_back_another, "returned another one"),
        (not_again, "does not repeat"),
        (claims_nothing, "return"),
        (without_noise, "noise"),
        (loop_plain.plain(steps=1), "at least 2 steps"),
    ],
)
def test_what_cannot_be_tested_is_refused(train: Any, said: str) -> None:
    with pytest.raises(AuditError, match=said):
        crash_test(train)


def test_a_training_that_hangs_is_ended_and_so_is_what_it_started() -> None:
    """Though it goes on at any error, once."""
    started = []

    def hangs(model: Any, records: Any) -> Any:
        started.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)))
        started[0].start()
        started.append(subprocess.Popen(["sleep", "600"]))
        with contextlib.suppress(Exception):
            time.sleep(600)
        time.sleep(600)

    begun = time.monotonic()
    with pytest.raises(AuditError, match="budget"):
        crash_test(hangs, minutes=0.01)
    started[0].join(timeout=60)
    assert (
        not started[0].is_alive()
        and started[1].wait(timeout=60) < 0
        and time.monotonic() - begun < 120
    )
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_what_was_there_before_a_training_goes_on_and_so_does_what_it_starts_meanwhile() -> None:
    """As a browser, or a server that the user's program keeps."""
    before = subprocess.Popen(["sh", "-c", "sleep 0.5; sleep 600 & wait"])
    there = psutil.Process().children()  # and what other tests keep
    with contextlib.suppress(AuditError), training_time_limit_context(time.monotonic() + 2):
        time.sleep(60)
    parent = psutil.Process(before.pid)
    (child,) = parent.children()
    assert parent.is_running() and child.is_running() and list_training_processes(there) == []
    child.kill()
    before.kill()
    before.wait()


def test_a_training_that_nothing_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(dp_loop.os, "_exit", ended.put)
    with dp_loop._kill_process_if_block_exceeds(0.01):
        assert ended.get(timeout=60) == 2
    with dp_loop._kill_process_if_block_exceeds(0.2):
        pass
    time.sleep(0.3)
    assert ended.empty()


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 30.5), ("steps", "many"), ("delta", None), ("epsilon", "4"), ("epsilon", math.nan)],
)
def test_a_claim_of_other_kinds_of_values_is_refused(field: str, value: Any) -> None:
    with pytest.raises(AuditError, match=f"claim's {field}"):
        LoopClaim.from_stated_claim({**loop_plain.CLAIM, field: value})


def test_a_claim_in_numbers_of_numpy_is_accounted_and_written() -> None:
    plain = LoopClaim.from_stated_claim(loop_plain.CLAIM)
    given = {**loop_plain.CLAIM, "steps": np.int64(plain.steps)}
    given |= {"sample_rate": np.float32(plain.sample_rate), "delta": np.float32(plain.delta)}
    stated = LoopClaim.from_stated_claim(given)
    assert stated.compute_implied_epsilon() == pytest.approx(plain.compute_implied_epsilon())
    assert json.loads(json.dumps(vars(stated)))["steps"] == plain.steps


def test_a_training_longer_than_its_budget_is_ended() -> None:
    with pytest.raises(AuditError, match="budget"):
        crash_test(loop_plain.plain(), minutes=1e-6)


@pytest.mark.parametrize(("above", "doubted"), [(-0.1, False), (0.1, True)])
def test_no_fault_is_not_said_alone_beside_an_epsilon_above_the_claim(
    above: float, doubted: bool
) -> None:
    claim = LoopClaim.from_stated_claim(loop_plain.CLAIM)
    low = claim.compute_implied_epsilon() + above
    seen = ObservedLoop(0.9, 1 / 6, 30, low + 0.1, low, low + 0.2)
    found = CrashTest(
        claim, (LoopCheck(NO_FAULT, "", "", name="one record's reach"),), (), 1.0, seen
    )
    assert found.keep_named_checks(["one record's reach"]) == found
    with refuses("unknown check 'fresh nois'", "did you mean 'fresh noise'?"):
        found.keep_named_checks(["fresh nois"])
    assert found.exceeds_claim_without_fault == doubted
    assert (
        ("doubt" in report.write_crash_test_headline(found))
        == ("another --seed" in report.describe_observed_loop(found))
        == doubted
    )


def test_the_command_writes_its_reports_and_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, junit = tmp_path / "out", tmp_path / "checks.xml"
    script = shorten_example(tmp_path, "plain")
    check_command("dp-loop", script, "--gate", "-o", out, "--junit", junit)
    assert capsys.readouterr().out.startswith("RESULT  No fault seen")
    assert (
        "Every check" in (out / "dp-loop.html").read_text()
        and "| Check |" in (out / "dp-loop.md").read_text()
    )
    assert int(ET.fromstring(junit.read_text()).attrib["failures"]) == 0


def test_the_command_fails_a_broken_loop_and_says_how_to_see_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = shorten_example(tmp_path, "plain")
    script.write_text(script.read_text().replace("NOISE * CLIP * torch.randn_like(p)", "0"))
    junit, out = tmp_path / "checks.xml", tmp_path / "out"
    check_command("dp-loop", script, "--gate", "--junit", junit, "-o", out, code=1)
    suite = ET.fromstring(junit.read_text())
    assert int(suite.attrib["failures"]) >= 1
    for reason in (*suite.iter("failure"), *suite.iter("skipped")):
        assert (reason.text or "").startswith(reason.attrib["message"])
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
    for text in (
        said,
        (out / "dp-loop.md").read_text(),
        html.unescape((out / "dp-loop.html").read_text()),
    ):
        assert again in text
    check_command(*shlex.split(again)[1:], "--gate", code=1)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("BROKEN")] == [
        line for line in said.splitlines() if line.startswith("BROKEN  noise in every tensor")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "def other(model, records): ...",
        "raise ValueError('mine')",
        "def train(model, records): raise KeyError(1)",
        "def train(model, records): raise AssertionError('Torch not compiled with CUDA enabled')",
    ],
)
def test_a_file_that_cannot_be_run_is_refused(text: str, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(text)
    check_command("dp-loop", script, code=2)
    check_command("dp-loop", tmp_path / "none.py", code=2)


def test_an_unknown_check_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text("raise SystemExit('the script ran')")
    check_command("dp-loop", script, "--check", "fresh noise", "--check", "print text", code=2)
    assert "unknown check 'print text'; did you mean 'printed text'?" in capsys.readouterr().err
    check_command("dp-loop", script, "--check", "?", code=2)
    assert "known: Gaussian noise, Poisson sampling, accounting" in capsys.readouterr().err


def test_a_claim_reads_as_json_does(tmp_path: Path) -> None:
    assert (
        trial.LoopClaim.from_stated_claim(json.loads(json.dumps(loop_plain.CLAIM))).steps
        == loop_plain.CLAIM["steps"]
    )


def test_a_script_may_put_its_annotations_off_and_its_entry_be_partial(tmp_path: Path) -> None:
    """A dataclass looks its annotations up in the module that is loaded."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from __future__ import annotations\n"
        "import functools\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Recipe:\n    name: ClassVar[str] = 'r'\n    steps: int = 2\n"
        "def go(model, records):\n    return Recipe().steps\n"
        "train = functools.partial(go)\nmain = functools.partial(go, None, None)\n"
    )
    assert dp_loop._load_dp_loop_training_function(script, None)(None, []) == 2
    with refuses("int"):  # no bug of ours
        dp_loop._load_dp_loop_training_function(script, "main")
