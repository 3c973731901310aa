"""Cut the answers of a conversation into secrets: prefixes known to an attacker, and suffixes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from auditor.benchmarks.data import chat_rendering
from auditor.benchmarks.data.chat import RenderedChat
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import (
    ASSISTANT,
    Conversation,
    UnusableConversation,
    get_message_text,
)
from auditor.benchmarks.data.cut_places import CutPlace, spread_windows
from auditor.benchmarks.data.wording import (
    CUT_WITHIN_CHARACTER,
    cut_wording,
    find_token_ends,
    move_cut_between_characters,
)
from auditor.core.nouns import Tokens, Wording
from auditor.core.plan_parts import SYSTEM, get_known_share


@dataclass(frozen=True)
class AnswerCut:
    """An answer of a conversation, cut into a prefix that the attacker gets and a suffix to
    extract.

    wording: the text of prefix and suffix.
    suffix_start: index of the suffix's first token in the conversation.
    conversation_text: the text of prefix and suffix in the conversation, if the attacker gets
        another prefix too.
    role: the answer's speaker.
    tokens: number of tokens of the complete answer; 0 for later windows of an answer.
    """

    prefix: Tokens
    suffix: Tokens
    wording: Wording
    suffix_start: int
    conversation_text: str
    role: str = ASSISTANT
    tokens: int = 0


def cut_answers_into_secrets(
    tokenizer: Any,
    conversation: Conversation,
    rendered: RenderedChat,
    form: ChatRendering,
    knows: str,
    longest: int,
    max_prefix: int | None,
    is_all_along: bool = False,
) -> Iterator[AnswerCut | UnusableConversation]:
    """Yield each answer as a secret (prefix and suffix), or the reason why the answer is unusable.

    knows: the attacker's knowledge. `user` is all text before an answer. `partial:F` adds the share
        F of the answer's tokens. `system` is only the system turn, so only the first answer is
        attacked.
    longest: maximum tokens of a suffix.
    max_prefix: maximum tokens of a prefix (None: no limit).
    is_all_along: whether to cut a long answer into several secrets, each after all preceding text.
    Raise UnusableConversation if `knows` is `system` and there is no system turn.
    """
    share = get_known_share(knows)
    ends = find_token_ends(rendered.offsets, len(rendered.text))
    if knows == SYSTEM:
        system_prompt = _system_turn_only_prompt(tokenizer, conversation, form)
    else:
        system_prompt = None
    for answer in rendered.answers if system_prompt is None else rendered.usable_answers[:1]:
        if isinstance(answer, UnusableConversation):
            yield answer
            continue
        if answer.no_loss:
            yield UnusableConversation(answer.no_loss)
            continue
        start, end = answer.span
        middle = start + math.floor(share * (end - start))
        if share and middle == start:
            yield UnusableConversation("an answer that is too short to know a part of")
            continue
        for place in spread_windows(middle, end) if is_all_along else [middle]:
            cut_place = CutPlace(
                0 if max_prefix is None else max(0, place - max_prefix),
                place,
                min(end, place + longest),
            )
            first, cut, last = move_cut_between_characters(rendered.offsets, cut_place)
            if not cut < last or (first == cut and cut > 0):
                yield UnusableConversation(CUT_WITHIN_CHARACTER)
                continue
            prefix = rendered.tokens[first:cut]
            wording = cut_wording(rendered.text, ends, first, cut, last)
            # repeats are counted by it, for any prefix
            stands = wording.prefix_and_suffix_text
            if system_prompt is not None:
                prefix = tuple(
                    tokenizer(system_prompt, add_special_tokens=False, verbose=False)["input_ids"]
                )
                wording = replace(wording, prefix=system_prompt)
            if not prefix:
                yield UnusableConversation("an answer with nothing before it")
                continue
            n_tokens = end - start if place == middle else 0
            yield AnswerCut(
                prefix, rendered.tokens[cut:last], wording, cut, stands, answer.role, n_tokens
            )


def _system_turn_only_prompt(
    tokenizer: Any, conversation: Conversation, form: ChatRendering
) -> str:
    """Return the text of the system turn, with the prompt to answer.

    Raise UnusableConversation if there is no system turn.
    """
    conversation = chat_rendering.apply_form(conversation, form)
    messages = chat_rendering.build_template_messages(conversation, form)
    if messages[0]["role"] != SYSTEM or (form.source is None and conversation.plain):
        raise UnusableConversation("no system turn to know")
    if form.source is None:
        return f"{get_message_text(messages[0].get('content'))}\n"
    return chat_rendering.render_messages(
        tokenizer, conversation, form, messages[:1], answering=True
    )
