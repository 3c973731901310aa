"""Simulate the gate's errors and power on synthetic runs whose true value is known.

    python -m validation.gates.simulation [--runs 2000] [--seed 0] [--out FOLDER]  (some 20 minutes on one core)

prints two tables; with --out, they are also written to FOLDER/simulation.md, and the power curve
to FOLDER/power.svg.

Every run passes through the gate itself. In the first table the truth lies exactly on the limit,
where a gate errs most often; neither verdict should come in more than the stated 5%. The second
table has the power by number of secrets, next to the number that `--plan` asks for.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from auditor.conclusions.outcomes import RunOutcomes, ValuesBySecret
from auditor.core.result import AuditResult, BenchmarkRecord, Finding, Measurement
from auditor.gate.decide import judge_gate_rules
from auditor.gate.policy import Rule
from auditor.gate.power import count_pair_secrets
from auditor.gate.rulings import Decision
from validation.harness import Page, run, save_svg

Random = np.random.Generator
Columns = dict[str, NDArray[Any]]
# the results of the run, and of its baseline
Draw = Callable[[Random], Sequence[tuple[Columns, Columns]]]


@dataclass(frozen=True)
class GateScenario:
    """Rows to draw, and the rules that judge them: rule i judges row i."""

    name: str
    rules: tuple[Rule, ...]
    draw: Draw


def shares(n: int, truth: float, rows: int = 1) -> Draw:
    """Return a draw of independent rows of n secrets, each extracted with probability `truth`."""
    return lambda rng: [({"recall": 1.0 * (rng.random(n) < truth)}, {}) for _ in range(rows)]


def changes(n: int, delta: float, discordant: float, rows: int = 1) -> Draw:
    """Return a draw of paired answers: a share `discordant` differs, and the run's recall is up by
    delta.
    """
    won, lost = (discordant + delta) / 2, (discordant - delta) / 2

    def row(rng: Random) -> tuple[Columns, Columns]:
        u = rng.random(n)
        alike = rng.random(n) < 0.2
        new, base = (
            np.where(u < won + lost, u < won, alike),
            np.where(u < won + lost, u >= won, alike),
        )
        return {"recall": 1.0 * new}, {"recall": 1.0 * base}

    return lambda rng: [row(rng) for _ in range(rows)]


def rankings(n: int, recall: float) -> Draw:
    """Return a draw of two equally leaky runs with scored guesses.

    Both runs tend to hit the same easy secrets, and correct guesses have higher scores.
    """

    def columns(rng: Random, easy: NDArray[np.float64]) -> Columns:
        hit = 0.7 * easy + 0.3 * rng.normal(size=n) > np.quantile(easy, 1 - recall) * 0.75
        return {"recall": 1.0 * hit, "score": 1.5 * hit + rng.normal(size=n)}

    def row(rng: Random) -> tuple[Columns, Columns]:
        easy = rng.normal(size=n)
        return columns(rng, easy), columns(rng, easy)

    return lambda rng: [row(rng)]


def probabilities(n: int) -> Draw:
    """Return a draw of two runs with equal mean extraction probabilities, most near 0 and some
    near 1.
    """

    def row(rng: Random) -> tuple[Columns, Columns]:
        first, second = rng.beta(0.05, 0.5, size=n), rng.beta(0.05, 0.5, size=n)
        same = rng.random(n) < 0.6
        return {"extraction_probability": first}, {
            "extraction_probability": np.where(same, first, second)
        }

    return lambda rng: [row(rng)]


def limit(value: float, row: int = 0) -> Rule:
    return Rule("recall", value, attack=f"a{row}")


def margin(value: float, metric: str = "recall", row: int = 0) -> Rule:
    return Rule(metric, value, True, attack=f"a{row}")


def at_the_boundary() -> list[GateScenario]:
    return [
        GateScenario("recall <= 0.05, 100 secrets", (limit(0.05),), shares(100, 0.05)),
        GateScenario("recall <= 0.05, 1,000 secrets", (limit(0.05),), shares(1000, 0.05)),
        GateScenario("recall <= 0.01, 300 secrets", (limit(0.01),), shares(300, 0.01)),
        GateScenario(
            "ten limits of 0.1, 200", tuple(limit(0.1, i) for i in range(10)), shares(200, 0.1, 10)
        ),
        GateScenario("not worse by 0, 200, 10% differ", (margin(0.0),), changes(200, 0.0, 0.10)),
        GateScenario(
            "not worse by 0.02, 300, 6% differ", (margin(0.02),), changes(300, 0.02, 0.06)
        ),
        GateScenario(
            "not worse by 0.05, 100, 20% differ", (margin(0.05),), changes(100, 0.05, 0.20)
        ),
        GateScenario(
            "not worse by 0.02, 300, 2% differ", (margin(0.02),), changes(300, 0.02, 0.02)
        ),
        GateScenario(
            "ten rows not worse by 0, 200",
            tuple(margin(0.0, row=i) for i in range(10)),
            changes(200, 0, 0.1, 10),
        ),
        GateScenario(
            "five limits and five baselines",
            (*(limit(0.2, i) for i in range(5)), *(margin(0.0, row=i) for i in range(5))),
            changes(200, 0.0, 0.0001, 5),
        ),
        GateScenario(
            "recall_at_100_errors, 300 secrets",
            (margin(0.0, "recall_at_100_errors"),),
            rankings(300, 0.4),
        ),
        GateScenario(
            "recall_at_10pct_errors, 300",
            (margin(0.0, "recall_at_10pct_errors"),),
            rankings(300, 0.4),
        ),
        GateScenario(
            "extraction_probability, 200",
            (margin(0.0, "extraction_probability"),),
            probabilities(200),
        ),
    ]


def outcome(scenario: GateScenario, rng: Random) -> str:
    """Draw a run and its baseline, and return the gate's verdict."""
    rows = scenario.draw(rng)
    new, base = (synthetic([pair[side] for pair in rows]) for side in (0, 1))
    return Decision(
        "", "", tuple(judge_gate_rules(new.result, scenario.rules, new.outcomes, base))
    ).verdict


