"""Define providers, which load models: `--model NAME:REST` loads REST with the provider NAME.

A provider is a frozen dataclass in its own file. Its fields are its options (`--model-arg
OPTION=VALUE`). The first line of its docstring is its description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from auditor.core.plan_parts import LoadingOptions
from auditor.models.base import LanguageModel
from auditor.plugins.options import Configured


@dataclass(frozen=True)
class RequestedModel:
    """A request to a provider for a model; equal requests mean the same model.

    Attributes:
        name: the part of --model after the prefix.
        loading: options for loading the model.
        base_url: value of --base-url.
        tokenizer: value of --tokenizer.
        run: id of the run, to which tokens drawn from the model are charged.
        most: largest number of tokens that the run may draw (--max-tokens-total).
    """

    name: str
    loading: LoadingOptions
    base_url: str | None = None
    tokenizer: str | None = None
    run: str = field(default="", compare=False)
    most: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Provider(Configured):
    """Base class of all providers of models.

    Attributes:
        takes: fields of the plan about loading that this provider uses.
        unprefixed: whether the provider loads names without a prefix.
        network: whether requests go over a network and may cost money.
        distribution: whether its models give complete next-token distributions, which defenses
            need.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    unprefixed: ClassVar[bool] = False
    network: ClassVar[bool] = False
    distribution: ClassVar[bool] = True

    def check(self, request: RequestedModel) -> None:
        """Raise AuditError, before loading, if the model cannot be loaded."""

    def load(self, request: RequestedModel) -> LanguageModel:
        """Return the model. Raise AuditError, with one sentence, if the model does not exist."""
        raise NotImplementedError

    def prepare_for_next_run(self, model: LanguageModel, request: RequestedModel) -> None:
        """Prepare an already loaded model for the next run."""

    def list_model_sources(self, request: RequestedModel) -> Mapping[str, tuple[str, str | None]]:
        """Map the role of each part of the model to its source.

        A source is (file, folder or hub id; hub revision or None). A gate identifies the model by
        digests of the sources. The map is empty if the model has no files.
        """
        return {}

    def estimate_least_bytes(self, request: RequestedModel) -> int | None:
        """Return a lower bound on the model's bytes in memory; None if unknown before loading."""
        return None

    def describe_model(self, request: RequestedModel) -> str:
        """Describe the model in a sentence without a full stop."""
        return f"{request.name}, as it is"
