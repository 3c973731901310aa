"""What a row of conversations or instructions says, as it was given. Knows columns and roles; no template, no model.

Reasons why a row cannot be used name columns, roles and turns, never what was said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.core.plan_parts import SYSTEM, USER

ASSISTANT = "assistant"
LAYOUTS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
BESIDE = ("input", "system", "tools", "chat_template_kwargs")  # columns that are read where the layout has them
REASONING = ("reasoning_content", "reasoning", "thinking")  # what a turn says before its content, by trainer
MESSAGES, COMPLETION, INSTRUCTION = "messages", "completion", "instruction"
# ShareGPT's names, and others', as axolotl reads them.
_USUAL_ROLES = {"human": USER, **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), ASSISTANT)}
_SHAREGPT = {"from": "role", "value": "content"}

Message = Mapping[str, Any]


class UnusableConversation(Exception):
    """Why a conversation, or an answer of it, is left out: in words that hold nothing of it."""


@dataclass(frozen=True)
class Conversation:
    """One row. messages: with role and content, and whatever else was given.

    kind: `messages`; of texts, `completion` or `instruction`: `plain` holds them then, (prompt, completion) or
    (instruction, input, output), and `messages` what they are as turns.
    """

    messages: tuple[Message, ...]
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the row's own chat_template_kwargs
    kind: str = MESSAGES
    plain: tuple[str, ...] = ()


def normalised_role(role: str) -> str:
    """`user` of `human`, `assistant` of `gpt`; any other role as it is."""
    return _USUAL_ROLES.get(role, role)


def is_assistant(message: Message) -> bool:
    """Whether it is what a model was trained to say."""
    return normalised_role(message["role"]) == ASSISTANT


def message_text(content: Any) -> str | None:
    """A text, or the texts of its parts one behind the other; None where a part is none."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        return "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def parse_row_as_conversation(layout: Sequence[str], row: Mapping[str, Any]) -> Conversation:
    """What a row of one of `LAYOUTS` says. Raises UnusableConversation."""
    tools, options = (
        _parsed_conversation_tools(row.get("tools")),
        _parsed_chat_template_options(row.get("chat_template_kwargs")),
    )
    before = [{"role": SYSTEM, "content": _require_message_text(row["system"])}] if row.get("system") else []
    kind, plain = MESSAGES, tuple[str, ...]()
    if layout[0] in ("messages", "conversations"):
        turns = _normalised_messages(row[layout[0]], "")
        # The turn wins over the column.
        if turns and turns[0]["role"] == SYSTEM:
            before = []
    elif layout[0] == "instruction":
        kind = INSTRUCTION
        plain = (
            _require_message_text(row["instruction"]),
            _require_message_text(row.get("input") or ""),
            _require_message_text(row["output"]),
        )
        asked = "\n\n".join(filter(None, plain[:2]))
        turns = [{"role": USER, "content": asked}, {"role": ASSISTANT, "content": plain[2]}]
    else:
        prompt, completion = row["prompt"], row["completion"]
        turns = [*_normalised_messages(prompt, USER), *_normalised_messages(completion, ASSISTANT)]
        if isinstance(prompt, str) and isinstance(completion, str):
            kind, plain = COMPLETION, (prompt, completion)
    said = Conversation((*before, *turns), tools, options, kind, plain)
    if not any(map(is_assistant, said.messages)):
        raise UnusableConversation("no assistant turn")
    return said


def _normalised_messages(messages: Any, role: str) -> list[dict[str, Any]]:
    """OpenAI's role and content, or ShareGPT's from and value under those names; of a text, one turn of this role."""
    if isinstance(messages, str) and role:
        return [{"role": role, "content": messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UnusableConversation("its messages are no list")
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise UnusableConversation("a message is no object")
        named = {_SHAREGPT.get(str(key), str(key)): value for key, value in message.items()}
        if not isinstance(named.get("role"), str):
            raise UnusableConversation("a turn without a role")
        content = named.get("content")
        if content is not None and message_text(content) is None:
            raise UnusableConversation("a turn that is not text")
        # Parquet and `datasets` give every message all keys of any, with null where it has none.
        found.append({key: value for key, value in named.items() if value is not None})
    return found


def _require_message_text(content: Any) -> str:
    if not isinstance(content, str):
        raise UnusableConversation("a turn that is not text")
    return content


def _parsed_conversation_tools(given: Any) -> Any:
    """A list of functions; TRL takes it as JSON too."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except ValueError:
            raise UnusableConversation("tools that are neither a list nor JSON") from None
    if given and not isinstance(given, Sequence):
        raise UnusableConversation("tools that are neither a list nor JSON")
    return list(given) if given else None


def _parsed_chat_template_options(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UnusableConversation("chat_template_kwargs that are no object")
    return {key: value for key, value in given.items() if value is not None}
