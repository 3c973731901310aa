"""Several LoRA adapters of one base in one forward, each in training on rows of its own.

Knows PEFT's layers and one loss; neither whose records the rows are nor what is done with the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from auditor.models.consistency import largest_rms_log_prob_distance
from auditor.models.lora import MixedLora, MixedLoraRouting, copy_sharing_weights
from auditor.models.self_check_facts import rounding_tolerance
from auditor.training import loss_masks

_SEED = 20_240_229  # of a trial's random numbers: any number
_SPREAD = 0.02  # of its updates, as of weights: five times as much makes a deep model multiply what a GPU rounds


def adapter_losses_one_by_one(adapters: Sequence[Any], rows: Sequence[Tensor]) -> Tensor:
    """(adapters,) mean nll, nats a token, of rows[i] (b_i, n) by the PEFT model adapters[i]: a forward each."""
    return torch.stack([mean_training_nll_of_each_row(*pair).mean() for pair in zip(adapters, rows, strict=True)])


class JointAdapterTraining:
    """A base through which rows of several adapters pass in one forward; `like` tells which layers are adapted."""

    def __init__(self, base: Any, like: Any) -> None:
        self._routing = MixedLoraRouting()
        self.model = copy_sharing_weights(base).eval()
        self._layers, empty = {}, torch.empty(0)
        self._found: WeakKeyDictionary[Any, dict[str, LoraLinear]] = WeakKeyDictionary()
        for name in lora_layers_by_name_in_base(like):
            self._layers[name] = MixedLora(self.model.get_submodule(name), empty, empty, self._routing)
            self.model.set_submodule(name, self._layers[name])

    def adapter_losses_in_one_forward(self, adapters: Sequence[Any], rows: Sequence[Tensor]) -> Tensor:
        """As `adapter_losses_one_by_one`, in one forward. The sum's gradient is for each adapter what it is alone."""
        counts = [len(own) for own in rows]
        self.route_rows_to_adapters(adapters, counts)
        found = mean_training_nll_of_each_row(self.model, torch.cat(list(rows)))
        return torch.stack([own.mean() for own in found.split(counts)])

    def route_rows_to_adapters(self, adapters: Sequence[Any], counts: Sequence[int]) -> None:
        """Of the next forward's rows the first counts[0] are those of adapters[0], and so on."""
        layers, device = [self._lora_layers_of_adapter(adapter) for adapter in adapters], self.model.device
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        for name, mixed in self._layers.items():
            # Stacked anew in each forward, so that gradients reach each adapter's own weights:
            # (adapters, rank, in) and (adapters, out, rank).
            own = [layer[name] for layer in layers]
            mixed.a = torch.stack([layer.get_parameter("lora_A.default.weight") for layer in own])
            mixed.b = torch.stack([layer.get_parameter("lora_B.default.weight") for layer in own])
            # LoRA's alpha / rank, the same for all adapters of one recipe
            mixed.b = mixed.b * own[0].scaling["default"]
            if half is not None:
                mixed.a, mixed.b = mixed.a.to(half), mixed.b.to(half)
        self._routing.part = torch.repeat_interleave(torch.tensor(counts, device=device))

    def _lora_layers_of_adapter(self, adapter: Any) -> dict[str, LoraLinear]:
        """Looked for once an adapter: a walk over all modules at every step takes as long as an optimizer's."""
        if adapter not in self._found:
            self._found[adapter] = lora_layers_by_name_in_base(adapter)
        return self._found[adapter]


def lora_layers_by_name_in_base(adapter: Any) -> dict[str, LoraLinear]:
    """The layers that a PEFT model adapts, by their names in its base."""
    modules = adapter.get_base_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLinear)}


def mean_training_nll_of_each_row(model: Any, rows: Tensor) -> Tensor:
    """(b,) mean nll of each row (b, n), nats a token that has a loss, its first token given."""
    labels = loss_masks.labels_of_loss_masked_rows(rows)
    return loss_masks.mean_nll_of_tokens_with_loss_per_row(
        model, labels, input_ids=loss_masks.token_id_rows_without_loss_mask(rows), use_cache=False
    )


def make_joint_training_base(base: Any, adapter: Callable[[], Any]) -> JointAdapterTraining | None:
    """The base for training such adapters together; None where its layers do not read each row of a batch by itself.

    adapter: makes one on a base of its own. Tried with two whose updates are random: layers that see the tokens of all
    rows in a line (experts), or that are not called as layers (kernels that read their weights), show in the
    distributions.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        adapters = [adapter().eval(), adapter().eval()]
        mixed = JointAdapterTraining(base, adapters[0])
        for parameter in (p for one in adapters for p in one.parameters() if p.requires_grad):
            nn.init.normal_(parameter, std=_SPREAD)
        rows = torch.randint(base.get_input_embeddings().num_embeddings, (3, 8)).to(base.device)
        truth = torch.cat([one(input_ids=own).logits for one, own in zip(adapters, rows.split([1, 2]), strict=True)])
        mixed.route_rows_to_adapters(adapters, [1, 2])
        try:
            found = mixed.model(input_ids=rows).logits
        except (RuntimeError, AttributeError, IndexError):  # what torch and modules raise of such shapes and uses
            return None
        near = largest_rms_log_prob_distance(found.log_softmax(-1), truth.log_softmax(-1)) <= rounding_tolerance(
            base, truth
        )
        return mixed if near else None
