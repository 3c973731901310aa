"""Send many requests to a completions endpoint, with pacing, retries, a budget and a store.

The official `openai` client handles HTTP; requests and answers are JSON objects. The API key comes
from the environment and never appears in messages. Messages do not quote the server's text, which
may contain the key or private data.
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
    read_reset_seconds,
    retry_after_seconds,
)

KEY = "OPENAI_API_KEY"

_AGAIN = (408, 409, 425, 429)  # and every 5xx: worth another try
_NOBODY = 3  # refused connections of a server that never answered
_REFUSES = 3  # answers of 500, which llama-cpp-python gives to an unknown field
_FILTERED = "content_filter"  # code of Azure's 400 if the prompt itself is withheld from the model
_TOO_MUCH = (429, 503, 529)  # signs of too many requests
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")  # 429 as well, and no wait helps


class MalformedAnswer(Exception):
    """Error for an answer that does not match its request; a retry may succeed."""


class RequestRefused(Exception):
    """Error for a request that the server permanently rejects."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answers {status}")
        self.status = status


@dataclass(eq=False)
class _RetryableFailure(Exception):
    """Error for a failed attempt to send a request; a retry may succeed.

    Attributes:
        wait: seconds that the server asks to wait.
        slower: whether requests came too fast.
        billed: whether the tokens may have been charged.
        status: HTTP status; 0 if there was no answer.
        unreachable: whether no connection was possible.
    """

    reason: str
    _: KW_ONLY
    wait: float = 0.0
    slower: bool = False
    billed: bool = False
    status: int = 0
    unreachable: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class ServerRequest:
    """A request to a completions server, and the function that parses its answer.

    Attributes:
        body: the JSON request.
        at_most: largest number of tokens in prompt and answer together.
        parse_answer: converts the JSON answer to values by key, or raises MalformedAnswer.
        stored: whether to store these values.
        on_error: values to return, but not to store, if every attempt gets status 500; if None, the
            run ends then.
    """

    body: Mapping[str, Any]
    at_most: int
    parse_answer: Callable[[Any], Mapping[bytes, Any]]
    stored: bool = True
    on_error: Mapping[bytes, Any] | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """Time limits for requests, and the number and delay of retries.

    A server that has never answered gets fewer attempts, within a few seconds.

    Attributes:
        answer: seconds to wait for an answer.
        connect: seconds to wait for a connection.
        tries: largest number of attempts.
        first_wait: scale of the random wait before the second attempt, in seconds. The scale
            doubles with each attempt.
        longest_wait: largest number of seconds between attempts.
    """

    answer: float = 600.0
    connect: float = 20.0
    tries: int = 8
    first_wait: float = 0.5
    longest_wait: float = 60.0


PATIENCE = RetryPolicy()


class ServerTokenBudget:
    """The token budget of one run.

    Tokens of unanswered requests count as spent. Raise AuditError before a request that could take
    the run beyond `most` tokens.
    """

    def __init__(self, answers: ServerAnswerStore, run: str, most: int | None) -> None:
        self.answers = answers
        self.run = run
        self.most = most
        self._reserved, self._lock = 0, threading.Lock()

    @property
    def server_usage_so_far(self) -> ServerUsage:
        return self.answers.read_run_usage(self.run)

    @contextmanager
    def reserve_tokens(self, tokens: int) -> Iterator[None]:
        """Reserve tokens for a request during the block. Raise AuditError if too few are left."""
        with (
            self._lock
        ):  # check and reserve in one step: two requests must not both take the last tokens
            n_paid = self.server_usage_so_far.paid_token_count
            if self.most is not None and n_paid + self._reserved + tokens > self.most:
                raise AuditError(
                    f"expected --max-tokens-total to pay for all requests, but {n_paid:,} of "
                    f"{self.most:,} tokens are spent and the next may take "
                    f"{tokens + self._reserved:,}: the answers so far are kept, and a run with "
                    "a larger budget pays for the rest"
                )
            self._reserved += tokens
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= tokens


