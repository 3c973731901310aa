"""ADP (Wu et al. 2022), DP-SGD whose noise shrinks where a batch looks public: as published, and made sound (B4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from auditor.core.nouns import Tokens
from auditor.defenses.private_training import PrivateTraining
from auditor.defenses.private_training_controls import NoNoise
from auditor.plugins.trainer import TrainingJob
from auditor.privacy.gaussian import epsilon_by_tightest_accountant, quick_rdp_epsilon
from auditor.privacy.promises import NOMINAL, PrivacyRecord
from auditor.training.poisson import MechanismTerms, UnitTreatment
from auditor.training.rarity import (
    Normalisation,
    check_clipping_share_options,
    compute_clipping_shares,
    compute_log_perplexities,
    scale_perplexities_within_data,
)

if TYPE_CHECKING:
    from auditor.training.dp_loop import PrivateModel


@dataclass(frozen=True)
class Adp(PrivateTraining):
    """Fine-tune with adaptive noise: less of it where a public model finds the batch common (ADP, Wu et al. 2022).

    Algorithm 1 with optimizer=adam, the SGD variant with optimizer=sgd. The noise of a batch is gamma_B N(0, C^2
    sigma^2 I) with gamma_B the mean privacy probability of its records (Eq. 5 and 6); normalise: min-max or rank (the
    paper does not say which). epsilon and delta set sigma, as in dp-sgd: they are nominal.
    """

    name: ClassVar[str] = "adp"
    title: ClassVar[str] = "ADP"
    noise_changes: ClassVar[str] = "Gaussian noise as it adapts: less where a public model finds the batch common"
    normalise: Normalisation = "min-max"

    def choose_unit_treatment(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        # Over the data set, so that each rho depends on all records: promised nothing for this too (formulas B4 (iii)).
        rho = scale_perplexities_within_data(compute_log_perplexities(job.public, examples), self.normalise)
        judged = np.concatenate([rho, np.ones(self.gradient_canaries)])  # a canary is as private as can be
        return UnitTreatment(
            # units: those of a batch, by index; gradient canaries are numbered after the records.
            noise_scale=lambda units: float(judged[units].mean()),
            details=(("privacy_probability_mean", float(rho.mean())), ("judged_private", float((rho > 0.5).mean()))),
        )

    def make_privacy_record(
        self, trained: PrivateModel, judgement: UnitTreatment, terms: MechanismTerms
    ) -> PrivacyRecord:
        """No guarantee, and what a data-independent noise scale of gamma's size would give (formulas B4)."""
        would_be = super().make_privacy_record(trained, judgement, terms)
        if not trained.moved:
            return would_be
        gammas = np.array(trained.noise_scales)
        rest = (terms.rate, trained.steps, terms.delta)
        # Neither is a bound: a scale that depends on the batch is told by the noise itself (formulas B4 (i)).
        mean, least = float(gammas.mean()) * terms.sigma, float(gammas.min()) * terms.sigma
        nominal = {
            "if the noise were not scaled": epsilon_by_tightest_accountant(terms.sigma, *rest)[0],
            NOMINAL: epsilon_by_tightest_accountant(mean, *rest)[0] if mean else math.inf,
            "if its scale were constant, the least": quick_rdp_epsilon(least, *rest) if least else math.inf,
        }
        return replace(
            would_be,
            epsilon=None,
            epsilon_rdp=None,
            epsilon_twice=None,
            status="no guarantee at any epsilon: the noise scale depends on which records are in a batch, so that the "
            "noise itself distinguishes neighbouring data sets",
            nominal=nominal,
            details={**would_be.details, "gamma_mean": float(gammas.mean()), "gamma_least": float(gammas.min())},
        )


@dataclass(frozen=True)
class AdpSound(PrivateTraining):
    """DP-SGD that clips hardest what a public model finds rare: ADP's idea, with a proof.

    Record i is clipped to C kappa(rho_i), kappa falling from 1 to kappa_least as rho rises from 0 to 1; the noise
    stays at C sigma. A record's rho depends on it and on public things alone: its perplexity under a public model,
    between lowest_perplexity and highest_perplexity (0: 1 and the size of the vocabulary, whatever the data). Everyone
    has the epsilon of dp-sgd; who is clipped harder has less to fear, by how much is a secret of the record.
    """

    name: ClassVar[str] = "adp-sound"
    title: ClassVar[str] = "ADP, sound"
    claims: ClassVar[str] = "(epsilon, delta) for one record (or user), under any access and decoding"
    promises: ClassVar[bool] = True
    clipping_changes: ClassVar[str] = "each unit's gradient is clipped, harder the rarer a public model finds it"
    kappa_least: float = 0.1
    lowest_perplexity: float = 0.0
    highest_perplexity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clipping_share_options(*self._clipping_share_options)

    @property
    def _clipping_share_options(self) -> tuple[float, float, float]:
        return self.kappa_least, self.lowest_perplexity, self.highest_perplexity

    def choose_unit_treatment(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        # No share is above 1, so no unit adds more than C: the noise of dp-sgd is enough (formulas B4, variant B).
        return UnitTreatment(shares=compute_clipping_shares(job.public, examples, *self._clipping_share_options))

    def collect_recipe_details(self) -> dict[str, float]:
        return {**super().collect_recipe_details(), "kappa_least": self.kappa_least}

    def no_noise_control(self) -> NoNoise:
        kappa, lowest, highest = self._clipping_share_options
        alike = super().no_noise_control()
        return replace(alike, kappa_least=kappa, lowest_perplexity=lowest, highest_perplexity=highest)
