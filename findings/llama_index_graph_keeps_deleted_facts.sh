#!/usr/bin/env bash
# Guess: delete_ref_doc(..., delete_from_docstore=True) takes a document out of a PropertyGraphIndex: its retriever gives
# nothing that only this document said.
# Library: llama-index-core 0.14.25, with the stores that it has by default. Date: 2026-11-29.
# Seen: the retriever still gives the facts that were extracted from the deleted document ("Zorblat0x -> LIVES_IN ->
# Quenbury0y"), and persist() writes its names to the graph's and to the vectors' file. The document's text is gone.
# VectorStoreIndex, with the same call, keeps nothing.
# Why: only the graph's node of the text itself is deleted; entities, relations and the entities' vectors stay.
# The extractor, the language model and the embedder are stand-ins; nothing leaves the machine.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "llama-index-core==0.14.25"
WORK="$work" "$work/venv/bin/python" -W ignore - <<'PY'
import os
import sys
from pathlib import Path

from llama_index.core import Document, PropertyGraphIndex, Settings, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.graph_stores.types import KG_NODES_KEY, KG_RELATIONS_KEY, EntityNode, Relation
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TransformComponent

Settings.llm = MockLLM()
Settings.embed_model = MockEmbedding(embed_dim=8)


class Extractor(TransformComponent):
    def __call__(self, nodes, **options):
        for node in nodes:
            words = node.get_content().split()
            who, where = EntityNode(name=words[0]), EntityNode(name=words[3])
            node.metadata[KG_NODES_KEY] = [who, where]
            fact = Relation(label="LIVES_IN", source_id=who.id, target_id=where.id)
            node.metadata[KG_RELATIONS_KEY] = [fact]
        return nodes


def examine(index, name):
    for i in range(5):
        index.delete_ref_doc(f"d{i}", delete_from_docstore=True)
    told = index.as_retriever(similarity_top_k=40).retrieve("Zorblat0x")
    told = [node.text for node in told if "Zorblat0x" in node.text]
    index.storage_context.persist(os.environ["WORK"] + "/" + name)
    files = {}
    for path in Path(os.environ["WORK"], name).iterdir():
        text = path.read_text()
        files[path.name] = sum(f"Zorblat{i}x" in text for i in range(5))
    files = {path: number for path, number in files.items() if number}
    print(f"{name}: the retriever says {told}; names of deleted documents in {files}")
    return told, files


texts = [f"Zorblat{i}x lives in Quenbury{i}y with a fever." for i in range(20)]
documents = [Document(text=text, doc_id=f"d{i}") for i, text in enumerate(texts)]
told, files = examine(PropertyGraphIndex.from_documents(documents, kg_extractors=[Extractor()]), "graph")
plain = examine(VectorStoreIndex.from_documents(documents), "vectors")
kept = {"property_graph_store.json": 5, "default__vector_store.json": 5}
sys.exit(told != ["Zorblat0x -> LIVES_IN -> Quenbury0y"] or files != kept or plain != ([], {}))
PY
