"""Convert between tokens and texts as a server reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.core.errors import NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.remote import withheld_answers
from auditor.remote.server_dialect import ServerDialect, WrittenAnswer

# a bare text may be read as fewer tokens than were drawn, but hardly this many times fewer
_READ_AS_FEWER = 2


@dataclass(frozen=True)
class TokenTextCodec:
    """Conversion between the user's tokens and the text that a server may require.

    `eos` are the end-of-text tokens, and `name` is the model's name in messages.
    """

    tokenizer: Any
    dialect: ServerDialect
    eos: Tokens
    name: str  # of the model, in sentences

    # --- texts in requests ---

    def can_score_exact_tokens(self, text: Tokens) -> bool:
        """Return whether the server reads the text as these tokens and can score any of them."""
        try:
            self.refuse_changed_tokens([text])
        except NotApplicable:
            return False
        return len(text) > self.dialect.hidden + 1

    def encode_prompt(self, context: Tokens) -> list[int] | str:
        """Return the prompt in the form that the server accepts.

        This is token ids, or text without the tokens that the server adds.
        """
        if self.dialect.ids:
            return list(context)
        adds = self.dialect.adds
        if context[: len(adds)] != adds:
            raise NotApplicable(
                f"the server puts {self.text(adds)!r} before every text that it is sent: give "
                "--prefix-token auto"
            )
        return self.text(context[len(adds) :])

    def refuse_changed_tokens(self, texts: Sequence[Tokens]) -> None:
        """Raise NotApplicable if the server would not read a text as the given tokens.

        This can happen only if the server accepts text but no token ids.
        """
        if self.dialect.ids:
            return
        adds = self.dialect.adds
        n_ended = sum(not set(self.eos).isdisjoint(text[len(adds) :]) for text in texts)
        if n_ended and not self.dialect.ends:
            raise NotApplicable(
                f"{n_ended} of {len(texts)} texts contain the end of text, which the server of "
                f"{self.name} does not score"
            )
        n_changed = sum(
            (*adds, *self.tokens(self.text(text[len(adds) :]))) != text for text in texts
        )
        if n_changed:
            raise NotApplicable(
                f"{n_changed} of {len(texts)} texts would be read as other tokens by a server that "
                "takes no token ids"
            )

    def is_split_character(self, token: int) -> bool:
        """Return whether a token is only part of a character, like many byte tokens."""
        return "\ufffd" in self.text((token,))

    def tokens(self, text: str) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, tokens: Sequence[int]) -> str:
        return decode_keeping_special_tokens(self.tokenizer, tokens)

    # --- texts in answers ---

    def read_sample(self, context: Tokens, answer: WrittenAnswer) -> WrittenAnswer:
        """Return the answer with tokens, taken from the server or by tokenising the answer's text.

        The server may have removed a leading space, so both tokenisations are tried, and the
        server's token count decides. Without a count, both are kept as `readings`.
        """
        if answer.tokens is not None:
            return answer
        readings = [self._tokens_after(context, answer.text)]
        if self.dialect.trims and answer.text:
            readings = list(
                dict.fromkeys([self._tokens_after(context, f" {answer.text}"), *readings])
            )
            readings = [
                tokens for tokens in readings if _has_counted_length(tokens, answer)
            ] or readings
        return replace(
            answer, tokens=readings[0], readings=tuple(readings) if len(readings) > 1 else ()
        )

    def _tokens_after(self, context: Tokens, text: str) -> Tokens:
        tokens = self.tokens(self.text(context) + text)
        if tokens[: len(context)] == context:
            return tokens[len(context) :]
        # Tokenize separately, after a line break: at the very beginning some tokenizers add a
        # space.
        line = self.tokens("\n")
        line_tokens = self.tokens(f"\n{text}")
        if line_tokens[: len(line)] == line:
            return line_tokens[len(line) :]
        return self.tokens(text)

    def continues_reading(self, reading: Tokens, rest: str) -> bool:
        """Return whether a server's text agrees with a possible tokenisation of its answer.

        `reading` is the tokenisation, and `rest` is the server's text after the first token. They
        agree if `rest` and the text of `reading[1:]` are equal, or if the longer of the two starts
        with the shorter one. Leading and trailing spaces are ignored.
        """
        expected = self.text(reading[1:]).strip()
        text = rest.strip()
        return bool(expected and text) and (expected.startswith(text) or text.startswith(expected))

    def find_withheld_kind(self, context: Tokens, answer: WrittenAnswer, length: int) -> str:
        """Return how an answer was withheld (a kind of `withheld_answers`), or "" if it was not.

        `length` is the largest number of tokens requested.
        """
        if answer.kind:
            return answer.kind
        prompt = "" if self.dialect.ids else self.text(context)
        if prompt.startswith("\ufffd") or prompt.endswith("\ufffd"):
            return withheld_answers.SPLIT
        text_drawn = answer.spelled
        if answer.tokens is not None:
            text_drawn = self.text(answer.tokens)
        if kind := withheld_answers.detect_withheld_kind(
            answer.text, self.text(context), text_drawn
        ):
            return kind
        if answer.n_tokens is not None:
            short = answer.n_tokens < length
        else:  # the server counts nothing
            n_read = len(self.read_sample(context, answer).tokens or ())
            if answer.ended:
                short = n_read < length
            else:
                short = n_read * _READ_AS_FEWER < length
        if not short:
            return ""
        # vLLM obeys ignore_eos
        continues = self.dialect.extended and self.dialect.scored == "prompt_logprobs"
        if continues or not answer.ended:
            return withheld_answers.CUT
        if answer.text:
            return withheld_answers.ENDED
        return withheld_answers.EMPTY


def _has_counted_length(tokens: Tokens, answer: WrittenAnswer) -> bool:
    """Return whether the number of tokens agrees with the server's count.

    The server may count an end of text in addition. Without a count, return True.
    """
    return answer.n_tokens in (None, len(tokens)) or (
        answer.ended and answer.n_tokens == len(tokens) + 1
    )
