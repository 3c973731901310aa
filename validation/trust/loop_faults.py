"""Plant faults in four kinds of private training loop, and list which `audit dp-loop` calls
broken.

    python -m validation.trust.loop_faults [-o DIR] [--only NAME ...] [--seed 0]

The loops are plain PyTorch, Opacus, the Hugging Face Trainer with a callback, and our own trainer,
each with one thing broken from outside. Controls have no fault. Exits with 1 if a control is
called broken, or if a harmful fault is not seen. A faster implementation computes gradients of
single records; the first step of each test compares them with the crash test's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, one_hot

from auditor.core import threads
from auditor.core.errors import AuditError
from auditor.crash import training_specimen, trial, watch
from auditor.crash.training_specimen import SpecimenRecordGradients
from auditor.crash.trial import CrashTest, crash_test
from auditor.crash.verdicts import UNKNOWN
from auditor.crash.watch import copy_watched_model_without_hooks
from validation.harness import Page, run
from validation.trust import loop_plain, loop_plants
from validation.trust.loop_packages import HONEST_PACKAGES, OPACUS, OURS, TRAINER
from validation.trust.loop_plain import Loop
from validation.trust.loop_plants import HONEST_PLAIN, PLAIN
from validation.trust.loop_variants import DIVIDED, HONEST_VARIANTS, SILENT_OPACUS

FAULTS: dict[str, Loop] = {**PLAIN, **DIVIDED, **OPACUS, **SILENT_OPACUS, **TRAINER, **OURS}
HARMLESS = {
    "noise for each of two micro-batches": "twice the variance: more private than its claim",
    "tied weights counted twice": "the two uses' gradients are at right angles: a reach of 1.02 at "
    "most",
}
CONTROLS: dict[str, Loop] = {**HONEST_PLAIN, **HONEST_VARIANTS, **HONEST_PACKAGES}


def tested(train: Loop, seed: int = 0) -> CrashTest:
    """Run the crash test without the bound from one training, which decides nothing."""
    with (
        warnings.catch_warnings(),
        patch.object(trial, "bound_loop_epsilon", lambda *given: None),
    ):
        warnings.simplefilter("ignore")
        return crash_test(train, minutes=10, seed=seed)


def row(name: str, found: CrashTest | AuditError) -> tuple[str, ...]:
    """Return a table row; if the test refused the loop, the row has the reason."""
    if isinstance(found, AuditError):
        return name, "refused", "", "-", str(found), ""
    worst = min(found.broken_checks, key=lambda check: check.p, default=None)
    really = (
        "-"
        if found.epsilon is None
        else "unbounded"
        if found.epsilon > 100
        else f"{found.epsilon:.1f}"
    )
    why = "" if worst is None else f"{worst.name}: {worst.said}"
    if found.verdict == "no fault seen":
        why = HARMLESS.get(name, "")
    if found.verdict == "cannot tell":
        unknown = (
            one for one in found.checks if one.name in trial._NEEDED and one.verdict == UNKNOWN
        )
        why = "; ".join(f"{one.name}: {one.said}" for one in unknown)
    return (
        name,
        found.verdict,
        f"{found.claim.compute_implied_epsilon():.1f}",
        really,
        why,
        f"{found.seconds:.0f}",
    )


def _judged(train: Loop, seed: int) -> CrashTest | AuditError:
    with written_out():
        try:
            return tested(train, seed)
        except AuditError as error:
            return error


# --- gradients, quickly ---

_HEADS, _EPS = 2, 1e-5
_SLOW = SpecimenRecordGradients.record_gradients_at_weights


def logits(w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the logits of the test model with separate weights for each row, (b, n, words).

    w: weights (b, *shape) by name; ids: (b, n).
    """
    layer = {name.removeprefix("gpt_neox.layers.0."): value for name, value in w.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.baddbmm(layer[f"{name}.bias"].unsqueeze(1), x, layer[f"{name}.weight"].mT)

    def normed(x: Tensor, name: str) -> Tensor:
        plainly = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=_EPS)
        return plainly * layer[f"{name}.weight"].unsqueeze(1) + layer[f"{name}.bias"].unsqueeze(1)

    embedding = w["gpt_neox.embed_in.weight"]
    x = one_hot(ids, embedding.shape[1]).to(embedding) @ embedding
    mixed = linear(normed(x, "input_layernorm"), "attention.query_key_value")
    q, k, v = mixed.view(*ids.shape, _HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
    scores = _turned(q) @ _turned(k).mT / math.sqrt(q.shape[-1])
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    seen = (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
    inner = gelu(linear(normed(x, "post_attention_layernorm"), "mlp.dense_h_to_4h"))
    x = x + linear(seen, "attention.dense") + linear(inner, "mlp.dense_4h_to_h")
    return normed(x, "gpt_neox.final_layer_norm") @ w["lm_head.weight"].mT


def _turned(x: Tensor) -> Tensor:
    """Apply rotary positions to a quarter of each head, here two of eight numbers."""
    angle = torch.arange(x.shape[2], dtype=torch.float)
    one, other = x[..., 0], x[..., 1]
    turned = torch.stack(
        [one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1
    )
    return torch.cat([turned, x[..., 2:]], -1)


@dataclass
class Quick:
    """A faster `SpecimenRecordGradients` of the plain model, checked at its first query."""

    checked: bool = False

    def at(
        self,
        own: SpecimenRecordGradients,
        weights: dict[str, Tensor],
        wanted: list[int],
        names: list[str],
    ) -> dict[str, Tensor]:
        rows = training_specimen.pad_specimen_tokens(own.records, wanted)
        each = {
            name: weights[name].detach().expand(len(rows), *parameter.shape)
            for name, parameter in own.twin.named_parameters()
        }
        found = quick(rows, each, names)
        if not self.checked:
            self.checked = True
            for name, value in _SLOW(own, weights, wanted, names).items():
                close = 1e-5 * float(value.abs().max())
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=close)
        return found


def quick(ids: Tensor, weights: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Return each record's gradients, (b, *shape) by name, at its own weights, for token ids
    (b, n).

    One backward pass of torch computes them.
    """
    own = {name: value.requires_grad_() for name, value in weights.items()}
    given = logits(own, ids)[:, :-1].transpose(1, 2)
    each = cross_entropy(
        given, ids[:, 1:], ignore_index=training_specimen.PAD, reduction="none"
    ).sum(1)
    loss = (each / (ids[:, 1:] != training_specimen.PAD).sum(1)).sum()
    return dict(zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True))


@contextmanager
def written_out() -> Iterator[None]:
    """Use one copy of the model, reloaded with weights at each query, and the faster gradients."""
    last, twin = (
        Quick(),
        copy_watched_model_without_hooks(training_specimen.build_tiny_specimen_model(0)),
    )
    layers = [(name, value.shape, value.dtype) for name, value in twin.named_parameters()]

    def copied(model: Any) -> Any:
        own = [(name, value.shape, value.dtype) for name, value in model.named_parameters()]
        return twin if own == layers else copy_watched_model_without_hooks(model)

    def at(own: SpecimenRecordGradients, *given: Any) -> dict[str, Tensor]:
        return (last.at if own.twin is twin else _SLOW)(own, *given)

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(SpecimenRecordGradients, "record_gradients_at_weights", at)
        )
        for module in (watch, loop_plain, loop_plants):
            stack.enter_context(patch.object(module, "copy_watched_model_without_hooks", copied))
        yield


# --- the table ---


def main(
    out: Annotated[Path | None, "a folder for loop_faults.md"] = None,
    only: Annotated[tuple[str, ...], "loops whose name holds one of these"] = (),
    seed: int = 0,
) -> int:
    threads.set_thread_count()
    page = Page(out and out / "loop_faults.md")
    page.head("loop", "verdict", "ε claimed", "ε really, at least", "what was seen", "seconds")
    wrong = 0
    for broken, loops in ((True, FAULTS), (False, CONTROLS)):
        for name, train in loops.items():
            if not only or any(one in name for one in only):
                shown = row(name if broken else f"**control**: {name}", _judged(train, seed))
                page.row(*shown)
                missed = broken and shown[1] == "no fault seen" and name not in HARMLESS
                wrong += missed or (not broken and shown[1] in ("broken", "refused"))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(run(main))
