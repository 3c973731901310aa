"""Provide DP-SGD, and the base class that it shares with ADP.

The base class provides noise, clipping, accounting and control models. The mathematics is in
`auditor/privacy/gaussian.py`. Subclasses define how each record is clipped or weighted.
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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from auditor.core.errors import AuditError
from auditor.defenses.control_rows import PublicModelControl
from auditor.defenses.private_training_controls import NoClipping, NoNoise
from auditor.plugins.defense import Cause
from auditor.plugins.options import Limits, Share
from auditor.plugins.trainer import TrainingJob
from auditor.privacy.gaussian import (
    MOST_EPSILON,
    compute_quick_rdp_epsilon,
    compute_rdp_epsilon,
    compute_tightest_epsilon,
    find_noise_multiplier,
)
from auditor.privacy.promises import SENSITIVITY, Mechanism, PrivacyRecord, read_privacy_record
from auditor.training.clipping import ROUNDING
from auditor.training.finetune import LARGEST, ClippingNorm
from auditor.training.poisson import MechanismTerms, PoissonTraining, UnitTreatment

if TYPE_CHECKING:
    from auditor.training.dp_loop import PrivateModel

_RECORDED_PACKAGES = ("opacus", "dp-accounting", "torch")


@dataclass(frozen=True)
class PrivateTraining(PoissonTraining):
    """Define the base of private trainings, which are also defenses.

    A built-in lab trains a model with such a defense on demand.

    epsilon, delta: the privacy budget, from which the noise is computed.
    noise_multiplier: sigma, instead of the one computed from the budget (0: compute it).
    clip: C, the largest norm of a unit's gradient.
    batch: the expected number of units in a batch; physical_batch: how many sequences to process at
    once.
    unit: the unit of protection; if it is `user`, all records of a user form one sequence.
    units: the number of units to make public, which determines the sampling rate and noise (0: the
    number in the data).
    noise: `secret` takes a key from the operating system and discards the key. `seeded` can be
    repeated but promises nothing, and its epsilon is nominal, because models with the same seed
    share noise and batches.
    ghost: keep only one record's gradient in memory at a time.
    model: a folder with a model trained in this way, for `audit run` outside a lab.
    no_noise, no_clipping: folders of the control models.
    """

    noise_changes: ClassVar[str] = "Gaussian noise on the sum of the gradients of a batch"
    clipping_changes: ClassVar[str] = "each unit's gradient is clipped"
    main = "epsilon"
    epsilon: Annotated[float, Limits(0, MOST_EPSILON, "(]")] = 8.0
    delta: Share = 1e-5
    noise_multiplier: Annotated[float, Limits(0, LARGEST, "[]")] = 0.0
    clip: ClippingNorm = 1.0
    noise: Literal["secret", "seeded"] = "secret"
    no_noise: str = ""
    no_clipping: str = ""

    # --- controls ---

    def cause_chain(self) -> tuple[Cause, ...]:
        def explain_how_to_make(control: str, option: str) -> str:
            return f"audit train {control} makes it, -D {self.name}.{option}=DIR names it"

        training = "trained as the private model is (epochs, batches, optimizer, rate)"
        recipe = f"{training}, without clipping and noise"
        no_clipping = NoClipping(**self._collect_control_options(self.no_clipping))
        no_noise = self.make_no_noise_control()
        no_clipping_advice = explain_how_to_make(no_clipping.name, "no_clipping")
        no_noise_advice = explain_how_to_make(no_noise.name, "no_noise")
        public = PublicModelControl()
        return (
            Cause("training configuration", recipe, no_clipping, no_clipping_advice),
            Cause("clipping", self.clipping_changes, no_noise, no_noise_advice),
            Cause("noise", self.noise_changes),
            Cause("no private data", "the public model alone", public, "--public MODEL"),
        )

    def make_no_noise_control(self) -> NoNoise:
        """Return a control: this training without noise."""
        return NoNoise(**self._collect_control_options(self.no_noise), clip=self.clip)

    def _collect_control_options(self, model: str) -> dict[str, Any]:
        """Collect the options that a control training shares with this training.

        model: the folder of the trained control.
        """
        options = {}
        for f in dataclasses.fields(PoissonTraining):
            options[f.name] = getattr(self, f.name)
        return {**options, "model": model, "gradient_canaries": 0}

    # --- as a trainer ---

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        for option in ("no_noise", "no_clipping"):
            if getattr(self, option):
                raise AuditError(
                    f"-D {option}= names a control of {self.name}, for audit run: audit train "
                    "makes one",
                )

    def compute_mechanism_terms(self, job: TrainingJob, units: int) -> MechanismTerms:
        terms = super().compute_mechanism_terms(job, units)
        sigma = self.noise_multiplier
        if not sigma:
            job.progress(f"solving for the noise of ε {self.epsilon:g}", 0, 1)
            sigma = find_noise_multiplier(self.epsilon, self.delta, terms.rate, terms.steps)
        base = None
        if Path(job.base).is_dir():
            # The promise of the base, if it was trained privately itself.
            base = read_privacy_record(Path(job.base))
        return dataclasses.replace(terms, sigma=sigma, clip=self.clip, delta=self.delta, base=base)

    def derive_randomness_key(self, job: TrainingJob) -> str:
        """Derive the key from which noise and batches are drawn.

        If the key is secret, it is stored only in the checkpoint, which is removed at the end.
        """
        if self.noise == "seeded":
            return f"{self.name} {job.seed}"
        state = job.checkpoint.load()
        if state is not None:
            return str(state["key"])
        return secrets.token_hex(32)

    def make_private_training_progress(
        self,
        job: TrainingJob,
        terms: MechanismTerms,
    ) -> Callable[[int, float], None]:
        """Return a callback that shows the loss and the epsilon so far, updated once a second.

        Epsilon is computed by a quick method that gives an upper bound.
        """
        most_epsilon = math.inf
        # The noise was solved for all steps with a tighter bound, but not for those of a base.
        if not self.noise_multiplier and not terms.base:
            most_epsilon = self.epsilon
        symbol = "ε"
        if not self.promises:
            symbol = "nominal ε"
        earlier = tuple(map(dataclasses.astuple, _list_private_trainings(terms.base)))
        last_update = -math.inf
        epsilon = 0.0

        def show_progress(steps: int, loss: float) -> None:
            nonlocal last_update, epsilon
            if time.monotonic() - last_update > 1:
                bound = compute_quick_rdp_epsilon(
                    terms.sigma, terms.rate, steps, terms.delta, earlier
                )
                epsilon = min(bound, most_epsilon)
                last_update = time.monotonic()
            description = f"training, loss {loss:.3f}, {symbol} ≤ {epsilon:.2f}"
            job.progress(description, steps, terms.steps)

        return show_progress

    def make_privacy_record(
        self, trained: PrivateModel, treatment: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        """Return a record of the guarantee of the completed steps, or of why there is none."""
        flaw, nominal = self._explain_missing_guarantee(trained, terms.base)
        # Both trainings used private records: their steps are composed.
        earlier = () if flaw else _list_private_trainings(terms.base)
        earlier_steps = tuple(map(dataclasses.astuple, earlier))
        mechanism = (terms.sigma, terms.rate, trained.steps, terms.delta, earlier_steps)
        epsilon, accountant = compute_tightest_epsilon(*mechanism)
        # Two models of the same records, each with its own noise.
        twice = (terms.sigma, terms.rate, 2 * trained.steps, terms.delta, earlier_steps)
        by_rdp = epsilon
        if accountant.endswith("PLD") and not flaw:
            by_rdp = compute_rdp_epsilon(*mechanism)  # a cross-check of PLD
        record = super().make_privacy_record(trained, treatment, terms)
        return dataclasses.replace(
            record,
            epsilon=None if flaw else epsilon,
            status=flaw or "sound",
            sound=not flaw,
            noise=self.noise,
            accountant=accountant,
            epsilon_rdp=None if flaw else by_rdp,
            epsilon_twice=None if flaw else compute_tightest_epsilon(*twice)[0],
            earlier=earlier,
            nominal={nominal: epsilon} if nominal else {},
            # The largest norm of a clipped gradient, rounding included (formulas D3).
            details={**record.details, SENSITIVITY: terms.clip * (1 + ROUNDING)},
            versions={name: importlib.metadata.version(name) for name in _RECORDED_PACKAGES},
        )

    def _explain_missing_guarantee(
        self,
        trained: PrivateModel,
        base: PrivacyRecord | None,
    ) -> tuple[str, str]:
        """Return why epsilon is not guaranteed, and the condition under which it would be.

        An example of a condition is "if the noise were secret". Guaranteed epsilon gives ("", "").
        `base`: the privacy record of the model
        from which training started; None without private training.
        """
        if not trained.moved:
            return "no parameter moved: nothing was learnt, so epsilon has no meaning", ""
        if self.noise == "seeded":
            reason = (
                "no guarantee: the noise is seeded, so two models with one seed share it and their "
                "batches (noise=secret gives a guarantee)"
            )
            return reason, "if the noise were secret"
        if base and (base.epsilon is None or base.unit != self.unit):
            if base.epsilon is not None:
                promise = f"for a {base.unit}"
            else:
                promise = "nothing"
            reason = (
                f"no guarantee: the base was trained on private records by {base.method} and "
                f"promises {promise}"
            )
            return reason, "of this training only"
        return "", ""


@dataclass(frozen=True)
class DpSgd(PrivateTraining):
    """Fine-tune with DP-SGD (Abadi et al. 2016).

    Each unit's gradient is clipped, and Gaussian noise is added to the sum of gradients.
    """

    name = "dp-sgd"
    title = "DP-SGD"
    claims = "(epsilon, delta) for one record (or user), under any access and decoding"
    promises = True


def _list_private_trainings(base: PrivacyRecord | None) -> tuple[Mechanism, ...]:
    """Return the private trainings that produced the base model, earliest first."""
    if base is None:
        return ()
    return (*base.earlier, Mechanism(base.noise_multiplier, base.sampling_rate, base.steps))
