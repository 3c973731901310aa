#!/usr/bin/env bash
# Guess: private_count() with epsilon 0.1 ("pure epsilon-DP") gives numbers above and below the true count, and of 10 patients the
# released counts hardly differ from those of 11; advanced_composition() gives no less than the exact epsilon of the queries.
# Library: diffpriv-pure 0.1.0 (no dependencies; scipy 1.17.1 for the exact numbers). Date: 2026-12-01.
# Seen: no count of 20,000 is below the true one, and 9.6% are it. So each released 10 says for certain that there were not 11
# patients, and the lowest of 50 releases is the true count. And 100 queries with epsilon 1 and delta 0.000001 each make 52.6 by
# advanced_composition(), with a delta of 0.0001; of 100 randomized answers the exact epsilon at this delta is 75.9.
# Why: the noise is geometric on one side only (0, 1, 2, ...). The composition leaves out the term that grows with the number of queries.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "diffpriv-pure==0.1.0" "scipy==1.17.1" "numpy==2.1.3"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import math
import random
import sys

from diffpriv_pure import PrivacyBudget, private_count
from scipy.stats import binom


def compose_exactly(n, epsilon, delta):
    """Return the exact epsilon of n randomized answers of one person, each with probability e^eps/(1 + e^eps) true."""
    true = math.exp(epsilon) / (1 + math.exp(epsilon))
    losses = [(2 * k - n) * epsilon for k in range(n + 1)]
    weights = binom.pmf(range(n + 1), n, true)
    low, high = 0.0, n * epsilon
    while high - low > 1e-6:
        middle = (low + high) / 2
        excess = sum(w * -math.expm1(middle - loss) for w, loss in zip(weights, losses) if loss > middle)
        low, high = (low, middle) if excess <= delta else (middle, high)
    return high


random.seed(0)
counts = [private_count(10, 0.1) for _ in range(20_000)]
below = sum(count < 10 for count in counts)
exact = counts.count(10) / len(counts)
others = sum(private_count(11, 0.1) <= 10 for _ in range(20_000))
print(f"10 patients: {below} of {len(counts)} counts below 10, {exact:.1%} are 10; 11 patients: {others} counts of 10 or less")
lowest = [min(private_count(10, 0.1) for _ in range(50)) for _ in range(200)]
print(f"lowest of 50 releases: the true count in {lowest.count(10)} of 200 repetitions")
told, delta = PrivacyBudget(1000.0).advanced_composition(100, 1.0, 1e-6)
right = compose_exactly(100, 1.0, delta)
print(f"100 queries of epsilon 1: advanced_composition {told:.1f} at delta {delta:.4f}, exact {right:.1f}")
one_sided = below == 0 and others == 0 and 0.08 < exact < 0.11 and lowest.count(10) > 190
sys.exit(not (one_sided and told < 0.8 * right))
PY
