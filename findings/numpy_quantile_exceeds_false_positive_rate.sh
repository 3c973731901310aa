#!/usr/bin/env bash
# Guess: np.quantile(scores of non-members, 0.99) is a threshold above which at most 1% of these non-members are.
# Library: numpy 2.4.6. Date: 2026-11-30.
# Seen: of 10 non-members 10% are above, of 30 3.3%, of 150 1.3%, in each of 2,000 draws. Members like them, of whom no attack knows
# anything, exceed it in 9.8%, 3.9% and 1.6%: "a true-positive rate of 3.9% at 1%" of chance alone. method="higher" lets at
# most 1% of the given ones pass, and still 9.0%, 3.1% and 1.3% of members.
# Why: by default the threshold lies between two scores, so that the higher one is above; and few scores have no 99% quantile.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np

rng = np.random.default_rng(0)


def measure_rates(n, method):
    """Return the share above the threshold of the n non-members given, and of 200 members like them."""
    given, fresh = [], []
    for _ in range(2000):
        others = rng.normal(size=n)
        threshold = np.quantile(others, 0.99, method=method)
        given.append(np.mean(others > threshold))
        fresh.append(np.mean(rng.normal(size=200) > threshold))
    print(f"{n} non-members, {method}: {np.mean(given):.2%} of them, {np.mean(fresh):.2%} of members like them")
    return np.mean(given), np.mean(fresh)


seen = {method: [measure_rates(n, method) for n in (10, 30, 150)] for method in ("linear", "higher")}
is_exceeded = all(share > 0.01 and fresh > 0.014 for share, fresh in seen["linear"])
sys.exit(not (is_exceeded and all(share < 0.01 < fresh for share, fresh in seen["higher"])))
PY
