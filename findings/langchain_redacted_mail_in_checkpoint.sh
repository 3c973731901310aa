#!/usr/bin/env bash
# Guess: an address that PIIMiddleware redacts, in what the user writes and in what the model answers, is not in the store
# of the conversation: the state that invoke() and get_state() return has only [REDACTED_EMAIL].
# Library: langchain 1.5.2 with langgraph 1.2.24 and langgraph-checkpoint-sqlite 3.1.2. Date: 2026-11-29.
# Seen: the model never sees the user's address, and the state is redacted; yet both addresses are in the database, word for
# word, in older checkpoints and in the writes of steps, and get_state_history() returns them. The model's own answer, too.
# Why: the redaction is a step of the graph; the message before it was stored as the result of the step before.
# With strategy="block" the refused message is in the database, too, and in the state that get_state() returns.
# Exits 0 if that is still so, 1 if it changed. The model is a stand-in; nothing leaves the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "langchain==1.5.2" "langgraph==1.2.24" "langgraph-checkpoint-sqlite==3.1.2"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import pathlib
import sys

from langchain.agents import create_agent
from langchain.agents.middleware import PIIMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.sqlite import SqliteSaver

asked = "quentin.zork@example.org"
answered = "wilma.zork@example.org"
prompts = []


class Model(GenericFakeChatModel):
    def _generate(self, messages, *arguments, **options):
        prompts.append(str(messages))
        return super()._generate(messages, *arguments, **options)


def count(text):
    return [text.count(asked) > 0, text.count(answered) > 0]


def talk(strategy):
    path = f"{strategy}.db"
    redact = PIIMiddleware("email", strategy=strategy, apply_to_input=True, apply_to_output=True)
    thread = {"configurable": {"thread_id": "1"}}
    with SqliteSaver.from_conn_string(path) as saver:
        model = Model(messages=iter([AIMessage(f"ask {answered}")]))
        agent = create_agent(model, tools=[], middleware=[redact], checkpointer=saver)
        refused = False
        try:
            agent.invoke({"messages": [("user", f"write to {asked}")]}, thread)
        except Exception as error:
            refused = type(error).__name__ == "PIIDetectionError"
        state = str(agent.get_state(thread).values)
        history = "".join(str(older.values) for older in agent.get_state_history(thread))
    stored = "".join(file.read_bytes().decode("latin-1") for file in pathlib.Path(".").glob(f"{path}*"))
    print(f"{strategy}: refused {refused}; addresses (asked, answered) in the prompt {count(''.join(prompts))}, ")
    print(f"  in the state {count(state)}, in the history {count(history)}, in the database {count(stored)}")
    return refused, count(state), count(history), count(stored)


redacted = talk("redact")
blocked = talk("block")
sent = count("".join(prompts))
expected = (False, [False, False], [True, True], [True, True])
sys.exit(redacted != expected or not (blocked[0] and blocked[3][0]) or sent[0])
PY
