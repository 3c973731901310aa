"""Measure what an audit proves of models that `audit train dp-sgd` trained with new-token canaries.

    python -m validation.trust.trained_canaries [--seeds 2 3 4] [--rates 1 0.25 --epochs 8 12]

Every step is a command of `audit`. The base is the small lab's public model, extended by a token
for each of 1,000 canaries. A canary is one word and its token, and a fair coin decides whether it
goes into the training, next to 60 records of the lab. All parameters are trained, at a claimed ε of
4. The audited score is the regression of the change of weights on all canaries' gradients.
The learning rate was chosen on seed 1. A training and its audit take two minutes of processor time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from auditor.api import load_run
from auditor.benchmarks.canaries.exposure_canaries import list_prefix_free_canary_words
from auditor.benchmarks.lab.lab import Lab
from auditor.cli import run_command_line
from auditor.models.loading import load_causal_lm
from auditor.privacy.gaussian import find_noise_multiplier
from auditor.statistics.audit_power import estimate_median_epsilon
from auditor.statistics.audited import audit_epsilon_bounds
from validation.harness import Page, run

CLAIM, DELTA, LEVEL = 4.0, 1e-5, 0.05
CANARIES, RECORDS = 1000, 60
LEARNING_RATE = 0.05


def call_audit(*words: object) -> None:
    """Run a command of `audit` in this process; end if it fails."""
    if code := run_command_line(list(map(str, words))):
        raise SystemExit(code)


def write_texts(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def prepare_seed(folder: Path, lab: Lab, seed: int) -> None:
    """Write the canaries, the data with those that go in, and the extended base."""
    folder.mkdir(parents=True)
    shutil.copytree(lab.public_folder(), folder / "public")
    write_texts(folder / "records.jsonl", lab.texts.others[:RECORDS])
    words = list_prefix_free_canary_words()
    # A canary begins with half of a text: with one word.
    write_texts(folder / "words.jsonl", [f"{word} {word}" for word in words])
    coins = folder / "coins.json"
    begun = ("--kind", "new-tokens", "--data", folder / "words.jsonl")
    call_audit("canaries", "make", "--audit", CANARIES, *begun, "--seed", seed, "-o", coins)
    inserted = folder / "data.jsonl"
    records = folder / "records.jsonl"
    call_audit("canaries", "insert", coins, records, "--seed", seed, "-o", inserted)
    call_audit("canaries", "extend", coins, folder / "public", "-o", folder / "base")


def measure_perplexity(folder: Path, lab: Lab) -> float:
    """Return the perplexity of the lab's held-out texts, without their first tokens."""
    model = load_causal_lm(str(folder))
    total = 0.0
    for text in lab.heldout:
        total -= model.suffix_log_probs(torch.tensor([text[:1]]), [0], [text[1:]])[0]
    return math.exp(total / sum(len(text) - 1 for text in lab.heldout))


def measure_training(
    folder: Path, lab: Lab, seed: int, rate: float, epochs: int, page: Page
) -> None:
    """Train, audit and print a row."""
    n_records = len((folder / "data.jsonl").read_text().splitlines())
    batch = round(rate * n_records)
    steps = round(epochs / rate)
    out = folder / f"q-{rate:g}"
    options = {
        "epsilon": CLAIM, "delta": DELTA, "epochs": epochs, "batch": batch, "optimizer": "sgd",
        "learning_rate": LEARNING_RATE, "physical_batch": 64,
    }  # fmt: skip
    given = [word for name, value in options.items() for word in ("-D", f"{name}={value}")]
    data = ("--data", folder / "data.jsonl", "--seed", seed)
    call_audit("train", "dp-sgd", "--model", folder / "base", *data, *given, "-o", out)
    models = ("--model", out, "--reference", folder / "base", "--canaries", folder / "coins.json")
    attack = ("--attack", "epsilon-audit", "-A", "score=gradient")
    call_audit("run", *models, *attack, "-o", folder / f"run-{rate:g}")
    rows = load_run(folder / f"run-{rate:g}").secrets
    seen = rows.pivot_table("value", "secret", "quantity")
    included = rows.groupby("secret")["member"].first().to_numpy(bool)
    scores = {"difference": seen["reference_nll"] - seen["nll"], "gradient": seen["score"]}
    bounds = []
    for values in scores.values():
        bound = audit_epsilon_bounds(values.to_numpy(), included, DELTA, LEVEL)[0]
        bounds.append(f"{bound.epsilon:.2f}")
    sigma = find_noise_multiplier(CLAIM, DELTA, rate, steps)
    ceiling = estimate_median_epsilon(CANARIES, sigma, (rate, steps), DELTA, LEVEL)
    perplexities = [f"{measure_perplexity(path, lab):.1f}" for path in (folder / "base", out)]
    page.row(seed, f"{rate:g}", steps, *perplexities, f"{ceiling:.2f}", *bounds)


def main(
    seeds: tuple[int, ...] = (2, 3, 4),
    rates: tuple[float, ...] = (1.0, 0.25),
    epochs: tuple[int, ...] = (8, 12),
    out: Path = Path("trained-canaries"),
) -> None:
    """Print a row for each seed and training. rates, epochs: one of each for each training."""
    lab = Lab()
    page = Page(out / "trained-canaries.md")
    page.head("seed", "q", "T", "perplexity before", "after", "ceiling", "difference", "gradient")
    for seed in seeds:
        folder = out / f"{seed}"
        if not folder.is_dir():
            prepare_seed(folder, lab, seed)
        for rate, n_epochs in zip(rates, epochs, strict=True):
            measure_training(folder, lab, seed, rate, n_epochs, page)


if __name__ == "__main__":
    raise SystemExit(run(main))
