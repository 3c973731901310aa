"""Test the privacy of a Hugging Face Trainer with its settings, on our own model and records."""

from __future__ import annotations

import copy
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from auditor.core.errors import AuditError
from auditor.crash import training_specimen

# A smaller seed was chosen by a person and is kept: all trainings then have the same noise.
_CHOSEN = 1 << 16


def is_crash_test_trainer(value: Any) -> bool:
    """Test whether `value` is a transformers Trainer, without importing the library."""
    loaded = sys.modules.get("transformers.trainer")
    return loaded is not None and isinstance(value, loaded.Trainer)


def wrap_crash_test_trainer(
    trainer: Any, claim: Mapping[str, Any] | None
) -> Callable[[Any, Any], Any]:
    """Return `train(model, records)`, which runs a copy of this Trainer.

    If the claim states no steps, the Trainer's steps are used. Raise AuditError if the Trainer
    already has an optimizer, which would train a different model.
    """
    if trainer.optimizer is not None:
        raise AuditError(
            "expected a Trainer that makes its own optimizer: its own optimizer was made for "
            "another model"
        )

    def train(model: Any, records: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            copied = _copy_trainer(trainer, model, records, folder)
            copied.train()
            counted = {"steps": copied.state.global_step}
        if claim is None:
            return model
        return (model, {**counted, **claim})

    return train


def _copy_trainer(trainer: Any, model: Any, records: Any, folder: str) -> Any:
    arguments = copy.copy(trainer.args)
    # A cached property: the copy would keep the device of the original arguments.
    arguments.__dict__["_setup_devices"] = torch.device("cpu")
    arguments.output_dir = folder
    arguments.use_cpu = True
    arguments.report_to = []
    arguments.bf16 = arguments.fp16 = False
    arguments.save_strategy = arguments.eval_strategy = "no"
    arguments.load_best_model_at_end = False
    # Draw a drawn seed again from torch's generator, which each watched training seeds.
    if arguments.seed >= _CHOSEN:
        arguments.seed = int(torch.randint(_CHOSEN, 2**31, ()))
    options: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": _build_trainer_dataset(trainer, records),
    }
    if "processing_class" in inspect.signature(type(trainer).__init__).parameters:
        options["processing_class"] = trainer.processing_class
    options["data_collator"] = _choose_collator(trainer)
    copied = type(trainer)(**options)
    # Users turn this off if a record's loss must not depend on the other texts of its step.
    copied.model_accepts_loss_kwargs &= trainer.model_accepts_loss_kwargs
    callbacks = trainer.callback_handler.callbacks
    usual_kinds = set(map(type, copied.callback_handler.callbacks))
    for kind in usual_kinds - set(map(type, callbacks)):
        copied.remove_callback(kind)  # as in the tested Trainer
    for callback in callbacks:
        if type(callback) not in usual_kinds:
            copied.add_callback(copy.deepcopy(callback))
    return copied


def _build_trainer_dataset(trainer: Any, records: Any) -> Any:
    # it takes only a `Dataset`, and makes the labels itself
    if type(trainer).__module__.startswith("trl."):
        from datasets import Dataset

        return Dataset.from_list([{"input_ids": row["input_ids"]} for row in records])
    rows = []
    for row in records:
        rows.append({"input_ids": row["input_ids"], "labels": row["input_ids"]})
    return rows


def _choose_collator(trainer: Any) -> Any:
    """Return the Trainer's collator if it can pad our tokens, else a right-padding collator."""
    collator = trainer.data_collator
    if hasattr(collator, "pad_token_id"):
        collator = copy.copy(collator)
        collator.pad_token_id = training_specimen.PAD
        return collator
    if getattr(collator, "__module__", type(collator).__module__).startswith("transformers."):
        return _pad_crash_records
    return collator


def _pad_crash_records(rows: Any) -> dict[str, torch.Tensor]:
    ids = training_specimen.pad_specimen_tokens(rows, list(range(len(rows))))
    return {
        "input_ids": ids,
        "attention_mask": (ids != training_specimen.PAD).long(),
        "labels": ids.masked_fill(ids == training_specimen.PAD, -100),
    }


class _Caught(BaseException):
    """End a script when its Trainer is about to train."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer


@contextmanager
def catch_trainer_before_training_context(trainers: list[Any]) -> Iterator[None]:
    """End the block's code when a Trainer is about to train; append the Trainer to `trainers`."""
    from transformers import Trainer

    def train(trainer: Any, *_: Any, **__: Any) -> None:
        raise _Caught(trainer)

    with patch.object(Trainer, "train", train):
        try:
            yield
        except _Caught as caught:
            trainers.append(caught.trainer)


def find_crash_test_trainer(entry: Callable[[], Any]) -> Any:
    """Return the Trainer that a user's function returns or is about to train.

    Raise AuditError if it does neither.
    """
    trainers: list[Any] = []
    with catch_trainer_before_training_context(trainers):
        trainers.append(entry())
    if not is_crash_test_trainer(trainers[0]):
        raise AuditError(
            "expected a function `train(model, records)`, or an entry point that makes a Trainer "
            f"of transformers: it gave {type(trainers[0]).__name__}"
        )
    return trainers[0]
