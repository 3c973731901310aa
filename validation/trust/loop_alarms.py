"""Measure how often `audit dp-loop` calls an honest training broken, and the coverage of its
interval.

    python -m validation.trust.loop_alarms COUNT [--first 0] [--kinds NAME ...] [-o DIR]

The whole crash test is run with seeds from FIRST on, for every kind of honest loop; each training
has noise of its own. Each finished test is a line of DIR/loop_alarms.jsonl and is not repeated.
Only parts that cost time and decide nothing are left out: the bound from one training, the exact
accountant (a smooth one replaces it), and the forward pass of a plain loop; models are copies.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
from scipy import stats

from auditor.core import threads
from auditor.crash import claim, training_specimen
from auditor.crash.trial import CrashTest
from auditor.crash.verdicts import LEVEL, UNKNOWN
from auditor.privacy import gaussian
from auditor.statistics.one_run import compute_gaussian_epsilon
from validation.harness import Page, run
from validation.trust import loop_plain
from validation.trust.loop_faults import tested, written_out
from validation.trust.loop_plain import Plain, plain
from validation.trust.loop_variants import (
    SUM_NOISE,
    WithAdaptiveClipping,
    WithMomentum,
    WithTensorBounds,
    WithUnfreezing,
    allocate,
    make_bounded_loop,
)

_made = cache(training_specimen.Specimen.build_crash_test_model)


@cache
def smooth_epsilon(sigma: float, q: float, steps: int, delta: float, earlier: Any = ()) -> float:
    """Return epsilon by the central limit theorem (Bu et al. 2020), which is smooth.

    Integer Renyi orders have kinks in sigma and q, which would shift an interval; only the error
    of the observed noise should count here.
    """
    mu = math.sqrt(steps) / sigma if q >= 1 else q * math.sqrt(steps * math.expm1(sigma**-2))
    return compute_gaussian_epsilon(mu, delta)


@contextmanager
def quickly() -> Iterator[None]:
    copied = patch.object(
        training_specimen.Specimen,
        "build_crash_test_model",
        lambda self: copy.deepcopy(_made(self)),
    )
    quick = patch.object(gaussian, "compute_quick_rdp_epsilon", smooth_epsilon)
    with copied, quick, patch.object(claim, "compute_claimed_epsilon", smooth_epsilon):
        yield


def _unread(self: Plain, model: Any) -> None:
    """Replace the model's forward pass; hooks that watch its inputs remain."""
    model.forward = lambda **given: None


