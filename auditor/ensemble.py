"""A public model and the private members beside it, asked together or one member at a time.

Part 0 is the public model, parts 1..N are the members. LoRA members of one base share its weights and are served in
mixed batches. Knows nothing of privacy: what is done with the parts' laws is the defense's business.
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.cache_utils import Cache

from auditor.errors import AuditError
from auditor.models import HuggingFaceModel, HuggingFaceRows, LanguageModel, Rows


class Ensemble(ABC):
    """A public model and `size` private members with one vocabulary."""

    public: LanguageModel
    size: int
    unit: str = ""  # what lies whole in one shard: "record", "user"; "": it does not say
    shards: Sequence[Collection[str] | None] | None = None  # names of each member's records; None: it does not say

    def shard_counts(self) -> dict[str, int]:
        """`shared_records`: how many records more than one shard has; `unlisted_shards`: members that do not say."""
        shards = self.shards or [None] * self.size
        seen = Counter(record for shard in shards if shard is not None for record in set(shard))
        shared = sum(count > 1 for count in seen.values())
        return {"shared_records": shared, "unlisted_shards": sum(shard is None for shard in shards)}

    @abstractmethod
    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        """Rows whose `log_probs` are those of every part, (rows, 1 + size, V)."""

    @abstractmethod
    def log_probs(self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """(B, last, V): context b answered by part[b] alone (0: public). Differentiable in `prompt`."""


class ModelEnsemble(Ensemble):
    """Members that are models of their own: any kind, one forward each."""

    def __init__(self, public: LanguageModel, members: Sequence[LanguageModel]) -> None:
        for member in members:
            if member.vocab_size != public.vocab_size:
                raise AuditError(
                    f"expected members with the public model's vocabulary of {public.vocab_size}, "
                    f"but {member.name} has {member.vocab_size}"
                )
        self.public = public
        self.parts = (public, *members)
        self.size = len(members)

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        return _Together([part.start(prefixes, length, prompt=prompt) for part in self.parts])

    def log_probs(self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        order = torch.argsort(part, stable=True)
        parts, counts = torch.unique_consecutive(part[order], return_counts=True)
        chunks = contexts[order].split(counts.tolist())
        laws = [
            self.parts[int(p)].log_probs(chunk, last, prompt=prompt) for p, chunk in zip(parts, chunks, strict=True)
        ]
        return torch.cat(laws)[torch.argsort(order)]


class _Together(Rows):
    """Rows of several models that always split alike."""

    def __init__(self, rows: list[Rows]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0])

    def log_probs(self) -> Tensor:
        return torch.stack([rows.log_probs() for rows in self.rows], dim=1)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        for rows in self.rows:
            rows.advance(parents, tokens)


class LoraEnsemble(Ensemble):
    """LoRA adapters on one base, which is the public model: one forward serves rows of different members."""

    def __init__(self, public: HuggingFaceModel, adapters: Sequence[Path], unit: str = "") -> None:
        self.public, self.unit = public, unit
        self.size = len(adapters)
        self.shards = [read_shard(adapter) for adapter in adapters]
        self._routing = _Routing()
        shared = {id(p): p for p in [*public.model.parameters(), *public.model.buffers()]}
        base = copy.deepcopy(public.model, shared)  # new modules over the same weights: the public model stays as it is
        self._model = HuggingFaceModel(_mix(base, adapters, self._routing), public.tokenizer, f"{public.name} ensemble")

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        self._model.check_room(prefixes.shape[1], length, prompt)
        with torch.no_grad():
            prefixes = prefixes.to(self._model.device)
            return HuggingFaceRows(self._model, prefixes, length, prompt, 1 + self.size, self._every)

    def _every(self, embeds: Tensor, last: int, cache: Cache | None) -> Tensor:
        self._routing.segments = None
        return self._model.forward(embeds, last, cache)

    def log_probs(self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        order = torch.argsort(part, stable=True)
        parts, counts = torch.unique_consecutive(part[order], return_counts=True)
        self._routing.segments = list(zip(parts.tolist(), counts.tolist(), strict=True))
        law = self._model.forward(self._model.embed(contexts[order].to(self._model.device), prompt), last)
        return law[torch.argsort(order)]


class _Routing:
    """Which part serves which rows of the batch: (part, rows) segments in order; None: every part, interleaved."""

    segments: list[tuple[int, int]] | None = None


class _MixedLora(nn.Module):
    """A linear layer with the low-rank updates of all members: a (1 + N, r, in), b (1 + N, out, r), part 0 all zero."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, routing: _Routing) -> None:
        super().__init__()
        self.base, self.routing = base, routing
        self.a, self.b = nn.Parameter(a, requires_grad=False), nn.Parameter(b, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, n, in) -> (rows, n, out)."""
        y = self.base(x)
        if self.routing.segments is None:
            parts = len(self.a)
            blocks = x.unflatten(0, (-1, parts)).transpose(0, 1).flatten(1, 2)  # (parts, rows * n, in)
            delta = torch.bmm(torch.bmm(blocks, self.a.mT), self.b.mT)
            return y + delta.unflatten(1, (-1, x.shape[1])).transpose(0, 1).flatten(0, 1)
        done, start = [], 0
        for part, count in self.routing.segments:
            mine = slice(start, start + count)
            done.append(y[mine] if part == 0 else y[mine] + (x[mine] @ self.a[part].mT) @ self.b[part].mT)
            start += count
        return torch.cat(done)


def _mix(base: Any, adapters: Sequence[Path], routing: _Routing) -> Any:
    """Loads the adapters with PEFT, then replaces each LoRA layer by one that serves all members in one batch."""
    if not adapters:
        raise AuditError("expected at least one ensemble member, got none")
    peft = PeftModel.from_pretrained(base, str(adapters[0]), adapter_name="0")
    for index, path in enumerate(adapters[1:], start=1):
        peft.load_adapter(str(path), adapter_name=str(index))
    if any(
        config.peft_type != "LORA" or getattr(config, "modules_to_save", None) for config in peft.peft_config.values()
    ):
        raise AuditError("expected plain LoRA adapters as ensemble members, got another PEFT method or saved modules")
    inner: nn.Module = peft.get_base_model()
    layers = {name: module for name, module in inner.named_modules() if isinstance(module, LoraLinear)}
    for name, layer in layers.items():
        if set(layer.lora_variant) or len(layer.lora_A) != len(adapters):
            raise AuditError(f"expected the same plain LoRA layers in every member, but {name} differs")
        names = [str(index) for index in range(len(adapters))]
        a = torch.stack([layer.get_parameter(f"lora_A.{n}.weight") for n in names])
        b = torch.stack([layer.get_parameter(f"lora_B.{n}.weight") * layer.scaling[n] for n in names])
        a, b = (torch.cat([torch.zeros_like(w[:1]), w]).detach() for w in (a, b))
        inner.set_submodule(name, _MixedLora(layer.base_layer, a, b, routing))
    return inner


def load_ensemble(folder: Path, public: HuggingFaceModel) -> Ensemble:
    """The members below `folder`, one sub-folder each, in name order: LoRA adapters of the public model.

    Raises AuditError when there is none.
    """
    if not folder.is_dir():
        raise AuditError(f"expected a folder of ensemble members, got {str(folder)!r}, which is no folder")
    adapters = sorted(config.parent for config in folder.glob("[!.]*/adapter_config.json"))
    unit, members = read_privacy(folder)
    if not adapters:
        raise AuditError(f"expected LoRA adapters in sub-folders of {str(folder)!r}, found none")
    if members not in (None, len(adapters)):
        raise AuditError(
            f"expected the {members} members that {_PRIVACY} in {str(folder)!r} tells of, found {len(adapters)}: "
            "the same audit train goes on where it was interrupted"
        )
    for adapter in adapters:
        _require_base(adapter, public.name)
    try:
        return LoraEnsemble(public, adapters, unit)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AuditError(f"cannot load the ensemble {str(folder)!r} on {public.name}: {reason}") from error


# --- what members say of themselves -----------------------------------------------------------------------------------

_SHARD, _PRIVACY = "shard.json", "privacy.json"
_UNITS = ("record", "user")


def write_privacy(folder: Path, *, unit: str, members: int) -> None:
    """Says in an ensemble's folder what lies whole in one shard, and how many members there will be."""
    promise = "none of its own: the members are private, and --defense pmixed promises something of its draws"
    record = {"method": "pmixed", "unit": unit, "unit_of_protection": "shard", "members": members, "promise": promise}
    (folder / _PRIVACY).write_text(json.dumps(record, indent=1) + "\n")


