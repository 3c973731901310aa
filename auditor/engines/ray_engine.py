"""Work on the workers of a Ray cluster: this machine's own, or one that is there already. Needs the
`ray` extra.

Ray schedules, restarts a worker that was lost and does again what that one had in hand; nothing of
it is done here.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from auditor.core import disk, threads
from auditor.core.counts import counted
from auditor.core.errors import AuditError, NotApplicable
from auditor.engines.engine import Work

_LOSSES = 3  # of one worker in one run: what kills it each time is the work itself
# bytes for what travels: secrets, guesses, soft prompts; models are loaded where they are used
_STORE = 256 * 2**20
_LOST = (
    "stopped: a process of the Ray cluster of this machine was lost (killed, or out of memory), so "
    "no work can go on; what is finished is kept for --resume\n"
)
# seconds, in which a cluster has begun, and the workers of a run before this one are gone
PATIENCE = 10.0
_AUTO = "auto"  # Ray's own word for the cluster that this machine belongs to
# as this process: Ray's own 15 leaves what does all the work behind any other program
AS_NICE = {"worker_niceness": 0}
# of portions that nobody asks for any more, once one was refused
_QUIET = "RAY_IGNORE_UNHANDLED_ERRORS"
_KNOCK = 5.0  # seconds; Ray itself goes on for minutes where nobody listens
# Ray's own: who has no token is told nothing and runs nothing
_MODE, _TOKEN = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
)
# Characters of the longest socket below Ray's folder:
# /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store.
_SOCKET = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.0")
_LONGEST = 103 if sys.platform == "darwin" else 107  # of a socket's path, in bytes


class RayEngine:
    """`workers` of one thread each. address: of a cluster, HOST:PORT or `auto`; "": a new cluster
    on this machine.

    gpus: of each worker, parts of one allowed. Raises AuditError where Ray is not installed, not to
    be reached, or has no room for the workers: all of them must be there from the start.
    """

    def __init__(self, workers: int, address: str = "", gpus: float = 0.0) -> None:
        self.workers, self.address, self.gpus = workers, address, gpus
        self._elsewhere: Callable[[], Any] | None = None
        self._pool: list[Any] = []
        # held as long as its workers: one that is started anew asks for it again
        self._stored_elsewhere: Any = None
        # the connection, unless a notebook made it before, and its folder
        self._held = contextlib.ExitStack()
        os.environ.setdefault(_QUIET, "1")
        try:
            if not _import_ray().is_initialized():
                self._connect_to_ray_cluster()
            self._wait_for_cluster_resources()
        except BaseException:
            self.close()
            raise

    @property
    def said(self) -> str:
        where = (
            f"the Ray cluster at {self.address}"
            if self.address
            else "a Ray cluster of this machine"
        )
        return f"{counted(self.workers, 'worker')} of {where}"

    def set_work_context(self, here: Any, elsewhere: Callable[[], Any]) -> None:
        self._kill_worker_pool()
        self._elsewhere = elsewhere

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        # `put` stores the work once for all portions, in place of a copy with each.
        ray, pool, shared = _import_ray(), self._started_worker_pool(), _import_ray().put(work)
        streams = list[Any]()
        # Every len(pool)-th item: its worker follows from its place alone. "streaming": results
        # come one by one.
        for i, worker in enumerate(pool):
            own, do = (
                items[i :: len(pool)],
                worker.stream_work_results.options(num_returns="streaming"),
            )
            for start in range(0, len(own), work.portion):
                streams.append(do.remote(shared, list(own[start : start + work.portion])))
        try:
            while streams:
                # fetch_local=False: told as soon as a result is there; `ray.get` fetches it.
                ready, _ = ray.wait(streams, num_returns=1, fetch_local=False)
                for stream in ready:
                    try:
                        yield _result_from_ray(next, stream)
                    except (
                        StopIteration
                    ):  # let out of a generator it would be a RuntimeError (PEP 479)
                        streams.remove(stream)
        finally:
            for stream in streams:
                ray.cancel(stream, force=False)  # Ray refuses force for what an actor does

    def results_of_long_items(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        from ray.util import ActorPool

        shared, pool = _import_ray().put(work), ActorPool(self._started_worker_pool())
        for item in items:
            pool.submit(lambda worker, one: worker.collect_work_results.remote(shared, [one]), item)
        while pool.has_next():
            yield from _result_from_ray(pool.get_next_unordered)

    def close(self) -> None:
        self._kill_worker_pool()
        self._held.close()

    def _kill_worker_pool(self) -> None:
        for worker in self._pool:
            _import_ray().kill(worker)  # for good: Ray starts none again that it was told to kill
        self._pool, self._stored_elsewhere = [], None

    def _started_worker_pool(self) -> list[Any]:
        if not self._pool:
            kind = _import_ray().remote(_Worker)
            kind = kind.options(
                num_cpus=1, num_gpus=self.gpus, max_restarts=_LOSSES, max_task_retries=_LOSSES
            )
            # Once for all workers: it may hold what a run has counted.
            self._stored_elsewhere = _import_ray().put(self._elsewhere)
            self._pool = [kind.remote(self._stored_elsewhere) for _ in range(self.workers)]
        return self._pool

    def _connect_to_ray_cluster(self) -> None:
        if self.address:
            _check_ray_cluster_listens(self.address)
            if os.environ.get(_MODE) != "token":
                raise AuditError(
                    f"expected {_MODE}=token with --ray-address, as a cluster without tokens hands "
                    "secrets and models to whoever reaches it, got "
                    f"{os.environ.get(_MODE) or 'none'}"
                )
            where: dict[str, Any] = {"address": self.address}
        else:
            if self.workers > (most := threads.usable_processor_count()):
                raise AuditError(
                    f"expected --workers of at most the {most} processors here, got {self.workers}"
                )
            if os.environ.get(_MODE, "token") != "token":
                raise AuditError(
                    f"expected {_MODE}=token or none for a cluster of our own, got "
                    f"{os.environ[_MODE]!r}"
                )
            if "RAY_AUTH_TOKEN_PATH" not in os.environ:
                # kept for the process: Ray reads it once
                os.environ.setdefault(_TOKEN, secrets.token_hex(32))
            # What travels is private: not below the folder that Ray shares with everybody on this
            # machine. Ray lets everybody into its own folder, so that one lies in one of ours.
            scratch = self._held.enter_context(disk.scratch_folder(_find_ray_socket_folder(), "r"))
            where = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
            where |= {
                "object_store_memory": _STORE,
                "_temp_dir": str(scratch / "r"),
                "_system_config": AS_NICE,
            }
        self._held.callback(_import_ray().shutdown)
        # Ray puts its own in its place, which knows nothing of runs
        handler = signal.getsignal(signal.SIGTERM)
        try:
            _import_ray().init(**where, logging_level=logging.ERROR, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise AuditError(
                f"cannot reach a Ray cluster at {self.address or 'this machine'!r}: "
                f"{_first_line_of_ray_error(error)}"
            ) from None
        if os.environ.get(_MODE) != "token":  # which Ray sets where nobody has, from 2.60 on
            raise AuditError(
                "expected a Ray that closes its cluster by tokens (2.60 or newer), got "
                f"{_import_ray().__version__}"
            )
        if hasattr(os, "pidfd_open"):
            node = str(_import_ray().get_runtime_context().get_node_id())
            self._held.enter_context(
                _ray_process_loss_watch_context(
                    _raylet_process_ids(node) if self.address else _own_ray_cluster_process_ids()
                )
            )

    def _wait_for_cluster_resources(self) -> None:
        """Ray itself would wait for ever. What a cluster has it says some moments after its
        start."""
        until = time.monotonic() + PATIENCE
        while (
            room := self._missing_resources_sentence(_import_ray().cluster_resources())
            or self._missing_resources_sentence(_import_ray().available_resources())
        ) and time.monotonic() < until:
            time.sleep(0.1)
        if room:
            raise AuditError(room)

    def _missing_resources_sentence(self, room: Mapping[str, float]) -> str:
        """A sentence on what a cluster with `room` has too little of for these workers; "" where it
        has enough."""
        for what, asked in (("CPU", float(self.workers)), ("GPU", self.gpus * self.workers)):
            if (free := room.get(what, 0.0)) < asked:
                return (
                    f"expected {asked:g} free {what}s in the Ray cluster for {self.workers} "
                    f"workers, got {free:g}"
                )
        return ""


def _find_ray_socket_folder() -> Path:
    """Where Ray's folder can lie so that the paths of its sockets are short enough. Raises
    AuditError for nowhere."""
    own = Path(tempfile.gettempdir())
    room = _LONGEST - _SOCKET - len("/.r.audit-scratch-01234567/r")
    for place in (own, Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")):
        if len(os.fsencode(place)) <= room and os.access(place, os.W_OK | os.X_OK):
            return place
    raise AuditError(
        f"expected a folder for Ray's sockets whose path has at most {room} characters, got "
        f"TMPDIR={str(own)!r} and no /tmp that can be written"
    )


def _own_ray_cluster_process_ids() -> list[int]:
    """The processes whose loss ends a cluster of our own, upon which Ray ends this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            agent = (
                any(word.endswith(("agent.py", "agent/main.py")) for word in words)
                or "Agent" in words[0]
            )
            if agent or process.name() in ("raylet", "gcs_server"):
                found.append(process.pid)
    return found


