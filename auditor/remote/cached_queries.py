"""Request samples and log-probabilities from one model of a server, sending each request once.

The model must not change in the meantime. The store (`answers.py`) keeps every answer under the
seed and index of its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.decoding import GREEDY, Decoding
from auditor.remote import drift_watch, withheld_answers
from auditor.remote.answers import digest_model_request
from auditor.remote.connection import (
    MalformedAnswer,
    RequestRefused,
    ServerConnection,
    ServerRequest,
    ServerTokenBudget,
)
from auditor.remote.drift_watch import ServerChanged, ServerWatch, WatchedRequest
from auditor.remote.handshake import Handshake
from auditor.remote.server_dialect import WrittenAnswer
from auditor.remote.token_text import TokenTextCodec

_MOST_ERRORS = 8  # failed requests allowed before their share of all requests counts
_FORM = 3  # version of the stored form: older forms lack the answer's kind


class CachedServerQueries:
    """Queries to one model of a server; each request is sent only once.

    `name` is the model's name in messages. Raise AuditError if two answers to the same request
    differ too much.
    """

    def __init__(
        self, wire: ServerConnection, handshake: Handshake, spelling: TokenTextCodec, name: str
    ) -> None:
        self.wire = wire
        self.dialect = handshake.dialect
        self.spelling = spelling
        self.name = name
        self._runs = [wire.ledger.run]
        # requests for samples, and those that ended in an error
        self._n_requests = 0
        self._n_errors = 0
        # Identifies this server in the keys of stored answers; renewed after the server has
        # changed.
        self.identity = digest_model_request(
            handshake.answer, wire.ledger.answers.invalidation_count
        ).hex()
        contexts = [(*self.dialect.adds, *spelling.tokens(text)) for text in drift_watch.TEXTS]
        if self.dialect.scored not in (None, "forced"):
            scored = self._rescore_texts
        else:
            scored = None
        self.watch = ServerWatch(self._redraw_greedy_texts, scored, contexts)
        self._check_server_unchanged(self.watch.ask_initial_sentinels)

    def switch_paying_run(self, ledger: ServerTokenBudget) -> None:
        """Charge later requests to the run that owns this token budget."""
        self.wire.ledger = ledger
        self._runs.append(ledger.run)

    # --- samples ---

    def draw_samples(
        self,
        contexts: Sequence[Tokens],
        length: int,
        decoding: Decoding,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[WrittenAnswer]]:
        """Return the samples of each context, requesting only those that are not stored.

        `seeds` holds, for each context, one seed per sample.
        """
        keys = list[list[bytes]]()
        for context, of_context in zip(contexts, seeds, strict=True):
            body = self.dialect.build_sampling_body(
                self.spelling.encode_prompt(context), length, decoding
            )
            # Keys are those of single requests, because a sample does not depend on the number per
            # request.
            keys.append(list(map(partial(self._build_store_key, body), of_context, count())))
        entries = self._find_stored_answers(chain.from_iterable(keys))
        questions = list[ServerRequest]()
        for context, sample_keys, of_context in zip(contexts, keys, seeds, strict=True):
            questions += self._build_sample_requests(
                context, length, decoding, sample_keys, of_context, entries
            )
        entries |= self._ask_watched(questions)
        samples = []
        for sample_keys in keys:
            samples.append([_decode_written_answer(entries[key]) for key in sample_keys])
        if decoding == GREEDY:
            samples = self._settle_greedy_readings(contexts, samples)
        self._note_written_answers(contexts, keys, samples)
        if decoding == GREEDY:
            for context, (answer, *_) in zip(contexts, samples, strict=True):
                if answer.kind in ("", withheld_answers.ENDED):
                    self.watch.note_greedy_answer(context, length, answer.text)
        return samples

    def _note_written_answers(
        self,
        contexts: Sequence[Tokens],
        keys: Sequence[Sequence[bytes]],
        answers: Sequence[Sequence[WrittenAnswer]],
    ) -> None:
        """Record, for this run, the kind of each answer, such as filtered or cut.

        `keys` and `answers` hold, for each context, the key and the answer of each sample.
        """
        rows = []
        for context, context_keys, samples in zip(contexts, keys, answers, strict=True):
            for key, answer in zip(context_keys, samples, strict=True):
                rows.append((key, digest_model_request(context), answer.kind))
        self.wire.ledger.answers.record_used_answers(self.wire.ledger.run, rows)

    def _build_store_key(self, body: Mapping[str, Any], *sample: int) -> bytes:
        return digest_model_request(_FORM, self.wire.url, self.identity, body, sample)

    def _build_sample_requests(
        self,
        context: Tokens,
        length: int,
        decoding: Decoding,
        keys: Sequence[bytes],
        seeds: Sequence[int],
        cached: Mapping[bytes, Any],
    ) -> Iterator[ServerRequest]:
        """Yield requests for the samples that are not in `cached`.

        If the server allows it, one request asks for several samples.
        """
        seed_by_key = dict(zip(keys, seeds, strict=True))
        missing = [key for key in keys if key not in cached]
        for start in range(0, len(missing), self.dialect.several):
            batch = missing[start : start + self.dialect.several]
            # A request has one seed, that of its first sample; the server draws the others in
            # addition.
            body = self.dialect.build_sampling_body(
                self.spelling.encode_prompt(context),
                length,
                decoding,
                len(batch),
                None if decoding == GREEDY else seed_by_key[batch[0]],
            )

            # Bind `of` now: answers are read after the loop has moved on.
            def read(answer: Any, of: Sequence[bytes] = batch) -> Mapping[bytes, Any]:
                values = {}
                samples = self.dialect.parse_sampled_answers(answer, len(of), length)
                for key, sample in zip(of, samples, strict=True):
                    values[key] = self._encode_stored_answer(context, sample, length)
                return values

            failed: list[Any] = ["", [], None, withheld_answers.FAILED, []]
            on_error = dict.fromkeys(batch, failed)
            at_most = len(context) + 8 + len(batch) * length
            yield ServerRequest(body, at_most, read, on_error=on_error)

    def _encode_stored_answer(
        self, context: Tokens, answer: WrittenAnswer, length: int
    ) -> list[Any]:
        kind = self.spelling.find_withheld_kind(context, answer, length)
        parsed = self.spelling.read_sample(context, answer)
        if parsed.readings and not kind:
            kind = withheld_answers.UNCLEAR
        return [parsed.text, parsed.tokens, parsed.log_probs, kind, parsed.readings]

    def _settle_greedy_readings(
        self, contexts: Sequence[Tokens], readings: Sequence[Sequence[WrittenAnswer]]
    ) -> list[list[WrittenAnswer]]:
        """Choose one tokenisation for each greedy answer, and return the answers.

        In `readings`, some answers have two possible tokenisations. A tokenisation is right if the
        server, given its first token, continues with the rest of the answer.
        """
        keys: dict[tuple[int, Tokens], bytes] = {}
        requests: dict[bytes, ServerRequest] = {}
        settled = list(map(list, readings))
        unclear = []
        for i, (answer, *_) in enumerate(readings):
            if answer.kind == withheld_answers.UNCLEAR:
                unclear.append((i, answer))
                for reading in answer.readings:
                    if len(reading) > 1:
                        keys[i, reading], request = self._build_greedy_request(
                            (*contexts[i], reading[0]), len(reading) - 1
                        )
                        requests[keys[i, reading]] = request
        rests = self._answer_requests(requests)
        for i, answer in unclear:
            going_on = []
            for reading in answer.readings:
                if (i, reading) in keys and self.spelling.continues_reading(
                    reading, rests[keys[i, reading]]
                ):
                    going_on.append(reading)
            if len(going_on) == 1:
                settled[i][0] = replace(answer, tokens=going_on[0], kind="", readings=())
        return settled

    def _build_greedy_request(
        self, context: Tokens, length: int, stored: bool = True
    ) -> tuple[bytes, ServerRequest]:
        """Return the request for the text of a greedy answer, and the request's store key."""
        body = self.dialect.build_sampling_body(
            self.spelling.encode_prompt(context), length, GREEDY
        )
        key = self._build_store_key(body)

        def read(answer: Any) -> Mapping[bytes, Any]:
            return {key: self.dialect.parse_sampled_answers(answer, 1, length)[0].text}

        return key, ServerRequest(body, len(context) + 8 + length, read, stored)

    # --- given tokens ---

    def score_tokens(
        self, pairs: Sequence[tuple[Tokens, Tokens]], likeliest: int = 0
    ) -> list[tuple[list[Any], ...]]:
        """Return the log-probabilities (nats) and ranks of all tokens of each prefix and suffix.

        Each is a list with one value per token, which is None for the first token. If `likeliest`
        is positive, also return, for each position, a list of the `likeliest` most likely tokens as
        (id, log-probability).
        """
        texts = [(*prefix, *suffix) for prefix, suffix in pairs]
        shortest = min((len(prefix) for prefix, _ in pairs), default=1)
        hidden = self.dialect.hidden
        if not shortest:
            raise NotApplicable(
                "nothing precedes the first token of a text: give --prefix-token eos, for example"
            )
        if shortest <= hidden:
            raise NotApplicable(f"{self.name} does not say how likely the first token of a text is")
        self.spelling.refuse_changed_tokens(texts)
        if self.dialect.scored == "forced":
            return self._score_forced_tokens(pairs, likeliest)
        scores = self._score_texts(texts, likeliest)
        for text in scores:
            self.watch.note_scored_text(text, scores[text][0])
        return [tuple(scores[text]) for text in texts]

    def _score_forced_tokens(
        self, pairs: Sequence[tuple[Tokens, Tokens]], likeliest: int
    ) -> list[tuple[list[Any], ...]]:
        """Return the results of `score_tokens` for suffixes only, with one request per token."""
        parts = []
        for prefix, suffix in pairs:
            for end in range(1, len(suffix) + 1):
                parts.append((*prefix, *suffix[:end]))
        answers = self._score_texts(parts, likeliest)
        self.watch.count_unwatched_requests(len(answers))
        scores = list[tuple[list[Any], ...]]()
        for prefix, suffix in pairs:
            # log-probability, rank and likeliest tokens of each prefix token
            columns: list[list[Any]] = [[0.0] * len(prefix), [1] * len(prefix)]
            if likeliest:
                columns.append([()] * len(prefix))
            for end in range(1, len(suffix) + 1):
                part = (*prefix, *suffix[:end])
                for column, values in zip(columns, answers[part], strict=True):
                    column.append(values[-1])
            scores.append(tuple(columns))
        return scores

    def _score_texts(self, texts: Sequence[Tokens], likeliest: int) -> dict[Tokens, Any]:
        """Return the scores of each whole text, keyed by its tokens."""
        keys: dict[Tokens, bytes] = {}
        requests: dict[bytes, ServerRequest] = {}
        for text in texts:
            keys[text], request = self._build_scoring_request(text, likeliest)
            requests[keys[text]] = request
        entries = self._answer_requests(requests)
        return {text: entries[key] for text, key in keys.items()}

    def _build_scoring_request(
        self, text: Tokens, likeliest: int = 0, stored: bool = True
    ) -> tuple[bytes, ServerRequest]:
        """Return the request for the scores of a text, and the request's key in the store."""
        forced = self.dialect.scored == "forced"
        body = self.dialect.build_scoring_body(
            self.spelling.encode_prompt(text),
            likeliest,
            self.spelling.is_split_character(text[-1]),
        )
        # The same body may serve to score a token or to list the likeliest ones: the key tells them
        # apart.
        key = self._build_store_key(body, *[likeliest] * forced)

        def read(answer: Any) -> Mapping[bytes, Any]:
            scores = self.dialect.parse_prompt_log_probs(answer, text, likeliest)
            if scores.tokens is not None and scores.tokens[1:] != text[1:]:
                raise MalformedAnswer("log-probabilities of other tokens came")
            # 0 nats and rank 1 represent unknown values
            n_unknown = len(text) - 1 if forced else self.dialect.hidden + 1
            log_probs = [0.0] * n_unknown + [*scores.log_probs[n_unknown:]]
            if None in log_probs:
                raise MalformedAnswer("log-probabilities are missing")
            if self.dialect.returns_ranks(likeliest) and scores.ranks is None:
                raise MalformedAnswer("ranks are missing")
            columns = [log_probs, [1, *(scores.ranks or ())[1:]]]
            return {key: [*columns, scores.likeliest] if likeliest else columns}

        return key, ServerRequest(body, len(text) + 9, read, stored)

    # --- requests ---

    def _find_stored_answers(self, keys: Iterable[bytes]) -> dict[bytes, Any]:
        entries = {}
        for key in keys:
            answer = self.wire.ledger.answers.find_stored_answer(key)
            if answer is not None:
                entries[key] = answer
        return entries

    def _answer_requests(self, requests: Mapping[bytes, ServerRequest]) -> dict[bytes, Any]:
        """Return the answers to requests by store key, sending only those that are not stored."""
        entries = self._find_stored_answers(requests)
        missing = [request for key, request in requests.items() if key not in entries]
        return entries | self._ask_watched(missing)

    def _ask_watched(self, questions: Sequence[ServerRequest]) -> dict[bytes, Any]:
        """Send all requests and return the answers; check the server between batches."""
        entries = dict[bytes, Any]()
        for start in range(0, len(questions), drift_watch.EVERY):
            batch = questions[start : start + drift_watch.EVERY]
            answers = self._ask_all_or_raise_audit_error(batch)
            self._check_error_share(batch, answers)
            for answer in answers:
                entries |= answer
            self._check_server_unchanged(partial(self.watch.check_when_due, len(batch)))
        return entries

    def _check_error_share(
        self, requests: Sequence[ServerRequest], answers: Sequence[Mapping[bytes, Any]]
    ) -> None:
        """Raise AuditError if most of the run's requests fail.

        After each failure, a request of the handshake is sent again; raise AuditError if it fails,
        too.
        """
        n_errors = 0
        for request, answer in zip(requests, answers, strict=True):
            self._n_requests += request.on_error is not None
            n_errors += answer is request.on_error
        self._n_errors += n_errors
        if n_errors:
            sentinel = self.watch.contexts[0]
            self._redraw_greedy_texts([WatchedRequest(sentinel, drift_watch.LENGTH)])
        if self._n_errors >= _MOST_ERRORS and 2 * self._n_errors > self._n_requests:
            raise AuditError(
                f"expected {self.wire.url} to answer as it did in the handshake, but it answers "
                f"500 to {self._n_errors:,} of {self._n_requests:,} requests, at every try"
            )

    def _ask_all_or_raise_audit_error(
        self, questions: Sequence[ServerRequest]
    ) -> list[Mapping[bytes, Any]]:
        try:
            return self.wire.ask_all(questions)
        except (RequestRefused, MalformedAnswer) as error:
            raise AuditError(
                f"expected {self.wire.url} to answer as it did in the handshake, but {error}"
            ) from None

    def _check_server_unchanged(self, check: Callable[[], None]) -> None:
        """Run `check`, which checks the server; raise AuditError if the server has changed.

        All stored answers are then declared invalid.
        """
        try:
            check()
        except ServerChanged as change:
            self.wire.ledger.answers.invalidate_stored_answers()
            raise AuditError(
                f"expected {self.wire.url} to stay the same model from the first answer to the "
                f"last, but {change}. Its answers stay in the store, but none is used again: this "
                "run cannot be resumed, and a new one sends all requests again"
            ) from None

    def _redraw_greedy_texts(self, answers: Sequence[WatchedRequest]) -> list[str]:
        """Send the requests of these greedy answers again, and return the new texts.

        The new texts are not stored.
        """
        requests = []
        for answer in answers:
            _, request = self._build_greedy_request(answer.context, answer.length, stored=False)
            requests.append(request)
        return self._ask_single_values(requests)

    def _rescore_texts(self, texts: Sequence[Tokens]) -> list[Sequence[float] | None]:
        """Return new log-probabilities of all tokens of each text, ignoring stored answers.

        The result is None for a text that the server would tokenise differently.
        """
        rescored: list[Sequence[float] | None] = [None] * len(texts)
        requests = dict[int, ServerRequest]()
        for i, text in enumerate(texts):
            if self.spelling.can_score_exact_tokens(text):
                _, requests[i] = self._build_scoring_request(text, stored=False)
        scores = self._ask_single_values(list(requests.values()))
        for i, (log_probs, _) in zip(requests, scores, strict=True):
            rescored[i] = log_probs
        return rescored

    def _ask_single_values(self, requests: Sequence[ServerRequest]) -> list[Any]:
        """Send requests that yield one value each, and return the values."""
        values = list[Any]()
        for answer in self._ask_all_or_raise_audit_error(requests):
            values += answer.values()
        return values

    def check_server_unchanged(self) -> None:
        self._check_server_unchanged(self.watch.check_all_sentinels)

    # --- use of the answers ---

    def count_own_answers(self) -> dict[str, int]:
        """Return the number of answers that this run used, by their kind in `withheld_answers`.

        If this run resumes earlier runs, their answers count too.
        """
        return self.wire.ledger.answers.count_used_answers(self._runs)

    def mark_withheld_contexts(self, contexts: Sequence[Tokens]) -> list[bool]:
        """Return, for each context, whether any answer to it may have hidden a leak."""
        withheld = self.wire.ledger.answers.list_withheld_contexts(
            self._runs,
            list(withheld_answers.count_hiding_answers(self.count_own_answers())),
        )
        return [digest_model_request(context) in withheld for context in contexts]


def _decode_written_answer(answer: Any) -> WrittenAnswer:
    text, tokens, log_probs, kind, readings = answer
    values = None if log_probs is None else tuple(log_probs)
    return WrittenAnswer(
        text, tuple(tokens), values, kind=kind, readings=tuple(map(tuple, readings))
    )
