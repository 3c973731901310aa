"""A Hugging Face Trainer as a training: another one with its settings and callbacks, on our model
and records."""

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

# a seed below it was written down by somebody, and is kept: the same noise for every training
_CHOSEN = 1 << 16


def is_transformers_trainer(given: Any) -> bool:
    """Whether `given` is a Trainer of transformers; the library is not imported to find out."""
    loaded = sys.modules.get("transformers.trainer")
    return loaded is not None and isinstance(given, loaded.Trainer)


def make_train_function_from_trainer(
    made: Any, claim: Mapping[str, Any] | None
) -> Callable[[Any, Any], Any]:
    """`train(model, records)` of a Trainer; its claim's steps are those that it takes, where none
    are stated.

    Raises AuditError where the Trainer was given an optimizer of its own, which trains another
    model.
    """
    if made.optimizer is not None:
        raise AuditError(
            "expected a Trainer that makes its own optimizer: the one it was given holds another "
            "model"
        )

    def train(model: Any, records: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            another = _trainer_copy_for_crash_test(made, model, records, folder)
            another.train()
            taken = {"steps": another.state.global_step}
        return model if claim is None else (model, {**taken, **claim})

    return train


def _trainer_copy_for_crash_test(made: Any, model: Any, records: Any, folder: str) -> Any:
    arguments = copy.copy(made.args)
    # A cached property: the copy would keep the device that the Trainer's own arguments found.
    arguments.__dict__["_setup_devices"] = torch.device("cpu")
    arguments.output_dir, arguments.use_cpu, arguments.report_to = folder, True, []
    arguments.bf16 = arguments.fp16 = False
    arguments.save_strategy = arguments.eval_strategy = "no"
    arguments.load_best_model_at_end = False
    # A seed that was drawn is drawn anew, from torch's generator, which each watched training
    # seeds.
    if arguments.seed >= _CHOSEN:
        arguments.seed = int(torch.randint(_CHOSEN, 2**31, ()))
    given: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": _crash_records_as_trainer_dataset(made, records),
    }
    if "processing_class" in inspect.signature(type(made).__init__).parameters:
        given["processing_class"] = made.processing_class
    given["data_collator"] = _trainer_collator_for_crash_records(made)
    another = type(made)(**given)
    usual = {type(one) for one in another.callback_handler.callbacks}
    wanted = [one for one in made.callback_handler.callbacks if type(one) not in usual]
    for one in usual - {type(one) for one in made.callback_handler.callbacks}:
        another.remove_callback(one)  # as was done to the one that is tested
    for one in wanted:
        another.add_callback(copy.deepcopy(one))
    return another


def _crash_records_as_trainer_dataset(made: Any, records: Any) -> Any:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in records]
    if type(made).__module__.startswith(
        "trl."
    ):  # it takes a `Dataset` alone, and makes the labels itself
        from datasets import Dataset

        return Dataset.from_list([{"input_ids": row["input_ids"]} for row in records])
    return rows


def _trainer_collator_for_crash_records(made: Any) -> Any:
    """The Trainer's own, where it can pad our tokens; else one that pads behind them."""
    own = made.data_collator
    if hasattr(own, "pad_token_id"):
        own = copy.copy(own)
        own.pad_token_id = training_specimen.PAD
        return own
    if getattr(own, "__module__", type(own).__module__).startswith("transformers."):
        return _collate_crash_records_with_padding
    return own


def _collate_crash_records_with_padding(rows: Any) -> dict[str, torch.Tensor]:
    ids = training_specimen.padded_specimen_token_ids(rows, list(range(len(rows))))
    return {
        "input_ids": ids,
        "attention_mask": (ids != training_specimen.PAD).long(),
        "labels": ids.masked_fill(ids == training_specimen.PAD, -100),
    }


class _Caught(BaseException):
    """Ends a script where its Trainer is about to train."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer


@contextmanager
def catch_trainer_before_training_context(found: list[Any]) -> Iterator[None]:
    """A context that ends the code inside it when a Trainer is about to train; that Trainer is then
    in `found`."""
    from transformers import Trainer

    def train(trainer: Any, *_: Any, **__: Any) -> None:
        raise _Caught(trainer)

    with patch.object(Trainer, "train", train):
        try:
            yield
        except _Caught as one:
            found.append(one.trainer)


def obtain_trainer_from_entry(entry: Callable[[], Any]) -> Any:
    """The Trainer that an entry point returns, or is about to train. Raises AuditError where there
    is none."""
    found: list[Any] = []
    with catch_trainer_before_training_context(found):
        found.append(entry())
    if not is_transformers_trainer(found[0]):
        raise AuditError(
            "expected a function `train(model, records)`, or an entry point that makes a Trainer "
            f"of transformers: it gave {type(found[0]).__name__}"
        )
    return found[0]
