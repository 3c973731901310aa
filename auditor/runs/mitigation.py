"""Plan a new training and a second audit from a finished audit (`audit mitigate --by`).

The lab trains by its own recipe. A user's model is trained again by its `training.json` or by a
command. A mitigation that drops records edits the data file. Other mitigations replace the training
method. This module prints and compares nothing.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from auditor.benchmarks.data.changed_tables import WRITERS
from auditor.benchmarks.data.compressed import find_table_ending
from auditor.benchmarks.data.files import format_data_row, read_training_rows, write_kept_data
from auditor.conclusions import secret_details
from auditor.conclusions.contrasts import WeightedMetric, measure_seed_contrast
from auditor.conclusions.outcomes import RunOutcomes
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError
from auditor.core.jsonable import write_json
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan import Plan
from auditor.core.plan_parts import DECIDED
from auditor.core.result import AuditResult, Measurement
from auditor.gate.comparability import digest_comparable_secrets
from auditor.gate.compare import compare_finished_runs
from auditor.models.loading import choose_loaded_dtype
from auditor.models.shards import SHARD, write_shard_record_list
from auditor.plugins import registry
from auditor.plugins.options import build_plugin, get_option_defaults
from auditor.plugins.trainer import Trainer, read_training_summary
from auditor.privacy.promises import read_privacy_record
from auditor.records import attacked_secrets, result_file
from auditor.records.folder import RunFolder
from auditor.records.table import read_heldout_losses as heldout_of
from auditor.reports import advice, files, phrases
from auditor.reports.before_after import BeforeAfter
from auditor.runs import training
from auditor.runs.audit import select_fingerprinted_secrets
from auditor.runs.reporter import Reporter
from auditor.runs.run import plan_audit, run_audit
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.training.variants import DataVariant

RECORD = "mitigation.json"
MODEL = "model"
DROPPED = "dropped"
_PLACEHOLDERS = ("{data}", "{out}")
_CARRIED = ("epochs", "batch", "learning_rate")  # options that methods share


@dataclass(frozen=True)
class MitigationOptions:
    """Options of `audit mitigate`.

    Args:
        run: folder of the first audit.
        by: mitigation, as NAME or NAME:VALUE.
        out: output folder.
        options: options of the mitigation, keyed by name.
        train: training command with {data} and {out}; None to repeat the recorded training.
        data: training data file; None to use the recorded file.
    """

    run: Path
    by: str
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    train: str | None = None
    data: str | None = None


@dataclass(frozen=True)
class TrainingOutcome:
    """Outcome of a training.

    Args:
        told: sentences that the training reported.
        seconds: duration of the training, even if it was done in an earlier session.
    """

    told: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Mitigation(MitigationOptions):
    """Planned mitigation of a run's model, with the options of the command.

    Args:
        plan: plan of the first audit.
        trainer: training method of the mitigation.
        recipe: arguments that repeat the recorded training. None in the lab, and None if the user
            gave a training command.
        command: words of the user's training command; () if no command was given.
    """

    plan: Plan
    trainer: Trainer
    recipe: training.TrainingRequest | None = None
    command: tuple[str, ...] = ()

    @property
    def copies_left_function(self) -> Callable[[int], int | None] | None:
        """Function from a record's number of copies to the number that the mitigation leaves.

        None if the mitigation drops no copies.
        """
        if isinstance(self.trainer, DataVariant):
            return self.trainer.count_remaining_copies
        return None

    @property
    def plan_of_second_audit(self) -> Plan:
        """Plan of the second audit: the first plan applied to the new model, without defenses."""
        plan = self.plan.with_fields(defense=(), defense_options={}, submission=None)
        if self.plan.target.uses_builtin_lab:
            return plan.with_fields(mitigation={"method": self.trainer.name, **vars(self.trainer)})
        model = self.out / MODEL
        adapter = (model / "adapter_config.json").is_file()
        # A new adapter needs the audited adapter's base model; a complete model needs no base
        # model.
        local = plan.with_fields(
            model=str(model), revision=None, base=self.plan.loading.base if adapter else None
        )
        # Keep the first audit's precision for `auto`: only the training may differ.
        return local.with_fields(
            dtype=choose_loaded_dtype(str(self.plan.target.model), self.plan.loading)
        )

    @property
    def training_records_file(self) -> str:
        """Path of the training data file of a model outside the lab."""
        if self.recipe:
            return self.recipe.data
        return self.data or str(self.plan.data.data)

    def configuration(self) -> dict[str, Any]:
        """Return the configuration to record in the output folder.

        An output folder with a different configuration is refused.
        """
        choices = {
            "run": str(self.run.resolve()),
            "by": self.by,
            "train": self.train,
        }
        # Round trip through JSON (lists for tuples), for equality with a configuration from a file.
        plain: dict[str, Any] = json.loads(
            json.dumps({**choices, "data": self.data, "options": self.options})
        )
        return plain


def plan_mitigation(request: MitigationOptions, run: RunOutcomes) -> Mitigation:
    """Plan the new training and the second audit.

    Raise AuditError for an impossible mitigation, before anything is written.

    Args:
        request: options of the command.
        run: the first audit.
    """
    plan = Plan.from_json(run.result.plan, str(request.run / "result.json"))
    _check_retrainable(plan)
    if run.result.benchmark.unasked:
        raise AuditError(
            "expected a run that asked all its records, got a check that ran out of time: audit "
            f"check --resume {shlex.quote(str(request.run))}"
        )
    name, options = _parse_mitigation(request)
    if plan.target.uses_builtin_lab:
        for flag, value in (("--train", request.train), ("--data", request.data)):
            if value is not None:
                raise AuditError(
                    f"{flag} goes with a model of your own: the lab trains by its own recipe"
                )
        trainer = Site(plan.with_fields(mitigation={"method": name, **options})).mitigation
        assert trainer is not None  # the plan names it
        return Mitigation(**vars(request), plan=plan, trainer=trainer)
    recipe = None
    if request.train is None:
        recipe = training.read_recorded_training_request(
            Path(str(plan.target.model)), request.out / MODEL
        )
        recipe = dataclasses.replace(recipe, data=request.data or recipe.data)
        kind = registry.list_mitigations()[name]
        if not issubclass(kind, DataVariant):
            for key in _CARRIED:
                if key in recipe.options and key in get_option_defaults(kind):
                    options.setdefault(key, recipe.options[key])
            recipe = dataclasses.replace(recipe, method=name, options=options)
            if kind.whole and recipe.lora:
                raise AuditError(
                    f"{name} trains a whole model, but the recipe of {plan.target.model!r} is for "
                    "an adapter"
                )
    trainer = build_plugin("mitigation", registry.list_mitigations(), name, options)
    command = () if request.train is None else _split_training_command(request.train, trainer)
    mitigation = Mitigation(
        **vars(request), plan=plan, trainer=trainer, recipe=recipe, command=command
    )
    if isinstance(trainer, DataVariant) and not (
        find_table_ending(Path(mitigation.training_records_file)) in WRITERS
        and Path(mitigation.training_records_file).is_file()
    ):
        raise AuditError(
            f"expected the records as a file of {', '.join(WRITERS)}, got "
            f"{mitigation.training_records_file!r}, which is none: --data FILE names one"
        )
    return mitigation


def _check_retrainable(plan: Plan) -> None:
    """Raise AuditError for a run whose training cannot be repeated."""
    if plan.objects:
        raise AuditError(
            "expected a run that was started by a command: this one attacked objects of a Python "
            "program"
        )
    if plan.data.forget is not None or plan.defenses.relearn is not None:
        raise AuditError(
            "expected an audit of a trained model, got one of unlearning: its records were to be "
            "forgotten"
        )
    if plan.attacks.until == DECIDED:
        raise AuditError(
            "expected a run that is repeated without a gate, got one that a gate stopped "
            f"(--until {DECIDED})"
        )
    if plan.target.mitigation:
        raise AuditError(
            "expected a run of the target, got one of a mitigated model: give the run before it"
        )
    if not plan.target.uses_builtin_lab and plan.data.data is None:
        raise AuditError(
            "expected a run on records (--data), got one on canaries only: their manifest says "
            "what to drop"
        )
    if plan.target.provider:
        raise AuditError(
            f"expected a model that can be trained, got one behind {plan.target.provider}"
        )


def _parse_mitigation(request: MitigationOptions) -> tuple[str, dict[str, Any]]:
    """Return the name of the mitigation, then its options.

    Raise AuditError for an unknown mitigation or an unexpected value.
    """
    name, colon, value = request.by.partition(":")
    known = registry.list_mitigations()
    if name not in known:
        build_plugin("mitigation", known, name, {})  # refuses it, with the nearest name
    main = known[name].main
    if colon and not (main and value):
        if main:
            takes = f"as {name}:{main.upper()}"
        else:
            takes = f"{name} without a value, because it has no main option"
        raise AuditError(f"expected --by {takes}, got {request.by}")
    options = {**({main: value} if colon else {}), **request.options}
    if "listed" in get_option_defaults(known[name]) and not {main, "listed"} & set(options):
        options["listed"] = str((request.out / DROPPED).resolve())
    return name, options


def _split_training_command(command: str, trainer: Trainer) -> tuple[str, ...]:
    """Split a user's training command into words.

    Raise AuditError if a placeholder is missing, or if the mitigation changes more than the
    training data.
    """
    if not isinstance(trainer, DataVariant):
        kinds = registry.list_mitigations()
        raise AuditError(
            f"--train COMMAND only gets other data, but {trainer.name} changes the training: "
            "expected --by "
            f"{', '.join(name for name, kind in kinds.items() if issubclass(kind, DataVariant))}"
        )
    try:
        words = tuple(shlex.split(command))
    except ValueError as why:
        raise AuditError(
            f"expected --train as a command, got one that cannot be read: {why}"
        ) from None
    for placeholder in _PLACEHOLDERS:
        if not any(placeholder in word for word in words):
            raise AuditError(
                f"expected --train with {' and '.join(_PLACEHOLDERS)} in it, got no {placeholder}"
            )
    return words


def audit_mitigated_model(
    mitigation: Mitigation, run: RunOutcomes, reporter: Reporter, command: str
) -> TrainingOutcome:
    """Train and audit the mitigated model, without repeating finished steps.

    Partial output is removed if AuditError is raised.

    Args:
        mitigation: the planned mitigation.
        run: the first audit.
        reporter: receiver of progress messages.
        command: the command line, which the second audit records.
    """
    # Share a cache: the audit attacks the model that the lab trains now.
    shared = SweepCache()
    out = mitigation.out
    with reporter.stage(f"train by {mitigation.trainer.name}"):
        outcome = train_mitigated_model(mitigation, run, reporter, shared)
    if (out / result_file.RESULT).is_file():
        return outcome
    plan = mitigation.plan_of_second_audit.with_fields(command=command)
    if (out / attacked_secrets.PLAN).is_file():
        folder = RunFolder.reopen(out)
        plan = Plan.from_json(folder.plan())
    else:
        folder = RunFolder.create(out, plan.run_folder_title, plan.to_json())
        if (form := RunFolder(mitigation.run).text_form()) is not None:
            # Render the same secrets in the same way, even on a different day.
            folder.save_text_form(form)
    try:
        planned = plan_audit(Site(plan, reporter, shared))
        files.write_run_reports(out, run_audit(planned, folder))
    except (AuditError, OSError):
        folder.discard_if_empty()
        raise
    finally:
        folder.close()
    return outcome


def compare_mitigated_run(
    mitigation: Mitigation, run: RunOutcomes, after: RunOutcomes, outcome: TrainingOutcome
) -> BeforeAfter:
    """Compare the runs before and after the mitigation.

    Raise AuditError if they are not comparable.

    Args:
        mitigation: the planned mitigation.
        run: the first audit.
        after: the second audit.
        outcome: outcome of the training between them.
    """
    count_remaining = mitigation.copies_left_function
    prediction = count_remaining and advice.predict_undefended_recall(
        phrases.make_result_printable(run.result),
        secret_details.read_secret_details(mitigation.run),
        count_remaining,
    )
    method = mitigation.by
    for name, value in mitigation.options.items():
        method += f" -D {name}={value}"
    return BeforeAfter(
        method=method,
        compared=compare_finished_runs([run, after]),
        result_before=run.result,
        result_after=after.result,
        predicted=(prediction[0].cell_key, prediction[1]) if prediction else None,
        perplexity=_measure_perplexity_change(
            mitigation.run, run.result, mitigation.out, after.result
        ),
        training_remarks=outcome.told,
        seconds=outcome.seconds,
    )


def _measure_perplexity_change(
    first: Path, before: AuditResult, second: Path, after: AuditResult
) -> Measurement | None:
    """Return the perplexity after the mitigation minus that before, paired by held-out text.

    Return None if a run stored no losses of the texts.

    Args:
        first: folder of the first audit.
        before: its result.
        second: folder of the second audit.
        after: its result.
    """
    parts = []
    for sign, place, result in ((1.0, second, after), (-1.0, first, before)):
        measured = result.target(UNDEFENDED).perplexity
        if measured is None:
            return None
        losses = heldout_of(place).get(UNDEFENDED)
        losses_by_seed = {} if losses is None else {0: losses}
        by_seed = {0: {measured.name: measured}}
        cell = Replicates(UNDEFENDED, "", "", measured=by_seed, heldout=losses_by_seed)
        parts.append(WeightedMetric(sign, measured.name, cell))
    return measure_seed_contrast(f"{parts[0].metric}_difference", parts)


# --- the training ---


def train_mitigated_model(
    mitigation: Mitigation, run: RunOutcomes, reporter: Reporter, shared: SweepCache
) -> TrainingOutcome:
    """Train the model in a locked folder, unless the folder already holds the trained model.

    Raise AuditError for the folder of a different mitigation, or if the training refuses its input.
    In the latter case, partial output is removed.
    """
    out = mitigation.out
    configuration = mitigation.configuration()
    earlier_record = training.read_matching_record(
        out, RECORD, configuration, "belongs to another mitigation"
    )
    if earlier_record is not None and (finished := earlier_record.get("done")):
        return TrainingOutcome(tuple(finished["told"]), float(finished["seconds"]))
    # Write the record first: an interrupted training recognises its folder by it.
    write_json(out / RECORD, {"configuration": configuration, "done": None})
    start = time.perf_counter()
    try:
        _refuse_changed_records(mitigation, run, reporter)
        _write_dropped_records(mitigation, run, reporter, shared)
        if mitigation.plan.target.uses_builtin_lab:
            site = Site(mitigation.plan_of_second_audit, reporter, shared)
            folder = Path(site.model_place)
            privacy = read_privacy_record(folder)
            messages = privacy.notes() if privacy else read_training_summary(folder).told
            seconds = site.lab.parts.seconds[folder.name]
        else:
            messages = _train_own_model(mitigation, reporter)
            seconds = time.perf_counter() - start
    except AuditError:
        _discard_refused_training(out)
        raise
    outcome = TrainingOutcome(messages, seconds)
    write_json(out / RECORD, {"configuration": configuration, "done": outcome}, sync=True)
    return outcome


def _refuse_changed_records(mitigation: Mitigation, run: RunOutcomes, reporter: Reporter) -> None:
    """Raise AuditError if the files no longer hold the secrets that the first audit attacked.

    The second audit could then not be compared, and row numbers would name other records.
    """
    recorded = run.result.benchmark.digest
    if mitigation.plan.target.uses_builtin_lab or not recorded:
        return
    plan = mitigation.plan.with_fields(defense=(), defense_options={}, submission=None)
    site = plan_audit(Site(plan, reporter)).site
    site.folder = RunFolder(mitigation.run)  # it holds the text form
    if digest_comparable_secrets(select_fingerprinted_secrets(site)) != recorded:
        raise AuditError(
            f"expected the records that {run.name} attacked, but the data has changed since: audit "
            "the model again"
        )


def _discard_refused_training(out: Path) -> None:
    """Remove the files of a refused training, but keep a partly trained model to continue later."""
    model = out / MODEL
    if model.is_dir() and any(model.iterdir()):
        return
    for path in (*out.glob("data.*"), out / DROPPED / SHARD, out / RECORD):
        path.unlink(missing_ok=True)
    for folder in (model, out / DROPPED):
        if folder.is_dir():
            folder.rmdir()


def _train_own_model(mitigation: Mitigation, reporter: Reporter) -> tuple[str, ...]:
    """Train a user's model on the mitigated records, and return sentences for the user.

    Raise AuditError if the model was not trained on these records, or if the command makes no
    model.
    """
    out = mitigation.out / MODEL
    recipe = mitigation.recipe
    if recipe is not None:
        training.check_same_training_records(Path(str(mitigation.plan.target.model)), recipe)
    messages = tuple[str, ...]()
    data = mitigation.training_records_file
    if isinstance(mitigation.trainer, DataVariant):
        column = recipe.text_column if recipe else None
        reduced = mitigation.out / f"data{find_table_ending(Path(data))}"
        messages = (write_kept_data(mitigation.trainer, data, reduced, column),)
        data = str(reduced)
    if recipe is not None:
        return (
            *messages,
            *training.train_model_into_folder(
                dataclasses.replace(recipe, data=data, out=out), reporter.progress
            ),
        )
    _run_training_command(mitigation.command, data, out)
    return messages


def _run_training_command(command: Sequence[str], data: str, out: Path) -> None:
    """Run the user's training command. Its output goes to stderr.

    Args:
        command: words of the command, with the placeholders {data} and {out}.
        data: path that replaces {data}.
        out: path that replaces {out}.
    """
    values = {"{data}": str(Path(data).resolve()), "{out}": str(out.resolve())}
    words = list(command)
    for placeholder, value in values.items():
        # Replace word by word, without a shell: a path with spaces stays one argument.
        words = [word.replace(placeholder, value) for word in words]
    out.mkdir(exist_ok=True, mode=0o700)
    try:
        code = subprocess.run(words, stdout=2, check=False).returncode
    except OSError as error:
        raise AuditError(f"--train cannot be run: {words[0]!r}: {error.strerror}") from None
    if code:
        raise AuditError(
            f"--train ended with exit code {code}: nothing was audited; the same command tries "
            "again"
        )
    if not any((out / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise AuditError(f"expected a model in {str(out)!r} ({{out}}) after --train, got none")


# --- the records ---


def _write_dropped_records(
    mitigation: Mitigation, run: RunOutcomes, reporter: Reporter, shared: SweepCache
) -> None:
    """Write a file of the extracted records, which the new training drops.

    Write nothing if the user gave a list of records to drop.
    """
    if getattr(mitigation.trainer, "listed", "") != str((mitigation.out / DROPPED).resolve()):
        return
    ids = list_extracted_members(run)
    if not ids:
        raise AuditError(
            f"{run.name} extracted nothing from the undefended model: no record needs to be dropped"
        )
    if mitigation.plan.target.uses_builtin_lab:
        texts_by_id = Site(mitigation.plan, reporter, shared).lab.whole_texts
        texts = [texts_by_id[id] for id in ids]
    else:
        _, rows = read_training_rows(str(mitigation.plan.data.data))
        # Ids (`row-ROW`, `row-ROW-PART`) name rows of the file.
        texts = []
        for id in ids:
            texts.append(format_data_row(rows[int(id.split("-")[1])]))
    write_shard_record_list(mitigation.out / DROPPED, texts)


def list_extracted_members(run: RunOutcomes) -> list[str]:
    """Return the ids of members that any attack extracted verbatim from the undefended model.

    Only the first guess of an attack counts.
    """
    ids = dict[str, None]()
    for cell, row in run.outcomes.items():
        if cell.target == UNDEFENDED and row.is_judged:
            ids |= dict.fromkeys(compress(row.ids, row.hit & row.member))
    return list(ids)
