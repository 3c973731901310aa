"""Plant small faults at random places of the deciding code, and list those that the tests miss.

    python -m validation.trust.mutants [--count 200] [--seed 0] [--limit 80] [-o mutants.jsonl]

Mutants are drawn without replacement from privacy, statistics, gate and training: a changed
comparison, boundary, arithmetic operator, number, condition or return value. Each runs the tests
of its module: `tests/PACKAGE/test_MODULE.py`, all that import the module, and MORE; the quickest
of them, as many as fit into half of --limit, in seconds of processor time. A mutant is caught if a
test fails or takes five times as long. A process with torch in memory forks for each mutant and
compiles its module from a changed tree; no file is written, so tests that start another program
test the unchanged program.

The journal keeps each result and the test that caught the mutant. While the module is unchanged, a
survivor runs only new or changed tests. `--only WORD,WORD` selects drawn mutants by words in key
or place, `--again` repeats survivors. EQUIVALENT lists mutants that no test can distinguish from
the program, with reasons; they are counted separately.
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
MORE = {  # tests that run a module through another module
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
# This warning is about plug-ins that torch or opacus imported before.
_KNOWN = "ignore::pytest.PytestAssertRewriteWarning"
EQUIVALENT = {  # key of a mutant -> why it changes nothing
    "6192e059ba7c": "privacy/projection.py: a larger bound has more distributions looked at, which "
    "fit as before",
}


def tests_of(path: str) -> list[str]:
    """Return the test files of a module: its own, all that import it, and MORE."""
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


# --- one mutant, in a separate process ---


class _Changed(importlib.machinery.SourceFileLoader):
    """An importer that loads changed code for one module, before all other importers."""

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
    """A pytest plug-in that writes the names of failed tests to a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, report.nodeid.encode() + b"\n")

    pytest_collectreport = pytest_runtest_logreport


@dataclass(frozen=True)
class MutantOutcome:
    """The outcome "survived", "caught" by a test, or "timeout" after some processor seconds."""

    outcome: str
    seconds: float
    by: str = ""


def run(tests: Sequence[str], mutant: Mutant | None, limit: float) -> MutantOutcome:
    """Run pytest in a fork until the first failure or `limit` seconds of processor time.

    A sleeping process is killed after ten times the limit in wall-clock time.
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
    """Return the processor seconds of a process and its descendants; 0.0 after its end."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


# --- many mutants ---


class Journal:
    """A journal with one line per trial; the last line of a mutant or test file counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.lines = {line["key"]: line for line in map(json.loads, lines)}

    def add(self, line: dict[str, Any]) -> None:
        self.lines[line["key"]] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def known(self, mutant: Mutant) -> dict[str, Any]:
        """Return a mutant's line if it is still valid, else {}.

        The mutant's module must be unchanged and, if a test caught the mutant, that test's file
        too.
        """
        line = self.lines.get(mutant.key, {})
        if line.get("module") != digest(f"auditor/{mutant.path}"):
            return {}
        by = line["by"].split("::")[0]
        return line if not by or line["tests"][by] == digest(by) else {}


def digest(path: str) -> str:
    """Return a digest of a file's content; "" if there is no file."""
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def usable(tests: Sequence[str], journal: Journal, limit: float) -> dict[str, float]:
    """Return the seconds of test files that pass on the unchanged program.

    These are the first file, and the quickest others that fit into half the limit.
    """
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
    """Test a mutant with the tests that it has not survived yet; return its journal line."""
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
    """Return `count` random mutants; a seed gives the same mutants while their lines are
    unchanged.
    """
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
