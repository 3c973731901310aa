#!/usr/bin/env bash
# Guess: read_json(lines=True) gives the texts of a file of JSON lines as they are: what stands in quotes is a text, so a phone
# number or a PIN keeps its zeros, a card number its digits.
# Library: pandas 3.1.1 (numpy 2.4.6). Date: 2026-11-30.
# Seen: if all texts of a column have digits only they become numbers. "0171234567" is 171234567, the PIN "0042" is 42, a number
# of 22 digits is 4.1111111111111113e+21, and "1600000000" under "signed_at" is a date of 2020. None of a person's 4 secrets is
# what the file has, so no search finds it in what a model says, nor a removal in the file. If the numbers of one other person
# have a blank the whole columns stay texts: whether a secret is found depends on another person's row. With dtype=False all 4
# stay.
# Why: types are inferred once more from the contents of texts, as if nothing stood in quotes.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pandas==3.1.1" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import io
import json
import sys

import pandas as pd

people = [
    {"phone": "0171234567", "pin": "0042", "account": "4111111111111111111122", "signed_at": "1600000000"},
    {"phone": "0179876543", "pin": "1234", "account": "4222222222222222222233", "signed_at": "1600086400"},
]


def read_first(rows, **options):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    row = pd.read_json(io.StringIO(text), lines=True, **options).iloc[0]
    return sum(str(value) == people[0][key] for key, value in row.items()), [str(value) for value in row]


blank = [people[0], {key: value[:3] + " " + value[3:] for key, value in people[1].items()}]
seen = {
    "as it comes": read_first(people),
    "another person's with a blank": read_first(blank),
    "dtype=False": read_first(people, dtype=False),
}
for name, (n_same, values) in seen.items():
    print(f"{name}: {n_same} of 4 secrets as in the file, {values}")
sys.exit([n_same for n_same, _ in seen.values()] != [0, 4, 4])
PY