def _in_turn(self: Plain, step: int, n: int) -> list[int]:
    """Return a batch of constant size, from a new random order in each pass."""
    at = step % (n // self.batch)
    if not at:
        object.__setattr__(self, "order", torch.randperm(n).tolist())
    order: list[int] = vars(self)["order"]
    return order[self.batch * at : self.batch * (at + 1)]


# Half as many steps with twice as many records as in the other loops: the same number of reads in
# half of the time.
_STEPS, _RATE = loop_plain.STEPS // 2, 2 * loop_plain.RATE
_SHORT: dict[str, Any] = {"steps": _STEPS, "sample_rate": _RATE}
_PARTS: dict[str, Any] = {"batch": 2 * loop_plain.BATCH, "sampling_rate": _RATE, "begun": _unread}
KINDS: dict[str, Callable[[int], Plain]] = {
    "plain": lambda seed: plain(_SHORT, _STEPS, **_PARTS),
    "shuffled": lambda seed: plain(
        {**_SHORT, "sampling": "shuffled"}, _STEPS, **_PARTS, drawn=_in_turn
    ),
    "allocation": lambda seed: plain(
        {**_SHORT, "sampling": "allocation"}, _STEPS, **_PARTS, drawn=allocate
    ),
    "momentum": lambda seed: plain(_SHORT, _STEPS, WithMomentum, **_PARTS),
    "adaptive clipping": lambda seed: plain(_SHORT, _STEPS, WithAdaptiveClipping, **_PARTS),
    "noise per tensor": lambda seed: plain(_SHORT, _STEPS, WithTensorBounds, **_PARTS),
    "gradual unfreezing": lambda seed: plain(_SHORT, _STEPS, WithUnfreezing, **_PARTS),
    "a bound of 0.1 to 10 medians": lambda seed: make_bounded_loop(
        _share_of_seed(seed), _SHORT, _STEPS, **_PARTS
    ),
}


def _share_of_seed(seed: int) -> float:
    """Return a share of the median gradient norm from 0.1 to 10.

    Consecutive seeds are spread evenly on a log scale.
    """
    return float(10 ** (2 * (seed * 0.6180339887 % 1) - 1))


def share(count: int, of: int) -> str:
    if not of:
        return "none of 0"
    found = stats.binomtest(count, of).proportion_ci(method="exact")
    return f"{count} of {of}: {count / of:.1%} [{found.low:.1%}, {found.high:.1%}]"


def main(
    count: Annotated[int, "honest trainings under the whole test"],
    first: Annotated[int, "the first seed"] = 0,
    kinds: Annotated[tuple[str, ...], "kinds of honest loop; all if none is named"] = (),
    out: Annotated[Path | None, "a folder for loop_alarms.jsonl and .md"] = None,
) -> int:
    threads.set_thread_count()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    page = Page(out and out / "loop_alarms.md")
    held = counted(
        range(first, first + count), kinds or tuple(KINDS), out and out / "loop_alarms.jsonl"
    )
    alarms = summed(held, page)
    return int(stats.binomtest(alarms, len(held)).proportion_ci(method="exact").low > LEVEL)


Row = dict[str, Any]  # results of the test with one seed


def counted(seeds: range, kinds: Sequence[str], file: Path | None) -> list[Row]:
    """Return a row for each seed and kind. file: earlier rows, to which each new row is
    appended.
    """
    rows = {}
    if file is not None and file.exists():
        rows = {
            (row["seed"], row["kind"]): row
            for row in map(json.loads, file.read_text().splitlines())
        }
    wanted = [(seed, kind) for seed in seeds for kind in kinds]
    for seed, kind in wanted:
        if (seed, kind) in rows:
            continue
        # A shared seed would share its noise between kinds, and their alarms would coincide.
        own_seed = seed * len(KINDS) + list(KINDS).index(kind)
        with quickly(), written_out():
            rows[seed, kind] = row(seed, kind, tested(KINDS[kind](own_seed), own_seed))
        if file is not None:
            with file.open("a") as lines:
                lines.write(json.dumps(rows[seed, kind]) + "\n")
    return [rows[each] for each in wanted]


def row(seed: int, kind: str, test: CrashTest) -> Row:
    low = test.loop.low
    high = test.loop.high
    true = test.claim
    if kind == "adaptive clipping":  # its gradients have a little more noise than its claim
        true = replace(true, noise_multiplier=SUM_NOISE)
    return {
        "seed": seed,
        "kind": kind,
        "verdict": test.verdict,
        "broken": {check.name: f"{check.said} (p = {check.p:.2g})" for check in test.broken_checks},
        "reach": test.loop.noise_multiplier and 1 / test.loop.noise_multiplier,
        "inside": None
        if low is None or high is None
        else low <= true.compute_implied_epsilon() <= high,
        "doubted": test.exceeds_claim_without_fault,
        "seconds": round(test.seconds, 1),
    }


def summed(held: list[Row], page: Page) -> int:
    """Print alarms and the noise estimates of each kind; return the number of alarms."""
    for one in held:
        for check, said in one["broken"].items():
            page.say(f"seed {one['seed']}, {one['kind']}: {check}: {said}")
    for kind in KINDS:
        own = [one for one in held if one["kind"] == kind]
        if not own:
            continue
        reaches = [one["reach"] for one in own if one["reach"] is not None]
        mean = "mean reach unknown"
        if reaches:
            error = 1.96 * float(np.std(reaches)) / math.sqrt(len(reaches))
            mean = f"mean reach {np.mean(reaches):.4f} ± {error:.4f}"
        intervals = [one["inside"] for one in own if one["inside"] is not None]
        page.say(
            f"{kind}: broken {share(sum(bool(one['broken']) for one in own), len(own))}; cannot "
            f"tell {sum(one['verdict'] == UNKNOWN for one in own)}; {mean}; its 95% interval "
            f"holds the claim in {share(sum(intervals), len(intervals))}; "
            f"doubted {share(sum(one['doubted'] for one in own), len(own))}"
        )
    by_check = Counter(check for one in held for check in one["broken"])
    page.say(
        "by check: " + (", ".join(f"{name} {n}" for name, n in by_check.most_common()) or "none")
    )
    alarms = sum(bool(one["broken"]) for one in held)
    page.say(f"in all: broken {share(alarms, len(held))}")
    return alarms


if __name__ == "__main__":
    raise SystemExit(run(main))
