"""Run `audit train`: read the records, load the base model, and start or resume the training.

The output folder's `training.json` records the configuration. A training with the same
configuration continues; a different configuration is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from platform import node
from typing import Any, ClassVar

import torch

from auditor import __version__
from auditor.benchmarks.canaries import making_audit_canaries
from auditor.benchmarks.data import chat_rendering
from auditor.benchmarks.data.chat import LEARNT, render_chat
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import ASSISTANT, Conversation, UnusableConversation
from auditor.benchmarks.data.files import read_unit_texts
from auditor.benchmarks.data.splitting import format_row_numbers
from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json, write_json
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import check_date_format
from auditor.engines.engine import Engine
from auditor.engines.ray_engine import make_engine
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.models.shards import record_digests
from auditor.models.vocabulary import check_same_vocabulary_size, check_tokens_within_vocabulary
from auditor.plugins import registry
from auditor.plugins.options import build_plugin
from auditor.plugins.trainer import (
    RECORD,
    TOKENS_AFTER,
    TOKENS_BEFORE,
    Trainer,
    TrainerCheckpoint,
    TrainingJob,
    TrainingRecord,
    read_training_summary,
)
from auditor.records import file_digests
from auditor.runs.training_request import TrainingRequest
from auditor.training.members import LoraAdapterRecipe, add_lora_adapter

CHECKPOINT = "checkpoint.pt"
_LONGEST = 512  # tokens of a sequence by default: memory grows with its square


def train_model_into_folder(
    request: TrainingRequest, progress: Callable[[str, int, int], None]
) -> tuple[str, ...]:
    """Start or continue the training in `request.out`. Return sentences for the user.

    Every error that a user can fix raises AuditError before anything is written.

    Args:
        request: arguments of the training.
        progress: function called with (description, done, total).
    """
    trainer = _build_trainer(request)
    _check_training_request(request, trainer)
    with closing(make_engine(request.engine)) as engine:
        job, notes = _build_training_job(request, progress)
        trainer.check(job)
        if engine.workers and not trainer.separate_model_count(job):
            raise AuditError(
                "--engine ray goes with a method that trains several models, got "
                f"{request.method}: "
                "one"
            )
        configuration = _build_configuration(request, trainer, job)
        if trainer.promises:
            notes += _check_records_new_to_base(request)
        with locks.lock_folder(request.out, RECORD):
            earlier_record = read_matching_record(
                request.out, RECORD, configuration, "was trained with another configuration"
            )
            if earlier_record is not None and earlier_record.get("finished"):
                job.checkpoint.clear()  # of a training killed between its end and this line
                unless = ""
                if trainer.promises:
                    unless = " (its records are unknown)"
                return (
                    f"{request.out} is already trained with this configuration{unless}: nothing "
                    "was "
                    "done",
                )
            engine.set_work_context((trainer, job), _TrainingJobOnWorker(request, configuration))
            recipe = {
                "configuration": configuration,
                "recipe": _encode_training_arguments(request),
            }
            return (*notes, *_train_recorded_job(trainer, job, recipe, engine))


def _check_records_new_to_base(request: TrainingRequest) -> tuple[str, ...]:
    """Raise AuditError if the base has learnt a record of the request without privacy.

    Earlier trainings of the base count too. Return a sentence for each that learnt other records.
    """
    notes = []
    rows = None
    folder = Path(request.model)
    while (summary := read_training_summary(folder)).method:
        recipe = read_recorded_training_request(folder, folder)
        if summary.data is not None:  # a training that promises something records no digest
            if rows is None:
                rows = _read_distinct_rows(request)
            try:
                learnt_rows = _read_distinct_rows(recipe)
            except AuditError as error:
                raise AuditError(
                    f"cannot tell whether the base {str(folder)!r} has learnt these records "
                    f"without privacy: its own cannot be read ({error})"
                ) from None
            if shared := len(rows & learnt_rows):
                raise AuditError(
                    "expected a base that has not learnt these records without privacy, but "
                    f"{str(folder)!r} was trained on {shared} of them: the promise of a training "
                    "on top of it would be false"
                )
            notes.append(f"{folder} learnt other records, of which nothing is promised")
        folder = Path(recipe.model)
    return tuple(notes)


def _read_distinct_rows(request: TrainingRequest) -> set[str]:
    """Return the texts or conversations that the request trains on, without repeats."""
    return set(map(repr, read_unit_texts(request.data, request.text_column)[0]))


def _build_trainer(request: TrainingRequest) -> Trainer:
    trainer: Trainer = build_plugin(
        "training method", registry.list_trainers(), request.method, request.options
    )
    return trainer


def _check_training_request(request: TrainingRequest, trainer: Trainer) -> None:
    """Raise AuditError for conflicting arguments, before anything is read."""
    request.engine.check(request.loading.device)
    if not 0 <= request.seed < 2**63:
        raise AuditError(f"expected --seed between 0 and 2^63 - 1, got {request.seed}")
    # Python decodes invalid UTF-8 to surrogates.
    if re.search("[\ud800-\udfff]", str(request.out)):
        raise AuditError(
            "expected -o as a path in UTF-8, which tokenizers can write to, got "
            f"{request.out.name!r}"
        )
    adapter = (request.lora_rank, request.lora_alpha)
    if not request.lora and adapter != (TrainingRequest.lora_rank, TrainingRequest.lora_alpha):
        raise AuditError("--lora-rank and --lora-alpha go with --lora")
    if request.lora and (request.lora_rank < 1 or request.lora_alpha < 1):
        raise AuditError(
            f"expected a LoRA rank and alpha >= 1, got {request.lora_rank} and {request.lora_alpha}"
        )
    if (Path(request.model) / "adapter_config.json").is_file():
        raise AuditError(
            f"expected a whole model to train, but {request.model!r} is an adapter: give its base, "
            "or merge"
        )
    if request.lora and trainer.whole:
        raise AuditError(
            f"expected a whole model for {request.method}, got --lora: this method decides itself "
            "what is trained"
        )
    if request.heldout is not None and not trainer.chooses:
        raise AuditError(
            f"--heldout names records to choose a model by, but {request.method} does not choose "
            "one"
        )
    if request.forget is not None and not trainer.unlearns:
        raise AuditError(
            f"--forget names records that a model should forget, but {request.method} forgets none"
        )
    if request.lora or trainer.adapters:
        making_audit_canaries.refuse_extended_adapter(request.model)


def _build_training_job(
    request: TrainingRequest, progress: Callable[[str, int, int], None]
) -> tuple[TrainingJob, tuple[str, ...]]:
    """Return the training job, then notes to print with its result."""
    # Read the texts first: loading takes minutes.
    texts, units = read_unit_texts(request.data, request.text_column, request.user_column)
    base = load_causal_lm(request.model, request.loading)
    records, notes = _tokenize_records(request, base, texts, units)
    heldout, forget = (
        ()
        if path is None
        else _tokenize_records(
            request, base, read_unit_texts(path, request.text_column, None)[0], None
        )[0]
        for path in (request.heldout, request.forget)
    )
    _check_record_roles(heldout, forget, records)
    job = TrainingJob(
        base=request.model,
        load=lambda: _load_trainable_model(request),
        tokenizer=base.tokenizer,
        end=_find_end_token(base),
        block=_check_block_length(request, base),
        records=records,
        users=units is not None,
        public=base if request.public is None else _load_public_model(request, base),
        out=request.out,
        checkpoint=TrainerCheckpoint(request.out / CHECKPOINT),
        seed=request.seed,
        progress=progress,
        heldout=heldout,
        forget=forget,
    )
    return job, (*base.notes, *notes)


@dataclass(frozen=True)
class _TrainingJobOnWorker:
    """Callable that builds the trainer and its job on a worker.

    The worker reads the base model and the records itself, from the paths of the command.

    Args:
        request: arguments of the command.
        configuration: the command's configuration, which the worker's configuration must match.
    """

    request: TrainingRequest
    configuration: dict[str, Any]

    def __call__(self) -> tuple[Trainer, TrainingJob]:
        """Build the trainer and its job.

        Raise AuditError if the worker's base model or records differ from the command's.
        """
        for path in self.request.plugin:
            registry.load_plugin_file(Path(path))
        trainer = _build_trainer(self.request)
        job, _ = _build_training_job(self.request, lambda description, n_done, total: None)
        settings = _build_configuration(self.request, trainer, job)
        for name, expected in self.configuration.items():
            if settings[name] != expected:
                difference = _format_configuration_difference(name, settings[name], expected)
                raise AuditError(
                    f"expected every worker to read the same data as the training, got on {node()} "
                    f"{difference}"
                )
        return trainer, job


@dataclass(frozen=True)
class _TrainingsByIndex:
    """Work for the engine: train a model for each index, and yield the model's folder."""

    portion: ClassVar[int] = 1

    def process_items(
        self, place: tuple[Trainer, TrainingJob], items: Sequence[int]
    ) -> Iterator[Path]:
        trainer, job = place
        for index in items:
            yield trainer.train_one(job, index)


