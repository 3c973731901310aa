"""Cut rows into prefix and suffix tokens.

A pair is cut where prefix and suffix join, a text at its start or at several positions, and a
conversation at its answers.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING, Any

from auditor.benchmarks.data import chat, chat_rendering
from auditor.benchmarks.data.chat import RenderedChat
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.columns import NO_TEXT, ColumnKinds, DataTable
from auditor.benchmarks.data.conversation_rows import (
    ASSISTANT,
    Conversation,
    Message,
    UnusableConversation,
    get_message_text,
    normalise_role,
)
from auditor.benchmarks.data.cut_places import (
    BY_OWN_LENGTH,
    CUT_WITHIN_CHARACTER,
    LENGTH,
    MOST_WINDOWS,
    NOTHING_SHARED,
    CutPlace,
    SharedBeginnings,
    TextLengths,
    cut_wording,
    find_shared_beginnings,
    find_token_ends,
    move_cut_between_characters,
    split_byte_runs,
    spread_windows,
)
from auditor.benchmarks.data.data_records import DataRecord, format_too_long
from auditor.core.errors import AuditError
from auditor.core.nouns import Wording
from auditor.core.plan_parts import ALL, SYSTEM, USER, get_known_share
from auditor.models.trained_length import TrainedLength
from auditor.models.vocabulary import decode_keeping_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000  # rows tokenised at once: offsets of a whole data set need not fit in memory
# Number of texts, and first characters of each, that are searched for shared beginnings.
_COMPARED = (
    1000,
    10_000,
)


_SYSTEM_ROLES = (SYSTEM, "developer")
CutPart = DataRecord | str  # a row or a part of a row, or the reason why it cannot be attacked


@dataclass(frozen=True)
class Cutting:
    """Hold the options for cutting the rows of a table into prefixes and suffixes.

    lengths: the user's lengths in tokens.
    knows: what the attacker knows of a conversation (None: `user`). `user` is all text before an
        answer; `partial:F` adds the share F of the answer's tokens; `system` is only the system
        turn.
    form: the rendering of conversations (None: the usual rendering).
    turns: the attacked speaker of conversations (None: the assistant).
    shared: prefixes that many texts share.
    kinds: Arrow types of the columns in `--data`. The rows of all files are rendered as if they had
        these types, so that equal rows of two files become equal texts.
    trained: the tokens of a row that were trained on (None: all).
    room: maximum number of tokens of prefix and suffix that the model reads (None: no limit).
    """

    tokenizer: Any
    lengths: TextLengths = BY_OWN_LENGTH
    knows: str | None = None
    form: ChatRendering | None = None
    turns: str | None = None
    shared: SharedBeginnings = NOTHING_SHARED
    kinds: ColumnKinds | None = None
    trained: TrainedLength | None = None
    room: int | None = None

    def trained_span(self, n_tokens: int) -> tuple[int, int]:
        """Return (start, end) of the trained tokens in a row of n_tokens."""
        templated = self.form is not None and self.form.source is not None
        if self.trained is None:
            return (0, n_tokens)
        return self.trained.span_of(n_tokens, templated)

    @property
    def has_answer_windows(self) -> bool:
        """True if a long answer is attacked in several windows, along all of it.

        This is the case if the user gives no lengths and the attacker knows all earlier text.
        """
        return not self.lengths.are_given and (self.knows or USER) == USER

    def fit_record(self, record: CutPart, n_tokens: int) -> CutPart:
        """Return the part of a record that was trained on, or the reason why there is none.

        A record that is already such a reason is returned unchanged. A record that is too long for
        the model is unusable too. n_tokens: length of the row.
        """
        if isinstance(record, str):
            return record
        start, end = self.trained_span(n_tokens)
        at = record.suffix_start
        if self.trained is not None and not (start < at and at + record.n_suffix <= end):
            return self.trained.beyond_phrase
        if start:
            cut = record.cut
            record = replace(
                record, cut=cut._replace(start=max(cut.start, cut.middle - at + start))
            )
        if self.room is not None and record.n_prefix + record.n_suffix > self.room:
            return format_too_long(self.room)
        return record


@dataclass
class CutCounts:
    """Count the rows of a table; the counts are complete once the rows are cut.

    rule: a phrase about how rows are cut.
    texts: the rows' texts.
    remarks: counts of moved cuts and of inputs that a template omits.
    row_tokens: number of tokens of each row; for a conversation, of its answers.
    """

    rule: str
    texts: list[str] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)
    row_tokens: Counter[int] = field(default_factory=Counter)


def require_fast_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer; raise AuditError if it cannot map tokens to characters."""
    if tokenizer is None:
        raise AuditError("expected a model with a tokenizer for text data, got a model without one")
    if not getattr(tokenizer, "is_fast", False):
        raise AuditError(
            "expected a fast tokenizer (with character offsets) for text data, got the slow "
            f"{type(tokenizer).__name__}"
        )
    return tokenizer


