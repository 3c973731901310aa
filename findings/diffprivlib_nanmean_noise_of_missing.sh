#!/usr/bin/env bash
# Guess: nanmean() with epsilon 1 keeps epsilon 1 if most values are missing: its noise is that of a mean of the values there
# are, or larger.
# Library: diffprivlib 0.6.6 (numpy 2.4.6, scikit-learn 1.6.1). Date: 2026-11-29.
# Seen: of 1,000 values in [0, 100] 990 are missing. One person's value moves the mean by 10, and the noise has scale 0.1:
# whether it is 0 or 100 is told rightly in all of 6,000 releases, which needs an epsilon of 6.7 at least. The
# accountant counts 1. Without missing values the same rule is right in 70% of the releases. mean() returns NaN.
# Why: the sensitivity is (upper - lower) / number of all values, missing ones included; so in nanvar() and nanstd().
# histogram(weights=...) has the like: one person of weight 100 fills a bin by 100, and the noise is that for 1.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "diffprivlib==0.6.6" "numpy==2.4.6" "scikit-learn==1.6.1"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
from diffprivlib import BudgetAccountant, tools
from scipy.stats import beta

RELEASES = 3000


def bound_epsilon(release, threshold):
    """Return the share told rightly and a lower bound on epsilon (95%) from releases for the values 0 and 100."""
    wrong = [0, 0]
    for _ in range(RELEASES):
        wrong[0] += release(0) > threshold
        wrong[1] += release(100) <= threshold
    rates = [beta.ppf(0.975, count + 1, RELEASES - count) for count in wrong]
    epsilon = max(0, np.log((1 - rates[0]) / rates[1]))
    return 1 - sum(wrong) / (2 * RELEASES), epsilon


random_state = np.random.RandomState(0)
others = np.tile([0.0, 100.0, 50.0], 3)


def average(value, missing):
    values = np.concatenate([[value], others, np.full(missing, np.nan)])
    return tools.nanmean(values, epsilon=1, bounds=(0, 100), random_state=random_state)


def count_weight(value):
    counts, _ = tools.histogram(
        [1, 1, 1], epsilon=1, bins=2, range=(0, 2), weights=[value, 10, 10], random_state=random_state
    )
    return counts[1]


accountant = BudgetAccountant()
tools.nanmean(np.append(others, np.full(990, np.nan)), epsilon=1, bounds=(0, 100), accountant=accountant)
seen = {}
for missing in (0, 990):
    seen[missing] = bound_epsilon(lambda value: average(value, missing), 50)
    print(f"{missing} missing: told rightly {seen[missing][0]:.4f}, epsilon at least {seen[missing][1]:.2f}")
seen["weights"] = bound_epsilon(count_weight, 70)
print(f"weights: told rightly {seen['weights'][0]:.4f}, epsilon at least {seen['weights'][1]:.2f}")
print(f"the accountant counts {accountant.total()[0]}")
still_so = seen[0][1] <= 1 and seen[990][1] > 6 and seen["weights"][1] > 6 and accountant.total()[0] == 1
sys.exit(not still_so)
PY
