"""Build the request bodies for a server and parse its answers.

Completions endpoints share a schema (OpenAI's, with vLLM's extensions), but silently ignore unknown
fields. This module sends nothing, and relies on the results of a handshake.
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
from auditor.remote.connection import MalformedAnswer, read_token_count

# vLLM's fields in addition to OpenAI's: return token ids, treat end of text as any other token, and
# replace no requested setting. Missing fields come from the model's generation_config.json there,
# and llama.cpp has its own defaults (top_k 40, min_p 0.05; llama-cpp-python also repeat_penalty
# 1.1, even when greedy).
_IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_OFF: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
EXTENSIONS: dict[str, Any] = {**_IDS, "ignore_eos": True, **_OFF}

# how to request the log-probabilities of given tokens
Scored = Literal["prompt_logprobs", "echo", "forced"]
_FORCE = 1e4  # logit bias above any logit: this token is drawn
_ALL = 10**6  # log-probabilities: llama.cpp lists at most its vocabulary
_NAMED = "token_id:"  # vLLM's form of a token if ids are requested


class IgnoredParameter(MalformedAnswer):
    """Error for an answer in which the server ignored a parameter."""


@dataclass(frozen=True)
class WrittenAnswer:
    """One sampled answer of a server.

    Attributes:
        tokens: the drawn tokens; None if not reported.
        log_probs: their log-probabilities; None if not reported.
        spelled: the texts of the drawn tokens, joined; None if not reported.
        n_tokens: number of drawn tokens; None if not reported.
        ended: whether the server reports that the model ended the text.
        kind: a kind of `withheld_answers`; "" for a complete answer.
        readings: possible tokenisations of the text, if there are several.
    """

    text: str
    tokens: Tokens | None = None
    log_probs: tuple[float, ...] | None = None
    spelled: str | None = None
    n_tokens: int | None = None
    ended: bool = False
    kind: str = ""
    readings: tuple[Tokens, ...] = ()


@dataclass(frozen=True)
class PromptLogProbs:
    """A server's scores of the tokens of a text.

    Attributes:
        log_probs: one value per token, in nats; None if not reported, as for the first token.
        ranks: rank of each token, from 1; None if not reported.
        tokens: the server's token ids; None if not reported.
        likeliest: for each position, (id, log-probability) of the most likely tokens in descending
            order; empty at the first position.
    """

    log_probs: tuple[float | None, ...]
    ranks: tuple[int | None, ...] | None = None
    tokens: Tokens | None = None
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class ServerDialect:
    """Features of a server, as detected by a handshake.

    Attributes:
        ids: whether the server accepts token ids as a prompt.
        returned: whether the ids that it returns can be trusted.
        extended: whether it accepts the fields `EXTENSIONS`.
        scored: the way in which it scores given tokens; None if it does not.
        ranked: whether scores include ranks.
        likeliest: number of most likely tokens listed with scores.
        reported: whether log-probabilities of drawn tokens are those of the unmodified
            distribution.
        several: largest number of samples per request.
        top_p: whether the server obeys this field.
        top_k: whether the server obeys this field.
        adds: tokens that it puts before a text.
        hidden: number of these tokens missing from its echo; the token after them is then unscored
            too.
        ends: whether it scores an end of text within a text like other tokens.
        samples: whether it draws at random.
        logprobs: value of the request's field `logprobs`; True if numbers are rejected
            (mlx_lm.server).
        drawable: a token to force if the wanted token is only part of a character.
        configured: whether it accepts decodings as `generation_config` (`transformers serve`).
        trims: whether answers may lack their leading space.
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

    def returns_ranks(self, likeliest: int) -> bool:
        """Return whether a request for scores of given tokens also returns their ranks.

        `likeliest` is the number of most likely tokens requested per position.
        """
        return self.ranked and (self.scored != "forced" or likeliest > 0)

    # --- requests ---

    def build_sampling_body(
        self,
        prompt: Any,
        length: int,
        decoding: Decoding,
        count: int = 1,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Return the body of a request for samples.

        Raise NotApplicable if the server does not support this decoding.
        """
        if decoding.forbidden:
            raise NotApplicable(
                f"needs the end-of-text token masked; {self.model} has no option for that"
            )
        if decoding.temperature > 0 and not self.samples:
            raise NotApplicable(
                f"draws at random; the server of {self.model} gives one answer: -A temperature=0"
            )
        for needed, supported, name, off in (
            (decoding.top_k > 0, self.top_k, "top_k", "top_k=0"),
            (decoding.top_p < 1, self.top_p, "top_p", "top_p=1"),
        ):
            if needed and not supported:
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
        if seed is not None:
            body["seed"] = seed
        if self.configured:
            return body | {"generation_config": _read_generation_config(length, decoding)}
        if (
            self.scored == "forced"
        ):  # llama.cpp's ignore_eos removes the end of text from the distribution
            body |= _IDS | _OFF
        elif self.extended:
            body |= EXTENSIONS
        return body | ({"top_k": decoding.top_k} if decoding.top_k else {})

    def build_scoring_body(self, prompt: Any, likeliest: int, split: bool) -> dict[str, Any]:
        """Return the body of a request for the log-probabilities of the prompt's tokens.

        `likeliest` is the number of most likely tokens requested per position.

        llama.cpp scores only tokens that it draws, so it is forced to draw the prompt's last token.
        If this token is only part of a character (`split`), llama.cpp reports no score for it. In
        this case, or if the most likely tokens are wanted, the request asks for the scores of all
        tokens.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "n": 1}
        if self.scored == "forced":
            listed = split or likeliest > 0
            token = self.drawable if listed else prompt[-1]
            body |= {"prompt": prompt[:-1], "temperature": 0, "logit_bias": [[token, _FORCE]]}
            # without ignore_eos, with which llama.cpp does not draw the end of text
            return body | {"logprobs": _ALL if listed else self.logprobs} | _IDS | _OFF
        if self.scored == "prompt_logprobs":
            body["prompt_logprobs"] = likeliest
        else:
            body |= {"echo": True, "logprobs": self.logprobs}
        return body | (_IDS if self.extended else {})

    # --- answers ---

    def parse_sampled_answers(self, answer: Any, count: int, length: int) -> list[WrittenAnswer]:
        """Return the `count` samples in an answer, by index, each of at most `length` tokens.

        Raise MalformedAnswer if the answer has any other form.
        """
        choices = _require_answer_list(answer, "choices")
        choice_by_index = {}
        for choice in choices:
            choice_by_index[_require_answer_field(choice, "index")] = choice
        if len(choices) != count or choice_by_index.keys() != set(range(count)):
            raise MalformedAnswer(
                f"{count} samples were requested, but {len(choices)} came, or one came twice"
            )
        counted = read_token_count(answer, "completion_tokens")
        # servers count all samples together: single lengths are known only if all samples are full
        if count == 1:
            length_of_sample = counted
        elif counted == count * length:
            length_of_sample = length
        else:
            length_of_sample = None
        samples = []
        for index in range(count):
            sample = _parse_sample_choice(choice_by_index[index], length_of_sample)
            if not self.returned:
                sample = replace(sample, tokens=None)
            samples.append(sample)
        return samples

    def parse_prompt_log_probs(self, answer: Any, prompt: Tokens, likeliest: int) -> PromptLogProbs:
        """Return the log-probabilities of the prompt's tokens from an answer.

        `likeliest` is the number of most likely tokens requested per position. Raise
        MalformedAnswer.
        """
        choice = _require_answer_list(answer, "choices")[:1]
        if not choice:
            raise MalformedAnswer("no answer came")
        if self.scored == "prompt_logprobs":
            scores = _parse_vllm_prompt_log_probs(choice[0], prompt, likeliest)
        elif self.scored == "forced":
            scores = _parse_forced_token(choice[0], prompt, likeliest)
        else:
            # One token was requested after the prompt: it is there unless the server counts none.
            n_drawn = int(read_token_count(answer, "completion_tokens") != 0)
            scores = _read_echoed_log_probs(choice[0], n_drawn, self.adds[: self.hidden])
        if len(scores.log_probs) != len(prompt):
            raise MalformedAnswer(
                f"log-probabilities of {len(scores.log_probs)} tokens came, not of {len(prompt)}"
            )
        return scores


