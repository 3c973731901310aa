"""What DP-SGD, ADP and its sound variant share: options, accounting, `privacy.json`; as trainers and as defenses.

The loop is `auditor/private_training.py`, the mathematics `gaussian.py`. Knows nothing of how records are judged.
"""

from __future__ import annotations

import importlib.metadata
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from auditor.defenses.gaussian import check_mechanism, noise_for, quick_epsilon, rdp_epsilon, reported_epsilon
from auditor.errors import AuditError
from auditor.models import LanguageModel
from auditor.privacy import PrivacyRecord, write
from auditor.training import Checkpoint
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
    noise: `secret` takes a key from the operating system and throws it away; `seeded` can be repeated, and subtracted
    by whoever knows the seed. ghost: clip without per-sample gradients in memory. model: a folder that was trained so,
    for `audit run` outside the lab.
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
    noise: Literal["secret", "seeded"] = "secret"
    ghost: bool = False
    physical_batch: int = 16
    model: str = ""

    def __post_init__(self) -> None:
        for option in ("epochs", "batch", "physical_batch"):
            if getattr(self, option) < 1:
                raise AuditError(f"expected {option} >= 1, got {getattr(self, option)}")
        for option in ("epsilon", "clip", "learning_rate"):
            if not 0 < getattr(self, option) < math.inf:
                raise AuditError(f"expected {option} > 0, got {getattr(self, option)}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise AuditError(f"expected noise_multiplier >= 0 (0: solved from epsilon), got {self.noise_multiplier}")
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
        units = len({record.unit for record in job.records}) if self.unit == "user" else len(job.records)
        if self.batch > units:
            raise AuditError(f"expected a batch of at most the {units} {self.unit}s of the data, got {self.batch}")

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        from auditor import private_training as loops

        examples, cut = _examples(job, self.unit)
        terms = self._terms(job, len(examples))
        checkpoint = Checkpoint(job.out / "checkpoint.pt")
        model, judgement = job.load(), self.judge(job, examples)
        trained = loops.fit_privately(
            model,
            examples,
            loops.PoissonSampler(len(examples), terms.rate, self._key(job, checkpoint)),
            loops.Recipe(
                noise_multiplier=terms.sigma,
                clip=self.clip,
                steps=terms.steps,
                expected_batch=terms.rate * len(examples),
                learning_rate=self.learning_rate,
                optimizer=self.optimizer,
                physical_batch=self.physical_batch,
                ghost=self.ghost,
            ),
            pad=job.end,
            shares=judgement.shares,
            noise_scale=judgement.noise_scale,
            progress=_Progress(job, terms, self.claims == "none"),
            checkpoint=checkpoint,
        )
        record = self.promise(trained, judgement, terms)
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        write(job.out, record)
        checkpoint.clear()  # with the key of the noise
        return _told(record, cut, len(examples))

    def _terms(self, job: TrainingJob, units: int) -> Terms:
        rate = self.batch / units
        steps = math.ceil(self.epochs / rate)
        if not self.noise_multiplier:
            job.progress(f"solving for the noise of ε {self.epsilon:g}", 0, 1)
        sigma = self.noise_multiplier or noise_for(self.epsilon, self.delta, rate, steps)
        return Terms(sigma, rate, steps, self.delta)

    def _key(self, job: TrainingJob, checkpoint: Checkpoint) -> str:
        """Of sampling and noise. A secret one lives in the checkpoint alone, for as long as there is one."""
        if self.noise == "seeded":
            return f"{self.name} {job.seed}"
        state = checkpoint.load()
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
    """The mechanism: sigma, sampling rate q, planned steps, delta."""

    sigma: float
    rate: float
    steps: int
    delta: float

    def record(self, trainer: PrivateTraining, trained: Trained) -> PrivacyRecord:
        """The guarantee of the steps that were taken; none where no parameter moved: nothing was learnt."""
        mechanism = (self.sigma, self.rate, trained.steps, self.delta)
        (epsilon, accountant), status = reported_epsilon(*mechanism), "sound"
        if trainer.noise == "seeded":
            status = "sound for those who do not know the seed of its noise"
        if not trained.moved:
            status = "no parameter moved: nothing was learnt, so there is nothing to put an epsilon on"
        return PrivacyRecord(
            method=trainer.name,
            epsilon=epsilon if trained.moved else None,
            delta=self.delta,
            status=status,
            noise_multiplier=self.sigma,
            clip=trainer.clip,
            sampling_rate=self.rate,
            steps=trained.steps,
            unit=trainer.unit,
            noise=trainer.noise,
            accountant=accountant,
            epsilon_rdp=_cross_check(epsilon, accountant, mechanism) if trained.moved else None,
            details={"expected_batch": float(trainer.batch), "learning_rate": trainer.learning_rate},
            versions={name: importlib.metadata.version(name) for name in ("opacus", "dp-accounting", "torch")},
        )


def _cross_check(epsilon: float, accountant: str, mechanism: tuple[float, float, int, float]) -> float:
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
    if record.delta * units >= 1:
        told.append(f"δ {record.delta:g} is no smaller than one in {units:,} units: it allows giving one of them away")
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
