"""PMixED with many members: ours against the published loop, and PEFT's `adapter_names`, in one run.

    python benchmarks/speed/pmixed.py [--members 80] [--texts 16] [--secrets 16] [--samples 10] [--repeats 2]

The published loop asks one adapter at a time (`set_adapter`) over the whole context and finds each weight by SciPy's
bisection, 20 steps a member and position and both divergences a step, as the authors' `ensemble.py` does. It is slow:
its parts are timed on one text and ten weights, and scaled. Both serve the same members, those of a lab of so many
shards (built in minutes, then cached); distributions and weights are compared before anything is timed. Ratios of
processor time on one thread: other work on the machine hardly counts. Absolute times prove nothing.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from scipy.optimize import bisect
from torch import Tensor

from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.core.nouns import Query, Secret, Tokens
from auditor.defenses.pmixed import PMixed, PMixedModel
from auditor.models.base import perplexity_nll
from auditor.models.decoding import ANCESTRAL
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Scenario
from auditor.plugins.view import CLAIM, Sampling, View

_AGREE = 1e-6  # distributions, in probability
_SHAVE = 1e-4  # of the radius, which our search gives up in single precision
_WEIGHTS = 10  # timed, and scaled


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Processor time, the best of several runs after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


class Adapters:
    """The members as PEFT serves them."""

    def __init__(self, public: HuggingFaceModel, adapters: Sequence[Path]) -> None:
        self.public, self.size = public, len(adapters)
        self.peft = PeftModel.from_pretrained(copy.deepcopy(public.model), str(adapters[0]), adapter_name="0")
        for index, path in enumerate(adapters[1:], start=1):
            self.peft.load_adapter(str(path), adapter_name=str(index))
        self.peft.eval()

    @torch.no_grad()
    def one_at_a_time(self, context: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """(1 + members, n, V) probabilities of one context (1, n), the public model's first; all members by default."""
        distributions = [self.public.model(context).logits[0].softmax(-1)]
        for member in range(self.size) if members is None else members:
            self.peft.set_adapter(str(member))
            distributions.append(self.peft(context).logits[0].softmax(-1))
        return torch.stack(distributions)

    @torch.no_grad()
    def mixed_batch(self, context: Tensor) -> Tensor:
        """The same distributions in one batch, by `adapter_names`."""
        names = ["__base__", *(str(member) for member in range(self.size))]
        distributions: Tensor = self.peft(context.expand(1 + self.size, -1), adapter_names=names).logits.softmax(-1)
        return distributions


def divergence(p: Tensor, q: Tensor, alpha: int) -> Tensor:
    """As published: in probabilities, nats."""
    return torch.log(torch.sum(p**alpha / q ** (alpha - 1))) / (alpha - 1)


def weight(p: Tensor, p0: Tensor, model: PMixedModel, radius: float, *, both: bool, steps: int = 20) -> float:
    """lambda of one member at one position by bisection; both: bound the divergence in both directions."""
    alpha, cap = model.projection.alpha, model.projection.cap

    def excess(lam: float) -> float:
        mixed = lam * p + (1 - lam) * p0
        found = float(divergence(mixed, p0, alpha))
        return (max(found, float(divergence(p0, mixed, alpha))) if both else found) - radius

    if excess(cap) <= 0:
        return cap
    return float(bisect(excess, 0.0, cap, maxiter=steps, xtol=1e-13, disp=False))


def compare(adapters: Adapters, model: PMixedModel, text: Tokens) -> float:
    """The largest difference of the released distributions in probability, behind a text; fails above 1e-6.

    The loop's distribution is that of a bisection to the end in double precision, with the radius that ours keeps to.
    Fails too where a weight of ours is larger than the full radius allows.
    """
    context, radius, both = torch.tensor([text]), float(model.radii[1]), model.projection.two_sided
    distributions = adapters.one_at_a_time(context)[:, -1].double()
    distributions /= distributions.sum(-1, keepdim=True)
    members = distributions[1:]
    shaved, most = (
        torch.tensor([weight(p, distributions[0], model, r, both=both, steps=60) for p in members], dtype=torch.float64)
        for r in (radius * (1 - _SHAVE), radius)
    )
    share = sum(model.shares.values()) / len(members)
    theirs = distributions[0] + share * (shaved[:, None] * (members - distributions[0])).sum(0)
    difference = float((model.log_probs(context, 1)[0, 0].double().exp() - theirs).abs().max())
    assert difference <= _AGREE, f"the released distributions differ by {difference:.2g}"
    single = distributions.float().log()
    ours = model.projection.weights(single[1:], single[:1], radius)
    assert bool((ours <= most + 1e-12).all()), "a weight of ours is beyond the radius"
    return difference


def perplexity(model: PMixedModel, texts: Sequence[Tokens]) -> float:
    scores = list(perplexity_nll(model, texts))
    return math.exp(sum(nll for nll, _ in scores) / sum(count for _, count in scores))


