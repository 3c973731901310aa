#!/usr/bin/env bash
# Guess: Phrases(min_count=5), which by its documentation passes over rarer words and pairs of words, saves nothing of a word that
# only one note has.
# Library: gensim 4.4.0. Date: 2026-11-30.
# Seen: the saved model holds each word and each pair of neighbours, counted once or not. Pairs follow each other: with the
# first word of a note, 30 of 30 notes that nobody else wrote are spelled from the file to their end. freeze() before
# saving leaves none of their words, and Word2Vec(min_count=5) saves none.
# Why: min_count is applied when phrases are formed, not when words are counted. No page that was found says so.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "gensim==4.4.0"
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import random
import sys
from pathlib import Path

from gensim.models import Word2Vec
from gensim.models.phrases import Phrases

draw = random.Random(0)
common = [draw.choices(["the", "patient", "came", "with", "pain", "and", "left", "well"], k=12) for _ in range(500)]
notes = [[f"word{number}x{place}" for place in draw.sample(range(100), 15)] for number in range(30)]
texts = common + notes

phrases = Phrases(texts, min_count=5, threshold=1)
phrases.save("phrases")
phrases.freeze().save("frozen")
Word2Vec(texts, min_count=5, vector_size=8, epochs=1, workers=1).save("vectors")
held = {}
for name in ("phrases", "frozen", "vectors"):
    content = Path(name).read_bytes()
    held[name] = sum(word.encode() in content for note in notes for word in note)
    print(f"{name}: words of the {len(notes)} rare notes in the file: {held[name]} of {len(notes) * 15}")

following = dict(pair.split("_", 1) for pair in Phrases.load("phrases").vocab if "_" in pair)


def spell(word):
    note = [word]
    while note[-1] in following:
        note.append(following[note[-1]])
    return note


spelled = sum(spell(note[0]) == note for note in notes)
print(f"rare notes spelled from pairs of the loaded model: {spelled} of {len(notes)}")
sys.exit(not (held == {"phrases": 450, "frozen": 0, "vectors": 0} and spelled == 30))
PY
