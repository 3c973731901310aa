"""`audit list`: list all plug-ins, or one plug-in's options, needs, claim, source and page."""

from __future__ import annotations

import typer

from auditor.commands import console, options
from auditor.plugins.catalogue import load_plugin_classes


def list_plugins(
    name: str | None = None,
    *,
    plugin: options.Many = None,
    schema: bool = False,
) -> None:
    """List attacks, probes, defenses, training methods and data, one line each; for NAME, all
    details.

    Args:
        name: Show one plug-in: its options, needs, claim, source and page.
        schema: Print the path of the JSON Schema of result.json.

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

    if plugin:
        console.silence_libraries()
        from auditor.plugins import registry

        options.load_plugin_files(plugin)
        classes: listing.Found = registry.list_plugin_classes()
    else:
        classes = load_plugin_classes(console.silence_libraries)
    out = Console()
    # rich assumes 80 columns for a pipe: do not wrap lines there, because grep reads them.
    width = out.width if out.is_terminal else None
    for line in (
        listing.list_overview_lines(classes, width)
        if name is None
        else listing.list_detail_lines(classes, name)
    ):
        out.print(line, soft_wrap=name is None or width is None)
