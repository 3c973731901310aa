"""Faults planted in four kinds of private training loop: which of them `audit dp-loop` calls broken.

    python -m benchmarks.checks.trust.loop_faults [-o DIR] [--only NAME] [--seed 0]

A plain PyTorch loop, Opacus, the Hugging Face Trainer with a callback, and our own trainer, each with one thing broken
from outside. Controls have no fault. A control that is broken, or a fault of which nothing is seen, makes it exit 1.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from auditor.core import threads
from auditor.crash import subject, trial
from auditor.crash.subject import Gradients
from auditor.crash.trial import CrashTest, crash_test
from auditor.crash.watch import bare
from auditor.training import dp_loop
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, ScaledOptimizer
from auditor.training.noise import NoiseStream, add_noise
from benchmarks.checks.harness import Page, run
from benchmarks.checks.trust.planted_faults import batch_clipped, noise_before_clipping, noise_off, shuffled

NOISE, CLIP, BATCH, STEPS, RATE, DELTA = 1.0, 1.0, 8, 30, 1 / 6, 1e-3
CLAIM = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "sample_rate": RATE, "steps": STEPS, "delta": DELTA}


# --- a plain loop -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """DP-SGD written out, a method a part, so that a fault is one part of it. No fault as it stands."""

    claim: dict[str, Any] = field(default_factory=lambda: dict(CLAIM))
    steps: int = STEPS

    def __call__(self, model: Any, records: Any) -> Any:
        self.begun(model)
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=self.rate(records))
        gradients = self.gradients(bare(model), records)
        for step in range(self.steps):
            if step == STEPS // 2:
                optimizer = self.halfway(model, optimizer)
            drawn = self.drawn(step, len(records))
            self.read(model, records, drawn)
            found = {name: torch.zeros(0, *p.shape) for name, p in parameters.items()}
            if drawn:
                weights = {name: p.detach() for name, p in parameters.items()}
                found = gradients.at(weights, drawn, list(parameters))
            summed = self.summed(found)
            divisor = self.divisor(len(drawn), len(records))
            for i, (name, p) in enumerate(parameters.items()):
                p.grad = self.finished(summed[name], self.noise(step, i, name, p), divisor)
            optimizer.step()
            self.stepped(step, model, records)
        return model, self.claim

    def gradients(self, twin: Any, records: Any) -> Gradients:
        return Gradients(twin, records)

    def stepped(self, step: int, model: Any, records: Any) -> None:
        """Behind each update."""

    def begun(self, model: Any) -> None:
        """Before the optimizer is made."""

    def halfway(self, model: Any, optimizer: Any) -> Any:
        """In the middle of the training -> the optimizer that goes on."""
        return optimizer

    def rate(self, records: Any) -> float:
        return 0.05

    def drawn(self, step: int, n: int) -> list[int]:
        return torch.nonzero(torch.rand(n) < RATE).flatten().tolist()

    def read(self, model: Any, records: Any, drawn: list[int]) -> None:
        """The forward pass of the batch; its gradients come from a faster way, one by one."""
        if drawn:
            model(input_ids=subject.padded(records, drawn))

    def norms(self, found: dict[str, Tensor]) -> Tensor:
        return torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)

    def factors(self, norms: Tensor) -> Tensor:
        return (CLIP / norms).clamp(max=1.0)

    def summed(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        factors = self.factors(self.norms(found))
        return {name: torch.einsum("k,k...->...", factors.to(one.dtype), one) for name, one in found.items()}

    def noise(self, step: int, i: int, name: str, p: Tensor) -> Tensor:
        return NOISE * CLIP * torch.randn_like(p)

    def divisor(self, drawn: int, n: int) -> float:
        return BATCH

    def finished(self, summed: Tensor, noise: Tensor, divisor: float) -> Tensor:
        return (summed + noise) / divisor


def plain(claim: dict[str, Any] | None = None, steps: int = STEPS, **parts: Any) -> Plain:
    """The plain loop with some of its parts replaced."""
    kind = type("Broken", (Plain,), parts)
    made: Plain = kind({**CLAIM, **(claim or {})}, steps)
    return made


def _without(*left_out: str) -> Callable[..., Tensor]:
    """Norms that do not count the tensors whose names hold one of these."""

    def norms(self: Plain, found: dict[str, Tensor]) -> Tensor:
        kept = {name: one for name, one in found.items() if not any(word in name for word in left_out)}
        return Plain.norms(self, kept)

    return norms


def _silent(*names: str) -> Callable[..., Tensor]:
    """No noise on the tensors whose names hold one of these."""

    def noise(self: Plain, step: int, i: int, name: str, p: Tensor) -> Tensor:
        return Plain.noise(self, step, i, name, p) * (not any(word in name for word in names))

    return noise


def _batch_clipped(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    whole = {name: one.sum(0) for name, one in found.items()}
    norm = torch.stack([one.norm() for one in whole.values()]).norm()
    return {name: one * (CLIP / norm).clamp(max=1.0) for name, one in whole.items()}


def _pairs_clipped(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss is averaged over two records before its gradient is clipped."""
    pairs = {name: torch.stack([one[at : at + 2].mean(0) for at in range(0, len(one), 2)]) if len(one) else one
             for name, one in found.items()}  # fmt: skip
    return Plain.summed(self, pairs)


