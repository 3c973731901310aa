"""What all checks share: flags from a signature, and a page; and every check has a command line
that can be read."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest

from validation import harness

ROOT = Path(__file__).parents[2]
CHECKS = sorted((ROOT / "validation").glob("*/*.py"))
PROGRAMS = [path for path in CHECKS if "run(main)" in path.read_text()]


def sample(
    data: Path,
    count: Annotated[int, "how many"] = 3,
    names: Annotated[tuple[str, ...], ["a", "b"]] = (),
    ends: tuple[float, float] = (0.0, 1.0),
    how: Literal["fast", "well"] = "well",
    small_one: bool = False,
    out: Path | None = None,
) -> None:
    called.append((data, count, names, ends, how, small_one, out))


called: list[object] = []


def test_flags_are_what_the_signature_says() -> None:
    called.clear()
    assert harness.run(sample, ["x"]) == 0
    given = [
        "x",
        "--count",
        "4",
        "--names",
        "b",
        "a",
        "--ends",
        "1",
        "2",
        "--how",
        "fast",
        "--small-one",
        "-o",
        "y",
    ]
    harness.run(sample, given)
    assert called == [
        (Path("x"), 3, (), (0.0, 1.0), "well", False, None),
        (Path("x"), 4, ("b", "a"), (1.0, 2.0), "fast", True, Path("y")),
    ]


@pytest.mark.parametrize(
    "wrong", [[], ["x", "--names", "c"], ["x", "--ends", "1"], ["x", "--count", "many"]]
)
def test_what_it_does_not_say_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        harness.run(sample, wrong)
    assert leave.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_page_is_said_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = harness.Page(tmp_path / "new" / "page.md")
    page.head("a", "b")
    page.row(1, "x|y")
    assert (tmp_path / "new" / "page.md").read_text() == "| a | b |\n|---|---|\n| 1 | x\\|y |\n"
    assert capsys.readouterr().out == harness.markdown(("a", "b"), [(1, "x|y")]) == page.text


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_check_says_what_can_be_asked_for(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert f"python -m {name}" in harness.flags(importlib.import_module(name).main).format_help()


def test_validation_is_not_installed() -> None:
    assert len(PROGRAMS) > 15
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    assert not [package for package in packages if "validation" in package]
