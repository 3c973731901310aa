"""Implement ADP (Wu et al. 2022): DP-SGD with less noise for batches that look public.

`adp` is the published algorithm, which has no guarantee. `adp-sound` is a variant with a proof:
its noise is constant, and it clips rare records hardest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from auditor.core.arrays import Ints
from auditor.core.nouns import Tokens
from auditor.defenses.private_training import PrivateTraining
from auditor.defenses.private_training_controls import NoNoise
from auditor.plugins.trainer import TrainingJob
from auditor.privacy.gaussian import compute_tightest_epsilon
from auditor.privacy.promises import NOMINAL, PrivacyRecord
from auditor.training.poisson import MechanismTerms, UnitTreatment
from auditor.training.rarity import (
    Normalisation,
    RarityClipping,
    compute_log_perplexities,
    scale_perplexities_within_data,
)

if TYPE_CHECKING:
    from auditor.training.dp_loop import PrivateModel


@dataclass(frozen=True)
class Adp(PrivateTraining):
    """Fine-tune with less noise for batches of common text (ADP, Wu et al. 2022).

    With optimizer=adam this is Algorithm 1, with optimizer=sgd its SGD variant. The noise of a
    batch is gamma_B N(0, C^2 sigma^2 I). gamma_B is the mean privacy probability of the batch's
    records under a public model (Eq. 5 and 6).

    normalise: how perplexities are scaled to privacy probabilities, `min-max` or `rank`. The paper
    does not say which.
    epsilon, delta: determine sigma, as in dp-sgd, but are only nominal.
    """

    name = "adp"
    title = "ADP"
    noise_changes = "adaptive Gaussian noise: less for a batch that a public model finds common"
    normalise: Normalisation = "min-max"

    def choose_unit_treatment(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        # Scale over the data set. Each rho then depends on all records, which is another reason why
        # there is no promise.
        log_perplexities = compute_log_perplexities(job.public, examples)
        rho = scale_perplexities_within_data(log_perplexities, self.normalise)
        # Gradient canaries are numbered after the records, and count as entirely private.
        privacy_by_unit = np.concatenate([rho, np.ones(self.gradient_canaries)])

        def compute_batch_scale(units: Ints) -> float:
            # An empty batch has no mean: all of the noise.
            return float(privacy_by_unit[units].mean()) if len(units) else 1.0

        return UnitTreatment(
            noise_scale=compute_batch_scale,
            details=(
                ("privacy_probability_mean", float(rho.mean())),
                ("judged_private", float((rho > 0.5).mean())),
            ),
        )

    def make_privacy_record(
        self, trained: PrivateModel, treatment: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        """Return a record without a guarantee.

        The record has the epsilon that constant noise scales would have.
        """
        dp_sgd_record = super().make_privacy_record(trained, treatment, terms)
        if not trained.moved:
            return dp_sgd_record
        gammas = np.array(trained.noise_scales)
        sampling = (terms.rate, trained.steps, terms.delta)

        def compute_epsilon(scale: float) -> float:
            if not scale:
                return math.inf
            return compute_tightest_epsilon(scale * terms.sigma, *sampling)[0]

        # None is a bound: the noise itself reveals a scale that depends on the batch
        # (Wu et al. 2022, Eq. 5).
        nominal = {
            "if the noise were not scaled": compute_epsilon(1.0),
            NOMINAL: compute_epsilon(float(gammas.mean())),
            "if its scale were constant, the least": compute_epsilon(float(gammas.min())),
        }
        return replace(
            dp_sgd_record,
            epsilon=None,
            epsilon_rdp=None,
            epsilon_twice=None,
            status="no guarantee at any epsilon: the noise scale depends on which records are in a "
            "batch, so that the noise itself distinguishes neighbouring data sets",
            nominal=nominal,
            details={
                **dp_sgd_record.details,
                "gamma_mean": float(gammas.mean()),
                "gamma_least": float(gammas.min()),
            },
        )


@dataclass(frozen=True)
class AdpSound(RarityClipping, PrivateTraining):
    """Fine-tune with DP-SGD that clips rare records hardest: ADP's idea with a proof.

    Record i is clipped to C kappa(rho_i); the noise remains C sigma. rho is the record's rarity,
    from 0 to 1, and kappa falls from 1 to kappa_least as rho rises. Rarity depends only on the
    record's own perplexity under a public model. It rises from 0 at lowest_perplexity to 1 at
    highest_perplexity. The value 0 means a lowest perplexity of 1, or a highest perplexity equal to
    the vocabulary's size.

    Every record has the epsilon of dp-sgd. A record that is clipped harder is better protected. How
    much better is secret, because it depends on the record.
    """

    name = "adp-sound"
    title = "ADP, sound"
    claims = "(epsilon, delta) for one record (or user), under any access and decoding"
    promises = True
    clipping_changes = "each unit's gradient is clipped, harder the rarer a public model finds it"

    def make_no_noise_control(self) -> NoNoise:
        return replace(
            super().make_no_noise_control(),
            kappa_least=self.kappa_least,
            lowest_perplexity=self.lowest_perplexity,
            highest_perplexity=self.highest_perplexity,
        )
