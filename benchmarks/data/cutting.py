"""Cut rows into prefix and suffix tokens.

Pairs are cut where prefix and suffix join. Texts are cut at the start or at several positions, and
conversations at their answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING, Any

from auditor.benchmarks.data import answer_cuts, chat, chat_rendering
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.columns import (
    PLAIN,
    ColumnKinds,
    detect_column_layout,
    list_joined_layout_texts,
    list_text_column_values,
    parse_row_conversations,
)
from auditor.benchmarks.data.conversation_rows import ASSISTANT, Conversation, UnusableConversation
from auditor.benchmarks.data.cut_places import (
    BY_OWN_LENGTH,
    LENGTH,
    MOST_WINDOWS,
    NOTHING_SHARED,
    CutPlace,
    SharedBeginnings,
    TextLengths,
    find_shared_beginnings,
)
from auditor.benchmarks.data.data_records import format_too_long
from auditor.benchmarks.data.tables import RecordTable
from auditor.benchmarks.data.wording import (
    CUT_WITHIN_CHARACTER,
    cut_wording,
    find_token_ends,
    move_cut_between_characters,
    split_byte_runs,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens, Wording
from auditor.core.plan_parts import ALL, USER
from auditor.models.trained_length import TrainedLength
from auditor.models.vocabulary import decode_keeping_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000  # rows tokenised at once: offsets of a whole data set need not fit in memory
# texts, and first characters of each, to search for shared beginnings
_COMPARED = (
    1000,
    10_000,
)


# prefix and suffix, as tokens and as text, or the reason against them
Halves = tuple[Tokens, Tokens, Wording] | str


@dataclass(frozen=True)
class Cutting:
    """The options for cutting the rows of a table into prefixes and suffixes.

    lengths: the user's lengths in tokens.
    knows: the attacker's knowledge of a conversation (see `cut_answers_into_secrets`).
    form: the rendering of conversations (None: the usual rendering).
    turns: the attacked speaker of conversations (None: the assistant).
    shared: beginnings that many texts share.
    kinds: Arrow types of the columns of the table that the rows are compared with.
    trained: the tokens of a row that were trained on (None: all).
    room: maximum tokens of prefix and suffix that the model reads (None: no limit).
    """

    tokenizer: Any
    lengths: TextLengths = BY_OWN_LENGTH
    knows: str | None = None
    form: ChatRendering | None = None  # of conversations; None: the usual form
    turns: str | None = None  # the attacked speaker of conversations; None: the assistant
    shared: SharedBeginnings = NOTHING_SHARED  # beginnings that many texts share
    kinds: ColumnKinds | None = None  # of the columns of the data that the rows are compared with
    trained: TrainedLength | None = None  # tokens of a row that were trained on; None: all
    # tokens of a prefix and a suffix that the model reads at once; None: any number
    room: int | None = None

    def trained_span(self, n_tokens: int) -> tuple[int, int]:
        """Return (start, end) of the trained tokens in a row of n_tokens."""
        templated = self.form is not None and self.form.source is not None
        if self.trained is None:
            return (0, n_tokens)
        return self.trained.span_of(n_tokens, templated)

    @property
    def is_all_along(self) -> bool:
        """True if long answers are attacked in several windows.

        This is so if the user gives no lengths and the attacker knows all earlier text.
        """
        return not self.lengths.are_given and (self.knows or USER) == USER

    def fit_halves(self, halves: Halves, at: int, n_tokens: int) -> Halves:
        """Return the trained part of a prefix and suffix, or the reason why they cannot be
        attacked.

        halves: prefix, suffix and their text, or a reason, which is returned. at: index in the row
        of the suffix's first token. n_tokens: length of the row.
        """
        if isinstance(halves, str):
            return halves
        prefix, suffix, wording = halves
        start, end = self.trained_span(n_tokens)
        if self.trained is not None and not (start < at and at + len(suffix) <= end):
            return self.trained.beyond_phrase
        if start:
            prefix = prefix[-(at - start) :]
        if self.room is not None and len(prefix) + len(suffix) > self.room:
            return format_too_long(self.room)
        return prefix, suffix, wording


@dataclass(frozen=True)
class CutPart:
    """A row or a part of a row after cutting: a prefix and suffix, or a reason.

    row, part: numbers of the row and of the part (None: the row is one part).
    halves: prefix, suffix and their text, or the reason why the part cannot be attacked.
    suffix_start: index in the row of the suffix's first token.
    row_text: the text of the part in the row, if the attacker gets another prefix.
    group: the speaker, if several are attacked, or `chosen` or the like for a preference.
    n_shared: first tokens of the row that many rows share.
    tokens: length of the row in its first part, else 0; for answers, of the answer.
    """

    row: int
    halves: Halves
    part: int | None = None  # None: the row is one secret
    suffix_start: int = 0
    row_text: str = ""  # its text in the row, if the attacker gets another prefix
    # its speaker, if several are attacked, or its side of a preference
    group: str | None = None
    n_shared: int = 0  # first tokens of the row that many rows share
    # of the row, in its first part only, so that the parts add up to the row
    tokens: int = 0


def require_fast_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer. Raise AuditError if the tokenizer cannot map tokens to characters."""
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
    table: RecordTable, cut: Cutting, remarks: Counter[str]
) -> tuple[Iterator[CutPart], str, Sequence[str]]:
    """Return the parts of each row, a phrase on how rows are cut, and the rows' texts.

    Texts of conversations are added only while their parts are read. remarks: receives counts of
    moved cuts and of inputs that a template leaves out. Raise AuditError for an option that has no
    effect on this table's columns.
    """
    layout = detect_column_layout(table)
    for flag, value in (("--knows", cut.knows), ("--turns", cut.turns)):
        if value is not None and layout in PLAIN:
            raise AuditError(
                f"{flag} is about conversations (messages), but {table.label} has "
                f"{' and '.join(layout)}"
            )
    if cut.lengths.windows is not None and layout != ("text",):
        raise AuditError(
            f"--windows slides over a text column, but {table.label} has {' and '.join(layout)}"
        )
    if cut.form is not None:
        knows = cut.knows or USER
        texts = list[str]()
        turns = cut.turns or ASSISTANT
        form = f"--template {cut.form.name_with_day} (--knows {knows})"
        longest = cut.lengths.suffix or LENGTH
        if cut.is_all_along:
            of_each = f"all along, at most {MOST_WINDOWS} windows"
        else:
            of_each = f"{longest} tokens"
        rule = f"{turns} turns, {of_each} of each, as {form}"
        rows = parse_row_conversations(table, layout, kinds=cut.kinds)
        return _cut_conversations(cut, cut.form, rows, texts, remarks), rule, texts
    row_texts = list_joined_layout_texts(table, layout)
    if layout == ("prefix", "suffix"):
        # as one text, as in training
        encoded = encode_data_texts(cut.tokenizer, row_texts)
        halves = zip(
            *(list_text_column_values(table, column) for column in layout), encoded, strict=True
        )
        parts = (
            _cut_pair_part(cut, row, _cut_pair(cut.tokenizer, prefix, suffix, ids, offsets))
            for row, (prefix, suffix, (ids, offsets)) in enumerate(halves)
        )
        return parts, "prefix and suffix tokenised jointly and kept whole", row_texts
    return _cut_texts_into_parts(cut, row_texts, remarks), cut.lengths.rule, row_texts


