"""Define loops of Opacus, the Hugging Face Trainer and our own trainer, and faults planted in
them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, WeightedRandomSampler

from auditor.crash import training_specimen
from auditor.training import dp_loop
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, ScaledOptimizer
from auditor.training.noise import NoiseStream, add_gaussian_noise
from validation.trust.loop_plain import BATCH, CLAIM, CLIP, DELTA, NOISE, RATE, STEPS, Loop
from validation.trust.loop_plants import tied
from validation.trust.planted_faults import (
    batch_clipped,
    noise_before_clipping,
    noise_off,
    shuffled,
)

# --- Opacus ---


def _mean_of_record_means(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over records of each record's mean nll.

    In a mean over the batch's tokens, the other records would change a record's weight.
    """
    losses = cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=training_specimen.PAD, reduction="none"
    )
    return (losses.sum(1) / targets.ne(training_specimen.PAD).sum(1)).mean()


def opacus(
    poisson: bool = True,
    ghost: bool = False,
    after: Callable[[Any], object] = lambda optimizer: None,
    claim: dict[str, Any] | None = None,
    sides: Callable[[Any, int], object] = lambda model, step: None,
    told: bool = False,
    begun: Callable[[Any], Any] = lambda model: model,
    sampler: Callable[[Any], Any] = lambda records: None,
) -> Loop:
    """Return a loop with Opacus's `make_private`, as in its tutorials.

    after: changes the optimizer; sides: called before each step; told: whether the claim comes
    from Opacus's accountant; begun: returns the model to train; sampler: returns the loader's
    sampler.
    """

    def train(model: Any, records: Any) -> Any:
        from opacus import PrivacyEngine

        trained, own = begun(model), sampler(records)
        optimizer: Any = torch.optim.SGD(
            [p for p in trained.parameters() if p.requires_grad], lr=0.05
        )
        shuffle = None if own is not None else not poisson
        loader: Any = DataLoader(
            records, batch_size=BATCH, collate_fn=_rows, shuffle=shuffle, sampler=own
        )
        rate = 1 / len(loader)
        engine = PrivacyEngine()
        private, optimizer, loader = engine.make_private(
            module=trained,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            poisson_sampling=poisson,
            grad_sample_mode="functorch" if ghost else "hooks",
        )
        after(optimizer)
        steps = 0
        for _ in range(STEPS // len(loader)):
            for ids in loader:
                optimizer.zero_grad()
                if len(ids):
                    logits = private(input_ids=ids, use_cache=False).logits[:, :-1]
                    _mean_of_record_means(logits, ids[:, 1:]).backward()
                sides(optimizer, steps)
                optimizer.step()
                steps += 1
        if told:
            return model, {"engine": engine, "max_grad_norm": CLIP, "delta": DELTA, **(claim or {})}
        return model, {**CLAIM, "sample_rate": rate, "steps": steps, **(claim or {})}

    return train


def _rows(rows: Any) -> Tensor:
    """Return the padded rows, or an empty batch (0, 2) without rows."""
    return _padded(rows) if len(rows) else torch.zeros(0, 2, dtype=torch.long)


def _padded(rows: Any) -> Tensor:
    return training_specimen.pad_specimen_tokens(rows, list(range(len(rows))))


def _set(**values: Any) -> Callable[[Any], object]:
    return lambda optimizer: [setattr(optimizer, name, value) for name, value in values.items()]


def _bypassed(optimizer: Any, step: int) -> None:
    """Take every fifth step with the wrapped optimizer and the raw gradient."""
    if step % 5 == 4:
        optimizer.original_optimizer.step()


def _seeded(optimizer: Any) -> None:
    optimizer.generator = torch.Generator().manual_seed(0)


def _summed_later(optimizer: Any) -> None:
    """Replace clipping as some tutorials do: clip the sum of the gradients instead of each
    gradient.
    """

    def clip_and_accumulate() -> None:
        whole = [p.grad_sample.sum(0) for p in optimizer.params]
        norm = torch.stack([one.norm() for one in whole]).norm()
        for p, one in zip(optimizer.params, whole, strict=True):
            p.summed_grad = one * (CLIP / norm).clamp(max=1.0)

    optimizer.clip_and_accumulate = clip_and_accumulate


def _adapted(model: Any) -> Any:
    """Add LoRA with PEFT, which puts the trained layers inside the model's own layers."""
    from peft import LoraConfig, get_peft_model

    layers = ["query_key_value", "dense_h_to_4h"]
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=layers, task_type="CAUSAL_LM")
    ).train()


def _weighted(share: float) -> Callable[[Any], Any]:
    """Return a sampler with replacement and unequal weights; it draws `share` of the records per
    pass.

    Opacus replaces it with Poisson sampling if it may.
    """
    return lambda records: WeightedRandomSampler(
        torch.linspace(1, 4, len(records)),
        num_samples=round(share * len(records)),
        replacement=True,
    )


_KNOWN = {"public_size": True}
OPACUS: dict[str, Loop] = {
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
    "Opacus, a weighted sampler, not made Poisson": opacus(
        poisson=False, sampler=_weighted(1), claim={**_KNOWN, "sampling": "shuffled"}
    ),
}


