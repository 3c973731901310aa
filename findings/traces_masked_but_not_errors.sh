#!/usr/bin/env bash
# Guess: if a tracing client hides what goes into a function and what comes out of it, or masks a name in both, the name is
# not in what the client sends.
# Libraries: langfuse 5.0.4 (mask), langsmith 0.15.1 (hide_inputs, hide_outputs), openinference-instrumentation 0.1.72 with
# its part for LangChain 0.1.80 (hide_inputs, hide_outputs). Date: 2026-11-29.
# Seen: all three send the message of an exception as it is, two of them with the traceback: a tool's "no record of Quentin
# Zork" is in the store of traces. The part for LangChain also sends the variables of each prompt template, which are the
# inputs themselves, without any error; TraceConfig has no field for them. langsmith's anonymizer replaces the name in
# errors, too.
# Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine: exporters and session are stand-ins.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "langfuse==5.0.4" "langsmith==0.15.1" "openinference-instrumentation==0.1.72" \
    "openinference-instrumentation-langchain==0.1.80" "langchain-core==1.8.3" "opentelemetry-sdk==1.45.2"
cd "$work"
HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import json
import sys
from unittest.mock import MagicMock

from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langfuse import Langfuse, observe
from langsmith import Client, traceable
from langsmith.anonymizer import create_anonymizer
from openinference.instrumentation import TraceConfig
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

NAME = "Quentin Zork"


def answer(name):
    """Look up a person."""
    return f"{name} is a patient"


def fail(name):
    """Look up a person."""
    raise ValueError(f"no record of {name}")


def call(function):
    try:
        function(NAME)
    except ValueError:
        pass


def hide_with_langfuse(function):
    def mask(*, data, **_):
        return json.loads(json.dumps(data, default=str).replace(NAME, "***"))

    exporter = InMemorySpanExporter()
    client = Langfuse(
        public_key=function.__name__, secret_key="x", host="http://127.0.0.1:9", mask=mask,
        span_exporter=exporter, tracer_provider=TracerProvider(),
    )
    traced = observe()(function)
    call(lambda name: traced(name, langfuse_public_key=function.__name__))
    client.flush()
    return "".join(span.to_json() for span in exporter.get_finished_spans())


def hide_with_langsmith(function, **options):
    session = MagicMock()
    session.request.return_value.status_code = 200
    client = Client("http://127.0.0.1:9", api_key="x", session=session, auto_batch_tracing=False, **options)
    call(traceable(client=client, enabled=True)(function))
    return "".join(str(request.kwargs.get("data")) for request in session.request.call_args_list)


def hide_with_openinference(runnable_input, runnable):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = TraceConfig(hide_inputs=True, hide_outputs=True)
    LangChainInstrumentor().instrument(tracer_provider=provider, config=config, skip_dep_check=True)
    try:
        runnable.invoke(runnable_input)
    except ValueError:
        pass
    LangChainInstrumentor().uninstrument()
    return "".join(span.to_json() for span in exporter.get_finished_spans())


hidden = {"hide_inputs": True, "hide_outputs": True}
anonymizer = create_anonymizer([{"pattern": NAME, "replace": "***"}])
prompt = ChatPromptTemplate.from_messages([("human", "Who is {name}?")])
sent = {
    "langfuse": hide_with_langfuse(answer),
    "langfuse, error": hide_with_langfuse(fail),
    "langsmith": hide_with_langsmith(answer, **hidden),
    "langsmith, error": hide_with_langsmith(fail, **hidden),
    "langsmith, anonymizer": hide_with_langsmith(answer, anonymizer=anonymizer),
    "langsmith, anonymizer, error": hide_with_langsmith(fail, anonymizer=anonymizer),
    "openinference": hide_with_openinference({"name": NAME}, tool(answer)),
    "openinference, error": hide_with_openinference({"name": NAME}, tool(fail)),
    "openinference, prompt": hide_with_openinference({"name": NAME}, prompt | FakeListChatModel(responses=["?"])),
}
for case, text in sent.items():
    print(f"{case}: {len(text)} characters sent, the name {text.count(NAME)} times")
found = [case for case, text in sent.items() if NAME in text]
expected = ["langfuse, error", "langsmith, error", "openinference, error", "openinference, prompt"]
sys.exit(found != expected or not all(sent.values()))
PY
