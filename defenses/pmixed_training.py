"""Train the ensemble for `--defense pmixed`: LoRA adapters on shards (Flemings et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.nn import Dropout

from auditor.core.errors import AuditError
from auditor.models.shards import WHOLE, write_ensemble_metadata
from auditor.plugins.options import Count, CountOrZero
from auditor.plugins.trainer import Trainer, TrainerCheckpoint, TrainingJob
from auditor.training import loss_masks
from auditor.training.finetune import Epochs, FineTuningRecipe, LearningRate
from auditor.training.members import (
    Layers,
    LoraAdapterRecipe,
    MemberToTrain,
    assign_member_shards,
    get_member_folder,
    name_inseparable_units,
    train_private_members,
)

_PROMISE = "none: the members are private, and --defense pmixed makes a promise for its draws"


@dataclass(frozen=True)
class PMixedTrainer(Trainer):
    """Fine-tune a LoRA ensemble on disjoint shards for `--defense pmixed` (Flemings et al. 2024).

    The defaults are the paper's (Table 2, WikiText-103), except the batch, which the paper does not
    give. The learning rate decays linearly to 0. The base model's dropout is off.

    members: the number of shards; each has one adapter.
    layers: what to adapt, the `attention` projection, as in the paper, or `all` linear layers.
    together: the number of members trained at once (0: as many as fit into steps of 4,096 tokens).
    It affects memory and speed, but not the results.
    control: also train one adapter on all records with the same settings, which shows the effect of
    splitting.
    """

    name = "pmixed"
    claims = "none: the members are private; `--defense pmixed` makes a promise for its draws"
    promises = True
    adapters = True
    whole = True
    surrounds = True
    immaterial: ClassVar[frozenset[str]] = frozenset({"together"})
    members: Count = 80
    epochs: Epochs = 15
    learning_rate: LearningRate = 2e-4
    rank: Count = 4
    alpha: Count = 32
    layers: Layers = "attention"
    batch: Count = 8
    together: CountOrZero = 0
    control: bool = False

    def check(self, job: TrainingJob) -> None:
        # Units that share a record count as one: a record in two shards would void both claims.
        n_units = len(set(name_inseparable_units(job.records)))
        if n_units < self.members:
            raise AuditError(
                f"expected at least one record or user for each of {self.members} members, got "
                f"{n_units} that share no record: lower -D members"
            )

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        """Train several models of the ensemble at once, and return notes for the report.

        After an interruption, finished models are kept; the others resume and end with the same
        weights as without the interruption.
        """
        self.check(job)
        base = job.load()
        members = self._list_adapters_to_train(job)
        unit = _name_protected_unit(job)
        count = self._train_shard_adapters(job, base, members, self.together, job.checkpoint)
        notes = [
            f"each {unit} is whole in one of {self.members} shards: the unit of protection is the "
            "shard",
            "the number of shards is public",
            f"adapters were trained {count} at a time",
        ]
        if any(isinstance(module, Dropout) and module.p > 0 for module in base.modules()):
            notes.append(
                "the base's dropout was off: adapters that are trained together cannot have "
                "separate masks",
            )
        n_users = len({record.unit for record in job.records})
        n_groups = len(set(name_inseparable_units(job.records)))
        if unit == "user" and n_groups < n_users:
            notes.append(
                f"users who share a record are protected together: {n_users} are {n_groups} groups",
            )
        n_empty = sum(not member.texts for member in members)
        if n_empty:
            notes.append(f"{n_empty} shards are empty: their members have learnt nothing")
        return tuple(notes)

    def separate_model_count(self, job: TrainingJob) -> int:
        return self.members + self.control

    def train_one(self, job: TrainingJob, index: int) -> Path:
        # Index 0 is the control, if there is one.
        adapter = self._list_adapters_to_train(job)[index]
        # Without a checkpoint: parallel processes would replace each other's.
        self._train_shard_adapters(job, job.load(), [adapter], 1)
        return adapter.folder

    def _list_adapters_to_train(self, job: TrainingJob) -> list[MemberToTrain]:
        """Return the adapters to train: first the control, if requested, then the members."""
        adapters = list[MemberToTrain]()
        if self.control:
            all_records = list(range(len(job.records)))
            folder = job.out / WHOLE
            adapters.append(self._make_member(job, folder, all_records, job.seed, "whole"))
        shards = assign_member_shards(name_inseparable_units(job.records), self.members)
        for index, shard in enumerate(shards):
            folder = get_member_folder(job.out, index)
            # Seeded by index, not by the members trained together: `train_one` gives the same
            # weights.
            seed = job.seed + index
            adapters.append(self._make_member(job, folder, shard, seed, "member", index))
        return adapters

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
            # With every member, so that an interrupted ensemble has its metadata.
            on_written=lambda member: write_ensemble_metadata(
                job.out,
                method=self.name,
                promise=_PROMISE,
                unit=_name_protected_unit(job),
                members=self.members,
            ),
            checkpoint=checkpoint,
        )

    def _make_member(
        self, job: TrainingJob, folder: Path, indices: list[int], seed: int, *key: str | int
    ) -> MemberToTrain:
        records = [job.records[i] for i in indices]
        texts = [record.text for record in records]
        sequences = list(map(loss_masks.apply_loss_mask, records))
        return MemberToTrain(folder, texts, sequences, seed, ("train", job.seed, *key))


def _name_protected_unit(job: TrainingJob) -> str:
    return "user" if job.users else "record"
