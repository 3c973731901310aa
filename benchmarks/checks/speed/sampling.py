"""Our sampler against `generate(num_return_sequences=K)` plus a scoring pass, and against the bare forward of its rows.

    python -m benchmarks.checks.speed.sampling [--samples 100] [--secrets 48] [--repeats 3]

Both produce K samples of each prefix of the lab's target under Ethicist's decoding (top-p 0.7, temperature 0.8) and the
log-probability of each distinct one. Ours is the pass that every attack of a run shares, batched as a run batches it.
The bare forward reads the same prefixes and then as many rows, token by token, on a cache that is there beforehand,
and does nothing with the logits; of a model of 7M parameters with GPT-2's vocabulary, too, whose distributions are most
of it. Ratios of processor time on one thread, alternately in one run: absolute times on shared machines prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import Cache

from auditor.core.nouns import Query, Secret
from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.slots import SlotLayer
from auditor.plugins.view import WHITE_BOX, Sampling, View
from benchmarks.checks.harness import lab, run, seconds

OWN = Decoding(temperature=0.8, top_p=0.7)


def ours(model: HuggingFaceModel, secrets: Sequence[Secret], samples: int) -> list[list[int]]:
    """Samples and scores, anew each time; returns how many rows were forwarded for each token of each batch."""
    view = View("undefended", model, WHITE_BOX, seed=0)
    queries = [Query(s.id, s.prefix, len(s.suffix)) for s in secrets]
    batches = view.candidates(queries, Sampling(samples, OWN))
    return [
        [sum(len(np.unique(found.suffixes[:, :depth], axis=0)) for _, found in batch) for depth in range(length)]
        for batch in batches
        for length in [batch[0][0].length]
    ]


@torch.no_grad()
def bare(model: HuggingFaceModel, prefix: Tensor, rows: Sequence[int], layers: Sequence[SlotLayer]) -> None:
    """The forwards of one batch: a prefix for each of the first rows, then a token for each of the others."""
    cache = Cache(layers=list(layers))
    for layer in layers:
        layer.filled = 0
    for depth, count in enumerate(rows):
        read = prefix.expand(count, -1) if depth == 0 else prefix[-1:].expand(count, 1)
        model.model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1)


def room(model: HuggingFaceModel, rows: int, length: int) -> list[SlotLayer]:
    """A cache for so many rows, its memory in use."""
    like = torch.zeros(rows, *model._probe(1, 2).held.layers[0].keys.shape[1:])
    layers = [SlotLayer(length) for _ in range(model.n_layers)]
    for layer in layers:
        layer.lazy_initialization(like, like)
        layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
    return layers


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


def compare(name: str, model: HuggingFaceModel, secrets: Sequence[Secret], samples: int, repeats: int) -> None:
    prefixes = torch.tensor([s.prefix for s in secrets])
    length = len(secrets[0].suffix)
    live = ours(model, secrets, samples)
    share = sum(map(sum, live)) / (len(secrets) * samples * length)
    cache = room(model, max(map(max, live)), prefixes.shape[1] + length)
    mine, other, least = seconds(
        repeats,
        lambda: ours(model, secrets, samples),
        lambda: theirs(model, prefixes, samples, length),
        lambda: [bare(model, prefixes[0], rows, cache) for rows in live],
    )
    print(f"{name:>24}  {other / mine:8.1f}x  {mine / least:10.2f}x  {share:7.1%} of the naive rows", flush=True)


def wide() -> HuggingFaceModel:
    """7.2M parameters, 6.4M of them for 50,257 tokens; untrained, its logits spread so that nuclei are narrow."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=4, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.33)
    return HuggingFaceModel(model)


def main(samples: int = 100, secrets: int = 48, repeats: int = 3) -> None:
    torch.set_num_threads(1)
    built = lab()
    target = built.target()
    groups = {r: [s for s in built.secrets if s.member and s.repeats == r][:secrets] for r in built.recipe.counts}
    print(f"K = {samples}, {secrets} secrets a group")
    print(f"{'':>24}  {'generate':>9}  {'bare forward':>11}   times the speed of one, the time of the other")
    for times, group in groups.items():
        compare(f"{times} repeats", target, group, samples, repeats)
    compare("the mix", target, [secret for group in groups.values() for secret in group], samples, repeats)
    compare("nothing memorised", built.public(), groups[1], samples, repeats)
    compare("vocabulary of 50,257", wide(), groups[1][: max(1, secrets // 6)], samples, repeats)


if __name__ == "__main__":
    raise SystemExit(run(main))
