"""Fine-tuning one example a unit in Poisson batches: what private ways of training and their controls share.

Options, checks, `privacy.json`; as trainers and as defenses. The loop is `auditor/training/dp_loop.py`. Knows nothing
of noise, clipping and what they promise: a subclass says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Claim, Tokens
from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.trainer import Trainer, TrainingJob
from auditor.privacy import gradient_canaries
from auditor.privacy.gaussian import MOST_STEPS
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import CANARIES, PrivacyRecord, read_privacy_record, write_privacy_record
from auditor.training import loss_masks
from auditor.training.finetune import check_epochs_and_learning_rate

if TYPE_CHECKING:
    from auditor.training.dp_loop import PrivateModel
    from auditor.training.gradient_canaries import CanaryWatch


@dataclass(frozen=True)
class UnitTreatment:
    """How each unit is treated. shares: of the clipping norm; noise_scale: of a batch, by its units; None: all 1."""

    shares: Sequence[float] | None = None
    noise_scale: Callable[[NDArray[np.int64]], float] | None = None
    details: tuple[tuple[str, float], ...] = ()  # for `privacy.json`


@dataclass(frozen=True)
class MechanismTerms:
    """The mechanism: sigma (0: none), C (inf: none), sampling rate q, planned steps, delta; how many units q is of.

    base: what the base promised.
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
    """Base of trainings that draw each unit into each batch independently, each of which is a defense too.

    batch: the expected one. physical_batch: sequences at once. unit: what is drawn; a `user`'s records make one
    sequence. units: how many there are, as far as the public may know: the sampling rate follows from it (0: as many as
    the data have). ghost: one record's gradient at a time in memory. model: a folder that was trained so, for
    `audit run` outside the lab. gradient_canaries: so many units are planted, each in the data or out by a coin, by
    which `gradient-audit` holds the training to its claim: a model to audit, not to ship.
    """

    needs: ClassVar[tuple[str, ...]] = ("trained",)
    later: ClassVar[frozenset[str]] = frozenset({"gradient_canaries"})
    epochs: int = 3
    batch: int = 256
    learning_rate: float = 2e-4
    optimizer: Literal["adam", "sgd"] = "adam"
    sampling: Literal["poisson", "shuffled"] = "poisson"
    unit: Literal["record", "user"] = "record"
    units: int = 0
    ghost: bool = False
    physical_batch: int = 16
    model: str = ""
    gradient_canaries: int = 0

    def __post_init__(self) -> None:
        for option in ("batch", "physical_batch"):
            if getattr(self, option) < 1:
                raise AuditError(f"expected {option} >= 1, got {getattr(self, option)}")
        check_epochs_and_learning_rate(self.epochs, self.learning_rate)
        if self.gradient_canaries < 0:
            raise AuditError(f"expected gradient_canaries >= 0, got {self.gradient_canaries}")
        if self.gradient_canaries and self.model:
            raise AuditError("gradient_canaries are planted by a training, and model= names one that is done")
        if self.units < 0:
            raise AuditError(f"expected units >= 0 (0: as many as the data have), got {self.units}")
        if self.sampling != "poisson":
            raise AuditError(
                "expected sampling=poisson, got shuffled: epsilon is accounted for Poisson sampling, and says nothing "
                "of shuffled batches"
            )

    # --- as a trainer ---

    def choose_unit_clipping_and_noise_scale(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        """How the units are treated; by default all alike."""
        return UnitTreatment()

    def mechanism_terms(self, job: TrainingJob, units: int) -> MechanismTerms:
        """The mechanism for so many units: noise, clipping, sampling rate, steps."""
        raise NotImplementedError

    def privacy_record_of_training(
        self, trained: PrivateModel, judgement: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        """What the training came to promise."""
        raise NotImplementedError

    def sampling_and_noise_key(self, job: TrainingJob) -> str:
        """What batches and noise are drawn by; secret wherever something is promised."""
        raise NotImplementedError

    def make_private_training_progress(self, job: TrainingJob, terms: MechanismTerms) -> Callable[[int, float], None]:
        """What is shown after so many steps, at this loss."""
        return lambda done, loss: job.progress(f"training, loss {loss:.3f}", done, terms.steps)

    def planned_step_count(self, units: int) -> int:
        return math.ceil(self.epochs * units / self.batch)

    def check(self, job: TrainingJob) -> None:
        _require_dp_packages()
        if self.model:
            raise AuditError(f"-D model= names a model trained by {self.name}, for audit run: audit train makes one")
        if job.public.model.dtype != torch.float32:
            raise AuditError(f"expected --dtype float32: noise rounded to {job.public.model.dtype} is not Gaussian")
        if self.unit == "user" and not job.users:
            raise AuditError(
                "expected data that say whose each record is for unit=user (audit train --user-column), got records "
                "without a user: a claim for users would be about records"
            )
        counted = len({record.unit for record in job.records}) if self.unit == "user" else len(job.records)
        units, where = (self.units, "of units") if self.units else (counted, "of the data")
        if self.batch > units:
            raise AuditError(f"expected a batch of at most the {units} {self.unit}s {where}, got {self.batch}")
        if self.planned_step_count(units) > MOST_STEPS:
            raise AuditError(
                f"expected at most {MOST_STEPS:,} steps, got {self.planned_step_count(units):,}: lower epochs"
            )

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        # Here, as they need the `dp` extra, which a model that is trained already does without.
        from auditor.training import dp_loop as loops
        from auditor.training.gradient_canaries import PlantedCanaries

        examples, cut = _cut_sequences_by_unit(job, self.unit)
        if (made := read_privacy_record(job.out)) is not None:  # written last: all is done but saying so
            return _privacy_notes_for_user(made, cut, len(examples))
        terms = self.mechanism_terms(job, self.units or len(examples))
        model, judgement = job.load(), self.choose_unit_clipping_and_noise_scale(job, examples)
        trained = loops.fit_privately(
            model,
            examples,
            # Canaries are units too, numbered behind the examples.
            loops.PoissonSampler(len(examples) + self.gradient_canaries, terms.rate, self.sampling_and_noise_key(job)),
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
            shares=judgement.shares,
            noise_scale=judgement.noise_scale,
            canaries=PlantedCanaries(self.gradient_canaries, job.seed),
            progress=self.make_private_training_progress(job, terms),
            checkpoint=job.checkpoint,
        )
        record = self.privacy_record_of_training(trained, judgement, terms)
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        if self.gradient_canaries:
            gradient_canaries.write_gradient_canaries(
                job.out, self._gradient_canaries_to_write(trained.watch, terms, record.steps, job.seed)
            )
        disk.fsync_tree(job.out)  # the record comes after all else is on disk: where it is, the training is done
        write_privacy_record(job.out, record)
        return _privacy_notes_for_user(record, cut, len(examples))

    def _gradient_canaries_to_write(
        self, watch: CanaryWatch, terms: MechanismTerms, steps: int, seed: int
    ) -> GradientCanaries:
        values, size, repeated = watch.noise_count_size_and_largest_correlation()
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
            noise_values=values,
            noise_size=size,
            noise_repeated=repeated,
            seed=seed,
        )

    def recipe_details_to_record(self) -> dict[str, float]:
        """Of the recipe, what `privacy.json` keeps among its details: controls are held to it."""
        planted = {CANARIES: float(self.gradient_canaries)} if self.gradient_canaries else {}
        return {"expected_batch": float(self.batch), "learning_rate": self.learning_rate, **planted}

    # --- as a defense ---

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.trained is not None
        return scenario.trained.model

    def claim(self, scenario: Scenario, spent: int) -> Claim | None:
        privacy = scenario.trained.privacy if scenario.trained else None
        return privacy.claim() if privacy else None


@dataclass(frozen=True)
class NonPrivateControl(PoissonTraining):
    """Base of trainings without noise, beside which a private one is judged. They promise nothing.

    Batches follow from the seed: there is nothing in them to keep secret, and controls of one seed share them.
    """

    claims: ClassVar[str] = "none: the control row of private training"

    @property
    def control_clipping_norm(self) -> float:
        """C, the clipping norm; inf: none."""
        return math.inf

    def mechanism_terms(self, job: TrainingJob, units: int) -> MechanismTerms:
        return MechanismTerms(
            0.0, self.control_clipping_norm, self.batch / units, self.planned_step_count(units), units
        )

    def sampling_and_noise_key(self, job: TrainingJob) -> str:
        return f"control {job.seed}"

    def privacy_record_of_training(
        self, trained: PrivateModel, judgement: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        return PrivacyRecord(
            method=self.name,
            epsilon=None,
            delta=0.0,
            status="no guarantee: trained without noise, as a control of private training",
            noise_multiplier=0.0,
            clip=terms.clip,
            sampling_rate=terms.rate,
            steps=trained.steps,
            unit=self.unit,
            noise="none",
            accountant="none",
            units=terms.units,
            units_given=self.units > 0,
            optimizer=self.optimizer,
            details={**self.recipe_details_to_record(), **dict(judgement.details)},
        )


def _cut_sequences_by_unit(job: TrainingJob, unit: str) -> tuple[list[Tokens], int]:
    """One sequence a unit, behind an end-of-text token and ended by one, cut at the block; and how many were cut."""
    whole: dict[str, list[int]] = {}
    for i, record in enumerate(job.records):
        whole.setdefault(record.unit if unit == "user" else str(i), [job.end]).extend(
            (*loss_masks.tokens_with_loss_mask(record), job.end)
        )
    return [tuple(ids[: job.block]) for ids in whole.values()], sum(len(ids) > job.block for ids in whole.values())


def _privacy_notes_for_user(record: PrivacyRecord, cut: int, units: int) -> tuple[str, ...]:
    """What the user must know: sentences."""
    told = list(record.notes())
    if record.epsilon is not None:
        told += [
            f"ε {record.epsilon:.3f} at δ {record.delta:g}, {record.adjacency} ({record.accountant}; by RDP "
            f"{record.epsilon_rdp:.3f}): σ {record.noise_multiplier:.3f}, C {record.clip:g}, "
            f"q {record.sampling_rate:.4g}, {record.steps:,} steps",
            record.status,
        ]
    of = record.units or units
    # Publishing one unit of n, drawn at random, is (0, 1 / n)-DP.
    if record.delta * of >= 1:
        told.append(f"δ {record.delta:g} is no smaller than one in {of:,} units: it allows giving one of them away")
    if cut:
        told.append(f"{cut:,} of {units:,} sequences were longer than --block and cut")
    return tuple(told)


def _require_dp_packages() -> None:
    try:
        import cryptography
        import dp_accounting
        import opacus
    except ImportError as error:
        raise AuditError(f"private training needs {error.name}: install audit-lm[dp]") from None
    del cryptography, dp_accounting, opacus
