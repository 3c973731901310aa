"""Run LoRA adapters of one base model as an ensemble in mixed batches, and load single adapters.

This module does not depend on privacy: defenses combine the parts' distributions.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from auditor.core.errors import AuditError, wrap_library_errors
from auditor.models.adapters import attach_adapter
from auditor.models.caches import NativeCache
from auditor.models.configuration import list_split_devices
from auditor.models.consistency import SEED, compute_largest_distance
from auditor.models.ensemble import Ensemble, EnsembleMemberRows
from auditor.models.huggingface import HuggingFaceModel, make_hidden_state_cache
from auditor.models.loading import read_adapter_base
from auditor.models.mixed_lora import (
    MixedLora,
    MixedLoraRouting,
    merge_lora_updates_within_memory,
)
from auditor.models.rows import Rows
from auditor.models.self_check_facts import compute_rounding_tolerance
from auditor.models.shards import (
    ENSEMBLE,
    WHOLE,
    find_control_adapter,
    read_ensemble_metadata,
    read_shard_record_list,
)
from auditor.models.slot_cache import SlotLayer, TreeCache

_CACHE_BYTES = 2**28  # keys and values of members that single draws queried
_STATE_BYTES = 2**28  # hidden states of texts that several models score
_TRIAL_TOKENS = 4
_TOKENS_AT_ONCE = 2**13  # read by members in one batch
# Initial values of LoRA's matrices that leave the weights of the base as they are.
_INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva")


class LoraEnsemble(Ensemble):
    """LoRA adapters on one public base; one forward pass can compute rows of different members.

    Args:
        public: the base model.
        adapters: folder of each member's adapter.
        unit: "record" or "user" if all data of one record or user trained the same member; "" if
            unknown.
    """

    public: HuggingFaceModel

    def __init__(self, public: HuggingFaceModel, adapters: Sequence[Path], unit: str = "") -> None:
        _require_single_device(public)
        self.public = public
        self.unit = unit
        self.size = len(adapters)
        self.shards = [read_shard_record_list(adapter) for adapter in adapters]
        self._routing = MixedLoraRouting()
        mixed = _replace_lora_layers(copy_sharing_weights(public.model), adapters, self._routing)
        self._model = _model_served_like(public, mixed, f"{public.name} ensemble")
        if public.served == "cache":
            # The mixed forward cannot serve a single row, so its cache cannot be measured.
            self._model.cache_batch_dimensions = public.cache_batch_dimensions
        self._check_rows_are_separate()
        # Several models that a run serves from these members score the same texts in turn.
        self._state_cache = make_hidden_state_cache(self._model, max_bytes=_STATE_BYTES)

    @torch.no_grad()
    def _check_rows_are_separate(self) -> None:
        """Raise AuditError if the public part answers otherwise beside a member than by itself.

        Some layers mix the tokens of all rows, or read weights that a mixed layer does not have.
        """
        noise = torch.Generator().manual_seed(SEED)
        text = torch.randint(self.public.vocab_size, (1, _TRIAL_TOKENS), generator=noise)
        expected = self.public.log_probs(text, _TRIAL_TOKENS)
        distance = math.inf
        with suppress(RuntimeError, AttributeError, IndexError):
            part = torch.tensor([1, 0], device=self._model.device)
            answers = self.log_probs(text.expand(2, -1), part, _TRIAL_TOKENS)
            distance = compute_largest_distance(answers[1:], expected)
        if distance > compute_rounding_tolerance(self.public.model, expected):
            raise AuditError(
                f"expected a base whose adapted layers read each row of a batch by itself, got "
                f"{self.public.name} ({self.public.model.config.model_type})"
            )

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        self._model.check_text_fits(prefixes.shape[1], length, prompt)
        self._model.can_share_slots = self.public.can_share_slots
        if self._model.served == "recompute":
            return super().start(prefixes, length, prompt=prompt)
        return self._model.start_served_rows(
            prefixes, length, prompt, 1 + self.size, self._logits_of_all_members
        )

    def _logits_of_all_members(
        self, input_ids: Tensor, last: int, cache: Cache | NativeCache | None
    ) -> Tensor:
        self._routing.part = self._routing.blocks = None
        self._routing.rows = len(input_ids)
        if isinstance(cache, TreeCache):
            self._routing.blocks = slice(None)
        return self._model.compute_input_logits(input_ids, last, cache)

    def log_probs(
        self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None
    ) -> Tensor:
        self._routing.route_rows(part)
        return self._model.compute_input_log_probs(
            self._model.prepend_soft_prompt(contexts.to(self._model.device), prompt), last
        )

    def distributions(
        self, contexts: Tensor, parts: Tensor, last: int, *, prompt: Tensor | None = None
    ) -> Tensor:
        self._routing.part = None
        self._routing.blocks = parts
        if torch.equal(parts, torch.arange(1 + self.size, device=parts.device)):
            self._routing.blocks = slice(None)  # an index would copy the weights of all members
        model_input = self._model.prepend_soft_prompt(contexts.to(self._model.device), prompt)
        # One block of rows after another, as `MixedLoraRouting.blocks` requires.
        blocks = model_input.repeat(len(parts), *(1,) * (model_input.ndim - 1))
        self._routing.rows = len(blocks)
        if prompt is None:
            part_of_row = parts.repeat_interleave(len(contexts)).tolist()
            distributions = self._state_cache.read_parts(blocks, part_of_row, last).log_softmax(-1)
        else:
            distributions = self._model.compute_input_log_probs(blocks, last)
        return distributions.unflatten(0, (len(parts), -1)).movedim(0, -2)

    def start_member_rows(
        self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None
    ) -> EnsembleMemberRows:
        if self._model.served != "slots":
            return super().start_member_rows(prefixes.to(self._model.device), length, prompt=prompt)
        return _CachedMemberRows(self, prefixes.to(self._model.device), length, prompt)

    def member_next_log_probs(self, input_ids: Tensor, part: Tensor, cache: Cache) -> Tensor:
        """Return the next-token log-probabilities (B, V) that part part[b] gives for each input b.

        `input_ids` are token ids (B, n) or embeddings (B, n, d) that continue the tokens in
        `cache`.
        """
        self._routing.route_rows(part)
        return self._model.compute_input_log_probs(input_ids, 1, cache)[:, 0]


class _CachedMemberRows(EnsembleMemberRows):
    """Decoding rows that cache the keys and values of each queried (row, part) pair in a slot.

    A part is a member of the ensemble, or the public model. A query reads only the positions that
    are not yet in the pair's slot. Pairs that start with the same tokens may share a slot until one
    of them is queried. If memory is full, pairs are not cached.
    """

    def __init__(
        self, ensemble: LoraEnsemble, prefixes: Tensor, length: int, prompt: Tensor | None
    ) -> None:
        super().__init__(ensemble, prefixes, prompt)
        self.lora, rows = ensemble, len(prefixes)
        # Positions of the prefix and the soft prompt, shared by all rows that grew from one prefix.
        self.shared = prefixes.shape[1] + (0 if prompt is None else len(prompt))
        self.pool = [SlotLayer(self.shared + length) for _ in range(ensemble._model.n_layers)]
        self.root = torch.arange(rows, device=prefixes.device)  # the prefix of each row
        # Slot of each (row, part); -1: none.
        self.slot = torch.full((rows, 1 + ensemble.size), -1, device=prefixes.device)
        # Number of positions of the slot that belong to the row.
        self.depth = torch.zeros_like(self.slot)
        self.users = self.slot.new_zeros(0)  # (slots,) number of pairs that use the slot

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        super().advance(parents, tokens)
        self.root, self.slot, self.depth = (
            self.root[parents],
            self.slot[parents],
            self.depth[parents],
        )
        self._count_users()

    def _count_users(self) -> None:
        self.users = torch.bincount(self.slot[self.slot >= 0], minlength=len(self.users))

    @torch.no_grad()
    def _query_pairs(self, row: Tensor, part: Tensor) -> Tensor:
        # A slot has one writer: a repeated pair is read once. Sorted by part, the pairs of a part
        # take one product in each layer.
        pairs, place = torch.unique(part * len(self.slot) + row, return_inverse=True)
        part = pairs // len(self.slot)
        row = pairs % len(self.slot)
        model_input = self.lora._model.prepend_soft_prompt(self.tokens, self.prompt)
        # Batches need one length: the number of missing positions is rounded up to a power of two,
        # which makes few batches.
        depth = self.depth[row, part]
        missing = torch.exp2((model_input.shape[1] - depth).double().log2().ceil()).long()
        begin = torch.where(
            depth == self.shared, depth, (model_input.shape[1] - missing).clamp_min(0)
        )
        # A second query before the row grows reads its last position again.
        begin = begin.clamp_max(model_input.shape[1] - 1)
        distribution: Tensor | None = None
        for first in begin.unique().tolist():
            indices = (begin == first).nonzero().squeeze(-1)
            for piece in indices.split(max(1, _TOKENS_AT_ONCE // (model_input.shape[1] - first))):
                log_probs = self._extend_member_caches(model_input, row[piece], part[piece], first)
                if distribution is None:
                    distribution = log_probs.new_empty(len(pairs), log_probs.shape[-1])
                distribution[piece] = log_probs
        assert distribution is not None
        return distribution[place]

    def _extend_member_caches(
        self, input_ids: Tensor, row: Tensor, part: Tensor, begin: int
    ) -> Tensor:
        """Return the next-token distribution of each pair (row[i], part[i]), of shape (pairs, V).

        `begin` is the first position to read; earlier positions come from the cache.
        """
        member_slots = self.slot[row, part]
        layers = []
        for pool in self.pool:
            layers.append(
                pool.copy_first_positions_of_slots(member_slots, begin, input_ids.shape[1])
            )
        distribution = self.lora.member_next_log_probs(
            input_ids[row, begin:], part, Cache(layers=list(layers))
        )
        self._keep_member_layers(layers, row, part)
        return distribution

    def _keep_member_layers(self, layers: list[SlotLayer], row: Tensor, part: Tensor) -> None:
        slot = self._exclusive_slots(layers[0], self.slot[row, part])
        indices = (slot >= 0).nonzero().squeeze(-1)
        row = row[indices]
        part = part[indices]
        slot = slot[indices]
        for pool, layer in zip(self.pool, layers, strict=True):
            pool.put_rows_into_slots(layer, indices, slot, len(self.users))
        new = self.slot[row, part] < 0
        self.slot[row, part], self.depth[row, part] = slot, layers[0].filled
        # Rows of the same prefix without a query of this member may read the prefix from this slot.
        row = row[new]
        part = part[new]
        slot = slot[new]
        # Shape (rows, pairs).
        is_mate = (self.root.unsqueeze(-1) == self.root[row]) & (self.slot[:, part] < 0)
        other, pair = is_mate.nonzero(as_tuple=True)
        self.slot[other, part[pair]], self.depth[other, part[pair]] = slot[pair], self.shared
        self._count_users()

    def _exclusive_slots(self, layer: SlotLayer, cached_slots: Tensor) -> Tensor:
        """Return, for each pair, a slot that no other pair uses.

        A pair that already has such a slot keeps it. A slot is -1 if memory is full.

        `cached_slots` holds the current slot of each pair, or -1.
        """
        # -1 (no slot) looks up slot 0; the comparison before excludes it.
        is_exclusive = cached_slots >= 0
        if len(self.users):
            is_exclusive &= self.users[cached_slots.clamp_min(0)] == 1
        free = (self.users == 0).nonzero().squeeze(-1)
        n_needed = int((~is_exclusive).sum())
        assert layer.keys is not None
        # Bytes of a position: keys and values of all layers, which have one size.
        position = 2 * len(self.pool) * layer.keys[0, :, 0].numel() * layer.keys.element_size()
        n_available = max(0, _CACHE_BYTES // (position * self.pool[0].length) - len(self.users))
        # Doubled, so that growth is rare.
        n_new = 0
        if n_needed > len(free):
            n_new = min(n_available, max(n_needed - len(free), len(self.users)))
        free = torch.cat(
            [free, torch.arange(len(self.users), len(self.users) + n_new, device=free.device)]
        )[:n_needed]
        self.users = torch.cat([self.users, self.users.new_zeros(n_new)])
        slots = torch.where(is_exclusive, cached_slots, -1)
        slots[(~is_exclusive).nonzero().squeeze(-1)[: len(free)]] = free
        return slots


def _replace_lora_layers(base: Any, adapters: Sequence[Path], routing: MixedLoraRouting) -> Any:
    """Load the adapters with PEFT, then replace each LoRA layer with one mixed layer."""
    if not adapters:
        raise AuditError("expected at least one ensemble member, got none")
    peft: Any = None
    updates = list[dict[str, tuple[Tensor, Tensor]]]()
    for index, path in enumerate(adapters):
        if not _leaves_base_unchanged(path):
            raise AuditError(
                f"expected plain LoRA adapters as ensemble members, got {str(path)!r}, which "
                "changes its base or is of another PEFT method"
            )
        name = f"member{index}"  # not only digits: PEFT searches for it in names of layers
        peft = attach_adapter(base, str(path), name, onto=peft)
        if updates:  # PEFT visits all its adapters for each further adapter
            peft.set_adapter(name)
            peft.delete_adapter(f"member{index - 1}")
        updates.append(_scaled_lora_matrices(peft, name))
        if unequal := sorted(updates[0].keys() ^ updates[-1].keys()):
            raise AuditError(
                f"expected the same plain LoRA layers in every member, but {unequal[0]} differs"
            )
    inner: nn.Module = peft.get_base_model()
    mixed: list[MixedLora] = []
    for name in updates[0]:
        pairs = zip(*(member[name] for member in updates), strict=True)
        a, b = (
            torch.stack([torch.zeros_like(matrices[0]), *matrices]).detach() for matrices in pairs
        )
        mixed.append(
            MixedLora(inner.get_submodule(name).get_submodule("base_layer"), a, b, routing)
        )
        inner.set_submodule(name, mixed[-1])
    merge_lora_updates_within_memory(mixed)
    return inner


def _scaled_lora_matrices(peft: Any, member: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a member's scaled LoRA matrices, (r, in) and (out, r), keyed by the base's layer name.

    `member` is the name of the adapter in `peft`. Raise AuditError if it is not a plain LoRA.
    """
    if any(getattr(config, "modules_to_save", None) for config in peft.peft_config.values()):
        raise AuditError("expected plain LoRA adapters as ensemble members, got saved modules")
    layers = list_plain_lora_layers(peft)
    matrices = {}
    for name, layer in layers.items():
        if (
            set(layer.lora_variant)
            or list(layer.lora_A) != [member]
            or any(layer.lora_bias.values())
        ):
            raise AuditError(
                f"expected the same plain LoRA layers in every member, but {name} differs"
            )
        b = layer.get_parameter(f"lora_B.{member}.weight") * layer.scaling[member]
        matrices[name] = layer.get_parameter(f"lora_A.{member}.weight").detach(), b.detach()
    return matrices


