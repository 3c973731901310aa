"""Trains the private members of an ensemble: disjoint shards of the records, one LoRA adapter a shard.

Knows neither how a member is fitted nor what is later done with the members' laws.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from auditor.ensemble import write_shard
from auditor.errors import AuditError

Layers = Literal["attention", "all"]


def shard(units: Sequence[str], members: int) -> list[list[int]]:
    """Which of the records each member gets, as indices; units: whose each record is.

    By the hash of the unit: all its records lie in one shard, and where they lie does not depend on anybody else's, so
    that adding or removing a unit changes one shard and no other.
    """
    shards: list[list[int]] = [[] for _ in range(members)]
    for index, unit in enumerate(units):
        shards[int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8], "big") % members].append(index)
    return shards


def joined(units: Sequence[str], records: Sequence[str]) -> list[str]:
    """The unit of each record, units that share a record made one (named after the first of them in the alphabet).

    units, records: side by side, a record the same text wherever it occurs. Copies in two shards would void a claim
    about one; so whoever shares a record is protected together.
    """
    leader = {unit: unit for unit in units}

    def find(unit: str) -> str:
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    owner: dict[str, str] = {}
    for unit, record in zip(units, records, strict=True):
        first, second = sorted((find(unit), find(owner.setdefault(record, unit))))
        leader[second] = first
    return [find(unit) for unit in units]


def member_folder(ensemble: Path, index: int) -> Path:
    return ensemble / f"member-{index:03d}"


@dataclass(frozen=True)
class Adapter:
    """A plain LoRA adapter, on the attention projection that PEFT names for an architecture or on all linear layers."""

    rank: int
    alpha: int
    layers: Layers


def train_member(
    folder: Path, base: Any, adapter: Adapter, texts: Sequence[str], fit: Callable[[Any], None], seed: int
) -> None:
    """Writes one member with the names of its records; the folder is there when all of it is.

    fit: trains the adapter that `base` is given here. All of torch's randomness follows from the seed, so that a member
    does not depend on which others were trained before it. A member without records has learnt nothing: it is the
    public model. Raises AuditError for an architecture whose attention PEFT does not know.
    """
    torch.manual_seed(seed)
    member = with_adapter(base, adapter)
    if texts:
        fit(member)
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)  # a run that was killed left it
    member.save_pretrained(str(scratch))
    write_shard(scratch, texts)
    os.replace(scratch, folder)


def with_adapter(model: Any, adapter: Adapter) -> Any:
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
        raise AuditError(
            f"cannot put a LoRA adapter on the attention of {model.config.model_type}: {reason}"
        ) from error