def _parse_sample_choice(choice: Any, counted: int | None) -> WrittenAnswer:
    """Parse one sample. `counted` is the server's count of drawn tokens, or None."""
    kind = withheld_answers.read_withheld_kind(choice)
    logprobs = choice.get("logprobs")
    if kind:
        text = choice.get("text", "") or ""
    else:
        text = _require_answer_field(choice, "text")
    if not isinstance(text, str):
        raise MalformedAnswer("a sample without text came")
    tokens = choice.get("token_ids")
    log_probs = None
    spelled = None
    if isinstance(logprobs, Mapping) and isinstance(logprobs.get("content"), list):
        entries = _require_answer_list(logprobs, "content")
        log_probs = tuple(_parse_log_prob(entry.get("logprob")) for entry in entries)
        if tokens is None and all("id" in entry for entry in entries):
            tokens = [entry["id"] for entry in entries]
        if (
            counted is not None and len(entries) < counted
        ):  # llama.cpp lists no token that writes a part of a character
            tokens = log_probs = None
    elif isinstance(logprobs, Mapping) and isinstance(logprobs.get("token_logprobs"), list):
        log_probs = tuple(map(_parse_log_prob, logprobs["token_logprobs"]))
        words = logprobs.get("tokens")
        if tokens is None:
            tokens = _parse_token_names(words)
        if (
            tokens is None
            and isinstance(words, list)
            and all(isinstance(word, str) for word in words)
        ):
            spelled = "".join(words)
    if tokens is not None:
        tokens = tuple(map(_parse_token_id, tokens))
        if log_probs is not None and len(log_probs) != len(tokens):
            raise MalformedAnswer(
                f"{len(tokens)} tokens came with {len(log_probs)} log-probabilities"
            )
    n_drawn = next((len(column) for column in (tokens, log_probs) if column is not None), counted)
    return WrittenAnswer(
        text,
        tokens,
        log_probs,
        spelled,
        n_drawn,
        withheld_answers.has_model_ended_text(choice),
        kind,
    )


