"""The public model in the target's place: what is left of the utility when nothing private is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario


@dataclass(frozen=True)
class Public(Defense):
    """Serve the public model in the target's place: the end of every trade-off that no private data stand behind."""

    name: ClassVar[str] = "public"
    title: ClassVar[str] = "Public model"
    needs: ClassVar[tuple[str, ...]] = ("public",)
    claims: ClassVar[str] = "none: the control row at no private data"

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.public is not None  # the run has seen to what is needed
        return scenario.public
