"""A completions endpoint as vLLM's, over a small model, on the loopback; with the faults that real
ones have.

habits: what it always does wrong; faults: what goes wrong with the next requests, one each.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.remote.server_dialect import EXTENSIONS

HABITS = {
    "silent": "answers 200 and ignores echo and every kind of log-probabilities, as `transformers "
    "serve`",
    "echo": "knows echo, but no prompt_logprobs and no other field of vLLM's",
    "shifted": "echoes each log-probability one token too late, as llama-cpp-python without a BOS "
    "token",
    "short": "leaves out the last log-probability of a prompt",
    "filled": "gives the first token a log-probability too",
    "copies": "answers n samples with n copies of one",
    "seedless": "draws anew whatever the seed",
    "greedy": "does not sample",
    "tempered": "reports log-probabilities after temperature",
    "text": "takes no token ids",
    "permuted": "takes token ids for those of another tokenizer",
    "truncates not": "ignores top_p and top_k",
    "begins": "puts end of text before every text",
    "counts wrong": "has another tokenizer",
    "endless": "echoes no end of text, as llama-cpp-python no special token",
    "misled": "leaves out the likeliest of the tokens that it tells beside those of a prompt",
    "strict": "refuses fields that it does not know",
    "fails": "fails within (500) at token ids, as llama-cpp-python at all that it does not take",
    "boolean": "takes true or false as logprobs and says them by ids, takes no token ids, as "
    "mlx_lm.server 0.32.2",
    "forces": "takes ids and logit_bias, says log-probabilities before the bias by ids, one "
    "sample, as llama-server",
    "spaced": "writes the first space of an answer, which the tokenizer's decoding drops",
    "biased": "says log-probabilities after the bias",
    "trims": "writes an answer without its first space, as `transformers serve` with "
    "SentencePiece's",
    "configured": "samples only by generation_config and refuses fields of vLLM's, as "
    "`transformers serve` 5.23",
    "counts nothing": "does not say how many tokens there are",
    "unechoed": "leaves the first token of a prompt out of its echo, as llama-cpp-python the BOS "
    "token",
}
LIES = {
    "filters": "withholds what it writes of a card (finish_reason content_filter)",
    "blocks": "refuses prompts about a card (400, content_filter), as Azure",
    "refuses": "says that it cannot help with a card",
    "redacts": "writes [REDACTED] in place of a card's number",
    "cuts": "writes two tokens of a card, and says that they are all that was asked for",
    "stops": "ends a card at once, as if the model had",
    "swaps": "is another model after 40 requests",
    "takes turns": "is two models, of which now the one and now the other answers",
    "corrupts": "has wrong log-probabilities of half of the prompts of more than 60 tokens",
}
_NOT_VLLMS = {"forces", "silent", "echo", "unechoed", "boolean", "configured"}
_SAID = {"filters", "refuses", "redacts", "cuts", "stops"}
_OURS = ("prompt_logprobs", "top_k", *EXTENSIONS)


class Blocked(ValueError):
    """A prompt that a filter lets nobody read."""


# Every handshake asks the same of the same models, and there are hundreds.


@lru_cache(maxsize=1024)
def _completions(
    model: HuggingFaceModel,
    ids: tuple[int, ...],
    length: int,
    decoding: Decoding,
    seeds: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(samples, length) tokens and their log-probabilities, each sample by its seed."""
    noise = np.stack([np.random.default_rng(seed).random((length, 3)) for seed in seeds])[None]
    drawn = model.completions(torch.tensor([ids]), length, decoding, torch.from_numpy(noise))
    assert drawn.log_probs is not None
    return drawn.tokens, drawn.log_probs


@lru_cache(maxsize=1024)
def _distributions(model: HuggingFaceModel, ids: tuple[int, ...]) -> torch.Tensor:
    """(tokens, vocabulary) log-probabilities behind each."""
    return model.log_probs(torch.tensor([ids]), len(ids))[0]


