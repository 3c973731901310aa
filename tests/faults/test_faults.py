"""The fault table in small: the command in forks of this process, killed and stopped, without room,
damaged, twice."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from validation.faults import kills, others, worlds
from validation.faults.rows import Recovery, markdown, totals
from validation.faults.worlds import MEMBERS, OWN, CommandPhase, FaultCommand, World

_, SAMPLING, PROBES, REPORTS = OWN.phases


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is forked must not wait for threads that it does not have
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield worlds.make(tmp_path_factory.mktemp("faults"))
    torch.set_num_threads(threads)


def held(row: Recovery) -> bool:
    """With all that a reader of the failure needs."""
    assert row.held, row
    return True


@pytest.mark.parametrize(
    "case",
    [dataclasses.replace(OWN, phases=(SAMPLING, REPORTS)), MEMBERS],
    ids=lambda case: case.name,
)
def test_what_is_killed_goes_on_to_the_same_end(world: World, case: FaultCommand) -> None:
    for row in kills.rows(world, case, 1, seed=1):
        assert held(row) and row.code == -signal.SIGKILL and row.kills >= 1


@pytest.mark.parametrize(
    ("phase", "number"),
    [(SAMPLING, signal.SIGTERM), (REPORTS, signal.SIGHUP)],
    ids=["SIGTERM", "SIGHUP"],
)
def test_what_is_asked_to_end_says_how_to_go_on(
    world: World, phase: CommandPhase, number: signal.Signals
) -> None:
    row = others.signals(world, OWN, phase, number, 0.01)
    assert (
        held(row)
        and row.said
        == "interrupted; finished secrets are kept. Continue with: audit run --resume run"
    )


def test_what_finds_no_room_says_so_and_goes_on_when_there_is_some(world: World) -> None:
    row = others.large_file(world, OWN, 10_000)
    assert (
        held(row)
        and row.said.startswith("error: ")
        and row.said.endswith(" cannot be written: File too large")
    )


@pytest.mark.skipif(os.getuid() == 0, reason="root writes wherever it likes")
def test_a_folder_that_is_not_ours_is_left_alone(world: World) -> None:
    row = others.not_ours(world, OWN, PROBES, "run")
    assert held(row) and row.said == "error: run/.lock: cannot be written: Permission denied"


def test_the_second_of_two_is_told_who_the_first_is(world: World) -> None:
    row = others.second(world, OWN, SAMPLING, resume=True)
    assert held(row) and "'run' is in use by process " in row.said


DAMAGES = {(one.name, Path(one.files).name): one for one in others.DAMAGES}


@pytest.mark.parametrize(
    "which", [("last line cut off", "guesses.jsonl"), ("last line overwritten", "guesses.jsonl")]
)
def test_damage_is_undone_or_refused_by_name(world: World, which: tuple[str, str]) -> None:
    row = others.damaged(world, OWN, PROBES, DAMAGES[which], seed=1)
    assert held(row) and (row.code == 0 or which[1] in row.said)


def test_a_difference_is_seen(world: World) -> None:
    """Another number, word, line and file, and what was left half written; times are none."""
    stand = world.stand(OWN)
    assert world.run(OWN, stand).code == 0
    assert not list(kills.compared(world, OWN, stand))
    for name, old, new in (
        ("result.json", '"seed": 0', '"seed": 1'),
        ("report.md", "Privacy audit", "Privacy audits"),
        ("weights.json", '"', "'"),
        ("guesses.jsonl", '"samples": 8', '"samples": 9'),
    ):
        path = stand / "run" / name
        before = path.read_text()
        path.write_text(before.replace(old, new, 1))
        assert [why for why in _compared(world, stand) if why.startswith(name)], name
        path.write_text(before)
    (stand / "run" / ".audit-x.tmp").touch()
    assert any("half written" in why for why in kills.compared(world, OWN, stand))


def _compared(world: World, stand: Path) -> list[str]:
    try:
        return list(kills.compared(world, OWN, stand))
    except ValueError:  # no JSON any more
        return ["weights.json is none"]


def test_the_table_counts_what_it_shows() -> None:
    equal = Recovery(
        "SIGKILL", "sampling", "`audit run`", "7% of it done", "", -9, "--resume", "", 0, kills=2
    )
    other = dataclasses.replace(equal, moment="91% of it done", then_code=3, kills=1)
    table = markdown([equal, other])
    assert "NO, 1 of 2" in table and "| 2: 7–91% of it done; 1 killed twice |" in table
    assert totals([equal, other]) == "2 faults, 3 kills among them: 1 of 2 ended as undisturbed"
