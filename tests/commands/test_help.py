"""`--help` of every command: examples that would be read, every flag once, in its panel."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from auditor.core.plan import FIELDS, format_field_flag
from auditor.core.plan_fields import PANELS
from tests.docs.pages import COMMAND, parse, split_help


def every(command: Any = COMMAND, name: str = "audit") -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, one in getattr(command, "commands", {}).items():
        yield from every(one, f"{name} {below}")


COMMANDS = dict(every())
LEAVES = {name: command for name, command in COMMANDS.items() if not hasattr(command, "commands")}
Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each flag and each paragraph."""
    monkeypatch.setenv("COLUMNS", "1000")


def shown(name: str, capsys: Said) -> list[str]:
    context = COMMAND.context_class(COMMANDS[name], info_name=name)
    COMMANDS[name].format_help(context, context.make_formatter())
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def panels(lines: list[str]) -> dict[str, str]:
    """Flag -> the title that it stands under."""
    title, found = "", {}
    for line in lines:
        if heading := re.match(r"╭─ ([\w ]+) ─", line):
            title = heading[1].lower()
        for spelt in re.split(r"\s{2,}|,", line.strip("│ ")):
            if re.fullmatch(r"--?[A-Za-z][\w-]*", spelt):
                assert spelt not in found, f"{spelt} stands twice"
                found[spelt] = title
    return found


@pytest.mark.parametrize("name", LEAVES)
def test_its_examples_would_be_read(name: str, capsys: Said) -> None:
    examples = split_help(LEAVES[name])[1]
    assert len(examples) >= (2 if name == "audit run" else 1)
    for example in examples:
        assert example.startswith(f"{name} ") or example == name
        parse(shlex.split(example)[1:])
    lines = shown(name, capsys)
    panel = next(line for line in lines if line.startswith("╭"))
    assert lines.index("Examples:") < lines.index(examples[0]) < lines.index(panel)


def test_the_examples_of_the_program_would_be_read() -> None:
    for example in split_help(COMMAND)[1]:
        parse(shlex.split(example)[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_stands_once_with_all_of_its_help(name: str, capsys: Said) -> None:
    lines = shown(name, capsys)
    options = [one for one in COMMANDS[name].params if one.param_type_name == "option"]
    assert set(panels(lines)) == {
        spelt for one in options for spelt in (*one.opts, *one.secondary_opts)
    } | {"--help"}
    text = "\n".join(lines)
    for one in options:  # rich takes words in brackets for styles, and those in colons for emoji
        assert one.help and one.help.replace("\\[", "[") in text
    for paragraph in split_help(COMMANDS[name])[0]:
        assert paragraph in text


def test_a_flag_of_a_plan_stands_in_the_panel_of_its_part(capsys: Said) -> None:
    lines = shown("audit run", capsys)
    found = panels(lines)
    for name, one in FIELDS.items():
        if one.has_flag:
            assert found[format_field_flag(name)] == one.panel, name
    titles = [line.split()[1].lower() for line in lines if line.startswith("╭")]
    assert titles == ["options", *PANELS]  # --help; the most used first


def test_the_overview_has_the_first_paragraph_of_each_command(capsys: Said) -> None:
    text = "\n".join(shown("audit", capsys))
    for command in COMMAND.commands.values():
        assert split_help(command)[0][0] in text


def test_help_imports_no_torch() -> None:
    script = """
import sys
from auditor.cli import run_command_line
run_command_line(["run", "--help"])
sys.exit("torch" in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
