"""Members of an ensemble trained together against one by one, steps taken in turns in one run.

    python benchmarks/speed/members.py [--members 8] [--batch 2] [--block 128] [--rank 16] [--steps 5]

A step of all members is a forward over their batches together, or one for each of them; both have the same batches,
clipping and AdamW, on models of the lab's shape. Beside float32, products in bfloat16 where the processor has it.
Losses are compared at every step. Ratios of processor time on one thread: other work on the machine hardly counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.benchmarks.lab_training import has_bfloat16
from auditor.core.streams import generator
from auditor.models.lora import over_same_weights
from auditor.training.finetune import Course, Fitting, trained_parameters, untrained
from auditor.training.members import Adapter, with_adapter
from auditor.training.side_by_side import alone, side_by_side

_AGREE = {None: 1e-4, torch.bfloat16: 0.1}  # losses, nats a token


def main() -> None:
    parser = argparse.ArgumentParser(description="members trained together against one by one")
    for name, default in (("members", 8), ("batch", 2), ("block", 128), ("rank", 16), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tokens = asked.members * asked.batch * asked.block
    for half in (None, torch.bfloat16) if has_bfloat16() else (None,):
        together, one_by_one = measured(asked, half)
        print(
            f"{'bfloat16' if half else 'float32 '}  one by one {tokens / one_by_one:7,.0f} tokens/s   "
            f"together {tokens / together:7,.0f} tokens/s   {one_by_one / together:4.2f} times as fast",
            flush=True,
        )


def measured(asked: argparse.Namespace, half: torch.dtype | None) -> tuple[float, float]:
    """Seconds of a step of all members, together and one by one: the best of the steps."""
    recipe = LabRecipe()
    base = untrained(
        vocab_size=recipe.vocab_size,
        layers=recipe.layers,
        hidden=recipe.hidden,
        heads=recipe.heads,
        positions=512,
        end=0,
        seed=0,
    )
    base.set_attn_implementation("eager")  # as the lab trains
    adapter = Adapter(asked.rank, 2 * asked.rank, "all")
    course = Course(1, 1e-4, asked.batch, asked.block, end=0)
    sequences = np.random.default_rng(0).integers(1, recipe.vocab_size, (2 + 2 * asked.steps, course.batch * 127))

    def make() -> object:
        return with_adapter(over_same_weights(base), adapter)

    def step_of(forward: Callable[..., Tensor], at_once: int) -> Callable[[], list[float]]:
        """Takes one step of every member; returns their losses."""
        models, fittings = [], []
        for seed in range(asked.members):
            torch.manual_seed(seed)
            models.append(make().eval())  # type: ignore[attr-defined]
            order = generator("speed", seed)
            fittings.append(Fitting(trained_parameters(models[-1]), list(map(tuple, sequences)), course, order))

        def step() -> list[float]:
            losses: list[float] = []
            for first in range(0, asked.members, at_once):
                some = slice(first, first + at_once)
                with torch.autocast("cpu", dtype=half, enabled=half is not None):
                    found = forward(models[some], [fitting.batch() for fitting in fittings[some]])
                found.sum().backward()
                for fitting in fittings[some]:
                    fitting.step()
                losses += found.tolist()
            return losses

        return step

    mixed = side_by_side(base, make)
    assert mixed is not None
    works = step_of(mixed.losses, asked.members), step_of(alone, 1)
    best = [float("inf"), float("inf")]
    for turn in range(1 + asked.steps):
        losses = []
        for index, work in enumerate(works):
            start = time.process_time()
            losses.append(work())
            if turn:  # the first warms up
                best[index] = min(best[index], time.process_time() - start)
        far = float(np.abs(np.subtract(*losses)).max())
        assert far <= _AGREE[half], f"step {turn}: losses differ by {far:.2g} nats"
    return best[0], best[1]


if __name__ == "__main__":
    main()