class Server:
    """asked: the requests that came, in their order; limited: the most that were answered at once.

    lie: one of LIES, about prompts that begin with "Card"; other: the model that it is now and
    then.
    """

    def __init__(
        self,
        model: HuggingFaceModel,
        name: str = "tiny",
        key: str = "",
        habits: tuple[str, ...] = (),
    ) -> None:
        assert set(habits) <= set(HABITS)
        self.model, self.name, self.key, self.habits = model, name, key, habits
        self.lie, self.other, self._first, self._times = (
            "",
            model,
            model,
            Counter[tuple[int, ...]](),
        )
        self.faults: deque[Any] = deque()
        self.busy_lists = 0  # of the next requests for the list of models: refused with 429
        self.asked: list[dict[str, Any]] = []
        # tokens of which nothing is said when they are drawn, as parts of characters
        self.held_back: set[int] = set()
        # of samples that are answered 500; None: of requests without a seed
        self.broken_seeds: set[int | None] = set()
        self.told = 20  # likeliest tokens at most, as vLLM's --max-logprobs
        self.top_k = 0  # of its generation_config.json: what is taken where a request says nothing
        self.headers: dict[str, str] = {}  # of every answer
        self.at_once = self.most_at_once = 0
        self.gone = threading.Event()  # slow answers end when the server does
        self._lock, self._draws = threading.Lock(), 0

    # --- what it answers ---

    def models(self) -> dict[str, Any]:
        room: dict[str, Any] = {"max_model_len": self.model.max_positions}
        if "forces" in self.habits:
            room = {"meta": {"n_ctx": self.model.max_positions}}
        return {"object": "list", "data": [{"id": self.name, **room}]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self._ids(body["prompt"])
        if self.lie == "blocks" and self._text(ids).startswith("Card") and body["max_tokens"] > 1:
            raise Blocked("content_filter")
        with self._lock:  # as one batch at a time
            self._draws += 1
            self._times[tuple(ids)] += 1
            seen = bytes([*ids, self._times[tuple(ids)]])
            turn = hashlib.sha256(seen).digest()[0] % 2 == 1  # at random, and whoever asks beside
            changed = {"swaps": self._draws > 40, "takes turns": turn}.get(self.lie, False)
            self.model = self.other if changed else self._first if self.lie else self.model
            tokens, log_probs = self._drawn(ids, body)
            choices = [
                self._choice(i, ids, body, tokens[i], log_probs[i]) for i in range(len(tokens))
            ]
            written = sum(len(choice["_tokens"]) for choice in choices)
        for choice in choices:
            del choice["_tokens"]
        if self._text(ids).startswith("Card") and body["max_tokens"] > 1:
            written = (
                sum(self._lied(choice) for choice in choices) if self.lie in _SAID else written
            )
        counted = len(ids) + 3 * ("counts wrong" in self.habits)
        usage = {
            "prompt_tokens": counted,
            "completion_tokens": written,
            "total_tokens": counted + written,
        }
        answer = {"object": "text_completion", "model": self.name, "choices": choices}
        return answer if "counts nothing" in self.habits else {**answer, "usage": usage}

    def _lied(self, choice: dict[str, Any]) -> int:
        """Makes another answer of it, as a proxy does; returns its tokens."""
        text = choice["text"]
        text, choice["finish_reason"] = {
            "filters": ("", "content_filter"),
            "refuses": ("I\u2019m sorry, but I can\u2019t help with that.", "stop"),
            "redacts": (re.sub(r"\d+", "[REDACTED]", text), "length"),
            "cuts": (text[:2], "length"),
            "stops": ("", "stop"),
        }[self.lie]
        choice["text"], choice["logprobs"] = text, None
        choice.pop("token_ids", None)
        return len(text)

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            begins = [0] if "begins" in self.habits else []
            return [*begins, *self.model.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        if "fails" in self.habits:
            raise RuntimeError("prompt must be a string")
        if {"text", "silent", "boolean", "configured"} & set(self.habits):
            raise ValueError("prompt must be a string")
        if "permuted" in self.habits:
            return [(token + 7) % self.model.vocab_size for token in prompt]
        return [int(token) for token in prompt]

    def _drawn(
        self, ids: list[int], body: dict[str, Any]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Samples with their log-probabilities, each by the seed of the request and its index."""
        if {"strict", "configured"} & set(self.habits) and set(body) & set(_OURS):
            raise ValueError("unknown field")
        if "boolean" in self.habits and not isinstance(body.get("logprobs", False), bool):
            raise ValueError("logprobs must be of type bool")
        truncates = "truncates not" not in self.habits
        decoding = Decoding(
            body.get("temperature", 1.0),
            max(0, body.get("top_k", self.top_k)) if truncates else 0,
            body.get("top_p", 1.0) if truncates else 1.0,
        )
        if "configured" in self.habits:
            config = json.loads(body.get("generation_config", "{}"))
            decoding = replace(decoding, top_k=config.get("top_k", 0))
            decoding = decoding if config.get("do_sample") else Decoding(temperature=0)
        if "greedy" in self.habits:
            decoding = Decoding(temperature=0)
        count, seed = body.get("n", 1), body.get("seed")
        if seed in self.broken_seeds:
            raise RuntimeError("the answer has bytes that write no character")
        if seed is None or "seedless" in self.habits:
            seed = 10_000 + 100 * self._draws
        seeds = [seed if "copies" in self.habits else seed + i for i in range(count)]
        length = body["max_tokens"]
        if "forces" in self.habits and count > 1:
            raise ValueError("Value must be between 1 <= value <= 1")
        if "forces" in self.habits and "logit_bias" in body:
            assert body["max_tokens"] == 1 and body["temperature"] == 0 and "ignore_eos" not in body
            ((token, _),) = body["logit_bias"]
            return [[token]], [[float(self._next_log_probs(ids, body)[token])]]
        tokens, log_probs = _completions(self.model, tuple(ids), length, decoding, tuple(seeds))
        if "tempered" in self.habits and decoding.temperature not in (0, 1):
            log_probs = log_probs / decoding.temperature
        return tokens.tolist(), log_probs.tolist()

    def _choice(
        self,
        index: int,
        ids: list[int],
        body: dict[str, Any],
        tokens: list[int],
        log_probs: list[float],
    ) -> dict[str, Any]:
        vllms = not _NOT_VLLMS & set(self.habits)
        obeys = vllms or "forces" in self.habits
        ended = not (obeys and body.get("ignore_eos")) and 0 in tokens
        if ended:
            # llama-server lists the end of text
            tokens = tokens[: tokens.index(0) + ("forces" in self.habits)]
        log_probs = log_probs[: len(tokens)]
        echoed = body.get("echo") and "silent" not in self.habits
        text = self._text(
            [*ids, *tokens]
            if echoed
            else tokens[:-1]
            if ended and "forces" in self.habits
            else tokens
        )
        choice: dict[str, Any] = {"index": index, "text": text, "_tokens": tokens}
        choice["finish_reason"] = "stop" if ended else "length"
        if vllms and body.get("return_token_ids"):
            choice |= {"token_ids": tokens}
        if "spaced" in self.habits:
            choice["text"] = f" {choice['text']}"
        if "trims" in self.habits:
            choice["text"] = choice["text"].removeprefix(" ")
        if "forces" in self.habits and body.get("logprobs") and not self.held_back & set(tokens):
            choice["logprobs"] = {"content": self._listed(ids, tokens, body)}
        if "boolean" in self.habits and body.get("logprobs"):
            pairs = zip(tokens, log_probs, strict=True)
            choice["logprobs"] = {
                "content": [{"id": token, "logprob": value} for token, value in pairs]
            }
        if {"silent", "boolean", "configured", "forces"} & set(self.habits):
            return choice
        if body.get("logprobs") is not None:
            shown = [*ids, *tokens] if echoed else tokens
            values = [*self._prompt(ids)[0], *log_probs] if echoed else log_probs
            named = vllms and body.get("return_tokens_as_token_ids")
            if echoed and "unechoed" in self.habits:
                shown, values = shown[1:], [None, *values[2:]]
            if echoed and "endless" in self.habits:
                kept = [i for i, token in enumerate(shown) if token != 0 or i == 0]
                shown, values = [shown[i] for i in kept], [values[i] for i in kept]
            words = [f"token_id:{token}" if named else self._text([token]) for token in shown]
            choice["logprobs"] = {"tokens": words, "token_logprobs": values, "top_logprobs": None}
        if vllms and body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._beside(ids, body["prompt_logprobs"])
        return choice

    def _next_log_probs(self, ids: list[int], body: dict[str, Any]) -> torch.Tensor:
        log_probs = _distributions(self.model, tuple(ids))[-1]
        if "biased" in self.habits and "logit_bias" in body:
            ((token, bias),) = body["logit_bias"]
            log_probs = log_probs.index_add(
                0, torch.tensor([token]), torch.tensor([float(bias)])
            ).log_softmax(-1)
        return log_probs

    def _listed(
        self, ids: list[int], tokens: list[int], body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The drawn tokens with the likeliest ones, as many as are asked for, as
        llama-server lists them."""
        content = list[dict[str, Any]]()
        for place, token in enumerate(tokens):
            log_probs = self._next_log_probs([*ids, *tokens[:place]], body)
            top = log_probs.topk(min(body["logprobs"], len(log_probs)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            beside = [{"id": other, "logprob": value} for other, value in pairs]
            content.append(
                {"id": token, "logprob": float(log_probs[token]), "top_logprobs": beside}
            )
        return content

    def _beside(self, ids: list[int], likeliest: int) -> list[Any]:
        """At each place of a prompt its token and the likeliest, by their ids; None at the
        first."""
        if likeliest > self.told:
            raise ValueError("too many log-probabilities are asked for")
        distribution = _distributions(self.model, tuple(ids))
        found = list[Any]()
        for place, (token, value, rank) in enumerate(zip(ids, *self._prompt(ids), strict=False)):
            top = distribution[place - 1].topk(likeliest) if place else distribution[0].topk(0)
            if "misled" in self.habits:  # the likeliest is left out
                top = distribution[place - 1].topk(likeliest + 1) if place else top
                top = top.values[1:], top.indices[1:]
            pairs = enumerate(zip(*(column.tolist() for column in top), strict=True), 1)
            beside = {str(i): {"logprob": one, "rank": at} for at, (one, i) in pairs}
            found.append(
                None if value is None else {**beside, str(token): {"logprob": value, "rank": rank}}
            )
        return found

    def _prompt(self, ids: list[int]) -> tuple[list[Any], list[Any]]:
        """Log-probabilities and ranks of the tokens of a prompt; None for the first."""
        distribution = self.model.log_probs(torch.tensor([ids]), len(ids))[0, :-1]
        own = torch.tensor(ids[1:])
        values: list[Any] = [None, *distribution.gather(-1, own.unsqueeze(-1)).squeeze(-1).tolist()]
        ranks: list[Any] = [
            None,
            *((distribution >= distribution.gather(-1, own.unsqueeze(-1))).sum(-1)).tolist(),
        ]
        if self.lie == "corrupts" and len(ids) > 60 and zlib.crc32(bytes(ids)) % 2:
            values = [None, *[value - 3.0 for value in values[1:]]]
        if "shifted" in self.habits:
            values = [None, values[1], *values[1:-1]]
        if "short" in self.habits:
            values, ranks = values[:-1], ranks[:-1]
        if "filled" in self.habits:
            values[0], ranks[0] = -1.5, 3
        return values, ranks

    def _text(self, tokens: list[int]) -> str:
        decoded: str = self.model.tokenizer.decode(tokens, skip_special_tokens=False)
        return decoded


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # or a body that goes after its headers waits 40 ms for the client's word
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None: ...

        def do_GET(self) -> None:
            if server.busy_lists:
                server.busy_lists -= 1
                self.reply(429, {"error": {"message": "too many requests"}})
                return
            self.reply(200, server.models()) if self.known() else self.reply(
                401, {"error": {"message": self.said()}}
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.known():
                self.reply(401, {"error": {"message": self.said()}})
                return
            server.asked.append(body)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            try:
                self.answer(body, server.faults.popleft() if server.faults else None)
            finally:
                server.at_once -= 1

        def known(self) -> bool:
            return not server.key or self.headers.get("Authorization") == f"Bearer {server.key}"

        def said(self) -> str:
            return f"wrong key {self.headers.get('Authorization')}"  # as some quote it

        def answer(self, body: dict[str, Any], fault: Any) -> None:
            if isinstance(fault, tuple):  # a status and headers
                self.reply(fault[0], {"error": {"message": f"no: {body['prompt']}"}}, fault[1])
                return
            if fault == "slow":
                server.gone.wait(20)
            try:
                answer = server.complete(body)
            except (ValueError, RuntimeError) as error:
                code = "content_filter" if isinstance(error, Blocked) else None
                told = {"error": {"message": str(error), "code": code}}
                self.reply(400 if isinstance(error, ValueError) else 500, told)
                return
            if fault == "short":
                for choice in answer["choices"]:
                    for values in (
                        choice.get("logprobs", {}).get("token_logprobs"),
                        choice.get("prompt_logprobs"),
                    ):
                        del (values or [None])[-1]
            if fault == "twice":
                answer["choices"] = [answer["choices"][0]] * max(2, len(answer["choices"]))
            self.reply(200, answer, cut=fault == "cut", text="{" if fault == "json" else None)

        def reply(
            self,
            status: int,
            answer: Any,
            headers: Any = None,
            cut: bool = False,
            text: str | None = None,
        ) -> None:
            data = (json.dumps(answer) if text is None else text).encode()
            self.send_response(status)
            for name, value in {**server.headers, **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.wfile.flush()
            self.close_connection = cut

    return Handler


class Quiet(ThreadingHTTPServer):
    """Says nothing of a client that has gone."""

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Its address while it runs."""
    http = Quiet(("127.0.0.1", 0), handler(server))
    http.daemon_threads = True
    thread = threading.Thread(
        target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    finally:
        server.gone.set()
        http.shutdown()
        http.server_close()
        thread.join()