def _read_in_pairs(self: Plain, model: Any, records: Any, drawn: list[int]) -> None:
    for at in range(0, len(drawn), 2):
        model(input_ids=subject.padded(records, drawn[at : at + 2]))


def _best_kept(self: Plain, step: int, model: Any, records: Any) -> None:
    """The checkpoint whose loss on the private records is least, of every fifth, is the one that is given back."""
    if step % 5 == 0:
        with torch.no_grad():
            ids = subject.padded(records, list(range(len(records))))
            logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
            loss = float(cross_entropy(logits, ids[:, 1:], ignore_index=subject.PAD))
        held = vars(self).get("best") if step else None
        if held is None or loss < held[0]:
            object.__setattr__(self, "best", (loss, copy.deepcopy(model.state_dict())))
    if step == self.steps - 1:
        model.load_state_dict(vars(self)["best"][1])


def _pushed_on(self: Plain, step: int, model: Any, records: Any) -> None:
    """Halfway, and by hand, an update by the records' own gradients: no optimizer, no noise."""
    if step == self.steps // 2:
        names = [name for name, _ in model.named_parameters()]
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        found = Gradients(bare(model), records).at(weights, list(range(len(records))), names)
        with torch.no_grad():
            for name, value in model.named_parameters():
                value -= 1e-3 * found[name].mean(0)


@dataclass(frozen=True)
class _PaddedLeft(Gradients):
    """Rows padded in front to the longest of the batch, with no mask: a gradient depends on who else is drawn."""

    def at(self, weights: dict[str, Tensor], wanted: list[int], names: list[str]) -> dict[str, Tensor]:
        width = max(len(self.records[i]["input_ids"]) for i in wanted)
        rows = [{"input_ids": [1] * (width - len(row["input_ids"])) + row["input_ids"]} for row in self.records]
        return Gradients(self.twin, rows).at(weights, wanted, names)


