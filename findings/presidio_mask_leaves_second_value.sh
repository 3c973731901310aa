#!/usr/bin/env bash
# Guess: the operator "mask" with chars_to_mask=12 masks the first 12 characters of each card number that was detected.
# Library: presidio-anonymizer 2.2.366. Date: 2026-11-28.
# Seen: if only blanks are between two values of the same kind, the second is left as it is, all 16 digits of it. With a
# comma, a line break, a tab or a word between them each is masked.
# Why: values of one kind with only blanks between them are joined to one value before the operator sees it.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "presidio-anonymizer==2.2.366"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from presidio_anonymizer import AnonymizerEngine
from presidio_anonymizer.entities import OperatorConfig, RecognizerResult

cards = ["4111111111111111", "5500000000000004"]
mask = OperatorConfig("mask", {"masking_char": "*", "chars_to_mask": 12, "from_end": False})
readable = {}
for between in [" ", "   ", ", ", "\n", "\t", " and "]:
    text = f"Cards: {between.join(cards)}."
    starts = [text.index(card) for card in cards]
    places = [RecognizerResult("CREDIT_CARD", start, start + 16, 1.0) for start in starts]
    cleaned = AnonymizerEngine().anonymize(text, places, {"CREDIT_CARD": mask}).text
    readable[between] = [card for card in cards if card in cleaned]
    print(f"{between!r} between them: {cleaned!r}, readable in full: {len(readable[between])} of 2")
blank = [between for between, numbers in readable.items() if numbers == cards[1:]]
others = [between for between, numbers in readable.items() if not numbers]
sys.exit(not (blank == [" ", "   "] and others == [", ", "\n", "\t", " and "]))
PY
