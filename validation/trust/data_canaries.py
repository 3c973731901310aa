"""Measure what an audit by canaries in the data proves of DP-SGD on SmolLM2, by its scores.

    python -m validation.trust.data_canaries [--seeds 0 1 2] [--rates 1 0.25 --steps 8 48]  (3 CPU minutes a seed)

Each of 1,000 canaries is four random words and a secret word of its own; a fair coin includes it.
The other records are 60 of the real lab's conversations, with the loss on answers. DP-SGD trains a
LoRA adapter of rank 4 on the output layer, so that each word has parameters of its own: canaries
hardly disturb each other. The layers below are frozen, so their output is computed once.
The gradient score is that of `epsilon-audit`; the canaries' gradients come from the cached output.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from auditor.benchmarks.lab import smollm2
from auditor.benchmarks.lab.lab_texts import make_fake_texts
from auditor.benchmarks.lab.real_lab import ANSWER, KINDS
from auditor.core import threads
from auditor.core.arrays import Floats
from auditor.models.weight_changes import regress_weight_change
from auditor.privacy.gaussian import find_noise_multiplier
from auditor.statistics.audit_power import estimate_median_epsilon
from auditor.statistics.audited import audit_epsilon_bounds
from validation.harness import Page, run

CLAIM, DELTA, LEVEL = 4.0, 1e-5, 0.05
CANARIES, RECORDS, HELD_OUT = 1000, 60, 30
RANK, SCALE, CLIP, LEARNING_RATE = 4, 2.0, 1.0, 3.0
_TOKENS_AT_ONCE = 600


@dataclass(frozen=True)
class Text:
    """tokens: of a text. learnt: the index of the first token with a loss."""

    tokens: tuple[int, ...]
    learnt: int


@dataclass(frozen=True)
class LearntTokens:
    """The tokens of texts that have a loss.

    states: (n, width) the output layer's inputs. tokens: (n,). owners: (n,) the text of each token.
    logits: (n, V) the base's.
    """

    states: Tensor
    tokens: Tensor
    owners: Tensor
    logits: Tensor

    def select(self, indices: Tensor) -> LearntTokens:
        return LearntTokens(*(value[indices] for value in vars(self).values()))


def make_canaries(tokenizer: Any, seed: int) -> list[Text]:
    words = []
    for token in range(tokenizer.vocab_size):
        word = tokenizer.decode([token])
        if word.startswith(" ") and word[1:].isalpha() and word[1:].islower():
            words.append(token)
    rng = np.random.default_rng(1000 + seed)
    prefixes = rng.choice(words, (CANARIES, 4))
    secrets = rng.choice(words, CANARIES, replace=False)
    texts = []
    for prefix, secret in zip(prefixes.tolist(), secrets.tolist(), strict=True):
        texts.append(Text((tokenizer.eos_token_id, *prefix, secret), len(prefix) + 1))
    return texts


def make_conversations(tokenizer: Any, count: int, seed: int) -> list[Text]:
    texts = []
    for text in make_fake_texts(seed, count, tuple(KINDS.values())):
        before, header, _ = text.partition(ANSWER)
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        learnt = sum(start <= len(before + header) for start, _ in encoded["offset_mapping"])
        texts.append(Text(tuple(encoded["input_ids"]), learnt))
    return texts


@torch.no_grad()
def read_learnt_tokens(model: Any, texts: Sequence[Text], end: int) -> LearntTokens:
    """Run the texts through the frozen layers, in batches of similar lengths."""
    parts: dict[int, Tensor] = {}
    batch: list[int] = []
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    for place, i in enumerate(order):
        batch.append(i)
        is_last = place + 1 == len(order)
        width = len(texts[order[min(place + 1, len(order) - 1)]].tokens)
        if not is_last and (len(batch) + 1) * width <= _TOKENS_AT_ONCE:
            continue
        width = max(len(texts[j].tokens) for j in batch)
        padded = [(*texts[j].tokens, *[end] * (width - len(texts[j].tokens))) for j in batch]
        states = model.model(input_ids=torch.tensor(padded), use_cache=False).last_hidden_state
        for j, row in zip(batch, states, strict=True):
            parts[j] = row[texts[j].learnt - 1 : len(texts[j].tokens) - 1].clone()
        batch = []
    all_states = torch.cat([parts[i] for i in range(len(texts))])
    tokens = torch.tensor([token for text in texts for token in text.tokens[text.learnt :]])
    lengths = torch.tensor([len(parts[i]) for i in range(len(texts))])
    owners = torch.arange(len(texts)).repeat_interleave(lengths)
    return LearntTokens(all_states, tokens, owners, model.lm_head(all_states))


class HeadAdapter:
    """LoRA on the output layer: logits + SCALE (x A^T) B^T, of which B is trained."""

    def __init__(self, width: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(RANK, width, generator=generator)
        self.a = (2 * uniform - 1) / math.sqrt(width)  # as PEFT initialises it
        self.b = torch.zeros(vocabulary, RANK)

    def project(self, tokens: LearntTokens) -> Tensor:
        return SCALE * (tokens.states @ self.a.T)

    def compute_nlls(self, tokens: LearntTokens) -> Tensor:
        logits = tokens.logits + self.project(tokens) @ self.b.T
        return logits.logsumexp(1) - logits.gather(1, tokens.tokens[:, None])[:, 0]

    def compute_residuals(self, tokens: LearntTokens) -> Tensor:
        """Return the derivative of each token's loss by its logits, (n, V)."""
        logits = tokens.logits + self.project(tokens) @ self.b.T
        residuals = torch.softmax(logits, 1)
        residuals[torch.arange(len(residuals)), tokens.tokens] -= 1
        return residuals

    def sum_clipped_gradients(self, tokens: LearntTokens, owners: Sequence[int]) -> Tensor:
        """Return the sum of the clipped gradients of these texts' mean losses by B."""
        total = torch.zeros_like(self.b)
        for owner in owners:
            text = tokens.select(torch.where(tokens.owners == owner)[0])
            residuals = self.compute_residuals(text)
            gradient = residuals.T @ self.project(text) / len(residuals)
            total += gradient * min(1.0, CLIP / float(gradient.norm()))
        return total


