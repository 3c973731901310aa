"""Who is in which shard: every copy of a record in one, and nobody's place depends on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from transformers import PreTrainedModel

from auditor.ensemble import read_shard, record_names
from auditor.errors import AuditError
from auditor.members import Adapter, joined, member_folder, shard, train_member
from auditor.models import HuggingFaceModel

MakeTiny = Callable[..., HuggingFaceModel]
TEXTS = st.text(alphabet="abcd", max_size=2)


@given(st.lists(TEXTS, max_size=60), st.integers(1, 9))
def test_shards_are_disjoint_and_complete_with_all_copies_together(units: list[str], members: int) -> None:
    shards = shard(units, members)
    assert len(shards) == members
    assert sorted(index for chosen in shards for index in chosen) == list(range(len(units)))
    for unit in set(units):
        assert [any(units[i] == unit for i in chosen) for chosen in shards].count(True) == 1


@given(st.lists(TEXTS, min_size=1, max_size=30), st.integers(1, 9), st.data())
def test_a_unit_stays_in_its_shard_whoever_else_is_there(units: list[str], members: int, data: st.DataObject) -> None:
    """Add/remove one, and no other shard changes: what a shard-level claim is about."""
    gone = data.draw(st.sampled_from(units))
    left = [unit for unit in units if unit != gone]

    def named(records: list[str]) -> list[list[str]]:
        return [[records[i] for i in chosen] for chosen in shard(records, members)]

    assert sum(a != b for a, b in zip(named(units), named(left), strict=True)) == 1


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=40), st.integers(1, 9))
def test_neither_a_user_nor_a_record_lies_in_two_shards(rows: list[tuple[str, str]], members: int) -> None:
    users, records = [user for user, _ in rows], [record for _, record in rows]
    shards = shard(joined(users, records), members)
    for column in (users, records):
        held = Counter(value for chosen in shards for value in {column[i] for i in chosen})
        assert set(held.values()) <= {1}


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=40))
def test_units_are_joined_where_records_connect_them_and_nowhere_else(rows: list[tuple[str, str]]) -> None:
    """Naive twin: connected components by repeated merging."""
    groups = [{i} for i in range(len(rows))]
    merged = True
    while merged:
        merged = False
        for a in groups:
            for b in groups:
                if a is not b and any(rows[i][0] == rows[j][0] or rows[i][1] == rows[j][1] for i in a for j in b):
                    groups = [g for g in groups if g is not a and g is not b] + [a | b]
                    merged = True
                    break
            if merged:
                break
    names = joined([user for user, _ in rows], [record for _, record in rows])
    for group in groups:
        assert {names[i] for i in group} == {min(rows[i][0] for i in group)}


def test_users_without_common_records_keep_their_names() -> None:
    assert joined(["u", "v", "u"], ["a", "b", "c"]) == ["u", "v", "u"]
    assert joined(["w", "v", "u", "v"], ["a", "a", "b", "b"]) == ["u", "u", "u", "u"]


def bumped(member: PeftModel) -> None:
    """A fit that is seen: noise of torch's own generator on every adapter weight."""
    with torch.no_grad():
        for parameter in member.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def adapter_weights(folder: Path, base: PreTrainedModel) -> list[torch.Tensor]:
    model: Any = PeftModel.from_pretrained(base, str(folder))
    return [p.detach() for name, p in model.named_parameters() if "lora" in name]


def test_a_member_says_what_it_saw_and_does_not_depend_on_those_before_it(make_tiny: MakeTiny, tmp_path: Path) -> None:
    adapter = Adapter(2, 8, "attention")
    for out, before in (("one", 0), ("other", 5)):
        torch.rand(before)
        train_member(tmp_path / out, make_tiny().model, adapter, ["a", "b", "a"], bumped, seed=3)
    assert read_shard(tmp_path / "one") == record_names(["a", "b"])
    first, second = (adapter_weights(tmp_path / out, make_tiny().model) for out in ("one", "other"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first) == 2 * 2  # two layers, one projection each


def test_a_member_of_an_empty_shard_is_the_public_model(make_tiny: MakeTiny, tmp_path: Path) -> None:
    train_member(tmp_path / "empty", make_tiny().model, Adapter(2, 8, "all"), [], bumped, seed=0)
    model = HuggingFaceModel(PeftModel.from_pretrained(make_tiny().model, str(tmp_path / "empty")))
    context = torch.tensor([[3, 4, 5]])
    assert torch.equal(model.log_probs(context, 1), make_tiny().log_probs(context, 1))
    assert read_shard(tmp_path / "empty") == []


def test_a_member_that_was_killed_is_not_there(make_tiny: MakeTiny, tmp_path: Path) -> None:
    def dies(member: PeftModel) -> None:
        raise KeyboardInterrupt

    folder = member_folder(tmp_path, 4)
    with pytest.raises(KeyboardInterrupt):
        train_member(folder, make_tiny().model, Adapter(2, 8, "all"), ["a"], dies, seed=0)
    assert folder.name == "member-004" and not folder.exists()
    (tmp_path / ".member-004").mkdir()  # a run killed while it wrote
    train_member(folder, make_tiny().model, Adapter(2, 8, "all"), ["a"], bumped, seed=0)
    assert folder.is_dir() and not (tmp_path / ".member-004").exists()


def test_an_architecture_that_peft_does_not_know_is_refused(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_tiny().model
    monkeypatch.setattr(type(base.config), "model_type", "of-tomorrow")
    with pytest.raises(AuditError, match="cannot put a LoRA adapter on the attention of of-tomorrow"):
        train_member(tmp_path / "m", base, Adapter(2, 8, "attention"), ["a"], bumped, seed=0)
    assert not list(tmp_path.iterdir())
