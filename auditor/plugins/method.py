"""What attacks and probes have in common: name, needs, what they measure, what they add to
reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from auditor.core.result import Finding, OwnSection
from auditor.plugins.view import Sampling


@dataclass(frozen=True)
class Method:
    """Base of attacks and probes: fields of the frozen dataclass are options, the first docstring
    line describes it.

    `needs` names the capabilities without which it cannot run by default: "draw", "likelihood",
    "ranks", "likeliest", "distribution", "embeddings", "training". `metrics` are the titles, by
    name, of numbers that are its own.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what people read in a table; "": its name
    # a way to leak: one of `records.leak_readings.KINDS` or its own; "": none
    measures: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("draw",)
    page: ClassVar[str] = "how-to/audit-your-model"  # of docs, where it is explained
    of: ClassVar[Literal["secrets", "canaries", "coins", "own"]] = "secrets"  # what it looks at
    metrics: ClassVar[Mapping[str, str]] = {}
    # its options in `audit check`; None: it takes too long for that
    quick: ClassVar[Mapping[str, Any] | None] = None
    deep: ClassVar[bool] = False  # whether `audit check --deep` uses it, though it takes long
    without_reference: ClassVar[
        Mapping[str, Any]
    ] = {}  # options to set where there is no reference model
    without_distributions: ClassVar[Mapping[str, Any]] = {}  # options to set behind an API
    # whether it is right in float32 alone: `--dtype auto` then means that
    float32: ClassVar[bool] = False
    least_nonmembers: ClassVar[int] = 0  # it needs as many, and as many members, to say anything

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        """The capabilities that it cannot run without as its options are set: known before anything
        is drawn."""
        return self.needs

    @property
    def draws_samples(self) -> bool:
        """Whether it takes a number of samples (`--samples`): a search draws none."""
        return False

    def sampling(self) -> Sampling | None:
        """The recipe of its candidates, or of the distribution it reads, for the report; None: it
        has neither."""
        return None

    def report_section(self, findings: Sequence[Finding]) -> OwnSection | None:
        """Its own section of the reports, of all of its rows of the run; None: it has none.

        It is kept in `result.json` and shown as it stands, so it must not hold private text.
        """
        return None