def _train_recorded_job(
    trainer: Trainer, job: TrainingJob, settings: dict[str, Any], engine: Engine
) -> tuple[str, ...]:
    """Run the training and record it in its output folder. Return sentences for the user.

    Args:
        trainer: the training method.
        job: base model, records and output folder.
        settings: the arguments that repeat the training, and the configuration: the values that
            decide the trained weights.
        engine: executor on workers, or in this process.
    """
    record = {"tool_version": __version__, **settings, "finished": False}
    if trainer.surrounds:
        record |= {TOKENS_BEFORE: [job.end], TOKENS_AFTER: [job.end]}
    configuration = settings["configuration"]
    write_json(job.out / RECORD, record, sync=True)
    start = time.perf_counter()
    try:
        if engine.workers:
            models = range(trainer.separate_model_count(job))
            for n_trained, folder in enumerate(
                engine.stream_long_results(_TrainingsByIndex(), models), 1
            ):
                if not folder.is_dir():
                    raise AuditError(
                        "expected -o on a file system that all workers share, got no "
                        f"{str(folder)!r} here"
                    )
                job.progress(f"models trained by {engine.description}", n_trained, len(models))
        notes = trainer.train(job)
    except AuditError:
        # A refusal leaves no files.
        if {path.name for path in job.out.iterdir()} == {RECORD, locks.LOCK}:
            (job.out / RECORD).unlink()
        raise
    if trainer.promises:  # a digest would distinguish the neighbouring data sets of the promise
        record["configuration"] = {**configuration}
        del record["configuration"]["data"]
    record |= {
        "finished": True,
        "told": list(notes),
        "seconds_of_last_run": round(time.perf_counter() - start, 1),
    }
    disk.fsync_tree(job.out)
    write_json(job.out / RECORD, record, sync=True)
    # Clear only now: without checkpoint and record, the same command would train again.
    job.checkpoint.clear()
    return notes


