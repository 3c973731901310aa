"""A second process trains the lab's ensembles beside the target: the same weights, and nothing is
left running."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from contextlib import closing, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.benchmarks.lab import second_process
from auditor.benchmarks.lab.lab import Lab, name_ensemble
from auditor.benchmarks.lab.second_process import train_in_two_processes
from auditor.core import threads
from auditor.core.errors import AuditError
from auditor.core.safe_mode import safe_mode
from auditor.records.folder import RunFolder
from auditor.runs import site as sites
from auditor.runs.plan import make_plan
from auditor.runs.run import plan_audit, run_audit
from auditor.runs.site import Site
from tests.benchmarks.test_lab import TINY

_PATIENCE = 300  # seconds until a process counts as hung, on however busy a machine


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    # or `limit_torch_threads` would leave two
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(threads, "count_usable_processors", lambda: 2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The second processes."""
    found, start = list[subprocess.Popen[bytes]](), second_process._start_second_process

    def record(errors: Any) -> subprocess.Popen[bytes]:
        found.append(start(errors))
        return found[-1]

    monkeypatch.setattr(second_process, "_start_second_process", record)
    return found


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second process fails."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho Traceback >&2\necho no memory >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


def weights(lab: Lab) -> dict[str, bytes]:
    return {
        str(path.relative_to(lab.folder)): path.read_bytes()
        for path in sorted(lab.folder.rglob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights by one process."""
    lab = Lab(TINY, cache=tmp_path_factory.mktemp("alone"))
    lab.target_folder()
    lab.ensemble_folder()
    return weights(lab)


def test_the_second_process_trains_what_the_first_would_and_ends_by_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[subprocess.Popen[bytes]],
    alone: dict[str, bytes],
) -> None:
    """The target is not done before the ensemble is and its process has ended: each waits for
    nobody."""
    lab, train = Lab(TINY, cache=tmp_path), Lab.train_target_model

    def train_late(lab: Lab, path: Path) -> None:
        assert started[0].wait(_PATIENCE) == 0
        train(lab, path)

    monkeypatch.setattr(Lab, "train_target_model", train_late)
    monkeypatch.setattr(Lab, "train_ensemble_members", lambda *given, **named: 1 / 0)
    train_in_two_processes(lab, [None])
    assert weights(lab) == alone and not lab.notes
    assert len(alone) == 2 + TINY.members  # the public model, the target, the members


def test_the_steps_of_the_second_process_are_shown_while_the_first_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    shown = list[tuple[str, int, int]]()
    recipe, train = dataclasses.replace(TINY, members=8), Lab.train_target_model
    lab = Lab(recipe, cache=tmp_path, progress=lambda *step: shown.append(step))
    own = list[int]()

    def train_until_the_second_has_begun(lab: Lab, path: Path) -> None:
        train(lab, path)
        lock = lab.folder / f"{name_ensemble(recipe, None)}.lock"
        while not lock.exists() and started[0].poll() is None:
            time.sleep(0.01)
        own.append(len(shown))

    monkeypatch.setattr(Lab, "train_target_model", train_until_the_second_has_begun)
    monkeypatch.setattr(Lab, "train_ensemble_members", lambda *given, **named: 1 / 0)
    train_in_two_processes(lab, [None])
    steps = {step for step in shown[own[0] :] if "waiting" not in step[0]}
    assert steps and all("ensemble" in name and n <= total for name, n, total in steps)
    assert not any("ensemble" in name for name, *_ in shown[: own[0]])


@pytest.mark.parametrize(
    "why",
    [
        "one thread",
        "one processor",
        "safe mode",
        "target there",
        "ensemble there",
        "not made",
        "more threads",
    ],
)
def test_it_is_used_where_there_is_room_and_work_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any], why: str
) -> None:
    if why == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    elif why == "one processor":
        monkeypatch.setattr(threads, "count_usable_processors", lambda: 1)
    elif why == "more threads":
        monkeypatch.setattr(Lab, "threads", None)
    lab = Lab(TINY, cache=tmp_path)
    if why == "not made":
        lab = Lab(TINY, cache=tmp_path, makes=False)
    elif why == "target there":
        lab.target_folder()
    elif why == "ensemble there":
        lab.ensemble_folder()
    before = weights(lab)
    with safe_mode() if why == "safe mode" else nullcontext():
        train_in_two_processes(lab, [None])
    assert not started and weights(lab) == before


@pytest.mark.usefixtures("broken")
def test_the_first_process_does_what_the_second_fails_to(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    lab = Lab(TINY, cache=tmp_path)
    train_in_two_processes(lab, [None])
    assert weights(lab) == alone
    assert len(lab.notes) == 1 and "(no memory)" in lab.notes[0]


@pytest.mark.usefixtures("broken")
def test_an_error_of_both_processes_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise AuditError("expected a training that converges")

    monkeypatch.setattr(Lab, "train_ensemble_members", fail)
    with pytest.raises(AuditError, match="converges"):
        train_in_two_processes(Lab(TINY, cache=tmp_path), [None])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_it_ends_with_a_run_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[subprocess.Popen[bytes]],
    error: type[BaseException],
) -> None:
    def fail(lab: Lab, path: Path) -> None:
        assert started[0].poll() is None
        raise error

    monkeypatch.setattr(Lab, "train_public_model", fail)
    with pytest.raises(error):
        train_in_two_processes(Lab(TINY, cache=tmp_path), [None])
    assert started[0].returncode is not None


def test_it_ends_with_a_run_that_is_killed() -> None:
    """Of whom nothing is left but the end of a pipe."""
    read, written = os.pipe()

    def train() -> None:
        os.close(written)
        sys.stdin = os.fdopen(read)
        threading.Thread(target=second_process._exit_with_first_process, daemon=True).start()
        time.sleep(_PATIENCE)

    second = get_context("fork").Process(target=train)
    second.start()
    os.close(read)
    second.join(0.1)
    assert second.exitcode is None
    os.close(written)
    second.join(_PATIENCE)
    assert second.exitcode == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"defense": ["pmixed"]}, [{None}]),
        ({"defense": ["goldfish"]}, [set()]),
        ({"defense": ["pmixed"], "mitigation": {"method": "goldfish"}}, []),
    ],
    ids=str,
)
def test_a_run_trains_the_ensembles_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: list[Any]
) -> None:
    """First of all, and those alone: a mitigation takes all threads."""
    asked = list[Any]()
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        sites, "train_in_two_processes", lambda lab, counts: asked.append(set(counts))
    )
    monkeypatch.setattr(Site, "benchmark", property(lambda site: 1 / 0))
    recipe = {**dataclasses.asdict(TINY), "repeats": [[1, 3, 2], [4, 3, 2]]}
    planned = plan_audit(Site(make_plan({"lab_recipe": recipe, **fields}, {})))
    folder = RunFolder.create(tmp_path / "run", "lab", planned.site.plan.to_json())
    with closing(folder), pytest.raises(ZeroDivisionError):
        run_audit(planned, folder)
    assert asked == expected