def describe_tokenisation(tokenizer: PreTrainedTokenizerBase) -> str:
    extra = tokenizer.num_special_tokens_to_add()
    if extra:
        default = f"; by default it would add {extra} to every text"
    else:
        default = ""
    return (
        f"tokenised by {type(tokenizer).__name__}, {len(tokenizer)} tokens, without special "
        f"tokens{default}"
    )


def cut_rows_into_parts(
    table: DataTable, cut: Cutting
) -> tuple[Iterator[tuple[int, CutPart]], CutCounts]:
    """Return an iterator over (row, part), and counts that are filled while it is read.

    Raise AuditError if an option has no effect on this table's columns.
    """
    layout = table.layout
    for flag, value in (("--knows", cut.knows), ("--turns", cut.turns)):
        if value is not None and not table.has_conversations:
            raise AuditError(
                f"{flag} is about conversations (messages), but {table.label} has "
                f"{' and '.join(layout)}"
            )
    if cut.lengths.windows is not None and layout != ("text",):
        raise AuditError(
            f"--windows slides over a text column, but {table.label} has {' and '.join(layout)}"
        )
    if cut.form is not None:
        of_each = f"{cut.lengths.suffix or LENGTH} tokens"
        if cut.has_answer_windows:
            of_each = f"all along, at most {MOST_WINDOWS} windows"
        counts = CutCounts(
            f"{cut.turns or ASSISTANT} turns, {of_each} of each, as --template "
            f"{cut.form.name_with_day} (--knows {cut.knows or USER})"
        )
        rows = table.parse_conversations(kinds=cut.kinds)
        return _cut_conversations(cut, cut.form, rows, counts), counts
    texts = table.list_texts(may_be_null=True)
    if layout == ("prefix", "suffix"):
        counts = CutCounts("prefix and suffix tokenised jointly and kept whole", texts)
        return _cut_pairs(cut, table.list_text_values("prefix", True), counts), counts
    counts = CutCounts(cut.lengths.rule, texts)
    return _cut_texts_into_parts(cut, counts), counts


def _cut_texts_into_parts(cut: Cutting, counts: CutCounts) -> Iterator[tuple[int, CutPart]]:
    """Yield (row, part) for the prefixes and suffixes of each text."""
    for row, (text, (ids, offsets)) in enumerate(
        zip(counts.texts, encode_data_texts(cut.tokenizer, counts.texts), strict=True)
    ):
        counts.row_tokens[row] = len(ids)
        if not text.strip():
            yield row, NO_TEXT["text",]
            continue
        begin, trained_end = cut.trained_span(len(ids))
        n_trained = trained_end - begin
        n_shared = cut.shared.length_in(ids)
        places = cut.lengths.cut_places(n_trained, max(0, n_shared - begin), cut.room)
        if places != cut.lengths.cut_places(n_trained, room=cut.room):
            counts.remarks[
                f"cut where they begin to differ: many others begin with the same {n_shared} tokens"
            ] += 1
        tokens = array("i", ids)
        if cut.trained is not None and ids and not n_trained:
            places = cut.trained.beyond_phrase
        if isinstance(places, str):
            yield row, places
            continue
        ends = find_token_ends(offsets, len(text))
        several = len(places) > 1 or cut.lengths.windows is not None
        is_moved = False
        for number, place in enumerate(places):
            cut_place = CutPlace(*(begin + at for at in place))
            place_in_text = move_cut_between_characters(offsets, cut_place)
            start, middle, end = place_in_text
            is_moved = is_moved or place_in_text != cut_place
            if not start < middle < end:
                yield row, CUT_WITHIN_CHARACTER
                continue
            n_context = 0
            row_text = ""
            if not cut.lengths.are_given and middle - start > LENGTH:
                n_context = middle - LENGTH - start
                row_text = text[ends[start + n_context - 1] : ends[end - 1]]
            record = DataRecord(
                row,
                tokens,
                place_in_text,
                wording=cut_wording(text, ends, start, middle, end),
                part=number if several else None,
                suffix_start=middle,
                n_shared=n_shared,
                n_context=n_context,
                row_text=row_text,
            )
            yield row, record
        if is_moved and cut.lengths.are_given:
            counts.remarks[
                "cut between characters, not within one, at up to a few tokens less"
            ] += 1
        if cut.trained is not None and n_trained < len(ids):
            yield row, cut.trained.beyond_phrase


