#!/usr/bin/env bash
# Guess: the privacy loss, the identifiability risk of the training rows less that of a holdout, is about 0 for synthetic rows
# that know neither table, however many rows the holdout has.
# Library: syntheval 1.7.3 (numpy 2.4.6, pandas 3.1.1, scikit-learn 1.9.1). Date: 2026-11-29.
# Seen: with 1,000 training rows and a holdout of 1,000, 500, 250 and 100 rows it is 0.01, 0.17, 0.28 and 0.44: with the usual
# split of 80 to 20 independent rows look as if they gave away a quarter of the training rows. And with a holdout of
# 2,000 rows a table that holds 300 of the training rows has a loss below 0.
# Why: the number of holdout rows at risk is divided by the number of training rows. (Divided by its own number the share
# of the 100 would be 0.87, and the loss -0.35, since the rows of a small table are far from one another.)
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "syntheval==1.7.3" "numpy==2.4.6" "pandas==3.1.1" "scikit-learn==1.9.1"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' > "$work/log"
import sys

import numpy as np
import pandas as pd
from syntheval import SynthEval

rng = np.random.default_rng(0)


def draw_people(n):
    return pd.DataFrame(rng.normal(size=(n, 3)), columns=["age", "weight", "pulse"])


def find_loss(n_holdout, n_copied):
    """Return the privacy loss of 1,000 synthetic rows of which `n_copied` are training rows."""
    train, holdout = draw_people(1000), draw_people(n_holdout)
    synthetic = pd.concat([train[:n_copied], draw_people(1000 - n_copied)], ignore_index=True)
    evaluator = SynthEval(train, holdout_dataframe=holdout, cat_cols=[], verbose=False)
    results = evaluator.evaluate(synthetic, eps_risk={})
    values = dict(zip(results["metric"], results["val"]))
    loss = values["priv_loss_eps"]
    print(f"holdout of {n_holdout}, {n_copied} copied: privacy loss {loss:+.2f}", file=sys.stderr)
    return loss


losses = [find_loss(n_holdout, 0) for n_holdout in (1000, 500, 250, 100)]
copied = [find_loss(n_holdout, 300) for n_holdout in (1000, 2000)]
still_so = abs(losses[0]) < 0.1 and losses[2] > 0.2 and losses[3] > 0.35
still_so = still_so and copied[0] > 0.05 and copied[1] < 0
sys.exit(not still_so)
PY
