"""`gradient-canaries.json`: what a training kept of its gradient canaries, for an audit of what it
promises.

Knows records of numbers and words; trains nothing and bounds nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object, to_json

FILE = "gradient-canaries.json"


@dataclass(frozen=True)
class GradientCanaries:
    """Of each canary whether it was in the data, and what the released noisy sums said of that; and
    what was assumed.

    scores: the log-likelihood ratio of in against out, in nats, summed over the steps. sums: of its
    share of each noisy sum, in clipping norms, summed over the steps: 1 for each step that it took
    part in, and noise. releases: noisy sums that were seen, whatever was accounted for. drawn: how
    often any canary was drawn, in or out; unevenness: of how often each was, below 0 where more
    evenly than by Poisson sampling. noise_size, noise_repeated: of so many values of the noise,
    over the deviation that it is said to have, the root mean square, and the largest correlation of
    two steps.
    """

    included: tuple[bool, ...]
    scores: tuple[float, ...]
    sums: tuple[float, ...]
    # The mechanism that the scores are likelihoods under: what the training says of itself.
    noise_multiplier: float
    sampling_rate: float
    steps: int
    clip: float
    delta: float
    unit: str
    releases: int
    drawn: int
    unevenness: float
    noise_values: int
    noise_size: float
    noise_repeated: float
    adjacency: str = "add_remove"
    seed: int = 0  # coins and directions follow from it, and from nothing that is secret
    schema_version: int = 1


def write_gradient_canaries(folder: Path, canaries: GradientCanaries) -> None:
    """Writes it whole or not at all."""
    disk.replace_atomically(folder / FILE, json.dumps(to_json(canaries)) + "\n", sync=True)


def read_gradient_canaries(folder: Path) -> GradientCanaries | None:
    """What the folder's training kept; None where it kept nothing. Raises AuditError for another
    form."""
    path = folder / FILE
    if not path.is_file():
        return None
    record: GradientCanaries = from_json(
        GradientCanaries, read_json_object(path, "gradient canaries"), str(path)
    )
    if not len(record.included) == len(record.scores) == len(record.sums):
        counts = ", ".join(
            str(len(column)) for column in (record.included, record.scores, record.sums)
        )
        raise AuditError(f"{path}: expected a coin, a score and a sum of each canary, got {counts}")
    return record
