"""Exact extraction probabilities against K samples a prefix, by repetition group, in one run.

    python benchmarks/speed/extraction_probability.py [--samples 100] [--secrets 8] [--repeats 2]

All three say how likely the lab's target is to give each suffix away under Ethicist's decoding (top-p 0.7, temperature
0.8): the probe exactly, from one teacher-forced pass; our own sampler (`View.candidates`, count splitting) and
`generate` with a scoring pass by counting. Ratios of processor time on one thread: absolute times on shared machines
prove nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from sampling import OWN, seconds, theirs  # the script beside this one

from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.benchmarks.lab import Lab
from auditor.core.nouns import Query, Secret
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.view import WORST, Sampling, View

PROBE = ExtractionProbability(OWN.temperature, OWN.top_p)


def counted(model: HuggingFaceModel, secrets: Sequence[Secret], samples: int) -> float:
    """Share of the samples that are the suffix. A view of its own for each pass: a view remembers what was drawn."""
    answers = {secret.id: secret.suffix for secret in secrets}
    queries = [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]
    hits = 0
    for batch in View("target", model, WORST, seed=0).candidates(queries, Sampling(samples, OWN)):
        for query, found in batch:
            pairs = zip(found.suffixes.tolist(), found.counts.tolist(), strict=True)
            hits += sum(count for suffix, count in pairs if tuple(suffix) == answers[query.id])
    return hits / (samples * len(secrets))


def exact(model: HuggingFaceModel, secrets: Sequence[Secret]) -> float:
    observed = PROBE.measure(View("target", model, WORST, seed=0), secrets)
    return sum(math.exp(seen.values["log_p"]) for seen in observed) / len(secrets)


def compare(name: str, model: HuggingFaceModel, secrets: Sequence[Secret], samples: int, repeats: int) -> None:
    p, share = exact(model, secrets), counted(model, secrets, samples)
    prefixes, length = torch.tensor([s.prefix for s in secrets]), len(secrets[0].suffix)
    probe, ours, naive = seconds(
        repeats,
        lambda: exact(model, secrets),
        lambda: counted(model, secrets, samples),
        lambda: theirs(model, prefixes, samples, length),
    )
    print(f"{name:>12}  {ours / probe:8.1f}x  {naive / probe:8.1f}x   {p:.3f}  {share:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--secrets", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lab = Lab(progress=lambda what, done, total: print(f"{what}: {done}/{total}", end="\r"))
    target = lab.target()
    groups = {r: [s for s in lab.secrets if s.member and s.repeats == r][: options.secrets] for r in lab.recipe.counts}
    print(f"{options.secrets} secrets a group; speed of the probe in times that of K = {options.samples} samples with")
    print(f"{'':>12}  {'ours':>9}  {'generate':>9}   mean p, exact and counted by ours")
    for repeats, secrets in groups.items():
        compare(f"{repeats} repeats", target, secrets, options.samples, options.repeats)
    mix = [secret for secrets in groups.values() for secret in secrets]
    compare("the mix", target, mix, options.samples, options.repeats)


if __name__ == "__main__":
    main()
