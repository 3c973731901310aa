#!/usr/bin/env bash
# Guess: a memory whose time to live has passed is not returned any more, the less if the store is asked to leave out
# expired items (omit_expired=True), and reading it does not make it live longer.
# Library: langgraph-checkpoint-sqlite 3.1.2 (with langgraph-checkpoint 4.3.2), SqliteStore. Date: 2026-11-29.
# Seen: until a sweep deletes it, an expired memory is returned by get() and search(), and its namespace is listed, also with
# omit_expired=True, which is taken without a word and does nothing. By default a get() or a search() gives the expired memory
# another whole time to live, so the next sweep leaves it; with refresh_ttl=False the sweep deletes it.
# Why: only sweep_ttl() compares the time with now; it runs if called, or in a thread that start_ttl_sweeper() starts.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "langgraph-checkpoint-sqlite==3.1.2" "langgraph-checkpoint==4.3.2"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys
import time

from langgraph.store.sqlite import SqliteStore

user = ("user", "1")
seen = {}
for refresh in (None, False):
    with SqliteStore.from_conn_string(f"{refresh}.db", ttl={"omit_expired": True, "refresh_on_read": True}) as store:
        store.setup()
        store.put(user, "ward", {"text": "seen on ward 7"}, ttl=0.05)
        store.put(user, "tea", {"text": "likes tea"})
        time.sleep(5)
        got = store.get(user, "ward", refresh_ttl=refresh)
        found = [item.key for item in store.search(user, filter={"text": "seen on ward 7"}, refresh_ttl=refresh)]
        swept = store.sweep_ttl()
        left = sorted(item.key for item in store.search(user, refresh_ttl=False))
    print(
        f"refresh_ttl={refresh}: 5 s old, lives 3 s: get() returns {got and got.value}, search() {found}; "
        f"the sweep deletes {swept}, leaves {left}"
    )
    seen[refresh] = (got is not None, found, swept, left)
expected = {None: (True, ["ward"], 0, ["tea", "ward"]), False: (True, ["ward"], 1, ["tea"])}
sys.exit(seen != expected)
PY
