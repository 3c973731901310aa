#!/usr/bin/env bash
# Guess: with litellm.turn_off_message_logging = True, by which messages and answers do not reach what logs calls, a logger
# is given nothing of the private text that a call sends.
# Library: litellm 1.110.2. Date: 2026-11-30.
# Seen: after a call the messages and the answer are replaced. A draft that is sent as `prediction`, and the text
# after the gap that is sent as `suffix`, are not: the first is also among the model parameters of `standard_logging_object`,
# which loggers pass on. Before the call log_pre_api_call() is given the messages themselves.
# Why: named fields are replaced, and what is left counts as parameters; the hook before the call is not covered.
# The page about redaction names neither; issue 16336 of the project tells of another field (proxy_server_request).
# Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine: answers are mocked.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "litellm==1.110.2"
cd "$work"
HOME="$work" LITELLM_LOCAL_MODEL_COST_MAP=True "$work/venv/bin/python" -W ignore - <<'PY'
import json
import sys
import time

import litellm
from litellm.integrations.custom_logger import CustomLogger

NAME = "Quentin Zork"
heard = {}


def hold_name(fields):
    return [field for field in fields if NAME in json.dumps(fields[field], default=str)]


class Logger(CustomLogger):
    def log_pre_api_call(self, model, messages, kwargs):
        heard["before"] = NAME in json.dumps(messages)

    def log_success_event(self, kwargs, response_obj, start_time, end_time):
        parts = ("messages", "input", "prediction", "extra_body", "standard_logging_object")
        heard["after"] = hold_name({part: kwargs.get(part) for part in parts})
        heard["parameters"] = hold_name(kwargs["standard_logging_object"]["model_parameters"])
        heard["answer"] = NAME in str(response_obj)


def listen(call, **options):
    """Make one call; return what the logger heard of the name."""
    heard.clear()
    call(mock_response=f"Dear {NAME}", api_key="none", **options)
    deadline = time.monotonic() + 60
    while "answer" not in heard and time.monotonic() < deadline:
        time.sleep(0.1)
    return dict(heard)


litellm.turn_off_message_logging = True
litellm.callbacks = [Logger()]
messages = [{"role": "user", "content": f"Mend this letter to {NAME}"}]
letter = {"type": "content", "content": f"Dear {NAME}, your result is here."}
results = {
    "messages only": listen(litellm.completion, model="openai/gpt-4o", messages=messages),
    "prediction": listen(litellm.completion, model="openai/gpt-4o", messages=messages, prediction=letter),
    "suffix": listen(litellm.text_completion, model="gpt-3.5-turbo-instruct", prompt="Dear", suffix=f"Yours, {NAME}"),
}
for label, result in results.items():
    print(f"{label}: {result}")
none = {"parameters": [], "answer": False}
expected = {
    "messages only": {"before": True, "after": [], **none},
    "prediction": {"before": True, "after": ["prediction", "standard_logging_object"], **none, "parameters": ["prediction"]},
    "suffix": {"before": False, "after": ["extra_body"], **none},
}
sys.exit(results != expected)
PY
