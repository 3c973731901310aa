"""Asks a completions endpoint, many questions at once: paced, tried again, paid for out of a
budget, kept.

The official `openai` client speaks HTTP; what it is sent and what comes back are JSON objects here.
Knows no tokens, no models and no attacks. The key comes from the environment and is in no message:
what a server says is not quoted, since it may quote the key or private text.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from auditor.core.errors import AuditError
from auditor.remote.answers import ServerAnswerStore, ServerUsage
from auditor.remote.request_pacing import (
    RequestPacing,
    rate_limit_reset_seconds,
    retry_after_seconds,
)

KEY = "OPENAI_API_KEY"

_AGAIN = (408, 409, 425, 429)  # and every 5xx: worth another try
_NOBODY = 3  # refused connections, of a server that never answered
_REFUSES = 3  # of 500, which llama-cpp-python answers to a field that it does not take
_FILTERED = "content_filter"  # 400 of Azure's, where the prompt itself is withheld from the model
_TOO_MUCH = (429, 503, 529)  # signs of too many requests
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")  # 429 as well, and no wait helps


class MalformedAnswer(Exception):
    """An answer that is not what was asked for: worth another try."""


class RequestRefused(Exception):
    """The server does not take this request, whoever sends it again."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answers {status}")
        self.status = status


