"""Records appended to a file as secrets finish, and read again by who goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import CellKey, Guess, Guesses, Observation, TokenLogProbs

Key = TypeVar("Key", CellKey, str)
Record = TypeVar("Record", Guesses, Observation, TokenLogProbs)


@dataclass
class _Journal(Generic[Key, Record]):
    """Finished secrets by cell (or target), one line of JSON each: on disk before they count, read back by `read`."""

    path: Path
    encode: Callable[[Key, Record], dict[str, Any]]
    decode: Callable[[dict[str, Any]], tuple[Key, Record]]
    _done: dict[Key, dict[str, Record]] = field(default_factory=dict)

    def done(self, key: Key) -> dict[str, Record]:
        return self._done.setdefault(key, {})

    def append(self, key: Key, batch: Sequence[Record]) -> None:
        disk.append(self.path, "".join(json.dumps(self.encode(key, record)) + "\n" for record in batch))
        self.done(key).update((record.secret, record) for record in batch)

    def read(self) -> None:
        """Raises AuditError for a line that is none of ours."""
        if not self.path.exists():
            return
        try:
            *whole, rest = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise AuditError(f"{self.path}: cannot be read: {error.strerror}") from error
        for number, line in enumerate(whole, 1):
            try:
                key, record = self.decode(json.loads(line))
                self.done(key)[record.secret] = record
            except (AuditError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                where = f"{self.path}, line {number}"
                raise AuditError(
                    f"{where}: expected a finished secret as a run writes it, got something else"
                ) from error
        if rest:  # the last append was cut off: forget it, so that the next one starts on a line of its own
            disk.replace(self.path, b"".join(line + b"\n" for line in whole))


def _encode(cell: CellKey, guesses: Guesses) -> dict[str, Any]:
    ranked = [[list(g.suffix), g.score, g.count, g.log_prob, g.min_log_prob] for g in guesses.ranked]
    rest = to_json(replace(guesses, ranked=()))
    return {"cell": str(cell), **rest, "ranked": ranked}


def _decode(record: dict[str, Any]) -> tuple[CellKey, Guesses]:
    ranked = tuple(Guess(tuple(suffix), *rest) for suffix, *rest in record["ranked"])
    rest = {name: value for name, value in record.items() if name not in ("cell", "ranked")}
    guesses: Guesses = from_json(Guesses, {**rest, "ranked": []})  # an older line lacks the newer fields
    return CellKey.read(record["cell"]), replace(guesses, ranked=ranked)


def _encode_observation(cell: CellKey, observation: Observation) -> dict[str, Any]:
    return {"cell": str(cell), **to_json(observation)}


def _decode_observation(record: dict[str, Any]) -> tuple[CellKey, Observation]:
    observation: Observation = from_json(Observation, {k: v for k, v in record.items() if k != "cell"}, "observation")
    return CellKey.read(record["cell"]), observation


def _encode_tokens(target: str, seen: TokenLogProbs) -> dict[str, Any]:
    return {"target": target, "secret": seen.secret, "log_probs": to_json([round(x, 4) for x in seen.log_probs])}


def _decode_tokens(record: dict[str, Any]) -> tuple[str, TokenLogProbs]:
    return record["target"], TokenLogProbs(record["secret"], tuple(map(float, record["log_probs"])))
