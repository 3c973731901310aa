"""Compare an accelerator's results with the processor's, and its speed with transformers'
`generate`.

    python -m validation.speed.accelerator [--device cuda] [--model smollm2] [--texts 32] [-o FILE]

Both devices have the same weights; results are compared in float32. A difference in nats or of a
value is the largest difference found; trained weights are compared relative to how far training
moved them. Exits with 1 if a difference is above its limit. Then speed is measured in samples of
16 tokens a second, until the device is done; our samples include their log-probabilities.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from auditor.attacks.ethicist import Ethicist
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.membership import Membership
from auditor.attacks.near_verbatim import bound_near_verbatim_probability
from auditor.benchmarks.lab.smollm2 import find_smollm2_folder
from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError
from auditor.core.nouns import Query, Tokens
from auditor.core.plan_parts import LoadingOptions
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.generation import tries
from auditor.models import precision
from auditor.models.decoding import ANCESTRAL
from auditor.models.loading import load_causal_lm
from auditor.models.self_check import configure_serving
from auditor.plugins.view import Sampling
from auditor.runs import scoring
from auditor.training import clipping, noise
from auditor.training import members as ensemble
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, fit_privately
from auditor.training.finetune import FineTuningRecipe
from validation.harness import Page, median_and_spread, run
from validation.speed.sheet import MODELS, OWN, PREFIX, SUFFIX, Bench, texts, took

_NATS = 1e-3  # log-probability of a token: sums of float32 in a different order
_TOKENS = 0.02  # share of all tokens: after a different token, all later ones differ
_LIMITS = np.arange(1.0, 41.0).tolist()  # nats: limits within which candidates are counted
_WEIGHTS = 1e-2  # relative to the distance that a training moved the weights


@dataclass(frozen=True)
class Agreement:
    """One measured difference between the device and the processor, and its limit."""

    what: str
    apart: float
    limit: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.apart <= self.limit


PARTS = ("reading", "decoding", "training", "speed")
Both = tuple[Bench, Bench]  # on the processor, on the device


def compared(both: Both, scratch: Path, count: int, parts: Collection[str]) -> Iterator[Agreement]:
    """Yield the comparisons of the requested parts, in the order in which an audit needs them."""
    if "reading" in parts:
        yield from _of_reading(both, count)
    if "decoding" in parts:
        yield from _of_decoding(both, count)
    if "training" in parts:
        yield from _of_training(both, scratch)


def _largest(both: Both, ask: Callable[[Bench], Any]) -> float:
    """Return the largest absolute difference between the answers of both benches."""
    one, other = (np.asarray(_on_cpu(ask(bench)), dtype=np.float64) for bench in both)
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


def _others(both: Both, ask: Callable[[Bench], Any]) -> float:
    """Return the share of tokens that differ between the answers of both benches."""
    one, other = (np.asarray(_on_cpu(ask(bench))) for bench in both)
    return float((one != other).mean())


def _on_cpu(found: Any) -> Any:
    return found.cpu() if isinstance(found, Tensor) else found


def _relative(both: Both, ask: Callable[[Bench], Tensor]) -> float:
    one, other = map(ask, both)
    return float((one - other).norm() / one.norm())


def _of_reading(both: Both, count: int) -> Iterator[Agreement]:
    def scored(probe: Any, name: str) -> Callable[[Bench], list[float]]:
        return lambda bench: [
            one.values[name] for one in probe.observe_secrets(bench.view(), bench.secrets[:count])
        ]

    @torch.no_grad()
    def distributions(bench: Bench) -> Tensor:
        _, prefixes, _ = bench.some(min(8, count))
        return bench.model.log_probs(prefixes, PREFIX // 2).exp()

    @torch.no_grad()
    def near(bench: Bench) -> Tensor:
        _, prefixes, suffixes = bench.some(4)
        return torch.stack(
            bound_near_verbatim_probability(bench.model, ANCESTRAL, prefixes, suffixes, 5, 20)
        )

    def exposure(bench: Bench) -> np.ndarray:
        tree = tries.load_or_build_trie(CanarySpace("My ID is {digits:2}"), bench.model.tokenizer)
        return np.log2(
            tries.count_leaves_within_nll(bench.model, tree, tree.head, _LIMITS).at_most + 1.0
        )

    probability, likely = (
        ExtractionProbability(temperature=1.0, top_p=1.0),
        Membership(lowercase=False, score="loss"),
    )
    peaks = Membership(lowercase=False, score="min_k_plus")
    apart = partial(_largest, both)
    yield Agreement("next-token distributions", apart(distributions), 1e-4, "probability")
    yield Agreement(
        "exact probability", apart(scored(probability, "log_p")) / SUFFIX, _NATS, "nats a token"
    )
    yield Agreement("membership, loss", apart(scored(likely, "loss")), _NATS, "nats a token")
    yield Agreement(
        "membership, Min-K%++", apart(scored(peaks, "min_k_plus")), 1e-2, "of the score"
    )
    yield Agreement("near-verbatim, bounds by 20 beams", apart(near), 0.05, "nats a text")
    yield Agreement("exposure of 100 candidates", apart(exposure), 0.05, "bits")


def _of_decoding(both: Both, count: int) -> Iterator[Agreement]:
    def greedy(bench: Bench) -> list[Tokens]:
        return scoring.decode_greedily(bench.model, bench.secrets[:count])

    def leaves(bench: Bench) -> list[set[Tokens]]:
        queries = [Query(s.id, s.prefix, 4) for s in bench.secrets[:4]]
        sampling = Sampling(1, OWN, search="tree", threshold=0.01)
        batches = bench.view().candidates(queries, sampling)
        return [set(map(tuple, found.suffixes.tolist())) for batch in batches for _, found in batch]

    unit, together = "of tokens are others", partial(drawn, count=count)
    yield Agreement("greedy suffixes", _others(both, greedy), _TOKENS, unit)
    yield Agreement("8 samples a prefix", _others(both, together), _TOKENS, unit)
    alone = torch.cat([drawn(both[1], 1, first) for first in range(count)])
    differ = float((together(both[1]) != alone).double().mean())
    yield Agreement("samples on the device, alone and beside others", differ, _TOKENS, unit)
    one, other = map(leaves, both)
    differ = sum(len(a ^ b) for a, b in zip(one, other, strict=True)) / max(1, sum(map(len, one)))
    yield Agreement("exact tree to 1 in 100", differ, _TOKENS, "of leaves are others")


def drawn(bench: Bench, count: int, first: int = 0) -> Tensor:
    """Return tokens (count, 8, SUFFIX), drawn with random numbers that depend only on the secret's
    index.
    """
    secrets = bench.secrets[first : first + count]
    prefixes = bench.tensor([secret.prefix for secret in secrets])
    numbers = torch.stack(
        [torch.as_tensor(draw_secret_uniforms(8, SUFFIX, first + i)) for i in range(count)]
    )
    return bench.model.completions(prefixes, SUFFIX, OWN, numbers).tokens


def _of_training(both: Both, scratch: Path) -> Iterator[Agreement]:
    def released(bench: Bench) -> Tensor:
        like = torch.zeros(1_000_000, device=bench.model.device)
        return noise.add_gaussian_noise(like, 1.0, noise.NoiseStream("accelerator", 0))

    def tuned(bench: Bench) -> list[float]:
        method = Ethicist(epochs=2, prompt_length=20, batch=8, warmup_steps=0)
        state = method._tune_soft_prompt(
            bench.model, bench.pairs[:16], bench.pairs[16:20], ("accelerator",)
        )
        return list(state["validation_loss"])

    def privately(bench: Bench, sigma: float) -> Tensor:
        model = bench._adapted().train()
        before = moved(model)
        examples = [pair.prefix + pair.suffix for pair in bench.pairs[:8]]
        recipe = PrivateRecipe(sigma, 1.0, 3, 8, 1e-2, optimizer="sgd", physical_batch=8)
        fit_privately(model, examples, PoissonSampler(8, 1.0, "accelerator"), recipe, pad=0)
        return moved(model) - before

    def members(bench: Bench) -> Tensor:
        adapter, base = ensemble.LoraAdapterRecipe(8, 16, "attention"), bench.model.model
        course = FineTuningRecipe(epochs=2, rate=1e-3, batch=2, block=PREFIX + SUFFIX, end=0)
        folder = Path(tempfile.mkdtemp(dir=scratch))
        every = [pair.prefix + pair.suffix for pair in bench.pairs[:16]]
        waiting = [
            ensemble.MemberToTrain(folder / f"m{i}", ["t"] * 8, every[i * 8 :][:8], i, (0, i))
            for i in range(2)
        ]
        ensemble.train_private_members(base, adapter, waiting, course)
        return torch.cat([learnt(folder / f"m{i}") for i in range(2)])

    yield Agreement(
        "secret noise, a million values", _others(both, released), 1e-4, "of values are others"
    )
    for bench in both:  # raises if float64 does not give the expected values
        clipping.check_gradient_clipping(
            [p for p in bench._adapted().parameters() if p.requires_grad], 1.0, 8
        )
    yield Agreement("a tuned soft prompt's losses", _largest(both, tuned), 0.02, "nats")
    for sigma in (0.0, 1.0):
        what = f"DP-SGD, three steps, noise multiplier {sigma:g}"
        yield Agreement(
            what, _relative(both, partial(privately, sigma=sigma)), _WEIGHTS, "of the weights' move"
        )
    what = "two adapters, trained together where the trial permits it"
    yield Agreement(what, _relative(both, members), 0.05, "of the weights")


def moved(model: Any) -> Tensor:
    return torch.cat(
        [p.detach().double().cpu().flatten() for p in model.parameters() if p.requires_grad]
    )


def learnt(folder: Path) -> Tensor:
    """Return the LoRA B matrices of an adapter, which are initially zero, flattened."""
    every = load_file(folder / "adapter_model.safetensors")
    return torch.cat([every[name].double().flatten() for name in sorted(every) if "lora_B" in name])


# --- speed ---


def samples_a_second(bench: Bench, count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return samples a second, in turns, of our code and of `generate`, with 20 samples per
    prefix.
    """
    secrets, prefixes, _ = bench.some(count)
    queries = [Query(secret.id, secret.prefix, SUFFIX) for secret in secrets]
    theirs: dict[str, Any] = {"do_sample": True, "num_return_sequences": 20, "top_k": 0}
    theirs |= {"temperature": OWN.temperature, "top_p": OWN.top_p, "pad_token_id": 0}
    theirs |= {
        "min_new_tokens": SUFFIX,
        "max_new_tokens": SUFFIX,
        "attention_mask": torch.ones_like(prefixes),
    }

    def ours() -> None:
        for _ in bench.view().candidates(queries, Sampling(20, OWN)):
            pass

    @torch.no_grad()
    def generate() -> None:
        bench.model.model.generate(prefixes, **theirs)

    every = 20 * len(secrets)
    ours(), generate()
    found = [
        [every / took(bench.model.device, work) for work in (ours, generate)]
        for _ in range(repeats)
    ]
    own, others = zip(*found, strict=True)
    return list(own), list(others)


