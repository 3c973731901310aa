"""How one server is spoken to: in which words it is asked, and what its answers say.

Completions endpoints share a schema (OpenAI's, with vLLM's extensions) and little else: they ignore
in silence what they do not know. Knows the schema and token ids; sends nothing, and believes what a
handshake found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from auditor.core.errors import NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.decoding import Decoding
from auditor.remote import withheld_answers
from auditor.remote.connection import MalformedAnswer, tokens_counted_by_server

# What vLLM takes beside OpenAI's fields: ids of the tokens that come back, end of text as a token
# like any other, and nothing in place of what is asked for. What is left out is taken from the
# model's generation_config.json there, and llama.cpp has defaults of its own (top_k 40, min_p 0.05;
# llama-cpp-python also repeat_penalty 1.1, even when greedy).
_IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_OFF: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
EXTENSIONS: dict[str, Any] = {**_IDS, "ignore_eos": True, **_OFF}

# how the log-probabilities of given tokens are asked for
Scored = Literal["prompt_logprobs", "echo", "forced"]
_FORCE = 1e4  # logit bias, above any logit: this token is drawn
_ALL = 10**6  # log-probabilities: llama.cpp tells as many as its vocabulary has
_NAMED = "token_id:"  # how vLLM writes a token of which ids are asked for


class IgnoredParameter(MalformedAnswer):
    """The server ignored what was asked for: its answer holds none of it."""


@dataclass(frozen=True)
class WrittenAnswer:
    """One sample. tokens, log_probs: None where the server does not say.

    spelled: the text of the drawn tokens, one by one; drawn: how many they were; None where it does
    not say. ended: whether it says that the model ended the text; kind: of `withheld_answers`, ""
    where it came through; readings: the tokens that the text may stand for, if nothing says which.
    """

    text: str
    tokens: Tokens | None = None
    log_probs: tuple[float, ...] | None = None
    spelled: str | None = None
    drawn: int | None = None
    ended: bool = False
    kind: str = ""
    readings: tuple[Tokens, ...] = ()


@dataclass(frozen=True)
class PromptLogProbs:
    """What a server says of the tokens of a text. log_probs: None for the first, which nothing
    stands before, and for those that it does not echo and the one behind them.

    ranks: from 1, None where it gives none; tokens: its own ids, None where it does not say;
    likeliest: (id, log-probability) of the likeliest tokens at each place, falling, none at the
    first.
    """

    log_probs: tuple[float | None, ...]
    ranks: tuple[int | None, ...] | None = None
    tokens: Tokens | None = None
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class ServerDialect:
    """What a server understands, as far as a handshake could tell.

    ids: takes token ids as a prompt; returned: whether ids that come back are believed; extended:
    is sent `EXTENSIONS`;
    scored: how it scores given tokens; ranked: whether with ranks; likeliest: how many of the
    likeliest tokens it tells beside them; reported: whether the log-probabilities of what it draws
    are the distribution's own; several: how many samples one request may ask for; top_p, top_k: are
    obeyed; adds: tokens that it puts before a text; hidden: how many of these it does not echo, so
    that it says nothing of the token behind them;
    ends: whether it scores the end of text as a token of a text like any other; samples: whether it
    draws at random;
    logprobs: the value of the request's field `logprobs`, True for a server that takes no number
    (mlx_lm.server);
    drawable: a token that can be drawn instead of one that writes a part of a character;
    configured: whether decodings are sent as `generation_config` (`transformers serve`); trims:
    whether the text of an answer may lack its first space.
    """

    model: str
    ids: bool = False
    returned: bool = True
    extended: bool = False
    scored: Scored | None = None
    ranked: bool = False
    likeliest: int = 0
    reported: bool = False
    several: int = 1
    top_p: bool = False
    top_k: bool = False
    adds: Tokens = ()
    hidden: int = 0
    ends: bool = True
    samples: bool = True
    logprobs: int = 1
    drawable: int = 0
    configured: bool = False
    trims: bool = False

    def asks_for_ranks(self, likeliest: int) -> bool:
        """Return whether a request for log-probabilities of given tokens also asks for their
        ranks."""
        return self.ranked and (self.scored != "forced" or likeliest > 0)

    # --- what is asked ---

    def sampling_request_body(
        self, prompt: Any, length: int, decoding: Decoding, count: int, seed: int | None
    ) -> dict[str, Any]:
        """Body that asks for samples. Raises NotApplicable for a decoding that the server does not
        do."""
        if decoding.forbidden:
            raise NotApplicable(f"needs end of text masked; {self.model} cannot be told so")
        if decoding.temperature > 0 and not self.samples:
            raise NotApplicable(
                f"draws at random; the server of {self.model} gives one answer: -A temperature=0"
            )
        for wanted, done, name, off in (
            (decoding.top_k > 0, self.top_k, "top_k", "top_k=0"),
            (decoding.top_p < 1, self.top_p, "top_p", "top_p=1"),
        ):
            if wanted and not done:
                raise NotApplicable(
                    f"draws with {name}, which the server of {self.model} ignores: -A {off}"
                )
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": decoding.temperature,
        }
        body |= {"top_p": decoding.top_p, "n": count, "logprobs": self.logprobs}
        body |= {} if seed is None else {"seed": seed}
        if self.configured:
            return body | {"generation_config": _generation_config_json(length, decoding)}
        if (
            self.scored == "forced"
        ):  # llama.cpp's ignore_eos takes the end of text out of the distribution
            body |= _IDS | _OFF
        elif self.extended:
            body |= EXTENSIONS
        return body | ({"top_k": decoding.top_k} if decoding.top_k else {})

    def scoring_request_body(
        self, prompt: Any, likeliest: int = 0, split: bool = False
    ) -> dict[str, Any]:
        """Body that asks for the prompt's log-probabilities, and one token more, as some servers
        cannot draw none.

        A server whose log-probabilities are those before any bias (llama.cpp) is made to draw the
        last token instead; if the likeliest tokens are asked for, or if it writes a part of a
        character (`split`), another one, beside which the server lists all tokens: llama.cpp says
        nothing of a token whose text it holds back.

        likeliest: so many tokens are asked for beside each, of those who speak as vLLM does.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "n": 1}
        if self.scored == "forced":
            listed = split or likeliest > 0
            token = self.drawable if listed else prompt[-1]
            body |= {"prompt": prompt[:-1], "temperature": 0, "logit_bias": [[token, _FORCE]]}
            # without ignore_eos, with which llama.cpp does not draw the end of text
            return body | {"logprobs": _ALL if listed else self.logprobs} | _IDS | _OFF
        echo = {"echo": True, "logprobs": self.logprobs}
        body |= {"prompt_logprobs": likeliest} if self.scored == "prompt_logprobs" else echo
        return body | (_IDS if self.extended else {})

    # --- what is answered ---

    def parse_sampled_answers(self, answer: Any, count: int, length: int) -> list[WrittenAnswer]:
        """Reads `count` samples, each of at most `length` tokens, by their index. Raises
        MalformedAnswer."""
        choices = _required_answer_list_field(answer, "choices")
        if len(choices) != count or {
            _required_answer_field(choice, "index") for choice in choices
        } != set(range(count)):
            raise MalformedAnswer(
                f"{count} samples were asked for, and {len(choices)} came, or one twice"
            )
        counted = tokens_counted_by_server(answer, "completion_tokens")
        # servers count all samples together: of several it is known what each has only where all
        # are full
        each = counted if count == 1 else length if counted == count * length else None
        every = [
            _parse_sample_choice(choice, each)
            for choice in sorted(choices, key=lambda choice: choice["index"])
        ]
        return every if self.returned else [replace(one, tokens=None) for one in every]

    def parse_prompt_log_probs(
        self, answer: Any, prompt: Tokens, likeliest: int = 0
    ) -> PromptLogProbs:
        """Reads the log-probabilities of the prompt's tokens. Raises MalformedAnswer."""
        choice = _required_answer_list_field(answer, "choices")[:1]
        if not choice:
            raise MalformedAnswer("no answer came")
        if self.scored == "prompt_logprobs":
            found = _parse_vllm_prompt_log_probs(choice[0], prompt, likeliest)
        elif self.scored == "forced":
            found = _parse_forced_token(choice[0], prompt, likeliest)
        else:
            # One token was asked for after the prompt: it is there unless the server counts none.
            drawn = 0 if tokens_counted_by_server(answer, "completion_tokens") == 0 else 1
            found = _log_probs_of_echoed_prompt(choice[0], drawn, self.adds[: self.hidden])
        if len(found.log_probs) != len(prompt):
            raise MalformedAnswer(
                f"log-probabilities of {len(found.log_probs)} tokens came, not of {len(prompt)}"
            )
        return found


