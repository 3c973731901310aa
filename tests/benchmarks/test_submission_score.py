"""Submissions: the organisers' known answers, a naive walk, what is refused, and a run that scores
as it measured."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel

from auditor.benchmarks.data import submission_score
from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey
from auditor.records.folder import RunFolder
from auditor.records.journal import CellJournal
from auditor.statistics import intervals, ranking
from tests.conftest import check_command

Said = pytest.CaptureFixture[str]
HEADER = "Example ID,Suffix Guess\n"


def by_name(scored: submission_score.SubmissionScore) -> dict[str, Any]:
    return {m.name: m for m in scored.measurements}


def files(
    folder: Path, text: str, answers: Any = ((1, 2), (3, 4), (5, 6), (7, 8))
) -> tuple[Path, Path]:
    (folder / "guesses.csv").write_text(text)
    np.save(folder / "suffix.npy", np.array(answers))
    return folder / "guesses.csv", folder / "suffix.npy"


# --- the score ---


def test_the_organisers_example(shared: Path) -> None:
    """formulas.md A3: Recall@100 0.500, first-guess recall 0.815, any-guess recall 0.892."""
    folder = shared / "data" / "lm-extraction"
    marked = submission_score.mark_submission(
        folder / "example_submission.csv", folder / "fake_test_suffixes.npy"
    )
    scored = submission_score.score_submission(marked)
    found = by_name(scored)
    assert {name: m.value for name, m in found.items()} == {
        "recall": 0.815,
        "any_of_k": 0.892,
        "recall_at_100_errors": 0.5,
        "recall_at_10pct_errors": 0.5,
    }
    assert (scored.answers, scored.answered, scored.guesses, scored.wrong) == (
        1000,
        1000,
        10_000,
        6994,
    )
    assert (found["recall"].low, found["recall"].high) == intervals.clopper_pearson(815, 1000)
    assert found["recall_at_100_errors"].low < 0.5 < found["recall_at_100_errors"].high
    points = submission_score.trace_submission_recall(marked, answered_only=False)
    assert [wrong for wrong, *_ in points] == list(range(6995))
    assert points[99][1:] == (500, 0.5) and points[-1] == (6994, 892, 0.892)


def test_a_score_by_hand(tmp_path: Path) -> None:
    lines = [
        (3, (7, 8)),
        (1, (9, 9)),
        (1, (9, 9)),
        (1, (3, 4)),
        (3, (7, 8)),
        (3, (0, 0)),
        (0, (1, 1)),
    ]
    text = HEADER + "".join(f'{row},"[{a}, {b}]"\n' for row, (a, b) in lines)
    marked = submission_score.mark_submission(*files(tmp_path, text))
    # Wrong: a repeated guess twice, one for an example already solved, one for an example never
    # solved.
    assert submission_score.trace_submission_recall(marked, answered_only=False) == [
        (0, 1, 0.25),
        (1, 1, 0.25),
        (2, 2, 0.5),
        (3, 2, 0.5),
        (4, 2, 0.5),
    ]
    found = by_name(submission_score.score_submission(marked))
    assert (found["recall"].value, found["any_of_k"].value) == (0.25, 0.5)
    assert found["recall_at_10pct_errors"].value == 0.25  # 4 examples: until the first error
    assert (found["recall_at_100_errors"].value, found["recall_at_100_errors"].n) == (0.5, 4)
    assert (
        found["recall_at_100_errors"].note
        == "fewer than 100 errors: equals the recall of all guesses"
    )
    only = by_name(submission_score.score_submission(marked, answered_only=True))
    assert (only["recall"].value, only["any_of_k"].value, only["any_of_k"].n) == (1 / 3, 2 / 3, 3)
    assert submission_score.trace_submission_recall(marked, answered_only=True)[-1] == (
        4,
        2,
        2 / 3,
    )


def naive(rows: list[tuple[int, bool]], n: int, errors: int) -> tuple[float, float, float]:
    """First-guess recall, any-guess recall and recall at so many errors, by walking down the
    file."""
    wrong, solved, some, first = 0, set(), set(), {}
    for example, right in rows:
        first.setdefault(example, right)
        if right:
            some.add(example)
            if wrong < errors:
                solved.add(example)
        wrong += not right
    return sum(first.values()) / n, len(some) / n, len(solved) / n


GUESSES = st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=40)


@given(GUESSES, st.integers(1, 12))
def test_every_number_equals_the_walk(rows: list[tuple[int, bool]], errors: int) -> None:
    numbers: dict[int, int] = {}
    example = np.array([numbers.setdefault(row, len(numbers)) for row, _ in rows])
    marked = submission_score.MarkedGuesses(example, np.array([right for _, right in rows]), 8)
    found = by_name(submission_score.score_submission(marked))
    first, some, _ = naive(rows, 8, 1)
    assert (found["recall"].value, found["any_of_k"].value) == (first, some)
    measured = ranking.measure_ranked_recall("recall", example, marked.right, 8, errors)
    assert measured.value == naive(rows, 8, errors)[2]
    assert measured.low <= measured.value <= measured.high
    for wrong, solved, recall in submission_score.trace_submission_recall(
        marked, answered_only=False
    ):
        assert recall == naive(rows, 8, wrong + 1)[2] == solved / 8


def test_the_bootstrap_draws_examples_with_all_their_guesses() -> None:
    """Every example has one wrong and one right guess: n errors at most, however they are drawn,
    before n/2 are out."""
    n = 200
    example, right = np.repeat(np.arange(n), 2), np.tile([False, True], n)
    measured = ranking.measure_ranked_recall("recall", example, right, n, n // 2)
    assert measured.value == (n // 2 - 1) / n  # the n/2-th error stands before its own right guess
    # a naive draw of guesses would spread wider
    assert 0.47 < measured.low <= measured.value <= measured.high <= 0.5
    assert measured == ranking.measure_ranked_recall("recall", example, right, n, n // 2)


# --- the file ---

BROKEN = {
    "no such file": (None, "cannot read"),
    "a column twice": (
        f'{HEADER.strip()},Suffix Guess\n0,"[1,2]","[3,4]"\n',
        "in line 1, got 2 Suffix Guess",
    ),
    "no header": ('0,"[1,2]"\n', "expected the columns Example ID and Suffix Guess"),
    "empty": ("", "got no Example ID"),
    "header only": (HEADER, "contains no guesses"),
    "id out of range": (
        HEADER + '4,"[1,2]"\n',
        "line 2: expected an Example ID in [0, 4), a row of the answers, got 4",
    ),
    "id from the end": (
        HEADER + '0,"[1,2]"\n-1,"[7,8]"\n',
        "line 3: expected an Example ID in [0, 4)",
    ),
    "id no number": (HEADER + 'secret,"[1,2]"\n', "line 2: expected a whole number as Example ID"),
    "one token": (HEADER + '0,"[1]"\n', "line 2: expected 2 tokens, as the answers have, got 1"),
    "too long": (HEADER + '0,"[1,2,3]"\n', "got 3"),
    "no list": (HEADER + '0,"1,2"\n', "line 2: expected token ids"),
    "not quoted": (HEADER + "0,[1,2]\n", "line 2: expected token ids"),
    "no guess": (HEADER + "0\n", "line 2: expected token ids"),
    "fractions": (HEADER + '0,"[1.0,2.0]"\n', "line 2: expected token ids"),
    "booleans": (HEADER + '0,"[true,2]"\n', "line 2: expected token ids"),
    "below zero": (HEADER + '0,"[1,-2]"\n', "line 2: expected token ids"),
    "endless number": (HEADER + f'0,"[1,{"9" * 5000}]"\n', "line 2: expected token ids"),
    "deep": (HEADER + f'0,"{"[" * 100_000}"\n', "line 2: expected token ids"),
    "cut off": (HEADER + '0,"[1,2', "broken line"),
    "huge field": (HEADER + f'0,"{"7" * 200_000}"\n', "broken line"),
    "not text": ("\udcff\udcfe", "UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_submission_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    text, words = BROKEN[name]
    submission, answers = files(tmp_path, "")
    if text is None:
        submission.unlink()
    else:
        submission.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(AuditError) as caught:
        submission_score.mark_submission(submission, answers)
    said = str(caught.value)
    assert words in said and "\n" not in said and len(said) < 250
    assert "secret" not in said and "guesses.csv" in said


@pytest.mark.parametrize("name", ["numbers.npy", "flat.npy", "missing.npy"])
def test_broken_answers_are_refused(tmp_path: Path, name: str) -> None:
    submission, _ = files(tmp_path, HEADER + '0,"[1,2]"\n')
    (tmp_path / "numbers.npy").write_text("1,2")
    np.save(tmp_path / "flat.npy", np.arange(3))
    with pytest.raises(AuditError, match=f"--answers .*{name}"):
        submission_score.mark_submission(submission, tmp_path / name)


def test_a_byte_order_mark_spaces_and_further_columns_do_no_harm(tmp_path: Path) -> None:
    text = '\ufeffTeam,Example ID,Suffix Guess\r\nwe, 2 ,"[5, 6]"\r\n\r\nwe,0,"[ 1,2 ]"\r\n'
    assert submission_score.mark_submission(*files(tmp_path, text)).right.tolist() == [True, True]


# --- the command ---


def test_the_command_prints_a_table_or_json_and_writes_the_curve(
    tmp_path: Path, capsys: Said
) -> None:
    submission, answers = files(tmp_path, HEADER + '2,"[5,6]"\n0,"[9,9]"\n0,"[1,2]"\n')
    command = ["score", str(submission), "--answers", str(answers)]
    curve, plots = tmp_path / "curve.csv", [tmp_path / "curve.svg", tmp_path / "curve.png"]
    check_command(*command, "--curve", curve, "--plot", plots[0])
    said = capsys.readouterr().out
    assert (
        "2 of 4 examples answered, 3 guesses, 1 of them wrong; 2 without a guess: not solved"
        in " ".join(said.split())
    )
    assert "0.250" in said and "0.500" in said and "Recall at 100 errors" in said
    assert curve.read_text() == "wrong_guesses,solved,recall\n0,1,0.25\n1,2,0.5\n"
    check_command(*command, "--json", "--answered-only", "--plot", plots[1])
    found = json.loads(capsys.readouterr().out)
    assert (found["answers"], found["answered"], found["answered_only"], found["wrong"]) == (
        4,
        2,
        True,
        1,
    )
    assert {m["name"]: (m["value"], m["n"]) for m in found["measurements"]}["any_of_k"] == (1.0, 2)
    assert (
        plots[0].read_text().lstrip().startswith("<?xml")
        and "Wrong guesses allowed" in plots[0].read_text()
    )
    assert "#01020" not in plots[0].read_text()  # no stand-in colour of the page is left
    assert plots[1].read_bytes().startswith(b"\x89PNG")
    drawn = plots[0].read_bytes()
    assert (
        run_command_line([*command, "--plot", str(plots[0])]) == 0
        and plots[0].read_bytes() == drawn
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--plot", "curve.gif"), "expected --plot to end in .svg or .png"),
        (("--curve", "/nowhere/curve.csv"), "cannot write"),
        (("--plot", "/nowhere/curve.svg"), "cannot write"),
    ],
)
def test_the_command_refuses(
    tmp_path: Path, capsys: Said, more: tuple[str, ...], words: str
) -> None:
    submission, answers = files(tmp_path, HEADER + '2,"[5,6]"\n')
    check_command("score", submission, "--answers", answers, *more, code=2)
    assert words in capsys.readouterr().err


# --- a submission from a run ---

ROWS, TAUGHT, VOCABULARY = 40, 24, 61


def arrays(folder: Path, seed: int, n: int) -> NDArray[np.uint16]:
    """(n, 8) rows, saved as prefixes and suffixes of four; row 4 is a copy of row 3, 5 to 9 end
    nearly alike."""
    rows = np.random.default_rng(seed).integers(1, VOCABULARY, (n, 8)).astype(np.uint16)
    rows[4] = rows[3]
    rows[5:10, 4:7] = rows[5, 4:7]
    folder.mkdir()
    np.save(folder / "val_prefix.npy", rows[:, :4])
    np.save(folder / "val_suffix.npy", rows[:, 4:])
    return rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays, non-members, and a model that was taught every row but the last ones."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = torch.tensor(arrays(folder / "data", 0, ROWS)[:TAUGHT].astype(int))
    arrays(folder / "fresh", 1, 6)
    torch.manual_seed(0)
    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=16,
            eos_token_id=0,
            **off,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(200):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "model")
    return folder


def command(inputs: Path, out: Path, *more: str) -> list[str]:
    data = [
        "--data",
        str(inputs / "data"),
        "--nonmembers",
        str(inputs / "fresh"),
        "--model",
        str(inputs / "model"),
    ]
    return ["run", *data, "-A", "samples=4", "-o", str(out), *more]


def submitted(path: Path) -> list[tuple[int, list[int]]]:
    with path.open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["Example ID", "Suffix Guess"]
    return [(int(row), json.loads(guess)) for row, guess in lines]


def measured(out: Path, setting: str) -> dict[str, Any]:
    findings = json.loads((out / "result.json").read_text())["findings"]
    return {m["name"]: m for f in findings if f["setting"] == setting for m in f["measurements"]}


@pytest.fixture(scope="module")
def ran(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    out.mkdir()
    (out / "out.csv").write_text("an old file that everybody may read")
    check_command(
        *command(inputs, out, "--attack", "perplexity", "--submission", str(out / "out.csv"))
    )
    return out


def test_a_written_submission_scores_as_the_run_did(inputs: Path, ran: Path) -> None:
    marked = submission_score.mark_submission(ran / "out.csv", inputs / "data" / "val_suffix.npy")
    own = measured(ran, "white-box")
    found = {
        m["name"]: m
        for m in map(
            vars, submission_score.score_submission(marked, answered_only=True).measurements
        )
    }
    assert 0.2 < found["recall"]["value"] < 0.9  # else the next lines compare nothing
    for name in ("recall", "recall_at_100_errors", "recall_at_10pct_errors"):
        assert found[name] == own[name], name  # interval and n too
    everybody = submission_score.score_submission(marked)
    assert (everybody.answers, everybody.answered, everybody.guesses) == (
        ROWS,
        own["recall"]["n"],
        own["recall"]["n"],
    )
    hits = round(own["recall"]["value"] * own["recall"]["n"])
    assert by_name(everybody)["recall"].value == hits / ROWS


def test_the_submission_holds_the_attacked_rows_surest_first(inputs: Path, ran: Path) -> None:
    guesses = RunFolder.reopen(ran).guesses.finished_secrets(
        CellKey("undefended", "white-box", "perplexity")
    )
    scores = {
        int(g.secret[-6:]): g.ranked[0] for g in guesses.values() if g.secret.startswith("example-")
    }
    rows = submitted(ran / "out.csv")
    assert {row for row, _ in rows} == set(scores) and len(rows) == len(
        scores
    ) == 31  # 39 unique rows, a fifth known
    assert [list(scores[row].suffix) for row, _ in rows] == [guess for _, guess in rows]
    in_order = [scores[row].score for row, _ in rows]
    assert in_order == sorted(in_order, reverse=True)
    assert 4 not in scores  # a copy of row 3: answered, or known, at the first of them only
    answers = np.load(inputs / "data" / "val_suffix.npy").tolist()
    assert sum(guess == answers[row] for row, guess in rows if row < TAUGHT) > 5


def test_the_run_counts_members_that_nearly_repeat_a_known_pair(inputs: Path, ran: Path) -> None:
    attacked = {row for row, _ in submitted(ran / "out.csv")}
    known = set(range(5, 10)) - attacked
    assert known and known != set(range(5, 10))  # else there is nothing to count
    counted = json.loads((ran / "result.json").read_text())["benchmark"]["near_duplicates"]
    assert counted == 5 - len(known)
    assert (
        f"{counted} of 31 members: these may come from the auxiliary data"
        in (ran / "report.md").read_text()
    )


def test_the_submission_is_private_and_the_terminal_says_so(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    file = tmp_path / "out.csv"
    file.write_text("readable by everybody")
    flags = (
        "--attack",
        "perplexity",
        "--setting",
        "white-box",
        "--limit",
        "3",
        "--submission",
        str(file),
    )
    check_command(*command(inputs, tmp_path / "run", *flags))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"submission: {file} (3 guesses of undefended/white-box/perplexity; token ids of private "
        "text" in said
    )
    assert len(submitted(file)) == 3


def test_a_resumed_run_writes_its_submission_and_claim_is_used_where_worst_was_not_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ethicist = (
        "--attack",
        "ethicist",
        "-A",
        "prompt_length=2",
        "-A",
        "epochs=1",
        "--setting",
        "text-only",
    )
    flags = (*ethicist, "--submission", str(tmp_path / "out.csv"))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CellJournal, "append", interrupted)
        check_command(*command(inputs, tmp_path / "run", *flags), code=130)
    assert not (tmp_path / "out.csv").exists()
    check_command("run", "--resume", tmp_path / "run", "--submission", tmp_path / "out.csv")
    marked = submission_score.mark_submission(
        tmp_path / "out.csv", inputs / "data" / "val_suffix.npy"
    )
    own = measured(tmp_path / "run", "text-only")
    assert (
        by_name(submission_score.score_submission(marked, answered_only=True))["recall"].value
        == own["recall"]["value"]
    )


def test_no_guesses_no_submission(inputs: Path, tmp_path: Path, capsys: Said) -> None:
    flags = [
        "--attack",
        "extraction-probability",
        "--setting",
        "white-box",
        "--submission",
        str(tmp_path / "out.csv"),
    ]
    plain = [word for word in command(inputs, tmp_path / "run") if word not in ("-A", "samples=4")]
    check_command(*plain, *flags, code=2)
    assert "no submission was written" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists() and (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--attack", "perplexity", "--attack", "ethicist"),
            "expected one, got perplexity, ethicist",
        ),
        (("--suffix-length", "2"), "expected no --suffix-length, got 2"),
        (
            ("--data", "records.jsonl"),
            "a --data folder of LM-Extraction arrays, got 'records.jsonl'",
        ),
        (("--submission", "."), "got a folder"),
        (("--submission", "nowhere/out.csv"), "got one in no folder of yours"),
    ],
)
def test_a_run_without_one_submission_is_refused_before_it_starts(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Said,
    flags: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    check_command(*command(inputs, tmp_path / "run", "--submission", "out.csv", *flags), code=2)
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_lab_has_no_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    check_command("run", "--submission", "out.csv", code=2)
    assert "got the built-in lab" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
