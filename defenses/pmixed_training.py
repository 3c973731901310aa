"""Fine-tunes the ensemble that `--defense pmixed` serves: LoRA adapters on disjoint shards (Flemings et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.nn import Dropout

from auditor.core.errors import AuditError
from auditor.models.shards import WHOLE, write_ensemble_metadata
from auditor.plugins.options import require_options_at_least
from auditor.plugins.trainer import Trainer, TrainerCheckpoint, TrainingJob
from auditor.training import loss_masks
from auditor.training.finetune import FineTuningRecipe, check_epochs_and_learning_rate
from auditor.training.members import (
    Layers,
    LoraAdapterRecipe,
    MemberToTrain,
    assign_member_shards,
    get_member_folder,
    name_inseparable_units,
    train_private_members,
)

_PROMISE = "none of its own: the members are private, and --defense pmixed promises something of its draws"


@dataclass(frozen=True)
class PMixedTrainer(Trainer):
    """Fine-tune a LoRA ensemble on disjoint shards, for `--defense pmixed` to serve (PMixED, Flemings et al. 2024).

    members: shards, one adapter each. Defaults are the paper's (Table 2, WikiText-103; it does not say the batch).
    layers: adapters on the `attention` projection, as in the paper, or on `all` linear layers. Learning rate decays
    linearly to 0. together: members trained at once (0: as many as read 4,096 tokens a step); memory and speed, not
    results. control: beside them one adapter on all records, by the same recipe: what splitting changes. The base's
    dropout is off.
    """

    name: ClassVar[str] = "pmixed"
    claims: ClassVar[str] = "none: the members are private; `--defense pmixed` promises something of its draws"
    promises: ClassVar[bool] = True
    adapters: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    immaterial: ClassVar[frozenset[str]] = frozenset({"together"})
    members: int = 80
    epochs: int = 15
    learning_rate: float = 2e-4
    rank: int = 4
    alpha: int = 32
    layers: Layers = "attention"
    batch: int = 8
    together: int = 0
    control: bool = False

    def __post_init__(self) -> None:
        require_options_at_least(self, 1, "members", "rank", "alpha", "batch")
        require_options_at_least(self, 0, "together")
        check_epochs_and_learning_rate(self.epochs, self.learning_rate)

    def check(self, job: TrainingJob) -> None:
        # Units that share a record count as one: in two shards it would void the claim of each.
        whole = set(name_inseparable_units(job.records))
        if len(whole) < self.members:
            raise AuditError(
                f"expected at least one record or user for each of {self.members} members, got {len(whole)} that "
                "share no record: lower -D members"
            )

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        """Trains several members at once; an interruption keeps finished ones, the others end as they would have."""
        self.check(job)
        base, units, given = (
            job.load(),
            name_inseparable_units(job.records),
            {record.unit for record in job.records},
        )
        members, whose = self._control_and_members(job), _protected_unit_name(job)
        most = self._train_shard_adapters(job, base, members, self.together, job.checkpoint)
        said = [
            f"each {whose} lies whole in one of {self.members} shards: the unit of protection is the shard",
            "the number of shards is public",
            f"adapters were trained {most} at a time",
        ]
        if any(isinstance(module, Dropout) and module.p > 0 for module in base.modules()):
            said.append("the base's dropout was off: adapters that are trained together cannot have masks of their own")
        if whose == "user" and len(groups := set(units)) < len(given):
            said.append(f"users who share a record are protected together: {len(given)} are {len(groups)} groups")
        if empty := sum(not member.texts for member in members):
            said.append(f"{empty} shards are empty: their members have learnt nothing")
        return tuple(said)

    def separate_model_count(self, job: TrainingJob) -> int:
        return self.members + self.control

    def train_one(self, job: TrainingJob, index: int) -> Path:
        # Index 0 is the control, where there is one.
        one = self._control_and_members(job)[index]
        # Without a checkpoint: processes side by side would replace each other's.
        self._train_shard_adapters(job, job.load(), [one], 1)
        return one.folder

    def _control_and_members(self, job: TrainingJob) -> list[MemberToTrain]:
        """The control, where there is one, and behind it the members."""
        members = [
            # By index, not by who is trained beside it: `train_one` gives the same weights.
            self._ensemble_member_of_records(
                job, get_member_folder(job.out, index), chosen, job.seed + index, "member", index
            )
            for index, chosen in enumerate(assign_member_shards(name_inseparable_units(job.records), self.members))
        ]
        everything = list(range(len(job.records)))
        whole = (
            [self._ensemble_member_of_records(job, job.out / WHOLE, everything, job.seed, "whole")]
            if self.control
            else []
        )
        return [*whole, *members]

    def _train_shard_adapters(
        self,
        job: TrainingJob,
        base: Any,
        members: list[MemberToTrain],
        together: int,
        checkpoint: TrainerCheckpoint | None = None,
    ) -> int:
        return train_private_members(
            base,
            LoraAdapterRecipe(self.rank, self.alpha, self.layers),
            members,
            FineTuningRecipe(self.epochs, self.learning_rate, self.batch, job.block, job.end),
            together=together,
            stepped=partial(job.progress, f"{len(members)} adapters"),
            # With every member: whoever finds an interrupted ensemble finds what it is.
            on_written=lambda member: write_ensemble_metadata(
                job.out, method=self.name, promise=_PROMISE, unit=_protected_unit_name(job), members=self.members
            ),
            checkpoint=checkpoint,
        )

    def _ensemble_member_of_records(
        self, job: TrainingJob, folder: Path, chosen: list[int], seed: int, *key: str | int
    ) -> MemberToTrain:
        records = [job.records[i] for i in chosen]
        tokens = [loss_masks.apply_loss_mask(record) for record in records]
        return MemberToTrain(folder, [record.text for record in records], tokens, seed, ("train", job.seed, *key))


def _protected_unit_name(job: TrainingJob) -> str:
    return "user" if job.users else "record"
