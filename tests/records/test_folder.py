"""What is written to a run folder comes back as it was, is read by nobody else, and survives a
crash."""

from __future__ import annotations

import gc
import json
import math
import os
import stat
import tracemalloc
import weakref
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Certificate, Guess, Guesses, Observation, TokenLogProbs
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.records.attacked_secrets import read_answered_secrets
from auditor.records.folder import RunFolder, batch_finished_secrets
from auditor.records.journal import SecretNumbers, open_journals


def answer(name: str, score: float = -1.5, drawn: int = 6) -> Guesses:
    return Guesses(
        name, (Guess((3, 1, 2), score, 2), Guess((3, 1, 4), score - 1)), 3, drawn, near_boundary=1
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "name", {"seed": 7, "attack": ["a"]})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


CELL = CellKey("t", "white-box", "a")
words = st.text(st.characters(exclude_characters="/", codec="utf-8"))
keys = st.builds(CellKey, words, words, words)
scores = st.floats(allow_nan=False)
shares = st.floats(0, 1)
known = st.none() | scores
guess = st.builds(
    Guess,
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    scores,
    st.integers(1, 9),
    known,
    known,
)
found = st.builds(
    Guesses,
    st.text(),
    st.lists(guess, min_size=1, max_size=3).map(tuple),
    st.integers(0, 99),
    st.integers(0, 10**12),
    st.integers(0, 9),
    st.integers(0, 10**12),
    st.none() | st.builds(Certificate, st.booleans(), st.booleans(), shares, shares),
)


