#!/usr/bin/env bash
# Guess: with an index over fields=["text"] only a memory's text goes to the embedder, as in InMemoryStore; its other fields
# (a name, a diagnosis) do not.
# Library: langgraph-checkpoint-sqlite 3.1.2 (langgraph-checkpoint 4.3.2, sqlite-vec 0.1.9), SqliteStore. Date: 2026-11-29.
# Seen: the whole memory goes to the embedder, as JSON, with every field; vectors are those of the whole, so a search finds a
# memory by the words of a field that was left out of the index. Often the embedder is somebody else's server.
# put(..., index=["text"]) sends the text only.
# Why: the store looks for the fields under the name "text_fields"; the configuration calls them "fields".
# SQLite comes from pysqlite3-binary, since not every Python may load extensions.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "langgraph-checkpoint-sqlite==3.1.2" "langgraph-checkpoint==4.3.2" \
    "sqlite-vec==0.1.9" pysqlite3-binary
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import pysqlite3

sys.modules["sqlite3"] = pysqlite3

from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite import SqliteStore

sent = []
user = ("user", "1")
memory = {"text": "likes tea", "name": "Quentin Zork", "diagnosis": "lymphoma"}


def embed(texts):
    sent.extend(texts)
    return [[float(word in text) for word in ("tea", "lymphoma", "tennis")] + [0.01] for text in texts]


def put_and_search(store, **options):
    sent.clear()
    store.put(user, "tea", memory, **options)
    texts = list(sent)
    score = store.search(user, query="lymphoma")[0].score
    return texts, round(score or 0.0, 2)


index = {"dims": 4, "embed": embed, "fields": ["text"]}
seen = {"InMemoryStore": put_and_search(InMemoryStore(index=index))}
for name, options in {"SqliteStore": {}, "SqliteStore, put(index=['text'])": {"index": ["text"]}}.items():
    with SqliteStore.from_conn_string(f"{len(seen)}.db", index=index) as store:
        store.setup()
        seen[name] = put_and_search(store, **options)
for name, (texts, score) in seen.items():
    print(f"{name}: sent to the embedder {texts}, score for 'lymphoma' {score}")
alone = (["likes tea"], 0.0)
whole, score = seen.pop("SqliteStore")
others = list(seen.values())
sys.exit(others != [alone, alone] or len(whole) != 1 or "Zork" not in whole[0] or score < 0.5)
PY
