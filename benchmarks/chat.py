"""Conversations as a tokenizer's own chat template writes them: what a model was trained to say, and what came before.

Knows roles, the usual columns and one template. Knows nothing of files or models. Reasons why a conversation cannot be
used name roles and turns, never what was said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from jinja2 import TemplateError

from auditor.benchmarks.wording import worded
from auditor.core.errors import AuditError
from auditor.core.knowledge import SYSTEM, USER, share_known
from auditor.core.nouns import Tokens, Wording

ASSISTANT = "assistant"
Learnt = Literal["assistant", "all"]  # whose tokens have a loss: those of assistant turns, or all
LEARNT: tuple[str, ...] = get_args(Learnt)
LAYOUTS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
BESIDE = ("input", "system")  # columns that are read where the layout has them
_ROLES = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("user", "human"), USER),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), ASSISTANT),
}


@dataclass(frozen=True)
class Turn:
    """One message: `system`, `user` or `assistant`, and what it says."""

    role: str
    content: str


Conversation = tuple[Turn, ...]


class Unusable(Exception):
    """Why a conversation, or an answer of it, is left out: in words that hold nothing of it."""


@dataclass(frozen=True)
class Answer:
    """Where one assistant turn stands in the tokens of its conversation: said[0]:said[1] is what was said in it,
    learnt[0]:learnt[1] all that the template wrote of it behind the header, the end of the turn included."""

    said: tuple[int, int]
    learnt: tuple[int, int]


@dataclass(frozen=True)
class Written:
    """A conversation as text and tokens, with its answers."""

    text: str
    tokens: Tokens
    offsets: tuple[tuple[int, int], ...]
    answers: tuple[Answer, ...]
    marked: tuple[bool, ...] | None  # what the template itself marks as the assistant's; None: it marks nothing

    def learnt(self, whose: str) -> tuple[bool, ...]:
        """Which tokens have a loss: all, or the assistant's, as far as the template marks them by its own marks."""
        if whose == "all":
            return (True,) * len(self.tokens)
        if self.marked is not None:
            return self.marked
        spans = [answer.learnt for answer in self.answers]
        return tuple(any(start <= i < end for start, end in spans) for i in range(len(self.tokens)))


@dataclass(frozen=True)
class Cut:
    """One answer as a secret; `at`: where its suffix begins, in tokens; `stands`: what it is in the conversation."""

    prefix: Tokens
    suffix: Tokens
    wording: Wording
    at: int
    stands: str


# --- what a row says --------------------------------------------------------------------------------------------------


def conversation(layout: Sequence[str], row: Mapping[str, Any]) -> Conversation:
    """The turns of a row of one of `LAYOUTS`. Raises Unusable."""
    kind = layout[0]
    if kind in ("messages", "conversations"):
        return _checked(_turns(row[kind], ""))
    if kind == "instruction":  # Alpaca's: the input stands below the instruction
        asked: Any = "\n\n".join(str(text) for text in (row["instruction"], row.get("input")) if text)
        answer = row["output"]
    else:
        asked, answer = row["prompt"], row["completion"]
    before = [Turn(SYSTEM, _text(row["system"]))] if row.get("system") else []
    return _checked([*before, *_turns(asked, USER), *_turns(answer, ASSISTANT)])


def _turns(messages: Any, role: str) -> list[Turn]:
    """OpenAI's role and content, or ShareGPT's from and value; of a text, one turn of this role."""
    if isinstance(messages, str) and role:
        return [Turn(role, _text(messages))]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Unusable("its messages are no list")
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise Unusable("a message is no object")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise Unusable("a turn of another role than system, user or assistant")
        found.append(Turn(_ROLES[role], _text(content)))
    return found


def _text(content: Any) -> str:
    """A text, or the texts of its parts; the parts of a message may also be images."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or not content.strip():
        raise Unusable("a turn that is not text, or empty")
    return content


def _checked(turns: Sequence[Turn]) -> Conversation:
    roles = [turn.role for turn in turns]
    if ASSISTANT not in roles:
        raise Unusable("no assistant turn")
    spoken = roles[1:] if roles[0] == SYSTEM else roles
    if SYSTEM in spoken:
        raise Unusable("roles out of order: a system turn that is not the first")
    if any(one == other for one, other in pairwise(spoken)):
        raise Unusable("roles out of order: two turns of one role in a row")
    return tuple(turns)


# --- what the template makes of it ------------------------------------------------------------------------------------


def check_template(tokenizer: Any) -> None:
    """Raises AuditError for a tokenizer without a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise AuditError(
            f"expected a tokenizer with a chat template for conversations, but this {type(tokenizer).__name__} has "
            "none: give the one that the model was trained with (chat_template.jinja beside the tokenizer)"
        )