@given(st.dictionaries(keys, st.lists(found, max_size=4, unique_by=lambda g: g.secret), max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_guesses_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, cells: dict[CellKey, list[Guesses]]
) -> None:
    """Bit for bit, whatever the scores, cells and secrets are called."""
    folder = RunFolder.create(tmp_path_factory.mktemp("x") / "run", "n", {})
    for cell, batch in cells.items():
        folder.guesses.append(cell, batch)
    again = RunFolder.reopen(folder.path)
    for cell, batch in cells.items():
        assert (
            again.guesses.finished_secrets(cell)
            == folder.guesses.finished_secrets(cell)
            == {g.secret: g for g in batch}
        )


@pytest.mark.parametrize("score", [0.1 + 0.2, 1e-320, -0.0, math.inf, -math.inf, 5e300])
def test_scores_keep_every_bit(folder: RunFolder, score: float) -> None:
    folder.guesses.append(CELL, [Guesses("s", (Guess((1,), score),), 1, 1)])
    kept = RunFolder.reopen(folder.path).guesses.finished_secrets(CELL)["s"].ranked[0].score
    assert kept.hex() == score.hex()


def test_lines_of_an_older_version_are_read(folder: RunFolder) -> None:
    ranked = '"ranked": [[[3, 1], -0.5, 2]], "samples": 2, "drawn": 4, "near_boundary": 0'
    line = f'{{"cell": "t/white-box/a", "secret": "s", {ranked}}}'
    (folder.path / "guesses.jsonl").write_text(line + "\n")
    assert RunFolder.reopen(folder.path).guesses.finished_secrets(CELL)["s"] == Guesses(
        "s", (Guess((3, 1), -0.5, 2),), 2, 4
    )


def test_cells_do_not_mix(folder: RunFolder) -> None:
    folder.guesses.append(CellKey("t", "text-only", "a"), [answer("s1"), answer("s2")])
    folder.guesses.append(CellKey("t", "white-box", "a"), [answer("s1", score=-9.0)])
    again = RunFolder.reopen(folder.path)
    assert list(again.guesses.finished_secrets(CellKey("t", "text-only", "a"))) == ["s1", "s2"]
    assert again.guesses.finished_secrets(CellKey("t", "white-box", "a")) == {
        "s1": answer("s1", score=-9.0)
    }
    assert again.guesses.finished_secrets(CellKey("t", "text-only", "b")) == {}


def test_guesses_are_on_disk_before_they_count(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        assert (folder.path / "guesses.jsonl").read_text().count(
            "\n"
        ) == 1  # flushed to the file already
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AuditError, match="no space"):
        folder.guesses.append(CELL, [answer("s1")])
    assert folder.guesses.finished_secrets(CELL) == {}


def test_what_was_half_appended_is_taken_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the file ends with a whole line, for whoever reads it before the run goes
    on."""
    folder.guesses.append(CELL, [answer("s1")])
    whole = (folder.path / "guesses.jsonl").read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(AuditError, match="no space"):
        patch.setattr(os, "fsync", full)
        folder.guesses.append(CELL, [answer("s2")])
    assert (folder.path / "guesses.jsonl").read_bytes() == whole
    folder.guesses.append(CELL, [answer("s3")])
    assert (
        list(folder.guesses.finished_secrets(CELL))
        == list(RunFolder.reopen(folder.path).guesses.finished_secrets(CELL))
        == ["s1", "s3"]
    )


class WatchedGuesses(Guesses):
    """Guesses that a weak reference can watch."""


def test_what_is_finished_is_not_kept_in_memory(folder: RunFolder) -> None:
    """Of 20,000 secrets the guesses are larger than any model: they are read again where they are
    asked for."""
    guesses = WatchedGuesses(*attrgetter(*Guesses.__slots__)(answer("s1")))
    alive = weakref.ref(guesses)
    folder.guesses.append(CELL, [guesses])
    del guesses
    gc.collect()
    assert alive() is None and folder.guesses.finished_secrets(CELL)["s1"] == answer("s1")


def test_a_run_that_goes_on_reads_what_it_wrote(folder: RunFolder) -> None:
    """A journal may round: what is worked out of it is the same whether or not the run was
    interrupted."""
    folder.tokens.append("undefended", [TokenLogProbs("s1", (-0.123456789, -2.5))])
    assert folder.tokens.finished_secrets("undefended") == RunFolder.reopen(
        folder.path
    ).tokens.finished_secrets("undefended")


def test_a_prefix_token_that_is_lost_is_not_taken_for_none(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "name", {})
    assert folder.prefix_token() is None  # nothing was asked yet
    folder.pin_secrets("of the secrets")
    with pytest.raises(
        AuditError, match=r"expected .*prefix_token\.json, the record of .*: it is missing"
    ):
        folder.prefix_token()


def test_a_broken_line_is_told_with_what_to_do(folder: RunFolder) -> None:
    folder.guesses.append(CELL, [answer("s1"), answer("s2")])
    file = folder.path / "guesses.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:20] + b"\n")
    with pytest.raises(
        AuditError,
        match=r"guesses\.jsonl, line 2: .*; if you delete that line, its secret is",
    ):
        RunFolder.reopen(folder.path)
    file.write_bytes(first)
    assert list(RunFolder.reopen(folder.path).guesses.finished_secrets(CELL)) == ["s1"]


def test_a_line_without_a_guess_is_told_too(folder: RunFolder) -> None:
    folder.guesses.append(CELL, [answer("s1")])
    file = folder.path / "guesses.jsonl"
    file.write_text(json.dumps({**json.loads(file.read_text()), "ranked": []}) + "\n")
    with pytest.raises(AuditError, match=r"guesses\.jsonl, line 1: expected a finished secret"):
        RunFolder.reopen(folder.path)


@pytest.mark.parametrize("lost", [1, 2, 20])
def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_is_whole(
    folder: RunFolder, lost: int
) -> None:
    """lost=1: only the newline is missing."""
    folder.guesses.append(CELL, [answer("s1"), answer("s2")])
    file = folder.path / "guesses.jsonl"
    file.write_bytes(file.read_bytes()[:-lost])
    again = RunFolder.reopen(folder.path)
    assert list(again.guesses.finished_secrets(CELL)) == ["s1"]
    again.guesses.append(CELL, [answer("s2", score=-3.0), answer("s3")])
    assert mode(file) == 0o600
    third = RunFolder.reopen(folder.path)
    assert third.guesses.finished_secrets(CELL) == {
        "s1": answer("s1"),
        "s2": answer("s2", score=-3.0),
        "s3": answer("s3"),
    }
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_states_come_back(folder: RunFolder) -> None:
    state: dict[str, Any] = {
        "prompt": torch.tensor([[0.1, -0.0]], dtype=torch.float64),
        "loss": [0.5, math.inf],
        "on": "target",
    }
    assert TrainerCheckpoint(folder.attack_state_path("a/target")).load() is None
    TrainerCheckpoint(folder.attack_state_path("a/target")).save(state)
    kept = TrainerCheckpoint(RunFolder.reopen(folder.path).attack_state_path("a/target")).load()
    assert kept is not None and torch.equal(kept["prompt"], state["prompt"])
    assert (kept["loss"], kept["on"]) == (state["loss"], state["on"])
    assert TrainerCheckpoint(folder.attack_state_path("a/other")).load() is None


def test_a_state_is_there_whole_or_not_at_all(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(state: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    TrainerCheckpoint(folder.attack_state_path("a")).save({"epoch": 1})
    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        TrainerCheckpoint(folder.attack_state_path("a")).save({"epoch": 2})
    with pytest.raises(KeyboardInterrupt):
        TrainerCheckpoint(folder.attack_state_path("b")).save({"epoch": 2})
    assert (
        TrainerCheckpoint(folder.attack_state_path("a")).load() == {"epoch": 1}
        and TrainerCheckpoint(folder.attack_state_path("b")).load() is None
    )


def test_modes(folder: RunFolder) -> None:
    before = os.umask(0)
    try:
        folder.guesses.append(CELL, [answer("s1")])
        TrainerCheckpoint(folder.attack_state_path("a")).save({})
        other = RunFolder.create(folder.path.parent / "open", "n", {})
    finally:
        os.umask(before)
    for run in (folder, other):
        assert mode(run.path) == mode(run.path / "state") == 0o700
        files = [path for path in run.path.rglob("*") if path.is_file()]
        assert files and all(mode(path) == 0o600 for path in files)


def test_the_plan_comes_back(folder: RunFolder) -> None:
    assert RunFolder.reopen(folder.path).plan() == {"seed": 7, "attack": ["a"]}
    (folder.path / "plan.json").write_text("{")
    with pytest.raises(AuditError, match="cannot read the plan"):
        folder.plan()


def test_a_folder_with_a_run_is_refused(folder: RunFolder) -> None:
    with pytest.raises(
        AuditError, match=f"contains a run; audit run --resume {folder.path} continues it if"
    ):
        RunFolder.create(folder.path, "name", {"seed": 8})
    assert folder.plan()["seed"] == 7


def test_a_folder_without_a_run_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert RunFolder.create(tmp_path, "name", {}).path == tmp_path
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("below", [(), ("run",), ("a", "b")])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AuditError, match="cannot write the run folder"):
        RunFolder.create((tmp_path / "file").joinpath(*below), "name", {})
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_answers_stay_with_the_secrets_they_are_about(folder: RunFolder) -> None:
    folder.pin_secrets("these")
    folder.pin_secrets("these")
    with pytest.raises(AuditError, match="the data has changed"):
        folder.pin_secrets("others")
    assert mode(folder.path / "secrets.sha256") == 0o600


def test_only_runs_are_reopened(tmp_path: Path) -> None:
    (tmp_path / "guesses.jsonl").write_text("")
    for path in (tmp_path, tmp_path / "none", tmp_path / "guesses.jsonl"):
        with pytest.raises(AuditError, match="expected a run folder to resume"):
            RunFolder.reopen(path)
    assert os.listdir(tmp_path) == ["guesses.jsonl"]


def test_latest_points_at_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = RunFolder.create(None, "first", {})
    latest = Path("runs") / "latest"
    assert latest.is_symlink() and latest.resolve() == first.path.resolve()
    second = RunFolder.create(None, "second", {})
    assert latest.resolve() == second.path.resolve()
    RunFolder.create(tmp_path / "elsewhere", "third", {})  # -o: the user's own place
    assert latest.resolve() == second.path.resolve()
    assert sorted(os.listdir("runs")) == sorted([first.path.name, second.path.name, "latest"])
    assert RunFolder.reopen(latest).plan() == {}


def test_two_runs_may_start_in_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {RunFolder.create(None, "same", {}).path for _ in range(3)}
    assert len(paths) == 3


def test_a_refused_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create(None, "refused", {}).discard_if_empty()
    RunFolder.create(Path("out"), "refused", {}).discard_if_empty()
    assert os.listdir(tmp_path) == []


def test_a_refused_run_does_not_give_latest_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`audit gate runs/latest` after it would judge the run before, which is about another
    model."""
    monkeypatch.chdir(tmp_path)
    real = RunFolder.create(None, "real", {})
    real.guesses.append(CELL, [answer("s1")])
    RunFolder.create(None, "refused", {}).discard_if_empty()
    assert not (Path("runs") / "latest").is_symlink() and real.path.is_dir()


def test_foreign_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    folder = RunFolder.create(tmp_path, "refused", {})
    folder.discard_if_empty()
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_users_empty_folder_stays(tmp_path: Path) -> None:
    """It was there before the run was."""
    mine = tmp_path / "mine"
    mine.mkdir()
    RunFolder.create(mine, "refused", {}).discard_if_empty()
    assert mine.is_dir() and not os.listdir(mine)


@pytest.mark.parametrize("what", ["guesses", "state"])
def test_what_was_found_out_is_not_discarded(folder: RunFolder, what: str) -> None:
    if what == "guesses":
        folder.guesses.append(CELL, [answer("s1")])
    else:
        TrainerCheckpoint(folder.attack_state_path("a")).save({"epoch": 1})
    folder.discard_if_empty()
    again = RunFolder.reopen(folder.path)
    assert (
        again.guesses.finished_secrets(CELL)
        if what == "guesses"
        else TrainerCheckpoint(again.attack_state_path("a")).load()
    )


def test_a_resumed_run_is_not_discarded(tmp_path: Path) -> None:
    """It was interrupted before its first guess; that its data cannot be read now must not cost its
    plan."""
    RunFolder.create(tmp_path / "run", "run", {"seed": 3}).tokens.append(
        "undefended", [TokenLogProbs("s1", (-0.5,))]
    )
    RunFolder.reopen(tmp_path / "run").discard_if_empty()
    again = RunFolder.reopen(tmp_path / "run")
    assert again.plan() == {"seed": 3} and again.tokens.finished_secrets("undefended")


def test_tokens_alone_do_not_keep_a_refused_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "run", {})
    folder.tokens.append("undefended", [TokenLogProbs("s1", (-0.5,))])
    folder.discard_if_empty()
    assert os.listdir(tmp_path) == []


