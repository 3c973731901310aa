"""Provide two control models for a defended model: the public model, and a single adapter."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario

# How to make the single adapter outside the lab.
CONTROL = "audit train pmixed -D control=true makes it"


@dataclass(frozen=True)
class PublicModelControl(Defense):
    """Serve the public model, which saw no private data, instead of the audited model."""

    name = "public"
    title = "Public model"
    needs = ("public",)
    claims = "none: the control without private data"

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.public is not None  # the run checks `needs`
        return scenario.public


@dataclass(frozen=True)
class OneAdapterControl(Defense):
    """Serve one adapter on all data, trained like PMixED's members but without splitting the data.

    This control makes no privacy claim.

    ensemble: the folder of the members, to which `audit train pmixed -D control=true` adds this
    adapter; a built-in lab trains its own.
    """

    name = "one-adapter"
    title = "One adapter, all data"
    needs = ("public", "whole")
    claims = "none: the control of pmixed for its members' training configuration"
    ensemble: str = ""

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.whole is not None  # the run checks `needs`
        return scenario.whole
