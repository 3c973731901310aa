#!/usr/bin/env bash
# Guess: l-diversity and t-closeness of a table do not depend on the order of its rows, and a person whose age is missing
# in an otherwise 10-anonymous table, the only such person, makes k = 1.
# Library: pycanon 1.3.6 (numpy 2.0.2, pandas 2.3.3). Date: 2026-11-29.
# Seen: a table with l = 1, t = 0.475 (all ten people aged 23 have hepatitis) has l = 2, t = 0.275 after
# DataFrame.sample(frac=1) or a filter that leaves the row labels as they were; after reset_index() it is 1 and 0.475 again.
# k is right in any order. The person without an age is not counted: k stays 10, and a max_rir() of 0.1 is told.
# Why: groups are lists of row labels, which are then used as positions; so other people's diseases are counted.
# Rows with a missing quasi-identifier belong to no group of pandas' groupby.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pycanon==1.3.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from pycanon import anonymity
from pycanon.metrics import max_rir

ages = np.repeat(np.arange(20, 40), 10)
people = pd.DataFrame({"age": ages, "disease": np.tile(["flu", "hepatitis"], 100)})
people.loc[people["age"] == 23, "disease"] = "hepatitis"
shuffled = people.sample(frac=1, random_state=0)
unknown = pd.DataFrame({"age": [np.nan], "disease": ["hepatitis"]})
tables = {
    "as read": people,
    "shuffled": shuffled,
    "shuffled, new labels": shuffled.reset_index(drop=True),
    "with one unknown age": pd.concat([people, unknown], ignore_index=True),
}
seen = {}
for name, table in tables.items():
    k = anonymity.k_anonymity(table, ["age"])
    l_diversity = anonymity.l_diversity(table, ["age"], ["disease"])
    t = round(anonymity.t_closeness(table, ["age"], ["disease"]), 3)
    seen[name] = k, l_diversity, t, max_rir(table, ["age"])
    print(f"{name}: k {k}, l {l_diversity}, t {t}, largest risk {seen[name][3]}")
still_so = (
    seen["as read"][:2] == seen["shuffled, new labels"][:2] == (10, 1)
    and seen["shuffled"][0] == 10
    and seen["shuffled"][1] > 1
    and seen["shuffled"][2] < seen["as read"][2]
    and seen["with one unknown age"][0] == 10
    and seen["with one unknown age"][3] == 0.1
)
sys.exit(not still_so)
PY
