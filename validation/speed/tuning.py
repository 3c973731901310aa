"""What Ethicist's tuning comes to in half the epochs, and what its warm-up has to do with it.

    python -m validation.speed.tuning [--lab smollm2] [--pairs 96]

The paper warms up for 500 of 8,440 steps. Who knows a hundred pairs takes 60 steps in all, and is
still warming up when it ends: a warm-up of the same share of the steps is held beside it, on the
same pairs, split the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from auditor.attacks.ethicist import Ethicist, count_warmup_steps
from auditor.core import threads
from auditor.core.nouns import Pair
from auditor.plugins.view import WHITE_BOX, View
from validation.harness import Page, run
from validation.trust.bases import LABS, Name

VALIDATION = 0.1


def variants(pairs: int) -> Iterator[tuple[str, Ethicist]]:
    """By what is said of each: the paper's warm-up and one of its share, in all epochs and in half
    of them."""
    for epochs in (20, 10):
        plain = Ethicist(epochs=epochs, patience=epochs, warmup_steps=500)
        yield f"{epochs} epochs, warm-up 500", plain
        steps = epochs * -(-round(pairs * (1 - VALIDATION)) // plain.batch)
        yield (
            f"{epochs} epochs, warm-up {count_warmup_steps(steps)}",
            Ethicist(epochs=epochs, patience=epochs),
        )


def main(lab: Name = "small", pairs: int = 96, seed: int = 0, out: Path | None = None) -> None:
    """pairs: of the lab's records, known and attacked ones alike: nothing is attacked here."""
    threads.set_thread_count()
    made = LABS[lab]()
    target = made.lab_target_model()
    known = [*made.known, *(Pair(one.prefix, one.suffix) for one in made.secrets if one.member)][
        :pairs
    ]
    page = Page(out)
    page.head("tuning", "processor seconds", "validation loss, first epoch", "best", "of epoch")
    for words, attack in variants(len(known)):
        start = time.process_time()
        state = attack.fit(View("target", target, WHITE_BOX, seed), known)
        losses = state["validation_loss"]
        spent = time.process_time() - start
        page.row(
            words,
            f"{spent:.0f}",
            f"{losses[0]:.3f}",
            f"{min(losses):.3f}",
            f"{state['best_epoch']}",
        )


if __name__ == "__main__":
    raise SystemExit(run(main))
