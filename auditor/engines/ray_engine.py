"""Do work on a Ray cluster: a new one on this machine, or a running one. Needs the `ray` extra.

Ray itself schedules work, restarts lost workers and repeats unfinished work.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from platform import node
from typing import Any

import psutil

from auditor import __version__
from auditor.core import disk, threads
from auditor.core.counts import format_count
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.plan_parts import EngineOptions
from auditor.engines.engine import Engine, Work

_LOSSES = 3  # losses of a worker in a run: if it is lost more often, the work itself kills it
# Most items in a row for the same worker: neighbours are alike, so that they share batches.
_RUN = 4
# Portions of items that a worker has at once, so that it need not wait for the next one.
_PORTIONS_AHEAD = 2
# Bytes of Ray's store, for secrets, guesses and soft prompts; each worker loads models itself.
_STORE = 256 * 2**20
_LOST = (
    "stopped: a process of the Ray cluster of this machine was lost (killed, or out of memory), so "
    "no work can continue; finished work is kept for --resume\n"
)
PATIENCE = 10.0  # seconds for a cluster to start and for the workers of the last run to end
_AUTO = "auto"  # Ray's word for the cluster that this machine belongs to
# The niceness of this process. Ray's default, 15, would let any other program run before the
# workers, which do all the work.
AS_NICE = {"worker_niceness": 0}
# Errors of portions that are no longer needed after one was refused.
_QUIET = "RAY_IGNORE_UNHANDLED_ERRORS"
_KNOCK = 5.0  # seconds; Ray itself tries for minutes if nobody listens
# Ray refuses processes without the token.
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
# Characters of the longest socket below Ray's folder:
# /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store.
_SOCKET = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.0")
_LONGEST = 103 if sys.platform == "darwin" else 107  # of a socket's path, in bytes


def make_engine(options: EngineOptions) -> Engine:
    """Return the engine that the options name. Raise AuditError if it cannot start."""
    if options.engine == "local":
        return Engine()
    return RayEngine(
        options.workers or threads.count_usable_processors(),
        options.ray_address or "",
        options.gpus_per_worker,
    )


class RayEngine(Engine):
    """Engine with `workers` Ray workers, each with one thread.

    Args:
        workers: Number of workers. The cluster must have room for all of them when the run starts.
        address: HOST:PORT of a cluster, or `auto`; "" for a new cluster on this machine.
        gpus: GPUs per worker; fractions are allowed.

    Raises:
        AuditError: if Ray is not installed, cannot be reached, or has no room for the workers.
    """

    def __init__(self, workers: int, address: str = "", gpus: float = 0.0) -> None:
        self.workers = workers
        self.address = address
        self.gpus = gpus
        self._pool: list[Any] = []
        # Reference to what loads models and data. In a list, else Ray would load it for each task.
        self._make_place: list[Any] = []
        # The connection and its folder, unless a notebook connected before.
        self._resources = contextlib.ExitStack()
        os.environ.setdefault(_QUIET, "1")
        try:
            if not _import_ray().is_initialized():
                self._connect_cluster()
            self._wait_cluster_resources()
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        cluster = "a Ray cluster of this machine"
        if self.address:
            cluster = f"the Ray cluster at {self.address}"
        return f"{format_count(self.workers, 'worker')} of {cluster}"

    def set_work_context(self, local_place: Any, make_place: Callable[[], Any]) -> None:
        # Stored once for all workers: it may contain the counts of a run.
        self._make_place = [_import_ray().put(make_place)]

    def load_ahead(self, load: Callable[[], Any]) -> None:
        self.set_work_context(None, load)
        for worker in self._start_worker_pool():
            worker.load_place.remote(self._make_place)  # a later task reports its errors

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        ray = _import_ray()
        pool = self._start_worker_pool()
        # `put` stores the work once for all portions instead of a copy with each.
        shared_work = ray.put(work)
        # The worker of each portion that is in work, keyed by the stream of its results.
        streams = dict[Any, int]()
        portions = []
        # A worker gets every len(pool)-th run of items, so that its index determines its items.
        size = max(1, min(_RUN, len(items) // (_RUN * len(pool))))
        for worker_index in range(len(pool)):
            starts = range(worker_index * size, len(items), len(pool) * size)
            portions.append(_join_runs_into_portions(items, starts, size, work.portion))

        def send_portion(worker_index: int) -> None:
            # "streaming": results come one by one.
            call = pool[worker_index].stream_work_results.options(num_returns="streaming")
            for portion in itertools.islice(portions[worker_index], 1):
                streams[call.remote(self._make_place, shared_work, portion)] = worker_index

        try:
            for worker_index in [*range(len(pool))] * _PORTIONS_AHEAD:
                send_portion(worker_index)
            while streams:
                # fetch_local=False: `wait` ends as soon as a result exists; `ray.get` fetches it.
                ready, _ = ray.wait(list(streams), num_returns=1, fetch_local=False)
                for stream in ready:
                    try:
                        yield _get_ray_result(next, stream)
                    except StopIteration:  # in a generator it would become a RuntimeError (PEP 479)
                        send_portion(streams.pop(stream))
        finally:
            for stream in streams:
                ray.cancel(stream, force=False)  # Ray refuses force for an actor's work

    def stream_long_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        from ray.util import ActorPool

        shared_work = _import_ray().put(work)
        pool = ActorPool(self._start_worker_pool())
        for item in items:
            pool.submit(
                lambda worker, next_item: worker.collect_work_results.remote(
                    self._make_place, shared_work, [next_item]
                ),
                item,
            )
        while pool.has_next():
            yield from _get_ray_result(pool.get_next_unordered)

    def close(self) -> None:
        for worker in self._pool:
            # This is final: Ray does not restart a worker that it was told to kill.
            _import_ray().kill(worker)
        self._pool = []
        self._make_place = []
        self._resources.close()

    def _start_worker_pool(self) -> list[Any]:
        if not self._pool:
            kind = _import_ray().remote(_Worker)
            kind = kind.options(
                num_cpus=1, num_gpus=self.gpus, max_restarts=_LOSSES, max_task_retries=_LOSSES
            )
            for _ in range(self.workers):
                self._pool.append(kind.remote(os.getcwd(), __version__))
        return self._pool

    def _connect_cluster(self) -> None:
        init_args = self._build_cluster_arguments()
        self._resources.callback(_import_ray().shutdown)
        # Ray installs a separate handler, which knows nothing of runs.
        handler = signal.getsignal(signal.SIGTERM)
        try:
            _import_ray().init(**init_args, logging_level=logging.ERROR, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise AuditError(
                f"cannot reach a Ray cluster at {self.address or 'this machine'!r}: "
                f"{_get_first_line(error)}"
            ) from None
        if os.environ.get(_MODE) != "token":  # Ray sets it from 2.60 on
            raise AuditError(
                "expected a Ray that closes its cluster by tokens (2.60 or newer), got "
                f"{_import_ray().__version__}"
            )
        if hasattr(os, "pidfd_open"):
            if self.address:
                node_id = str(_import_ray().get_runtime_context().get_node_id())
                process_ids = _find_raylet_process_ids(node_id)
            else:
                process_ids = _find_cluster_process_ids()
            self._resources.enter_context(_watch_ray_processes(process_ids))

    def _build_cluster_arguments(self) -> dict[str, Any]:
        """Return the arguments for `ray.init`.

        Raise AuditError if the cluster uses no authentication token, or has no room for the
        workers.
        """
        if self.address:
            _check_ray_cluster_listens(self.address)
            if os.environ.get(_MODE) != "token":
                raise AuditError(
                    f"expected {_MODE}=token with --ray-address, because a cluster without tokens "
                    "gives secrets and models to anyone who reaches it, got "
                    f"{os.environ.get(_MODE) or 'none'}"
                )
            return {"address": self.address}
        n_processors = threads.count_usable_processors()
        if self.workers > n_processors:
            raise AuditError(
                f"expected --workers of at most the {n_processors} processors here, got "
                f"{self.workers}"
            )
        if os.environ.get(_MODE, "token") != "token":
            raise AuditError(
                f"expected {_MODE}=token or none for a cluster of our own, got "
                f"{os.environ[_MODE]!r}"
            )
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            # Set it for the rest of the process, because Ray reads it once.
            os.environ.setdefault(_TOKEN, secrets.token_hex(32))
        # Secrets travel through this folder. Ray lets everybody on this machine read its own
        # folder, so it lies inside a private one.
        scratch = self._resources.enter_context(
            disk.open_scratch_folder(_find_ray_socket_folder(), "r")
        )
        return {
            "address": "local",
            "num_cpus": self.workers,
            "include_dashboard": False,
            "object_store_memory": _STORE,
            "_temp_dir": str(scratch / "r"),
            "_system_config": AS_NICE,
        }

    def _wait_cluster_resources(self) -> None:
        """Wait until the cluster reports its resources, which takes a moment after its start.

        Ray itself would wait forever.
        """
        deadline = time.monotonic() + PATIENCE
        while (
            missing := self._describe_missing_resources(_import_ray().cluster_resources())
            or self._describe_missing_resources(_import_ray().available_resources())
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        if missing:
            raise AuditError(missing)

    def _describe_missing_resources(self, resources: Mapping[str, float]) -> str:
        """Return a sentence about a resource that the cluster lacks for the workers.

        Return "" if it lacks none.
        """
        needs = {"CPU": float(self.workers), "GPU": self.gpus * self.workers}
        for resource, needed in needs.items():
            free = resources.get(resource, 0.0)
            if free < needed:
                return (
                    f"expected {needed:g} free {resource}s in the Ray cluster for {self.workers} "
                    f"workers, got {free:g}"
                )
        return ""


def _find_ray_socket_folder() -> Path:
    """Return a folder whose path is short enough for Ray's sockets.

    Raise AuditError if there is none.
    """
    temporary = Path(tempfile.gettempdir())
    room = _LONGEST - _SOCKET - len("/.r.audit-scratch-01234567/r")
    for place in (temporary, Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")):
        if len(os.fsencode(place)) <= room and os.access(place, os.W_OK | os.X_OK):
            return place
    raise AuditError(
        f"expected a folder for Ray's sockets whose path has at most {room} characters, got "
        f"TMPDIR={str(temporary)!r} and /tmp cannot be written"
    )


def _find_cluster_process_ids() -> list[int]:
    """Return the process ids of the cluster that this process started.

    Ray ends this process if any of them is lost.
    """
    pids = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            agent = (
                any(word.endswith(("agent.py", "agent/main.py")) for word in words)
                or "Agent" in words[0]
            )
            if agent or process.name() in ("raylet", "gcs_server"):
                pids.append(process.pid)
    return pids


def _find_raylet_process_ids(node_id: str) -> list[int]:
    """Return the ids of a node's raylet processes.

    They connect this process to a running cluster.
    """
    processes = psutil.process_iter(["name", "cmdline"])
    return [
        process.pid
        for process in processes
        if process.info["name"] == "raylet"
        and f"--node_id={node_id}" in (process.info["cmdline"] or ())
    ]


@contextlib.contextmanager
def _watch_ray_processes(pids: Sequence[int]) -> Iterator[None]:
    """End this process if one of `pids` is lost during the block.

    A sentence is printed, and the exit code is 3. Ray itself would end the process from C++ at the
    next call, without a sentence and with exit code 1, which means a failed gate.
    """
    handles = [os.pidfd_open(pid) for pid in pids]  # each is readable once its process has ended
    stop_reader, stop_writer = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([*handles, stop_reader], [], [])
        if stop_reader not in ready:
            os.write(2, _LOST.encode())
            os._exit(3)  # sys.exit would end only this thread

    thread = threading.Thread(target=watch, daemon=True, name="audit: the cluster")
    thread.start()
    try:
        yield
    finally:
        os.close(stop_writer)  # `stop_reader` becomes readable
        thread.join()
        for handle in (*handles, stop_reader):
            os.close(handle)


class _Worker:
    """Process of the cluster with its own models and data. Ray restarts it if it is lost."""

    def __init__(self, folder: str, version: str) -> None:
        """Create a worker without models and data.

        `folder` and `version` are the run's working folder and program version.
        """
        self.folder = folder
        self.version = version
        self.make_place: list[Any] | None = None
        self.place: Any = None  # models and data

    def load_place(self, make_place: list[Any]) -> Any:
        """Return the models and data that a task needs.

        They are loaded in the first task that needs them, not when the worker starts, because only
        a task's errors reach the caller. Raise AuditError if the worker lacks the run's folder or
        has a different version of the program.
        """
        if make_place == self.make_place:
            return self.place
        if self.version != __version__:
            raise AuditError(
                f"expected audit {self.version} on every worker, got {__version__} on {node()}"
            )
        try:
            os.chdir(self.folder)  # of the whole process: each worker has its own
        except OSError as error:
            raise AuditError(
                f"expected the folder {self.folder!r} on every worker, got none on {node()}"
            ) from error
        self.place = self.make_place = None  # free the memory of earlier models
        for reference in make_place:
            self.place = _import_ray().get(reference)()
        self.make_place = make_place
        return self.place

    def stream_work_results(
        self, make_place: list[Any], work: Work, items: Sequence[Any]
    ) -> Iterator[Any]:
        yield from work.process_items(self.load_place(make_place), items)

    def collect_work_results(
        self, make_place: list[Any], work: Work, items: Sequence[Any]
    ) -> list[Any]:
        return list(work.process_items(self.load_place(make_place), items))


def _join_runs_into_portions(
    items: Sequence[Any], starts: Iterable[int], run_size: int, portion_size: int
) -> Iterator[list[Any]]:
    """Yield portions of the runs of items that begin at `starts`."""
    own_items = list[Any]()
    for start in starts:
        own_items += items[start : start + run_size]
        while len(own_items) >= portion_size:
            yield own_items[:portion_size]
            del own_items[:portion_size]
    if own_items:
        yield own_items


def _get_ray_result(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call to Ray; re-raise a worker's AuditError or NotApplicable here."""
    ray = _import_ray()
    try:
        result = call(*args)
        if isinstance(result, ray.ObjectRef):
            return ray.get(result)
        return result
    except ray.exceptions.RayTaskError as error:
        raise (
            error.cause if isinstance(error.cause, AuditError | NotApplicable) else error
        ) from None
    except ray.exceptions.RayActorError as error:
        raise AuditError(
            f"a worker was lost {_LOSSES + 1} times, so this run stops; finished work is kept for "
            f"--resume ({_get_first_line(error)})"
        ) from None


def _check_ray_cluster_listens(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if address == _AUTO:
        return
    if not (host and colon and port.isdecimal() and int(port) < 2**16) or "/" in host:
        raise AuditError(f"expected --ray-address as HOST:PORT or {_AUTO}, got {address!r}")
    try:
        socket.create_connection((host, int(port)), _KNOCK).close()
    except OSError as error:
        raise AuditError(
            f"expected a Ray cluster at --ray-address {address}, but nothing listens there "
            f"({error})"
        ) from None


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise AuditError("--engine ray needs Ray: pip install 'audit-lm[ray]'") from None
    return ray


def _get_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
