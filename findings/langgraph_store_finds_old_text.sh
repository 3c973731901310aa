#!/usr/bin/env bash
# Guess: if a memory is put again with another text, a search finds it by the new text only, or not at all if the new
# value isn't indexed.
# Library: langgraph-checkpoint 4.3.2 (InMemoryStore with an index). Date: 2026-11-28.
# Seen: vectors of the old text stay if the new value has no vector in their place: after a put with index=False, with a
# value that lacks the indexed field, and with a shorter list, the memory is found by the words that are gone, with score
# 1.0. So a search tells that a corrected memory once had these words. delete() before put() removes the old vectors.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "langgraph-checkpoint==4.3.2"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from langgraph.store.memory import InMemoryStore

words = ("cancer", "tennis", "paris")


def embed(texts):
    return [[float(word in text) for word in words] + [0.01] for text in texts]


store = InMemoryStore(index={"dims": 4, "embed": embed, "fields": ["text"]})
user = ("user", "1")
for key in ("not indexed", "field missing", "new text", "deleted first"):
    store.put(user, key, {"text": "cancer"})
store.put(user, "shorter list", {"text": ["paris", "cancer"]}, index=["text[*]"])

store.put(user, "not indexed", {"text": "nothing"}, index=False)
store.put(user, "field missing", {"note": "nothing"})
store.put(user, "new text", {"text": "tennis"})
store.delete(user, "deleted first")
store.put(user, "deleted first", {"text": "nothing"}, index=False)
store.put(user, "shorter list", {"text": ["paris"]}, index=["text[*]"])

scores = {item.key: item.score for item in store.search(user, query="cancer", limit=10)}
for key, score in scores.items():
    print(f"{key}: {store.get(user, key).value}, score for 'cancer' {score}")
stale = sorted(key for key, score in scores.items() if score is not None and score > 0.9)
sys.exit(stale != ["field missing", "not indexed", "shorter list"])
PY
