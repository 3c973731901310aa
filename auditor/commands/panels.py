"""How `--help` is laid out: examples on top, then flags by panel, those asked for most first. Plain
text, no rich.

The panel of a field of a plan is that of its part. Examples stand last in the docstring of a
command, under "Examples:", one a line. Knows no command.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from auditor.core.plan_fields import PANELS

SETTINGS = {"max_content_width": 100}  # of a context: columns, at most
_WIDEST = 24  # characters of a flag in a column of its own
_EXAMPLES = "Examples:"
_UNREAD = f"{__name__}.unread"  # of a context: whether a group leaves its own flags unread
_HELP = "help"  # the flag that ends the last panel
# "" stands for all panels that only this command has
_ORDER = ("arguments", "options", *PANELS[:4], "", *PANELS[4:])
_FEW = 8  # flags among which nobody needs panels to find one's way
Rows = list[tuple[str, str]]  # how a flag is written, what it does


@dataclass(frozen=True)
class ParsedCommandDocstring:
    """The docstring of a command, taken apart. more: what is said beyond its first paragraph."""

    first: str
    more: tuple[str, ...]
    examples: tuple[str, ...]

    @classmethod
    def split_docstring(cls, text: str) -> ParsedCommandDocstring:
        said, _, shown = inspect.cleandoc(text).partition(f"{_EXAMPLES}\n")
        first, *more = (" ".join(paragraph.split()) for paragraph in said.strip().split("\n\n"))
        return cls(first, tuple(more), tuple(line.strip() for line in shown.splitlines()))


def flags_by_help_panel(command: Any, context: Any) -> dict[str, Rows]:
    """Panel -> its flags, in the order of the page. A command's own panels stand between --data and
    compute."""
    asked = [(one, one.get_help_record(context)) for one in command.get_params(context)]
    few = sum(one.param_type_name == "option" for one, _ in asked) <= _FEW
    found: dict[str, Rows] = {}
    for one, record in asked:
        if record is not None:  # None: a hidden flag
            panel, (written, told) = _help_panel_title(one, few), record
            # without its type
            named = written.partition(" ")[0] if panel == "arguments" else written
            found.setdefault(panel, []).append((named, " ".join(told.split())))
    for_help = found.pop(_HELP, [])
    # sorted() is stable: panels of one rank stay in the order of their first flags
    ordered = {
        name: found[name]
        for name in sorted(found, key=lambda name: _ORDER.index(name if name in _ORDER else ""))
    }
    last = next(reversed(ordered), "options")
    return ordered | {last: ordered.get(last, []) + for_help}


def _help_panel_title(one: Any, few: bool) -> str:
    if one.param_type_name == "argument":
        return "arguments"
    if "--help" in one.opts:
        return _HELP
    return (None if few else getattr(one, "rich_help_panel", None)) or "options"


def _write_help_sections(formatter: Any, listed: dict[str, Rows]) -> None:
    """All sections with their second columns aligned."""
    # at most 28, and click's width is never below 50: textwrap refuses a width of 0
    column = 4 + max(
        (len(name) for rows in listed.values() for name, _ in rows if len(name) <= _WIDEST),
        default=0,
    )
    for title, rows in listed.items():
        with formatter.section(title.capitalize()):
            for name, told in rows:
                first, *more = _wrap_help_text_at_spaces(told, formatter.width - column) or [""]
                if len(name) > column - 4:
                    formatter.write(f"  {name}\n")
                    name = ""
                formatter.write(f"  {name:{column - 2}}{first}".rstrip() + "\n")
                formatter.write("".join(f"{'':{column}}{line}\n" for line in more))


def _wrap_help_text_at_spaces(text: str, width: int) -> list[str]:
    """Lines that break at spaces alone: a flag stays whole."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _write_help_text_with_examples(formatter: Any, text: str) -> None:
    said = ParsedCommandDocstring.split_docstring(text)
    _write_help_paragraph(formatter, said.first)
    if said.examples:
        with formatter.section(_EXAMPLES.rstrip(":")):
            formatter.write("".join(f"  {line}\n" for line in said.examples))
    for paragraph in said.more:
        _write_help_paragraph(formatter, paragraph)


def _write_help_paragraph(formatter: Any, text: str) -> None:
    formatter.write(
        "\n"
        + "".join(f"  {line}\n" for line in _wrap_help_text_at_spaces(text, formatter.width - 2))
    )


class PanelCommand(TyperCommand):
    """A command whose flags stand in panels."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        _write_help_text_with_examples(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_help_sections(formatter, flags_by_help_panel(self, ctx))


class PanelGroup(TyperGroup):
    """A group whose commands stand in panels, each with its whole first sentence, before the flags
    of the group.

    Where a command comes first none of the group's flags is given, and none is read: typer would
    import pydantic for the default of a number, which takes longer than all of the help. Each is
    then said to be not given, as typer's callback otherwise keeps what an earlier call gave.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # click shares `meta` with the contexts of all commands below: each group says it for itself
        # before it reads
        ctx.meta[_UNREAD] = bool(args) and args[0] in self.commands
        rest = super().parse_args(ctx, args)
        if ctx.meta[_UNREAD]:
            own: list[Any] = [one for one in self.params if one.expose_value]
            ctx.params |= {one.name: False if one.is_flag else None for one in own}
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        return [] if ctx.meta.get(_UNREAD) else super().get_params(ctx)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        _write_help_text_with_examples(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found: dict[str, Rows] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "commands"
            # 1000: click cuts a sentence at 45 characters by default
            found.setdefault(panel, []).append((name, command.get_short_help_str(1000)))
        _write_help_sections(formatter, found | flags_by_help_panel(self, ctx))
