"""Engines: work is done once for each item, whoever is lost; guesses do not depend on who made them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from auditor.cli import call
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import from_json
from auditor.core.nouns import CellKey, Guesses
from auditor.core.plan import Plan
from auditor.core.result import AuditResult
from auditor.engines.engine import LocalEngine
from auditor.engines.ray_engine import AS_NICE, RayEngine
from auditor.records.folder import RunFolder
from auditor.runs.work import CellWork
from tests.conftest import save_tiny

ray = pytest.importorskip("ray")


@dataclass(frozen=True)
class Squares:
    """At a place that is a number: (item, item squared plus it, whose process it was)."""

    gate: Path | None = None  # what items wait for, from `since` on
    since: int = 0
    portion: int = 4

    def at(self, place: int, items: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        for item in items:
            while item >= self.since and self.gate is not None and not self.gate.exists():
                time.sleep(0.01)
            yield item, item**2 + place, os.getpid()


@dataclass(frozen=True)
class OpensLast:
    """The first item waits for a gate that the last one opens: (item, whose process it was)."""

    gate: Path
    last: int
    portion: int = 4

    def at(self, place: int, items: Sequence[int]) -> Iterator[tuple[int, int]]:
        for item in items:
            if item == self.last:
                self.gate.touch()
            while item == 0 and not self.gate.exists():
                time.sleep(0.01)
            yield item, os.getpid()


@dataclass(frozen=True)
class Refuses:
    error: type[Exception]
    portion: int = 1

    def at(self, place: int, items: Sequence[int]) -> Iterator[int]:
        yield items[0]
        raise self.error("expected an even number, got 1")


def seven() -> int:
    return 7


def nowhere() -> int:
    raise AuditError("expected a place, got none")


@pytest.fixture(scope="module", autouse=True)
def ours() -> Iterator[None]:
    """One small cluster for all of these tests: to start one takes seconds."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each worker would import torch for these toys
    small = {"num_cpus": 5, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(**small, _system_config=AS_NICE, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(ours: None) -> Iterator[RayEngine]:
    engine = RayEngine(2)
    engine.open(None, seven)
    yield engine
    engine.close()


def test_every_item_is_worked_on_once_by_either_worker(cluster: RayEngine) -> None:
    found, local = list(cluster.stream(Squares(), range(21))), LocalEngine()
    local.open(7, seven)
    assert sorted(row[:2] for row in found) == [(i, i * i + 7) for i in range(21)]
    assert {pid for *_, pid in found} == set(cluster.pids())
    assert [row[:2] for row in local.stream(Squares(), range(21))] == sorted(row[:2] for row in found)
    assert list(cluster.stream(Squares(), [])) == []


def test_an_item_goes_to_the_worker_that_has_had_it_before(cluster: RayEngine) -> None:
    first, second = ({i: pid for i, _, pid in cluster.stream(Squares(), range(9))} for _ in range(2))
    assert first == second


def test_whoever_is_free_takes_the_next_of_what_takes_long(cluster: RayEngine, tmp_path: Path) -> None:
    found = list(cluster.each(OpensLast(tmp_path / "open", last=5), range(6)))
    assert sorted(item for item, _ in found) == list(range(6))
    assert len({pid for item, pid in found if item}) == 1


@pytest.mark.parametrize("error", [AuditError, NotApplicable])
@pytest.mark.parametrize("how", ["stream", "each"])
def test_what_work_refuses_is_refused_here_in_its_own_words(
    cluster: RayEngine, how: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^expected an even number, got 1$"):
        list(getattr(cluster, how)(Refuses(error), [1, 2]))


def test_a_place_that_cannot_be_opened_is_refused_in_its_own_words(ours: None) -> None:
    with closing(RayEngine(1)) as engine:
        engine.open(None, nowhere)
        with pytest.raises(AuditError, match=r"^expected a place, got none$"):
            list(engine.stream(Squares(), range(2)))


@pytest.mark.parametrize("how", ["stream", "each"])
def test_a_lost_worker_is_replaced_and_its_items_are_found_once(cluster: RayEngine, how: str, tmp_path: Path) -> None:
    """Killed when three items are found and each worker has the next one in hand, in the middle of its portion."""
    lost, gate = cluster.pids()[0], tmp_path / "open"
    stream = getattr(cluster, how)(Squares(gate, since=3), range(24))
    rows = [next(stream) for _ in range(3)]
    os.kill(lost, signal.SIGKILL)
    gate.touch()
    rows += stream
    assert sorted(row[:2] for row in rows) == [(i, i * i + 7) for i in range(24)]
    assert lost not in cluster.pids()


@pytest.mark.parametrize(
    ("workers", "address", "gpus", "refusal"),
    [
        (4, "", 0, "expected 4 free CPUs in the Ray cluster for 4 workers, got 3"),
        (1, "", 0.5, "expected 0.5 free GPUs in the Ray cluster for 1 workers, got 0"),
    ],
)
def test_more_workers_than_the_cluster_has_room_for_are_refused(
    cluster: RayEngine, workers: int, address: str, gpus: float, refusal: str
) -> None:
    with pytest.raises(AuditError, match=f"^{re.escape(refusal)}$"):
        RayEngine(workers, address, gpus)


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on tiny models of bytes, inside the claim and in the worst case, with a budget that does not last."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("model", "public"):
        save_tiny(folder / name)
    rows = [{"text": f"record {i * 7919 % 1000:03d} of somebody {i * 104729 % 977}"} for i in range(48)]
    for name, some in (("data", rows[:30]), ("nonmembers", rows[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    given = {name: str(folder / name) for name in ("model", "public")}
    given |= {name: str(folder / f"{name}.jsonl") for name in ("data", "nonmembers")}
    members = ["-D", "members=2", "-D", "epochs=1", "--data", given["data"], "-o", str(folder / "ensemble")]
    assert call(["train", "pmixed", "--model", given["public"], *members]) == 0
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    methods = ["--attack", "ethicist", "--attack", "perplexity", "--attack", "zlib", "--attack", "claim-check"]
    methods += ["-A", "epochs=1", "-A", "tune_on=public", "-A", "prompt_length=4"]
    defenses = ["--defense", "uniform-mixing", "--defense", "pmixed", "-D", f"ensemble={folder / 'ensemble'}"]
    defenses += ["-D", "pmixed.queries=500", "-D", "pmixed.on_exhaustion=public"]
    sizes = ["--samples", "3", "--prefix-length", "10", "--suffix-length", "6", "--batch-size", "4"]
    return ["run", *flags, *methods, *defenses, *sizes]


def held(folder: Path) -> tuple[AuditResult, dict[CellKey, dict[str, object]]]:
    result: AuditResult = from_json(AuditResult, json.loads((folder / "result.json").read_text()))
    run = RunFolder.reopen(folder)
    run.close()
    rows = {f.key: {**run.done(f.key), **run.observed(f.key)} for f in result.findings}
    return result, rows


@pytest.fixture(scope="module")
def here(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By one process."""
    out = tmp_path_factory.mktemp("here") / "run"
    assert call([*asked, "-o", str(out)]) == 0
    return out


def test_guesses_and_ledgers_are_those_of_one_process_though_a_worker_is_lost(
    here: Path, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost in the middle of a cell inside the claim, whose budget does not last."""
    stream, killed = RayEngine.stream, list[int]()

    def deadly(engine: RayEngine, work: CellWork, items: Sequence[object]) -> Iterator[object]:
        for found in stream(engine, work, items):
            yield found
            if work.key == ("pmixed", "claim", "ethicist") and not killed:
                os.kill(pid := engine.pids()[0], signal.SIGKILL)
                killed.append(pid)

    monkeypatch.setattr(RayEngine, "stream", deadly)
    assert call([*asked, "-o", str(tmp_path / "run"), "--engine", "ray", "--workers", "2"]) == 0
    assert killed
    (mine, one), (others, other) = held(here), held(tmp_path / "run")
    assert set(one) == set(other) and all(one[f.key] for f in mine.findings if f.measurements)
    for key, rows in one.items():
        assert rows.keys() == other[key].keys()
        for secret, answer in rows.items():
            assert same(answer, other[key][secret])
    spent = {t.name: t.claim and t.claim.spent_queries for t in mine.targets}
    assert spent == {t.name: t.claim and t.claim.spent_queries for t in others.targets} and spent["pmixed"] == 500
    for f, g in zip(mine.findings, others.findings, strict=True):
        assert [m.name for m in f.measurements] == [m.name for m in g.measurements]
        assert [m.value for m in f.measurements] == pytest.approx([m.value for m in g.measurements], nan_ok=True)


def same(one: Any, other: Any) -> bool:
    """Guesses token for token, with what was drawn for them; what probes saw, but for rounding."""
    if isinstance(one, Guesses):
        return [g.suffix for g in one.ranked] == [g.suffix for g in other.ranked] and one.drawn == other.drawn
    return bool(one.values == pytest.approx(other.values, abs=1e-5, nan_ok=True))


@pytest.mark.parametrize("flag", [["--workers", "2"], ["--ray-address", "h:1"], ["--gpus-per-worker", "1"]])
def test_flags_of_a_cluster_go_with_one(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", *flag]) == 2
    assert f"{flag[0]} goes with --engine ray, got --engine local" in capsys.readouterr().err.replace("\n", " ")


def test_a_plan_says_who_did_the_work() -> None:
    assert Plan(engine="ray", workers=2).workers == 2
