"""Private training without its noise and its clipping: what its recipe alone leaves of a leak, and costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.core.errors import AuditError
from auditor.training.poisson import NonPrivateControl


@dataclass(frozen=True)
class NoClipping(NonPrivateControl):
    """Fine-tune as private training does, without noise and without clipping: its recipe alone, and no claim.

    Options as in `dp-sgd`.
    """

    name: ClassVar[str] = "no-clipping"
    title: ClassVar[str] = "No clipping, no noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_canaries:
            raise AuditError(
                "expected gradient_canaries=0 for no-clipping, whose gradients have no norm to plant canaries of, "
                f"got {self.gradient_canaries}"
            )
