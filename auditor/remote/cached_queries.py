"""Asks one model of one server for samples and for log-probabilities: nothing twice, and only while
it stays the same.

Every answer is kept (`answers.py`), by the seed and the index of its sample. Knows tokens and
requests; no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.decoding import GREEDY, Decoding
from auditor.remote import drift_watch, withheld_answers
from auditor.remote.answers import digest_of_question
from auditor.remote.connection import (
    MalformedAnswer,
    RequestRefused,
    ServerConnection,
    ServerRequest,
    ServerTokenBudget,
)
from auditor.remote.drift_watch import GreedyAnswer, ServerChanged, ServerWatch
from auditor.remote.handshake import Handshake
from auditor.remote.server_dialect import WrittenAnswer
from auditor.remote.token_text import TokenTextCodec

_MOST_ERRORS = 8  # requests that may fail before it counts how many of all they are
_FORM = 3  # of what is kept of an answer: what an older version kept does not say what became of it


class CachedServerQueries:
    """name: of the model, in sentences. Raises AuditError where two answers to one question are too
    far apart."""

    def __init__(
        self, wire: ServerConnection, handshake: Handshake, spelling: TokenTextCodec, name: str
    ) -> None:
        self.wire, self.dialect, self.spelling, self.name = wire, handshake.dialect, spelling, name
        self._runs = [wire.ledger.run]
        # of samples, and of those the ones that ended in an error
        self._n_requests, self._n_errors = (
            0,
            0,
        )
        # What keys of stored answers hold of this server; a new one once it was found to have
        # changed.
        self.identity = digest_of_question(
            handshake.answer, wire.ledger.answers.invalidation_count
        ).hex()
        contexts = [(*self.dialect.adds, *spelling.tokens(text)) for text in drift_watch.TEXTS]
        scored = self._rescore_texts if self.dialect.scored not in (None, "forced") else None
        self.watch = ServerWatch(self._redraw_greedy_texts, scored, contexts)
        self._give_up_if_server_changed(self.watch.ask_initial_sentinels)

    def switch_paying_run(self, ledger: ServerTokenBudget) -> None:
        """From here on the run of this ledger pays."""
        self.wire.ledger = ledger
        self._runs.append(ledger.run)

    # --- samples ---

    def stored_or_drawn_samples(
        self,
        contexts: Sequence[Tokens],
        length: int,
        decoding: Decoding,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[WrittenAnswer]]:
        """The samples of each context, from the store; only those missing there are asked for."""
        answers = self.wire.ledger.answers
        keys = list[list[bytes]]()
        for context, of_context in zip(contexts, seeds, strict=True):
            body = self.dialect.sampling_request_body(
                self.spelling.prompt_as_server_takes_it(context), length, decoding, 1, None
            )
            # keyed as if asked for alone: how many come in one request is no part of a sample
            keys.append(
                [self._answer_store_key(body, seed, index) for index, seed in enumerate(of_context)]
            )
        found = {
            key: answer
            for own in keys
            for key in own
            if (answer := answers.find_stored_answer(key)) is not None
        }
        questions = [
            question
            for context, own, seed in zip(contexts, keys, seeds, strict=True)
            for question in self._requests_for_missing_samples(
                context, length, decoding, own, seed, found
            )
        ]
        for answered in self._ask_watching_for_change(questions):
            found |= answered
        written = [[_written_answer_from_json(found[key]) for key in own] for own in keys]
        if decoding == GREEDY:
            written = self._settle_greedy_readings(contexts, written)
        self._note_written_answers(contexts, keys, written)
        if decoding == GREEDY:
            for context, own in zip(contexts, written, strict=True):
                if own[0].kind in ("", withheld_answers.ENDED):
                    self.watch.note_greedy_answer(context, length, own[0].text)
        return written

    def _note_written_answers(
        self,
        contexts: Sequence[Tokens],
        keys: Sequence[Sequence[bytes]],
        written: Sequence[Sequence[WrittenAnswer]],
    ) -> None:
        """Records the kind of each answer (filtered, cut, ...), for this run and one that resumes
        it."""
        every = [
            (key, digest_of_question(context), one.kind)
            for context, own_keys, own in zip(contexts, keys, written, strict=True)
            for key, one in zip(own_keys, own, strict=True)
        ]
        self.wire.ledger.answers.record_used_answers(self.wire.ledger.run, every)

    def _answer_store_key(self, body: Mapping[str, Any], *sample: int) -> bytes:
        return digest_of_question(_FORM, self.wire.url, self.identity, body, sample)

    def _requests_for_missing_samples(
        self,
        context: Tokens,
        length: int,
        decoding: Decoding,
        keys: Sequence[bytes],
        seeds: Sequence[int],
        found: Mapping[bytes, Any],
    ) -> Iterator[ServerRequest]:
        """Requests for the samples that are missing, several of them in one where the server draws
        them apart."""
        missing = [index for index, key in enumerate(keys) if key not in found]
        for start in range(0, len(missing), self.dialect.several):
            mine = missing[start : start + self.dialect.several]
            # A request has one seed, its first sample's: the others of it are what the server draws
            # besides.
            seed = None if decoding == GREEDY else seeds[mine[0]]
            body = self.dialect.sampling_request_body(
                self.spelling.prompt_as_server_takes_it(context), length, decoding, len(mine), seed
            )

            # `of` is bound now: answers are read after the loop has gone on
            def read(answer: Any, of: Sequence[int] = mine) -> Mapping[bytes, Any]:
                every = zip(
                    of, self.dialect.parse_sampled_answers(answer, len(of), length), strict=True
                )
                return {
                    keys[i]: self._stored_form_of_answer(context, one, length) for i, one in every
                }

            failed: list[Any] = ["", [], None, withheld_answers.FAILED, []]
            on_error = {keys[i]: failed for i in mine}
            yield ServerRequest(
                body, len(context) + 8 + len(mine) * length, read, on_error=on_error
            )

    def _stored_form_of_answer(
        self, context: Tokens, answer: WrittenAnswer, length: int
    ) -> list[Any]:
        kind = self.spelling.withheld_kind_of_answer(context, answer, length)
        read = self.spelling.read_tokens_of_sample(context, answer)
        unclear = withheld_answers.UNCLEAR if read.readings else ""
        return [read.text, read.tokens, read.log_probs, kind or unclear, read.readings]

    def _settle_greedy_readings(
        self, contexts: Sequence[Tokens], written: Sequence[Sequence[WrittenAnswer]]
    ) -> list[list[WrittenAnswer]]:
        """Return the greedy answers, of those with two readings the one that the server goes on
        with, if only one."""
        unclear = [
            (i, own[0]) for i, own in enumerate(written) if own[0].kind == withheld_answers.UNCLEAR
        ]
        asked = {
            (i, reading): self._rest_request(contexts[i], reading)
            for i, answer in unclear
            for reading in answer.readings
            if len(reading) > 1
        }
        answers = self.wire.ledger.answers
        keys = {place: self._answer_store_key(request.body) for place, request in asked.items()}
        rests = {
            key: text
            for key in keys.values()
            if (text := answers.find_stored_answer(key)) is not None
        }
        missing = {
            keys[place]: request for place, request in asked.items() if keys[place] not in rests
        }
        for answered in self._ask_watching_for_change(list(missing.values())):
            rests |= answered
        settled = [list(own) for own in written]
        for i, answer in unclear:
            going_on = [
                reading
                for reading in answer.readings
                if (i, reading) in keys
                and self.spelling.continues_reading(reading, rests[keys[i, reading]])
            ]
            if len(going_on) == 1:
                settled[i][0] = replace(answer, tokens=going_on[0], kind="", readings=())
        return settled

    def _rest_request(self, context: Tokens, reading: Tokens) -> ServerRequest:
        """Return the request for the greedy rest of a reading, after its first token."""
        given, length = (*context, reading[0]), len(reading) - 1
        prompt = self.spelling.prompt_as_server_takes_it(given)
        body = self.dialect.sampling_request_body(prompt, length, GREEDY, 1, None)
        key = self._answer_store_key(body)

        def read(answer: Any) -> Mapping[bytes, Any]:
            return {key: self.dialect.parse_sampled_answers(answer, 1, length)[0].text}

        return ServerRequest(body, len(given) + 8 + length, read)

    # --- given tokens ---

    def stored_or_asked_token_scores(
        self, pairs: Sequence[tuple[Tokens, Tokens]], likeliest: int = 0
    ) -> list[tuple[list[Any], ...]]:
        """(log-probabilities, ranks) of all tokens of each text; nothing is known of the first.

        likeliest: with (id, log-probability) of so many tokens at each place.
        """
        texts = [(*prefix, *suffix) for prefix, suffix in pairs]
        shortest, hidden = min((len(prefix) for prefix, _ in pairs), default=1), self.dialect.hidden
        if not shortest:
            raise NotApplicable(
                "nothing stands before the first token of a text: give --prefix-token eos, for "
                "example"
            )
        if shortest <= hidden:
            raise NotApplicable(f"{self.name} does not say how likely the first token of a text is")
        self.spelling.refuse_texts_read_as_other_tokens(texts)
        if self.dialect.scored == "forced":
            return self._scores_of_forced_tokens(pairs, likeliest)
        found = self._stored_or_asked_scores_by_text(texts, likeliest)
        for text in found:
            self.watch.note_scored_text(text, found[text][0])
        return [tuple(found[text]) for text in texts]

    def _scores_of_forced_tokens(
        self, pairs: Sequence[tuple[Tokens, Tokens]], likeliest: int
    ) -> list[tuple[list[Any], ...]]:
        """Return the scores of every suffix, each of whose tokens costs a request; nothing is asked
        of prefixes."""
        parts = [
            [(*prefix, *suffix[: i + 1]) for i in range(len(suffix))] for prefix, suffix in pairs
        ]
        answers = self._stored_or_asked_scores_by_text(
            [part for row in parts for part in row], likeliest
        )
        self.watch.count_unwatched_requests(len(answers))
        # log-probability, rank and likeliest tokens of a token of a prefix
        unknown = (
            [0.0],
            [1],
            [()],
        )
        scores = list[tuple[list[Any], ...]]()
        for (prefix, _), row in zip(pairs, parts, strict=True):
            columns = zip(unknown[: 3 if likeliest else 2], range(3), strict=False)
            scores.append(
                tuple(
                    blank * len(prefix) + [answers[part][i][-1] for part in row]
                    for blank, i in columns
                )
            )
        return scores

    def _stored_or_asked_scores_by_text(
        self, texts: Sequence[Tokens], likeliest: int
    ) -> dict[Tokens, Any]:
        answers = self.wire.ledger.answers
        # One body may list all tokens for the sake of one of them, or of the likeliest.
        sample = (likeliest,) if self.dialect.scored == "forced" else ()
        keys = {
            text: self._answer_store_key(self._scoring_body(text, likeliest), *sample)
            for text in texts
        }
        found = {
            key: answer
            for key in keys.values()
            if (answer := answers.find_stored_answer(key)) is not None
        }
        questions = [
            self._scoring_request(text, key, likeliest)
            for text, key in keys.items()
            if key not in found
        ]
        for answered in self._ask_watching_for_change(questions):
            found |= answered
        return {text: found[key] for text, key in keys.items()}

    def _scoring_body(self, text: Tokens, likeliest: int) -> dict[str, Any]:
        prompt = self.spelling.prompt_as_server_takes_it(text)
        return self.dialect.scoring_request_body(
            prompt, likeliest, self.spelling.is_split_character(text[-1])
        )

    def _scoring_request(self, text: Tokens, key: bytes, likeliest: int = 0) -> ServerRequest:
        def read(answer: Any) -> Mapping[bytes, Any]:
            given = self.dialect.parse_prompt_log_probs(answer, text, likeliest)
            if given.tokens is not None and given.tokens[1:] != text[1:]:
                raise MalformedAnswer("log-probabilities of other tokens came")
            last_unknown = len(text) - 2 if self.dialect.scored == "forced" else self.dialect.hidden
            log_probs = [
                0.0 if i <= last_unknown else value for i, value in enumerate(given.log_probs)
            ]
            if None in log_probs:
                raise MalformedAnswer("log-probabilities are missing")
            if self.dialect.asks_for_ranks(likeliest) and given.ranks is None:
                raise MalformedAnswer("ranks are missing")
            # 0 nats and rank 1 stand for what is not known
            told = [
                log_probs,
                [1, *(given.ranks or ())[1:]],
            ]
            return {key: [*told, given.likeliest] if likeliest else told}

        return ServerRequest(self._scoring_body(text, likeliest), len(text) + 9, read)

    # --- asking ---

    def _ask_watching_for_change(
        self, questions: Sequence[ServerRequest]
    ) -> list[Mapping[bytes, Any]]:
        """Asks all questions, and in between checks whether the server is still the same one."""
        answered = list[Mapping[bytes, Any]]()
        for start in range(0, len(questions), drift_watch.EVERY):
            some = questions[start : start + drift_watch.EVERY]
            answers = self._ask_all_or_raise_audit_error(some)
            self._check_errors_are_exceptions(some, answers)
            answered += answers
            self._give_up_if_server_changed(
                partial(self.watch.count_requests_and_check_when_due, len(some))
            )
        return answered

    def _check_errors_are_exceptions(
        self, asked: Sequence[ServerRequest], answers: Sequence[Mapping[bytes, Any]]
    ) -> None:
        """Raise AuditError if the server fails at a request of the handshake too, or at most
        requests."""
        pairs = [pair for pair in zip(asked, answers, strict=True) if pair[0].on_error is not None]
        n_errors = sum(answer is request.on_error for request, answer in pairs)
        self._n_requests += len(pairs)
        self._n_errors += n_errors
        if n_errors:
            sentinel = self.watch.contexts[0]
            self._redraw_greedy_texts([GreedyAnswer(sentinel, drift_watch.LENGTH, "")])
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

    def _give_up_if_server_changed(self, looks: Callable[[], None]) -> None:
        """Runs a check; where it finds the server changed, invalidates all stored answers and
        raises AuditError."""
        try:
            looks()
        except ServerChanged as why:
            self.wire.ledger.answers.invalidate_stored_answers()
            raise AuditError(
                f"expected {self.wire.url} to stay the same model from the first answer to the "
                f"last, but {why}. What was answered stays in the store, but none of it is used "
                "again: this run cannot be resumed, and a new one asks anew"
            ) from None

    def _redraw_greedy_texts(self, asked: Sequence[GreedyAnswer]) -> list[str]:
        """Greedy texts, asked anew."""

        def question(one: GreedyAnswer) -> ServerRequest:
            body = self.dialect.sampling_request_body(
                self.spelling.prompt_as_server_takes_it(one.context), one.length, GREEDY, 1, None
            )
            return ServerRequest(
                body, len(one.context) + 8 + one.length, partial(read, one.length), stored=False
            )

        def read(length: int, answer: Any) -> Mapping[bytes, Any]:
            return {b"": self.dialect.parse_sampled_answers(answer, 1, length)[0].text}

        return [
            answer[b""]
            for answer in self._ask_all_or_raise_audit_error([question(one) for one in asked])
        ]

    def _rescore_texts(self, asked: Sequence[Tokens]) -> list[Sequence[float] | None]:
        """Log-probabilities of all tokens of each text, asked anew; None where it would be read as
        other tokens."""
        scored = [self.spelling.can_score_exact_tokens(text) for text in asked]
        questions = [
            self._scoring_request(text, b"") for text, can in zip(asked, scored, strict=True) if can
        ]
        answers = iter(
            self._ask_all_or_raise_audit_error(
                [replace(question, stored=False) for question in questions]
            )
        )
        return [next(answers)[b""][0] if can else None for can in scored]

    def check_server_unchanged_at_end(self) -> None:
        self._give_up_if_server_changed(self.watch.check_all_sentinels_for_drift)

    # --- what became of the answers ---

    def own_answer_counts_by_kind(self) -> dict[str, int]:
        """How many answers these runs have used, by kind (`withheld_answers`)."""
        return self.wire.ledger.answers.used_answer_counts_by_kind(self._runs)

    def has_withheld_answer_by_context(self, contexts: Sequence[Tokens]) -> list[bool]:
        """Whether an answer to each may have hidden a leak."""
        held = self.wire.ledger.answers.contexts_with_withheld_answers(
            self._runs,
            list(withheld_answers.leak_hiding_answer_counts(self.own_answer_counts_by_kind())),
        )
        return [digest_of_question(context) in held for context in contexts]


def _written_answer_from_json(answer: Any) -> WrittenAnswer:
    text, tokens, log_probs, kind, readings = answer
    values = None if log_probs is None else tuple(log_probs)
    return WrittenAnswer(
        text, tuple(tokens), values, kind=kind, readings=tuple(map(tuple, readings))
    )
