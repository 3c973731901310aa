"""Who is in which shard: every copy of a record in one, and nobody's place depends on others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.shards import read_shard_record_list, record_digests
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training import members as members_module
from auditor.training.finetune import (
    FineTuningRecipe,
    StepwiseFineTuning,
    cast_frozen_linear_weights,
    train_packed_blocks,
)
from auditor.training.members import (
    Layers,
    LoraAdapterRecipe,
    MemberToTrain,
    add_lora_adapter,
    assign_member_shards,
    get_member_folder,
    merge_units_sharing_records,
    train_private_members,
)
from auditor.training.side_by_side import (
    JointAdapterTraining,
    compute_losses_separately,
    compute_row_nlls,
    list_lora_layers,
)
from tests.zoo.families import tiny as tiny_of

MakeTiny = Callable[..., HuggingFaceModel]
TEXTS = st.text(alphabet="abcd", max_size=2)


@given(st.lists(TEXTS, max_size=60), st.integers(1, 9))
def test_shards_are_disjoint_and_complete_with_all_copies_together(
    units: list[str], members: int
) -> None:
    shards = assign_member_shards(units, members)
    assert len(shards) == members
    assert sorted(index for chosen in shards for index in chosen) == list(range(len(units)))
    for unit in set(units):
        assert [any(units[i] == unit for i in chosen) for chosen in shards].count(True) == 1


@given(st.lists(TEXTS, min_size=1, max_size=30), st.integers(1, 9), st.data())
def test_a_unit_stays_in_its_shard_whoever_else_is_there(
    units: list[str], members: int, data: st.DataObject
) -> None:
    """Add/remove one, and no other shard changes: what a shard-level claim is about."""
    gone = data.draw(st.sampled_from(units))
    left = [unit for unit in units if unit != gone]

    def named(records: list[str]) -> list[list[str]]:
        return [[records[i] for i in chosen] for chosen in assign_member_shards(records, members)]

    assert sum(a != b for a, b in zip(named(units), named(left), strict=True)) == 1


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=40), st.integers(1, 9))
def test_neither_a_user_nor_a_record_lies_in_two_shards(
    rows: list[tuple[str, str]], members: int
) -> None:
    users, records = [user for user, _ in rows], [record for _, record in rows]
    shards = assign_member_shards(merge_units_sharing_records(users, records), members)
    for column in (users, records):
        held = Counter(value for chosen in shards for value in {column[i] for i in chosen})
        assert set(held.values()) <= {1}


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=40))
def test_units_are_joined_where_records_connect_them_and_nowhere_else(
    rows: list[tuple[str, str]],
) -> None:
    """Naive twin: connected components by repeated merging."""
    groups = [{i} for i in range(len(rows))]
    merged = True
    while merged:
        merged = False
        for a in groups:
            for b in groups:
                if a is not b and any(
                    rows[i][0] == rows[j][0] or rows[i][1] == rows[j][1] for i in a for j in b
                ):
                    groups = [g for g in groups if g is not a and g is not b] + [a | b]
                    merged = True
                    break
            if merged:
                break
    names = merge_units_sharing_records([user for user, _ in rows], [record for _, record in rows])
    for group in groups:
        assert {names[i] for i in group} == {min(rows[i][0] for i in group)}


def test_users_without_common_records_keep_their_names() -> None:
    assert merge_units_sharing_records(["u", "v", "u"], ["a", "b", "c"]) == ["u", "v", "u"]
    assert merge_units_sharing_records(["w", "v", "u", "v"], ["a", "a", "b", "b"]) == [
        "u",
        "u",
        "u",
        "u",
    ]


COURSE = FineTuningRecipe(epochs=2, rate=3e-3, batch=2, block=16, end=0)
SIZES = (9, 4, 0, 7, 1)  # records of each shard: batches of several sizes, and one that has none
Losses = dict[int, list[float]]


def members_of(folder: Path, sizes: Sequence[int] = SIZES) -> list[MemberToTrain]:
    """Random records of 6 tokens."""
    noise = np.random.default_rng(5)
    made = []
    for index, size in enumerate(sizes):
        records = [tuple(noise.integers(1, 61, 6).tolist()) for _ in range(size)]
        made.append(
            MemberToTrain(
                get_member_folder(folder, index),
                [str(r) for r in records],
                records,
                70 + index,
                ("t", index),
            )
        )
    return made


def one_by_one(
    base: Callable[[], PreTrainedModel],
    adapter: LoraAdapterRecipe,
    members: Sequence[MemberToTrain],
) -> Losses:
    """PEFT's layers and a forward each; the loss in the model's own precision."""
    losses: Losses = {}
    for index, member in enumerate(members):
        own = losses.setdefault(index, [])

        def loss(model: Any, blocks: Tensor, own: list[float] = own) -> Tensor:
            logits = model(input_ids=blocks).logits[:, :-1].flatten(0, 1)
            found = torch.nn.functional.cross_entropy(logits, blocks[:, 1:].flatten())
            own.append(float(found.detach()))
            return found

        plain = without_dropout(base())
        torch.manual_seed(member.seed)
        model = add_lora_adapter(plain, adapter)
        if member.sequences:
            train_packed_blocks(
                model,
                member.sequences,
                **vars(COURSE),
                order=make_keyed_generator(*member.stream),
                loss=loss,
            )
        model.save_pretrained(str(member.folder))
    return losses


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "adapter_model.safetensors"))


@pytest.fixture
def losses_together(monkeypatch: pytest.MonkeyPatch) -> Losses:
    """Of each step of each member that is trained together with others: its mean loss."""
    seen: Losses = {index: [] for index in range(len(SIZES))}
    begin, real = (
        members_module._MemberTraining.__init__,
        JointAdapterTraining.compute_losses_jointly,
    )
    whose: dict[int, int] = {}

    def begins(self: Any, member: MemberToTrain, *more: Any) -> None:
        begin(self, member, *more)
        whose[id(self.model)] = int(member.folder.name[-3:])

    def losses(
        self: JointAdapterTraining, adapters: Sequence[Any], rows: Sequence[Tensor]
    ) -> Tensor:
        found = real(self, adapters, rows)
        for model, loss in zip(adapters, found, strict=True):
            seen[whose[id(model)]].append(float(loss.detach()))
        return found

    monkeypatch.setattr(members_module._MemberTraining, "__init__", begins)
    monkeypatch.setattr(JointAdapterTraining, "compute_losses_jointly", losses)
    return seen


@pytest.mark.parametrize("layers", ["attention", "all"])
@pytest.mark.parametrize("kind", ["neox", "gpt2"])  # nn.Linear, and Conv1D with dropout
def test_together_is_one_by_one(
    make_tiny: MakeTiny, tmp_path: Path, losses_together: Losses, kind: str, layers: Layers
) -> None:
    """In double precision, where rounding hides nothing: the same losses at every step and the same
    adapters."""

    def base() -> PreTrainedModel:
        model: PreTrainedModel = make_tiny(kind=kind).model.double()
        return model

    adapter = LoraAdapterRecipe(4, 8, layers)
    expected = one_by_one(base, adapter, members_of(tmp_path / "one"))
    written: list[str] = []
    together = members_of(tmp_path / "together")
    most = train_private_members(
        base(),
        adapter,
        together,
        COURSE,
        together=5,
        on_written=lambda member: written.append(member.folder.name),
    )
    assert most == 5 and sorted(written) == [f"member-00{i}" for i in range(5)]
    for index, own in expected.items():
        np.testing.assert_allclose(losses_together[index], own, rtol=0, atol=1e-9)
    assert len({len(own) for own in expected.values()}) > 2  # some end before others
    for index, member in enumerate(together):
        here, there = weights(member.folder), weights(tmp_path / "one" / member.folder.name)
        assert here.keys() == there.keys()
        for name, found in here.items():
            torch.testing.assert_close(found, there[name], rtol=0, atol=1e-8)
        learnt = any(bool(found.any()) for name, found in here.items() if "lora_B" in name)
        assert learnt == bool(SIZES[index])
        configs = [
            json.loads((p / "adapter_config.json").read_text())
            for p in (member.folder, tmp_path / "one" / member.folder.name)
        ]
        assert configs[0] == configs[1]


def test_losses_in_single_precision_are_those_of_one_by_one(
    make_tiny: MakeTiny, tmp_path: Path, losses_together: Losses
) -> None:
    adapter = LoraAdapterRecipe(4, 8, "all")
    expected = one_by_one(lambda: make_tiny().model, adapter, members_of(tmp_path / "one"))
    train_private_members(
        make_tiny().model, adapter, members_of(tmp_path / "together"), COURSE, together=5
    )
    for index, own in expected.items():
        np.testing.assert_allclose(losses_together[index], own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("together", [0, 1, 2, 3])
def test_members_do_not_depend_on_who_is_trained_beside_them(
    make_tiny: MakeTiny, tmp_path: Path, together: int
) -> None:
    """GPT-2's dropout is off however many are trained at once."""
    adapter = LoraAdapterRecipe(2, 8, "attention")
    for out, count in (("all", 5), ("some", together)):
        torch.rand(count)
        base = make_tiny(kind="gpt2").model.double().train()
        train_private_members(base, adapter, members_of(tmp_path / out), COURSE, together=count)
    for member in members_of(tmp_path / "all"):
        here, there = weights(member.folder), weights(tmp_path / "some" / member.folder.name)
        for name, found in here.items():
            torch.testing.assert_close(found, there[name], rtol=0, atol=1e-8)
        assert read_shard_record_list(member.folder) == record_digests(member.texts)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_frozen_weights_kept_in_half_precision_give_the_same_bits(architecture: str) -> None:
    torch.manual_seed(0)
    model = add_lora_adapter(tiny_of(architecture), LoraAdapterRecipe(2, 4, "all"))
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = torch.randint(40, (2, 9))

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_row_nlls(model, rows).sum()
        return list(torch.autograd.grad(loss, trained))

    before = gradients()
    cast_frozen_linear_weights(model, torch.bfloat16)
    assert any(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in (*trained, model.get_input_embeddings().weight))
    for own, other in zip(before, gradients(), strict=True):
        assert torch.equal(own, other)
    for layer in list_lora_layers(model).values():
        layer.cast_input_dtype_enabled = False
    for own, other in zip(before, gradients(), strict=True):
        assert torch.equal(own, other)


