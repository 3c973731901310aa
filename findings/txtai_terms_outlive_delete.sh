#!/usr/bin/env bash
# Guess: after `Embeddings.delete(ids)` and `save()`, a hybrid index holds nothing of the deleted documents: neither their
# texts, nor their vectors, nor their words.
# Library: txtai 9.14.0 (faiss-cpu 1.14.3, torch 2.13.0), 2026-11-29.
# Seen: 50 of 500 documents are deleted, each with a code of its own. The saved database has none of the 50 codes (control:
# all 50 kept ones). The keyword index has all 50, in `scoring` and in the term database `scoring.terms`. After `reindex()`
# and `save()` no file has any.
# Why: the keyword index only marks documents as deleted; its terms are rebuilt by `reindex()`.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" "txtai==9.14.0" "faiss-cpu==1.14.3" "numpy==2.4.6"
cat > "$work/vectors.py" <<'PY'
import numpy as np

rng = np.random.default_rng(0)


def embed(inputs):
    return rng.standard_normal((len(inputs), 32)).astype("float32")
PY
cd "$work"
ALLOW_RESOLVE_TRANSFORM=True venv/bin/python -W ignore - <<'PY'
import random
import sys
from pathlib import Path

sys.path.insert(0, ".")
from txtai import Embeddings

random.seed(0)
codes = ["".join(random.choices("bcdfghjklmnp", k=24)) for _ in range(500)]
rows = [(i, f"Patient {i} has the code {code}", None) for i, code in enumerate(codes)]
deleted = list(range(0, 500, 10))
index = Embeddings(method="external", transform="vectors.embed", content=True, hybrid=True)
index.index(rows)
index.delete(deleted)


def count_codes(folder):
    found = {}
    for path in sorted(Path(folder).iterdir()):
        data = path.read_bytes()
        gone = sum(codes[i].encode() in data for i in deleted)
        kept = sum(codes[i + 1].encode() in data for i in deleted)
        found[path.name] = (gone, kept)
    print(folder, {name: f"{gone} of 50 deleted, {kept} of 50 kept" for name, (gone, kept) in found.items()})
    return found


index.save("after_delete")
after_delete = count_codes("after_delete")
index.reindex(index.config)
index.save("after_reindex")
after_reindex = count_codes("after_reindex")
same = (
    after_delete["documents"] == (0, 50)
    and after_delete["scoring"] == (50, 50)
    and after_delete["scoring.terms"] == (50, 50)
    and all(gone == 0 for gone, _ in after_reindex.values())
)
sys.exit(not same)
PY
