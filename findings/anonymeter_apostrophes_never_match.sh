#!/usr/bin/env bash
# Guess: the risk of being singled out by a released note does not depend on whether the note contains an apostrophe.
# Library: anonymeter 1.1.0 (polars 2.1.0, pandas 3.0.6), 2026-11-29.
# Seen: copies of 1,000 unique notes are released. If none has an apostrophe, the multivariate attack finds all 300 queries
# in 3,000 attempts, risk .99. If 9 of 10 have one ("patient's"), it finds 125, none about such a note; if all have one, it
# finds none. The univariate attack finds them all.
# Why: the multivariate attack compares a column with the note after it has put a backslash before each quote, as for a
# query in text form. Queries are expressions by now, so the backslash is compared too, and nothing matches.
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
import polars as pl
from anonymeter.evaluators.singling_out_evaluator import (
    multivariate_singling_out_queries,
    univariate_singling_out_queries,
)

rng = np.random.default_rng(0)


def draw_notes(n, share):
    notes = []
    for i in range(n):
        word = "patient's" if rng.random() < share else "patients"
        notes.append(f"{word} case {i}, {rng.integers(1_000_000)}")
    letters = list("abcdefgh")
    table = {"town": rng.choice(letters, n), "ward": rng.choice(letters, n), "note": notes}
    return pl.from_pandas(pd.DataFrame(table))


found = {}
for share in (0, 0.9, 1):
    notes = draw_notes(1000, share)
    queries = multivariate_singling_out_queries(
        df=notes, n_queries=300, n_cols=2, max_attempts=3000, rng=np.random.default_rng(0)
    )
    found[share] = len(queries)
    simple = len(univariate_singling_out_queries(notes, 300, np.random.default_rng(0)))
    print(f"apostrophe in {share:.0%} of the notes: {found[share]} queries with two columns, {simple} with one")
sys.exit(not (found[0] == 300 and found[0.9] < 200 and found[1] == 0))
PY
