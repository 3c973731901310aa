#!/usr/bin/env bash
# Guess: after all memories are forgotten ("math-exact, no reindex") the sum of vectors that is the memory is zero, as before the
# first was added.
# Library: crystal-mem 0.1.0 (torch 2.13.0, numpy 2.4.6). Date: 2026-12-01.
# Seen: it is, after 500 memories to 0.0001, also after update(). But if a text is written again by add() with the same memory_id,
# as a job that mirrors a table does, the old text's vector stays in the sum and in the saved file for good: get_all() shows only the new
# text, forget() takes only this away, and from the sum the old vector can be read with a cosine of 0.97. Of five versions each
# stays: the four old ones have 0.4 to 0.5.
# Why: add() adds to the sum without subtracting what the memory_id had before; update() does.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "crystal-mem==0.1.0" "torch==2.13.0" "numpy==2.4.6"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - "$work/saved" <<'PY'
import sys
import zlib

import torch
from crystal_mem import CrystalMem
from crystal_mem.core import bind, block_oct_conj


def embed(text):
    vector = torch.randn(256, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))
    return vector / vector.norm()


def make():
    return CrystalMem(user_id="clinic", dim=256, n_heads=4, embedder=embed)


def read_sum(memory, texts):
    """The cosine of each text with what the id's keys read from the sum."""
    keys = memory._derive_head_keys("note")
    parts = [bind(block_oct_conj(key), part) for key, part in zip(keys, memory.crystals)]
    read = torch.stack(parts).mean(0)
    return [round(float(read @ embed(text) / read.norm()), 2) for text in texts]


def get_norm(memory):
    return max(float(part.norm()) for part in memory.crystals)


clean = make()
for i in range(500):
    clean.add(f"note {i}", memory_id=f"note {i}", entity="all")
clean.forget_entity("all")
updated = make()
updated.add("has HIV", memory_id="note")
updated.update("note", "has a cold")
updated.forget("note")
again = make()
again.add("has HIV", memory_id="note")
again.add("has a cold", memory_id="note")
shown = [entry.content for entry in again.get_all()]
again.forget("note")
again.export_file(sys.argv[1])
loaded = CrystalMem.from_file(sys.argv[1])
versions = make()
for i in range(5):
    versions.add(f"version {i}", memory_id="note")
versions.forget("note")
norms = [get_norm(memory) for memory in (clean, updated, again)]
print("norm of the sum after all is forgotten: 500 memories, update(), add() again:", [f"{norm:.2g}" for norm in norms])
cosines = [read_sum(memory, ["has HIV", "has a cold", "has flu"]) for memory in (again, loaded)]
print("shown before:", shown, "cosines with HIV, cold, flu, then of the loaded file:", cosines)
of_versions = read_sum(versions, [f"version {i}" for i in range(5)])
print("five versions:", of_versions)
right = max(norms[:2]) < 1e-3 < 1 < norms[2] and shown == ["has a cold"] and not again.entries
stays = all(hiv > 0.9 > 0.3 > max(cold, flu) for hiv, cold, flu in cosines)
sys.exit(not (right and stays and min(of_versions[:4]) > 0.3 > of_versions[4]))
PY
