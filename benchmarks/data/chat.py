"""Conversations as a model was trained on them: the tokens of one rendering, where its answers
stand in them, and what of them is learnt.

Knows rows (`conversation_rows.py`) and renderings (`chat_rendering.py`). Knows nothing of files or
models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from auditor.benchmarks.data import chat_rendering
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import (
    ASSISTANT,
    MARKED,
    NO_LOSS,
    REASONING,
    THOUGHT,
    Conversation,
    Message,
    UnusableConversation,
    is_assistant,
    message_text,
    name_of_tool,
    normalised_role,
)
from auditor.benchmarks.data.wording import split_offsets_of_byte_runs
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.plan_parts import ALL, SYSTEM, TURNS

LEARNT = (ASSISTANT, "all")  # whose tokens have a loss: those of assistant turns, or all
CALLS = "tool_calls"
_MARK = "Zq7vX9kJ"  # stands in for an answer: no template makes anything of it


@dataclass(frozen=True)
class Answer:
    """Where one thing that the assistant said stands in the tokens of its conversation:
    said[0]:said[1]; and learnt[0]:learnt[1], all that the template wrote of its turn behind the
    header, the end of the turn included.

    of: the key of the message that says it: its content, its reasoning, which stands before, or its
    tool calls. role:
    whose it is.
    """

    said: tuple[int, int]
    learnt: tuple[int, int]
    of: str = "content"
    role: str = ASSISTANT
    no_loss: str = ""  # why nothing of it was learnt, if nothing was


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text and tokens, with its answers, or why one of them cannot be asked
    for."""

    text: str
    tokens: Tokens
    offsets: tuple[tuple[int, int], ...]
    answers: tuple[Answer | UnusableConversation, ...]
    # what the template itself marks as the assistant's; None: it marks nothing
    marked: tuple[bool, ...] | None
    remarks: tuple[str, ...] = ()  # what of the row the text does not say

    @property
    def usable_answers(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if isinstance(answer, Answer))

    def learnt_token_mask(self, whose: str) -> tuple[bool, ...]:
        """Return which tokens have a loss: all, or the assistant's, as far as the template marks
        them by its own marks.

        None of a turn that the row marks as not trained on; the assistant's in a prompt only have
        one of all.
        """
        silent = [answer for answer in self.usable_answers if answer.no_loss]
        spans = [answer.learnt for answer in self.usable_answers if not answer.no_loss]
        learnt = [any(start <= i < end for start, end in spans) for i in range(len(self.tokens))]
        if whose == "all":
            learnt = [True] * len(self.tokens)
            silent = [answer for answer in silent if answer.no_loss == MARKED]
        elif self.marked is not None:
            learnt = list(self.marked)
        for start, end in (answer.learnt for answer in silent):
            learnt[start:end] = [False] * (end - start)
        return tuple(learnt)


@dataclass(frozen=True)
class _Span:
    """Characters of an answer, and of its turn behind the header."""

    said: tuple[int, int]
    learnt: tuple[int, int]
    of: str
    role: str = ASSISTANT
    no_loss: str = ""


# --- what is written
# -----------------------------------------------------------------------------------------------


def render_chat(
    tokenizer: Any, said: Conversation, form: ChatRendering, turns: str = ASSISTANT
) -> RenderedChat:
    """The conversation in this rendering. turns: whose turns are its answers, or ALL.

    `learnt_token_mask` may be asked of the assistant's answers alone. Raises UnusableConversation
    where nothing can be written, or nothing of it be asked for; AuditError for a template that
    drops the system turn, which the model then never saw.
    """
    said = chat_rendering.conversation_in_form(said, form)
    if form.source is None:
        if turns != ASSISTANT:
            raise AuditError(
                f"expected a chat template for --turns {turns}, as without one only answers are "
                f"told apart, got the text form {form.name}: --template model takes the model's own"
            )
        return _render_chat_without_template(tokenizer, said, form)
    messages = chat_rendering.messages_for_template(said, form)
    try:
        whole = chat_rendering.render_messages_by_template(tokenizer, said, form, messages)
    except UnusableConversation:
        if not any(isinstance(message.get("content"), list | tuple) for message in messages):
            raise
        messages = tuple(  # for a template that knows no parts of a text
            {**one, "content": message_text(one["content"])}
            if one.get("content") is not None
            else one
            for one in messages
        )
        whole = chat_rendering.render_messages_by_template(tokenizer, said, form, messages)
    _check_system_turn_written(messages, whole)

    def rendered(changed: Sequence[Message], answering: bool = False) -> str:
        return chat_rendering.render_messages_by_template(tokenizer, said, form, changed, answering)

    roles = [normalised_role(one["role"]) for one in messages]
    asked = [i for i, role in enumerate(roles) if role == turns or (turns == ALL and role in TURNS)]
    spans = [span for i in asked for span in _assistant_answer_spans(rendered, whole, messages, i)]
    remarks = tuple(_ignored_chat_input_sentences(rendered, whole, said, messages))
    mask = _template_answer_mask(tokenizer, said, form, messages)
    return _tokenise_rendered_chat(tokenizer, whole, spans, mask, remarks, turns)


