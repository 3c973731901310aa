"""The mutants are what they say: one change each, all different, with a key that outlives changes
elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from validation.trust import mutants as program
from validation.trust import mutation

SOURCE = '''
def few(values: list[int], most: int = 3) -> bool:
    """At most so many."""
    if not values or len(values) > 2 * most:
        raise ValueError(f"expected {most + 1}")
    return len(values) <= most
'''


def written(folder: Path, source: str) -> Path:
    path = folder / "auditor" / "gate" / "few.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def test_mutants_of_a_function(tmp_path: Path) -> None:
    """Neither annotations and defaults nor what is raised are touched."""
    path = written(tmp_path, SOURCE)
    found = list(mutation.mutants(path, tmp_path))
    assert sorted(mutant.change for mutant in found) == [
        "2 * most -> 2 / most",
        "2 -> 3",
        "len(values) <= most -> len(values) < most",
        "len(values) <= most -> len(values) > most",
        "len(values) > 2 * most -> len(values) <= 2 * most",
        "len(values) > 2 * most -> len(values) >= 2 * most",
        "not values -> values",
        "not values or len(values) > 2 * most -> not values and len(values) > 2 * most",
        "return len(values) <= most -> return None",
    ]
    answers = []
    for mutant in found:
        space: dict[str, Any] = {}
        exec(mutation.mutated(mutant, str(path)), space)
        answers.append([_answer(space["few"], [0] * n) for n in range(9)])
    program_itself: dict[str, Any] = {}
    exec(compile(SOURCE, "few", "exec"), program_itself)
    right = [_answer(program_itself["few"], [0] * n) for n in range(9)]
    assert all(answer != right for answer in answers)


def _answer(few: Any, values: list[int]) -> object:
    try:
        return few(values)
    except ValueError as error:
        return str(error)


def test_a_key_outlives_changes_elsewhere(tmp_path: Path) -> None:
    before = list(mutation.mutants(written(tmp_path, SOURCE), tmp_path))
    after = list(mutation.mutants(written(tmp_path, f"LIMIT = 1 + 2\n{SOURCE}"), tmp_path))
    assert [mutant.key for mutant in before] == [mutant.key for mutant in after][-len(before) :]
    assert len({mutant.key for mutant in after}) == len(after) == len(before) + 3


def test_every_module_has_tests_and_every_equivalent_one_is_there() -> None:
    files = [
        path
        for package in program.PACKAGES
        for path in (mutation.ROOT / "auditor" / package).glob("*.py")
    ]
    every = [mutant for path in files for mutant in mutation.mutants(path)]
    assert len({mutant.key for mutant in every}) == len(every) > 3000
    assert set(program.EQUIVALENT) <= {mutant.key for mutant in every}
    assert [
        path for path in sorted({mutant.path for mutant in every}) if not program.tests_of(path)
    ] == []
    for file in {file for more in program.MORE.values() for file in more}:
        ast.parse((mutation.ROOT / file).read_text())
