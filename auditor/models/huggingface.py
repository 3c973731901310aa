"""Wrap Hugging Face causal LMs.

Decoding rows use slots of preallocated keys and values, the model's own cache, or no cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.activation import Activation
from auditor.models.base import (
    LanguageModel,
    WholeTextRows,
    check_logits_finite,
    get_max_logits,
)
from auditor.models.cached_rows import CachedRows, Forward, SlotRows
from auditor.models.caches import Dimensions, NativeCache, find_cache_batch_dimensions
from auditor.models.configuration import (
    get_input_device,
    list_end_tokens,
    max_positions,
    unwrap_peft,
)
from auditor.models.hidden_states import RECENT_BYTES, HiddenStateCache
from auditor.models.memory import BatchSizeLimit
from auditor.models.precision import Float32SingleQueryAttention, make_head_input_contiguous
from auditor.models.rows import Rows
from auditor.models.shared_prefix import SharedPrefixCache
from auditor.models.slot_cache import PaddedCache, SlotLayer, TreeCache
from auditor.models.weights import digest_weights

# Cache of decoding rows: "slots", keys and values in preallocated slots; "cache", the model's
# native cache, copied row by row; "recompute", none: each token reads its row again. Fastest first,
# the order in which the self-check tries them.
Served = Literal["slots", "cache", "recompute"]

_WEIGHTS_PER_STATES = 2  # bytes of weights for each byte of states in a bounded cache
_LEAST_BYTES = 2**26  # of states in a bounded cache, if the weights are small
_BATCH_BYTES = 2**27  # of log-probabilities, if hidden states are cached for a while only
# Parameter names of the cache in model families.
_CACHE_NAMES = ("past_key_values", "cache_params", "state")


@dataclass
class ModelTraffic:
    """The work of all models in this process.

    `rows` is the number of sequences, counted at every step; `tokens` is the number of tokens read.
    """

    rows: int = 0
    tokens: int = 0


traffic = ModelTraffic()  # of this process


class HuggingFaceModel(LanguageModel):
    """A Hugging Face causal LM (with or without a PEFT adapter), in eval mode, parameters frozen.

    `self_check` finds the values of `served` and `embeddings` that are right for a model.

    Args:
        model: the model, on its device.
        tokenizer: tokenizer of its texts; None if the caller tokenizes.
        name: name in reports.
        served: the kind of cache that decoding rows use: `slots`, `cache` or `recompute`.
        embeddings: whether the model also accepts input embeddings, which soft prompts need.
        notes: sentences about loading that users must know.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
        *,
        served: Served = "slots",
        embeddings: bool = True,
        notes: tuple[str, ...] = (),
    ) -> None:
        # In place: freezes the caller's model, too.
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.notes = notes
        self.served: Served = served
        if not embeddings:
            self.capabilities = self.capabilities - {"embeddings"}
        config = model.config.get_text_config(decoder=True)
        self.n_layers = int(config.num_hidden_layers)
        self.max_positions = max_positions(model)
        self.embedding = model.get_input_embeddings()
        self.device = get_input_device(model, self.embedding)
        head = model.get_output_embeddings()
        # The hook stays on the model, which may be wrapped more than once.
        if head is not None and make_head_input_contiguous not in head._forward_pre_hooks.values():
            head.register_forward_pre_hook(make_head_input_contiguous)
        self.vocab_size = int(config.vocab_size)
        if head is not None:
            self.vocab_size = int(head.weight.shape[0])
        # GPT-2's default, 50256, is beyond a smaller vocabulary.
        end_tokens = list_end_tokens(model, config)
        self.eos = tuple(token for token in end_tokens if 0 <= token < self.vocab_size)
        self.family = f"{config.model_type} with {self.vocab_size:,} tokens"
        few_bits = (torch.float16, torch.bfloat16)
        self._in_few_bits = self.device.type == "cpu" and model.dtype in few_bits
        self.seen: HiddenStateCache | None = None
        self._is_cacheable = True  # False: more than the head follows the hidden states
        self._digest: str | None = None  # set only if the weights cannot change
        self.is_merged = False  # whether the self-check merged the adapter into the base
        self.begins: SharedPrefixCache | None = None
        self.activation = Activation(model)
        # Whether all rows after a prefix may share a slot: the self-check finds out.
        self.can_share_slots = False
        # Loads the same weights into a new model; None: not on disk.
        self.load_again: Callable[[], Any] | None = None
        accepted = inspect.signature(unwrap_peft(model).forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted
        # XLM ends a text at its padding token, unless a mask says otherwise.
        self._needs_mask = hasattr(config, "pad_index")
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)

    def enable_hidden_state_cache(
        self, recent_bytes: int = RECENT_BYTES, bounded: float = False
    ) -> None:
        """Cache the hidden states of all texts from now on. The weights must not change.

        Args:
            recent_bytes: see `HiddenStateCache`.
            bounded: whether the states take at most half the memory of the weights, or 64 MiB if
                that is more (or this share of either), and recent log-probabilities none.
        """
        if self.activation:  # its effect on the beginning of a text depends on later tokens
            return
        max_bytes = None
        if bounded:
            recent_bytes = 0
            n_bytes = sum(weight.nbytes for weight in self.model.parameters())
            max_bytes = int(bounded * max(n_bytes // _WEIGHTS_PER_STATES, _LEAST_BYTES))
        self.seen = make_hidden_state_cache(self, recent_bytes, max_bytes)

    @contextmanager
    def cache_hidden_states(self, bounded: float = False) -> Iterator[None]:
        outer = self.seen
        if not self._is_cacheable or (outer is not None and (bounded or not outer.is_bounded)):
            yield
            return
        self.enable_hidden_state_cache(_BATCH_BYTES, bounded)
        if self.seen is not None and outer is not None:
            self.seen.adopt_states(outer)
        try:
            yield
        finally:
            if self.seen is not None:
                self._is_cacheable = self.seen.is_exact is not False
            self.seen = outer

    def read_ahead(
        self,
        texts: Sequence[Tokens],
        last: Sequence[int],
        prefix_lengths: Sequence[int] | None = None,
    ) -> None:
        if self.seen is not None:
            keys = self.can_join_rows and not self.seen.is_bounded
            self.seen.read_ahead(texts, last, self.device, keys, prefix_lengths)

    def forget_batch(self) -> None:
        if self.seen is not None:
            self.seen.forget_batch()

    def copy_shared_prefix_layers(
        self, input_ids: Tensor, last: int, length: int, shared: bool = True
    ) -> tuple[int, list[SlotLayer]]:
        """Return the number of cached leading positions, and layers with their keys and values.

        The positions are those that all texts share (see `SharedPrefixCache.get_prefix_layers`).
        Return 0 and empty layers if `shared` is False or the shared prefix cache is disabled.

        Args:
            input_ids: the texts, a result of `prepend_soft_prompt`.
            last: number of trailing positions that must stay uncached.
            length: capacity of the layers in positions.
            shared: whether to use the cache of the shared prefix.
        """
        if self.begins is None or not shared or input_ids.requires_grad:
            return 0, [SlotLayer(length) for _ in range(self.n_layers)]
        return self.begins.get_prefix_layers(input_ids, last, length)

    def enable_shared_prefix_cache(self, **options: int) -> None:
        """Cache the prefix that texts share, from now on.

        Call this only if the self-check found that it changes no distribution. `options` are passed
        to `SharedPrefixCache`.
        """
        # torch counts in-place writes to a weight in `_version`, except those through `.data`.
        weights = [*self.model.parameters()]
        self.begins = SharedPrefixCache(
            self.transformers_logits,
            self.n_layers,
            lambda: sum(weight._version for weight in weights),
            **options,
        )

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        self.check_text_fits(prefixes.shape[1], length, prompt)
        return self.start_served_rows(prefixes, length, prompt)

    @torch.no_grad()
    def start_served_rows(
        self,
        prefixes: Tensor,
        length: int,
        prompt: Tensor | None,
        width: int = 1,
        forward: Forward | None = None,
    ) -> Rows:
        """Return decoding rows with the kind of cache set in `served`.

        Args:
            prefixes: token ids (B, n).
            length: largest number of tokens to append to a row.
            prompt: soft prompt (P, d) or None.
            width: number of sequences in a row.
            forward: computes the logits of all ensemble parts; None for a single model.
        """
        prefixes = prefixes.to(self.device)
        if self.served == "slots":
            return SlotRows(self, prefixes, length, prompt, width, forward)
        if self.served == "cache":
            return CachedRows(self, prefixes, length, prompt, width, forward)
        return WholeTextRows(partial(self._read_text_batches, prompt), prefixes)

    @torch.no_grad()
    def _read_text_batches(self, prompt: Tensor | None, texts: Tensor) -> Tensor:
        """Return the next-token log-probabilities (B, 1, V) of texts, read in small batches.

        Large batches would need too much memory, because some models compute logits at every
        position.
        """
        n_positions = texts.shape[1] + (0 if prompt is None else len(prompt))
        limit = BatchSizeLimit(
            max(1, get_max_logits(self.device) // (n_positions * self.vocab_size))
        )
        results = limit.run_pieces_within_memory(
            len(texts), lambda piece: self.log_probs(texts[piece], 1, prompt=prompt)
        )
        return torch.cat([log_probs for _, log_probs in results])

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        fixed, bytes_per_position = (
            (0, 0) if self.served == "recompute" else self._cache_bytes_fixed_and_per_position
        )
        return super().row_bytes(positions, distribution) + fixed + positions * bytes_per_position

    @cached_property
    def _cache_bytes_fixed_and_per_position(self) -> tuple[int, int]:
        """Return the size of a row's cache: its fixed bytes, and its bytes per position."""
        # Two lengths separate the part that grows with the length from the fixed part.
        two, four = (
            sum(tensor.nbytes for tensor in self._build_dummy_cache(1, n).tensors().values())
            for n in (2, 4)
        )
        bytes_per_position = (four - two) // 2
        return two - 2 * bytes_per_position, bytes_per_position

    @cached_property
    def cache_batch_dimensions(self) -> Dimensions:
        return find_cache_batch_dimensions(
            self._build_dummy_cache(2, 4), self._build_dummy_cache(3, 4)
        )

    @torch.no_grad()
    def _build_dummy_cache(self, rows: int, length: int) -> NativeCache:
        cache = NativeCache()
        self.compute_input_log_probs(
            torch.ones(rows, length, dtype=torch.long, device=self.device), 1, cache
        )
        return cache

    def digest(self) -> str:
        """Return the SHA-256 of the names, shapes and bytes of all weights in memory."""
        if self.seen is None and self.choices_kept_in is None:  # the caller may change the weights
            return digest_weights(self.model)
        if self._digest is None:
            self._digest = digest_weights(self.model)
        return self._digest

    def special_token_id(self, kind: str) -> int | None:
        token = getattr(self.model.config.get_text_config(decoder=True), f"{kind}_token_id", None)
        if isinstance(token, list | tuple):
            return next(iter(token), None)
        return token

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        contexts = contexts.to(self.device)
        model_input = self.prepend_soft_prompt(contexts, prompt)
        return self.activation.read(
            contexts, last, lambda: self.compute_input_log_probs(model_input, last)
        )

    def embedding_rows(self, count: int) -> Tensor:
        """Return the embeddings of the first `count` tokens as the model reads them, (count, d).

        Some families (Gemma, XGLM, BioGPT) multiply the matrix by a factor. Raise AuditError if the
        matrix has fewer than `count` rows.
        """
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        if count > len(weight):
            raise AuditError(
                f"expected a soft prompt of at most {len(weight)} rows (the embedding matrix), got "
                f"{count}"
            )
        rows: Tensor = self.embedding(torch.arange(count, device=self.device))
        return rows.detach().clone()

    def prepend_soft_prompt(self, tokens: Tensor, prompt: Tensor | None) -> Tensor:
        """Return the model's input: token ids (B, n) or, given a prompt, embeddings (B, P + n, d).

        Prompt rows are not tokens. Raise NotApplicable if a soft prompt is given but the model
        accepts only token ids.
        """
        if prompt is None:
            return tokens
        if "embeddings" not in self.capabilities:
            raise NotApplicable(f"needs a soft prompt; {self.name} is exact only with token ids")
        embeds = self.embedding(tokens)
        return torch.cat([prompt.to(embeds).expand(len(tokens), -1, -1), embeds], dim=1)

    def compute_input_log_probs(
        self, input_ids: Tensor, last: int, cache: Cache | NativeCache | None = None
    ) -> Tensor:
        """Return float32 log-probabilities (B, last, V) at the last positions of an input.

        `input_ids` is a result of `prepend_soft_prompt`. It continues the tokens in `cache`; None
        for an input without earlier tokens.
        """
        logits = self.compute_input_logits(input_ids, last, cache)
        if self._reads_hidden_states(input_ids, cache):
            return logits  # log-probabilities already
        return torch.log_softmax(logits, dim=-1)

    def _reads_hidden_states(self, input_ids: Tensor, cache: Cache | NativeCache | None) -> bool:
        return self.seen is not None and cache is None and not input_ids.is_floating_point()

    def compute_input_logits(
        self, input_ids: Tensor, last: int, cache: Cache | NativeCache | None = None
    ) -> Tensor:
        """Return float32 logits (B, last, V) at the last positions of an input.

        `input_ids` is a result of `prepend_soft_prompt`. It continues the tokens in `cache`; None
        for an input without earlier tokens. If the hidden state cache answers, the logits are
        normalised: they are log-probabilities. Raise AuditError if a logit is NaN.
        """
        if self.seen is not None and self._reads_hidden_states(input_ids, cache):
            return self.seen.log_probs(input_ids, last)
        if cache is None:
            return self.logits_after_cached_prefix(input_ids, last)
        return self.transformers_logits(input_ids, last, cache)

    def logits_after_cached_prefix(
        self,
        input_ids: Tensor,
        last: int,
        n_logits: int | None = None,
        layers: list[SlotLayer] | None = None,
    ) -> Tensor:
        """Return logits of whole texts, reading their common prefix from the cache.

        Args:
            input_ids: the texts, a result of `prepend_soft_prompt`.
            last: number of trailing positions to read.
            n_logits: number of trailing positions to return; None means `last`.
            layers: list to which layers with the texts' keys and values are appended; None to keep
                no keys and values.
        """
        n_cached, prefix_layers = self.copy_shared_prefix_layers(
            input_ids, last, input_ids.shape[1]
        )
        if layers is not None:
            layers += prefix_layers
        cache = None
        if n_cached or layers is not None:
            cache = Cache(layers=list(prefix_layers))
        return self.transformers_logits(
            input_ids[:, n_cached:], last if n_logits is None else n_logits, cache
        )

    def log_probs_at_positions(self, texts: Tensor, positions: Tensor, last: int) -> Tensor | None:
        """Return log-probabilities (B, last, V) of texts (B, n) with token positions (B, n).

        `last` is the number of trailing tokens whose next token is predicted. Return None if the
        model does not accept positions.
        """
        if not self.takes_positions:
            return None
        # Without a cache, transformers 5.23 keeps texts apart whose positions begin again at 0.
        extra: dict[str, Any] = {"position_ids": positions}
        if self._cache_name:
            extra["use_cache"] = True
        logits = self.model(input_ids=texts, **extra).logits[:, -last:].float()
        return torch.log_softmax(logits, dim=-1)

    def transformers_logits(
        self, input_ids: Tensor, last: int, cache: Cache | NativeCache | None
    ) -> Tensor:
        """Return the logits (B, last, V) of one plain transformers call.

        `input_ids` is a result of `prepend_soft_prompt` and continues the texts in `cache`.
        """
        native_cache = None
        if isinstance(cache, NativeCache):
            native_cache = cache
        extra: dict[str, Any] = {}
        if self._keeps_logits:
            extra["logits_to_keep"] = last
        if self._cache_name:
            # Without use_cache=False, models create a native cache in every call.
            extra |= {
                self._cache_name: native_cache.state if native_cache else cache,
                "use_cache": cache is not None,
            }
        if self.activation.offsets is not None:
            extra["alora_offsets"] = self.activation.offsets
        if self._needs_mask:
            extra["attention_mask"] = input_ids.new_ones(input_ids.shape[:2], dtype=torch.long)
        if isinstance(cache, PaddedCache | TreeCache):
            extra |= cache.mask_and_positions(input_ids.shape[1])
        traffic.rows += cache.n_sequences if isinstance(cache, TreeCache) else len(input_ids)
        traffic.tokens += len(input_ids) * input_ids.shape[1]
        name = "input_ids"
        if input_ids.is_floating_point():
            name = "inputs_embeds"
        with (
            Float32SingleQueryAttention()
            if input_ids.shape[1] == 1 and self._in_few_bits
            else nullcontext()
        ):
            output = self.model(**{name: input_ids}, **extra)
        if native_cache:
            native_cache.state = getattr(output, self._cache_name or "past_key_values", None)
        logits: Tensor = output.logits[:, -last:].float()
        check_logits_finite(logits, self.name)
        return logits


def make_hidden_state_cache(
    model: HuggingFaceModel, recent_bytes: int = RECENT_BYTES, max_bytes: int | None = None
) -> HiddenStateCache:
    """Return an empty cache that reads the model's texts; the model itself does not use it."""
    inner = unwrap_peft(model.model)
    body = inner.get_decoder()  # OPT calls it without the model around it
    if body is inner:  # Llama 4 names it otherwise than its prefix says
        body = getattr(inner, "model", inner)
    head = model.model.get_output_embeddings()
    read_texts = model.logits_after_cached_prefix
    return HiddenStateCache(body, head, read_texts, recent_bytes, max_bytes)
