"""Do user turns leak where the loss was masked to the answers? Masked against unmasked training, paired by turn.

    python -m benchmarks.checks.trust.turns [--seeds 0 1 2] [--out FOLDER]  (two minutes a seed on one core)
    python -m benchmarks.checks.trust.turns --lab smollm2 --seeds 0         (half an hour a seed)

Conversations: a user tells a private record of the small lab's kinds, the assistant says which kind it is and for whom.
The lab's public model is fine-tuned on them with the loss on all tokens, or on the answers alone (--loss-on); then user
turns are attacked (--turns user), behind half of them (--knows partial:0.5). On SmolLM2 it is a LoRA adapter.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from auditor.benchmarks.lab_texts import PRIVATE_KINDS, make_fake_texts_with_marks
from auditor.records.outcomes import RowValuesBySecret, read_row_values_by_secret
from auditor.records.result_file import read_result
from auditor.statistics.compare import difference_evidence
from auditor.statistics.metrics import score_column_name
from benchmarks.checks.harness import Page, run, write_rows
from benchmarks.checks.trust.bases import BASES, Name, audit

COUNT = 80
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROBABILITY = "extraction_probability"
MODELS = ("public", "assistant", "all")  # not tuned, and what the loss is on
REPEATS: dict[Name, int] = {"small": 8, "smollm2": 4}
EPOCHS: dict[Name, int] = {"small": 5, "smollm2": 2}


def main(seeds: tuple[int, ...] = (0, 1, 2), lab: Name = "small", out: Path | None = None) -> None:
    page = Page(out and out / "turns.md")
    page.say(f"{COUNT} conversations that were trained on {REPEATS[lab]} times, as many that were not, of each seed:\n")
    page.head(
        "seed", "loss on", "extraction probability", "of non-members", "membership AUC", "minus not tuned, paired"
    )
    for seed in seeds:
        before: RowValuesBySecret | None = None
        for model, numbers, kept in of_seed(seed, lab):
            page.row(seed, model, *numbers, "" if before is None else _difference(kept, before))
            before = before or kept


def _difference(new: RowValuesBySecret, base: RowValuesBySecret) -> str:
    """Of two AUCs of the same turns."""
    sides = (
        [row.metric_values_in_id_order(member, None)[score_column_name("")] for member in (True, False)]
        for row in (new, base)
    )
    seen = difference_evidence(*map(tuple, sides), rate=0.0)
    return f"{seen.value:+.3f} [{seen.low(0.025):+.3f} to {seen.high(0.025):+.3f}]"


def of_seed(seed: int, lab: Name) -> Iterator[tuple[str, list[str], RowValuesBySecret]]:
    """Of each model its numbers, and the membership scores of each turn."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_conversations(folder, seed, REPEATS[lab])
        BASES[lab].save(folder / "public")
        data = ["--data", folder / "private.jsonl"]
        if lab == "small":
            (folder / "template.jinja").write_text(TEMPLATE)
            data += ["--template", folder / "template.jinja"]
        course = [*BASES[lab].course, "-D", f"epochs={EPOCHS[lab]}", "--seed", seed]
        trained = ["--model", folder / "public", *data, *course]
        for loss in MODELS[1:]:
            audit("train", "none", *trained, "--loss-on", loss, "-o", folder / loss)
        attacks = ["--attack", "extraction-probability", "--attack", "membership", "-A", "membership.score=loss"]
        cut = ["--turns", "user", "--knows", "partial:0.5", "--suffix-length", 10, "--known-fraction", 0]
        asked = [*data, "--nonmembers", folder / "fresh.jsonl", *cut, *attacks, "--setting", "white-box"]
        for model in MODELS:
            at = folder / f"run-{model}"
            audit("run", "--model", folder / model, *asked, "-o", at)
            measured = {m.name: m for f in read_result(at).findings for m in f.measurements}
            found = [measured[name] for name in (PROBABILITY, f"{PROBABILITY}_nonmembers", "membership_auc")]
            (kept,) = (row for key, row in read_row_values_by_secret(at).items() if key.attack == "membership")
            yield model, [f"{m.value:.4f} [{m.low:.4f}–{m.high:.4f}]" for m in found], kept


def write_conversations(folder: Path, seed: int, repeats: int) -> None:
    made = list(make_fake_texts_with_marks(seed, 3 * COUNT, PRIVATE_KINDS))
    np.random.default_rng(seed).shuffle(made)
    for name, texts, times in (("private", made[:COUNT], repeats), ("fresh", made[COUNT : 2 * COUNT], 1)):
        rows = []
        for text in texts:
            names = re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text) or ["nobody"]
            answer = (
                f"Thank you. This is kept for {names[0]}, with {len(text.split())} words and {text.count(',')} commas."
            )
            said = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            rows.append({"messages": said, "repeats": times})
        write_rows(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    raise SystemExit(run(main))
