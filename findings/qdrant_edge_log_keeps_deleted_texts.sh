#!/usr/bin/env bash
# Guess: delete_points(), optimize(), flush() and close() leave nothing of the deleted points in the shard's folder, at the
# latest if the optimizer is set to clean up from the first deleted point on.
# Library: qdrant-edge-py 0.9.0. Date: 2026-11-29.
# Seen: as it comes, optimize() does nothing, and all 12 deleted texts stay in the payloads and in the log of writes. With
# EdgeOptimizersConfig(deleted_threshold=0.01, vacuum_min_vector_number=1) it takes them out of the payloads; the log keeps
# all 12, also after flush(), a restart and close(). Only a shard that was made with wal_enabled=False then holds none.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "qdrant-edge-py==0.9.0"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import pathlib
import random
import sys

import qdrant_edge as edge

random.seed(0)


def find_files(folder):
    files = {}
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            n_texts = sum(f"note {i:03d} of user 3".encode() in content for i in range(3, 120, 10))
            if n_texts:
                files[path.parent.name] = n_texts
    return files


def delete_user(name, **options):
    pathlib.Path(name).mkdir()
    vectors = {"": edge.EdgeVectorParams(size=8, distance=edge.Distance.Dot)}
    shard = edge.EdgeShard.create(name, edge.EdgeConfig(vectors=vectors, **options))
    points = []
    for i in range(120):
        texts = {"text": f"note {i:03d} of user {i % 10}"}
        points.append(edge.Point(i, [random.gauss(0, 1) for _ in range(8)], texts))
    shard.update(edge.UpdateOperation.upsert_points(points))
    shard.flush()
    shard.update(edge.UpdateOperation.delete_points(list(range(3, 120, 10))))
    shard.flush()
    optimized = shard.optimize()
    shard.flush()
    shard.close()
    shard = edge.EdgeShard.load(name)
    shard.optimize()
    n_points = shard.info().points_count
    shard.flush()
    shard.close()
    files = find_files(name)
    print(f"{name}: points {n_points}, optimize() returned {optimized}, deleted texts in {files or 'no file'}")
    return n_points, files


eager = edge.EdgeOptimizersConfig(deleted_threshold=0.01, vacuum_min_vector_number=1)
seen = [
    delete_user("as it comes"),
    delete_user("eager", optimizers=eager),
    delete_user("eager, no log", optimizers=eager, wal_enabled=False),
]
sys.exit(seen != [(108, {"payload_storage": 12, "wal": 12}), (108, {"wal": 12}), (108, {})])
PY