def _each_tensor(self: Plain, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor is clipped to C by itself: together they reach C times the root of their number."""
    factors = {name: self.factors(one.flatten(1).norm(dim=1).clamp(min=1e-9)) for name, one in found.items()}
    return {name: torch.einsum("k,k...->...", factors[name], one) for name, one in found.items()}


def _float16(self: Plain, found: dict[str, Tensor]) -> Tensor:
    """Norms summed in half precision: 65,504 is the most it holds, and what overflows to infinity is skipped over."""
    squares = torch.stack([(one.flatten(1).square().sum(1) * 400).half() for one in found.values()]).sum(0)
    return squares.float().nan_to_num(posinf=1.0).sqrt() / 20


def _one_by_one(self: Plain, found: dict[str, Tensor]) -> Tensor:
    """Norms whose squares are summed in bfloat16, one after the other: what is small beside the sum is lost."""
    squares = torch.cat([one.flatten(1).square() for one in found.values()], dim=1).bfloat16()
    total = squares[:, 0].clone()
    for column in squares.T[1:]:
        total += column
    return total.float().sqrt()


def _overflowing(self: Plain, summed: Tensor, noise: Tensor, divisor: float) -> Tensor:
    """A loss scale for float16, undone behind it: 65,504 is the most it holds."""
    return ((summed + noise) * 2**15).half().float() / 2**15 / divisor


def _resumed(generator_too: bool) -> Callable[[Plain, Any, Any], Any]:
    """Killed halfway: model and optimizer go on from a file; the generator of noise and batches with them, or anew."""

    def halfway(self: Plain, model: Any, optimizer: Any) -> Any:
        with io.BytesIO() as file:
            torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
            torch.manual_seed(torch.initial_seed())  # as the script does when it is started
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
        torch.vmap(logits)(subject.padded(records, drawn))


def _rounded(self: Plain, summed: Tensor, noise: Tensor, divisor: float) -> Tensor:
    return ((summed.float() + noise.float()) / divisor).to(summed.dtype)


PLAIN: dict[str, Plain] = {
    "no noise": plain(noise=lambda self, step, i, name, p: torch.zeros_like(p)),
    "noise of 0.7 sigma": plain(noise=lambda self, step, i, name, p: 0.7 * torch.randn_like(p)),
    "noise without C": plain({"max_grad_norm": 4.0}, factors=lambda self, norms: (4 / norms).clamp(max=1.0)),
    "noise after averaging": plain(finished=lambda self, summed, noise, divisor: (summed + noise / divisor) / divisor),
    "noise forgotten on the last layer": plain(noise=_silent("lm_head")),
    "noise forgotten on one bias": plain(noise=_silent("attention.dense.bias")),
    "the same noise every step": plain(
        noise=lambda self, step, i, name, p: torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    ),
    "noise from a fixed seed": plain(
        noise=lambda self, step, i, name, p: torch.randn(
            p.shape, generator=torch.Generator().manual_seed(1000 * step + i)
        )
    ),
    "noise seeded alike for every tensor": plain(
        noise=lambda self, step, i, name, p: torch.randn(
            p.shape, generator=torch.Generator().manual_seed(torch.initial_seed() + step)
        )
    ),
    "uniform noise": plain(noise=lambda self, step, i, name, p: (torch.rand(p.shape) - 0.5) * math.sqrt(12)),
    "no clipping": plain(factors=lambda self, norms: torch.ones_like(norms)),
    "clipped to 1.5 C": plain(factors=lambda self, norms: (1.5 * CLIP / norms).clamp(max=1.0)),
    "the batch clipped, not its records": plain(summed=_batch_clipped),
    "pairs clipped, as their losses are averaged": plain(summed=_pairs_clipped, read=_read_in_pairs),
    "padded to the longest of the batch, without a mask": plain(gradients=lambda self, *given: _PaddedLeft(*given)),
    "the best checkpoint by private records": plain(stepped=_best_kept),
    "an update by hand between two steps": plain(stepped=_pushed_on),
    "each tensor clipped by itself": plain(summed=_each_tensor),
    "embedding not in the norm": plain(norms=_without("embed_in")),
    "last layer not in the norm": plain(norms=_without("lm_head")),
    "biases not in the norm": plain(norms=_without("bias")),
    "weights of attention not in the norm": plain(norms=_without("query_key_value.weight", "attention.dense.weight")),
    "weights of the feed-forward layer not in the norm": plain(norms=_without("mlp.dense_h", "mlp.dense_4h_to_h.w")),
    "bias of the feed-forward layer not in the norm": plain(norms=_without("h_to_4h.bias")),
    "bias of attention not in the norm": plain(norms=_without("query_key_value.bias")),
    "layer norms not in the norm": plain(norms=_without("input_layernorm", "post_attention_layernorm")),
    "last layer norm not in the norm": plain(norms=_without("final_layer_norm")),
    "norms overflow in float16": plain(norms=_float16),
    "norms summed in bfloat16, one by one": plain(norms=_one_by_one),
    "released gradients overflow in float16": plain(finished=_overflowing),
    "resumed with its seed anew": plain(halfway=_resumed(generator_too=False)),
    "shuffled, accounted as Poisson": plain(drawn=lambda self, step, n: torch.randperm(n)[:BATCH].tolist()),
    "twice the sampling rate": plain(
        drawn=lambda self, step, n: torch.nonzero(torch.rand(n) < 2 * RATE).flatten().tolist()
    ),
    "one record in every batch": plain(drawn=lambda self, step, n: sorted({0, *Plain.drawn(self, step, n)})),
    "drawn with replacement": plain(
        drawn=lambda self, step, n: torch.randint(n, (int(torch.poisson(torch.tensor(float(BATCH)))),)).tolist()
    ),
    "divided by the batch that was drawn": plain(divisor=lambda self, drawn, n: max(1, drawn)),
    "divided by the number of records": plain(divisor=lambda self, drawn, n: n * RATE),
    "a learning rate of the number of records": plain(rate=lambda self, records: 2.4 / len(records)),
    "more steps than are claimed": plain(steps=STEPS + 10),
    "epsilon of half the steps": plain({"epsilon": 3.0}),
}


# --- Opacus -----------------------------------------------------------------------------------------------------------


def opacus(
    poisson: bool = True, ghost: bool = False, after: Callable[[Any], object] = lambda optimizer: None,
    claim: dict[str, Any] | None = None, sides: Callable[[Any, int], object] = lambda model, step: None,
    told: bool = False,
) -> Callable[[Any, Any], Any]:  # fmt: skip
    """Opacus's `make_private` as its tutorials use it. after: what is done to its optimizer; sides: before a step.

    told: the claim is what its accountant tells.
    """

    def train(model: Any, records: Any) -> Any:
        from opacus import PrivacyEngine

        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        loader: Any = DataLoader(records, batch_size=BATCH, collate_fn=_rows, shuffle=not poisson)
        rate = 1 / len(loader)
        engine = PrivacyEngine()
        private, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=NOISE, max_grad_norm=CLIP,
            poisson_sampling=poisson, grad_sample_mode="functorch" if ghost else "hooks",
        )  # fmt: skip
        after(optimizer)
        steps = 0
        for _ in range(STEPS // len(loader)):
            for ids in loader:
                optimizer.zero_grad()
                if len(ids):
                    logits = private(input_ids=ids, use_cache=False).logits[:, :-1]
                    cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=subject.PAD).backward()
                sides(optimizer, steps)
                optimizer.step()
                steps += 1
        if told:
            return model, {"engine": engine, "max_grad_norm": CLIP, "delta": DELTA, **(claim or {})}
        return model, {**CLAIM, "sample_rate": rate, "steps": steps, **(claim or {})}

    return train


def _rows(rows: Any) -> Tensor:
    return subject.padded(rows, list(range(len(rows)))) if len(rows) else torch.zeros(0, 2, dtype=torch.long)


def _set(**values: Any) -> Callable[[Any], object]:
    return lambda optimizer: [setattr(optimizer, name, value) for name, value in values.items()]


def _bypassed(optimizer: Any, step: int) -> None:
    """Every fifth step is taken by the optimizer underneath, with the gradient as it is."""
    if step % 5 == 4:
        optimizer.original_optimizer.step()


def _seeded(optimizer: Any) -> None:
    optimizer.generator = torch.Generator().manual_seed(0)


def _summed_later(optimizer: Any) -> None:
    """Clipping as it is replaced in tutorials: sums of the gradients as they are, clipped as one."""

    def clip_and_accumulate() -> None:
        whole = [p.grad_sample.sum(0) for p in optimizer.params]
        norm = torch.stack([one.norm() for one in whole]).norm()
        for p, one in zip(optimizer.params, whole, strict=True):
            p.summed_grad = one * (CLIP / norm).clamp(max=1.0)

    optimizer.clip_and_accumulate = clip_and_accumulate


_KNOWN = {"public_size": True}
OPACUS: dict[str, Callable[[Any, Any], Any]] = {
    "Opacus 1.6.0 as it is: divides by the number of records": opacus(),
    "Opacus, shuffled, accounted as Poisson": opacus(poisson=False, claim=_KNOWN),
    "Opacus, shuffled and said so, with the epsilon that it tells": opacus(
        poisson=False, claim={**_KNOWN, "sampling": "shuffled"}, told=True
    ),
    "Opacus, noise set to 0 later": opacus(after=_set(noise_multiplier=0.0), claim=_KNOWN),
    "Opacus, noise set to a half later": opacus(after=_set(noise_multiplier=0.5), claim=_KNOWN),
    "Opacus, a generator of a fixed seed": opacus(after=_seeded, claim=_KNOWN),
    "Opacus, steps that go past it": opacus(sides=_bypassed, claim=_KNOWN),
    "Opacus, the batch clipped": opacus(after=_summed_later, claim=_KNOWN),
}


# --- the Hugging Face Trainer -----------------------------------------------------------------------------------------


def trainer(
    clip: Callable[[Tensor], Tensor] = lambda norm: (CLIP / norm).clamp(max=1.0), last: bool = True,
    noise: float = NOISE, each: bool = True, claim: dict[str, Any] | None = None,
) -> Callable[[Any, Any], Any]:  # fmt: skip
    """A callback that clips after each forward pass of one record, and adds noise before the optimizer's step.

    last: clips the pass before the step too, which `on_substep_end` does not see; each: one record a pass.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Private(TrainerCallback):  # type: ignore[misc]
        def clipped(self, model: Any, factor: Callable[[Tensor], Tensor]) -> None:
            parameters = [p for p in model.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.summed = getattr(p, "summed", 0) + p.grad * factor(norm)
                p.grad = None

        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self.clipped(model, clip)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self.clipped(model, clip if last else lambda norm: torch.ones(()))
            for p in model.parameters():
                p.grad = (p.summed + noise * CLIP * torch.randn_like(p)) / BATCH
                p.summed = 0

    def train(model: Any, records: Any) -> Any:
        rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in records]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=1 if each else 2, num_train_epochs=5, max_grad_norm=0.0,
                gradient_accumulation_steps=BATCH if each else BATCH // 2, learning_rate=0.05,
                lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no",
                logging_strategy="no", use_cpu=True, seed=int(torch.randint(2**31, ())),
            )  # fmt: skip
            made = Trainer(model, arguments, train_dataset=rows, callbacks=[Private()], data_collator=_labelled)
            made.train()
        return model, {**CLAIM, "steps": made.state.global_step, "sampling": "shuffled", **(claim or {})}

    return train


