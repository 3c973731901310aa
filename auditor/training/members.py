"""Trains the private members of an ensemble: disjoint shards of the records, one LoRA adapter a shard.

Knows which members there are and what is kept of them; neither how a forward serves several of them nor what is later
done with their distributions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.models.lora import copy_sharing_weights
from auditor.models.shards import write_shard_record_list
from auditor.plugins.trainer import TrainerCheckpoint, TrainingRecord
from auditor.training.finetune import (
    FineTuningRecipe,
    StepwiseFineTuning,
    cast_frozen_linear_weights,
    require_finite_weights,
    trainable_parameters,
)
from auditor.training.side_by_side import adapter_losses_one_by_one, make_joint_training_base

Layers = Literal["attention", "all"]
_TOKENS_A_STEP = 4096  # of all members that are trained together: more fill memory and are no faster


def assign_records_to_member_shards(units: Sequence[str], members: int) -> list[list[int]]:
    """Which of the records each member gets, as indices; units: whose each record is.

    By the hash of the unit: all its records lie in one shard, and where they lie does not depend on anybody else's, so
    that adding or removing a unit changes one shard and no other.
    """
    shards: list[list[int]] = [[] for _ in range(members)]
    for index, unit in enumerate(units):
        shards[int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8], "big") % members].append(index)
    return shards


def merge_units_sharing_records(units: Sequence[str], records: Sequence[str]) -> list[str]:
    """The unit of each record, units that share a record made one (named after the first of them in the alphabet).

    units, records: side by side, a record the same text wherever it occurs. Copies in two shards would void a claim
    about one; so whoever shares a record is protected together.
    """
    leader = {unit: unit for unit in units}

    def find(unit: str) -> str:  # of a union-find, halving its paths
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    owner: dict[str, str] = {}
    for unit, record in zip(units, records, strict=True):
        first, second = sorted((find(unit), find(owner.setdefault(record, unit))))
        # The first in the alphabet leads, so that the order of records does not name a group.
        leader[second] = first
    return [find(unit) for unit in units]


def inseparable_unit_of_each_record(records: Sequence[TrainingRecord]) -> list[str]:
    """The name of what each record cannot be parted from: its user's records, and copies of any of them."""
    return merge_units_sharing_records([record.unit for record in records], [record.text for record in records])


def folder_of_trained_member(ensemble: Path, index: int) -> Path:
    return ensemble / f"member-{index:03d}"


@dataclass(frozen=True)
class LoraAdapterRecipe:
    """A plain LoRA adapter, on the attention projection that PEFT names for an architecture or on all linear layers."""

    rank: int
    alpha: int
    layers: Layers


@dataclass(frozen=True)
class MemberToTrain:
    """One adapter to train: its folder, its records, the seed of its random half, the key of its random order."""

    folder: Path
    texts: Sequence[str]
    sequences: Sequence[Tokens]
    seed: int
    stream: tuple[str | int, ...]


class _MemberTraining:
    """A member under way."""

    def __init__(self, member: MemberToTrain, base: Any, adapter: LoraAdapterRecipe, course: FineTuningRecipe) -> None:
        self.member = member
        # Right before the adapter is made: its random half is what torch draws next.
        torch.manual_seed(member.seed)
        self.model = add_lora_adapter(copy_sharing_weights(base), adapter).eval()
        parameters = trainable_parameters(self.model)
        self.fitting = StepwiseFineTuning(parameters, member.sequences, course, keyed_random_generator(*member.stream))

    def write_adapter_and_shard_list(self) -> None:
        with disk.create_atomically(self.member.folder) as made:
            self.model.save_pretrained(str(made))
            write_shard_record_list(made, self.member.texts)


