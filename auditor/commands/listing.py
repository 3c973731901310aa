"""What `audit list` shows: every plug-in with its description, options, access and claim."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from auditor.plugins import registry
from auditor.reports import inert


def tables() -> Iterator[Table]:
    """One table a kind, in the order a user meets them."""
    yield _table("Attacks", "needs", [(name, cls, ", ".join(cls.needs)) for name, cls in registry.attacks().items()])
    probes = [(name, cls, ", ".join(cls.needs)) for name, cls in registry.probes().items()]
    yield _table("Probes: the auditor's own measurements, which see the answers (--attack NAME)", "needs", probes)
    yield _table("Defenses", "claim", [(name, cls, cls.claims) for name, cls in registry.defenses().items()])
    trainers = [(name, cls, cls.claims) for name, cls in registry.trainers().items()]
    yield _table("Training methods (audit train NAME)", "claim", trainers)
    yield _table("Benchmarks", "", [(name, cls, "") for name, cls in registry.benchmarks().items()], options=False)


def _table(title: str, last: str, rows: list[tuple[str, type, str]], options: bool = True) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True, expand=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it does")
    if options:
        table.add_column("options and defaults")
        table.add_column(last)
    for name, cls, word in rows:
        cells = [inert.terminal(name), inert.terminal(registry.description(cls))]
        cells[0].stylize("bold")
        if options:
            values = [inert.terminal(f"{option}={value}") for option, value in registry.options_of(cls).items()]
            cells += [Text("\n").join(values) or Text("none"), inert.terminal(word)]
        table.add_row(*cells)
    return table