def train_adapter(
    adapter: HeadAdapter, tokens: LearntTokens, included: Sequence[int], rate: float, steps: int,
    sigma: float, seed: int,
) -> None:  # fmt: skip
    """Train B by DP-SGD with Poisson batches."""
    rng = np.random.default_rng([seed, 5, steps])
    noise = torch.Generator().manual_seed(1000 * seed + steps)
    for _ in range(steps):
        batch = [i for i in included if rng.random() < rate]
        total = adapter.sum_clipped_gradients(tokens, batch)
        total += sigma * CLIP * torch.randn(total.shape, generator=noise)
        adapter.b -= LEARNING_RATE / (rate * len(included)) * total


def yield_gradients(adapter: HeadAdapter, canaries: LearntTokens) -> Iterator[list[Tensor]]:
    """Yield the gradient by B of each canary's loss, at the base."""
    projected = adapter.project(canaries)
    residuals = torch.softmax(canaries.logits, 1)
    residuals[torch.arange(len(residuals)), canaries.tokens] -= 1
    for residual, projection in zip(residuals, projected, strict=True):
        yield [torch.outer(residual, projection)]


def score_canaries(adapter: HeadAdapter, canaries: LearntTokens, seed: int) -> list[Floats]:
    """Return each canary's scores: loss, difference, gradient."""
    after = np.asarray(adapter.compute_nlls(canaries).double())
    base = HeadAdapter(adapter.a.shape[1], len(adapter.b), seed)
    before = np.asarray(base.compute_nlls(canaries).double())
    by_gradient = regress_weight_change(
        [adapter.b], lambda: yield_gradients(adapter, canaries), CANARIES, seed
    )
    return [-after, before - after, by_gradient]


def measure_seed(seed: int, mechanisms: Sequence[tuple[float, int]], page: Page) -> None:
    """Print a row for each mechanism (sampling rate, steps)."""
    folder = smollm2.find_smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    coins = np.random.default_rng(77 + seed).random(CANARIES) < 0.5
    texts = [
        *make_canaries(tokenizer, seed),
        *make_conversations(tokenizer, RECORDS, 100 + seed),
        *make_conversations(tokenizer, HELD_OUT, 900 + seed),
    ]
    tokens = read_learnt_tokens(model, texts, tokenizer.eos_token_id)
    canaries = tokens.select(torch.where(tokens.owners < CANARIES)[0])
    held_out = tokens.select(torch.where(tokens.owners >= CANARIES + RECORDS)[0])
    included = [*np.flatnonzero(coins).tolist(), *range(CANARIES, CANARIES + RECORDS)]
    for rate, steps in mechanisms:
        adapter = HeadAdapter(model.config.hidden_size, model.config.vocab_size, seed)
        perplexities = [float(adapter.compute_nlls(held_out).mean().exp())]
        sigma = find_noise_multiplier(CLAIM, DELTA, rate, steps)
        train_adapter(adapter, tokens, included, rate, steps, sigma, seed)
        perplexities.append(float(adapter.compute_nlls(held_out).mean().exp()))
        ceiling = estimate_median_epsilon(CANARIES, sigma, (rate, steps), DELTA, LEVEL)
        cells = [f"{value:.2f}" for value in (*perplexities, ceiling)]
        for values in score_canaries(adapter, canaries, seed):
            cells.append(f"{audit_epsilon_bounds(values, coins, DELTA, LEVEL)[0].epsilon:.2f}")
        page.row(seed, f"{rate:g}", steps, *cells)


def main(
    seeds: tuple[int, ...] = (0, 1, 2),
    rates: tuple[float, ...] = (1.0, 0.25),
    steps: tuple[int, ...] = (8, 48),
) -> None:
    """Print a row for each seed and mechanism. rates, steps: one of each for each mechanism."""
    threads.set_thread_count()
    page = Page()
    page.say(f"DP-SGD of a claimed ε {CLAIM:g}, δ {DELTA:g}, {CANARIES:,} canaries")
    scores = ("loss", "difference", "gradient")
    page.head("seed", "q", "T", "perplexity before", "after", "ceiling", *scores)
    for seed in seeds:
        measure_seed(seed, tuple(zip(rates, steps, strict=True)), page)


if __name__ == "__main__":
    raise SystemExit(run(main))