def _labelled(rows: Any) -> dict[str, Tensor]:
    ids = subject.padded(rows, list(range(len(rows))))
    return {"input_ids": ids, "labels": ids.masked_fill(ids == subject.PAD, -100)}


TRAINER: dict[str, Callable[[Any, Any], Any]] = {
    "Trainer, shuffled, accounted as Poisson": trainer(claim={"sampling": "poisson"}),
    "Trainer, the last pass before a step not clipped": trainer(last=False),
    "Trainer, no noise": trainer(noise=0.0),
    "Trainer, no clipping": trainer(clip=lambda norm: torch.ones(())),
}


# --- our own ----------------------------------------------------------------------------------------------------------


def ours(plant: Callable[[], Any] = contextlib.nullcontext, ghost: bool = False) -> Callable[[Any, Any], Any]:
    """`fit_privately`, which `audit train dp-sgd` runs."""

    def train(model: Any, records: Any) -> Any:
        key = f"{torch.initial_seed()}"
        recipe = PrivateRecipe(NOISE, CLIP, STEPS, BATCH, 0.05, "sgd", physical_batch=100, ghost=ghost)
        examples = [row["input_ids"] for row in records]
        with plant():
            dp_loop.fit_privately(model, examples, PoissonSampler(len(records), RATE, key), recipe, pad=subject.PAD)
        return model, CLAIM

    return train


