"""Terminal, Markdown and HTML: the facts that must be there, and that nothing a user named can
break out."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console

from auditor.core.jsonable import from_json, to_json
from auditor.core.result import AuditResult
from auditor.records.private_texts import SecretText
from auditor.reports import html, markdown, terminal
from auditor.reports.figures import draw_all_figures
from auditor.reports.plots import render_plot_svg
from auditor.reports.table_of_contents import build_markdown_document

FACTS = (
    "166/320 (52% [46–57])",
    "1/320 (0.3% [0.0–1.7])",
    "0/160 (0.0% [0.0–2.3])",
    "top-p 0.7, temperature 0.8",
    "PMixED (sound), white-box",
    "no, outside the claim (log-probabilities, top-p 0.7)",
    "not applicable: perplexity ranks by log-probabilities",
)
HOSTILE = (
    "<script>alert(1)</script> [red]x[/red] |a|`b` **c** [l](javascript:d) \\| $x_1$ & "
    "\x1b[31m\n# h\u202e\ud800 _e_"
)
VOID = {"meta", "br", "hr", "img", "link", "input"}


def screen(result: AuditResult, width: int, folder: Path = Path("runs/own"), **options: Any) -> str:
    out = io.StringIO()
    blocks = terminal.build_report_screen(result, folder)
    Console(file=out, width=width, **options).print(*blocks, sep="\n")
    return out.getvalue()


def hostile(result: AuditResult) -> AuditResult:
    """The result with every text a user could have chosen set to the hostile one; structure and
    numbers kept."""

    def spoil(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            free = name in ("environment", "timings", "options", "epsilon", "repeats")
            return {HOSTILE if free else key: spoil(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item, name) for item in value]
        kept = isinstance(value, str) and (
            name in ("setting", "target", "unit") or value in ("inf", "undefended")
        )
        known = name == "name" and value in (
            "recall",
            "recall_nonmembers",
            "excess_recall",
            "recall_difference",
        )
        return HOSTILE if isinstance(value, str) and value and not kept and not known else value

    spoiled: AuditResult = from_json(AuditResult, spoil(to_json(result)))
    named = (
        replace(record, name=target.name)
        for record, target in zip(spoiled.targets, result.targets, strict=True)
    )
    return replace(spoiled, targets=tuple(named))


class Page(HTMLParser):
    """Checks that tags nest, and collects what a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


# --- what is there ---


@pytest.mark.parametrize("fact", FACTS)
def test_facts_are_in_every_report(result: AuditResult, fact: str) -> None:
    assert fact in screen(result, 400)
    assert fact in markdown.render_markdown_report(result)
    assert fact in "".join(Page(html.render_html_report(result)).text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7, "7 of 320 members: these may come from the auxiliary data"),
        (0, "none among the members"),
        (None, "not counted"),
    ],
)
def test_near_duplicates_of_known_pairs_are_counted(
    result: AuditResult, count: int | None, text: str
) -> None:
    shown = replace(result, benchmark=replace(result.benchmark, near_duplicates=count))
    assert f"- Near-duplicates of auxiliary data: {text}" in markdown.render_markdown_report(shown)
    assert text in "".join(Page(html.render_html_report(shown)).text)


def test_a_probe_shows_its_own_number_where_an_attack_shows_recall(with_probe: AuditResult) -> None:
    row = (
        "extraction-probability",
        "chance per sample 31% [27–35]",
        "<0.01% [0.00–4.00]",
        "31 points [26–36]",
    )
    text = "".join(Page(html.render_html_report(with_probe)).text)
    for cell in row:
        assert cell in screen(with_probe, 400) and cell in text
    assert f"| {' | '.join(map(markdown.escape, row))} |" in markdown.render_markdown_report(
        with_probe
    )


def test_the_curve_of_errors_keeps_its_steep_part(result: AuditResult) -> None:
    """A saved curve has few of its points, and need not have one at 1, 2 or 5 errors."""
    thin = ((0, 0.0), (4, 0.07), (9, 0.075), (44, 0.08), (96, 0.107), (258, 0.14))
    finding = replace(result.findings[1], curve=thin)
    drawn = draw_all_figures(replace(result, findings=(finding,)))
    (group,) = next(f for f in drawn if f.title.startswith("Recall by wrong guesses")).groups
    assert [errors for errors, _ in group.rows] == [
        "0",
        "4",
        "9",
        "44",
        "96",
        "258",
    ] and group.rows[1][1] == "7.0%"


