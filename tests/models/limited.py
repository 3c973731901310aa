"""Guesses of a model whose distributions are wide, asked for more at once than the address space of
this process holds.

    python -m tests.models.limited MEBIBYTES

Prints how many prefixes were asked at once before and after a halving, and the guesses. Another
batch size rounds
otherwise: what a draw within 1e-6 of a boundary comes to is left out (None).
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch

from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.core.nouns import Query
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.memory import BatchSizeLimit
from auditor.plugins.view import WHITE_BOX, View
from auditor.testing import make_tiny_random_model

TOKENS = 20_000
AT_ONCE = 32
Found = list[list[tuple[tuple[int, ...], int]] | None]


def model() -> HuggingFaceModel:
    """Of many tokens, of which some ten are likely: fewer boundaries for a draw to be near."""
    made = make_tiny_random_model(TOKENS)
    with torch.no_grad():
        made.model.get_output_embeddings().weight.mul_(5)
    return made


def guesses(asked: HuggingFaceModel, samples: int = 6) -> Found:
    rows = torch.randint(1, 61, (AT_ONCE, 6), generator=torch.Generator().manual_seed(3)).tolist()
    queries = [Query(f"q{i}", tuple(row), 4) for i, row in enumerate(rows)]
    view = View("undefended", asked, WHITE_BOX, seed=0, batch_size=AT_ONCE)
    found = PerplexityRanking(samples=samples, top_p=1.0, temperature=1.0).guess(view, {}, queries)
    return [
        None if own.near_boundary else [(guess.suffix, guess.count) for guess in own.ranked]
        for own in found
    ]


def main(mebibytes: int) -> None:
    asked, sizes = model(), list[tuple[int, int]]()
    guesses(asked, samples=1)  # what torch makes once is made
    ask = BatchSizeLimit.run_within_memory

    def watched(self: BatchSizeLimit, work: Callable[[int], Any], most: int | None = None) -> Any:
        before, found = self.size, ask(self, work, most)
        sizes.append((before, self.size))
        return found

    BatchSizeLimit.run_within_memory = watched  # type: ignore[method-assign]
    limit = psutil.Process().memory_info().vms + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found = guesses(asked)
    print(json.dumps({"halved": [(a, b) for a, b in sizes if b < a], "guesses": found}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
