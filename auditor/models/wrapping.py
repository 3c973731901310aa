"""The base of models that answer through another: what is no answer is the other's own, and is forwarded here alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from auditor.core.result import Doubt
from auditor.models.base import LanguageModel

_SAME = (
    *("name", "family", "vocab_size", "max_positions", "eos", "device"),
    *("capabilities", "parts", "notes", "prefix_token", "tokenizer"),
)


class WrappingModel(LanguageModel):
    """A model that answers through another: its name, sizes and capabilities are the other's, unless it says otherwise.

    Its answers are not: `start` and `log_probs`, which all others are made of, are each wrapper's own, so that nobody
    gets past a defense by asking in another way.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        for name in _SAME:
            setattr(self, name, getattr(model, name))

    def embedding_rows(self, count: int) -> Tensor:
        return self.model.embedding_rows(count)

    def read_ahead(self, texts: Sequence[tuple[int, ...]], last: Sequence[int]) -> None:
        self.model.read_ahead(texts, last)

    def continues_read_texts(self, tokens: int) -> bool:
        return self.model.continues_read_texts(tokens)

    def special_token(self, kind: str) -> int | None:
        return self.model.special_token(kind)

    def digest(self) -> str:
        return self.model.digest()

    def cost_sentences(self) -> tuple[str, ...]:
        return self.model.cost_sentences()

    def doubts(self) -> tuple[Doubt, ...]:
        return self.model.doubts()

    def answers_withheld(self, prefixes: Sequence[tuple[int, ...]]) -> list[bool]:
        return self.model.answers_withheld(prefixes)

    def finish(self) -> None:
        self.model.finish()