@pytest.mark.parametrize("alone", [False, True])
def test_any_of_n_is_drawn_beside_the_floor(
    with_probe: AuditResult, probe_only: AuditResult, alone: bool
) -> None:
    shown = probe_only if alone else with_probe
    figures = [
        f
        for s in build_markdown_document(shown).sections
        for b in s.blocks
        for f in getattr(b, "figures", ())
    ]
    drawn = [f for f in figures if f.plot == "any_of_n"]
    assert [f.id for f in drawn] == ["any-of-white-box"] and len(drawn[0].series) == 2
    assert ("100", "100.0% [96.0–100.0]", "46% [42–50]") in drawn[0].table.groups[0].rows
    picture = render_plot_svg(drawn[0])
    assert "non-members" in picture and "Samples" in picture
    assert "any_of_n" not in [f.plot for f in figures if f.id.endswith("text-only")]
    repeats = next(f for f in figures if f.id == "repeats-white-box")
    assert repeats.title.startswith("Extraction probability, mean by" if alone else "Recall by")
    assert {series.kind for series in repeats.series} == {
        "extraction-probability" if alone else "ethicist"
    }


def test_reports_are_deterministic(result: AuditResult, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = html.render_html_report(result)
    # drawn again, and not kept from the last time
    monkeypatch.setattr(html, "render_plot_svg", render_plot_svg)
    assert html.render_html_report(result) == drawn
    assert markdown.render_markdown_report(result) == markdown.render_markdown_report(result)


def test_an_empty_result_still_renders(result: AuditResult) -> None:
    empty = replace(result, findings=(), targets=(), timings={}, environment={}, plan={})
    for text in (
        html.render_html_report(empty),
        markdown.render_markdown_report(empty),
        screen(empty, 80),
    ):
        assert "Nothing was measured on the undefended model" in " ".join(text.split())


# --- terminal ---


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_fits(with_probe: AuditResult, width: int) -> None:
    result = with_probe
    lines = screen(result, width, Path("runs/latest")).splitlines()
    assert max(map(cell_len, lines)) <= width


def test_the_screen_ends_with_what_to_do_next(result: AuditResult) -> None:
    text = screen(result, 120, Path("runs/my run"))
    assert "report: runs/my run/report.html" in text
    assert "next:   audit advise 'runs/my run'" in text


def test_no_color(result: AuditResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\d", screen(result, 80, force_terminal=True))


# --- escaping ---


def test_terminal_shows_hostile_text_as_text(result: AuditResult) -> None:
    text = screen(hostile(result), 400, Path("x\x1b[2J"))
    assert "[red]x[/red]" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)


def test_markdown_shows_hostile_text_as_text(result: AuditResult) -> None:
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(
        markdown.render_markdown_report(hostile(result))
    )
    inline = [child for token in tokens for child in token.children or []]
    unwanted = {"html_inline", "link_open", "code_inline", "em_open"}
    assert not unwanted & {token.type for token in (*tokens, *inline)}
    ours = re.compile(r"</details>\n|<details><summary>[\w ,]+</summary>\n")
    assert all(ours.fullmatch(token.content) for token in tokens if token.type == "html_block")
    assert "<script>alert(1)</script> [red]x[/red] |a|`b` **c** [l](javascript:d)" in shown(tokens)


def test_no_pipe_makes_or_eats_a_cell(result: AuditResult) -> None:
    lines = markdown.render_markdown_document(build_markdown_document(hostile(result))).splitlines()
    tables = [
        list(group)
        for is_row, group in groupby(lines, key=lambda line: line.startswith("| "))
        if is_row
    ]
    assert len(tables) == 13
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def shown(tokens: list[Any]) -> str:
    """The text a reader sees."""
    return "\n".join("".join(child.content for child in token.children or []) for token in tokens)


@pytest.mark.parametrize(
    "text",
    ["# a", "- a", "+ a", "1. a", "1) a", "===", "---", "> a", "```", "| a |", "* a", "12.5"],
)
def test_markdown_line_starts(text: str) -> None:
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(
        f"before\n\n{markdown.escape(text)}\n"
    )
    assert [t.type for t in tokens] == ["paragraph_open", "inline", "paragraph_close"] * 2
    assert shown(tokens[4:5]) == text


def test_html_shows_hostile_text_as_text(result: AuditResult) -> None:
    page, usual = (
        Page(html.render_html_report(hostile(result))),
        Page(html.render_html_report(result)),
    )
    assert not page.all("script")
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in usual.tags}
    assert "<script>alert(1)</script> [red]x[/red]" in "".join(page.text)


def test_revealed_text_is_shown_as_text_and_said_to_be_private(result: AuditResult) -> None:
    row = "undefended/white-box/ethicist"
    said = {
        "row-1": SecretText("s1", "nobody's", ("guess",), {row: "other"}),
        "row-2": SecretText("s2", HOSTILE, ("=1", "\n"), {row: "=1\n"}, (row,)),
    }
    page, usual = (
        Page(html.render_html_report(result, texts=said)),
        Page(html.render_html_report(result)),
    )
    text, mark = "".join(page.text), markdown.render_markdown_report(result, texts=said)
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in usual.tags}
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(mark)
    inline = {child.type for token in tokens for child in token.children or []}
    assert not {"html_block", "html_inline", "link_open", "code_inline", "em_open"} & inline
    for report in (text, shown(tokens)):
        assert "This report shows private text (--reveal): keep it to yourself." in report
        assert (
            "<script>alert(1)</script> [red]x[/red]" in report
            and "‹U+202E›‹U+D800› _e_" in report
            and "=1↵" in report
        )
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", report)
        assert report.index("s2") < report.index("nobody's")  # what was given away comes first
    assert "contains no text" not in text and "contains no text" in "".join(usual.text)
    assert "shows private text" not in "".join(usual.text) + markdown.render_markdown_report(result)


