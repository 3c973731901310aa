"""Parse rows of conversations or instructions.

If a row is unusable, the reason names columns, roles and turns, but never their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.benchmarks.data.cut_places import count_common_beginning
from auditor.benchmarks.data.json_rows import describe_cell_value_type, parse_strict_json
from auditor.core.plan_parts import SYSTEM, USER

ASSISTANT = "assistant"
PREFERENCES = ("chosen", "rejected")
LAYOUTS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    PREFERENCES,
)
# A trainer's marks, with the value 0 or false, that exclude a row or a message from training.
_MARKS = ("weight", "train", "trainable", "training", "loss", "loss_scale")
# Spans of a message, each of which may have `train: false`, as in axolotl.
_MARKED_SPANS = ("training_detail", "train_detail", "reasoning_training_detail")
# Columns that are read if the table has them.
BESIDE = ("input", "history", "system", "tools", "chat_template_kwargs", "label", *_MARKS)
# keys of a turn's text before its content, by trainer
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)
MESSAGES = "messages"
COMPLETION = "completion"
INSTRUCTION = "instruction"
CHOSEN = "chosen"
REJECTED = "rejected"
WANTED = "wanted"
UNWANTED = "unwanted"
NO_LOSS = "no loss"  # key of a message without a loss; the value is the reason
MARKED = (
    "the row marks it as not trained on (weight 0, or train, trainable, training or loss false; "
    "TRL 1.16 ignores such marks: take them out if it trained the model)"
)
_PREFERENCE_PROMPT = (
    "a turn of the prompt, which has no loss in DPO and KTO (if it was trained on, as by TRL's "
    "ORPO, put the whole conversation into messages)"
)
_PROMPT = (
    "a turn of the prompt, which has no loss unless TRL's completion_only_loss is false (then put "
    "the whole conversation into messages)"
)
_TOOL = "tool"
# Roles whose turns are tool calls as JSON text: LLaMA-Factory's name, and ms-swift's.
_CALLING_ROLES = ("function_call", "function-call", "tool_call")
# ShareGPT's names, and others', as axolotl, LLaMA-Factory, ms-swift, LangChain and Cohere write
# them.
_USUAL_ROLES = {
    SYSTEM: SYSTEM,
    **dict.fromkeys((USER, "human", "prompter"), USER),
    **dict.fromkeys(
        (ASSISTANT, "gpt", "chatgpt", "bot", "chatbot", "ai", "model", *_CALLING_ROLES), ASSISTANT
    ),
    _TOOL: _TOOL,
    **dict.fromkeys(("observation", "observations", "function_response", "tool_response"), _TOOL),
}
# Names that may be shown: roles of people, keys of a turn, types of its parts.
_PUBLIC = (
    "advisor agent author body caller client content customer doctor employee expert from helper"
    " message moderator name operator parts patient role sender speaker student support teacher"
    " text type utterance value audio document file image image_url input_audio refusal thinking"
    " tool_use tool_result video"
)
_SHAREGPT = {"from": "role", "value": "content"}
_TURNS = 'expected a JSON list of {"role": ..., "content": ...}'
_CALLS = '[{"function": {"name": ..., "arguments": ...}}]'
# A list of messages in JSON or as Python writes it.
_WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
THOUGHT = re.compile(r"^(\s*<think>\s*)(.*?)(\s*</think>\s*)", re.DOTALL)

Message = Mapping[str, Any]


class UnusableConversation(Exception):
    """Report why a conversation or answer is unusable, without private text."""


@dataclass(frozen=True)
class Conversation:
    """A conversation, parsed from a row of a table.

    messages: dictionaries with role, content and all further keys given.
    tools: the tool functions.
    options: the row's chat_template_kwargs.
    kind: `messages`, `completion` or `instruction`.
    plain: the row's own texts, which `messages` repeats as turns: (prompt, completion) for the kind
        `completion`, (instruction, input, output) for `instruction`, and () for `messages`.
    group: for preference data, `chosen`, `rejected`, `wanted` or `unwanted`.
    system_column: whether the first message is from a separate column.
    filled: the conversation as read from an Arrow table, if different. An Arrow table gives each
        object all keys that occur in any row, with null for its missing keys.
    place: file and row, for error messages.
    """

    messages: tuple[Message, ...]
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = MESSAGES
    plain: tuple[str, ...] = ()
    group: str | None = None
    system_column: bool = False
    filled: Conversation | None = field(default=None, compare=False)
    place: str = field(default="a conversation", compare=False)

    @property
    def is_learnt(self) -> bool:
        """Return whether any answer of the conversation was trained on."""
        if self.group in (REJECTED, UNWANTED):
            return False
        answers = filter(is_assistant, self.messages)
        return any(NO_LOSS not in message for message in answers)


def normalise_role(role: str) -> str:
    """Return `user` for `Human`, `assistant` for `gpt`, `tool` for `observation`, else the role."""
    return _USUAL_ROLES.get(role.lower(), role)


def is_assistant(message: Message) -> bool:
    return normalise_role(message["role"]) == ASSISTANT


def get_message_text(content: Any) -> str | None:
    """Return the text of a message's content; None if any part has no text.

    content: a text, or a list of parts, whose texts are joined.
    """
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                return None
            texts.append(part["text"])
        return "".join(texts)
    return content if isinstance(content, str) else None


def parse_conversations(
    layout: Sequence[str], row: Mapping[str, Any], keep_nulls: bool = False
) -> tuple[Conversation, ...]:
    """Parse a row with the columns of one of `LAYOUTS` into conversations.

    A preference row gives a chosen and a rejected conversation, any other row a single one.
    keep_nulls: see `parse_conversation`. Raise UnusableConversation if the row is invalid.
    """
    if layout != PREFERENCES:
        return (parse_conversation(layout, row, keep_nulls),)
    prompt, *sides = _split_preferences(row)
    columns = ("instruction", "output") if prompt is None else ("prompt", "completion")
    conversations = []
    for side, group in zip(sides, PREFERENCES, strict=True):
        cells = {**row, columns[1]: side, "prompt": prompt}
        conversation = parse_conversation(columns, cells, keep_nulls)
        conversations.append(_drop_prompt_loss(conversation, side, _PREFERENCE_PROMPT, group))
    return tuple(conversations)


def _split_preferences(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the prompt, the chosen completion and the rejected completion of a row.

    The prompt of an instruction is None. If the row has no prompt column, the prompt is the common
    prefix of both completions, as in TRL's `extract_prompt`.
    """
    chosen = row["chosen"]
    rejected = row["rejected"]
    # LLaMA-Factory writes each side as one message.
    if isinstance(chosen, Mapping):
        chosen = [chosen]
    if isinstance(rejected, Mapping):
        rejected = [rejected]
    for name, side in zip(PREFERENCES, (chosen, rejected), strict=True):
        if not isinstance(side, Sequence):
            kind = describe_cell_value_type(side)
            raise UnusableConversation(f"its {name} side is neither a text nor a list but {kind}")
    prompt = row.get("prompt")
    if prompt is None and row.get("instruction") is not None:
        return None, chosen, rejected
    if prompt is not None and not (isinstance(prompt, str) and _repeats_prompt(chosen)):
        return prompt, chosen, rejected
    shared = min(count_common_beginning(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and shared > 0 and chosen[shared - 1] == " ":
        shared -= 1
    if shared < 1:
        raise UnusableConversation("chosen and rejected sides that share no prompt")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _repeats_prompt(side: Sequence[Any]) -> bool:
    """Return whether a side repeats a prompt that is a text: it is a list, and no answer first."""
    if isinstance(side, str):
        return False
    turns = _list_normalised_messages(side, ASSISTANT, False)
    return bool(turns) and not is_assistant(turns[0])


def _drop_prompt_loss(
    conversation: Conversation, completion: Any, reason: str, group: str | None
) -> Conversation:
    """Exclude all turns from the loss except those of the completion.

    completion: a text or a list of messages. reason: why the prompt is excluded from the loss.
    group: the group of the returned conversation.
    """
    n_last = 1
    if not isinstance(completion, str):
        n_last = len(completion)
    n_prompt = len(conversation.messages) - n_last
    prompt = ({NO_LOSS: reason, **message} for message in conversation.messages[:n_prompt])
    messages = (*prompt, *conversation.messages[n_prompt:])
    return replace(conversation, messages=messages, group=group)


def parse_conversation(
    layout: Sequence[str], row: Mapping[str, Any], keep_nulls: bool
) -> Conversation:
    """Parse a row with the columns of one of `LAYOUTS`, but not a preference row.

    keep_nulls: whether to keep keys with null values in messages and chat_template_kwargs. Raise
    UnusableConversation if the row is invalid.
    """
    tools = _parse_conversation_tools(row.get("tools"))
    options = _parse_chat_template_options(row.get("chat_template_kwargs"), keep_nulls)
    before = []
    if row.get("system"):
        before = [{"role": SYSTEM, "content": _require_message_text(row["system"])}]
    kind = MESSAGES
    plain = tuple[str, ...]()
    # For messages and instructions with a label, LLaMA-Factory takes the last turn as the
    # completion.
    completion: Any = ""
    if layout[0] in ("messages", "conversations"):
        turns = _list_normalised_messages(row[layout[0]], "", keep_nulls)
        # The turn takes precedence over the column.
        if turns and normalise_role(turns[0]["role"]) == SYSTEM:
            before = []
    elif layout[0] == "instruction":
        kind = INSTRUCTION
        plain = (
            _require_message_text(row["instruction"]),
            _require_message_text(row.get("input") or ""),
            _require_message_text(row["output"]),
        )
        question = "\n\n".join(filter(None, plain[:2]))
        turns = [{"role": USER, "content": question}, {"role": ASSISTANT, "content": plain[2]}]
        turns = [*_parse_history(row.get("history")), *turns]
    else:
        prompt = row["prompt"]
        completion = row["completion"]
        turns = [
            *_list_normalised_messages(prompt, USER, keep_nulls),
            *_list_normalised_messages(completion, ASSISTANT, keep_nulls),
        ]
        if isinstance(prompt, str) and isinstance(completion, str):
            kind = COMPLETION
            plain = (prompt, completion)
    if _is_marked_untrained(row):
        turns = [{**turn, NO_LOSS: MARKED} for turn in turns]
    conversation = Conversation(
        (*before, *turns), tools, options, kind, plain, system_column=bool(before)
    )
    if not any(map(is_assistant, conversation.messages)):
        raise UnusableConversation(_describe_missing_assistant(conversation.messages))
    # CSV contains only text.
    group = {"true": WANTED, "false": UNWANTED}.get(str(row.get("label")).lower())
    if group is None and layout[0] != "prompt":
        return conversation
    reason = _PROMPT if group is None else _PREFERENCE_PROMPT
    return _drop_prompt_loss(conversation, completion, reason, group)


def _describe_missing_assistant(messages: Sequence[Message]) -> str:
    """Name the roles of a conversation without an assistant's turn, and say what to rename."""
    if not messages:
        return "no message"
    roles = {message["role"] for message in messages}
    reason = f"no assistant turn, only roles {_list_public_names(roles)}"
    if any(role.lower() not in _USUAL_ROLES for role in roles):
        reason += ": rename to assistant the role whose turns the model was trained on"
    return reason


def _list_public_names(names: Iterable[str]) -> str:
    """List roles, keys or types for a message.

    Only common names are listed. Uncommon names may be names of people, so they are only counted.
    """
    usual = []
    n_hidden = 0
    for name in sorted(names):
        if name.lower() in (*_USUAL_ROLES, *_PUBLIC.split()):
            usual.append(name)
        else:
            n_hidden += 1
    if n_hidden:
        usual.append(f"{n_hidden} not shown, as it may be a name")
    return ", ".join(usual)


def _is_marked_untrained(message: Mapping[str, Any]) -> bool:
    """Return whether a row, a message or its part has a mark that excludes it from the loss."""
    marks = list(map(message.get, _MARKS))
    for name in _MARKED_SPANS:
        spans = message.get(name)
        for span in spans if isinstance(spans, Sequence) else ():
            if isinstance(span, Mapping):
                marks.append(span.get("train"))
    return any(map(_means_no, marks))


def _means_no(mark: Any) -> bool:
    """Return whether a mark is 0 or false, as a number or as text (from CSV)."""
    if isinstance(mark, str):
        return mark.strip().lower() in ("0", "0.0", "false")
    return isinstance(mark, int | float) and mark == 0


def _parse_history(history: Any) -> list[dict[str, Any]]:
    """Parse the history column (question, answer) of LLaMA-Factory's Alpaca layout to messages."""
    if isinstance(history, str) and history:
        with suppress(ValueError):  # refused below
            history = parse_strict_json(history)
    if history and not isinstance(history, Sequence):
        history = [history]  # refused below
    turns = []
    for pair in history or ():
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise UnusableConversation("a history that is no list of questions and answers")
        for role, text in zip((USER, ASSISTANT), pair, strict=True):
            turns.append({"role": role, "content": _require_message_text(text)})
    return turns


def _list_normalised_messages(messages: Any, role: str, keep_nulls: bool) -> list[dict[str, Any]]:
    """Return messages with role and content, from OpenAI's keys or ShareGPT's `from` and `value`.

    A plain text becomes one turn of the speaker `role`.
    """
    name = "prompt" if role == USER else "answer"
    if isinstance(messages, str) and role:
        if _WRITTEN_MESSAGES.match(messages):
            raise UnusableConversation(
                f"its {name} is a list of messages written as text: give lists, as in JSONL, or "
                "the columns prefix and suffix if this text was trained on"
            )
        return [{"role": role, "content": messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        kind = describe_cell_value_type(messages)
        if role:
            raise UnusableConversation(f"its {name} is neither a text nor a list but {kind}")
        if isinstance(messages, str) and _WRITTEN_MESSAGES.match(messages):
            kind = "text that is not JSON, or has a key twice: write lists with json.dumps, not str"
        raise UnusableConversation(f"its messages are no list but {kind} ({_TURNS})")
    turns = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise UnusableConversation(f"a message is no object ({_TURNS})")
        renamed = {}
        for key, value in message.items():
            renamed[_SHAREGPT.get(str(key), str(key))] = value
        if not isinstance(renamed.get("role"), str):
            keys = _list_public_names(map(str, message))
            raise UnusableConversation(f"a turn without a role, only {keys} ({_TURNS})")
        content = renamed.get("content")
        if content is not None and get_message_text(content) is None:
            raise UnusableConversation(_describe_content_without_text(content))
        parts: Any = content
        if isinstance(content, str | None):
            parts = ()
        # Parquet and `datasets` give each message the keys of all messages, with null for missing
        # values.
        turn = {}
        for key, value in renamed.items():
            if key not in (*_MARKS, *_MARKED_SPANS) and (keep_nulls or value is not None):
                turn[key] = value
        if not _are_tool_calls(renamed.get("tool_calls")):
            raise UnusableConversation(f"tool_calls in another form than {_CALLS}")
        if any(map(_is_marked_untrained, (renamed, *parts))):
            turn[NO_LOSS] = MARKED
        turns.append(turn)
    return turns


def _are_tool_calls(calls: Any) -> bool:
    """Return whether a message's `tool_calls` is empty, or a list of calls with names."""
    if not calls:
        return True
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return False
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            return False
    return True


def decode_messages(value: Any) -> Any:
    """Return a list of messages that a cell holds as JSON text, as in CSV; None for "".

    Any other value is returned unchanged.
    """
    if not isinstance(value, str):
        return value
    with suppress(ValueError, RecursionError):
        if isinstance(messages := parse_strict_json(value), list):
            return messages
    return value or None


def _describe_content_without_text(content: Any) -> str:
    """Say why a message's content is not text, naming the types of its parts without text."""
    parts = [content]
    if isinstance(content, Sequence):
        parts = [part for part in content if get_message_text([part]) is None]
    types = set()
    for part in parts:
        if isinstance(part, Mapping) and "type" in part:
            types.add(str(part["type"]))
    names = _list_public_names(types) or describe_cell_value_type(parts[0])
    return (
        f"a turn that is not text ({names}): only texts are audited, as in "
        '"content": "..." or parts {"type": "text", "text": "..."}'
    )


def _require_message_text(content: Any) -> str:
    if not isinstance(content, str):
        kind = describe_cell_value_type(content)
        raise UnusableConversation(f"a turn that is not text ({kind})")
    return content


def get_tool_name(tool: Any) -> str:
    """Return the name of a tool function, given bare or in OpenAI's format; "" if it has none."""
    if isinstance(tool, Mapping):
        tool = tool.get("function", tool)
    return str(tool.get("name", "")) if isinstance(tool, Mapping) else ""


def _parse_conversation_tools(tools: Any) -> Any:
    """Return the tool functions as a list; the input may be JSON, which TRL also reads."""
    if isinstance(tools, str):
        with suppress(ValueError):  # refused below
            tools = json.loads(tools)
    if isinstance(tools, Sequence) and not isinstance(tools, str):
        return list(tools)
    if tools:
        raise UnusableConversation("tools that are neither a list nor JSON")
    return None


def _parse_chat_template_options(options: Any, keep_nulls: bool) -> dict[str, Any]:
    if isinstance(options, str) and options:
        with suppress(ValueError):  # refused below
            options = json.loads(options)
    if options is None or options == "":
        return {}
    if not isinstance(options, Mapping):
        raise UnusableConversation("chat_template_kwargs that are no object")
    return {key: value for key, value in options.items() if keep_nulls or value is not None}


# --- trainers' changes of a row ---


def add_tool_calls(message: Message) -> Message:
    """Convert a message whose role means a tool call to an assistant's message with `tool_calls`.

    LLaMA-Factory and ms-swift do the same. Messages of other roles, and messages without JSON of
    calls, are unchanged.
    """
    text = get_message_text(message.get("content"))
    if message["role"] not in _CALLING_ROLES or text is None:
        return message
    thought = THOUGHT.match(text)
    start = thought.end() if thought else 0
    try:
        parsed = json.loads(text[start:])
    except (ValueError, RecursionError):
        return message
    calls = parsed if isinstance(parsed, list) else [parsed]
    functions = []
    for call in calls:
        if not isinstance(call, Mapping) or not call.keys() >= {"name", "arguments"}:
            return message
        functions.append({"type": "function", "function": call})
    if not functions:
        return message
    return {**message, "role": ASSISTANT, "content": text[:start], "tool_calls": functions}


def wrap_tools(conversation: Conversation) -> Conversation:
    """Put each bare tool function under the key `function`, as in OpenAI's API."""
    if not isinstance(conversation.tools, list):
        return conversation
    wrapped = []
    for tool in conversation.tools:
        if isinstance(tool, Mapping) and "name" in tool and "function" not in tool:
            tool = {"type": "function", "function": tool}
        wrapped.append(tool)
    return replace(conversation, tools=wrapped)


def decode_call_arguments(conversation: Conversation) -> Conversation:
    """Decode the JSON arguments of the conversation's tool calls into objects, as in axolotl."""
    messages = []
    for message in conversation.messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": list(map(_decode_arguments, calls))}
        messages.append(message)
    return replace(conversation, messages=tuple(messages))


def _decode_arguments(call: Any) -> Any:
    """Decode the JSON arguments of a tool call, given bare or in OpenAI's format."""
    if not isinstance(call, Mapping):
        return call
    changed = dict(call)
    if "function" in call:
        changed["function"] = _decode_arguments(call["function"])
    if isinstance(changed.get("arguments"), str):
        try:
            changed["arguments"] = json.loads(changed["arguments"])
        except (ValueError, RecursionError):
            return call
    return changed


def remove_nested_nulls(conversation: Conversation) -> Conversation:
    """Return the conversation without null-valued keys in its tools and messages, at any depth."""
    return replace(
        conversation,
        messages=remove_nulls(conversation.messages),
        tools=remove_nulls(conversation.tools),
    )


def remove_nulls(value: Any) -> Any:
    """Return the value without null-valued keys, at any depth."""
    if isinstance(value, Mapping):
        return {key: remove_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return type(value)(map(remove_nulls, value))
    return value


def fill_arrow_nulls(value: Any, kind: Any) -> Any:
    """Return a cell as read from an Arrow column of the type `kind` (`pyarrow.DataType`).

    Each object gets all keys of the column type, in the type's order, with null for missing keys.
    """
    from pyarrow import types

    if value is None or kind is None:
        return value
    if types.is_struct(kind) and isinstance(value, Mapping):
        return {field.name: fill_arrow_nulls(value.get(field.name), field.type) for field in kind}
    if (types.is_list(kind) or types.is_large_list(kind)) and isinstance(value, list | tuple):
        return [fill_arrow_nulls(inner, kind.value_type) for inner in value]
    return value