def write(tokenizer: Any, said: Conversation) -> Written:
    """The conversation as the template writes it. Raises Unusable where its answers cannot be found in that.

    Raises AuditError for a template that drops the system turn: the model never saw what it says.
    """
    whole = _rendered(tokenizer, said)
    ends = [_rendered(tokenizer, said[: i + 1]) for i, turn in enumerate(said) if turn.role == ASSISTANT]
    starts = [_rendered(tokenizer, said[:i], True) for i, turn in enumerate(said) if turn.role == ASSISTANT]
    if said[0].role == SYSTEM and said[0].content.strip() not in whole:
        raise AuditError(
            "expected a chat template that writes the system turn, but this one drops it: leave the system turns out, "
            "or give the template that the model was trained with"
        )
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
    contents = [turn.content.strip() for turn in said if turn.role == ASSISTANT]
    answers = []
    for content, before, after in zip(contents, starts, ends, strict=True):
        if not whole.startswith(before):
            raise Unusable("the chat template writes what came before an answer differently once the answer is there")
        at = whole.find(content, len(before))
        if at < 0:
            raise Unusable("the chat template does not write an answer as it was given")
        end = len(after) if whole.startswith(after) else at + len(content)
        span = _tokens_of(whole, offsets, at, at + len(content))
        if span is None:
            raise Unusable("an answer does not begin at a token boundary")
        answers.append(Answer(span, (_first(offsets, len(before)), _first(offsets, end))))
    return Written(whole, tuple(encoded["input_ids"]), tuple(offsets), tuple(answers), _marked(tokenizer, said))


def _marked(tokenizer: Any, said: Conversation) -> tuple[bool, ...] | None:
    """The tokens inside the template's `{% generation %}` blocks, which is what TRL's assistant_only_loss trains on."""
    if not re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        return None
    told = tokenizer.apply_chat_template(_messages(said), return_dict=True, return_assistant_tokens_mask=True)
    return tuple(map(bool, told["assistant_masks"]))


def _messages(said: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in said]


def _rendered(tokenizer: Any, said: Conversation, answering: bool = False) -> str:
    """As text; answering: up to where the assistant begins to speak."""
    try:
        return str(tokenizer.apply_chat_template(_messages(said), tokenize=False, add_generation_prompt=answering))
    except (TemplateError, IndexError, TypeError) as error:  # of a template that looks at turns that are not there
        raise Unusable(f"the chat template refuses it ({_harmless(error, said)})") from None


def _harmless(error: Exception, said: Conversation) -> str:
    """What the template says, unless it quotes the conversation."""
    words = " ".join(str(error).split())[:120]
    return type(error).__name__ if any(turn.content.strip() in words for turn in said) or not words else words


def _first(offsets: Sequence[tuple[int, int]], at: int) -> int:
    """The first token that reaches beyond this character."""
    return next((i for i, (_, end) in enumerate(offsets) if end > at), len(offsets))


def _tokens_of(text: str, offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """The tokens that say text[start:end]; a space before it may be part of the first one. None: no token begins there.

    A last token that says more than white space behind the end is none of them.
    """
    first = _first(offsets, start)
    if first == len(offsets) or text[offsets[first][0] : start].strip():
        return None
    last = next((i for i in range(first, len(offsets)) if text[end : offsets[i][1]].strip()), len(offsets))
    while last > first and offsets[last - 1][0] >= end:  # white space behind the answer
        last -= 1
    return (first, last) if last > first else None


# --- what an attacker knows of it -------------------------------------------------------------------------------------


def cut(
    tokenizer: Any, said: Conversation, written: Written, knows: str, longest: int, shown: int | None
) -> Iterator[Cut | Unusable]:
    """Each answer that an attacker who knows so much can ask for, as a secret; or why there is none.

    `user`: all that came before an answer; `partial:F`: that, and the share F of the answer's tokens; `system`: the
    system turn alone, of the first answer. longest: tokens of a suffix; shown: of a prefix, its last ones (None: all).
    Raises Unusable where there is none at all.
    """
    share = share_known(knows)
    alone = _system_alone(tokenizer, said) if knows == SYSTEM else None
    for answer in written.answers if alone is None else written.answers[:1]:
        start, end = answer.said
        middle = start + math.floor(share * (end - start))
        if share and middle == start:
            yield Unusable("an answer that is too short to know a part of")
            continue
        last = min(end, middle + longest)
        first = 0 if shown is None else max(0, middle - shown)
        prefix, wording = written.tokens[first:middle], worded(written.text, written.offsets, first, middle, last)
        stands = wording.whole
        if alone is not None:
            prefix = tuple(tokenizer(alone, add_special_tokens=False, verbose=False)["input_ids"])
            wording = replace(wording, prefix=alone)
        yield Cut(prefix, written.tokens[middle:last], wording, middle, stands)


def _system_alone(tokenizer: Any, said: Conversation) -> str:
    """What an attacker sends who knows the system turn and no other. Raises Unusable where there is none."""
    if said[0].role != SYSTEM:
        raise Unusable("no system turn to know")
    return _rendered(tokenizer, said[:1], answering=True)
