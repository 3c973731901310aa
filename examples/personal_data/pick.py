"""Pick personal data out of training texts, as prefix and suffix for `audit run --data`; no model
is needed.

    python pick.py --data corpus.jsonl [--heldout fresh.jsonl] [--kinds email,phone] -o
    secrets.jsonl

Each row of the output holds the text before a piece of personal data (`prefix`), the piece
(`suffix`), its `kind` and how often both occur in the corpus (`repeats`). With --heldout, as many
non-members of each kind, whose pieces occur nowhere in the corpus, go to secrets.nonmembers.jsonl.
At most one piece is picked from a row. Names and addresses are picked if the column `pii` marks
them. The files hold private text: their owner alone may read them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import extractOne

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.columns import DataTable, read_data_table
from auditor.benchmarks.data.words import (
    count_text_occurrences,
    is_inside_word,
    is_whole_word_somewhere,
)
from auditor.core import disk
from auditor.core.errors import AuditError

LEAST = 20  # characters of a prefix: anything could follow a shorter one
SIMILAR = 0.8  # of two secrets this similar (1: equal) one is picked
LIKENESS = Levenshtein.normalized_similarity


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--heldout")
    parser.add_argument("--kinds", help="what to pick, with commas; default: all that is found")
    parser.add_argument("--phone-region", default="")
    parser.add_argument("--limit", type=int, default=1000, help="at most N of each kind")
    parser.add_argument("--prefix-length", type=int, default=200, help="at most N characters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", dest="out", type=Path, required=True)
    return parser.parse_args()


def read_texts(flag: str, name: str) -> tuple[DataTable, Sequence[str]]:
    table = read_data_table(flag, name)
    return table, table.list_texts()


@dataclass(frozen=True)
class Secret:
    """One row of the output. ends_word: a marked name may have an ending of its language after
    it."""

    row: dict[str, Any]
    piece: str
    ends_word: bool

    @property
    def whole(self) -> str:
        return str(self.row["prefix"] + self.row["suffix"])


def cut_secret(text: str, span: pii.Span, length: int) -> Secret | None:
    """Return one piece with its prefix; None if the prefix is too short or holds the piece."""
    said = text[span.start : span.end]
    # most vocabularies write a space with the next word
    middle = span.start - text[: span.start].endswith(" ")
    first = max(0, middle - length)
    while 0 < first < middle - LEAST and is_inside_word(text[first - 1], text[first]):
        first += 1
    prefix = text[first:middle]
    if len(prefix.strip()) < LEAST or is_whole_word_somewhere(said, prefix):
        return None
    row = {
        "prefix": prefix,
        "suffix": text[middle : span.end],
        "kind": span.kind,
        "pii": {span.kind: [said]},
    }
    return Secret(row, said, not is_inside_word(said, text[span.end : span.end + 1]))


def pick_secrets(
    table: DataTable,
    texts: Sequence[str],
    args: argparse.Namespace,
    taken: list[str],
    wanted: Counter[str] | None,
) -> Iterator[Secret]:
    """Yield one secret a text, in random order, of the kind that was picked least; wanted: how many
    of each kind."""
    kinds = args.kinds.split(",") if args.kinds else None
    recognisers = pii.PiiRecognisers(args.phone_region.split(",") if args.phone_region else ())
    marks = table.list_personal_data_marks()
    counts, pieces = Counter[str](), set[str]()
    order = list(range(len(texts)))
    random.Random(args.seed).shuffle(order)
    for i in order:
        spans = pii.find_pii_spans(texts[i], marks[i], recognisers)
        for span in sorted(spans, key=lambda span: counts[span.kind]):
            limit = args.limit if wanted is None else wanted[span.kind]
            if (kinds and span.kind not in kinds) or counts[span.kind] >= limit:
                continue
            secret = cut_secret(texts[i], span, args.prefix_length)
            if secret is None or secret.piece in pieces:
                continue
            if extractOne(secret.whole, taken, scorer=LIKENESS, score_cutoff=SIMILAR):
                continue
            taken.append(secret.whole)
            pieces.add(secret.piece)
            counts[span.kind] += 1
            yield secret
            break


def main() -> None:
    args = read_arguments()
    nonmembers = args.out.with_name(f"{args.out.stem}.nonmembers.jsonl")
    for path in (args.out, nonmembers):
        if path.exists():
            raise AuditError(f"expected a new file, but {str(path)!r} exists")
    table, texts = read_texts("--data", args.data)
    taken: list[str] = []
    members = list(pick_secrets(table, texts, args, taken, None))
    if not members:
        raise AuditError(f"nothing was found in {args.data} after {LEAST} characters of text")
    others: list[Secret] = []
    if args.heldout:
        wanted = Counter(secret.row["kind"] for secret in members)
        others = list(pick_secrets(*read_texts("--heldout", args.heldout), args, taken, wanted))
    # The piece of a non-member must be nowhere in the corpus, whatever precedes it.
    counted = {secret.whole: secret.ends_word for secret in members}
    counted |= {secret.piece: False for secret in others}
    copies = map(itertools.repeat, texts, table.list_repeat_counts())
    repeats = count_text_occurrences(counted, itertools.chain.from_iterable(copies))
    write_rows(args.out, [{**secret.row, "repeats": repeats[secret.whole]} for secret in members])
    if args.heldout:
        write_rows(nonmembers, [secret.row for secret in others if not repeats[secret.piece]])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    disk.replace_atomically(
        path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )
    print(f"{path}: {dict(Counter(row['kind'] for row in rows))}")


if __name__ == "__main__":
    try:
        main()
    except AuditError as error:
        raise SystemExit(f"error: {error}") from None
