"""Measure the speed of bfloat16 on this processor against float32, and its effect on results.

    python -m validation.speed.precision [--repeats 5] [-o FILE]

SmolLM2-135M reads and decodes as in an audit, in both precisions with the same weights, which are
first rounded to bfloat16. Processor time of one thread is measured, in turns. *Same tokens*:
samples of each prefix, drawn alone and together with the other prefixes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from auditor.attacks.ethicist import Ethicist
from auditor.core.nouns import Pair
from auditor.core.plan_parts import LoadingOptions
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.models import precision
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from validation.harness import Page, median_and_spread, run
from validation.speed.sheet import OWN, smollm2, texts

READ = ((1, 48), (8, 48), (4, 100))  # texts, tokens
DECODED = ((1, 50), (20, 50), (8, 200))  # rows, tokens before them
_STEPS, _LAST = 4, 16


def both(folder: Path) -> dict[str, HuggingFaceModel]:
    """Return SmolLM2 with weights rounded to bfloat16, by the precision it runs in."""
    own = smollm2()
    own.model.to(torch.bfloat16).save_pretrained(folder)
    own.tokenizer.save_pretrained(folder)
    return {
        name: load_causal_lm(str(folder), LoadingOptions(dtype=name))
        for name in ("float32", "bfloat16")
    }


@torch.no_grad()
def read(model: HuggingFaceModel, some: Tensor) -> float:
    start = time.process_time()
    model.log_probs(some, _LAST)
    return some.numel() / (time.process_time() - start)


@torch.no_grad()
def decode(model: HuggingFaceModel, some: Tensor) -> float:
    rows, every = model.start_served_rows(some, _STEPS + 1, None), torch.arange(len(some))
    start = time.process_time()
    for i in range(_STEPS):
        rows.advance(every, some[:, i])
    return len(some) * _STEPS / (time.process_time() - start)


def tune(model: HuggingFaceModel, pairs: list[Pair]) -> float:
    """Return the positions a second, prompt included, of one tuning epoch.

    The last two pairs are only read.
    """
    method, start = Ethicist(epochs=1, batch=8, warmup_steps=0), time.process_time()
    method._tune_soft_prompt(model, pairs[:-2], pairs[-2:], ("precision",))
    every = sum(method.prompt_length + len(pair.prefix + pair.suffix) - 1 for pair in pairs)
    return every / (time.process_time() - start)


def same_tokens(model: HuggingFaceModel, prefixes: Tensor, samples: int = 8) -> tuple[int, int]:
    """Count the tokens that do not depend on whether a prefix is queried alone or with others.

    Return this number and the number of all tokens.
    """
    noise = torch.stack(
        [torch.as_tensor(draw_secret_uniforms(samples, _LAST, i)) for i in range(len(prefixes))]
    )
    together = model.completions(prefixes, _LAST, OWN, noise).tokens
    alone = [
        model.completions(prefixes[i : i + 1], _LAST, OWN, noise[i : i + 1]).tokens
        for i in range(len(prefixes))
    ]
    return int((together == torch.cat(alone)).sum()), together.numel()


def main(repeats: int = 5, out: Path | None = None) -> None:
    torch.set_num_threads(1)
    page = Page(out)
    with tempfile.TemporaryDirectory() as folder:
        models = both(Path(folder))
    tokens = torch.tensor([token for text in texts(models["float32"]) for token in text])

    def some(rows: int, length: int) -> Tensor:
        return tokens[: rows * length].view(rows, length)

    whole = tokens[: 10 * 64].view(10, 64).tolist()
    pairs = [
        Pair(tuple(text[: 24 + i]), tuple(text[24 + i : 40 + i])) for i, text in enumerate(whole)
    ]
    page.head("work", "tokens a second, float32", "bfloat16", "times the speed, median", "spread")
    work: dict[str, Callable[[HuggingFaceModel], float]] = {
        **{
            f"{n} texts of {long} tokens read": partial(read, some=some(n, long))
            for n, long in READ
        },
        **{
            f"{n} rows behind {long} tokens decoded": partial(decode, some=some(n, long))
            for n, long in DECODED
        },
        "10 pairs of 40 to 49 tokens tuned on": partial(tune, pairs=pairs),
    }
    for name, ask in work.items():
        found = [[ask(model) for model in models.values()] for _ in range(repeats + 1)][1:]
        speeds = (f"{statistics.median(column):.0f}" for column in zip(*found, strict=True))
        page.row(name, *speeds, *median_and_spread([few / full for full, few in found]))
    page.head("precision", "tokens the same, asked alone and together")
    for name, model in models.items():
        same, every = same_tokens(model, some(8, 32))
        page.row(name, f"{same:,} of {every:,}")
    held = [(tuple(text[:32]), tuple(text[32:])) for text in some(8, 48).tolist()]
    page.say(precision.dtype_effect_sentence(models["bfloat16"], held))


if __name__ == "__main__":
    raise SystemExit(run(main))
