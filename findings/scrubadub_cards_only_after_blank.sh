#!/usr/bin/env bash
# Guess: clean() as it comes removes the number of a card, which CreditCardDetector finds, wherever it stands in a text.
# Library: scrubadub 2.0.1 (scikit-learn 1.9.1, dateparser 1.5.0). Date: 2026-11-29.
# Seen: only behind a blank or a line break. At the beginning of a text, behind "card:", "=", a bracket or a quotation mark, as in
# JSON or CSV, all 16 digits stay, and so they do anywhere if they are written in groups of four. E-mail addresses in the
# same places are removed.
# Why: the expression demands a white space before the number, and takes digits without anything between them.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "scrubadub==2.0.1" "scikit-learn==1.9.1" "dateparser==1.5.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from scrubadub import Scrubber

scrubber = Scrubber()
card = "4111111111111111"  # the number that card networks publish for tests
places = ["pay by {}.", "pay by\n{}.", "{} is mine.", "card:{}", "card={}&x=1", "({})", '{{"card": "{}"}}', "a,{},b"]
stays = []
for place in places:
    text = place.format(card)
    address = place.format("someone@example.org")
    cleaned = scrubber.clean(text)
    stays.append(card in cleaned)
    assert "someone@" not in scrubber.clean(address), address
    print(f"{text!r} -> {cleaned!r}")
grouped = scrubber.clean("pay by 4111 1111 1111 1111.")
print(repr(grouped))
sys.exit(not (stays == [False] * 2 + [True] * 6 and grouped == "pay by 4111 1111 1111 1111."))
PY
