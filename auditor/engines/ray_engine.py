"""Work on the workers of a Ray cluster: this machine's own, or one that is there already. Needs the `ray` extra.

Ray schedules, restarts a worker that was lost and does its portion again; nothing of that is done here. A place is
opened once on each worker, and items always go to the worker that has had them before.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from auditor.core.errors import AuditError, NotApplicable
from auditor.engines.engine import Work

_LOSSES = 3  # of one worker in one run: what kills it each time is the work itself
_STORE = 256 * 2**20  # bytes for what travels: secrets, guesses, soft prompts; models are loaded where they are used


class RayEngine:
    """opened: makes a place; it travels to each worker, which opens one. address: a cluster's, "" for our own.

    gpus: of each worker, parts of one allowed. Raises AuditError where Ray is not installed or not to be reached.
    """

    def __init__(self, opened: Callable[[], Any], workers: int, address: str = "", gpus: float = 0.0) -> None:
        self.opened, self.workers, self.address, self.gpus = opened, workers, address, gpus
        self._pool: list[Any] = []
        self._scratch = ""
        self._ours = False  # whether the connection is, which a notebook may have made before
        _ray()  # now, rather than when the first work is there

    @property
    def said(self) -> str:
        where = f"the Ray cluster at {self.address}" if self.address else "a Ray cluster of this machine"
        return f"{self.workers} worker{'s' * (self.workers > 1)} of {where}"

    def stream(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        ray, pool = _ray(), self._started()
        shared = ray.put(work)
        streams = [
            worker.do.options(num_returns="streaming").remote(shared, list(portion))
            for i, worker in enumerate(pool)
            for portion in _portions(items[i :: len(pool)], work.portion)
        ]
        try:
            while streams:
                ready, _ = ray.wait(streams, num_returns=1, fetch_local=False)
                for stream in ready:
                    try:
                        yield ray.get(next(stream))
                    except StopIteration:
                        streams.remove(stream)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, AuditError | NotApplicable) else error) from None
        except ray.exceptions.RayActorError as error:
            raise AuditError(
                f"a worker was lost {_LOSSES + 1} times, so this run stops; what is finished is kept for --resume "
                f"({_first(error)})"
            ) from None
        finally:
            for stream in streams:
                ray.cancel(stream, force=False)

    def pids(self) -> list[int]:
        """The process of each worker."""
        pids: list[int] = _ray().get([worker.pid.remote() for worker in self._started()])
        return pids

    def close(self) -> None:
        for worker in self._pool:
            _ray().kill(worker)
        self._pool = []
        if self._ours:
            _ray().shutdown()
            self._ours = False
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _started(self) -> list[Any]:
        if not self._pool:
            ray = _ray()
            if not ray.is_initialized():
                self._connect(ray)
            self._check_room(ray)
            kind = ray.remote(_Worker).options(
                num_cpus=1, num_gpus=self.gpus, max_restarts=_LOSSES, max_task_retries=_LOSSES
            )
            self._pool = [kind.remote(self.opened) for _ in range(self.workers)]
        return self._pool

    def _connect(self, ray: Any) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            if self.address:
                ray.init(address=self.address, **quiet)
            else:
                # What travels is private: not below the folder that Ray shares with everybody on this machine.
                self._scratch = tempfile.mkdtemp(prefix="audit-ray-")
                ray.init(
                    num_cpus=self.workers,
                    include_dashboard=False,
                    object_store_memory=_STORE,
                    _temp_dir=self._scratch,
                    **quiet,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise AuditError(
                f"cannot reach a Ray cluster at {self.address or 'this machine'!r}: {_first(error)}"
            ) from None
        self._ours = True

    def _check_room(self, ray: Any) -> None:
        room = ray.available_resources()
        for what, asked in (("CPU", float(self.workers)), ("GPU", self.gpus * self.workers)):
            if (free := room.get(what, 0.0)) < asked:
                self.close()
                raise AuditError(f"expected {asked:g} free {what}s in the Ray cluster for this run, got {free:g}")


class _Worker:
    """One process of the cluster, with a place of its own. Ray starts it again where it is lost."""

    def __init__(self, opened: Callable[[], Any]) -> None:
        self.place = opened()

    def do(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        yield from work.at(self.place, items)

    def pid(self) -> int:
        return os.getpid()


def _portions(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise AuditError("--engine ray needs Ray: pip install 'audit-lm[ray]'") from None
    return ray


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
