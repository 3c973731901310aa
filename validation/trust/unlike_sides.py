"""Measure how often the membership verdict takes a difference in kind for a leak, and its power.

    python -m validation.trust.unlike_sides [--draws 2000] [--seed 0] [--out FOLDER]

Each draw has new records: 100, 240, 1,000 or 2,000 of them, half members on average, with 5 or 40
features; the first feature is up to 1.5 deviations higher for members. Scores follow this feature.
No model is needed. Column `controls`: how often the blind baseline detects the difference; `holds
.5`: how often the 95% interval of the adjusted AUC does, which without a leak is the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from auditor.core.arrays import Bools, Floats, Ints
from auditor.statistics import adjusted_auc, blind_classifier, roc
from validation.harness import Page, run, share

RECORDS = (100, 240, 1000, 2000)
FEATURES = (5, 40)
SHIFTS = ((0.0, 0.25), (0.25, 0.75), (0.75, 1.5))
LEAK = 0.7  # deviations of the score's noise: an AUC of .64 without a shift


def draw_records(
    noise: np.random.Generator, n: int, n_features: int, shift: float, leak: float
) -> tuple[Floats, Bools, Floats]:
    """Return features (n, n_features), and the membership and score of each record, (n,)."""
    member = noise.random(n) < 0.5
    features = noise.standard_normal((n, n_features))
    features[:, 0] += shift * member
    scores = features[:, 0] + 0.3 * features[:, 1] + noise.standard_normal(n) + leak * member
    return features, member, scores


def judge_draw(features: Floats, member: Bools, scores: Floats) -> tuple[bool, ...]:
    """Return whether the AUC is above chance, whether a control is, whether the adjusted AUC's
    interval holds .5, and whether a leak is shown."""
    group = np.arange(len(member))
    controls = {"blind": blind_classifier.predict_membership(features, member, group)}
    overlap = adjusted_auc.weigh_scored_records(
        {"score": scores}, controls, features, member, group
    )["score"]
    adjusted, _ = adjusted_auc.estimate_adjusted_auc(
        "adjusted", scores, member, overlap.weights, widen=overlap.widen, note=""
    )
    is_above = roc.estimate_auc("", scores[member], scores[~member]).low > 0.5
    is_unlike = overlap.widen > 1
    # The same decision as in `_read_membership_leaks`.
    is_shown = adjusted.low > 0.5 and (is_unlike or is_above)
    return is_above, is_unlike, adjusted.low <= 0.5 <= adjusted.high, is_shown


def split_folds(member: Bools, group: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the known and scored records of five folds; a faster version for unrelated records."""
    from sklearn.model_selection import StratifiedKFold

    yield from StratifiedKFold(5, shuffle=True, random_state=0).split(member, member)


def main(draws: int = 2000, seed: int = 0, out: Path = Path("unlike-sides")) -> None:
    noise = np.random.default_rng(seed)
    blind_classifier._split_cross_fit_folds = split_folds
    rows = []
    for i in range(draws):
        n = RECORDS[i % len(RECORDS)]
        n_features = FEATURES[i // len(RECORDS) % len(FEATURES)]
        shift = noise.uniform(0, SHIFTS[-1][1])
        for leak in (0.0, LEAK)[: 1 + (i % 5 == 0)]:
            judged = judge_draw(*draw_records(noise, n, n_features, shift, leak))
            rows.append((n, n_features, shift, leak, *judged))
    table = np.array(rows)
    page = Page(out / "unlike-sides.md")
    head = ("records", "features", "shift", "leak", "draws", "AUC alone", "controls", "holds .5")
    page.head(*head, "shown")
    shifts = (*SHIFTS, (0.0, SHIFTS[-1][1]))
    cells = [*product(RECORDS, FEATURES), (0, 0)]
    parts = [(*cell, *shift) for cell, shift in product(cells, shifts)]
    for leak in (0.0, LEAK):
        for n, n_features, low, high in parts:
            chosen = (table[:, 3] == leak) & (table[:, 2] >= low) & (table[:, 2] <= high)
            if n:
                chosen &= (table[:, 0] == n) & (table[:, 1] == n_features)
            counts = table[chosen, 4:].sum(0).astype(int)
            if not (total := int(chosen.sum())):
                continue
            shares = [share(int(count), total) for count in counts]
            page.row(n or "all", n_features or "all", f"{low}–{high}", leak, total, *shares)


if __name__ == "__main__":
    raise SystemExit(run(main))
