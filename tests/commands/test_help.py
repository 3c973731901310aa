"""`--help` of every command: examples that would be read, every flag once, in its panel, on lines
that fit; no rich."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from auditor.commands.panels import ParsedCommandDocstring
from auditor.core.plan import FIELDS, format_field_flag
from auditor.core.plan_fields import PANELS
from tests.docs.pages import COMMAND, parse


def every(command: Any = COMMAND, name: str = "audit") -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, one in getattr(command, "commands", {}).items():
        yield from every(one, f"{name} {below}")


COMMANDS = dict(every())
LEAVES = {name: command for name, command in COMMANDS.items() if not hasattr(command, "commands")}


def shown(name: str) -> list[str]:
    context = COMMAND.context_class(COMMANDS[name], info_name=name, terminal_width=98)
    return COMMANDS[name].get_help(context).splitlines()


def panels(lines: list[str]) -> dict[str, str]:
    """Flag -> the title that it stands under."""
    title, found = "", {}
    for line in lines:
        if heading := re.fullmatch(r"(\w[\w ]+):", line):
            title = heading[1].lower()
        elif line.startswith("  -"):
            for spelt in re.findall(r"(?<!\S)--?[A-Za-z][\w-]*", line.strip().split("  ")[0]):
                assert spelt not in found, f"{spelt} stands twice"
                found[spelt] = title
    return found


@pytest.mark.parametrize("name", LEAVES)
def test_its_examples_would_be_read(name: str) -> None:
    examples = ParsedCommandDocstring.split_docstring(LEAVES[name].help).examples
    assert len(examples) >= (2 if name == "audit run" else 1)
    for example in examples:
        assert example.startswith(f"{name} ") or example == name
        parse(shlex.split(example)[1:])
    lines = shown(name)
    assert lines.index("Examples:") < next(
        i for i, line in enumerate(lines) if line.startswith("  -")
    )


def test_the_examples_of_the_program_would_be_read() -> None:
    for example in ParsedCommandDocstring.split_docstring(COMMAND.help).examples:
        parse(shlex.split(example)[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_stands_once_and_every_line_fits(name: str) -> None:
    lines = shown(name)
    assert max(map(len, lines)) <= 100
    assert not [
        line for line in lines if re.search(r"<(str|int|float|bool|path|list\[\w+\])>", line)
    ]  # types, as typer names them
    options = [one for one in COMMANDS[name].params if one.param_type_name == "option"]
    assert set(panels(lines)) == {
        spelt for one in options for spelt in (*one.opts, *one.secondary_opts)
    } | {"--help"}
    assert all(one.help for one in options)


def test_a_flag_of_a_plan_stands_in_the_panel_of_its_part() -> None:
    lines = shown("audit run")
    found = panels(lines)
    for name, one in FIELDS.items():
        if one.has_flag:
            assert found[format_field_flag(name)] == one.panel, name
    titles = [line[:-1].lower() for line in lines if re.fullmatch(r"\w+:", line)]
    assert titles == ["examples", *PANELS]
    assert lines[-1].split()[0] == "--help"


def test_no_sentence_of_the_overview_is_cut() -> None:
    text = " ".join(" ".join(shown("audit")).split())
    assert "..." not in text.replace("[ARGS]...", "")
    for command in COMMAND.commands.values():
        assert (
            " ".join(
                ParsedCommandDocstring.split_docstring(command.help).summary.split(". ")[0].split()
            ).rstrip(".")
            in text
        )


@pytest.mark.parametrize("arguments", ["--help", "run --help"])
def test_help_draws_nothing(arguments: str) -> None:
    """What draws takes longer to import than all of the help to print."""
    heavy = "{'rich', 'urllib.request', 'pydantic', 'torch'}"
    script = f"""
import sys
from auditor.cli import run_command_line
run_command_line({arguments.split()})
sys.exit(bool({heavy} & set(sys.modules)))"""
    command, wide = [sys.executable, "-c", script], {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