def _render_chat_without_template(
    tokenizer: Any, said: Conversation, form: ChatRendering
) -> RenderedChat:
    """Without a template: one text, and the end of text behind it, as TRL puts it there."""
    end = str(getattr(tokenizer, "eos_token", None) or "")
    text, spans = "", list[_Span | UnusableConversation]()
    found = chat_rendering.chat_pieces_without_template(said, form, end)
    no_loss = iter([message.get(NO_LOSS, "") for message in said.messages if is_assistant(message)])
    for number, (piece, answers) in enumerate(found):
        last = number == len(found) - 1
        behind = end if last and not piece.endswith(end) else ""
        start = len(text)
        text += piece + behind
        if answers:
            bounds = _strip_answer_span_whitespace(text, start, start + len(piece))
            turn = (start, len(text))
            span = _Span(bounds or turn, turn, "content", no_loss=next(no_loss))
            spans.append(span if bounds else UnusableConversation("an empty answer"))
    beside = {
        "system": any(m["role"] == SYSTEM for m in said.messages) and said.plain,
        "tools": said.tools,
    }
    remarks = [
        f"nothing of {name} is written without a template"
        for name, there in beside.items()
        if there
    ]
    return _tokenise_rendered_chat(tokenizer, text, spans, None, remarks)


def _tokenise_rendered_chat(
    tokenizer: Any,
    text: str,
    spans: Sequence[_Span | UnusableConversation],
    marked: tuple[bool, ...] | None,
    remarks: Sequence[str],
    turns: str = ASSISTANT,
) -> RenderedChat:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = tuple(split_offsets_of_byte_runs(text, encoded["offset_mapping"]))
    answers = tuple(
        _answer_of_span(text, offsets, span) if isinstance(span, _Span) else span for span in spans
    )
    unusable = [answer for answer in answers if isinstance(answer, UnusableConversation)]
    if len(unusable) == len(answers):
        raise unusable[0] if unusable else UnusableConversation(f"no {turns} turn")
    return RenderedChat(text, tuple(encoded["input_ids"]), offsets, answers, marked, tuple(remarks))


def _answer_of_span(
    text: str, offsets: Sequence[tuple[int, int]], span: _Span
) -> Answer | UnusableConversation:
    tokens = _token_range_of_text(text, offsets, *span.said)
    if tokens is None:
        return UnusableConversation("an answer does not begin at a token boundary")
    start, end = (_index_of_token_reaching_past(offsets, at) for at in span.learnt)
    return Answer(tokens, (start, end), span.of, span.role, span.no_loss)


def _check_system_turn_written(messages: Sequence[Message], whole: str) -> None:
    content = message_text(messages[0].get("content")) if messages[0]["role"] == SYSTEM else None
    # Templates strip the white space around a turn.
    if content is not None and content.strip() not in whole:
        raise AuditError(
            "expected a chat template that writes the system turn, but this one drops it: leave "
            "the system turns out, or give the template that the model was trained with "
            "(--template FILE)"
        )


