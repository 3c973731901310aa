"""Cut the answers of a conversation into secrets: prefixes known to an attacker, and suffixes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from auditor.benchmarks.data import chat_rendering
from auditor.benchmarks.data.chat import RenderedChat
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import (
    Conversation,
    UnusableConversation,
    get_message_text,
)
from auditor.benchmarks.data.cut_places import CutPlace, spread_windows
from auditor.benchmarks.data.data_records import DataRecord
from auditor.benchmarks.data.wording import (
    CUT_WITHIN_CHARACTER,
    cut_wording,
    find_token_ends,
    move_cut_between_characters,
)
from auditor.core.plan_parts import SYSTEM, get_known_share


def cut_answers_into_secrets(
    tokenizer: Any,
    conversation: Conversation,
    rendered: RenderedChat,
    form: ChatRendering,
    knows: str,
    longest: int,
    max_prefix: int | None,
    is_all_along: bool = False,
) -> Iterator[DataRecord | str]:
    """Yield each answer as a record of row 0, or the reason why the answer is unusable.

    The group of a record is the speaker.

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
            yield str(answer)
            continue
        if answer.no_loss:
            yield answer.no_loss
            continue
        start, end = answer.span
        middle = start + math.floor(share * (end - start))
        if share and middle == start:
            yield "an answer that is too short to know a part of"
            continue
        for place in spread_windows(middle, end) if is_all_along else [middle]:
            cut_place = CutPlace(
                0 if max_prefix is None else max(0, place - max_prefix),
                place,
                min(end, place + longest),
            )
            first, cut, last = move_cut_between_characters(rendered.offsets, cut_place)
            if not cut < last or (first == cut and cut > 0):
                yield CUT_WITHIN_CHARACTER
                continue
            prefix = rendered.tokens[first:cut]
            wording = cut_wording(rendered.text, ends, first, cut, last)
            row_text = ""
            if system_prompt is not None:
                prefix = tuple(
                    tokenizer(system_prompt, add_special_tokens=False, verbose=False)["input_ids"]
                )
                row_text = wording.prefix_and_suffix_text
                wording = replace(wording, prefix=system_prompt)
            if not prefix:
                yield "an answer with nothing before it"
                continue
            yield DataRecord(
                0,
                prefix,
                rendered.tokens[cut:last],
                group=answer.role,
                wording=wording,
                suffix_start=cut,
                row_text=row_text,
                answer_tokens=end - start if place == middle else 0,
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
