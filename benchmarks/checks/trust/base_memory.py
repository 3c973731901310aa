"""Texts of this machine for an audit of what a pretrained model holds: public ones, and what is younger than the model.

    python -m benchmarks.checks.trust.base_memory FOLDER --model BASE
    audit run --model BASE --data FOLDER/licences.jsonl --nonmembers FOLDER/younger.jsonl \\
        --windows 96 --prefix-length 32 --suffix-length 16 \\
        --attack extraction-probability --attack near-verbatim --attack membership

Any Debian has them: /usr/share/common-licenses, Python's own topics (`pydoc_data`), and the entries of packages'
changelogs from a year on. With a model, the longest block of each text that it goes on with by itself, token by token.
"""

from __future__ import annotations

import email.utils
import gzip
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

from benchmarks.checks.harness import Page, refuse, run, write_rows

LICENCES, DOCS = Path("/usr/share/common-licenses"), Path("/usr/share/doc")
CHARACTERS, LEAST = 6_000, 600
TOKENS, SHOWN, NEW = 512, 32, 4  # of a text that are read; of those, given; of an n-gram that makes a token new
# What a model of any size has read many times: where of this too nothing comes back, a nought says nothing.
FAMOUS = """
When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the
Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should
declare the causes which impel them to the separation. We hold these truths to be self-evident, that all men are
created equal, that they are endowed by their Creator with certain unalienable Rights, that among these are Life,
Liberty and the pursuit of Happiness.

Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether
that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that
war.

In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon
the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be light: and
there was light. And God saw the light, that it was good: and God divided the light from the darkness.

To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer The slings and arrows of
outrageous fortune, Or to take arms against a sea of troubles And by opposing end them. To die: to sleep; No more; and
by a sleep to say we end The heart-ache and the thousand natural shocks That flesh is heir to

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright notice
and this permission notice shall be included in all copies or substantial portions of the Software.
"""
_ENTRY = re.compile(r"^(?=\S+ \([^)]+\) )", re.MULTILINE)  # hello (2.10-3) unstable; urgency=medium
_SIGNED = re.compile(r"^ -- .*>  (.+)$", re.MULTILINE)


def main(folder: Path, year: int = 2025, model: str = "") -> None:
    """year: the first that the model has read nothing of. model: a folder or name that transformers load."""
    if not LICENCES.is_dir():
        refuse(f"expected a Debian with {LICENCES}, got none")
    folder.mkdir(parents=True, exist_ok=True)
    page, written = Page(), dict[str, list[str]]()
    kinds = {"famous": FAMOUS.split("\n\n"), "licences": licences(), "python": python(), "younger": younger(year)}
    for name, texts in kinds.items():
        own = written[name] = list(dict.fromkeys(" ".join(text.split())[:CHARACTERS] for text in texts))
        if not own:
            refuse(f"expected texts for {name}.jsonl on this machine, got none")
        write_rows(folder / f"{name}.jsonl", ({"text": text} for text in own))
        page.say(f"{name}.jsonl: {len(own)} texts, {sum(map(len, own)):,} characters")
    if model:
        blocks(page, model, written)


def blocks(page: Page, model: str, kinds: dict[str, list[str]]) -> None:
    """Says of each kind of text how long a block greedy decoding gives back behind all that stands before it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, words = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    page.say()
    page.head("texts", "of them", "next tokens right", "longest block: median", "longest", "texts with 16 tokens")
    longest = list[str]()
    for name, texts in kinds.items():
        found, hits = list[tuple[int, str]](), list[bool]()
        for text in texts:
            tokens = words(text, add_special_tokens=False)["input_ids"][:TOKENS]
            with torch.no_grad():
                guesses = base(torch.tensor([tokens])).logits[0, :-1].argmax(-1).tolist()
            right = [guess == token for guess, token in zip(guesses, tokens[1:], strict=True)][SHOWN - 1 :]
            length, end = longest_block(tokens, right)
            found.append((length, words.decode(tokens[end - length : end])))
            hits += right
        lengths = sorted(length for length, _ in found)
        share = f"{sum(hits) / len(hits):.0%}"
        sixteen = sum(length >= 16 for length in lengths)
        page.row(name, len(texts), share, lengths[len(lengths) // 2], lengths[-1], sixteen)
        longest.append(f"{name}: {max(found)[1]!r}")
    page.say()
    for one in longest:
        page.say(f"- the longest of {one}")


def longest_block(tokens: Sequence[int], right: Sequence[bool]) -> tuple[int, int]:
    """(tokens, where it ends) of the longest run of right guesses; right: of the last tokens, one each.

    Greedy decoding behind all that stands before a run gives the run back. A token counts where the n-gram that ends
    in it stands nowhere before in the text: what is repeated there can be copied, and need not be remembered.
    """
    seen, first = set[tuple[int, ...]](), len(tokens) - len(right)
    best, length = (0, 0), 0
    for i in range(len(tokens)):
        gram = tuple(tokens[max(0, i - NEW + 1) : i + 1])
        if i >= first:
            length = length + (gram not in seen) if right[i - first] else 0
            best = max(best, (length, i + 1), key=lambda found: found[0])
        seen.add(gram)
    return best


def licences() -> Iterator[str]:
    for path in sorted(LICENCES.iterdir()):
        if not path.is_symlink():  # GPL is GPL-3
            yield path.read_text(errors="replace")


def python() -> Iterator[str]:
    """Python's own documentation, its long topics."""
    yield from (text for _, text in sorted(topics.topics.items()) if len(text) >= 10_000)


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