def _ignored_chat_input_sentences(
    rendered: Callable[[Sequence[Message]], str],
    whole: str,
    said: Conversation,
    messages: Sequence[Message],
) -> Iterator[str]:
    """A sentence for each thing given that the template does not write; nor did the trainer's, if
    it was this one."""
    kinds = {
        key
        for message in messages
        for key in message
        if key not in ("role", "content", NO_LOSS) and message[key]
    }
    for key in sorted(kinds):
        without = [
            {name: value for name, value in message.items() if name != key} for message in messages
        ]
        try:
            if rendered(without) == whole:
                yield (
                    "the chat template writes nothing of "
                    f"{key if key.isidentifier() else 'a key of a message'}"
                )
        except UnusableConversation:
            continue  # it asks for it
    if said.tools and not any(name_of_tool(tool) in whole for tool in said.tools):
        yield "the chat template writes nothing of tools"


# --- where its answers stand
# -----------------------------------------------------------------------------------------------


def _assistant_answer_spans(
    rendered: Callable[..., str], whole: str, messages: Sequence[Message], turn: int
) -> Iterator[_Span | UnusableConversation]:
    """What the assistant said in this turn, as the template wrote it: its reasoning, if that is
    there, and its content.

    Each is found by writing the conversation with a mark in its place: what stands before and
    behind the mark stands before and behind the answer too. So it does not matter what the template
    makes of the answer, of earlier turns, or of a prompt to answer (DeepSeek-R1 and Qwen3.5 open a
    thought there that the whole does not have).
    """
    message = messages[turn]
    role = normalised_role(message["role"])
    no_loss = message.get(NO_LOSS, "") if role == ASSISTANT else ""
    said = [part for part in _reasoning_and_content_with_replacers(message) if part[1].strip()]
    content_bounds = None
    for key, _, put in said:
        with_mark = [*messages[:turn], put(_MARK), *messages[turn + 1 :]]
        marked = None if _MARK in whole else _render_chat_or_none(rendered, with_mark)
        bounds = None if marked is None else _answer_bounds_by_mark(whole, marked)
        if bounds is not None:
            content_bounds = bounds if key == "content" else None
            learnt = _answer_turn_bounds(rendered, whole, with_mark[: turn + 1], bounds)
            yield _Span(bounds, learnt, key, role, no_loss)
        elif key == "content":  # a thought of an earlier turn is what templates leave out
            yield UnusableConversation("the chat template does not write an answer as it was given")
    if message.get("tool_calls"):
        found = _tool_call_bounds(
            rendered, whole, messages, turn, 0 if content_bounds is None else content_bounds[1]
        )
        unwritten = UnusableConversation(
            "tool calls that the chat template does not write as they were given"
        )
        yield _Span(*found, CALLS, role, no_loss) if found is not None else unwritten
    elif not said:
        yield UnusableConversation("an empty answer")