# --- the data ---


def _tokenize_records(
    request: TrainingRequest,
    base: HuggingFaceModel,
    rows: Sequence[str | Conversation],
    units: list[str] | None,
) -> tuple[tuple[TrainingRecord, ...], tuple[str, ...]]:
    """Tokenize the rows. Return the records, then sentences for the user.

    Args:
        request: arguments of the training.
        base: the base model, with its tokenizer.
        rows: texts or conversations.
        units: privacy unit of each row, such as its user; if None, rows with the same text form a
            unit.
    """
    if base.tokenizer is None:
        raise AuditError(f"expected a model with a tokenizer, but {base.name} has none")
    conversations = [row for row in rows if not isinstance(row, str)]
    if request.loss_on is not None and (not conversations or request.loss_on not in LEARNT):
        got = request.loss_on
        if not conversations:
            got = "it with text, which is learnt whole"
        raise AuditError(f"expected --loss-on {' or '.join(LEARNT)}, of conversations, got {got}")
    if conversations:
        form = _choose_chat_rendering(request, base.tokenizer, conversations)
        records, notes = _tokenize_conversations(
            base.tokenizer, conversations, request.loss_on or ASSISTANT, form
        )
    elif request.template != AUTO or request.date is not None:
        raise AuditError(
            "--template and --date are about conversations and instructions, got them with text"
        )
    else:
        records = _tokenize_texts(base.tokenizer, [row for row in rows if isinstance(row, str)])
        notes = ()
    check_tokens_within_vocabulary(
        "the records", [record.tokens for record in records], base.vocab_size, base.name
    )
    unit_noun = "distinct texts"
    if units is not None:
        unit_noun = "users or groups"
        records = [replace(record, unit=unit) for record, unit in zip(records, units, strict=True)]
    return tuple(records), (
        f"{len(records):,} records of {len({r.unit for r in records}):,} {unit_noun}",
        *notes,
    )