def read_privacy(folder: Path) -> tuple[str, int | None]:
    """The unit and number of members that `write_privacy` wrote; "" and None where nothing was.

    Raises AuditError for another form.
    """
    path = folder / _PRIVACY
    if not path.is_file():
        return "", None
    try:
        record = json.loads(path.read_text())
        unit, members = record["unit"], record["members"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise AuditError(f"expected the unit and members of an ensemble in {str(path)!r}, got {error!r}") from error
    if unit not in _UNITS or type(members) is not int:
        raise AuditError(f"expected {str(path)!r} to name a unit in {_UNITS} and a number of members, got {record}")
    return unit, members


def record_names(texts: Iterable[str]) -> list[str]:
    """Records by the SHA-256 of their text, each once: enough to see that shards are disjoint."""
    return sorted({hashlib.sha256(text.encode()).hexdigest() for text in texts})


def write_shard(member: Path, texts: Iterable[str]) -> None:
    """Says in a member's folder which records it was trained on, by name; readable by its owner only."""
    path = member / _SHARD
    path.touch(mode=0o600)
    path.write_text(json.dumps({"records": record_names(texts)}))


def read_shard(member: Path) -> list[str] | None:
    """The names that `write_shard` wrote; None where nothing was written. Raises AuditError for another form."""
    path = member / _SHARD
    if not path.is_file():
        return None
    try:
        names = json.loads(path.read_text())["records"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise AuditError(f'expected {{"records": [...]}} in {str(path)!r}, got {error!r}') from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AuditError(f'expected {{"records": [...]}} in {str(path)!r}, with the records\' names as text')
    return names


def _require_base(adapter: Path, public: str) -> None:
    """Refuses a member of another base: the same folder, the same name or the same weights are the same base."""
    try:
        base = json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError, OSError) as error:
        raise AuditError(f"cannot read the adapter {str(adapter)!r}: {error}") from error
    if not base or base == public:  # trained on a model without a name: nothing to compare
        return
    own, given = Path(base), Path(public)
    if own.is_dir() and given.is_dir() and (own.samefile(given) or _weights(own) == _weights(given)):
        return
    raise AuditError(
        f"expected members trained from --public {public}, but {adapter.name} was trained from {base!r}: "
        "give that model as --public"
    )


def _weights(folder: Path) -> dict[str, str]:
    """Digest of each weight file by name."""
    found = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    digests = {}
    for path in found:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
