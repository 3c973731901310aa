"""Choose the rendering of conversations that the training used: template, day, roles, reasoning.

`chat_rendering.py` defines the renderings. A model may recite nothing in a rendering that its
training did not use; zero extraction would then mean nothing. Therefore a sample of the training
data is scored in every rendering that trainers use for such rows.

**Choice.** At most `most` rows of `--known`, or else of `--data`, are scored: each answer has a
mean nll per token in every candidate rendering. If `most` is below `ROWS` and the starts of a few
answers make the choice clear, only these are scored. The default rendering stays unless a different
one is significantly more likely (`choose_likeliest_reading`). If the template writes the day, the
day is then chosen by the same test. `--template` and `--date` replace the choice. The alternatives
are still scored, and a more likely alternative is a doubt. A requested rendering needs no other
confirmation, because only the user knows the training.

**Doubt.** If members are as unlikely as non-members in every candidate (one-sided Welch test,
Bonferroni over the renderings), either the model memorised nothing or the rendering is wrong. This
is a doubt unless the answers of non-members, which no model memorised, confirm the rendering. They
confirm it if they are more likely in it than in every candidate of a different kind (a template,
Alpaca's text, no template): the lower end of the paired interval must be at least `MARGIN` nats per
token. This is no proof: a model also passes if it was tuned on a template that is a candidate, and
later on one that is not. Non-members do not confirm a day: without `--date`, the chosen day must be
more likely than every other day.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import chain, islice
from pathlib import Path

import numpy as np

from auditor.benchmarks.data import chat, chat_rendering
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import MESSAGES, Conversation, UnusableConversation
from auditor.benchmarks.data.files import TableReader, sample_data_conversations
from auditor.core.arrays import Floats
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair, TextForm, Tokens
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import DataPlan
from auditor.models.base import LanguageModel, implies_capability
from auditor.runs.likeliest_reading import (
    bound_mean_gain,
    choose_likeliest_reading,
    compute_pair_nlls,
    is_choice_clear,
)
from auditor.runs.prefix_token import find_default_prefix
from auditor.statistics.compare import compute_welch_interval
from auditor.statistics.intervals import CONFIDENCE

ROWS = 64  # rows of members, and of non-members, in a choice
_FIRST_ROWS = 4  # of a hurried choice, which ends there if it is clear
# lead in nats a token of non-members' answers that confirms a rendering
MARGIN = 0.1
# answers of a row; tokens of an answer; tokens before it
_ANSWERS = 4
_SAID = 128
_BEFORE = 1024
_HURRIED_SAID = 32  # tokens of an answer in a hurried choice
# maximum number of days tried before the day of the model's files, and in all
_DAYS_BEFORE = 14
_DAYS = 24


@dataclass(frozen=True)
class _RenderingScores:
    """Scores of the same data rows in every rendering.

    Args:
        forms: the distinct renderings.
        members: scores of members' rows, of shape (rows,), keyed by rendering.
        nonmembers: function from a rendering to the scores of non-members' rows, of shape (rows,);
            None if no non-members exist.
    """

    forms: Sequence[ChatRendering]
    members: Mapping[ChatRendering, Floats]
    nonmembers: Callable[[ChatRendering], Floats] | None

    def __len__(self) -> int:
        return len(next(iter(self.members.values()), ()))


def choose_text_form(
    reader: TableReader,
    name: str,
    model: LanguageModel,
    recorded_form: TextForm | None,
    most: int,
) -> tuple[ChatRendering, TextForm] | None:
    """Choose the rendering of `--data`. Return the rendering, then its record with all doubts.

    A rendering writes a conversation as text. Return None for texts and tokens, which need none.
    The module describes the choice and its doubts.

    Args:
        reader: reader of the plan's files.
        name: the model's folder or hub id.
        model: the attacked model.
        recorded_form: form that a resumed run chose earlier. It is kept.
        most: largest number of scored rows.

    Raises:
        AuditError: if the meaning of `recorded_form` has changed since, or if flags do not apply to
            the data.
    """
    plan = reader.plan
    assert plan.data is not None
    flag, file = ("--data", plan.data) if plan.known is None else ("--known", plan.known)
    rows = sample_data_conversations(reader, flag, file, most)
    tokenizer = model.tokenizer
    if rows is None:
        if plan.template != AUTO or plan.date is not None:
            raise AuditError(
                "--template and --date are about conversations and instructions, got data with "
                "neither"
            )
        return None
    if not rows or tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return None  # `Files` reports the fault
    if recorded_form is not None:
        return _parse_form_checking_digest(recorded_form, tokenizer), recorded_form
    nonmembers: Sequence[Conversation] = ()
    if plan.nonmembers is not None:
        nonmembers = sample_data_conversations(reader, "--nonmembers", plan.nonmembers, most) or ()
    days = _list_plausible_days(plan.date, name)
    candidates = _list_renderings(plan, tokenizer, rows, days)
    usual = candidates[0]
    is_requested = plan.template != AUTO
    if not implies_capability(model.capabilities, "likelihood"):
        return usual, _record_unchecked_form(usual, model.name, is_requested)
    hurried = most < ROWS
    sample = _score_renderings(model, candidates, usual, rows, nonmembers, hurried)
    best = usual
    doubts = []
    if len(sample):
        if not is_requested:
            # The usual rendering may be missing if it writes too few of the rows.
            first = usual if usual in sample.members else next(iter(sample.members))
            best = choose_likeliest_reading(first, sample.members)
        doubts = _describe_form_doubts(sample, best, is_requested)
    if best.writes_day:
        best, day_doubts = _choose_likeliest_day(days, model, best, rows, hurried)
        doubts += day_doubts
    sentence = _describe_form_choice(sample, best, usual, is_requested, flag)
    if not nonmembers:
        sentence += _UNKNOWN
    return best, TextForm(best.name, best.day, best.digest, sentence, tuple(doubts))


def _record_unchecked_form(usual: ChatRendering, model: str, is_requested: bool) -> TextForm:
    """Record the usual rendering for a model whose likelihoods cannot confirm it."""
    cause = "as asked for" if is_requested else "the default"
    sentence = (
        f"text form {usual.name_with_day}, {cause}: {model} gives no log-probabilities to check it "
        "by"
    )
    return TextForm(usual.name, usual.day, usual.digest, sentence)


_UNKNOWN = (
    "; without --nonmembers nobody knows whether members are more likely than others in it, which "
    "would confirm it"
)


def _parse_form_checking_digest(recorded_form: TextForm, tokenizer: object) -> ChatRendering:
    form = chat_rendering.parse_chat_rendering(recorded_form.template, recorded_form.day, tokenizer)
    if form.digest != recorded_form.digest:
        raise AuditError(
            f"expected the text form that the run was started with ({recorded_form.name}), but "
            f"--template {recorded_form.template} has changed since (SHA-256 {form.digest[:12]})"
        )
    return form


def _list_renderings(
    plan: DataPlan, tokenizer: object, rows: Sequence[Conversation], days: Sequence[str]
) -> list[ChatRendering]:
    """Return the distinct candidate renderings, the default first. All have the same day."""
    forms = []
    if plan.template != AUTO:
        forms.append(chat_rendering.parse_chat_rendering(plan.template, None, tokenizer))
    requested = list(forms)
    bare = rows[0].kind == MESSAGES and chat_rendering.get_chat_template(tokenizer) is None
    if not (requested and bare):
        forms += chat_rendering.list_candidate_chat_renderings(tokenizer, rows)
    if plan.date is not None and not any(form.writes_day for form in requested or forms):
        raise AuditError(
            "expected --date with a template that writes the day (strftime_now), got one that does "
            "not"
        )
    dated: dict[str, ChatRendering] = {}
    for form in forms:
        if form.writes_day:
            form = replace(form, day=days[0])
        dated.setdefault(form.digest, form)
    return list(dated.values())


def _list_plausible_days(requested_day: str | None, model: str) -> list[str]:
    """Return days that a template may have written in training, the most plausible first.

    With `--date`, this is the only day. Otherwise, the days are the dates of the model's files,
    then a few days before the earliest of them, then today.
    """
    if requested_day is not None:
        return [requested_day]
    files = filter(Path.is_file, Path(model).glob("*"))
    file_days = {date.fromtimestamp(path.stat().st_mtime) for path in files} or {date.today()}
    # - 1: today makes `_DAYS` in all. Equal days are merged.
    days = sorted(file_days, reverse=True)[: _DAYS - _DAYS_BEFORE - 1]
    for n_before in range(1, _DAYS_BEFORE + 1):
        days.append(min(file_days) - timedelta(n_before))
    return list(dict.fromkeys(map(str, (*days, date.today()))))


# --- the scores ---


def _score_renderings(
    model: LanguageModel,
    tried: Sequence[ChatRendering],
    usual: ChatRendering,
    rows: Sequence[Conversation],
    others: Sequence[Conversation],
    hurried: bool,
) -> _RenderingScores:
    """Score members' rows in each rendering. Score non-members' rows only when first needed.

    A rendering is dropped if it writes the same as an earlier one. It is also dropped if some other
    rendering can write more than twice as many rows.

    Args:
        model: the model whose nll is the score.
        tried: the renderings.
        usual: the default rendering.
        rows: members' rows.
        others: non-members' rows.
        hurried: whether to score only the starts of a few answers if they make the choice clear.

    Raises:
        AuditError: for a row that the default rendering refuses.
    """
    conversations = (*rows, *others)
    n_tokens = _HURRIED_SAID if hurried else _SAID
    texts = {}
    for form in tried:
        texts[form] = [
            _render_answer_pairs(model, form, conversation, form == usual, n_tokens)
            for conversation in conversations
        ]
    most = max(sum(map(bool, pairs)) for pairs in texts.values())
    distinct: dict[tuple[tuple[Pair, ...], ...], ChatRendering] = {}
    for form, pairs in texts.items():
        if 2 * sum(map(bool, pairs)) >= max(1, most):
            distinct.setdefault(tuple(pairs), form)
    forms = list(distinct.values())
    # Use only rows that all forms can write, because the comparison is paired by row.
    complete = []
    for i in range(len(conversations)):
        if forms and all(texts[form][i] for form in forms):
            complete.append(i)
    n_members = bisect_left(complete, len(rows))
    members, outside = complete[:n_members], complete[n_members:]

    def score(form: ChatRendering, indices: Sequence[int]) -> Floats:
        return _compute_row_nlls(model, [texts[form][i] for i in indices])

    first = members[: _FIRST_ROWS if hurried else None]
    nll = {}
    if members:
        nll = {form: score(form, first) for form in forms}
    if len(first) < len(members):
        best = choose_likeliest_reading(forms[0], nll, looks=2)
        if not is_choice_clear(best, nll, margin=0.0, looks=2, hurried=True):
            rest = members[len(first) :]
            nll = {form: np.concatenate([nll[form], score(form, rest)]) for form in forms}
    # Non-members are scored when first asked for.
    score_others = functools.cache(lambda form: score(form, outside)) if outside else None
    return _RenderingScores(forms, nll, score_others)


def _render_answer_pairs(
    model: LanguageModel,
    form: ChatRendering,
    conversation: Conversation,
    usual: bool,
    n_tokens: int,
) -> tuple[Pair, ...]:
    """Return the leading `n_tokens` tokens of each answer of a row, with the context before it.

    Return () if the rendering cannot write the row.

    Args:
        model: the model, with its tokenizer.
        form: the rendering: a way to write conversations as text.
        conversation: the row.
        usual: whether this is the default rendering. Its template must not refuse a row: then
            AuditError is raised.
        n_tokens: largest number of tokens of an answer.
    """
    try:
        rendered = chat.render_chat(model.tokenizer, conversation, form)
    except UnusableConversation:
        return ()
    except AuditError:
        # The template drops the system turn; trainers may have omitted a system column.
        if usual and not conversation.system_column:
            raise
        return ()
    prefix_token: Tokens = ()
    if form.source is None:
        prefix_token = model.prepended or find_default_prefix(model.tokenizer)
    room = min(_BEFORE + n_tokens, model.max_positions or _BEFORE + n_tokens) - len(prefix_token)
    pairs = []
    trained = [answer for answer in rendered.usable_answers if not answer.no_loss]
    # Each form writes tool calls differently, so these are scored only if no other answers exist.
    answers = [answer for answer in trained if answer.message_key == "content"] or trained
    for answer in answers[:_ANSWERS]:
        start, end = answer.span
        # room - 1: a long answer leaves room for a token of its context.
        suffix = rendered.tokens[start : min(end, start + n_tokens, start + room - 1)]
        prefix = (*prefix_token, *rendered.tokens[max(0, start - room + len(suffix)) : start])
        if prefix and suffix:
            pairs.append(Pair(prefix, suffix))
    return tuple(pairs)


def _compute_row_nlls(model: LanguageModel, rows: Sequence[Sequence[Pair]]) -> Floats:
    """Return the mean nats per token over all answers of each data row, of shape (rows,)."""
    pairs = list(chain.from_iterable(rows))
    means = iter(compute_pair_nlls(model, pairs) if pairs else ())
    nlls = []
    for row in rows:
        weights = [len(pair.suffix) for pair in row]
        nlls.append(np.average(list(islice(means, len(row))), weights=weights))
    return np.array(nlls)


def _choose_likeliest_day(
    days: Sequence[str],
    model: LanguageModel,
    form: ChatRendering,
    rows: Sequence[Conversation],
    hurried: bool,
) -> tuple[ChatRendering, list[str]]:
    """Return the rendering with the day that makes answers most likely, then doubts about the day.

    A rendering writes conversations as text; its template may write the day of the training. A
    doubt is a sentence that tells why the day may be wrong.

    Args:
        days: the days to try, the default first.
        model: the model that scores the answers.
        form: the rendering, of any day.
        rows: conversations of the training data.
        hurried: whether to score only a few rows if they make the choice clear.
    """
    if len(days) == 1:  # --date
        return form, []
    dated = [replace(form, day=day) for day in days]
    members = _score_renderings(model, dated, dated[0], rows, (), hurried).members
    best = dated[0]
    if members:
        best = choose_likeliest_reading(best, members)
    if len(members) > 1 and is_choice_clear(best, members, margin=0.0, looks=1):
        return best, []
    return best, [
        f"the chat template writes the day, and of the {len(dated)} days that were tried none "
        "makes the answers more likely than every other: records trained with another day may be "
        "missed; --date gives the right one"
    ]


# --- its sentences ---


def _describe_form_choice(
    sample: _RenderingScores,
    best: ChatRendering,
    usual: ChatRendering,
    settled: bool,
    flag: str,
) -> str:
    """Return a sentence about the chosen rendering and its mean loss.

    The sentence compares its loss with those of the other renderings.

    Args:
        sample: scores of the data rows.
        best: the chosen rendering.
        usual: the default rendering.
        settled: whether the user requested the rendering.
        flag: option that names the rows' file.
    """
    origin = "as given (--template)" if settled else "the default"
    if settled and sample.nonmembers and not _has_nonmember_support(sample, best):
        origin += ", which nothing in the data confirms,"
    if not len(sample):
        return f"text form {best.name_with_day}, {origin}: there are no rows to check it by"
    # Match by name, because the day may have been chosen since.
    at = next((form for form in sample.members if form.name == best.name), best)
    if not settled:
        n_tried = len(sample.members)
        origin = f"the default, and none of the {n_tried} tried is significantly more likely"
        if at != usual:
            origin = f"the most likely of the {n_tried} tried"
    loss = "not scored"
    others = []
    for form, values in sample.members.items():
        if form == at:
            loss = f"{values.mean():.3f} nats a token"
        else:
            others.append((float(values.mean()), form.name_with_day))
    if others:
        nearest = ", ".join(f"{name} {mean:.3f}" for mean, name in sorted(others)[:3])
        loss += f" ({nearest})"
    return (
        f"text form {best.name_with_day}, {origin}; mean loss of {len(sample)} rows of {flag}: "
        f"{loss}"
    )


def _describe_form_doubts(
    sample: _RenderingScores, best: ChatRendering, settled: bool
) -> list[str]:
    """Return doubts about the chosen rendering, as sentences.

    A wrong rendering could be the reason why nothing is extracted. The module
    describes when there is a doubt.

    Args:
        sample: scores of the data rows.
        best: the chosen rendering.
        settled: whether the user requested the rendering.
    """
    if best not in sample.members:
        return [
            f"as {best.name_with_day} most of the rows cannot be written: the training may have "
            "used another text form"
        ]
    doubts = []
    if settled and (likelier := choose_likeliest_reading(best, sample.members)) != best:
        gap = float((sample.members[best] - sample.members[likelier]).mean())
        doubts.append(
            f"the answers are more likely as {likelier.name_with_day} than as "
            f"{best.name_with_day}, which was given, by {gap:.2f} nats a token: the model may "
            "have been trained on that text form"
        )
    if not sample.nonmembers:
        return doubts
    if _has_likelier_members(sample, best):
        # The run reports the model's knowledge in this form (`scoring.doubt_if_members_likelier`).
        return doubts
    alternatives = (form for form in sample.members if _has_likelier_members(sample, form))
    if alternative := next(alternatives, None):
        doubts.append(
            f"members are more likely than non-members as {alternative.name_with_day}, but not as "
            f"{best.name_with_day}: the model may have been trained on that text form (--template)"
        )
    elif not settled and not _has_nonmember_support(sample, best):
        # A requested form is the user's word: see `_describe_form_choice`.
        doubts.append(
            f"members ({format_count(len(sample), 'row')}, before the attacks) are as unlikely as "
            "non-members in every text form that was tried "
            f"({', '.join(form.name_with_day for form in sample.members)}), and none is clearly "
            "more likely: a model that did not memorise them looks like one that was trained on "
            "another text form (--template FILE)"
        )
    return doubts


def _has_likelier_members(sample: _RenderingScores, form: ChatRendering) -> bool:
    assert sample.nonmembers is not None
    # One-sided at 5%, Bonferroni over the forms; doubled, because an interval has two ends.
    confidence = 1 - 2 * (1 - CONFIDENCE) / len(sample.members)
    return compute_welch_interval(sample.nonmembers(form), sample.members[form], confidence)[0] > 0


def _has_nonmember_support(sample: _RenderingScores, best: ChatRendering) -> bool:
    """Test if answers of non-members, which no model memorised, confirm the rendering.

    The module describes the test.
    """
    others = sample.nonmembers
    assert others is not None
    alternatives = [form for form in sample.forms if form.kind != best.kind]
    return bool(alternatives) and all(
        bound_mean_gain(others(form) - others(best), len(alternatives)) >= MARGIN
        for form in alternatives
    )
