"""Our private step against Opacus's own loop on the same model and batches; and the memory that ghost clipping saves.

    python -m benchmarks.checks.speed.dp_training [--batch 64] [--physical 16] [--length 64] [--steps 5] [--device cpu]

Opacus's loop is its tutorial's: GradSampleModule, DPOptimizer, physical batches by skipped steps, Adam. Ours adds the
shares of the clipping norm (ADP made sound) and the noise scale (ADP). Loops take turns and the fastest step counts.
Processor time on a CPU, which other people's work disturbs less than the clock. Ratios only.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from auditor.core.nouns import Tokens
from auditor.core.streams import generator
from auditor.runs.machine import peak_memory_mb, reset_peak_memory
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, fit_privately
from auditor.training.finetune import untrained
from auditor.training.per_sample import padded, record_losses
from benchmarks.checks.harness import run

SIGMA, CLIP, RATE = 1.0, 1.0, 1e-3


def neox() -> Any:
    """The lab's model: tied embeddings, 2,048 tokens."""
    return untrained(vocab_size=2048, layers=4, hidden=128, heads=4, positions=512, end=0, seed=0)


def gpt2(width: int = 128, layers: int = 4, vocabulary: int = 2048, tied: bool = True) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 512, "vocab_size": vocabulary}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied))


def gpt2_untied() -> Any:
    return gpt2(256, 6, 8192, tied=False)


def lora() -> Any:
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(neox().requires_grad_(False), config)


def now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def ours(model: Any, examples: list[Tokens], steps: int, physical: int, **more: Any) -> float:
    """Seconds of the fastest step, every example in every batch; the first step and the check of gradients aside."""
    marks: list[float] = []
    device = next(model.parameters()).device
    ghost = more.pop("ghost", False)
    recipe = PrivateRecipe(SIGMA, CLIP, steps + 1, len(examples), RATE, physical_batch=physical, ghost=ghost)
    sampler = PoissonSampler(len(examples), 1.0, "speed")
    fit_privately(
        model, examples, sampler, recipe, pad=0, progress=lambda done, loss: marks.append(now(device)), **more
    )
    return min(after - before for before, after in itertools.pairwise(marks))


def theirs(model: Any, examples: list[Tokens], steps: int, physical: int) -> float:
    rule = GradSampleModule.GRAD_SAMPLERS.pop(Conv1D)  # ours; Opacus has none, and goes through functorch
    try:
        wrapped = GradSampleModule(model.train(), loss_reduction="mean")
        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        optimizer = DPOptimizer(
            torch.optim.Adam(parameters, lr=RATE),
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            expected_batch_size=len(examples),
        )
        took = []
        for _ in range(steps + 1):
            start = now(parameters[0].device)
            for first in range(0, len(examples), physical):
                optimizer.signal_skip_step(first + physical < len(examples))
                part = examples[first : first + physical]
                record_losses(wrapped, *padded(part, 0, parameters[0].device)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            took.append(now(parameters[0].device) - start)
        wrapped.cleanup()
        return min(took[1:])
    finally:
        GradSampleModule.GRAD_SAMPLERS[Conv1D] = rule


def memory(work: Callable[[], object], device: str) -> float:
    """MB that the work adds to what was there before."""
    gc.collect()
    reset_peak_memory()
    before = peak_memory_mb(torch.device(device))
    work()
    return peak_memory_mb(torch.device(device)) - before


def main(
    batch: int = 64, physical: int = 16, length: int = 64, steps: int = 5, rounds: int = 3, device: str = "cpu"
) -> None:
    warnings.filterwarnings("ignore", message="Full backward hook")
    warnings.filterwarnings("ignore", category=FutureWarning)
    examples = [tuple(generator("speed", i).integers(1, 2048, length).tolist()) for i in range(batch)]
    kinds: dict[str, dict[str, Any]] = {
        "DP-SGD": {},
        "ADP": {"noise_scale": lambda units: 0.5},
        "ADP, sound": {"shares": [0.5] * batch},
    }
    print(f"batch {batch} in parts of {physical}, {length} tokens: our step over Opacus's (at most 1.1 wanted)")
    for make in (neox, gpt2, lora):
        best = {name: float("inf") for name in ("Opacus", *kinds)}
        for _ in range(rounds):
            best["Opacus"] = min(best["Opacus"], theirs(make().to(device), examples, steps, physical))
            for name, more in kinds.items():
                mine = ours(make().to(device), examples, steps, physical, **more)
                best[name] = min(best[name], mine)
        ratios = ", ".join(f"{name} {best[name] / best['Opacus']:.2f}" for name in kinds)
        print(f"{make.__name__:>12}  {ratios}", flush=True)
    print("memory that one training adds, MB (untied GPT-2, 6 x 256, 8,192 tokens):")
    for ghost in (True, False):
        model = gpt2_untied().to(device)
        added = memory(lambda m=model, g=ghost: ours(m, examples, 1, physical, ghost=g), device)  # type: ignore[misc]
        took = ours(gpt2_untied().to(device), examples, steps, physical, ghost=ghost)
        print(f"{'ghost' if ghost else 'per-sample':>12}  {added:8.0f} MB  {took:.2f} s a step", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(main))
