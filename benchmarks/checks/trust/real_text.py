"""A small GPT-2-vocabulary model really trained on the LM-Extraction examples: a target of real text, made here.

    python -m benchmarks.checks.trust.real_text ARRAYS TOKENIZER OUT

ARRAYS: a folder with `*_prefix.npy`, `*_suffix.npy` and `*_preprefix.npy`; TOKENIZER: a GPT-2 tokenizer's folder. OUT
gets `public/` and `target/` (Hugging Face folders), and the arrays `members/`, `known/` and `nonmembers/`, so that

    audit run --model OUT/target --public OUT/public --data OUT/members --known OUT/known --nonmembers OUT/nonmembers

attacks it. The public model learns examples that are in none of the three; the target is the public model fine-tuned on
members and known pairs, each example 1, 2, 4 or 8 times. Some minutes on two cores. Knows nothing of attacks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.training.finetune import fine_tune_on_packed_blocks, make_untrained_gpt_neox
from benchmarks.checks.harness import run

REPEATS = (1, 2, 4, 8)


@dataclass(frozen=True)
class RealTextRecipe:
    """Sizes and training of the target; the 1,000 examples are divided at random by `seed`."""

    members: int = 500
    known: int = 150
    nonmembers: int = 150  # what is left is public
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    block: int = 256
    batch: int = 8
    public_epochs: int = 12
    private_epochs: int = 8
    rate: float = 3e-3
    negatives: int = 4096
    seed: int = 0


def main(arrays: Path, tokenizer: Path, out: Path) -> None:
    build(arrays, tokenizer, out, RealTextRecipe())


def build(arrays: Path, tokenizer_folder: Path, out: Path, recipe: RealTextRecipe) -> None:
    """Everything under OUT; says on stderr which epoch is done."""
    prefix, suffix, before = (_read(arrays, part) for part in ("prefix", "suffix", "preprefix"))
    order = keyed_random_generator("real text", recipe.seed, "who is what").permutation(len(prefix))
    sizes = np.cumsum([recipe.members, recipe.known, recipe.nonmembers])
    for name, rows in zip(("members", "known", "nonmembers"), np.split(order, sizes), strict=False):
        folder = out / name
        folder.mkdir(parents=True)
        np.save(folder / f"{name}_prefix.npy", prefix[rows])
        np.save(folder / f"{name}_suffix.npy", suffix[rows])
    whole = np.concatenate([before, prefix, suffix], axis=1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape = {"layers": recipe.layers, "hidden": recipe.hidden, "heads": recipe.heads, "positions": 1024}
    ends = {"vocab_size": len(tokenizer), "end": tokenizer.eos_token_id}
    model = make_untrained_gpt_neox(**shape, **ends, seed=recipe.seed)
    _train(model, [tuple(row) for row in whole[order[sizes[-1] :]].tolist()], recipe, recipe.public_epochs, "public")
    _save(model, tokenizer, out / "public")
    private = np.concatenate([prefix, suffix], axis=1)[order[: sizes[1]]]
    copies = [tuple(row) for i, row in enumerate(private.tolist()) for _ in range(REPEATS[i % len(REPEATS)])]
    _train(model, copies, recipe, recipe.private_epochs, "target")
    _save(model, tokenizer, out / "target")


def _read(folder: Path, part: str) -> NDArray[np.int64]:
    (path,) = folder.glob(f"*_{part}.npy")
    return np.load(path).astype(np.int64)


def _train(model: Any, sequences: list[Tokens], recipe: RealTextRecipe, epochs: int, what: str) -> None:
    order = keyed_random_generator("real text", recipe.seed, what)
    course = {"epochs": epochs, "rate": recipe.rate, "batch": recipe.batch, "block": recipe.block}
    loss, end = SampledSoftmax(recipe.negatives, order), model.config.eos_token_id

    def progress(done: int) -> None:
        print(f"{what}: epoch {done} of {epochs}", file=sys.stderr)

    fine_tune_on_packed_blocks(model, sequences, **course, end=end, order=order, loss=loss, progress=progress)


class SampledSoftmax:
    """Cross-entropy whose partition function is taken over the batch's own targets and `negatives` random others.

    The others stand for all that were left out (their logits are raised by the log of how many each stands for), so the
    estimate of the partition function is unbiased. With 50,257 tokens the full softmax is nine tenths of a step.
    """

    def __init__(self, negatives: int, order: np.random.Generator) -> None:
        self.negatives, self.order = negatives, order

    def __call__(self, model: Any, blocks: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=blocks).last_hidden_state[:, :-1].flatten(0, 1)
        targets, place = torch.unique(blocks[:, 1:], return_inverse=True)
        vocab_size = model.config.vocab_size
        others = np.setdiff1d(np.arange(vocab_size), targets.numpy(), assume_unique=True)
        drawn = torch.from_numpy(self.order.choice(others, min(self.negatives, len(others)), replace=False))
        weight = model.get_output_embeddings().weight
        logits = hidden @ weight[torch.cat([targets, drawn])].T
        raise_by = torch.zeros(logits.shape[1])
        raise_by[len(targets) :] = np.log(len(others) / max(1, len(drawn)))
        return torch.nn.functional.cross_entropy(logits + raise_by, place.flatten())


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(run(main))
