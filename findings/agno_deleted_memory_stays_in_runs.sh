#!/usr/bin/env bash
# Guess: delete_user_memory() takes what an agent knows of a person out of the agent's database.
# Library: agno 3.1.10 (SQLAlchemy 2.1.9, greenlet 3.5.6). Date: 2026-11-30.
# Seen: every run while the memory was there stored it in its messages: 5 of 5 rows of agno_runs quote it word for word afterwards,
# and the library returns them. It is not sent to the model again. delete_session() removes them.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "agno==3.1.10" "SQLAlchemy==2.1.9" "greenlet==3.5.6"
cd "$work"
AGNO_TELEMETRY=false "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sqlite3
import sys
from contextlib import closing

from agno.agent import Agent
from agno.db.schemas import UserMemory
from agno.db.sqlite import SqliteDb
from agno.models.base import Model
from agno.models.response import ModelResponse

memory = "Anna Example is HIV positive"


class Answering(Model):
    def invoke(self, *args, **more):
        return ModelResponse(role="assistant", content="I see.")

    async def ainvoke(self, *args, **more):
        return self.invoke()

    def invoke_stream(self, *args, **more):
        yield self.invoke()

    async def ainvoke_stream(self, *args, **more):
        yield self.invoke()

    def _parse_provider_response(self, response, **more):
        return response

    def _parse_provider_response_delta(self, response):
        return response


def count_rows():
    counts = {}
    with closing(sqlite3.connect("agent.db")) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            n_rows = sum(memory in str(row) for row in database.execute(f"SELECT * FROM {table}"))
            if n_rows:
                counts[table] = n_rows
    return counts


def run_agent():
    agent = Agent(
        model=Answering(id="answering"), db=db, user_id="anna", session_id="visit", telemetry=False,
        add_memories_to_context=True, add_history_to_context=True,
    )
    return any(memory in str(message.content) for message in agent.run("Hello").messages)


db = SqliteDb(db_file="agent.db")
db.upsert_user_memory(UserMemory(memory=memory, memory_id="1", user_id="anna"))
sent = [run_agent() for _ in range(5)]
seen = [sent.count(True), count_rows()]
db.delete_user_memory("1", user_id="anna")
seen += [count_rows(), memory in str(db.get_session(session_id="visit", session_type="agent")), run_agent()]
db.delete_session("visit")
seen += [count_rows()]
print("sent {}, rows {}, rows after deletion {}, returned {}, sent again {}, after delete_session() {}".format(*seen))
sys.exit(seen != [5, {"agno_memories": 1, "agno_runs": 5}, {"agno_runs": 5}, True, False, {}])
PY