@given(st.integers(0, 40), st.integers(1, 17))
def test_batched_loses_nobody_and_waits_for_nobody(count: int, size: int) -> None:
    taken = 0

    def stream() -> Iterator[Guesses]:
        nonlocal taken
        for i in range(count):
            taken += 1
            yield answer(f"s{i}")

    seen = []
    for batch in batch_finished_secrets(stream(), size):
        seen += [g.secret for g in batch]
        assert len(batch) == min(size, count - len(seen) + len(batch)) and taken == len(seen)
    assert seen == [f"s{i}" for i in range(count)]


def test_observations_come_back_and_a_second_one_takes_the_place_of_the_first(
    folder: RunFolder,
) -> None:
    first, other = (
        Observation("s1", {"log_p": -math.inf, "bits": 0.1 + 0.2}),
        Observation("s2", {"log_p": -1e-320}),
    )
    folder.observations.append(CellKey("t", "white-box", "p"), [first, other])
    again = RunFolder.reopen(folder.path)
    assert again.observations.finished_secrets(CellKey("t", "white-box", "p")) == {
        "s1": first,
        "s2": other,
    }
    assert (
        again.observations.finished_secrets(CellKey("t", "white-box", "q")) == {}
        and again.guesses.finished_secrets(CellKey("t", "white-box", "p")) == {}
    )
    second = Observation("s1", {**first.values, "conformal_p": 0.5})
    again.observations.append(CellKey("t", "white-box", "p"), [second])
    file = folder.path / "observations.jsonl"
    assert mode(file) == 0o600
    file.write_bytes(file.read_bytes() + b'{"cell": "t/wor')  # the machine died in the next line
    third = RunFolder.reopen(folder.path)
    assert third.observations.finished_secrets(CellKey("t", "white-box", "p")) == {
        "s1": second,
        "s2": other,
    }
    third.save_probe_numbers(CellKey("t", "white-box", "p"), {"games": 200.0, "covered": math.inf})
    third.save_probe_numbers(CellKey("t", "white-box", "q"), {})
    assert mode(folder.path / "facts.json") == 0o600
    assert third.read_probe_numbers(CellKey("t", "white-box", "p")) == {
        "games": 200.0,
        "covered": math.inf,
    }
    assert third.read_probe_numbers(CellKey("t", "white-box", "q")) == {}
    third.discard_if_empty()
    assert file.exists()


