#!/usr/bin/env bash
# Guess: after adelete_by_doc_id(..., delete_llm_cache=True) no answer has anything of the deleted document.
# Library: lightrag-hku 1.5.7, its own stores in files. Date: 2026-11-29.
# Seen: a question that was asked before is answered as before, with the deleted document's patient, and the model isn't
# asked. Another wording of the question is answered without. The old answer is in kv_store_llm_response_cache.json;
# all other files are free of the document. aclear_cache() removes it.
# Why: answers are kept by the question and its parameters, whatever is stored now; delete_llm_cache removes what the model
# extracted from the document, and not the answers.
# The language model and the embedder are stand-ins; nothing leaves the machine.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "lightrag-hku==1.5.7"
cd "$work"
venv/bin/python -W ignore - 2>"$work/log" <<'PY'
import asyncio
import re
import sys
from pathlib import Path

import numpy as np
from lightrag import LightRAG, QueryParam
from lightrag.utils import EmbeddingFunc, Tokenizer

calls = []


class Letters:
    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


async def write(prompt, system_prompt=None, **options):
    calls.append("model")
    if "Who has" in prompt:  # a question: the context is in the system's prompt
        return " ".join(dict.fromkeys(re.findall(r"Zorblat\dx", system_prompt)))
    lines = []
    for name in dict.fromkeys(re.findall(r"Zorblat\dx", prompt)):
        lines.append(f"entity<|#|>{name}<|#|>person<|#|>{name} is a patient")
    return "\n".join([*lines, "<|COMPLETE|>"])


async def embed(texts):
    calls.append("embedder")
    return np.random.default_rng(0).normal(size=(len(texts), 8)).astype("float32")


async def main():
    embedder = EmbeddingFunc(embedding_dim=8, max_token_size=512, func=embed)
    folder = Path("store")
    folder.mkdir()
    rag = LightRAG(
        working_dir=str(folder),
        llm_model_func=write,
        embedding_func=embedder,
        tokenizer=Tokenizer("letters", Letters()),
    )
    await rag.initialize_storages()
    texts = [f"Zorblat{i}x was seen with a fever." for i in range(4)]
    await rag.ainsert(texts, ids=[f"d{i}" for i in range(4)])
    how = QueryParam(mode="naive", enable_rerank=False)
    question = "Who has a fever?"
    before = await rag.aquery(question, how)
    deleted = await rag.adelete_by_doc_id("d0", delete_llm_cache=True)
    calls.clear()
    after = await rag.aquery(question, how)
    asked = list(calls)
    reworded = await rag.aquery("Who has a fever now?", how)
    files = [path.name for path in folder.rglob("*") if path.is_file() and b"Zorblat0x" in path.read_bytes()]
    await rag.aclear_cache()
    cleared = await rag.aquery(question, how)
    print(f"deletion: {deleted.status}; before: {before}; after: {after} (asked: {asked}); reworded: {reworded}")
    print(f"files with the deleted name: {files}; after aclear_cache(): {cleared}")
    kept = "Zorblat0x" in before and after == before and "model" not in asked
    gone = "Zorblat0x" not in reworded + cleared
    sys.exit(not (kept and gone and files == ["kv_store_llm_response_cache.json"]))


asyncio.run(main())
PY
