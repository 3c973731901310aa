"""The whole crash test: a training is run thrice on what we make, and every check is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from auditor.core.errors import AuditError
from auditor.crash import reach, subject
from auditor.crash.checks import all_checks
from auditor.crash.claim import LoopClaim
from auditor.crash.one_run import OneRun, one_run
from auditor.crash.verdicts import BROKEN, UNKNOWN, LoopCheck, Runs
from auditor.crash.watch import Trace, Train, watched

_OTHER = 0.25  # every second training's embedding: two thirds of a gradient lie there, where the others have half
_ENOUGH, _MOST = 1200, 12  # gradients of single records that are looked at; trainings


@dataclass(frozen=True)
class LoopSeen:
    """What the loop really did. epsilon: by our accountant, of this noise, rate and steps; inf: unbounded.

    noise_multiplier and epsilon are None where no record's reach was seen; low, high: the 95% interval of epsilon that
    the noise multiplier's gives.
    """

    noise_multiplier: float | None
    sample_rate: float
    steps: int
    epsilon: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class CrashTest:
    """The verdict on a private training. epsilon: what it really has, at least; None: nothing against its claim."""

    claim: LoopClaim
    checks: tuple[LoopCheck, ...]
    remarks: tuple[str, ...]
    seconds: float
    seen: LoopSeen
    seed: int = 0
    one_run: OneRun | None = None  # None: there was no time for it

    def of(self, names: Sequence[str]) -> CrashTest:
        """These checks alone; all where none is named. Raises AuditError for a name that no check has."""
        known = [check.name for check in self.checks]
        if unknown := [name for name in names if name not in known]:
            raise AuditError(f"there is no check {unknown[0]!r}; the checks are {', '.join(known)}")
        kept = tuple(check for check in self.checks if check.name in names or not names)
        return replace(self, checks=kept)

    @property
    def broken(self) -> list[LoopCheck]:
        return [check for check in self.checks if check.verdict == BROKEN]

    @property
    def verdict(self) -> str:
        """`broken`, `no fault seen` or `cannot tell`, where no record's reach was seen: never that it is private."""
        if self.broken:
            return BROKEN
        by_name = {check.name: check.verdict for check in self.checks}
        return by_name.get("one record's reach") or next(iter(by_name.values()))

    @property
    def doubted(self) -> bool:
        """Whether what was seen gives more than is claimed, by its own interval, while no check is sure of a fault."""
        return not self.broken and self.seen.low is not None and self.seen.low > self.claim.implied_epsilon()

    @property
    def epsilon(self) -> float | None:
        found = [check.epsilon for check in self.broken if check.epsilon is not None]
        return max(found) if found else None


def crash_test(
    train: Train,
    claim: object = None,
    minutes: float = 2.0,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, all: None,
) -> CrashTest:
    """Run `train(model, records)` on tiny models and records that we make, and hold it against its claim.

    train: trains the model in place by a torch.optim optimizer; records: a list of {"input_ids": [token, ...]}. It
    returns (model, claim), or its claim is given here (`LoopClaim`, or a mapping of its fields). It is run until some
    thousand gradients were seen, at least thrice; tell: gets how many, and of how many. Raises AuditError where the
    training ignores its model or its records, states no claim, or takes longer than so many minutes.
    """
    begun = time.monotonic()
    until = begun + 60 * minutes
    stated = claim
    first, returned = watched(train, own_seed(seed, 0), subject.RECORDS, until)
    if claim is None:
        claim = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else returned
    read = LoopClaim.read(claim)
    if not read.noise_multiplier:
        raise AuditError("expected a claim with noise, got noise_multiplier 0: no epsilon follows from it")
    fewer, _ = watched(train, own_seed(seed, 0), subject.RECORDS - 1, until)
    traces = [first]
    # How often depends on how much is read, not on what is found: the level holds.
    while len(traces) < 2 or (_seen(traces) < _ENOUGH and len(traces) < _MOST and _time(begun, until)):
        tell(_seen(traces), _ENOUGH)
        embedding = _OTHER if len(traces) % 2 else 1.0
        traces.append(watched(train, own_seed(seed, len(traces)), subject.RECORDS, until, embedding)[0])
    runs = Runs(read, tuple(traces), fewer)
    checks = tuple(all_checks(runs))
    bound = one_run(train, stated, own_seed(seed, _MOST), until) if _time(begun, until) else None
    return CrashTest(read, checks, tuple(_remarks(runs)), time.monotonic() - begun, seen(runs, checks), seed, bound)


def own_seed(seed: int, training: int) -> int:
    """Of one of a test's trainings, from 0. No two tests share one: another seed is another draw of all of them."""
    return seed * (_MOST + 1) + training


def seen(runs: Runs, checks: tuple[LoopCheck, ...]) -> LoopSeen:
    """The loop's own numbers: unbounded where a check says so, else what its noise, rate, sampling and steps give.

    Where one kind of record, or one record, is worse off than all together, epsilon is its.
    """
    broken = {check.name: check for check in checks if check.verdict == BROKEN}
    steps = max(len(trace.steps) for trace in runs.traces)
    noise = reach.noise_multiplier(runs) if runs.noisy else (0.0, 0.0, 0.0)
    if any(check.verdict == UNKNOWN for check in checks if check.name == "one record's reach") and runs.noisy:
        noise = None  # a reach below the bound, which is not seen, says nothing of the noise
    if any(check.epsilon == math.inf for check in broken.values()):
        return LoopSeen(noise and noise[0], runs.rate, steps, math.inf, math.inf, math.inf)
    if noise is None:
        return LoopSeen(None, runs.rate, steps, None)
    drawn = {"sampling": "shuffled"} if "Poisson sampling" in broken else {}
    epsilon, high, low = (runs.epsilon(one, steps=steps, **drawn) for one in noise)
    worst = max((check.epsilon for check in broken.values() if check.epsilon is not None), default=0.0)
    return LoopSeen(noise[0], runs.rate, steps, *(max(one, worst) for one in (epsilon, low, high)))


def _seen(traces: list[Trace]) -> int:
    return sum(len(step.records) for trace in traces for step in trace.steps)


def _time(begun: float, until: float) -> bool:
    """Whether half of the time is left: one more training then fits."""
    return time.monotonic() - begun < (until - begun) / 2


def _remarks(runs: Runs) -> list[str]:
    said = []
    if runs.first.evaluated:
        said.append(
            f"{len(runs.first.evaluated)} private records were read without a gradient: whatever is printed of that, "
            "or chosen by it, is outside the claim"
        )
    if runs.first.foreign:
        said.append(f"{runs.first.foreign} rows were none of the records given: not looked at")
    return said
