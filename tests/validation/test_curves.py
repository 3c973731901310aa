"""The exponent of known growth, and the script in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from auditor.core.secret_randomness import make_keyed_generator
from validation.harness import run
from validation.speed import curves

SIZES = [size for size in (100, 1000, 10_000, 100_000) for _ in range(3)]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("fixed", [0.0, 4.0])
def test_the_exponent_of_known_growth(power: float, fixed: float) -> None:
    found = curves.growth(SIZES, [fixed + 1e-2 * size**power for size in SIZES])
    assert found.power == pytest.approx(power, abs=0.011) and found.fixed == pytest.approx(
        fixed, abs=0.05
    )


def test_the_interval_has_the_exponent_as_often_as_it_says() -> None:
    """Errors of 5%, independent of each other: 95% of 200 intervals, give or take three
    deviations."""
    noise = make_keyed_generator("curves, interval")
    held = 0
    for _ in range(200):
        seconds = [(2 + 1e-3 * size) * np.exp(noise.normal(0, 0.05)) for size in SIZES]
        found = curves.growth(SIZES, seconds)
        held += found.low - 0.005 <= 1 <= found.high + 0.005
    assert held / 200 >= 0.90


def test_growth_asks_for_three_sizes() -> None:
    with pytest.raises(ValueError, match="expected 4 points of 3 sizes or more, got 4 of 2"):
        curves.growth([1, 1, 2, 2], [1.0, 1.0, 2.0, 2.0])


def test_memory_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MB a size unit, in a process of its own: the second does not stand on the first one's
    peak."""

    def held(out: Path, size: int) -> curves.Parts:
        return {"asking": float(np.ones(size * 4_000_000).sum())}

    monkeypatch.setattr(curves, "audited", held)
    # 192 MB, of pieces that the process keeps when they are free
    free = [np.ones(120_000) for _ in range(200)]
    free[:-1] = []  # the last one keeps the heap from shrinking by itself
    found = curves.measured(
        curves.Knob("units", (1, 2, 1), lambda folder, size: {"size": size}), (4, 8, 4), 1
    )
    assert [cost.memory / 32e6 for cost in found] == pytest.approx([4, 8, 4], rel=0.1)


def test_it_runs_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = {"secrets": (20, 40, 80), "records": (300, 600, 1200)}
    for name, sizes in asked.items():
        knob = curves.KNOBS[name]
        monkeypatch.setitem(curves.KNOBS, name, curves.Knob(knob.words, sizes, knob.make))
    page = tmp_path / "page.md"
    words = ["--only", *asked, "--repeats", "2", "-o", str(page)]
    assert run(curves.main, words) == 0
    _, _, *rows = page.read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows] == [
        f"| {curves.KNOBS[name].words}" for name in asked
    ]
    for row, sizes in zip(rows, asked.values(), strict=True):
        assert f"| {', '.join(f'{size:,}' for size in sizes)} |" in row
        assert all(float(cell) > 0 for cell in row.split(" | ")[2].split(", "))


def test_too_few_sizes_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "audited", lambda *given, **more: {})
    with pytest.raises(SystemExit):
        run(curves.main, ["--only", "samples", "--most", "100"])
    assert "expected --most with three sizes of samples or more" in capsys.readouterr().err
