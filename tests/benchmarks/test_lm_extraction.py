"""The challenge's arrays: ids as they are, prefix and suffix side by side, and no wrong vocabulary
unnoticed."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.benchmarks.data import splitting
from auditor.benchmarks.data.lm_extraction import LMExtraction, has_extraction_arrays
from auditor.core import secret_table
from auditor.core.errors import AuditError
from tests.conftest import read_arrays

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "lm-extraction"
real = pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/data/lm-extraction")


def arrays(
    folder: Path, n: int = 6, start: int = 0, stem: str = "val", dtype: Any = np.uint16
) -> str:
    """Row i is the prefix 10i..10i+3 and the suffix 10i+4..10i+6."""
    folder.mkdir(exist_ok=True)
    rows = 10 * np.arange(start, start + n)[:, None]
    np.save(folder / f"{stem}_prefix.npy", (rows + np.arange(4)).astype(dtype))
    np.save(folder / f"{stem}_suffix.npy", (rows + np.arange(4, 7)).astype(dtype))
    return str(folder)


def build(folder: str, **options: Any) -> LMExtraction:
    return read_arrays(folder, **{"vocab_size": 1000, "known_fraction": 0.0, **options})


def refusal(folder: str, **options: Any) -> str:
    with pytest.raises(AuditError) as caught:
        build(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, ">i4"])
def test_ids_are_used_as_they_are(tmp_path: Path, dtype: Any) -> None:
    benchmark = build(arrays(tmp_path / "a", dtype=dtype))
    assert [s.id for s in benchmark.secrets] == [f"example-{i:06d}" for i in range(6)]
    assert benchmark.secrets[2].prefix == (20, 21, 22, 23) and benchmark.secrets[2].suffix == (
        24,
        25,
        26,
    )
    assert all(type(token) is int for token in benchmark.secrets[0].prefix)
    # how often Pile text occurs is not in the arrays
    assert all(s.repeats is None and s.member for s in benchmark.secrets)
    assert benchmark.description == "LM-Extraction arrays of a: 6 members"


def test_prefixes_and_suffixes_may_have_two_types_of_whole_numbers(tmp_path: Path) -> None:
    """numpy joins uint64 and int64 into floats."""
    folder = Path(arrays(tmp_path / "a", dtype=np.int64))
    np.save(folder / "val_prefix.npy", np.load(folder / "val_prefix.npy").astype(np.uint64))
    benchmark = build(str(folder))
    assert benchmark.secrets[2].tokens == (20, 21, 22, 23, 24, 25, 26)
    assert type(benchmark.secrets[2].prefix[0]) is int


def test_shorter_lengths_keep_the_tokens_next_to_the_join(tmp_path: Path) -> None:
    secret = build(arrays(tmp_path / "a"), prefix_length=1, suffix_length=2).secrets[0]
    assert (secret.prefix, secret.suffix) == ((3,), (4, 5))


def test_rows_take_little_memory_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "NEAR_MOST", 0)
    monkeypatch.setattr(secret_table, "_AT_ONCE", 1024)
    ids = np.random.default_rng(0).integers(1000, 50_000, (5000, 32), dtype=np.uint32)
    np.save(tmp_path / "a_prefix.npy", ids[:, :16])
    np.save(tmp_path / "a_suffix.npy", ids[:, 16:])
    build(arrays(tmp_path / "few"))  # imports are no part of what is held
    tracemalloc.start()
    benchmark = build(str(tmp_path), vocab_size=50_257)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A tuple of 32 numbers takes 1,200 bytes, an array 200.
    assert len(benchmark.secrets) == 5000 and held < 600 * 5000 and most < 2000 * 5000


def test_known_pairs_nonmembers_copies_and_limit(tmp_path: Path) -> None:
    data, known, others = (
        arrays(tmp_path / name, start=start) for name, start in (("d", 0), ("k", 5), ("n", 9))
    )
    benchmark = build(data, known=known, nonmembers=others, limit=3)
    assert len(benchmark.known) == 6
    assert [sum(s.member == member for s in benchmark.secrets) for member in (True, False)] == [
        3,
        3,
    ]
    assert {s.prefix for s in benchmark.secrets}.isdisjoint(pair.prefix for pair in benchmark.known)
    with pytest.raises(AuditError, match="every row is also a member or an auxiliary record"):
        build(data, nonmembers=data)
    split = build(data, known_fraction=0.5)
    assert len(split.known) == len(split.secrets) == 3
    copies = np.zeros((5, 4), np.int32)
    np.save(tmp_path / "d" / "val_prefix.npy", copies)
    np.save(tmp_path / "d" / "val_suffix.npy", copies)
    merged = build(data)
    assert len(merged.secrets) == 1 and merged.secrets[0].repeats is None
    assert any("merged 4 rows" in note for note in merged.notes)


def test_the_corpus_is_every_row_whatever_is_attacked(tmp_path: Path) -> None:
    data, others = arrays(tmp_path / "d"), arrays(tmp_path / "n", start=4)
    benchmark = build(data, nonmembers=others, limit=1, known_fraction=0.5)
    assert [
        tokens[0] for tokens, times in benchmark.texts_with_repeat_counts(True) if times is None
    ] == [
        0,
        10,
        20,
        30,
        40,
        50,
    ]
    assert len(list(benchmark.texts_with_repeat_counts(False))) == 6 and not list(
        build(data).texts_with_repeat_counts(False)
    )


def test_nonmembers_beside_members(tmp_path: Path) -> None:
    benchmark = build(arrays(tmp_path / "d"), nonmembers=arrays(tmp_path / "n", start=4))
    nonmembers = [s for s in benchmark.secrets if not s.member]
    assert [s.id for s in nonmembers] == [f"nonmember-{i:06d}" for i in (2, 3, 4, 5)]
    assert benchmark.heldout[0] == (60, 61, 62, 63, 64, 65, 66)


def test_what_is_recognised_as_such_a_folder(tmp_path: Path) -> None:
    assert has_extraction_arrays(Path(arrays(tmp_path / "a")))
    assert not has_extraction_arrays(tmp_path) and not has_extraction_arrays(tmp_path / "nowhere")
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "b" / "val_preprefix.npy", np.zeros((2, 2), int))
    assert not has_extraction_arrays(tmp_path / "b")
    np.save(tmp_path / "b" / "val_prefix.npy", np.zeros((2, 2), int))
    # so that what is missing is said, not guessed at
    assert has_extraction_arrays(tmp_path / "b")
    assert "expected a pair *_prefix.npy and *_suffix.npy, got val_prefix.npy" in refusal(
        str(tmp_path / "b")
    )


def test_the_pair_must_be_one(tmp_path: Path) -> None:
    data = arrays(tmp_path / "a")
    np.save(tmp_path / "a" / "test_prefix.npy", np.zeros((2, 2), int))
    np.save(tmp_path / "a" / "val_preprefix.npy", np.zeros((2, 2), float))
    assert any("other half is missing: test_prefix.npy" in note for note in build(data).notes)
    arrays(tmp_path / "a", stem="train")
    assert refusal(data).endswith("got several: train, val")
    assert "nothing of that name" in refusal(str(tmp_path / "nowhere"))
    assert "got a file" in refusal(str(tmp_path / "a" / "val_prefix.npy"))


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (np.zeros((5, 3), int), "got shapes (6, 4) and (5, 3)"),
        (np.zeros((6, 3)), "expected whole numbers (token ids) in val_suffix.npy, got float64"),
        (np.zeros((6, 3), bool), "got bool"),
        (np.zeros(6, int), "expected shape (examples, tokens) in val_suffix.npy, got (6,)"),
        (np.zeros((6, 0), int), "val_suffix.npy is empty"),
        (
            np.full((6, 3), -1),
            "vocabulary mismatch: expected token ids in [0, 1000), the model's vocabulary, got -1 "
            "to -1",
        ),
        (
            np.pad([[1000]], ((2, 3), (1, 1))),
            "got 0 to 1000 in val_suffix.npy (first in row 2, counted from 0)",
        ),
        (np.full((6, 3), 2**63, np.uint64), "vocabulary mismatch"),
        (np.array([[None]]), "val_suffix.npy is not a .npy array of numbers"),
    ],
)
def test_an_array_that_cannot_be_meant_is_refused(
    tmp_path: Path, suffix: Any, expected: str
) -> None:
    data = arrays(tmp_path / "a")
    np.save(tmp_path / "a" / "val_suffix.npy", suffix, allow_pickle=True)
    assert expected in refusal(data)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x06\x00{'a':\n", b"PK\x03\x04"]
)
def test_a_file_that_is_no_array_is_refused(tmp_path: Path, content: bytes) -> None:
    data = arrays(tmp_path / "a")
    (tmp_path / "a" / "val_suffix.npy").write_bytes(content)
    assert "val_suffix.npy" in refusal(data)


def test_an_archive_under_the_wrong_name_is_refused(tmp_path: Path) -> None:
    data = arrays(tmp_path / "a")
    with (tmp_path / "a" / "val_suffix.npy").open("wb") as file:
        np.savez(file, np.zeros((6, 3), int))
    assert "val_suffix.npy is not a .npy array" in refusal(data)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prefix_length": 5}, "expected --prefix-length <= 4, the width of the array, got 5"),
        ({"suffix_length": 4}, "expected --suffix-length <= 3, the width of the array, got 4"),
        ({"known_fraction": 1.0}, "expected --known-fraction in [0, 1), got 1.0"),
    ],
)
def test_options_out_of_range_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    assert refusal(arrays(tmp_path / "a"), **options).endswith(expected)


@real
def test_the_real_arrays() -> None:
    benchmark = build(str(REAL), vocab_size=50_257, known_fraction=0.2)
    prefix, suffix = np.load(REAL / "val_prefix.npy"), np.load(REAL / "val_suffix.npy")
    assert len(benchmark.secrets) + len(benchmark.known) == len(
        {(*p, *s) for p, s in zip(prefix, suffix, strict=True)}
    )
    for secret in benchmark.secrets:
        row = int(secret.id.removeprefix("example-"))
        assert secret.prefix == tuple(prefix[row]) and secret.suffix == tuple(suffix[row])


@real
def test_the_real_arrays_with_a_smaller_vocabulary() -> None:
    assert "vocabulary mismatch: expected token ids in [0, 2048)" in refusal(
        str(REAL), vocab_size=2048
    )