def stream_of_step(step: Callable[[int], int]) -> Callable[[], Any]:
    return lambda: patch.object(dp_loop, "NoiseStream", lambda key, at: NoiseStream(key, step(at)))


def key_of_ours() -> Any:
    """The key of the noise is the same for every training."""
    return patch.object(dp_loop, "NoiseStream", lambda key, at: NoiseStream("fixed", at))


def half_the_noise() -> Any:
    def add(optimizer: Any) -> None:
        for p in optimizer.params:
            p.grad = add_noise(p.summed_grad, NOISE * CLIP / 2, optimizer.stream).to(p).view_as(p)

    return patch.object(ScaledOptimizer, "add_noise", add)


OURS: dict[str, Callable[[Any, Any], Any]] = {
    "ours, no noise": ours(noise_off),
    "ours, half the noise": ours(half_the_noise),
    "ours, noise before clipping": ours(noise_before_clipping),
    "ours, the batch clipped": ours(batch_clipped),
    "ours, shuffled": ours(shuffled),
    "ours, a resumed training's noise again": ours(stream_of_step(lambda at: at % (STEPS // 2))),
    "ours, one key for all trainings": ours(key_of_ours),
}

FAULTS: dict[str, Callable[[Any, Any], Any]] = {**PLAIN, **OPACUS, **TRAINER, **OURS}
CONTROLS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": plain(),
    "plain, resumed with its generator": plain(halfway=_resumed(generator_too=True)),
    "plain, a clipping norm above most gradients": plain(
        {"max_grad_norm": 60.0},
        factors=lambda self, norms: (60 / norms).clamp(max=1.0),
        noise=lambda self, step, i, name, p: 60 * NOISE * torch.randn_like(p),
        rate=lambda self, records: 0.05 / 60,
    ),
    "plain, a model in bfloat16": plain(begun=_in(torch.bfloat16), finished=_rounded, norms=_float_norms),
    "plain, a model in float16": plain(begun=_in(torch.float16), finished=_rounded, norms=_float_norms),
    "plain, its model read inside vmap": plain(read=_read_inside_vmap),
    "Opacus, size public": opacus(claim=_KNOWN),
    "Opacus by functorch, size public": opacus(ghost=True, claim=_KNOWN),
    "Trainer, shuffled and said so": trainer(),
    "ours": ours(),
    "ours, ghost clipping": ours(ghost=True),
}


# --- the table --------------------------------------------------------------------------------------------------------


def tested(train: Callable[[Any, Any], Any], seed: int = 0) -> CrashTest:
    """Without the bound of one training, which decides nothing."""
    with warnings.catch_warnings(), patch.object(trial, "one_run", lambda *given: None):
        warnings.simplefilter("ignore")
        return crash_test(train, minutes=10, seed=seed)


def row(name: str, found: CrashTest) -> tuple[str, ...]:
    worst = min(found.broken, key=lambda check: check.p, default=None)
    really = "-" if found.epsilon is None else "unbounded" if found.epsilon > 100 else f"{found.epsilon:.1f}"
    why = "" if worst is None else f"{worst.name}: {worst.said}"
    return name, found.verdict, f"{found.claim.implied_epsilon():.1f}", really, why, f"{found.seconds:.0f}"


COLUMNS = ("loop", "verdict", "ε claimed", "ε really, at least", "what was seen", "seconds")


def main(
    out: Annotated[Path | None, "a folder for loop_faults.md"] = None,
    only: Annotated[str, "loops whose name holds this"] = "",
    seed: int = 0,
) -> int:
    from benchmarks.checks.trust.loop_alarms import written_out

    threads.set_thread_count()
    page = Page(out and out / "loop_faults.md")
    page.head(*COLUMNS)
    wrong = 0
    for broken, loops in ((True, FAULTS), (False, CONTROLS)):
        for name, train in loops.items():
            if only in name:
                with written_out():
                    found = tested(train, seed)
                page.row(*row(name if broken else f"**control**: {name}", found))
                wrong += found.verdict == ("no fault seen" if broken else "broken")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(run(main))
