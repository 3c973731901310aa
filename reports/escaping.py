"""Text of data, models, plug-ins and users as text, whatever it holds: one function a medium. Knows
no report.

Names, notes and paths become one bounded printable line (`to_printable_line`); private text that
was asked for keeps every character in sight (`show_invisible_characters`). Then what each medium
would run, link, hide or reorder is made harmless.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# characters of one piece of text: a line of a megabyte is not read, and buries what is
LONGEST = 4000

# ECMA-48: CSI behind `ESC [` or 0x9b; OSC up to BEL or `ESC \`, or as far as it goes; sequences of
# two characters.
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])|\x9b[0-?]*[ -/]*[@-~]"
)
# Soft hyphen, joiners, byte order mark, tags: unseen, they hide text or make two names look alike.
_ZERO_WIDTH = "\u00ad\u180e\u200b-\u200d\u2060-\u2065\ufeff\U000e0000-\U000e007f"
# C0, C1, line separators, and the marks that reorder text (Boucher and Anderson 2021, "Trojan
# Source").
_CONTROL = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ufffe\uffff"
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be written as UTF-8
_INVISIBLE = re.compile(f"[{_ZERO_WIDTH}]")
_UNPRINTABLE = re.compile(f"[{_CONTROL}]")
_UNPRINTABLE_IN_LINES = re.compile(f"(?!\n)[{_CONTROL}]")
_UNSEEN = re.compile(f"[{_ZERO_WIDTH}{_CONTROL}\ud800-\udfff]")

# a `]` matters only where a link could follow
_MARKDOWN = re.compile(r"[\\`*|~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])")
# headings, rules, list items
_MARKDOWN_LINE_START = re.compile(r"^(\d*)([#+=-]|(?<=\d)[.)](?=\s|$))")
# What GitHub links or notifies without being asked: addresses, mentions, issues. No backslash keeps
# it from that.
_MARKDOWN_LINK = re.compile(
    r"(?<=@)(?=\w)|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)", re.IGNORECASE
)
_SPLIT = "&#8203;"  # a space without width

# Spreadsheets also run what begins with the full-width forms of = + - @.
# `;` separates cells in half the world
_FORMULA = re.compile("(^|;\\s*)(?=[=+\\-@\uff1d\uff0b\uff0d\uff20])")

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{
        character: f"{{{character}}}" for character in "[]*"
    },  # behind a row's end they would belong to it
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    "–": "--",
    "…": r"\ldots{}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "Δ": r"$\Delta$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "·": r"\textperiodcentered{}",
}


# --- plain text
# -----------------------------------------------------------------------------------------------


def to_printable_line(text: str) -> str:
    """One printable line of at most LONGEST characters: nothing that repaints a terminal or
    reorders a report."""
    # Escape sequences whole before their first character goes as a control: else the rest stays as
    # text.
    text = _SURROGATE.sub("\ufffd", _ESCAPE_SEQUENCE.sub("", text))
    return _cut_text_to_report_limit(
        " ".join(_UNPRINTABLE.sub(" ", _INVISIBLE.sub("", text)).split())
    )


def show_invisible_characters(text: str) -> str:
    """Private text on one line, every character in sight: a line end as `↵`, others that are not
    seen as `‹U+202E›`."""
    return _cut_text_to_report_limit(_UNSEEN.sub(_show_invisible_character, text))


def _show_invisible_character(match: re.Match[str]) -> str:
    # control pictures are in few fonts
    return "↵" if match[0] == "\n" else f"‹U+{ord(match[0]):04X}›"


def _cut_text_to_report_limit(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    end = f"… ({len(text):,} characters)"
    return text[: LONGEST - len(end)].rstrip() + end


# --- a function a medium
# -----------------------------------------------------------------------------------------------


def escape_for_terminal(text: str) -> Text:
    """For rich: never parsed as markup."""
    from rich.text import Text

    return Text(to_printable_line(text))


def escape_for_html(text: str) -> str:
    """For the inside of an element or of a quoted attribute. Line ends and runs of spaces stay."""
    return escape(strip_unprintable(text))  # quotes too, by its default


def strip_unprintable(text: str) -> str:
    """The text without what a page may not hold, not escaped; line ends stay: what a template's
    strings go through."""
    return _UNPRINTABLE_IN_LINES.sub(" ", _INVISIBLE.sub("", _SURROGATE.sub("\ufffd", text)))


def escape_for_markdown(text: str) -> str:
    """Shown as it stands by GitHub: no HTML, links, mentions, emphasis, table cells or
    mathematics."""
    # `&` first, and _SPLIT last: it is an entity, which must not be escaped itself.
    text = to_printable_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # `^` is the start of all: one line is left by now.
    text = _MARKDOWN_LINE_START.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", text))
    return _MARKDOWN_LINK.sub(_SPLIT, text)


def escape_csv_cell(value: object) -> object:
    """For a cell of CSV: text that a spreadsheet would run gets an apostrophe in front, None is
    empty."""
    # Numbers stay numbers: as text a negative one would get the apostrophe.
    if isinstance(value, str):
        # Tabs and line ends, which begin a formula too, are spaces by then.
        return _FORMULA.sub(r"\1'", to_printable_line(value))
    return "" if value is None else value


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """RFC 4180 with "\\n" line ends, every cell inert."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(escape_csv_cell, head))
    writer.writerows(map(escape_csv_cell, row) for row in rows)
    return buffer.getvalue()


def escape_for_latex(text: str) -> str:
    """For the text of a LaTeX document."""
    return "".join(_LATEX.get(character, character) for character in to_printable_line(text))
