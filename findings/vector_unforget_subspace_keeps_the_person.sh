#!/usr/bin/env bash
# Guess: project_matrix_multisubspace() with the "concept subspace" of a person's 20 notes makes their vectors unlike the person's mean
# vector, and the more so the higher the rank; a note that is projected by its own subspace is unlike itself.
# Library: vector-unforget 4.2.0 (numpy 2.4.6). Date: 2026-12-01.
# Seen: they become more like it. Their cosine with the mean is 0.80 before, 0.81 after rank 1 and 0.93 after rank 19, all that there
# is; a search for the person finds all 20 first. Of a single note, as a request of one record has it, the cosine with itself is
# still 0.98 or more. The other way, project_matrix_orthogonal() with the mean, gives 0.00 (the "residual leakage" that its certificate
# states), and yet each of the 20 notes is the first that is found by its old vector, that is, by its text.
# Why: the subspace is computed after the mean is subtracted: it has what the notes differ in, not what they have in common.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "vector-unforget==4.2.0" "numpy==2.4.6"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
from vector_unforget.subspace_projection import SubspaceProjector

rng = np.random.default_rng(0)
person = rng.standard_normal(64)
vectors = np.concatenate([person + 0.7 * rng.standard_normal((20, 64)), rng.standard_normal((200, 64))])
vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
notes = vectors[:20]
mean = notes.mean(0) / np.linalg.norm(notes.mean(0))
projector = SubspaceProjector(device="cpu")


def describe(name, projected):
    cosine = float((projected[:20] @ mean).mean())
    by_person = int((np.argsort(-(projected @ person))[:20] < 20).sum())
    by_note = sum(int(np.argmax(projected @ note)) == i for i, note in enumerate(notes))
    print(f"{name}: cosine with the mean {cosine:.2f}; among the first 20 for the person {by_person} of her notes; "
          f"{by_note} of 20 found first by their old vector")
    return cosine, by_person, by_note


before = describe("before", vectors)
ranks = []
for rank in (1, 5, 19):
    basis, _ = projector.compute_concept_subspace(notes, rank=rank)
    ranks.append(describe(f"rank {rank}", projector.project_matrix_multisubspace(vectors, basis)))
whole = describe("mean", projector.project_matrix_orthogonal(vectors, mean, backend="numpy"))
own = []
for note in notes:
    basis, _ = projector.compute_concept_subspace(note)
    own.append(float(projector.project_matrix_multisubspace(note[None], basis)[0] @ note))
print(f"single notes: cosine with themselves after the projection at least {min(own):.2f}")
cosines = [before[0]] + [cosine for cosine, _, _ in ranks]
more_alike = cosines == sorted(cosines) and cosines[-1] > cosines[0] + 0.1
found = all(by_person == 20 for _, by_person, _ in ranks) and whole[2] == 20
sys.exit(not (more_alike and found and abs(whole[0]) < 1e-3 and min(own) > 0.9))
PY
