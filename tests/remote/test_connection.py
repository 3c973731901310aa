"""Requests that fail, wait, cost and are kept: what comes back is what an undisturbed server would
have answered."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.models.decoding import ANCESTRAL, GREEDY
from auditor.models.huggingface import HuggingFaceModel
from auditor.remote.answers import ServerAnswerStore, ServerUsage
from auditor.remote.connection import (
    PATIENCE,
    RetryPolicy,
    ServerConnection,
    ServerRequest,
    ServerTokenBudget,
    read_retry_after,
)
from auditor.remote.model import RemoteModel
from tests.remote.conftest import QUICK
from tests.remote.server import Server

Served = Callable[..., tuple[Server, str]]
Connect = Callable[..., ServerConnection]
PREFIXES = torch.arange(1, 41).view(10, 4)
NOISE = torch.from_numpy(
    np.stack([draw_secret_uniforms(4, 5, "wire", i) for i in range(len(PREFIXES))])
)

FAULTS: dict[str, Any] = {
    "429": (429, {}),
    "429 with a time to wait": (429, {"retry-after-ms": "3"}),
    "500": (500, {}),
    "503": (503, {}),
    "cut off": "cut",
    "wrong JSON": "json",
    "short log-probabilities": "short",
    "a sample twice": "twice",
    "slow": "slow",
}


def drawn(model: RemoteModel) -> Any:
    return model.completions(PREFIXES, 5, ANCESTRAL, NOISE)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_no_answer(
    served: Served, wire: Connect, local: HuggingFaceModel, name: str
) -> None:
    server, url = served()
    truth = drawn(RemoteModel(wire(url), "tiny", local.tokenizer))
    scored = local.token_log_probs(PREFIXES, truth.tokens[::4])
    patience = (
        RetryPolicy(answer=1.0, connect=5, tries=4, first_wait=0.001, longest_wait=0.002)
        if name == "slow"
        else QUICK
    )
    link = wire(url, run="faulty", patience=patience)
    os.remove(link.ledger.answers.path)
    link = wire(url, run="faulty", patience=patience)
    model = RemoteModel(link, "tiny", local.tokenizer)
    clean = link.ledger.server_usage_so_far
    assert clean.retries == 0
    server.faults.extend([None, FAULTS[name], FAULTS[name], None, FAULTS[name]])
    found = drawn(model)
    assert torch.equal(found.tokens, truth.tokens) and torch.equal(found.log_probs, truth.log_probs)
    server.faults.extend([FAULTS[name]])
    torch.testing.assert_close(
        model.token_log_probs(PREFIXES, truth.tokens[::4]), scored, atol=1e-4, rtol=0
    )
    if (
        name != "a sample twice"
    ):  # a text that is scored is one sample: that it came twice is no harm
        assert link.ledger.server_usage_so_far.retries == 4
    assert f"{link.ledger.server_usage_so_far.retries} attempts failed" in model.cost_sentences()[0]


def test_a_server_that_always_fails_is_given_up_in_a_sentence(
    served: Served, wire: Connect, local: HuggingFaceModel
) -> None:
    server, url = served()
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    server.faults.extend([(500, {})] * 100)
    with pytest.raises(AuditError, match=f"cannot ask {url}: it answers 500, 4 times"):
        drawn(model)
    server.faults.clear()
    server.faults.extend(["json"] * 100)
    with pytest.raises(AuditError, match="as it did in the handshake, but its answer is not JSON"):
        drawn(model)
    server.faults.clear()
    server.faults.extend(["short"] * 100)
    with pytest.raises(
        AuditError, match="to answer as it did in the handshake, but log-probabilities of"
    ):
        model.token_log_probs(PREFIXES, PREFIXES)
    server.faults.clear()
    server.faults.extend([(400, {})] * 100)
    with pytest.raises(
        AuditError, match="as it did in the handshake, but it answers 400"
    ) as refused:
        model.token_log_probs(PREFIXES, PREFIXES + 1)
    assert "no:" not in str(refused.value)  # what the server says may quote the prompt


def test_a_sample_that_the_server_fails_at_is_a_miss_that_is_counted(
    served: Served, wire: Connect, local: HuggingFaceModel
) -> None:
    server, url = served("forces")  # a request for each sample
    truth = drawn(RemoteModel(wire(url, run="first"), "tiny", local.tokenizer)).tokens
    seeds = (NOISE[:, :, 0, 0] * 2**31).long()
    server.broken_seeds = {int(seeds[2, 1])}
    # nothing is stored
    model = RemoteModel(wire(url.replace("127.0.0.1", "localhost")), "tiny", local.tokenizer)
    tokens = drawn(model).tokens
    place = 2 * 4 + 1
    assert set(tokens[place].tolist()) == {local.eos[0]}
    others = [i for i in range(len(truth)) if i != place]
    assert torch.equal(tokens[others], truth[others])
    assert "1 answered with an error (500) at every try" in " ".join(model.cost_sentences())
    assert "1 answered with an error" in model.doubts()[0].sentence  # more than one in a thousand
    assert model.has_withheld_answer_by_prefix([tuple(PREFIXES[i].tolist()) for i in (2, 3)]) == [
        True,
        False,
    ]
    server.broken_seeds = set()
    assert torch.equal(drawn(model).tokens, truth)  # a failure is not kept


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("all", "cannot ask .*: it answers 500, 4 times"),
        ("samples", "it answers 500 to 40 of 40 requests"),
    ],
)
def test_a_server_that_fails_at_all_samples_ends_the_run(
    served: Served, wire: Connect, local: HuggingFaceModel, broken: str, sentence: str
) -> None:
    server, url = served("forces")
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    seeds = set((NOISE[:, :, 0, 0] * 2**31).long().flatten().tolist())
    server.broken_seeds = seeds if broken == "samples" else {None}
    noise = NOISE if broken == "samples" else NOISE[:1]
    decoding = ANCESTRAL if broken == "samples" else GREEDY
    with pytest.raises(AuditError, match=sentence):
        model.completions(PREFIXES[: len(noise)], 5, decoding, noise)


def test_a_prompt_is_sent_as_it_is_and_not_converted_token_by_token(
    served: Served, wire: Connect
) -> None:
    """The client's conversion took three quarters of the time of 500 tokens."""

    class Prompt(list[int]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            self.reads += 1
            return super().__iter__()

    server, url = served()
    prompt = Prompt([5, 6, 7])
    wire(url)._send_request({"model": "tiny", "prompt": prompt, "max_tokens": 1, "n": 1})
    assert server.asked[-1]["prompt"] == [5, 6, 7] and prompt.reads == 1  # to write JSON


def test_a_connection_that_is_refused_is_given_up_in_seconds(wire: Connect) -> None:
    begun = time.monotonic()
    with pytest.raises(
        AuditError, match=r"cannot ask http://127\.0\.0\.1:9/v1: no connection comes about, 3 times"
    ):
        wire("http://127.0.0.1:9/v1", patience=PATIENCE).list_served_models()
    assert time.monotonic() - begun < 5


def test_a_server_that_restarts_or_is_overloaded_is_waited_for(
    served: Served, wire: Connect
) -> None:
    server, url = served()
    link = wire(url)
    server.faults.extend([(503, {}), (429, {}), (503, {})])  # from the first answer on
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    assert link.ask(ServerRequest(body, 9, lambda answer: {b"": len(answer["choices"])})) == {
        b"": 1
    }
    link.url, link._client = "http://127.0.0.1:9/v1", None  # the same server, between two starts
    with pytest.raises(AuditError, match="no connection comes about, 4 times"):
        link.ask(ServerRequest(body, 9, lambda answer: {}))


def test_an_account_without_money_is_not_waited_for(
    served: Served, wire: Connect, local: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    server, url = served()
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    monkeypatch.setattr(openai.APIStatusError, "code", "insufficient_quota", raising=False)
    monkeypatch.setattr(openai.APIError, "__init__", _without_code(openai.APIError.__init__))
    before = len(server.asked)
    server.faults.extend([(429, {})] * 9)
    with pytest.raises(AuditError, match="the account has no quota left"):
        model.token_log_probs(PREFIXES[:1], PREFIXES[:1])
    assert len(server.asked) == before + 1


def _without_code(init: Any) -> Any:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.code = "insufficient_quota"

    return made


# --- pace ---


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "-7"}, 0),
        ({"retry-after": "nan"}, 0),
        ({"retry-after": "inf"}, 3600),
        ({"retry-after": "soon"}, 0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:07 GMT"}, 7),
        ({"retry-after": "Wednesday, 21-Oct-26 07:28:07 GMT"}, 7),
        ({"retry-after": "Wed Oct 21 07:28:07 2026"}, 7),
        ({"retry-after-ms": "250", "retry-after": "Wed, 21 Oct 2026 07:28:07 GMT"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2026 07:27:00 GMT"}, 0),
        ({"retry-after": "Thu, 21 Oct 2027 07:28:00 GMT"}, 3600),
        ({"retry-after": f"Wed, 21 Oct {10**20} 07:28:00 GMT"}, 0),
    ],
)
def test_the_time_a_refusal_names_is_read(
    headers: dict[str, str], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC).timestamp()
    monkeypatch.setattr(time, "time", lambda: now)
    assert read_retry_after(headers) == seconds


def test_a_server_with_too_many_requests_is_given_more_attempts(
    served: Served, wire: Connect, local: HuggingFaceModel
) -> None:
    server, url = served()
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    truth = model.token_log_probs(PREFIXES[:1], PREFIXES[:1])
    server.faults.extend([(429, {})] * 19)
    found = model.token_log_probs(PREFIXES[:1], PREFIXES[1:2])
    assert found.shape == truth.shape and not server.faults
    server.faults.extend([(429, {})] * 20)
    with pytest.raises(AuditError, match="it answers 429, 20 times"):
        model.token_log_probs(PREFIXES[:1], PREFIXES[2:3])


def test_the_list_of_models_is_asked_for_again_if_the_server_is_busy(
    served: Served, wire: Connect
) -> None:
    server, url = served()
    server.busy_lists = 2
    assert wire(url).list_served_models() and not server.busy_lists


def test_a_named_time_is_waited_for(served: Served, wire: Connect, local: HuggingFaceModel) -> None:
    server, url = served()
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    server.faults.extend([(429, {"retry-after": "0.2"})])
    start = time.monotonic()
    model.token_log_probs(PREFIXES[:1], PREFIXES[:1])
    assert time.monotonic() - start >= 0.2


def test_requests_run_side_by_side(served: Served, wire: Connect, local: HuggingFaceModel) -> None:
    server, url = served()
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    model.token_log_probs(torch.arange(1, 91).view(45, 2), torch.arange(1, 46).view(45, 1))
    assert 1 < server.most_at_once <= 32


# --- what is paid for, and kept ---


def test_the_ledger_counts_what_the_server_counts(
    served: Served, wire: Connect, local: HuggingFaceModel
) -> None:
    _, url = served()
    link = wire(url)
    model = RemoteModel(link, "tiny", local.tokenizer)
    before = link.ledger.server_usage_so_far
    drawn(model)
    drawn(model)  # kept
    after = link.ledger.server_usage_so_far
    assert after == ServerUsage(
        before.requests + 10, 0, before.prompt_tokens + 40, before.answer_tokens + 10 * 4 * 5
    )
    other = wire(url, run="another")
    model.switch_token_budget(other.ledger)
    drawn(model)
    assert other.ledger.server_usage_so_far == ServerUsage()


def test_whatever_is_in_flight_a_budget_is_not_exceeded(
    served: Served, wire: Connect, local: HuggingFaceModel
) -> None:
    _, url = served()
    first = wire(url, run="first")
    RemoteModel(first, "tiny", local.tokenizer)
    introduced = first.ledger.server_usage_so_far.paid_token_count
    most = introduced + 150
    link = wire(url, most=most)
    model = RemoteModel(link, "tiny", local.tokenizer)
    with pytest.raises(AuditError, match=r"tokens are spent and the next may take"):
        drawn(model)
    assert introduced < link.ledger.server_usage_so_far.paid_token_count <= most


def test_another_model_under_the_same_name_is_asked_anew(
    served: Served, wire: Connect, local: HuggingFaceModel, make_tiny: Any
) -> None:
    server, url = served()
    link = wire(url)
    truth = drawn(RemoteModel(link, "tiny", local.tokenizer))
    other = make_tiny(local.vocab_size, seed=9)
    other.tokenizer = local.tokenizer
    server.model = other
    assert not torch.equal(drawn(RemoteModel(link, "tiny", local.tokenizer)).tokens, truth.tokens)


def _ask(addresses: Connection, store: str, tokenizer: Any) -> None:
    budget = ServerTokenBudget(ServerAnswerStore(Path(store)), "run", None)
    model = RemoteModel(ServerConnection(addresses.recv(), budget), "tiny", tokenizer)
    model.token_log_probs(PREFIXES, PREFIXES)


def test_a_process_that_is_killed_has_kept_what_it_was_answered(
    served: Served, wire: Connect, local: HuggingFaceModel, tmp_path: Path
) -> None:
    store, fork = str(tmp_path / "answers.sqlite"), multiprocessing.get_context("fork")
    addresses, address = fork.Pipe(duplex=False)
    # Started before the server, whose threads hold locks.
    killed = fork.Process(target=_ask, args=(addresses, store, local.tokenizer))
    killed.start()
    try:
        server, url = served()
        RemoteModel(wire(url), "tiny", local.tokenizer)
        handshake = len(server.asked)
        server.asked.clear()
        server.faults.extend([None] * (handshake + 6) + ["slow"] * 20)
        address.send(url)
        while len(server.asked) < handshake + 10 and killed.is_alive():
            time.sleep(0.01)
        assert killed.is_alive()
        deadline = time.monotonic() + 60
        while _kept(store) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        killed.kill()
        killed.join()
    server.faults.clear()
    server.gone.set()
    model = RemoteModel(wire(url), "tiny", local.tokenizer)
    before = len(server.asked)
    found = model.token_log_probs(PREFIXES, PREFIXES)
    assert len(server.asked) - before == 4
    torch.testing.assert_close(found, local.token_log_probs(PREFIXES, PREFIXES), atol=1e-4, rtol=0)


def _kept(store: str) -> int:
    with closing(sqlite3.connect(store)) as file:
        count: int = file.execute("select count(*) from answers").fetchone()[0]
    return count


@pytest.mark.parametrize("content", [b"not a database, but as long as one", b""])
def test_a_store_that_is_none_is_refused_and_an_empty_one_is_begun(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_bytes(content * 100)
    if content:
        with pytest.raises(AuditError, match="cannot be used as the store of answers"):
            ServerAnswerStore(path)
    else:
        assert ServerAnswerStore(path).find_stored_answer(b"x") is None