def _read_generation_config(length: int, decoding: Decoding) -> str:
    """Return a decoding as JSON for transformers, with top_k, because its default there is 50."""
    config: dict[str, Any] = {
        "max_new_tokens": length,
        "do_sample": decoding.temperature > 0,
        "top_k": decoding.top_k,
    }
    if decoding.temperature > 0:
        config |= {"temperature": decoding.temperature, "top_p": decoding.top_p}
    return json.dumps(config)


def _parse_vllm_prompt_log_probs(choice: Any, prompt: Tokens, likeliest: int) -> PromptLogProbs:
    """Parse vLLM's scores: each position's token and most likely tokens, by id, with ranks.

    The first token has no scores.
    """
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or not entries:
        raise IgnoredParameter("no log-probabilities of the prompt came")
    log_probs = list[float | None]()
    ranks = list[Any]()
    tokens = list[int]()
    likeliest_by_place = list[tuple[tuple[int, float], ...]]()
    for place, entry in enumerate(entries):
        scores: dict[int, tuple[float, Any]] = {}
        if entry is not None:
            scores = _parse_token_scores(entry)
        # the text's own token comes with the likeliest, unless it is one of them
        if scores and len(scores) not in (likeliest, likeliest + 1):
            raise MalformedAnswer(
                f"{len(scores)} tokens came back for one position, not its own token and the "
                f"{likeliest} likeliest"
            )
        token = prompt[place] if place < len(prompt) else -1
        if token not in scores:
            # The server read another token, which vLLM lists first: its id informs the caller.
            token = next(iter(scores), -1)
        value, rank = scores.get(token, (None, None))
        log_probs.append(value)
        ranks.append(rank)
        tokens.append(token)
        falling = sorted(scores, key=lambda token: (-scores[token][0], token))
        likeliest_by_place.append(
            tuple((candidate, scores[candidate][0]) for candidate in falling[:likeliest])
        )
    known = all(isinstance(rank, int) and rank >= 1 for rank in ranks[1:])
    return PromptLogProbs(
        tuple(log_probs), tuple(ranks) if known else None, tuple(tokens), tuple(likeliest_by_place)
    )