def _check_record_roles(
    heldout: Sequence[TrainingRecord],
    forget: Sequence[TrainingRecord],
    records: Sequence[TrainingRecord],
) -> None:
    """Raise AuditError if the data contain a held-out record, or lack a record to forget."""
    texts = {record.text for record in records}
    if shared := len({record.text for record in heldout} & texts):
        raise AuditError(
            f"expected --heldout with records that are not trained on, got {shared} that are "
            "also in --data"
        )
    if missing := [row for row, record in enumerate(forget) if record.text not in texts]:
        raise AuditError(
            f"expected --forget with records of --data, got {len(missing)} of {len(forget)} that "
            f"are not in it ({format_row_numbers(missing)})"
        )


def _tokenize_texts(tokenizer: Any, texts: list[str]) -> list[TrainingRecord]:
    tokens = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return list(map(_make_training_record, texts, tokens))


def _make_training_record(
    text: str, tokens: Sequence[int], mask: tuple[bool, ...] | None = None
) -> TrainingRecord:
    """Return a training record. Records with the same text belong to the same privacy unit.

    Args:
        text: the text.
        tokens: its token ids.
        mask: True for each token that is trained on; None if all are.
    """
    (unit,) = record_digests([text])
    return TrainingRecord(text, tuple(tokens), unit, mask)


def _choose_chat_rendering(
    request: TrainingRequest, tokenizer: Any, talks: Sequence[Conversation]
) -> ChatRendering:
    """Return the requested rendering of conversations.

    If none is requested, return the rendering of the usual trainers. Raise AuditError if the
    rendering needs a day but no day is given.
    """
    if request.date is not None:
        check_date_format(request.date)
    chosen = request.template
    if chosen == AUTO:
        chosen = chat_rendering.list_candidate_chat_renderings(tokenizer, talks)[0].name
    form = chat_rendering.parse_chat_rendering(chosen, request.date, tokenizer)
    if form.writes_day and form.day is None:
        raise AuditError(
            "expected --date YYYY-MM-DD, because the chat template writes the day: the trained "
            "text must not depend on the day of the run"
        )
    return form


