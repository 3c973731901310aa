#!/usr/bin/env bash
# Guess: a "synthetic" table that is the training table itself gets the worst privacy scores: an identifiability risk of 1
# and a median distance to the closest record of 0.
# Library: syntheval 1.7.3 (numpy 2.4.6, pandas 3.1.1, scikit-learn 1.9.1). Date: 2026-11-29.
# Seen: it gets the best ones, a risk of 0 and a distance of 1, better than new rows of the same distribution (0.48 and
# 1.0); the privacy loss against a holdout is -0.51. The same copy with its rows in another order, or with one row fewer,
# scores as guessed: 1 and 0. So a generator that returns its training rows passes exactly if it returns them in order.
# Why: if both tables are equal, the distances are taken to be those within one table, which leave out each row itself.
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
    return pd.DataFrame(
        {
            "age": rng.normal(50, 15, n),
            "weight": rng.normal(75, 12, n),
            "income": rng.lognormal(10, 0.5, n),
        }
    )


train, holdout = draw_people(600), draw_people(600)
tables = {
    "new rows": draw_people(600),
    "copy": train.copy(),
    "copy, shuffled": train.sample(frac=1, random_state=0, ignore_index=True),
    "copy, one row fewer": train[:-1].copy(),
}
seen = {}
for name, table in tables.items():
    evaluator = SynthEval(train, holdout_dataframe=holdout, cat_cols=[], verbose=False)
    results = evaluator.evaluate(table, eps_risk={}, dcr={})
    values = dict(zip(results["metric"], results["val"]))
    seen[name] = values["eps_identif_risk"], values["median_DCR"]
    print(
        f"{name}: risk {seen[name][0]:.2f}, distance {seen[name][1]:.2f}, "
        f"privacy loss {values['priv_loss_eps']:+.2f}",
        file=sys.stderr,
    )
still_so = (
    seen["copy"] == (0, 1)
    and seen["copy, shuffled"] == (1, 0)
    and seen["copy, one row fewer"][0] > 0.99
)
sys.exit(not still_so)
PY
