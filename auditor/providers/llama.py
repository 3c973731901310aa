"""GGUF files by llama.cpp in this process (llama-cpp-python): next-token distributions of all
positions.

Tokens are read one by one. In a batch llama.cpp rounds otherwise (a logit of a model in 4 bits
moves by up to 1), so that what a text is read beside would change what is drawn; one by one, the
same text gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from auditor.core.errors import AuditError, NotApplicable, wrap_library_errors
from auditor.core.plan_parts import LoadingOptions
from auditor.models import consistency
from auditor.models.base import LanguageModel, check_logits_finite
from auditor.models.loading import load_tokenizer_if_present
from auditor.plugins.provider import Provider, RequestedModel

# where tokenizers differ first: digits, white space, other scripts, signs within words
_TRIED = (
    "The 7 quick brown foxes",
    " it's 12:30\n\n\tnow",
    "naïve café – 東京",
    "user@example.com +49 170 555-0199",
)


class LlamaModel(LanguageModel):
    """One GGUF file. llama: the loaded `llama_cpp.Llama`, whose cache holds the text that it read
    last."""

    capabilities = frozenset({"draw", "distribution"})

    def __init__(self, llama: Any, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer, self._llama = name, tokenizer, llama
        self.vocab_size = int(llama.n_vocab())
        self.max_positions = int(llama.n_ctx())
        self.family = (
            f"{llama.metadata.get('general.architecture', 'GGUF')} with {self.vocab_size:,} tokens"
        )
        self.eos = () if (end := self.special_token_id("eos")) is None else (end,)
        self._held: list[int] = []

    def special_token_id(self, kind: str) -> int | None:
        token = int(self._llama.token_bos() if kind == "bos" else self._llama.token_eos())
        # llama.cpp says -1 where a model has no such token
        return token if token >= 0 else None

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """Texts are read in sorted order, so that what two of them begin with is read once."""
        if prompt is not None:
            raise NotApplicable(f"needs a soft prompt; {self.name} takes only tokens")
        texts = contexts.tolist()
        found = torch.empty(len(texts), last, self.vocab_size)
        for i in sorted(range(len(texts)), key=texts.__getitem__):
            found[i] = torch.from_numpy(np.stack(list(self._logits(texts[i], last))))
        check_logits_finite(found, self.name)
        return found.log_softmax(-1)

    def _logits(self, text: list[int], last: int) -> Iterator[np.ndarray[Any, Any]]:
        """(V,) behind each of the last tokens of a text; what it shares with the last one read is
        not read again."""
        import llama_cpp

        shared = 0
        # the cache holds keys and values, no logits: the last tokens are read again even where they
        # are held
        most = min(len(self._held), len(text) - last)
        while shared < most and self._held[shared] == text[shared]:
            shared += 1
        # Shortened before anything is read: where `eval` fails, `_held` still says what is in the
        # cache.
        # `eval` drops what llama.cpp holds behind n_tokens, and goes on there.
        self._llama.n_tokens, self._held = shared, text[:shared]
        for position in range(shared, len(text)):
            self._llama.eval([text[position]])
            self._held.append(text[position])
            if position >= len(text) - last:
                # A copy: llama.cpp writes the next logits into the same buffer.
                yield np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits(self._llama.ctx), (self.vocab_size,)
                ).copy()


@dataclass(frozen=True)
class LlamaCpp(Provider):
    """A GGUF file by llama.cpp in this process: llama:FILE.gguf. positions: tokens that a text may
    have at most.

    threads: 0: as llama.cpp chooses; gpu_layers: -1: all. Its tokenizer is the file's own, but for
    --tokenizer.
    """

    name: ClassVar[str] = "llama"
    takes: ClassVar[tuple[str, ...]] = ("model_args", "tokenizer")
    positions: int = 2048
    threads: int = 0
    gpu_layers: int = 0

    def __post_init__(self) -> None:
        if self.positions < 1:
            raise AuditError(f"expected positions >= 1, got {self.positions}")

    def check(self, wanted: RequestedModel) -> None:
        if not Path(wanted.name).is_file():
            raise AuditError(
                f"expected --model {self.name}:FILE.gguf, got {wanted.name!r}: no such file"
            )
        try:
            import llama_cpp  # noqa: F401 - whether it is there
        except ImportError:
            raise AuditError(
                f"--model {self.name}: needs llama-cpp-python: pip install 'audit-lm[llama]'"
            ) from None

    def load(self, wanted: RequestedModel) -> LlamaModel:
        import llama_cpp

        with wrap_library_errors(f"cannot load {wanted.name!r} by llama.cpp"):
            sizes: dict[str, Any] = {"n_ctx": self.positions, "n_gpu_layers": self.gpu_layers}
            llama = llama_cpp.Llama(
                wanted.name, n_threads=self.threads or None, verbose=False, **sizes
            )
        model = LlamaModel(llama, f"{self.name}:{wanted.name}", _load_chosen_tokenizer(wanted))
        # metadata are texts; past the context of its training a model has seen no positions: logits
        # mean little there
        trained = int(
            llama.metadata.get(f"{llama.metadata.get('general.architecture')}.context_length", 0)
        )
        model.max_positions = min(self.positions, trained or self.positions)
        _check_tokenizer(llama, model)
        consistency.check_distribution_consistency(model)
        return model

    def model_sources_by_role(self, wanted: RequestedModel) -> Mapping[str, tuple[str, str | None]]:
        return {"model": (wanted.name, None)}

    def least_model_bytes(self, wanted: RequestedModel) -> int | None:
        return Path(wanted.name).stat().st_size


def _load_chosen_tokenizer(wanted: RequestedModel) -> Any:
    """As `--tokenizer` says, else the file's own, as transformers reads it."""
    if wanted.tokenizer is None:
        path = Path(wanted.name)
        with wrap_library_errors(
            f"cannot read the tokenizer of {wanted.name!r}: --tokenizer DIR names one"
        ):
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    found = load_tokenizer_if_present(wanted.tokenizer, LoadingOptions())
    if found is None:
        raise AuditError(
            f"expected --tokenizer as a folder or hub id with one, got none in {wanted.tokenizer!r}"
        )
    return found


def _check_tokenizer(llama: Any, model: LlamaModel) -> None:
    """Raises AuditError where the tokenizer reads a text as other tokens than the model's own
    does."""
    for text in _TRIED:
        ours: Sequence[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        theirs: Sequence[int] = llama.tokenize(text.encode(), add_bos=False, special=True)
        if list(ours) != list(theirs):
            raise AuditError(
                f"expected a tokenizer that reads {text!r} as {model.name} does, {list(theirs)}, "
                f"got {list(ours)}: --tokenizer DIR names another"
            )
