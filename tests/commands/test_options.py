"""Flags that several commands share: spelt out from groups, with one text each, and none that a
plan does not have."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from auditor.cli import app
from auditor.commands import options
from auditor.core.errors import AuditError

COMMANDS: Any = typer.main.get_command(app)


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    place: str
    inner: Inner
    loud: bool = False


def test_a_command_gets_its_groups_from_flags_that_stand_in_its_signature() -> None:
    seen: list[tuple[str, Outer, int]] = []

    def command(first: str, *, outer: Outer, last: int = 3) -> None:
        seen.append((first, outer, last))

    spelt = options.expand_flag_groups(command)
    assert list(inspect.signature(spelt).parameters) == ["first", "place", "size", "loud", "last"]
    alone = typer.Typer(add_completion=False)
    alone.command()(spelt)
    click: Any = typer.main.get_command(alone)
    click.main(["here", "--place", "there", "--size", "0"], standalone_mode=False)
    assert seen == [("here", Outer(place="there", inner=Inner(size=0)), 3)]
    # what is zero was given, what is not set was not
    assert options.list_given_flags(seen[0][1]) == {
        "place": "there",
        "size": 0,
    }
    with pytest.raises(Exception, match="Missing parameter: place"):
        click.main(["here"], standalone_mode=False)


def test_a_docstring_gives_a_command_its_flags_with_notation_and_help() -> None:
    def command(place: str, *, out: Path | None = None, kept: bool = False, seed: int = 0) -> None:
        """Do it.

        Args:
            place (HERE|THERE): Where.
            out (-o, --out-file FILE): What to write,
                on two lines.
            kept: Whether it stays.

        Examples:
            audit do
        """

    spelt = options.expand_flag_groups(command)
    assert spelt.__doc__ == "Do it.\n\nExamples:\n    audit do"
    alone = typer.Typer(add_completion=False)
    alone.command()(spelt)
    click: Any = typer.main.get_command(alone)
    place, out, kept, seed = click.params
    assert (place.param_type_name, place.metavar, place.help) == (
        "argument",
        "HERE|THERE",
        "Where.",
    )
    assert (out.opts, out.metavar) == (["-o", "--out-file"], "FILE")
    assert out.help == "What to write, on two lines."
    assert (kept.opts, kept.secondary_opts, kept.help) == (["--kept"], [], "Whether it stays.")
    # without an entry: that of the plan field, whose default typer adds
    assert (seed.metavar, seed.help) == ("N", "Seed of all random numbers.")


def test_a_command_gets_the_fields_of_a_plan_that_were_given() -> None:
    """Zero and no were given; what was not is left to the plan file, or to the default."""
    seen: list[dict[str, Any]] = []

    def command(
        plan: Annotated[options.Values, options.PlanFlags("seed controls attack")],
    ) -> None:
        seen.append(plan)

    alone = typer.Typer(add_completion=False)
    alone.command()(options.expand_flag_groups(command))
    click: Any = typer.main.get_command(alone)
    assert {param.name: param.opts for param in click.params} == {
        "seed": ["--seed"],
        "controls": ["--controls"],
        "attack": ["--attack", "-a"],
    }
    for given in (["--seed", "0", "--no-controls"], ["-a", "zlib", "--attack", "perplexity"], []):
        click.main(given, standalone_mode=False)
    assert seen == [{"seed": 0, "controls": False}, {"attack": ["zlib", "perplexity"]}, {}]


def test_every_command_that_loads_a_model_takes_the_same_flags_for_it() -> None:
    leaves = {**COMMANDS.commands, **COMMANDS.commands["canaries"].commands}
    loading = {name for name in leaves if "device" in {param.name for param in leaves[name].params}}
    assert loading == {"run", "reproduce", "train", "score"}


@pytest.mark.parametrize("text", ["0", "-1", "ten", "", "1.5", "9" * 10])
def test_a_batch_size_is_a_whole_number_or_auto(text: str) -> None:
    assert (options.parse_batch_size_flag("auto"), options.parse_batch_size_flag("7")) == (
        "auto",
        7,
    )
    with pytest.raises(AuditError, match="expected --batch-size to be a whole number >= 1 or auto"):
        options.parse_batch_size_flag(text)
