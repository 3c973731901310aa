"""Text from data, models and users stays text: whatever it holds, no medium runs, links, hides or
reorders it."""

from __future__ import annotations

import csv
import io
import re
import time
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from auditor.commands import console
from auditor.reports import escaping

PAYLOADS = (
    "<script>alert(1)</script>",
    "\u202eevil\u2066x\u061c\u200f",
    "x" * 1_000_000,
    "nul\x00byte",
    "\x1b[2J\x1b]8;;http://x\x07link\x1b]8;;\x07\x9b31m",
    "=HYPERLINK(1)",
    " +1",
    "-1|2",
    "@SUM(A1)",
    "a;=1+1",
    "\uff1d1+1",
    "\t=1",
    "| a | `b` **c** __d__ _e_ [l](javascript:d) ![i](http://x) [r]: http://y",
    "mail a@b.example, @team, #123, GH-7, https://x.example www.y.example",
    "[red]x[/red] [/] [link=http://x]y[/link]",
    "&lt;b&gt; \" ' {{ 1 }} {% x %} ]]> --> $x$ \\",
    "\ud800 half\n# heading\r\n- item\u2028> quote",
    "z\u200be\u200dr\u00ado\ufeff\U000e0041",
)
ANY = st.text(st.characters(), max_size=80) | st.sampled_from(PAYLOADS)
NASTY = st.lists(
    ANY | st.sampled_from("=+-@;_*~!b|`[](){}<>&\\#:/\x1b\x00\u202e\"' \n"), max_size=12
).map("".join)
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
BAD = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def payloads(test: object) -> object:
    for payload in PAYLOADS:
        test = example(payload)(test)  # type: ignore[arg-type]
    return given(NASTY)(test)  # type: ignore[arg-type]


@payloads
def test_a_clean_line_is_printable_bounded_and_stays_so(text: str) -> None:
    line = escaping.make_printable_line(text)
    assert not BAD.search(line) and len(line) <= escaping.LONGEST
    assert line == escaping.make_printable_line(line) == line.strip()
    line.encode("utf-8")


@given(st.text(st.characters(categories=("L", "N", "P", "S")), max_size=80))
def test_what_can_be_read_is_kept(text: str) -> None:
    kept = "".join(c for c in text if unicodedata.category(c) != "Cf" and c not in "\ufffe\uffff")
    assert (
        escaping.make_printable_line(text) == kept
        and escaping.show_invisible_characters(text) == text
    )


@given(st.text(st.characters(), max_size=80), st.text(st.characters(), max_size=80))
def test_visible_text_loses_nothing(one: str, other: str) -> None:
    plain = {c for c in one + other if c not in "‹›↵"}
    first, second = ("".join(c for c in text if c in plain) for text in (one, other))
    assert (
        escaping.show_invisible_characters(first) == escaping.show_invisible_characters(second)
    ) == (first == second)
    assert not BAD.search(escaping.show_invisible_characters(first))


def test_visible_text_shows_what_is_not_seen() -> None:
    assert (
        escaping.show_invisible_characters("a  b\n\x00\x1b\u202e\ud800é")
        == "a  b↵‹U+0000›‹U+001B›‹U+202E›‹U+D800›é"
    )


@pytest.mark.parametrize(
    "make",
    [
        escaping.make_printable_line,
        escaping.show_invisible_characters,
        escaping.escape_for_markdown,
        escaping.escape_for_latex,
        escaping.escape_csv_cell,
    ],
)
def test_a_megabyte_is_cut_and_counted_quickly(make: object) -> None:
    start = time.perf_counter()
    for filler in ("x", "\x1b]", "\x1b[0", "[", ";", "=", " ", "@", "&", "\n"):
        text = make(filler * (1_000_000 // len(filler)))  # type: ignore[operator]
        assert len(text) < 10 * escaping.LONGEST
    assert time.perf_counter() - start < 20
    assert "1,000,000 characters" in escaping.make_printable_line("x" * 1_000_000)


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str | None] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@payloads
def test_html_holds_it_as_text_and_in_attributes(text: str) -> None:
    escaped = escaping.escape_for_html(text)
    page = Elements(f"<p title=\"{escaped}\" lang='{escaped}'>{escaped}</p>")
    assert page.tags == ["p"] and page.text == escaping.strip_unprintable(text)
    assert page.values == [escaping.strip_unprintable(text)] * 2
    assert not BAD.search(page.text.replace("\n", ""))


@payloads
def test_markdown_shows_it_as_it_stands(text: str) -> None:
    shown = escaping.escape_for_markdown(text)
    line = escaping.make_printable_line(text)
    for source in (shown, f"- {shown}", f"> {shown}"):
        tokens = MARKDOWN.parse(source)
        inline = [child for token in tokens for child in token.children or []]
        allowed = {"text", "text_special", "softbreak"}
        assert {child.type for child in inline} <= allowed, source
        blocks = {"paragraph_open", "inline", "paragraph_close"}
        structure = {
            f"{kind}_{end}"
            for kind in ("bullet_list", "list_item", "blockquote")
            for end in ("open", "close")
        }
        assert {token.type for token in tokens} <= blocks | structure
        seen = "".join(child.content for child in inline).replace("\u200b", "")
        assert seen == line


@payloads
def test_github_finds_nothing_to_link_or_notify(text: str) -> None:
    # What GitHub looks for in rendered text: GFM 6.9 autolinks, mentions, issues.
    tokens = MARKDOWN.parse(escaping.escape_for_markdown(text))
    seen = "".join(child.content for token in tokens for child in token.children or [])
    assert not re.search(r"https?://|ftp://|\bwww\.|@\w|#\d|\bGH-\d", seen, re.IGNORECASE)


@payloads
def test_no_pipe_makes_a_cell(text: str) -> None:
    source = f"| a | b |\n| --- | --- |\n| {escaping.escape_for_markdown(text)} | c |"
    tokens = MARKDOWN.parse(source)
    assert sum(token.type == "td_open" for token in tokens) == 2


@payloads
def test_a_spreadsheet_runs_nothing(text: str) -> None:
    rows = list(
        csv.reader(io.StringIO(escaping.render_csv(["h", text], [[text, 1.5], [None, -2]])))
    )
    assert rows[2:] == [["", "-2"]] and rows[0][0] == "h" and len(rows[1]) == 2
    for cell in (rows[0][1], rows[1][0]):
        for part in (cell, *cell.split(";")):  # where `;` separates cells
            assert not part.lstrip().startswith(
                ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
            )
        assert cell.replace("'", "") == escaping.make_printable_line(text).replace("'", "")


@payloads
def test_a_terminal_prints_text_not_markup(text: str) -> None:
    out = io.StringIO()
    Console(file=out, width=10**7, force_terminal=True, color_system=None).print(
        escaping.escape_for_terminal(text), soft_wrap=True
    )
    assert out.getvalue() == escaping.make_printable_line(text) + "\n"


@given(NASTY)
def test_latex_leaves_no_command(text: str) -> None:
    left = re.sub(
        r"\\(?:text\w+|ldots|varepsilon|delta|Delta|geq|leq|times|infty)(?:\{\})?|\\[&%$#_{}]",
        "",
        escaping.escape_for_latex(text),
    )
    assert "\\" not in left and not re.search("[%#&~^<>_]", left)


def test_what_is_said_is_one_inert_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        console.print_stderr_line("error: '\x1b[2J[red]no[/red]\u202e\nsecond' " + "y" * 10**6, 2)
        == 2
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "[red]no[/red] second" in said and not BAD.search(said[:-1])
    assert len(said) < 5000
