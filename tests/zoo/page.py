"""The page of families, printed from the table: `python -m tests.zoo.page` writes it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tests.zoo.families import ENCODER_DECODERS, FAMILIES, MASKED, REFUSED, TRAINED, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "model-families.md"
_HEAD = """# Model families

Printed from the tables in `tests/zoo/families.py` (`python -m tests.zoo.page`), where each family stands as a tiny
model of transformers {version}: its distribution, its greedy tokens, rows that split and soft prompts, or the
distributions of its hidden tokens, are compared with transformers' own in every run of the tests.

- **slots**: keys and values in a cache of ours, written in place. The fastest.
- **cache**: the cache that the model makes of its own (states, convolutions, keys and values), copied row by row.
- **recompute**: no cache; each new token reads its whole text again. Right, and slow.
- **soft prompts**: whether attacks that tune a prompt apply (`ethicist`); else their rows say "not applicable".
- **trained**: "tested" where each method of `audit train` (none, dp-sgd, adp, pmixed) runs on the family in the tests.
  The methods know no family by name: any other is trained, or refused in a sentence (OPT with noise needs `--lora`).

A model that is not loaded at all but asked over HTTP, of whatever family:
[models behind an API](../how-to/api-models.md).

A family that is not listed is checked like the others when it is loaded, and refused where it is not right.
{others}

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
    others = textwrap.fill(
        f"An encoder-decoder is refused as one: {', '.join(ENCODER_DECODERS)}.", 120
    )
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
