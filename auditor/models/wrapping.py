"""Provide base classes for models and rows that wrap others, such as defended models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from auditor.models.base import LanguageModel
from auditor.models.rows import Rows

_SAME = (
    *("name", "family", "vocab_size", "max_positions", "eos", "device"),
    *("capabilities", "parts", "notes", "prefix_token", "prepended", "tokenizer"),
    *("returns_token_ids", "load_doubts"),
)


def _make_forwarding_method(method: str) -> Any:
    """Return a method that calls the wrapped model's method of this name."""

    def answer(self: WrappingModel, *of: Any, **more: Any) -> Any:
        return getattr(self.model, method)(*of, **more)

    return answer


class WrappingModel(LanguageModel):
    """A model that wraps another model, by default with the same name, sizes and capabilities.

    A subclass implements `start` and `log_probs`. All other answers are computed by these two
    methods, so no answer bypasses a defense.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        # Copied once: later changes of the wrapped model, such as its notes, do not appear here.
        for name in _SAME:
            setattr(self, name, getattr(model, name))

    embedding_rows = _make_forwarding_method("embedding_rows")
    read_ahead = _make_forwarding_method("read_ahead")
    cache_hidden_states = _make_forwarding_method("cache_hidden_states")
    forget_batch = _make_forwarding_method("forget_batch")
    special_token_id = _make_forwarding_method("special_token_id")
    digest = _make_forwarding_method("digest")
    cost_sentences = _make_forwarding_method("cost_sentences")
    doubts = _make_forwarding_method("doubts")
    has_withheld_answer_by_prefix = _make_forwarding_method("has_withheld_answer_by_prefix")
    check_unchanged_at_end = _make_forwarding_method("check_unchanged_at_end")


class WrappingRows(Rows):
    """Rows that wrap other rows and advance together with them.

    Each subclass implements `log_probs`.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.rows.advance(parents, tokens)


class MappedRows(WrappingRows):
    """Rows that apply a function to the wrapped rows' distribution, once per step."""

    def __init__(self, rows: Rows, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(rows)
        self.function = function
        self._distribution: Tensor | None = None

    def log_probs(self) -> Tensor:
        if self._distribution is None:
            self._distribution = self.function(self.rows.log_probs())
        return self._distribution

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        super().advance(parents, tokens)
        self._distribution = None
