#!/usr/bin/env bash
# Guess: after delete_all(user_id=...) nothing of what that user wrote is used again; the table of past events, which
# history() shows, keeps the deleted memories.
# Library: mem0ai 2.2.1 (with qdrant-client 1.20.0 on disk). Date: 2026-11-28.
# Seen: the user's own messages stay, word for word, in a second table, and the next add() for the same user sends them to
# the language model, which may extract the deleted memory anew. get_all() shows nothing. reset() removes them, for all users.
# Why: add() keeps the last ten messages of a user as context; delete() and delete_all() do not touch them.
# The language model and the embedder are stand-ins; nothing leaves the machine.
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

from mem0 import Memory

logging.disable(logging.CRITICAL)
work = sys.argv[1]
store = {"path": f"{work}/vectors", "on_disk": True, "embedding_model_dims": 8}
memory = Memory.from_config(
    {
        "vector_store": {"provider": "qdrant", "config": store},
        "history_db_path": f"{work}/history.db",
    }
)
prompts = []
extracted = []


def embed(text, action=None):
    return [byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:8]]


def extract(messages, **options):
    prompts.append(messages[-1]["content"])
    return json.dumps({"memory": [{"id": "0", "text": text} for text in extracted]})


memory.embedding_model.embed = embed
memory.embedding_model.embed_batch = lambda texts, action=None: [embed(text) for text in texts]
memory.llm.generate_response = extract

message = "I am seen for lymphoma on ward 7"
extracted = ["The user is treated for lymphoma"]
memory.add(message, user_id="a")
n_before = len(memory.get_all(filters={"user_id": "a"})["results"])
memory.delete_all(user_id="a")
n_after = len(memory.get_all(filters={"user_id": "a"})["results"])
extracted = []
memory.add("I like tea", user_id="a")
memory.add("I like tea", user_id="b")
sent = [message in prompt for prompt in prompts]
print(f"memories of user a: {n_before}, after delete_all {n_after}")
print(f"the deleted user's message is in the next prompt: {sent[1]} (user a), {sent[2]} (user b)")
memory.reset()
memory.add("I like tea", user_id="a")
print(f"after reset(): {message in prompts[-1]}")
memory.close()
memory.vector_store.client.close()
sys.exit(not (n_before == 1 and n_after == 0 and sent == [True, True, False] and message not in prompts[-1]))
PY
