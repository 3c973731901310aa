"""Measure errors, power and time of `audit synthetic` on texts whose writer, and so the truth, is
known.

    python -m validation.trust.released_text [--runs 300] [--seed 0] [--out FOLDER]  (ten minutes on one core)
    python -m validation.trust.released_text --lab smollm2   (the third table; ten minutes)

A writer draws each word by trigrams of the private records with probability `of private`, else by
bigrams of other records of the same kind; at 0, the writer has not seen the private records. First
table: the share of runs that show each signal, with one level shared by all; and membership alone
at its own 5%. Second: the AUC of each score on the same texts, and our AUC minus each published
one, paired. Third: the same for two models of a lab, fine-tuned and not. Last: the time of the
command for 10,000 texts.
"""  # noqa: E501

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t as student

from auditor.benchmarks.canaries import audit_canaries
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.data.released_passages import ReleasedRecord, WordIds
from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.benchmarks.lab.lab_texts import PRIVATE_KINDS, make_fake_texts
from auditor.benchmarks.lab.real_lab import RealLab, RealLabRecipe
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult
from auditor.core.secret_randomness import CHANNELS, make_keyed_generator
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL
from auditor.models.loading import load_causal_lm
from auditor.records.folder import RunFolder
from auditor.records.table import MEASURED, read_secrets_table
from auditor.runs import released_text
from auditor.runs.reporter import Reporter
from auditor.statistics import roc
from auditor.statistics.metrics import name_score_column
from validation.harness import Page, run, share
from validation.trust.bases import Name

RECORDS, TEXTS, CANARIES = 150, 400, 200
SCORES = {"ours": "", "bigrams": "bigrams", "likeness": "likeness"}
SIGNALS = ("verbatim", "near-verbatim", "membership", "personal data", "audited epsilon")
Sides = tuple[np.ndarray, np.ndarray]


class Writer:
    """A writer that draws each word after the previous ones, from private or from public texts."""

    def __init__(self, private: Sequence[str], public: Sequence[str]) -> None:
        self.sides = tuple(self._table(texts, n) for texts, n in ((private, 2), (public, 1)))

    @staticmethod
    def _table(texts: Sequence[str], n: int) -> dict[tuple[str, ...], list[str]]:
        table: dict[tuple[str, ...], list[str]] = {}
        for text in texts:
            words = ["", "", *text.split(" "), "\n"]
            for i in range(2, len(words)):
                table.setdefault(tuple(words[i - n : i]), []).append(words[i])
        return table

    def write(self, of_private: float, noise: np.random.Generator) -> str:
        words = ["", ""]
        while len(words) < 80 and words[-1] != "\n":
            own = self.sides[0].get(tuple(words[-2:])) if noise.random() < of_private else None
            found = own or self.sides[1].get((words[-1],)) or ["\n"]
            words.append(found[noise.integers(len(found))])
        return " ".join(words[2:]).strip()


