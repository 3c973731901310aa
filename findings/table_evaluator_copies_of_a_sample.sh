#!/usr/bin/env bash
# Guess: TableEvaluator.get_copies() counts the synthetic rows that are rows of the real table; sample=False, its default, says that
# no sample is drawn.
# Library: table-evaluator 1.9.0 (with pandas 2.2.2, numpy 1.26.4). Date: 2026-11-30.
# Seen: both tables are cut to the length of the shorter one, at random, whatever sample says. Of 500 synthetic rows, each copied
# from one of 10,000 real people, 31 count as copies; of 500 copied from 500 people all do. Of 50 people without an income,
# copied as they are among 450 new ones, none counts: the empty income is filled by the mean of the synthetic table there and by
# that of the real table here. So a generator that copies people looks the safer, the more people there are.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "table-evaluator==1.9.0" "pandas==2.2.2" "numpy==1.26.4"
cd "$work"
HOME="$work" MPLCONFIGDIR="$work" "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from table_evaluator import TableEvaluator


def make_people(n_people, seed=0):
    draw = np.random.default_rng(seed)
    town = draw.choice(["Alba", "Berg", "Cole"], n_people)
    return pd.DataFrame({"person": np.arange(n_people), "income": draw.normal(2_000, 300, n_people).round(2), "town": town})


def count(real, copies):
    return TableEvaluator(real, copies, cat_cols=["town"]).get_copies(return_len=True)


many, few = make_people(10_000), make_people(500)
copies = many.sample(500, random_state=1)
seen = {"10,000 people": count(many, copies), "500 people": count(few, few.sample(500, random_state=1))}
same = int(copies.isin(many).all(axis=1).sum())
missing = few.assign(income=few["income"].mask(few["person"] < 50))
others = make_people(450, seed=2)
synthetic = pd.concat([missing[:50], others.assign(person=others["person"] + 1_000)])
copied_missing = int(synthetic["income"].isna().sum())
found_missing = count(missing, synthetic)
for table, number in seen.items():
    print(f"copies found among 500 synthetic rows that are all copied from {table}: {number}")
print(f"of {copied_missing} copied rows with an empty income {found_missing} are found")
right = (same, copied_missing) == (500, 50)
sys.exit(not (right and seen == {"10,000 people": 31, "500 people": 500} and found_missing == 0))
PY
