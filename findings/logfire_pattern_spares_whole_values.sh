#!/usr/bin/env bash
# Guess: if a pattern for addresses is added to logfire's scrubbing (extra_patterns), no address is in what the client sends, be it
# the value of a field or a part of a longer text, in whose place the client puts a note that something was scrubbed.
# Library: logfire 5.4.0. Date: 2026-11-30.
# Seen: a value that is an address and nothing else is sent as it is, in the field and in the message. Of a longer text all but
# the address is removed: the note that takes its place quotes it, and so does the attribute `logfire.scrubbed`.
# A callback that returns a text of its own ends the quotes, but it is not asked about a value that is an address.
# Why: patterns are meant for words such as "password": the word alone is no secret, and the note names the word.
# The page about scrubbing says neither. That notes quote is known (pydantic/logfire, issue 1909, open), and a comment in the
# code says that whole values are kept. Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "logfire==5.4.0" "opentelemetry-sdk==1.45.2"
cd "$work"
HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import logfire
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ADDRESS = "quentin.zork@example.org"
PATTERN = r"[\w.+-]+@[\w-]+\.[\w.]+"


def send(callback=None):
    """Log a field that is the address, then a text with it; return the attributes that are sent for each."""
    sent = InMemorySpanExporter()
    logfire.configure(
        send_to_logfire=False,
        console=False,
        inspect_arguments=False,
        scrubbing=logfire.ScrubbingOptions(extra_patterns=[PATTERN], callback=callback),
        additional_span_processors=[SimpleSpanProcessor(sent)],
    )
    logfire.info("mail from {sender}", sender=ADDRESS)
    logfire.info("a note", note=f"The patient asks for an answer to {ADDRESS} by Friday.")
    logs = {span.name: dict(span.attributes) for span in sent.get_finished_spans()}
    return logs["mail from {sender}"], logs["a note"]


def name_attributes(log):
    return sorted(name for name, value in log.items() if ADDRESS in str(value))


field, text = send()
print("address as a whole value, sent in", name_attributes(field))
print("address within a text, sent in", name_attributes(text), "with the note", repr(text["note"]))
field_asked, text_asked = send(callback=lambda match: "[hidden]")
print("with a callback:", name_attributes(field_asked), "and", name_attributes(text_asked), repr(text_asked["note"]))
spared = name_attributes(field) == name_attributes(field_asked) == ["logfire.msg", "sender"]
quoted = name_attributes(text) == ["logfire.scrubbed", "note"] and "Friday" not in text["note"]
sys.exit(not (spared and quoted and name_attributes(text_asked) == [] and text_asked["note"] == "[hidden]"))
PY
