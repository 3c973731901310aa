"""Memories of mem0 without a language model: each message is a memory, and its vector is given."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.erasure.stored import Row


def has_mem0() -> bool:
    return find_spec("mem0") is not None


def open_memory(folder: Path, rows: Sequence[Row], provider: str = "qdrant") -> Any:
    """Return mem0's Memory, with its database and its vector store in a folder."""
    store: dict[str, Any] = {"path": str(folder / "vectors")}
    if provider != "chroma":
        store["embedding_model_dims"] = len(rows[0]["embedding"])
    if provider == "qdrant":
        store["on_disk"] = True
    settings = {
        "vector_store": {"provider": provider, "config": store},
        "history_db_path": str(folder / "history.db"),
    }
    # Read by the import, which makes the folder.
    variables = {"MEM0_DIR": str(folder), "MEM0_TELEMETRY": "False", "OPENAI_API_KEY": "none"}
    with patch.dict(os.environ, variables):
        from mem0 import Memory

        memory = Memory.from_config(settings)
    vectors = {row["text"]: row["embedding"] for row in rows}
    embed = memory.embedding_model
    embed.embed = lambda text, action=None: vectors[text.removeprefix("user: ").strip()]
    embed.embed_batch = lambda texts, action=None: [vectors[text] for text in texts]
    return memory


def remember(memory: Any, rows: Sequence[Row]) -> None:
    """Add each row's text as a message of a user with the row's id, and as the memory of it."""
    for row in rows:
        extracted = json.dumps({"memory": [{"id": "0", "text": row["text"]}]})
        memory.llm.generate_response = lambda messages, extracted=extracted, **options: extracted
        memory.add(row["text"], user_id=str(row["id"]))


def close_memory(memory: Any) -> None:
    memory.close()
    client = getattr(memory.vector_store, "client", None)
    if hasattr(client, "close"):
        client.close()
