#!/usr/bin/env bash
# Guess: what dp_clip_laplace() and dp_clip_gaussian() make of a column of incomes with epsilon 1 does not tell, to the cent,
# what one person earns, with bounds or without (they are optional).
# Library: trasgodp 2.0.0 (numpy 2.0.2, pandas 2.3.3). Date: 2026-11-30.
# Seen: without bounds the highest income of 200 is the highest released value, to the cent, in 200 of 200 releases, and 28%
# (Laplace) or 45% (Gaussian) of all rows are given it; the lowest likewise. If that person earns what others do, the
# number occurs in none of 200. So one release tells that somebody earns it, and no epsilon with a small delta holds. No
# warning. With bounds of 0 and 200,000 no private number occurs.
# Why: bounds that are left out are the least and the greatest private value, for the noise and for the clipping after it, which
# puts whatever lies beyond on exactly these two. The docstrings don't say what stands for None.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "trasgodp==2.0.0" "numpy==2.0.2" "pandas==2.3.3"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from trasgodp.numerical import dp_clip_gaussian, dp_clip_laplace

np.random.seed(0)
incomes = np.random.default_rng(0).normal(50000, 9000, 200).round(2)
incomes[17] = 83127.45
ordinary = incomes.copy()
ordinary[17] = 50000.00
mechanisms = {"Laplace": (dp_clip_laplace, {}), "Gaussian": (dp_clip_gaussian, {"delta": 1e-5})}
seen = []
for name, (add_noise, options) in mechanisms.items():
    for title, values, bounds in (
        ("with that person", incomes, {}),
        ("without", ordinary, {}),
        ("with bounds", incomes, {"lower_bound": 0, "upper_bound": 200000}),
    ):
        tables = [pd.DataFrame({"income": values}) for _ in range(200)]
        releases = [add_noise(table, "income", epsilon=1.0, **options, **bounds)["income"] for table in tables]
        n_told = sum((release == 83127.45).any() for release in releases)
        share = np.mean([(release == 83127.45).mean() for release in releases])
        print(f"{name}, {title}: 83127.45 is in {n_told} of 200 releases, in {share:.0%} of the rows")
        seen.append(int(n_told))
sys.exit(seen != [200, 0, 0] * 2)
PY
