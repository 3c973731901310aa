#!/usr/bin/env bash
# Guess: who knows all rows of a table but one person's diagnosis can hardly guess it from a synthetic table of DPCopulaGenerator with
# epsilon 1 ("pure DP"): right at most in 79 of 100 cases if three are equally
# frequent (one row is another: epsilon 2, e^2 / (e^2 + 2)); a second fit gives other rows.
# Library: synthpriv 0.2.1 (torch 2.13.0, sdv 1.38.5, pandas 2.3.3, numpy 1.26.4). Date: 2026-12-01.
# Seen: it is told in 30 of 30 cases, and with certainty: of the three possible tables exactly one gives the released 500 rows. With
# epsilon 0.1 in 7 of 30; in the others one of three diagnoses is ruled out. The same table twice gives the same rows. With a
# secret random_state none of the possible tables gives the released rows.
# Why: random_state is 0 if it isn't given, so everybody has the noise.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "synthpriv==0.2.1" "torch==2.13.0" "sdv==1.38.5" \
    "anonymeter==1.1.0" "opacus==1.6.0" "pandas==2.3.3" "numpy==1.26.4"
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'PY'
import logging
import sys

import numpy as np
import pandas as pd
from synthpriv.dp.copula import DPCopulaGenerator
from synthpriv.privacy.mechanisms import DPSGD

logging.disable(logging.CRITICAL)
rng = np.random.default_rng(1)
diagnoses = ["flu", "HIV", "none"]


def draw_people(n):
    columns = {"age": rng.uniform(20, 80, n), "income": rng.uniform(1e4, 9e4, n), "diagnosis": rng.choice(diagnoses, n)}
    return pd.DataFrame(columns)


def release(table, epsilon, **options):
    bounds = {"age": (0, 100), "income": (0, 1e5)}
    generator = DPCopulaGenerator(privacy=DPSGD(epsilon=epsilon), bounds=bounds, **options)
    return generator.fit(table).sample(500)


others = draw_people(300)
same = release(others, 1.0).equals(release(others, 1.0))
seen = {}
for epsilon in (1.0, 0.1):
    for name in ("as it comes", "secret seed"):
        left = []
        for _ in range(30):
            person = draw_people(1)
            options = {} if name == "as it comes" else {"random_state": int(rng.integers(2**31))}
            released = release(pd.concat([others, person], ignore_index=True), epsilon, **options)
            tables = {value: pd.concat([others, person.assign(diagnosis=value)], ignore_index=True) for value in diagnoses}
            fitting = [value for value, table in tables.items() if release(table, epsilon).equals(released)]
            assert not fitting or person["diagnosis"][0] in fitting
            left.append(len(fitting))
        seen[epsilon, name] = [left.count(n) for n in range(4)]
        print(f"epsilon {epsilon}, {name}: releases to which 0, 1, 2, 3 diagnoses lead: {seen[epsilon, name]}")
print("the same table twice:", "the same rows" if same else "other rows")
known = seen[1.0, "as it comes"][1] == 30 and seen[0.1, "as it comes"][1] > 5 and seen[0.1, "as it comes"][3] == 0
hidden = seen[1.0, "secret seed"][0] == 30 == seen[0.1, "secret seed"][0]
sys.exit(not (same and known and hidden))
PY
