"""Small faults at random places of the code that decides, and whether the tests see them: which
ones they do not.

    python -m validation.trust.mutants [--count 200] [--seed 0] [--limit 80] [-o mutants.jsonl]

Mutants are drawn without replacement from privacy, statistics, gate and training: a comparison
turned or moved by its boundary, an operator of arithmetic, a number, a condition, a returned value.
Each runs the tests that belong to its
module: `tests/PACKAGE/test_MODULE.py`, all that import it, and MORE; the quickest, as many as half
of --limit has room for, in seconds of processor time. It is caught where one of them fails, or
takes five times as long. A process with torch in its memory forks for each mutant, whose module is
compiled from a changed tree: no file is written, and tests that start another program test the
program as it is.

The journal keeps what was tried, with the test that caught it. As long as the module is the same, a
survivor runs only tests that are new or changed. `--only WORD,WORD` takes those drawn with one in
key or place, `--again` tries survivors anew. EQUIVALENT are mutants that no test can tell from the
program, with the reason; they are counted beside, and not among the caught.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Annotated, Any, NoReturn

import psutil

from validation import harness
from validation.trust.mutation import ROOT, Mutant, mutants, mutated

PACKAGES = ("privacy", "statistics", "gate", "training")
WARM = (
    "torch",
    "peft",
    "opacus",
    "dp_accounting",
    "scipy.stats",
    "sklearn.linear_model",
    "jsonschema",
    "typer",
    "faker",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "hypothesis",
)
MORE = {  # tests of what is tested through something else
    "gate/attest.py": ("tests/gate/test_manifest.py",),
    "gate/comparability.py": ("tests/reports/test_history.py",),
    "gate/contradictions.py": ("tests/gate/test_claims.py",),
    "gate/history.py": ("tests/reports/test_history.py",),
    "gate/decide.py": ("tests/runs/test_stopping.py",),
    "gate/decision_log.py": (
        "tests/gate/test_gate.py",
        "tests/reports/test_history.py",
        "tests/reports/test_decision.py",
    ),
    "gate/policy.py": ("tests/gate/test_values.py",),
    "gate/rule_scope.py": ("tests/gate/test_gate.py", "tests/gate/test_required_coverage.py"),
    "privacy/gradient_canaries.py": ("tests/attacks/test_gradient_audit.py",),
    "statistics/extraction.py": ("tests/statistics/test_metrics.py",),
    "statistics/games.py": (
        "tests/statistics/test_audited.py",
        "tests/attacks/test_gradient_audit.py",
    ),
    "statistics/judging.py": ("tests/statistics/test_metrics.py",),
    "statistics/ranking.py": ("tests/statistics/test_metrics.py",),
    "statistics/unlearning.py": (
        "tests/defenses/test_unlearning.py",
        "tests/reports/test_unlearning.py",
    ),
    "training/poisson.py": ("tests/defenses/test_private_training.py",),
    "training/preflight.py": ("tests/runs/test_estimate.py",),
    "training/rarity.py": ("tests/defenses/test_private_training.py",),
    "training/unlearning.py": ("tests/defenses/test_unlearning.py",),
    "training/variants.py": ("tests/defenses/test_variants.py",),
}
# of plug-ins that torch or opacus have imported already
_KNOWN = "ignore::pytest.PytestAssertRewriteWarning"
EQUIVALENT = {  # a mutant's key, and why
    "31547e66e191": "privacy/promises.py: how far the lines of a JSON file are indented",
    "6192e059ba7c": "privacy/projection.py: a larger bound has more distributions looked at, which "
    "fit as before",
}


def tests_of(path: str) -> list[str]:
    """The test files that belong to a module: its own, all that import it, and MORE."""
    package, module = path.removesuffix(".py").split("/")
    own = [ROOT / f"tests/{package}/test_{module}.py"]
    imports = re.compile(
        rf"auditor\.{package}\.{module}\b|from auditor\.{package} import [^\n]*\b{module}\b"
    )
    importing = [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if imports.search(file.read_text())
    ]
    more = [
        ROOT / file for start, files in MORE.items() if path.startswith(start) for file in files
    ]
    chosen = dict.fromkeys(
        file.relative_to(ROOT).as_posix() for file in (*own, *importing, *more) if file.is_file()
    )
    return list(chosen)


# --- one mutant, in a process of its own
# -----------------------------------------------------------------------------------------------


class _Changed(importlib.machinery.SourceFileLoader):
    """Finds one module, before all others do, and loads other code for it."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return (
            importlib.util.spec_from_file_location(name, self.path, loader=self)
            if name == self.name
            else None
        )


class _Failures:
    """A plug-in of pytest that says which test failed."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, report.nodeid.encode() + b"\n")

    pytest_collectreport = pytest_runtest_logreport


@dataclass(frozen=True)
class MutantOutcome:
    """ "survived", "caught" by a test, or "timeout" after so many seconds of processor time."""

    outcome: str
    seconds: float
    by: str = ""


def run(tests: Sequence[str], mutant: Mutant | None, limit: float) -> MutantOutcome:
    """pytest over the files, until the first failure or the limit in seconds of processor time.

    A process that sleeps is given up after ten times the limit by the clock on the wall.
    """
    reading, writing = os.pipe()
    start, child = time.monotonic(), os.fork()
    if child == 0:
        _child(tests, mutant, writing)
    os.close(writing)
    process, used = psutil.Process(child), 0.0
    while used < limit and time.monotonic() - start < 10 * limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with os.fdopen(reading) as pipe:
                by = pipe.readline().strip() if status else ""
            return MutantOutcome("caught" if status else "survived", used, by)
        time.sleep(0.05)
        used = max(used, processor_time(process))
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return MutantOutcome("timeout", used)


def _child(tests: Sequence[str], mutant: Mutant | None, pipe: int) -> NoReturn:
    os.setsid()
    os.chdir(ROOT)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    code = 1
    try:
        if mutant is not None:
            filename = str(ROOT / "auditor" / mutant.path)
            name = "auditor." + mutant.path.removesuffix(".py").replace("/", ".")
            sys.meta_path.insert(0, _Changed(name, filename, mutated(mutant, filename)))  # type: ignore[arg-type]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", _KNOWN]
        code = int(pytest.main([*options, *tests], plugins=[_Failures(pipe)]))
    finally:
        os._exit(code)


def processor_time(process: psutil.Process) -> float:
    """Seconds of a process and all that it started; 0.0 where it has ended."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


