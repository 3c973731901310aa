#!/usr/bin/env bash
# Guess: a profile, the statistical summary that is sent to a monitor in place of the data, holds no notes of a column in
# which every note is different: at most a few as examples.
# Library: whylogs 1.6.4 (with pandas 2.3.3), its default schema. Date: 2026-11-29.
# Seen: it holds the first 128 bytes of all 200 notes, with the patients' names, word for word; of 1,000 notes more than 200.
# Without the metric of frequent items it holds none.
# Why: every column of texts gets a sketch of its frequent values, which keeps each value as long as it has room.
# Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "whylogs==1.6.4" "pandas==2.3.3"
PROFILE="$work/profile.bin" WHYLOGS_NO_ANALYTICS=True "$work/venv/bin/python" -W ignore - <<'PY'
import os
import sys
from pathlib import Path

import pandas as pd
import whylogs
from whylogs.core.metrics import StandardMetric
from whylogs.core.resolvers import STANDARD_RESOLVER
from whylogs.core.schema import DeclarativeSchema


def count(size, schema=None):
    notes = [f"Patient Zorblat{i}x was seen on ward {i}" + " and again" * 20 for i in range(size)]
    result = whylogs.log(pd.DataFrame({"note": notes}), schema=schema)
    result.writer("local").write(dest=os.environ["PROFILE"])
    data = Path(os.environ["PROFILE"]).read_bytes()
    return sum(f"Patient Zorblat{i}x was seen on ward {i}".encode() in data for i in range(size))


few, many = count(200), count(1000)
for spec in STANDARD_RESOLVER:
    spec.metrics = [m for m in spec.metrics if m.metric != StandardMetric.frequent_items.value]
none = count(200, DeclarativeSchema(STANDARD_RESOLVER))
print(f"of 200 notes: {few}; of 1000: {many}; of 200 without the frequent items: {none}")
sys.exit(few != 200 or many <= 200 or none != 0)
PY
