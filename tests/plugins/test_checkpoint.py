"""Where an interrupted training goes on: whole or not there, and a disk that is full is no bug of
ours."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from auditor.core.errors import AuditError
from auditor.plugins.trainer import TrainerCheckpoint


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """As on a full disk: the system refuses to write more of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_finds_no_room_is_refused_by_name_and_the_one_before_stays(tmp_path: Path) -> None:
    checkpoint = TrainerCheckpoint(tmp_path / "checkpoint.pt")
    checkpoint.save({"step": 1, "weights": torch.ones(10)})
    with (
        no_file_beyond(10_000),
        pytest.raises(AuditError, match=r"checkpoint\.pt: cannot be written: File too large"),
    ):
        checkpoint.save({"step": 2, "weights": torch.ones(10_000)})
    held = checkpoint.load()
    assert held is not None and held["step"] == 1 and torch.equal(held["weights"], torch.ones(10))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
