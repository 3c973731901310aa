"""ADP made sound (formulas B4, variant B): fixed noise, a smaller clipping norm for records that look private."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from auditor.core.nouns import Tokens
from auditor.defenses.private_training import PrivateTraining
from auditor.defenses.private_training_controls import NoNoise
from auditor.plugins.trainer import TrainingJob
from auditor.training.poisson import UnitTreatment
from auditor.training.rarity import check_clipping_share_options, clipping_shares


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

    def judge(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        return UnitTreatment(shares=clipping_shares(job.public, examples, *self._clipping_share_options))

    def recorded(self) -> dict[str, float]:
        return {**super().recorded(), "kappa_least": self.kappa_least}

    def without_noise(self) -> NoNoise:
        kappa, lowest, highest = self._clipping_share_options
        alike = super().without_noise()
        return replace(alike, kappa_least=kappa, lowest_perplexity=lowest, highest_perplexity=highest)
