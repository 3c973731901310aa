"""The base of models and rows that answer through others, whose sizes, names and costs are forwarded here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from auditor.models.base import LanguageModel, Rows

_SAME = (
    *("name", "family", "vocab_size", "max_positions", "eos", "device"),
    *("capabilities", "parts", "notes", "prefix_token", "tokenizer"),
)


def _forwarded(question: str) -> Any:
    """What the other model answers to this question of `LanguageModel`."""

    def answer(self: WrappingModel, *of: Any, **more: Any) -> Any:
        return getattr(self.model, question)(*of, **more)

    return answer


class WrappingModel(LanguageModel):
    """A model that answers through another: its name, sizes and capabilities are the other's, unless it says otherwise.

    Its answers are not: `start` and `log_probs`, which all others are made of, are each wrapper's own, so that nobody
    gets past a defense by asking in another way.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        for name in _SAME:  # copied once: what the other changes later, such as its notes, is not seen here
            setattr(self, name, getattr(model, name))

    embedding_rows = _forwarded("embedding_rows")
    read_ahead = _forwarded("read_ahead")
    continues_read_texts = _forwarded("continues_read_texts")
    special_token = _forwarded("special_token")
    digest = _forwarded("digest")
    cost_sentences = _forwarded("cost_sentences")
    doubts = _forwarded("doubts")
    answers_withheld = _forwarded("answers_withheld")
    finish = _forwarded("finish")


class WrappingRows(Rows):
    """Rows that answer through others, with which they advance and split. What they answer is each wrapper's own."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.rows.advance(parents, tokens)
