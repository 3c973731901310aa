"""Pictures of evidence are drawn from the tables beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from validation.picture import Row, drawn, pictures, rows

PAGE = """# A page

| seed | model | AUC | minus |
|---|---|---|---|
| 0 | tuned | .848 [.752–.923] | |
| 0 | **public** | 13% [9–17] | −1.0 points [−2.5 to +.5] |

<!-- picture
file = "a.svg"
labels = 2
line = 0.5
panels = { small = [1, "AUC"] }
-->
"""


TOGETHER = """together = true
log = ["AUC"]
[panels]
"AUC" = [1, "AUC"]
"minus" = [1, "minus"]"""


def test_numbers_are_those_of_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (said,) = pictures(page)
    assert rows(page, 1, "AUC", 2) == [
        Row("0 · tuned", 0.848, 0.752, 0.923),
        Row("0 · public", 13, 9, 17),
    ]
    assert rows(page, 1, "minus", 2) == [Row("0 · public", -1, -2.5, 0.5)]
    (axes,) = drawn(page, said).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0 · tuned", "0 · public"]


def test_panels_together_name_a_row_once_and_leave_out_what_has_no_number(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace('panels = { small = [1, "AUC"] }', TOGETHER))
    (said,) = pictures(page)
    auc, minus = drawn(page, said).axes
    assert [label.get_text() for label in auc.get_yticklabels()] == ["0 · tuned", "0 · public"]
    assert (
        {label.get_text() for label in minus.get_yticklabels()} == {""}
        and minus.get_xscale() == "linear"
        and auc.get_xscale() == "log"
    )
    (tuned, public), (only,) = (axes.lines[0].get_ydata().tolist() for axes in (auc, minus))
    assert (tuned, public, only) == (0, 1, 1)  # beside its name


SHOWN = [
    (page, said)
    for page in sorted((ROOT / "docs" / "evidence").glob("*.md"))
    for said in pictures(page)
]


@pytest.mark.parametrize(("page", "said"), SHOWN, ids=[said["file"] for _, said in SHOWN])
def test_a_picture_that_is_kept_shows_what_its_page_says(
    page: Path, said: dict[str, object]
) -> None:
    """Every row by its name; and the page shows it."""
    kept = (page.parent / str(said["file"])).read_text(encoding="utf-8")
    names = [
        label.get_text() for axes in drawn(page, said).axes for label in axes.get_yticklabels()
    ]
    assert any(names) and all(f">{name}<" in kept for name in filter(None, names))
    assert f"]({said['file']})" in page.read_text(encoding="utf-8")
