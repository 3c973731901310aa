"""What the target and a public model both would say: the rule of CP-Δ (Vyas et al. 2023), with no half of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.defenses.cp_delta import CommonModel, Distance, check_distance
from auditor.models.base import LanguageModel
from auditor.models.ensemble import ModelEnsemble
from auditor.plugins.defense import Defense, Scenario

_BOTH = (0, 1)  # the public model and the target


@dataclass(frozen=True)
class PublicCommon(Defense):
    """Sample what the target and the public model both find likely. No claim.

    distance: `max` mixes the two next-token distributions to min(q, p)/Z, `kl` to sqrt(q p)/Z. How much more likely a
    text is than under the public model, which saw no private data, depends on how little the two distributions overlap,
    and so on that data; it grows with each token, and nothing bounds it beforehand.
    """

    name: ClassVar[str] = "public-common"
    title: ClassVar[str] = "Common with the public model"
    needs: ClassVar[tuple[str, ...]] = ("public",)
    claims: ClassVar[str] = "none: how much more likely a text is than under the public model depends on the data"
    distance: Distance = "max"

    def __post_init__(self) -> None:
        check_distance(self.distance)

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.public is not None  # the run has seen to what is needed
        return CommonModel(ModelEnsemble(scenario.public, [scenario.target]), self.distance, _BOTH)
