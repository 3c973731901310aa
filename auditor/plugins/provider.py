"""Providers: where models come from. `--model NAME:REST` asks the provider NAME for REST.

A provider is a frozen dataclass in one file: its fields are its options (`--model-arg
OPTION=VALUE`), the first line of its docstring is its description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from auditor.core.plan_parts import LoadingOptions
from auditor.models.base import LanguageModel


@dataclass(frozen=True)
class RequestedModel:
    """A model that a provider is asked for; equal ones are the same model.

    name: what stands behind the prefix. run, most: the run that pays for what the model is asked,
    and for how many tokens at most.
    """

    name: str
    loading: LoadingOptions
    base_url: str | None = None
    tokenizer: str | None = None
    run: str = field(default="", compare=False)
    most: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Provider:
    """Base of all providers."""

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what people read in a table; "": its name
    takes: ClassVar[
        tuple[str, ...]
    ] = ()  # of the plan's fields about loading, those that mean something here
    unprefixed: ClassVar[bool] = False  # whether it is asked for names without a prefix
    # whether its models are asked over a network, for which somebody may charge
    network: ClassVar[bool] = False
    # whether its models give whole next-token distributions, which defenses read
    distribution: ClassVar[bool] = True

    def check(self, wanted: RequestedModel) -> None:
        """Refuses what cannot be loaded, before anything is. Raises AuditError."""

    def load(self, wanted: RequestedModel) -> LanguageModel:
        """The model. Raises AuditError, one sentence, where there is none."""
        raise NotImplementedError

    def prepare_for_next_run(self, model: LanguageModel, wanted: RequestedModel) -> None:
        """Called when another run is to use a model that this provider has loaded already."""

    def model_sources_by_role(self, wanted: RequestedModel) -> Mapping[str, tuple[str, str | None]]:
        """By role, what the model is read from: a file, folder or hub id, and the revision of one
        on the hub.

        A gate knows the judged model by the digests of these; empty for a model of which there are
        no files.
        """
        return {}

    def least_model_bytes(self, wanted: RequestedModel) -> int | None:
        """Bytes that the model takes at least, as far as that is known before it is loaded."""
        return None

    def model_description(self, wanted: RequestedModel) -> str:
        """What the model is: a sentence without its full stop."""
        return f"{wanted.name}, as it is"