# --- many, and what is known of them
# -----------------------------------------------------------------------------------------------


class Journal:
    """What was tried, a line each; the last line of a mutant or a test file counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.lines = {line["key"]: line for line in map(json.loads, lines)}

    def add(self, line: dict[str, Any]) -> None:
        self.lines[line["key"]] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def known(self, mutant: Mutant) -> dict[str, Any]:
        """The line of a mutant whose module is as it was and, if caught, whose catching test file
        is; otherwise {}."""
        line = self.lines.get(mutant.key, {})
        if line.get("module") != digest(f"auditor/{mutant.path}"):
            return {}
        by = line["by"].split("::")[0]
        return line if not by or line["tests"][by] == digest(by) else {}


def digest(path: str) -> str:
    """Of a file's content; "" where there is none."""
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def usable(tests: Sequence[str], journal: Journal, limit: float) -> dict[str, float]:
    """Seconds of those that pass on the program as it is: the first, and the quickest others up to
    half the limit."""
    took = {}
    for test in tests:
        room = 2 * limit if test == tests[0] else limit / 2
        line = journal.lines.get(test, {})
        if line.get("file") != digest(test) or (
            line["outcome"] == "timeout" and line["seconds"] < room
        ):
            found = run([test], None, room)
            line = {
                "key": test,
                "file": digest(test),
                "outcome": found.outcome,
                "seconds": round(found.seconds, 1),
            }
            journal.add(line)
        if line["outcome"] == "survived":
            took[test] = line["seconds"]
    chosen: dict[str, float] = {}
    for test in sorted(took, key=lambda test: (test != tests[0], took[test])):
        if not chosen or sum(chosen.values()) + took[test] <= limit / 2:
            chosen[test] = took[test]
    return chosen


def tried(mutant: Mutant, journal: Journal, limit: float, again: bool) -> dict[str, Any]:
    """A mutant's line in the journal, after those of its tests that it has not yet survived."""
    line = journal.known(mutant)
    if line and line["outcome"] != "survived":
        return line
    before = {} if again else line.get("tests", {})
    took = usable(tests_of(mutant.path), journal, limit)
    files = {test: digest(test) for test in took}
    new = [test for test in took if before.get(test) != files[test]]
    if new:
        found = run(new, mutant, 20 + 4 * sum(took[test] for test in new))
        line = {
            "key": mutant.key,
            "module": digest(f"auditor/{mutant.path}"),
            "outcome": found.outcome,
            "by": found.by,
            "seconds": round(found.seconds, 1),
            "place": mutant.place,
            "tests": files,
        }
        journal.add(line)
    return line or {"outcome": "survived", "by": "", "seconds": 0.0}


def drawn(seed: int, count: int) -> list[Mutant]:
    """So many of all mutants, the same ones for a seed as long as their lines are."""
    files = sorted(
        path for package in PACKAGES for path in (ROOT / "auditor" / package).glob("*.py")
    )
    every = [mutant for path in files for mutant in mutants(path)]
    return sorted(
        every, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()
    )[:count]


def main(
    count: int = 200,
    seed: int = 0,
    limit: Annotated[float, "seconds of processor time, twice what tests take"] = 80.0,
    only: Annotated[str, "of those drawn, the ones with one of these words in key or place"] = "",
    again: Annotated[bool, "try survivors anew against all tests"] = False,
    out: Path = Path("mutants.jsonl"),
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in WARM:
        importlib.import_module(name)
    journal, lines = Journal(out), []
    for number, mutant in enumerate(drawn(seed, count)):
        if not any(word in f"{mutant.key} {mutant.place}" for word in only.split(",")):
            continue
        line = tried(mutant, journal, limit, again)
        if line["outcome"] == "survived" and mutant.key in EQUIVALENT:
            line = {**line, "outcome": "equivalent", "by": EQUIVALENT[mutant.key]}
        lines.append((mutant, line))
        print(
            f"{number + 1:4} {line['outcome']:10} {line['seconds']:6.1f} s  {mutant.key}  "
            f"{mutant.place}",
            end="",
        )
        print(f"  [{line['by']}]" if line["by"] else "", flush=True)
    report(lines)


def report(lines: Sequence[tuple[Mutant, dict[str, Any]]]) -> None:
    from auditor.statistics.intervals import clopper_pearson

    outcomes = [line["outcome"] for _, line in lines]
    counted = len(outcomes) - outcomes.count("equivalent")
    caught = counted - outcomes.count("survived")
    low, high = clopper_pearson(caught, counted) if counted else (0.0, 1.0)
    print(
        f"\n{caught} of {counted} caught ({caught / max(1, counted):.1%}, 95% {low:.1%} to "
        f"{high:.1%}), ",
        end="",
    )
    print(
        f"{outcomes.count('timeout')} of them by the limit; {outcomes.count('equivalent')} "
        "equivalent. Survivors:"
    )
    for mutant, line in lines:
        if line["outcome"] == "survived":
            print(f"  {mutant.key}  {mutant.place}\n      {mutant.source}")


if __name__ == "__main__":
    raise SystemExit(harness.run(main))