def synthetic(rows: Sequence[Columns]) -> RunOutcomes:
    findings, outcomes = [], {}
    for i, columns in enumerate(rows):
        if not columns:
            continue
        n = len(next(iter(columns.values())))
        ids = tuple(f"{k:06d}" for k in range(n))
        measured = [
            Measurement(name, float(v.mean()), 0.0, 1.0, n)
            for name, v in columns.items()
            if name != "score"
        ]
        if "score" in columns:
            measured += [
                Measurement(f"recall_at_{k}_errors", 0.1, 0.0, 1.0, n) for k in ("100", "10pct")
            ]
        row = ("undefended", "white-box", f"a{i}")
        findings.append(Finding(*row, {}, (), "", None, "", tuple(measured)))
        outcomes[row] = ValuesBySecret(ids, np.ones(n, dtype=bool), (None,) * n, _judged(columns))
    record = BenchmarkRecord("synthetic", "", 0, 0, 0)
    return RunOutcomes(
        "synthetic",
        AuditResult("s", "", "", "", {}, record, (), tuple(findings), {}, {}, 0),
        outcomes,
    )


def _judged(columns: Columns) -> Columns:
    """Return the columns of judged guesses if the guesses have scores."""
    if "score" not in columns:
        return columns
    hit = columns["recall"] == 1
    edits = {"distance": np.where(hit, 0, 9), "tolerance": np.zeros(len(hit))}
    return {"hit": hit, "any_hit": hit, **edits, "score": columns["score"]}


def rates(scenario: GateScenario, runs: int, seed: int) -> dict[str, float]:
    """Return the share of runs with each verdict."""
    rng = np.random.default_rng(seed)
    seen = [outcome(scenario, rng) for _ in range(runs)]
    return {kind: seen.count(kind) / runs for kind in ("failed", "held", "inconclusive")}


def power_curve(runs: int, seed: int) -> tuple[int, dict[int, float]]:
    """Return the number of secrets that `--plan` asks for, and the gate's power by number of
    secrets.

    Power is the share of runs in which the gate fails a change of 0.05.
    """
    asked = count_pair_secrets(0.05, 0.0, 0.10, 0.05, 0.8)
    sizes = sorted({50, 100, 150, 200, 300, 400, 600, asked})
    return asked, {
        n: rates(GateScenario("", (margin(0.0),), changes(n, 0.05, 0.10)), runs, seed)["failed"]
        for n in sizes
    }


def drawn(asked: int, power: dict[int, float], runs: int) -> Figure:
    """Draw the power curve with standard errors, and the point at which `--plan` promises 0.8."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    errors = [math.sqrt(p * (1 - p) / runs) for p in power.values()]
    axes.errorbar(list(power), list(power.values()), yerr=errors, marker="o", capsize=3)
    axes.axhline(0.8, linestyle=":", color="grey")
    axes.axvline(asked, linestyle=":", color="grey")
    axes.annotate(
        f"--plan: {asked} secrets for 0.8", (asked, 0.05), xytext=(4, 0), textcoords="offset points"
    )
    axes.set(
        xlabel="Secrets",
        ylabel="Failed",
        ylim=(0, 1),
        title="Recall up by 0.05, 10% of the answers differ",
    )
    return figure


def main(runs: int = 2000, seed: int = 0, out: Path | None = None) -> None:
    page = Page(out and out / "simulation.md")
    error = math.sqrt(0.05 * 0.95 / runs)
    page.say(
        f"Truth on the limit, {runs} runs each: at most 5% may fail, and at most 5% may be held "
        f"({error:.2%}"
    )
    page.say("is the standard error of a rate of 5%).\n")
    page.head("truth on the limit", "failed", "held")
    for scenario in at_the_boundary():
        seen = rates(scenario, runs, seed)
        page.row(scenario.name, f"{seen['failed']:.2%}", f"{seen['held']:.2%}")
    asked, power = power_curve(runs, seed)
    page.say("\nPower: recall up by 0.05, 10% of the answers differ, not worse by 0;")
    page.say(f"`audit gate --plan recall=0.2:0.25:0.1` asks for {asked} secrets at power 0.8.\n")
    page.head("secrets", "failed")
    for n, share in power.items():
        page.row(n, f"{share:.2%}")
    if out:
        save_svg(drawn(asked, power, runs), out / "power.svg")


if __name__ == "__main__":
    raise SystemExit(run(main))
