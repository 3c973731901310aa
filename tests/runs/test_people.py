"""`--user-column`: people are what is counted, told by aliases; and whose data is in it, by what
was not trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import rankdata

from auditor.cli import run_command_line
from auditor.core.nouns import Guess, Guesses, Secret
from auditor.records.result_file import read_result
from auditor.statistics import people
from auditor.statistics.extraction import measure_extraction
from auditor.statistics.judging import judge_guesses
from tests.conftest import check_command, save_tiny


def secret(i: int, user: str | None, member: bool = True, trained: bool = True) -> Secret:
    return Secret(
        f"s{i:04d}", (1,), (i + 2, 0), 1 if member else 0, member, user=user, user_trained=trained
    )


def told(secrets: list[Secret], out: set[str]) -> dict[str, tuple[float, float, float, int]]:
    guesses = [
        Guesses(s.id, (Guess(s.suffix if s.id in out else (0, 0), 1.0),), 1, 0) for s in secrets
    ]
    found = measure_extraction(judge_guesses(guesses, {s.id: s for s in secrets}))
    return {m.name: (m.value, m.low, m.high, m.n) for m in found if m.name.startswith("user")}


def test_each_person_counts_once_however_many_records() -> None:
    """30 people: two with 50 records each, all out, the others with two, one out of ten of them."""
    whose = ["a"] * 50 + ["b"] * 50 + [f"p{i // 2}" for i in range(56)] + [None]
    secrets = [secret(i, user) for i, user in enumerate(whose)]
    secrets += [secret(1000 + i, f"q{i}", member=False, trained=False) for i in range(25)]
    # of somebody who is in it: no baseline
    secrets += [secret(2000 + i, "a", member=False) for i in range(9)]
    out = {s.id for s in secrets if s.user in ("a", "b") or s.user is None or s.user == "p3"}
    found = told(secrets, out)
    value, low, high, n = found["user_recall"]
    assert (value, n) == (pytest.approx(3 / 30), 30) and low < 0.1 < high and high - low > 0.15
    assert found["users_extracted"][0] == pytest.approx(3 / 30)
    assert found["user_recall_nonmembers"][0] == 0 and found["user_recall_nonmembers"][3] == 25
    few = [s for s in secrets if s.member and s.user in {f"p{i}" for i in range(19)}]
    assert not told(few, set()) and told([secret(i, None) for i in range(30)], set()) == {}


def test_an_interval_over_people_covers_where_one_over_records_does_not() -> None:
    """Whole people come out or not, each with 1 to 20 records: 95% intervals of the mean over
    people."""
    rng, covered, runs = np.random.default_rng(0), 0, 200
    for _ in range(runs):
        out = rng.random(40) < 0.3
        user = np.repeat(np.arange(40.0), rng.integers(1, 21, 40))
        shares = people.average_per_person(out[user.astype(int)], user)
        assert np.array_equal(shares, out)
        low, high = people_interval(shares)
        covered += low <= 0.3 <= high
    assert covered / runs >= 0.93


def people_interval(shares: np.ndarray) -> tuple[float, float]:
    from auditor.statistics.intervals import compute_mean_probability

    m = compute_mean_probability("user_recall", shares)
    return m.low, m.high


def test_people_are_told_by_the_mean_of_what_was_not_trained_on() -> None:
    rng = np.random.default_rng(1)
    secrets = [secret(i, f"u{i % 50}", member=False, trained=i % 50 < 25) for i in range(200)]
    secrets += [secret(900 + i, f"u{i % 25}") for i in range(50)]
    scores = rng.normal(size=250) + [0.5 * s.user_trained for s in secrets]
    (m,) = people.measure_user_inference(secrets, {people.INFERENCE: scores}, "mean")
    means = np.array(
        [np.mean([scores[i] for i in range(200) if i % 50 == person]) for person in range(50)]
    )
    wins = rankdata(means)[:25].sum() - 25 * 26 / 2
    assert m.value == pytest.approx(wins / 25**2) and m.n == 50 and "25 people in it" in m.note
    fewer = [
        replace(s, user="u0") if s.user in ("u1", "u2", "u3", "u4", "u5", "u6") else s
        for s in secrets
    ]
    assert people.measure_user_inference(fewer, {people.INFERENCE: scores}, "") == ()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 people with two records each; 50 more records, of 25 of them and of 25 others."""
    folder = tmp_path_factory.mktemp("people")
    save_tiny(folder / "model")
    for name, whose in (
        ("private", [f"Ada-{i // 2}" for i in range(60)]),
        ("fresh", [f"Ada-{i}" for i in range(5, 55)]),
    ):
        rows = [{"text": f"{name} {i:03d} of a record", "who": who} for i, who in enumerate(whose)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def audit(inputs: Path, *more: str) -> int:
    data = ["--data", str(inputs / "private.jsonl"), "--nonmembers", str(inputs / "fresh.jsonl")]
    cut = [
        "--prefix-length",
        "12",
        "--suffix-length",
        "4",
        "--known-fraction",
        "0",
        "--user-column",
        "who",
    ]
    return run_command_line(
        ["run", "--model", str(inputs / "model"), *data, *cut, "--setting", "white-box", *more]
    )


def test_a_run_tells_people_by_aliases_and_a_gate_takes_them(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "-A",
        "perplexity.samples=1",
        "-A",
        "membership.score=min_k_plus",
        "-A",
        "membership.lowercase=false",
    ]
    assert (
        audit(
            inputs,
            "--attack",
            "perplexity",
            "--attack",
            "membership",
            *options,
            "-o",
            str(inputs / "run"),
        )
        == 0
    )
    result = read_result(inputs / "run")
    numbers = {m.name: m for f in result.findings for m in f.measurements}
    assert numbers["user_recall"].n == 30 and numbers["user_recall_nonmembers"].n == 25
    assert numbers["user_inference_auc"].n == 50
    page = (inputs / "run" / "report.html").read_text()
    assert "By person" in page and "are of 55 people and not independent" in page
    kept = [path for path in (inputs / "run").rglob("*") if path.is_file()]
    assert not [path.name for path in kept if b"Ada-" in path.read_bytes()]
    assert b'"user": ["u' in (inputs / "run" / "secrets.json").read_bytes()
    capsys.readouterr()
    check_command("gate", inputs / "run", "--max", "user_recall=0.5")
    check_command("gate", inputs / "run", "--max", "user_recall=0.01", code=4)
    capsys.readouterr()


def test_few_people_and_no_column_are_refused(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(inputs, "--limit", "12", "--attack", "perplexity") == 2
    assert (
        "attacked records of at least 20 people, to say anything by person, got 11"
        in capsys.readouterr().err
    )
    assert audit(inputs, "--attack", "perplexity", "--user-column", "whose") == 2
    assert "expected one column --user-column 'whose'" in capsys.readouterr().err
    assert not Path("runs").exists()  # which the first had made
