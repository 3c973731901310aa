#!/usr/bin/env bash
# Guess: forget_entity() removes the same memories of a person whether the program was restarted before or not.
# Library: crystal-mem 0.1.0 (torch 2.13.0, numpy 2.4.6). Date: 2026-12-01.
# Seen: of two memories, a fact about Quentin Marlow and a link "Dr Hale treats for bipolar disorder Quentin Marlow", both are gone if
# the same process forgets him. After a restart one is: the link stays, get_all() and search() give it, and the file names him and
# what he is treated for. The call returns 1 instead of 2, no error. entity_facts() doesn't show it either.
# Why: a link is kept under its first entity; that it is also about the second one is noted in memory only, and not in the file.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "crystal-mem==0.1.0" "torch==2.13.0" "numpy==2.4.6"
cd "$work"
cat > memory.py <<'PY'
import pathlib
import sys
import zlib

import torch
from crystal_mem import CrystalMem


def embed(text):
    vector = torch.randn(256, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))
    return vector / vector.norm()


step, path = sys.argv[1:]
memory = CrystalMem(user_id="clinic", dim=256, n_heads=4, embedder=embed, persist_path=path)
if "write" in step:
    memory.add("takes lithium", entity="Quentin Marlow")
    memory.link("Dr Hale", "Quentin Marlow", "treats for bipolar disorder")
    memory.add("likes tea", entity="Dr Hale")
if "forget" in step:
    count = memory.forget_entity("Quentin Marlow")
    left = sorted(entry.content for entry in memory.get_all())
    in_file = b"bipolar disorder Quentin Marlow" in pathlib.Path(path).read_bytes()
    found = any("Quentin" in entry.content for entry, _ in memory.search("Quentin Marlow", top_k=9))
    print(count, left, "in the file" if in_file else "not in the file", "found" if found else "not found")
PY
run() { OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore memory.py "$@"; }
one=$(run write-forget one.crystal)
run write two.crystal
two=$(run forget two.crystal)
printf 'in one process: %s\nafter a restart: %s\n' "$one" "$two"
[ "$one" = "2 ['likes tea'] not in the file not found" ]
[ "$two" = "1 ['Dr Hale treats for bipolar disorder Quentin Marlow', 'likes tea'] in the file found" ]
