"""The script of two splits: who is held against whom by length, and that its random splits are random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from auditor.core.secret_randomness import keyed_random_generator
from benchmarks.checks.trust import membership_splits as program


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of 1 to 60 letters, so that a record's ids say how long it is."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"w" * (i + 1): i for i in range(60)}, unk_token="w"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def arrays(folder: Path, name: str, count: int) -> None:
    folder.mkdir(parents=True)
    for part, width in (("prefix", 5), ("suffix", 4)):
        np.save(
            folder / f"{name}_{part}.npy",
            keyed_random_generator(name, part).integers(0, 60, (count, width)).astype(np.uint16),
        )


def size(folder: Path, name: str) -> np.ndarray:
    return sum(np.load(folder / f"{name}_{part}.npy").astype(int).sum(1) for part in ("prefix", "suffix"))


def test_by_length_holds_longer_members_against_shorter_non_members(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("members", "nonmembers"):
        arrays(tmp_path / name, name, 40)
    program.by_length(tmp_path, tokenizer)
    longer, shorter = (size(tmp_path / "length" / name, name) for name in ("members", "nonmembers"))
    assert len(longer) == len(shorter) == 20
    assert longer.min() > np.median(size(tmp_path / "members", "members")) > shorter.mean()


def test_random_splits_are_seldom_objected_to(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays(tmp_path / "arrays", "val", 60)
    monkeypatch.setattr(program, "SPLITS", 10)
    assert program.false_alarms(tmp_path / "arrays", tokenizer, 30, 20) <= 2
