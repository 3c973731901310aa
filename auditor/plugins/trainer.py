"""Define the base class of trainers, their job, and checkpoints of an interrupted training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.options import Configured

RECORD = "training.json"  # next to a trained model: its configuration
# fields of this file: token ids in the training
TOKENS_BEFORE = "tokens_before_each_record"
TOKENS_AFTER = "tokens_after_each_record"


@dataclass(frozen=True)
class TrainingRecord:
    """A private record to fine-tune on; each copy is a separate record.

    Attributes:
        tokens: the whole text, without special tokens.
        unit: owner of the record, from the user or group column, or else the digest of its content.
        learnt: for each token, whether it counts toward the loss; None means all of them.
    """

    text: str
    tokens: Tokens
    unit: str
    learnt: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class TrainingJob:
    """Inputs of a `Trainer`: the records, the base model and the output folder.

    Attributes:
        base: hub id or folder.
        load: loads a new transformers model; its trained parameters require gradients.
        end: token that ends a record.
        block: largest number of tokens in a training sequence.
        users: whether the data name each record's owner.
        public: model with which trainers may judge records.
        out: output folder.
        checkpoint: continues an interrupted training.
        progress: callback(description, done, total).
        half: dtype of torch's autocast for matrix products, if a trainer permits it.
        heldout: records that are not trained on, by which a trainer may choose its model.
        forget: records that the base model has learnt and must forget.
    """

    base: str
    load: Callable[[], Any]
    tokenizer: Any
    end: int
    block: int
    records: tuple[TrainingRecord, ...]
    users: bool
    # Judges records for trainers that need it; the base unless the user names another model.
    public: HuggingFaceModel
    out: Path
    checkpoint: TrainerCheckpoint
    seed: int
    progress: Callable[[str, int, int], None]
    half: torch.dtype | None = None
    heldout: tuple[TrainingRecord, ...] = ()
    forget: tuple[TrainingRecord, ...] = ()


@dataclass(frozen=True)
class Trainer(Configured):
    """Base class of the methods of `audit train`: a frozen dataclass like an `Attack`.

    `train` writes one or several model folders to `job.out`. If there are models already, it
    continues them, after `audit train` has checked that their configuration is the same.

    Attributes:
        promises: whether its models, or the way they are served, have a privacy claim.
        adapters: whether it trains adapters on a frozen base.
        whole: whether it trains a whole model and selects the trained parameters itself.
        chooses: whether it uses held-out records.
        unlearns: whether its base model has learnt the records, some of which must be forgotten.
        immaterial: options that do not affect results, such as memory limits.
        surrounds: whether the token `TrainingJob.end` precedes and follows every record, except at
            the limits of a block.
        main: the option that `audit mitigate --by NAME:VALUE` sets; "" for none.
        later: options that were added later, whose defaults change nothing.
    """

    claims: ClassVar[str] = "none"  # one line for `audit list`
    promises: ClassVar[bool] = False
    adapters: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    unlearns: ClassVar[bool] = False
    immaterial: ClassVar[frozenset[str]] = frozenset()
    surrounds: ClassVar[bool] = False
    main: ClassVar[str] = ""
    later: ClassVar[frozenset[str]] = frozenset()

    def options(self) -> dict[str, Any]:
        """Return the options to store in a model's record.

        `later` options are left out if they have their default values.
        """
        values = {}
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.name not in self.later or value != option.default:
                values[option.name] = value
        return values

    def check(self, job: TrainingJob) -> None:
        """Raise AuditError, before anything is written, if this trainer cannot do this job."""

    def separate_model_count(self, job: TrainingJob) -> int:
        """Return the number of models that separate processes could train.

        Return 0 if the job cannot be divided.
        """
        return 0

    def train_one(self, job: TrainingJob, index: int) -> Path:
        """Train only model number `index` and return its folder.

        The model gets the same weights as in `train`.
        """
        raise NotImplementedError

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        """Train, and return sentences that the user must know."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a finished training, from `training.json` in the model's folder.

    `told` holds the trainer's notes; `tokens_before` and `tokens_after` the tokens that precede and
    follow every record in the training, or None if they are unknown; `data` the digest of the
    records, or None for a private training; `settings` what a control must share besides the
    settings in its privacy record.
    """

    method: str = ""
    told: tuple[str, ...] = ()
    tokens_before: Tokens | None = None
    tokens_after: Tokens | None = None
    data: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


def read_training_summary(folder: Path) -> TrainingSummary:
    """Return the summary in a model's folder; an empty one if it is missing or unfinished."""
    try:
        record = json.loads((folder / RECORD).read_text())
        configuration = record["configuration"]
        weights = json.dumps(configuration.get("weights"))
        summary = TrainingSummary(
            str(configuration["method"]),
            tuple(map(str, record.get("told", ()))),
            _read_tokens(record, TOKENS_BEFORE),
            _read_tokens(record, TOKENS_AFTER),
            configuration.get("data"),
            {
                "base weights of digest": hashlib.sha256(weights.encode()).hexdigest()[:8],
                "LoRA rank and alpha": configuration.get("lora"),
                "block": configuration.get("block"),
            },
        )
        if record["finished"]:
            return summary
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return TrainingSummary()


def read_recorded_prefix(folder: Path) -> Tokens | None:
    """Return the tokens before every record in the training of a folder's model.

    Return None if they are unknown.
    """
    return read_training_summary(folder).tokens_before


def _read_tokens(record: dict[str, Any], name: str) -> Tokens | None:
    if name not in record:
        return None
    return tuple(map(int, record[name]))


class TrainerCheckpoint:
    """A file with the state of an interrupted training, or of a tuned attack.

    It is replaced atomically, and only its owner can read it. When `save` returns, the state is on
    disk. The state includes the key of the noise in private training. If the key were lost, the
    training would be repeated with other noise, and so reveal more than its privacy claim says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_save = time.monotonic()

    def save_when_due(self, seconds: float, build_state: Callable[[], dict[str, Any]]) -> None:
        """Save the state that `build_state` returns, if the last save is so many seconds ago."""
        if time.monotonic() - self._last_save >= seconds:
            self.save(build_state())

    def save(self, state: dict[str, Any]) -> None:
        """Save tensors, numbers, text and containers of them. Raise AuditError on failure."""
        with (
            disk.open_atomic_replacement(self.path, sync=True) as scratch,
            open(scratch, "wb") as file,
        ):
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch's, whose context is the system's error
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        self._last_save = time.monotonic()

    def load(self, device: Any = "cpu") -> dict[str, Any] | None:
        """Load the last saved state to a device. Raise AuditError if the file is unreadable.

        Return None if no state was saved.
        """
        if not self.path.is_file():
            return None
        try:
            # weights_only: unpickling runs no code of the file's author.
            state: dict[str, Any] = torch.load(self.path, weights_only=True, map_location=device)
        except Exception as error:  # torch raises a dozen classes, all about the file
            raise AuditError(
                f"cannot read the checkpoint {str(self.path)!r}: {type(error).__name__}"
            ) from None
        return state

    def clear(self) -> None:
        """Remove the checkpoint after the training, because it contains private data."""
        self.path.unlink(missing_ok=True)