def _tokenize_conversations(
    tokenizer: Any, talks: Sequence[Conversation], loss_on: str, form: ChatRendering
) -> tuple[list[TrainingRecord], tuple[str, ...]]:
    """Render conversations as training records. Return the records, then sentences for the user.

    If a conversation cannot be used, raise AuditError with its row.

    Args:
        tokenizer: tokenizer of the base model.
        talks: the conversations.
        loss_on: the parts of a conversation to train on.
        form: the rendering: a way to write conversations as text.
    """
    records = []
    n_learnt = 0
    remarks = dict[str, None]()
    for conversation in talks:
        try:
            chat = render_chat(tokenizer, conversation, form)
            if loss_on != "all" and chat.marked is None:
                for answer in chat.answers:
                    if isinstance(answer, UnusableConversation):
                        raise answer  # for an answer that cannot be found in the tokens
            mask = chat.learnt_token_mask(loss_on)
            token_mask = None if all(mask) else mask
        except UnusableConversation as error:
            raise AuditError(
                f"{conversation.place}: expected a conversation to train on, got {error}"
            ) from None
        records.append(_make_training_record(chat.text, chat.tokens, token_mask))
        n_learnt += sum(mask)
        remarks |= dict.fromkeys(chat.remarks)
    share = n_learnt / sum(len(r.tokens) for r in records)
    return records, (
        f"as --template {form.name_with_day}; loss on {loss_on}: {share:.0%} of the tokens",
        *remarks,
    )


def _find_end_token(base: HuggingFaceModel) -> int:
    end = getattr(base.tokenizer, "eos_token_id", None)
    if end is None:
        raise AuditError(
            f"expected a tokenizer with an end-of-text token, but {base.name} has none"
        )
    return int(end)


def _check_block_length(request: TrainingRequest, base: HuggingFaceModel) -> int:
    room = base.max_positions or _LONGEST
    block = request.block
    if block is None:
        block = min(room, _LONGEST)
    if not 2 <= block <= room:
        raise AuditError(
            f"expected --block between 2 and the {room} positions of {base.name}, got {block}"
        )
    return block


# --- the models ---


def _load_public_model(request: TrainingRequest, base: HuggingFaceModel) -> HuggingFaceModel:
    assert request.public is not None
    public = load_causal_lm(request.public, request.loading.for_companion_model())
    check_same_vocabulary_size(
        "--public", public.name, public.vocab_size, "the base's", base.vocab_size
    )
    return public


def _load_trainable_model(request: TrainingRequest) -> Any:
    """Load the base model in training mode.

    All parameters are trainable, or only those of a new LoRA adapter if an adapter is requested.
    """
    model: Any = load_causal_lm(request.model, request.loading).model
    torch.manual_seed(request.seed)  # seed of the adapter's random half
    if request.lora:
        model = add_lora_adapter(
            model, LoraAdapterRecipe(request.lora_rank, request.lora_alpha, "all")
        )
    else:
        for parameter in model.parameters():
            # torch allows no gradient for integers
            parameter.requires_grad_(parameter.is_floating_point())
    return model.train()


# --- the recipe to train again ---

_HERE = ("out", "engine")  # arguments about the place of a training, not its configuration
_PLACES = ("model", "data", "public", "heldout", "forget")


def _encode_training_arguments(request: TrainingRequest) -> dict[str, Any]:
    """Return the arguments as JSON values, with absolute file paths."""
    arguments: dict[str, Any] = {}
    for name, value in vars(request).items():
        if name in _PLACES and value is not None and Path(value).exists():
            arguments[name] = str(Path(value).resolve())
        elif name not in _HERE:
            arguments[name] = to_json(value)
    return arguments


