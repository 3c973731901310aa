"""Faults planted in four kinds of private training loop: which of them `audit dp-loop` calls broken.

    python -m benchmarks.checks.trust.loop_faults [-o DIR] [--only NAME ...] [--seed 0]

A plain PyTorch loop, Opacus, the Hugging Face Trainer with a callback, and our own trainer, each with one thing broken
from outside. Controls have no fault. A control that is broken, or a fault of which nothing is seen though it does harm,
makes it exit 1.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

from auditor.core import threads
from auditor.core.errors import AuditError
from auditor.crash import trial
from auditor.crash.trial import CrashTest, crash_test
from auditor.crash.verdicts import UNKNOWN
from benchmarks.checks.harness import Page, run
from benchmarks.checks.trust.loop_packages import HONEST_PACKAGES, OPACUS, OURS, TRAINER
from benchmarks.checks.trust.loop_plain import Loop
from benchmarks.checks.trust.loop_plants import HONEST_PLAIN, PLAIN

FAULTS: dict[str, Loop] = {**PLAIN, **OPACUS, **TRAINER, **OURS}
HARMLESS = {"tied weights counted twice": "the two uses' gradients are at right angles: a reach of 1.02 at most"}
CONTROLS: dict[str, Loop] = {**HONEST_PLAIN, **HONEST_PACKAGES}


def tested(train: Loop, seed: int = 0) -> CrashTest:
    """Without the bound of one training, which decides nothing."""
    with warnings.catch_warnings(), patch.object(trial, "bound_epsilon_by_guesses", lambda *given: None):
        warnings.simplefilter("ignore")
        return crash_test(train, minutes=10, seed=seed)


def row(name: str, found: CrashTest | AuditError) -> tuple[str, ...]:
    """A line of the table; of a loop that cannot be told, what keeps the test from it."""
    if isinstance(found, AuditError):
        return name, "refused", "", "-", str(found), ""
    worst = min(found.broken, key=lambda check: check.p, default=None)
    really = "-" if found.epsilon is None else "unbounded" if found.epsilon > 100 else f"{found.epsilon:.1f}"
    why = "" if worst is None else f"{worst.name}: {worst.said}"
    if found.verdict == "no fault seen":
        why = HARMLESS.get(name, "")
    if found.verdict == "cannot tell":
        unknown = (one for one in found.checks if one.name in trial._NEEDED and one.verdict == UNKNOWN)
        why = "; ".join(f"{one.name}: {one.said}" for one in unknown)
    return name, found.verdict, f"{found.claim.implied_epsilon():.1f}", really, why, f"{found.seconds:.0f}"


def _judged(train: Loop, seed: int) -> CrashTest | AuditError:
    from benchmarks.checks.trust.loop_alarms import written_out

    with written_out():
        try:
            return tested(train, seed)
        except AuditError as error:
            return error


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
