#!/usr/bin/env bash
# Guess: min_nearest_neighbour(), which by default compares the outliers of the real table only ("filter out the real data
# inliers"), is 0 if the synthetic table has copies of the most extreme people.
# Library: synthgauge 2.2.0 (scikit-learn 1.9.1, numpy 1.26.4, pandas 2.3.3, matplotlib 3.8.4). Date: 2026-11-29.
# Seen: copies of the four outliers don't change it (0.0048 with them and without); a copied ordinary row makes it 0. With
# outliers_only=False both make it 0. So the copies for which the default was made are the ones that it doesn't see.
# sample_overlap_score(), a share of copied rows, is about 0.2 for the real table itself, and 1 with a seed.
# Why: a row counts as an outlier if its outlier factor is BELOW the threshold of 2. And both tables are sampled, 20% of
# each, so a row meets its copy in one case of five; with a seed the same rows of both are drawn.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "synthgauge==2.2.0" "scikit-learn==1.9.1" "numpy==1.26.4" \
    "pandas==2.3.3" "matplotlib==3.8.4"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from synthgauge.metrics import privacy

rng = np.random.default_rng(0)


def draw_people(n):
    return pd.DataFrame(rng.normal(size=(n, 2)), columns=["income", "weight"])


outliers = pd.DataFrame({"income": [40.0, -35, 50, 9], "weight": [50.0, 20, -30, -8]})
real = pd.concat([draw_people(500), outliers], ignore_index=True)
new = draw_people(500)
tables = {
    "new people": new,
    "and the four outliers": pd.concat([new, outliers], ignore_index=True),
    "and four ordinary people": pd.concat([new, real[:4]], ignore_index=True),
}
seen = {}
for name, table in tables.items():
    default = privacy.min_nearest_neighbour(real, table)
    everybody = privacy.min_nearest_neighbour(real, table, outliers_only=False)
    seen[name] = default, everybody
    print(f"{name}: smallest distance {default:.4f}, with outliers_only=False {everybody:.4f}")
np.random.seed(0)
overlap = privacy.sample_overlap_score(real, real), privacy.sample_overlap_score(real, real, seed=1)
print(f"overlap of the real table with itself: {overlap[0]:.2f}, with a seed {overlap[1]:.2f}")
still_so = (
    seen["and the four outliers"][0] == seen["new people"][0] > 0
    and seen["and the four outliers"][1] == 0
    and seen["and four ordinary people"] == (0, 0)
    and overlap[0] < 0.3
    and overlap[1] == 1
)
sys.exit(not still_so)
PY
