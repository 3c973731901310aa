"""Manage the run folder: answers, the plan to resume from, and files for reports.

Answers are appended as secrets finish. Files have mode 0600.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import read_json_object, read_record, write_json
from auditor.core.nouns import CellKey, PrefixToken, TextForm
from auditor.records import file_digests
from auditor.records.attacked_secrets import PLAN, SECRETS
from auditor.records.journal import GUESSES, OBSERVATIONS, TOKENS, open_journals
from auditor.records.remarks import REMARKS

_RUNS = Path("runs")
_LATEST = "latest"
_SECRETS = "secrets.sha256"
_WEIGHTS = "weights.json"
_PREFIX_TOKEN = "prefix_token.json"
_TEXT_FORM = "text_form.json"
_FACTS = "facts.json"
_STOPS = "until.sha256"
_VERSIONS = "versions.txt"

Item = TypeVar("Item")


def refuse_other_versions(folder: Path, now: str) -> None:
    """Raise AuditError if the answers in a run's folder are from other programs.

    now: the current programs; without the precision, any precision will do.
    """
    path = folder / _VERSIONS
    recorded = path.read_bytes().decode(errors="replace") if path.is_file() else now
    if not f"{recorded},".startswith(f"{now},"):
        raise AuditError(
            f"expected {recorded}, with which {str(folder)!r} was started, got {now}: give a new "
            "folder"
        )


class RunFolder:
    """Manage a run's folder, locked against other processes.

    `create` starts a run and `reopen` continues an interrupted run.

    Attributes:
        path: path of the folder.
        guesses: attacks' answers about each secret, keyed by cell (target, setting, attack).
        observations: probes' answers about each secret, keyed by cell (target, setting, probe).
        tokens: log-probabilities of each secret's suffix tokens, keyed by target.
        numbers: numbers of the secrets, which all three journals share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        # whether `create` started this run; a resumed run existed before
        self._new = False
        self._ours = False  # whether `create` made the folder
        self.guesses, self.observations, self.tokens = open_journals(path)
        self.numbers = self.guesses.numbers  # of secrets, in all journals

    @classmethod
    def create(cls, out: Path | None, name: str, plan: dict[str, Any]) -> RunFolder:
        """Create a folder with the plan.

        Raise AuditError if the folder cannot be written or already holds a run.

        Args:
            out: the folder; None for a new folder in runs/.
            name: end of the new folder's name, if `out` is None.
            plan: the plan as JSON values.
        """
        path = out or find_unused_path(name)
        folder = cls(path)
        try:
            folder._ours = not path.exists()
            # The mode applies only to the last folder: parents get the umask's, and an existing
            # folder keeps its mode.
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder._lock = locks.acquire_folder_lock(path)
            # Check under the lock, which every writer of a plan holds.
            refuse_started_run(path)
            (path / "state").mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise AuditError(
                f"cannot write the run folder {str(path)!r}: {error.strerror}"
            ) from error
        write_json(path / PLAN, plan)
        folder._new = True
        if out is None:
            disk.replace_symlink(path.parent / _LATEST, path.name)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open a folder that `create` made, and read its finished secrets.

        A line that a crash left incomplete is dropped.
        """
        if not (path / PLAN).is_file():
            raise AuditError(f"expected a run folder to resume, but {str(path)!r} has no {PLAN}")
        folder = cls(path)
        folder._lock = locks.acquire_folder_lock(path)
        # Only under the lock: this cuts off a half-written line, which another process may be
        # writing.
        for journal in (folder.guesses, folder.observations, folder.tokens):
            journal.index_written_lines()
        folder.numbers.index_table(())
        return folder

    def close(self) -> None:
        """Release the lock, so that other processes can write to the folder."""
        if self._lock is not None:
            self._lock.release()

    def discard_if_empty(self) -> None:
        """Remove a new folder if it has no answers, so that a refused run leaves no files."""
        if not self._new or self._has_answers or any((self.path / "state").iterdir()):
            return
        latest = self.path.parent / _LATEST
        if latest.is_symlink() and os.readlink(latest) == self.path.name:
            # do not point it at the previous run, which would be mistaken for this run
            latest.unlink()
        (self.path / "state").rmdir()
        (self.path / PLAN).unlink()
        for name in (
            _SECRETS,
            _WEIGHTS,
            _PREFIX_TOKEN,
            _TEXT_FORM,
            _STOPS,
            _VERSIONS,
            SECRETS,
            TOKENS,
            REMARKS,
            locks.LOCK,
        ):
            (self.path / name).unlink(missing_ok=True)
        if self._ours:
            with contextlib.suppress(OSError):  # the folder may contain other files
                self.path.rmdir()
                if self.path.parent == _RUNS:
                    _RUNS.rmdir()  # if it holds no other run

    @property
    def _has_answers(self) -> bool:
        return any((self.path / name).exists() for name in (GUESSES, OBSERVATIONS))

    @property
    def identity(self) -> str:
        """Folder's path and start time, unique to this run and the same in all its processes."""
        # written once, by `create`
        return f"{self.path.resolve()} {(self.path / PLAN).stat().st_mtime_ns}"

    def plan(self) -> dict[str, Any]:
        return read_json_object(self.path / PLAN, "the plan of a run")

    def pin_secrets(self, fingerprint: str) -> None:
        """Record the fingerprint of the secrets, or compare it with the recorded one.

        A fingerprint is a digest (`digest_comparable_secrets`). Raise AuditError if the folder's
        answers are about different secrets.
        """
        complaint = (
            f"expected the secrets that {str(self.path)!r} was started on, but the data has changed"
        )
        self._pin_digest(_SECRETS, fingerprint, complaint)

    def pin_stopping_rules(self, digest: str) -> None:
        """Record the digest of the stopping rules; "" if no queries may stop early.

        Raise AuditError if a different digest is already recorded.
        """
        complaint = (
            f"expected the rules and baseline by which {str(self.path)!r} was to stop (--until), "
            "got others"
        )
        self._pin_digest(_STOPS, digest, complaint)

    def pin_versions(self, now: str) -> None:
        """Record the programs and the precision of the answers, or compare with the recorded ones.

        Raise AuditError if the folder's answers are from others: `now` names the current ones.
        """
        refuse_other_versions(self.path, now)
        disk.replace_atomically(self.path / _VERSIONS, now)

    def _pin_digest(self, name: str, digest: str, complaint: str) -> None:
        path = self.path / name
        if path.is_file() and path.read_bytes() != digest.encode():
            raise AuditError(complaint)
        # "": a run without stopping rules writes no file.
        if digest:
            disk.replace_atomically(path, digest)

    def refuse_changed_weights(self, now: Mapping[str, str]) -> None:
        """Raise AuditError, with a file's name, if the folder's answers are from different weights.

        Args:
            now: the current SHA-256 of each file, keyed by `role/file`.
        """
        digests = read_record(self.path / _WEIGHTS, dict[str, str], "the digests of weights")
        if digests is not None or self._has_answers:
            file_digests.check_model_files_unchanged(digests, now, str(self.path))

    def pin_weights(self, now: Mapping[str, str]) -> None:
        """Record the current SHA-256 of each weight file (`now`), keyed by `role/file`.

        Raise AuditError, with a file's name, if the folder's answers are from different weights.
        """
        self.refuse_changed_weights(now)
        write_json(self.path / _WEIGHTS, now)

    def save_prefix_token(self, prefix_token: PrefixToken) -> None:
        """Save the prefix token, so that a resumed run does not choose one again.

        The prefix token is the token that the run puts before every text.
        """
        write_json(self.path / _PREFIX_TOKEN, prefix_token)

    def prefix_token(self) -> PrefixToken | None:
        """The run's prefix token; None in a new folder.

        Raise AuditError if the saved token is lost, because results with different prefix tokens
        must not be mixed.
        """
        path = self.path / _PREFIX_TOKEN
        prefix = read_record(path, PrefixToken, "the prefix token of a run")
        if prefix is None and (self.path / _SECRETS).is_file():
            raise AuditError(
                f"expected {path}, the record of the tokens before every text so far: it is missing"
            )
        return prefix

    def save_text_form(self, form: TextForm) -> None:
        """Save the text form: the template and date that turn conversations into text.

        A run that resumes on another day then keeps the same date.
        """
        write_json(self.path / _TEXT_FORM, form)

    def text_form(self) -> TextForm | None:
        """Saved text form (the template and date that turn conversations into text).

        None in a new folder, or if the data has no conversations.
        """
        return read_record(self.path / _TEXT_FORM, TextForm, "the text form of a run")

    def save_secret_attributes(self, facts: dict[str, Any]) -> None:
        """Save the publishable attributes of each secret, without text.

        Args:
            facts: a column per attribute, keyed by name, from
                `secret_details.build_attribute_columns`.
        """
        write_json(self.path / SECRETS, facts, indent=None)

    def read_probe_numbers(self, cell: CellKey) -> dict[str, float]:
        """Return the numbers that `save_probe_numbers` saved; {} if there are none.

        Args:
            cell: target, setting and probe.
        """
        return self._read_all_probe_numbers().get(str(cell), {})

    def save_probe_numbers(self, cell: CellKey, facts: Mapping[str, float]) -> None:
        """Save numbers that a probe measured over all secrets together.

        Args:
            cell: target, setting and probe.
            facts: the numbers, keyed by name.
        """
        if facts:
            known = {**self._read_all_probe_numbers(), str(cell): dict(facts)}
            write_json(self.path / _FACTS, known)

    def _read_all_probe_numbers(self) -> dict[str, dict[str, float]]:
        kind = dict[str, dict[str, float]]
        return read_record(self.path / _FACTS, kind, "what probes found of each cell") or {}

    def attack_state_path(self, name: str) -> Path:
        """Return the path at which an attack's fitted parameters are saved (`runs/audit.py`).

        Args:
            name: name of the attack and of its access.
        """
        return self.path / "state" / (name.replace("/", "--") + ".pt")


def refuse_started_run(path: Path) -> None:
    """Raise AuditError if the folder already contains a run."""
    if (path / PLAN).exists():
        raise AuditError(
            f"expected a new folder for -o, but {str(path)!r} contains a run; audit run --resume "
            f"{path} continues it if it is not finished"
        )


def remove_latest_link() -> None:
    """Remove the link runs/latest before a new run.

    If the new run is refused, no link to an older run remains.
    """
    latest = _RUNS / _LATEST
    if latest.is_symlink():
        latest.unlink()


def find_unused_path(name: str) -> Path:
    """Return the path runs/<UTC time>-<name>, with a number appended if that path exists."""
    path = free = _RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}"
    count = 1
    # Only a first check: if two processes get the same free name, the lock in `create` admits
    # one of them.
    while free.exists():
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


def batch_finished_secrets(stream: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Group finished secrets into lists of at most `size`, which are then written together."""
    while batch := list(islice(stream, size)):
        yield batch
