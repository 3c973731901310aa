"""`audit list`: every plug-in in a line; of one, its options, needs, claim, source and page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import completion, console, options
from auditor.plugins.catalogue import cached_plugin_classes

if TYPE_CHECKING:
    from auditor.commands.listing import Found


def list_plugins(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show one plug-in: its options, needs, claim, source and page.",
            autocompletion=completion.complete_plugin_names,
        ),
    ] = None,
    plugin: options.Plugin = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the path of the JSON Schema of result.json.")] = False,
) -> None:
    """List attacks, probes, defenses, training methods and data, one line each; for NAME, all details.

    Examples:
        audit list
        audit list ethicist
    """
    if schema:
        from auditor.reports.schema import PATH

        typer.echo(PATH)
        return
    from rich.console import Console

    from auditor.commands import listing

    found, out = _plugin_classes_by_kind(plugin or []), Console()
    width = out.width if out.is_terminal else None
    for line in (
        listing.plugin_overview_lines(found, width) if name is None else listing.plugin_detail_lines(found, name)
    ):
        out.print(line, soft_wrap=name is None or width is None)


def _plugin_classes_by_kind(files: list[str]) -> Found:
    """By kind and name."""
    if not files:
        return cached_plugin_classes(console.silence_libraries)
    console.silence_libraries()
    from auditor.plugins import registry

    options.load_plugins(files)
    return registry.all_plugins()
