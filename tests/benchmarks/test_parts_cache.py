"""The cache of parts, on parts that are a line of text: whole or not there, whoever dies, damages
or competes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from auditor.benchmarks.lab import parts_cache
from auditor.benchmarks.lab.parts_cache import LabParts
from auditor.core.errors import AuditError

PARTS = ("first", "base", "top_1", "other")  # each stands on those before it, but for the last
_PATIENCE = 300  # seconds until a process counts as hung, on however busy a machine


class Toys:
    """Parts that are built in a row; how often each was."""

    def __init__(self, folder: Path, makes: bool = True) -> None:
        self.built, self.told = list[str](), list[str]()
        self.parts = LabParts(folder, makes, "first", ("first", "base"), self.told.append)

    def get(self, part: str) -> str:
        def build(path: Path) -> None:
            self.built.append(part)
            (path / "below").mkdir()
            (path / "below" / "text").write_text(f"this is {part}")

        return (self.parts.build_once(part, build) / "below" / "text").read_text()

    def all(self) -> list[str]:
        return [self.get(part) for part in PARTS]


ALL = [f"this is {part}" for part in PARTS]


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_a_part_is_built_once_and_says_how_long_that_took(tmp_path: Path) -> None:
    toys = Toys(tmp_path / "cache")
    assert (
        toys.get("base") == "this is base"
        and toys.built == ["base"]
        and there(tmp_path / "cache") == ["base"]
    )
    assert toys.all() == ALL and Toys(tmp_path / "cache").all() == ALL
    assert sorted(toys.built) == sorted(PARTS) and set(toys.parts.seconds) == set(PARTS)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("part", PARTS)
def test_a_build_that_dies_leaves_nothing_that_looks_finished(
    tmp_path: Path, part: str, error: type[BaseException]
) -> None:
    """It dies after its files are written, before it is done."""
    toys = Toys(tmp_path)
    for name in PARTS[: PARTS.index(part)]:
        toys.get(name)

    def dies(path: Path) -> None:
        (path / "text").write_text("all of it")
        raise error

    with pytest.raises(error):
        toys.parts.build_once(part, dies)
    assert there(tmp_path) == sorted(PARTS[: PARTS.index(part)])
    assert Toys(tmp_path).all() == ALL and there(tmp_path) == sorted(PARTS)


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    """kill -9 runs no clean-up: a scratch folder and a lock file stay."""
    for part in PARTS:
        (tmp_path / f".{part}.audit-scratch-abc123").mkdir()
        (tmp_path / f".{part}.audit-scratch-abc123" / "text").write_text("half")
        (tmp_path / f"{part}.lock").touch()
    assert Toys(tmp_path).all() == ALL and there(tmp_path) == sorted(PARTS)


@pytest.mark.parametrize(
    ("part", "file", "damage", "anew"),
    [
        ("other", "below/text", lambda path: path.write_text("this is otheR"), ["other"]),
        ("other", "below/text", Path.unlink, ["other"]),
        ("other", "seconds.json", lambda path: path.write_text("["), ["other"]),
        ("other", "sha256.json", Path.unlink, ["other"]),
        ("other", "more", Path.touch, ["other"]),
        ("base", "below/text", lambda path: path.write_bytes(b""), ["base", "top_1", "other"]),
        ("first", "below/text", Path.unlink, list(PARTS)),
    ],
)
def test_a_damaged_part_is_built_anew_with_all_that_was_built_on_it(
    tmp_path: Path, part: str, file: str, damage: Callable[[Path], Any], anew: list[str]
) -> None:
    """And the user is told. The first part is in all the others, yet stands where another one is
    damaged."""
    Toys(tmp_path).all()
    damage(tmp_path / part / file)
    toys = Toys(tmp_path)
    assert toys.all() == ALL and toys.built == anew
    assert toys.told == [
        f"the lab's {part} in the cache had changed since it was built: it was rebuilt"
    ]


def test_what_is_missing_is_refused_where_nothing_is_made(tmp_path: Path) -> None:
    Toys(tmp_path).get("base")
    toys = Toys(tmp_path, makes=False)
    assert toys.get("base") == "this is base"
    with pytest.raises(AuditError, match="set AUDIT_CACHE to a folder that all of them share"):
        toys.get("other")
    assert there(tmp_path) == ["base"]


def _build(cache: str, barrier: Any, answers: Any) -> None:
    toys = Toys(Path(cache))
    barrier.wait(_PATIENCE)
    answers.put((toys.all(), toys.built))


def test_two_processes_end_with_one_valid_part(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_build, args=(str(tmp_path), barrier, answers)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=_PATIENCE) for _ in processes]
    for process in processes:
        process.join(_PATIENCE)
        assert process.exitcode == 0
    assert [texts for texts, _ in found] == [ALL, ALL]
    assert sorted(found[0][1] + found[1][1]) == sorted(PARTS)  # each was built by one of them
    assert there(tmp_path) == sorted(PARTS)


def test_a_process_that_waits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_cache, "_PATIENCE", 0.01)
    heard, waiting = list[tuple[str, int, int]](), list[threading.Thread]()
    waits = LabParts(tmp_path, True, "first", (), print, lambda *told: heard.append(told))

    def build(path: Path) -> None:
        waiting.append(threading.Thread(target=waits.build_once, args=("base", lambda path: None)))
        waiting[0].start()
        deadline = time.monotonic() + _PATIENCE
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)

    LabParts(tmp_path, True, "first", (), print).build_once("base", build)
    waiting[0].join(_PATIENCE)
    assert not waiting[0].is_alive()
    assert heard == [("another process builds the lab's base: waiting", 0, 1)]
