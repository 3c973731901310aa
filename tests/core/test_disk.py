"""What is written is there whole or not at all, for its owner only, and one module sees to it."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from auditor.core import disk
from auditor.core.canary_space import CanarySpace
from auditor.generation.tries import _load_trie, _save_trie, build_trie
from auditor.models import shards
from auditor.training.finetune import FineTuningRecipe
from auditor.training.members import LoraAdapterRecipe, MemberToTrain, train_private_members
from tests.conftest import tiny
from tests.test_layers import MODULES, parse

STEPS = {
    "os.replace",
    "os.rename",
    "tempfile.mkstemp",
    "tempfile.mkdtemp",
    "tempfile.NamedTemporaryFile",
}


@pytest.fixture
def careless() -> Iterator[None]:
    """The most careless umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    paths = (folder, *folder.rglob("*"))
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


def test_one_module_takes_the_steps_of_writing_whole() -> None:
    for name, path in MODULES.items():
        if not re.search(r"\b(os|tempfile)\b", path.read_text()):
            continue
        calls = [node.func for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
        assert name == "core.disk" or not STEPS & set(map(ast.unparse, calls)), name


def test_what_is_made_is_there_whole_or_not_at_all_and_for_its_owner(
    tmp_path: Path, careless: None
) -> None:
    with disk.create_atomically(tmp_path / "new" / "made") as place:
        place.mkdir()
        (place / "inside").write_text("text")
        assert not (tmp_path / "new" / "made").exists()
    assert modes(tmp_path / "new" / "made") == {"made": 0o700, "inside": 0o600}
    with pytest.raises(RuntimeError), disk.create_atomically(tmp_path / "failed") as place:
        place.write_text("half")
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]


def test_a_link_is_put_in_the_place_of_another(tmp_path: Path) -> None:
    for target in ("one", "two"):
        disk.replace_symlink(tmp_path / "latest", target)
        assert os.readlink(tmp_path / "latest") == target
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_members_and_what_they_were_trained_on_are_their_owners(
    tmp_path: Path, careless: None
) -> None:
    folder = tmp_path / "ensemble" / "member-000"
    member = MemberToTrain(folder, ["a record"], [(1, 2, 3, 4)], 0, ("test", 0))
    (tmp_path / "ensemble").mkdir(mode=0o700)
    train_private_members(
        tiny().model,
        LoraAdapterRecipe(2, 4, "all"),
        [member],
        FineTuningRecipe(1, 1e-3, 1, 8, end=0),
    )
    shards.write_ensemble_metadata(
        tmp_path / "ensemble", method="pmixed", promise="", unit="record", members=1
    )
    assert set(modes(tmp_path / "ensemble").values()) == {0o700, 0o600}
    assert shards.read_shard_record_list(folder) == shards.record_digests(["a record"])


def test_a_kept_trie_is_what_was_built(tmp_path: Path, careless: None) -> None:
    class Digits:
        def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
            return {"input_ids": [int(letter) for letter in text]}

    made = build_trie(CanarySpace("{digits:2}"), Digits())
    _save_trie(tmp_path / "tries" / "trie.npz", made)
    held = _load_trie(tmp_path / "tries" / "trie.npz")
    assert (held.head, held.largest, held.levels[0].leaves[0]) == (made.head, made.largest, 100)
    assert all(
        torch.equal(one.leaf_token, two.leaf_token)
        for one, two in zip(held.levels, made.levels, strict=True)
    )
    assert (
        modes(tmp_path / "tries")["trie.npz"] == 0o600
        and len(list((tmp_path / "tries").iterdir())) == 1
    )
