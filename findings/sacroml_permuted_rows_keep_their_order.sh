#!/usr/bin/env bash
# Guess: get_metrics() of an attack that gives all records the same probability finds no leak, whatever the order of the rows; its
# permute_rows=True, the default, says that they are shuffled first.
# Library: sacroml 2.0.1 (scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6). Date: 2026-11-30.
# Seen: with the 200 non-members first, the most suspected tenth are all members and the least suspected tenth none: FDIF01 is 1
# with a p-value below 1e-49 (PDIF01 115.13), a leak as clear as can be. With the members first FDIF01 is -1, for shuffled rows
# about 0. The AUC is 0.5 in all three, and permute_rows=False gives the same numbers.
# Why: the records are ranked by argsort, which here leaves equal scores in the order of the rows, and the function that shuffles
# makes shuffled copies for itself and returns nothing. Attacks by labels, by votes or with saturated scores are full of ties;
# the package's own LiRA attack hands the members over first.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "scikit-learn==1.9.1" "scipy==1.17.1" "numpy==2.4.6"
"$work/venv/bin/pip" install -q --no-compile --no-deps "sacroml==2.0.1"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
from sacroml.metrics import get_metrics

shuffled = np.random.default_rng(0).permutation(400)
orders = {"non-members first": np.arange(400), "members first": np.arange(400)[::-1], "shuffled": shuffled}
differences = []
for order, rows in orders.items():
    members = np.repeat([0, 1], 200)[rows]
    seen = [
        [float(get_metrics(np.full((400, 2), 0.5), members.copy(), permute_rows=permute)[name]) for name in ("AUC", "FDIF01", "PDIF01")]
        for permute in (True, False)
    ]
    print(f"{order}: AUC, FDIF01, PDIF01 are {seen[0]}; without permute_rows {seen[1]}")
    if seen[0] != seen[1] or seen[0][0] != 0.5:
        sys.exit(1)
    differences.append(seen[0][1])
first, last, mixed = differences
sys.exit(not (first > 0.8 and last < -0.8 and abs(mixed) < 0.4))
PY