@dataclass
class ServerConnection:
    """A connection to one completions server.

    `ledger` is the token budget of the run, `patience` sets time limits and retries, and `pace`
    limits the number of requests in flight. Raise AuditError if the server is unreachable, rejects
    the key, or fails repeatedly.
    """

    url: str
    ledger: ServerTokenBudget
    patience: RetryPolicy = field(default_factory=lambda: PATIENCE)
    pace: RequestPacing = field(default_factory=RequestPacing)
    _client: Any = None
    _answered: bool = False  # True after the first answer
    _stopped: threading.Event = field(default_factory=threading.Event)

    def list_served_models(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the server's description of each model, keyed by name.

        The result is empty if the server has no list. Such a server may still serve a model:
        `transformers serve` has no list unless it has a cache folder, and mlx_lm.server never has
        one.
        """

        def listed() -> Any:
            try:
                return self._ask_request(None, lambda answer: answer)
            except _RetryableFailure as error:
                if error.status >= 500 or isinstance(error.__cause__, ValueError):
                    raise RequestRefused(error.status) from error
                raise

        try:
            return {str(entry["id"]): dict(entry) for entry in self._retry_request(listed)["data"]}
        except (RequestRefused, KeyError, TypeError):
            return {}

    def get_only_model(self, address: str) -> str:
        """Return the name of the served model. Raise AuditError if there are several."""
        names = list(self.list_served_models())
        if len(names) != 1:
            listed = ", ".join(names[:3]) or "none"
            raise AuditError(
                f"expected {self.url} to serve one model, or {address}#NAME, got {listed}"
            )
        return names[0]

    def ask(self, question: ServerRequest) -> Mapping[bytes, Any]:
        """Send a request and return its parsed answer.

        Raise RequestRefused, AuditError, or, if every answer is malformed, MalformedAnswer.
        """
        if question.on_error is None:
            return self._retry_request(lambda: self._ask_stored_once(question))
        try:
            return self.ask_untested_request(question, self.patience.tries)
        except RequestRefused as error:
            if error.status != 500:
                raise
            return question.on_error

    def ask_untested_request(
        self, question: ServerRequest, tries: int = _REFUSES
    ) -> Mapping[bytes, Any]:
        """Send a request that the server may not support, and return its parsed answer.

        Raise RequestRefused if `tries` attempts get status 500, and otherwise the same errors as
        `ask`.
        """
        failures = 0

        def once() -> Mapping[bytes, Any]:
            nonlocal failures
            try:
                return self._ask_stored_once(question)
            except _RetryableFailure as error:
                failures += error.status == 500
                if failures == tries:
                    raise RequestRefused(error.status) from error
                raise

        return self._retry_request(once)

    def ask_all(self, questions: Sequence[ServerRequest]) -> list[Mapping[bytes, Any]]:
        """Send several requests at once and return their answers.

        If one fails, cancel the requests that have not been sent yet.
        """
        if len(questions) < 2:
            return [self.ask(question) for question in questions]
        self._stopped.clear()
        pool = ThreadPoolExecutor(min(self.pace.most, len(questions)), "asking")
        try:
            return list(pool.map(self.ask, questions))
        except BaseException:
            self._stopped.set()  # threads that wait between two tries give up
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self._stopped.clear()

    # --- one attempt ---

    def _ask_stored_once(self, question: ServerRequest) -> Mapping[bytes, Any]:
        """Send a request once, charge its tokens, and store its answer."""
        ledger = self.ledger
        with ledger.reserve_tokens(question.at_most):
            try:
                answer, values = self._ask_request(
                    question.body, lambda a: (a, question.parse_answer(a))
                )
            except _RetryableFailure as error:
                ledger.answers.store_charged_answers(
                    ledger.run,
                    ServerUsage(retries=1, prompt_tokens=question.at_most * error.billed),
                    {},
                )
                raise
            except RequestRefused:
                ledger.answers.store_charged_answers(ledger.run, ServerUsage(requests=1), {})
                raise
            # Charge before the reservation ends: otherwise another request could find these tokens
            # free.
            usage = _read_answer_usage(answer, question.at_most)
            ledger.answers.store_charged_answers(
                ledger.run, usage, values if question.stored else {}
            )
        return dict(values)

    def _ask_request(self, body: Mapping[str, Any] | None, parse: Callable[[Any], Any]) -> Any:
        """Send one request, parse its JSON answer with `parse`, and return the result.

        If `body` is None, request the list of models.
        """
        import openai

        with self.pace.wait_request_slot() as of_round:
            try:
                answer = self._send_request(body)
                self._answered = True
                self.pace.pause_all_requests(read_reset_seconds(answer.headers))
                try:
                    value = parse(json.loads(answer.text))
                except (ValueError, MalformedAnswer) as error:
                    reason = "its answer is not JSON"
                    if isinstance(error, MalformedAnswer):
                        reason = str(error)
                    raise _RetryableFailure(reason, billed=True) from error
                self.pace.raise_request_limit()
                return value
            except openai.APIStatusError as error:
                self._answered = True
                failed = self._make_status_error(error)
                if body is not None and getattr(error, "code", None) == _FILTERED:
                    with suppress(MalformedAnswer):  # no log-probabilities came
                        return parse(_make_withheld_answer(int(body["n"])))
            except openai.APIConnectionError as error:
                failed = self._make_retryable_error(error)
            if isinstance(failed, _RetryableFailure):
                self.pace.pause_all_requests(failed.wait)
                if failed.slower:
                    self.pace.halve_request_limit(of_round)
            raise failed

    def _make_retryable_error(self, error: Any) -> _RetryableFailure:
        import openai

        # By name, since the client bundles its HTTP library: no connection was made and nothing was
        # sent.
        if type(error.__cause__).__name__.startswith("Connect"):
            return _RetryableFailure(
                "no connection comes about",
                slower=isinstance(error, openai.APITimeoutError),
                unreachable=True,
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
            # local servers need no key, but the client does
            key = os.environ.get(KEY) or "none"
            # no retries by the client, which would escape pacing, counting and paying
            client = openai.OpenAI(api_key=key, base_url=self.url, max_retries=0, timeout=timeout)
            # the garbage collector would leave its connections open
            weakref.finalize(self, client.close)
            self._client = client
        if body is None:
            return self._client.models.with_raw_response.list()
        # create() checks OpenAI's fields; extra_body is sent unchanged, whatever the server takes
        content = "prompt"
        endpoint = self._client.completions
        if "messages" in body:
            content = "messages"
            endpoint = self._client.chat.completions
        first = {name: body[name] for name in ("model", content)}
        return endpoint.with_raw_response.create(**first, extra_body=dict(body))

    def _make_status_error(self, error: Any) -> Exception:
        status = error.status_code
        if status in (401, 403):
            key = f"none: set {KEY}"
            if os.environ.get(KEY):
                key = f"the one in {KEY}"
            return AuditError(
                f"expected a key that {self.url} accepts, got {key} (it answers {status})"
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

    def _retry_request(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it succeeds, within the limits of `patience`."""
        import tenacity

        patience = self.patience
        jittered = tenacity.wait_random_exponential(patience.first_wait, patience.longest_wait)

        def wait(
            state: Any,
        ) -> float:  # all requests wait in `pace` for a time named by the server
            if is_unreachable(state):
                return patience.first_wait
            if state.outcome.exception().wait:
                return 0.0
            return float(jittered(state))

        def is_unreachable(state: Any) -> bool:
            return state.outcome.exception().unreachable and not self._answered

        def is_exhausted(state: Any) -> bool:
            tries = patience.tries
            if is_unreachable(state):
                tries = min(_NOBODY, tries)
            return bool(state.attempt_number >= tries)

        given_up: Any = is_exhausted  # tenacity's type names a class although any callable works
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


def _make_withheld_answer(count: int) -> Mapping[str, Any]:
    """Return the answer to a filtered prompt: `count` empty samples, at no cost."""
    choices = []
    for i in range(count):
        choices.append({"index": i, "text": "", "finish_reason": _FILTERED})
    return {"choices": choices, "usage": {"prompt_tokens": 0, "completion_tokens": 0}}


def _read_answer_usage(answer: Any, at_most: int) -> ServerUsage:
    """Return the token counts that the server reports.

    If it reports none, `at_most` is used.
    """
    n_read, n_written = (
        read_token_count(answer, name) for name in ("prompt_tokens", "completion_tokens")
    )
    if n_read is None or n_read < 0:
        return ServerUsage(1, prompt_tokens=at_most)
    return ServerUsage(1, prompt_tokens=n_read, answer_tokens=max(0, n_written or 0))


def read_token_count(answer: Any, name: str) -> int | None:
    """Return the count `prompt_tokens` or `completion_tokens` of an answer, or None."""
    count = None
    if isinstance(answer, Mapping) and isinstance(answer.get("usage"), Mapping):
        count = answer["usage"].get(name)
    return count if isinstance(count, int) else None
