"""Define the base class of attacks and probes: name, needs, measurements, report sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from auditor.core.nouns import Secret
from auditor.core.result import Finding, OwnSection
from auditor.plugins.options import Configured
from auditor.plugins.view import Sampling


@dataclass(frozen=True)
class Method(Configured):
    """Base class of attacks and probes: frozen dataclasses whose fields are their options.

    The first paragraph of a subclass's docstring describes the method.

    Attributes:
        measures: the kind of leak, one of `records.leak_readings.KINDS` or a new one; "" for none.
        needs: capabilities that the default options require: "draw", "likelihood", "ranks",
            "likeliest", "distribution", "embeddings", "training".
        of: the attacked records: secrets, canaries, records included by a coin, or the method's
            own.
        metrics: titles of the numbers that only this method reports, keyed by name.
        quick: its options in `audit check`; None for a method too slow for it.
    """

    measures: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("draw",)
    page: ClassVar[str] = "how-to/audit-your-model"  # of docs that explains it
    of: ClassVar[Literal["secrets", "canaries", "coins", "own"]] = "secrets"
    metrics: ClassVar[Mapping[str, str]] = {}
    quick: ClassVar[Mapping[str, Any] | None] = None
    deep: ClassVar[bool] = False  # whether `audit check --deep` uses it
    without_reference: ClassVar[
        Mapping[str, Any]
    ] = {}  # its options if there is no reference model
    without_distributions: ClassVar[Mapping[str, Any]] = {}  # its options for a model behind an API
    float32: ClassVar[bool] = False  # whether it is valid only in float32, which `auto` then picks
    least_nonmembers: ClassVar[int] = 0  # the fewest members and non-members that it needs
    # whether `audit check` uses it only without non-members, if some record contains the kind of
    # data that it examines
    instead_of_nonmembers: ClassVar[bool] = False

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        """Capabilities that the current options require, known before anything is drawn."""
        return self.needs

    @property
    def draws_samples(self) -> bool:
        """True if the method uses `--samples`; a search draws no samples."""
        return False

    def has_subject_in(self, secrets: Sequence[Secret]) -> bool:
        """Return whether any of these records contains the kind of data that is measured."""
        return True

    def sampling(self) -> Sampling | None:
        """Return the decoding with which the method samples, searches or reads distributions.

        The report shows it. Return None if the method does none of these.
        """
        return None

    def report_section(self, findings: Sequence[Finding]) -> OwnSection | None:
        """Return a section for the reports, or None for no section.

        `findings` are all results of this method in the run. `result.json` stores the section and
        reports show it unchanged, so it must not contain private text.
        """
        return None
