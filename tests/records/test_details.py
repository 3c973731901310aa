"""What a report shows secret by secret: read back as written, older folders too; the numbers against naive twins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.core.errors import AuditError
from auditor.core.nouns import Guess, Guesses, Secret
from auditor.records.details import (
    Details,
    RowDetails,
    SecretFacts,
    by_group,
    by_length,
    facts,
    read,
    reliability,
    tail,
)
from auditor.statistics import intervals, judging

CELL = "undefended/worst/a"
SECRETS = (
    Secret("s0", (1,), (5, 6, 7, 8), repeats=1, group="mail", alias="as0"),
    Secret("s1", (2,), (5, 6, 7, 9), repeats=4, group="note", alias="as1"),
    Secret("s2", (3,), (5, 6), repeats=4, group="mail", alias="as2"),
    Secret("s3", (4,), (5, 5, 5, 5), repeats=0, member=False, group="mail", alias="as3"),
)
GUESSED = ((5, 6, 7, 8), (5, 6, 1, 9), (9, 6), (5, 5, 5, 5))  # leads 4 of 4, 2 of 4, 0 of 2; a non-member's is right


def outcome() -> judging.Outcome:
    guesses = [Guesses(s.id, (Guess(g, 0.5),), 1, len(g)) for s, g in zip(SECRETS, GUESSED, strict=True)]
    return judging.judge(guesses, {s.id: s for s in SECRETS})


def folder(path: Path, **more: str) -> Path:
    record = {**judging.to_record(outcome()), "score_is_probability": True}
    probe = {"ids": ["s0", "s1"], "member": [True, True], "repeats": [1, 4], "values": {"p": [0.5, "nan"]}}
    (path / "outcomes.json").write_text(json.dumps({CELL: record, "undefended/worst/p": probe}))
    (path / "secrets.json").write_text(json.dumps(facts(SECRETS, "salt")))
    lines = [
        {"target": "undefended", "secret": "s0", "log_probs": [0.0, -1.5, "-inf", -2]},
        {"target": "undefended", "secret": "s1", "log_probs": [-0.5] * 4},
    ]
    (path / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"target": "unde')
    seen: list[dict[str, Any]] = [
        {"cell": "undefended/worst/exposure", "secret": "s0", "values": {"null_p": 2**-3.0}},
        {"cell": "undefended/worst/exposure", "secret": "s0", "values": {"null_p": 2**-4.0}},
        {"cell": "undefended/worst/p", "secret": "s0", "values": {"log_p": -1.0}},
    ]
    (path / "observations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in seen))
    for name, text in more.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read(folder(tmp_path))
    assert found.secrets[1] == SecretFacts("s1", "as1", True, 4, 4, "note")
    row = found.rows["undefended", "worst", "a"]
    assert (
        row.score_is_probability and row.outcome is not None and row.outcome.hit.tolist() == [True, False, False, True]
    )
    probe = found.rows["undefended", "worst", "p"]
    assert probe.outcome is None and probe.value[0] == 0.5 and math.isnan(probe.value[1])
    assert found.tokens["undefended"]["s0"] == (0.0, -1.5, -math.inf, -2.0)  # and the line that a crash cut is left out
    assert found.exposure == {("undefended", "worst", "exposure"): {"s0": 4.0}}  # the later observation counts


def test_an_older_folder_still_tells_what_it_kept(tmp_path: Path) -> None:
    assert read(tmp_path) == Details()
    record = judging.to_record(outcome())
    del record["traits"]["lead"]
    (tmp_path / "outcomes.json").write_text(json.dumps({CELL: record}))
    found = read(tmp_path)
    assert found.secrets[2] == SecretFacts("s2", "s2", True, 4) and not found.tokens
    assert by_length(found, found.rows["undefended", "worst", "a"]) == {}
    assert by_group(found, found.rows["undefended", "worst", "a"]) == {}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"outcomes_json": "{"}, "outcomes.json': it is not JSON"),
        ({"outcomes_json": "[]"}, "expected an object, got list"),
        ({"outcomes_json": '{"a/b/c": {"hit": 3}}'}, "expected what each row found out"),
        ({"secrets_json": '{"id": ["a"]}'}, "secrets.json: expected a column each of"),
        ({"tokens_jsonl": "{\n"}, "tokens.jsonl: not lines of JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, broken: dict[str, str], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        read(folder(tmp_path, **broken))


def test_recall_by_group_and_first_tokens(tmp_path: Path) -> None:
    found = read(folder(tmp_path))
    row = found.rows["undefended", "worst", "a"]
    groups = by_group(found, row)
    assert {name: (m.value, m.n) for name, m in groups.items()} == {"mail": (0.5, 2), "note": (0.0, 1)}
    assert (groups["mail"].low, groups["mail"].high) == intervals.clopper_pearson(1, 2)
    lengths = by_length(found, row, (1, 2, 3, 8))
    # members only; at 1 and 2 tokens all three count, beyond that the two that are so long; the last L is the longest
    assert {L: (m.value, m.n) for L, m in lengths.items()} == {1: (2 / 3, 3), 2: (2 / 3, 3), 3: (0.5, 2), 4: (0.5, 2)}
    assert by_length(found, found.rows["undefended", "worst", "p"]) == {}


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_reliability_is_what_a_loop_over_guesses_says(guesses: list[tuple[float, bool]]) -> None:
    score, right = (np.array(column) for column in zip(*guesses, strict=True))
    found = reliability(score.astype(float), right.astype(bool))
    bins: dict[int, list[tuple[float, bool]]] = {}
    for one in guesses:
        bins.setdefault(min(9, int(one[0] * 10)), []).append(one)
    error = 0.0
    for own, seen in zip((bins[i] for i in sorted(bins)), found.bins, strict=True):
        mean, share = sum(s for s, _ in own) / len(own), sum(r for _, r in own) / len(own)
        assert (seen.score, seen.right.value, seen.right.n) == (pytest.approx(mean), pytest.approx(share), len(own))
        error += abs(mean - share) * len(own) / len(guesses)
    assert found.error == pytest.approx(error)
    assert found.brier == pytest.approx(sum((s - r) ** 2 for s, r in guesses) / len(guesses))


def test_reliability_of_what_is_known() -> None:
    sure = reliability(np.array([1.0, 1.0, 0.0, 0.0]), np.array([True, True, False, False]))
    assert (sure.error, sure.brier, len(sure.bins)) == (0.0, 0.0, 2)
    boast = reliability(np.full(10, 0.9), np.arange(10) < 5)
    assert boast.error == pytest.approx(0.4) and boast.brier == pytest.approx((0.01 + 0.81) / 2)
    for none in (np.array([]), np.array([1.2]), np.array([-0.1]), np.array([math.nan])):
        with pytest.raises(AuditError, match="each a probability"):
            reliability(none, np.zeros(len(none), dtype=bool))


def test_the_tail_of_exposures() -> None:
    assert tail([1.0, 3.0, 3.0, math.nan]) == [(1.0, 1.0), (3.0, pytest.approx(2 / 3))]
    assert tail([]) == []
    n = 2**12  # ranks 1 … n once each: exposure log2 n - log2 rank, whose tail is the null 2^-x
    for x, share in tail([math.log2(n) - math.log2(rank) for rank in range(1, n + 1)]):
        assert share == pytest.approx(2**-x)


def test_a_row_of_non_members_alone_has_no_lengths() -> None:
    found = Details((SecretFacts("s3", "as3", False, 0, 4),), {})
    assert by_length(found, RowDetails(("s3",), outcome().only(np.array([False, False, False, True])))) == {}