def audited(
    private: Sequence[str],
    fresh: Sequence[str],
    texts: Sequence[str],
    manifest: AuditCanaryManifest | None = None,
    seed: int = 0,
) -> tuple[AuditResult, dict[str, Sides]]:
    """Audit texts; return the result, and the scores of members and non-members by score name."""
    words = WordIds()
    sides = ((private, True), (fresh, False))
    records = tuple(
        ReleasedRecord(i, t, words(t), side, 1 if side else None)
        for own, side in sides
        for i, t in enumerate(own)
    )
    plan = released_text.build_release_plan(
        Path("out"), "private", "fresh", None if manifest is None else "canaries", seed, "check"
    )
    held = released_text.ReleasedText(
        plan, words, records, tuple(map(words, texts)), tuple(texts), manifest, ()
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run", "", plan.to_json())
        result = released_text.audit_released_text(held, 10, folder, Reporter())
        kept = {
            c.quantity: c
            for c in read_secrets_table(folder.path, MEASURED)
            if c.cell.attack == released_text.MEMBERS
        }
    found = {}
    for name, score in SCORES.items():
        column = kept[name_score_column(score)]
        values, member = np.asarray(column.values), np.array(column.member, dtype=bool)
        found[name] = (values[member], values[~member])
    return result, found


def simulated(of_private: float, seed: int) -> tuple[AuditResult, dict[str, Sides]]:
    """Draw new records, coins and texts, and audit them."""
    made = list(make_fake_texts(seed, 3 * RECORDS, PRIVATE_KINDS))
    noise = np.random.default_rng(seed)
    noise.shuffle(made)
    private, fresh, public = made[:RECORDS], made[RECORDS : 2 * RECORDS], made[2 * RECORDS :]
    begun = audit_canaries.make_audit_canary_texts("prefixed", CANARIES, 6, seed, texts=public)
    manifest = audit_canaries.make_audit_canary_manifest("prefixed", begun, 1, seed)
    writer = Writer([*private, *(one.text for one in manifest.list_inserted_copies())], public)
    texts = [writer.write(of_private, noise) for _ in range(TEXTS)]
    return audited(private, fresh, texts, manifest, seed)


def main(
    runs: int = 300,
    seed: int = 0,
    out: Path | None = None,
    lab: Name = "small",
    texts: int = 10_000,
) -> None:
    page = Page(out and out / "released-text.md")
    if lab == "smollm2":
        of_lab(page, RealLab(RealLabRecipe(seed=seed)), 16, 16, 112)
        return
    page.say(
        f"{RECORDS} private records, as many fresh ones, {TEXTS} texts, {CANARIES} canaries by "
        "coin; share of runs:\n"
    )
    page.head("of private", "runs", *SIGNALS, "any of them", "membership alone at 5%")
    powers = list[tuple[str, list[float]]]()
    for of_private in (0.0, 0.1, 0.3, 0.5, 0.8):
        count = runs if not of_private else max(2, runs // 15)
        shown, aucs = Counter[str](), list[list[float]]()
        for i in range(count):
            result, scores = simulated(of_private, seed + i + int(1e6 * of_private))
            seen = {
                signal.kind.short
                for signal in assess_leak_signals(result).list_shown_signals(UNDEFENDED)
            } & set(SIGNALS)
            auc = roc.estimate_auc("", *scores["ours"])
            told = {"any": bool(seen), "alone": not auc.low <= 0.5 <= auc.high}
            shown.update([*seen, *(name for name, is_told in told.items() if is_told)])
            aucs.append([roc.auc(*sides) for sides in scores.values()])
        page.row(
            f"{of_private:g}",
            count,
            *(share(shown[name], count) for name in (*SIGNALS, "any", "alone")),
        )
        each = np.array(aucs)
        powers.append(
            (
                f"{of_private:g}",
                [_mean(x) for x in (*each.T, *(each[:, 0] - x for x in each.T[1:]))],
            )
        )
    page.say("\nAUC on the same texts, means over the runs with 95% intervals:\n")
    page.head("of private", *SCORES, *(f"ours minus {name}" for name in list(SCORES)[1:]))
    for name, row in powers:
        page.row(name, *row)
    of_lab(page, Lab(LabRecipe(seed=seed)), 2, 250, 80)
    timed(page, texts, seed)


def _mean(values: np.ndarray) -> str:
    reach = float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return f"{values.mean():.3f} [{values.mean() - reach:.3f}–{values.mean() + reach:.3f}]"


def of_lab(page: Page, own: Lab, batches: int, size: int, length: int) -> None:
    """Print the results for texts that a lab's real models write after the token that begins a
    text.
    """
    words, seed = own.tokenizer, own.recipe.seed
    # of a text; a conversation's turns end with another
    end = words.convert_tokens_to_ids("<|endoftext|>")
    private, fresh = (
        [
            words.decode([*s.prefix, *s.suffix], skip_special_tokens=True)
            for s in own.secrets
            if s.member == member
        ]
        for member in (True, False)
    )
    page.say(
        f"\n{batches * size} texts by each model; {len(private)} attacked records, {len(fresh)} "
        "never seen:\n"
    )
    others = list(SCORES)[1:]
    page.head(
        "model",
        "verbatim",
        "never seen",
        *(f"AUC, {x}" for x in SCORES),
        *(f"ours minus {x}" for x in others),
    )
    for name, model in (
        ("fine-tuned", load_causal_lm(str(own.target_folder()))),
        ("never trained on them", load_causal_lm(str(own.public_folder()))),
    ):
        texts = [
            text
            for batch in range(batches)
            for text in _drawn(model, end, seed, batch, size, length)
        ]
        result, scores = audited(private, fresh, texts, seed=seed)
        told = {m.name: m for f in result.findings for m in f.measurements}
        recalls = [
            _said(m.value, m.low, m.high) for m in (told["recall"], told["recall_nonmembers"])
        ]
        aucs = [roc.estimate_auc("", *sides) for sides in scores.values()]
        apart = [roc.compute_auc_difference(scores["ours"], scores[other]) for other in others]
        differences = [_said(one.value, one.low(0.025), one.high(0.025)) for one in apart]
        page.row(name, *recalls, *(_said(m.value, m.low, m.high) for m in aucs), *differences)


def _drawn(
    model: LanguageModel, end: int, seed: int, batch: int, size: int, length: int
) -> Iterator[str]:
    """Yield a batch of texts, each up to its end token."""
    words = model.tokenizer
    start = torch.tensor([[words.bos_token_id or words.eos_token_id]])
    noise = make_keyed_generator("released text", seed, batch).random((1, size, length, CHANNELS))
    for row in sample_candidates(model, start, length, ANCESTRAL, noise)[0].suffixes.tolist():
        yield words.decode(row[: row.index(end)] if end in row else row, skip_special_tokens=True)


def _said(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}–{high:.3f}]"


def timed(page: Page, count: int, seed: int) -> None:
    made = list(make_fake_texts(seed, 3000, PRIVATE_KINDS))
    writer, noise = Writer(made[:1000], made[2000:]), np.random.default_rng(seed)
    texts = [writer.write(0.3, noise) for _ in range(count)]
    begin = time.process_time()
    audited(made[:1000], made[1000:2000], texts)
    page.say(
        f"\n{count:,} texts against 1,000 private and 1,000 fresh records: "
        f"{time.process_time() - begin:.0f} s."
    )


if __name__ == "__main__":
    raise SystemExit(run(main))
