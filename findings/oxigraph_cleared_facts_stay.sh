#!/usr/bin/env bash
# Guess: after remove() of a user's facts, flush() and optimize() nothing of them is in the store's folder; at the latest after
# clear(), which empties the store.
# Library: pyoxigraph 0.5.13. Date: 2026-11-30.
# Seen: all 12 removed texts stay in the folder, word for word, and so they do in a copy that backup() makes afterwards. With
# clear(), optimize() and a restart all 120 texts of the emptied store stay too, also in its backup. No query returns them. What
# dump() writes, from which a new store can be made, has the 108 other texts only. Graphs of facts that a language model drew
# from documents are kept in such stores.
# Why: a long text is stored once, under its hash, and facts refer to it; removing facts leaves the texts. An issue of 2020 asks
# for a collector of unused texts (oxigraph, 32, open); a comment of 2021 says that it is made. It is not in this version.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pyoxigraph==0.5.13"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import pathlib
import sys

import pyoxigraph as oxigraph

note = oxigraph.NamedNode("urn:note")


def count_texts(folder):
    content = b"".join(path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file())
    n_deleted = sum(f"note {i:03d} of user 3".encode() in content for i in range(3, 120, 10))
    n_all = sum(f"note {i:03d} of user {i % 10}".encode() in content for i in range(120))
    return n_deleted, n_all


store = oxigraph.Store("store")
for i in range(120):
    text = oxigraph.Literal(f"note {i:03d} of user {i % 10}, who has a rare disease")
    store.add(oxigraph.Quad(oxigraph.NamedNode(f"urn:{i}"), note, text, oxigraph.DefaultGraph()))
store.flush()
for quad in list(store):
    if " of user 3," in quad.object.value:
        store.remove(quad)
seen = {}
for step in ("removed", "cleared"):
    if step == "cleared":
        store.clear()
    store.flush()
    store.optimize()
    n_facts = len(store)
    del store
    store = oxigraph.Store("store")
    store.optimize()
    store.backup(f"backup {step}")
    seen[step] = (n_facts, *count_texts("store"), *count_texts(f"backup {step}"))
    if step == "removed":
        store.dump("dump.nq", format=oxigraph.RdfFormat.N_QUADS)
        dump = pathlib.Path("dump.nq").read_text()
        seen["dumped"] = (dump.count("note "), dump.count(" of user 3,"))
    print(f"{step}: facts, removed texts and all texts in the folder, both in a backup: {seen[step]}")
print(f"dumped: all texts, removed texts: {seen['dumped']}")
sys.exit(list(seen.values()) != [(108, 12, 120, 12, 120), (108, 0), (0, 12, 120, 12, 120)])
PY
