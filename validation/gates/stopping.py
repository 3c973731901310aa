"""Simulate a gate that may stop at any look (`--until decided`): its errors and its sample sizes.

    python -m validation.gates.stopping [--runs 10000] [--seed 0] [--out FOLDER]  (a minute on one core)

prints three tables; with --out, they are also written to FOLDER/stopping.md. First: the truth lies
exactly on the limit, where a gate errs most often, and the gate looks at up to 5,000 secrets;
neither verdict may ever come in more than 5% of runs. Next to it are the exact bounds for a fixed
size, used at the same looks. Second: the number of secrets by distance of the truth from the
limit, next to the fixed size that `--plan` asks for to detect twice the limit (or half of it) at
power 0.8. Third: the same for a paired difference.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import binom

from auditor.gate.power import count_failing_secrets, count_pair_secrets
from auditor.statistics.anytime import simulate_stopping_sizes, yield_look_sizes
from auditor.statistics.bounds import LEVEL
from validation.harness import Page, run

MOST, POWER = 5000, 0.8
LIMITS = (0.01, 0.05, 0.2, 0.5)
Odds = Sequence[float]


def ever(
    values: Odds, odds: Odds, mean: float, runs: int, seed: int, level: float = LEVEL
) -> float:
    """Return the share of runs in which some look refutes a mean of at most `mean`.

    values, odds: the distribution of each secret's value.
    """
    found = simulate_stopping_sizes(
        np.array(values, dtype=float), np.array(odds), mean, level, MOST, runs, seed
    )
    return float((found <= MOST).mean())


def ever_exact(limit: float, runs: int, seed: int) -> float:
    """Return the share of runs in which the exact fixed-size bound misses the truth at some
    look.
    """
    at = np.array([*yield_look_sizes(MOST)])
    hits = (
        np.random.default_rng(seed)
        .binomial(np.diff(at, prepend=0), limit, size=(runs, len(at)))
        .cumsum(axis=1)
    )
    return float((binom.sf(hits - 1, at, limit) <= LEVEL).any(axis=1).mean())


def mean_size(values: Odds, odds: Odds, mean: float, runs: int, seed: int) -> tuple[float, int]:
    """Return the mean number of secrets used until a decision, and its 90% quantile."""
    found = simulate_stopping_sizes(
        np.array(values, dtype=float), np.array(odds), mean, LEVEL, 100_000, runs, seed
    )
    return float(found.mean()), int(np.quantile(found, 0.9, method="higher"))


def on_the_limit(page: Page, runs: int, seed: int) -> None:
    page.head("truth on the limit", "ever failed", "ever held", "exact bounds, ever failed")
    for limit in LIMITS:
        failed = ever([0, 1], [1 - limit, limit], limit, runs, seed)
        held = ever([0, 1], [limit, 1 - limit], 1 - limit, runs, seed)
        page.row(
            f"recall <= {limit:g}",
            *(f"{rate:.2%}" for rate in (failed, held, ever_exact(limit, runs, seed))),
        )
    each = ever([0, 1], [0.9, 0.1], 0.1, runs, seed, LEVEL / 10)
    page.row("ten limits of 0.1, any of them", f"{1 - (1 - each) ** 10:.2%}", "", "")
    for margin, differ in ((0.0, 0.1), (0.02, 0.06), (0.05, 0.2)):
        won, lost = (differ + margin) / 2, (differ - margin) / 2
        odds, mean = [lost, 1 - differ, won], (1 + margin) / 2
        failed = ever([0, 0.5, 1], odds, mean, runs, seed)
        held = ever([1, 0.5, 0], odds, 1 - mean, runs, seed)
        page.row(
            f"not worse by {margin:g}, {differ:.0%} differ", f"{failed:.2%}", f"{held:.2%}", ""
        )


def off_the_limit(page: Page, runs: int, seed: int) -> None:
    page.head("limit", "truth", "fixed size", "stopping: mean", "nine in ten", "fewer")
    for limit in (0.01, 0.05):
        for truth in (0.0, limit / 10, limit / 2, 2 * limit, 4 * limit, 8 * limit, 0.5, 0.9):
            if truth > limit:
                fixed = count_failing_secrets(limit, 2 * limit, LEVEL, POWER)
                asked, nine = mean_size([0, 1], [1 - truth, truth], limit, runs, seed)
            else:
                fixed = count_failing_secrets(1 - limit, 1 - limit / 2, LEVEL, POWER)
                asked, nine = mean_size([0, 1], [truth, 1 - truth], 1 - limit, runs, seed)
            page.row(
                f"{limit:g}",
                f"{truth:g}",
                f"{fixed:,}",
                f"{asked:,.0f}",
                f"{nine:,}",
                f"{fixed / asked:.1f} times",
            )


def off_the_margin(page: Page, runs: int, seed: int) -> None:
    page.head("recall up by", "fixed size for 0.05", "stopping: mean", "nine in ten", "fewer")
    fixed = count_pair_secrets(0.05, 0.0, 0.10, LEVEL, POWER)
    for up in (0.05, 0.1, 0.2, 0.4):
        differ = max(0.10, up + 0.02)
        won, lost = (differ + up) / 2, (differ - up) / 2
        asked, nine = mean_size([0, 0.5, 1], [lost, 1 - differ, won], 0.5, runs, seed)
        page.row(
            f"{up:g}", f"{fixed:,}", f"{asked:,.0f}", f"{nine:,}", f"{fixed / asked:.1f} times"
        )


def main(runs: int = 10_000, seed: int = 0, out: Path | None = None) -> None:
    page = Page(out and out / "stopping.md")
    page.say(f"Truth on the limit, {runs:,} runs each, looks at up to {MOST:,} secrets:\n")
    on_the_limit(page, runs, seed)
    page.say(
        "\nUntil a limit is decided; fixed size: for twice the limit, or half of it, at power "
        "0.8:\n"
    )
    off_the_limit(page, runs // 10, seed)
    page.say("\nUntil 'not worse by 0' fails; at least 10% of the answers differ:\n")
    off_the_margin(page, runs // 10, seed)


if __name__ == "__main__":
    raise SystemExit(run(main))
