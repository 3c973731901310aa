"""A small model made on the spot from arrays of the Training Data Extraction Challenge: real text, and what to audit.

    python -m benchmarks.checks.trust.arrays lm-extraction/ OUT
    audit reproduce frontier --scale arrays --model OUT/fine-tuned --public OUT/public \\
        --data OUT/data --nonmembers OUT/others

The first 400 rows teach a public model from nothing, the next 300 a fine-tuned one, 100 of them eight times an epoch;
the last 300 are trained on by neither. Token ids are GPT-2's. So small a model on so little text is of no use to
anybody: ratios of its perplexities are what is read. Some ten minutes of one processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.training.finetune import fine_tune_on_packed_blocks, make_untrained_gpt_neox
from benchmarks.checks.harness import run

VOCABULARY, END = 50257, 50256
PUBLIC, MEMBERS, OFTEN, TIMES = 400, 300, 100, 8


def rows(folder: Path, parts: Sequence[str]) -> NDArray[np.int64]:
    """(rows, tokens): these parts of every row, side by side."""
    return np.concatenate([np.load(folder / f"val_{part}.npy") for part in parts], axis=1).astype(np.int64)


def learn(model: object, texts: NDArray[np.int64], epochs: int, rate: float) -> None:
    sequences: list[Tokens] = [tuple(row) for row in texts.tolist()]
    order = keyed_random_generator("arrays", 0)
    fine_tune_on_packed_blocks(model, sequences, epochs=epochs, rate=rate, batch=16, block=128, end=END, order=order)


def save(folder: Path, source: Path, which: slice) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("prefix", "suffix"):
        np.save(folder / f"val_{part}.npy", np.load(source / f"val_{part}.npy")[which])


def main(
    arrays: Path, out: Path, *, epochs: Annotated[tuple[int, int], "of public, and of private text"] = (3, 5)
) -> None:
    whole, own = rows(arrays, ("preprefix", "prefix", "suffix")), rows(arrays, ("prefix", "suffix"))
    members = slice(PUBLIC, PUBLIC + MEMBERS)
    model = make_untrained_gpt_neox(vocab_size=VOCABULARY, layers=2, hidden=64, heads=4, positions=256, end=END, seed=0)
    learn(model, whole[:PUBLIC], epochs[0], 3e-3)
    model.save_pretrained(out / "public")
    learn(model, np.concatenate([own[members], *[own[members][:OFTEN]] * (TIMES - 1)]), epochs[1], 2e-3)
    model.save_pretrained(out / "fine-tuned")
    save(out / "data", arrays, members)
    save(out / "others", arrays, slice(PUBLIC + MEMBERS, None))


if __name__ == "__main__":
    raise SystemExit(run(main))