def list_plain_lora_layers(peft: Any) -> dict[str, Any]:
    """Return the linear layers that the adapters of a PEFT model adapt, keyed by name in the base.

    Raise AuditError if they adapt other layers, too.
    """
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {}
    base = peft.get_base_model()
    head = base.get_output_embeddings()
    for name, module in base.named_modules():
        if isinstance(module, LoraLinear) and module is not head:
            layers[name] = module
        elif isinstance(module, BaseTunerLayer):  # of embeddings, quantised layers, experts
            raise AuditError(
                "expected adapters of plain linear layers as ensemble members, got one that "
                f"adapts {name} ({type(module).__name__})"
            )
    return layers


def load_lora_ensemble(folder: Path, public: HuggingFaceModel) -> Ensemble:
    """Load the adapters in the sub-folders of `folder`, in name order, as members of an ensemble.

    Each must be an adapter of the model `public`. The control adapter (`find_control_adapter`),
    which is trained on all data, is not a member. Raise AuditError if there are no members.
    """
    if not folder.is_dir():
        raise AuditError(
            f"expected a folder of ensemble members, got {str(folder)!r}, which is no folder"
        )
    adapters = sorted(
        path.parent
        for path in folder.glob("[!.]*/adapter_config.json")
        if path.parent.name != WHOLE
    )
    unit, members = read_ensemble_metadata(folder)
    if not adapters:
        raise AuditError(f"expected LoRA adapters in sub-folders of {str(folder)!r}, found none")
    if members not in (None, len(adapters)):
        raise AuditError(
            f"expected the {members} members that {ENSEMBLE} in {str(folder)!r} lists, found "
            f"{len(adapters)}: the same `audit train` command continues where it was interrupted"
        )
    for adapter in adapters:
        _check_adapter_base_matches(adapter, public.name)
    with wrap_library_errors(f"cannot load the ensemble {str(folder)!r} on {public.name}"):
        return LoraEnsemble(public, adapters, unit)


