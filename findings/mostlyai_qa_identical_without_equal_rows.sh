#!/usr/bin/env bash
# Guess: ims_training, described as "share of synthetic samples that are identical to a training sample", is 0 for a table without
# one row of the training table, and 1 for a copy of it.
# Library: mostlyai-qa 1.10.11 (with numpy 2.4.6, scikit-learn 1.9.1, torch 2.13.0). Date: 2026-11-30.
# Seen: of 300 bills drawn anew, with an amount and a tax of a fifth of it, none is a training bill, and ims_training is 1, as for
# a copy; ims_holdout is 1 for both, too, and both have dcr_training 0. So the report tells a copied table from a new one in
# nothing: the copied one even looks as good as the holdout. With an age instead of the tax, drawn by itself, it is 0 and 1.
# Why: numbers become ranks from -0.5 to 0.5, and each row is then divided by its length, so that only its direction is left:
# columns that rise together have two directions, above and below the median.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "mostlyai-qa==1.10.11" "torch==2.13.0" "numpy==2.4.6" "scikit-learn==1.9.1" "pandas==3.1.1"
cd "$work"
HOME="$work" HF_HOME="$work/hub" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sys

import numpy as np
import pandas as pd
from mostlyai import qa


def make_bills(seed, other):
    draw = np.random.default_rng(seed)
    amount = draw.uniform(100, 900, 300).round(2)
    values = {"tax": amount / 5, "age": draw.uniform(20, 80, 300).round(1)}
    return pd.DataFrame({"amount": amount, other: values[other]})


def measure(other, seed):
    training, holdout, synthetic = (make_bills(number, other) for number in (1, 2, seed))
    _, metrics = qa.report(syn_tgt_data=synthetic, trn_tgt_data=training, hol_tgt_data=holdout, report_path="report.html")
    equal = synthetic.merge(training.drop_duplicates(), how="inner").shape[0]
    found = metrics.distances
    kind = "copied" if seed == 1 else "new"
    print(f"amount and {other}, {kind}: {equal} of 300 rows are in the training table; ims_training {found.ims_training}, ", end="")
    print(f"ims_holdout {found.ims_holdout}, dcr_training {found.dcr_training}, dcr_share {found.dcr_share}", flush=True)
    return equal, found.ims_training, found.ims_holdout, found.dcr_training


seen = {(other, seed): measure(other, seed) for other in ("tax", "age") for seed in (3, 1)}
together = seen["tax", 3] == (0, 1, 1, 0) and seen["tax", 1] == (300, 1, 1, 0)
apart = seen["age", 3][:3] == (0, 0, 0) and seen["age", 1][:3] == (300, 1, 0)
sys.exit(not (together and apart))
PY
