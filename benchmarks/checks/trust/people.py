"""Leakage by person: how often its intervals hold, and whose data is told to be in a model that was trained.

    python -m benchmarks.checks.trust.people [--seeds 0 1 2] [--out FOLDER]  (two minutes a seed on one core)
    python -m benchmarks.checks.trust.people --lab smollm2 --seeds 0         (twenty minutes a seed)

First table: 95% intervals of a mean over people of whom all records are extracted or none, over people and records.
Second: 100 people, each with a vocabulary of their own; the lab's public model is fine-tuned on 8 records each of 50 of
them, those of 5 people 10 times. What it tells, also of the 4 others of each, which it has not seen, by
--user-column; the untuned model beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from faker import Faker

from auditor.records.result_file import read_result
from auditor.statistics import people
from auditor.statistics.intervals import mean_probability, share_with_interval
from benchmarks.checks.harness import Page, run, share, write_rows
from benchmarks.checks.trust.bases import BASES, Name, audit

IN, OUT, OFTEN, TRAINED, FRESH = 50, 50, 5, 8, 4
EPOCHS: dict[Name, int] = {"small": 8, "smollm2": 3}
NUMBERS = ("user_recall", "users_extracted", "recall", "user_inference_auc", "user_inference_auc_reference_alone")


def main(seeds: tuple[int, ...] = (0, 1, 2), lab: Name = "small", runs: int = 2000, out: Path | None = None) -> None:
    page = Page(out and out / "people.md")
    page.say("40 people, 1 to 20 records each; of 30% of the people all records are extracted:\n")
    page.head("interval", "covers", "mean width")
    for name, held, width in covered(runs):
        page.row(name, share(held, runs), f"{width:.3f}")
    page.say(f"\n{IN} people in it, {OUT} not:\n")
    page.head("seed", "model", *NUMBERS)
    for seed in seeds:
        for model, found in trained(seed, lab):
            page.row(seed, model, *(found.get(name, "") for name in NUMBERS))


def covered(runs: int) -> Iterator[tuple[str, int, float]]:
    rng, held, width = np.random.default_rng(0), np.zeros(2, int), np.zeros(2)
    for _ in range(runs):
        out = rng.random(40) < 0.3
        user = np.repeat(np.arange(40), rng.integers(1, 21, 40))
        by_person = mean_probability("user_recall", people.mean_per_person(out[user], user.astype(float)))
        for i, m in enumerate((by_person, share_with_interval("recall", out[user]))):
            held[i] += m.low <= 0.3 <= m.high
            width[i] += m.high - m.low
    for i, name in enumerate(("over people", "over records")):
        yield name, int(held[i]), float(width[i] / runs)


def trained(seed: int, lab: Name) -> Iterator[tuple[str, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, rows in write_people(seed).items():
            write_rows(folder / f"{name}.jsonl", rows)
        BASES[lab].save(folder / "public")
        data = ["--data", folder / "private.jsonl"]
        course = [*BASES[lab].course, "-D", f"epochs={EPOCHS[lab]}", "--seed", seed]
        audit("train", "none", "--model", folder / "public", *data, *course, "-o", folder / "tuned")
        attacks = ["--attack", "perplexity", "-A", "perplexity.samples=5", "--attack", "membership"]
        asked = [*data, "--nonmembers", folder / "fresh.jsonl", "--user-column", "who", *attacks]
        cut = ["--prefix-length", 10, "--suffix-length", 10, "--known-fraction", 0, "--setting", "white-box"]
        for name in ("tuned", "public"):
            more = ["--reference", folder / "public"] if name == "tuned" else ["-A", "membership.score=loss"]
            audit("run", "--model", folder / name, *asked, *cut, *more, "-o", folder / f"run-{name}")
            found = (m for f in read_result(folder / f"run-{name}").findings for m in f.measurements)
            yield name, {m.name: f"{m.value:.3f} [{m.low:.3f}–{m.high:.3f}]" for m in found}


def write_people(seed: int) -> dict[str, list[dict[str, object]]]:
    """Rows trained on, and others, of people who are in it or not: each writes with 30 words of their own."""
    fake = Faker()
    fake.seed_instance(seed)
    rng, rows = np.random.default_rng(seed), {"private": list[dict[str, object]](), "fresh": list[dict[str, object]]()}
    for person in range(IN + OUT):
        own = [*dict.fromkeys(fake.words(60))][:30]
        for i in range(TRAINED + FRESH if person < IN else FRESH):
            words = " ".join(rng.choice(own, 20))
            kept = "private" if person < IN and i < TRAINED else "fresh"
            text = f"Note {rng.integers(10**6):06d}: {words}."
            rows[kept].append({"text": text, "who": f"person {person}", "repeats": 10 if person < OFTEN else 1})
    return rows


if __name__ == "__main__":
    raise SystemExit(run(main))