def measure_shared_beginnings(tokenizer: Any, table: DataTable) -> SharedBeginnings:
    """Return the prefixes that many texts of a table share; none if it has no text column."""
    if table.layout != ("text",):
        return NOTHING_SHARED
    texts = table.list_texts(may_be_null=True)
    n_texts, n_characters = _COMPARED
    sample = [text[:n_characters] for text in texts[:: -(-len(texts) // n_texts)]]
    return find_shared_beginnings([ids for ids, _ in encode_data_texts(tokenizer, sample)])


def _cut_pairs(
    cut: Cutting, prefixes: Sequence[str], counts: CutCounts
) -> Iterator[tuple[int, CutPart]]:
    """Yield (row, record) for each prefix and suffix, tokenised as one text as in training."""
    encoded = encode_data_texts(cut.tokenizer, counts.texts)
    for row, (prefix, text, (ids, offsets)) in enumerate(
        zip(prefixes, counts.texts, encoded, strict=True)
    ):
        part = cut.fit_record(_cut_pair(cut.tokenizer, row, prefix, text, ids, offsets), len(ids))
        counts.row_tokens[row] = 0
        if isinstance(part, DataRecord):
            counts.row_tokens[row] = part.n_suffix
        yield row, part


def _cut_pair(
    tokenizer: Any,
    row: int,
    prefix: str,
    text: str,
    ids: list[int],
    offsets: list[tuple[int, int]],
) -> CutPart:
    """Cut a row's tokens `ids` after the text `prefix`, or return why this fails.

    The tokens before the cut are decoded, because `offsets` do not suffice. Many tokenizers trim
    the space from a token's offsets, so that " b" after "a" seems to start after "a ".
    """
    n_prefix = len(prefix)
    if not (prefix and text[n_prefix:].strip()):
        return NO_TEXT["prefix", "suffix"]
    if decode_keeping_special_tokens(tokenizer, ids) != text:
        return "the tokenizer does not give this text back (it normalises it)"
    begun = sum(start < n_prefix for start, _ in offsets)  # tokens that begin in the prefix
    # Leading tokens that end in it.
    ended = next((i for i, (_, end) in enumerate(offsets) if end > n_prefix), len(ids))
    for at in range(max(1, begun), min(ended, len(ids) - 1) + 1):  # several: tokens have no width
        if decode_keeping_special_tokens(tokenizer, ids[:at]) == prefix:
            ends = []
            for end in find_token_ends(offsets[at:], len(text)):
                ends.append(max(0, end - n_prefix))
            wording = Wording(text, 0, n_prefix, len(text), tuple(ends))
            place = CutPlace(0, at, len(ids))
            return DataRecord(row, array("i", ids), place, wording=wording, suffix_start=at)
    return "the join of prefix and suffix is not a token boundary"


def _cut_conversations(
    cut: Cutting,
    form: ChatRendering,
    rows: Iterator[tuple[int, Conversation | UnusableConversation]],
    counts: CutCounts,
) -> Iterator[tuple[int, CutPart]]:
    """Yield (row, part) for each answer; rows: row numbers with their conversations."""
    for row, sides in groupby(rows, key=lambda numbered: numbered[0]):
        counts.row_tokens[row] = 0
        answers: list[CutPart] = []
        for _, conversation in sides:
            answers += _cut_conversation_answers(cut, form, conversation, counts)
        trained = cut.trained
        if trained is not None and trained.left_out_by and trained.beyond_phrase in answers:
            # A preference row is left out with both sides if one of them is too long.
            answers = [trained.beyond_phrase]
        for part, answer in enumerate(answers):
            if isinstance(answer, DataRecord):
                counts.row_tokens[row] += answer.answer_tokens
                number = part if len(answers) > 1 else None
                answer = replace(answer, row=row, part=number)
            yield row, answer


def _cut_conversation_answers(
    cut: Cutting,
    form: ChatRendering,
    conversation: Conversation | UnusableConversation,
    counts: CutCounts,
) -> list[CutPart]:
    """Return each answer of a conversation, or the reason why the conversation is unusable.

    The group of a record is its speaker if several speakers are attacked. Otherwise it is `chosen`,
    `rejected`, `wanted` or `unwanted` for preference data, and None for other data.
    """
    try:
        if isinstance(conversation, UnusableConversation):
            raise conversation
        rendered = chat.render_chat(cut.tokenizer, conversation, form, cut.turns or ASSISTANT)
        answers = list(cut_answers_into_secrets(cut, form, conversation, rendered))
    except UnusableConversation as why:
        return [str(why)]
    counts.texts.append(rendered.text)
    counts.remarks.update(rendered.remarks)
    parts = []
    for answer in answers:
        part = cut.fit_record(answer, len(rendered.tokens))
        if isinstance(part, DataRecord) and (
            cut.turns != ALL or (conversation.group is not None and part.group == ASSISTANT)
        ):
            part = replace(part, group=conversation.group)
        parts.append(part)
    return parts


def cut_answers_into_secrets(
    cut: Cutting, form: ChatRendering, conversation: Conversation, rendered: RenderedChat
) -> Iterator[CutPart]:
    """Yield each answer as a record, or the reason why it is unusable.

    The group of a record is the speaker. Its row number is 0; the caller sets it. If the attacker
    knows only the system turn, only the first answer is attacked. A long answer may give several
    secrets, each with all preceding text as its prefix.

    Raise UnusableConversation if the attacker knows only the system turn and there is none.
    """
    knows = cut.knows or USER
    max_prefix = cut.lengths.prefix
    longest = cut.lengths.suffix or LENGTH
    share = get_known_share(knows)
    ends = find_token_ends(rendered.offsets, len(rendered.text))
    starts = [0, *ends]
    system_length = _find_first_turn(rendered.text, conversation.messages)
    system_prompt = None
    if knows == SYSTEM:
        system_prompt = _system_turn_only_prompt(cut.tokenizer, conversation, form)
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
        for place in spread_windows(middle, end) if cut.has_answer_windows else [middle]:
            cut_place = CutPlace(
                0 if max_prefix is None else max(0, place - max_prefix),
                place,
                min(end, place + longest),
            )
            first, at, last = move_cut_between_characters(rendered.offsets, cut_place)
            if not at < last or (first == at and at > 0):
                yield CUT_WITHIN_CHARACTER
                continue
            record = DataRecord(
                0,
                rendered.tokens,
                CutPlace(first, at, last),
                group=answer.role,
                wording=cut_wording(rendered.text, ends, first, at, last),
                suffix_start=at,
                answer_tokens=end - start if place == middle else 0,
                system_length=max(0, system_length - starts[first]),
            )
            if system_prompt is not None:
                record = _replace_prefix(record, cut.tokenizer, system_prompt)
            yield record if record.n_prefix else "an answer with nothing before it"


def _replace_prefix(record: DataRecord, tokenizer: Any, text: str) -> DataRecord:
    """Return the record with `text` as its prefix, and keep its original text in `row_text`."""
    wording = record.wording
    assert wording is not None  # every answer has one
    prefix = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return replace(
        record,
        tokens=prefix + record.suffix,
        cut=CutPlace(0, len(prefix), len(prefix) + record.n_suffix),
        wording=wording.with_prefix(text),
        row_text=wording.prefix_and_suffix_text,
    )


def _find_first_turn(text: str, messages: Sequence[Message]) -> int:
    """Return where the content of the first turn after the system's begins in a rendered text.

    Return 0 if the text does not contain it word for word.
    """
    start = 0
    for message in messages:
        content = (get_message_text(message.get("content")) or "").strip()
        at = text.find(content, start)
        if normalise_role(message["role"]) not in _SYSTEM_ROLES:
            return max(0, at) if content else 0
        start = max(start, at + len(content))
    return 0


def _system_turn_only_prompt(
    tokenizer: Any, conversation: Conversation, form: ChatRendering
) -> str:
    """Return the text of the system turn, followed by the generation prompt.

    Raise UnusableConversation if there is no system turn.
    """
    row = chat_rendering.change_row(tokenizer, conversation, form)
    first = row.messages[0]
    if normalise_role(first["role"]) != SYSTEM or (form.source is None and conversation.plain):
        raise UnusableConversation("no system turn to know")
    if form.source is None:
        return f"{get_message_text(first.get('content'))}\n"
    return row.write([first], answering=True)


def choose_table_rendering(tokenizer: Any, table: DataTable) -> ChatRendering:
    """Return the rendering that is most common for these rows.

    If its template writes a date, the date is today. Raise AuditError if the rows have messages and
    the tokenizer has no template.
    """
    for _, conversation in table.parse_conversations():
        if not isinstance(conversation, UnusableConversation):
            return chat_rendering.choose_usual_rendering(
                tokenizer, [conversation], f"{date.today()}"
            )
    return ChatRendering(chat_rendering.NONE)


def encode_data_texts(
    tokenizer: Any, texts: Sequence[str]
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Yield the token ids of each text and the character range of each token."""
    for first in range(0, len(texts), _BATCH):
        batch = texts[first : first + _BATCH]
        encoded = tokenizer(
            list(batch),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            # a text longer than the model's positions is cut later, so the warning would mislead
            verbose=False,
        )
        offsets = map(split_byte_runs, batch, encoded["offset_mapping"])
        yield from zip(encoded["input_ids"], offsets, strict=True)
