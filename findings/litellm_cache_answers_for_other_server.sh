#!/usr/bin/env bash
# Guess: litellm's cache keeps answers apart that come from different servers or were asked with different sampling.
# Library: litellm 1.110.2, its local cache (which imports fastapi, orjson and soundfile). Date: 2026-11-28.
# Seen: api_base is no part of the cache's key: with two servers that serve two checkpoints under one model name the second
# is never asked, and its "answers" are those of the first. The same with min_p, repetition_penalty and what extra_body
# holds (chat_template_kwargs), while temperature, seed and logprobs are kept apart. Whoever compares a fine-tuned model
# with its base in this way measures no difference.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "litellm==1.110.2" "fastapi==0.165.0" "orjson==3.13.0" "soundfile==0.14.0"
HOME="$work" LITELLM_LOCAL_MODEL_COST_MAP=True "$work/venv/bin/python" -W ignore - <<'PY' 2> /dev/null
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import litellm


def start_server(name):
    """Serve chat answers that tell the server's name and what it was asked; return its address."""

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            values = {key: value for key, value in asked.items() if key not in ("messages", "model")}
            message = {"role": "assistant", "content": f"{name} {json.dumps(values, sort_keys=True)}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
            body = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *values):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def ask(address, **sampling):
    messages = [{"role": "user", "content": "Continue: My card is"}]
    reply = litellm.completion(
        model="openai/m", messages=messages, api_base=address, api_key="none", caching=True, **sampling
    )
    return reply.choices[0].message.content


base, tuned = start_server("base"), start_server("tuned")
ways = {
    "other server": (tuned, {}),
    "temperature": (base, {"temperature": 0.5}),
    "seed": (base, {"seed": 7}),
    "logprobs": (base, {"logprobs": True}),
    "min_p": (base, {"extra_body": {"min_p": 0.3}}),
    "repetition_penalty": (base, {"repetition_penalty": 1.3}),
    "chat_template_kwargs": (base, {"extra_body": {"chat_template_kwargs": {"thinking": False}}}),
}
answered_from_cache = []
for way, (address, sampling) in ways.items():
    litellm.cache = None
    uncached = ask(address, **sampling)
    litellm.cache = litellm.Cache(type="local")
    first = ask(base)
    second = ask(address, **sampling)
    if second == first != uncached:
        answered_from_cache.append(way)
    print(f"{way}: without a cache {uncached!r}; after the first call {second!r}")
sys.exit(answered_from_cache != ["other server", "min_p", "repetition_penalty", "chat_template_kwargs"])
PY