def _parse_forced_token(choice: Any, prompt: Tokens, likeliest: int) -> PromptLogProbs:
    """Parse llama.cpp's score of the prompt's last token; earlier tokens get None.

    The token has a rank only if the most likely tokens are requested, because only then are all
    tokens listed.
    """
    logprobs = choice.get("logprobs")
    entries: Sequence[Mapping[str, Any]] = ()
    if isinstance(logprobs, Mapping):
        entries = _require_answer_list(logprobs, "content")
    if len(entries) != 1:
        raise IgnoredParameter("no log-probability of a forced token came")
    log_probs: dict[int, float] = {}
    for entry in (*(entries[0].get("top_logprobs") or ()), entries[0]):
        token = _parse_token_id(_require_answer_field(entry, "id"))
        log_probs[token] = _parse_log_prob(_require_answer_field(entry, "logprob"))
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
    likeliest_by_place = (*[()] * unknown, tuple(falling[:likeliest]))
    return PromptLogProbs(
        (*[None] * unknown, value), (*[1] * unknown, rank), None, likeliest_by_place
    )


def _parse_token_scores(entry: Any) -> dict[int, tuple[float, Any]]:
    """Return the log-probability and rank of each token listed at one position, by token id."""
    if not isinstance(entry, Mapping):
        raise MalformedAnswer("the prompt came back with log-probabilities that belong to no token")
    return {
        _parse_token_id(token): (
            _parse_log_prob(_require_answer_field(score, "logprob")),
            score.get("rank"),
        )
        for token, score in entry.items()
    }


def _read_echoed_log_probs(choice: Any, n_sampled: int, hidden: Tokens) -> PromptLogProbs:
    """Parse the scores that OpenAI's `echo` returns for a prompt and its drawn tokens.

    `n_sampled` is the number of drawn tokens at the end. `hidden` are the leading tokens that the
    echo omits.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping) or not isinstance(logprobs.get("token_logprobs"), list):
        raise IgnoredParameter("no log-probabilities came")
    values = logprobs["token_logprobs"]
    values = values[: len(values) - n_sampled]
    log_probs = tuple(None if value is None else _parse_log_prob(value) for value in values)
    tokens = _parse_token_names(logprobs.get("tokens"))
    if tokens is not None:
        tokens = (*hidden, *tokens[: len(values)])
    return PromptLogProbs((*[None] * len(hidden), *log_probs), None, tokens)


def _parse_token_names(words: Any) -> Tokens | None:
    """Return token ids if the server writes tokens as `token_id:N`, otherwise None."""
    if not isinstance(words, list) or not all(
        isinstance(word, str) and word.startswith(_NAMED) for word in words
    ):
        return None
    return tuple(_parse_token_id(word.removeprefix(_NAMED)) for word in words)


def _parse_log_prob(value: Any) -> float:
    # servers round: a certain token may have a value slightly above 0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or value > 1e-3
    ):
        raise MalformedAnswer("a log-probability came back that is not a number <= 0")
    return min(0.0, float(value))


def _parse_token_id(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise MalformedAnswer("an invalid token id came") from None


def _require_answer_field(answer: Any, name: str) -> Any:
    if not isinstance(answer, Mapping) or name not in answer:
        raise MalformedAnswer(f"an answer without {name} came")
    return answer[name]


def _require_answer_list(answer: Any, name: str) -> Sequence[Mapping[str, Any]]:
    values = _require_answer_field(answer, name)
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise MalformedAnswer(f"{name} came, but not as a list")
    return values