def test_adapters_read_the_half_precision_that_layers_before_them_give(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = set[torch.dtype]()

    def watch(adapters: Sequence[Any], rows: Sequence[Tensor]) -> Tensor:
        for layer in list_lora_layers(adapters[0]).values():
            layer.lora_A["default"].register_forward_pre_hook(
                lambda module, inputs: read.add(inputs[0].dtype)
            )
        return compute_losses_separately(adapters, rows)

    monkeypatch.setattr(members_module, "compute_losses_separately", watch)
    adapter, alone = LoraAdapterRecipe(4, 8, "all"), members_of(tmp_path, SIZES[:1])
    train_private_members(make_tiny().model, adapter, alone, COURSE, half=torch.bfloat16)
    assert torch.bfloat16 in read


def test_products_in_half_precision(
    make_tiny: MakeTiny, tmp_path: Path, losses_together: Losses
) -> None:
    """Beside others or alone: the losses are near those of single precision, and are not those."""
    adapter, exact = (
        LoraAdapterRecipe(4, 8, "all"),
        one_by_one(
            lambda: make_tiny().model, LoraAdapterRecipe(4, 8, "all"), members_of(tmp_path / "one")
        ),
    )
    train_private_members(
        make_tiny().model,
        adapter,
        members_of(tmp_path / "two"),
        COURSE,
        together=5,
        half=torch.bfloat16,
    )
    far = [
        abs(a - b) for i, own in exact.items() for a, b in zip(own, losses_together[i], strict=True)
    ]
    assert 1e-4 < max(far) < 0.1
    (member,) = members_of(tmp_path / "alone", SIZES[:1])
    train_private_members(make_tiny().model, adapter, [member], COURSE, half=torch.bfloat16)
    far = [
        float((w - weights(tmp_path / "two" / "member-000")[k]).abs().max())
        for k, w in weights(member.folder).items()
    ]
    assert max(far) < 0.02


def test_a_member_of_an_empty_shard_is_the_public_model(
    make_tiny: MakeTiny, tmp_path: Path
) -> None:
    (member,) = members_of(tmp_path, [0])
    train_private_members(make_tiny().model, LoraAdapterRecipe(2, 8, "all"), [member], COURSE)
    model = HuggingFaceModel(PeftModel.from_pretrained(make_tiny().model, str(member.folder)))
    context = torch.tensor([[3, 4, 5]])
    assert torch.equal(model.log_probs(context, 1), make_tiny().log_probs(context, 1))
    assert read_shard_record_list(member.folder) == []


class Killed(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("saved", [True, False])
def test_a_killed_training_goes_on_and_ends_as_it_would_have(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """In the middle of an epoch of some, when others are written: with a checkpoint of every step,
    and without one."""
    adapter, checkpoint = (
        LoraAdapterRecipe(2, 8, "all"),
        TrainerCheckpoint(tmp_path / "checkpoint.pt"),
    )
    options: dict[str, Any] = {
        "together": 3,
        "checkpoint": checkpoint if saved else None,
        "seconds_between": 0.0,
    }

    def base() -> PreTrainedModel:
        model: PreTrainedModel = make_tiny().model.double()
        return model

    train_private_members(base(), adapter, members_of(tmp_path / "whole"), COURSE, together=5)
    real, steps = StepwiseFineTuning.step, [0]

    def dies(self: StepwiseFineTuning) -> None:
        if steps[0] == 9:
            raise Killed
        steps[0] += 1
        real(self)

    monkeypatch.setattr(StepwiseFineTuning, "step", dies)
    cut = members_of(tmp_path / "cut")
    with pytest.raises(Killed):
        train_private_members(base(), adapter, cut, COURSE, **options)
    kept = [member.folder.is_dir() for member in cut]
    assert True in kept and False in kept
    (tmp_path / "cut" / ".member-000.audit-scratch-x").mkdir(exist_ok=True)  # killed while it wrote
    steps[0] = -1000
    before = steps[0]
    train_private_members(base(), adapter, cut, COURSE, **options)
    needed = sum(
        2 * -(-len(m.sequences) * 7 // 32)
        for m, is_kept in zip(cut, kept, strict=True)
        if not is_kept
    )
    assert (steps[0] - before < needed) == saved
    assert not (tmp_path / "cut" / ".member-000.audit-scratch-x").exists()
    for member in cut:
        for name, found in weights(member.folder).items():
            torch.testing.assert_close(
                found, weights(tmp_path / "whole" / member.folder.name)[name], rtol=0, atol=1e-8
            )


def test_a_base_whose_rows_do_not_stay_apart_trains_one_member_at_a_time(tmp_path: Path) -> None:
    """Jamba reads the weights of layers without calling them."""
    base = tiny_of("jamba")
    assert (
        train_private_members(
            base, LoraAdapterRecipe(2, 8, "all"), members_of(tmp_path / "auto", [2, 2]), COURSE
        )
        == 1
    )
    with pytest.raises(
        AuditError, match=r"expected together=1 for jamba, whose layers do not read each row"
    ):
        train_private_members(
            base,
            LoraAdapterRecipe(2, 8, "all"),
            members_of(tmp_path / "two", [2, 2]),
            COURSE,
            together=2,
        )


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # PEFT's own patterns
def test_adapters_of_experts_are_refused_before_they_are_trained(tmp_path: Path) -> None:
    """An ensemble could not serve them."""
    with pytest.raises(AuditError, match="adapters of plain linear layers"):
        train_private_members(
            tiny_of("mixtral"), LoraAdapterRecipe(2, 8, "all"), members_of(tmp_path), COURSE
        )
    assert not list(tmp_path.iterdir())


def test_an_architecture_that_peft_does_not_know_is_refused(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_tiny().model
    monkeypatch.setattr(type(base.config), "model_type", "of-tomorrow")
    with pytest.raises(
        AuditError, match="cannot put a LoRA adapter on the attention of of-tomorrow"
    ):
        train_private_members(
            base, LoraAdapterRecipe(2, 8, "attention"), members_of(tmp_path), COURSE
        )
    assert not list(tmp_path.iterdir())
