#!/usr/bin/env bash
# Guess: DCROverfittingProtection of a "synthetic" table that is an exact copy of the training table, notes and all, is near 0.
# Library: sdmetrics 0.32.0. Date: 2026-11-29.
# Seen: it is 1, the best, if the notes are declared as text, which they are: of all rows "closer to holdout" is 100%. The
# ages alone are compared, which the holdout has, too. No warning. DCRBaselineProtection is undefined then. With
# the notes declared as categorical the copy scores 0; and if only the notes are copied and the ages drawn anew
# DCROverfittingProtection is near 0 and DCRBaselineProtection is 1, the best.
# Why: columns of texts and of personal data are left out without a word; a row at the same distance from both counts for the
# holdout.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "sdmetrics==0.32.0"
"$work/venv/bin/python" - <<'PY'
import sys
import warnings

import numpy as np
import pandas as pd
from sdmetrics.single_table import DCRBaselineProtection, DCROverfittingProtection

warned = warnings.catch_warnings(record=True)


def make_table(name, seed):
    ages = np.random.default_rng(seed).integers(20, 30, 300)
    return pd.DataFrame({"note": [f"{name} {i}: seen on ward {i % 7}" for i in range(300)], "age": ages})


training, holdout = make_table("patient", 1), make_table("other patient", 2)
copies = {
    "all copied": training.copy(),
    "notes copied, ages new": training.assign(age=make_table("", 3)["age"]),
    "nothing copied": make_table("new patient", 4),
}
scores = {}
with warned as messages:
    warnings.simplefilter("always")
    for kind in ("text", "categorical"):
        columns = {"note": {"sdtype": kind}, "age": {"sdtype": "numerical"}}
        metadata = {"tables": {"notes": {"columns": columns}}}
        for name, table in copies.items():
            overfitting = DCROverfittingProtection.compute(training, table, holdout, metadata, "notes")
            baseline = DCRBaselineProtection.compute(training, table, metadata, "notes")
            scores[kind, name] = (round(float(overfitting), 1), round(float(baseline), 1))
for (kind, name), (overfitting, baseline) in scores.items():
    print(f"notes as {kind}, {name}: DCROverfittingProtection {overfitting}, DCRBaselineProtection {baseline}")
print(f"warnings: {len(messages)}")
best = [scores["text", name][0] for name in copies]
rest = [scores["categorical", name] for name in copies]
sys.exit(best != [1.0] * 3 or rest[0] != (0.0, 0.0) or rest[1][0] > 0.2 or rest[1][1] != 1.0 or bool(messages))
PY
