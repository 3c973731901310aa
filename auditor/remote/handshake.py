"""Test how a server really behaves before its answers are trusted.

The test consists of a dozen short requests about a public sentence. Some servers accept fields
(status 200) but ignore them, count one token too few, shift echoed values by one, or send the same
sample several times. Features that fail the test are not used, and the run's record names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.decoding import GREEDY, Decoding
from auditor.models.partial_distributions import LIKELIEST
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.remote import drift_watch
from auditor.remote.answer_comparison import (
    CLOSE,
    describe_log_prob_fault,
    is_shared_prefix,
    likeliest_match_ranks,
    list_sample_contents,
)
from auditor.remote.connection import (
    MalformedAnswer,
    RequestRefused,
    ServerConnection,
    ServerRequest,
    read_token_count,
)
from auditor.remote.handshake_checks import (
    COUNTED,
    ENDS,
    FIRST,
    IDS,
    OBEYED,
    RANKED,
    REPORTED,
    RETURNED,
    SAME,
    SAMPLES,
    SCORED,
    SEED,
    SEVERAL,
    TOLD,
    TRIMMED,
    Handshake,
    HandshakeCheck,
)
from auditor.remote.server_dialect import (
    IgnoredParameter,
    PromptLogProbs,
    ServerDialect,
    WrittenAnswer,
)
from auditor.remote.token_text import TokenTextCodec

T = TypeVar("T")

# an unfinished text: something must follow
TEXT = "The quick brown fox jumps over the lazy dog, and"
_LENGTH = 8  # tokens of an answer
_COPIES = 4
# seeds tried for two samples: llama.cpp answers 500 to a sample that ends within a character
_SEEDS = 12
_SEVERAL = 16  # samples per request, which bounds the server's memory for it
_HOT = Decoding(temperature=2.0)  # so that two equal samples are no coincidence
# Settings that are greedy unless the server ignores them.
_SURE = {
    "top_p": replace(_HOT, top_p=1e-4),
    "top_k": replace(_HOT, top_k=1),
}
_FEWER = 5  # likeliest tokens, if a server lists no more


def _explain_unscored(dialect: ServerDialect, error: RequestRefused | MalformedAnswer) -> str:
    """Return a phrase that says why a server with this dialect does not score a prompt's tokens."""
    if isinstance(error, RequestRefused):
        return f"{dialect.scored} is refused with {error.status}"
    if isinstance(error, IgnoredParameter):
        return (
            "the server ignores "
            f"{'echo and logprobs' if dialect.scored == 'echo' else dialect.scored}: {error}"
        )
    return f"by {dialect.scored}, {error}"


def _list_scoring_dialects(dialect: ServerDialect, context: Tokens) -> Iterator[ServerDialect]:
    """Yield the ways in which known servers score prompts.

    They are those of vLLM, OpenAI, llama-cpp-python (which hides tokens) and llama.cpp.
    """
    yield replace(dialect, scored="prompt_logprobs")
    yield replace(dialect, scored="echo")
    if dialect.adds:
        yield replace(dialect, scored="echo", hidden=len(dialect.adds))
    if dialect.ids and dialect.returned:
        yield replace(dialect, scored="forced", drawable=context[-1])


def open_server_handshake(wire: ServerConnection, model: str, tokenizer: Any) -> Handshake:
    """Test the server with a few requests and return the results.

    Raise AuditError if the server does not have this model or cannot draw samples.
    """
    served = wire.list_served_models()
    if served and model not in served:
        raise AuditError(
            f"expected a model that {wire.url} serves ({', '.join(sorted(served))}), got {model!r}"
        )
    listed = served.get(model, {})
    meta = listed.get("meta")  # llama.cpp's
    n_positions = listed.get(
        "max_model_len", meta.get("n_ctx") if isinstance(meta, Mapping) else None
    )
    return _HandshakeInProgress(wire, model, tokenizer).run_handshake(
        n_positions if isinstance(n_positions, int) else None
    )


