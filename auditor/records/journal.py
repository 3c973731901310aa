"""Append records to a file as secrets finish, and read the records when a run resumes."""

from __future__ import annotations

import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from auditor.core import disk
from auditor.core.arrays import Ints, Strings
from auditor.core.errors import AuditError, refuse_unreadable_path
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import CellKey, Guess, Guesses, Observation, TokenLogProbs
from auditor.core.secret_table import STRINGS

GUESSES = "guesses.jsonl"
OBSERVATIONS = "observations.jsonl"
TOKENS = "tokens.jsonl"

Key = TypeVar("Key", CellKey, str)
Record = TypeVar("Record", Guesses, Observation, TokenLogProbs)


class SecretNumbers:
    """Number secrets, first those of a run's table, then others in the order of their answers.

    The ids of a table are found by their hashes, which take a tenth of the memory of a dict.
    """

    def __init__(self, ids: Sequence[str] | Strings = ()) -> None:
        # sorted, and the index of each hash's id
        self._hashes: Ints = np.empty(0, np.int64)
        self._places: Ints = np.empty(0, np.int64)
        self._ids: Sequence[str] | Strings = ()
        self._others: dict[str, int] = {}
        self.index_table(ids)

    def __len__(self) -> int:
        return len(self._ids) + len(self._others)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._ids, self._others)

    def index_table(self, ids: Sequence[str] | Strings) -> None:
        """Number these ids by their position, after secrets that already have numbers."""
        if len(self):
            ids = np.array([*dict.fromkeys(itertools.chain(self, ids))], STRINGS)
        hashes = _hash_ids(ids)
        places = np.argsort(hashes)
        hashes = hashes[places]
        if (hashes[1:] == hashes[:-1]).any():
            return
        self._ids = ids
        self._places = places
        self._hashes = hashes
        self._others = {}

    def find(self, secret: object) -> int | None:
        """Return the number of a secret by its id; None if it has none."""
        number = hash(secret)
        place = self._hashes.searchsorted(number)  # half the time of `np.searchsorted`
        if place < len(self._hashes) and self._hashes[place] == number:
            return int(self._places[place])
        return self._others.get(secret)  # type: ignore[call-overload]

    def find_all(self, secrets: Sequence[str] | Strings) -> Ints:
        """Return the numbers of secrets by their ids, (secrets,); -1 for ids outside the table."""
        if len(secrets) == len(self._ids) and np.array_equal(secrets, self._ids):
            return np.arange(len(secrets))
        hashes = _hash_ids(secrets)
        if not len(self._hashes):
            return np.full(len(hashes), -1)
        order = np.argsort(hashes)  # adjacent searches read the same memory
        places = np.empty_like(order)
        places[order] = np.searchsorted(self._hashes, hashes[order])
        places[places == len(self._hashes)] = 0
        return np.where(self._hashes[places] == hashes, self._places[places], -1)

    def add_all(self, secrets: Sequence[str] | Strings) -> Ints:
        """Return the numbers of secrets by their ids, (secrets,); new secrets get the next ones."""
        numbers = self.find_all(secrets)
        for place in np.flatnonzero(numbers < 0).tolist():
            numbers[place] = self.add(secrets[place])
        return numbers

    def add(self, secret: str) -> int:
        """Return the number of a secret by its id; a new secret gets the next number."""
        number = self.find(secret)
        if number is None:
            number = len(self)
            self._others[secret] = number
        return number


def _hash_ids(ids: Sequence[str] | Strings) -> Ints:
    return np.fromiter(map(hash, ids), np.int64, len(ids))


