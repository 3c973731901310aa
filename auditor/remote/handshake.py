"""What a server really does, tried out before anything of it is believed.

A dozen short questions about a sentence that is nobody's secret: servers answer 200 to what they ignore, count one
token too few, shift what they echo by one, or send one sample several times. What fails is not used, and is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.decoding import GREEDY, Decoding
from auditor.models.partial_distributions import LIKELIEST
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.remote.connection import (
    MalformedAnswer,
    RequestRefused,
    ServerConnection,
    ServerRequest,
    tokens_counted_by_server,
)
from auditor.remote.server_dialect import IgnoredParameter, PromptLogProbs, ServerDialect, WrittenAnswer

T = TypeVar("T")

TEXT = "The quick brown fox jumps over the lazy dog, and"  # not the end of anything: something must follow
_LENGTH = 8  # tokens of an answer
_COPIES = 4
_SEVERAL = 16  # samples that one request asks for: what a server holds in memory for it is bounded
_HOT = Decoding(temperature=2.0)  # so that two equal samples are no chance
_SURE = {"top_p": replace(_HOT, top_p=1e-4), "top_k": replace(_HOT, top_k=1)}  # greedy, where it is not ignored
_FEWER = 5  # of the likeliest tokens, where a server tells no more
_CLOSE = 0.05  # nats: half precision in another batch is this far off; the number of a neighbouring token is not

_DEFAULTS = (
    "the server knows no field that turns its own defaults off (top_k, min_p, penalties): if it has any, samples are "
    "of another distribution than is said"
)

COUNTED = "the tokenizer counts the tokens of a text as the server does"
IDS = "token ids are taken as a prompt"
RETURNED = "the ids that come back are the tokenizer's"
SCORED = "log-probabilities of all tokens of a prompt come back"
FIRST = "the first of them is empty"
SAME = "a token has the same log-probability given as drawn"
ENDS = "an end of text within a text is scored as one token"
RANKED = "ranks come with them"
TOLD = "so do the likeliest tokens at each place"
REPORTED = "temperature does not change the log-probabilities that come with a sample"
SEVERAL = "several samples of one request differ (n)"
SEED = "a seed gives the same sample again"
OBEYED = {"top_p": "top_p is obeyed", "top_k": "top_k is obeyed"}


@dataclass(frozen=True)
class HandshakeCheck:
    """One thing that was tried. held: None where it could not be; found: what came where it did not hold, in words."""

    name: str
    held: bool | None
    found: str = ""

    def __str__(self) -> str:
        said = {True: "yes", False: f"no, {self.found}", None: f"unknown, {self.found}"}[self.held]
        return f"{self.name}: {said}"


@dataclass(frozen=True)
class Handshake:
    """dialect: how to speak to this server; answer: a digest of its greedy answer, by which it is known again.

    room: tokens that fit in a text, None where it does not say.
    """

    dialect: ServerDialect
    checks: tuple[HandshakeCheck, ...]
    answer: str
    room: int | None = None

    @property
    def capabilities(self) -> frozenset[str]:
        scored = {"likelihood"} if self.dialect.scored else set[str]()
        ranked = {"ranks"} if self.dialect.ranked else set()
        return frozenset({"draw"} | scored | ranked | ({"likeliest"} if self.dialect.likeliest else set()))

    def notes(self) -> tuple[str, ...]:
        """What a reader must know of this access: sentences."""
        held = sum(check.held is True for check in self.checks)
        sent = "token ids" if self.dialect.ids else "text"
        return (
            f"{self.dialect.model} is behind an API: its access is what a handshake found, {self._access_label}; it is "
            f"sent {sent}; {held} of {len(self.checks)} checks held",
            *(() if self.dialect.extended and self.dialect.top_k else (_DEFAULTS,)),
            *(f"handshake: {check}" for check in self.checks if not check.held),
        )

    @property
    def _access_label(self) -> str:
        if not self.dialect.scored:
            why = next(
                (check.found for check in self.checks if check.name in (SCORED, FIRST, SAME) and not check.held), ""
            )
            return f"text only ({why})"
        more = ", with ranks" * self.dialect.ranked
        more += f" and the {self.dialect.likeliest} likeliest beside them" if self.dialect.likeliest else ""
        return f"sampled tokens and log-probabilities of given tokens{more}"


def shake_hands(wire: ServerConnection, model: str, tokenizer: Any) -> Handshake:
    """Tries the server out. Raises AuditError where it does not serve this model, or draws no samples of it."""
    served = wire.served_models_by_name()
    if served and model not in served:
        raise AuditError(f"expected a model that {wire.url} serves ({', '.join(sorted(served))}), got {model!r}")
    room = served.get(model, {}).get("max_model_len")
    return _HandshakeInProgress(wire, model, tokenizer).run_handshake(room if isinstance(room, int) else None)


@dataclass
class _HandshakeInProgress:
    """One question after another; each is asked in the words that the ones before it have shown to be understood."""

    wire: ServerConnection
    model: str
    tokenizer: Any
    checks: list[HandshakeCheck] = field(default_factory=list)

    def run_handshake(self, room: int | None) -> Handshake:
        dialect, context, greedy = self._detect_prompt_form(ServerDialect(self.model))
        # Scoring first: the log-probabilities that come with samples are compared with it.
        dialect = self._detect_sampling(self._detect_scoring(dialect, context, greedy), context, greedy)
        return Handshake(dialect, tuple(self.checks), hashlib.sha256(greedy.text.encode()).hexdigest(), room)

    # --- how a text is sent ---

    def _detect_prompt_form(self, plain: ServerDialect) -> tuple[ServerDialect, Tokens, WrittenAnswer]:
        """(dialect, the tokens that all further questions begin with, the greedy answer to them)."""
        bare, special = (self._encode(TEXT, special=special) for special in (False, True))
        (by_text,), counted = self._ask_first_question(plain)
        # Taken to stand in front, as a BOS does, and only where the server counts them too.
        adds = special[: len(special) - len(bare)] if counted == len(special) else ()
        agrees = None if counted is None else counted in (len(bare), len(special))
        self._record_check(COUNTED, agrees, "it counts none" if counted is None else f"{counted} and {len(bare)}")
        if agrees is False:
            raise AuditError(
                f"expected the tokenizer of {self.model!r}, got one that makes {len(bare)} tokens of a text of which "
                f"{self.wire.url} makes {counted}: give --tokenizer DIR"
            )
        context, dialect = (*adds, *bare), replace(plain, adds=adds, extended=True)
        # In vLLM's words too, where they are not refused: the answer without a server's own defaults is another.
        found = self._result_unless_refused(partial(self._request_samples, dialect, context, GREEDY, 1, None))
        dialect, by_text = (replace(dialect, extended=False), by_text) if found is None else (dialect, found[0][0])
        by_ids = self._answer_to_token_ids(replace(dialect, ids=True), context, by_text)
        answer = by_text if by_ids is None else by_ids
        read = answer.tokens is not None and decode_keeping_special_tokens(self.tokenizer, answer.tokens) == answer.text
        self._record_check(RETURNED, read, "none come" if answer.tokens is None else "they write another text")
        dialect = replace(dialect, ids=by_ids is not None, returned=read)
        return dialect, context, answer if read else replace(answer, tokens=None)

    def _answer_to_token_ids(
        self, dialect: ServerDialect, context: Tokens, by_text: WrittenAnswer
    ) -> WrittenAnswer | None:
        """The answer to the same tokens by their ids; None where they are refused, or mean other tokens."""
        found = self._result_unless_refused(partial(self._request_samples, dialect, context, GREEDY, 1, None))
        if found is None:
            self._record_check(IDS, False, "they are refused")
            return None
        (by_ids,), counted = found
        same = counted in (None, len(context)) and _is_one_answer_prefix_of_other(by_ids.text, by_text.text)
        self._record_check(IDS, same, "they mean other tokens to it")
        return by_ids if same else None

    def _ask_first_question(self, plain: ServerDialect) -> tuple[list[WrittenAnswer], int | None]:
        """The greedy answer to the text, in OpenAI's words alone, and how many tokens the server made of the text."""
        try:
            return self._request_samples(plain, TEXT, GREEDY, 1, None)
        except RequestRefused as error:
            what = f"a model {self.model!r}" if error.status == 404 else "a completions endpoint"
            raise AuditError(f"expected {what} behind {self.wire.url}, but {error}") from None
        except MalformedAnswer as error:
            raise AuditError(f"expected a completions endpoint behind {self.wire.url}, but {error}") from None

    # --- how likely given tokens are ---

    def _detect_scoring(self, dialect: ServerDialect, context: Tokens, greedy: WrittenAnswer) -> ServerDialect:
        """The way of asking for log-probabilities that can be believed, if there is one."""
        answer = self._encode(greedy.text) if greedy.tokens is None else greedy.tokens
        whole, why = (*context, *answer), ""
        for asked in self._scoring_dialects(dialect):
            try:
                given = self._ask_prompt_log_probs(asked, whole)
            except RequestRefused as error:
                why = f"{asked.scored} is refused with {error.status}"
                continue
            except IgnoredParameter as error:
                why = f"the server ignores {'echo and logprobs' if asked.scored == 'echo' else asked.scored}: {error}"
                continue
            except MalformedAnswer as error:
                why = f"by {asked.scored}, {error}"
                continue
            self._record_check(SCORED, True)
            first, rest = given.log_probs[: 1 + asked.hidden], given.log_probs[1 + asked.hidden :]
            self._record_check(FIRST, set(first) == {None}, "it has a number")
            fault = _log_prob_fault_sentence(rest, given.tokens, whole, greedy.log_probs)
            if greedy.log_probs and len(answer) != len(greedy.log_probs):
                fault = "its answer is text of other tokens than it drew, so that they cannot be compared"
            self._record_check(SAME, not fault, fault)
            if fault or set(first) != {None}:
                return dialect
            ranked = given.ranks is not None and set(given.ranks[len(context) :]) == {1}
            self._record_check(
                RANKED, ranked, "none come" if given.ranks is None else "the likeliest token is not the first"
            )
            if not dialect.ids:
                asked = self._dialect_with_end_of_text(asked, context, answer)
            return self._dialect_with_likeliest_tokens(replace(asked, ranked=True), whole) if ranked else asked
        self._record_check(SCORED, False, why)
        return dialect

    def _dialect_with_end_of_text(self, dialect: ServerDialect, context: Tokens, answer: Tokens) -> ServerDialect:
        """Whether an end of text within a text is scored as one: sent as text, it may be read as letters."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        if end is None:
            return dialect
        given = self._result_unless_refused(partial(self._ask_prompt_log_probs, dialect, (*context, int(end), *answer)))
        self._record_check(ENDS, given is not None, "as something else, or not at all")
        return replace(dialect, ends=given is not None)

    def _dialect_with_likeliest_tokens(self, dialect: ServerDialect, whole: Tokens) -> ServerDialect:
        """With how many of the likeliest tokens are told, if they come and are those that the ranks speak of."""
        for count in (LIKELIEST, _FEWER):
            given = self._result_unless_refused(partial(self._ask_prompt_log_probs, dialect, whole, count))
            if given is not None:
                agree = _likeliest_match_ranks(given, whole, count)
                self._record_check(TOLD, agree, "the ranks speak of more likely ones")
                return replace(dialect, likeliest=count if agree else 0)
        self._record_check(TOLD, False, "they do not come")
        return dialect

    def _scoring_dialects(self, dialect: ServerDialect) -> Iterator[ServerDialect]:
        """vLLM's; OpenAI's; and OpenAI's where what the server puts before a text is not echoed (llama-cpp-python)."""
        yield replace(dialect, scored="prompt_logprobs")
        yield replace(dialect, scored="echo")
        if dialect.adds:
            yield replace(dialect, scored="echo", hidden=len(dialect.adds))

    # --- how samples are drawn ---

    def _detect_sampling(self, dialect: ServerDialect, context: Tokens, greedy: WrittenAnswer) -> ServerDialect:
        def hot(count: int, seed: int, decoding: Decoding = _HOT) -> list[WrittenAnswer] | None:
            every = replace(dialect, top_p=True, top_k=True)  # as if it obeyed both: else `draw` refuses to ask
            found = self._result_unless_refused(lambda: self._request_samples(every, context, decoding, count, seed))
            return None if found is None else found[0]

        copies, first, again, other = hot(_COPIES, 1), hot(1, 1), hot(1, 1), hot(1, 2)
        if first is None or again is None or other is None:
            raise AuditError(f"expected samples at temperature 2 from {self.wire.url}, but it gives none")
        if _sampled_tokens_or_texts(first) == _sampled_tokens_or_texts(other):
            raise AuditError(
                f"expected samples that differ from {self.wire.url}, but at temperature 2 two seeds give one answer: "
                "it does not sample"
            )
        several = copies is not None and len(set(_sampled_tokens_or_texts(copies))) == _COPIES
        self._record_check(SEVERAL, several, "they do not come" if copies is None else "they are copies")
        self._record_check(
            SEED, _sampled_tokens_or_texts(first) == _sampled_tokens_or_texts(again), "another one comes"
        )
        obeyed = {}
        for name, decoding in _SURE.items():
            sure = hot(1, 3, decoding)
            obeyed[name] = sure is not None and _is_one_answer_prefix_of_other(sure[0].text, greedy.text)
            self._record_check(OBEYED[name], obeyed[name], "it is refused" if sure is None else "it is ignored")
        dialect = replace(dialect, several=_SEVERAL if several else 1, top_p=obeyed["top_p"], top_k=obeyed["top_k"])
        return replace(
            dialect, reported=dialect.scored is not None and self._has_undistorted_log_probs(dialect, context, first[0])
        )

    def _has_undistorted_log_probs(self, dialect: ServerDialect, context: Tokens, sample: WrittenAnswer) -> bool:
        """Whether what comes with a hot sample are log-probabilities of the distribution itself."""
        fault = "none come"
        if sample.tokens and sample.log_probs is not None:
            whole = (*context, *sample.tokens)
            given = self._result_unless_refused(lambda: self._ask_prompt_log_probs(dialect, whole))
            fault = "they could not be compared"
            if given is not None:
                fault = _log_prob_fault_sentence(
                    given.log_probs[1 + dialect.hidden :], given.tokens, whole, sample.log_probs
                )
        self._record_check(REPORTED, not fault, fault)
        return not fault

    # --- asking ---

    def _request_samples(
        self, dialect: ServerDialect, prompt: str | Tokens, decoding: Decoding, count: int, seed: int | None
    ) -> tuple[list[WrittenAnswer], int | None]:
        """Samples, and how many tokens the server says the prompt had. Raises RequestRefused and MalformedAnswer."""
        if not isinstance(prompt, str) and not dialect.ids:
            prompt = decode_keeping_special_tokens(self.tokenizer, prompt[len(dialect.adds) :])
        body = dialect.sampling_request_body(
            prompt if isinstance(prompt, str) else list(prompt), _LENGTH, decoding, count, seed
        )

        def read(answer: Any) -> tuple[list[WrittenAnswer], int | None]:
            return dialect.parse_sampled_answers(answer, count, _LENGTH), tokens_counted_by_server(
                answer, "prompt_tokens"
            )

        return self._ask_up_to_twice(body, 2 * len(prompt) + count * _LENGTH, read)

    def _ask_prompt_log_probs(self, dialect: ServerDialect, whole: Tokens, likeliest: int = 0) -> PromptLogProbs:
        """Raises RequestRefused and MalformedAnswer."""
        prompt = (
            list(whole) if dialect.ids else decode_keeping_special_tokens(self.tokenizer, whole[len(dialect.adds) :])
        )
        body = dialect.scoring_request_body(prompt, likeliest)
        return self._ask_up_to_twice(
            body, 2 * len(whole), lambda answer: dialect.parse_prompt_log_probs(answer, whole, likeliest)
        )

    def _ask_up_to_twice(self, body: Mapping[str, Any], at_most: int, read: Callable[[Any], T]) -> T:
        """Twice, before a server is said to answer otherwise than it should: once may be an accident."""
        request = ServerRequest(body, at_most, lambda answer: {b"": answer}, stored=False)
        try:
            return read(self.wire.ask_untested_request(request)[b""])
        except MalformedAnswer:
            return read(self.wire.ask_untested_request(request)[b""])

    def _result_unless_refused(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except (RequestRefused, MalformedAnswer):
            return None

    def _record_check(self, name: str, held: bool | None, found: str = "") -> None:
        self.checks.append(HandshakeCheck(name, held, "" if held else found))

    def _encode(self, text: str, special: bool = False) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])


