#!/usr/bin/env bash
# Guess: a known name with ignore_case=True is removed wherever it stands as it is given, in a Turkish text as in an English.
# Library: scrubadub 2.0.1 (scikit-learn 1.9.1, dateparser 1.5.0). Date: 2026-11-29.
# Seen: after each letter "İ" of the text one letter more of the name stays, and one letter behind it is lost: "Merkez:
# İzmir. Hasta: Quentin Zork, 54" becomes "... Hasta: Q{{NAME}} 54". After 13 of them (a letterhead in capitals) the whole
# name stays, and the words behind it are gone. With ignore_case=False the name is removed each time.
# Why: places are looked up in text.lower(), in which "İ" is two characters long, and then used in the text itself.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "scrubadub==2.0.1" "scikit-learn==1.9.1" "dateparser==1.5.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from scrubadub import Scrubber
from scrubadub.detectors import UserSuppliedFilthDetector

texts = {
    "English": "Centre: Izmir. Patient: Quentin Zork, 54 years old, lives alone.",
    "Turkish": "Merkez: İzmir. Hasta: Quentin Zork, 54 yaşında, yalnız yaşıyor.",
    "letterhead": "İZMİR İLİ, DİKİLİ İLÇESİ, GENEL CERRAHİ KLİNİĞİ BİRİMİ\n"
    "Hasta: Quentin Zork, 54 yaşında, yalnız yaşıyor.",
}
cleaned = {}
for ignore_case in (False, True):
    known = {"match": "Quentin Zork", "filth_type": "name", "ignore_case": ignore_case}
    scrubber = Scrubber(detector_list=[UserSuppliedFilthDetector([known])])
    for name, text in texts.items():
        cleaned[name, ignore_case] = scrubber.clean(text)
        print(f"{name}, ignore_case={ignore_case}: {cleaned[name, ignore_case]!r}")
still_so = (
    not any("Quen" in cleaned[name, False] or "Zork" in cleaned[name, False] for name in texts)
    and "Zork" not in cleaned["English", True]
    and "Hasta: Q{{NAME}} 54" in cleaned["Turkish", True]
    and "Quentin Zork" in cleaned["letterhead", True]
)
sys.exit(not still_so)
PY
