"""`audit train`: reads the records, loads the base, lets a `Trainer` train, and knows whether it
has done so before.

The folder's `training.json` says with what configuration it was made: the same one goes on where it
stopped, any other is refused. Knows nothing of how a trainer trains.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from platform import node
from typing import Any, ClassVar

import torch

from auditor import __version__
from auditor.benchmarks.data import chat_rendering
from auditor.benchmarks.data.chat import LEARNT, RenderedChat, render_chat
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import ASSISTANT, Conversation, UnusableConversation
from auditor.benchmarks.data.splitting import row_numbers_phrase
from auditor.benchmarks.data.whole_texts import read_texts_and_units
from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import LOCAL, EngineOptions, LoadingOptions, check_date_format
from auditor.engines.choose import make_engine
from auditor.engines.engine import Engine, WorkerStart
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import FLOAT32, load_causal_lm
from auditor.models.shards import record_digests
from auditor.models.vocabulary import check_same_vocabulary_size, check_tokens_within_vocabulary
from auditor.plugins import registry
from auditor.plugins.options import build_plugin
from auditor.plugins.trainer import RECORD, Trainer, TrainerCheckpoint, TrainingJob, TrainingRecord
from auditor.records import file_digests
from auditor.runs import making_audit_canaries
from auditor.training.members import LoraAdapterRecipe, add_lora_adapter

CHECKPOINT = "checkpoint.pt"
_LONGEST = 512  # tokens of a sequence, unless asked otherwise: memory grows with its square


@dataclass(frozen=True)
class TrainingRequest:
    """One `audit train`: what was asked for."""

    method: str
    model: str
    data: str
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    public: str | None = None
    lora: bool = False
    lora_rank: int = 8
    lora_alpha: int = 16
    text_column: str | None = None
    loss_on: str | None = None  # of conversations: assistant (None) or all
    template: str = AUTO  # how conversations are rendered: as the usual trainers do
    date: str | None = None  # what a template writes as the day
    user_column: str | None = None
    heldout: str | None = None  # records that are not trained on, for a method that chooses by them
    # of the records, those that the model is to forget, for a method that unlearns
    forget: str | None = None
    block: int | None = None
    seed: int = 0
    loading: LoadingOptions = FLOAT32
    engine: EngineOptions = LOCAL
    plugin: tuple[str, ...] = ()  # files that the method may be in, for workers


def train_model_into_folder(
    asked: TrainingRequest, progress: Callable[[str, int, int], None]
) -> tuple[str, ...]:
    """Trains, or goes on training, into `asked.out`. Returns what the user must know: sentences.

    Raises AuditError, before anything is written, for whatever a user can mend.
    """
    asked.engine.check(asked.loading.device)
    trainer: Trainer = build_plugin(
        "training method", registry.list_trainers(), asked.method, asked.options
    )
    if not 0 <= asked.seed < 2**63:
        raise AuditError(f"expected --seed between 0 and 2^63 - 1, got {asked.seed}")
    if any(
        "\ud800" <= letter <= "\udfff" for letter in str(asked.out)
    ):  # how Python reads bytes that are no UTF-8
        raise AuditError(
            f"expected -o as a path in UTF-8, which tokenizers can write to, got {asked.out.name!r}"
        )
    if asked.lora and (asked.lora_rank < 1 or asked.lora_alpha < 1):
        raise AuditError(
            f"expected a LoRA rank and alpha >= 1, got {asked.lora_rank} and {asked.lora_alpha}"
        )
    if (Path(asked.model) / "adapter_config.json").is_file():
        raise AuditError(
            f"expected a whole model to train, but {asked.model!r} is an adapter: give its base, "
            "or merge"
        )
    if asked.lora and trainer.whole:
        raise AuditError(
            f"expected a whole model for {asked.method}, got --lora: it says itself what is trained"
        )
    if asked.heldout is not None and not trainer.chooses:
        raise AuditError(
            f"--heldout names records to choose a model by, and {asked.method} chooses none"
        )
    if asked.forget is not None and not trainer.unlearns:
        raise AuditError(
            f"--forget names records that a model is to forget, and {asked.method} forgets none"
        )
    if asked.lora or trainer.adapters:
        making_audit_canaries.refuse_adapter_on_token_extended_model(asked.model)
    with closing(make_engine(asked.engine)) as engine:
        job, notes = _build_training_job(asked, progress)
        trainer.check(job)
        if engine.workers and not trainer.separate_model_count(job):
            raise AuditError(
                f"--engine ray goes with a method that trains several models, got {asked.method}: "
                "one"
            )
        configuration = _configuration_deciding_weights(asked, trainer, job)
        if (
            trainer.promises
            and _recorded_data_digest_of_model(asked.model) == configuration["data"]
        ):
            raise AuditError(
                "expected a base that has not learnt these records without privacy, but "
                f"{asked.model!r} was trained on them: what a training on top of that promised "
                "would not be true"
            )
        with locks.locked_folder(asked.out, RECORD):
            if _has_finished_training(asked.out, configuration):
                job.checkpoint.clear()  # of a training that was killed between its end and this
                unless = " (which records it was, is not kept)" if trainer.promises else ""
                return (
                    f"{asked.out} is already trained with this configuration{unless}: nothing was "
                    "done",
                )
            engine.set_work_context((trainer, job), _TrainingJobOnWorker(asked, configuration))
            how = {"configuration": configuration, "recipe": _training_arguments_as_json(asked)}
            return (*notes, *_train_and_record_job(trainer, job, how, engine))


def _build_training_job(
    asked: TrainingRequest, progress: Callable[[str, int, int], None]
) -> tuple[TrainingJob, tuple[str, ...]]:
    """What is to be trained on what, and what is to be said of it."""
    # before minutes of loading
    texts, units = read_texts_and_units(asked.data, asked.text_column, asked.user_column)
    base = load_causal_lm(asked.model, asked.loading)
    records, notes = _tokenize_records(asked, base, texts, units)
    heldout, forget = (
        ()
        if path is None
        else _tokenize_records(
            asked, base, read_texts_and_units(path, asked.text_column, None)[0], None
        )[0]
        for path in (asked.heldout, asked.forget)
    )
    _check_heldout_and_forget_records(heldout, forget, records)
    job = TrainingJob(
        base=asked.model,
        load=lambda: _load_trainable_model(asked),
        tokenizer=base.tokenizer,
        end=_end_of_text_token(base),
        block=_checked_block_length(asked, base),
        records=records,
        users=units is not None,
        public=base if asked.public is None else _load_public_model(asked, base),
        out=asked.out,
        checkpoint=TrainerCheckpoint(asked.out / CHECKPOINT),
        seed=asked.seed,
        progress=progress,
        heldout=heldout,
        forget=forget,
    )
    return job, (*base.notes, *notes)


@dataclass(frozen=True)
class _TrainingJobOnWorker:
    """The trainer and its job as a worker makes them, which reads base and records where the
    command says."""

    asked: TrainingRequest
    configuration: dict[str, Any]
    there: WorkerStart = field(default_factory=WorkerStart)

    def __call__(self) -> tuple[Trainer, TrainingJob]:
        """Raises AuditError where the worker reads another base or other records than the
        command."""
        self.there.enter_folder()
        for path in self.asked.plugin:
            registry.load_plugin_file(Path(path))
        kinds = registry.list_trainers()
        trainer: Trainer = build_plugin(
            "training method", kinds, self.asked.method, self.asked.options
        )
        job, _ = _build_training_job(self.asked, lambda what, done, total: None)
        found = _configuration_deciding_weights(self.asked, trainer, job)
        for name, own in self.configuration.items():
            if found[name] != own:
                difference = _configuration_difference_phrase(name, found[name], own)
                raise AuditError(
                    f"expected every worker to read what the training does, got on {node()} "
                    f"{difference}"
                )
        return trainer, job


@dataclass(frozen=True)
class _TrainingsByIndex:
    """Trains models of a trainer, by their index, one a task; yields the folder of each."""

    portion: ClassVar[int] = 1

    def process_items(
        self, place: tuple[Trainer, TrainingJob], items: Sequence[int]
    ) -> Iterator[Path]:
        trainer, job = place
        for index in items:
            yield trainer.train_one(job, index)


def _train_and_record_job(
    trainer: Trainer, job: TrainingJob, how: dict[str, Any], engine: Engine
) -> tuple[str, ...]:
    """Trains and records it. how: the configuration that the weights depend on, and the recipe to
    do it again."""
    record, configuration = (
        {"tool_version": __version__, **how, "finished": False},
        how["configuration"],
    )
    disk.replace_atomically(job.out / RECORD, json.dumps(record, indent=1), sync=True)
    start = time.perf_counter()
    try:
        if engine.workers:
            models = range(trainer.separate_model_count(job))
            for done, made in enumerate(engine.stream_long_results(_TrainingsByIndex(), models), 1):
                if not made.is_dir():
                    raise AuditError(
                        "expected -o on a file system that all workers share, got no "
                        f"{str(made)!r} here"
                    )
                job.progress(f"models trained by {engine.description}", done, len(models))
        told = trainer.train(job)
    except AuditError:
        if {path.name for path in job.out.iterdir()} == {
            RECORD,
            locks.LOCK,
        }:  # a refusal leaves nothing behind
            (job.out / RECORD).unlink()
        raise
    if trainer.promises:  # two data sets that a promise makes alike would differ in their digest
        record["configuration"] = {
            name: value for name, value in configuration.items() if name != "data"
        }
    record |= {
        "finished": True,
        "told": list(told),
        "seconds_of_last_run": round(time.perf_counter() - start, 1),
    }
    disk.fsync_tree(job.out)
    disk.replace_atomically(job.out / RECORD, json.dumps(record, indent=1), sync=True)
    # not before: with neither, the same command would train on the records again
    job.checkpoint.clear()
    return told


# --- the data
# -----------------------------------------------------------------------------------------------


def _tokenize_records(
    asked: TrainingRequest,
    base: HuggingFaceModel,
    rows: Sequence[str | Conversation],
    units: list[str] | None,
) -> tuple[tuple[TrainingRecord, ...], tuple[str, ...]]:
    """The rows as tokens, and what is to be said of them. Without a column, copies of a text are
    one unit."""
    if base.tokenizer is None:
        raise AuditError(f"expected a model with a tokenizer, but {base.name} has none")
    talks = [row for row in rows if not isinstance(row, str)]
    if asked.loss_on is not None and (not talks or asked.loss_on not in LEARNT):
        got = asked.loss_on if talks else "it with text, which is learnt whole"
        raise AuditError(f"expected --loss-on {' or '.join(LEARNT)}, of conversations, got {got}")
    whose = "users or groups" if units is not None else "distinct texts"
    if talks:
        form = _choose_chat_rendering(asked, base.tokenizer, talks)
        records, said = _training_records_of_conversations(
            base.tokenizer, talks, asked.loss_on or ASSISTANT, form
        )
    elif asked.template != AUTO or asked.date is not None:
        raise AuditError(
            "--template and --date are about conversations and instructions, got them with text"
        )
    else:
        records, said = (
            _training_records_of_texts(
                base.tokenizer, [row for row in rows if isinstance(row, str)]
            ),
            (),
        )
    check_tokens_within_vocabulary(
        "the records", [record.tokens for record in records], base.vocab_size, base.name
    )
    if units is not None:
        records = [replace(record, unit=unit) for record, unit in zip(records, units, strict=True)]
    return tuple(records), (
        f"{len(records):,} records of {len({r.unit for r in records}):,} {whose}",
        *said,
    )


def _check_heldout_and_forget_records(
    heldout: Sequence[TrainingRecord],
    forget: Sequence[TrainingRecord],
    records: Sequence[TrainingRecord],
) -> None:
    """Raises AuditError where one of `heldout` is among the records, and where one of `forget` is
    not."""
    known = {record.text for record in records}
    if shared := len({record.text for record in heldout} & known):
        raise AuditError(
            f"expected --heldout with records that are not trained on, got {shared} that --data "
            "has too"
        )
    if missing := [row for row, record in enumerate(forget) if record.text not in known]:
        raise AuditError(
            f"expected --forget with records that --data has, got {len(missing)} of {len(forget)} "
            f"that it has not ({row_numbers_phrase(missing)})"
        )


def _training_records_of_texts(tokenizer: Any, texts: list[str]) -> list[TrainingRecord]:
    tokens = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return [
        TrainingRecord(t, tuple(ids), record_digests([t])[0])
        for t, ids in zip(texts, tokens, strict=True)
    ]


def _choose_chat_rendering(
    asked: TrainingRequest, tokenizer: Any, talks: Sequence[Conversation]
) -> ChatRendering:
    """The rendering that is asked for, else the usual one. Raises AuditError for a day that nobody
    named."""
    if asked.date is not None:
        check_date_format(asked.date)
    chosen = (
        chat_rendering.candidate_chat_renderings(tokenizer, talks)[0].name
        if asked.template == AUTO
        else asked.template
    )
    form = chat_rendering.parse_chat_rendering(chosen, asked.date, tokenizer)
    if form.writes_day and form.day is None:
        raise AuditError(
            "expected --date YYYY-MM-DD, as the chat template writes the day: what is learnt must "
            "not hang on when"
        )
    return form


def _training_records_of_conversations(
    tokenizer: Any, talks: Sequence[Conversation], loss_on: str, form: ChatRendering
) -> tuple[list[TrainingRecord], tuple[str, ...]]:
    """The conversations as records in this rendering. Raises AuditError with the number of one that
    has none."""
    records, remarks = [], dict[str, None]()
    for number, said in enumerate(talks):
        try:
            found = render_chat(tokenizer, said, form)
            mask = (
                found.learnt_token_mask(loss_on)
                if loss_on == "all"
                else _read_learnt_mask(found, loss_on)
            )
            learnt = None if all(mask) else mask
        except UnusableConversation as why:
            raise AuditError(
                f"expected conversations to train on, but of number {number} (from 0) {why}"
            ) from None
        records.append(
            TrainingRecord(found.text, found.tokens, record_digests([found.text])[0], learnt)
        )
        remarks |= dict.fromkeys(found.remarks)
    share = sum(sum(r.learnt) if r.learnt else len(r.tokens) for r in records) / sum(
        len(r.tokens) for r in records
    )
    return records, (
        f"as --template {form.name_with_day}; loss on {loss_on}: {share:.0%} of the tokens",
        *remarks,
    )


def _read_learnt_mask(found: RenderedChat, loss_on: str) -> tuple[bool, ...]:
    """Raises UnusableConversation where an answer that is to be learnt cannot be found."""
    if found.marked is None:
        for answer in found.answers:
            if isinstance(answer, UnusableConversation):
                raise answer
    return found.learnt_token_mask(loss_on)


def _end_of_text_token(base: HuggingFaceModel) -> int:
    end = getattr(base.tokenizer, "eos_token_id", None)
    if end is None:
        raise AuditError(
            f"expected a tokenizer with an end-of-text token, but that of {base.name} has none"
        )
    return int(end)


def _checked_block_length(asked: TrainingRequest, base: HuggingFaceModel) -> int:
    room = base.max_positions or _LONGEST
    block = min(room, _LONGEST) if asked.block is None else asked.block
    if not 2 <= block <= room:
        raise AuditError(
            f"expected --block between 2 and the {room} positions of {base.name}, got {block}"
        )
    return block


# --- the models
# -----------------------------------------------------------------------------------------------


def _load_public_model(asked: TrainingRequest, base: HuggingFaceModel) -> HuggingFaceModel:
    assert asked.public is not None
    public = load_causal_lm(asked.public, asked.loading.for_companion_model())
    check_same_vocabulary_size(
        "--public", public.name, public.vocab_size, "the base's", base.vocab_size
    )
    return public


def _load_trainable_model(asked: TrainingRequest) -> Any:
    """A fresh model in training mode: all of its parameters free, or only those of a new LoRA
    adapter."""
    model: Any = load_causal_lm(asked.model, asked.loading).model
    torch.manual_seed(asked.seed)  # of the adapter's random half
    if asked.lora:
        model = add_lora_adapter(model, LoraAdapterRecipe(asked.lora_rank, asked.lora_alpha, "all"))
    else:
        for parameter in model.parameters():
            # torch refuses integers a gradient
            parameter.requires_grad_(parameter.is_floating_point())
    return model.train()


# --- to do it again
# -----------------------------------------------------------------------------------------------

_HERE = ("out", "engine")  # of a training: where it took place
_PLACES = ("model", "data", "public", "heldout", "forget")


def _training_arguments_as_json(asked: TrainingRequest) -> dict[str, Any]:
    """What was asked for, as JSON, its files by their whole path."""
    found: dict[str, Any] = {
        name: to_json(value) for name, value in vars(asked).items() if name not in _HERE
    }
    for name in _PLACES:
        if found[name] is not None and Path(found[name]).exists():
            found[name] = str(Path(found[name]).resolve())
    return found


def read_recorded_training_request(folder: Path, out: Path) -> TrainingRequest:
    """The request that made the model in a folder, for another `out`. Raises AuditError where the
    folder has none."""
    try:
        record = json.loads((folder / RECORD).read_text())
        recipe, finished = dict(record["recipe"]), record["finished"] is True
    except (OSError, ValueError, KeyError, TypeError):
        raise AuditError(
            f"expected a model that audit train made, with its recipe in {RECORD}, got "
            f"{str(folder)!r}: --train COMMAND says how it was trained"
        ) from None
    if not finished:
        raise AuditError(
            f"expected a finished training in {str(folder)!r}, got one that was interrupted"
        )
    found: TrainingRequest = from_json(
        TrainingRequest, {**recipe, "out": out}, f"{folder / RECORD}: recipe"
    )
    return found


def check_same_training_records(folder: Path, asked: TrainingRequest) -> None:
    """Refuses data that are not what the model in a folder was trained on, where that was kept.
    Raises AuditError."""
    held = _recorded_data_digest_of_model(str(folder))
    if held is None:
        return
    texts, units = read_texts_and_units(asked.data, asked.text_column, asked.user_column)
    records, _ = _tokenize_records(asked, load_causal_lm(asked.model, asked.loading), texts, units)
    if _training_records_digest(records) != held:
        raise AuditError(
            f"{asked.data!r} is not what {str(folder)!r} was trained on: other records, or other "
            "options"
        )


# --- what a folder was made with
# -----------------------------------------------------------------------------------------------


def _configuration_deciding_weights(
    asked: TrainingRequest, trainer: Trainer, job: TrainingJob
) -> dict[str, Any]:
    """All that the weights depend on, as JSON. Of the records: a digest."""
    read: dict[str, Any] = {
        "model": (asked.model, asked.loading.revision),
        "public": (asked.public, None),
    }
    configuration = {
        "method": trainer.name,
        "options": {
            name: own
            for name, own in to_json(trainer.options()).items()
            if name not in trainer.immaterial
        },
        "model": asked.model,
        "revision": asked.loading.revision,
        "public": asked.public,
        "weights": file_digests.model_sha256_by_file_name(
            {role: of for role, of in read.items() if of[0] is not None}
        ),
        "lora": [asked.lora_rank, asked.lora_alpha] if asked.lora else None,
        "data": _training_records_digest(job.records),
        "block": job.block,
        "seed": asked.seed,
        "heldout": _training_records_digest(job.heldout) if job.heldout else None,
        "forget": _training_records_digest(job.forget) if job.forget else None,
        "dtype": asked.loading.dtype,
    }
    # As JSON gives it back (lists for tuples), to be equal to a configuration that was read.
    plain: dict[str, Any] = json.loads(json.dumps(configuration))
    return plain


def _training_records_digest(records: Sequence[TrainingRecord]) -> str:
    told = [
        [record.text, record.unit, *([record.learnt] if record.learnt else [])]
        for record in records
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _recorded_data_digest_of_model(model: str) -> str | None:
    """The digest of the records that a folder was trained on without privacy; None where it does
    not say."""
    try:
        found: str | None = json.loads((Path(model) / RECORD).read_text())["configuration"].get(
            "data"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found


def _has_finished_training(out: Path, configuration: dict[str, Any]) -> bool:
    """Whether the folder holds this training, finished. Raises AuditError where it holds anything
    else."""
    if not any(path.name != locks.LOCK for path in out.iterdir()):
        return False
    try:
        record = json.loads((out / RECORD).read_text())
        before, finished = dict(record["configuration"]), bool(record["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        raise AuditError(
            f"expected a new or empty folder for -o, but {str(out)!r} holds something else"
        ) from None
    for name in [*configuration, *before]:
        if (
            name == "data" and finished and name not in before
        ):  # a private training keeps no digest of its records
            continue
        own, other = configuration.get(name), before.get(name)
        if own != other:
            why = _configuration_difference_phrase(name, own, other)
            raise AuditError(f"{str(out)!r} was trained with another configuration ({why})")
    return finished


def _configuration_difference_phrase(name: str, own: Any, other: Any) -> str:
    if isinstance(own, dict) and isinstance(other, dict):
        name = next(key for key in [*own, *other] if own.get(key) != other.get(key))
        own, other = own.get(name), other.get(name)
    if name == "data":
        return "other records"
    return f"{name}: {other!r} there, {own!r} now"
