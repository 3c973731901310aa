#!/usr/bin/env bash
# Guess: AnonymizationPipeline puts in each row of a table the code, or the masked text, of this row's own value, however the rows
# are sorted or filtered before.
# Library: aindo-anonymize 1.1.5 (pandas 2.3.3, numpy 2.4.6, faker 40.54.0, scikit-learn 1.9.1). Date: 2026-11-30.
# Seen: of 100 patients sorted by age 96 have the code of another one beside their own note, so two tables that are joined by the
# codes give a stranger's diagnosis. Of 70 who are left by a filter 49 have another's code and 21 none. In a table that
# pd.concat() made of two clinics' the second clinic's patients have the codes of the first's. So with key hashing, masking of
# characters and the perturbation of categories, even with alpha=0, which changes nothing. After reset_index() all are right.
# Why: these techniques give new row labels from 0 on, and the pipeline writes values to labels, not to rows.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "aindo-anonymize==1.1.5" "pandas==2.3.3" "numpy==2.4.6" "faker==40.54.0" \
    "scikit-learn==1.9.1"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import pandas as pd
from aindo.anonymize import AnonymizationPipeline
from aindo.anonymize.config import Config

ages = [20 + 37 * i % 100 for i in range(100)]
names = [f"patient {i:02d}" for i in range(100)]
table = pd.DataFrame({"patient": names, "age": ages, "note": [f"note of {name}" for name in names]})
methods = {
    "key hashing": {"type": "key_hashing", "key": "secret"},
    "character masking": {"type": "character_masking", "mask_length": 7},
    "perturbation of alpha 0": {"type": "perturbation_categorical", "alpha": 0.0},
}


def anonymize(rows, method):
    kept = {"method": {"type": "identity"}, "columns": ["age", "note"]}
    config = Config.from_dict({"steps": [{"method": method, "columns": ["patient"]}, kept]})
    return AnonymizationPipeline(config).run(rows)


tables = {
    "as read": table,
    "sorted by age": table.sort_values("age"),
    "from 50 on": table[table["age"] >= 50],
    "two clinics": pd.concat([table[:50].reset_index(drop=True), table[50:].reset_index(drop=True)]),
    "sorted, labels reset": table.sort_values("age").reset_index(drop=True),
}
expected = {
    "as read": (0, 0),
    "sorted by age": (96, 0),
    "from 50 on": (49, 21),
    "two clinics": (50, 0),
    "sorted, labels reset": (0, 0),
}
is_so = True
for name, method in methods.items():
    own = dict(zip(table["note"], anonymize(table, method)["patient"]))
    for kind, rows in tables.items():
        released = anonymize(rows, method)
        pairs = list(zip(released["note"], released["patient"]))
        others = sum(pd.notna(code) and code != own[note] for note, code in pairs)
        missing = sum(pd.isna(code) for _, code in pairs)
        print(f"{name}, {kind}: {len(pairs)} rows, {others} with the code of another patient, {missing} with none")
        is_so &= (others, missing) == expected[kind]
sys.exit(not is_so)
PY