def _cut_texts_into_parts(
    cut: Cutting, texts: Sequence[str], remarks: Counter[str]
) -> Iterator[CutPart]:
    """Yield the prefixes and suffixes of each text. remarks: receives counts of moved cuts by
    reason.
    """
    for row, (text, (ids, offsets)) in enumerate(
        zip(texts, encode_data_texts(cut.tokenizer, texts), strict=True)
    ):
        begin, trained_end = cut.trained_span(len(ids))
        n_trained = trained_end - begin
        n_shared = cut.shared.length_in(ids)
        places = cut.lengths.cut_places(n_trained, max(0, n_shared - begin), cut.room)
        if places != cut.lengths.cut_places(n_trained):
            remarks[
                f"cut where they begin to differ: many others begin with the same {n_shared} tokens"
            ] += 1
        if isinstance(places, str):
            yield CutPart(row, places)
            continue
        ends = find_token_ends(offsets, len(text))
        several = len(places) > 1 or cut.lengths.windows is not None
        is_moved = False
        for number, place in enumerate(places):
            cut_place = CutPlace(*(begin + at for at in place))
            start, middle, end = move_cut_between_characters(offsets, cut_place)
            is_moved = is_moved or (start, middle, end) != cut_place
            part = number if several else None
            n_tokens = 0 if number else len(ids)
            if not start < middle < end:
                yield CutPart(row, CUT_WITHIN_CHARACTER, part, tokens=n_tokens)
                continue
            wording = cut_wording(text, ends, start, middle, end)
            halves = (tuple(ids[start:middle]), tuple(ids[middle:end]), wording)
            yield CutPart(row, halves, part, middle, n_shared=n_shared, tokens=n_tokens)
        if is_moved and cut.lengths.are_given:
            remarks["cut between characters, not within one, at up to a few tokens less"] += 1
        if cut.trained is not None and n_trained < len(ids):
            yield CutPart(row, cut.trained.beyond_phrase, len(places))


