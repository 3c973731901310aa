#!/usr/bin/env bash
# Guess: deidentify() moves all dates of a patient by the same number of days ("intervals preserved"), so a stay of nine days is one of
# nine days afterwards; with lang="en" also if dates are written as in the United States (03/14/2020).
# Library: deidkit 0.1.6 (pandas 3.1.1, numpy 2.1.3). Date: 2026-12-01.
# Seen: with ISO dates and with 14/03/2020 all 100 stays are nine days. With 03/14/2020 60 of 100 admissions become "[DATE]", and the
# others are read as day and month: of the ten stays of which both dates are left, none is nine days; they are 274 or 275. The report
# counts dates and redacted dates; nothing is sent to review.
# Why: a number of two digits in front is the day, whatever lang is.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pandas==3.1.1" "numpy==2.1.3" openpyxl PyYAML
"$work/venv/bin/pip" install -q --no-compile --no-deps "deidkit==0.1.6"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import deidkit
import pandas as pd

days = pd.date_range("2020-01-01", periods=100, freq="3D")
seen = {}
for form in ("%Y-%m-%d", "%d/%m/%Y", "%m/%d/%Y"):
    columns = {"admission_date": days.strftime(form), "discharge_date": (days + pd.Timedelta(days=9)).strftime(form)}
    table = pd.DataFrame({"patient_id": [f"P{i // 4:03d}" for i in range(100)], **columns})
    result = deidkit.deidentify(table, lang="en", secret="0123456789abcdef" * 2)
    read = "%Y-%m-%d" if form.startswith("%Y") else "%d/%m/%Y"
    first, last = (pd.to_datetime(result.table[name], format=read, errors="coerce") for name in columns)
    stays = (last - first).dt.days
    redacted = int((result.table["admission_date"] == "[DATE]").sum())
    seen[form] = len(stays.dropna()), int((stays == 9).sum()), redacted, result.summary["review_detections"]
    print(f"{form}: of 100 stays {seen[form][0]} can be computed, {seen[form][1]} are nine days, {redacted} admissions redacted;",
          sorted(int(stay) for stay in set(stays.dropna()))[:12])
both, nine, redacted, reviewed = seen["%m/%d/%Y"]
right = all(seen[form] == (100, 100, 0, 0) for form in ("%Y-%m-%d", "%d/%m/%Y"))
sys.exit(not (right and both < 30 and nine < 5 and redacted > 50 and reviewed == 0))
PY
