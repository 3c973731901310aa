#!/usr/bin/env bash
# Guess: after reset() of a Memory, "Reset the memory", nothing of the conversation goes to the model any more.
# Library: llama-index-core 0.14.25, Memory with a FactExtractionMemoryBlock. Date: 2026-11-30.
# Seen: the messages are gone, get_all() returns none; the facts that a model drew from them are not. get(), which is what an
# agent gives to its model, returns them in a system message, right after reset() and in the next conversation.
# Why: reset() deletes rows of the store of messages, and a block has no call that empties it. Setting the block's `facts` to
# an empty list removes them. No page or issue that was found says so.
# Exits 0 if that is still so, 1 if it changed. The model that draws the facts is a stand-in.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "llama-index-core==0.14.25"
cd "$work"
HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY'
import sys

from llama_index.core.llms import ChatMessage, CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.memory import FactExtractionMemoryBlock, Memory

FACT = "The user is called Quentin Zork"


class Reader(CustomLLM):
    @property
    def metadata(self):
        return LLMMetadata()

    def complete(self, prompt, formatted=False, **options):
        return CompletionResponse(text=f"<facts><fact>{FACT}</fact></facts>")

    def stream_complete(self, prompt, formatted=False, **options):
        raise NotImplementedError


def talk(memory, user):
    for number in range(10):
        memory.put(ChatMessage(role="user", content=f"{user}, and this is the question of number {number}"))
        memory.put(ChatMessage(role="assistant", content=f"The answer to the question of number {number}"))


def holds_fact(memory):
    return any(FACT in message.content for message in memory.get())


block = FactExtractionMemoryBlock(llm=Reader())
memory = Memory.from_defaults(session_id="chat", token_limit=200, token_flush_size=50, memory_blocks=[block])
talk(memory, "I am Quentin Zork")
seen = [holds_fact(memory)]
memory.reset()
stored = len(memory.get_all())
seen.append(holds_fact(memory))
memory.put(ChatMessage(role="user", content="Hello, I am somebody else"))
seen.append(holds_fact(memory))
block.facts = []
seen.append(holds_fact(memory))
print(f"messages after reset(): {stored}")
for label, fact in zip(("before reset()", "after it", "after the next message", "with facts = []"), seen, strict=True):
    print(f"fact in what the model gets, {label}: {fact}")
sys.exit(not (stored == 0 and seen == [True, True, True, False]))
PY