@torch.no_grad()
def quantised(bench: Bench, device: str) -> str:
    """Return a sentence on the difference of the 4-bit model from float32, or on why it did not
    load.

    Loading includes the self-check.
    """
    try:
        few = load_causal_lm(
            str(find_smollm2_folder()), LoadingOptions(device=device, quantise="4bit")
        )
    except AuditError as error:
        return f"in 4 bits: {error}"
    _, prefixes, suffixes = bench.some(8)
    full, own = (model.token_log_probs(prefixes, suffixes) for model in (bench.model, few))
    return f"in 4 bits: {float((full - own).abs().mean()):.3f} nats a token apart from float32"


def on(device: str, model: str, dtype: str, words: Path, times: int = 1) -> Bench:
    loaded = MODELS[model](device, dtype)
    return Bench(loaded, list(texts(loaded)), words, times)


def speeds(
    page: Page, on_device: Bench, model: str, scratch: Path, samples: tuple[int, ...], repeats: int
) -> None:
    """Print two tables (samples a second, decoding steps) and two sentences (bfloat16, 4 bits)."""
    device = str(on_device.model.device)
    page.head(
        "precision", "prefixes at once", "our samples a second", "of `generate`", "times as fast"
    )
    benches = {"float32": on_device, "bfloat16": on(device, model, "bfloat16", scratch)}
    for dtype, bench in benches.items():
        for count in samples:
            own, others = samples_a_second(bench, count, repeats)
            middle, spread = median_and_spread([a / b for a, b in zip(own, others, strict=True)])
            speeds = (f"{statistics.median(one):,.0f}" for one in (own, others))
            page.row(dtype, count, *speeds, f"{middle} ({spread})")
    page.head("precision", "rows a step", "bare forward, milliseconds a step")
    for dtype, bench in benches.items():
        _, prefixes, _ = bench.some(1)
        for rows in (1, 64, 1280):
            step = partial(bench.decode, prefixes[:1], [rows] * SUFFIX)
            spent = min(took(bench.model.device, step) for _ in range(1 + repeats))
            page.row(dtype, rows, f"{1000 * spent / (SUFFIX + 1):.1f}")
    few = benches["bfloat16"]
    page.say(
        precision.dtype_effect_sentence(
            few.model, [(secret.prefix, secret.suffix) for secret in few.secrets[:8]]
        )
    )
    if model == "smollm2":
        page.say(quantised(on_device, device))


def main(
    device: Annotated[str, "cuda, cuda:1 or mps; cpu compares it with itself"] = "cuda",
    model: Literal["smollm2", "llama"] = "smollm2",
    texts: Annotated[int, "that are read and completed"] = 32,
    samples: Annotated[tuple[int, ...], "prefixes that are sampled from at once, for the speed"] = (
        16,
        64,
    ),
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
    repeats: int = 3,
    out: Path | None = None,
) -> int:
    page, failed = Page(out), 0
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        on_device = on(device, model, "float32", scratch)
        for note in configure_serving(on_device.model, PREFIX + SUFFIX + 20):
            page.say(f"self-check: {note}")
        both = on("cpu", model, "float32", scratch), on_device
        page.say(f"{model}: {device} against the processor, float32")
        page.head("what", "apart", "at most", "of what", "holds")
        for one in compared(both, scratch, texts, parts):
            failed += not one.holds
            page.row(
                one.what,
                f"{one.apart:.2g}",
                f"{one.limit:g}",
                one.unit,
                "yes" if one.holds else "NO",
            )
        if "speed" in parts:
            speeds(page, on_device, model, scratch, samples, repeats)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(run(main))
