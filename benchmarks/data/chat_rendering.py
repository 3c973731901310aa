"""Define renderings: rules by which trainers turn conversations into training text.

A rendering has a name (`--template`), in most cases a Jinja template, and the date that the
template writes (`--date`). This module lists common renderings; `runs/text_form.py` tests which of
these a model was trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from auditor.benchmarks.data.conversation_rows import (
    COMPLETION,
    INSTRUCTION,
    MESSAGES,
    NO_LOSS,
    REASONING,
    THOUGHT,
    Conversation,
    Message,
    UnusableConversation,
    add_tool_calls,
    decode_call_arguments,
    get_message_text,
    is_assistant,
    normalise_role,
    remove_nested_nulls,
    wrap_tools,
)
from auditor.core.errors import AuditError

MODEL = "model"
NONE = "none"
ALPACA = "alpaca"
TRL = "trl"
BASES = (MODEL, NONE, ALPACA, TRL)
GIVEN_ROLES = "given-roles"
NO_REASONING = "no-reasoning"
NO_THINKING = "no-thinking"
LINE = "line"  # a new line where the base has another join
BARE = "bare"  # BARE and INPUT: two relatives of Alpaca's text
INPUT = "input"
# Changes of the row by a trainer before the template writes it; see `change_row`.
FILLED, NO_NULLS, DECODED, WRAPPED, NO_SYSTEM, NO_EMPTY_TOOLS = _OF_ROWS = (
    *("filled", "no-nulls", "decoded-arguments", "wrapped-tools"),
    *("no-system-column", "no-empty-tools"),
)
VARIANTS = (GIVEN_ROLES, NO_REASONING, NO_THINKING, LINE, BARE, INPUT, *_OF_ROWS)
_OF_TEMPLATES = {GIVEN_ROLES, NO_REASONING, NO_THINKING, LINE, *_OF_ROWS}
_MOST = 32  # most forms of one template to try, beginning with those closest to the usual form
# Taori et al. 2023, train.py: PROMPT_DICT
_OPENING = "Below is an instruction that describes a task"
_FURTHER = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request.\n\n"
_ASKS_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
Piece = tuple[str, bool]  # a text, and if it is an answer


@dataclass(frozen=True)
class ChatRendering:
    """Define a rendering, which turns a row into training text.

    base: one of `BASES`: the model's template, TRL's template, `alpaca` or `none`.
    source: the template as Jinja, or several named templates as JSON; None if there is no template.
    variants: names of differences from the base rendering, from `VARIANTS`.
    day: the date that the template writes, as YYYY-MM-DD.
    """

    base: str
    source: str | None = None
    variants: tuple[str, ...] = ()
    day: str | None = None

    @property
    def name(self) -> str:
        """The value of `--template` that selects this rendering."""
        return "+".join((self.base, *self.variants))

    @property
    def name_with_day(self) -> str:
        if self.day is None:
            return self.name
        return f"{self.name}, {self.day}"

    @property
    def kind(self) -> str:
        """The kind of the rendering: `template`, `alpaca` or `none`.

        Renderings of the same kind differ in details. Renderings of different kinds differ in all
        text around an answer.
        """
        if self.source is not None:
            return "template"
        return self.base

    @property
    def writes_day(self) -> bool:
        return self.source is not None and "strftime_now" in self.source

    @property
    def digest(self) -> str:
        """The hex SHA-256 of all fields that affect the text."""
        fields = [self.source or self.base, sorted(self.variants), self.day]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


# --- parsing ---


def parse_chat_rendering(text: str, day: str | None, tokenizer: Any) -> ChatRendering:
    """Return the rendering that the user's `--template` and `--date` describe.

    text: the value of --template. day: the value of --date (None leaves the template's date open).
    Raise AuditError if the rendering is unknown.
    """
    base = text
    variants = tuple[str, ...]()
    # Remove only known variants from the end, because a file name may contain a plus, too.
    while (parts := base.rpartition("+"))[2] in VARIANTS and parts[0]:
        base = parts[0]
        variants = (parts[2], *variants)
    allowed = {NONE: {LINE}, ALPACA: {LINE, BARE, INPUT}}.get(base, _OF_TEMPLATES)
    if wrong := [variant for variant in variants if variant not in allowed]:
        raise AuditError(
            f"expected --template {base} with one of {', '.join(sorted(allowed))}, got +{wrong[0]}"
        )
    form = ChatRendering(
        base, None if base in (NONE, ALPACA) else _get_template_source(base, tokenizer), variants
    )
    if day is not None and not form.writes_day:
        raise AuditError(
            "expected --date with a template that writes the day (strftime_now), got it with "
            f"{text}"
        )
    return replace(form, day=day)


def _get_template_source(base: str, tokenizer: Any) -> str:
    if base == MODEL:
        if (template := get_chat_template(tokenizer)) is None:
            raise AuditError(
                "expected a tokenizer with a chat template for conversations, but this "
                f"{type(tokenizer).__name__} has none: give the one that the model was trained "
                "with (--template FILE), or --template none"
            )
        return template
    if base == TRL:
        if (of_trl := find_trl_template(tokenizer)) is None:
            raise AuditError(
                "expected --template trl with a chat template that TRL has a training template "
                "for, and TRL installed (pip install trl), got one that it leaves as it is, or no "
                "TRL"
            )
        return of_trl
    try:
        return Path(base).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise AuditError(
            f"expected --template as auto, {', '.join(BASES)}, or a file with a Jinja template, "
            f"got {base!r}"
        ) from None


def get_chat_template(tokenizer: Any) -> str | None:
    """Return the tokenizer's chat template; several named templates become one JSON text."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None or isinstance(template, str):
        return template
    return json.dumps(template, sort_keys=True)


def find_trl_template(tokenizer: Any) -> str | None:
    """Return the chat template that TRL uses instead of the tokenizer's for `assistant_only_loss`.

    Return None if TRL keeps the tokenizer's template or is not installed.
    """
    if not isinstance(getattr(tokenizer, "chat_template", None), str):
        return None
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError:
        return None
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except (
        ValueError,
        TemplateError,
        TypeError,
        LookupError,
        AttributeError,
    ):  # a template that TRL does not know
        return None
    return template


# --- candidates ---


def list_candidate_chat_renderings(
    tokenizer: Any, rows: Sequence[Conversation]
) -> list[ChatRendering]:
    """Return the renderings that trainers use for such rows, without dates, most common first.

    Raise AuditError if the rows have messages and the tokenizer has no template.
    """
    kind = rows[0].kind
    template = get_chat_template(tokenizer)
    of_trl = find_trl_template(tokenizer)
    plain = {
        COMPLETION: [
            ChatRendering(NONE),
            ChatRendering(NONE, None, (LINE,)),
        ],  # TRL: one text, then its end
        INSTRUCTION: [
            ChatRendering(ALPACA),
            ChatRendering(ALPACA, None, (LINE,)),
            ChatRendering(ALPACA, None, (INPUT, LINE)),
            ChatRendering(ALPACA, None, (BARE, LINE)),
            ChatRendering(NONE),
        ],
    }.get(kind, [])
    if kind == MESSAGES and template is None:
        return [parse_chat_rendering(MODEL, None, tokenizer)]
    # Without variants product() yields one empty tuple: the template unchanged.
    of_templates = []
    for base, source in ((MODEL, template), (TRL, of_trl)):
        if source is not None:
            usual = ChatRendering(base, source)
            choices = product(*_list_chat_rendering_variant_choices(tokenizer, usual, rows))
            # The smallest first: a stable sort.
            for variants in sorted(choices, key=lambda variants: sum(map(bool, variants)))[:_MOST]:
                of_templates.append(replace(usual, variants=tuple(filter(None, variants))))
    return [*plain, *of_templates, *([ChatRendering(NONE)] if kind == MESSAGES else [])]


def choose_usual_rendering(tokenizer: Any, rows: Sequence[Conversation], day: str) -> ChatRendering:
    """Return the most common rendering of these rows.

    If its template writes a date, the date is `day`.
    """
    form = list_candidate_chat_renderings(tokenizer, rows)[0]
    return replace(form, day=day) if form.writes_day else form


def _list_chat_rendering_variant_choices(
    tokenizer: Any, usual: ChatRendering, rows: Sequence[Conversation]
) -> Iterator[tuple[str, ...]]:
    """Yield tuples of alternative variants that change the text of these rows.

    The first entry of each tuple is "", which means no variant.
    """
    messages: list[Message] = []
    has_options = False
    has_input = False
    for conversation in rows:
        messages += conversation.messages
        has_options |= bool(conversation.options)
        has_input |= conversation.kind == INSTRUCTION and bool(conversation.plain[1])
    if any(normalise_role(message["role"]) != message["role"] for message in messages):
        yield ("", GIVEN_ROLES)
    if any(map(_has_reasoning, messages)):
        yield ("", NO_REASONING)
    if "enable_thinking" in str(usual.source) and not has_options:
        yield ("", NO_THINKING)
    if rows[0].kind == INSTRUCTION and has_input:
        yield ("", LINE)
    for variants in ((FILLED, NO_NULLS), (DECODED,), (WRAPPED,), (NO_SYSTEM,), (NO_EMPTY_TOOLS,)):
        # Only variants that change this template's text of these rows: most templates write nothing
        # for a null.
        other = []
        for variant in variants:
            if _is_text_changed(tokenizer, usual, variant, rows):
                other.append(variant)
        if other:
            yield ("", *other)


def _is_text_changed(
    tokenizer: Any, usual: ChatRendering, variant: str, rows: Sequence[Conversation]
) -> bool:
    """Return whether a variant changes the text of any of these rows."""
    for conversation in rows:
        row = WrittenRow(tokenizer, conversation, usual)
        changed = change_row(tokenizer, conversation, replace(usual, variants=(variant,)))
        if changed.conversation != conversation and changed.write_or_none(
            changed.messages
        ) != row.write_or_none(row.messages):
            return True
    return False


def _has_reasoning(message: Message) -> bool:
    has_key = any(map(message.get, REASONING))
    return has_key or (
        is_assistant(message)
        and bool(THOUGHT.match(get_message_text(message.get("content")) or ""))
    )


# --- texts of the forms ---


def change_row(tokenizer: Any, conversation: Conversation, form: ChatRendering) -> WrittenRow:
    """Change a conversation as this rendering's trainers do before they call the template.

    For example, some trainers decode tool arguments or drop keys without a value.
    """
    variants = form.variants
    if FILLED in variants and conversation.filled is not None:
        conversation = conversation.filled
    if NO_NULLS in variants:
        conversation = remove_nested_nulls(conversation)
    if DECODED in variants:
        conversation = decode_call_arguments(conversation)
    if WRAPPED in variants:
        conversation = wrap_tools(conversation)
    if NO_SYSTEM in variants and conversation.system_column:
        conversation = replace(
            conversation, messages=conversation.messages[1:], system_column=False
        )
    if NO_EMPTY_TOOLS in variants and not conversation.tools:
        conversation = replace(conversation, tools=None)
    return WrittenRow(tokenizer, conversation, form)


@dataclass(frozen=True)
class WrittenRow:
    """Write a conversation, changed by `change_row`, as text of a rendering."""

    tokenizer: Any
    conversation: Conversation
    form: ChatRendering

    @cached_property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The messages for the template, changed by the variants of the rendering."""
        variants = self.form.variants
        usual = GIVEN_ROLES not in variants
        messages = []
        for message in self.conversation.messages:
            messages.append(dict(add_tool_calls(message) if usual else message))
        if LINE in variants and self.conversation.kind == INSTRUCTION:
            # An instruction's turns end with its question and the answer (`parse_conversation`).
            messages[-2]["content"] = "\n".join(filter(None, self.conversation.plain[:2]))
        for message in messages:
            if usual:
                message["role"] = normalise_role(message["role"])
            if NO_REASONING in variants and _has_reasoning(message):
                for key in REASONING:
                    message.pop(key, None)
                message["content"] = THOUGHT.sub("", get_message_text(message.get("content")) or "")
        return tuple(messages)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `apply_chat_template` except the messages."""
        tools = self.conversation.tools
        source = str(self.form.source)
        if self.form.base == MODEL and not isinstance(
            self.tokenizer.chat_template, str
        ):  # several by name: the tools decide
            source = self.tokenizer.get_chat_template(None, tools)
        arguments: dict[str, Any] = {"chat_template": fix_template_date(source, self.form.day)}
        if tools is not None:
            arguments["tools"] = tools
        if NO_THINKING in self.form.variants:
            arguments["enable_thinking"] = False
        # Options of the row override others.
        return arguments | dict(self.conversation.options)

    def write(self, messages: Sequence[Message], answering: bool = False) -> str:
        """Return the text that the template makes of the messages.

        answering: whether to end with the generation prompt. Raise UnusableConversation if the
        template rejects the messages.
        """
        arguments = self.arguments
        try:
            text = self.tokenizer.apply_chat_template(
                remove_loss_marks(messages),
                tokenize=False,
                add_generation_prompt=answering,
                **arguments,
            )
        except (
            TemplateError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise UnusableConversation(
                f"the chat template refuses it ({_format_template_error(error, messages)}): give "
                "the template of the training (--template FILE)"
            ) from None
        return str(text)

    def write_or_none(self, messages: Sequence[Message], answering: bool = False) -> str | None:
        """Return the text; None without messages, or if the template rejects the messages."""
        with suppress(UnusableConversation):
            if messages:
                return self.write(messages, answering)
        return None

    def list_plain_pieces(self, end: str) -> list[Piece]:
        """Return the text of a row without a template, as a list of (text, is an answer).

        end: the end-of-text token. Raise UnusableConversation if a turn has no text.
        """
        row = self.conversation
        line = "\n" if LINE in self.form.variants else ""
        if self.form.base == ALPACA:
            return self._list_alpaca_pieces(line, end)
        if row.kind == MESSAGES:  # turn by turn, a line each
            pieces: list[Piece] = []
            for message in row.messages:
                content = get_message_text(message.get("content"))
                if content is None:
                    raise UnusableConversation(
                        "a turn that is not text, and no template to write it"
                    )
                pieces += [("\n", False), (content, is_assistant(message))]
            return pieces[1:]
        questions = list(filter(None, row.plain[:-1]))
        answer = (row.plain[-1], True)
        if row.kind == INSTRUCTION:
            before = self._list_history_pieces("", "\n", "\n")
            return [*before, ("\n".join(questions) + "\n", False), answer]
        return [("".join(questions) + line, False), answer]

    def _list_history_pieces(self, before: str, between: str, after: str) -> list[Piece]:
        """Return the questions and answers before an instruction, with text around each of them."""
        # The last two turns are the instruction and its answer (`parse_conversation`).
        contents = []
        for message in self.conversation.messages[self.conversation.system_column : -2]:
            contents.append(str(message["content"]))
        pieces: list[Piece] = []
        for question, answer in zip(contents[::2], contents[1::2], strict=True):
            pieces += [(before + question + between, False), (answer, True), (after, False)]
        return pieces

    def _list_alpaca_pieces(self, line: str, end: str) -> list[Piece]:
        """Return the text as in Alpaca's training, as a list of (text, is an answer).

        Variants: `bare` omits the opening; `input` keeps the input's heading even if the input is
        empty; `line` begins the answer on a new line, as in axolotl. A history comes first, as in
        LLaMA-Factory's `alpaca`.
        """
        if self.conversation.kind != INSTRUCTION:
            raise UnusableConversation(
                "without instruction and output, which --template alpaca needs"
            )
        instruction, input_text, output = self.conversation.plain
        opening = _OPENING
        heading = "### Instruction:\n"
        text = f"{heading}{instruction}\n\n"
        if input_text or INPUT in self.form.variants:
            opening += _FURTHER
            text += f"### Input:\n{input_text}\n\n"
        opening += _REQUEST
        if BARE in self.form.variants:
            opening = ""
        answering = f"### Response:{line}"
        pieces: list[Piece] = [
            *self._list_history_pieces(heading, f"\n\n{answering}", f"{end}\n\n"),
            (text + answering, False),
            (output, True),
        ]
        first_text, is_learnt = pieces[0]
        return [(opening + first_text, is_learnt), *pieces[1:]]


def fix_template_date(source: str, day: str | None) -> str:
    """Replace the template's calls of the clock by the date `day`; do nothing if `day` is None.

    The clock is a function, which a template variable cannot replace. Raise AuditError if the date
    format in a call is not a literal.
    """
    if day is None:
        return source
    when = datetime.fromisoformat(day)
    fixed = _ASKS_CLOCK.sub(lambda match: json.dumps(when.strftime(match[2])), source)
    if "strftime_now(" in fixed:
        raise AuditError(
            "expected a chat template that asks for the day as strftime_now('%d %b %Y'), got "
            "another call"
        )
    return fixed


def remove_loss_marks(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages without the keys that mark the loss, which templates do not receive."""
    unmarked = []
    for message in messages:
        plain = dict(message)
        plain.pop(NO_LOSS, None)
        unmarked.append(plain)
    return unmarked


def _format_template_error(error: Exception, messages: Sequence[Message]) -> str:
    """Return the template's error message, or only its type if it quotes the conversation."""
    words = " ".join(str(error).split())[:120]
    for message in messages:
        text = (get_message_text(message.get("content")) or "").strip()
        if text and text in words:
            words = ""
    return words or type(error).__name__
