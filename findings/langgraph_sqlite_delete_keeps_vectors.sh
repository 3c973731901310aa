#!/usr/bin/env bash
# Guess: delete(), and the sweep of expired memories, remove a memory's vectors with it, as they do in InMemoryStore; the
# vectors' table says ON DELETE CASCADE.
# Library: langgraph-checkpoint-sqlite 3.1.2 (langgraph-checkpoint 4.3.2, sqlite-vec 0.1.9), SqliteStore with an index.
# Date: 2026-11-29.
# Seen: the vectors of all deleted and all swept memories stay in `store_vectors`. A memory that is put anew under the key
# without a vector (index=False) is found by the words of the deleted one, with score 1.0. Executing
# "PRAGMA foreign_keys = ON" on the store's connection first makes both remove them.
# Why: SQLite obeys ON DELETE CASCADE only on connections that switch foreign keys on; the store does not.
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
import time

import pysqlite3

sys.modules["sqlite3"] = pysqlite3

from langgraph.store.sqlite import SqliteStore

words = ("cancer", "tennis", "paris")
user = ("user", "1")


def embed(texts):
    return [[float(word in text) for word in words] + [0.01] for text in texts]


def delete_and_search(foreign_keys):
    index = {"dims": 4, "embed": embed, "fields": ["text"]}
    with SqliteStore.from_conn_string(f"{foreign_keys}.db", index=index) as store:
        store.setup()
        if foreign_keys:
            store.conn.execute("PRAGMA foreign_keys = ON")
        store.put(user, "deleted", {"text": "cancer"})
        store.put(user, "expired", {"text": "tennis"}, ttl=0.01)
        store.put(user, "kept", {"text": "paris"})
        store.delete(user, "deleted")
        time.sleep(3)
        store.sweep_ttl()
        memories = [key for (key,) in store.conn.execute("SELECT key FROM store ORDER BY key")]
        vectors = [key for (key,) in store.conn.execute("SELECT key FROM store_vectors ORDER BY key")]
        store.put(user, "deleted", {"text": "nothing"}, index=False)
        scores = {item.key: item.score for item in store.search(user, query="cancer")}
    score = round(scores.get("deleted") or 0.0, 3)
    print(f"foreign keys {foreign_keys}: memories {memories}, vectors {vectors}; put anew, score for 'cancer' {score}")
    return memories, vectors, score


off = (["kept"], ["deleted", "expired", "kept"], 1.0)
on = (["kept"], ["kept"], 0.0)
sys.exit(delete_and_search(False) != off or delete_and_search(True) != on)
PY
