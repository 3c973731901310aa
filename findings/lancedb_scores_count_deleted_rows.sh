#!/usr/bin/env bash
# Guess: after delete() and optimize() with a retention of zero, the full-text index knows the remaining rows only, as its
# statistics say; so nobody who searches can tell that a deleted row had a word.
# Library: lancedb 0.40.0. Date: 2026-11-29.
# Seen: with 40 of 500 rows deleted, index_stats() counts 460 rows, but each score is that of the 500: a word that a deleted
# row had scores lower than in an index of the 460 rows. Searching for words of a guessed text tells that it was there.
# Why: the index hides deleted rows from results; it counts documents, and documents with a word, as when it was made.
# create_index(..., replace=True) gives the scores of the 460. Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "lancedb==0.40.0"
"$work/venv/bin/python" -W ignore - "$work" <<'PY'
import random
import sys
from datetime import timedelta

import lancedb
from lancedb.index import FTS

draw = random.Random(0)
words = ["".join(draw.choices("abcdefghijklmnop", k=8)) for _ in range(2_000)]
texts = [" ".join(draw.sample(words, 25)) for _ in range(500)]
kept, deleted = texts[:460], texts[460:]
rows = [{"number": number, "text": text} for number, text in enumerate(texts)]
table = lancedb.connect(sys.argv[1] + "/store").create_table("notes", rows)
table.create_index("text", config=FTS(stem=False))
table.delete("number >= 460")
table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
counted = table.index_stats("text_idx").num_indexed_rows


def count_texts(word, chosen):
    return sum(word in text.split() for text in chosen)


def score(word):
    return max(row["_score"] for row in table.search(word, query_type="fts").limit(10).to_list())


rare = [word for word in words if 0 < count_texts(word, kept) <= 4]
shared = [word for word in rare if count_texts(word, deleted)][:50]
others = [word for word in rare if not count_texts(word, deleted)][:50]
before = {word: score(word) for word in shared + others}
table.create_index("text", config=FTS(stem=False), replace=True)
lower = sum(before[word] < score(word) - 1e-4 for word in shared)
lower_others = sum(before[word] < score(word) - 1e-4 for word in others)
print(f"rows counted by index_stats(): {counted}")
print(f"words that a deleted row had, with a lower score than in a new index: {lower} of {len(shared)}")
print(f"other words: {lower_others} of {len(others)}")
sys.exit(not (counted == 460 and lower == len(shared) > 0 and lower_others == 0 and len(others) > 0))
PY
