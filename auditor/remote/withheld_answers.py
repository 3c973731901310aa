"""Classify incomplete answers as filtered, refused, redacted or cut.

Such an answer is no evidence that nothing leaked. The module lists phrases used by servers and
content filters. It trusts a server's tokens and log-probabilities more than its text. Text that was
replaced without any sign of it cannot be detected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FILTERED = "filtered"
CALLED = "tool calls"
REFUSED = "refused"
REDACTED = "redacted"
CUT = "cut"
EMPTY = "empty"
ENDED = "ended"
UNCLEAR = "unclear"
FAILED = "failed"
SPLIT = "split"
# A single answer of this kind is enough for a doubt.
HIDDEN = (
    FILTERED,
    CALLED,
    REFUSED,
    REDACTED,
    CUT,
    UNCLEAR,
    SPLIT,
)
# Shares of answers that raise a doubt. An honest model ends some texts early, and a few
# immediately, so only a large share counts. An honest server fails at a few samples (llama-server
# at bytes that are not a character): fewer than any limit of a gate.
MANY = {EMPTY: 0.05, ENDED: 0.5, FAILED: 0.001}

_WORDS = {
    FILTERED: "withheld by a content filter",
    CALLED: "replaced by a tool call",
    REFUSED: "refused",
    REDACTED: "redacted",
    CUT: "cut short by the server",
    UNCLEAR: "readable with and without a first space, which the server trims",
    SPLIT: "to prefixes that begin or end within a character, which the server does not accept",
    FAILED: "answered with an error (500) at every try",
    EMPTY: "empty",
    ENDED: "ended before the requested length",
}
# Finish reasons: OpenAI and Azure, then those that gateways pass on from Gemini, Bedrock and Zhipu.
_FILTERS = {
    "content_filter",
    "content_filtered",
    "safety",
    "recitation",
    "blocklist",
    "prohibited_content",
    "spii",
}
_FILTERS |= {"guardrail_intervened", "sensitive"}
_CALLS = {"tool_calls", "function_call", "tool_use"}
_REFUSALS = {"refusal"}
_ENDS = {"stop", "eos", "eos_token", "end_turn"}  # the model's own end of text

_BEGINS = 160  # first characters of an answer to search for a refusal
_STOCK = re.compile(
    r"\b(sorry|apologi[sz]e|unfortunately|as an? (ai|language model|assistant)|i)\b.{0,60}?"
    r"\b(can(no|')t|can not|cannot|unable to|not able to|won't|will not|not allowed to|not "
    r"permitted to)\b.{0,30}?"
    r"\b(help|assist|provide|share|comply|complete|continue|fulfil+|disclose|reveal|discuss|answer|reproduce|do that)\b"  # noqa: E501
    r"|\b(content|response|request|answer|output) (was|has been|is) "
    r"(blocked|filtered|removed|withheld|redacted)\b",
    re.IGNORECASE | re.DOTALL,
)
# [REDACTED], <EMAIL_ADDRESS> as Presidio writes it, {{NAME}}, asterisks, blocks.
_NAMES = r"(redacted|removed|masked|filtered|hidden|pii|private|person|name|email|phone|ssn|address|credit_card|number)"  # noqa: E501
_MARK = re.compile(
    rf"[\[<({{]{{1,2}}\s*([a-z]+_)?{_NAMES}(_[a-z0-9]+)*\s*[\]>)}}]{{1,2}}|\*{{3,}}|[\u2588\u25a0]{{2,}}",
    re.IGNORECASE,
)


def read_withheld_kind(choice: Mapping[str, Any]) -> str:
    """Return the kind of withheld answer that the server reports: FILTERED, CALLED, REFUSED or "".

    `choice` is one sample in the server's JSON answer.
    """
    reason = str(choice.get("finish_reason") or "").lower()
    message = choice.get("message")
    refusal = choice.get("refusal") or (
        message.get("refusal") if isinstance(message, Mapping) else None
    )
    azure = choice.get("content_filter_results")  # {"hate": {"filtered": false, ...}, ...}
    categories = azure.values() if isinstance(azure, Mapping) else ()
    if reason in _FILTERS or any(
        isinstance(category, Mapping) and category.get("filtered") for category in categories
    ):
        return FILTERED
    if reason in _CALLS:
        return CALLED
    return REFUSED if refusal or reason in _REFUSALS else ""


def has_model_ended_text(choice: Mapping[str, Any]) -> bool:
    """Return whether the server reports that the model, not a stop string, ended the text."""
    # vLLM's: a stop string, or the id of an end of text other than the first
    stopped = choice.get("stop_reason")
    return str(choice.get("finish_reason") or "").lower() in _ENDS and not isinstance(stopped, str)


def detect_withheld_kind(text: str, before: str, sampled: str | None) -> str:
    """Return REFUSED or REDACTED if the words of the answer `text` say so, otherwise "".

    `before` is the text before the answer; the answer may repeat redaction marks from it. `sampled`
    is the text of the drawn tokens, None if not reported. A mark in drawn tokens comes from the
    model, not from a filter.
    """
    if _STOCK.search(text[:_BEGINS].replace("\u2019", "'")):
        return REFUSED
    known_text = before + (sampled or "")
    for mark in _MARK.finditer(text):
        if mark.group() not in known_text:
            return REDACTED
    return ""


def format_withheld_answers(counts: Mapping[str, int]) -> str:
    """Return a phrase such as `12 withheld by a content filter, 3 redacted`, largest first."""
    return ", ".join(
        f"{n:,} {_WORDS[kind]}"
        for kind, n in sorted(counts.items(), key=lambda item: -item[1])
        if kind and n
    )


def count_hiding_answers(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts of the kinds of answers that may have hidden a leak.

    In `counts`, complete answers are under "".
    """
    total = sum(counts.values())
    many = {}
    for kind, share in MANY.items():
        if counts.get(kind, 0) > share * total:
            many[kind] = counts[kind]
    return {kind: counts[kind] for kind in HIDDEN if counts.get(kind)} | many