def load_control_adapter(folder: Path, public: HuggingFaceModel) -> HuggingFaceModel:
    """Load the adapter that was trained on the records of all members of an ensemble together.

    It shows how much the whole data leak without the ensemble. `folder` is the folder of the
    members, and `public` is their base model. Raise AuditError if the adapter is missing or has a
    different base.
    """
    adapter = find_control_adapter(folder)
    if adapter is None:
        raise AuditError(
            f"expected the control of an ensemble in {str(folder / WHOLE)!r}, found no adapter "
            "there"
        )
    _check_adapter_base_matches(adapter, public.name)
    with wrap_library_errors(f"cannot load the adapter {str(adapter)!r} on {public.name}"):
        return load_adapter_model(public, adapter)


def load_adapter_model(public: HuggingFaceModel, adapter: Path) -> HuggingFaceModel:
    """Return the public model with one adapter; a plain LoRA shares the base's weights."""
    _require_single_device(public)
    base = copy_sharing_weights(public.model)
    if not _leaves_base_unchanged(adapter):
        base = copy.deepcopy(public.model)
    adapted = attach_adapter(base, str(adapter))
    return _model_served_like(public, adapted, f"{public.name} with one adapter")


def _leaves_base_unchanged(adapter: Path) -> bool:
    """Return whether an adapter is a LoRA that changes no weight of its base when it is loaded.

    Trained biases replace those of the base. PiSSA, OLoRA and others subtract their first update
    from its weights.
    """
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(str(adapter))
    return (
        config.peft_type == "LORA"
        and config.bias == "none"
        and config.layer_replication is None
        and config.init_lora_weights in _INITIAL_VALUES
    )


