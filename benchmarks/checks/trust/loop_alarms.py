"""How often `audit dp-loop` calls an honest training broken, and whether what it saw of its noise holds the claim.

    python -m benchmarks.checks.trust.loop_alarms COUNT [--first 0] [-o DIR]

The whole crash test, of seeds FIRST and on: an even seed trains with Poisson sampling, an odd one on shuffled batches.
Only what costs time and decides nothing is left out: the bound from one training, the exact accountant, the forward
pass that a plain loop makes beside its gradients. Gradients of single records come from the layers written out, which
each training's first step holds against those of the crash test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, one_hot

from auditor.core import threads
from auditor.crash import claim, subject, trial, watch
from auditor.crash.subject import Gradients
from auditor.crash.trial import CrashTest
from auditor.crash.verdicts import LEVEL
from auditor.crash.watch import bare
from auditor.privacy import gaussian
from benchmarks.checks.harness import Page, run
from benchmarks.checks.trust import loop_faults
from benchmarks.checks.trust.loop_faults import BATCH, Plain, plain, tested

_HEADS, _EPS = 2, 1e-5
_SLOW = Gradients.at


def logits(w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The subject's model, with other weights for each row. w: name -> (b, *shape); ids: (b, n) -> (b, n, words)."""
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
    """Rotary positions on a quarter of a head, here two of eight numbers."""
    angle = torch.arange(x.shape[2], dtype=torch.float)
    one, other = x[..., 0], x[..., 1]
    turned = torch.stack([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)
    return torch.cat([turned, x[..., 2:]], -1)


@dataclass
class Quick:
    """`Gradients.at` of the plain model: layers written out, and what was asked last, which loop and test both ask."""

    weights: Tensor | None = None
    wanted: tuple[int, ...] = ()
    found: dict[str, Tensor] = field(default_factory=dict)

    def at(self, own: Gradients, weights: dict[str, Tensor], wanted: list[int], names: list[str]) -> dict[str, Tensor]:
        embedding = weights["gpt_neox.embed_in.weight"]
        first = self.weights is None or not vars(own).get("held")
        if first or self.wanted != tuple(wanted) or not torch.equal(embedding, self.weights):
            self.weights, self.wanted = embedding.clone(), tuple(wanted)
            self.found = quick(own.records, weights, wanted, names)
        if first:
            object.__setattr__(own, "held", True)
            for name, value in _SLOW(own, weights, wanted, names).items():
                close = 1e-5 * float(value.abs().max())
                torch.testing.assert_close(self.found[name], value, rtol=1e-3, atol=close)
        return self.found


def quick(records: Any, weights: dict[str, Tensor], wanted: list[int], names: list[str]) -> dict[str, Tensor]:
    """name -> (records wanted, *shape), by torch's own backward pass."""
    ids = subject.padded(records, wanted)
    own = {name: value.detach().expand(len(ids), *value.shape).requires_grad_() for name, value in weights.items()}
    given = logits(own, ids)[:, :-1].transpose(1, 2)
    each = cross_entropy(given, ids[:, 1:], ignore_index=subject.PAD, reduction="none").sum(1)
    loss = (each / (ids[:, 1:] != subject.PAD).sum(1)).sum()
    return dict(zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True))


@contextmanager
def quickly() -> Iterator[None]:
    last = Quick()
    with ExitStack() as stack:
        stack.enter_context(patch.object(Gradients, "at", lambda own, *given: last.at(own, *given)))
        twin = bare(subject.model(0))
        for module in (watch, loop_faults):  # one copy of the model, which gets its weights anew wherever it is read
            stack.enter_context(patch.object(module, "bare", lambda model: twin))
        stack.enter_context(patch.object(claim, "epsilon", gaussian.quick_epsilon))
        stack.enter_context(patch.object(trial, "one_run", lambda *given: None))
        yield


def _unread(self: Plain, model: Any) -> None:
    """Its hooks, which see what is read, stay."""
    model.forward = lambda **given: None


def _in_turn(self: Plain, step: int, n: int) -> list[int]:
    """Batches of one size, of an order drawn anew for each pass."""
    at = step % (n // BATCH)
    if not at:
        object.__setattr__(self, "order", torch.randperm(n).tolist())
    order: list[int] = vars(self)["order"]
    return order[BATCH * at : BATCH * (at + 1)]


KINDS: dict[str, Plain] = {
    "Poisson": plain(begun=_unread),
    "shuffled": plain({"sampling": "shuffled"}, begun=_unread, drawn=_in_turn),
}


def share(count: int, of: int) -> str:
    found = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count} of {of}: {count / of:.1%} [{found.low:.1%}, {found.high:.1%}]"


def main(
    count: Annotated[int, "honest trainings under the whole test"],
    first: Annotated[int, "the first seed"] = 0,
    out: Annotated[Path | None, "a folder for loop_alarms.md"] = None,
) -> int:
    threads.set_thread_count()
    with quickly():
        return counted(count, first, out)


def counted(count: int, first: int, out: Path | None) -> int:
    page = Page(out and out / "loop_alarms.md")
    begun, tests, alarms = time.monotonic(), list[tuple[str, CrashTest]](), 0
    for seed in range(first, first + count):
        kind = list(KINDS)[seed % len(KINDS)]
        found = tested(KINDS[kind], seed)
        tests.append((kind, found))
        for check in found.broken:
            page.say(f"seed {seed}, {kind}: {check.name}: {check.said} (p = {check.p:.2g})")
        if len(tests) % 10 == 0 or len(tests) == count:
            alarms = summed(tests, page, time.monotonic() - begun)
    return int(stats.binomtest(alarms, count).proportion_ci(method="exact").low > LEVEL)


def summed(tests: list[tuple[str, CrashTest]], page: Page, seconds: float) -> int:
    """Says how many were called broken, and how the noise multiplier and its interval did -> how many."""
    for kind in KINDS:
        held = [test for one, test in tests if one == kind]
        if not held:
            continue
        seen = torch.tensor([1 / (test.seen.noise_multiplier or math.nan) for test in held])
        inside = sum((t.seen.low or 0) <= t.claim.implied_epsilon() <= (t.seen.high or math.inf) for t in held)
        error = float(seen.std()) / math.sqrt(len(held))
        page.say(
            f"{kind}: broken {share(sum(bool(t.broken) for t in held), len(held))}; mean reach {seen.mean():.4f} "
            f"± {1.96 * error:.4f}; its 95% interval holds the claim in {share(inside, len(held))}; "
            f"doubted {share(sum(t.doubted for t in held), len(held))}"
        )
    alarms = sum(bool(test.broken) for _, test in tests)
    page.say(f"in all: broken {share(alarms, len(tests))}; {seconds / len(tests):.1f} s each")
    return alarms


if __name__ == "__main__":
    raise SystemExit(run(main))
