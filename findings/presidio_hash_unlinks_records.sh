#!/usr/bin/env bash
# Guess: the operator "hash" replaces a value by the same hash everywhere, so that the records of a person stay together.
# Library: presidio-anonymizer 2.2.366. Date: 2026-11-30.
# Seen: each occurrence gets a salt of its own: 5 records of one number have 5 hashes, and 2 occurrences in one text have 2. With
# the parameter "salt" all are the same. Who counts people by the hashes, or splits members from non-members by them, takes
# each record for another person: one person is on both sides, and intervals over people are those over records.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "presidio-anonymizer==2.2.366"
"$work/venv/bin/python" -W ignore - <<'PY'
import re
import sys

from presidio_anonymizer import AnonymizerEngine
from presidio_anonymizer.entities import OperatorConfig, RecognizerResult

engine = AnonymizerEngine()
number = "07123456789"
records = [f"visit {i} of {number}" for i in range(5)]


def list_hashes(text, **parameters):
    spans = [RecognizerResult("PHONE", m.start(), m.end(), 1.0) for m in re.finditer(number, text)]
    operators = {"PHONE": OperatorConfig("hash", {"hash_type": "sha256", **parameters})}
    hashed = engine.anonymize(text=text, analyzer_results=spans, operators=operators)
    return re.findall(r"[0-9a-f]{64}", hashed.text)


n_hashes = {
    "5 records": len({hash for record in records for hash in list_hashes(record)}),
    "1 text": len(set(list_hashes(" and ".join(records[:2])))),
    "5 records, salted": len(
        {hash for record in records for hash in list_hashes(record, salt=b"sixteen bytes of")}
    ),
}
print(n_hashes)
sys.exit(n_hashes != {"5 records": 5, "1 text": 2, "5 records, salted": 1})
PY
