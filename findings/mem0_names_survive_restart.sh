#!/usr/bin/env bash
# Guess: delete_all(user_id=...) removes the names that were extracted from that user's memories, and reset() all names.
# Library: mem0ai 2.2.1 (with qdrant-client 1.20.0 on disk). Date: 2026-11-28.
# Seen: only in the process that stored them. After a restart delete_all() reports success and get_all() is empty, but the
# collection of entities still has every name, and so it has after reset(), the call that delete_all() names for
# deleting all memories.
# Why: that collection is opened at its first use, and both calls leave it alone while it is not open.
# The language model, the embedder and the extraction of names are stand-ins; nothing leaves the machine.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "mem0ai==2.2.1" "qdrant-client==1.20.0"
export MEM0_DIR="$work/mem0" MEM0_TELEMETRY=False OPENAI_API_KEY=none
"$work/venv/bin/python" -W ignore - "$work" <<'PY'
import hashlib
import json
import logging
import sys

import mem0.memory.main
from mem0 import Memory

logging.disable(logging.CRITICAL)
names = ["Anna Example", "Doctor Example"]
mem0.memory.main.extract_entities_batch = lambda texts: [[("PROPER", name) for name in names] for text in texts]
mem0.memory.main.extract_entities = lambda text: []


def embed(text, action=None):
    return [byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:8]]


def open_memory(folder):
    store = {"path": folder, "on_disk": True, "embedding_model_dims": 8, "collection_name": "memories"}
    memory = Memory.from_config(
        {
            "vector_store": {"provider": "qdrant", "config": store},
            "history_db_path": f"{folder}.db",
        }
    )
    memory.embedding_model.embed = embed
    memory.embedding_model.embed_batch = lambda texts, action=None: [embed(text) for text in texts]
    answer = json.dumps({"memory": [{"id": "0", "text": "Anna Example is seen by Doctor Example"}]})
    memory.llm.generate_response = lambda messages, **options: answer
    return memory


def close_memory(memory):
    memory.close()
    memory.vector_store.client.close()


def list_names(memory):
    points, _ = memory.vector_store.client.scroll("memories_entities", limit=100)
    return sorted(point.payload["data"] for point in points)


left = {}
for restart in (False, True):
    memory = open_memory(f"{sys.argv[1]}/{restart}")
    memory.add("hello", user_id="a")
    stored = list_names(memory)
    if restart:
        close_memory(memory)
        memory = open_memory(f"{sys.argv[1]}/{restart}")
    memory.delete_all(user_id="a")
    listed = memory.get_all(filters={"user_id": "a"})["results"]
    deleted = list_names(memory)
    memory.reset()
    left[restart] = [stored, listed, deleted, list_names(memory)]
    print(
        f"restart: {restart}; names stored {stored}, memories after delete_all {listed}, "
        f"names after delete_all {deleted}, after reset {left[restart][3]}"
    )
    close_memory(memory)
sys.exit(left != {False: [names, [], [], []], True: [names, [], names, names]})
PY