def _model_served_like(public: HuggingFaceModel, model: Any, name: str) -> HuggingFaceModel:
    # No separate self-check: the settings of the public model are right for its architecture with
    # adapters.
    embeddings = "embeddings" in public.capabilities
    return HuggingFaceModel(
        model, public.tokenizer, name, served=public.served, embeddings=embeddings
    )


def _require_single_device(public: HuggingFaceModel) -> None:
    """Raise AuditError if the public model is split over several devices."""
    if places := list_split_devices(public.model):
        raise AuditError(
            "expected the public model of an ensemble on one device, got one that --device-map put "
            f"on {', '.join(places)}: its members answer in one batch"
        )


def copy_sharing_weights(model: Any) -> Any:
    """Return a copy of the model's modules that shares the original's parameters and buffers."""
    # deepcopy treats the entries of its memo, by id, as copied already.
    return copy.deepcopy(model, {id(p): p for p in [*model.parameters(), *model.buffers()]})


def _check_adapter_base_matches(adapter: Path, public: str) -> None:
    """Raise AuditError if the adapter's base is not the public model."""
    if not is_adapter_of_base(adapter, public):
        base, _ = read_adapter_base(str(adapter)) or ("", None)
        raise AuditError(
            f"expected members trained from --public {public}, but {adapter.name} was trained from "
            f"{base!r}: give that model as --public"
        )


def is_adapter_of_base(adapter: Path, public: str) -> bool:
    """Return whether the adapter's base has the folder, the name or the weights of this model.

    An adapter that names no base was trained on a model without a name: nothing can be compared.
    """
    base, _ = read_adapter_base(str(adapter)) or ("", None)
    if not base or base == public:
        return True
    base_folder = Path(base)
    public_folder = Path(public)
    return (
        base_folder.is_dir()
        and public_folder.is_dir()
        and (
            base_folder.samefile(public_folder)
            or _digest_base_weights(base_folder) == _digest_base_weights(public_folder)
        )
    )


def _digest_base_weights(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
