#!/usr/bin/env bash
# Guess: by the schema "ent_type", of which the page says "some overlap between the system tagged entity and the gold annotation
# is required", a model that marks only the character after each name has found no name.
# Library: nervaluate 1.2.1, spans with start and end as spaCy, prodi.gy and Presidio give them (the end is not part of the span).
# Date: 2026-11-30.
# Seen: its recall is 1.0, and by "partial" 0.5, as if half of each name were found; one character further it is 0. Of names in a
# Chinese text, where no blank stands between, a model that finds only the word behind each name finds all. "strict" and
# "exact" give 0. So the recall of a tool that removes names counts names that it left whole.
# Why: ends are taken as part of the span, as in the lists of labels that it reads too; nothing in its page says so.
# With min_overlap_percentage=50 none of these counts. Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "nervaluate==1.2.1"
"$work/venv/bin/python" - <<'PY'
import sys

from nervaluate import Evaluator

SCHEMAS = ("ent_type", "partial", "exact", "strict")


def mark(text, words):
    return [{"label": "PERSON", "start": text.index(word), "end": text.index(word) + len(word)} for word in words]


def find_recalls(text, names, found, **options):
    overall = Evaluator([mark(text, names)], [mark(text, found)], tags=["PERSON"], loader="dict", **options).evaluate()["overall"]
    return [overall[schema].recall for schema in SCHEMAS]


text = "Quentin Zork, then Anna Abel; later Vera Yolk: they were on the ward."
names = ["Quentin Zork", "Anna Abel", "Vera Yolk"]
chinese = "王小明先生和李小红女士到了。"
seen = {
    "the names": find_recalls(text, names, names),
    "the character after each": find_recalls(text, names, [",", ";", ":"]),
    "the one after that": find_recalls(text, names, [" then", " later", " they"]),
    "half of each needed": find_recalls(text, names, [",", ";", ":"], min_overlap_percentage=50),
    "Chinese, the word behind each": find_recalls(chinese, ["王小明", "李小红"], ["先生", "女士"]),
}
for found, recalls in seen.items():
    print(f"{found}: recall " + ", ".join(f"{schema} {recall}" for schema, recall in zip(SCHEMAS, recalls)))
touching, nothing = [1.0, 0.5, 0, 0], [0, 0, 0, 0]
sys.exit(list(seen.values()) != [[1.0] * 4, touching, nothing, nothing, touching])
PY
