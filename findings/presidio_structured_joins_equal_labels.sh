#!/usr/bin/env bash
# Guess: StructuredEngine puts in each row of a table what its operator makes of this row's own value, whatever the rows' labels.
# Library: presidio-structured 0.0.10 (presidio-anonymizer 2.2.366, pandas 3.0.6). Date: 2026-11-30.
# Seen: in a table that pd.concat() made of two clinics' tables (its labels are 0, 1, 0, 1) the second clinic's patients get
# the masked cards of the first one's: whoever knows that Ann's card ends in 1111 reads that she has her own flu and a
# stranger's HIV. With labels of their own (ignore_index=True) all four are right. Nothing warns, and no row is unmasked.
# Why: each masked value is written to its label, not to its row.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "presidio-structured==0.0.10" "presidio-analyzer==2.2.366" "presidio-anonymizer==2.2.366" \
    "spacy==3.8.18" "pandas==3.0.6" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import pandas as pd
from presidio_anonymizer.entities import OperatorConfig
from presidio_structured import StructuredAnalysis, StructuredEngine

first = pd.DataFrame({"card": ["4111111111111111", "5555555555554444"], "diagnosis": ["flu", "asthma"]})
second = pd.DataFrame({"card": ["4012888888881881", "5105105105105100"], "diagnosis": ["HIV", "gout"]})
mask = OperatorConfig("mask", {"masking_char": "*", "chars_to_mask": 12, "from_end": False})


def measure(ignore_index):
    table = pd.concat([first, second], ignore_index=ignore_index)
    analysis = StructuredAnalysis(entity_mapping={"card": "CREDIT_CARD"})
    seen = StructuredEngine().anonymize(table, analysis, operators={"DEFAULT": mask})
    pairs = [(card[-4:], diagnosis) for card, diagnosis in zip(seen["card"], seen["diagnosis"])]
    print(f"labels {list(table.index)}: last digits and diagnoses {pairs}; all masked: {set(seen['card'].str[:12]) == {'*' * 12}}")
    return pairs, set(seen["card"].str[:12])


seen, masked = measure(ignore_index=False)
own, _ = measure(ignore_index=True)
right = own == [("1111", "flu"), ("4444", "asthma"), ("1881", "HIV"), ("5100", "gout")]
sys.exit(not (right and seen == [("1111", "flu"), ("4444", "asthma"), ("1111", "HIV"), ("4444", "gout")] and masked == {"*" * 12}))
PY
