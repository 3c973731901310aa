#!/usr/bin/env bash
# Guess: the inference risk of a release that copies its records is the same if a secret number (a balance, a log of an
# income) is written with a minus sign.
# Library: anonymeter 1.1.0 (numpy 1.26.4, pandas 3.0.6), 2026-11-29.
# Seen: copies of 1,000 people with positive balances: 43% of the balances guessed, 3% of a control group's, risk .41. The
# same with negative balances: 100% guessed of both groups, risk 0 [0 to 1]. New people, unlike the secret ones, get the
# same 100%.
# Why: a guess is right if |guess - secret| / guess is at most .05. A negative guess makes the ratio negative, so every
# negative guess is right. Attack and control then agree, and the risk is their difference.
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


def draw_people(n, sign):
    return pd.DataFrame(
        {
            "age": rng.integers(20, 80, n),
            "town": rng.choice(list("abcdefgh"), n),
            "balance": sign * rng.lognormal(7, 1, n).round(2),
        }
    )


seen = {}
for sign in (1, -1):
    people, control = draw_people(1000, sign), draw_people(1000, sign)
    np.random.seed(0)
    evaluator = InferenceEvaluator(
        ori=people,
        syn=people.copy(),
        control=control,
        aux_cols=["age", "town"],
        secret="balance",
        regression=True,
        n_attacks=500,
    ).evaluate(n_jobs=1)
    rates = evaluator.results()
    seen[sign] = rates.attack_rate.value, rates.control_rate.value, evaluator.risk().value
    print(
        f"sign {sign:+}: guessed {seen[sign][0]:.0%} of the copied records, "
        f"{seen[sign][1]:.0%} of the control's, risk {seen[sign][2]:.2f}"
    )
still_so = seen[1][2] > 0.3 and seen[-1][1] > 0.99 and seen[-1][2] == 0
sys.exit(not still_so)
PY
