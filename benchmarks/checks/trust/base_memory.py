"""Texts of this machine for an audit of what a pretrained model holds: licences, and what is younger than the model.

    python -m benchmarks.checks.trust.base_memory FOLDER
    audit run --model BASE --data FOLDER/licences.jsonl --nonmembers FOLDER/younger.jsonl \\
        --windows 96 --prefix-length 32 --suffix-length 16 \\
        --attack extraction-probability --attack near-verbatim --attack membership

Any Debian has them: /usr/share/common-licenses, and the entries of packages' changelogs from a year on.
"""

from __future__ import annotations

import email.utils
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checks.harness import Page, refuse, run

LICENCES, DOCS = Path("/usr/share/common-licenses"), Path("/usr/share/doc")
CHARACTERS, LEAST = 6_000, 600
_ENTRY = re.compile(r"^(?=\S+ \([^)]+\) )", re.MULTILINE)  # hello (2.10-3) unstable; urgency=medium
_SIGNED = re.compile(r"^ -- .*>  (.+)$", re.MULTILINE)


def main(folder: Path, year: int = 2025) -> None:
    """year: the first that the model has read nothing of."""
    if not LICENCES.is_dir():
        refuse(f"expected a Debian with {LICENCES}, got none")
    folder.mkdir(parents=True, exist_ok=True)
    page = Page()
    for name, texts in (("licences", licences()), ("younger", younger(year))):
        rows = [{"text": text} for text in dict.fromkeys(" ".join(text.split())[:CHARACTERS] for text in texts)]
        if not rows:
            refuse(f"expected texts for {name}.jsonl on this machine, got none")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page.say(f"{name}.jsonl: {len(rows)} texts, {sum(len(row['text']) for row in rows):,} characters")


def licences() -> Iterator[str]:
    for path in sorted(LICENCES.iterdir()):
        if not path.is_symlink():  # GPL is GPL-3
            yield path.read_text(errors="replace")


def younger(year: int) -> Iterator[str]:
    """Of each package, the changelog's entries from that year on; packages of one source share theirs."""
    seen = set[str]()
    for path in sorted(DOCS.glob("*/changelog.Debian.gz")):
        entries = _ENTRY.split(gzip.decompress(path.read_bytes()).decode(errors="replace"))
        text = "".join(entry for entry in entries if _year(entry) >= year)
        if len(text) >= LEAST and text[:LEAST] not in seen:
            seen.add(text[:LEAST])
            yield text


def _year(entry: str) -> int:
    signed = _SIGNED.search(entry)
    try:
        return email.utils.parsedate_to_datetime(signed[1].strip()).year if signed else 0
    except ValueError:
        return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
