"""Lay out `--help` as plain text: examples first, then flags by panel, most used first.

Each part of the plan is a panel that contains its fields. In a command's docstring, examples come
last, under "Examples:", one per line.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from auditor.core.plan_fields import PANELS

SETTINGS = {"max_content_width": 100}  # of a context: maximum columns
_WIDEST = 24  # characters of a flag in a separate column
_EXAMPLES = "Examples:"
_UNREAD = f"{__name__}.unread"  # of a context: whether a group leaves its flags unread
_HELP = "help"  # the flag that ends the last panel
# "" means all panels that only this command has.
_ORDER = ("arguments", "options", *PANELS[:4], "", *PANELS[4:])
_FEW = 8  # number of flags that need no panels
Rows = list[tuple[str, str]]  # the notation of a flag, its help


@dataclass(frozen=True)
class ParsedCommandDocstring:
    """Parts of a command's docstring.

    Args:
        summary: first paragraph.
        paragraphs: further paragraphs, without examples.
        examples: example commands.
    """

    summary: str
    paragraphs: tuple[str, ...]
    examples: tuple[str, ...]

    @classmethod
    def split_docstring(cls, text: str) -> ParsedCommandDocstring:
        text_part, _, example_part = inspect.cleandoc(text).partition(f"{_EXAMPLES}\n")
        first, *more = (
            " ".join(paragraph.split()) for paragraph in text_part.strip().split("\n\n")
        )
        return cls(first, tuple(more), tuple(line.strip() for line in example_part.splitlines()))


def group_flags(command: Any, context: Any) -> dict[str, Rows]:
    """Return the flags, keyed by panel, in the order of the help page.

    A command's own panels come after the panel of --data and before the panel "compute".
    """
    parameters = command.get_params(context)
    few = sum(flag.param_type_name == "option" for flag in parameters) <= _FEW
    rows_by_panel: dict[str, Rows] = {}
    for flag in parameters:
        record = flag.get_help_record(context)
        if record is not None:  # None: a hidden flag
            panel = _title_help_panel(flag, few)
            label, help_text = record
            if panel == "arguments":
                label = label.partition(" ")[0]  # without its type
            rows_by_panel.setdefault(panel, []).append((label, " ".join(help_text.split())))
    for_help = rows_by_panel.pop(_HELP, [])
    # sorted() is stable: panels of one rank stay in the order of their first flags.
    ranks = {name: _ORDER.index(name if name in _ORDER else "") for name in rows_by_panel}
    ordered = {name: rows_by_panel[name] for name in sorted(ranks, key=ranks.__getitem__)}
    last = next(reversed(ordered), "options")
    return ordered | {last: ordered.get(last, []) + for_help}


def _title_help_panel(parameter: Any, few: bool) -> str:
    if parameter.param_type_name == "argument":
        return "arguments"
    if "--help" in parameter.opts:
        return _HELP
    return (None if few else getattr(parameter, "rich_help_panel", None)) or "options"


def _write_help_sections(formatter: Any, listed: dict[str, Rows]) -> None:
    """Write all sections of the help page, with their second columns aligned."""
    # At most 28, and click's width is at least 50: textwrap refuses a width of 0.
    widths = [len(name) for rows in listed.values() for name, _ in rows]
    column = 4 + max((width for width in widths if width <= _WIDEST), default=0)
    for title, rows in listed.items():
        with formatter.section(title.capitalize()):
            for name, help_text in rows:
                first, *more = _wrap_help_text(help_text, formatter.width - column) or [""]
                if len(name) > column - 4:
                    formatter.write(f"  {name}\n")
                    name = ""
                formatter.write(f"  {name:{column - 2}}{first}".rstrip() + "\n")
                formatter.write("".join(f"{'':{column}}{line}\n" for line in more))


def _wrap_help_text(text: str, width: int) -> list[str]:
    """Wrap the text only at spaces, so that no flag is split."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _write_help_text(formatter: Any, text: str) -> None:
    parsed = ParsedCommandDocstring.split_docstring(text)
    _write_help_paragraph(formatter, parsed.summary)
    if parsed.examples:
        with formatter.section(_EXAMPLES.rstrip(":")):
            formatter.write("".join(f"  {line}\n" for line in parsed.examples))
    for paragraph in parsed.paragraphs:
        _write_help_paragraph(formatter, paragraph)


def _write_help_paragraph(formatter: Any, text: str) -> None:
    formatter.write(
        "\n" + "".join(f"  {line}\n" for line in _wrap_help_text(text, formatter.width - 2))
    )


class PanelCommand(TyperCommand):
    """Command whose --help shows flags in panels."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        _write_help_text(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_help_sections(formatter, group_flags(self, ctx))


class PanelGroup(TyperGroup):
    """Group of commands whose --help shows the commands in panels, then the group's flags.

    The help shows the first sentence of each command.

    If the command line starts with a command, the group's flags are not parsed. Parsing them would
    import pydantic, which takes longer than the entire help. Instead, all flags are marked as not
    given; otherwise typer's callback would keep the values of an earlier call.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # click shares `meta` with the contexts of all subcommands: each group sets it before it
        # reads.
        ctx.meta[_UNREAD] = bool(args) and args[0] in self.commands
        rest = super().parse_args(ctx, args)
        if ctx.meta[_UNREAD]:
            flags: list[Any] = [flag for flag in self.params if flag.expose_value]
            ctx.params |= {flag.name: False if flag.is_flag else None for flag in flags}
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        if ctx.meta.get(_UNREAD):
            return []
        return super().get_params(ctx)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        _write_help_text(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows_by_panel: dict[str, Rows] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "commands"
            # 1000: click cuts a sentence at 45 characters by default.
            rows_by_panel.setdefault(panel, []).append((name, command.get_short_help_str(1000)))
        _write_help_sections(formatter, rows_by_panel | group_flags(self, ctx))
