"""What a report shows secret by secret: read back as written; the numbers against naive twins."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.conclusions.outcomes import ValuesBySecret, read_secret_values
from auditor.conclusions.secret_details import (
    SecretDetails,
    build_attribute_columns,
    calibrate_guess_scores,
    compute_survival_function,
    measure_length_accuracy,
    read_secret_details,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guess, Guesses, Secret
from auditor.core.result import SCHEMA_VERSION
from auditor.core.secret_table import build_secret_table
from auditor.records import table
from auditor.records.attacked_secrets import SecretAttributes
from auditor.records.table import HELDOUT, MEASURED, OBSERVED, TABLE, TOKENS, Column
from auditor.statistics import judging

CELL = "undefended/white-box/a"
SECRETS = (
    Secret("s0", (1,), (5, 6, 7, 8), repeats=1, group="mail", alias="as0"),
    Secret("s1", (2,), (5, 6, 7, 9), repeats=4, group="note", alias="as1"),
    Secret("s2", (3,), (5, 6), repeats=4, group="mail", alias="as2"),
    Secret("s3", (4,), (5, 5, 5, 5), repeats=0, member=False, group="mail", alias="as3"),
)
# leads 4 of 4, 2 of 4, 0 of 2; a non-member's is right
GUESSED = (
    (5, 6, 7, 8),
    (5, 6, 1, 9),
    (9, 6),
    (5, 5, 5, 5),
)


def outcome() -> judging.Outcome:
    guesses = [
        Guesses(s.id, (Guess(g, 0.5),), 1, len(g)) for s, g in zip(SECRETS, GUESSED, strict=True)
    ]
    return judging.judge_guesses(guesses, {s.id: s for s in SECRETS})


EXPOSURE = CellKey("undefended", "white-box", "exposure")


def folder(path: Path) -> Path:
    attacked, probed, target = (
        CellKey.parse_cell_key(CELL),
        CellKey("undefended", "white-box", "p"),
        CellKey("undefended", "", ""),
    )
    member, repeats = [True, True], [1, 4]
    columns = [
        *ValuesBySecret.from_judged_guesses(
            outcome(), {"mail": [1.0, math.nan, 0.5, math.nan]}, True
        ).list_columns(attacked),
        Column(MEASURED, probed, "p", ["s0", "s1"], [0.5, math.nan], member, repeats),
        Column(OBSERVED, EXPOSURE, "null_p", ["s0", "s1"], [2**-4.0, 0.0], member, repeats),
        Column(OBSERVED, probed, "log_p", ["s0"], [-1.0], [True], [1]),
        Column(
            TOKENS,
            target,
            "log_prob",
            ["s0"] * 4 + ["s1"] * 2,
            [0.0, -1.5, -math.inf, -2, -0.5, -0.5],
        ),
        Column(HELDOUT, target, "tokens", ["heldout-0", "heldout-1"], [3, 4]),
    ]
    table.write_secrets_table(path, columns)
    (path / "secrets.json").write_text(
        json.dumps(build_attribute_columns(SECRETS, "salt", canaries=()))
    )
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read_secret_details(folder(tmp_path))
    assert found.secrets[1] == SecretAttributes("s1", "as1", True, 4, 4, "note")
    assert found.secrets[-1] == [*found.secrets][-1] == [*found.secrets[1:]][-1]
    with pytest.raises(IndexError):
        found.secrets[len(found.secrets)]
    row = found.values_by_cell["undefended", "white-box", "a"]
    assert row.score_is_probability and row.hit.tolist() == [True, False, False, True]
    assert row.kinds["mail"].tolist()[::2] == [1.0, 0.5] and np.isnan(row.kinds["mail"][1::2]).all()
    for name in ("ids", "repeats", "member"):
        assert [*getattr(row, name)] == [*getattr(outcome(), name)]
    assert row.score.tolist() == outcome().score.tolist()
    for name, values in outcome().columns.items():
        if name != "score":
            assert row.columns[name].dtype == values.dtype
            np.testing.assert_array_equal(row.columns[name], values)
    probe = found.values_by_cell["undefended", "white-box", "p"]
    assert not probe.is_judged and probe.values["p"][0] == 0.5 and math.isnan(probe.values["p"][1])
    assert found.tokens == {"undefended": {"s0": (0.0, -1.5, -math.inf, -2.0), "s1": (-0.5, -0.5)}}
    assert found.exposure == {EXPOSURE: {"s0": 4.0, "s1": math.inf}}
    assert table.read_heldout_losses(tmp_path) == {"undefended": {"tokens": [3.0, 4.0]}}


def test_quantities_of_a_row_may_stand_on_both_sides_of_another_row(tmp_path: Path) -> None:
    """An audit adds the strongest membership score after all rows."""
    asked = ValuesBySecret(("b", "a"), np.array([True, False]), (None, 2), {"p": np.zeros(2)})
    other = ValuesBySecret(("c",), np.array([True]), (None,), {"p": np.ones(1)})
    rest = replace(asked, columns={"q": np.ones(2)})
    cells = (EXPOSURE, CellKey("u", "white-box", "m"), EXPOSURE)
    for last, is_read in ((rest, True), (replace(rest, ids=("b", "c")), False)):
        rows = zip((asked, other, last), cells, strict=True)
        columns = [column for row, cell in rows for column in row.list_columns(cell)]
        table.write_secrets_table(tmp_path, columns)
        if is_read:
            assert read_secret_values(tmp_path)[EXPOSURE].columns.keys() == {"p", "q"}
        else:
            with pytest.raises(AuditError):
                read_secret_values(tmp_path)


def test_a_row_of_whom_nothing_is_kept_still_says_who_was_asked(tmp_path: Path) -> None:
    asked = ValuesBySecret(("b", "a"), np.array([True, False]), (None, 2), {})
    table.write_secrets_table(tmp_path, asked.list_columns(EXPOSURE))
    (again,) = read_secret_values(tmp_path).values()
    assert ([*again.ids], again.member.tolist(), again.repeats, again.values) == (
        ["b", "a"],
        [True, False],
        (None, 2),
        {},
    )
    assert (
        read_secret_details(tmp_path)
        == SecretDetails()
        == read_secret_details(tmp_path / "nowhere")
    )


def test_the_file_is_one_row_a_configuration_secret_and_quantity(tmp_path: Path) -> None:
    frame = table.read_dataframe(folder(tmp_path), {"s0": "as0"})
    key = ["kind", "target", "setting", "attack", "secret", "quantity", "token"]
    assert (
        list(frame) == [*key[:5], "member", "repeats", *key[5:], "value"]
        and not frame.duplicated(key).any()
    )
    assert "as0" in set(frame.secret) and "s0" not in set(frame.secret)
    assert frame[frame.kind == TOKENS].token.tolist() == [1, 2, 3, 4, 1, 2]


def hit(value: float) -> Callable[[list[Column]], list[Column]]:
    """Of one secret."""
    return lambda columns: [
        replace(c, values=[value, 0, 0, 0]) if c.quantity == "hit" else c for c in columns
    ]


BROKEN: dict[str, Callable[[list[Column]], list[Column]]] = {
    "half a hit": hit(0.5),
    "no number": hit(math.nan),
    "half an edit": lambda columns: [
        replace(c, values=[0.5] * 4) if c.quantity == "distance" else c for c in columns
    ],
    "no edits": lambda columns: [c for c in columns if c.quantity != "distance"],
    "other secrets": lambda columns: [
        replace(columns[0], ids=["s0", "s1", "s2", "s9"]),
        *columns[1:],
    ],
    "another member": lambda columns: [replace(columns[0], member=[False] * 4), *columns[1:]],
    "other repeats": lambda columns: [replace(columns[0], repeats=[9] * 4), *columns[1:]],
    "neither in nor out": lambda columns: [replace(c, member=()) for c in columns],
    "fewer": lambda columns: [
        replace(columns[0], ids=["s0"], values=[1], member=[True], repeats=[1]),
        *columns[1:],
    ],
    "twice": lambda columns: [*columns, columns[0]],
}


@pytest.mark.parametrize("name", BROKEN)
def test_columns_that_do_not_make_a_row_are_refused(name: str, tmp_path: Path) -> None:
    columns = list(
        ValuesBySecret.from_judged_guesses(outcome()).list_columns(CellKey.parse_cell_key(CELL))
    )
    table.write_secrets_table(tmp_path, columns)
    assert len(read_secret_details(tmp_path).values_by_cell) == 1
    table.write_secrets_table(tmp_path, BROKEN[name](columns))
    with pytest.raises(AuditError, match=r"secrets.parquet: expected the table"):
        read_secret_details(tmp_path)


def of_version(version: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        held = pq.read_table(path)
        pq.write_table(held.replace_schema_metadata({"audit.schema_version": version}), path)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"PAR1"), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-99]), "damaged"),
        (lambda path: path.write_text("{}"), "damaged"),
        (lambda path: pq.write_table(pq.read_table(path).drop(["value"]), path), "damaged"),
        (of_version("3"), f"expected schema_version {SCHEMA_VERSION}, got '3'"),
        (of_version("none"), "got 'none'"),
        (
            lambda path: path.with_name("secrets.json").write_text('{"id": ["a"]}'),
            "expected one column for each of",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder(tmp_path) / TABLE)
    with pytest.raises(AuditError, match=message):
        read_secret_details(tmp_path)


def test_accuracy_of_first_tokens(tmp_path: Path) -> None:
    found = read_secret_details(folder(tmp_path))
    row = found.values_by_cell["undefended", "white-box", "a"]
    lengths = measure_length_accuracy(found, row, (1, 2, 3, 8))
    # members only; at 1 and 2 tokens all three count, beyond that the two that are so long; the
    # last L is the longest
    assert {L: (m.value, m.n) for L, m in lengths.items()} == {
        1: (2 / 3, 3),
        2: (2 / 3, 3),
        3: (0.5, 2),
        4: (0.5, 2),
    }
    assert (
        measure_length_accuracy(found, found.values_by_cell["undefended", "white-box", "p"]) == {}
    )


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_reliability_is_what_a_loop_over_guesses_says(guesses: list[tuple[float, bool]]) -> None:
    score, right = (np.array(column) for column in zip(*guesses, strict=True))
    found = calibrate_guess_scores(score.astype(float), right.astype(bool))
    bins: dict[int, list[tuple[float, bool]]] = {}
    for one in guesses:
        bins.setdefault(min(9, int(one[0] * 10)), []).append(one)
    error = 0.0
    for own, seen in zip((bins[i] for i in sorted(bins)), found.bins, strict=True):
        mean, share = sum(s for s, _ in own) / len(own), sum(r for _, r in own) / len(own)
        assert (seen.score, seen.right.value, seen.right.n) == (
            pytest.approx(mean),
            pytest.approx(share),
            len(own),
        )
        error += abs(mean - share) * len(own) / len(guesses)
    assert found.error == pytest.approx(error)
    assert found.brier == pytest.approx(sum((s - r) ** 2 for s, r in guesses) / len(guesses))


def test_reliability_of_what_is_known() -> None:
    sure = calibrate_guess_scores(
        np.array([1.0, 1.0, 0.0, 0.0]), np.array([True, True, False, False])
    )
    assert (sure.error, sure.brier, len(sure.bins)) == (0.0, 0.0, 2)
    boast = calibrate_guess_scores(np.full(10, 0.9), np.arange(10) < 5)
    assert boast.error == pytest.approx(0.4) and boast.brier == pytest.approx((0.01 + 0.81) / 2)
    for none in (np.array([]), np.array([1.2]), np.array([-0.1]), np.array([math.nan])):
        with pytest.raises(AuditError, match="each a probability"):
            calibrate_guess_scores(none, np.zeros(len(none), dtype=bool))


def test_the_tail_of_exposures() -> None:
    assert compute_survival_function([1.0, 3.0, 3.0, math.nan]) == [
        (1.0, 1.0),
        (3.0, pytest.approx(2 / 3)),
    ]
    assert compute_survival_function([]) == []
    n = 2**12  # ranks 1 … n once each: exposure log2 n - log2 rank, whose tail is the null 2^-x
    for x, share in compute_survival_function(
        [math.log2(n) - math.log2(rank) for rank in range(1, n + 1)]
    ):
        assert share == pytest.approx(2**-x)


def test_a_row_of_non_members_alone_has_no_lengths() -> None:
    found = SecretDetails((SecretAttributes("s3", "as3", False, 0, 4),), {})
    assert (
        measure_length_accuracy(
            found,
            ValuesBySecret.from_judged_guesses(
                outcome().select_secrets(np.array([False, False, False, True]))
            ),
        )
        == {}
    )


def test_columns_and_tokens_that_lie_in_several_row_groups_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_secret_details(folder(tmp_path))
    before = pq.read_table(tmp_path / TABLE)
    monkeypatch.setattr(table, "_ROWS_AT_ONCE", 3)
    parts = read_secret_details(folder(tmp_path))
    with pq.ParquetFile(tmp_path / TABLE) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    # a column of tokens is a row group, whatever its size
    assert max(sizes[:-1]) == 3 and sizes[-1] == 6
    # NaN is not equal to itself
    assert pq.read_table(tmp_path / TABLE).drop(["value"]).equals(before.drop(["value"]))
    # as another writer may cut a secret's tokens
    measured = before.slice(0, before.num_rows - 6)
    tokens = before.slice(before.num_rows - 6)
    with pq.ParquetWriter(tmp_path / TABLE, before.schema) as writer:
        for kind in dict.fromkeys(measured["kind"].to_pylist()):
            writer.write_table(measured.filter(pc.equal(measured["kind"], kind)), row_group_size=5)
        writer.write_table(tokens, row_group_size=3)
    cut = read_secret_details(tmp_path)
    for found in (parts, cut):
        assert found.tokens == whole.tokens and found.exposure == whole.exposure
        assert [*found.values_by_cell] == [*whole.values_by_cell]
        for cell, row in whole.values_by_cell.items():
            assert [*found.values_by_cell[cell].ids] == [*row.ids]
            assert found.values_by_cell[cell].repeats == row.repeats
            for name, values in row.values.items():
                np.testing.assert_array_equal(found.values_by_cell[cell].values[name], values)


def test_the_numbers_of_a_secret_take_little_more_than_their_values(tmp_path: Path) -> None:
    count, member = 20_000, np.arange(20_000) % 2 == 0
    table_of_secrets = build_secret_table(
        Secret(f"row-{i:06d}", (1,), (2, 3), 1, bool(member[i]), alias=f"s{i:012x}")
        for i in range(count)
    )
    row = ValuesBySecret(table_of_secrets.ids, member, (1,) * count, {"p": np.ones(count)})
    table.write_secrets_table(tmp_path, row.list_columns(EXPOSURE))
    (tmp_path / "secrets.json").write_text(
        json.dumps(build_attribute_columns(table_of_secrets, "salt", canaries=()))
    )
    read_secret_details(tmp_path)  # imports are no part of what is held
    tracemalloc.start()
    details = read_secret_details(tmp_path)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # two ids and an alias of 16 bytes each, a value, a repeat count, and membership twice
    assert len(details.secrets) == count and held < 90 * count
