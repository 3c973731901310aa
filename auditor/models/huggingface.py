"""A Hugging Face model as a `LanguageModel`: its rows stand on a preallocated cache, on its own, or
on none."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.activation import ActivatedTexts, Activation, Offsets
from auditor.models.base import LanguageModel, check_logits_finite, get_max_logits
from auditor.models.caches import Dimensions, NativeCache, find_cache_batch_dimensions
from auditor.models.configuration import (
    get_input_device,
    list_end_tokens,
    max_positions,
    unwrap_peft,
)
from auditor.models.decoding import Decoding, compute_log_sum_exp
from auditor.models.hidden_states import HiddenStateCache
from auditor.models.memory import BatchSizeLimit
from auditor.models.precision import Float32SingleQueryAttention, make_head_input_contiguous
from auditor.models.rows import Rows
from auditor.models.shared_prefix import SharedPrefixCache
from auditor.models.slot_cache import PaddedCache, SlotLayer, assign_slots
from auditor.models.weights import digest_weights

# as `HuggingFaceModel.logits`
Forward = Callable[[Tensor, int, Cache | NativeCache | None], Tensor]


# How decoding rows keep their past: keys and values in slots of ours; in whatever cache the model
# makes of its own, copied row by row; or not at all: each token reads its whole row. The fastest
# first, as the self-check tries them.
Served = Literal["slots", "cache", "recompute"]

_CACHE_NAMES = ("past_key_values", "cache_params", "state")  # what families call it


@dataclass
class ModelTraffic:
    """What was asked of models. rows: sequences, anew at each step; tokens: those that were read of
    them."""

    rows: int = 0
    tokens: int = 0


traffic = ModelTraffic()  # of this process


class HuggingFaceRows(Rows):
    """Rows of a Hugging Face causal LM, `width` sequences behind each that split with it.

    width: 1, or the parts of an ensemble that `forward` serves in the order (row, part). Logits are
    kept as they come:
    a distribution is written only where somebody reads it whole.
    """

    _logits: Tensor  # (rows, width, V)
    # (rows, width): what exp of them sums to, as a log, once it is known
    _total: Tensor | None = None
    _offsets: Offsets | None = None  # of an activated LoRA, for the sequences that are read next

    def __init__(
        self,
        model: HuggingFaceModel,
        prefixes: Tensor,
        length: int,
        prompt: Tensor | None,
        width: int = 1,
        forward: Forward | None = None,
    ) -> None:
        self.model, self.width = model, width
        self.forward = forward or model.logits_of_input
        self._start(prefixes, length, prompt)

    @abstractmethod
    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        """Reads the prefixes (rows, n), behind which `length` tokens will follow."""

    def _next_logits_of_tokens(
        self, tokens: Tensor, prompt: Tensor | None, cache: Cache | NativeCache | None
    ) -> Tensor:
        """(sequences, width, V): the logits behind tokens (sequences, n)."""
        if cache is None:
            self._offsets = self.model.activation.compute_offsets(tokens)
        return self._next_logits_of_input(
            self.model.input_behind_soft_prompt(tokens, prompt), cache
        )

    def _next_logits_of_input(self, read: Tensor, cache: Cache | NativeCache | None) -> Tensor:
        """As `_next_logits_of_tokens`, of tokens or embeddings, as `HuggingFaceModel.embed` gives
        them."""
        self._total = None
        with self.model.activation.apply_offsets(self._offsets):
            logits = self.forward(read.repeat_interleave(self.width, dim=0), 1, cache)
        return logits[:, 0].unflatten(0, (-1, self.width))

    def _sequence_indices(self, rows: Tensor) -> Tensor:
        """The sequences (rows x width,) behind these rows."""
        return (
            rows.unsqueeze(-1) * self.width + torch.arange(self.width, device=rows.device)
        ).flatten()

    def __len__(self) -> int:
        return len(self._logits)

    def log_probs(self) -> Tensor:
        """(rows, V); (rows, width, V) where a row has several parts."""
        if self._total is None or self._total.any():
            # Log-probabilities are logits whose total is 0: they are kept in the place of what
            # came.
            self._logits = torch.log_softmax(self._logits, dim=-1)
            self._total = self._logits.new_zeros(self._logits.shape[:-1])
        return self._logits if self.width > 1 else self._logits[:, 0]

    def draw(
        self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding
    ) -> tuple[Tensor, Tensor]:
        assert self.width == 1  # what is drawn of several parts is the defense's to say
        return decoding.draw(
            self._logits[:, 0],
            self._logit_indices(row_of_draw),
            uniforms[:, 0],
            self._log_normalisers()[:, 0],
        )

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        assert self.width == 1
        places = self._logit_indices(row_of_token)
        return self._logits[places, 0, tokens] - self._log_normalisers()[places, 0]

    def _logit_indices(self, rows: Tensor) -> Tensor:
        """Where the logits of these rows lie."""
        return rows

    def _log_normalisers(self) -> Tensor:
        if self._total is None:
            self._total = compute_log_sum_exp(self._logits.flatten(0, 1)).view(
                self._logits.shape[:-1]
            )
        return self._total


class SlotRows(HuggingFaceRows):
    """Rows on `SlotLayer`s; the logits are kept in slot order: putting them in row order would copy
    all of them."""

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        total = prefixes.shape[1] + length + (0 if prompt is None else len(prompt))
        self.slots = torch.arange(len(prefixes), device=self.model.device)
        self.texts, self.prompt = ActivatedTexts(self.model.activation, prefixes, length), prompt
        self._offsets = self.model.activation.compute_offsets(prefixes)
        # not `is`: a bound method is made anew each time
        alone = self.forward == self.model.logits_of_input
        before = (
            self.model.cached_prefix_logits_and_layers(prefixes, total)
            if alone and prompt is None
            else None
        )
        if before is not None:
            logits, self.layers = before
            self.cache, self._logits = Cache(layers=list(self.layers)), logits.unsqueeze(1)
            return
        read = self.model.input_behind_soft_prompt(prefixes, prompt)
        begun, self.layers = self.model.layers_with_shared_prefix(read, 1, total, alone)
        self.cache = Cache(layers=list(self.layers))
        self._logits = self._next_logits_of_input(read[:, begun:], self.cache)

    def log_probs(self) -> Tensor:
        distribution = super().log_probs()
        in_order = torch.equal(self.slots, torch.arange(len(self.slots), device=self.slots.device))
        return distribution if in_order else distribution[self.slots]

    def _logit_indices(self, rows: Tensor) -> Tensor:
        return self.slots[rows]

    def joined(self, others: Sequence[Rows]) -> Rows:
        """All slots end at one position; a mask leaves out the empty positions in front of the
        shorter ones."""
        parts = [self]
        for rows in others:
            assert isinstance(rows, SlotRows)  # of one model, which serves all its rows in one way
            parts.append(rows)
        filled = [rows.layers[0].filled for rows in parts]
        more = max(rows.layers[0].length - own for rows, own in zip(parts, filled, strict=True))
        new = copy.copy(self)  # shallow: all that holds keys, values or logits is set anew below
        new.layers = [
            SlotLayer.join_layers(same, more)
            for same in zip(*(rows.layers for rows in parts), strict=True)
        ]
        empty = [
            torch.full_like(rows.slots, max(filled) - own)
            for rows, own in zip(parts, filled, strict=True)
        ]
        new.cache = PaddedCache(new.layers, torch.cat(empty))
        new.slots = torch.arange(len(new.cache.empty), device=self.model.device)
        new._logits, new._total = torch.cat([rows._logits for rows in parts]), None
        return new

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        if self.model.activation and self.texts.advance(parents, tokens):
            # An invocation has just ended: its own tokens were read without the adapter.
            self._start(self.texts.tokens, self.texts.length, self.prompt)
            return
        slots, source, destination = assign_slots(parents, self.slots)
        if len(source):
            source, destination = (
                self._sequence_indices(source),
                self._sequence_indices(destination),
            )
            for layer in self.layers:
                layer.copy_slots(source, destination, len(slots) * self.width)
        if isinstance(self.cache, PaddedCache):
            # read before `self.slots` changes: of where parents were
            empty = self.cache.empty[self.slots[parents]]
            self.cache.empty = torch.empty_like(empty)
            self.cache.empty[slots] = empty
        self.slots = slots
        if self.model.activation:
            self._offsets = self.texts.compute_slot_offsets(slots)
        in_slots = torch.empty_like(tokens)
        in_slots[slots] = tokens
        self._logits = self._next_logits_of_tokens(in_slots.unsqueeze(-1), None, self.cache)


class CachedRows(HuggingFaceRows):
    """Rows on the cache that the model makes of its own; a row that splits is copied with all that
    it holds of it."""

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        self.cache = NativeCache()
        self._logits = self._next_logits_of_tokens(prefixes, prompt, self.cache)

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        if not torch.equal(parents, torch.arange(len(self), device=parents.device)):
            self.cache.select(self._sequence_indices(parents), self.model.cache_batch_dimensions)
        self._logits = self._next_logits_of_tokens(tokens.unsqueeze(-1), None, self.cache)


class RecomputedRows(HuggingFaceRows):
    """Rows of a model whose past no cache holds: each token reads its whole row again."""

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        self.tokens, self.prompt = prefixes, prompt
        self._recompute_row_logits()

    def _recompute_row_logits(self) -> None:
        """A few rows at a time: not every model can leave out the logits of what is past."""
        positions = self.tokens.shape[1] + (0 if self.prompt is None else len(self.prompt))
        step = max(
            1, get_max_logits(self.model.device) // (positions * self.width * self.model.vocab_size)
        )
        asked = BatchSizeLimit(step).run_pieces_within_memory(
            len(self.tokens),
            lambda some: self._next_logits_of_tokens(self.tokens[some], self.prompt, None),
        )
        self._logits = torch.cat([logits for _, logits in asked])

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)
        self._recompute_row_logits()


class HuggingFaceModel(LanguageModel):
    """Any Hugging Face causal LM (PEFT adapters included), in eval mode, parameters frozen.

    served: how its rows keep their past. embeddings: whether it may be asked by input embeddings,
    which soft prompts take; token ids are what it reads else. Which of these are right for a model,
    its self-check finds out.
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
        # in place: the caller's own model is frozen, too
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
        self.eos = list_end_tokens(model, config)
        self.embedding = model.get_input_embeddings()
        self.device = get_input_device(model, self.embedding)
        head = model.get_output_embeddings()
        # The hook stays on the model, which may be wrapped more than once.
        if head is not None and make_head_input_contiguous not in head._forward_pre_hooks.values():
            head.register_forward_pre_hook(make_head_input_contiguous)
        self.vocab_size = int(head.weight.shape[0]) if head is not None else int(config.vocab_size)
        self.family = f"{config.model_type} with {self.vocab_size:,} tokens"
        self._in_few_bits = self.device.type == "cpu" and model.dtype in (
            torch.float16,
            torch.bfloat16,
        )
        self._seen: HiddenStateCache | None = None
        self._digest: str | None = None  # once the weights are known to stay
        self.begins: SharedPrefixCache | None = None
        self.activation = Activation(model)
        # the same weights in a model of their own; None: not on disk
        self.load_again: Callable[[], Any] | None = None
        accepted = inspect.signature(unwrap_peft(model).forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)

    def enable_hidden_state_cache(self) -> None:
        """From now on a text that was read whole is not read again. Only for weights that nobody
        changes meanwhile."""
        if self.activation:  # what it makes of a text's beginning depends on what follows
            return
        body, head = unwrap_peft(self.model).base_model, self.model.get_output_embeddings()
        self._seen = HiddenStateCache(body, head, self.logits_after_cached_prefix)

    def read_ahead(
        self, texts: Sequence[Tokens], last: Sequence[int], begun: Sequence[int] | None = None
    ) -> None:
        if self._seen is not None:
            self._seen.read_ahead(texts, last, self.device, self.can_join_rows, begun)

    def forget_batch(self) -> None:
        if self._seen is not None:
            self._seen.forget_batch()

    def cached_prefix_logits_and_layers(
        self, prefixes: Tensor, length: int
    ) -> tuple[Tensor, list[SlotLayer]] | None:
        """As `HiddenStateCache.rows`, of what was read ahead."""
        return (
            None
            if self._seen is None
            else self._seen.logits_and_layers_behind_prefixes(prefixes, length)
        )

    def layers_with_shared_prefix(
        self, read: Tensor, last: int, length: int, shared: bool = True
    ) -> tuple[int, list[SlotLayer]]:
        """As `SharedPrefixCache.layers_holding_prefix`; empty ones where nothing is `shared`, or no
        cache is on."""
        if self.begins is None or not shared or read.requires_grad:
            return 0, [SlotLayer(length) for _ in range(self.n_layers)]
        return self.begins.layers_holding_prefix(read, last, length)

    def enable_shared_prefix_cache(self, **least: int) -> None:
        """From now on what texts begin with is read once. Only where the self-check has found that
        nothing changes."""
        # torch counts in `_version` what is written to a weight in place, but not through `.data`.
        weights = [*self.model.parameters()]
        self.begins = SharedPrefixCache(
            self._transformers_logits,
            self.n_layers,
            lambda: sum(weight._version for weight in weights),
            **least,
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
        return self.start_rows_as_served(prefixes, length, prompt)

    @torch.no_grad()
    def start_rows_as_served(
        self,
        prefixes: Tensor,
        length: int,
        prompt: Tensor | None,
        width: int = 1,
        forward: Forward | None = None,
    ) -> Rows:
        """Decoding rows as `served` says, `width` sequences behind each that `forward` answers."""
        return _ROWS[self.served](self, prefixes.to(self.device), length, prompt, width, forward)

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        fixed, each = (
            (0, 0) if self.served == "recompute" else self._cache_bytes_fixed_and_per_position
        )
        return super().row_bytes(positions, distribution) + fixed + positions * each

    @cached_property
    def _cache_bytes_fixed_and_per_position(self) -> tuple[int, int]:
        """What the cache holds of one row, in bytes: whatever its length, and for each position."""
        # Two lengths tell apart what grows with the length and what does not.
        two, four = (
            sum(held.nbytes for held in self._cache_of_dummy_pass(1, n).tensors().values())
            for n in (2, 4)
        )
        each = (four - two) // 2
        return two - 2 * each, each

    @cached_property
    def cache_batch_dimensions(self) -> Dimensions:
        return find_cache_batch_dimensions(
            self._cache_of_dummy_pass(2, 4), self._cache_of_dummy_pass(3, 4)
        )

    @torch.no_grad()
    def _cache_of_dummy_pass(self, rows: int, length: int) -> NativeCache:
        cache = NativeCache()
        self.log_probs_of_input(
            torch.ones(rows, length, dtype=torch.long, device=self.device), 1, cache
        )
        return cache

    def digest(self) -> str:
        """Of names, shapes and bytes of the weights in memory."""
        if self._seen is None and self.choices_kept_in is None:  # somebody may change them
            return digest_weights(self.model)
        if self._digest is None:
            self._digest = digest_weights(self.model)
        return self._digest

    def special_token_id(self, kind: str) -> int | None:
        token = getattr(self.model.config.get_text_config(decoder=True), f"{kind}_token_id", None)
        return next(iter(token), None) if isinstance(token, list | tuple) else token

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        contexts = contexts.to(self.device)
        read = self.input_behind_soft_prompt(contexts, prompt)
        return self.activation.read(contexts, last, lambda: self.log_probs_of_input(read, last))

    def embedding_rows(self, count: int) -> Tensor:
        """As the model reads them: the look-up itself scales them in some families (Gemma, XGLM,
        BioGPT)."""
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        if count > len(weight):
            raise AuditError(
                f"expected a soft prompt of at most {len(weight)} rows (the embedding matrix), got "
                f"{count}"
            )
        rows: Tensor = self.embedding(torch.arange(count, device=self.device))
        return rows.detach().clone()

    def input_behind_soft_prompt(self, tokens: Tensor, prompt: Tensor | None) -> Tensor:
        """What the model reads: the token ids (B, n) themselves, as everybody else gives it; behind
        a soft prompt embeddings, (B, P + n, d). Prompt rows are no tokens: never generated.

        Raises NotApplicable for a soft prompt before a model that reads token ids alone.
        """
        if prompt is None:
            return tokens
        if "embeddings" not in self.capabilities:
            raise NotApplicable(f"needs a soft prompt; {self.name} is right by token ids alone")
        embeds = self.embedding(tokens)
        return torch.cat([prompt.to(embeds).expand(len(tokens), -1, -1), embeds], dim=1)

    def log_probs_of_input(
        self, read: Tensor, last: int, cache: Cache | NativeCache | None = None
    ) -> Tensor:
        """(B, last, V) log-probabilities, float32. As `logits`."""
        return torch.log_softmax(self.logits_of_input(read, last, cache), dim=-1)

    def logits_of_input(
        self, read: Tensor, last: int, cache: Cache | NativeCache | None = None
    ) -> Tensor:
        """(B, last, V), float32. read: as `input_behind_soft_prompt` gives it, behind what the
        cache holds.

        Raises AuditError on NaN logits.
        """
        if self._seen is not None and cache is None and not read.is_floating_point():
            return self._seen.logits(read, last)
        return (
            self.logits_after_cached_prefix(read, last)
            if cache is None
            else self._transformers_logits(read, last, cache)
        )

    def logits_after_cached_prefix(
        self,
        read: Tensor,
        last: int,
        kept: int | None = None,
        layers: list[SlotLayer] | None = None,
    ) -> Tensor:
        """As `logits`, of whole texts, nothing of them remembered. kept: how many of the `last`
        positions, all of which are read, are answered for; None: all. layers: takes those that hold
        keys and values of the texts."""
        begun, own = self.layers_with_shared_prefix(read, last, read.shape[1])
        if layers is not None:
            layers += own
        cache = Cache(layers=list(own)) if begun or layers is not None else None
        return self._transformers_logits(read[:, begun:], last if kept is None else kept, cache)

    def logits_without_cache(self, texts: Tensor, last: int) -> Tensor:
        """Return what one call of transformers gives for whole texts (B, n), with nothing of ours:
        (B, last, V)."""
        return self._transformers_logits(texts, last, None)

    def log_probs_at_positions(self, texts: Tensor, positions: Tensor, last: int) -> Tensor | None:
        """Return what one call of transformers gives at these positions, (B, last, V)."""
        if not self._takes_positions:
            return None
        # Without a cache, transformers 5.23 keeps texts apart whose positions begin again at 0.
        extra: dict[str, Any] = {"use_cache": True} if self._cache_name else {}
        extra |= {"position_ids": positions}
        logits = self.model(input_ids=texts, **extra).logits[:, -last:].float()
        return torch.log_softmax(logits, dim=-1)

    def _transformers_logits(
        self, read: Tensor, last: int, cache: Cache | NativeCache | None
    ) -> Tensor:
        own = cache if isinstance(cache, NativeCache) else None
        extra: dict[str, Any] = {"logits_to_keep": last} if self._keeps_logits else {}
        if self._cache_name:
            # use_cache: where it is not said, models make a cache of their own for every call.
            extra |= {self._cache_name: own.state if own else cache, "use_cache": cache is not None}
        if self.activation.offsets is not None:
            extra["alora_offsets"] = self.activation.offsets
        if isinstance(cache, PaddedCache):
            extra |= cache.mask_and_positions(read.shape[1])
        traffic.rows += len(read)
        traffic.tokens += len(read) * read.shape[1]
        name = "inputs_embeds" if read.is_floating_point() else "input_ids"
        with (
            Float32SingleQueryAttention()
            if read.shape[1] == 1 and self._in_few_bits
            else nullcontext()
        ):
            output = self.model(**{name: read}, **extra)
        if own:
            own.state = getattr(output, self._cache_name or "past_key_values", None)
        logits: Tensor = output.logits[:, -last:].float()
        check_logits_finite(logits, self.name)
        return logits


_ROWS: Mapping[Served, Callable[..., Rows]] = {
    "slots": SlotRows,
    "cache": CachedRows,
    "recompute": RecomputedRows,
}
