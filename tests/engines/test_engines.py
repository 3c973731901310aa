"""Engines: work is done once for each item, whoever is lost; guesses do not depend on who made
them."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from auditor import audit
from auditor.benchmarks.data import large_tables
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.large_tables import (
    BlockCounts,
    BlockHashing,
    TableBlock,
    TableCounting,
)
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import from_json
from auditor.core.nouns import CellKey, Guesses, Query, Secret
from auditor.core.plan import Plan
from auditor.core.plan_parts import EngineOptions, LoadingOptions
from auditor.core.result import AuditResult
from auditor.core.secret_table import SecretTable, build_secret_table
from auditor.engines import ray_engine
from auditor.engines.engine import Engine, Work
from auditor.engines.ray_engine import AS_NICE, RayEngine, _find_raylet_process_ids
from auditor.models import loading, self_check
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.records.folder import RunFolder
from auditor.runs import run, targets, training
from auditor.runs.cells import CellWork
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.runs.targets import Targets, WorkerTargets, sort_by_lengths
from auditor.studies import sweep
from tests.conftest import check_command, read_files, save_tiny, tiny

ray = pytest.importorskip("ray")


@dataclass(frozen=True)
class Squares:
    """At a place that is a number: (item, item squared plus it, whose process it was)."""

    gate: Path | None = None  # what items wait for, from `since` on
    since: int = 0
    portion: int = 4

    def process_items(self, place: int, items: Sequence[int]) -> Iterator[tuple[int, int, int]]:
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

    def process_items(self, place: int, items: Sequence[int]) -> Iterator[tuple[int, int]]:
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

    def process_items(self, place: int, items: Sequence[int]) -> Iterator[int]:
        yield items[0]
        raise self.error("expected an even number, got 1")


@dataclass(frozen=True)
class Processes:
    portion: int = 1

    def process_items(self, place: Any, items: Sequence[int]) -> Iterator[int]:
        yield os.getpid()


def worker_process_ids(engine: RayEngine) -> list[int]:
    """The process of each worker."""
    work, workers = ray.put(Processes()), engine._start_worker_pool()
    return [
        pid
        for (pid,) in ray.get(
            [
                worker.collect_work_results.remote(engine._make_place, work, [0])
                for worker in workers
            ]
        )
    ]


def seven() -> int:
    return 7


def eight() -> int:
    return 8


def nowhere() -> int:
    raise AuditError("expected a place, got none")


@pytest.fixture(scope="module", autouse=True)
def ours() -> Iterator[None]:
    """One small cluster for all of these tests: to start one takes seconds."""
    # or each worker would import torch for these toys
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    small = {"num_cpus": 5, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(**small, _system_config=AS_NICE, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(ours: None) -> Iterator[RayEngine]:
    engine = RayEngine(2)
    engine.set_work_context(None, seven)
    yield engine
    engine.close()


def test_the_raylet_of_a_cluster_that_was_there_before_is_watched_too() -> None:
    """`--ray-address` reaches it through the one on this machine, whose loss Ray would end with 1,
    a gate's word."""
    (pid,) = _find_raylet_process_ids(ray.get_runtime_context().get_node_id())
    assert psutil.Process(pid).name() == "raylet" and not _find_raylet_process_ids("0" * 56)


def test_every_item_is_worked_on_once_by_either_worker(cluster: RayEngine) -> None:
    found, local = list(cluster.stream_results(Squares(), range(21))), Engine()
    local.set_work_context(7, seven)
    assert sorted(row[:2] for row in found) == [(i, i * i + 7) for i in range(21)]
    assert {pid for *_, pid in found} == set(worker_process_ids(cluster))
    assert [row[:2] for row in local.stream_results(Squares(), range(21))] == sorted(
        row[:2] for row in found
    )
    assert list(cluster.stream_results(Squares(), [])) == []


def test_an_item_goes_to_the_worker_that_has_had_it_before(cluster: RayEngine) -> None:
    first, second = (
        {i: pid for i, _, pid in cluster.stream_results(Squares(), range(9))} for _ in range(2)
    )
    assert first == second


