#!/usr/bin/env bash
# Guess: k_anonymity(), and what is built on it, returns the columns of the table that it was given, the identifiers replaced by
# stars, and no others.
# Library: anjana 1.2.3 (pycanon 1.3.5, pandas 2.3.3, numpy 2.0.2). Date: 2026-11-30.
# Seen: if records are suppressed (supp_level above 0), the released table has one column more, in front: the row labels of the
# private table. If these are patient numbers, all 57 released rows of 60 have theirs, each a different one; otherwise it is the
# row's place in the private table. k is 9 without that column, which pyCANON is not asked about, and 1 with it. So with
# l_diversity() and t_closeness(). If nothing needs to be suppressed, the column is not there.
# Why: after suppressing, the table is numbered anew by reset_index(), which keeps the old labels as a column.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "anjana==1.2.3" "pycanon==1.3.5" "pandas==2.3.3" "numpy==2.0.2"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from anjana.anonymity import k_anonymity, l_diversity, t_closeness

n = 60
ages = [31 + i % 3 if i % 20 else 50 + i // 20 for i in range(n)]  # three people are the only ones of their age
columns = {"name": [f"patient {i}" for i in range(n)], "age": ages, "sex": ["f", "m"] * 30}
numbers = pd.Index(range(7000, 7000 + n), name="patient_number")
table = pd.DataFrame({**columns, "illness": ["flu", "HIV", "cold"] * 20}, index=numbers)


def release(function, supp_level, *more):
    levels = {name: {0: table[name].values, 1: np.array(["*"] * n)} for name in ("age", "sex")}
    released = function(table, ["name"], ["age", "sex"], *more, supp_level, levels)
    least = released.groupby(["age", "sex"]).size().min()
    added = [name for name in released.columns if name not in table.columns]
    n_numbers = released[added].nunique().sum()
    print(f"{function.__name__}, suppression up to {supp_level}%: {len(released)} rows, k {least}; new columns {added}, "
          f"{n_numbers} different patient numbers")
    return added == ["patient_number"] and n_numbers == len(released)


without = release(k_anonymity, 0, 5)
added = [
    release(k_anonymity, 20, 5),
    release(l_diversity, 20, "illness", 5, 2),
    release(t_closeness, 20, "illness", 5, 0.9),
]
sys.exit(without or not all(added))
PY
