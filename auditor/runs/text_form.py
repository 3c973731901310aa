"""Which rendering of conversations a model was trained on: template, day, roles, reasoning.

Renderings are `chat_rendering.py`'s. A model that was trained on another rendering than the one
that it is asked in may recite nothing, and a zero says nothing then. So a sample of what it was
trained on is scored in every rendering that trainers make of such rows. Knows the model and the
data of one run; nothing of attacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data import chat, chat_rendering
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import MESSAGES, Conversation, UnusableConversation
from auditor.benchmarks.data.files import TableReader
from auditor.benchmarks.data.whole_texts import sample_data_conversations
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair, TextForm, Tokens
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import DataPlan
from auditor.models.base import LanguageModel, implies_capability
from auditor.runs.likeliest_reading import (
    choose_likeliest_reading,
    lower_bound_of_mean_nll_gain,
    mean_suffix_nll_of_each_pair,
)
from auditor.runs.prefix_token import tokenizer_default_prefix_token
from auditor.statistics.compare import compute_welch_interval
from auditor.statistics.intervals import CONFIDENCE

ROWS = 64  # of members, and of non-members, that a choice looks at
# nats a token of non-members' answers by which a rendering must be ahead to be confirmed
MARGIN = 0.1
_ANSWERS, _SAID, _BEFORE = 4, 128, 1024  # of a row; tokens of an answer; tokens before it
_DAYS_BEFORE, _DAYS = 14, 24  # days before the model's files that are tried, and all days, at most

# (rows,) nats a token of the answers of the same rows
Scores = dict[ChatRendering, NDArray[np.float64]]


@dataclass(frozen=True)
class _RenderingScores:
    """Scores of the same rows in every rendering. others: of non-members; empty without them. what:
    rows, in words."""

    members: Scores
    others: Scores
    what: str

    def __len__(self) -> int:
        return len(next(iter(self.members.values()), ()))


def choose_text_form(
    plan: DataPlan,
    name: str,
    model: LanguageModel,
    held: TextForm | None = None,
    most: int = ROWS,
    reader: TableReader | None = None,
) -> tuple[ChatRendering, TextForm] | None:
    """The rendering of `--data`, with what is to be said of it; None for data that have none: texts
    and tokens.

    **Which.** Rows of `--known`, else of `--data`, at most `most`: each answer's mean nll a token
    in every candidate. The usual rendering stays unless another is more likely beyond chance
    (`choose_likeliest_reading`); after that, of a template that writes the day, the day is chosen
    alike. `--template` and `--date` settle it; the others are scored all the same, and one that is
    more likely is a doubt. A form that was asked for needs no more: nobody else can know it.

    **When nothing found is no evidence.** A model that memorised nothing, and one that is asked in
    a rendering which it was not trained on, look alike where members are as unlikely as non-members
    (one-sided Welch test, Bonferroni over the renderings) in every candidate. That is a doubt,
    unless the rendering is confirmed by what needs no memory: non-members' answers are more likely
    in it than in every candidate of another kind (a template, Alpaca's text, no template) by at
    least `MARGIN` nats a token, at the lower end of the paired interval. That is evidence and no
    proof: a model that was tuned on a template of its trainer's that nobody tried, after one that
    was, passes. A day is not confirmed so: without `--date` the chosen one must be more likely than
    every other that was tried.

    name: of the model, a folder or a hub id. held: what the run was started with; it is kept.
    reader: of large tables. Raises AuditError where it means something else by now, and for flags
    that say nothing to these data.
    """
    assert plan.data is not None
    flag, file = ("--data", plan.data) if plan.known is None else ("--known", plan.known)
    rows = sample_data_conversations(flag, file, most, reader)
    words = model.tokenizer
    if rows is None:
        if plan.template != AUTO or plan.date is not None:
            raise AuditError(
                "--template and --date are about conversations and instructions, got data with "
                "neither"
            )
        return None
    if not rows or words is None or not getattr(words, "is_fast", False):
        return None  # `Files` says what is wrong
    if held is not None:
        return _parse_form_checking_digest(held, plan, words), held
    others = (
        (sample_data_conversations("--nonmembers", plan.nonmembers, most, reader) or [])
        if plan.nonmembers is not None
        else []
    )
    usual, tried = _default_and_candidate_renderings(
        plan, words, rows, _plausible_template_days(plan.date, name)
    )
    settled = plan.template != AUTO
    if not implies_capability(model.capabilities, "likelihood"):
        why = "as asked for" if settled else "the default"
        said = (
            f"text form {usual.name_with_day}, {why}: {model.name} gives no log-probabilities to "
            "check it by"
        )
        return usual, TextForm(usual.name, usual.day, usual.digest, said)
    sample = _score_renderings(model, tried, usual, rows, others, f"rows of {flag}")
    best = usual
    if len(sample) and not settled:
        # The usual one may have been dropped, as it writes too few of the rows.
        first = usual if usual in sample.members else next(iter(sample.members))
        best = choose_likeliest_reading(first, sample.members)
    doubts = _text_form_doubt_sentences(sample, best, settled) if len(sample) else []
    if best.writes_day:
        best, of_days = _rendering_on_likeliest_day(
            _plausible_template_days(plan.date, name), model, best, rows
        )
        doubts += of_days
    said = _text_form_choice_sentence(sample, best, usual, settled) + ("" if others else _UNKNOWN)
    return best, TextForm(best.name, best.day, best.digest, said, tuple(doubts))


_UNKNOWN = (
    "; without --nonmembers nobody knows whether members are more likely than others in it, which "
    "would confirm it"
)


def _parse_form_checking_digest(held: TextForm, plan: DataPlan, tokenizer: object) -> ChatRendering:
    form = chat_rendering.parse_chat_rendering(held.template, held.day, tokenizer)
    if form.digest != held.digest:
        raise AuditError(
            f"expected the text form that the run was started with ({held.name}), but --template "
            f"{held.template} is another by now (SHA-256 {form.digest[:12]})"
        )
    return form


def _default_and_candidate_renderings(
    plan: DataPlan, tokenizer: object, rows: Sequence[Conversation], days: Sequence[str]
) -> tuple[ChatRendering, list[ChatRendering]]:
    """The rendering that stays unless there is a better one, and all of them, on one day."""
    asked = (
        None
        if plan.template == AUTO
        else chat_rendering.parse_chat_rendering(plan.template, None, tokenizer)
    )
    bare = rows[0].kind == MESSAGES and chat_rendering.tokenizer_chat_template(tokenizer) is None
    found = (
        []
        if asked is not None and bare
        else chat_rendering.candidate_chat_renderings(tokenizer, rows)
    )
    every = [*([asked] if asked is not None else []), *found]
    if plan.date is not None and not any(
        form.writes_day for form in every[: 1 if asked is not None else None]
    ):
        raise AuditError(
            "expected --date with a template that writes the day (strftime_now), got one that does "
            "not"
        )
    dated = [replace(form, day=days[0]) if form.writes_day else form for form in every]
    # Reversed, as a dict keeps the last of equal digests: the first of them, which was asked for,
    # gives the name.
    return dated[0], list({form.digest: form for form in reversed(dated)}.values())[::-1]


def _plausible_template_days(asked: str | None, model: str) -> list[str]:
    """Days that a template may have written in training, the most plausible first: `--date`; else
    when the model's files were written, the days before, and today.
    """
    if asked is not None:
        return [asked]
    folder = Path(model)
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    written = sorted(
        {date.fromtimestamp(path.stat().st_mtime) for path in files}, reverse=True
    ) or [date.today()]
    before = [written[-1] - timedelta(days) for days in range(1, _DAYS_BEFORE + 1)]
    # - 1: today makes `_DAYS` in all. Equal days are tried once.
    return [
        str(day)
        for day in dict.fromkeys((*written[: _DAYS - _DAYS_BEFORE - 1], *before, date.today()))
    ]


# --- what the model makes of them
# -----------------------------------------------------------------------------------------------


def _score_renderings(
    model: LanguageModel,
    tried: Sequence[ChatRendering],
    usual: ChatRendering,
    rows: Sequence[Conversation],
    others: Sequence[Conversation],
    what: str,
) -> _RenderingScores:
    """Renderings that cannot write half of what another can are none of this model's; of two that
    write the same the first is kept. Raises AuditError for what the usual one refuses.
    """
    every = (*rows, *others)
    written = {
        form: [_rendered_answer_pairs(model, form, said, form == usual) for said in every]
        for form in tried
    }
    most = max(sum(map(bool, found)) for found in written.values())
    distinct: dict[tuple[tuple[Pair, ...], ...], ChatRendering] = {}
    for form, found in written.items():
        if 2 * sum(map(bool, found)) >= max(1, most):
            distinct.setdefault(tuple(found), form)
    kept = list(distinct.values())
    # Only rows that all of them can write: the comparison is paired by row.
    both = [i for i in range(len(every)) if kept and all(written[form][i] for form in kept)]
    members, outside = ([i for i in both if (i < len(rows)) is inside] for inside in (True, False))
    nll = {form: _mean_answer_nll_by_row(model, [written[form][i] for i in both]) for form in kept}
    split = len(members)
    return _RenderingScores(
        {form: values[:split] for form, values in nll.items()} if members else {},
        {form: values[split:] for form, values in nll.items()} if outside else {},
        f"{len(members)} {what}",
    )


def _rendered_answer_pairs(
    model: LanguageModel, form: ChatRendering, said: Conversation, usual: bool
) -> tuple[Pair, ...]:
    """The answers of a row, each behind what a model reads before it, as far as it has room."""
    try:
        found = chat.render_chat(model.tokenizer, said, form)
    except UnusableConversation:
        return ()
    except (
        AuditError
    ):  # a template that drops the system turn; a column of its own trainers may have left out
        if usual and not said.system_column:
            raise
        return ()
    default = model.prepended or tokenizer_default_prefix_token(model.tokenizer)
    prefix_token: Tokens = default if form.source is None else ()
    room = min(_BEFORE + _SAID, model.max_positions or _BEFORE + _SAID) - len(prefix_token)
    pairs = []
    learnt = [answer for answer in found.usable_answers if not answer.no_loss]
    # Tool calls are written in other texts by each form: they decide only if there is nothing else.
    answers = [answer for answer in learnt if answer.of == "content"] or learnt
    for start, end in [answer.said for answer in answers][:_ANSWERS]:
        # room - 1: an answer that fills all room leaves a token of what stands before it.
        suffix = found.tokens[start : min(end, start + _SAID, start + room - 1)]
        prefix = (*prefix_token, *found.tokens[max(0, start - room + len(suffix)) : start])
        if prefix and suffix:
            pairs.append(Pair(prefix, suffix))
    return tuple(pairs)


def _mean_answer_nll_by_row(
    model: LanguageModel, rows: Sequence[Sequence[Pair]]
) -> NDArray[np.float64]:
    """(rows,) nats a token of all answers of each."""
    pairs = [pair for row in rows for pair in row]
    means = iter(mean_suffix_nll_of_each_pair(model, pairs)) if pairs else iter(())
    weights = [[len(pair.suffix) for pair in row] for row in rows]
    return np.array([np.average([next(means) for _ in row], weights=row) for row in weights])


def _rendering_on_likeliest_day(
    days: Sequence[str], model: LanguageModel, form: ChatRendering, rows: Sequence[Conversation]
) -> tuple[ChatRendering, list[str]]:
    """The form on the day on which the answers are most likely, and why that may be another than
    that of training."""
    if len(days) == 1:  # --date
        return form, []
    dated = [replace(form, day=day) for day in days]
    members = _score_renderings(model, dated, dated[0], rows, (), "").members
    best = choose_likeliest_reading(dated[0], members) if members else dated[0]
    others = [other for other in members if other != best]
    if others and all(
        lower_bound_of_mean_nll_gain(members[other] - members[best], len(others)) > 0
        for other in others
    ):
        return best, []
    return best, [
        f"the chat template writes the day, and of the {len(dated)} days that were tried none "
        "makes the answers more likely than every other: what was learnt on another day may be "
        "hidden; --date says which it was"
    ]


# --- what is said of it
# -----------------------------------------------------------------------------------------------


def _text_form_choice_sentence(
    sample: _RenderingScores, best: ChatRendering, usual: ChatRendering, settled: bool
) -> str:
    """The choice, with its margin."""
    which = "as asked for (--template)" if settled else "the default"
    if settled and sample.others and not _is_confirmed_by_nonmembers(sample.others, best):
        which += ", which nothing in the data confirms,"
    if not len(sample):
        return f"text form {best.name_with_day}, {which}: there are no rows to check it by"
    # By name: the day may have been chosen since.
    at = next((form for form in sample.members if form.name == best.name), best)
    means = {form: float(values.mean()) for form, values in sample.members.items()}
    if not settled:
        of = f"the most likely of the {len(means)} tried"
        which = (
            of
            if at != usual
            else f"the default, and none of the {len(means)} tried is significantly more likely"
        )
    nearest = sorted((mean, form.name_with_day) for form, mean in means.items() if form != at)[:3]
    beside = f" ({', '.join(f'{name} {mean:.3f}' for mean, name in nearest)})" if nearest else ""
    own = f"{means[at]:.3f} nats a token" if at in means else "not scored"
    return f"text form {best.name_with_day}, {which}; mean loss of {sample.what}: {own}{beside}"


def _text_form_doubt_sentences(
    sample: _RenderingScores, best: ChatRendering, settled: bool
) -> list[str]:
    """Why nothing seen may be due to the rendering: sentences; see `choose_text_form`."""
    doubts = []
    if best not in sample.members:
        return [
            f"as {best.name_with_day} most of the rows cannot be written: another text form may be "
            "that of the training"
        ]
    if settled and (likelier := choose_likeliest_reading(best, sample.members)) != best:
        by = float((sample.members[best] - sample.members[likelier]).mean())
        doubts.append(
            f"the answers are more likely as {likelier.name_with_day} than as "
            f"{best.name_with_day}, which was asked for, by {by:.2f} nats a token: the model may "
            "have been trained on that text form"
        )
    if not sample.others:
        return doubts
    remembers = [form for form in sample.members if _has_likelier_members(sample, form)]
    if best in remembers:
        # what the model knows of them in this form the run says
        # (`scoring.doubt_if_members_likelier`)
        return doubts
    if remembers:
        doubts.append(
            f"members are more likely than non-members as {remembers[0].name_with_day}, but not as "
            f"{best.name_with_day}: the model may have been trained on that text form (--template)"
        )
    elif not settled and not _is_confirmed_by_nonmembers(sample.others, best):
        # One that was asked for is the user's word: see `_text_form_choice_sentence`.
        doubts.append(
            "members are as unlikely as non-members in every text form that was tried "
            f"({', '.join(form.name_with_day for form in sample.members)}), and none stands out: a "
            "model that did not memorise them cannot be told from one that was trained on another "
            "text form (--template FILE)"
        )
    return doubts


def _has_likelier_members(sample: _RenderingScores, form: ChatRendering) -> bool:
    # One-sided at 5%, Bonferroni over the forms: an interval has two such ends.
    confidence = 1 - 2 * (1 - CONFIDENCE) / len(sample.members)
    return compute_welch_interval(sample.others[form], sample.members[form], confidence)[0] > 0


def _is_confirmed_by_nonmembers(
    others: Mapping[ChatRendering, NDArray[np.float64]], best: ChatRendering
) -> bool:
    """Whether non-members, whom nobody memorised, speak for it: see `choose_text_form`."""
    apart = [form for form in others if form.kind != best.kind]
    return bool(apart) and all(
        lower_bound_of_mean_nll_gain(others[form] - others[best], len(apart)) >= MARGIN
        for form in apart
    )
