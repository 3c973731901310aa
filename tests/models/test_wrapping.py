"""Whoever answers through another model forwards what is no answer, and whatever a model can be
asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from auditor.benchmarks.data.fixed_distributions import FixedDistribution
from auditor.core.result import Doubt
from auditor.defenses.cp_delta import CpDeltaModel
from auditor.defenses.invisible_ink import InkOptions, InvisibleInkModel
from auditor.defenses.memfree import MemFreeModel, build_exact_filter
from auditor.defenses.pmixed_model import EnsembleModel, PMixedModel, build_unmixed_projection
from auditor.defenses.uniform_mixing import UniformMixingModel
from auditor.models.base import LanguageModel
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.wrapping import WrappingModel
from auditor.providers.llama import LlamaModel
from auditor.remote.model import RemoteModel
from auditor.runs.prefix_token import PrefixedModel
from auditor.studies.published_promises import NeighbouringModels

# Made of `start` and `log_probs`: a defense that forwarded them would be gone past.
ANSWERS = {
    *(
        "start",
        "log_probs",
        "tuning_log_probs",
        "completions",
        "suffix_log_probs",
        "token_log_probs",
        "token_ranks",
    ),
    *(
        "partial_distributions_of",
        "teacher_forced_distributions",
        "published_perplexity_nll",
        "divergence_checks",
        "neighbour_distributions",
        "neighbour_model",
        "claim_premise_counts",
    ),
    *("row_bytes", "check_text_fits"),
}


class Marked(FixedDistribution):
    """A model whose every word is its own."""

    family, max_positions, eos, notes = "marked", 64, (1,), ("a note",)
    tokenizer, finished = "its tokenizer", 0

    def __init__(self) -> None:
        super().__init__([0.5, 0.25, 0.25])

    def special_token_id(self, kind: str) -> int | None:
        return 2

    def cost_sentences(self) -> tuple[str, ...]:
        return ("it costs",)

    def doubts(self) -> tuple[Doubt, ...]:
        return (Doubt("filter", "it withholds"),)

    def has_withheld_answer_by_prefix(self, prefixes: Sequence[tuple[int, ...]]) -> list[bool]:
        return [True for _ in prefixes]

    def check_unchanged_at_end(self) -> None:
        self.finished += 1

    def embedding_rows(self, count: int) -> Tensor:
        return torch.full((count, 1), 7.0)


def wrappers() -> Iterator[WrappingModel]:
    def two() -> ModelEnsemble:
        return ModelEnsemble(Marked(), [Marked(), Marked()])

    yield PrefixedModel(Marked(), (1,))
    yield MemFreeModel(Marked(), 2, build_exact_filter(set()))
    yield UniformMixingModel(Marked(), 0.5)
    yield InvisibleInkModel(two(), InkOptions(1.0, 1.0), "ink")
    yield PMixedModel(two(), 0.5, build_unmixed_projection, "pmixed")
    yield CpDeltaModel(two(), "max", (1, 2))
    yield NeighbouringModels(Marked(), {}, {})


@pytest.mark.parametrize("model", list(wrappers()), ids=lambda model: type(model).__name__)
def test_what_is_no_answer_is_the_other_model_s(model: WrappingModel) -> None:
    own = Marked()
    for name in ("family", "vocab_size", "eos", "device", "notes", "tokenizer", "capabilities"):
        assert getattr(model, name) == getattr(own, name), name
    assert (
        model.special_token_id("bos") == 2
        and model.cost_sentences() == own.cost_sentences()
        and model.doubts() == own.doubts()
    )
    assert model.has_withheld_answer_by_prefix([(1,)]) == [True] and torch.equal(
        model.embedding_rows(2), own.embedding_rows(2)
    )
    inner = model.model
    while isinstance(inner, WrappingModel):
        inner = inner.model
    model.check_unchanged_at_end()
    assert isinstance(inner, Marked) and inner.finished == 1
    assert model.max_positions == 64 - len(model.prefix_token)


def test_whatever_a_model_can_be_asked_is_forwarded_or_an_answer() -> None:
    """A new question must be put to the model behind a prefix token, or what it says is lost in
    every run."""
    asked = {
        name
        for name, value in vars(LanguageModel).items()
        if callable(value) and not name.startswith("_")
    }
    forwarded = asked & vars(WrappingModel).keys()
    assert forwarded | ANSWERS == asked and not forwarded & ANSWERS
    assert asked <= forwarded | vars(PrefixedModel).keys()
    said = {name for name in LanguageModel.__annotations__ if not name.startswith("_")} - asked
    assert said == {name for name in vars(PrefixedModel(Marked(), (1,))) if name != "model"}


def test_every_model_of_ours_that_holds_another_is_a_wrapping_one() -> None:
    def below(kind: type) -> Iterator[type]:
        for one in kind.__subclasses__():
            yield from (one, *below(one))

    ours = {kind for kind in below(LanguageModel) if kind.__module__.startswith("auditor.")}
    assert {kind for kind in ours if not issubclass(kind, WrappingModel)} <= {
        *(FixedDistribution, HuggingFaceModel, LlamaModel, RemoteModel)
    }
    tried = tuple(type(model) for model in wrappers())
    assert all(
        issubclass(kind, tried)
        for kind in ours
        if issubclass(kind, WrappingModel) and kind not in (WrappingModel, EnsembleModel)
    )
