#!/usr/bin/env bash
# Guess: the naive baseline of an inference attack guesses a coin of yes and no right half of the time.
# Library: anonymeter 1.1.0 (numpy 1.26.4, pandas 3.0.6), 2026-11-29.
# Seen: with 500 attacks, on released tables of 500, 1,000, 2,000 and 10,000 rows that know nothing of the secret: 53%, 23%,
# 12% and 3%. The attack is right half of the time on each, so it looks far better than guessing.
# Why: 500 released rows are drawn as guesses and 500 private rows as targets; then the guesses are put in the order of the
# targets by row label. A target whose label was not drawn gets an empty guess, which counts as wrong. The two tables have
# nothing in common but that pandas numbers the rows of both from 0.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "anonymeter==1.1.0" "numpy==1.26.4" "pandas==3.0.6" "polars==2.1.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from anonymeter.evaluators import InferenceEvaluator

rng = np.random.default_rng(0)


def draw_people(n):
    return pd.DataFrame(
        {
            "age": rng.integers(20, 80, n),
            "town": rng.choice(list("abcdefgh"), n),
            "ill": rng.choice(["yes", "no"], n),
        }
    )


baselines = {}
for n in (500, 1000, 2000, 10_000):
    np.random.seed(0)
    evaluator = InferenceEvaluator(
        ori=draw_people(n),
        syn=draw_people(n),
        control=draw_people(n),
        aux_cols=["age", "town"],
        secret="ill",
        regression=False,
        n_attacks=500,
    ).evaluate(n_jobs=1)
    rates = evaluator.results()
    baselines[n] = rates.baseline_rate.value
    print(f"{n:,} rows: attack {rates.attack_rate.value:.1%}, naive baseline {baselines[n]:.1%}")
still_so = baselines[500] > 0.4 and baselines[10_000] < 0.1
sys.exit(not still_so)
PY
