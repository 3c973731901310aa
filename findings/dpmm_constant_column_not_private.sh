#!/usr/bin/env bash
# Guess: with epsilon 1, and the domain of every column given, as the warnings of PrivacyLeakage ask for, the diagnosis of one
# patient of 100 changes little of what a synthetic table looks like.
# Library: dpmm 0.1.9 (opendp 0.12.1, pandas 2.1.0, scipy 1.17.1), MSTPipeline. Date: 2026-11-29.
# Seen: if no patient has it, no synthetic row ever has, though the domain allows it; with one patient ten tables of twelve
# had 72 to 351 such rows of 2,000. So one such row tells that somebody has it, and no epsilon with a small delta holds. No warning.
# If an income is missing, the income of a patient is in the stored pipeline, to the cent, as the value that fills gaps.
# Why: a column with a single value is taken out before the mechanism and put back exactly; the filling value is drawn from
# the private rows. Neither is noised or counted.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "dpmm==0.1.9" "scipy==1.17.1"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import logging
import sys

import joblib
import numpy as np
import pandas as pd
from dpmm.pipelines import MSTPipeline

warned = []
logging.getLogger("dpmm").addHandler(type("Keep", (logging.Handler,), {"emit": lambda _, one: warned.append(one)})())
domain = {"hepatitis": {"categories": ["no", "yes"]}, "sex": {"categories": ["f", "m"]}}


def count_rows(n_patients, seed):
    """Return how many of 2,000 synthetic rows have hepatitis."""
    table = pd.DataFrame({"hepatitis": ["yes"] * n_patients + ["no"] * (100 - n_patients), "sex": ["f", "m"] * 50})
    pipeline = MSTPipeline(epsilon=1.0, delta=1e-5, n_jobs=1, gen_kwargs={"n_iters": 50})
    pipeline.fit(table, domain=domain, random_state=seed)
    rows = pipeline.generate(n_records=2000, random_state=seed)
    return int((rows["hepatitis"] == "yes").sum())


without = [count_rows(0, seed) for seed in range(2)]
print(f"no patient: synthetic rows with hepatitis, of 2,000: {without}")
with_one = 0
for seed in range(8):
    with_one = count_rows(1, seed)
    print(f"one patient of 100: {with_one}")
    if with_one > 0:
        break
incomes = np.random.default_rng(0).uniform(0, 100_000, 100).round(2)
table = pd.DataFrame({"income": np.append(incomes, np.nan)})
binner = MSTPipeline(epsilon=1.0, delta=1e-5).proc
binner.set_domain({"income": {"lower": 0, "upper": 100_000}})
binner.fit(table)
binner.store("processing.joblib")
kept = joblib.load("processing.joblib").nan_columns["income"]["fill_value"]
print(f"stored to fill gaps: {kept}, the income of a patient: {kept in incomes}; warnings: {len(warned)}")
sys.exit(not (sum(without) == 0 and with_one > 0 and kept in incomes and not warned))
PY
