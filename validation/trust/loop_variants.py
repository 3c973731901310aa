"""Define honest private loops that differ from the plain loop, and faults that Opacus accepts
silently.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from validation.trust.loop_packages import _mean_of_record_means, _rows
from validation.trust.loop_plain import BATCH, CLIP, DELTA, NOISE, STEPS, Loop, Plain, plain

_MEDIAN = 30.0  # median norm of the plain loop's gradients on our models


def _tensor_bounds(names: list[str]) -> dict[str, float]:
    """Return a clipping bound for each tensor; their squares add up to that of the clipping
    norm.
    """
    raw = torch.tensor([1.0 + 2.0 * (i % 2) for i in range(len(names))])
    return dict(zip(names, (raw / raw.norm() * CLIP).tolist(), strict=True))


def _clip_each_tensor(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    bounds = _tensor_bounds(list(found))
    summed = {}
    for name, gradients in found.items():
        factors = (bounds[name] / gradients.flatten(1).norm(dim=1)).clamp(max=1.0)
        summed[name] = torch.einsum("k,k...->...", factors.to(gradients.dtype), gradients)
    return summed


def _add_noise_of_each_tensor(self: Plain, step: int, i: int, name: str, p: Tensor) -> Tensor:
    n_tensors = 16
    raw = torch.tensor([1.0 + 2.0 * (j % 2) for j in range(n_tensors)])
    return NOISE * float(raw[i] / raw.norm()) * CLIP * math.sqrt(n_tensors) * torch.randn_like(p)


def make_bounded_loop(
    share: float, claim: dict[str, Any] | None = None, steps: int = STEPS, **parts: Any
) -> Plain:
    """Return the plain loop clipped at a share of the median gradient norm, with noise in
    proportion.
    """
    bound = share * _MEDIAN
    return plain(
        {"max_grad_norm": bound, **(claim or {})},
        steps,
        factors=lambda self, norms: (bound / norms).clamp(max=1.0),
        noise=lambda self, step, i, name, p: bound * NOISE * torch.randn_like(p),
        rate=lambda self, records: 0.05 / bound,
        **parts,
    )


def allocate(self: Plain, step: int, n: int) -> list[int]:
    """Return a batch such that each record is in one independently chosen step of each pass."""
    per_pass = round(1 / self.sampling_rate)
    if step % per_pass == 0:
        object.__setattr__(self, "places", torch.randint(per_pass, (n,)))
    places: Tensor = vars(self)["places"]
    return torch.nonzero(places == step % per_pass).flatten().tolist()


class WithMomentum(Plain):
    """A loop with momentum and weight decay, which use only released gradients."""

    def make_optimizer(self, parameters: dict[str, Any], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters.values(), lr=rate / 5, momentum=0.9, weight_decay=0.01)


class WithTensorBounds(Plain):
    """A loop with a clipping bound and noise for each tensor."""

    summed = _clip_each_tensor
    noise = _add_noise_of_each_tensor


class WithUnfreezing(Plain):
    """A loop that freezes the embedding in the first third of its steps, as in gradual
    unfreezing.
    """

    def choose_trained(self, step: int, names: list[str]) -> list[str]:
        return (
            names if 3 * step >= self.steps else [name for name in names if "embed_in" not in name]
        )


# Noise on the count of records below the clipping norm, and the noise that the claim leaves for
# gradients.
COUNT_NOISE = 3.0
SUM_NOISE = (NOISE**-2 - (2 * COUNT_NOISE) ** -2) ** -0.5


class WithAdaptiveClipping(Plain):
    """A loop whose clipping norm follows a noisy quantile of gradient norms (Andrew et al.
    2021).
    """

    clip: float
    # the number of the batch's records below the clipping norm, minus 1/2 for each record
    centred: float

    def drawn(self, step: int, n: int) -> list[int]:
        if step == 0:
            object.__setattr__(self, "clip", CLIP)
        return super().drawn(step, n)

    def summed(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        object.__setattr__(
            self, "centred", float((self.norms(found) <= self.clip).float().sub(0.5).sum())
        )
        return super().summed(found)

    def factors(self, norms: Tensor) -> Tensor:
        return (self.clip / norms).clamp(max=1.0)

    def noise(self, step: int, i: int, name: str, p: Tensor) -> Tensor:
        return SUM_NOISE * self.clip * torch.randn_like(p)

    def stepped(self, step: int, model: Any, records: Any) -> None:
        below = (self.centred + COUNT_NOISE * torch.randn(()).item()) / self.batch
        object.__setattr__(self, "clip", self.clip * math.exp(-0.2 * below))


HONEST_VARIANTS: dict[str, Loop] = {
    "momentum and weight decay": plain(base=WithMomentum),
    "a bound and noise for each tensor": plain(base=WithTensorBounds),
    "adaptive clipping": plain(base=WithAdaptiveClipping),
    "random allocation": plain({"sampling": "allocation"}, drawn=allocate),
    "gradual unfreezing": plain(base=WithUnfreezing),
    **{
        f"a bound of {share:g} times the median norm": make_bounded_loop(share)
        for share in (0.1, 0.3, 1, 3, 10)
    },
}


# --- faults of a loss, and those that Opacus takes in silence ---


def _count_tokens(self: Plain, model: Any, records: Any, drawn: list[int]) -> None:
    object.__setattr__(self, "n_tokens", [len(records[i]["input_ids"]) - 1 for i in drawn])
    Plain.read(self, model, records, drawn)


def _token_mean(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clip each record's part of the gradient of a mean over the batch's tokens."""
    n_tokens = torch.tensor(vars(self)["n_tokens"], dtype=torch.float)
    weights = n_tokens / n_tokens.sum()
    weighted = {name: weights.view(-1, *[1] * (one.ndim - 1)) * one for name, one in found.items()}
    return Plain.summed(self, weighted)


