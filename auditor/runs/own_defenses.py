"""What the defenses of a user's own model are made of: the folders that `-D` names, and what must
be given for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.models.base import LanguageModel
from auditor.models.shards import ensemble_control_adapter_folder
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins.defense import Defense, TrainedModel
from auditor.plugins.trainer import RECORD, read_trainer_summary_of_model
from auditor.privacy import gradient_canaries, promises
from auditor.training.variants import Variant


def missing_defense_input_phrase(defense: Defense, public: str | None) -> str:
    """What this defense would have to be given outside the lab; "" where it has been."""
    ensemble = defense.ensemble_folder
    if {"ensemble", "whole"} & set(defense.needs) and not ensemble:
        return "-D ensemble=DIR, a folder of member adapters"
    if "whole" in defense.needs and ensemble_control_adapter_folder(Path(ensemble)) is None:
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
    """Refuses a defense whose needs only the lab would see to. Raises AuditError."""
    if what := missing_defense_input_phrase(defense, public):
        raise AuditError(f"--defense {defense.name} outside the lab needs {what}")


def check_controls_trained_like_defense(defense: Defense) -> None:
    """Refuses a control that was not trained as the model it stands beside. Raises AuditError with
    what differs."""
    own = promises.read_privacy_record(Path(defense.model_folder))
    for control in (cause.row for cause in defense.cause_chain()):
        folder = "" if control is None else control.model_folder
        record = promises.read_privacy_record(Path(folder)) if folder else None
        if own is None or record is None:
            continue  # what is no folder of the right training is refused by `load_trained_defense`
        for what, one, other in promises.list_training_differences(own, record):
            if one != other:
                raise AuditError(
                    f"expected the control {folder!r} to be trained as the {defense.name} model "
                    f"was, with {what} {one}, got {other}"
                )


def load_trained_defense(
    defense: Defense, load: Callable[[str], LanguageModel], vocab_size: int
) -> TrainedModel:
    """The model that `-D model=` of a trained defense names. Raises AuditError for one that it did
    not train."""
    folder = defense.model_folder
    if not Path(folder).is_dir():
        raise AuditError(
            f"expected -D model= of {defense.name} to be a folder that was trained, got {folder!r}"
        )
    record, own = (
        promises.read_privacy_record(Path(folder)),
        read_trainer_summary_of_model(Path(folder)),
    )
    # nothing is promised of it, so nothing but its training says what it is
    plain = isinstance(defense, Variant)
    by = own if plain else record
    if by is None or by.method != defense.name:
        found = (
            f"a model trained by {by.method}" if by else f"no {RECORD if plain else promises.FILE}"
        )
        raise AuditError(
            f"expected {folder!r} to be trained by audit train {defense.name}, got {found}"
        )
    model = load(folder)
    check_same_vocabulary_size(repr(folder), "it", model.vocab_size, "the target's", vocab_size)
    return TrainedModel(
        model,
        record,
        gradient_canaries.read_gradient_canaries(Path(folder)),
        own.told if own else (),
    )
