"""Compare Ethicist's tuning in all and in half of its epochs, with two lengths of warm-up.

    python -m validation.speed.tuning [--lab smollm2] [--pairs 96]

The paper warms up for 500 of 8,440 steps. Tuning with a hundred pairs takes only 60 steps, all of
them warm-up. It is compared with a warm-up of the same share of the steps, on the same pairs with
the same split.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from auditor.attacks.ethicist import Ethicist, count_warmup_steps
from auditor.core import threads
from auditor.core.nouns import Pair
from auditor.models.loading import load_causal_lm
from auditor.plugins.view import WHITE_BOX, View
from validation.harness import Page, run
from validation.trust.bases import LABS, Name

VALIDATION = 0.1


def variants(pairs: int) -> Iterator[tuple[str, Ethicist]]:
    """Yield tunings with descriptions: two warm-ups, each with all epochs and with half of them."""
    for epochs in (20, 10):
        plain = Ethicist(epochs=epochs, patience=epochs, warmup_steps=500)
        yield f"{epochs} epochs, warm-up 500", plain
        steps = epochs * -(-round(pairs * (1 - VALIDATION)) // plain.batch)
        yield (
            f"{epochs} epochs, warm-up {count_warmup_steps(steps)}",
            Ethicist(epochs=epochs, patience=epochs),
        )


def main(lab: Name = "small", pairs: int = 96, seed: int = 0, out: Path | None = None) -> None:
    """Tune prompts and print a table. pairs: number of the lab's records, known or attacked."""
    threads.set_thread_count()
    made = LABS[lab]()
    target = load_causal_lm(str(made.target_folder()))
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