def test_a_revealed_page_stays_small(result: AuditResult) -> None:
    many = {f"s{i}": SecretText(f"s{i}", "p" * 200, ("s" * 200,)) for i in range(10_000)}
    page = html.render_html_report(result, texts=many)
    assert len(page.encode()) < 3_000_000 and re.search("2,[0-9]{3} of 10,000 secrets", page)


def test_a_fence_is_longer_than_the_backticks_it_holds(result: AuditResult) -> None:
    text = markdown.render_markdown_report(replace(result, command="echo ```` # x"))
    assert "\n`````\necho ```` # x\n`````\n" in text


# --- the page ---


@pytest.fixture(scope="module", params=["result alone", "secret by secret"])
def written(request: pytest.FixtureRequest, detailed: tuple[Path, Any]) -> str:
    """The page of a result, and of one with the list of its secrets."""
    if request.param == "secret by secret":
        return detailed[0].read_text()
    return html.render_html_report(request.getfixturevalue("lab"))


def test_the_page_loads_nothing(written: str) -> None:
    text = written
    page = Page(text)
    assert "http://" not in text and "https://" not in text
    assert not [tag for tag in ("link", "img", "iframe", "object", "form") if page.all(tag)]
    assert [script.get("type") for script in page.all("script")] in ([], ["application/json", None])
    assert not any(script.get("src") for script in page.all("script"))
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    policy = next(
        meta for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_the_page_is_accessible(written: str) -> None:
    page = Page(written)
    tags = [tag for tag, _ in page.tags]
    assert page.all("html")[0]["lang"] == "en"
    assert (
        tags.count("main"),
        tags.count("header"),
        tags.count("nav"),
        tags.count("footer"),
        tags.count("h1"),
    ) == (1,) * 5
    assert tags.count("caption") == tags.count("table") > 0
    assert all(th.get("scope") in ("col", "row", "rowgroup") for th in page.all("th"))
    assert all(
        plot["role"] == "img" and plot["aria-labelledby"]
        for plot in page.all("svg")
        if plot["class"] == "plot"
    )
    assert page.all("a")[0] == {"class": "skip", "href": "#verdict"}
    regions = [div for div in page.all("div") if div.get("role") == "region"]
    assert len(regions) == tags.count("table") and all(
        region["tabindex"] == "0" for region in regions
    )


def test_ids_are_unique_and_references_resolve(written: str) -> None:
    text = written
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    used = {ref for _, attrs in page.tags for ref in (attrs.get("aria-labelledby") or "").split()}
    used |= {(attrs.get("href") or "#")[1:] for _, attrs in page.tags} | set(
        re.findall(r"url\(#([^)]+)\)", text)
    )
    assert used - {""} <= set(ids)


def test_plots_are_small_and_follow_the_theme(result: AuditResult) -> None:
    plots = re.findall(r"<svg.*?</svg>", html.render_html_report(result), re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        assert len(plot.encode()) < 60_000
        assert "var(--series-1)" in plot and "currentColor" in plot
        assert not re.search(r"#[0-9a-f]{6}\b", plot)


def test_a_plot_leaves_titles_alone(result: AuditResult) -> None:
    title = 'x=0.123456 #010203 id="y" $a$'
    renamed = replace(
        result, targets=(replace(result.targets[0], title=title), *result.targets[1:])
    )
    plots = re.findall(r"<svg.*?</svg>", html.render_html_report(renamed), re.DOTALL)
    assert all(title in plot for plot in plots)


def test_a_large_plot_is_small_too(result: AuditResult) -> None:
    cell = result.findings[0]
    long = tuple((errors, errors / 20000) for errors in range(15000))
    many = tuple(
        replace(cell, target=f"t{i // 2}", attack=f"a{i % 2}", curve=long) for i in range(24)
    )
    figure = next(
        figure
        for section in build_markdown_document(replace(result, findings=many)).sections
        for block in section.blocks
        for figure in getattr(block, "figures", ())
        if figure.plot == "errors"
    )
    assert len(render_plot_svg(figure).encode()) < 60_000


def test_on_paper_a_paragraph_is_set_as_on_the_screen() -> None:
    """A rule that a merge had spliced drew a thick line over every paragraph and every list of a
    printed page."""
    style = (Path(html.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    said = re.findall(
        r"([^{}]+)\{([^{}]*)\}", style[style.index("@media print") :].partition("{")[2]
    )
    of_text = [
        body for names, body in said if {"p", "ul"} & {name.strip() for name in names.split(",")}
    ]
    assert of_text and all("border" not in body and "color" not in body for body in of_text)
