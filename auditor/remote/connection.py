"""Send many requests to a completions endpoint, with retries, a budget and a store.

The official `openai` client handles HTTP; requests and answers are JSON objects. The API key comes
from the environment and never appears in messages. Messages do not quote the server's text, which
may contain the key or private data.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from typing import Any

from auditor.core.errors import AuditError
from auditor.remote.answers import ServerAnswerStore, ServerUsage

KEY = "OPENAI_API_KEY"

_AGAIN = (408, 409, 425, 429)  # and every 5xx: worth another try
_NOBODY = 3  # refused connections of a server that never answered
_REFUSES = 3  # answers of 500, which llama-cpp-python gives to an unknown field
_FILTERED = "content_filter"  # code of Azure's 400 if the prompt itself is withheld from the model
_TOO_MUCH = (429, 503, 529)  # signs of too many requests
_PATIENCE_IF_BUSY = 5  # so many times as many attempts at a server with too many requests
_AT_ONCE = 32  # requests in flight
_LONGEST_PAUSE = 3600.0  # seconds to wait because a server asks for it
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")  # 429 as well, and no wait helps


class _RetryableFailure(Exception):
    """Error for a failed attempt to send a request; a retry may succeed.

    Attributes:
        status: HTTP status; 200 if there was no refusal, so the tokens may have been charged; 0 if
            no connection was possible.
        wait: seconds that the server asks to wait.
    """

    def __init__(self, reason: str, status: int = 200, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.wait = wait


class MalformedAnswer(_RetryableFailure):
    """Error for an answer that does not match its request; a retry may succeed."""


class RequestRefused(Exception):
    """Error for a request that the server permanently rejects."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answers {status}")
        self.status = status


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

    `ledger` is the token budget of the run, and `patience` sets time limits and retries. Raise
    AuditError if the server is unreachable, rejects the key, or fails repeatedly.
    """

    url: str
    ledger: ServerTokenBudget
    patience: RetryPolicy = PATIENCE
    _client: Any = None
    _answered: bool = False  # True after the first answer
    _stopped: threading.Event = field(default_factory=threading.Event)

    def list_served_models(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the server's description of each model, keyed by name.

        The result is empty if the server has no list. Such a server may still serve a model:
        `transformers serve` has no list unless it has a cache folder, and mlx_lm.server never has
        one.
        """
        try:
            answer = self._retry_request(
                lambda: self._ask_request(None, lambda answer: answer), (200, *range(500, 600))
            )
            return {str(entry["id"]): dict(entry) for entry in answer["data"]}
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
        try:
            if question.on_error is None:
                return self._retry_request(lambda: self._ask_stored_once(question))
            return self.ask_untested_request(question, self.patience.tries)
        except RequestRefused as error:
            if question.on_error is None or error.status != 500:
                raise
            return question.on_error

    def ask_untested_request(
        self, question: ServerRequest, tries: int = _REFUSES
    ) -> Mapping[bytes, Any]:
        """Send a request that the server may not support, and return its parsed answer.

        Raise RequestRefused if the server still answers 500 after `tries` attempts, and otherwise
        the same errors as `ask`.
        """
        return self._retry_request(lambda: self._ask_stored_once(question), (500,), tries)

    def ask_all(self, questions: Sequence[ServerRequest]) -> list[Mapping[bytes, Any]]:
        """Send several requests at once and return their answers.

        If one fails, cancel the requests that have not been sent yet.
        """
        if len(questions) < 2:
            return [self.ask(question) for question in questions]
        self._stopped.clear()
        pool = ThreadPoolExecutor(_AT_ONCE, "asking")
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
                n_billed = question.at_most * (error.status == 200)
                ledger.answers.store_charged_answers(
                    ledger.run, ServerUsage(retries=1, prompt_tokens=n_billed), {}
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

        try:
            answer = self._send_request(body)
        except openai.APIStatusError as error:
            self._answered = True
            if body is not None and getattr(error, "code", None) == _FILTERED:
                with suppress(MalformedAnswer):  # no log-probabilities came
                    return parse(_make_withheld_answer(int(body["n"])))
            raise self._make_status_error(error) from error
        except openai.APIConnectionError as error:
            # By name, since the client bundles its HTTP library: no connection was made and nothing
            # was sent.
            if type(error.__cause__).__name__.startswith("Connect"):
                raise _RetryableFailure("no connection comes about", 0) from error
            reason = "no whole answer comes back"
            if isinstance(error, openai.APITimeoutError):
                reason = f"no answer in {self.patience.answer:g} s"
            raise _RetryableFailure(reason) from error
        self._answered = True
        try:
            content = json.loads(answer.text)
        except ValueError:
            raise MalformedAnswer("its answer is not JSON") from None
        return parse(content)

    def _send_request(self, body: Mapping[str, Any] | None) -> Any:
        import openai

        if self._client is None:
            timeout = openai.Timeout(self.patience.answer, connect=self.patience.connect)
            # local servers need no key, but the client does
            key = os.environ.get(KEY) or "none"
            # no retries by the client, which would escape counting and paying
            client = openai.OpenAI(api_key=key, base_url=self.url, max_retries=0, timeout=timeout)
            # the garbage collector would leave its connections open
            weakref.finalize(self, client.close)
            self._client = client
        if body is None:
            return self._client.models.with_raw_response.list()
        # `extra_body` is sent unchanged, in place of the arguments of `create`. These would be
        # converted token by token, which takes most of the time of a long prompt.
        unsent: dict[str, Any] = {"prompt": ""}
        endpoint = self._client.completions
        if "messages" in body:
            unsent = {"messages": []}
            endpoint = self._client.chat.completions
        return endpoint.with_raw_response.create(
            model=body["model"], **unsent, extra_body=dict(body)
        )

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
            wait = read_retry_after(error.response.headers)
            return _RetryableFailure(f"it answers {status}", status, wait)
        return RequestRefused(status)

    # --- many attempts ---

    def _retry_request(
        self, attempt: Callable[[], Any], refusals: Collection[int] = (), n_refusals: int = 1
    ) -> Any:
        """Call `attempt` until it succeeds, within the limits of `patience`.

        Raise RequestRefused if attempt number `n_refusals` fails with a status in `refusals`.
        """
        import tenacity

        patience = self.patience
        jittered = tenacity.wait_random_exponential(patience.first_wait, patience.longest_wait)

        def wait(state: Any) -> float:
            return float(state.outcome.exception().wait + jittered(state))

        def is_exhausted(state: Any) -> bool:
            status = state.outcome.exception().status
            tries = patience.tries
            if status in refusals:
                tries = n_refusals
            elif status in _TOO_MUCH:
                tries *= _PATIENCE_IF_BUSY
            elif not status and not self._answered:
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
            if error.status in refusals:
                raise RequestRefused(error.status) from error
            if isinstance(error, MalformedAnswer):
                raise
            raise AuditError(
                f"cannot ask {self.url}: {error}, {trying.statistics['attempt_number']} times"
            ) from None


def read_retry_after(headers: Mapping[str, str]) -> float:
    """Return the number of seconds that a refusal asks to wait; 0 if it names no time.

    `retry-after` is a number of seconds, or a date as HTTP writes it.
    """
    seconds = 0.0
    with suppress(ValueError, OverflowError):  # a day or a year that no calendar has
        if date := parsedate_tz(headers.get("retry-after")):
            seconds = mktime_tz(date) - time.time()
    for name, unit in (("retry-after", 1.0), ("retry-after-ms", 0.001)):
        with suppress(ValueError):
            seconds = unit * float(headers.get(name, ""))
    return max(0.0, min(seconds, _LONGEST_PAUSE))


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
    n_read = read_token_count(answer, "prompt_tokens")
    n_written = read_token_count(answer, "completion_tokens")
    if n_read is None or n_read < 0:
        return ServerUsage(1, prompt_tokens=at_most)
    return ServerUsage(1, prompt_tokens=n_read, answer_tokens=max(0, n_written or 0))


def read_token_count(answer: Any, name: str) -> int | None:
    """Return the count `prompt_tokens` or `completion_tokens` of an answer, or None."""
    count = None
    if isinstance(answer, Mapping) and isinstance(answer.get("usage"), Mapping):
        count = answer["usage"].get(name)
    return count if isinstance(count, int) else None
