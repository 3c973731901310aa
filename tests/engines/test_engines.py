"""Engines: work is done once for each item, whoever is lost; guesses do not depend on who made them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from auditor.cli import call
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import from_json
from auditor.core.nouns import CellKey
from auditor.core.plan import Plan
from auditor.core.result import AuditResult
from auditor.engines.engine import LocalEngine
from auditor.engines.ray_engine import RayEngine
from auditor.records.folder import RunFolder
from tests.conftest import save_tiny

ray = pytest.importorskip("ray")


@dataclass(frozen=True)
class Squares:
    """At a place that is a number: (item, item squared plus it, whose process it was)."""

    wait: Path | None = None  # what the last item of each portion waits for
    portion: int = 4

    def at(self, place: int, items: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        for item in items:
            while item == items[-1] and self.wait is not None and not self.wait.exists():
                time.sleep(0.01)
            yield item, item**2 + place, os.getpid()


@dataclass(frozen=True)
class Refuses:
    error: type[Exception]
    portion: int = 1

    def at(self, place: int, items: Sequence[int]) -> Iterator[int]:
        yield items[0]
        raise self.error("expected an even number, got 1")


def seven() -> int:
    return 7


@pytest.fixture(scope="module", autouse=True)
def ours() -> Iterator[None]:
    """One small cluster for all of these tests: to start one takes seconds."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each worker would import torch for these toys
    ray.init(num_cpus=5, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(ours: None) -> Iterator[RayEngine]:
    engine = RayEngine(seven, 2)
    yield engine
    engine.close()


def test_every_item_is_worked_on_once_by_either_worker(cluster: RayEngine) -> None:
    found = list(cluster.stream(Squares(), range(21)))
    assert sorted(row[:2] for row in found) == [(i, i * i + 7) for i in range(21)]
    assert {pid for *_, pid in found} == set(cluster.pids())
    assert [row[:2] for row in LocalEngine(7).stream(Squares(), range(21))] == sorted(row[:2] for row in found)
    assert list(cluster.stream(Squares(), [])) == []


def test_an_item_goes_to_the_worker_that_has_had_it_before(cluster: RayEngine) -> None:
    first, second = ({i: pid for i, _, pid in cluster.stream(Squares(), range(9))} for _ in range(2))
    assert first == second


@pytest.mark.parametrize("error", [AuditError, NotApplicable])
def test_what_work_refuses_is_refused_here_in_its_own_words(cluster: RayEngine, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^expected an even number, got 1$"):
        list(cluster.stream(Refuses(error), [1, 2]))


def test_a_lost_worker_is_replaced_and_its_items_are_found_once(cluster: RayEngine, tmp_path: Path) -> None:
    """Killed while the last item of each portion of each worker is still to be found."""
    lost, gate = cluster.pids()[0], tmp_path / "open"
    stream = cluster.stream(Squares(gate), range(24))
    found = [next(stream) for _ in range(4)]
    os.kill(lost, signal.SIGKILL)
    gate.touch()
    found += stream
    assert sorted(row[:2] for row in found) == [(i, i * i + 7) for i in range(24)]
    assert lost not in cluster.pids()


def test_more_workers_than_the_cluster_has_room_for_are_refused(cluster: RayEngine) -> None:
    with pytest.raises(AuditError, match=r"^expected 4 free CPUs in the Ray cluster for this run, got 3$"):
        RayEngine(seven, 4).pids()


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on a tiny model of bytes, inside the claim and in the worst case, with a budget."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("model", "public"):
        save_tiny(folder / name)
    rows = [{"text": f"record {i * 7919 % 1000:03d} of somebody {i * 104729 % 977}"} for i in range(48)]
    for name, some in (("data", rows[:30]), ("nonmembers", rows[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    given = {name: str(folder / name) for name in ("model", "public")}
    given |= {name: str(folder / f"{name}.jsonl") for name in ("data", "nonmembers")}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    methods = ["--attack", "ethicist", "--attack", "perplexity", "--attack", "extraction-probability"]
    methods += ["-A", "epochs=1", "-A", "tune_on=public", "-A", "prompt_length=4"]
    sizes = ["--samples", "5", "--prefix-length", "10", "--suffix-length", "6", "--batch-size", "4"]
    return ["run", *flags, *methods, "--defense", "uniform-mixing", *sizes]


def held(folder: Path) -> tuple[AuditResult, dict[CellKey, dict[str, object]]]:
    result: AuditResult = from_json(AuditResult, json.loads((folder / "result.json").read_text()))
    run = RunFolder.reopen(folder)
    run.close()
    rows = {f.key: {**run.done(f.key), **run.observed(f.key)} for f in result.findings}
    return result, rows


def test_guesses_are_the_same_for_any_number_of_workers(asked: list[str], tmp_path: Path) -> None:
    assert call([*asked, "-o", str(tmp_path / "here")]) == 0
    mine, here = held(tmp_path / "here")
    for workers in ("1", "3"):
        out = tmp_path / workers
        assert call([*asked, "-o", str(out), "--engine", "ray", "--workers", workers]) == 0
        others, there = held(out)
        assert set(there) == set(here) and any(here.values())
        for key, rows in here.items():
            assert rows.keys() == there[key].keys()
            for secret, one in rows.items():
                other = there[key][secret]
                if hasattr(one, "ranked"):
                    assert [g.suffix for g in one.ranked] == [g.suffix for g in other.ranked]  # type: ignore[attr-defined]
                    assert one.drawn == other.drawn  # type: ignore[attr-defined]
                else:
                    assert one.values == pytest.approx(other.values, abs=1e-5, nan_ok=True)  # type: ignore[attr-defined]
        for one, other in zip(mine.targets, others.targets, strict=True):
            assert (one.claim and one.claim.spent_queries) == (other.claim and other.claim.spent_queries)
        for f, g in zip(mine.findings, others.findings, strict=True):
            assert [m.value for m in f.measurements] == pytest.approx([m.value for m in g.measurements], nan_ok=True)


@pytest.mark.parametrize("flag", [["--workers", "2"], ["--ray-address", "h:1"], ["--gpus-per-worker", "1"]])
def test_flags_of_a_cluster_go_with_one(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", *flag]) == 2
    assert f"{flag[0]} goes with --engine ray, got --engine local" in capsys.readouterr().err.replace("\n", " ")


def test_a_plan_says_who_did_the_work() -> None:
    assert Plan(engine="ray", workers=2).workers == 2
