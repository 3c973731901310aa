"""Render conversations as in training; find the tokens of answers and the tokens with a loss.

Conversations are from `conversation_rows.py` and renderings from `chat_rendering.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.benchmarks.data import chat_rendering
from auditor.benchmarks.data.chat_rendering import ChatRendering, WrittenRow
from auditor.benchmarks.data.conversation_rows import (
    ASSISTANT,
    MARKED,
    NO_LOSS,
    REASONING,
    THOUGHT,
    Conversation,
    Message,
    UnusableConversation,
    get_message_text,
    get_tool_name,
    is_assistant,
    normalise_role,
)
from auditor.benchmarks.data.cut_places import count_common_beginning, split_byte_runs
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.plan_parts import ALL, SYSTEM, TURNS

LEARNT = (ASSISTANT, "all")  # tokens with a loss: those of assistant turns, or all
CALLS = "tool_calls"
_MARK = "Zq7vX9kJ"  # placeholder for an answer, which templates copy unchanged


@dataclass(frozen=True)
class Answer:
    """Position in a conversation of a text that the assistant wrote.

    Ranges are in tokens, or in characters before the conversation is tokenised.

    span: (start, end) of the text.
    learnt: (start, end) of the whole turn after its header, including the turn's end mark.
    message_key: the part of the message that the text is in: content, tool calls, or reasoning,
        which precedes the content.
    role: who wrote the text; the assistant unless other turns are attacked.
    no_loss: reason why the answer is excluded from the loss; "" if it is not.
    """

    span: tuple[int, int]
    learnt: tuple[int, int]
    message_key: str = "content"
    role: str = ASSISTANT
    no_loss: str = ""


@dataclass(frozen=True)
class RenderedChat:
    """Hold a conversation as text and tokens, with each answer or the reason why it is unusable.

    offsets: the character range of each token.
    marked: whether the template marks each token as the assistant's; None if it has no marks.
    remarks: sentences about content of the row that is missing in the text.
    """

    text: str
    tokens: Tokens
    offsets: tuple[tuple[int, int], ...]
    answers: tuple[Answer | UnusableConversation, ...]
    marked: tuple[bool, ...] | None
    remarks: tuple[str, ...] = ()

    @property
    def usable_answers(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if isinstance(answer, Answer))

    def learnt_token_mask(self, loss_on: str) -> tuple[bool, ...]:
        """Return whether each token counts toward the loss.

        loss_on: `all` for all tokens. `assistant` for the assistant's turns; if the template marks
        the assistant's tokens, exactly those.

        Turns that the row marks as untrained never count. The assistant's turns in a prompt count
        only for `all`.
        """
        if loss_on == "all":
            mask = [True] * len(self.tokens)
        elif self.marked is not None:
            mask = list(self.marked)
        else:
            mask = [False] * len(self.tokens)
            for answer in self.usable_answers:
                if not answer.no_loss:
                    start, end = answer.learnt
                    mask[start:end] = [True] * (end - start)
        for answer in self.usable_answers:
            if answer.no_loss and (loss_on != "all" or answer.no_loss == MARKED):
                start, end = answer.learnt
                mask[start:end] = [False] * (end - start)
        return tuple(mask)


# --- rendering ---


def render_chat(
    tokenizer: Any, conversation: Conversation, form: ChatRendering, turns: str = ASSISTANT
) -> RenderedChat:
    """Render a conversation by `form`, and find its answers.

    turns: the speaker whose turns are the answers, or ALL; `learnt_token_mask` supports only the
    assistant. Raise UnusableConversation if the template writes nothing or if no answer is usable.
    Raise AuditError if the template omits the system turn.
    """
    row = chat_rendering.change_row(tokenizer, conversation, form)
    if form.source is None:
        if turns != ASSISTANT:
            raise AuditError(
                f"expected a chat template for --turns {turns}, because without one only answers "
                "are "
                f"distinguished, got the text form {form.name}: --template model takes the model's "
                "own"
            )
        return _render_chat_without_template(row)
    messages: Sequence[Message] = row.messages
    try:
        text = row.write(messages)
    except UnusableConversation:
        if not any(isinstance(message.get("content"), list | tuple) for message in messages):
            raise
        joined = []  # for a template that only reads a content of one text
        for message in messages:
            if message.get("content") is not None:
                message = {**message, "content": get_message_text(message["content"])}
            joined.append(message)
        messages = tuple(joined)
        text = row.write(messages)
    _check_system_turn_written(conversation.place, messages, text)
    finder = _AnswerFinder(row, text, messages)
    spans: list[Answer | UnusableConversation] = []
    for i, message in enumerate(messages):
        role = normalise_role(message["role"])
        if role == turns or (turns == ALL and role in TURNS):
            spans += finder.find_answer_spans(i)
    remarks = tuple(finder.describe_ignored_input())
    mask = _mask_template_answers(row, messages)
    return _tokenise_rendered_chat(tokenizer, text, spans, mask, remarks, turns)


def _render_chat_without_template(row: WrittenRow) -> RenderedChat:
    """Render the conversation as one text that ends with the end-of-text token, as in TRL."""
    conversation = row.conversation
    end = str(getattr(row.tokenizer, "eos_token", None) or "")
    text = ""
    spans = list[Answer | UnusableConversation]()
    pieces = row.list_plain_pieces(end)
    assistant_messages = filter(is_assistant, conversation.messages)
    for number, (piece, answers) in enumerate(pieces):
        start = len(text)
        text += piece
        if number == len(pieces) - 1 and not piece.endswith(end):
            text += end
        if answers:
            bounds = _strip_answer_span_whitespace(text, start, start + len(piece))
            turn = (start, len(text))
            no_loss = next(assistant_messages).get(NO_LOSS, "")
            span = Answer(bounds or turn, turn, "content", no_loss=no_loss)
            spans.append(span if bounds else UnusableConversation("an empty answer"))
    dropped = {
        "system": any(m["role"] == SYSTEM for m in conversation.messages) and conversation.plain,
        "tools": conversation.tools,
    }
    remarks = []
    for name, is_dropped in dropped.items():
        if is_dropped:
            remarks.append(f"nothing of {name} is written without a template")
    return _tokenise_rendered_chat(row.tokenizer, text, spans, None, remarks)


def _tokenise_rendered_chat(
    tokenizer: Any,
    text: str,
    spans: Sequence[Answer | UnusableConversation],
    marked: tuple[bool, ...] | None,
    remarks: Sequence[str],
    turns: str = ASSISTANT,
) -> RenderedChat:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = tuple(split_byte_runs(text, encoded["offset_mapping"]))
    answers = [_cut_answer(text, offsets, span) for span in spans]
    unusable = [answer for answer in answers if isinstance(answer, UnusableConversation)]
    if len(unusable) == len(answers):
        raise next(iter(unusable), UnusableConversation(f"no {turns} turn"))
    ids = tuple(encoded["input_ids"])
    return RenderedChat(text, ids, offsets, tuple(answers), marked, tuple(remarks))


def _cut_answer(
    text: str, offsets: Sequence[tuple[int, int]], span: Answer | UnusableConversation
) -> Answer | UnusableConversation:
    if isinstance(span, UnusableConversation):
        return span
    tokens = _find_token_range(text, offsets, *span.span)
    if tokens is None:
        return UnusableConversation("an answer does not begin at a token boundary")
    start, end = span.learnt
    turn = (_find_first_token_after(offsets, start), _find_first_token_after(offsets, end))
    return replace(span, span=tokens, learnt=turn)


def _check_system_turn_written(place: str, messages: Sequence[Message], text: str) -> None:
    if normalise_role(messages[0]["role"]) != SYSTEM:
        return
    content = messages[0].get("content")
    parts = [content] if isinstance(content, str) else [[part] for part in content or ()]
    # Templates change white space, and write more between the parts of a turn.
    written = "".join(text.split())
    if any("".join((get_message_text(part) or "").split()) not in written for part in parts):
        raise AuditError(
            f"{place}: expected a chat template that writes the system turn, but this one drops "
            "it: leave the system turns out, or give the template that the model was trained with "
            "(--template FILE)"
        )


# --- places of answers ---


@dataclass(frozen=True)
class _AnswerFinder:
    """Find the answers in a conversation that a template writes as `text`.

    The conversation is rendered again with a placeholder (`_MARK`) in place of an answer. The
    answer is then what stands between the same surroundings in the complete rendering. So the
    template may change the answer and earlier turns. It may also end the generation prompt with
    text that the complete rendering lacks, such as the start of a thought in DeepSeek-R1 and
    Qwen3.5.
    """

    row: WrittenRow
    text: str
    messages: Sequence[Message]

    def find_answer_spans(self, turn: int) -> Iterator[Answer | UnusableConversation]:
        """Yield the character spans of the reasoning (if any) and content in this turn."""
        before, message, after = self._split_messages(turn)
        role = normalise_role(message["role"])
        no_loss = message.get(NO_LOSS, "") if role == ASSISTANT else ""
        parts = [part for part in _list_text_replacers(message) if part[1].strip()]
        content_end = 0
        for key, _, put in parts:
            so_far = [*before, put(_MARK)]
            bounds = self._find_marked_bounds([*so_far, *after])
            if bounds is not None:
                if key == "content":
                    content_end = bounds[1]
                yield Answer(bounds, self._find_turn_bounds(so_far, bounds), key, role, no_loss)
            elif key == "content":  # templates leave out thoughts of earlier turns
                yield UnusableConversation(
                    "the chat template does not write an answer as it was given"
                )
        if message.get(CALLS):
            call_bounds = self._find_tool_call_bounds(turn, content_end)
            if call_bounds is None:
                yield UnusableConversation(
                    "tool calls that the chat template does not write as they were given"
                )
            else:
                yield Answer(*call_bounds, CALLS, role, no_loss)
        elif message.get("function_call"):
            yield UnusableConversation("a function_call, which is not read: give it as tool_calls")
        elif not parts:
            yield UnusableConversation("an empty answer")

    def _split_messages(self, turn: int) -> tuple[Sequence[Message], Message, Sequence[Message]]:
        return self.messages[:turn], self.messages[turn], self.messages[turn + 1 :]

    def _find_tool_call_bounds(
        self, turn: int, least: int
    ) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Return the character ranges of a turn's tool calls, and of the turn after its header.

        A placeholder instead of content and calls locates the calls. If this fails, the calls are
        assumed to fill the turn after its header. Return None if this fails too.

        least: character before which the calls do not begin.
        """
        before, message, after = self._split_messages(turn)
        so_far = [*before, message]
        silent = {key: value for key, value in message.items() if key != CALLS}
        thought = THOUGHT.match(get_message_text(silent.get("content")) or "")
        before_calls = thought[0] if thought else ""
        text = self.row.write_or_none(so_far) or ""
        if self.row.write_or_none([*before, silent, *after]) == self.text:
            return None
        with_mark = {**silent, "content": before_calls + _MARK}
        bounds = self._find_marked_bounds([*before, with_mark, *after])
        if bounds is None and text and self.text.startswith(text.rstrip()):
            end = len(text.rstrip())
            bounds = self._find_turn_bounds(so_far, (end, end))[0], end
        if bounds is None:
            return None
        calls = _strip_answer_span_whitespace(self.text, max(least, bounds[0]), bounds[1])
        if calls is None:
            return None
        start, end = self._find_turn_bounds(so_far, calls)
        return calls, (start, len(text) if text and self.text.startswith(text) else end)

    def _find_marked_bounds(self, with_mark: Sequence[Message]) -> tuple[int, int] | None:
        """Return the characters that the placeholder replaced, without surrounding white space.

        Return None if the range is unclear.
        """
        marked = self.row.write_or_none(with_mark)
        text = self.text
        if marked is None or _MARK in text or marked.count(_MARK) != 1:
            return None
        before, after = marked.split(_MARK)
        if not (text.startswith(before) and text.endswith(after)) or len(before) + len(after) > len(
            text
        ):
            return None
        return _strip_answer_span_whitespace(text, len(before), len(text) - len(after))

    def _find_turn_bounds(
        self, so_far: Sequence[Message], bounds: tuple[int, int]
    ) -> tuple[int, int]:
        """Return the characters at which the answer's turn starts, after its header, and ends.

        The header ends where the text first differs from the earlier conversation with a generation
        prompt.

        The turn's end mark is found by rendering the conversation only up to this turn: there, it
        is all text after the placeholder. The turn ends after this mark if the mark follows the
        answer in the text, and otherwise with the answer.
        """
        start, end = bounds
        with_prompt = self.row.write_or_none(so_far[:-1], True)
        without = self.row.write_or_none(so_far[:-1])
        if with_prompt is not None and without is not None and with_prompt.startswith(without):
            shared = count_common_beginning(with_prompt, self.text)
            if len(without) <= shared <= start:
                start = shared
        ending = (self.row.write_or_none(so_far) or "").partition(_MARK)[2]
        return start, end + (len(ending) if self.text.startswith(ending, end) else 0)

    def describe_ignored_input(self) -> Iterator[str]:
        """Yield a sentence about each part of the conversation that the template does not write."""
        kinds = set()
        for message in self.messages:
            for key in message:
                if key not in ("role", "content", NO_LOSS) and message[key]:
                    kinds.add(key)
        for key in sorted(kinds):
            without = []
            for message in self.messages:
                without.append({name: value for name, value in message.items() if name != key})
            if self.row.write_or_none(without) == self.text:
                yield (
                    "the chat template writes nothing of "
                    f"{key if key.isidentifier() else 'a key of a message'}"
                )
        tools = self.row.conversation.tools
        if tools and not any(get_tool_name(tool) in self.text for tool in tools):
            yield "the chat template writes nothing of tools"


