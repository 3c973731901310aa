"""Fine-tunes the ensemble that `--defense pmixed` serves: LoRA adapters on disjoint shards (Flemings et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peft import PeftModel

from auditor.ensemble import write_ensemble
from auditor.errors import AuditError
from auditor.members import Adapter, Layers, joined, member_folder, shard, train_member
from auditor.streams import generator
from auditor.training import check_schedule, fit
from auditor.types import Trainer, TrainingJob


@dataclass(frozen=True)
class PMixedTrainer(Trainer):
    """Fine-tune a LoRA ensemble on disjoint shards, for `--defense pmixed` to serve (PMixED, Flemings et al. 2024).

    members: shards, one adapter each. Defaults are the paper's (Table 2, WikiText-103; it does not say the batch).
    layers: adapters on the `attention` projection, as in the paper, or on `all` linear layers. Learning rate decays
    linearly to 0.
    """

    name: ClassVar[str] = "pmixed"
    claims: ClassVar[str] = "none: the members are private; `--defense pmixed` promises something of its draws"
    members: int = 80
    epochs: int = 15
    learning_rate: float = 2e-4
    rank: int = 4
    alpha: int = 32
    layers: Layers = "attention"
    batch: int = 8

    def __post_init__(self) -> None:
        for option in ("members", "rank", "alpha", "batch"):
            if getattr(self, option) < 1:
                raise AuditError(f"expected {option} >= 1, got {getattr(self, option)}")
        check_schedule(self.epochs, self.learning_rate)

    def check(self, job: TrainingJob) -> None:
        whole = set(_units(job))
        if len(whole) < self.members:
            raise AuditError(
                f"expected at least one record or user for each of {self.members} members, got {len(whole)} that "
                "share no record: lower -D members"
            )

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        """Member by member: a finished one is kept, an unfinished one starts anew and ends as it would have."""
        self.check(job)
        units, given = _units(job), {record.unit for record in job.records}
        shards = shard(units, self.members)
        whose = "user" if job.users else "record"
        for index, chosen in enumerate(shards):
            if not member_folder(job.out, index).is_dir():
                self._train_member(job, index, chosen)
                write_ensemble(job.out, unit=whose, members=self.members)
        said = [
            f"each {whose} lies whole in one of {self.members} shards: the unit of protection is the shard",
            "the number of shards is public",
        ]
        if whose == "user" and len(groups := set(units)) < len(given):
            said.append(f"users who share a record are protected together: {len(given)} are {len(groups)} groups")
        if empty := sum(not chosen for chosen in shards):
            said.append(f"{empty} shards are empty: their members have learnt nothing")
        return tuple(said)

    def _train_member(self, job: TrainingJob, index: int, chosen: list[int]) -> None:
        base = job.load()
        if isinstance(base, PeftModel):
            raise AuditError("expected a whole model for pmixed, got an adapter: its own are -D rank and -D alpha")

        def progress(done: int) -> None:
            job.progress(f"member {index + 1} of {self.members}", index * self.epochs + done, total)

        total = self.members * self.epochs
        train_member(
            member_folder(job.out, index),
            base,
            Adapter(self.rank, self.alpha, self.layers),
            [job.records[i].text for i in chosen],
            lambda member: fit(
                member,
                [job.records[i].tokens for i in chosen],
                epochs=self.epochs,
                rate=self.learning_rate,
                batch=self.batch,
                block=job.block,
                end=job.end,
                order=generator("train", job.seed, "member", index),
                progress=progress,
            ),
            job.seed + index,
        )


def _units(job: TrainingJob) -> list[str]:
    """What must lie in one shard with what, by name: a user's records, and copies of a record."""
    return joined([record.unit for record in job.records], [record.text for record in job.records])
