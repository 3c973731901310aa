#!/usr/bin/env bash
# Guess: joblib's Memory stores a function's results under a hash of its arguments, so a cache of embeddings holds no text.
# Library: joblib 1.6.0 (numpy 2.4.6). Date: 2026-11-30.
# Seen: metadata.json beside each result quotes the arguments: all 12 notes, word for word, and a text of 6,000 characters in full.
# ignore=["text"] keeps the text out; reduce_size() takes it away with the result.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "joblib==1.6.0" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import hashlib
import pathlib
import sys

import joblib
import numpy as np

notes = [f"note {i:02d}: patient Anna{i:02d} is HIV positive" for i in range(12)]


def embed(text):
    return np.full(8, len(text))


def embed_by_key(key, text):
    return np.full(8, len(text))


def count_quotes(folder, texts=notes):
    contents = [path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return sum(any(text.encode() in content for content in contents) for text in texts)


plain = joblib.Memory("plain", verbose=0)
cached = plain.cache(embed)
for note in notes:
    cached(note)
quoted = count_quotes("plain")
long = "begins with Anna. " + "visit " * 1000 + "ends with Zwetelina."
cached(long)
n_long = count_quotes("plain", [long])
plain.reduce_size(bytes_limit=0)
reduced = count_quotes("plain")
ignoring = joblib.Memory("ignoring", verbose=0).cache(embed_by_key, ignore=["text"])
for note in notes:
    ignoring(hashlib.sha256(note.encode()).hexdigest(), note)
seen = [quoted, n_long, reduced, count_quotes("ignoring")]
print(f"quoted: {quoted} of 12, {n_long} of 1 long text; after reduce_size() {reduced}; if ignored {seen[3]}")
sys.exit(seen != [12, 1, 0, 0])
PY
