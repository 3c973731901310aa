"""Train several LoRA adapters of one base in one forward pass, each on its own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from auditor.models.consistency import compute_largest_distance
from auditor.models.lora import copy_sharing_weights
from auditor.models.mixed_lora import MixedLora, MixedLoraRouting
from auditor.models.self_check_facts import compute_rounding_tolerance
from auditor.training import loss_masks

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

_TRIAL_SEED = 20_240_229  # of the trial's random numbers: any number
# Standard deviation of the trial's updates, as of weights: with five times as much, a deep model
# amplifies a GPU's rounding.
_TRIAL_SPREAD = 0.02


def compute_losses_separately(adapters: Sequence[Any], rows: Sequence[Tensor]) -> Tensor:
    """Return the loss of each adapter, (adapters,), with one forward pass per adapter.

    A loss is the mean negative log-likelihood per token, in nats, of rows[i] (b_i, n) under the
    PEFT model adapters[i].
    """
    pairs = zip(adapters, rows, strict=True)
    return torch.stack([compute_row_nlls(adapter, part).mean() for adapter, part in pairs])


class JointAdapterTraining:
    """Base model that computes batch rows of several adapters in one forward pass.

    `like` is a PEFT model with adapters on the layers to adapt.
    """

    def __init__(self, base: Any, like: Any) -> None:
        self._routing = MixedLoraRouting()
        self.model = copy_sharing_weights(base).eval()
        self._mixed_layers = {}
        self._layers_by_adapter: WeakKeyDictionary[Any, dict[str, LoraLinear]] = WeakKeyDictionary()
        empty = torch.empty(0)
        for name in list_lora_layers(like):
            mixed = MixedLora(self.model.get_submodule(name), empty, empty, self._routing)
            self._mixed_layers[name] = mixed
            self.model.set_submodule(name, mixed)

    def compute_losses_jointly(self, adapters: Sequence[Any], rows: Sequence[Tensor]) -> Tensor:
        """Return the losses of `compute_losses_separately` from one forward pass.

        The gradient of their sum with respect to an adapter is that of the adapter's own loss.
        """
        counts = list(map(len, rows))
        self.route_adapter_rows(adapters, counts)
        nlls = compute_row_nlls(self.model, torch.cat(list(rows)))
        return torch.stack([part.mean() for part in nlls.split(counts)])

    def route_adapter_rows(self, adapters: Sequence[Any], counts: Sequence[int]) -> None:
        """Route the next forward pass: the first counts[0] rows go to adapters[0], and so on."""
        adapter_layers = list(map(self._get_lora_layers, adapters))
        device = self.model.device
        half = None
        if torch.is_autocast_enabled(device.type):
            half = torch.get_autocast_dtype(device.type)
        for name, mixed in self._mixed_layers.items():
            # Stacked again in each forward pass, so that gradients reach each adapter's own
            # weights: (adapters, rank, in) and (adapters, out, rank).
            layers = [by_name[name] for by_name in adapter_layers]
            mixed.a = torch.stack(
                [layer.get_parameter("lora_A.default.weight") for layer in layers],
            )
            mixed.b = torch.stack(
                [layer.get_parameter("lora_B.default.weight") for layer in layers],
            )
            # LoRA's alpha / rank, the same for all adapters of one recipe.
            mixed.b = mixed.b * layers[0].scaling["default"]
            if half is not None:
                mixed.a = mixed.a.to(half)
                mixed.b = mixed.b.to(half)
        self._routing.part = torch.repeat_interleave(torch.tensor(counts, device=device))
        self._routing.rows = sum(counts)

    def _get_lora_layers(self, adapter: Any) -> dict[str, LoraLinear]:
        """Return the adapter's layers from a cache.

        A search through all modules would take as long as an optimizer step.
        """
        if adapter not in self._layers_by_adapter:
            self._layers_by_adapter[adapter] = list_lora_layers(adapter)
        return self._layers_by_adapter[adapter]


def list_lora_layers(adapter: Any) -> dict[str, LoraLinear]:
    """Return the layers that a PEFT model adapts, keyed by their names in its base."""
    from peft.tuners.lora import Linear as LoraLinear

    modules = adapter.get_base_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLinear)}


def compute_row_nlls(model: Any, rows: Tensor) -> Tensor:
    """Return each row's mean negative log-likelihood over the tokens in its loss, (b,) nats.

    `rows` holds token sequences (b, n). The first token of a row never counts.
    """
    labels = loss_masks.make_row_labels(rows)
    input_ids = loss_masks.remove_row_loss_masks(rows)
    return loss_masks.compute_mean_learnt_nlls(model, labels, input_ids=input_ids, use_cache=False)


def make_joint_training_base(base: Any, adapter: Callable[[], Any]) -> JointAdapterTraining | None:
    """Return a base for joint training of such adapters; None if batch rows affect each other.

    `adapter` makes an adapter on a new base of its own. A trial runs two random adapters, jointly
    and separately, and compares the distributions. These differ if a layer mixes the tokens of all
    rows (experts), or if a kernel reads the weights without calling the layers.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_TRIAL_SEED)
        adapters = [adapter().eval(), adapter().eval()]
        joint_base = JointAdapterTraining(base, adapters[0])
        for model in adapters:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    nn.init.normal_(parameter, std=_TRIAL_SPREAD)
        vocab_size = base.get_input_embeddings().num_embeddings
        rows = torch.randint(vocab_size, (3, 8)).to(base.device)
        parts = rows.split([1, 2])
        expected = torch.cat([adapters[i](input_ids=part).logits for i, part in enumerate(parts)])
        joint_base.route_adapter_rows(adapters, [1, 2])
        try:
            logits = joint_base.model(input_ids=rows).logits
        except (RuntimeError, AttributeError, IndexError):
            # Raised by torch and modules that cannot use the mixed layers.
            return None
        distance = compute_largest_distance(logits.log_softmax(-1), expected.log_softmax(-1))
        if distance <= compute_rounding_tolerance(base, expected):
            return joint_base
        return None
