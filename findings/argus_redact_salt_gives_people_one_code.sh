#!/usr/bin/env bash
# Guess: if notes are redacted one by one with the same salt, so that the codes are the same in every run, a person has the same
# code in each note, and two people have different codes.
# Library: argus-redact 0.8.22. Date: 2026-11-30.
# Seen: 300 patients in 600 notes share 2 codes: the first name of a note always gets the one, the second name the other,
# whoever it is. Each patient has both. So a table or a training set of these notes ascribes the flu and the HIV of everybody to
# one person, and the maps of the notes, joined to one to restore them, give one name for 300. A salt of 32 random bytes does
# the same. Without a salt each call draws its own codes; key=, the map of the notes before, gives each person a code of his
# own.
# Why: the salt starts a generator anew in each call, and codes are drawn from it in the order of first mention; the name itself
# is not part of it. The package's page uses a salt in its examples, and says that keys are fresh with each call.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "argus-redact==0.8.22"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import collections
import sys

from argus_redact import redact

people = [f"Quentin {first}{last}ork" for first in "ABCDEFGHIJKLMNOPQRST" for last in "abcdefghijklmno"]


def redact_notes(keep_map, **options):
    people_by_code = collections.defaultdict(set)
    codes_by_person = collections.defaultdict(set)
    key = None
    for i, person in enumerate(people):
        other = people[(7 * i + 1) % len(people)]
        for note in (f"Patient {person} has flu.", f"Referred by {other}: {person} has HIV."):
            if keep_map:
                options["key"] = key
            text, key = redact(note, lang="en", names=people, **options)
            for code, name in key.items():
                if code in text:
                    people_by_code[code].add(name)
                    codes_by_person[name].add(code)
    shared = max(len(names) for names in people_by_code.values())
    several = sum(len(codes) > 1 for codes in codes_by_person.values())
    return len(codes_by_person), len(people_by_code), shared, several


seen = {
    "salt=42": redact_notes(False, salt=42),
    "salt of 32 bytes": redact_notes(False, salt=bytes(range(32))),
    "map handed on": redact_notes(True, salt=42),
}
for name, (n_people, n_codes, shared, several) in seen.items():
    print(f"{name}: {n_people} people, {n_codes} codes, up to {shared} people with one code, {several} people with several")
wrong = (300, 2, 300, 300)
sys.exit(seen["salt=42"] != wrong or seen["salt of 32 bytes"] != wrong or seen["map handed on"] != (300, 300, 1, 0))
PY
