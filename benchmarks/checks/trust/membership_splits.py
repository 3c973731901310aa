"""What a split is worth: the same records as members and non-members by chance, and by length, on real text.

    python -m benchmarks.checks.trust.membership_splits ARRAYS TOKENIZER OUT     (some minutes of training, once)

ARRAYS, TOKENIZER: as `benchmarks.checks.trust.real_text` takes them; OUT gets its public model and target, and the
arrays of each split. The target learnt half of the examples, drawn at random; the public model learnt none. By length,
the longer half of what was learnt is held against the shorter half of what was not: a split that looks like evidence
against the public model too, of which there is none to be had. Last, how often the blind baseline objects to random
splits of these texts, which differ in nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from auditor.attacks.likelihood_ranking import zlib_compressed_byte_count
from auditor.cli import run_command_line
from auditor.core.result import AuditResult
from auditor.core.secret_randomness import keyed_random_generator
from auditor.records.result_file import read_result
from auditor.reports import phrases
from auditor.reports.verdict import headline
from auditor.statistics import blind_classifier, roc
from benchmarks.checks.harness import Page, run
from benchmarks.checks.trust.real_text import RealTextRecipe, build

RECIPE = RealTextRecipe(members=400, known=50, nonmembers=400, public_epochs=6, private_epochs=4)
LIMIT, SPLITS = "200", 100
SHOWN = ("membership_auc", "tpr_at_1pct_fpr", "blind_auc", "reference_alone_auc")


def main(arrays: Path, tokenizer: Path, out: Path) -> None:
    if not (out / "target").is_dir():
        build(arrays, tokenizer, out, RECIPE)
    if not (out / "length").is_dir():
        by_length(out, tokenizer)
    page = Page()
    page.head("split", "model", *map(phrases.metric_label, SHOWN), "the report's first sentence")
    for split, model in (("random", "target"), ("length", "target"), ("length", "public")):
        page.row(split, model, *row(audited(out, split, model)))
    for members, others in ((400, 400), (300, 100)):
        objections = false_alarms(arrays, tokenizer, members, others)
        page.say(f"random splits, {members} against {others}: the blind baseline objects to {objections} of {SPLITS}")


def false_alarms(arrays: Path, tokenizer_folder: Path, members: int, others: int) -> int:
    """Of random splits, those that the interval of the blind AUC takes for no chance."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    parts = [np.load(next(arrays.glob(f"*_{part}.npy"))).astype(np.int64) for part in ("prefix", "suffix")]
    texts = [tuple(row) for row in np.concatenate(parts, axis=1).tolist()]
    written = [tokenizer.decode(text) for text in texts]
    sizes = np.array([[len(text), zlib_compressed_byte_count(text)] for text in written], dtype=float)
    group, objections = blind_classifier.related_fold_groups(texts), 0
    member = np.arange(members + others) < members
    for i in range(SPLITS):
        rows = keyed_random_generator("splits", i, members, others).permutation(len(texts))[: len(member)]
        scores = blind_classifier.blind_membership_scores(
            [texts[row] for row in rows], sizes[rows], member, group[rows]
        )
        widen = blind_classifier.cross_fit_deviation_factor(blind_classifier.cross_fit_fold_count(member, group[rows]))
        objections += roc.auc_with_interval("blind_auc", scores[member], scores[~member], widen=widen).low > 0.5
    return objections


def by_length(out: Path, tokenizer_folder: Path) -> None:
    """Of members the longer half, of non-members the shorter: in characters, as all have as many tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for name in ("members", "nonmembers"):
        parts = [np.load(out / name / f"{name}_{part}.npy") for part in ("prefix", "suffix")]
        size = np.array([len(tokenizer.decode(row)) for row in np.concatenate(parts, axis=1)])
        longer = size > np.median(size)
        folder = out / "length" / name
        folder.mkdir(parents=True)
        for part, rows in zip(("prefix", "suffix"), parts, strict=True):
            np.save(folder / f"{name}_{part}.npy", rows[longer if name == "members" else ~longer])


def audited(out: Path, split: str, model: str) -> AuditResult:
    data, folder = out if split == "random" else out / split, out / "runs" / f"{split}-{model}"
    if not (folder / "result.json").is_file():
        # The public model is no reference of itself: its own scores are looked at without one.
        beside = ["--reference", str(out / "public")] if model == "target" else ["-A", "score=min_k_plus"]
        places = ["--data", str(data / "members"), "--nonmembers", str(data / "nonmembers"), "-o", str(folder)]
        asked = ["--attack", "membership", "--setting", "white-box", "--known-fraction", "0", "--limit", LIMIT, *beside]
        if code := run_command_line(["run", "--model", str(out / model), *places, *asked]):
            sys.exit(code)
    return read_result(folder)


def row(result: AuditResult) -> Iterator[str]:
    (finding,) = result.findings
    for name in SHOWN:
        yield phrases.value_with_interval(finding.measurement(name))
    yield headline(result)


if __name__ == "__main__":
    raise SystemExit(run(main))