def _list_text_replacers(
    message: Message,
) -> Iterator[tuple[str, str, Callable[[str], Message]]]:
    """Yield (key, text, replace) for each text of a turn, in speaking order.

    key: `reasoning` or `content`. replace: returns the message with a given text instead.
    """
    for key in REASONING:
        if isinstance(message.get(key), str):
            # key=key: otherwise every lambda would see the last key of the loop.
            yield "reasoning", message[key], lambda text, key=key: {**message, key: text}  # type: ignore[misc]
    content = message.get("content")
    text = get_message_text(content) or ""

    def says(new: str) -> Message:
        return {
            **message,
            "content": new if isinstance(content, str | None) else [{"type": "text", "text": new}],
        }

    thought = THOUGHT.match(text)
    if thought is None:
        yield "content", text, says
        return
    before, inside, closing = thought.groups()
    answer = text[thought.end() :]
    yield "reasoning", inside, lambda new: says(before + new + closing + answer)
    yield "content", answer, lambda new: says(before + inside + closing + new)


def _strip_answer_span_whitespace(text: str, start: int, end: int) -> tuple[int, int] | None:
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    if inside.strip():
        return (start, start + len(inside.strip()))
    return None


def _mask_template_answers(row: WrittenRow, messages: Sequence[Message]) -> tuple[bool, ...] | None:
    """Return whether each token is in the template's `{% generation %}` blocks; None without them.

    With TRL's assistant_only_loss, these tokens count toward the loss.
    """
    # Without such blocks transformers only warns and returns a mask of zeros, as if nothing were
    # learnt.
    if not re.search(r"\{%-?\s*generation\s*-?%\}", str(row.form.source)):
        return None
    # It tokenises without special tokens, like `_tokenise_rendered_chat`: the mask is of the same
    # tokens.
    encoded = row.tokenizer.apply_chat_template(
        chat_rendering.remove_loss_marks(messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **row.arguments,
    )
    return tuple(map(bool, encoded["assistant_masks"]))


def _find_first_token_after(offsets: Sequence[tuple[int, int]], at: int) -> int:
    """Return the index of the first token that ends after character `at`.

    Return the number of tokens if there is none.
    """
    return next((i for i, (_, end) in enumerate(offsets) if end > at), len(offsets))


def _find_token_range(
    text: str, offsets: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[int, int] | None:
    """Return (first, end), the token range of text[start:end]; None if no token starts there.

    The first token may include a preceding space. The last token is excluded if it extends beyond
    `end` by more than white space.
    """
    first = _find_first_token_after(offsets, start)
    if first == len(offsets) or text[offsets[first][0] : start].strip():
        return None
    last = next(
        (i for i in range(first, len(offsets)) if text[end : offsets[i][1]].strip()), len(offsets)
    )
    while last > first and offsets[last - 1][0] >= end:  # white space after the answer
        last -= 1
    return (first, last) if last > first else None