def _sampled_tokens_or_texts(samples: Sequence[WrittenAnswer]) -> list[Any]:
    return [one.text if one.tokens is None else one.tokens for one in samples]


def _is_one_answer_prefix_of_other(one: str, other: str) -> bool:
    """Whether one is the beginning of the other: an answer that ends at end of text is shorter."""
    return one.startswith(other) or other.startswith(one)


def _likeliest_match_ranks(given: PromptLogProbs, whole: Tokens, count: int) -> bool:
    """Whether at every place rank - 1 other tokens (`count` at most) are told that are as likely as the text's own."""
    if given.ranks is None:
        return False
    places = zip(whole, given.log_probs, given.ranks, given.likeliest, strict=True)
    return all(
        sum(value >= own for one, value in likeliest if one != token) >= min(rank - 1, count)
        for token, own, rank, likeliest in places
        if own is not None and rank is not None
    )


def _log_prob_fault_sentence(
    scored: Sequence[float | None], tokens: Tokens | None, whole: Tokens, drawn: Sequence[float] | None
) -> str:
    """What is wrong with log-probabilities of the last tokens of a text, the last of which were drawn with these.

    "" for nothing. tokens: of the text, as the server says.
    """
    if tokens is not None and tokens[1:] != whole[1:]:
        return "they are those of other tokens"
    values = [value for value in scored if value is not None]
    if len(values) != len(scored):
        return "some are missing"
    if not drawn:
        return "none come with what is drawn, so that they cannot be compared"
    if _largest_log_prob_difference(values[-len(drawn) :], drawn) <= _CLOSE:
        return ""
    for shift in (-1, 1):
        apart = values[len(values) - len(drawn) + shift :][: len(drawn)]  # one fewer where the shift is 1
        if (
            len(drawn) > 2
            and len(apart) >= len(drawn) - 1
            and _largest_log_prob_difference(apart, drawn[: len(apart)]) <= _CLOSE
        ):
            return "they are shifted by one token"
    return f"they are up to {_largest_log_prob_difference(values[-len(drawn) :], drawn):.2g} nats apart"


def _largest_log_prob_difference(values: Sequence[float], others: Sequence[float]) -> float:
    return max((abs(one - other) for one, other in zip(values, others, strict=False)), default=0.0)
