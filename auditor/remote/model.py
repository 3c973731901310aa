"""A model behind an API as a `LanguageModel`: whole completions for draws, log-probabilities of given tokens.

It keeps no decoding rows: a question is a request, and every answer is kept (`answers.py`), by the seed and the index
of its sample. Which of its capabilities there are, a handshake found. Knows nothing of attacks or secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Tokens
from auditor.core.result import Doubt
from auditor.models.base import Completions, LanguageModel, Rows
from auditor.models.brackets import Told
from auditor.models.decoding import GREEDY, Cooling, Decoding
from auditor.remote import watch, withheld
from auditor.remote.answers import key_of
from auditor.remote.dialect import Written
from auditor.remote.handshake import Handshake, shake_hands
from auditor.remote.spelling import Spelling
from auditor.remote.watch import Drawn, Otherwise, Watch
from auditor.remote.wire import Ledger, Malformed, Question, Refused, Wire

# No vocabulary is padded to more than so many times its tokenizer's tokens: bounds on a distribution ask how many there
# may be.
_PADDED = 2
_NO_PROMPT = "needs a soft prompt; a model behind an API takes tokens alone"
_FORM = 2  # of what is kept of an answer: what an older version kept does not say what became of it


class RemoteModel(LanguageModel):
    """One model of one server. Raises AuditError where the handshake does."""

    def __init__(self, wire: Wire, model: str, tokenizer: Any) -> None:
        self.wire, self.tokenizer = wire, tokenizer
        self.handshake: Handshake = shake_hands(wire, model, tokenizer)
        self.dialect = self.handshake.dialect
        self.name = f"openai:{model}"
        self.capabilities = self.handshake.capabilities
        self.vocab_size = len(tokenizer)
        self.family = f"an API whose tokenizer has {self.vocab_size:,} tokens"
        room = self.handshake.room
        self.max_positions = None if room is None else room - 1  # a text is scored with one token behind it
        end = getattr(tokenizer, "eos_token_id", None)
        self.eos = () if end is None else (int(end),)
        self.spelling = Spelling(tokenizer, self.dialect, self.eos, self.name)
        self.device = torch.device("cpu")
        self._runs = [wire.ledger.run]
        # By which it is known again; another one once it was found to answer otherwise.
        self.identity = key_of(self.handshake.answer, wire.ledger.answers.era).hex()
        contexts = [(*self.dialect.adds, *self.spelling.tokens(text)) for text in watch.TEXTS]
        scored = self._scored_again if self.dialect.scored else None
        self.watch = Watch(self._drawn_again, scored, contexts)
        self._watched(self.watch.begin)
        self.notes = self.handshake.notes()

    def digest(self) -> str:
        return self.identity

    def charge(self, ledger: Ledger) -> None:
        """From here on another run pays."""
        self.wire.ledger = ledger
        self._runs.append(ledger.run)

    # --- draws ---

    def completions(
        self,
        prefixes: Tensor,
        length: int,
        decoding: Decoding,
        uniforms: Tensor,
        *,
        prompt: Tensor | None = None,
        likelihood: bool = True,
    ) -> Completions:
        """K samples of each prefix, each asked for by a seed of its own: the bits of its first uniform.

        The server does the drawing, so that samples do not equal a local model's one by one, only in distribution.
        """
        if prompt is not None:
            raise NotApplicable(_NO_PROMPT)
        if isinstance(decoding, Cooling):
            raise NotApplicable(
                f"needs a temperature that falls from token to token; {self.name} draws whole texts at one: "
                "-A cooling=0 asks for that"
            )
        contexts = [tuple(row) for row in prefixes.tolist()]
        seeds = (uniforms[:, :, 0, 0] * 2**31).long().tolist()
        samples = len(seeds[0]) if seeds else 0
        if decoding.temperature == 0:  # one answer, whatever the seed
            seeds = [[0] for _ in contexts]
        written = self._sampled(contexts, length, decoding, seeds)
        tokens, log_probs = self._read(contexts, written, length, likelihood)
        if decoding.temperature == 0:
            tokens = tokens.repeat_interleave(samples, 0)
            log_probs = None if log_probs is None else log_probs.repeat_interleave(samples, 0)
        owner = torch.arange(len(contexts)).repeat_interleave(samples).unsqueeze(-1)
        _, path = np.unique(torch.cat([owner, tokens], -1).numpy(), axis=0, return_inverse=True)
        nothing = torch.zeros(len(tokens), dtype=torch.long)
        return Completions(tokens, log_probs, torch.from_numpy(path.reshape(-1)), nothing)

    def _sampled(
        self, contexts: Sequence[Tokens], length: int, decoding: Decoding, seeds: Sequence[Sequence[int]]
    ) -> list[list[Written]]:
        """The samples of each context, those of them asked for that were not answered before."""
        answers = self.wire.ledger.answers
        keys = [self._keys(context, length, decoding, own) for context, own in zip(contexts, seeds, strict=True)]
        found = {key: answer for own in keys for key in own if (answer := answers.get(key)) is not None}
        questions = [
            question
            for context, own, seed in zip(contexts, keys, seeds, strict=True)
            for question in self._draws(context, length, decoding, own, seed, found)
        ]
        for answered in self._asked(questions):
            found |= answered
        written = [[_kept(found[key]) for key in own] for own in keys]
        self._noted(contexts, keys, written)
        if decoding == GREEDY:
            for context, own in zip(contexts, written, strict=True):
                if own[0].kind in ("", withheld.ENDED):
                    self.watch.saw_drawn(context, length, own[0].text)
        return written

    def _noted(
        self, contexts: Sequence[Tokens], keys: Sequence[Sequence[bytes]], written: Sequence[Sequence[Written]]
    ) -> None:
        """What became of each answer, for this run and one that goes on from it."""
        every = [
            (key, _digest(context), one.kind)
            for context, own_keys, own in zip(contexts, keys, written, strict=True)
            for key, one in zip(own_keys, own, strict=True)
        ]
        self.wire.ledger.answers.note(self.wire.ledger.run, every)

    def _keys(self, context: Tokens, length: int, decoding: Decoding, seeds: Sequence[int]) -> list[bytes]:
        body = self.dialect.draw(self.spelling.prompt(context), length, decoding, 1, None)
        return [self._key(body, seed, index) for index, seed in enumerate(seeds)]

    def _key(self, body: Mapping[str, Any], *sample: int) -> bytes:
        return key_of(_FORM, self.wire.url, self.identity, body, sample)

    def _draws(
        self,
        context: Tokens,
        length: int,
        decoding: Decoding,
        keys: Sequence[bytes],
        seeds: Sequence[int],
        found: Mapping[bytes, Any],
    ) -> Iterator[Question]:
        """Requests for the samples that are missing, several of them in one where the server draws them apart."""
        missing = [index for index, key in enumerate(keys) if key not in found]
        for start in range(0, len(missing), self.dialect.several):
            mine = missing[start : start + self.dialect.several]
            seed = None if decoding == GREEDY else seeds[mine[0]]
            body = self.dialect.draw(self.spelling.prompt(context), length, decoding, len(mine), seed)

            def read(answer: Any, of: Sequence[int] = mine) -> Mapping[bytes, Any]:
                every = zip(of, self.dialect.written(answer, len(of), length), strict=True)
                kinds = [(i, one, self.spelling.fate(context, one, length)) for i, one in every]
                return {keys[i]: [one.text, one.tokens, one.log_probs, kind] for i, one, kind in kinds}

            yield Question(body, len(context) + 8 + len(mine) * length, read)

    def _read(
        self, contexts: Sequence[Tokens], written: Sequence[Sequence[Written]], length: int, likelihood: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(draws, length): the tokens, and their log-probabilities where they are asked for.

        A sample that ended early is filled up with the end of text: as the distribution sees it, a text like any other.
        """
        every = [(context, one) for context, own in zip(contexts, written, strict=True) for one in own]
        rows = [self.spelling.tokens_of(context, one) for context, one in every]
        filler = self.eos[0] if self.eos else 0
        filled = [(*row[:length], *[filler] * (length - len(row))) for row in rows]
        tokens = torch.tensor(filled, dtype=torch.long).view(len(rows), length)
        if not likelihood:
            return tokens, None
        scores: dict[int, Sequence[float]] = {}
        for i, (_, one) in enumerate(every):
            if self.dialect.reported and one.log_probs is not None and len(one.log_probs) == length == len(rows[i]):
                scores[i] = one.log_probs
        pairs = [(every[i][0], filled[i]) for i in range(len(every)) if i not in scores]
        given = iter(self._log_probs(pairs))
        return tokens, torch.tensor([scores[i] if i in scores else next(given) for i in range(len(every))])

    # --- given tokens ---

    def token_log_probs(self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None) -> Tensor:
        if prompt is not None:
            raise NotApplicable(_NO_PROMPT)
        return torch.tensor(self._log_probs(_pairs(prefixes, suffixes))).view(suffixes.shape)

    def token_ranks(self, prefixes: Tensor, suffixes: Tensor) -> Tensor:
        if not self.dialect.ranked:
            raise NotApplicable(f"needs ranks of tokens; {self.name} does not give them")
        pairs = _pairs(prefixes, suffixes)
        ranks = [ranks[len(prefix) :] for (prefix, _), (_, ranks) in zip(pairs, self._given(pairs), strict=True)]
        return torch.tensor(ranks).view(suffixes.shape)

    def token_told(self, prefixes: Tensor, suffixes: Tensor) -> Told:
        """Asked for apart from log-probabilities and ranks alone: an answer of all this is many times as long."""
        if not self.dialect.likeliest:
            raise NotApplicable(f"needs the likeliest tokens; {self.name} does not give them")
        pairs = _pairs(prefixes, suffixes)
        given = self._given(pairs, self.dialect.likeliest)
        own = [[column[len(prefix) :] for column in columns] for (prefix, _), columns in zip(pairs, given, strict=True)]
        log_probs, ranks, likeliest = (torch.tensor(column, dtype=torch.float64) for column in zip(*own, strict=True))
        ids, top = likeliest.flatten(0, 1).unbind(-1)
        most = _PADDED * self.vocab_size
        return Told(suffixes.flatten(), log_probs.flatten(), ranks.flatten().long(), ids.long(), top, most)

    def suffix_log_probs(
        self, prefixes: Tensor, owner: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> list[float]:
        contexts = [tuple(row) for row in prefixes.tolist()]
        pairs = [(contexts[i], tuple(suffix)) for i, suffix in zip(owner, suffixes, strict=True)]
        return [float(np.sum(scores)) for scores in self._log_probs(pairs)]

    def _log_probs(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[list[float]]:
        """Of each token of the second behind the first, which may not be empty."""
        if not self.dialect.scored:
            raise NotApplicable(f"needs log-probabilities; {self.name} does not give them")
        given = self._given(pairs)
        return [log_probs[len(prefix) :] for (prefix, _), (log_probs, _) in zip(pairs, given, strict=True)]

    def _given(self, pairs: Sequence[tuple[Tokens, Tokens]], likeliest: int = 0) -> list[tuple[list[Any], ...]]:
        """(log-probabilities, ranks) of all tokens of each text; nothing is known of the first.

        likeliest: with (id, log-probability) of so many tokens at each place.
        """
        answers, texts = self.wire.ledger.answers, [(*prefix, *suffix) for prefix, suffix in pairs]
        shortest, hidden = min((len(prefix) for prefix, _ in pairs), default=1), self.dialect.hidden
        if not shortest:
            raise NotApplicable("nothing stands before the first token of a text: give --prefix-token eos, for example")
        if shortest <= hidden:
            raise NotApplicable(f"{self.name} does not say how likely the first token of a text is")
        self.spelling.check(texts)
        keys = {text: self._key(self.dialect.score(self.spelling.prompt(text), likeliest)) for text in texts}
        found = {key: answer for key in keys.values() if (answer := answers.get(key)) is not None}
        questions = [self._score(text, key, likeliest) for text, key in keys.items() if key not in found]
        for answered in self._asked(questions):
            found |= answered
        for text, key in keys.items():
            self.watch.saw_scored(text, found[key][0])
        return [tuple(found[keys[text]]) for text in texts]

    def _score(self, text: Tokens, key: bytes, likeliest: int = 0) -> Question:
        def read(answer: Any) -> Mapping[bytes, Any]:
            given = self.dialect.given(answer, text, likeliest)
            if given.tokens is not None and given.tokens[1:] != text[1:]:
                raise Malformed("log-probabilities of other tokens came")
            log_probs = [0.0 if i <= self.dialect.hidden else value for i, value in enumerate(given.log_probs)]
            if None in log_probs:
                raise Malformed("log-probabilities are missing")
            if self.dialect.ranked and given.ranks is None:
                raise Malformed("ranks are missing")
            told = [log_probs, [1, *(given.ranks or ())[1:]]]
            return {key: [*told, given.likeliest] if likeliest else told}

        return Question(self.dialect.score(self.spelling.prompt(text), likeliest), len(text) + 9, read)

    # --- asking ---

    def _asked(self, questions: Sequence[Question]) -> list[Mapping[bytes, Any]]:
        """All of them, and between them whether the server is still the same one."""
        answered = list[Mapping[bytes, Any]]()
        for start in range(0, len(questions), watch.EVERY):
            some = questions[start : start + watch.EVERY]
            answered += self._answered(some)
            self._watched(partial(self.watch.asked, len(some)))
        return answered

    def _answered(self, questions: Sequence[Question]) -> list[Mapping[bytes, Any]]:
        try:
            return self.wire.ask_all(questions)
        except Refused as error:
            raise AuditError(f"expected {self.wire.url} to answer as it did in the handshake, but {error}") from None
        except Malformed as error:
            raise AuditError(f"expected {self.wire.url} to answer as it did in the handshake, but {error}") from None

    def _watched(self, looks: Callable[[], None]) -> None:
        """Raises AuditError where the server does not answer as it did; nothing that it answered is used again."""
        try:
            looks()
        except Otherwise as why:
            self.wire.ledger.answers.give_up()
            raise AuditError(
                f"expected {self.wire.url} to stay the same model from the first answer to the last, but {why}. "
                "What was answered stays in the store, but none of it is used again: this run cannot be resumed, and a "
                "new one asks anew"
            ) from None

    def finish(self) -> None:
        self._watched(self.watch.finish)

    def _drawn_again(self, asked: Sequence[Drawn]) -> list[str]:
        """Greedy texts, asked anew."""
        texts = dict[int, str]()

        def question(i: int, one: Drawn) -> Question:
            body = self.dialect.draw(self.spelling.prompt(one.context), one.length, GREEDY, 1, None)

            def read(answer: Any) -> Mapping[bytes, Any]:
                texts[i] = self.dialect.written(answer, 1, one.length)[0].text
                return {}

            return Question(body, len(one.context) + 8 + one.length, read)

        self._answered([question(i, one) for i, one in enumerate(asked)])
        return [texts[i] for i in range(len(asked))]

    def _scored_again(self, asked: Sequence[Tokens]) -> list[Sequence[float] | None]:
        """Log-probabilities of all tokens of each text, asked anew; None where it would be read as other tokens."""
        found = dict[int, Sequence[float]]()

        def question(i: int, text: Tokens) -> Question:
            key = b""
            whole = self._score(text, key)

            def read(answer: Any) -> Mapping[bytes, Any]:
                found[i] = whole.read(answer)[key][0]
                return {}

            return Question(whole.body, whole.at_most, read)

        self._answered([question(i, text) for i, text in enumerate(asked) if self.spelling.reads(text)])
        return [found.get(i) for i in range(len(asked))]

    # --- what it cost ---

    def account(self) -> tuple[str, ...]:
        ledger = self.wire.ledger
        spent = ledger.spent
        limit = "" if ledger.most is None else f" of --max-tokens-total {ledger.most:,}"
        again = f"; {spent.again:,} attempts failed and were made again" if spent.again else ""
        said = [
            f"this run paid for {spent.tokens:,} tokens{limit} in {spent.requests:,} requests ({spent.read:,} read, "
            f"{spent.written:,} written){again}; what was answered before cost nothing"
        ]
        counts = self._kinds()
        if any(counts.get(kind) for kind in (*withheld.HIDDEN, *withheld.MANY)):
            filled = "; what is shorter than asked for was filled up with the end of text"
            said.append(f"of {sum(counts.values()):,} answers: {withheld.said(counts)}{filled}")
        said.append(self._said_of_watch())
        return tuple(said)

    def _kinds(self) -> dict[str, int]:
        return self.wire.ledger.answers.kinds(self._runs)

    def _said_of_watch(self) -> str:
        seen = self.watch
        scored = f", and {seen.rescored:,} texts were scored again, cut elsewhere" if seen.score else ""
        return (
            f"asked again on the way and at the end: {seen.compared:,} greedy answers, of which {seen.differed:,} came "
            f"back otherwise{scored}"
        )

    def doubts(self) -> tuple[Doubt, ...]:
        counts, said = self._kinds(), list[str]()
        if hidden := withheld.doubted(counts):
            said.append(
                f"Of {sum(counts.values()):,} answers of {self.name} not all came through: {withheld.said(hidden)}. "
                "What they would have said was not seen."
            )
        if self.watch.unsteady:
            said.append(
                f"{self.watch.differed:,} of {self.watch.compared:,} greedy answers of {self.name} came back otherwise "
                "when they were asked for again: it is not deterministic, or several models answer under one name."
            )
        return tuple(Doubt("answers", sentence) for sentence in said)

    def withheld(self, prefixes: Sequence[Tokens]) -> list[bool]:
        held = self.wire.ledger.answers.held_back(self._runs, list(withheld.doubted(self._kinds())))
        return [_digest(prefix) in held for prefix in prefixes]

    # --- what an API does not give ---

    def check_room(self, n_prefix: int, length: int, prompt: Tensor | None = None, prefix_token: int = 0) -> None:
        """No soft prompt takes room: an attack that would tune one goes without."""
        super().check_room(n_prefix, length, None, prefix_token)

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, distribution: bool = True) -> Rows:
        self._no_distribution()

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        self._no_distribution()

    def _no_distribution(self) -> NoReturn:
        raise NotApplicable(f"needs log-probabilities of every next token; {self.name} does not give them")


def _pairs(prefixes: Tensor, suffixes: Tensor) -> list[tuple[Tokens, Tokens]]:
    return [(tuple(a), tuple(b)) for a, b in zip(prefixes.tolist(), suffixes.tolist(), strict=True)]


def _kept(answer: Any) -> Written:
    text, tokens, log_probs, kind = answer
    values = None if log_probs is None else tuple(log_probs)
    return Written(text, None if tokens is None else tuple(tokens), values, kind=kind)


def _digest(context: Tokens) -> bytes:
    return key_of(context)
