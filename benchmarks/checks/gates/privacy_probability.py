"""How often harmless rare text is judged private by ADP's privacy probability, on lab text (Wu et al. 2022, Eq. 4).

    python -m benchmarks.checks.gates.privacy_probability

The lab's public model judges its private records, fresh records of the public kinds, and harmless English that it has
never seen the like of (a licence, paragraph by paragraph). The paper admits such false positives and does not measure
them. A group's column: the share with rho > 1/2; then how often a record of it is judged more private than a private
one of the same data set (1/2: no better than a coin).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_texts import COMMON_KINDS, drawn
from auditor.core.nouns import Tokens
from auditor.training.rarity import against_constants, log_perplexities, normalise
from benchmarks.checks.harness import Page, run

LICENCE = Path(__file__).parents[3] / "LICENSE"


def groups(lab: Lab) -> dict[str, list[str]]:
    private = list(dict.fromkeys(lab.texts.copies()))
    fresh = list(drawn(lab.recipe.seed + 7, 300, COMMON_KINDS))
    prose = [" ".join(part.split()) for part in LICENCE.read_text().split("\n\n") if len(part.split()) > 20]
    return {"private": private, "harmless, common kinds": fresh, "harmless, rare prose": prose}


def above(values: NDArray[np.float64], private: NDArray[np.float64]) -> float:
    """P(value > private one), ties half."""
    return float(np.mean((values[:, None] > private) + 0.5 * (values[:, None] == private)))


def main() -> None:
    page, lab = Page(), Lab()
    model = lab.public()
    texts = groups(lab)
    examples: list[Tokens] = [(0, *lab.tokenizer(text)["input_ids"], 0) for group in texts.values() for text in group]
    p = log_perplexities(model, [tokens[: lab.recipe.block] for tokens in examples])
    ends = np.cumsum([len(group) for group in texts.values()])[:-1]
    rules: dict[str, Callable[[], NDArray[np.float64]]] = {
        "min-max": lambda: normalise(p, "min-max"),
        "rank": lambda: normalise(p, "rank"),
        "constants": lambda: against_constants(p, 1, model.vocab_size),
    }
    medians = ", ".join(f"{name} {np.exp(np.median(v)):.1f}" for name, v in zip(texts, np.split(p, ends), strict=True))
    page.say(f"median perplexity: {medians}\n")
    page.head("rule", *(f"{name} ({len(group)})" for name, group in texts.items()))
    for rule, judge in rules.items():
        private, *others = np.split(judge(), ends)
        page.row(rule, *(f"{(v > 0.5).mean():.1%}, above {above(v, private):.2f}" for v in (private, *others)))


if __name__ == "__main__":
    raise SystemExit(run(main))
