"""zlib: low perplexity counts for less where the text compresses well anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.plugins.attack import SamplingAttack, candidate_tokens, cpu_float64_tensor, mean_nll
from auditor.plugins.view import Batch, View


@dataclass(frozen=True)
class Zlib(SamplingAttack):
    """Rank by perplexity against compressed size (Carlini et al. 2021); score = -(mean nll / zlib bytes).

    `text`: what is compressed, the suffix alone or prefix and suffix. Public repositories disagree on this score; this
    is the form in which more bytes make a candidate surer.
    """

    name: ClassVar[str] = "zlib"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")
    text: Literal["suffix", "all"] = "suffix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text not in ("suffix", "all"):
            raise AuditError(f"expected text to be 'suffix' or 'all', got {self.text!r}")

    def scores(self, view: View, batch: Batch) -> list[Tensor]:
        if view.tokenizer is None:
            raise NotApplicable("needs a tokenizer to turn tokens into text, and the model came without one")
        result = []
        for query, candidates in batch:
            head = query.prefix if self.text == "all" else ()
            texts = [view.tokenizer.decode([*head, *suffix]) for suffix in candidate_tokens(candidates)]
            result.append(-mean_nll(candidates) / cpu_float64_tensor([compressed_size(text) for text in texts]))
        return result


def compressed_size(text: str) -> int:
    """Size of the text under zlib at its default level."""
    try:
        import zlib  # the standard library's; only this scorer needs it, and some Pythons are built without
    except ImportError as error:
        raise AuditError(
            "the zlib attack needs Python's own zlib module, and this Python was built without it"
        ) from error
    return len(zlib.compress(text.encode("utf-8")))
