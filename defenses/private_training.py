"""What DP-SGD, ADP and its sound variant share: options, accounting, `privacy.json`; as trainers and as defenses.

The loop is `auditor/private_training.py`, the mathematics `gaussian.py`. Knows nothing of how records are judged.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from auditor import disk
from auditor.defenses.gaussian import (
    MOST_EPSILON,
    MOST_STEPS,
    Earlier,
    check_mechanism,
    noise_for,
    quick_epsilon,
    rdp_epsilon,
    reported_epsilon,
)
from auditor.errors import AuditError
from auditor.models import LanguageModel
from auditor.privacy import Mechanism, PrivacyRecord, read, write
from auditor.training import LARGEST, check_schedule
from auditor.types import Claim, Defense, Scenario, Tokens, Trainer, TrainingJob

if TYPE_CHECKING:
    from auditor.private_training import Trained


@dataclass(frozen=True)
class Judgement:
    """How each unit is treated. shares: of the clipping norm; noise_scale: of a batch, by its units; None: all 1."""

    shares: Sequence[float] | None = None
    noise_scale: Callable[[NDArray[np.int64]], float] | None = None
    details: tuple[tuple[str, float], ...] = ()  # for `privacy.json`


@dataclass(frozen=True)
class PrivateTraining(Defense, Trainer):
    """Base of the private ways of training, each of which is a defense too: in the lab it is trained on demand.

    epsilon, delta: what the noise is solved for; noise_multiplier: sigma itself instead (0: solve). clip: C. batch: the
    expected one. physical_batch: sequences at once. unit: what is protected; a `user`'s records make one sequence.
    units: how many there are, as far as the public may know: sampling rate and noise follow from it (0: as many as the
    data have, which is then taken as public). noise: `secret` takes a key from the operating system and throws it away;
    `seeded` can be repeated and promises nothing, its epsilon is nominal: two models of one seed share noise and
    batches. ghost: clip without per-sample gradients in memory. model: a folder that was trained so, for `audit run`
    outside the lab.
    """

    needs: ClassVar[tuple[str, ...]] = ("trained",)
    epsilon: float = 8.0
    delta: float = 1e-5
    noise_multiplier: float = 0.0
    clip: float = 1.0
    epochs: int = 3
    batch: int = 256
    learning_rate: float = 2e-4
    optimizer: Literal["adam", "sgd"] = "adam"
    sampling: Literal["poisson", "shuffled"] = "poisson"
    unit: Literal["record", "user"] = "record"
    units: int = 0
    noise: Literal["secret", "seeded"] = "secret"
    ghost: bool = False
    physical_batch: int = 16
    model: str = ""

    def __post_init__(self) -> None:
        for option in ("batch", "physical_batch"):
            if getattr(self, option) < 1:
                raise AuditError(f"expected {option} >= 1, got {getattr(self, option)}")
        check_schedule(self.epochs, self.learning_rate)
        for option, most in (("epsilon", MOST_EPSILON), ("clip", LARGEST)):
            if not 0 < getattr(self, option) <= most:
                raise AuditError(f"expected {option} > 0 and at most {most:g}, got {getattr(self, option):g}")
        if not 0 <= self.noise_multiplier <= LARGEST:
            raise AuditError(
                f"expected noise_multiplier between 0 (solved from epsilon) and {LARGEST:g}, "
                f"got {self.noise_multiplier:g}"
            )
        if self.units < 0:
            raise AuditError(f"expected units >= 0 (0: as many as the data have), got {self.units}")
        check_mechanism(1.0, 1.0, 1, self.delta)
        if self.sampling != "poisson":
            raise AuditError(
                "expected sampling=poisson, got shuffled: epsilon is accounted for Poisson sampling, and says nothing "
                "of shuffled batches"
            )

    # --- as a trainer ---

    def judge(self, job: TrainingJob, examples: Sequence[Tokens]) -> Judgement:
        """How the units are treated; DP-SGD treats all alike."""
        return Judgement()

    def promise(self, trained: Trained, judgement: Judgement, terms: Terms) -> PrivacyRecord:
        """What the training came to promise."""
        return terms.record(self, trained)

    def check(self, job: TrainingJob) -> None:
        _require_opacus()
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
        if self._steps(units) > MOST_STEPS:
            raise AuditError(f"expected at most {MOST_STEPS:,} steps, got {self._steps(units):,}: lower epochs")

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        from auditor import private_training as loops

        examples, cut = _examples(job, self.unit)
        if (made := read(job.out)) is not None:  # written last: all is done but saying so
            return _told(made, cut, len(examples))
        terms = self._terms(job, self.units or len(examples))
        model, judgement = job.load(), self.judge(job, examples)
        trained = loops.fit_privately(
            model,
            examples,
            loops.PoissonSampler(len(examples), terms.rate, self._key(job)),
            loops.Recipe(
                noise_multiplier=terms.sigma,
                clip=self.clip,
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
            progress=_Progress(job, terms, self.claims == "none"),
            checkpoint=job.checkpoint,
        )
        record = self.promise(trained, judgement, terms)
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        disk.sync_all(job.out)
        write(job.out, record)
        return _told(record, cut, len(examples))

    def _terms(self, job: TrainingJob, units: int) -> Terms:
        rate, steps = self.batch / units, self._steps(units)
        if not self.noise_multiplier:
            job.progress(f"solving for the noise of ε {self.epsilon:g}", 0, 1)
        sigma = self.noise_multiplier or noise_for(self.epsilon, self.delta, rate, steps)
        return Terms(sigma, rate, steps, self.delta, units, _earlier(job.base))

    def _steps(self, units: int) -> int:
        return math.ceil(self.epochs * units / self.batch)

    def _key(self, job: TrainingJob) -> str:
        """Of sampling and noise. A secret one lives in the checkpoint alone, for as long as there is one."""
        if self.noise == "seeded":
            return f"{self.name} {job.seed}"
        state = job.checkpoint.load()
        return str(state["key"]) if state is not None else secrets.token_hex(32)

    # --- as a defense ---

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.trained is not None
        return scenario.trained.model

    def claim(self, scenario: Scenario, spent: int) -> Claim | None:
        privacy = scenario.trained.privacy if scenario.trained else None
        return privacy.claim() if privacy else None


@dataclass(frozen=True)
class Terms:
    """The mechanism: sigma, sampling rate q, planned steps, delta; how many units q is of; what the base promised."""

    sigma: float
    rate: float
    steps: int
    delta: float
    units: int
    base: PrivacyRecord | None

    def record(self, trainer: PrivateTraining, trained: Trained) -> PrivacyRecord:
        """The guarantee of the steps that were taken; none where `_flaw` finds a reason."""
        flaw, nominal = self._flaw(trainer, trained)
        earlier = _mechanisms(self.base) if self.base and not flaw else ()
        mechanism = (self.sigma, self.rate, trained.steps, self.delta, tuple(map(dataclasses.astuple, earlier)))
        epsilon, accountant = reported_epsilon(*mechanism)
        return PrivacyRecord(
            method=trainer.name,
            epsilon=None if flaw else epsilon,
            delta=self.delta,
            status=flaw or "sound",
            noise_multiplier=self.sigma,
            clip=trainer.clip,
            sampling_rate=self.rate,
            steps=trained.steps,
            unit=trainer.unit,
            noise=trainer.noise,
            accountant=accountant,
            epsilon_rdp=None if flaw else _cross_check(epsilon, accountant, mechanism),
            epsilon_twice=None if flaw else self._twice(trained, mechanism[-1]),
            earlier=earlier,
            units=self.units,
            units_given=trainer.units > 0,
            nominal={nominal: epsilon} if nominal else {},
            details={"expected_batch": float(trainer.batch), "learning_rate": trainer.learning_rate},
            versions={name: importlib.metadata.version(name) for name in ("opacus", "dp-accounting", "torch")},
        )

    def _flaw(self, trainer: PrivateTraining, trained: Trained) -> tuple[str, str]:
        """Why there is no guarantee, and what the epsilon would be that of ("": there is none to name)."""
        if not trained.moved:
            return "no parameter moved: nothing was learnt, so there is nothing to put an epsilon on", ""
        if trainer.noise == "seeded":
            why = "no guarantee: the noise is seeded, and two models of one seed share it, and their batches"
            return f"{why} (noise=secret has one)", "if the noise were secret"
        if self.base and (self.base.epsilon is None or self.base.unit != trainer.unit):
            what = f"for a {self.base.unit}" if self.base.epsilon is not None else "nothing"
            why = f"no guarantee: the base was trained on private records by {self.base.method} and promises {what}"
            return why, "of this training alone"
        return "", ""

    def _twice(self, trained: Trained, earlier: Earlier) -> float:
        return reported_epsilon(self.sigma, self.rate, 2 * trained.steps, self.delta, earlier)[0]


def _earlier(base: str) -> PrivacyRecord | None:
    """What the base promises that is to be trained on, where it was trained privately itself."""
    return read(Path(base)) if Path(base).is_dir() else None


def _mechanisms(record: PrivacyRecord) -> tuple[Mechanism, ...]:
    return (*record.earlier, Mechanism(record.noise_multiplier, record.sampling_rate, record.steps))


def _cross_check(epsilon: float, accountant: str, mechanism: tuple[float, float, int, float, Earlier]) -> float:
    return rdp_epsilon(*mechanism) if accountant.endswith("PLD") else epsilon


class _Progress:
    """A bar with the loss and the running epsilon, which is looked up once a second."""

    def __init__(self, job: TrainingJob, terms: Terms, nominal: bool) -> None:
        self.job, self.terms, self.word = job, terms, "nominal ε" if nominal else "ε"
        self.at, self.epsilon = -math.inf, 0.0

    def __call__(self, done: int, loss: float) -> None:
        if time.monotonic() - self.at > 1:
            self.epsilon = quick_epsilon(self.terms.sigma, self.terms.rate, done, self.terms.delta)
            self.at = time.monotonic()
        self.job.progress(f"training, loss {loss:.3f}, {self.word} ≤ {self.epsilon:.2f}", done, self.terms.steps)


def _examples(job: TrainingJob, unit: str) -> tuple[list[Tokens], int]:
    """One sequence a unit, behind an end-of-text token and ended by one, cut at the block; and how many were cut."""
    whole: dict[str, list[int]] = {}
    for i, record in enumerate(job.records):
        whole.setdefault(record.unit if unit == "user" else str(i), [job.end]).extend((*record.tokens, job.end))
    return [tuple(ids[: job.block]) for ids in whole.values()], sum(len(ids) > job.block for ids in whole.values())


def _told(record: PrivacyRecord, cut: int, units: int) -> tuple[str, ...]:
    """What the user must know: sentences."""
    told = list(record.notes())
    if record.epsilon is not None:
        told.append(
            f"ε {record.epsilon:.3f} at δ {record.delta:g}, {record.adjacency} ({record.accountant}; by RDP "
            f"{record.epsilon_rdp:.3f}): σ {record.noise_multiplier:.3f}, C {record.clip:g}, "
            f"q {record.sampling_rate:.4g}, {record.steps:,} steps"
        )
        told.append(record.status)
    of = record.units or units
    if record.delta * of >= 1:
        told.append(f"δ {record.delta:g} is no smaller than one in {of:,} units: it allows giving one of them away")
    if cut:
        told.append(f"{cut:,} of {units:,} sequences were longer than --block and cut")
    return tuple(told)


def _require_opacus() -> None:
    try:
        import cryptography
        import dp_accounting
        import opacus
    except ImportError as error:
        raise AuditError(f"private training needs {error.name}: install audit-lm[dp]") from None
    del cryptography, dp_accounting, opacus
