"""Load the defenses of a user's model from the folders that `-D` names, and check their inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.models.base import LanguageModel
from auditor.models.shards import find_control_adapter
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins.defense import Defense, TrainedModel
from auditor.plugins.trainer import RECORD, read_training_summary
from auditor.privacy import gradient_canaries, promises
from auditor.training.variants import Variant


def format_missing_input(defense: Defense, public: str | None) -> str:
    """Return the names of inputs that this defense lacks outside the lab; "" if none is missing.

    public: folder or hub id of the public model.
    """
    ensemble = defense.ensemble_folder
    if {"ensemble", "whole"} & set(defense.needs) and not ensemble:
        return "-D ensemble=DIR, a folder of member adapters"
    if "whole" in defense.needs and find_control_adapter(Path(ensemble)) is None:
        return (
            "an ensemble with its control, as audit train with -D control=true makes it: "
            f"{ensemble!r} has none"
        )
    if "public" in defense.needs and public is None:
        return (
            "--public MODEL, one that has seen no private data (of an ensemble, the base of its "
            "members)"
        )
    if "trained" in defense.needs and not defense.model_folder:
        return f"-D {defense.name}.model=DIR, a folder made by audit train {defense.name}"
    return ""


def check_defense_inputs_given(defense: Defense, public: str | None) -> None:
    """Raise AuditError if a defense needs an input that the user did not give and only the lab has.

    public: folder or hub id of the public model; None if not given.
    """
    if phrase := format_missing_input(defense, public):
        raise AuditError(f"--defense {defense.name} outside the lab needs {phrase}")


def check_controls_trained_like_defense(defense: Defense) -> None:
    """Raise AuditError, with the difference, if a control was not trained like its defense."""
    promise = promises.read_privacy_record(Path(defense.model_folder))
    for control in (cause.row for cause in defense.cause_chain()):
        if control is None:
            folder = ""
        else:
            folder = control.model_folder
        if folder:
            record = promises.read_privacy_record(Path(folder))
        else:
            record = None
        if promise is None or record is None:
            continue  # `load_trained_defense` refuses a folder of another training
        for setting, expected, other in promises.list_training_differences(promise, record):
            if expected != other:
                raise AuditError(
                    f"expected the control {folder!r} to be trained as the {defense.name} model "
                    f"was, with {setting} {expected}, got {other}"
                )


def load_trained_defense(
    defense: Defense, load: Callable[[str], LanguageModel], vocab_size: int
) -> TrainedModel:
    """Load the model of a trained defense from `-D model=`.

    vocab_size: vocabulary size of the attacked model. Raise AuditError if another method trained
    the model.
    """
    folder = defense.model_folder
    if not Path(folder).is_dir():
        raise AuditError(
            f"expected -D model= of {defense.name} to be a folder that was trained, got {folder!r}"
        )
    record = promises.read_privacy_record(Path(folder))
    summary = read_training_summary(Path(folder))
    # A variant promises nothing, so only its training record identifies it.
    is_variant = isinstance(defense, Variant)
    trainer_record = summary if is_variant else record
    if trainer_record is None or trainer_record.method != defense.name:
        if trainer_record:
            actual = f"a model trained by {trainer_record.method}"
        else:
            actual = f"no {RECORD if is_variant else promises.FILE}"
        raise AuditError(
            f"expected {folder!r} to be trained by audit train {defense.name}, got {actual}"
        )
    model = load(folder)
    check_same_vocabulary_size(repr(folder), "it", model.vocab_size, "the target's", vocab_size)
    return TrainedModel(
        model,
        record,
        gradient_canaries.read_gradient_canaries(Path(folder)),
        summary.told if summary else (),
    )
