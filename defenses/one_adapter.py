"""One adapter on all data, trained as the members of an ensemble are: what their recipe alone leaves of a leak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario

CONTROL = "audit train pmixed -D control=true makes it"  # outside the lab


@dataclass(frozen=True)
class OneAdapter(Defense):
    """One adapter on all data, trained by the recipe of PMixED's members: nothing is split, nothing mixed. No claim.

    ensemble: the folder of the members, where `audit train pmixed -D control=true` leaves it; the lab has its own.
    """

    name: ClassVar[str] = "one-adapter"
    title: ClassVar[str] = "One adapter, all data"
    needs: ClassVar[tuple[str, ...]] = ("public", "whole")
    claims: ClassVar[str] = "none: the control row of pmixed for its members' training configuration"
    ensemble: str = ""

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.whole is not None  # the run has seen to what is needed
        return scenario.whole
