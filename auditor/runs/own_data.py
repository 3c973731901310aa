"""The records and canaries that a plan names outside the lab, read with the tokenizer of the model they are held to."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from auditor.benchmarks import manifests
from auditor.benchmarks.audit_canaries import AuditManifest
from auditor.benchmarks.files import Files
from auditor.benchmarks.lm_extraction import LMExtraction, is_lm_extraction
from auditor.benchmarks.tokenised import Tokenised, is_tokenised
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, TextForm
from auditor.core.plan import AUTO, Plan
from auditor.core.result import Doubt
from auditor.models.base import LanguageModel
from auditor.models.vocabulary import check_tokens
from auditor.plugins.benchmark import Benchmark
from auditor.runs import coining, text_form


def load_data(plan: Plan, model: LanguageModel, held: TextForm | None = None) -> Benchmark:
    """The records and canaries of a plan outside the lab. held: how a run that is resumed renders conversations."""
    canaries: tuple[Secret, ...] = ()
    if plan.canaries is not None:
        manifest = manifests.read(Path(plan.canaries))
        if isinstance(manifest, AuditManifest):
            coining.check_learnable(manifest, str(plan.model))
        canaries = manifests.secrets(manifest, model.tokenizer, model.vocab_size)
    if plan.data is None:
        return manifests.Canaries(
            canaries, model.tokenizer, f"{Path(str(plan.canaries)).name}: {len(canaries)} canaries"
        )
    benchmark = _load_records(plan, plan.data, model, held)
    benchmark.canaries = canaries
    return benchmark


def _load_records(plan: Plan, data: str, model: LanguageModel, held: TextForm | None) -> Benchmark:
    common: dict[str, Any] = {
        "known": plan.known,
        "known_fraction": plan.known_fraction,
        "nonmembers": plan.nonmembers,
        "limit": plan.limit,
        "seed": plan.seed,
    }
    prefix, suffix = plan.prefix_length, plan.suffix_length
    if is_lm_extraction(Path(data)):
        if plan.group_column is not None:
            raise AuditError(f"--group-column names a column, which the arrays of {data!r} do not have")
        for name in ("knows", "windows", "forget", "template", "date"):
            if getattr(plan, name) not in (None, AUTO):
                raise AuditError(f"--{name} is about text, which the arrays of {data!r} do not have")
        arrays = LMExtraction(data, vocab_size=model.vocab_size, prefix_length=prefix, suffix_length=suffix, **common)
        arrays.tokenizer = model.tokenizer
        benchmark: Benchmark = arrays
    elif is_tokenised(data):
        for name in ("knows", "windows", "group_column", "template", "date"):
            if getattr(plan, name) not in (None, AUTO):
                raise AuditError(f"--{name.replace('_', '-')} is about text, and {data!r} holds token ids")
        benchmark = Tokenised(
            data, vocab_size=model.vocab_size, prefix_length=prefix, suffix_length=suffix, forget=plan.forget, **common
        )
        benchmark.tokenizer = model.tokenizer
    else:
        chosen = text_form.choose(plan, model, held)
        form, said = (None, None) if chosen is None else chosen
        benchmark = Files(
            data,
            model.tokenizer,
            prefix_length=prefix,
            suffix_length=suffix,
            knows=plan.knows,
            windows=plan.windows,
            group_column=plan.group_column,
            forget=plan.forget,
            form=form,
            **common,
        )
        if said is not None:
            benchmark.text_form = said
            benchmark.notes += (said.said,)
            benchmark.doubts += tuple(Doubt("text form", sentence) for sentence in said.doubts)
    if model.tokenizer is not None and len(model.tokenizer) != model.vocab_size:
        pairs = (*((s.prefix, s.suffix) for s in benchmark.secrets), *((p.prefix, p.suffix) for p in benchmark.known))
        check_tokens("the data", (*itertools.chain(*pairs), *benchmark.heldout), model.vocab_size, model.name)
        more = len(model.tokenizer) > model.vocab_size
        benchmark.notes += (
            f"the model's law has {model.vocab_size} entries, its tokenizer {len(model.tokenizer)} tokens: "
            + ("the data use none of those beyond" if more else "the rest is padding"),
        )
    return benchmark