# --- the Hugging Face Trainer ---


def trainer(
    clip: Callable[[Tensor], Tensor] = lambda norm: (CLIP / norm).clamp(max=1.0),
    last: bool = True,
    noise: float = NOISE,
    each: bool = True,
    claim: dict[str, Any] | None = None,
    quiet: bool = True,
) -> Loop:
    """Return a Trainer loop whose callback clips after each forward pass and adds noise before a
    step.

    last: whether to clip the pass before the step too, which `on_substep_end` does not see; each:
    whether a pass has only one record; quiet: whether to hide the Trainer's loss output.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Private(TrainerCallback):  # type: ignore[misc]
        def clipped(self, model: Any, factor: Callable[[Tensor], Tensor]) -> None:
            parameters = [p for p in model.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.summed = getattr(p, "summed", 0) + p.grad * factor(norm)
                p.grad = None

        def on_substep_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
        ) -> None:
            self.clipped(model, clip)

        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
        ) -> None:
            self.clipped(model, clip if last else lambda norm: torch.ones(()))
            for p in model.parameters():
                p.grad = (p.summed + noise * CLIP * torch.randn_like(p)) / BATCH
                p.summed = 0

    def train(model: Any, records: Any) -> Any:
        rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in records]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=1 if each else 2,
                num_train_epochs=5,
                max_grad_norm=0.0,
                gradient_accumulation_steps=BATCH if each else BATCH // 2,
                learning_rate=0.05,
                lr_scheduler_type="constant",
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                seed=int(torch.randint(2**31, ())),
            )
            made = Trainer(
                model, arguments, train_dataset=rows, callbacks=[Private()], data_collator=_labelled
            )
            # Otherwise transformers divides each loss by the tokens of all texts of the step, a
            # fault.
            made.model_accepts_loss_kwargs = False
            if quiet:
                made.remove_callback(PrinterCallback)
            made.train()
        return model, {
            **CLAIM,
            "steps": made.state.global_step,
            "sampling": "shuffled",
            **(claim or {}),
        }

    return train


def _labelled(rows: Any) -> dict[str, Tensor]:
    ids = _padded(rows)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == training_specimen.PAD, -100)}


TRAINER: dict[str, Loop] = {
    "Trainer, shuffled, accounted as Poisson": trainer(claim={"sampling": "poisson"}),
    "Trainer, the last pass before a step not clipped": trainer(last=False),
    "Trainer, as it prints the training's loss": trainer(quiet=False),
    "Trainer, no noise": trainer(noise=0.0),
    "Trainer, no clipping": trainer(clip=lambda norm: torch.ones(())),
}


# --- our trainers ---


def ours(plant: Callable[[], Any] = contextlib.nullcontext, ghost: bool = False) -> Loop:
    """Return a loop with `fit_privately`, which `audit train dp-sgd` runs. plant: plants a
    fault.
    """

    def train(model: Any, records: Any) -> Any:
        key = f"{torch.initial_seed()}"
        recipe = PrivateRecipe(
            NOISE, CLIP, STEPS, BATCH, 0.05, "sgd", physical_batch=100, ghost=ghost
        )
        examples = [row["input_ids"] for row in records]
        with plant():
            sampler = PoissonSampler(len(records), RATE, key)
            dp_loop.fit_privately(model, examples, sampler, recipe, pad=training_specimen.PAD)
        return model, CLAIM

    return train


def stream(made: Callable[[str, int], NoiseStream]) -> Callable[[], Any]:
    """Return a fault that replaces the noise stream of a key and step."""
    return lambda: patch.object(dp_loop, "NoiseStream", made)


def half_the_noise() -> Any:
    def add(optimizer: Any) -> None:
        for p in optimizer.params:
            p.grad = (
                add_gaussian_noise(p.summed_grad, NOISE * CLIP / 2, optimizer.stream)
                .to(p)
                .view_as(p)
            )

    return patch.object(ScaledOptimizer, "add_noise", add)


OURS: dict[str, Loop] = {
    "ours, no noise": ours(noise_off),
    "ours, half the noise": ours(half_the_noise),
    "ours, noise before clipping": ours(noise_before_clipping),
    "ours, the batch clipped": ours(batch_clipped),
    "ours, shuffled": ours(shuffled),
    "ours, a resumed training's noise again": ours(
        stream(lambda key, at: NoiseStream(key, at % (STEPS // 2)))
    ),
    "ours, one key for all trainings": ours(stream(lambda key, at: NoiseStream("fixed", at))),
}
HONEST_PACKAGES: dict[str, Loop] = {
    "Opacus, size public": opacus(claim=_KNOWN),
    "Opacus by functorch, size public": opacus(ghost=True, claim=_KNOWN),
    "Opacus, a weighted sampler, made Poisson (issue 813)": opacus(
        sampler=_weighted(0.5), claim=_KNOWN, told=True
    ),
    "Opacus, LoRA by PEFT (issues 820, 827)": opacus(begun=_adapted, claim=_KNOWN),
    "Opacus, tied weights": opacus(begun=tied, claim=_KNOWN),
    "Trainer, shuffled and said so": trainer(),
    "ours": ours(),
    "ours, ghost clipping": ours(ghost=True),
}
