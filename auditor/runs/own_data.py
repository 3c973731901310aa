"""Read the records and canaries of a plan outside the lab, with the audited model's tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.data.cut_places import LEAST_PREFIX, LEAST_SUFFIX
from auditor.benchmarks.data.files import Files, TableReader
from auditor.benchmarks.data.large_tables import TableCounting
from auditor.benchmarks.data.lm_extraction import LMExtraction, has_extraction_arrays
from auditor.benchmarks.data.splitting import SplitOptions
from auditor.benchmarks.data.tokenised import Tokenised, is_tokenised_data
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, TextForm, select_members
from auditor.core.plan import FIELDS, format_field_flag
from auditor.core.plan_fields import AUTO, NONE
from auditor.core.plan_parts import DataPlan
from auditor.core.result import Doubt
from auditor.models.base import LanguageModel
from auditor.models.trained_length import TrainedLength, read_trained_length
from auditor.models.vocabulary import (
    check_tokens_within_vocabulary,
    decode_keeping_special_tokens,
)
from auditor.plugins.benchmark import Benchmark
from auditor.runs import making_audit_canaries, text_form
from auditor.runs.prefix_token import find_default_prefix

_OF_ALL_KINDS = ("prefix_length", "suffix_length", "known", "known_fraction", "nonmembers", "limit")
_COLUMNS = ("group_column", "user_column")
_OF_TEXT = ("knows", "turns", "windows", "template", "date", "trained_length")


def load_own_benchmark(
    plan: DataPlan,
    name: str,
    seed: int,
    model: LanguageModel,
    recorded_form: TextForm | None = None,
    form_rows: int | None = None,
    soft_prompt_rows: int = 0,
    counting: TableCounting | None = None,
) -> Benchmark:
    """Load the records and canaries of a plan outside the lab.

    Args:
        plan: data fields of the plan.
        name: the model's folder or hub id.
        seed: seed of the run.
        model: the attacked model.
        recorded_form: text form of a resumed run; None to choose the form.
        form_rows: most data rows used to choose the form; None for the default.
        soft_prompt_rows: number of soft-prompt rows before the texts.
        counting: counter of the rows of large tables.
    """
    canaries: tuple[Secret, ...] = ()
    if plan.canaries is not None:
        manifest = manifests.read_canary_manifest(Path(plan.canaries))
        if isinstance(manifest, AuditCanaryManifest):
            making_audit_canaries.check_new_tokens_trainable(manifest, name)
        canaries = manifests.build_manifest_secrets(manifest, model.tokenizer, model.vocab_size)
    if plan.data is None:
        return manifests.Canaries(
            canaries, model.tokenizer, f"{Path(str(plan.canaries)).name}: {len(canaries)} canaries"
        )
    benchmark = _load_record_benchmark(
        plan,
        plan.data,
        name,
        seed,
        model,
        recorded_form,
        form_rows or text_form.ROWS,
        soft_prompt_rows,
        counting,
    )
    benchmark.canaries = canaries
    return benchmark


def _load_record_benchmark(
    plan: DataPlan,
    data: str,
    name: str,
    seed: int,
    model: LanguageModel,
    recorded_form: TextForm | None,
    form_rows: int,
    soft_prompt_rows: int,
    counting: TableCounting | None,
) -> Benchmark:
    common: dict[str, Any] = {
        "seed": seed,
        **{name: getattr(plan, name) for name in _OF_ALL_KINDS},
    }
    benchmark: Benchmark
    if model.max_positions is None:
        context = None
    else:
        context = model.max_positions - soft_prompt_rows
    if context is not None and context <= LEAST_PREFIX + LEAST_SUFFIX:
        # The soft prompt, not the rows, is too long: the run refuses it by name.
        context = model.max_positions
    if has_extraction_arrays(Path(data)):
        _refuse_nondefault_fields(
            plan, _COLUMNS, f"names a column, which the arrays of {data!r} do not have"
        )
        _refuse_nondefault_fields(
            plan, (*_OF_TEXT, "forget"), f"is about text, which the arrays of {data!r} do not have"
        )
        benchmark = LMExtraction(data, vocab_size=model.vocab_size, **common)
        benchmark.tokenizer = model.tokenizer
    elif is_tokenised_data(data):
        about_text = tuple(field for field in _OF_TEXT if field != "trained_length")
        _refuse_nondefault_fields(
            plan, (*about_text, *_COLUMNS), f"is about text, and {data!r} holds token ids"
        )
        trained, trained_notes = _choose_trained_length(plan, name, model.tokenizer)
        benchmark = Tokenised(
            data,
            vocab_size=model.vocab_size,
            forget=plan.forget,
            model=name,
            trained=trained,
            room=context,
            end_of_text=getattr(model.tokenizer, "eos_token_id", None),
            **common,
        )
        benchmark.tokenizer = model.tokenizer
        benchmark.notes += trained_notes
    else:
        counting = counting or TableCounting()
        reader = TableReader(
            SplitOptions(plan.known_fraction, plan.limit, seed),
            counting,
            (plan.group_column, plan.user_column),
            plan.forget,
        )
        choice = text_form.choose_text_form(plan, name, model, recorded_form, form_rows, reader)
        form, form_record = (None, None) if choice is None else choice
        trained, trained_notes = _choose_trained_length(plan, name, model.tokenizer)
        # A template writes the first token; other texts need room for a prefix token.
        framed = form is not None and form.source is not None
        benchmark = Files(
            data,
            model.tokenizer,
            knows=plan.knows,
            turns=plan.turns,
            windows=plan.windows,
            group_column=plan.group_column,
            user_column=plan.user_column,
            forget=plan.forget,
            form=form,
            trained=trained,
            room=context if context is None or framed else context - 1,
            counting=counting,
            **common,
        )
        benchmark.notes += trained_notes
        if form_record is not None:
            benchmark.text_form = form_record
            benchmark.notes += (form_record.said,)
            benchmark.doubts += tuple(
                Doubt("text form", sentence) for sentence in form_record.doubts
            )
    if not model.returns_token_ids:
        benchmark.doubts += tuple(_list_character_doubts(benchmark.secrets, model))
    # With equal sizes, no token is outside the distribution.
    if model.tokenizer is not None and len(model.tokenizer) != model.vocab_size:
        pairs = (
            *((s.prefix, s.suffix) for s in benchmark.secrets),
            *((p.prefix, p.suffix) for p in benchmark.known),
        )
        check_tokens_within_vocabulary(
            "the data", (*itertools.chain(*pairs), *benchmark.heldout), model.vocab_size, model.name
        )
        more = len(model.tokenizer) > model.vocab_size
        benchmark.notes += (
            f"the model's distribution has {model.vocab_size} entries, its tokenizer "
            f"{len(model.tokenizer)} tokens: "
            + ("the data use none of those beyond" if more else "the rest is padding"),
        )
    return benchmark


def _list_character_doubts(secrets: Sequence[Secret], model: LanguageModel) -> Iterator[Doubt]:
    """Yield a doubt if suffixes end inside a character.

    A model that writes only whole characters cannot write such suffixes.
    """
    members = select_members(secrets)
    n_split = sum(
        decode_keeping_special_tokens(model.tokenizer, secret.suffix).endswith("\ufffd")
        for secret in members
    )
    if n_split:
        yield Doubt(
            "answers",
            f"{n_split:,} of {len(members):,} suffixes end within a character, and {model.name} "
            "writes whole characters only: none of these can be extracted. Another --suffix-length "
            "cuts elsewhere.",
        )


def _choose_trained_length(
    plan: DataPlan, name: str, tokenizer: Any
) -> tuple[TrainedLength | None, tuple[str, ...]]:
    """Return the number of tokens in a row of the training, then notes on this length.

    The length is in the plan or in a file next to the model; None if neither names a length.
    """
    if plan.trained_length == NONE:
        return None, ()
    note = ""
    trained: TrainedLength | None
    if plan.trained_length == AUTO:
        trained, note = read_trained_length(Path(name))
    else:
        trained = TrainedLength(int(plan.trained_length))
    if trained is None:
        return None, (note,) if note else ()
    # TRL adds the tokenizer's prefix before a text, and an end of text after it.
    before = len(find_default_prefix(tokenizer))
    after = int(getattr(tokenizer, "eos_token", None) is not None)
    side = "last" if trained.from_end else "first"
    note = (
        f"of each row the {side} {trained.tokens:,} tokens were trained on ({trained.source}): "
        "the tokens beyond are left out; --trained-length none includes them"
    )
    return replace(trained, tokens_before=before, tokens_after=after), (note,)


def _refuse_nondefault_fields(plan: DataPlan, fields: Sequence[str], reason: str) -> None:
    """Raise AuditError, with this reason, if any of these plan fields differs from its default."""
    for field in fields:
        if getattr(plan, field) != FIELDS[field].default:
            raise AuditError(f"{format_field_flag(field)} {reason}")