def test_a_worker_lives_on_when_its_place_changes() -> None:
    """It has imported torch and joined the cluster, which takes longer than to load a model."""
    with closing(RayEngine(1)) as engine:
        before = list(engine.stream_results(Processes(), [0]))
        for place, value in ((seven, 7), (eight, 8)):
            engine.set_work_context(None, place)
            assert list(engine.stream_results(Squares(), [3])) == [(3, 9 + value, *before)]


def test_a_worker_that_cannot_load_ahead_reports_what_a_later_task_reports() -> None:
    with closing(RayEngine(1)) as engine:
        engine.load_ahead(nowhere)
        engine.set_work_context(None, seven)
        assert [row[:2] for row in engine.stream_results(Squares(), [3])] == [(3, 16)]


def test_a_slow_worker_delays_no_other_and_changes_no_result(
    cluster: RayEngine, tmp_path: Path
) -> None:
    """It has not finished its first item when the other one has finished all portions."""
    found = list(cluster.stream_results(OpensLast(tmp_path / "open", last=39), range(40)))
    assert sorted(item for item, _ in found) == list(range(40))
    assert len({pid for item, pid in found if item // 4 % 2}) == 1


def test_neighbours_go_to_the_same_worker(cluster: RayEngine) -> None:
    """Equally long texts are neighbours, and share batches only at the same worker."""
    found = sorted(cluster.stream_results(Squares(), range(32)))
    owners = [pid for *_, pid in found]
    assert all(len({*owners[start : start + 4]}) == 1 for start in range(0, 32, 4))
    assert owners[:4] != owners[4:8] and owners.count(owners[0]) == 16
    few = list(cluster.stream_results(Squares(), range(2)))
    assert len({pid for *_, pid in few}) == 2


def test_equally_long_texts_and_windows_of_a_text_follow_each_other() -> None:
    text = tuple(range(9))
    secrets = [
        Secret("a", (1, 2, 3), (4, 5)),
        Secret("w1", text[:2], text[2:4]),
        Secret("w2", text[:4], text[4:9]),
        Secret("b", (1,), (2,)),
        Secret("c", (6, 7, 8), (9, 5)),
    ]
    assert [secret.id for secret in sort_by_lengths(secrets)] == ["b", "a", "c", "w1", "w2"]
    table = sort_by_lengths(build_secret_table(secrets))
    assert isinstance(table, SecretTable) and table.ids.tolist() == ["b", "a", "c", "w1", "w2"]
    queries = [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]
    assert [query.id for query in sort_by_lengths(queries)][:3] == ["b", "a", "c"]


def test_only_a_few_portions_are_sent_ahead(
    cluster: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent waits in memory, and Ray looks through all of it for each result."""
    sent = list[int]()
    join = ray_engine._join_runs_into_portions

    def record_portions(*args: Any) -> Iterator[list[int]]:
        for portion in join(*args):
            sent.extend(portion)
            yield portion

    monkeypatch.setattr(ray_engine, "_join_runs_into_portions", record_portions)
    stream = cluster.stream_results(Squares(), range(400))
    for n_found, _ in enumerate(stream, 1):
        assert len(sent) <= n_found + 16  # two portions of four for each of two workers
    assert sorted(sent) == list(range(400))


def test_workers_of_another_version_or_without_the_folder_are_refused(
    ours: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RayEngine(1)) as engine, monkeypatch.context() as patch:
        patch.setattr(ray_engine, "__version__", "0.0.0")
        with pytest.raises(AuditError, match=r"^expected audit 0\.0\.0 on every worker, got "):
            list(engine.stream_results(Squares(), range(2)))
    with closing(RayEngine(1)) as engine:
        monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "gone"))
        with pytest.raises(AuditError, match=r"^expected the folder '.*gone' on every worker"):
            list(engine.stream_results(Squares(), range(2)))


def test_whoever_is_free_takes_the_next_of_what_takes_long(
    cluster: RayEngine, tmp_path: Path
) -> None:
    found = list(cluster.stream_long_results(OpensLast(tmp_path / "open", last=5), range(6)))
    assert sorted(item for item, _ in found) == list(range(6))
    assert len({pid for item, pid in found if item}) == 1


@pytest.mark.parametrize("error", [AuditError, NotApplicable])
@pytest.mark.parametrize("how", ["stream_results", "stream_long_results"])
def test_what_work_refuses_is_refused_here_in_its_own_words(
    cluster: RayEngine, how: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^expected an even number, got 1$"):
        list(getattr(cluster, how)(Refuses(error), [1, 2]))


def test_a_place_that_cannot_be_opened_is_refused_in_its_own_words(ours: None) -> None:
    with closing(RayEngine(1)) as engine:
        engine.set_work_context(None, nowhere)
        with pytest.raises(AuditError, match=r"^expected a place, got none$"):
            list(engine.stream_results(Squares(), range(2)))


@pytest.mark.parametrize("how", ["stream_results", "stream_long_results"])
def test_a_lost_worker_is_replaced_and_its_items_are_found_once(
    cluster: RayEngine, how: str, tmp_path: Path
) -> None:
    """Killed when three items are found and each worker has the next one in hand, in the middle of
    its portion."""
    lost, gate = worker_process_ids(cluster)[0], tmp_path / "open"
    stream = getattr(cluster, how)(Squares(gate, since=3), range(24))
    rows = [next(stream) for _ in range(3)]
    os.kill(lost, signal.SIGKILL)
    gate.touch()
    rows += stream
    assert sorted(row[:2] for row in rows) == [(i, i * i + 7) for i in range(24)]
    assert lost not in worker_process_ids(cluster)


@pytest.mark.parametrize(
    ("workers", "address", "gpus", "refusal"),
    [
        (4, "", 0, "expected 4 free CPUs in the Ray cluster for 4 workers, got 3"),
        (6, "", 0, "expected 6 free CPUs in the Ray cluster for 6 workers, got 5"),
        (1, "", 0.5, "expected 0.5 free GPUs in the Ray cluster for 1 workers, got 0"),
    ],
)
def test_more_workers_than_the_cluster_has_room_for_are_refused(
    cluster: RayEngine,
    workers: int,
    address: str,
    gpus: float,
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(worker_process_ids(cluster)) == 2
    RayEngine(3).close()  # waits until those of the tests before are gone
    monkeypatch.setattr(ray_engine, "PATIENCE", 0.0)
    with pytest.raises(AuditError, match=f"^{re.escape(refusal)}$"):
        RayEngine(workers, address, gpus)


# --- a run ---


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on tiny models of bytes."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("model", "public"):
        save_tiny(folder / name)
    rows = [
        {"text": f"record {i * 7919 % 1000:03d} of somebody {i * 104729 % 977}"} for i in range(48)
    ]
    for name, some in (("data", rows[:30]), ("nonmembers", rows[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    given = {name: str(folder / name) for name in ("model", "public")}
    given |= {name: str(folder / f"{name}.jsonl") for name in ("data", "nonmembers")}
    sizes = ["--samples", "3", "--prefix-length", "10", "--suffix-length", "6", "--batch-size", "4"]
    return [
        "run",
        *(part for name, value in given.items() for part in (f"--{name}", value)),
        *sizes,
    ]


@pytest.fixture(scope="module")
def run_words(own: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Inside the claim and in the worst case, with a budget that does not last."""
    ensemble = str(tmp_path_factory.mktemp("members") / "ensemble")
    data, public = (own[own.index(flag) + 1] for flag in ("--data", "--public"))
    members = ["-D", "members=2", "-D", "epochs=1", "--data", data, "-o", ensemble]
    check_command("train", "pmixed", "--model", public, *members)
    methods = [
        "--attack",
        "ethicist",
        "--attack",
        "perplexity",
        "--attack",
        "zlib",
        "--attack",
        "claim-check",
    ]
    methods += ["-A", "epochs=1", "-A", "tune_on=public", "-A", "prompt_length=4"]
    defenses = ["--defense", "uniform-mixing", "--defense", "pmixed", "-D", f"ensemble={ensemble}"]
    defenses += ["-D", "pmixed.queries=500", "-D", "pmixed.on_exhaustion=public"]
    return [*own, *methods, *defenses]


def held(folder: Path) -> tuple[AuditResult, dict[CellKey, dict[str, object]]]:
    result: AuditResult = from_json(AuditResult, json.loads((folder / "result.json").read_text()))
    run = RunFolder.reopen(folder)
    run.close()
    rows = {
        f.cell_key: {
            **run.guesses.finished_secrets(f.cell_key),
            **run.observations.finished_secrets(f.cell_key),
        }
        for f in result.findings
    }
    return result, rows


@pytest.fixture(scope="module")
def here(run_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By one process."""
    out = tmp_path_factory.mktemp("here") / "run"
    check_command(*run_words, "-o", out)
    return out


def test_a_lost_cluster_and_a_lost_worker_change_nothing(
    here: Path, run_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run loses its cluster when it has its first guesses, which ends it with 3 and a sentence
    (Ray: with 1, as a gate that failed); gone on with, it loses a worker in a cell whose budget
    does not last.
    """
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "auditor.cli",
        *run_words,
        "-o",
        str(out),
        "--engine",
        "ray",
        "--workers",
        "1",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["TMPDIR"] = str(tmp_path)  # too long for the path of a socket below it
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
    ) as driver:
        while not ((guesses := out / "guesses.jsonl").exists() and guesses.stat().st_size):
            assert driver.poll() is None, driver.stderr and driver.stderr.read().decode()
            time.sleep(0.01)
        raylet = next(
            one
            for one in psutil.Process(driver.pid).children(recursive=True)
            if one.name() == "raylet"
        )
        (session,) = (
            word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--session_dir=")
        )
        above, mode = Path(session).parents[1], raylet.environ()["RAY_AUTH_MODE"]
        assert stat.S_IMODE(above.stat().st_mode) == 0o700 and above.name.startswith(
            ".r.audit-scratch-"
        )
        assert mode == "token"  # nobody else on this machine is told anything
        raylet.kill()
        assert driver.stderr is not None
        said = driver.stderr.read().decode()
    assert driver.returncode == 3, said
    assert "a process of the Ray cluster of this machine was lost" in said
    assert not (out / "result.json").exists()
    stream, killed = RayEngine.stream_results, list[int]()

    def deadly(engine: RayEngine, work: Work, items: Sequence[object]) -> Iterator[object]:
        for found in stream(engine, work, items):
            yield found
            is_cell = isinstance(work, CellWork)
            if is_cell and work.key == ("pmixed", "text-only", "ethicist") and not killed:
                os.kill(pid := worker_process_ids(engine)[0], signal.SIGKILL)
                killed.append(pid)

    monkeypatch.setattr(RayEngine, "stream_results", deadly)
    check_command("run", "--resume", out)
    assert killed
    (mine, one), (others, other) = held(here), held(out)
    assert set(one) == set(other) and all(one[f.cell_key] for f in mine.findings if f.measurements)
    for key, rows in one.items():
        assert rows.keys() == other[key].keys()
        for secret, answer in rows.items():
            assert same(answer, other[key][secret])
    spent = {t.name: t.claim and t.claim.spent_queries for t in mine.targets}
    assert (
        spent == {t.name: t.claim and t.claim.spent_queries for t in others.targets}
        and spent["pmixed"] == 500
    )
    agree(mine, others)


def agree(one: AuditResult, other: AuditResult) -> None:
    for f, g in zip(one.findings, other.findings, strict=True):
        assert [m.name for m in f.measurements] == [m.name for m in g.measurements]
        assert [m.value for m in f.measurements] == pytest.approx(
            [m.value for m in g.measurements], nan_ok=True
        )


def same(one: Any, other: Any) -> bool:
    """Guesses token for token, with what was drawn for them; what probes saw, but for rounding."""
    if isinstance(one, Guesses):
        return [g.suffix for g in one.ranked] == [
            g.suffix for g in other.ranked
        ] and one.drawn == other.drawn
    return bool(one.values == pytest.approx(other.values, abs=1e-5, nan_ok=True))


# --- what is done one a task, in this process as if it were another ---


class Far(Engine):
    """Takes nothing along but what travels, and gives it back in another order."""

    workers, said = 2, "two far away"

    def set_work_context(self, local_place: object, make_place: Callable[[], object]) -> None:
        self._place = pickle.loads(pickle.dumps(make_place))()

    def load_ahead(self, load: Callable[[], object]) -> None:
        pickle.loads(pickle.dumps(load))()

    def stream_results(self, work: Work, items: Sequence[object]) -> Iterator[object]:
        yield from super().stream_results(
            *pickle.loads(pickle.dumps((work, list(reversed(items)))))
        )

    stream_long_results = stream_results


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_of(run_words: EngineOptions) -> Engine:
        return Engine() if run_words.engine == "local" else Far()

    for module in (run, sweep, training):
        monkeypatch.setattr(module, "make_engine", engine_of)


def test_a_lab_is_attacked_alike_by_workers_and_by_one_process(
    far: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an ensemble, reference models and a private training: the run trains all of them."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    tiny = {
        "vocab_size": 300,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "private_rank": 2,
        "batch": 8,
        "others": 0,
    }
    tiny |= {
        "repeats": [[times, 2, 1] for times in (1, 2, 4, 8, 16)],
        "nonmembers": 4,
        "public_records": 20,
    }
    tiny |= {
        "public_epochs": 1,
        "private_epochs": 1,
        "members": 2,
        "lora_rank": 4,
        "lora_epochs": 1,
    }
    (tmp_path / "plan.toml").write_text(
        "[lab_recipe]\n" + "".join(f"{k} = {v}\n" for k, v in tiny.items())
    )
    command = [
        "run",
        "--config",
        str(tmp_path / "plan.toml"),
        "--defense",
        "pmixed",
        "--defense",
        "dp-sgd",
    ]
    command += [
        "--attack",
        "extraction-probability",
        "--attack",
        "membership",
        "-A",
        "membership.score=lira",
    ]
    command += [
        "-A",
        "membership.references=4",
        "-D",
        "dp-sgd.epochs=1",
        "-D",
        "noise_multiplier=1.0",
    ]
    check_command(*command, "-o", tmp_path / "far", "--engine", "ray", "--workers", "2")
    check_command(*command, "-o", tmp_path / "near")
    agree(held(tmp_path / "far")[0], held(tmp_path / "near")[0])


def test_a_worker_that_shares_no_cache_trains_no_lab_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    site = Site(Plan())
    site.may_train = False
    with pytest.raises(
        AuditError, match="for workers on other machines set AUDIT_CACHE to a folder"
    ):
        _ = site.model


def test_members_of_an_ensemble_are_trained_one_a_task(
    far: None, own: list[str], tmp_path: Path
) -> None:
    data, public = (own[own.index(flag) + 1] for flag in ("--data", "--public"))
    command = [
        "train",
        "pmixed",
        "--model",
        public,
        "--data",
        data,
        "-D",
        "members=3",
        "-D",
        "epochs=2",
    ]
    command += ["-D", "control=true"]
    check_command(*command, "-o", tmp_path / "near")
    check_command(*command, "-o", tmp_path / "far", "--engine", "ray")
    files = [
        path.relative_to(tmp_path / "near")
        for path in (tmp_path / "near").rglob("adapter_model.safetensors")
    ]
    assert len(files) == 4
    for file in files:
        one, other = load_file(tmp_path / "near" / file), load_file(tmp_path / "far" / file)
        assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)
    check_command("train", "none", *command[2:6], "-o", tmp_path / "one", "--engine", "ray", code=2)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 30 rows is counted in blocks, and some of it tokenised."""
    for name, value in (("LARGE", 20), ("SAMPLE", 12), ("BATCH", 4)):
        monkeypatch.setattr(large_tables, name, value)
    monkeypatch.setattr(large_tables, "BATCH", 4)
    monkeypatch.setattr(large_tables, "_BLOCK", 200)


def test_workers_read_all_texts_with_models_served_as_in_the_run(
    far: None, own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy recall, perplexity and true tokens too; the run itself queries no model."""
    command = [*own, "--attack", "perplexity", "--attack", "membership", "--setting", "white-box"]
    command += ["-A", "membership.score=min_k_plus"]
    traffic.tokens = 0
    check_command(*command, "-o", tmp_path / "near")
    n_near, traffic.tokens = traffic.tokens, 0
    monkeypatch.setattr(targets, "_worker_models", SweepCache())
    loaded, model_folder = list[str](), own[own.index("--model") + 1]
    load_whole_model = loading._load_whole_model

    def record_load(name: str, options: LoadingOptions) -> HuggingFaceModel:
        loaded.append(name)
        return load_whole_model(name, options)

    monkeypatch.setattr(loading, "_load_whole_model", record_load)
    places = list[Targets]()
    load = Far.set_work_context

    def load_and_silence(engine: Far, local_place: Targets, make_place: WorkerTargets) -> None:
        assert loaded.count(model_folder) == 2  # by the run, and ahead by the worker
        load(engine, local_place, make_place)
        places.append(local_place)
        model = cast(HuggingFaceModel, local_place.scene.site.model)
        there = cast(HuggingFaceModel, engine._place.scene.site.model)
        served = self_check.describe_findings(model)
        assert served == self_check.describe_findings(there)
        assert served["begins"] and served["can_join_rows"]
        monkeypatch.setattr(model, "transformers_logits", lambda *args: pytest.fail("a query"))
        monkeypatch.setattr(model, "logits_after_cached_prefix", model.transformers_logits)

    monkeypatch.setattr(Far, "set_work_context", load_and_silence)
    lists = list[list[str]]()
    stream = Far.stream_results

    def record_items(engine: Far, work: Work, items: Sequence[Any]) -> Iterator[object]:
        lists.append([str(getattr(item, "id", item)) for item in items])
        return stream(engine, work, items)

    monkeypatch.setattr(Far, "stream_results", record_items)
    check_command(*command, "-o", tmp_path / "far", "--engine", "ray")
    assert places and loaded.count(model_folder) == 2
    # A worker reads a text once for all measures, too. Equal lists are divided alike.
    assert traffic.tokens <= 1.05 * n_near
    members, heldout, _, others = lists[:4]
    assert lists[-2:] == [members, others] and members[0] != others[0]
    assert heldout == [str(i) for i in map(others.index, others)]
    (result, near), (there, far_rows) = held(tmp_path / "near"), held(tmp_path / "far")
    agree(result, there)
    for key, rows in near.items():
        assert all(same(answer, far_rows[key][secret]) for secret, answer in rows.items())
    for one, other in zip(result.targets, there.targets, strict=True):
        assert one.perplexity and other.perplexity
        assert one.perplexity.value == pytest.approx(other.perplexity.value)
    for scores in zip(tokens_of(tmp_path / "near"), tokens_of(tmp_path / "far"), strict=True):
        (secret, near_scores), (other, far_scores) = scores
        assert secret == other and near_scores == pytest.approx(far_scores, abs=1e-5)


def tokens_of(folder: Path) -> list[tuple[str, tuple[float, ...]]]:
    """Log-probabilities of each member's true tokens, as the run stored them."""
    run = RunFolder.reopen(folder)
    run.close()
    stored = run.tokens.finished_secrets("undefended")
    return sorted((id, stored[id].log_probs) for id in stored)


def test_a_worker_that_reads_other_data_is_refused(
    far: None,
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(Path(own[own.index("--data") + 1]).read_text())
    command = [*own, "--data", str(data), "--attack", "perplexity", "-o", str(tmp_path / "run")]
    load = Far.set_work_context

    def change_then_load(engine: Far, *place: Any) -> None:
        data.write_text(data.read_text().replace("somebody", "anybody"))
        load(engine, *place)

    monkeypatch.setattr(Far, "set_work_context", change_then_load)
    check_command(*command, "--engine", "ray", code=2)
    assert "expected every worker to read the same data as the run, but the data differs on" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_a_worker_with_another_plug_in_is_refused(
    far: None,
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from auditor.attacks.likelihood_ranking import PerplexityRanking\n\n\n"
        "class Mine(PerplexityRanking):\n"
        '    """Rank by likelihood."""\n\n'
        '    name = "mine"\n'
    )
    command = [*own, "--plugin", str(mine), "--attack", "mine", "-o", str(tmp_path / "run")]
    load = Far.set_work_context

    def change_then_load(engine: Far, *place: Any) -> None:
        mine.write_text(mine.read_text() + "    batch = 1\n")
        load(engine, *place)

    monkeypatch.setattr(Far, "set_work_context", change_then_load)
    check_command(*command, "--engine", "ray", code=2)
    assert "but plug-in 1/mine.py differs on" in capsys.readouterr().err


def test_a_worker_that_is_lost_while_a_table_is_counted_changes_nothing(
    cluster: RayEngine, small_is_large: None, own: list[str]
) -> None:
    data = own[own.index("--data") + 1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(own[own.index("--model") + 1])
    lost = worker_process_ids(cluster)[0]

    def count_and_kill(*work: Any) -> Iterator[Any]:
        stream = cluster.stream_results(*work)
        yield next(stream)
        os.kill(lost, signal.SIGKILL)
        yield from stream

    there = read_files(data, tokenizer, limit=5, counting=TableCounting(count_and_kill))
    near = read_files(data, tokenizer, limit=5)
    assert there.secrets == near.secrets and there.record_counts == near.record_counts
    assert lost not in worker_process_ids(cluster)


def test_a_large_table_is_counted_by_workers_once(
    far: None, small_is_large: None, own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = list[tuple[str, int]]()
    hash_block = BlockHashing.hash_block

    def record_block(work: BlockHashing, block: TableBlock) -> BlockCounts:
        blocks.append((work.label, block.number))
        return hash_block(work, block)

    monkeypatch.setattr(BlockHashing, "hash_block", record_block)
    command = [*own, "--attack", "perplexity", "--limit", "5"]
    check_command(*command, "-o", tmp_path / "near")
    counted_near, blocks[:] = sorted(blocks), []
    check_command(*command, "-o", tmp_path / "far", "--engine", "ray")
    assert sorted(blocks) == counted_near
    assert len(blocks) > 4
    assert blocks != counted_near
    (result, near), (_, there) = held(tmp_path / "near"), held(tmp_path / "far")
    assert any(
        "30 rows were counted by their text; a sample of 20" in note
        for note in result.benchmark.notes
    )
    assert near.keys() == there.keys()
    for cell, answers in near.items():
        assert answers.keys() == there[cell].keys()
        assert all(same(answer, there[cell][secret]) for secret, answer in answers.items())


def test_a_cluster_counts_a_large_table_as_one_process_does(
    cluster: RayEngine, small_is_large: None, own: list[str]
) -> None:
    data = own[own.index("--data") + 1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(own[own.index("--model") + 1])
    counting = TableCounting(cluster.stream_results)
    there = read_files(data, tokenizer, limit=5, counting=counting)
    near = read_files(data, tokenizer, limit=5)
    assert there.secrets == near.secrets
    assert there.record_counts == near.record_counts
    counted = TableCounting(counted=pickle.loads(pickle.dumps(there.counted_tables)))
    assert read_files(data, tokenizer, limit=5, counting=counted).secrets == near.secrets


def test_a_cluster_counts_a_large_table_of_conversations_and_their_people(
    cluster: RayEngine,
    small_is_large: None,
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("auditor.statistics.people.LEAST", 3)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Door {i % 28}?"},
                {"role": "assistant", "content": f"Its code is {i % 28 * 7919 % 10007:05d} today."},
            ],
            "who": f"p{i % 7}",
        }
        for i in range(40)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(own[own.index("--model") + 1])
    choices = {"limit": 5, "user_column": "who", "form": ChatRendering("none")}
    there, near = (
        read_files(str(tmp_path / "d.jsonl"), tokenizer, counting=counting, **choices)
        for counting in (TableCounting(cluster.stream_results), TableCounting())
    )
    assert there.secrets == near.secrets
    assert there.record_counts == near.record_counts
    assert any("40 rows were counted by their conversation" in note for note in there.notes)
    assert {secret.repeats for secret in there.secrets} == {2}
    assert len({secret.user for secret in there.secrets}) > 1


def test_points_of_a_sweep_are_run_one_a_task(far: None, own: list[str], tmp_path: Path) -> None:
    command = [*own, "--attack", "perplexity", "--seeds", "0,1", "--sweep", "samples=2,3"]
    check_command(*command, "-o", tmp_path / "near")
    check_command(*command, "-o", tmp_path / "far", "--engine", "ray")
    folders = [path.parent.name for path in (tmp_path / "near").glob("*/result.json")]
    assert len(folders) == 4
    for name in folders:
        agree(held(tmp_path / "near" / name)[0], held(tmp_path / "far" / name)[0])


# --- a cluster of our own ---


def test_a_place_for_sockets_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    longest = ray_engine._find_ray_socket_folder() / ".r.audit-scratch-01234567" / "r"
    name = "session_2026-11-22_21-45-49_148725_4194303/sockets/plasma_store"
    assert len(os.fsencode(longest / name)) <= 107
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(AuditError, match="a folder for Ray's sockets"):
        ray_engine._find_ray_socket_folder()


# --- bad input ---


REFUSED = {
    "expected --workers >= 1, got 0": ["--engine", "ray", "--workers", "0"],
    "expected --gpus-per-worker >= 0, got -1.0": ["--engine", "ray", "--gpus-per-worker", "-1"],
    "--gpus-per-worker 0.5 goes with --device cuda, got --device cpu": [
        "--engine",
        "ray",
        "--gpus-per-worker",
        "0.5",
    ],
    "--workers goes with --engine ray, got --engine local": ["--workers", "2"],
    "--ray-address goes with --engine ray, got --engine local": ["--ray-address", "h:1"],
    "--gpus-per-worker goes with --engine ray, got --engine local": ["--gpus-per-worker", "1"],
    "of at most the 1 processors here, got 2": ["--engine", "ray", "--workers", "2"],
    "expected --ray-address as HOST:PORT or auto, got 'nowhere'": [
        "--engine",
        "ray",
        "--ray-address",
        "nowhere",
    ],
    "expected RAY_AUTH_MODE=token with --ray-address": ["--engine", "ray", "--ray-address", "auto"],
    "expected a Ray cluster at --ray-address localhost:1, but nothing listens there": [
        *("--engine", "ray", "--ray-address", "localhost:1")
    ],
}


@pytest.mark.parametrize(("sentence", "flags"), REFUSED.items())
def test_what_cannot_be_is_refused_in_a_sentence_before_anything_is_loaded(
    sentence: str,
    flags: list[str],
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("auditor.core.threads.count_usable_processors", lambda: 1)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    check_command(*own, *flags, "-o", tmp_path / "run", code=2)
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_without_ray_its_engine_is_refused(
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    check_command(*own, "--engine", "ray", "-o", tmp_path / "run", code=2)
    assert "--engine ray needs Ray: pip install 'audit-lm[ray]'" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "run").exists()


def test_live_models_and_those_behind_an_api_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "model as a folder or a hub id"  # of either refusal
    save_tiny(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    data = [{"text": f"record {i} of somebody and of nobody else at all"} for i in range(12)]
    sizes = {"prefix_length": 8, "suffix_length": 4, "attacks": ["perplexity"]}
    with pytest.raises(AuditError, match=sentence):
        audit(tiny(257).model, tokenizer, data=data, out=tmp_path / "live", engine="ray", **sizes)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    remote = [
        "--model",
        "openai:m",
        "--base-url",
        "http://localhost:1/v1",
        "--tokenizer",
        str(tmp_path / "model"),
    ]
    remote += ["--data", str(tmp_path / "data.jsonl"), "--attack", "perplexity"]
    check_command("run", *remote, "--engine", "ray", "-o", tmp_path / "api", code=2)
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "live").exists() and not (tmp_path / "api").exists()
