"""Train the private members of an ensemble: a LoRA adapter on each disjoint shard of records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.pytorch_utils import Conv1D

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.lora import copy_sharing_weights, list_plain_lora_layers
from auditor.models.shards import write_shard_record_list
from auditor.plugins.trainer import TrainerCheckpoint, TrainingRecord
from auditor.training.finetune import (
    FineTuningRecipe,
    StepwiseFineTuning,
    cast_frozen_linear_weights,
    check_weights_finite,
    list_trainable_parameters,
)
from auditor.training.side_by_side import (
    compute_losses_separately,
    make_joint_training_base,
)

Layers = Literal["attention", "all"]
# Tokens of all members trained together: more tokens fill memory and are no faster.
_TOKENS_A_STEP = 4096


def assign_member_shards(units: Sequence[str], members: int) -> list[list[int]]:
    """Return the indices of each member's records.

    `units` holds the privacy unit of each record. The hash of the unit determines the shard. So all
    records of a unit are in one shard, and adding or removing a unit changes only this shard.
    """
    shards: list[list[int]] = [[] for _ in range(members)]
    for index, unit in enumerate(units):
        digest = hashlib.sha256(unit.encode()).digest()
        shards[int.from_bytes(digest[:8], "big") % members].append(index)
    return shards


def merge_units_sharing_records(units: Sequence[str], records: Sequence[str]) -> list[str]:
    """Return the unit of each record, after merging units that have a record in common.

    A merged unit gets the name that comes first in the alphabet. Without merging, copies of a
    record could be in two shards, and a claim about one record would be false. `units` and
    `records` hold the unit and the text of each record.
    """
    leader = {unit: unit for unit in units}

    def find_leader(unit: str) -> str:  # union-find with path halving
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    owner: dict[str, str] = {}
    for unit, record in zip(units, records, strict=True):
        other_unit = owner.setdefault(record, unit)
        # The first in the alphabet leads, so that the order of records does not name a group.
        first, second = sorted((find_leader(unit), find_leader(other_unit)))
        leader[second] = first
    return list(map(find_leader, units))


def name_inseparable_units(records: Sequence[TrainingRecord]) -> list[str]:
    """Return the id of each record's privacy unit.

    A unit contains all records of a user and every copy of them. So users who share a record are in
    the same unit.
    """
    units = [record.unit for record in records]
    return merge_units_sharing_records(units, [record.text for record in records])


def get_member_folder(ensemble: Path, index: int) -> Path:
    return ensemble / f"member-{index:03d}"


@dataclass(frozen=True)
class LoraAdapterRecipe:
    """Settings of a plain LoRA adapter.

    `layers` are the adapted layers: all linear layers, or the attention projection that PEFT adapts
    in this architecture.
    """

    rank: int
    alpha: int
    layers: Layers


@dataclass(frozen=True)
class MemberToTrain:
    """One member of an ensemble to train: its folder and its records.

    Attributes:
        texts: the records as texts.
        sequences: the records as tokens.
        seed: determines the half of the adapter's weights that is drawn at random.
        stream: key that determines the order of the records.
    """

    folder: Path
    texts: Sequence[str]
    sequences: Sequence[Tokens]
    seed: int
    stream: tuple[str | int, ...]


class _MemberTraining:
    """Training of one member, in progress."""

    def __init__(
        self,
        member: MemberToTrain,
        base: Any,
        adapter: LoraAdapterRecipe,
        course: FineTuningRecipe,
        half: torch.dtype | None,
    ) -> None:
        self.member = member
        # Right before the adapter is made: torch draws its random half next.
        torch.manual_seed(member.seed)
        self.model = add_lora_adapter(copy_sharing_weights(base), adapter).eval()
        layers = list_plain_lora_layers(self.model)
        if half is not None:
            # Autocast casts all inputs of products; PEFT would cast them to float32 before.
            for layer in layers.values():
                layer.cast_input_dtype_enabled = False
        order = make_keyed_generator(*member.stream)
        parameters = list_trainable_parameters(self.model)
        self.fitting = StepwiseFineTuning(parameters, member.sequences, course, order)

    def restore(self, states: dict[str, Any]) -> int:
        """Continue from this member's state, and return the number of steps in it; 0 without one.

        States are keyed by folder name.
        """
        state = states.pop(self.member.folder.name, None)
        if state is None:
            return 0
        self.fitting.restore(state)
        return self.fitting.epochs * self.fitting.steps_per_epoch + self.fitting.steps

    def write_member(self) -> None:
        with disk.create_atomically(self.member.folder) as folder:
            self.model.save_pretrained(str(folder))
            write_shard_record_list(folder, self.member.texts)


def train_private_members(
    base: Any,
    adapter: LoraAdapterRecipe,
    members: Sequence[MemberToTrain],
    course: FineTuningRecipe,
    *,
    together: int = 0,
    half: torch.dtype | None = None,
    stepped: Callable[[int, int], None] = lambda n_steps, total: None,
    on_written: Callable[[MemberToTrain], None] = lambda member: None,
    checkpoint: TrainerCheckpoint | None = None,
    seconds_between: float = 60.0,
) -> int:
    """Train the members that have no folder yet, several in each forward pass.

    A member's folder appears only when it is complete. Members do not affect each other: each has
    its own seed, batches, clipping and AdamW, and equals PEFT's adapter up to rounding. The base
    has no dropout, because dropout masks would depend on the batch. A member without records equals
    the public model.

    Args:
        together: largest number of members to train at once. 0 means as many as read 4,096 tokens
            per step, but only one if the base's layers do not treat each row of a batch
            independently.
        half: precision of torch's autocast for matrix products.
        stepped: callback(steps of all members done, total steps).
        on_written: callback(member), called after the member's folder is written.
        checkpoint: state from which members in progress continue.

    Returns:
        The largest number of members trained at once.

    Raises:
        AuditError: if PEFT does not know the architecture's attention, if `together` > 1 but
            members cannot be trained together, or if a training diverges.
    """
    pending = [member for member in members if not member.folder.is_dir()]
    steps_done = 0
    total_steps = sum(course.count_steps(member.sequences) for member in pending)
    default_count = max(1, _TOKENS_A_STEP // (course.batch * course.block))
    max_count = min(together or default_count, len(pending))
    compute_losses, max_count = _choose_losses(base, adapter, max_count, required=together > 0)
    cast_frozen_linear_weights(base.requires_grad_(False), half)
    states = {}
    if checkpoint is not None:
        states = checkpoint.load() or {}
    active = list[_MemberTraining]()
    while pending or active:
        while pending and len(active) < max_count:
            active.append(_MemberTraining(pending.pop(0), base, adapter, course, half))
            steps_done += active[-1].restore(states)
        # A member with an empty shard is finished before its first step.
        unfinished = [training for training in active if not training.fitting.is_finished]
        if unfinished:
            _take_joint_step(unfinished, compute_losses, base.device, half)
            steps_done += len(unfinished)
            stepped(steps_done, total_steps)
        at_epoch_end = [training for training in active if training.fitting.steps == 0]
        for training in at_epoch_end:
            check_weights_finite(training.fitting.parameters.values(), checkpoint)
            if training.fitting.is_finished:
                active.remove(training)
                training.write_member()
                on_written(training.member)
        if checkpoint is not None:
            # Finished members need no state: their folders exist.
            checkpoint.save_when_due(
                seconds_between,
                lambda: {
                    training.member.folder.name: training.fitting.state() for training in active
                },
            )
    return max_count


def _take_joint_step(
    trainings: Sequence[_MemberTraining],
    compute_losses: Callable[..., torch.Tensor],
    device: torch.device,
    half: torch.dtype | None,
) -> None:
    """Take one step of each of these trainings, after a forward pass that reads all batches."""
    batches = [training.fitting.get_next_batch().to(device) for training in trainings]
    with torch.autocast(device.type, dtype=half, enabled=half is not None):
        losses = compute_losses([training.model for training in trainings], batches)
    # No adapter reads another's rows, so the gradient of the sum is, for each adapter, the gradient
    # of its loss.
    losses.sum().backward()
    for training in trainings:
        training.fitting.step()


def _choose_losses(
    base: Any, adapter: LoraAdapterRecipe, max_count: int, *, required: bool
) -> tuple[Callable[..., torch.Tensor], int]:
    """Return a function that computes several members' losses, and how many it takes per call.

    It takes `max_count` members if the base's layers treat each row of a batch independently.
    Otherwise it takes one member or, if `required`, AuditError is raised.
    """
    if max_count > 1:
        joint_base = make_joint_training_base(
            base,
            lambda: add_lora_adapter(copy_sharing_weights(base), adapter),
        )
        if joint_base is not None:
            return joint_base.compute_losses_jointly, max_count
        if required:
            raise AuditError(
                f"expected together=1 for {base.config.model_type}, whose layers do not read each "
                "row of a batch by itself, got more"
            )
    return compute_losses_separately, 1


def add_lora_adapter(model: Any, adapter: LoraAdapterRecipe) -> Any:
    """Add an untrained adapter and freeze the other weights.

    Half of the adapter's matrices are drawn at random by torch. Raise AuditError if PEFT does not
    know the architecture's attention.
    """
    from peft import LoraConfig, get_peft_model

    width = int(getattr(model.config, "hidden_size", adapter.rank))
    if adapter.rank > width:
        raise AuditError(
            f"expected a LoRA rank of at most the model's width of {width}, got {adapter.rank}",
        )
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        # None: the layers that PEFT names for the architecture
        target_modules="all-linear" if adapter.layers == "all" else None,
        # GPT-2's linear layers
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise AuditError(
            f"cannot put a LoRA adapter on the attention of {model.config.model_type}: {reason}"
        ) from error
