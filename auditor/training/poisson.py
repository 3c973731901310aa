"""Fine-tune in Poisson batches, one example per privacy unit: the base of private trainings.

It is also the base of trainings without noise, which serve as controls. The module defines their
options, checks and `privacy.json`, both as trainers and as defenses. The loop is in
`auditor/training/dp_loop.py`. Subclasses define noise, clipping and promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from auditor.core import disk
from auditor.core.arrays import Ints
from auditor.core.errors import AuditError
from auditor.core.nouns import Claim, Tokens
from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import Count, CountOrZero
from auditor.plugins.trainer import Trainer, TrainingJob
from auditor.privacy import gradient_canaries
from auditor.privacy.gaussian import MOST_STEPS
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import (
    CANARIES,
    PrivacyRecord,
    read_privacy_record,
    write_privacy_record,
)
from auditor.training import loss_masks
from auditor.training.finetune import Epochs, LearningRate, refuse_trained_model

if TYPE_CHECKING:
    from auditor.training.dp_loop import PrivateModel
    from auditor.training.gradient_canaries import CanaryWatch


@dataclass(frozen=True)
class UnitTreatment:
    """Clipping and noise that a training chooses for each privacy unit.

    Attributes:
        shares: for each unit, a fraction of the clipping norm; None means 1.
        noise_scale: maps the units of a batch to the factor on its noise; None means 1.
        details: (name, value) pairs for `privacy.json`.
    """

    shares: Sequence[float] | None = None
    noise_scale: Callable[[Ints], float] | None = None
    details: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class MechanismTerms:
    """Parameters of a training's mechanism, from which its promise is computed.

    Attributes:
        sigma: noise multiplier; 0 for no noise.
        clip: C, the clipping norm; inf for no clipping.
        rate: sampling rate q of the `units` units.
        units: number of units.
        steps: number of planned steps.
        delta: delta of the promise.
        base: promise of the base model.
    """

    sigma: float
    clip: float
    rate: float
    steps: int
    units: int
    delta: float = 0.0
    base: PrivacyRecord | None = None


@dataclass(frozen=True)
class PoissonTraining(Defense, Trainer):
    """Base class of trainings that put each privacy unit into each batch independently.

    Each such training is a trainer and a defense.

    Attributes:
        batch: expected number of units in a batch.
        unit: what is sampled: a record, or all records of a user as one sequence.
        units: public number of units, from which the sampling rate follows; 0 means the number in
            the data.
        ghost: whether to keep only one record's gradient in memory at a time.
        physical_batch: number of sequences in one forward pass.
        model: folder with a model trained this way, for `audit run` outside the lab.
        gradient_canaries: number of planted units, each included by a coin; `gradient-audit` checks
            the claim with them. A model with canaries is for an audit, not for release.
    """

    needs = ("trained",)
    later: ClassVar[frozenset[str]] = frozenset({"gradient_canaries"})
    surrounds = True
    epochs: Epochs = 3
    batch: Count = 256
    learning_rate: LearningRate = 2e-4
    optimizer: Literal["adam", "sgd"] = "adam"
    sampling: Literal["poisson", "shuffled"] = "poisson"
    unit: Literal["record", "user"] = "record"
    units: CountOrZero = 0
    ghost: bool = False
    physical_batch: Count = 16
    model: str = ""
    gradient_canaries: CountOrZero = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_canaries and self.model:
            raise AuditError(
                "expected gradient_canaries or model=, got both: gradient canaries are planted in "
                "a training, and model= names a trained model"
            )
        if self.sampling != "poisson":
            raise AuditError(
                "expected sampling=poisson, got shuffled: epsilon is accounted for Poisson "
                "sampling, and does not hold for shuffled batches"
            )

    # --- as a trainer ---

    def choose_unit_treatment(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        """Return the clipping and the noise of each unit; by default, all units are alike."""
        return UnitTreatment()

    @property
    def control_clipping_norm(self) -> float:
        """C, the clipping norm of a control; inf for no clipping."""
        return math.inf

    def compute_mechanism_terms(self, job: TrainingJob, units: int) -> MechanismTerms:
        """Return the mechanism's noise, clipping, rate and steps for this number of units.

        By default, there is no noise.
        """
        return MechanismTerms(
            sigma=0.0,
            clip=self.control_clipping_norm,
            # Poisson sampling: each unit is in a batch with this chance.
            rate=self.batch / units,
            steps=self.count_planned_steps(units),
            units=units,
        )

    def make_privacy_record(
        self, trained: PrivateModel, treatment: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        """Return the promise that the finished training makes; by default, none.

        `treatment` is the clipping and noise of each unit; `terms` are the mechanism's parameters.
        """
        return PrivacyRecord(
            method=self.name,
            epsilon=None,
            delta=terms.delta,
            status="no guarantee: trained without noise, as a control of private training",
            noise_multiplier=terms.sigma,
            clip=terms.clip,
            sampling_rate=terms.rate,
            steps=trained.steps,
            unit=self.unit,
            noise="none",
            accountant="none",
            units=terms.units,
            units_given=self.units > 0,
            optimizer=self.optimizer,
            details={**self.collect_recipe_details(), **dict(treatment.details)},
        )

    def derive_randomness_key(self, job: TrainingJob) -> str:
        """Return the key of batches and noise, which is secret if the training makes a promise."""
        raise NotImplementedError

    def make_private_training_progress(
        self,
        job: TrainingJob,
        terms: MechanismTerms,
    ) -> Callable[[int, float], None]:
        """Return a callback(steps done, loss) that shows progress."""
        return lambda n_steps, loss: job.progress(
            f"training, loss {loss:.3f}",
            n_steps,
            terms.steps,
        )

    def count_planned_steps(self, units: int) -> int:
        return math.ceil(self.epochs * units / self.batch)

    def check(self, job: TrainingJob) -> None:
        _require_dp_packages()
        refuse_trained_model(self.name, self.model)
        dtype = job.public.model.dtype
        if dtype != torch.float32:
            raise AuditError(f"expected --dtype float32: noise rounded to {dtype} is not Gaussian")
        if self.unit == "user" and not job.users:
            raise AuditError(
                "expected data with a user for each record for unit=user (audit train "
                "--user-column), got records without a user: a claim for users would be about "
                "records"
            )
        n_units = len(job.records)
        if self.unit == "user":
            n_units = len({record.unit for record in job.records})
        scope = "of the data"
        if self.units:
            n_units = self.units
            scope = "of units"
        if self.batch > n_units:
            raise AuditError(
                f"expected a batch of at most the {n_units} {self.unit}s {scope}, got {self.batch}",
            )
        examples, _ = _collect_unit_sequences(job, self.unit)
        if not loss_masks.has_learnt_tokens(examples, slice(1, None)):
            raise AuditError(
                f"expected --block to reach an answer, got {job.block} tokens, of which none has a "
                "loss"
            )
        n_steps = self.count_planned_steps(n_units)
        if n_steps > MOST_STEPS:
            raise AuditError(
                f"expected at most {MOST_STEPS:,} steps, got {n_steps:,}: lower epochs",
            )

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        # Imported here because they need the `dp` extra, which using a trained model does not.
        from auditor.training import dp_loop as loops
        from auditor.training.gradient_canaries import PlantedCanaries

        examples, n_cut = _collect_unit_sequences(job, self.unit)
        finished = read_privacy_record(job.out)
        if finished is not None:  # written last: only the notes were missing
            return _write_privacy_notes(finished, n_cut, len(examples))
        terms = self.compute_mechanism_terms(job, self.units or len(examples))
        model = job.load()
        treatment = self.choose_unit_treatment(job, examples)
        # Canaries are units too, numbered after the examples.
        n_units = len(examples) + self.gradient_canaries
        trained = loops.fit_privately(
            model,
            examples,
            loops.PoissonSampler(n_units, terms.rate, self.derive_randomness_key(job)),
            loops.PrivateRecipe(
                noise_multiplier=terms.sigma,
                clip=terms.clip,
                steps=terms.steps,
                expected_batch=self.batch,
                learning_rate=self.learning_rate,
                optimizer=self.optimizer,
                physical_batch=self.physical_batch,
                ghost=self.ghost,
            ),
            pad=job.end,
            shares=treatment.shares,
            noise_scale=treatment.noise_scale,
            canaries=PlantedCanaries(self.gradient_canaries, job.seed),
            progress=self.make_private_training_progress(job, terms),
            checkpoint=job.checkpoint,
        )
        record = self.make_privacy_record(trained, treatment, terms)
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        if self.gradient_canaries:
            canaries = self._collect_canaries(trained.watch, terms, record.steps, job.seed)
            gradient_canaries.write_gradient_canaries(job.out, canaries)
        # The record comes after everything else is on disk: if it exists, the training is done.
        disk.fsync_tree(job.out)
        write_privacy_record(job.out, record)
        return _write_privacy_notes(record, n_cut, len(examples))

    def _collect_canaries(
        self,
        watch: CanaryWatch,
        terms: MechanismTerms,
        steps: int,
        seed: int,
    ) -> GradientCanaries:
        n_values, size, largest_correlation = watch.measure_noise()
        return GradientCanaries(
            included=tuple(watch.included.tolist()),
            scores=tuple(watch.scores.tolist()),
            sums=tuple(watch.sums.tolist()),
            noise_multiplier=terms.sigma,
            sampling_rate=terms.rate,
            steps=steps,
            clip=terms.clip,
            delta=terms.delta,
            unit=self.unit,
            releases=watch.releases,
            drawn=int(watch.drawn.sum()),
            unevenness=watch.draw_unevenness_z,
            noise_values=n_values,
            noise_size=size,
            noise_repeated=largest_correlation,
            seed=seed,
        )

    def collect_recipe_details(self) -> dict[str, float]:
        """Return the training's settings for `privacy.json`, keyed by name.

        A control must have the same settings.
        """
        details = {"expected_batch": float(self.batch), "learning_rate": self.learning_rate}
        if self.gradient_canaries:
            details[CANARIES] = float(self.gradient_canaries)
        return details

    # --- as a defense ---

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.trained is not None
        return scenario.trained.model

    def claim(self, scenario: Scenario, n_tokens: int) -> Claim | None:
        if scenario.trained is None or scenario.trained.privacy is None:
            return None
        return scenario.trained.privacy.claim()


@dataclass(frozen=True)
class NonPrivateControl(PoissonTraining):
    """Base class of trainings without noise, which are controls of a private training.

    They promise nothing, so the seed may determine the batches: controls with the same seed have
    the same batches.
    """

    claims = "none: the control of private training"

    def derive_randomness_key(self, job: TrainingJob) -> str:
        return f"control {job.seed}"


def _collect_unit_sequences(job: TrainingJob, unit: str) -> tuple[list[Tokens], int]:
    """Return one sequence per privacy unit, cut to the block length, and the number of cuts.

    `unit` is "record" or "user". An end-of-text token precedes a unit's first record and follows
    each of its records.
    """
    sequences: dict[str, list[int]] = {}
    for i, record in enumerate(job.records):
        key = record.unit if unit == "user" else str(i)
        sequence = sequences.setdefault(key, [job.end])
        sequence += (*loss_masks.apply_loss_mask(record), job.end)
    n_cut = sum(len(ids) > job.block for ids in sequences.values())
    return [tuple(ids[: job.block]) for ids in sequences.values()], n_cut


def _write_privacy_notes(record: PrivacyRecord, n_cut: int, n_sequences: int) -> tuple[str, ...]:
    """Return sentences about this training that a user must know."""
    notes = list(record.notes())
    if record.epsilon is not None:
        notes += [
            f"ε {record.epsilon:.3f} at δ {record.delta:g}, {record.adjacency} "
            f"({record.accountant}; by RDP {record.epsilon_rdp:.3f}): σ "
            f"{record.noise_multiplier:.3f}, C {record.clip:g}, q {record.sampling_rate:.4g}, "
            f"{record.steps:,} steps",
            record.status,
        ]
    n_units = record.units or n_sequences
    # Publishing one of n units, drawn at random, is (0, 1 / n)-DP.
    if record.delta * n_units >= 1:
        notes.append(
            f"δ {record.delta:g} is no smaller than one in {n_units:,} units: a mechanism with "
            "this δ may publish a whole unit"
        )
    if n_cut:
        notes.append(
            f"{n_cut:,} of {n_sequences:,} sequences were longer than --block and were cut",
        )
    return tuple(notes)


def _require_dp_packages() -> None:
    try:
        import cryptography
        import dp_accounting
        import opacus
    except ImportError as error:
        raise AuditError(f"private training needs {error.name}: install audit-lm[dp]") from None
    del cryptography, dp_accounting, opacus
