#!/usr/bin/env bash
# Guess: the risk of membership_inference_test() is near 1 for a "synthetic" table that is the training table itself, and no table
# with fewer copies has a higher one.
# Library: clearbox-sure 0.2.16 (pandas 2.2.3, polars 1.17.1, numpy 1.26.4, scikit-learn 1.9.1). Date: 2026-12-01.
# Seen: the exact copy has 0.25. If half of its rows are replaced by new people the risk is 0.28, and if noise is added to each
# copied income 1. So a generator that copies all people looks safer than one that copies half of them. New people: 0.
# Why: a record counts as a member if its distance is below a quantile of all distances; for a copy a half of the distances is 0,
# so three of the four quantiles are 0, and nothing is below 0. A quantile at which nobody is guessed counts as chance, 0.5.
# The package compiles a part of itself when it is imported (a C compiler is needed). Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "clearbox-sure==0.2.16" "pandas==2.2.3" "polars==1.17.1" "numpy==1.26.4" \
    "scikit-learn==1.9.1"
cd "$work"
HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sys

import numpy as np
import pandas as pd
from sure.privacy import adversary_dataset, membership_inference_test

rng = np.random.default_rng(0)


def make_people(n):
    incomes = rng.normal(50_000, 15_000, n).round()
    weights = rng.normal(70, 12, n).round(1)
    return pd.DataFrame({"age": rng.integers(20, 90, n), "income": incomes, "weight": weights})


def measure_risk(name, released):
    rows = adversary_dataset(training, holdout)
    members = rows["privacy_test_is_training"]
    result = membership_inference_test(rows, released.copy(), members, parallel=False, save_data=False)
    risk = result["membership_inference_mean_risk_score"]
    print(f"{name}: risk {risk:.2f}, precisions {[round(value, 2) for value in result['adversary_precisions']]}")
    return risk


training, holdout = make_people(1000), make_people(500)
copy = measure_risk("exact copy", training)
half = measure_risk("half of it copied", pd.concat([training[:500], make_people(500)], ignore_index=True))
noised = measure_risk("copy, noise in incomes", training.assign(income=training["income"] + rng.normal(0, 500, 1000)))
new = measure_risk("new people", make_people(1000))
sys.exit(not (copy == 0.25 < half < 0.4 and noised > 0.95 and new < 0.1))
PY
