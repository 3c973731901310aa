"""How many tokens of a row were trained on: read from a trainer's arguments, without running what
they hold."""

import itertools
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import pack_dataset

from auditor.models.trained_length import TrainedLength, read_trained_length

FILE = "training_args.bin"


@dataclass
class Arguments:
    """As TRL's SFTConfig."""

    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    packing: bool = False
    packing_strategy: str = "bfd"
    device: Any = None


@pytest.mark.parametrize(
    ("fields", "tokens", "from_end"),
    [
        ({}, 1024, False),
        ({"max_length": 22, "truncation_mode": "keep_end"}, 22, True),
        ({"max_length": 64, "packing": True, "truncation_mode": "keep_end"}, 64, False),
    ],
)
def test_the_length_stands_in_the_trainers_arguments(
    tmp_path: Path, fields: dict[str, Any], tokens: int, from_end: bool
) -> None:
    torch.save(Arguments(**fields, device=torch.device("cpu")), tmp_path / FILE)
    assert read_trained_length(tmp_path) == (
        TrainedLength(tokens, from_end, f"max_length of {FILE}"),
        "",
    )


@pytest.mark.parametrize(
    "fields", [{"max_length": None}, {"packing": True, "packing_strategy": "wrapped"}]
)
def test_a_trainer_that_cuts_no_row_says_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    torch.save(Arguments(**fields, device=torch.device("cpu")), tmp_path / FILE)
    assert read_trained_length(tmp_path) == (None, "")
    assert read_trained_length(tmp_path / "nowhere") == (None, "")


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_keeps_the_tokens_that_trl_packs(strategy: str, tmp_path: Path) -> None:
    """Twin: `trl.pack_dataset` (1.16)."""
    rows = [list(range(10)), list(range(100, 103)), list(range(200, 206))]
    packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), 4, strategy)
    arguments = Arguments(4, "keep_end", packing=True, packing_strategy=strategy)
    torch.save(arguments, tmp_path / FILE)
    found, _ = read_trained_length(tmp_path)
    trained = []
    for row in rows:
        start, end = found.span_of(len(row)) if found else (0, len(row))
        trained += row[start:end]
    assert sorted(itertools.chain(*packed["input_ids"])) == sorted(trained)


def test_code_in_the_file_is_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    arguments = Arguments(device=Harm())
    torch.save(arguments, tmp_path / FILE)
    found, _ = read_trained_length(tmp_path)
    assert found is not None and found.tokens == 1024 and not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_file_that_cannot_be_read_safely_is_named_and_the_audit_goes_on(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is None:
        with zipfile.ZipFile(tmp_path / FILE, "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02" + b"0" * 100)
    else:
        (tmp_path / FILE).write_bytes(content)
    found, note = read_trained_length(tmp_path)
    assert found is None and "--trained-length N" in note


def test_the_tokens_that_a_trainer_puts_around_a_text_count() -> None:
    first, last = (
        TrainedLength(10, tokens_before=1, tokens_after=1),
        TrainedLength(10, True, tokens_before=1, tokens_after=1),
    )
    assert (first.span_of(30), first.span_of(30, templated=True), first.span_of(5)) == (
        (0, 9),
        (0, 10),
        (0, 5),
    )
    assert (last.span_of(30), last.span_of(30, templated=True), last.span_of(5)) == (
        (21, 30),
        (20, 30),
        (0, 5),
    )


@pytest.mark.parametrize("package", ["axolotl", "swift"])
def test_a_trainer_that_leaves_longer_rows_out_trains_on_no_token_of_them(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(f"{package}.core.training_args")
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.core", ModuleType(f"{package}.core"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = type("DPOConfig", (Arguments,), {"__module__": module.__name__})
    module.DPOConfig = kind  # type: ignore[attr-defined]
    torch.save(kind(max_length=64), tmp_path / FILE)
    found, _ = read_trained_length(tmp_path)
    assert found is not None and (found.tokens, found.left_out_by) == (64, package)
    assert [found.span_of(n) for n in (64, 65)] == [(0, 64), (0, 0)]
    assert package in found.beyond_phrase and "--trained-length 64" in found.rule
