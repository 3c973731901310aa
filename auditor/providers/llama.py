"""Load GGUF files with llama.cpp in this process (llama-cpp-python), with full distributions.

Texts are read one at a time. In a batch, llama.cpp rounds differently (a logit of a 4-bit model
moves by up to 1), so the other texts of a batch would change the samples. Read one at a time, a
text always gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from auditor.core.errors import AuditError, NotApplicable, wrap_library_errors
from auditor.core.plan_parts import LoadingOptions
from auditor.models import consistency
from auditor.models.base import LanguageModel, check_logits_finite
from auditor.models.loading import load_tokenizer_if_present
from auditor.plugins.options import Count
from auditor.plugins.provider import Provider, RequestedModel

# Tokenizers differ first in digits, white space, other scripts and signs within words.
_SAMPLE_TEXTS = (
    "The 7 quick brown foxes",
    " it's 12:30\n\n\tnow",
    "naïve café – 東京",
    "user@example.com +49 170 555-0199",
)


class LlamaModel(LanguageModel):
    """A model from a GGUF file.

    `llama` is the loaded `llama_cpp.Llama`, whose cache contains the last text that it read.
    """

    capabilities = frozenset({"draw", "distribution"})

    def __init__(self, llama: Any, name: str, tokenizer: Any) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._llama = llama
        self.vocab_size = int(llama.n_vocab())
        self.max_positions = int(llama.n_ctx())
        self.family = (
            f"{llama.metadata.get('general.architecture', 'GGUF')} with {self.vocab_size:,} tokens"
        )
        end = self.special_token_id("eos")
        if end is not None:
            self.eos = (end,)
        self._cached_text: list[int] = []

    def special_token_id(self, kind: str) -> int | None:
        token = int(self._llama.token_bos() if kind == "bos" else self._llama.token_eos())
        # llama.cpp returns -1 if a model has no such token.
        if token < 0:
            return None
        return token

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """Return log-probabilities (B, last, V) at the last positions of contexts (B, n).

        Texts are read in sorted order, so that consecutive texts share long prefixes.
        """
        if prompt is not None:
            raise NotApplicable(f"needs a soft prompt; {self.name} takes only tokens")
        texts = contexts.tolist()
        logits = torch.empty(len(texts), last, self.vocab_size)
        for i in sorted(range(len(texts)), key=texts.__getitem__):
            logits[i] = torch.from_numpy(np.stack(list(self._logits(texts[i], last))))
        check_logits_finite(logits, self.name)
        return logits.log_softmax(-1)

    def _logits(self, text: list[int], last: int) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the logits (V,) after each of the `last` trailing tokens of a text.

        A prefix shared with the previous text is not read again.
        """
        import llama_cpp

        shared = 0
        # The cache holds keys and values, no logits: the last tokens are read again in any case.
        longest = min(len(self._cached_text), len(text) - last)
        while shared < longest and self._cached_text[shared] == text[shared]:
            shared += 1
        # Shorten these before reading anything: if `eval` fails, `_cached_text` is still true.
        # `eval` drops the part of the cache after n_tokens and continues there.
        self._llama.n_tokens = shared
        self._cached_text = text[:shared]
        for position in range(shared, len(text)):
            self._llama.eval([text[position]])
            self._cached_text.append(text[position])
            if position >= len(text) - last:
                # A copy: llama.cpp writes the next logits into the same buffer.
                yield np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits(self._llama.ctx), (self.vocab_size,)
                ).copy()


@dataclass(frozen=True)
class LlamaCpp(Provider):
    """A GGUF file by llama.cpp in this process: llama:FILE.gguf.

    positions: largest number of tokens in a text. threads: number of threads (0: llama.cpp
    chooses). gpu_layers: number of layers on the GPU (-1: all). The tokenizer is the file's own
    unless --tokenizer names another.
    """

    name = "llama"
    takes = ("model_args", "tokenizer")
    positions: Count = 2048
    threads: int = 0
    gpu_layers: int = 0

    def check(self, request: RequestedModel) -> None:
        if not Path(request.name).is_file():
            raise AuditError(
                f"expected --model {self.name}:FILE.gguf, got {request.name!r}: no such file"
            )
        try:
            import llama_cpp  # noqa: F401 - only whether it is installed
        except ImportError:
            raise AuditError(
                f"--model {self.name}: needs llama-cpp-python: pip install 'audit-lm[llama]'"
            ) from None

    def load(self, request: RequestedModel) -> LlamaModel:
        import llama_cpp

        with wrap_library_errors(f"cannot load {request.name!r} by llama.cpp"):
            sizes: dict[str, Any] = {"n_ctx": self.positions, "n_gpu_layers": self.gpu_layers}
            llama = llama_cpp.Llama(
                request.name, n_threads=self.threads or None, verbose=False, **sizes
            )
        model = LlamaModel(llama, f"{self.name}:{request.name}", _load_chosen_tokenizer(request))
        # Beyond the context of its training a model's logits mean little. Metadata are texts.
        trained_length = int(
            llama.metadata.get(f"{llama.metadata.get('general.architecture')}.context_length", 0)
        )
        model.max_positions = min(self.positions, trained_length or self.positions)
        _check_tokenizer(llama, model)
        consistency.check_distribution_consistency(model)
        return model

    def list_model_sources(self, request: RequestedModel) -> Mapping[str, tuple[str, str | None]]:
        return {"model": (request.name, None)}

    def estimate_least_bytes(self, request: RequestedModel) -> int | None:
        return Path(request.name).stat().st_size


def _load_chosen_tokenizer(request: RequestedModel) -> Any:
    """Load a tokenizer with transformers: the one in `--tokenizer`, or else the GGUF file's."""
    if request.tokenizer is None:
        path = Path(request.name)
        with wrap_library_errors(
            f"cannot read the tokenizer of {request.name!r}: --tokenizer DIR names one"
        ):
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer = load_tokenizer_if_present(request.tokenizer, LoadingOptions())
    if tokenizer is None:
        raise AuditError(
            f"expected --tokenizer as a folder or hub id with one, got none in "
            f"{request.tokenizer!r}"
        )
    return tokenizer


def _check_tokenizer(llama: Any, model: LlamaModel) -> None:
    """Raise AuditError if the chosen tokenizer and the file's own one split a text differently."""
    for text in _SAMPLE_TEXTS:
        token_ids: Sequence[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        model_token_ids: Sequence[int] = llama.tokenize(text.encode(), add_bos=False, special=True)
        if list(token_ids) != list(model_token_ids):
            raise AuditError(
                f"expected a tokenizer that reads {text!r} as {model.name} does, "
                f"{list(model_token_ids)}, got {list(token_ids)}: --tokenizer DIR names another"
            )
