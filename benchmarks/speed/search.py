"""K samples against the threshold-complete tree at equal forward rows, on the lab's target with no soft prompt.

    python benchmarks/speed/search.py [--samples 100] [--limit N] [--thresholds 0.01 0.001]

Samples are ranked by Ethicist's calibrated confidence, leaves by their exact probability under the same decoding
distribution (top-p 0.7, temperature 0.8), and both by the nll of the attacked distribution. The threshold of equal rows
is found by bisection. A row is one token of one sequence through the model; seconds are those of the search alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auditor.attacks.ethicist import calibrated_confidence
from auditor.benchmarks.lab import Lab
from auditor.core.nouns import Query, Secret
from auditor.core.streams import uniforms
from auditor.generation.sample import Candidates, sample
from auditor.generation.search import Leaves, beam, tree
from auditor.models.decoding import Decoding, by_shape
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.attack import ranked
from auditor.statistics import extraction, judging, ranking

OWN = Decoding(temperature=0.8, top_p=0.7)
Score = Callable[[Candidates], Tensor]


@dataclass(frozen=True)
class Pass:
    """The candidates of every secret, and what they cost."""

    candidates: list[Candidates]
    seconds: float

    @property
    def rows(self) -> int:
        return sum(found.forward_rows() for found in self.candidates)


def search(
    secrets: Sequence[Secret], batch: int, find: Callable[[Tensor, int, list[Secret]], list[Candidates]]
) -> Pass:
    found: dict[str, Candidates] = {}
    start = time.perf_counter()
    for indices in by_shape([(len(s.prefix), len(s.suffix)) for s in secrets], batch):
        some = [secrets[i] for i in indices]
        prefixes = torch.tensor([s.prefix for s in some])
        found.update(zip((s.id for s in some), find(prefixes, len(some[0].suffix), some), strict=True))
    return Pass([found[s.id] for s in secrets], time.perf_counter() - start)


def sampled(model: HuggingFaceModel, secrets: Sequence[Secret], samples: int) -> Pass:
    def find(prefixes: Tensor, length: int, some: list[Secret]) -> list[Candidates]:
        noise = np.stack([uniforms(samples, length, "search", s.id) for s in some])
        return sample(model, prefixes, length, OWN, noise)

    return search(secrets, max(1, 2048 // samples), find)


def grown(model: HuggingFaceModel, secrets: Sequence[Secret], threshold: float) -> Pass:
    return search(secrets, 64, lambda prefixes, length, some: [*tree(model, prefixes, length, OWN, threshold)])


def beamed(model: HuggingFaceModel, secrets: Sequence[Secret], beams: int) -> Pass:
    return search(secrets, 64, lambda prefixes, length, some: [*beam(model, prefixes, length, beams)])


def at_equal_rows(model: HuggingFaceModel, secrets: Sequence[Secret], rows: int, steps: int = 7) -> tuple[float, Pass]:
    """The largest threshold, to 2% of the rows, at which the tree spends about as many of them: never more."""
    low, high, best = 1e-5, 0.1, (1.0, grown(model, secrets, 1.0))
    for _ in range(steps):
        middle = math.sqrt(low * high)
        found = grown(model, secrets, middle)
        if found.rows > rows:
            low = middle
            continue
        high, best = middle, (middle, found)
        if found.rows > 0.98 * rows:
            break
    return best


def exact(candidates: Candidates) -> Tensor:
    assert isinstance(candidates, Leaves)
    return candidates.log_q


def likelihood(candidates: Candidates) -> Tensor:
    return -candidates.nll


def line(name: str, how: str, found: Pass, secrets: Sequence[Secret], score: Score) -> str:
    guesses = [
        ranked(Query(s.id, s.prefix, len(s.suffix)), c, score(c), 0)
        for s, c in zip(secrets, found.candidates, strict=True)
    ]
    outcome = judging.judge(guesses, {s.id: s for s in secrets})
    members = outcome.only(outcome.member)
    measured = {m.name: m for m in extraction.extraction(outcome)}
    shares = [measured[m] for m in ("recall", "any_of_k", "recall_at_100_errors", "recall_at_10pct_errors")]
    numbers = "".join(f"{m.value:9.3f}" for m in shares)
    curve = ranking.recall_at_errors("recall_at_10_errors", members, 10).value
    return f"{name:<26}{how:<24}{numbers}{curve:9.3f}{found.rows:>10,}{found.seconds:>9.1f}"


def certificates(found: Pass) -> str:
    held = [c.certificate for c in found.candidates if isinstance(c, Leaves)]
    reached, certified = sum(c.reached for c in held), sum(c.certified for c in held)
    leftover = sum(c.leftover for c in held) / len(held)
    leaves = sum(len(c.counts) for c in found.candidates) / len(held)
    return (
        f"{reached}/{len(held)} reach it, {certified} certified, {leftover:.3f} left over, {leaves:.1f} leaves a secret"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--beams", type=int, default=10)
    parser.add_argument("--limit", type=int, default=None, help="members, and non-members, at most")
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.1, 0.01])
    options = parser.parse_args()
    lab = Lab(progress=lambda what, done, total: print(f"{what}: {done}/{total}", end="\r"), limit=options.limit)
    model, secrets = lab.target(), lab.secrets
    print(f"{'candidates':<26}{'ranked by':<24}   recall   any-of  @100err  @10%err   @10err      rows  seconds")
    drawn = sampled(model, secrets, options.samples)
    print(
        line(f"{options.samples} samples", "calibrated confidence", drawn, secrets, calibrated_confidence), flush=True
    )
    print(line("", "nll", drawn, secrets, likelihood), flush=True)
    trees = [(f"tree {t:g}", grown(model, secrets, t)) for t in options.thresholds]
    threshold, same = at_equal_rows(model, secrets, drawn.rows)
    for name, found in [*trees, (f"tree {threshold:.2g} equal rows", same)]:
        print(line(name, "exact probability", found, secrets, exact))
        print(line("", "nll", found, secrets, likelihood))
        print(line("", "calibrated confidence", found, secrets, calibrated_confidence))
        print(f"{'':<26}{certificates(found)}", flush=True)
    beams = beamed(model, secrets, options.beams)
    print(line(f"beam {options.beams}", "nll", beams, secrets, likelihood))


if __name__ == "__main__":
    main()