def draws(model: PMixedModel, secrets: Sequence[Secret], samples: int) -> int:
    """Tokens drawn inside the claim, batched as a run batches them; anew each time."""
    view = View("pmixed", model, CLAIM, seed=0)
    queries = [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]
    for _ in view.candidates(queries, Sampling(samples, ANCESTRAL)):
        pass
    return view.meter.total


class Loop:
    """Seconds of the published loop, from its parts; `both`: directions of the divergence."""

    def __init__(self, adapters: Adapters, model: PMixedModel, text: Tokens, repeats: int) -> None:
        context = torch.tensor([text[:-1]])
        distributions = adapters.one_at_a_time(context, range(_WEIGHTS))[:, -1]
        self.members, self.q = adapters.size, model.q
        self.public = seconds(lambda: adapters.one_at_a_time(context, []), repeats)
        self.text = seconds(lambda: adapters.one_at_a_time(context), repeats)
        self.member = (self.text - self.public) / self.members
        radius = float(model.radii[1])
        self.weight = {
            both: seconds(
                lambda: [weight(p, distributions[0], model, radius, both=both) for p in distributions[1:]],  # noqa: B023
                repeats,
            )
            / _WEIGHTS
            for both in (False, True)
        }

    def perplexity(self, texts: Sequence[Tokens], weights: float, both: bool) -> float:
        """So many weights at each position."""
        return len(texts) * self.text + sum(len(t) - 1 for t in texts) * weights * self.weight[both]

    def sampling(self, tokens: int) -> float:
        """As published: every member is asked for every token, the subset is mixed."""
        return tokens * (self.text + self.members * self.q * self.weight[True])

    def sampling_by_few(self, tokens: int) -> float:
        """Only the subset is asked."""
        return tokens * (self.public + self.members * self.q * (self.member + self.weight[True]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("members", 80), ("texts", 16), ("secrets", 16), ("samples", 10), ("repeats", 2)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lab = Lab(LabRecipe(members=options.members), progress=lambda what, done, n: print(f"{what}: {done}/{n}", end="\r"))
    held = lab.ensemble()
    adapters = Adapters(held.public, sorted(lab.ensemble_folder.glob("member-*")))
    texts, members = lab.heldout[: options.texts], [secret for secret in lab.secrets if secret.member]
    secrets = members[:: max(1, len(members) // options.secrets)][: options.secrets]
    scenario = Scenario(held.public, held.public, held, 0, len(secrets[0].suffix))
    sound, published = (
        PMixed(alpha=3, queries=1024, accounting=rule).protect(scenario)  # type: ignore[arg-type]
        for rule in ("sound", "published")
    )
    assert isinstance(sound, PMixedModel) and isinstance(published, PMixedModel)
    print(
        f"{held.size} members, texts of {len(texts[0])} tokens, {held.public.vocab_size} words; alpha 3, q 0.03, T 1024"
    )
    worst = max(compare(adapters, sound, texts[i][:n]) for i, n in enumerate((5, 20, 35)))
    print(f"released distributions differ by at most {worst:.1g}; no weight of ours is beyond the radius", flush=True)

    loop = Loop(adapters, sound, texts[0], options.repeats)
    context, parts = torch.tensor([texts[0][:-1]]), torch.arange(1 + held.size)
    peft = seconds(lambda: adapters.mixed_batch(context), options.repeats)
    ours = seconds(lambda: held.log_probs(context.expand(len(parts), -1), parts, context.shape[1]), options.repeats)
    print(
        f"distributions of all members  {loop.text / ours:7.1f}x  set_adapter; adapter_names: {loop.text / peft:.1f}x"
    )

    ours = seconds(lambda: perplexity(sound, texts), options.repeats)
    both, one = (loop.perplexity(texts, held.size, both) / ours for both in (True, False))
    print(
        f"private perplexity      {both:7.1f}x  the loop, exact; did it look one way only: {one:.1f}x",
        flush=True,
    )
    ours = seconds(lambda: perplexity(published, texts[:2]), options.repeats)
    every = loop.perplexity(texts[:2], held.size * len(published.shares), True) / ours
    subset = loop.perplexity(texts[:2], held.size * loop.q, True) / ours
    print(
        f"  radius by subset size {every:7.1f}x  the loop, exact; one random subset a token: {subset:.1f}x",
        flush=True,
    )

    drawn = draws(sound, secrets, options.samples)
    ours = seconds(lambda: draws(sound, secrets, options.samples), options.repeats)
    all_asked, few = (found(drawn) / ours for found in (loop.sampling, loop.sampling_by_few))
    print(f"sampling                {all_asked:7.1f}x  the loop; did it ask the subset only: {few:.1f}x")
    print(
        f"the loop takes {1e3 * loop.member:.1f} ms a member and text, {1e3 * loop.weight[True]:.2f} ms a weight; "
        f"timed on 1 text and {_WEIGHTS} weights, scaled to {len(texts)} texts and {drawn:,} drawn tokens"
    )


if __name__ == "__main__":
    main()