def _raylet_process_ids(node: str) -> list[int]:
    """The raylet of a node of somebody's cluster on this machine, through which this process
    reaches it."""
    found = psutil.process_iter(["name", "cmdline"])
    return [
        one.pid
        for one in found
        if one.info["name"] == "raylet" and f"--node_id={node}" in (one.info["cmdline"] or ())
    ]


@contextlib.contextmanager
def _ray_process_loss_watch_context(pids: Sequence[int]) -> Iterator[None]:
    """While the block lasts, the loss of one of these processes ends this one in a sentence, exit
    code 3.

    Ray would end it from C++ at its next question to them, with 1, which is a gate's word, and
    without one of its own.
    """
    handles = [os.pidfd_open(pid) for pid in pids]  # each readable once its process has ended
    left, end = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([*handles, left], [], [])
        if left not in ready:
            os.write(2, _LOST.encode())
            os._exit(3)  # sys.exit would end this thread alone

    thread = threading.Thread(target=watch, daemon=True, name="audit: the cluster")
    thread.start()
    try:
        yield
    finally:
        os.close(end)  # which `left` reads as its end
        thread.join()
        for handle in (*handles, left):
            os.close(handle)


class _Worker:
    """One process of the cluster, with a place of its own. Ray starts it again where it is lost."""

    def __init__(self, elsewhere: Callable[[], Any]) -> None:
        self.elsewhere = elsewhere

    @cached_property
    def models_and_data(self) -> Any:
        """Opened with the first work: what is refused then reaches whoever asked, in its own
        words."""
        return self.elsewhere()

    def stream_work_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        yield from work.results_at_workplace(self.models_and_data, items)

    def collect_work_results(self, work: Work, items: Sequence[Any]) -> list[Any]:
        return list(work.results_at_workplace(self.models_and_data, items))


def _result_from_ray(ask: Callable[..., Any], *of: Any) -> Any:
    """The result of a call to Ray. AuditError and NotApplicable of a worker are raised here as they
    were there."""
    ray = _import_ray()
    try:
        found = ask(*of)
        return ray.get(found) if isinstance(found, ray.ObjectRef) else found
    except ray.exceptions.RayTaskError as error:
        raise (
            error.cause if isinstance(error.cause, AuditError | NotApplicable) else error
        ) from None
    except ray.exceptions.RayActorError as error:
        raise AuditError(
            f"a worker was lost {_LOSSES + 1} times, so this run stops; what is finished is kept "
            f"for --resume ({_first_line_of_ray_error(error)})"
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
            f"expected a Ray cluster at --ray-address {address}, but nobody listens there ({error})"
        ) from None


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise AuditError("--engine ray needs Ray: pip install 'audit-lm[ray]'") from None
    return ray


def _first_line_of_ray_error(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
