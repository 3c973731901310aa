"""The HTML report in a real browser: it fits the window, logs nothing and asks the network for
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult
from auditor.records.private_texts import SecretText
from auditor.reports import html

# WCAG contrast of each text-bearing element with its own colour against the nearest opaque
# background
CONTRAST = """(() => {
  const rgba = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = rgb => [.2126, .7152, .0722].reduce((sum, weight, i) => sum + weight * linear(rgb[i] / 255), 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = rgba(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = node => {
    const style = getComputedStyle(node), ink = node.closest('svg') ? style.fill : style.color;
    const [more, less] = [light(rgba(ink)), light(behind(node))].sort((x, y) => y - x);
    return (more + .05) / (less + .05);
  };
  const holdsText = node => [...node.childNodes].some(child => child.nodeType == 3 && child.data.trim());
  const texts = [...document.body.querySelectorAll('*')].filter(holdsText);
  return Math.min(...texts.filter(node => !node.closest('style, defs, title, desc')).map(contrast));
})()"""  # noqa: E501


UNFOLD = "document.querySelectorAll('details.fold').forEach(one => { one.open = true; })"


@pytest.fixture
def page(tmp_path: Path, result: AuditResult) -> Path:
    path = tmp_path / "report.html"
    path.write_text(html.render_html_report(result), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 768, 1440])
def test_the_page_in_a_browser(browser: Any, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark=dark)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.querySelectorAll('svg.plot path').length") > 20
    assert browser.evaluate(CONTRAST) >= 4.5
    assert browser.troubles() == []


def test_wide_tables_scroll_by_themselves(browser: Any, page: Path) -> None:
    browser.open(page, 390)
    browser.evaluate(UNFOLD)
    region = "document.querySelector('#results .scroll')"
    assert browser.evaluate(f"{region}.scrollWidth > {region}.clientWidth")
    assert browser.evaluate(f"{region}.focus(), document.activeElement == {region}")


def test_a_long_word_does_not_widen_the_page(
    browser: Any, tmp_path: Path, result: AuditResult
) -> None:
    word = "x" * 500
    targets = tuple(replace(target, title=word, description=word) for target in result.targets)
    path = tmp_path / "report.html"
    path.write_text(
        html.render_html_report(replace(result, name=word, command=word, targets=targets)),
        encoding="utf-8",
    )
    browser.open(path, 390)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= 390


# --- the list of secrets ---

LINES = "[...document.querySelectorAll('#secrets-table > tbody > tr:not(.opened)')]"
STATUS = "document.getElementById('secrets-status').textContent"


def choose(name: str, text: str) -> str:
    """Chooses an option by its text, as a person would."""
    return f"""(() => {{
      const select = document.getElementById('filter-{name}');
      select.value = [...select.options].find(o => o.text === {text!r}).value;
      select.dispatchEvent(new Event('change'));
    }})()"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_the_page_with_its_secrets_in_a_browser(
    browser: Any, detailed: tuple[Path, SecretDetails], width: int, dark: bool
) -> None:
    browser.open(detailed[0], width, dark=dark)
    browser.evaluate(choose("member", "yes"))
    browser.evaluate("document.querySelectorAll('.opener')[1].click()")
    assert browser.evaluate("document.querySelectorAll('.opened .level').length") > 0
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert browser.evaluate(CONTRAST) >= 4.5
    assert browser.troubles() == []


def test_filters_find_what_a_loop_finds(browser: Any, detailed: tuple[Path, SecretDetails]) -> None:
    path, details = detailed
    browser.open(path, 1440)
    outcome = details.values_by_cell["undefended", "white-box", "ethicist"]
    # the strongest undefended row, every secret once
    assert browser.evaluate(STATUS) == "1–25 of 200"

    def expect(count: int) -> None:
        shown = f"1–{min(25, count)} of {count:,}" if count else "Nothing matches these filters."
        assert browser.evaluate(STATUS) == shown
        assert browser.evaluate(f"{LINES}.length") == min(25, count)

    browser.evaluate(choose("outcome", "extracted verbatim"))
    expect(int(outcome.hit.sum()))
    browser.evaluate(choose("member", "yes"))
    expect(int((outcome.hit & outcome.member).sum()))
    browser.evaluate(choose("repeats", "4"))
    expect(
        sum(
            h and m and r == 4
            for h, m, r in zip(outcome.hit, outcome.member, outcome.repeats, strict=True)
        )
    )
    for name in ("outcome", "member", "repeats"):
        browser.evaluate(choose(name, "all"))
    browser.evaluate(choose("group", "group 3"))
    expect(sum(secret.group == "group 3" for secret in details.secrets))
    browser.evaluate(choose("group", "all"))
    browser.evaluate(choose("attack", "all"))
    expect(400)
    browser.evaluate(choose("target", "PMixED (sound), white-box"))
    expect(400)
    browser.evaluate("document.getElementById('filter-reset').click()")
    expect(200 * len(details.values_by_cell))
    search = "document.getElementById('filter-search')"
    browser.evaluate(f"{search}.value = 'ROW-00001'; {search}.dispatchEvent(new Event('input'))")
    expect(10 * len(details.values_by_cell))
    browser.evaluate(f"{search}.value = 'nobody'; {search}.dispatchEvent(new Event('input'))")
    expect(0)
    assert browser.troubles() == []


def test_pages_and_orders(browser: Any, detailed: tuple[Path, SecretDetails]) -> None:
    browser.open(detailed[0], 1440)
    assert browser.evaluate("document.getElementById('secrets-previous').disabled")
    browser.evaluate("for (let i = 0; i < 50; i++) document.getElementById('secrets-next').click()")
    assert browser.evaluate(STATUS) == "176–200 of 200" and browser.evaluate(
        "document.getElementById('secrets-next').disabled"
    )
    header = (
        "[...document.querySelectorAll('#secrets-table thead th')].find(th => th.textContent === "
        "'Tokens right')"
    )
    right = f"{LINES}.map(tr => parseInt(tr.cells[2].textContent))"
    browser.evaluate(f"{header}.querySelector('button').click()")
    down = browser.evaluate(right)
    assert down == sorted(down, reverse=True) and down[0] > down[-1]
    assert browser.evaluate(f"{header}.getAttribute('aria-sort')") == "descending"
    browser.evaluate(f"{header}.querySelector('button').click()")
    up = browser.evaluate(right)
    assert (
        up == sorted(up) and browser.evaluate(f"{header}.getAttribute('aria-sort')") == "ascending"
    )


def test_the_list_by_keyboard(browser: Any, detailed: tuple[Path, SecretDetails]) -> None:
    """Tab reaches a secret, Enter opens it, and its tokens are numbers that can be read out."""
    path, details = detailed
    browser.open(path, 1440)
    browser.evaluate(UNFOLD)
    browser.evaluate("document.getElementById('filter-reset').focus()")
    for _ in range(60):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.className") == "opener":
            break
    assert browser.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    secret = browser.evaluate("document.activeElement.textContent")
    cells = browser.evaluate(
        "[...document.querySelector('.opened .tokens tbody tr').cells].map(td => td.textContent)"
    )
    id = next(s.id for s in details.secrets if s.alias == secret)
    distribution = np.exp(details.tokens["undefended"][id])
    assert len(cells) == 1 + len(distribution)
    for text, p in zip(cells[1:], distribution, strict=True):
        assert abs(float(text.strip("<%")) / 100 - p) < 0.05
    browser.press("Enter")
    assert browser.evaluate("document.querySelectorAll('.opened').length") == 0


def test_hostile_names_stay_text_in_the_browser(
    browser: Any,
    tmp_path: Path,
    result: AuditResult,
    secret_by_secret: Callable[..., SecretDetails],
    hostile_text: str,
) -> None:
    details = secret_by_secret(
        result, 5, length=3, name=hostile_text + "{}", group=hostile_text + "{}"
    )
    said = SecretText("a", hostile_text, (hostile_text, "<b>b</b>", "x" * 1_000_000))
    path = tmp_path / "report.html"
    page = html.render_html_report(
        replace(result, plan={"group_column": hostile_text}),
        details,
        texts={s.id: said for s in details.secrets},
    )
    path.write_text(page, encoding="utf-8")
    browser.open(path, 390)
    browser.evaluate("document.querySelectorAll('.opener').forEach(opener => opener.click())")
    assert browser.evaluate("document.querySelectorAll('.opened').length") == 5
    assert browser.evaluate("document.querySelectorAll('#secrets-list b').length") == 0
    assert "<script>alert(1)</script>" in browser.evaluate(
        "document.querySelector('.opener').textContent"
    )
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert browser.troubles() == []


def test_a_smuggled_script_does_not_run(
    browser: Any, detailed: tuple[Path, SecretDetails], tmp_path: Path
) -> None:
    """Should a text ever get through, the content security policy still lets nothing run but the
    page's own script."""
    path = tmp_path / "report.html"
    path.write_text(
        detailed[0].read_text().replace("</main>", "<script>window.smuggled = 1</script></main>")
    )
    browser.open(path, 1440)
    assert browser.evaluate("window.smuggled") is None and browser.evaluate(STATUS) == "1–25 of 200"


def test_without_a_script_a_note_says_so(
    browser: Any, detailed: tuple[Path, SecretDetails]
) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(detailed[0], 390)
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        note = browser.call("DOM.querySelector", nodeId=root, selector="#secrets-without")["nodeId"]
        assert "needs JavaScript" in browser.call("DOM.getOuterHTML", nodeId=note)["outerHTML"]
        assert not browser.call("DOM.querySelector", nodeId=root, selector=".filters")["nodeId"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_ten_thousand_secrets_answer_at_once(browser: Any, ten_thousand: Path) -> None:
    browser.open(ten_thousand, 390)
    search = "document.getElementById('filter-search')"
    took = (
        f"(() => {{ const t = performance.now(); {search}.value = '77'; "
        f"{search}.dispatchEvent(new Event('input')); "
    )
    # ms, on a busy machine
    assert browser.evaluate(took + "return performance.now() - t; })()") < 2000
    assert browser.evaluate(f"{LINES}.length") == 25
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= 390
