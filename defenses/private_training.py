"""DP-SGD, and what ADP and its sound variant share with it: noise, clipping, accounting, and their control rows.

The mathematics is `gaussian.py`. Knows nothing of how records are judged.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from auditor.core.errors import AuditError
from auditor.defenses.control_rows import PublicModelControl
from auditor.defenses.private_training_controls import NoClipping, NoNoise
from auditor.plugins.defense import Cause
from auditor.plugins.trainer import TrainingJob
from auditor.privacy.gaussian import (
    MOST_EPSILON,
    epsilon_by_tightest_accountant,
    noise_multiplier_for,
    quick_rdp_epsilon,
    rdp_epsilon,
    require_valid_gaussian_mechanism,
)
from auditor.privacy.promises import SENSITIVITY, Mechanism, PrivacyRecord, read_privacy_record
from auditor.training.clipping import ROUNDING
from auditor.training.finetune import LARGEST
from auditor.training.poisson import MechanismTerms, PoissonTraining, UnitTreatment

if TYPE_CHECKING:
    from auditor.training.dp_loop import PrivateModel


@dataclass(frozen=True)
class PrivateTraining(PoissonTraining):
    """Base of the private ways of training, each of which is a defense too: in the lab it is trained on demand.

    epsilon, delta: what the noise is solved for; noise_multiplier: sigma itself instead (0: solve). clip: C. batch: the
    expected one. physical_batch: sequences at once. unit: what is protected; a `user`'s records make one sequence.
    units: how many there are, as far as the public may know: sampling rate and noise follow from it (0: as many as the
    data have, which is then taken as public). noise: `secret` takes a key from the operating system and throws it away;
    `seeded` can be repeated and promises nothing, its epsilon is nominal: two models of one seed share noise and
    batches. ghost: one record's gradient at a time in memory. model: a folder that was trained so, for `audit run`
    outside the lab; no_noise, no_clipping: folders of its controls.
    """

    noise_changes: ClassVar[str] = "Gaussian noise on the sum of the gradients of a batch"
    clipping_changes: ClassVar[str] = "each unit's gradient is clipped"
    main: ClassVar[str] = "epsilon"
    epsilon: float = 8.0
    delta: float = 1e-5
    noise_multiplier: float = 0.0
    clip: float = 1.0
    noise: Literal["secret", "seeded"] = "secret"
    no_noise: str = ""
    no_clipping: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, most in (("epsilon", MOST_EPSILON), ("clip", LARGEST)):
            if not 0 < getattr(self, option) <= most:
                raise AuditError(f"expected {option} > 0 and at most {most:g}, got {getattr(self, option):g}")
        if not 0 <= self.noise_multiplier <= LARGEST:
            raise AuditError(
                f"expected noise_multiplier between 0 (solved from epsilon) and {LARGEST:g}, "
                f"got {self.noise_multiplier:g}"
            )
        require_valid_gaussian_mechanism(1.0, 1.0, 1, self.delta)  # refuses a delta outside (0, 1)

    # --- what it is judged beside ---

    def cause_chain(self) -> tuple[Cause, ...]:
        def needs(control: str, option: str) -> str:
            return f"audit train {control} makes it, -D {self.name}.{option}=DIR names it"

        recipe = "trained as the private model is (epochs, batches, optimizer, rate), without clipping and noise"
        unclipped, unnoised = (
            NoClipping(**self._options_shared_with_controls(self.no_clipping)),
            self.no_noise_control(),
        )
        return (
            Cause("training configuration", recipe, unclipped, needs(unclipped.name, "no_clipping")),
            Cause("clipping", self.clipping_changes, unnoised, needs(unnoised.name, "no_noise")),
            Cause("noise", self.noise_changes),
            Cause("no private data", "the public model alone", PublicModelControl(), "--public MODEL"),
        )

    def no_noise_control(self) -> NoNoise:
        """The same training without noise."""
        return NoNoise(**self._options_shared_with_controls(self.no_noise), clip=self.clip)

    def _options_shared_with_controls(self, model: str) -> dict[str, Any]:
        """The options that a control has in common with this training. model: the folder it was trained into."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(PoissonTraining)}
        return {**shared, "model": model, "gradient_canaries": 0}

    # --- as a trainer ---

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        for option in ("no_noise", "no_clipping"):
            if getattr(self, option):
                raise AuditError(f"-D {option}= names a control of {self.name}, for audit run: audit train makes one")

    def compute_mechanism_terms(self, job: TrainingJob, units: int) -> MechanismTerms:
        # Poisson sampling: each unit is in a batch with this chance, `batch` of them on average.
        rate, steps = self.batch / units, self.count_planned_steps(units)
        if not self.noise_multiplier:
            job.progress(f"solving for the noise of ε {self.epsilon:g}", 0, 1)
        sigma = self.noise_multiplier or noise_multiplier_for(self.epsilon, self.delta, rate, steps)
        # What the base promises, where it was trained privately itself.
        base = read_privacy_record(Path(job.base)) if Path(job.base).is_dir() else None
        return MechanismTerms(sigma, self.clip, rate, steps, units, self.delta, base)

    def derive_randomness_key(self, job: TrainingJob) -> str:
        """What noise and batches are drawn from. A secret key is kept in the checkpoint alone, and cleared with it."""
        if self.noise == "seeded":
            return f"{self.name} {job.seed}"
        state = job.checkpoint.load()
        return str(state["key"]) if state is not None else secrets.token_hex(32)

    def make_private_training_progress(self, job: TrainingJob, terms: MechanismTerms) -> Callable[[int, float], None]:
        # What is asked for is of these steps alone.
        asked = math.inf if self.noise_multiplier or terms.base else self.epsilon
        return _Progress(job, terms, asked, not self.promises)

    def make_privacy_record(
        self, trained: PrivateModel, judgement: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        """The guarantee of the steps that were taken; none where `_missing_guarantee_reason` finds a reason."""
        (flaw, nominal), base = self._missing_guarantee_reason(trained, terms.base), terms.base
        # Both trainings saw private records: their steps are composed.
        earlier = () if flaw else _earlier_private_trainings(base)
        before = tuple(map(dataclasses.astuple, earlier))
        mechanism = (terms.sigma, terms.rate, trained.steps, terms.delta, before)
        epsilon, accountant = epsilon_by_tightest_accountant(*mechanism)
        # Two models of the same records, each with noise of its own.
        twice = (terms.sigma, terms.rate, 2 * trained.steps, terms.delta, before)
        # RDP stands beside PLD as a cross-check (formulas B4).
        by_rdp = rdp_epsilon(*mechanism) if accountant.endswith("PLD") and not flaw else epsilon
        return PrivacyRecord(
            method=self.name,
            epsilon=None if flaw else epsilon,
            delta=terms.delta,
            status=flaw or "sound",
            sound=not flaw,
            noise_multiplier=terms.sigma,
            clip=terms.clip,
            sampling_rate=terms.rate,
            steps=trained.steps,
            unit=self.unit,
            noise=self.noise,
            accountant=accountant,
            epsilon_rdp=None if flaw else by_rdp,
            epsilon_twice=None if flaw else epsilon_by_tightest_accountant(*twice)[0],
            earlier=earlier,
            units=terms.units,
            units_given=self.units > 0,
            optimizer=self.optimizer,
            nominal={nominal: epsilon} if nominal else {},
            details={
                **self.collect_recipe_details(),
                # What a clipped gradient may be too long by, rounded as it is (formulas D3).
                SENSITIVITY: terms.clip * (1 + ROUNDING),
                **dict(judgement.details),
            },
            versions={name: importlib.metadata.version(name) for name in ("opacus", "dp-accounting", "torch")},
        )

    def _missing_guarantee_reason(self, trained: PrivateModel, base: PrivacyRecord | None) -> tuple[str, str]:
        """(why there is no guarantee, under which condition epsilon would be one); "" for what does not apply."""
        if not trained.moved:
            return "no parameter moved: nothing was learnt, so there is nothing to put an epsilon on", ""
        if self.noise == "seeded":
            why = "no guarantee: the noise is seeded, and two models of one seed share it, and their batches"
            return f"{why} (noise=secret has one)", "if the noise were secret"
        if base and (base.epsilon is None or base.unit != self.unit):
            what = f"for a {base.unit}" if base.epsilon is not None else "nothing"
            why = f"no guarantee: the base was trained on private records by {base.method} and promises {what}"
            return why, "of this training alone"
        return "", ""


@dataclass(frozen=True)
class DpSgd(PrivateTraining):
    """Fine-tune with DP-SGD: each record's gradient clipped, Gaussian noise on their sum (Abadi et al. 2016)."""

    name: ClassVar[str] = "dp-sgd"
    title: ClassVar[str] = "DP-SGD"
    claims: ClassVar[str] = "(epsilon, delta) for one record (or user), under any access and decoding"
    promises: ClassVar[bool] = True


def _earlier_private_trainings(base: PrivacyRecord | None) -> tuple[Mechanism, ...]:
    """The private steps that the base was trained by, its own base's first."""
    return () if base is None else (*base.earlier, Mechanism(base.noise_multiplier, base.sampling_rate, base.steps))


class _Progress:
    """A bar with the loss and a running bound on epsilon: the quick one, once a second, up to what was asked for."""

    def __init__(self, job: TrainingJob, terms: MechanismTerms, asked: float, nominal: bool) -> None:
        self.job, self.terms, self.asked, self.word = job, terms, asked, "nominal ε" if nominal else "ε"
        self.earlier = tuple(map(dataclasses.astuple, _earlier_private_trainings(terms.base)))
        self.at, self.epsilon = -math.inf, 0.0

    def __call__(self, done: int, loss: float) -> None:
        if time.monotonic() - self.at > 1:
            quick = quick_rdp_epsilon(self.terms.sigma, self.terms.rate, done, self.terms.delta, self.earlier)
            self.epsilon = min(quick, self.asked)  # the noise was solved for all steps, by a closer bound
            self.at = time.monotonic()
        self.job.progress(f"training, loss {loss:.3f}, {self.word} ≤ {self.epsilon:.2f}", done, self.terms.steps)