@dataclass
class _HandshakeInProgress:
    """A running handshake, which tests a server. Each answer determines the next request's fields.

    `wire` is the connection, and `checks` holds the results so far.
    """

    wire: ServerConnection
    model: str
    tokenizer: Any
    checks: list[HandshakeCheck] = field(default_factory=list)

    def run_handshake(self, room: int | None) -> Handshake:
        dialect, context, greedy = self._detect_prompt_form(ServerDialect(self.model))
        dialect, greedy = self._detect_trimming(dialect, context, greedy)
        # Detect scoring first: the log-probabilities of samples are compared with it.
        dialect = self._detect_sampling(
            self._detect_scoring(dialect, context, greedy), context, greedy
        )
        return Handshake(
            dialect, tuple(self.checks), hashlib.sha256(greedy.text.encode()).hexdigest(), room
        )

    # --- form of the prompt ---

    def _detect_prompt_form(
        self, plain: ServerDialect
    ) -> tuple[ServerDialect, Tokens, WrittenAnswer]:
        """Find out whether the server accepts token ids or only text, by completing `TEXT`.

        plain: the server's dialect (which request fields it accepts), as far as known so far.

        Returns:
            The dialect, completed.
            The tokens of `TEXT`, including tokens that the server prepends.
            The server's greedy completion of `TEXT`.
        """
        bare = self._encode(TEXT)
        special = self._encode(TEXT, special=True)
        plain, by_text, counted = self._ask_first_question(plain)
        # Assume a prefix, like a BOS, and only if the server counts these tokens too.
        adds: Tokens = ()
        if counted == len(special):
            adds = special[: len(special) - len(bare)]
        agrees = None
        if counted is not None:
            agrees = counted in (len(bare), len(special))
        if agrees is False and (
            token := self._detect_prepended_token(plain, counted == len(bare) + 1)
        ):
            adds = token
            agrees = True
        self._record_check(
            COUNTED, agrees, "it counts none" if counted is None else f"{counted} and {len(bare)}"
        )
        if agrees is False:
            raise AuditError(
                f"expected the tokenizer of {self.model!r}, got one that makes {len(bare)} tokens "
                f"of a text of which {self.wire.url} makes {counted}: give --tokenizer DIR"
            )
        context = (*adds, *bare)
        dialect = replace(plain, adds=adds, extended=True)
        # Use vLLM's fields too if not refused: the answer without a server's own defaults differs.
        answers = self._catch_refusal(self._request_samples, dialect, context)
        if answers is None:
            dialect = replace(dialect, extended=False)
        else:
            by_text = answers[0][0]
        by_ids = self._ask_token_ids(replace(dialect, ids=True), context, by_text)
        answer = by_text if by_ids is None else by_ids
        matches = answer.tokens is not None and self._tokens_match_text(answer.tokens, answer.text)
        self._record_check(
            RETURNED, matches, "none come" if answer.tokens is None else "they write another text"
        )
        dialect = replace(dialect, ids=by_ids is not None, returned=matches)
        return dialect, context, answer if matches else replace(answer, tokens=None)

    def _ask_token_ids(
        self, dialect: ServerDialect, context: Tokens, by_text: WrittenAnswer
    ) -> WrittenAnswer | None:
        """Return the answer to the prompt `context`, sent as token ids.

        Return None if the server refuses ids or reads them as different tokens. `by_text` is the
        answer to the same prompt sent as text.
        """
        if (
            dialect.logprobs is True
        ):  # mlx_lm.server 0.32.2: a prompt of ids ends its generation thread
            self._record_check(
                IDS,
                None,
                "not tried: a server that takes logprobs as true or false reads text only",
            )
            return None
        answers = self._catch_refusal(self._request_samples, dialect, context)
        if answers is None:
            self._record_check(IDS, False, "they are refused")
            return None
        (by_ids,), counted = answers
        same = counted in (None, len(context)) and is_shared_prefix(by_ids.text, by_text.text)
        self._record_check(IDS, same, "the server reads them as other tokens")
        return by_ids if same else None

    def _ask_first_question(
        self, plain: ServerDialect
    ) -> tuple[ServerDialect, WrittenAnswer, int | None]:
        """Request the greedy answer to the test text, using only OpenAI's fields.

        If the server rejects a number for `logprobs`, send the request again with a Boolean. Return
        the dialect, the answer, and the server's count of the tokens in the text.
        """
        dialects = (plain, replace(plain, logprobs=True))
        for dialect in dialects:
            try:
                (answer,), counted = self._request_samples(dialect, TEXT)
                return dialect, answer, counted
            except RequestRefused as error:
                if dialect is not dialects[-1] and error.status in (400, 422):
                    continue
                expected = "a completions endpoint"
                if error.status == 404:
                    expected = f"a model {self.model!r}"
                raise AuditError(
                    f"expected {expected} behind {self.wire.url}, but {error}"
                ) from None
            except MalformedAnswer as error:
                raise AuditError(
                    f"expected a completions endpoint at {self.wire.url}, but {error}"
                ) from None
        raise AssertionError("the last dialect returns or raises")

    def _detect_prepended_token(self, plain: ServerDialect, one_more: bool) -> Tokens:
        """Return the token that the server, not the tokenizer, puts before texts; () if unknown.

        `one_more` says whether the server counts one token more than the tokenizer for the test
        text. If this holds for other texts, too, the additional token is taken to be BOS, or the
        end of text if there is no BOS.
        """
        token = getattr(self.tokenizer, "bos_token_id", None)
        if token is None:
            token = getattr(self.tokenizer, "eos_token_id", None)
        if not one_more or token is None:
            return ()
        for text in drift_watch.TEXTS[:2]:
            _, counted = self._request_samples(plain, text)
            if counted != len(self._encode(text)) + 1:
                return ()
        return (int(token),)

    def _tokens_match_text(self, tokens: Tokens, text: str) -> bool:
        """Return whether the tokens decode to the text.

        A leading space and an end of text are ignored.
        """
        end = getattr(self.tokenizer, "eos_token_id", None)
        texts = [decode_keeping_special_tokens(self.tokenizer, tokens)]
        if tokens[-1:] == (end,):
            texts.append(decode_keeping_special_tokens(self.tokenizer, tokens[:-1]))
        return text.removeprefix(" ") in [candidate.removeprefix(" ") for candidate in texts]

    def _detect_trimming(
        self, dialect: ServerDialect, context: Tokens, greedy: WrittenAnswer
    ) -> tuple[ServerDialect, WrittenAnswer]:
        """Detect whether answers may lack their leading space.

        Return the dialect, and the greedy answer with tokens. Servers drop this space if they
        decode an answer without its context. No test is needed if the server returns correct token
        ids.
        """
        if greedy.tokens is not None:
            return dialect, greedy
        answers = [greedy.text]
        spaced = greedy.text.startswith(" ")
        for text in drift_watch.TEXTS:
            if not spaced:
                prompt = (*dialect.adds, *self._encode(text))
                answers.append(self._request_samples(dialect, prompt)[0][0].text)
                spaced = answers[-1].startswith(" ")
        dialect = replace(dialect, trims=not spaced)
        codec = self._make_codec(dialect)
        parsed = codec.read_sample(context, greedy)
        going_on = []
        for reading in parsed.readings:
            if self._confirms_tokenisation(codec, context, reading):
                going_on.append(reading)
        fault = f"none of {len(answers)} answers begins with one: each is read with and without it"
        self._record_check(TRIMMED, spaced, fault)
        return dialect, replace(
            parsed, tokens=going_on[0] if len(going_on) == 1 else parsed.tokens, readings=()
        )

    def _confirms_tokenisation(
        self, codec: TokenTextCodec, context: Tokens, reading: Tokens
    ) -> bool:
        """Return whether the server agrees with a tokenisation of its answer.

        Given the first token of the tokenisation, it must answer the text of the remaining tokens.
        """
        prompt = (*context, *reading[:1])
        (rest,), _ = self._request_samples(codec.dialect, prompt)
        return codec.continues_reading(reading, rest.text)

    # --- scores of given tokens ---

    def _detect_scoring(
        self, dialect: ServerDialect, context: Tokens, greedy: WrittenAnswer
    ) -> ServerDialect:
        """Find a request for log-probabilities that passes the tests, and add it to the dialect."""
        if (
            dialect.logprobs is True
        ):  # mlx_lm.server 0.32.2: a prompt of an earlier text and its answer ends it
            self._record_check(
                SCORED,
                False,
                "a server that takes logprobs as true or false gives them only for drawn tokens",
            )
            return dialect
        answer = greedy.tokens or ()
        text = (*context, *answer)
        reason = ""
        for attempt in _list_scoring_dialects(dialect, context):
            try:
                scores = self._ask_prompt_log_probs(attempt, text)
            except (RequestRefused, MalformedAnswer) as error:
                if attempt.scored != "forced":  # report the reason of the more common way
                    reason = _explain_unscored(attempt, error)
                continue
            if attempt.scored == "forced" and not self._forces_before_bias(
                attempt, context, answer
            ):
                continue
            self._record_check(SCORED, True)
            if not self._has_right_scores(attempt, scores, text, greedy):
                return dialect
            if attempt.scored == "forced":
                self._record_check(RANKED, True)
                self._record_check(TOLD, True)
                return replace(attempt, ranked=True, likeliest=LIKELIEST)
            ranked = scores.ranks is not None and set(scores.ranks[len(context) :]) == {1}
            self._record_check(
                RANKED,
                ranked,
                "none come" if scores.ranks is None else "the likeliest token is not the first",
            )
            if not dialect.ids:
                attempt = self._detect_end_of_text(attempt, context, answer)
            if ranked:
                return self._detect_likeliest_tokens(replace(attempt, ranked=True), text)
            return attempt
        self._record_check(SCORED, False, reason)
        return dialect

    def _has_right_scores(
        self, dialect: ServerDialect, scores: PromptLogProbs, text: Tokens, greedy: WrittenAnswer
    ) -> bool:
        """Return whether the scores of a text that ends with the greedy answer are right.

        Record two checks: the first token has no score, and the other scores are consistent with
        those of the answer.
        """
        first = scores.log_probs[: 1 + dialect.hidden]
        rest = scores.log_probs[1 + dialect.hidden :]
        is_first_unscored = set(first) == {None}
        self._record_check(FIRST, is_first_unscored, "it has a number")
        fault = describe_log_prob_fault(rest, scores.tokens, text, greedy.log_probs)
        if greedy.log_probs and len(greedy.tokens or ()) != len(greedy.log_probs):
            fault = (
                "the text of its answer has other tokens than it drew, so they cannot be compared"
            )
        self._record_check(SAME, not fault, fault)
        return is_first_unscored and not fault

    def _detect_end_of_text(
        self, dialect: ServerDialect, context: Tokens, answer: Tokens
    ) -> ServerDialect:
        """Detect whether the server scores an end of text inside a text as a single token."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        if end is None:
            return dialect
        scores = self._catch_refusal(
            self._ask_prompt_log_probs, dialect, (*context, int(end), *answer)
        )
        self._record_check(ENDS, scores is not None, "as something else, or not at all")
        return replace(dialect, ends=scores is not None)

    def _detect_likeliest_tokens(self, dialect: ServerDialect, text: Tokens) -> ServerDialect:
        """Find out how many of the most likely tokens the server lists; add this to the dialect.

        The number is 0 unless these tokens agree with the ranks in `text`.
        """
        for count in (LIKELIEST, _FEWER):
            scores = self._catch_refusal(self._ask_prompt_log_probs, dialect, text, count)
            if scores is not None:
                agree = likeliest_match_ranks(scores, text, count)
                self._record_check(TOLD, agree, "the ranks refer to more likely ones")
                return replace(dialect, likeliest=count if agree else 0)
        self._record_check(TOLD, False, "they do not come")
        return dialect

    def _forces_before_bias(self, dialect: ServerDialect, context: Tokens, answer: Tokens) -> bool:
        """Return whether log-probabilities are unaffected by the bias that forces a token.

        Only then do they describe the model. The test forces the second most likely token. Its
        log-probability must be the same as without the bias; it must not be 0, as for a certain
        token.
        """
        if not answer:
            return False
        text = (*context, answer[0])
        listed = self._catch_refusal(self._ask_last_log_prob, dialect, text, LIKELIEST)
        if listed is None or listed.ranks is None or listed.ranks[-1] != 1:
            return False
        second, log_prob = next(pair for pair in listed.likeliest[-1] if pair[0] != answer[0])
        forced = self._catch_refusal(self._ask_last_log_prob, dialect, (*context, second))
        value = None
        if forced is not None:
            value = forced.log_probs[-1]
        return value is not None and abs(value - log_prob) <= CLOSE

    # --- samples ---

    def _detect_sampling(
        self, dialect: ServerDialect, context: Tokens, greedy: WrittenAnswer
    ) -> ServerDialect:
        """Test the server's sampling (seeds, several samples, top-p, top-k); add to the dialect."""
        if not dialect.extended:
            dialect, greedy = self._read_generation_config(dialect, context, greedy)
        hot = partial(self._draw_obediently, dialect, context)
        samples_by_seed: dict[int, list[WrittenAnswer]] = {}
        for seed in range(1, 1 + _SEEDS):
            sample = hot(seed)
            if sample is not None:
                samples_by_seed[seed] = sample
            if len(samples_by_seed) == 2:
                break
        if len(samples_by_seed) < 2:
            raise AuditError(
                f"expected samples at temperature 2 from {self.wire.url}, but it gives none"
            )
        seed, first, other = min(samples_by_seed), *samples_by_seed.values()
        copies = hot(seed, count=_COPIES)
        again = hot(seed)
        differ = list_sample_contents(first) != list_sample_contents(other)
        self._record_check(SAMPLES, differ, "they give one answer: only greedy answers are used")
        if not differ:
            return replace(dialect, samples=False)
        several = copies is not None and len(set(list_sample_contents(copies))) == _COPIES
        self._record_check(
            SEVERAL, several, "they do not come" if copies is None else "they are copies"
        )
        repeats = again is not None and list_sample_contents(first) == list_sample_contents(again)
        self._record_check(SEED, repeats, "another one comes")
        obeyed = {}
        for name, decoding in _SURE.items():
            sure = hot(3, decoding)
            obeyed[name] = sure is not None and is_shared_prefix(sure[0].text, greedy.text)
            self._record_check(
                OBEYED[name], obeyed[name], "it is refused" if sure is None else "it is ignored"
            )
        dialect = replace(
            dialect,
            several=_SEVERAL if several else 1,
            top_p=obeyed["top_p"],
            top_k=obeyed["top_k"],
        )
        return replace(
            dialect,
            reported=dialect.scored is not None
            and self._has_undistorted_log_probs(dialect, context, first[0]),
        )

    def _read_generation_config(
        self, dialect: ServerDialect, context: Tokens, greedy: WrittenAnswer
    ) -> tuple[ServerDialect, WrittenAnswer]:
        """Detect whether the server obeys `generation_config`.

        Return the dialect and the greedy answer.
        """

        # top_k is only in this field: a server that ignores the field does not obey it.
        ask = partial(self._draw_obediently, replace(dialect, configured=True), context)
        plain = ask(None, GREEDY)
        sure = ask(3, _SURE["top_k"])
        first = ask(1)
        other = ask(2)
        if plain is None or sure is None or first is None or other is None:
            return dialect, greedy
        if first[0].text != other[0].text and is_shared_prefix(sure[0].text, plain[0].text):
            return replace(dialect, configured=True), plain[0]
        return dialect, greedy

    def _draw_obediently(
        self,
        dialect: ServerDialect,
        context: Tokens,
        seed: int | None,
        decoding: Decoding = _HOT,
        count: int = 1,
    ) -> list[WrittenAnswer] | None:
        """Return samples, assuming that the server obeys top-p and top-k; None if it refuses."""
        obedient = replace(dialect, top_p=True, top_k=True)
        answers = self._catch_refusal(
            self._request_samples, obedient, context, decoding, count, seed
        )
        return answers and answers[0]

    def _has_undistorted_log_probs(
        self, dialect: ServerDialect, context: Tokens, sample: WrittenAnswer
    ) -> bool:
        """Return whether a sample's log-probabilities are those at temperature 1.

        `sample` was drawn at a high temperature.
        """
        fault = "none come"
        if sample.tokens and sample.log_probs is not None:
            text = (*context, *sample.tokens)
            scores = self._catch_refusal(self._ask_prompt_log_probs, dialect, text)
            fault = "they could not be compared"
            if scores is not None:
                fault = describe_log_prob_fault(
                    scores.log_probs[1 + dialect.hidden :], scores.tokens, text, sample.log_probs
                )
        self._record_check(REPORTED, not fault, fault)
        return not fault

    # --- requests ---

    def _request_samples(
        self,
        dialect: ServerDialect,
        prompt: Tokens | str,
        decoding: Decoding = GREEDY,
        count: int = 1,
        seed: int | None = None,
    ) -> tuple[list[WrittenAnswer], int | None]:
        """Return `count` samples, and the server's count of prompt tokens.

        Raise RequestRefused or MalformedAnswer.
        """
        sent: Any = prompt
        if not isinstance(prompt, str):
            sent = self._make_codec(dialect).encode_prompt(prompt)
        body = dialect.build_sampling_body(sent, _LENGTH, decoding, count, seed)

        def read(answer: Any) -> tuple[list[WrittenAnswer], int | None]:
            return dialect.parse_sampled_answers(answer, count, _LENGTH), read_token_count(
                answer, "prompt_tokens"
            )

        return self._ask_twice(body, 2 * len(prompt) + count * _LENGTH, read)

    def _ask_prompt_log_probs(
        self, dialect: ServerDialect, text: Tokens, likeliest: int = 0
    ) -> PromptLogProbs:
        """Return the log-probabilities of a text. Raise RequestRefused or MalformedAnswer."""
        if dialect.scored == "forced":
            values: list[float | None] = [None]
            for end in range(2, len(text) + 1):
                values.append(self._ask_last_log_prob(dialect, text[:end]).log_probs[-1])
            return PromptLogProbs(tuple(values))
        return self._ask_last_log_prob(dialect, text, likeliest)

    def _ask_last_log_prob(
        self, dialect: ServerDialect, text: Tokens, likeliest: int = 0
    ) -> PromptLogProbs:
        """Return the log-probabilities of one answer; a server that is forced gives only the last.

        The last token is that of the text.
        """
        codec = self._make_codec(dialect)
        body = dialect.build_scoring_body(
            codec.encode_prompt(text), likeliest, codec.is_split_character(text[-1])
        )
        return self._ask_twice(
            body,
            2 * len(text) + 9,
            lambda answer: dialect.parse_prompt_log_probs(answer, text, likeliest),
        )

    def _make_codec(self, dialect: ServerDialect) -> TokenTextCodec:
        return TokenTextCodec(self.tokenizer, dialect, (), self.model)

    def _ask_twice(self, body: Mapping[str, Any], at_most: int, parse: Callable[[Any], T]) -> T:
        """Send a request; if it fails, send it once more."""
        request = ServerRequest(body, at_most, lambda answer: {b"": answer}, stored=False)
        try:
            return parse(self.wire.ask_untested_request(request)[b""])
        except MalformedAnswer:
            return parse(self.wire.ask_untested_request(request)[b""])

    def _catch_refusal(self, ask: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of `ask`; None if the server refuses or its answer is malformed."""
        try:
            return ask(*arguments)
        except (RequestRefused, MalformedAnswer):
            return None

    def _record_check(self, name: str, passed: bool | None, failure: str = "") -> None:
        self.checks.append(HandshakeCheck(name, passed, "" if passed else failure))

    def _encode(self, text: str, special: bool = False) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])
