"""The page of families, printed from the table: `python -m tests.zoo.page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tests.zoo.families import ENCODER_DECODERS, FAMILIES, MASKED, REFUSED, TRAINED, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "model-families.md"
_HEAD = """# Model families

Printed from the tables in `tests/zoo/families.py` (`python -m tests.zoo.page`). Every run of the tests compares a tiny
model of each family with transformers {version}: distributions, greedy tokens, split rows and soft prompts, or the
distributions of hidden tokens.

- **slots**: our cache of keys and values, written in place. The fastest.
- **cache**: the model's own cache (states, convolutions, keys and values), copied row by row.
- **recompute**: no cache; each new token reads its whole text again. Right, and slow.
- **soft prompts**: "yes" if attacks that tune a prompt apply (`ethicist`); otherwise their rows say "not applicable".
- **trained**: "tested" if the tests run each method of `audit train` (none, dp-sgd, adp, pmixed) on the family. Any other
  family is trained, too, or refused in a sentence (OPT with noise needs `--lora`).

A family that is not in the table is checked when it is loaded, and refused if it is not right. A model of any family can be
asked over HTTP: [models behind an API](../how-to/api-models.md). {others}

## Causal

| family | class | rows | soft prompts | trained |
|---|---|---|---|---|
"""  # noqa: E501
_MASKED = """
## Masked

For papers that hide tokens of whole texts (`audit reproduce uniform-mixing`).

| family | class | served |
|---|---|---|
"""


def page() -> str:
    others = f"Encoder-decoders are refused: {', '.join(ENCODER_DECODERS)}."
    head = _HEAD.format(others=others, version=".".join(transformers.__version__.split(".")[:2]))
    rows = []
    for name, row in sorted(FAMILIES.items()):
        prompts = "yes" if row.embeddings else "no"
        trained = "tested" if name in TRAINED else ""
        served = f"{row.served}; {row.but}" if row.but else row.served
        rows.append(
            f"| {name} | `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}` | {served} | {prompts} | "
            f"{trained} |\n"
        )
    rows += [
        f"| {name} | `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}` | {_no(row)} | | |\n"
        for name, row in REFUSED.items()
    ]
    masked = [
        f"| {name} | `{MODEL_FOR_MASKED_LM_MAPPING_NAMES[name]}` | "
        f"{_no(row) if row.refused else 'yes'} |\n"
        for name, row in MASKED.items()
    ]
    return head + "".join(sorted(rows)) + _MASKED + "".join(sorted(masked))


def _no(row: Row) -> str:
    """Why the family is refused, as its sentence says, but for the numbers in it."""
    return (
        "refused: "
        f"{re.sub(r' (in a text of|by) [.][*]( nats)?', '', row.refused).replace('whose', 'its')}"
    )


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