def measure_shared_beginnings(tokenizer: Any, table: RecordTable) -> SharedBeginnings:
    """Return beginnings that many texts of a table share; none without a text column."""
    layout = detect_column_layout(table)
    if layout != ("text",):
        return NOTHING_SHARED
    texts = list_joined_layout_texts(table, layout)
    n_texts, n_characters = _COMPARED
    sample = [text[:n_characters] for text in texts[:: -(-len(texts) // n_texts)]]
    return find_shared_beginnings([ids for ids, _ in encode_data_texts(tokenizer, sample)])


def _cut_pair_part(cut: Cutting, row: int, halves: Halves) -> CutPart:
    if isinstance(halves, str):
        return CutPart(row, halves)
    n_prefix = len(halves[0])
    n_suffix = len(halves[1])
    return CutPart(row, cut.fit_halves(halves, n_prefix, n_prefix + n_suffix), tokens=n_suffix)


def _cut_pair(
    tokenizer: Any, prefix: str, suffix: str, ids: list[int], offsets: list[tuple[int, int]]
) -> Halves:
    """Cut a row's tokens `ids` between the prefix text and the suffix text, or return why that
    fails.

    Return (prefix tokens, suffix tokens, text). The tokens before the cut are decoded, because
    `offsets` do not suffice. Many tokenizers trim the space from a token's offsets, so that " b"
    after "a" seems to start after "a ".
    """
    if not prefix or not suffix:
        return "prefix or suffix is empty"
    if decode_keeping_special_tokens(tokenizer, ids) != prefix + suffix:
        return "the tokenizer does not give this text back (it normalises it)"
    begun = sum(start < len(prefix) for start, _ in offsets)  # tokens that begin in the prefix
    # Leading tokens that end in it.
    ended = next((i for i, (_, end) in enumerate(offsets) if end > len(prefix)), len(ids))
    for cut_index in range(
        max(1, begun), min(ended, len(ids) - 1) + 1
    ):  # several if tokens have no width
        if decode_keeping_special_tokens(tokenizer, ids[:cut_index]) == prefix:
            ends = []
            for end in find_token_ends(offsets[cut_index:], len(prefix + suffix)):
                ends.append(max(0, end - len(prefix)))
            return (
                tuple(ids[:cut_index]),
                tuple(ids[cut_index:]),
                Wording(prefix, suffix, tuple(ends)),
            )
    return "the join of prefix and suffix is not a token boundary"


def _cut_conversations(
    cut: Cutting,
    form: ChatRendering,
    rows: Iterator[tuple[int, Conversation | UnusableConversation]],
    texts: list[str],
    remarks: Counter[str],
) -> Iterator[CutPart]:
    """Yield the parts of each conversation.

    form: the rendering. rows: row numbers with their conversations. texts: receives the
    conversations' texts. remarks: receives counts of inputs that the template leaves out.
    """
    for row, sides in groupby(rows, key=lambda numbered: numbered[0]):
        answers = [
            answer
            for _, conversation in sides
            for answer in _cut_conversation_answers(cut, form, conversation, texts, remarks)
        ]
        for part, (answer, group) in enumerate(answers):
            number = part if len(answers) > 1 else None
            if isinstance(answer, UnusableConversation):
                yield CutPart(row, str(answer), number)
            else:
                halves = (answer.prefix, answer.suffix, answer.wording)
                yield CutPart(
                    row,
                    halves,
                    number,
                    answer.suffix_start,
                    answer.conversation_text,
                    group,
                    tokens=answer.tokens,
                )


def _fit_answer(
    cut: Cutting, answer: answer_cuts.AnswerCut | UnusableConversation, n_tokens: int
) -> answer_cuts.AnswerCut | UnusableConversation:
    """Return the trained part of an answer, or the reason why the answer cannot be attacked.

    n_tokens: length of the conversation.
    """
    if isinstance(answer, UnusableConversation):
        return answer
    halves = cut.fit_halves(
        (answer.prefix, answer.suffix, answer.wording), answer.suffix_start, n_tokens
    )
    if isinstance(halves, str):
        return UnusableConversation(halves)
    return replace(answer, prefix=halves[0])


def _cut_conversation_answers(
    cut: Cutting,
    form: ChatRendering,
    conversation: Conversation | UnusableConversation,
    texts: list[str],
    remarks: Counter[str],
) -> list[tuple[answer_cuts.AnswerCut | UnusableConversation, str | None]]:
    """Return (answer, group) for each answer of a conversation.

    If the whole conversation is unusable, return only the reason, with group None. texts: receives
    the conversation's text. remarks: receives counts of ignored inputs.
    """
    knows = cut.knows or USER
    lengths = (cut.lengths.suffix or LENGTH, cut.lengths.prefix)
    try:
        if isinstance(conversation, UnusableConversation):
            raise conversation
        rendered = chat.render_chat(cut.tokenizer, conversation, form, cut.turns or ASSISTANT)
        whole_answers = list(
            answer_cuts.cut_answers_into_secrets(
                cut.tokenizer, conversation, rendered, form, knows, *lengths, cut.is_all_along
            )
        )
    except UnusableConversation as why:
        return [(why, None)]
    texts.append(rendered.text)
    remarks.update(rendered.remarks)
    answers = [_fit_answer(cut, answer, len(rendered.tokens)) for answer in whole_answers]
    roles = []
    for answer in answers:
        roles.append(answer.role if isinstance(answer, answer_cuts.AnswerCut) else ASSISTANT)
    return [
        (
            answer,
            role
            if cut.turns == ALL and (conversation.group is None or role != ASSISTANT)
            else conversation.group,
        )
        for answer, role in zip(answers, roles, strict=True)
    ]


def choose_table_rendering(tokenizer: Any, table: RecordTable) -> ChatRendering:
    """Return the rendering that is most common for these rows.

    If its template writes a date, the date is today. Raise AuditError for messages if the tokenizer
    has no template.
    """
    for _, conversation in parse_row_conversations(table, detect_column_layout(table)):
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
