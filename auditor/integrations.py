"""Measure memorisation during training: cheap exact probes of fixed records, in the trainer's log.

    from auditor.integrations import AuditCallback

    trainer.add_callback(
        AuditCallback(trainer, data="private.jsonl", nonmembers="fresh.jsonl", every=50)
    )

The callback leaves the model's weights, modes and gradients and all random numbers unchanged.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from auditor import api
from auditor.attacks.exposure import Exposure
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.plan_parts import SYSTEM
from auditor.core.secret_table import select_members
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.probe import Probe, mask_members, order_observations, value_column
from auditor.plugins.view import WHITE_BOX, View
from auditor.records.folder import refuse_started_run
from auditor.reports import phrases
from auditor.reports.blocks import PlotPoint, Series
from auditor.reports.training_curve import Panel, draw_training_curve
from auditor.runs.live_models import name_live_model, restore_training_state
from auditor.runs.prefix_token import resolve_prefix_token, wrap_prefixed_model
from auditor.training import preflight

PREFIX = "audit/"  # of logged names
# Exposure among up to so many texts is exact during training, otherwise estimated, as an exact rank
# among 10^6 texts takes ten times as long. At the end it is exact.
_ENUMERATE = 10_000
MEMBERS = "extraction_probability"
OTHERS = "extraction_probability_nonmembers"
LOSS = "loss_members"
LOSS_OTHERS = "loss_nonmembers"
EXPOSURE = "exposure"
LOGGED = (MEMBERS, OTHERS, LOSS, LOSS_OTHERS, EXPOSURE)
NOT_CHECKED = (
    "whether the records are in the training set was not checked: it is streamed, or its rows "
    "contain no token ids (input_ids, or TRL's prompt_ids with completion_ids, chosen_ids or "
    "rejected_ids)"
)
_PANELS = (
    ("Probability that one sample is the suffix", (MEMBERS, OTHERS)),
    ("Loss of the suffix, nats a token", (LOSS, LOSS_OTHERS)),
    ("Exposure of canaries, bits", (EXPOSURE,)),
)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class StopLimit:
    """Condition on a measured value that ends the training.

    Args:
        name: name of the value.
        sign: ">", ">=", "<" or "<=".
        number: number that the value must pass.
    """

    name: str
    sign: str
    number: float

    @classmethod
    def parse_sentence(cls, text: str) -> StopLimit:
        """Parse a sentence such as `extraction_probability > 0.01`.

        Raise AuditError if the text has any other form.
        """
        match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+.0-9e]+)\s*", text)
        try:
            number = float(match[3]) if match else math.nan
        except ValueError:
            number = math.nan
        if match is None or match[1] not in LOGGED or not math.isfinite(number):
            raise AuditError(
                "expected stop_at as NAME > NUMBER (or >=, <, <=) with one of "
                f"{', '.join(LOGGED)}, got {text!r}"
            )
        return cls(match[1], match[2], number)

    def is_reached_by(self, values: Mapping[str, float]) -> bool:
        return self.name in values and _COMPARE[self.sign](values[self.name], self.number)


class AuditCallback(TrainerCallback):
    """Callback for transformers' and TRL's `Trainer` that measures memorisation during training.

    Args:
        trainer: trainer that runs this callback and logs its values.
        data: as for `auditor.audit`, like all further plan fields (prefix_length=, knows=, ...).
        nonmembers: as for `auditor.audit`.
        canaries: as for `auditor.audit`.
        limit: number of records of each kind to measure. They are the same records at every step.
        tokenizer: by default the trainer's.
        every: number of steps between measurements; the first one is before the first step.
        stop_at: a sentence such as "extraction_probability > 0.01". If a measurement satisfies it,
            the training ends and is saved.
        out: run folder of the audit at the end, by default `audit` in the output folder. The folder
            also contains the curve.

    The values are logged as `audit/NAME`. Two values are logged for members and, as a baseline, for
    non-members: the mean exact probability that a sample is the record's suffix, and the suffix
    loss in nats per token. For inserted canaries, the value is the mean exposure in bits, estimated
    among more than 10,000 possible texts.

    Under DDP, process 0 measures and the others wait. Before the first step, raise AuditError for
    FSDP and DeepSpeed, because no process has all weights. Also raise AuditError if members are
    missing from the training set, if non-members are in it, or if the attacked tokens are masked in
    the loss (`preflight`).
    """

    def __init__(
        self,
        trainer: Any,
        *,
        data: Any,
        nonmembers: Any = None,
        canaries: str | Path | None = None,
        tokenizer: Any = None,
        every: int = 100,
        limit: int = 200,
        stop_at: str = "",
        out: str | Path | None = None,
        **plan: Any,
    ) -> None:
        if every < 1:
            raise AuditError(f"expected every >= 1, got {every}")
        for name in ("fsdp", "deepspeed"):
            if getattr(trainer, f"is_{name}_enabled", False):
                raise AuditError(
                    f"expected a whole model in one process, got {name}, which shards it: audit "
                    "a checkpoint"
                )
        self.trainer = trainer
        self.every = every
        self.out = out
        # transformers 5 calls a Trainer's tokenizer processing_class.
        if tokenizer is not None:
            self.tokenizer = tokenizer
        else:
            self.tokenizer = getattr(trainer, "processing_class", None)
        self.limit = StopLimit.parse_sentence(stop_at) if stop_at else None
        # No attack is tuned on known pairs here.
        self.asked = {"known_fraction": 0.0, "data": data, "limit": limit, **plan}
        for name, value in (("nonmembers", nonmembers), ("canaries", canaries)):
            if value is not None:
                self.asked[name] = value
        self.probes: tuple[Probe, ...] = (
            ExtractionProbability(),
            *([Exposure()] if canaries is not None else []),
        )
        self.notes: tuple[str, ...] = ()
        self.rows: list[dict[str, float]] = []
        self.stopped_at: int | None = None

    # --- calls of the trainer ---

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.limit is not None and args.world_size > 1:
            raise AuditError(
                f"expected training in one process with stop_at, got {args.world_size}: the "
                "other processes would continue"
            )
        if not state.is_world_process_zero:
            return
        refuse_started_run(self._find_run_folder(args))  # before the training, not after it
        _refuse_canaries_of_frozen_embeddings(
            self._unwrapped_model_in_training(), self.asked.get("canaries")
        )
        # Nothing is run in this block: it cuts the records as the final audit will, and restores
        # the model.
        with api.open_prepared_audit(
            self._unwrapped_model_in_training(), self.tokenizer, attacks=self.probes, **self.asked
        ) as site:
            benchmark = site.benchmark
            plan = site.plan.data
            self.secrets = benchmark.secrets
            self.canaries = benchmark.canaries
            self.prefix_token = resolve_prefix_token(
                plan.prefix_token,
                site.model,
                framed=benchmark.framed,
                as_trained=benchmark.as_trained,
            )
            if (
                form := benchmark.text_form
            ) is not None:  # the curve and the final run use the same one
                self.asked |= {
                    "template": form.template,
                    **({"date": form.day} if form.day else {}),
                }
        self._check_training_set(args, plan.knows == SYSTEM)
        self._measure_and_log(state.global_step)

    def _find_run_folder(self, args: TrainingArguments) -> Path:
        if self.out is not None:
            return Path(self.out)
        return Path(str(args.output_dir)) / "audit"

    def _check_training_set(self, args: TrainingArguments, knows_system: bool) -> None:
        """Check whether the training set holds the records. Raise AuditError if it does not.

        `knows_system` says whether the attacker has only the system turn of a conversation.
        """
        cut = getattr(args, "max_length", None)
        mode = getattr(args, "truncation_mode", "keep_start")
        # TRL's SFTTrainer says whether it reads a completion_mask.
        completion_only = getattr(self.trainer, "completion_only_loss", True)
        training = preflight.read_training_set(
            self.trainer.train_dataset,
            cut,
            mode == "keep_end",
            completion_only=completion_only,
            learns_prompts=type(args).__name__ == "ORPOConfig",
        )
        sought = self.secrets
        if knows_system:
            # Text between the system turn and an answer is not part of such a secret.
            sought = tuple(replace(secret, prefix=()) for secret in sought if secret.member)
        if training is None:
            self.notes = (NOT_CHECKED,)
            logging.getLogger(__name__).warning("audit: %s", NOT_CHECKED)
        else:
            self.notes = preflight.describe_secret_coverage(training, sought)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if state.is_world_process_zero and state.global_step % self.every == 0:
            values = self._measure_and_log(state.global_step)
            if self.limit is not None and self.limit.is_reached_by(values):
                self.stopped_at = state.global_step
                control.should_training_stop = control.should_save = True
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        # With load_best_model_at_end, the best weights have been restored by now: the audit is
        # about these, not about those of the last step.
        if not self.rows or self.rows[-1]["step"] != state.global_step:
            self._measure_and_log(state.global_step)
        out = self._find_run_folder(args)
        tokens = list(self.prefix_token.tokens)  # as for the curve, whatever the user requested
        tokenizer: Any = self.tokenizer
        if tokens:
            prefix_name = str(tokenizer.decode(tokens, skip_special_tokens=False))
        else:
            prefix_name = "none"
        plan = {**self.asked, "prefix_token": prefix_name}
        self.run = api.audit(
            self._unwrapped_model_in_training(),
            self.tokenizer,
            attacks=self.probes,
            out=out,
            **plan,
        )
        disk.replace_atomically(out / "curve.csv", self.to_csv())
        panels = []
        for title, names in _PANELS:
            if lines := list(filter(None, map(self._curve_of_logged_value, names))):
                panels.append(Panel(title, tuple(lines)))
        disk.replace_atomically(out / "curve.svg", draw_training_curve(panels, self.stopped_at))

    # --- results for the user ---

    def to_csv(self) -> str:
        """Return the logged values as CSV, with one row per measurement and its `step`."""
        text = io.StringIO()
        names = ["step", *(name for name in LOGGED if any(name in row for row in self.rows))]
        writer = csv.DictWriter(text, names, restval="")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def _curve_of_logged_value(self, name: str) -> Series | None:
        points = []
        for row in self.rows:
            if name in row:
                # No interval, because these are exact means over a fixed set of records.
                points.append(PlotPoint(row["step"], row[name]))
        if points:
            return Series(phrases.format_metric(name), points)
        return None

    def _measure_and_log(self, step: int) -> dict[str, float]:
        """Measure the model, log and store the values, and return them keyed by name."""
        model = self._unwrapped_model_in_training()
        # fork_rng covers the CPU and every CUDA device, so measuring does not affect dropout and
        # data order.
        with restore_training_state(model), torch.random.fork_rng(), torch.no_grad():
            target = wrap_prefixed_model(
                HuggingFaceModel(model, self.tokenizer, name_live_model(model)),
                self.prefix_token.tokens,
            )
            values = dict(self._measure_mean_suffixes(target))
            if self.canaries:
                values[EXPOSURE] = self._measure_mean_exposure(target)
        self.rows.append({"step": step, **values})
        # transformers' on_log clears should_log, so the training loss of this step would never be
        # logged.
        log_is_due = self.trainer.control.should_log
        # Not the trainer's own `log`: TRL's version adds its collected metrics to any log entry and
        # then drops them.
        Trainer.log(self.trainer, {f"{PREFIX}{name}": value for name, value in values.items()})
        self.trainer.control.should_log = log_is_due
        return values

    def _measure_mean_suffixes(self, target: LanguageModel) -> dict[str, float]:
        observations = order_observations(
            self.probes[0], self._white_box_view(target), self.secrets
        )
        # Arrays are (secrets,). log_p is under the attacked decoding; log_p_ancestral is under the
        # plain softmax, like a loss.
        member = mask_members(self.secrets)
        log_p = value_column(observations, "log_p")
        # Nats per token: the sum over each suffix divided by its length.
        loss = -value_column(observations, "log_p_ancestral") / [
            len(secret.suffix) for secret in self.secrets
        ]
        values = {MEMBERS: float(np.exp(log_p[member]).mean()), LOSS: float(loss[member].mean())}
        if not member.all():
            values |= {
                OTHERS: float(np.exp(log_p[~member]).mean()),
                LOSS_OTHERS: float(loss[~member].mean()),
            }
        return values

    def _measure_mean_exposure(self, target: LanguageModel) -> float:
        inserted = select_members(self.canaries)
        probe = Exposure(enumerate=_ENUMERATE)
        observations = order_observations(probe, self._white_box_view(target), inserted)
        return float(value_column(observations, "exposure_bits").mean())

    def _white_box_view(self, target: LanguageModel) -> View:
        return View(
            "training",
            target,
            WHITE_BOX,
            seed=int(self.asked.get("seed", 0)),
            tokenizer=self.tokenizer,
        )

    def _unwrapped_model_in_training(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)


def _refuse_canaries_of_frozen_embeddings(model: Any, canaries: Any) -> None:
    """Raise AuditError for canaries with new tokens if the model's embeddings are frozen."""
    if canaries is None:
        manifest = None
    else:
        manifest = manifests.read_canary_manifest(Path(canaries))
    # A token whose embedding keeps its random initial value is hardly learnt, so the audit would
    # miss leaks.
    frozen = not model.get_input_embeddings().weight.requires_grad
    if isinstance(manifest, AuditCanaryManifest) and manifest.kind == "new-tokens" and frozen:
        raise AuditError(
            "expected embeddings that are trained, for canaries of new tokens, got frozen ones"
        )
