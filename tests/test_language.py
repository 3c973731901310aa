"""The code reads no worse than it did: each package is held to the measures that it reached."""

from __future__ import annotations

from pathlib import Path

from validation import language

SAMPLE = '''"""What is read of it by those who are told of such."""
def scores_of_one(own, n_records):
    """Return scores."""
    found, other = own, 1
    return [x for x in found] if other else None
'''


def test_no_package_reads_worse_than_recorded() -> None:
    losses = language.list_losses(language.measure_all(), language.read_record())
    assert not losses, (
        "name the values, split the statements; python -m validation.language prints the table"
    )


def test_each_measure_sees_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE + f"# {'x' * 100}\n")
    values = language.measure_package([path])
    assert values == {
        "lines above 100 columns, %": 16.7,
        "vague assigned names, %": 33.3,
        "vague parameters, %": 50.0,
        "names with a preposition, %": 100.0,
        "names with and, %": 0.0,
        "vague openings of docstrings, %": 50.0,
        "sentences of function words, %": 100.0,
        "comprehensions in 1,000 lines": 166.7,
        "ternaries in 1,000 lines": 166.7,
        "tuple assignments in 1,000 lines": 166.7,
    }


def test_a_package_that_reads_worse_is_named() -> None:
    record = language.read_record()
    worse = {package: dict(values) for package, values in record.items()}
    worse["auditor/core"]["ternaries in 1,000 lines"] += 0.1
    (loss,) = language.list_losses(worse, record)
    assert loss.startswith("auditor/core: ternaries in 1,000 lines")
    worst = {name: max(values[name] for values in record.values()) for name in language.MEASURES}
    assert not language.list_losses({"auditor/new": worst}, record)
    over = {**worst, "names with and, %": worst["names with and, %"] + 0.1}
    assert len(language.list_losses({"auditor/new": over}, record)) == 1
