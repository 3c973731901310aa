"""Escape text of data, models, plug-ins and users, with one function per medium.

First, `make_printable_line` turns names, notes and paths into one short printable line, and
`show_invisible_characters` makes every character of private text visible. Then the function of the
medium escapes everything that the medium would run, link, hide or reorder.
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

# Most characters of a text: a line of a megabyte would hide the rest.
LONGEST = 4000

# ECMA-48: CSI after `ESC [` or 0x9b; OSC up to BEL, `ESC \` or its end; two-character sequences.
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])|\x9b[0-?]*[ -/]*[@-~]"
)
# Soft hyphen, joiners, byte order mark, tags: invisible, they hide text or make two names look
# equal.
_ZERO_WIDTH = "\u00ad\u180e\u200b-\u200d\u2060-\u2065\ufeff\U000e0000-\U000e007f"
# C0, C1, line separators, and the marks that reorder text (Boucher and Anderson 2021, "Trojan
# Source").
_CONTROL = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ufffe\uffff"
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be written as UTF-8
_INVISIBLE = re.compile(f"[{_ZERO_WIDTH}]")
_UNPRINTABLE = re.compile(f"[{_CONTROL}]")
_UNPRINTABLE_IN_LINES = re.compile(f"(?!\n)[{_CONTROL}]")
_UNSEEN = re.compile(f"[{_ZERO_WIDTH}{_CONTROL}\ud800-\udfff]")

# a `]` matters only before a possible link target
_MARKDOWN = re.compile(r"[\\`*|~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])")
# headings, rules, list items
_MARKDOWN_LINE_START = re.compile(r"^(\d*)([#+=-]|(?<=\d)[.)](?=\s|$))")
# Addresses, mentions and issues that GitHub links or notifies automatically, even after a
# backslash.
_MARKDOWN_LINK = re.compile(
    r"(?<=@)(?=\w)|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)", re.IGNORECASE
)
_SPLIT = "&#8203;"  # a zero-width space

# Spreadsheets also run text after the full-width forms of = + - @, and many locales separate cells
# by `;`.
_FORMULA = re.compile("(^|;\\s*)(?=[=+\\-@\uff1d\uff0b\uff0d\uff20])")

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{
        character: f"{{{character}}}" for character in "[]*"
    },  # after a row's end LaTeX would parse them as its argument
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


# --- plain text ---


def make_printable_line(text: str) -> str:
    """Return the text as one printable line of at most LONGEST characters, safe in any medium."""
    # Remove full escape sequences before control characters, or their rest would stay as text.
    text = _SURROGATE.sub("\ufffd", _ESCAPE_SEQUENCE.sub("", text))
    return _cut_long_text(" ".join(_UNPRINTABLE.sub(" ", _INVISIBLE.sub("", text)).split()))


def list_printable(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return one line with the first `most` names and the number of omitted names."""
    n_left = len(names) - most
    text = separator.join(map(make_printable_line, names[:most]))
    if n_left > 0:
        text += f" and {n_left:,} more"
    return text


def show_invisible_characters(text: str) -> str:
    """Return private text on one line, with `↵` for line ends and `‹U+202E›` for invisible
    characters.
    """
    return _cut_long_text(_UNSEEN.sub(_show_invisible_character, text))


def _show_invisible_character(match: re.Match[str]) -> str:
    # few fonts have control pictures
    if match[0] == "\n":
        return "↵"
    return f"‹U+{ord(match[0]):04X}›"


def _cut_long_text(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    end = f"… ({len(text):,} characters)"
    return text[: LONGEST - len(end)].rstrip() + end


# --- one function per medium ---


def escape_for_terminal(text: str) -> Text:
    """Return rich Text, which is never parsed as markup."""
    from rich.text import Text

    return Text(make_printable_line(text))


def escape_for_html(text: str) -> str:
    """Escape text for an element or a quoted attribute; keep line ends and runs of spaces."""
    return escape(strip_unprintable(text))  # quotes too, by default


def strip_unprintable(text: str) -> str:
    """Remove characters that HTML forbids, but keep line ends; escape nothing."""
    return _UNPRINTABLE_IN_LINES.sub(" ", _INVISIBLE.sub("", _SURROGATE.sub("\ufffd", text)))


def escape_for_markdown(text: str) -> str:
    """Escape text so that GitHub shows it literally, without HTML, links, mentions or formulas."""
    # `&` first, and _SPLIT last: it is an entity, which must not be escaped.
    text = make_printable_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # `^` matches the start of the text: only one line is left.
    text = _MARKDOWN_LINE_START.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", text))
    return _MARKDOWN_LINK.sub(_SPLIT, text)


def escape_csv_cell(value: object) -> object:
    """Return a value as a CSV cell that no spreadsheet runs.

    None becomes an empty cell; text that a spreadsheet would run gets an apostrophe in front.
    """
    # Numbers stay numbers: a negative number as text would get the apostrophe.
    if isinstance(value, str):
        # Tabs and line ends, which also begin a formula, have become spaces.
        return _FORMULA.sub(r"\1'", make_printable_line(value))
    return "" if value is None else value


def render_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return RFC 4180 CSV with "\\r\\n" line ends and no cell that a spreadsheet would run."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(escape_csv_cell, head))
    writer.writerows(map(escape_csv_cell, row) for row in rows)
    return buffer.getvalue()


def escape_for_latex(text: str) -> str:
    """Escape text for a LaTeX document."""
    return "".join(_LATEX.get(character, character) for character in make_printable_line(text))