def train_private_members(
    base: Any,
    adapter: LoraAdapterRecipe,
    members: Sequence[MemberToTrain],
    course: FineTuningRecipe,
    *,
    together: int = 0,
    half: torch.dtype | None = None,
    stepped: Callable[[int, int], None] = lambda done, total: None,
    written: Callable[[MemberToTrain], None] = lambda member: None,
    checkpoint: TrainerCheckpoint | None = None,
    seconds_between: float = 60.0,
) -> int:
    """Trains the members whose folders are not there yet, several in each forward; a folder is there when all of it is.

    together: how many at once at most; where one ends, the next begins. 0: as many as read 4,096 tokens a step, and one
    at a time where the base's layers do not read each row of a batch by itself. But for rounding, no member depends on
    it or on the others: its adapter is PEFT's after `torch.manual_seed` of its seed, its batches, steps, clipping and
    AdamW are its own, and the base answers as it does in use: without dropout, whose masks would be the batch's.
    A member without records has learnt nothing: it is the public model. half: what torch's autocast multiplies
    matrices in. stepped: told how many steps of all members are done, of how many.
    checkpoint: where members that are under way go on. Returns how many were trained at once.

    Raises AuditError for an architecture whose attention PEFT does not know, for one whose members cannot be trained
    together as was asked, and for a training that diverges.
    """
    waiting = [member for member in members if not member.folder.is_dir()]
    done, total = 0, sum(course.step_count(member.sequences) for member in waiting)
    wanted = together or max(1, _TOKENS_A_STEP // (course.batch * course.block))
    losses, most = _member_losses_function_and_count(base, adapter, min(wanted, len(waiting)), asked=together > 0)
    cast_frozen_linear_weights(base.requires_grad_(False), half)
    begun = {} if checkpoint is None else checkpoint.load() or {}
    saved, going = time.monotonic(), list[_MemberTraining]()
    while waiting or going:
        while waiting and len(going) < most:
            going.append(_MemberTraining(waiting.pop(0), base, adapter, course))
            if (state := begun.pop(going[-1].member.folder.name, None)) is not None:
                going[-1].fitting.restore(state)
                done += going[-1].fitting.epochs * going[-1].fitting.steps_per_epoch + going[-1].fitting.steps
        if fittings := [
            training.fitting for training in going if not training.fitting.is_done_with_all_epochs
        ]:  # not of an empty shard
            batches = [fitting.next_step_batch().to(base.device) for fitting in fittings]
            with torch.autocast(base.device.type, dtype=half, enabled=half is not None):
                found = losses(
                    [training.model for training in going if not training.fitting.is_done_with_all_epochs], batches
                )
            # Of the sum: no adapter reads another's rows, so that each gets the gradient of its own loss alone.
            found.sum().backward()
            for fitting in fittings:
                fitting.step()
            stepped(done := done + len(fittings), total)
        ended = [training for training in going if training.fitting.steps == 0]  # an epoch, or all
        for training in ended:
            require_finite_weights(training.fitting.parameters.values(), checkpoint)
            if training.fitting.is_done_with_all_epochs:
                going.remove(training)
                training.write_adapter_and_shard_list()
                written(training.member)
        if checkpoint is not None and time.monotonic() - saved >= seconds_between:
            # Members that are done need no state: their folders are there.
            checkpoint.save({training.member.folder.name: training.fitting.state() for training in going})
            saved = time.monotonic()
    return most


def _member_losses_function_and_count(
    base: Any, adapter: LoraAdapterRecipe, most: int, *, asked: bool
) -> tuple[Callable[..., torch.Tensor], int]:
    """What gives the losses of `most` members at once, and `most`; of one where the base does not permit more."""
    if most > 1:
        mixed = make_joint_training_base(base, lambda: add_lora_adapter(copy_sharing_weights(base), adapter))
        if mixed is not None:
            return mixed.adapter_losses_in_one_forward, most
        if asked:
            raise AuditError(
                f"expected together=1 for {base.config.model_type}, whose layers do not read each row of a batch by "
                "itself, got more"
            )
    return adapter_losses_one_by_one, 1


def add_lora_adapter(model: Any, adapter: LoraAdapterRecipe) -> Any:
    """The model with an untrained adapter, the rest of it frozen; its random half is torch's to draw.

    Raises AuditError for an architecture whose attention PEFT does not know.
    """
    width = int(getattr(model.config, "hidden_size", adapter.rank))
    if adapter.rank > width:
        raise AuditError(f"expected a LoRA rank of at most the model's width of {width}, got {adapter.rank}")
    targets = "all-linear" if adapter.layers == "all" else None  # None: what PEFT names for the architecture
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's linear layers
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        said = f"cannot put a LoRA adapter on the attention of {model.config.model_type}: {reason}"
        raise AuditError(said) from error