def _parse_sample_choice(choice: Any, counted: int | None) -> WrittenAnswer:
    """counted: how many tokens of it were drawn, as the answer counts them."""
    kind, own = withheld_answers.withheld_kind_from_server(choice), choice.get("logprobs")
    text = choice.get("text", "") or "" if kind else _required_answer_field(choice, "text")
    if not isinstance(text, str):
        raise MalformedAnswer("a sample without text came")
    tokens, log_probs, spelled = choice.get("token_ids"), None, None
    if isinstance(own, Mapping) and isinstance(own.get("content"), list):
        entries = _required_answer_list_field(own, "content")
        log_probs = tuple(_parsed_server_log_prob(entry.get("logprob")) for entry in entries)
        if tokens is None and all("id" in entry for entry in entries):
            tokens = [entry["id"] for entry in entries]
        if (
            counted is not None and len(entries) < counted
        ):  # llama.cpp lists no token that writes a part of a character
            tokens = log_probs = None
    elif isinstance(own, Mapping) and isinstance(own.get("token_logprobs"), list):
        log_probs = tuple(_parsed_server_log_prob(value) for value in own["token_logprobs"])
        words = own.get("tokens")
        if tokens is None:
            tokens = _token_ids_from_names(words)
        if (
            tokens is None
            and isinstance(words, list)
            and all(isinstance(word, str) for word in words)
        ):
            spelled = "".join(words)
    if tokens is not None:
        tokens = tuple(map(_parsed_server_token_id, tokens))
        if log_probs is not None and len(log_probs) != len(tokens):
            raise MalformedAnswer(
                f"{len(tokens)} tokens came with {len(log_probs)} log-probabilities"
            )
    drawn = next((len(column) for column in (tokens, log_probs) if column is not None), counted)
    return WrittenAnswer(
        text, tokens, log_probs, spelled, drawn, withheld_answers.has_model_ended_text(choice), kind
    )