def read_recorded_training_request(folder: Path, out: Path) -> TrainingRequest:
    """Return the arguments that trained the folder's model, with `out` as output folder.

    Raise AuditError if the folder has no record of its training.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
        recipe = dict(record["recipe"])
        finished = record["finished"] is True
    except (OSError, ValueError, KeyError, TypeError):
        raise AuditError(
            f"expected a model that audit train made, with its recipe in {RECORD}, got "
            f"{str(folder)!r}: --train COMMAND says how it was trained"
        ) from None
    if not finished:
        raise AuditError(
            f"expected a finished training in {str(folder)!r}, got one that was interrupted"
        )
    where = f"{folder / RECORD}: recipe"
    return from_json(TrainingRequest, {**recipe, "out": out}, where)


def check_same_training_records(folder: Path, request: TrainingRequest) -> None:
    """Raise AuditError if a folder's model was trained on other data than the request names.

    The data are compared by the digest that the folder recorded.
    """
    summary = read_training_summary(folder)
    if summary.data is None:
        return
    texts, units = read_unit_texts(request.data, request.text_column, request.user_column)
    records, _ = _tokenize_records(
        request, load_causal_lm(request.model, request.loading), texts, units
    )
    if _digest_training_records(records) != summary.data:
        raise AuditError(
            f"{request.data!r} is not what {str(folder)!r} was trained on: other records, or other "
            "options"
        )


# --- the configuration of a folder ---


def _build_configuration(
    request: TrainingRequest, trainer: Trainer, job: TrainingJob
) -> dict[str, Any]:
    """Return all values that decide the trained weights, as JSON, with a digest of the records."""
    sources: dict[str, tuple[str, str | None]] = {
        "model": (request.model, request.loading.revision)
    }
    if request.public is not None:
        sources["public"] = request.public, None
    options = to_json(trainer.options())
    for name in trainer.immaterial:
        options.pop(name, None)
    configuration = {
        "method": trainer.name,
        "options": options,
        "model": request.model,
        "revision": request.loading.revision,
        "public": request.public,
        "weights": file_digests.digest_model_files(sources),
        "lora": [request.lora_rank, request.lora_alpha] if request.lora else None,
        "data": _digest_training_records(job.records),
        "block": job.block,
        "seed": request.seed,
        "heldout": _digest_training_records(job.heldout) if job.heldout else None,
        "forget": _digest_training_records(job.forget) if job.forget else None,
        "dtype": request.loading.dtype,
    }
    if request.plugin:  # the method's code may be there
        files = map(Path, request.plugin)
        configuration["plugin"] = {file.name: file_digests.digest_file(file) for file in files}
    # Round trip through JSON (lists for tuples), for equality with a configuration from a file.
    plain: dict[str, Any] = json.loads(json.dumps(configuration))
    return plain


def _digest_training_records(records: Sequence[TrainingRecord]) -> str:
    rows = []
    for record in records:
        rows.append([record.text, record.unit, *filter(None, [record.learnt])])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def read_matching_record(
    out: Path, file: str, configuration: Mapping[str, Any], fault: str
) -> dict[str, Any] | None:
    """Return the record in an output folder; None if the folder is empty.

    Raise AuditError if the folder holds other files, or a record of another configuration.

    Args:
        out: the output folder.
        file: name of the record's file.
        configuration: the configuration that the record must have.
        fault: end of the message about another configuration.
    """
    if not any(path.name != locks.LOCK for path in out.iterdir()):
        return None
    try:
        record: dict[str, Any] = json.loads((out / file).read_text())
        recorded = dict(record["configuration"])
    except (OSError, ValueError, KeyError, TypeError):
        raise AuditError(
            f"expected a new or empty folder for -o, but {str(out)!r} contains something else"
        ) from None
    for name in [*configuration, *recorded]:
        # A finished private training records no digest of its records.
        if name == "data" and record.get("finished") and name not in recorded:
            continue
        value = configuration.get(name)
        other = recorded.get(name)
        if value != other:
            difference = _format_configuration_difference(name, value, other)
            raise AuditError(f"{str(out)!r} {fault} ({difference})")
    return record


def _format_configuration_difference(name: str, value: Any, other: Any) -> str:
    if isinstance(value, dict) and isinstance(other, dict):
        name = next(key for key in [*value, *other] if value.get(key) != other.get(key))
        value = value.get(name)
        other = other.get(name)
    if name == "data":
        return "other records"
    return f"{name}: {other!r} there, {value!r} now"
