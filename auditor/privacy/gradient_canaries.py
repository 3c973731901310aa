"""Read and write `gradient-canaries.json`, a training's gradient canaries for an audit of its
claim.
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
    """A record of the gradient canaries of a private training.

    included: whether each canary was in the training data.
    scores: each canary's log-likelihood ratio of included against excluded, in nats, summed over
    steps.
    sums: each canary's share of the noisy gradient sums, in clipping norms, summed over steps. A
    step with the canary adds 1, and each step adds noise.

    releases: the number of noisy sums observed, whatever the accounting.
    drawn: the total draws of all canaries, included or not.
    unevenness: z-score of the draw counts, below 0 if more even than by Poisson sampling.
    noise_size: the root mean square of `noise_values` noise values over the reported deviation.
    noise_repeated: the largest correlation of two steps' noise.
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
    """Write the gradient canaries to the folder, atomically."""
    disk.replace_atomically(folder / FILE, json.dumps(to_json(canaries)) + "\n", sync=True)


def read_gradient_canaries(folder: Path) -> GradientCanaries | None:
    """Read the folder's gradient canaries; return None if there are none.

    Raise AuditError for a file with another structure.
    """
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