def _generation_config_json(length: int, decoding: Decoding) -> str:
    """Return a decoding as `transformers` configures it; its own default of top_k is 50, so that 0
    is said."""
    config: dict[str, Any] = {
        "max_new_tokens": length,
        "do_sample": decoding.temperature > 0,
        "top_k": decoding.top_k,
    }
    if decoding.temperature > 0:
        config |= {"temperature": decoding.temperature, "top_p": decoding.top_p}
    return json.dumps(config)


def _parse_vllm_prompt_log_probs(choice: Any, prompt: Tokens, likeliest: int) -> PromptLogProbs:
    """vLLM's: the token that stands at each place and the likeliest there, by ids, with ranks;
    nothing at the first."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or not entries:
        raise IgnoredParameter("no log-probabilities of the prompt came")
    log_probs, ranks, tokens = list[float | None](), list[Any](), list[int]()
    beside = list[tuple[tuple[int, float], ...]]()
    for place, entry in enumerate(entries):
        every = {} if entry is None else _parse_token_scores(entry)
        # the text's own token comes beside the likeliest, unless it is one of them
        if every and len(every) not in (likeliest, likeliest + 1):
            raise MalformedAnswer(
                f"{len(every)} tokens came at a place, not its own and the {likeliest} likeliest"
            )
        here = prompt[place] if place < len(prompt) else -1
        # Else the server read another token, which vLLM lists first: its id tells the caller.
        token = here if here in every else next(iter(every), -1)
        value, rank = every.get(token, (None, None))
        log_probs.append(value)
        ranks.append(rank)
        tokens.append(token)
        falling = sorted(every, key=lambda one: (-every[one][0], one))
        beside.append(tuple((one, every[one][0]) for one in falling[:likeliest]))
    known = all(isinstance(rank, int) and rank >= 1 for rank in ranks[1:])
    return PromptLogProbs(
        tuple(log_probs), tuple(ranks) if known else None, tuple(tokens), tuple(beside)
    )


def _parse_forced_token(choice: Any, prompt: Tokens, likeliest: int) -> PromptLogProbs:
    """Return what llama.cpp says of the prompt's last token, which is drawn or listed beside
    another; None before it.

    Ranks come only with the likeliest tokens, which are asked for with all others.
    """
    logprobs = choice.get("logprobs")
    entries = (
        _required_answer_list_field(logprobs, "content") if isinstance(logprobs, Mapping) else ()
    )
    if len(entries) != 1:
        raise IgnoredParameter("no log-probability of a forced token came")
    log_probs: dict[int, float] = {}
    for entry in (*(entries[0].get("top_logprobs") or ()), entries[0]):
        token = _parsed_server_token_id(_required_answer_field(entry, "id"))
        log_probs[token] = _parsed_server_log_prob(_required_answer_field(entry, "logprob"))
    value = log_probs.get(prompt[-1])
    if value is None:
        raise IgnoredParameter("another token is drawn than the one that is forced")
    unknown = len(prompt) - 1
    if not likeliest:
        return PromptLogProbs((*[None] * unknown, value))
    if len(log_probs) <= likeliest:
        raise MalformedAnswer(f"{len(log_probs)} tokens came, not all of the vocabulary")
    falling = sorted(log_probs.items(), key=lambda item: (-item[1], item[0]))
    rank = sum(other >= value for other in log_probs.values())
    beside = (*[()] * unknown, tuple(falling[:likeliest]))
    return PromptLogProbs((*[None] * unknown, value), (*[1] * unknown, rank), None, beside)


def _parse_token_scores(entry: Any) -> dict[int, tuple[float, Any]]:
    """Log-probability and rank of each token that is told of at one place, by its id."""
    if not isinstance(entry, Mapping):
        raise MalformedAnswer("log-probabilities of the prompt came that are no tokens'")
    return {
        _parsed_server_token_id(token): (
            _parsed_server_log_prob(_required_answer_field(own, "logprob")),
            own.get("rank"),
        )
        for token, own in entry.items()
    }


def _log_probs_of_echoed_prompt(choice: Any, drawn: int, hidden: Tokens) -> PromptLogProbs:
    """OpenAI's: scores of the prompt, which comes back without its hidden tokens and before `drawn`
    sampled ones."""
    own = choice.get("logprobs")
    if not isinstance(own, Mapping) or not isinstance(own.get("token_logprobs"), list):
        raise IgnoredParameter("no log-probabilities came")
    values = own["token_logprobs"]
    values = values[: len(values) - drawn]
    log_probs = tuple(None if value is None else _parsed_server_log_prob(value) for value in values)
    tokens = _token_ids_from_names(own.get("tokens"))
    tokens = None if tokens is None else (*hidden, *tokens[: len(values)])
    return PromptLogProbs((*[None] * len(hidden), *log_probs), None, tokens)


def _token_ids_from_names(words: Any) -> Tokens | None:
    """The ids of tokens that a server names by them; None where it names one by its text."""
    if not isinstance(words, list) or not all(
        isinstance(word, str) and word.startswith(_NAMED) for word in words
    ):
        return None
    return tuple(_parsed_server_token_id(word.removeprefix(_NAMED)) for word in words)


def _parsed_server_log_prob(value: Any) -> float:
    # servers round: a token that is certain may come back a little above 0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or value > 1e-3
    ):
        raise MalformedAnswer("a log-probability came that is none")
    return min(0.0, float(value))


def _parsed_server_token_id(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise MalformedAnswer("a token id came that is none") from None


def _required_answer_field(answer: Any, name: str) -> Any:
    if not isinstance(answer, Mapping) or name not in answer:
        raise MalformedAnswer(f"an answer without {name} came")
    return answer[name]


def _required_answer_list_field(answer: Any, name: str) -> Sequence[Mapping[str, Any]]:
    found = _required_answer_field(answer, name)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise MalformedAnswer(f"{name} came that are no list")
    return found
