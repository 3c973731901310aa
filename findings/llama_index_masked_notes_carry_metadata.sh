#!/usr/bin/env bash
# Guess: if notes pass PIINodePostprocessor, whose local model masks names before a remote model answers, no name that
# the local model masked is in what the remote model gets.
# Library: llama-index-core 0.14.25 (the class is marked beta there). Date: 2026-11-30.
# Seen: the local model gets the note's metadata above its text and masks the name in both; all of it becomes the note's new
# text. The remote model gets that text with the metadata above it once more, as they were: the name stands in
# the prompt, next to the placeholder that hides it. With the metadata key in excluded_llm_metadata_keys it does not.
# Why: content is read with the metadata (MetadataMode.LLM) and written without; prompts put the metadata on top again.
# NERPIINodePostprocessor does the same by its code. Neither pages nor issues say so.
# Exits 0 if that is still so, 1 if it changed. Both models are stand-ins.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "llama-index-core==0.14.25"
cd "$work"
HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY'
import sys

from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.postprocessor import PIINodePostprocessor

NAME = "Quentin Zork"
asked = []


class Remote(CustomLLM):
    @property
    def metadata(self):
        return LLMMetadata()

    def complete(self, prompt, formatted=False, **options):
        asked.append(prompt)
        return CompletionResponse(text=self.answer(prompt))

    def answer(self, prompt):
        return "Penicillin."

    def stream_complete(self, prompt, formatted=False, **options):
        raise NotImplementedError


class Local(Remote):
    def answer(self, prompt):
        """Mask the name in the last context of the prompt, which is the note; the ones before are examples."""
        note = prompt.rsplit("Context:", 1)[1].split("Task:")[0]
        return note.replace(NAME, "[NAME1]") + 'Output Mapping:\n{"NAME1": "' + NAME + '"}'


def ask(**options):
    """Ask about the one note; return the prompts of the local and of the remote model."""
    asked.clear()
    note = Document(text=f"{NAME} must not get penicillin.", metadata={"patient": NAME}, **options)
    index = VectorStoreIndex.from_documents([note], embed_model=MockEmbedding(embed_dim=2))
    engine = index.as_query_engine(llm=Remote(), node_postprocessors=[PIINodePostprocessor(llm=Local())])
    engine.query("What must the patient not get?")
    return asked


counts = {}
for label, options in {"as it comes": {}, "key excluded": {"excluded_llm_metadata_keys": ["patient"]}}.items():
    local, remote = ask(**options)
    counts[label] = remote.count(NAME), remote.count("[NAME1]")
    print(f"{label}: in the remote model's prompt the name {counts[label][0]} times, the placeholder {counts[label][1]} times")
    print("   ", repr(remote[remote.index("-----") : remote.index("Given")]))
sys.exit(counts != {"as it comes": (1, 2), "key excluded": (0, 1)})
PY
