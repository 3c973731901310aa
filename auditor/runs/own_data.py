"""Read the records and canaries of a plan outside the lab, with the audited model's tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from auditor.benchmarks.canaries import making_audit_canaries, manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.data.cut_places import LEAST_PREFIX, LEAST_SUFFIX
from auditor.benchmarks.data.files import Files, TableReader
from auditor.benchmarks.data.lm_extraction import LMExtraction, has_extraction_arrays
from auditor.benchmarks.data.tokenised import Tokenised, is_tokenised_data
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, TextForm
from auditor.core.plan import FIELDS, format_field_flag
from auditor.core.plan_fields import AUTO, NONE
from auditor.core.plan_parts import DataPlan
from auditor.core.result import Doubt
from auditor.core.secret_table import build_secret_table, select_members
from auditor.models.base import LanguageModel
from auditor.models.memory import release_unused_memory
from auditor.models.trained_length import AXOLOTL, TrainedLength, read_trained_length
from auditor.models.vocabulary import (
    check_tokens_within_vocabulary,
    decode_keeping_special_tokens,
)
from auditor.plugins.benchmark import Benchmark
from auditor.runs import text_form
from auditor.runs.prefix_token import find_default_prefix

_MANY = 10_000  # secrets
_COLUMNS = ("group_column", "user_column")
_OF_TEXT = ("knows", "turns", "windows", "template", "date", "trained_length")


def load_own_benchmark(
    reader: TableReader,
    name: str,
    model: LanguageModel,
    recorded_form: TextForm | None = None,
    form_rows: int = text_form.ROWS,
    soft_prompt_rows: int = 0,
) -> Benchmark:
    """Load the records and canaries of a plan that attacks the user's own model.

    Args:
        reader: reader of the plan's files.
        name: the model's folder or hub id, for messages.
        model: the attacked model.
        recorded_form: how a resumed run renders conversations as text; None to choose this now.
        form_rows: largest number of data rows used to choose the text form.
        soft_prompt_rows: number of soft-prompt vectors before each text.
    """
    plan = reader.plan
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
    if has_extraction_arrays(Path(plan.data)):
        _refuse_nondefault_fields(
            plan, _COLUMNS, f"names a column, which the arrays of {plan.data!r} do not have"
        )
        _refuse_nondefault_fields(
            plan,
            (*_OF_TEXT, "forget"),
            f"is about text, which the arrays of {plan.data!r} do not have",
        )
        benchmark: Benchmark = LMExtraction(plan, model.vocab_size, reader.seed)
    else:
        benchmark = _load_row_benchmark(
            reader, name, model, recorded_form, form_rows, soft_prompt_rows
        )
    benchmark.tokenizer = model.tokenizer
    benchmark.canaries = canaries
    if not model.returns_token_ids:
        benchmark.doubts += tuple(_list_character_doubts(benchmark.secrets, model))
    # If the sizes are equal, every token is in the distribution.
    if model.tokenizer is not None and len(model.tokenizer) != model.vocab_size:
        benchmark.notes += (_compare_vocabulary_sizes(benchmark, model),)
    if len(benchmark.secrets) > _MANY:
        release_unused_memory()  # the rows took several times the memory of the secrets
    return benchmark


def _compare_vocabulary_sizes(benchmark: Benchmark, model: LanguageModel) -> str:
    """Return a note on a distribution that is smaller or larger than the tokenizer's vocabulary.

    Raise AuditError if the data have a token without an entry in the distribution.
    """
    texts = build_secret_table(benchmark.secrets).texts
    known = (pair.tokens for pair in benchmark.known)
    check_tokens_within_vocabulary(
        "the data",
        itertools.chain(texts, known, benchmark.heldout),
        model.vocab_size,
        model.name,
    )
    more = len(model.tokenizer) > model.vocab_size
    return (
        f"the model's distribution has {model.vocab_size} entries, its tokenizer "
        f"{len(model.tokenizer)} tokens: "
        + ("the data use no token beyond these entries" if more else "the rest is padding")
    )


def _load_row_benchmark(
    reader: TableReader,
    name: str,
    model: LanguageModel,
    recorded_form: TextForm | None,
    form_rows: int,
    soft_prompt_rows: int,
) -> Benchmark:
    """Load rows of token ids, texts or conversations. See `load_own_benchmark`."""
    plan = reader.plan
    if model.max_positions is None:
        context = None
    else:
        context = model.max_positions - soft_prompt_rows
    if context is not None and context <= LEAST_PREFIX + LEAST_SUFFIX:
        # The soft prompt is too long, not the rows: a later check refuses the soft prompt by name.
        context = model.max_positions
    form_record = None
    is_tokenised = is_tokenised_data(str(plan.data))
    if is_tokenised:
        about_text = tuple(field for field in _OF_TEXT if field != "trained_length")
        _refuse_nondefault_fields(
            plan, (*about_text, *_COLUMNS), f"is about text, and {plan.data!r} holds token ids"
        )
        form = None
    else:
        choice = text_form.choose_text_form(reader, name, model, recorded_form, form_rows)
        form, form_record = choice or (None, None)
    trained, trained_notes = _choose_trained_length(plan, name, model.tokenizer)
    if not is_tokenised and form is None and trained and trained.left_out_by == AXOLOTL:
        trained = None  # of texts, unlike conversations, axolotl makes several rows
        trained_notes = ()
    if is_tokenised:
        benchmark: Benchmark = Tokenised(
            plan,
            model.vocab_size,
            reader.seed,
            model=name,
            trained=trained,
            room=context,
            end_of_text=getattr(model.tokenizer, "eos_token_id", None),
        )
    else:
        # A template writes the first token; texts without a template need room for a prefix token.
        framed = form is not None and form.source is not None
        room = context if context is None or framed else context - 1
        benchmark = Files(reader, model.tokenizer, form=form, trained=trained, room=room)
    benchmark.notes += trained_notes
    if form_record is not None:
        benchmark.text_form = form_record
        benchmark.notes += (form_record.said,)
        benchmark.doubts += tuple(Doubt("text form", sentence) for sentence in form_record.doubts)
    return benchmark


def _list_character_doubts(secrets: Sequence[Secret], model: LanguageModel) -> Iterator[Doubt]:
    """Yield a doubt if suffixes end inside a character.

    A doubt is a sentence that tells why the result may hide a leak. A model that writes only whole
    characters cannot write such suffixes.
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
    """Return how many tokens of each data row the model was trained on, then notes about this.

    The plan or a file next to the model gives the number. It is None if neither does.

    Args:
        plan: the plan's fields about data.
        name: folder or hub id of the model.
        tokenizer: tokenizer of the model; None if it has none.
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
    return replace(trained, tokens_before=before, tokens_after=after), (trained.rule,)


def _refuse_nondefault_fields(plan: DataPlan, fields: Sequence[str], reason: str) -> None:
    """Raise AuditError with this reason if any of these plan fields differs from its default."""
    for field in fields:
        if getattr(plan, field) != FIELDS[field].default:
            raise AuditError(f"{format_field_flag(field)} {reason}")
