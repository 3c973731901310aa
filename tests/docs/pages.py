"""The pages that people read, taken apart: commands with why they are not run, files to write,
links, named options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from auditor.cli import app

COMMAND: Any = typer.main.get_command(app)
ROOT = Path(__file__).resolve().parents[2]
DOCS = tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS, "examples/ci/README.md")
_WHY = re.compile(r"<!-- not run: (\S.*\S) -->")
_NAMED = re.compile(r"# ([\w-]+\.(?:py|toml))")


@dataclass(frozen=True)
class Command:
    """A line of a bash block. why: why it is not run; empty where it is."""

    where: str  # page:line
    words: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class File:
    """A block whose first line is `# NAME.py` or `# NAME.toml`: what the page's commands find under
    that name."""

    where: str
    name: str
    text: str


def blocks(page: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """(language, number of the first line, line before the fence, lines) of each fenced block."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = None
    for i, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start = i
            else:
                yield lines[start][3:], start + 2, lines[start - 1], lines[start + 1 : i]
                start = None
    assert start is None, f"{page}: a block is never closed"


def steps(page: str) -> list[Command | File]:
    """What a reader does, from the top of the page to its end."""
    found: list[Command | File] = []
    for language, first, before, lines in blocks(page):
        where = f"{page}:{first}"
        if language == "bash":
            why = _WHY.fullmatch(before)
            found += _commands(page, first, lines, why[1] if why else "")
        elif lines and (named := _NAMED.fullmatch(lines[0])):
            found.append(File(where, named[1], "\n".join(lines) + "\n"))
    return found


def _commands(page: str, first: int, lines: list[str], why: str) -> Iterator[Command]:
    held, begun = "", first
    for number, line in enumerate(lines, first):
        begun = begun if held else number
        held += line.removesuffix("\\")
        if not line.endswith("\\"):
            if words := shlex.split(held, comments=True):
                yield Command(f"{page}:{begun}", tuple(words), why)
            held = ""


def parts(command: Command) -> list[list[str]]:
    """The commands that `&&` joins."""
    found: list[list[str]] = [[]]
    for word in command.words:
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return found


def parse(arguments: list[str]) -> None:
    """Reads the arguments of `audit` as it would, and runs nothing. Raises typer's usage error for
    what it refuses."""
    command, name, parent = COMMAND, "audit", None
    while True:
        parent = command.make_context(name, list(arguments), parent=parent)
        if not hasattr(command, "resolve_command"):
            return
        name, command, arguments = command.resolve_command(
            parent, [*parent._protected_args, *parent.args]
        )


def split_help(command: Any) -> tuple[list[str], list[str]]:
    """Paragraphs and examples of a command's help, as people read them."""
    text, _, examples = (command.help or "").replace("\\[", "[").partition("Examples:\n")
    paragraphs = [" ".join(one.split()) for one in text.strip().split("\n\n")]
    return paragraphs, [line.strip() for line in examples.splitlines()]


def options() -> set[str]:
    """Every option of every command."""
    return set(_options(COMMAND))


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from _options(below)


def prose(page: str) -> str:
    """The page without its blocks."""
    return re.sub(
        r"^```.*?^```$",
        "",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )


def spans(page: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", prose(page).replace("\n", " "))


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))
