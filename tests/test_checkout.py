"""Two checkouts never mix: the command, the Python API and the tests refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import auditor


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkout that is not the installed one, as far as `auditor` and its tests are loaded
    first."""
    root = Path(auditor.__file__).parents[1]
    for part in ("auditor/__init__.py", "tests/conftest.py"):
        (tmp_path / part).parent.mkdir()
        shutil.copy(root / part, tmp_path / part)
    return tmp_path


def started(other: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(other)}
    asked = [sys.executable, *command]
    return subprocess.run(
        asked, cwd=other, env=environment, capture_output=True, text=True, timeout=60
    )


def refused(other: Path, *command: str) -> str:
    """What it says last, once its exit code says that it refused."""
    done = started(other, *command)
    assert done.returncode != 0, done
    return (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import auditor; auditor.main()"),  # what the script `audit` does
        ("-c", "from auditor import load_run"),
        ("-m", "pytest", "tests", "-p", "no:cacheprovider"),
    ],
)
def test_parts_of_two_checkouts_are_refused(other: Path, command: tuple[str, ...]) -> None:
    said = refused(other, *command)
    assert str(other / "auditor") in said and "auditor.attacks" in said and "pip install" in said


def test_the_command_says_it_in_one_line_with_exit_code_2(other: Path) -> None:
    done = started(other, "-c", "import auditor; auditor.main()")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_a_clone_that_is_not_installed_says_what_to_do(other: Path) -> None:
    # -S: without site-packages, so that there is no editable install to find the other parts in
    said = refused(other, "-S", "-c", "import auditor; auditor.main()")
    assert "not installed" in said and "pip install" in said


def test_this_checkout_is_one() -> None:
    assert auditor.explain_mixed_checkout() == ""