def test_answered_ids_are_read_with_and_without_escapes(tmp_path: Path) -> None:
    cell = CellKey("undefended", "white-box", "p")
    ids = ('plain "quoted" id', "plain", "naïve", "back\\slash", 'a", "secret": "b')
    _, journal, _ = open_journals(tmp_path)
    journal.append(cell, [Observation(id, {"p": 0.5}) for id in ids])
    found = read_answered_secrets(tmp_path)
    assert found.observations is not None and list(found.observations) == [cell]
    assert set(np.array([*found.numbers])[found.observations[cell]]) == set(ids)
    whole = journal.path.read_bytes()
    for damaged in (whole[:-9], whole.replace(b'"secret"', b'"hidden"'), whole + b"{}\n"):
        journal.path.write_bytes(damaged)
        with pytest.raises(AuditError, match="expected an answer about a secret on every line"):
            read_answered_secrets(tmp_path)


def test_records_are_read_on_demand_from_a_file_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = CellKey("undefended", "white-box", "p")
    _, journal, _ = open_journals(tmp_path)
    finished = journal.finished_secrets(cell)
    observations = [Observation(f"s{i}", {"p": i / 8}) for i in range(8)]
    journal.append(cell, observations)
    opened = []

    def count(path: Path, mode: str) -> IO[Any]:
        opened.append(path)
        return path.open(mode)

    monkeypatch.setattr("auditor.records.journal.open", count, raising=False)
    records = list(finished.read_records(f"s{i}" for i in reversed(range(8))))
    assert records == observations[::-1] and opened == [journal.path]
    names = [name for observation in records for name in observation.values]
    assert all(name is names[0] for name in names)  # one object for all records


def test_indexed_secrets_keep_their_numbers_in_little_memory() -> None:
    count = 20_000
    numbers = SecretNumbers()
    tracemalloc.start()
    for i in reversed(range(count)):  # as a resumed run reads its lines
        numbers.add(f"row-{i:06d}")
    numbers.index_table([f"row-{i:06d}" for i in range(count + 2)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 50 * count  # an id of 16 bytes, a hash and a number of 8
    assert [numbers.find(f"row-{i:06d}") for i in (0, 7, count + 1)] == [
        count - 1,
        count - 8,
        count + 1,
    ]
    assert numbers.add("other") == len(numbers) - 1 == count + 2
    assert numbers.find_all(["other", "row-000007", "unknown"]).tolist() == [-1, count - 8, -1]
    assert SecretNumbers().find_all(["a"]).tolist() == [-1]
    assert SecretNumbers(["b", "a"]).find_all(["b", "a"]).tolist() == [0, 1]