@dataclass(eq=False)
class _RetryableFailure(Exception):
    """This attempt failed, the next may not."""

    why: str
    _: KW_ONLY
    wait: float = 0.0  # seconds that the server asks for
    slower: bool = False  # whether requests came too fast
    billed: bool = False  # whether the tokens may have been paid for all the same
    status: int = 0  # of HTTP, 0 where no answer came
    nobody: bool = False  # whether no connection came about

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True)
class ServerRequest:
    """A request, and what reads its answer. at_most: tokens that it may cost, prompt and answer.

    read: turns the JSON answer into values by key, or raises MalformedAnswer. stored: whether these
    values are kept.
    on_error: the values if the server answers 500 at every try, which are not kept; None: that ends
    the run.
    """

    body: Mapping[str, Any]
    at_most: int
    read: Callable[[Any], Mapping[bytes, Any]]
    stored: bool = True
    on_error: Mapping[bytes, Any] | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait for one answer, how often to try, and between tries at first, in seconds.

    A server that never answered is no server that restarts: it is tried a few times, in a few
    seconds.
    """

    answer: float = 600.0
    connect: float = 20.0
    tries: int = 8
    first_wait: float = 0.5
    longest_wait: float = 60.0


PATIENCE = RetryPolicy()


class ServerTokenBudget:
    """What one run spends. Raises AuditError before `most` tokens would be exceeded, whatever is in
    flight."""

    def __init__(self, answers: ServerAnswerStore, run: str, most: int | None) -> None:
        self.answers, self.run, self.most = answers, run, most
        self._reserved, self._lock = 0, threading.Lock()

    @property
    def server_usage_so_far(self) -> ServerUsage:
        return self.answers.usage_of_run(self.run)

    @contextmanager
    def reserve_tokens(self, tokens: int) -> Iterator[None]:
        with (
            self._lock
        ):  # look and reserve in one step: two requests may not both take the last tokens
            spent = self.server_usage_so_far.paid_token_count
            if self.most is not None and spent + self._reserved + tokens > self.most:
                raise AuditError(
                    f"expected --max-tokens-total to pay for all requests, but {spent:,} of "
                    f"{self.most:,} tokens are spent and the next may take "
                    f"{tokens + self._reserved:,}: what was answered is kept, and a run with a "
                    "larger budget pays for the rest"
                )
            self._reserved += tokens
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= tokens


@dataclass
class ServerConnection:
    """One server. Raises AuditError where it cannot be reached, takes no key, or fails again and
    again."""

    url: str
    ledger: ServerTokenBudget
    patience: RetryPolicy = field(default_factory=lambda: PATIENCE)
    pace: RequestPacing = field(default_factory=RequestPacing)
    _client: Any = None
    _answered: bool = False  # whether anybody ever did
    _stopped: threading.Event = field(default_factory=threading.Event)

    def list_served_models(self) -> Mapping[str, Mapping[str, Any]]:
        """What the server says of each model that it serves, by name; empty where it does not say.

        One that cannot list them (`transformers serve` fails without a cache folder, mlx_lm.server
        answers nothing) may serve one all the same.
        """

        def listed() -> Any:
            try:
                return self._answer_of_one_request(None, lambda answer: answer)
            except _RetryableFailure as error:
                if error.status >= 500 or isinstance(error.__cause__, ValueError):
                    raise RequestRefused(error.status) from error
                raise

        try:
            return {str(one["id"]): dict(one) for one in self._result_with_retries(listed)["data"]}
        except (RequestRefused, KeyError, TypeError):
            return {}

    def ask(self, question: ServerRequest) -> Mapping[bytes, Any]:
        """What is read of the answer. Raises RequestRefused, MalformedAnswer (each time anew) and
        AuditError."""
        if question.on_error is None:
            return self._result_with_retries(lambda: self._ask_once_and_store(question))
        try:
            return self.ask_untested_request(question, self.patience.tries)
        except RequestRefused as error:
            if error.status != 500:
                raise
            return question.on_error

    def ask_untested_request(
        self, question: ServerRequest, tries: int = _REFUSES
    ) -> Mapping[bytes, Any]:
        """As `ask`, of what a server may not know: one that answers 500 at so many tries refuses
        it."""
        failures = 0

        def once() -> Mapping[bytes, Any]:
            nonlocal failures
            try:
                return self._ask_once_and_store(question)
            except _RetryableFailure as error:
                failures += error.status == 500
                if failures == tries:
                    raise RequestRefused(error.status) from error
                raise

        return self._result_with_retries(once)

    def ask_all(self, questions: Sequence[ServerRequest]) -> list[Mapping[bytes, Any]]:
        """As `ask`, several at once. The first failure ends all that have not begun; what was
        answered is kept."""
        if len(questions) < 2:
            return [self.ask(question) for question in questions]
        self._stopped.clear()
        pool = ThreadPoolExecutor(min(self.pace.most, len(questions)), "asking")
        try:
            return list(pool.map(self.ask, questions))
        except BaseException:
            self._stopped.set()  # whoever waits between two tries gives up
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self._stopped.clear()

    # --- one attempt ---

    def _ask_once_and_store(self, question: ServerRequest) -> Mapping[bytes, Any]:
        ledger = self.ledger
        with ledger.reserve_tokens(question.at_most):
            try:
                answer, kept = self._answer_of_one_request(
                    question.body, lambda a: (a, question.read(a))
                )
            except _RetryableFailure as error:
                read = question.at_most if error.billed else 0
                ledger.answers.store_answers_and_charge(
                    ledger.run, ServerUsage(again=1, read=read), {}
                )
                raise
            except RequestRefused:
                ledger.answers.store_answers_and_charge(ledger.run, ServerUsage(requests=1), {})
                raise
            # Charged before the reservation ends: in between, another request would find these
            # tokens free.
            spent = _server_usage_of_answer(answer, question.at_most)
            ledger.answers.store_answers_and_charge(
                ledger.run, spent, kept if question.stored else {}
            )
        return dict(kept)

    def _answer_of_one_request(
        self, body: Mapping[str, Any] | None, read: Callable[[Any], Any]
    ) -> Any:
        """What `read` makes of the JSON that answers one request, None: for the list of models."""
        import openai

        with self.pace.wait_for_request_slot() as of_round:
            try:
                answer = self._send_request(body)
                self._answered = True
                self.pace.pause_all_requests(rate_limit_reset_seconds(answer.headers))
                try:
                    found = read(json.loads(answer.text))
                except (ValueError, MalformedAnswer) as error:
                    why = (
                        str(error)
                        if isinstance(error, MalformedAnswer)
                        else "its answer is not JSON"
                    )
                    raise _RetryableFailure(why, billed=True) from error
                self.pace.raise_in_flight_limit()
                return found
            except openai.APIStatusError as error:
                self._answered = True
                failed = self._error_of_status(error)
                if body is not None and getattr(error, "code", None) == _FILTERED:
                    with suppress(MalformedAnswer):  # no log-probabilities came
                        return read(_withheld_answer(int(body["n"])))
            except openai.APIConnectionError as error:
                failed = self._retryable_connection_error(error)
            if isinstance(failed, _RetryableFailure):
                self.pace.pause_all_requests(failed.wait)
                if failed.slower:
                    self.pace.halve_in_flight_limit(of_round)
            raise failed

    def _retryable_connection_error(self, error: Any) -> _RetryableFailure:
        import openai

        # By name, as the client brings an HTTP library of its own: nothing was sent, no connection
        # came about.
        if type(error.__cause__).__name__.startswith("Connect"):
            return _RetryableFailure(
                "no connection comes about",
                slower=isinstance(error, openai.APITimeoutError),
                nobody=True,
            )
        if isinstance(error, openai.APITimeoutError):
            return _RetryableFailure(
                f"no answer in {self.patience.answer:g} s", slower=True, billed=True
            )
        return _RetryableFailure("no whole answer comes back", billed=True)

    def _send_request(self, body: Mapping[str, Any] | None) -> Any:
        import openai

        if self._client is None:
            timeout = openai.Timeout(self.patience.answer, connect=self.patience.connect)
            # servers of one's own ask for none, and the client for some
            key = os.environ.get(KEY) or "none"
            # no retries of its own, which nobody would pace, count or pay for
            client = openai.OpenAI(api_key=key, base_url=self.url, max_retries=0, timeout=timeout)
            # left to the garbage collector, its connections stay open
            weakref.finalize(self, client.close)
            self._client = client
        if body is None:
            return self._client.models.with_raw_response.list()
        # create() checks the fields that OpenAI has; extra_body goes out as it is, whatever the
        # server takes
        first = {name: body[name] for name in ("model", "prompt")}
        return self._client.completions.with_raw_response.create(**first, extra_body=dict(body))

    def _error_of_status(self, error: Any) -> Exception:
        status = error.status_code
        if status in (401, 403):
            given = f"the one in {KEY}" if os.environ.get(KEY) else f"none: set {KEY}"
            return AuditError(
                f"expected a key that {self.url} takes, got {given} (it answers {status})"
            )
        if getattr(error, "code", None) in _NO_MONEY:
            return AuditError(f"{self.url} answers {status}: the account has no quota left")
        if status in _AGAIN or status >= 500:
            wait = retry_after_seconds(error.response.headers)
            return _RetryableFailure(
                f"it answers {status}", wait=wait, slower=status in _TOO_MUCH, status=status
            )
        return RequestRefused(status)

    # --- many attempts ---

    def _result_with_retries(self, attempt: Callable[[], Any]) -> Any:
        import tenacity

        patience = self.patience
        jittered = tenacity.wait_random_exponential(patience.first_wait, patience.longest_wait)

        def wait(
            state: Any,
        ) -> float:  # a time that the server named is waited for in `pace`, by all
            if nobody(state):
                return patience.first_wait
            return 0.0 if state.outcome.exception().wait else float(jittered(state))

        def nobody(state: Any) -> bool:
            return state.outcome.exception().nobody and not self._answered

        def in_vain(state: Any) -> bool:
            tries = min(_NOBODY, patience.tries) if nobody(state) else patience.tries
            return bool(state.attempt_number >= tries)

        given_up: Any = in_vain  # tenacity names a class where it takes any callable
        trying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_RetryableFailure),
            stop=tenacity.stop_any(given_up, tenacity.stop_when_event_set(self._stopped)),
            wait=wait,
            sleep=tenacity.sleep_using_event(self._stopped),
            reraise=True,
        )
        try:
            return trying(attempt)
        except _RetryableFailure as error:
            if isinstance(error.__cause__, MalformedAnswer):
                raise error.__cause__ from None
            raise AuditError(
                f"cannot ask {self.url}: {error}, {trying.statistics['attempt_number']} times"
            ) from None


def _withheld_answer(count: int) -> Mapping[str, Any]:
    """The answer that a filter of prompts stands for: so many samples of nothing, for which nothing
    was paid."""
    choices = [{"index": i, "text": "", "finish_reason": _FILTERED} for i in range(count)]
    return {"choices": choices, "usage": {"prompt_tokens": 0, "completion_tokens": 0}}


def _server_usage_of_answer(answer: Any, at_most: int) -> ServerUsage:
    """As the server counts; all that it may have been where it does not."""
    read, written = (
        tokens_counted_by_server(answer, name) for name in ("prompt_tokens", "completion_tokens")
    )
    if read is None or read < 0:
        return ServerUsage(1, read=at_most)
    return ServerUsage(1, read=read, written=max(0, written or 0))


def tokens_counted_by_server(answer: Any, name: str) -> int | None:
    """`prompt_tokens` or `completion_tokens` of all samples together; None where nothing says
    it."""
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) else None
