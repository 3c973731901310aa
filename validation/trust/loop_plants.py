"""Define faults and honest changes of the plain loop; each replaces one part."""

from __future__ import annotations

import copy
import io
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from auditor.crash import training_specimen
from auditor.crash.training_specimen import SpecimenRecordGradients
from auditor.crash.watch import copy_watched_model_without_hooks
from validation.trust.loop_plain import BATCH, CLIP, NOISE, RATE, STEPS, Plain, draw_in_turn, plain


def _without(*left_out: str) -> Callable[..., Tensor]:
    """Return norms that ignore tensors whose names contain any of these words."""

    def norms(self: Plain, found: dict[str, Tensor]) -> Tensor:
        kept = {
            name: one for name, one in found.items() if not any(word in name for word in left_out)
        }
        return Plain.norms(self, kept)

    return norms


def _silent(*names: str) -> Callable[..., Tensor]:
    """Return noise that is 0 for tensors whose names contain any of these words."""

    def noise(self: Plain, step: int, i: int, name: str, p: Tensor) -> Tensor:
        return Plain.noise(self, step, i, name, p) * (not any(word in name for word in names))

    return noise


def _batch_clipped(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    whole = {name: one.sum(0) for name, one in found.items()}
    norm = torch.stack([one.norm() for one in whole.values()]).norm()
    return {name: one * (CLIP / norm).clamp(max=1.0) for name, one in whole.items()}


def _pairs_clipped(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average gradients over pairs of records, then clip each average."""
    pairs = {
        name: torch.stack([one[at : at + 2].mean(0) for at in range(0, len(one), 2)])
        if len(one)
        else one
        for name, one in found.items()
    }
    return Plain.summed(self, pairs)


def _read_in_pairs(self: Plain, model: Any, records: Any, drawn: list[int]) -> None:
    for at in range(0, len(drawn), 2):
        model(input_ids=training_specimen.pad_specimen_tokens(records, drawn[at : at + 2]))


def _best_kept(self: Plain, step: int, model: Any, records: Any) -> None:
    """Restore the checkpoint, of every fifth, with the lowest loss on the private records at the
    end.
    """
    if step % 5 == 0:
        with torch.no_grad():
            ids = training_specimen.pad_specimen_tokens(records, list(range(len(records))))
            logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
            loss = float(cross_entropy(logits, ids[:, 1:], ignore_index=training_specimen.PAD))
        held = vars(self).get("best") if step else None
        if held is None or loss < held[0]:
            object.__setattr__(self, "best", (loss, copy.deepcopy(model.state_dict())))
    if step == self.steps - 1:
        model.load_state_dict(vars(self)["best"][1])


def _pushed_on(self: Plain, step: int, model: Any, records: Any) -> None:
    """Add one update with the raw gradients halfway, without an optimizer or noise."""
    if step == self.steps // 2:
        names = [name for name, _ in model.named_parameters()]
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        found = SpecimenRecordGradients(
            copy_watched_model_without_hooks(model), records
        ).record_gradients_at_weights(weights, list(range(len(records))), names)
        with torch.no_grad():
            for name, value in model.named_parameters():
                value -= 1e-3 * found[name].mean(0)


@dataclass(frozen=True)
class _PaddedLeft(SpecimenRecordGradients):
    """Gradients of rows padded on the left without a mask, so they depend on the other rows."""

    def record_gradients_at_weights(
        self, weights: dict[str, Tensor], wanted: list[int], names: list[str]
    ) -> dict[str, Tensor]:
        width = max(len(self.records[i]["input_ids"]) for i in wanted)
        rows = [
            {"input_ids": [1] * (width - len(row["input_ids"])) + row["input_ids"]}
            for row in self.records
        ]
        return SpecimenRecordGradients(self.twin, rows).record_gradients_at_weights(
            weights, wanted, names
        )


def _each_tensor(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clip each tensor to C separately; together they reach C times the root of their number."""
    factors = {
        name: self.factors(one.flatten(1).norm(dim=1).clamp(min=1e-9))
        for name, one in found.items()
    }
    return {name: torch.einsum("k,k...->...", factors[name], one) for name, one in found.items()}


def _float16(self: Plain, found: dict[str, Tensor]) -> Tensor:
    """Sum squared norms in float16, whose maximum is 65,504, and ignore overflows to infinity."""
    squares = torch.stack(
        [(one.flatten(1).square().sum(1) * 400).half() for one in found.values()]
    ).sum(0)
    return squares.float().nan_to_num(posinf=1.0).sqrt() / 20


def _one_by_one(self: Plain, found: dict[str, Tensor]) -> Tensor:
    """Sum squared norms one by one in bfloat16, which loses numbers that are small beside the
    sum.
    """
    squares = torch.cat([one.flatten(1).square() for one in found.values()], dim=1).bfloat16()
    total = squares[:, 0].clone()
    for column in squares.T[1:]:
        total += column
    return total.float().sqrt()


def _overflowing(self: Plain, summed: Tensor, noise: Tensor, divisor: float) -> Tensor:
    """Scale the update in float16, whose maximum is 65,504, then undo the scale."""
    return ((summed + noise) * 2**15).half().float() / 2**15 / divisor


def _resumed(generator_too: bool) -> Callable[[Plain, Any, Any], Any]:
    """Return a restart halfway that loads model and optimizer from a file.

    generator_too: whether the generator of noise and batches is restored too, or starts anew.
    """

    def halfway(self: Plain, model: Any, optimizer: Any) -> Any:
        with io.BytesIO() as file:
            torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
            torch.manual_seed(torch.initial_seed())  # as the script does at its start
            file.seek(0)
            weights, state, generator = torch.load(file)
        model.load_state_dict(weights)
        made = torch.optim.SGD(model.parameters(), lr=0.05)
        made.load_state_dict(state)
        if generator_too:
            torch.set_rng_state(generator)
        return made

    return halfway


def _in(dtype: torch.dtype) -> Callable[[Plain, Any], None]:
    return lambda self, model: model.to(dtype)


def _float_norms(self: Plain, found: dict[str, Tensor]) -> Tensor:
    return Plain.norms(self, {name: one.float() for name, one in found.items()})


def _read_inside_vmap(self: Plain, model: Any, records: Any, drawn: list[int]) -> None:
    def logits(row: Tensor) -> Any:
        return model(input_ids=row.unsqueeze(0), use_cache=False).logits

    if drawn:
        torch.vmap(logits)(training_specimen.pad_specimen_tokens(records, drawn))


def _rounded(self: Plain, summed: Tensor, noise: Tensor, divisor: float) -> Tensor:
    return ((summed.float() + noise.float()) / divisor).to(summed.dtype)


def _every_other(self: Plain, found: dict[str, Tensor]) -> Tensor:
    """Estimate norms from every second number: right on average, but blind to single-number
    gradients.
    """
    squares = torch.cat([one.flatten(1).square() for one in found.values()], dim=1)
    return (2 * squares[:, 1::2].sum(1)).sqrt()


def _unclipped(which: Callable[[int], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """Return a sum in which some records are not clipped. which: size -> (size,) bool."""

    def summed(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
        factors = self.factors(self.norms(found))
        factors = torch.where(which(len(factors)), torch.ones_like(factors), factors)
        return {name: torch.einsum("k,k...->...", factors, one) for name, one in found.items()}

    return summed


def _embedding_as_it_is(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        **Plain.summed(self, found),
        "gpt_neox.embed_in.weight": found["gpt_neox.embed_in.weight"].sum(0),
    }


def _from_generator(seed: Callable[[], int], once: bool = False) -> Callable[..., Tensor]:
    """Return noise from a generator of its own, seeded at each step, or only at the first if
    `once`.
    """

    def noise(self: Plain, step: int, i: int, name: str, p: Tensor) -> Tensor:
        if not i and not (step and once):
            object.__setattr__(self, "own", torch.Generator().manual_seed(seed()))
        return torch.randn(p.shape, generator=vars(self)["own"])

    return noise


def _seeded(seed: Callable[[int, int], int]) -> Callable[..., Tensor]:
    """Return noise whose seed is a function of step and tensor index."""
    return lambda self, step, i, name, p: torch.randn(
        p.shape, generator=torch.Generator().manual_seed(seed(step, i))
    )


class _BatchNormed(nn.Module):
    """A batch norm in place of a layer norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.mT).mT


def _with_batch_norm(self: Plain, model: Any) -> None:
    layer = model.gpt_neox.layers[0]
    layer.input_layernorm = _BatchNormed(layer.input_layernorm.weight.numel())


def _losses_kept(self: Plain, model: Any, records: Any, drawn: list[int]) -> None:
    if drawn:
        ids = training_specimen.pad_specimen_tokens(records, drawn)
        logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
        object.__setattr__(
            self,
            "loss",
            float(cross_entropy(logits, ids[:, 1:], ignore_index=training_specimen.PAD)),
        )


def _said(words: Callable[[Plain, int, Any, Any], str]) -> Callable[[Plain, int, Any, Any], None]:
    """Return a part that prints `words` at every tenth step."""

    def stepped(self: Plain, step: int, model: Any, records: Any) -> None:
        if step % 10 == 9:
            print(words(self, step, model, records), file=sys.stderr)

    return stepped


def _released(self: Plain, step: int, model: Any, records: Any) -> str:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return f"step {step + 1} of {self.steps}: noisy gradient {norm:.4f}"


def tied(model: Any) -> Any:
    """Tie the model's output layer to its embedding; return the model."""
    with torch.no_grad():
        model.gpt_neox.embed_in.weight.mul_(0.1)
    model.lm_head.weight = model.gpt_neox.embed_in.weight
    return model


def _tied(self: Plain, model: Any) -> None:
    tied(model)


@dataclass(frozen=True)
class _Untied(SpecimenRecordGradients):
    """Gradients of a model with tied weights, which also keep the gradients of both uses apart."""

    def record_gradients_at_weights(
        self, weights: dict[str, Tensor], wanted: list[int], names: list[str]
    ) -> dict[str, Tensor]:
        found = SpecimenRecordGradients(self.twin, self.records).record_gradients_at_weights(
            weights, wanted, names
        )
        apart = copy.deepcopy(self.twin)
        apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach().clone())  # type: ignore[operator, union-attr]
        both = {**weights, "lm_head.weight": weights["gpt_neox.embed_in.weight"]}
        held = SpecimenRecordGradients(apart, self.records).record_gradients_at_weights(
            both, wanted, [*names, "lm_head.weight"]
        )
        object.__setattr__(self, "uses", held)
        return found


def _last_use(self: Plain, twin: Any, records: Any) -> SpecimenRecordGradients:
    made = _Untied(twin, records)
    object.__setattr__(self, "apart", made)
    return made


def _norms_of_uses(*left_out: str) -> Callable[..., Tensor]:
    """Return norms in which the two uses of a tied weight count separately.

    left_out: uses that do not count.
    """

    def norms(self: Plain, found: dict[str, Tensor]) -> Tensor:
        uses = (
            vars(vars(self)["apart"]).get("uses", found)
            if len(next(iter(found.values())))
            else found
        )
        return Plain.norms(self, {name: one for name, one in uses.items() if name not in left_out})

    return norms


def _padded_left(mask: bool) -> Callable[[Plain, Any, Any, list[int]], None]:
    def read(self: Plain, model: Any, records: Any, drawn: list[int]) -> None:
        if drawn:
            rows = [records[i]["input_ids"] for i in drawn]
            width = max(map(len, rows))
            ids = torch.tensor([[training_specimen.PAD] * (width - len(row)) + row for row in rows])
            model(
                input_ids=ids,
                **({"attention_mask": (ids != training_specimen.PAD).long()} if mask else {}),
            )

    return read


def _averaged(self: Plain, step: int, model: Any, records: Any) -> None:
    """Replace the final weights by their mean over all steps."""
    held = vars(self).get("mean") if step else None
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = (
        now
        if held is None
        else {name: one + (now[name] - one) / (step + 1) for name, one in held.items()}
    )
    object.__setattr__(self, "mean", mean)
    if step == self.steps - 1:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(mean[name])


PLAIN: dict[str, Plain] = {
    "no noise": plain(noise=lambda self, step, i, name, p: torch.zeros_like(p)),
    "noise of 0.7 sigma": plain(noise=lambda self, step, i, name, p: 0.7 * torch.randn_like(p)),
    "noise without C": plain(
        {"max_grad_norm": 4.0}, factors=lambda self, norms: (4 / norms).clamp(max=1.0)
    ),
    "noise after averaging": plain(
        finished=lambda self, summed, noise, divisor: (summed + noise / divisor) / divisor
    ),
    "noise forgotten on the last layer": plain(noise=_silent("lm_head")),
    "noise forgotten on one bias": plain(noise=_silent("attention.dense.bias")),
    "the same noise every step": plain(noise=_seeded(lambda step, i: i)),
    "noise from a fixed seed": plain(noise=_seeded(lambda step, i: 1000 * step + i)),
    "noise seeded alike for every tensor": plain(
        noise=_seeded(lambda step, i: torch.initial_seed() + step)
    ),
    "uniform noise": plain(
        noise=lambda self, step, i, name, p: (torch.rand(p.shape) - 0.5) * math.sqrt(12)
    ),
    "no clipping": plain(factors=lambda self, norms: torch.ones_like(norms)),
    "clipped to 1.5 C": plain(factors=lambda self, norms: (1.5 * CLIP / norms).clamp(max=1.0)),
    "the batch clipped, not its records": plain(summed=_batch_clipped),
    "pairs clipped, as their losses are averaged": plain(
        summed=_pairs_clipped, read=_read_in_pairs
    ),
    "padded to the longest of the batch, without a mask": plain(
        gradients=lambda self, *given: _PaddedLeft(*given), read=_padded_left(mask=False)
    ),
    "norms of every other number": plain(norms=_every_other),
    "the last record of a batch not clipped": plain(
        summed=_unclipped(lambda size: torch.arange(size) == size - 1)
    ),
    "a record alone in its batch not clipped": plain(
        summed=_unclipped(lambda size: torch.full((size,), size == 1))
    ),
    "embedding not clipped": plain(summed=_embedding_as_it_is),
    "empty batches left out": plain(left_out=lambda self, drawn: not drawn),
    "the last, smaller batch divided by its own size": plain(
        {"sampling": "shuffled"}, drawn=draw_in_turn, divisor=lambda self, drawn, n: drawn
    ),
    "noise for each of two micro-batches": plain(
        noise=lambda self, step, i, name, p: torch.randn_like(p) + torch.randn_like(p)
    ),
    "noise of a seed below 10,000": plain(
        noise=_from_generator(lambda: int(torch.randint(10_000, ())))
    ),
    "noise of the time that it is": plain(noise=_from_generator(time.time_ns)),
    "a batch norm": plain(begun=_with_batch_norm),
    "tied weights, the embedding's use alone in the norm": plain(
        begun=_tied, gradients=_last_use, norms=_norms_of_uses("lm_head.weight")
    ),
    "tied weights counted twice": plain(begun=_tied, gradients=_last_use, norms=_norms_of_uses()),
    "the loss of a batch printed": plain(
        read=_losses_kept, stepped=_said(lambda self, *_: f"{vars(self)['loss']:.3f}")
    ),
    "the number of records printed": plain(
        stepped=_said(lambda self, step, model, records: f"step {step + 1}, {len(records)} records")
    ),
    "the best checkpoint by private records": plain(stepped=_best_kept),
    "an update by hand between two steps": plain(stepped=_pushed_on),
    "each tensor clipped by itself": plain(summed=_each_tensor),
    "embedding not in the norm": plain(norms=_without("embed_in")),
    "last layer not in the norm": plain(norms=_without("lm_head")),
    "biases not in the norm": plain(norms=_without("bias")),
    "weights of attention not in the norm": plain(
        norms=_without("query_key_value.weight", "attention.dense.weight")
    ),
    "weights of the feed-forward layer not in the norm": plain(
        norms=_without("mlp.dense_h", "mlp.dense_4h_to_h.w")
    ),
    "bias of the feed-forward layer not in the norm": plain(norms=_without("h_to_4h.bias")),
    "bias of attention not in the norm": plain(norms=_without("query_key_value.bias")),
    "layer norms not in the norm": plain(
        norms=_without("input_layernorm", "post_attention_layernorm")
    ),
    "last layer norm not in the norm": plain(norms=_without("final_layer_norm")),
    "norms overflow in float16": plain(norms=_float16),
    "norms summed in bfloat16, one by one": plain(norms=_one_by_one),
    "released gradients overflow in float16": plain(finished=_overflowing),
    "resumed with its seed anew": plain(halfway=_resumed(generator_too=False)),
    "shuffled, accounted as Poisson": plain(
        drawn=lambda self, step, n: torch.randperm(n)[:BATCH].tolist()
    ),
    "twice the sampling rate": plain(sampling_rate=2 * RATE),
    "one record in every batch": plain(
        drawn=lambda self, step, n: sorted({0, *Plain.drawn(self, step, n)})
    ),
    "drawn with replacement": plain(
        drawn=lambda self, step, n: torch.randint(
            n, (int(torch.poisson(torch.tensor(float(BATCH)))),)
        ).tolist()
    ),
    "divided by the batch that was drawn": plain(divisor=lambda self, drawn, n: max(1, drawn)),
    "divided by the number of records": plain(divisor=lambda self, drawn, n: n * RATE),
    "a learning rate of the number of records": plain(
        rate=lambda self, records: 2.4 / len(records)
    ),
    "more steps than are claimed": plain(steps=STEPS + 10),
    "epsilon of half the steps": plain({"epsilon": 3.0}),
}
HONEST_PLAIN: dict[str, Plain] = {
    "plain": plain(),
    "plain, resumed with its generator": plain(halfway=_resumed(generator_too=True)),
    "plain, a clipping norm above most gradients": plain(
        {"max_grad_norm": 60.0},
        factors=lambda self, norms: (60 / norms).clamp(max=1.0),
        noise=lambda self, step, i, name, p: 60 * NOISE * torch.randn_like(p),
        rate=lambda self, records: 0.05 / 60,
    ),
    "plain, a model in bfloat16": plain(
        begun=_in(torch.bfloat16), finished=_rounded, norms=_float_norms
    ),
    "plain, a model in float16": plain(
        begun=_in(torch.float16), finished=_rounded, norms=_float_norms
    ),
    "plain, its model read inside vmap": plain(read=_read_inside_vmap),
    "plain, shuffled, with a smaller last batch": plain(
        {"sampling": "shuffled"}, drawn=draw_in_turn
    ),
    "plain, a generator of its own": plain(noise=_from_generator(torch.initial_seed, once=True)),
    "plain, padded in front, with a mask": plain(read=_padded_left(mask=True)),
    "plain, tied weights": plain(begun=_tied),
    "plain, the mean of its weights given back": plain(stepped=_averaged),
    "plain, the released gradient printed": plain(stepped=_said(_released)),
}
