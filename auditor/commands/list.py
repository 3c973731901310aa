"""`audit list`: every plug-in with its description, options, access and claim."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from auditor.commands import console, options
from auditor.plugins.options import description_of, options_of
from auditor.plugins.shadows import ENTRY_POINTS, Unreadable, shadows
from auditor.reports import inert


def list_plugins(
    plugin: options.Plugin = None,
    schema: Annotated[bool, typer.Option("--schema", help="Say where the JSON Schema of result.json lies.")] = False,
) -> None:
    """Show attacks, probes, defenses and benchmarks with their options."""
    if schema:
        from auditor.reports.schema import PATH

        typer.echo(PATH)
        return
    out = Console()
    for table in _tables(_plugins(plugin or [])):
        out.print(table)


def _plugins(files: list[str]) -> Mapping[str, Mapping[str, Any]]:
    """By kind and name. Our own files are read, not run, unless others stand beside them: those have to be run."""
    if not files and not importlib.metadata.entry_points(group=ENTRY_POINTS):
        with suppress(Unreadable):
            return shadows()
    console.quiet()
    from auditor.plugins import registry

    options.load_plugins(files)
    return registry.everything()


def _tables(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """One table a kind, in the order a user meets them."""
    yield _table("Attacks", found["Attack"], "needs", _needs)
    probes = "Probes: the auditor's own measurements, which see the answers (--attack NAME)"
    yield _table(probes, found["Probe"], "needs", _needs)
    yield _table("Defenses", found["Defense"], "claim", attrgetter("claims"))
    yield _table("Training methods (audit train NAME)", found["Trainer"], "claim", attrgetter("claims"))
    yield _table("Benchmarks", found["Benchmark"])


def _needs(cls: Any) -> str:
    return ", ".join(cls.needs)


def _table(title: str, plugins: Mapping[str, Any], head: str = "", said: Callable[[Any], str] | None = None) -> Table:
    """said: what the last column says of a plug-in; None: it has no options to show either."""
    table = Table(title=title, title_justify="left", show_lines=True, expand=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it does")
    if said:
        table.add_column("options and defaults")
        table.add_column(head)
    for name, cls in plugins.items():
        cells = [inert.terminal(name), inert.terminal(description_of(cls))]
        cells[0].stylize("bold")
        if said:
            values = [inert.terminal(f"{option}={value}") for option, value in options_of(cls).items()]
            cells += [Text("\n").join(values) or Text("none"), inert.terminal(said(cls))]
        table.add_row(*cells)
    return table
