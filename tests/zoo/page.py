"""The page of families, printed from the table: `python -m tests.zoo.page` writes it."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.families import FAMILIES, TRAINED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_HEAD = """# Model families

Printed from the table in `tests/zoo/families.py` (`python -m tests.zoo.page`), where each family stands as a tiny model
of transformers {version}: its law, its greedy tokens, rows that split and soft prompts are compared with transformers'
own in every run of the tests.

- **slots**: keys and values in a cache of ours, written in place. The fastest.
- **cache**: the cache that the model makes of its own (states, convolutions, keys and values), copied row by row.
- **recompute**: no cache; each new token reads its whole text again. Right, and slow.
- **soft prompts**: whether attacks that tune a prompt apply (`ethicist`); else their rows say "not applicable".
- **trained**: "tested" where each method of `audit train` (none, dp-sgd, adp, pmixed) runs on the family in the tests.
  The methods know no family by name: any other is trained, or refused in a sentence (OPT with noise needs `--lora`).

A family that is not listed is checked like the others when it is loaded, and refused where it is not right.
An encoder-decoder is refused.

| family | class | rows | soft prompts | trained |
|---|---|---|---|---|
"""


def page() -> str:
    head = _HEAD.format(version=".".join(transformers.__version__.split(".")[:2]))
    rows = []
    for name, row in sorted(FAMILIES.items()):
        prompts = "yes" if row.embeddings else "no"
        trained = "tested" if name in TRAINED else ""
        rows.append(
            f"| {name} | `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}` | {row.served} | {prompts} | {trained} |\n"
        )
    return head + "".join(rows)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
