#!/usr/bin/env bash
# Guess: an exact copy of a question of the evaluation set is found, as long as the rows are those of a usual set (MMLU, GSM8K: "question"
# and "answer"), or the rows are refused; and the canaries that inject() adds are those of this set.
# Library: contamination-audit 0.1.2. Date: 2026-12-01.
# Seen: of 40 copied questions none is found: 0 findings, risk 0.0, "item_count" 80. Under the names "text" and "prompt" all are found (each
# from both sides), under "question", "input" and "problem" none. The canaries of each set are AURAONE_CANARY_0000, ..._0001 and so on,
# so the output of a model that was trained on another marked set convicts this one; and a set with 10,001 rows has rows 1000 and
# 10000 convicted by the canary of the latter.
# Why: a row without "text" and "prompt" counts as an empty text. A canary is a prefix and the row's number, and is searched as a
# part of the output.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "contamination-audit==0.1.2"
cd "$work"
cat > write.py <<'PY'
import json
import random
import sys

generator = random.Random(0)
questions = [" ".join(f"word{generator.randrange(3000)}" for _ in range(30)) for _ in range(40)]
for copy in ("first", "again"):
    for i, question in enumerate(questions):
        print(json.dumps({"item_id": f"{copy} {i}", sys.argv[1]: question, "answer": "B"}))
PY
for name in question input problem text prompt; do
    "$work/venv/bin/python" write.py "$name" > rows.jsonl
    "$work/venv/bin/contamination-audit" run --eval-data rows.jsonl --skip-embedding > report.json
    found=$(grep -c '"detector": "ngram"' report.json || true)
    echo "$name: $(grep '"item_count"' report.json) $found findings, $(grep '"aggregate_risk_score"' report.json)"
    echo "$name $found" >> counts
done
"$work/venv/bin/python" - <<'PY' > canaries
from contamination_audit.detectors.canary import detect, inject

clinic = inject([{"item_id": f"clinic {i}"} for i in range(10_001)])
bank = inject([{"item_id": f"bank {i}"} for i in range(10)])
for row in (bank[3], clinic[10_000]):
    convicted = [finding["item_id"] for finding in detect(clinic, [{"output": f"It says {row['canary']}."}])]
    print(row["item_id"], "convicts", convicted)
PY
cat canaries
diff counts <(printf '%s\n' "question 0" "input 0" "problem 0" "text 80" "prompt 80")
diff canaries <(printf '%s\n' "bank 3 convicts ['clinic 3']" "clinic 10000 convicts ['clinic 1000', 'clinic 10000']")
