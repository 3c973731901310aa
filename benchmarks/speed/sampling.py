"""Our sampler against `generate(num_return_sequences=K)` plus a scoring pass, by repetition group, in one run.

    python benchmarks/speed/sampling.py [--samples 100] [--secrets 48] [--repeats 3]

Both produce K samples of each prefix of the lab's target under Ethicist's decoding (top-p 0.7, temperature 0.8) and the
log-probability of each distinct one. Ours is the pass that every attack of a run shares, batched as a run batches it.
Ratios only: absolute times on shared machines prove nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from auditor.benchmarks.lab import Lab
from auditor.models import HuggingFaceModel
from auditor.sampling import Decoding
from auditor.types import Query, Secret
from auditor.view import WORST, Sampling, View

OWN = Decoding(temperature=0.8, top_p=0.7)


def ours(model: HuggingFaceModel, secrets: Sequence[Secret], samples: int) -> int:
    """Samples and scores, anew each time; returns the rows that were forwarded."""
    view = View("undefended", model, WORST, seed=0)
    queries = [Query(s.id, s.prefix, len(s.suffix)) for s in secrets]
    batches = view.candidates(queries, Sampling(samples, OWN))
    return sum(candidates.forward_rows() for batch in batches for _, candidates in batch)


def theirs(model: HuggingFaceModel, prefixes: Tensor, samples: int, length: int) -> None:
    """generate, one prefix at a time as the reference implementation does, then one scoring pass."""
    for prefix in prefixes:
        out = model.model.generate(
            prefix[None],
            attention_mask=torch.ones_like(prefix[None]),
            do_sample=True,
            num_return_sequences=samples,
            max_new_tokens=length,
            min_new_tokens=length,
            temperature=OWN.temperature,
            top_p=OWN.top_p,
            top_k=0,
            pad_token_id=0,
        )
        with torch.no_grad():
            model.token_log_probs(out[:, : len(prefix)], out[:, len(prefix) :])


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The best of several runs: the one least disturbed."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(name: str, model: HuggingFaceModel, secrets: Sequence[Secret], samples: int, repeats: int) -> float:
    prefixes = torch.tensor([s.prefix for s in secrets])
    length = len(secrets[0].suffix)
    share = ours(model, secrets, samples) / (len(secrets) * samples * length)
    mine = seconds(lambda: ours(model, secrets, samples), repeats)
    other = seconds(lambda: theirs(model, prefixes, samples, length), repeats)
    print(f"{name:>12}  {other / mine:8.1f}x  {share:7.1%} of the naive rows", flush=True)
    return other / mine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--secrets", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    lab = Lab(progress=lambda what, done, total: print(f"{what}: {done}/{total}", end="\r"))
    target = lab.target()
    groups = {r: [s for s in lab.secrets if s.member and s.repeats == r][: options.secrets] for r in lab.recipe.counts}
    print(f"K = {options.samples}, {options.secrets} secrets a group; times the speed of generate + scoring")
    for repeats, secrets in groups.items():
        compare(f"{repeats} repeats", target, secrets, options.samples, options.repeats)
    mix = [secret for secrets in groups.values() for secret in secrets]
    compare("the mix", target, mix, options.samples, options.repeats)
    compare("public model", lab.public(), groups[1], options.samples, options.repeats)


if __name__ == "__main__":
    main()
