"""Wrap a model behind an API as a `LanguageModel`.

The model returns sampled completions and log-probabilities of given tokens. Each query is a request
(`cached_queries.py`), so there are no decoding rows. A handshake determines the model's
capabilities. This module does not depend on attacks or secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import NotApplicable
from auditor.core.nouns import Tokens
from auditor.core.result import Doubt
from auditor.models.base import LanguageModel
from auditor.models.decoding import Cooling, Decoding
from auditor.models.partial_distributions import PartialDistribution
from auditor.models.rows import Completions
from auditor.remote import withheld_answers
from auditor.remote.cached_queries import CachedServerQueries
from auditor.remote.connection import ServerConnection, ServerTokenBudget
from auditor.remote.handshake import Handshake, open_server_handshake
from auditor.remote.server_dialect import WrittenAnswer
from auditor.remote.token_text import TokenTextCodec

# Assume that a vocabulary is padded to at most this multiple of its tokenizer's tokens: bounds on a
# distribution need its size.
_PADDED = 2
_NO_PROMPT = "needs a soft prompt; a model behind an API takes only tokens"


class RemoteModel(LanguageModel):
    """One model on one server. Raise AuditError if the handshake (the initial tests) fails."""

    def __init__(self, wire: ServerConnection, model: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.handshake: Handshake = open_server_handshake(wire, model, tokenizer)
        self.dialect = self.handshake.dialect
        self.name = f"openai:{model}"
        self.capabilities = self.handshake.capabilities
        self.vocab_size = len(tokenizer)
        self.family = f"an API whose tokenizer has {self.vocab_size:,} tokens"
        room = self.handshake.room
        if not self.dialect.ids:
            self.prepended = self.dialect.adds
        self.returns_token_ids = self.dialect.returned
        # Scoring a text generates one more token after it.
        self.max_positions = None if room is None else room - 1
        end = getattr(tokenizer, "eos_token_id", None)
        self.eos = () if end is None else (int(end),)
        self.asker = CachedServerQueries(
            wire,
            self.handshake,
            TokenTextCodec(tokenizer, self.dialect, self.eos, self.name),
            self.name,
        )
        self.notes = self.handshake.notes()

    def digest(self) -> str:
        return self.asker.identity

    def switch_token_budget(self, ledger: ServerTokenBudget) -> None:
        """Charge later requests to the run that owns this token budget."""
        self.asker.switch_paying_run(ledger)

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
        """Draw K samples for each prefix; a sample's first uniform number is its seed.

        The server draws the tokens, so they have the same distribution as a local model's samples,
        but not the same values.
        """
        if prompt is not None:
            raise NotApplicable(_NO_PROMPT)
        if isinstance(decoding, Cooling):
            raise NotApplicable(
                f"needs a temperature that falls from token to token; {self.name} draws whole "
                "texts at one temperature: give -A cooling=0"
            )
        contexts = list(map(tuple, prefixes.tolist()))
        # below 2^31, to fit a 32-bit integer
        seeds = (uniforms[:, :, 0, 0] * 2**31).long().tolist()
        samples = len(seeds[0]) if seeds else 0
        if decoding.temperature == 0:  # one answer for all seeds, with or without truncation
            seeds = [[0]] * len(contexts)
            decoding = replace(decoding, top_k=0, top_p=1.0)
        answers = self.asker.draw_samples(contexts, length, decoding, seeds)
        tokens, log_probs = self._build_answer_tensors(contexts, answers, length, likelihood)
        if decoding.temperature == 0:
            tokens = tokens.repeat_interleave(samples, 0)
            if log_probs is not None:
                log_probs = log_probs.repeat_interleave(samples, 0)
        owner = torch.arange(len(contexts)).repeat_interleave(samples).unsqueeze(-1)
        # equal path: equal prefix and draws; NumPy 2.0 returns the inverse along an axis with a
        # second dimension
        _, path = np.unique(torch.cat([owner, tokens], -1).numpy(), axis=0, return_inverse=True)
        zeros = torch.zeros(len(tokens), dtype=torch.long)
        return Completions(tokens, log_probs, torch.from_numpy(path.reshape(-1)), zeros)

    def _build_answer_tensors(
        self,
        contexts: Sequence[Tokens],
        written_answers: Sequence[Sequence[WrittenAnswer]],
        length: int,
        likelihood: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens, (draws, length), and their log-probabilities in nats.

        If `likelihood` is False, None is returned instead of log-probabilities. Samples that ended
        early are filled with end-of-text tokens, which are scored too.
        """
        filler = self.eos[0] if self.eos else 0
        rows = []
        scores = list[Sequence[float] | None]()
        missing = []
        for context, samples in zip(contexts, written_answers, strict=True):
            for answer in samples:
                row = answer.tokens or ()
                rows.append((*row[:length], *[filler] * (length - len(row))))
                log_probs = answer.log_probs if self.dialect.reported else None
                if log_probs is None or not len(log_probs) == length == len(row):
                    missing.append((context, rows[-1]))
                    log_probs = None
                scores.append(log_probs)
        tokens = torch.tensor(rows, dtype=torch.long).view(len(rows), length)
        if not likelihood:
            return tokens, None
        listed = iter(self._list_suffix_log_probs(missing))
        return tokens, torch.tensor([next(listed) if row is None else row for row in scores])

    # --- given tokens ---

    def token_log_probs(
        self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None
    ) -> Tensor:
        if prompt is not None:
            raise NotApplicable(_NO_PROMPT)
        return torch.tensor(self._list_suffix_log_probs(_cut_token_pairs(prefixes, suffixes))).view(
            suffixes.shape
        )

    def token_ranks(self, prefixes: Tensor, suffixes: Tensor) -> Tensor:
        if not self.dialect.ranked:
            raise NotApplicable(f"needs ranks of tokens; {self.name} does not give them")
        pairs = _cut_token_pairs(prefixes, suffixes)
        # llama.cpp reports a token's rank only with the likeliest tokens
        listed = 0
        if self.dialect.scored == "forced":
            listed = self.dialect.likeliest
        scores = self.asker.score_tokens(pairs, listed)
        ranks = [
            ranks[len(prefix) :] for (prefix, _), (_, ranks, *_) in zip(pairs, scores, strict=True)
        ]
        return torch.tensor(ranks).view(suffixes.shape)

    def partial_distributions_of(self, prefixes: Tensor, suffixes: Tensor) -> PartialDistribution:
        """Return log-probabilities of suffix tokens and of the most likely tokens at each position.

        `prefixes` is (B, n) and `suffixes` is (B, L). Separate requests are sent for this, because
        answers that list the most likely tokens are many times longer.
        """
        if not self.dialect.likeliest:
            raise NotApplicable(f"needs the likeliest tokens; {self.name} does not give them")
        pairs = _cut_token_pairs(prefixes, suffixes)
        scores = self.asker.score_tokens(pairs, self.dialect.likeliest)
        suffix_scores = []
        for (prefix, _), columns in zip(pairs, scores, strict=True):
            suffix_scores.append([column[len(prefix) :] for column in columns])
        # float64 represents token ids exactly, which share a tensor with their log-probabilities
        log_probs, ranks, likeliest = (
            torch.tensor(column, dtype=torch.float64) for column in zip(*suffix_scores, strict=True)
        )
        ids, top = likeliest.flatten(0, 1).unbind(-1)
        most = _PADDED * self.vocab_size
        return PartialDistribution(
            suffixes.flatten(), log_probs.flatten(), ranks.flatten().long(), ids.long(), top, most
        )

    def suffix_log_probs(
        self, prefixes: Tensor, owner: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> list[float]:
        contexts = list(map(tuple, prefixes.tolist()))
        pairs = []
        for i, suffix in zip(owner, suffixes, strict=True):
            pairs.append((contexts[i], tuple(suffix)))
        return [float(np.sum(scores)) for scores in self._list_suffix_log_probs(pairs)]

    def _list_suffix_log_probs(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[list[float]]:
        """Return the log-probabilities (nats) of each suffix's tokens, given a nonempty prefix."""
        if not self.dialect.scored:
            raise NotApplicable(f"needs log-probabilities; {self.name} does not give them")
        scores = self.asker.score_tokens(pairs)
        return [
            log_probs[len(prefix) :]
            for (prefix, _), (log_probs, _) in zip(pairs, scores, strict=True)
        ]

    # --- cost of the queries ---

    def check_unchanged_at_end(self) -> None:
        self.asker.check_server_unchanged()

    def cost_sentences(self) -> tuple[str, ...]:
        ledger = self.asker.wire.ledger
        usage = ledger.server_usage_so_far
        limit = ""
        if ledger.most is not None:
            limit = f" of --max-tokens-total {ledger.most:,}"
        again = ""
        if usage.retries:
            again = f"; {usage.retries:,} attempts failed and were made again"
        sentences = [
            f"this run paid for {usage.paid_token_count:,} tokens{limit} in {usage.requests:,} "
            f"requests ({usage.prompt_tokens:,} read, {usage.answer_tokens:,} written){again}; "
            "earlier answers cost nothing"
        ]
        counts = self.asker.count_own_answers()
        if any(counts.get(kind) for kind in (*withheld_answers.HIDDEN, *withheld_answers.MANY)):
            filled = "; shorter answers were filled up with the end-of-text token"
            sentences.append(
                f"of {sum(counts.values()):,} answers: "
                f"{withheld_answers.format_withheld_answers(counts)}{filled}"
            )
        watch = self.asker.watch
        scored = ""
        if watch.score:
            scored = f", and {watch.rescored:,} texts were scored again, cut elsewhere"
        sentences.append(
            f"requested again during the run and at its end: {watch.compared:,} greedy answers, of "
            f"which {watch.differed:,} differed the first time{scored}"
        )
        return tuple(sentences)

    def doubts(self) -> tuple[Doubt, ...]:
        counts = self.asker.count_own_answers()
        doubts = list[Doubt]()
        if hidden := withheld_answers.count_hiding_answers(counts):
            sentence = (
                f"Of {sum(counts.values()):,} answers of {self.name} not all came through: "
                f"{withheld_answers.format_withheld_answers(hidden)}. Their contents are unknown."
            )
            doubts.append(Doubt("answers", sentence))
        if (watch := self.asker.watch).answers_are_unstable:
            sentence = (
                f"{watch.differed:,} of {watch.compared:,} greedy answers of {self.name} differed "
                "when they were requested again: it is not deterministic, or several "
                "models answer under one name."
            )
            doubts.append(Doubt("answers", sentence))
        return tuple(doubts)

    def has_withheld_answer_by_prefix(self, prefixes: Sequence[Tokens]) -> list[bool]:
        return self.asker.mark_withheld_contexts(prefixes)

    # --- unsupported methods ---

    def check_text_fits(
        self, n_prefix: int, length: int, prompt: Tensor | None = None, prefix_token: int = 0
    ) -> None:
        """Raise AuditError if a text is too long, and NotApplicable if there is a soft prompt."""
        super().check_text_fits(n_prefix, length, None, prefix_token)

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> NoReturn:
        self.log_probs(prefixes, 1)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> NoReturn:
        raise NotApplicable(
            f"needs log-probabilities of every next token; {self.name} does not give them"
        )


def _cut_token_pairs(prefixes: Tensor, suffixes: Tensor) -> list[tuple[Tokens, Tokens]]:
    return list(zip(map(tuple, prefixes.tolist()), map(tuple, suffixes.tolist()), strict=True))
