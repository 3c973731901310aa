"""Models that are shown beside a defended one: the public model, and one adapter on all data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario

CONTROL = "audit train pmixed -D control=true makes it"  # the one adapter, outside the lab


@dataclass(frozen=True)
class PublicModelControl(Defense):
    """Serve the public model in the target's place: no private data at all, the end of every trade-off."""

    name: ClassVar[str] = "public"
    title: ClassVar[str] = "Public model"
    needs: ClassVar[tuple[str, ...]] = ("public",)
    claims: ClassVar[str] = "none: the control row at no private data"

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.public is not None  # the run has seen to what is needed
        return scenario.public


@dataclass(frozen=True)
class OneAdapterControl(Defense):
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
