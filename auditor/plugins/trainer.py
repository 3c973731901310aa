"""Trainers: the base of all, the job they are given, and the checkpoint from which an interrupted
one goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.huggingface import HuggingFaceModel

RECORD = "training.json"  # beside a trained model: how it was made


@dataclass(frozen=True)
class TrainingRecord:
    """One private record to fine-tune on; copies are records of their own."""

    text: str
    tokens: Tokens  # of the whole text, without special tokens
    unit: str  # whose it is: the user or group column, else the name of the record's own content
    # which tokens have a loss (`training.loss_masks`); None: all
    learnt: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class TrainingJob:
    """What `audit train` hands to a `Trainer`: the data as tokens, a way to load the base, and
    where to write."""

    base: str  # hub id or folder
    # a fresh transformers model, its parameters (LoRA: the adapter's) free to train
    load: Callable[[], Any]
    tokenizer: Any
    end: int  # the token that ends a record
    block: int  # tokens of a training sequence, at most
    records: tuple[TrainingRecord, ...]
    users: (
        bool  # whether the data say whose each record is; else a record's unit is its own content
    )
    public: (
        HuggingFaceModel  # judges records for trainers that ask; the base where no other was named
    )
    out: Path
    # where an interrupted training goes on; cleared by whoever records that it is finished
    checkpoint: TrainerCheckpoint
    seed: int
    progress: Callable[[str, int, int], None]  # (what, done, of how many)
    # what torch's autocast multiplies matrices in, where a trainer lets it
    half: torch.dtype | None = None
    heldout: tuple[
        TrainingRecord, ...
    ] = ()  # not to be trained on: what a trainer may choose its model by
    forget: tuple[
        TrainingRecord, ...
    ] = ()  # of the records, those that the base has learnt and is to forget


@dataclass(frozen=True)
class Trainer:
    """Base of what `audit train` offers: one way to fine-tune. A frozen dataclass like an `Attack`.

    `train` writes a model folder (or a folder of them) to `job.out`; where part of it is already
    there, it goes on.
    `audit train` has seen to it that what is there was made with the same configuration.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what people read in a table; "": its name
    claims: ClassVar[str] = "none"  # one line for `audit list`
    # whether something is promised of what it trains, or of how that is served
    promises: ClassVar[bool] = False
    # whether it trains adapters beside a frozen base, --lora or not
    adapters: ClassVar[bool] = False
    # whether it takes a whole model, and says itself which parameters are trained
    whole: ClassVar[bool] = False
    chooses: ClassVar[bool] = False  # whether it looks at held-out records
    # whether its base has learnt the records, and it is told which to forget
    unlearns: ClassVar[bool] = False
    # options that its results do not depend on: of memory and speed
    immaterial: ClassVar[frozenset[str]] = frozenset()
    # the option that `audit mitigate --by NAME:VALUE` sets; "": there is none
    main: ClassVar[str] = ""
    # options that came later: at their defaults all is as it was before
    later: ClassVar[frozenset[str]] = frozenset()

    def options(self) -> dict[str, Any]:
        """Its options, without `later` ones at their defaults: what a model was made with."""
        values = {
            field.name: (getattr(self, field.name), field.default)
            for field in dataclasses.fields(self)
        }
        return {
            name: own
            for name, (own, default) in values.items()
            if name not in self.later or own != default
        }

    def check(self, job: TrainingJob) -> None:
        """Refuses, before anything is written, what this trainer cannot train on. Raises
        AuditError."""

    def separate_model_count(self, job: TrainingJob) -> int:
        """How many models it trains, where each can be trained by a process of its own; 0: it
        cannot be divided."""
        return 0

    def train_one(self, job: TrainingJob, index: int) -> Path:
        """Trains model `index` alone, with the weights that `train` would give it; returns its
        folder."""
        raise NotImplementedError

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        """Trains. Returns what the user must know of it: sentences."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainingSummary:
    """What `training.json` says of the finished model beside it: which trainer made it, and what it
    told of that."""

    method: str
    told: tuple[str, ...] = ()


def read_trainer_summary_of_model(folder: Path) -> TrainingSummary | None:
    """The summary in a model's folder; None where there is none, or the training is not
    finished."""
    try:
        record = json.loads((folder / RECORD).read_text())
        found = TrainingSummary(
            str(record["configuration"]["method"]), tuple(map(str, record.get("told", ())))
        )
        return found if record["finished"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class TrainerCheckpoint:
    """Where an interrupted training goes on: one file, replaced as a whole, readable by its owner
    only.

    Once `save` returns, the state is on disk: were the key of the noise lost, records would be used
    again with another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, state: dict[str, Any]) -> None:
        """Tensors, numbers and text, and containers of them. Raises AuditError where they cannot be
        written."""
        with (
            disk.atomic_replacement_file(self.path, sync=True) as scratch,
            open(scratch, "wb") as file,
        ):
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch's, behind which stands what the system said
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None where nothing was. Raises AuditError for a file that cannot be
        read."""
        if not self.path.is_file():
            return None
        try:
            # weights_only: unpickling runs no code of whoever wrote the file
            state: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        except Exception as error:  # torch raises a dozen kinds, all of them about the file
            raise AuditError(
                f"cannot read the checkpoint {str(self.path)!r}: {type(error).__name__}"
            ) from None
        return state

    def clear(self) -> None:
        """Removes it: the training is done, and it holds private data."""
        self.path.unlink(missing_ok=True)