@dataclass
class CellJournal(Generic[Key, Record]):
    """Manage a file of finished secrets, with a JSON line for each.

    The key of a line is a target, or a cell (target, setting, and attack or probe). Lines are
    written at once and read on demand. Memory holds only the start of each line, because the
    guesses of all secrets may be larger than any model. A second record of a secret replaces the
    first.

    Args:
        path: path of the file.
        encode: function from key and record to JSON values.
        decode: function from JSON values to key and record.
        numbers: the numbers of secrets, which a run's journals share.
        _finished: finished secrets, keyed by the journal's keys.
    """

    path: Path
    encode: Callable[[Key, Record], dict[str, Any]]
    decode: Callable[[dict[str, Any]], tuple[Key, Record]]
    numbers: SecretNumbers
    _finished: dict[Key, FinishedSecrets[Record]] = field(default_factory=dict)

    def finished_secrets(self, key: Key) -> FinishedSecrets[Record]:
        """Return the finished secrets of a key; later secrets are added to the same object."""
        if key not in self._finished:
            self._finished[key] = FinishedSecrets(self.numbers, self._read_records)
        return self._finished[key]

    def append(self, key: Key, batch: Sequence[Record]) -> None:
        lines = []
        for record in batch:
            lines.append(json.dumps(self.encode(key, record)) + "\n")
        at = disk.append_durably(self.path, "".join(lines))
        finished = self.finished_secrets(key)
        for record, line in zip(batch, lines, strict=True):
            finished.set_begin(record.secret, at)
            at += len(line)  # this JSON is ASCII: a character is a byte

    def index_written_lines(self) -> None:
        """Find the start of each line, and remove a half-written last line.

        Raise AuditError if a line is not a record of this journal.
        """
        if not self.path.exists():
            return
        at = 0
        with refuse_unreadable_path(self.path), open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # cut off by a crash, so it is the last line
                    break
                key, record = self._parse_journal_line(line, number)
                self.finished_secrets(key).set_begin(record.secret, at)
                at += len(line)
        # Remove a cut-off append, so that the next append starts on a new line.
        disk.truncate(self.path, at)

    def _read_records(self, begins: Iterable[int]) -> Iterator[Record]:
        """Yield the record that starts at each given byte; raise AuditError if the file changed."""
        places = array("q", begins)
        if not places:  # nothing was written: perhaps there is no file
            return
        with refuse_unreadable_path(self.path), open(self.path, "rb") as file:
            for begin in places:
                file.seek(begin)
                yield self._parse_journal_line(file.readline())[1]

    def _parse_journal_line(self, line: bytes, number: int | None = None) -> tuple[Key, Record]:
        """Return the key and record of a line.

        Raise AuditError if the line is not a record of this journal.

        Args:
            line: the line's bytes.
            number: the line number for messages; None if unknown.
        """
        try:
            return self.decode(json.loads(line))
        except (
            AuditError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            if number is None:
                where = f"{self.path}"
            else:
                where = f"{self.path}, line {number}"
            raise AuditError(
                f"{where}: expected a finished secret as a run writes it, got something else; "
                "if you delete that line, its secret is attacked again"
            ) from error


_UNFINISHED = -1


@dataclass(eq=False)
class FinishedSecrets(Mapping[str, Record]):
    """Map secret ids to records of finished secrets, in the order of their lines in the file.

    Each record is read from the file on demand.

    Args:
        numbers: the numbers of secrets.
        read_lines: function that yields the records whose lines start at given bytes.
        _begins: the byte at which each secret's line starts, by the secret's index.
        _count: number of finished secrets.
    """

    numbers: SecretNumbers
    read_lines: Callable[[Iterable[int]], Iterator[Record]]
    _begins: array[int] = field(default_factory=lambda: array("q"))
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        ids = list(self.numbers)
        begins = np.array(self._begins)
        for number in np.argsort(begins)[len(begins) - self._count :].tolist():
            yield ids[number]

    def __contains__(self, secret: object) -> bool:
        return self._find_begin(secret) != _UNFINISHED

    def __getitem__(self, secret: str) -> Record:
        begin = self._find_begin(secret)
        if begin == _UNFINISHED:
            raise KeyError(secret)
        return next(self.read_lines([begin]))

    def read_records(self, secrets: Iterable[str]) -> Iterator[Record]:
        """Yield the records of these secrets, opening the file only once."""
        yield from self.read_lines(map(self._find_begin, secrets))

    def set_begin(self, secret: str, begin: int) -> None:
        """Record that a secret's line starts at byte `begin` of the file."""
        number = self.numbers.add(secret)
        n_new = number + 1 - len(self._begins)
        self._begins.extend(itertools.repeat(_UNFINISHED, n_new))
        self._count += self._begins[number] == _UNFINISHED
        self._begins[number] = begin

    def _find_begin(self, secret: object) -> int:
        number = self.numbers.find(secret)
        if number is None or number >= len(self._begins):
            return _UNFINISHED
        return self._begins[number]


def open_journals(
    folder: Path,
) -> tuple[
    CellJournal[CellKey, Guesses],
    CellJournal[CellKey, Observation],
    CellJournal[str, TokenLogProbs],
]:
    """Open three journals: attacks' answers, probes' observations and scored suffix tokens."""
    numbers = SecretNumbers()
    return (
        CellJournal(folder / GUESSES, _encode_guesses, _decode_guesses, numbers),
        CellJournal(
            folder / OBSERVATIONS,
            lambda cell, observation: {"cell": str(cell), **to_json(observation)},
            _decode_observation,
            numbers,
        ),
        CellJournal(folder / TOKENS, _encode_token_log_probs, _decode_token_log_probs, numbers),
    )


def _encode_guesses(cell: CellKey, guesses: Guesses) -> dict[str, Any]:
    # Without field names, which would be much of the file: in the order of `Guess`.
    # A score may be infinite: `json` writes and reads `Infinity`, which other programs reject.
    ranked = []
    for g in guesses.ranked:
        ranked.append([list(g.suffix), g.score, g.count, g.log_prob, g.min_log_prob])
    rest = to_json(replace(guesses, ranked=()))
    return {"cell": str(cell), **rest, "ranked": ranked}


def _decode_guesses(record: dict[str, Any]) -> tuple[CellKey, Guesses]:
    ranked = tuple(Guess(tuple(suffix), *rest) for suffix, *rest in record["ranked"])
    if not ranked:
        raise ValueError("an answer without a guess")
    cell = CellKey.parse_cell_key(record.pop("cell"))
    # an older line lacks the newer fields
    guesses = from_json(Guesses, {**record, "ranked": []})
    return cell, replace(guesses, ranked=ranked)


def _decode_observation(record: dict[str, Any]) -> tuple[CellKey, Observation]:
    cell = CellKey.parse_cell_key(record.pop("cell"))
    observation = from_json(Observation, record, "observation")
    # Interned: each line would otherwise have its own copy of all names.
    values = {}
    for name, value in observation.values.items():
        values[sys.intern(name)] = value
    return cell, Observation(observation.secret, values)


def _encode_token_log_probs(target: str, record: TokenLogProbs) -> dict[str, Any]:
    # Round when writing: the first run and a resumed run then read equal numbers.
    return {
        "target": target,
        "secret": record.secret,
        "log_probs": to_json([round(x, 4) for x in record.log_probs]),
    }


def _decode_token_log_probs(record: dict[str, Any]) -> tuple[str, TokenLogProbs]:
    return record["target"], TokenLogProbs(record["secret"], tuple(map(float, record["log_probs"])))
