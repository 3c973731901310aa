#!/usr/bin/env bash
# Guess: as_retriever(doc_ids=[...]), "list of documents to constrain search", returns notes of these documents only.
# Library: llama-index-core 0.14.25, with the vector store that it has by default. Date: 2026-11-28.
# Seen: notes of all documents come back, for one id as for none. A metadata filter is obeyed, but "any of these groups" with
# no group (MetadataFilters(filters=[], condition=OR)) returns all notes, too, while IN with an empty list returns none.
# Why: SimpleVectorStore.query() reads node_ids and filters of a query, and not its doc_ids.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "llama-index-core==0.14.25"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

people = ["ann", "bob", "eve"]
documents = [Document(text=f"note of {name}", doc_id=name, metadata={"group": name}) for name in people]
index = VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))


def retrieve(**limits):
    nodes = index.as_retriever(similarity_top_k=5, **limits).retrieve("note")
    return sorted(node.node.get_content().removeprefix("note of ") for node in nodes)


def any_of(groups):
    filters = [MetadataFilter(key="group", value=group) for group in groups]
    return MetadataFilters(filters=filters, condition=FilterCondition.OR)


def within(groups):
    return MetadataFilters(filters=[MetadataFilter(key="group", value=groups, operator=FilterOperator.IN)])


seen = {
    "doc_ids=['ann']": retrieve(doc_ids=["ann"]),
    "doc_ids=[]": retrieve(doc_ids=[]),
    "any of ['ann']": retrieve(filters=any_of(["ann"])),
    "any of []": retrieve(filters=any_of([])),
    "in ['ann']": retrieve(filters=within(["ann"])),
    "in []": retrieve(filters=within([])),
}
for call, names in seen.items():
    print(f"{call}: notes of {', '.join(names) or 'nobody'}")
expected = [people, people, ["ann"], people, ["ann"], []]
sys.exit(list(seen.values()) != expected)
PY
