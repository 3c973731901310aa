"""Language models as an attacker may query them, and decoding rows on a preallocated cache.

A model has capabilities, each optional: `draw` (sampled next tokens), `law` (next-token log-probabilities in nats),
`embeddings` (gradients for soft prompts). Sampling, scoring and tuning are written once on these. A defended model is a
`LanguageModel` that holds others. Knows nothing of attacks, secrets or files of results.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin

from auditor.caches import Dimensions, OwnCache, row_dimensions
from auditor.errors import AuditError, NotApplicable
from auditor.sampling import Decoding, by_shape, log_sum_exp

Forward = Callable[[Tensor, int, Cache | OwnCache | None], Tensor]  # as `HuggingFaceModel.logits`
# How decoding rows keep their past: keys and values in slots of ours; in whatever cache the model makes of its own,
# copied row by row; or not at all: each token reads its whole row.
Served = Literal["slots", "cache", "recompute"]
_CACHE_NAMES = ("past_key_values", "cache_params", "state")  # what families call it
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # what families call how many they have
# Logits held at once when scoring: 128 MiB of float32. On a CPU 32 MiB: larger blocks go back to the system when they
# are freed (glibc), and every use of new ones pays for fresh pages, measured at a quarter of the time.
_LAW_ELEMENTS = {"cpu": 2**23}
_LAW_ELEMENTS_ELSEWHERE = 2**25


class Rows(ABC):
    """The live state of incremental decoding: one row a distinct partial sequence.

    The model decides how a token is drawn from a row, so a randomised defense keeps its own randomness per draw.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def log_probs(self) -> Tensor:
        """(rows, V) next-token law in nats."""

    @abstractmethod
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """New row i continues old row parents[i] with tokens[i]. A parent may have several children, or none."""

    def draw(self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
        """One token a draw. row_of_draw: (draws,); uniforms: (draws, CHANNELS). Returns tokens and CDF nearness."""
        return decoding.draw(self.log_probs(), row_of_draw, uniforms[:, 0])

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        """(tokens,): the log-probability, in nats, of each token in its row's law."""
        return self.log_probs()[row_of_token, tokens]


@dataclass(frozen=True)
class Check:
    """What is claimed of one query, and what came true of it: how far the law is from that of each neighbour."""

    relation: str  # how neighbours differ: "add_remove"; or the step of the proof that was looked at
    order: float  # of the Renyi divergence; inf: pure
    claimed: float  # nats, the most that any two neighbours may differ by
    realised: Tensor  # (B, positions, neighbours) nats, float64, the larger of both directions


def law_elements(device: torch.device) -> int:
    """How many logits to hold at once when scoring on this device."""
    return _LAW_ELEMENTS.get(device.type, _LAW_ELEMENTS_ELSEWHERE)


class LanguageModel(ABC):
    """What is attacked. Shapes: contexts (B, n) token ids; prompt (P, d) soft prompt rows in embedding space."""

    capabilities: frozenset[str] = frozenset({"draw", "law", "embeddings"})
    name: str
    family: str = ""  # architecture and vocabulary, in words; "" where the model does not say
    vocab_size: int  # width of the law; may exceed the tokenizer's
    max_positions: int | None
    eos: tuple[int, ...]
    device: torch.device
    notes: tuple[str, ...] = ()  # what its user must know of how it was loaded and is served
    parts: int = 1  # laws behind each row: what a batch of rows costs in time and memory
    lead: tuple[int, ...] = ()  # tokens that it reads before every text

    @abstractmethod
    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, law: bool = True) -> Rows:
        """Rows standing behind `prefixes` (B, n), able to take `length` more tokens. law: `log_probs` will be read."""

    @abstractmethod
    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """(B, last, V): the law of the token after each of the last `last` positions, in nats, teacher-forced.

        Differentiable in `prompt`.
        """

    def tuning_log_probs(self, contexts: Tensor, last: int, prompt: Tensor, noise: torch.Generator) -> Tensor:
        """`log_probs` for tuning a prompt. A model of many parts may answer with an estimate from a few of them."""
        return self.log_probs(contexts, last, prompt=prompt)

    def row_bytes(self, positions: int, law: bool = True) -> int:
        """Memory that a decoding row of so many positions holds: its laws; a model with a cache adds its own.

        law: whether `log_probs` will be read of it, or only tokens drawn.
        """
        return 4 * self.vocab_size * self.parts

    @abstractmethod
    def embedding_rows(self, count: int) -> Tensor:
        """The first `count` rows of the embedding matrix, (count, d), detached: where soft prompts start."""

    def token_log_probs(self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None) -> Tensor:
        """(B, L): log-probability in nats of each suffix token behind its prefix, teacher-forced."""
        laws = self.teacher_forced(prefixes, suffixes, prompt=prompt)
        return torch.cat([law.gather(-1, own.unsqueeze(-1)).squeeze(-1) for own, law in laws])

    def teacher_forced(
        self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A few texts at a time, so that memory stays bounded: suffixes (b, L) and the law of each token (b, L, V)."""
        length = suffixes.shape[1]
        contexts = torch.cat([prefixes, suffixes[:, :-1]], dim=1)
        step = max(1, law_elements(self.device) // (length * self.vocab_size * self.parts))
        for start in range(0, len(contexts), step):
            yield suffixes[start : start + step], self.log_probs(contexts[start : start + step], length, prompt=prompt)

    def other_nll(self, texts: Sequence[tuple[int, ...]], seed: int, given: int = 1) -> Mapping[str, Sequence[float]]:
        """Summed nll (nats) of each text behind its `given` tokens as a paper counts it, by the name of the perplexity.

        Empty where there is no other way than the law's own, `perplexity_nll`.
        """
        return {}

    def check_claim(self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0) -> Sequence[Check]:
        """What is claimed of one token against what is realised, at the positions `at` among the last `last`.

        Teacher-forced on contexts (B, n). order: of the divergence, 0 for the one that is claimed. Realised
        divergences depend on the private data: they are for the auditor alone. Raises NotApplicable where nothing is
        claimed, AuditError for an order that is not controlled.
        """
        raise NotApplicable(f"{self.name} makes no claim about single answers")

    def claim_premises(self) -> Mapping[str, int]:
        """What the claim rests on beside the laws, in counts, as far as the model can tell.

        `shared_records`: private records in more than one shard, each of which voids a claim about a shard;
        `unlisted_shards`: members that do not say what they were trained on.
        """
        return {}

    def check_room(self, n_prefix: int, length: int, prompt: Tensor | None = None, lead: int = 0) -> None:
        """Refuses sequences longer than the positions the model has. lead: tokens before the prefix."""
        rows = 0 if prompt is None else len(prompt)
        needed = lead + n_prefix + length + rows
        if self.max_positions is not None and needed > self.max_positions:
            before = f"lead ({lead}) + " if lead else ""
            raise AuditError(
                f"{before}prefix ({n_prefix}) + suffix ({length}) + soft prompt ({rows}) = {needed} "
                f"tokens, but {self.name} has {self.max_positions} positions"
            )


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, preallocated for `length` positions; a row lives in a slot.

    DynamicCache concatenates the whole cache at every token and StaticLayer fixes the batch: here a token is written in
    place and rows may split.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._slots(key_states, len(key_states))
        self.values = self._slots(value_states, len(value_states))
        self.is_initialized = True

    def _slots(self, like: Tensor, count: int) -> Tensor:
        return like.new_empty(count, like.shape[1], self.length, like.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows, end = len(key_states), self.filled + key_states.shape[2]
        self.keys[:rows, :, self.filled : end] = key_states
        self.values[:rows, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def copy(self, source: Tensor, destination: Tensor, slots: int) -> None:
        """Copies slots, growing to `slots` of them (by doubling, so that growth is paid for rarely)."""
        assert self.keys is not None and self.values is not None
        first, last = int(destination[0]), int(destination[-1])
        # As where no row ends: the extra children follow all rows.
        beside = last - first + 1 == len(source) and int(source.max()) < first
        for name in ("keys", "values"):
            held = getattr(self, name)
            if slots > len(held):
                grown = self._slots(held, max(slots, 2 * len(held)))
                grown[: len(held), :, : self.filled] = held[:, :, : self.filled]
                setattr(self, name, grown)
                held = grown
            if beside:  # whole slots, straight to where they go: several times as fast as any index on the left
                torch.index_select(held[:first], 0, source, out=held[first : first + len(source)])
            else:
                held[destination, :, : self.filled] = held[source, :, : self.filled]

    def take(self, pool: SlotLayer, slots: Tensor, filled: int) -> None:
        """Starts with the first `filled` positions of these slots of another layer."""
        assert pool.keys is not None and pool.values is not None
        for name in ("keys", "values"):
            held = getattr(pool, name)
            own = self._slots(held, len(slots))
            own[:, :, :filled] = held[slots, :, :filled]
            setattr(self, name, own)
        self.filled, self.is_initialized = filled, True

    def put(self, layer: SlotLayer, rows: Tensor, slots: Tensor, capacity: int) -> None:
        """Takes rows of another layer into slots of this one, which grows to `capacity` of them."""
        assert layer.keys is not None and layer.values is not None
        for name in ("keys", "values"):
            held, theirs = getattr(self, name), getattr(layer, name)
            if held is None or len(held) < capacity:
                grown = self._slots(theirs, capacity)
                if held is not None:
                    grown[: len(held)] = held
                setattr(self, name, grown)
                held = grown
            held[slots, :, : layer.filled] = theirs[rows, :, : layer.filled]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.length


def assign_slots(parents: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where children live: a parent's first child stays in its parent's slot, only extra children are copied.

    parents: (children,) row of each child; slots: (rows,) slot of each row. Slots stay dense, 0..children-1.
    Returns (slot of each child, copied-from slots, copied-to slots).
    """
    count = len(parents)
    old = slots[parents]
    position = torch.arange(count, device=parents.device)
    first = torch.full((int(slots.max()) + 1,), count, device=parents.device)
    first.scatter_reduce_(0, old, position, "amin")
    stays = (first[old] == position) & (old < count)
    taken = torch.zeros(count, dtype=torch.bool, device=parents.device)
    taken[old[stays]] = True
    new = old.clone()
    new[~stays] = (~taken).nonzero().squeeze(-1)
    return new, old[~stays], new[~stays]


class HuggingFaceRows(Rows):
    """Rows of a Hugging Face causal LM, `width` sequences behind each that split with it.

    width: 1, or the parts of an ensemble that `forward` serves in the order (row, part). Logits are kept as they come:
    a law is written only where somebody reads it whole.
    """

    _logits: Tensor  # (rows, width, V)
    _total: Tensor | None = None  # (rows, width): what exp of them sums to, as a log, once it is known

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
        self.forward = forward or model.logits
        self._start(prefixes, length, prompt)

    @abstractmethod
    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        """Reads the prefixes (rows, n), behind which `length` tokens will follow."""

    def _ask(self, tokens: Tensor, prompt: Tensor | None, cache: Cache | OwnCache | None) -> Tensor:
        """(sequences, width, V): the logits behind tokens (sequences, n)."""
        self._total = None
        read = self.model.embed(tokens, prompt).repeat_interleave(self.width, dim=0)
        return self.forward(read, 1, cache)[:, 0].unflatten(0, (-1, self.width))

    def _parts(self, rows: Tensor) -> Tensor:
        """The sequences (rows x width,) behind these rows."""
        return (rows.unsqueeze(-1) * self.width + torch.arange(self.width, device=rows.device)).flatten()

    def __len__(self) -> int:
        return len(self._logits)

    def log_probs(self) -> Tensor:
        """(rows, V); (rows, width, V) where a row has several parts."""
        if self._total is None or self._total.any():
            self._logits = torch.log_softmax(self._logits, dim=-1)
            self._total = self._logits.new_zeros(self._logits.shape[:-1])
        return self._logits if self.width > 1 else self._logits[:, 0]

    def draw(self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
        assert self.width == 1  # what is drawn of several parts is the defense's to say
        return decoding.draw(self._logits[:, 0], self._places(row_of_draw), uniforms[:, 0], self._totals()[:, 0])

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        assert self.width == 1
        places = self._places(row_of_token)
        return self._logits[places, 0, tokens] - self._totals()[places, 0]

    def _places(self, rows: Tensor) -> Tensor:
        """Where the logits of these rows lie."""
        return rows

    def _totals(self) -> Tensor:
        if self._total is None:
            self._total = log_sum_exp(self._logits.flatten(0, 1)).view(self._logits.shape[:-1])
        return self._total


class SlotRows(HuggingFaceRows):
    """Rows on `SlotLayer`s; the logits are kept in slot order: putting them in row order would copy all of them."""

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        total = prefixes.shape[1] + length + (0 if prompt is None else len(prompt))
        self.layers = [SlotLayer(total) for _ in range(self.model.n_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.slots = torch.arange(len(prefixes), device=self.model.device)
        self._read(prefixes, prompt)

    def _read(self, tokens: Tensor, prompt: Tensor | None = None) -> None:
        self._logits = self._ask(tokens, prompt, self.cache)

    def log_probs(self) -> Tensor:
        law = super().log_probs()
        return law if self._in_order else law[self.slots]

    def _places(self, rows: Tensor) -> Tensor:
        return self.slots[rows]

    @property
    def _in_order(self) -> bool:
        return bool((self.slots == torch.arange(len(self.slots), device=self.slots.device)).all())

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        slots, source, destination = assign_slots(parents, self.slots)
        if len(source):
            source, destination = self._parts(source), self._parts(destination)
            for layer in self.layers:
                layer.copy(source, destination, len(slots) * self.width)
        self.slots = slots
        in_slots = torch.empty_like(tokens)
        in_slots[slots] = tokens
        self._read(in_slots.unsqueeze(-1))


class CachedRows(HuggingFaceRows):
    """Rows on the cache that the model makes of its own; a row that splits is copied with all that it holds of it."""

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        self.cache = OwnCache()
        self._logits = self._ask(prefixes, prompt, self.cache)

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        if not torch.equal(parents, torch.arange(len(self), device=parents.device)):
            self.cache.select(self._parts(parents), self.model.row_dimensions)
        self._logits = self._ask(tokens.unsqueeze(-1), None, self.cache)


class RecomputedRows(HuggingFaceRows):
    """Rows of a model whose past no cache holds: each token reads its whole row again."""

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        self.tokens, self.prompt = prefixes, prompt
        self._read()

    def _read(self) -> None:
        """A few rows at a time: not every model can leave out the logits of what is past."""
        positions = self.tokens.shape[1] + (0 if self.prompt is None else len(self.prompt))
        step = max(1, law_elements(self.model.device) // (positions * self.width * self.model.vocab_size))
        self._logits = torch.cat([self._ask(tokens, self.prompt, None) for tokens in self.tokens.split(step)])

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)
        self._read()


class HuggingFaceModel(LanguageModel):
    """Any Hugging Face causal LM (PEFT adapters included), in eval mode, parameters frozen.

    served: how its rows keep their past. embeddings: whether it may be asked by input embeddings, which soft prompts
    take; token ids are what it reads else. Which of these are right for a model, its self-check finds out.
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
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.notes = notes
        self.served: Served = served
        if not embeddings:
            self.capabilities = self.capabilities - {"embeddings"}
        config = model.config.get_text_config(decoder=True)
        self.n_layers = int(config.num_hidden_layers)
        self.max_positions = positions(model)
        self.eos = _ends(model, config)
        self.device = next(model.parameters()).device
        self.embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self.vocab_size = int(head.weight.shape[0]) if head is not None else int(config.vocab_size)
        self.family = f"{config.model_type} with {self.vocab_size:,} tokens"
        accepted = inspect.signature(_plain(model).forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, law: bool = True) -> Rows:
        self.check_room(prefixes.shape[1], length, prompt)
        return self.rows(prefixes, length, prompt)

    @torch.no_grad()
    def rows(
        self, prefixes: Tensor, length: int, prompt: Tensor | None, width: int = 1, forward: Forward | None = None
    ) -> Rows:
        """Decoding rows as `served` says, `width` sequences behind each that `forward` answers."""
        return _ROWS[self.served](self, prefixes.to(self.device), length, prompt, width, forward)

    def row_bytes(self, positions: int, law: bool = True) -> int:
        fixed, each = (0, 0) if self.served == "recompute" else self._cache_bytes
        return super().row_bytes(positions, law) + fixed + positions * each

    @cached_property
    def _cache_bytes(self) -> tuple[int, int]:
        """What the cache holds of one row, in bytes: whatever its length, and for each position."""
        few, more = 2, 4
        held = [sum(tensor.nbytes for tensor in self._probe(1, n).tensors().values()) for n in (few, more)]
        each = (held[1] - held[0]) // (more - few)
        return held[0] - few * each, each

    @cached_property
    def row_dimensions(self) -> Dimensions:
        return row_dimensions(self._probe(2, 4), self._probe(3, 4))

    @torch.no_grad()
    def _probe(self, rows: int, length: int) -> OwnCache:
        """The cache behind so many rows of so many tokens."""
        cache = OwnCache()
        self.forward(torch.ones(rows, length, dtype=torch.long, device=self.device), 1, cache)
        return cache

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.forward(self.embed(contexts.to(self.device), prompt), last)

    def embedding_rows(self, count: int) -> Tensor:
        """As the model reads them: the look-up itself scales them in some families (Gemma, XGLM, BioGPT)."""
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        if count > len(weight):
            raise AuditError(
                f"expected a soft prompt of at most {len(weight)} rows (the embedding matrix), got {count}"
            )
        rows: Tensor = self.embedding(torch.arange(count, device=self.device))
        return rows.detach().clone()

    def embed(self, tokens: Tensor, prompt: Tensor | None) -> Tensor:
        """What the model reads: the token ids (B, n) themselves, as everybody else gives it; behind a soft prompt
        embeddings, (B, P + n, d). Prompt rows are no tokens: never generated.

        Raises NotApplicable for a soft prompt before a model that reads token ids alone.
        """
        if prompt is None:
            return tokens
        if "embeddings" not in self.capabilities:
            raise NotApplicable(f"needs a soft prompt; {self.name} is right by token ids alone")
        embeds = self.embedding(tokens)
        return torch.cat([prompt.to(embeds).expand(len(tokens), -1, -1), embeds], dim=1)

    def forward(self, read: Tensor, last: int, cache: Cache | OwnCache | None = None) -> Tensor:
        """(B, last, V) log-probabilities, float32. As `logits`."""
        return torch.log_softmax(self.logits(read, last, cache), dim=-1)

    def logits(self, read: Tensor, last: int, cache: Cache | OwnCache | None = None) -> Tensor:
        """(B, last, V), float32. read: as `embed` gives it, behind what the cache holds.

        Raises AuditError on NaN logits.
        """
        own = cache if isinstance(cache, OwnCache) else None
        extra: dict[str, Any] = {"logits_to_keep": last} if self._keeps_logits else {}
        if self._cache_name:
            extra |= {self._cache_name: own.held if own else cache, "use_cache": cache is not None}
        name = "inputs_embeds" if read.is_floating_point() else "input_ids"
        output = self.model(**{name: read}, **extra)
        if own:
            own.held = getattr(output, self._cache_name or "past_key_values", None)
        logits: Tensor = output.logits[:, -last:].float()
        most = logits.detach().amax(-1)  # NaN where any is; where the law would be, too, for infinite ones
        if not torch.isfinite(most).all():
            raise AuditError(
                f"expected finite logits, but {self.name} returned NaN: the weights or the dtype are broken"
            )
        return logits


_ROWS: Mapping[Served, Callable[..., Rows]] = {
    "slots": SlotRows,
    "cache": CachedRows,
    "recompute": RecomputedRows,
}


def _plain(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def positions(model: Any) -> int | None:
    """How many tokens fit; None where nothing limits them.

    RoBERTa counts its positions from behind the padding id, and a tuned prompt stands in front: both cost some of them.
    """
    plain = _plain(model)
    config = plain.config.get_text_config(decoder=True)
    limit: int | None = next((n for name in _POSITIONS if (n := getattr(config, name, None)) is not None), None)
    if limit is None or limit <= 0:  # XLNet has -1
        return None
    table = getattr(getattr(plain.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    tuned = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None)
    return limit - (0 if padding is None else padding + 1) - (tuned or 0)


def _ends(model: Any, config: Any) -> tuple[int, ...]:
    """Every end-of-text token that the configuration or the generation configuration names: chat models have many."""
    named: dict[int, None] = {}
    for source in (config, getattr(model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        named |= dict.fromkeys([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(named)


def perplexity_nll(
    model: LanguageModel, texts: Sequence[tuple[int, ...]], batch_size: int = 32
) -> Iterator[tuple[float, int]]:
    """(summed nll in nats, predicted tokens) of each text under the model's law; the first token is given."""
    results: dict[int, tuple[float, int]] = {}
    for batch in by_shape([(1, len(text)) for text in texts], batch_size):
        tokens = torch.tensor([texts[i] for i in batch], device=model.device)
        with torch.no_grad():
            scores = model.token_log_probs(tokens[:, :1], tokens[:, 1:])
        for i, nll in zip(batch, (-scores.double().sum(-1)).tolist(), strict=True):
            results[i] = (nll, tokens.shape[1] - 1)
    yield from (results[i] for i in range(len(texts)))
