#!/usr/bin/env bash
# Guess: for NewRowSynthesis a synthetic row is new if its date is not a real row's date or very close to it.
# Library: sdmetrics 0.32.0. Date: 2026-11-28.
# Seen: dates are compared as numbers counted from 1970 with a tolerance of 1 %, so the tolerance is six months for a
# date in 2020 and four days for one in 1971. Of 200 visits in 2020, all moved by 60 days, none counts as new; of the
# same visits in 1971 all do. So the score tells of the calendar as much as of copied rows.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "sdmetrics==0.32.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import pandas as pd
from sdmetrics.single_table import NewRowSynthesis

columns = {"visit": {"sdtype": "datetime", "datetime_format": "%Y-%m-%d"}, "ward": {"sdtype": "categorical"}}
scores = {}
for first_day in ("1971-01-01", "2020-01-01"):
    visits = pd.Series(pd.to_datetime(first_day) + pd.to_timedelta(np.arange(200), unit="D"))
    real = pd.DataFrame({"visit": visits, "ward": [f"ward {day}" for day in range(200)]})
    for n_days in (0, 60, 365):
        synthetic = real.assign(visit=real["visit"] + pd.Timedelta(days=n_days))
        scores[first_day, n_days] = NewRowSynthesis.compute(real, synthetic, {"columns": columns})
        print(f"visits from {first_day}, moved by {n_days:3d} days: share of new rows {scores[first_day, n_days]:.3f}")
no_copies = scores["1971-01-01", 60] == 1 and scores["2020-01-01", 365] == 1
sys.exit(not (scores["2020-01-01", 60] == 0 and no_copies and scores["2020-01-01", 0] == 0))
PY
