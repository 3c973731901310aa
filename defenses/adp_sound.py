"""ADP made sound (formulas B4, variant B): fixed noise, a smaller clipping norm for records that look private."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from auditor.defenses.privacy_probability import against_constants, log_perplexities
from auditor.defenses.private_training import Judgement, PrivateTraining
from auditor.errors import AuditError
from auditor.types import Tokens, TrainingJob


@dataclass(frozen=True)
class AdpSound(PrivateTraining):
    """Fine-tune with DP-SGD that clips records harder the rarer a public model finds them: ADP's idea, with a proof.

    Record i is clipped to C kappa(rho_i), kappa falling from 1 to kappa_least as rho rises from 0 to 1; the noise
    stays at C sigma. A record's rho depends on it and on public things alone: its perplexity under a public model,
    between lowest_perplexity and highest_perplexity (0: 1 and the size of the vocabulary, whatever the data). Everyone
    has the epsilon of dp-sgd; who is clipped harder has less to fear, by how much is a secret of the record.
    """

    name: ClassVar[str] = "adp-sound"
    title: ClassVar[str] = "ADP, sound"
    claims: ClassVar[str] = "(epsilon, delta) for one record (or user), under any access and decoding"
    kappa_least: float = 0.1
    lowest_perplexity: float = 0.0
    highest_perplexity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.kappa_least <= 1:
            raise AuditError(f"expected kappa_least in (0, 1], got {self.kappa_least}")
        against_constants(np.zeros(0), self.lowest_perplexity or 1, self.highest_perplexity or 1e9)

    def judge(self, job: TrainingJob, examples: Sequence[Tokens]) -> Judgement:
        lowest, highest = self.lowest_perplexity or 1.0, self.highest_perplexity or float(job.public.vocab_size)
        rho = against_constants(log_perplexities(job.public, examples), lowest, highest)
        return Judgement(shares=(1 - (1 - self.kappa_least) * rho).tolist())