def _tool_call_bounds(
    rendered: Callable[..., str], whole: str, messages: Sequence[Message], turn: int, after: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the characters of a turn's tool calls, after those of its content, and of the turn
    behind its header; None if they cannot be found: by a mark in the place of content and calls,
    else from the header to the end of the turn.
    """
    so_far, others = messages[: turn + 1], messages[turn + 1 :]
    silent = {key: value for key, value in messages[turn].items() if key != "tool_calls"}
    thought = THOUGHT.match(message_text(silent.get("content")) or "")
    before_calls = thought[0] if thought else ""
    text = _render_chat_or_none(rendered, so_far) or ""
    if _render_chat_or_none(rendered, [*so_far[:-1], silent, *others]) == whole:
        return None
    marked = _render_chat_or_none(
        rendered, [*so_far[:-1], {**silent, "content": before_calls + _MARK}, *others]
    )
    bounds = None if marked is None or _MARK in whole else _answer_bounds_by_mark(whole, marked)
    if bounds is None and text and whole.startswith(text.rstrip()):
        end = len(text.rstrip())
        bounds = _answer_turn_bounds(rendered, whole, so_far, (end, end))[0], end
    calls = (
        None
        if bounds is None
        else _strip_answer_span_whitespace(whole, max(after, bounds[0]), bounds[1])
    )
    if calls is None:
        return None
    start, end = _answer_turn_bounds(rendered, whole, so_far, calls)
    return calls, (start, len(text) if text and whole.startswith(text) else end)


def _reasoning_and_content_with_replacers(
    message: Message,
) -> Iterator[tuple[str, str, Callable[[str], Message]]]:
    """What the turn says, by key, in the order of speaking; and the message with another text in
    that place."""
    for key in REASONING:
        if isinstance(message.get(key), str):
            # key=key: else every lambda would see the last key of the loop.
            yield "reasoning", message[key], lambda text, key=key: {**message, key: text}  # type: ignore[misc]
    content = message.get("content")
    text = message_text(content) or ""

    def says(new: str) -> Message:
        return {
            **message,
            "content": new if isinstance(content, str | None) else [{"type": "text", "text": new}],
        }

    thought = THOUGHT.match(text)
    if thought is None:
        yield "content", text, says
        return
    before, inside, behind = thought.groups()
    answer = text[thought.end() :]
    yield "reasoning", inside, lambda new: says(before + new + behind + answer)
    yield "content", answer, lambda new: says(before + inside + behind + new)


def _answer_bounds_by_mark(whole: str, marked: str) -> tuple[int, int] | None:
    """The characters in the place of the mark, without white space around them; None where there is
    no such place."""
    if marked.count(_MARK) != 1:
        return None
    before, behind = marked.split(_MARK)
    if not (whole.startswith(before) and whole.endswith(behind)) or len(before) + len(behind) > len(
        whole
    ):
        return None
    return _strip_answer_span_whitespace(whole, len(before), len(whole) - len(behind))


def _strip_answer_span_whitespace(text: str, start: int, end: int) -> tuple[int, int] | None:
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    return (start, start + len(inside.strip())) if inside.strip() else None


def _answer_turn_bounds(
    rendered: Callable[..., str], whole: str, so_far: Sequence[Message], bounds: tuple[int, int]
) -> tuple[int, int]:
    """Where the turn begins behind its header, and where it ends. The header ends where the whole
    stops being like the conversation before this turn with a prompt to answer. The end is what
    stands behind the mark in the conversation up to this turn, if the whole has that behind the
    answer too.
    """
    start, end = bounds
    with_prompt, without = (
        _render_chat_or_none(rendered, so_far[:-1], True),
        _render_chat_or_none(rendered, so_far[:-1]),
    )
    if with_prompt is not None and without is not None and with_prompt.startswith(without):
        shared = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(with_prompt, whole, strict=False)
            )
        )
        if len(without) <= shared <= start:
            start = shared
    behind = (_render_chat_or_none(rendered, so_far) or "").partition(_MARK)[2]
    return start, end + (len(behind) if whole.startswith(behind, end) else 0)


def _render_chat_or_none(
    rendered: Callable[..., str], messages: Sequence[Message], answering: bool = False
) -> str | None:
    try:
        return str(rendered(messages, answering)) if messages else None
    except UnusableConversation:
        return None


def _template_answer_mask(
    tokenizer: Any, said: Conversation, form: ChatRendering, messages: Sequence[Message]
) -> tuple[bool, ...] | None:
    """The tokens inside the template's `{% generation %}` blocks, which is what TRL's
    assistant_only_loss trains on."""
    # Without such blocks transformers only warns and gives a mask of zeros, as if nothing were
    # learnt.
    if not re.search(r"\{%-?\s*generation\s*-?%\}", str(form.source)):
        return None
    asked = chat_rendering.chat_template_arguments(tokenizer, said, form)
    # It tokenises without special tokens as `_tokenise_rendered_chat` does: the mask is of the same
    # tokens.
    given = chat_rendering.messages_without_loss_marks(messages)
    told = tokenizer.apply_chat_template(
        given, return_dict=True, return_assistant_tokens_mask=True, **asked
    )
    return tuple(map(bool, told["assistant_masks"]))


def _index_of_token_reaching_past(offsets: Sequence[tuple[int, int]], at: int) -> int:
    return next((i for i, (_, end) in enumerate(offsets) if end > at), len(offsets))


def _token_range_of_text(
    text: str, offsets: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[int, int] | None:
    """The tokens that say text[start:end]; a space before it may be part of the first one. None: no
    token begins there.

    A last token that says more than white space behind the end is none of them.
    """
    first = _index_of_token_reaching_past(offsets, start)
    if first == len(offsets) or text[offsets[first][0] : start].strip():
        return None
    last = next(
        (i for i in range(first, len(offsets)) if text[end : offsets[i][1]].strip()), len(offsets)
    )
    while last > first and offsets[last - 1][0] >= end:  # white space behind the answer
        last -= 1
    return (first, last) if last > first else None
