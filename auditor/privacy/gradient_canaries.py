"""Read and write `gradient-canaries.json`: a training's gradient canaries, to audit its claim."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.core.jsonable import read_record, write_json

FILE = "gradient-canaries.json"


@dataclass(frozen=True)
class GradientCanaries:
    """Record of the gradient canaries of a private training.

    Attributes:
        included: whether each canary was in the training data.
        scores: each canary's log-likelihood ratio of being included to being excluded, in nats,
            summed over steps.
        sums: each canary's share of the noisy gradient sums, in clipping norms, summed over steps.
            A step with the canary adds 1, and every step adds noise.
        releases: number of noisy sums observed, whatever the accounting.
        drawn: number of draws of all canaries together, included or not.
        unevenness: z-score of the draw counts; negative if they are more even than under Poisson
            sampling.
        noise_size: root mean square of `noise_values` noise values, divided by the reported
            deviation.
        noise_repeated: largest correlation between the noise of two steps.
    """

    included: tuple[bool, ...]
    scores: tuple[float, ...]
    sums: tuple[float, ...]
    # Parameters of the mechanism, as the training reports them; the scores assume them.
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
    seed: int = 0  # determines coins and directions, which depend on nothing secret
    schema_version: int = 1


def write_gradient_canaries(folder: Path, canaries: GradientCanaries) -> None:
    """Write the gradient canaries to the folder, atomically."""
    write_json(folder / FILE, canaries, indent=None, sync=True)


def read_gradient_canaries(folder: Path) -> GradientCanaries | None:
    """Return the gradient canaries in the folder, or None if there are none.

    Raise AuditError if the file has a different structure.
    """
    path = folder / FILE
    record = read_record(path, GradientCanaries, "gradient canaries")
    if record is None:
        return None
    sizes = list(map(len, (record.included, record.scores, record.sums)))
    if len(set(sizes)) > 1:
        counts = ", ".join(map(str, sizes))
        raise AuditError(f"{path}: expected a coin, a score and a sum of each canary, got {counts}")
    return record
