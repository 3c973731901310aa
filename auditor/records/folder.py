"""The run folder: guesses and observations appended as secrets finish, the plan that resumes it,
what reports read.

Files are 0600. Knows files; knows nothing of models or terminals.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object, to_json
from auditor.core.nouns import CellKey, PrefixToken, TextForm
from auditor.records import file_digests
from auditor.records.attacked_secrets import PLAN, SECRETS
from auditor.records.journal import GUESSES, OBSERVATIONS, TOKENS, journals_of_run_folder
from auditor.records.remarks import REMARKS

_RUNS, _LATEST = Path("runs"), "latest"
_SECRETS, _WEIGHTS, _PREFIX_TOKEN = "secrets.sha256", "weights.json", "prefix_token.json"
_TEXT_FORM, _FACTS, _STOPS = "text_form.json", "facts.json", "until.sha256"

Item = TypeVar("Item")


class RunFolder:
    """One run on disk. `create` starts it, `reopen` continues an interrupted one; either locks
    other processes out.

    guesses, observations: finished secrets of the cells of attacks and of probes. tokens: those
    whose true suffix was scored token by token, by target.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        # whether `create` began this run; one that is resumed is somebody's already
        self._new = False
        self._ours = False  # whether `create` made the folder itself
        self.guesses, self.observations, self.tokens = journals_of_run_folder(path)

    @classmethod
    def create(cls, out: Path | None, name: str, plan: dict[str, Any]) -> RunFolder:
        """A new folder with the plan in it. Raises AuditError when it cannot be written or already
        holds a run."""
        path = out or unused_run_path(name)
        folder = cls(path)
        try:
            folder._ours = not path.exists()
            # The mode is of the last folder alone: parents get the umask's, and one that is there
            # keeps its own.
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder._lock = locks.acquire_folder_lock(path)
            # Asked only under the lock, which whoever writes a plan holds.
            if (path / PLAN).exists():
                raise AuditError(
                    f"expected a new folder for -o, but {str(path)!r} holds a run; continue it "
                    f"with --resume {path}"
                )
            (path / "state").mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise AuditError(
                f"cannot write the run folder {str(path)!r}: {error.strerror}"
            ) from error
        disk.replace_atomically(path / PLAN, json.dumps(plan, indent=1))
        folder._new = True
        if out is None:
            disk.replace_symlink(path.parent / _LATEST, path.name)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """A folder that `create` made. Finished secrets are read back; a line cut off by a crash is
        dropped."""
        if not (path / PLAN).is_file():
            raise AuditError(f"expected a run folder to resume, but {str(path)!r} holds no {PLAN}")
        folder = cls(path)
        folder._lock = locks.acquire_folder_lock(path)
        # Under the lock alone: a half-written line is cut off, which another process may be
        # writing.
        for journal in (folder.guesses, folder.observations, folder.tokens):
            journal.index_written_lines()
        return folder

    def close(self) -> None:
        """Lets other processes write to it."""
        if self._lock is not None:
            self._lock.release()

    def discard_if_empty(self) -> None:
        """Removes a new folder in which no attack found anything: a refused run leaves nothing half
        written."""
        found = any((self.path / name).exists() for name in (GUESSES, OBSERVATIONS))
        if not self._new or found or any((self.path / "state").iterdir()):
            return
        latest = self.path.parent / _LATEST
        if latest.is_symlink() and os.readlink(latest) == self.path.name:
            # nor does it point at the run before, which would be taken for this one
            latest.unlink()
        (self.path / "state").rmdir()
        (self.path / PLAN).unlink()
        for name in (
            _SECRETS,
            _WEIGHTS,
            _PREFIX_TOKEN,
            _TEXT_FORM,
            _STOPS,
            SECRETS,
            TOKENS,
            REMARKS,
            locks.LOCK,
        ):
            (self.path / name).unlink(missing_ok=True)
        if self._ours:
            with contextlib.suppress(OSError):  # somebody may have put other things there
                self.path.rmdir()
                if self.path.parent == _RUNS:
                    _RUNS.rmdir()  # where no other run is in it

    @property
    def identity(self) -> str:
        """Where it lies and when it was begun: no other run's, and the same for every process of
        this one."""
        # written once, by `create`
        return f"{self.path.resolve()} {(self.path / PLAN).stat().st_mtime_ns}"

    def plan(self) -> dict[str, Any]:
        return read_json_object(self.path / PLAN, "the plan of a run")

    def pin_secrets(self, fingerprint: str) -> None:
        """Ties the folder to the secrets it is started on. Raises AuditError where it holds answers
        about others."""
        changed = (
            f"expected the secrets that {str(self.path)!r} was started on, but the data has changed"
        )
        self._pin_digest(_SECRETS, fingerprint, changed)

    def pin_stopping_rules(self, digest: str) -> None:
        """Ties the folder to when its rows stop; "": no row does. Raises AuditError where others
        were to."""
        others = (
            f"expected the rules and baseline by which {str(self.path)!r} was to stop (--until), "
            "got others"
        )
        self._pin_digest(_STOPS, digest, others)

    def _pin_digest(self, name: str, digest: str, complaint: str) -> None:
        path = self.path / name
        if path.is_file() and path.read_bytes() != digest.encode():
            raise AuditError(complaint)
        # "": a run without stopping rules writes no file.
        if digest:
            disk.replace_atomically(path, digest)

    def refuse_changed_weights(self, now: Mapping[str, str]) -> None:
        """Raises AuditError by the name of a file where the answers in the folder are about other
        weights."""
        held = self._read_json_file_as_or_none(_WEIGHTS, dict[str, str], "the digests of weights")
        if held is not None or any((self.path / name).exists() for name in (GUESSES, OBSERVATIONS)):
            file_digests.check_model_files_unchanged(held, now, str(self.path))

    def pin_weights(self, now: Mapping[str, str]) -> None:
        """Ties the folder to the weights it is started on. Raises AuditError as
        `refuse_changed_weights`."""
        self.refuse_changed_weights(now)
        disk.replace_atomically(self.path / _WEIGHTS, json.dumps(now, indent=1))

    def save_prefix_token(self, prefix_token: PrefixToken) -> None:
        """Ties the folder to what stands before every text: a resumed run chooses none anew."""
        disk.replace_atomically(self.path / _PREFIX_TOKEN, json.dumps(to_json(prefix_token)))

    def prefix_token(self) -> PrefixToken | None:
        """None in a new folder.

        Raises AuditError where it is lost: what was found behind it must not stand beside what is
        found behind another.
        """
        found = self._read_json_file_as_or_none(
            _PREFIX_TOKEN, PrefixToken, "the prefix token of a run"
        )
        if found is None and (self.path / _SECRETS).is_file():
            where = self.path / _PREFIX_TOKEN
            raise AuditError(
                f"expected {where}, which says what stood before every text until now: it is "
                "missing"
            )
        return found

    def save_text_form(self, form: TextForm) -> None:
        """Ties the folder to how conversations are rendered: a resumed run, on another day too,
        chooses none anew."""
        disk.replace_atomically(self.path / _TEXT_FORM, json.dumps(to_json(form)))

    def text_form(self) -> TextForm | None:
        """None in a new folder, and for data that are not rendered."""
        return self._read_json_file_as_or_none(_TEXT_FORM, TextForm, "the text form of a run")

    def _read_json_file_as_or_none(self, name: str, kind: type[Item], what: str) -> Item | None:
        path = self.path / name
        if not path.exists():
            return None
        found: Item = from_json(kind, read_json_object(path, what), str(path))
        return found

    def save_secret_facts(self, facts: dict[str, Any]) -> None:
        """What reports may tell of each secret (`secret_details.secret_fact_columns`): a column a
        key, no text."""
        disk.replace_atomically(self.path / SECRETS, json.dumps(facts))

    def probe_facts_of_cell(self, cell: CellKey) -> dict[str, float]:
        """What `save_probe_facts` kept of this cell; empty where it kept nothing."""
        return self._probe_facts_by_cell().get(str(cell), {})

    def save_probe_facts(self, cell: CellKey, facts: Mapping[str, float]) -> None:
        """Keeps what a probe found of a cell as a whole, not of single secrets."""
        if facts:
            known = {**self._probe_facts_by_cell(), str(cell): dict(facts)}
            disk.replace_atomically(self.path / _FACTS, json.dumps(to_json(known)))

    def _probe_facts_by_cell(self) -> dict[str, dict[str, float]]:
        return (
            self._read_json_file_as_or_none(
                _FACTS, dict[str, dict[str, float]], "what probes found of each cell"
            )
            or {}
        )

    def attack_state_path(self, name: str) -> Path:
        """Where an attack's tuned state lies (`runs/tuned_states.py`)."""
        return self.path / "state" / (name.replace("/", "--") + ".pt")


def remove_latest_link() -> None:
    """Removes runs/latest when a new run is asked for: if that is refused, no older run is taken
    for it."""
    latest = _RUNS / _LATEST
    if latest.is_symlink():
        latest.unlink()


def unused_run_path(name: str) -> Path:
    """runs/<UTC time>-<name>, or the first of its kind that is free: two runs may start in one
    second."""
    path = free = _RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}"
    count = 1
    # A first look alone: where two find one name free, the lock in `create` lets one of them
    # through.
    while free.exists():
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


def batch_finished_secrets(stream: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Finished secrets in small lists, so that appending them costs one flush for several."""
    while batch := list(islice(stream, size)):
        yield batch