def _record_mean(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clip each record's part of the gradient of a mean over the batch's records."""
    return Plain.summed(self, {name: one / max(1, len(one)) for name, one in found.items()})


def train_with_opacus(kind: str) -> Loop:
    """Return an Opacus loop with one of the faults in `SILENT_OPACUS`."""
    ghost = kind in ("column", "unfrozen", "accumulated")

    def train(model: Any, records: Any) -> Any:
        from opacus import PrivacyEngine
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        if kind == "unfrozen":
            model.get_input_embeddings().requires_grad_(False)
        engine = PrivacyEngine()
        more = (
            {"grad_sample_mode": "ghost"}
            if ghost
            else {"rand_on_empty": kind == "random when empty"}
        )
        made: Any = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(records, batch_size=BATCH, collate_fn=_rows),
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            **more,
        )
        private, optimizer, loader = made[0], made[1], made[-1]
        for at in range(STEPS // len(loader)):
            if at == 1:
                model.get_input_embeddings().requires_grad_(True)
            for ids in loader:
                optimizer.zero_grad()
                for part in ids.chunk(2) if kind == "accumulated" else [ids]:
                    if kind == "token mean":
                        labels = part.masked_fill(part == 0, -100)
                        private(input_ids=part, labels=labels, use_cache=False).loss.backward()
                        continue
                    logits, targets = (
                        private(input_ids=part, use_cache=False).logits[:, :-1],
                        part[:, 1:],
                    )
                    if not ghost:
                        _mean_of_record_means(logits, targets).backward()
                        continue
                    losses = torch.nn.functional.cross_entropy(
                        logits.transpose(1, 2), targets, ignore_index=0, reduction="none"
                    )
                    each = losses.sum(1, keepdim=True) / targets.ne(0).sum(1, keepdim=True)
                    each = each if kind == "column" else each[:, 0]
                    DPTensorFastGradientClipping(private, optimizer, each).backward()
                optimizer.step()
        return model, {"engine": engine, "max_grad_norm": CLIP, "delta": DELTA, "public_size": True}

    return train


SILENT_OPACUS: dict[str, Loop] = {
    "Opacus, a mean over the tokens of the batch": train_with_opacus("token mean"),
    "Opacus, a made-up record in an empty batch": train_with_opacus("random when empty"),
    "Opacus ghost clipping, losses of shape (batch, 1)": train_with_opacus("column"),
    "Opacus ghost clipping, a layer unfrozen later": train_with_opacus("unfrozen"),
    "Opacus ghost clipping, two passes a step by hand": train_with_opacus("accumulated"),
}
DIVIDED: dict[str, Loop] = {
    "a mean over the batch's tokens, not undone": plain(read=_count_tokens, summed=_token_mean),
    "a mean over the batch's records, not undone": plain(summed=_record_mean),
}
