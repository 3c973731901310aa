"""The private half of a run folder: what secrets say, for `--reveal`. Readable by its owner only.

A secret's text is kept as its owner wrote it; guesses are tokens, which whoever writes brings a
`decode` for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json
from auditor.core.nouns import Guesses, Secret, Tokens

TEXTS = "texts.jsonl"
Decode = Callable[[Sequence[int]], str]
CONTEXT = 8  # tokens before a text that decide how its first token is written


@dataclass(frozen=True)
class SecretText:
    """What one secret says. pieces: what each token of the suffix adds to it; guesses: the first
    one of each row.

    Rows are named `target/setting/attack`; verbatim: those whose first guess is the suffix.
    decoded: whether the data hold token ids alone, so that this is how a tokenizer writes them.
    """

    alias: str
    prefix: str
    pieces: tuple[str, ...]
    guesses: dict[str, str] = field(default_factory=dict)
    verbatim: tuple[str, ...] = ()
    decoded: bool = False

    @property
    def suffix(self) -> str:
        return "".join(self.pieces)


Out = Mapping[str, Mapping[str, tuple[Tokens, Tokens]]]
"""By row and alias of a record, the longest part of it that was extracted, and the generation that
holds it."""


def write_secret_texts(
    folder: Path,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Mapping[str, Guesses]],
    decode: Decode,
    out: Out = MappingProxyType({}),
) -> None:
    """Writes texts.jsonl. guesses: by row and secret id; the first one of each is written."""
    with (
        # Made 0600; opening it again leaves that as it is.
        disk.atomic_replacement_file(folder / TEXTS) as scratch,
        open(scratch, "w", encoding="utf-8", newline="\n") as file,
    ):
        file.writelines(
            json.dumps(line) + "\n" for line in _secret_text_entries(secrets, guesses, decode)
        )
        file.writelines(json.dumps(line) + "\n" for line in _extracted_record_texts(out, decode))


def _extracted_record_texts(out: Out, decode: Decode) -> Iterator[dict[str, Any]]:
    """Records extracted of generations, as secrets without a prefix: what was extracted, and from
    what."""
    for alias in dict.fromkeys(alias for found in out.values() for alias in found):
        own = {row: found[alias] for row, found in out.items() if alias in found}
        longest = max((part for part, _ in own.values()), key=len)
        said = {row: decode(whole) for row, (_, whole) in own.items()}
        yield {
            "secret": alias,
            **asdict(SecretText(alias, "", (decode(longest),), said, tuple(own), decoded=True)),
        }


def _secret_text_entries(
    secrets: Sequence[Secret], guesses: Mapping[str, Mapping[str, Guesses]], decode: Decode
) -> Iterator[dict[str, Any]]:
    for secret in secrets:
        own = {
            row: held[secret.id].ranked[0].suffix
            for row, held in guesses.items()
            if secret.id in held
        }
        context, wording = secret.prefix[-CONTEXT:], secret.wording
        said = {row: text_added_by_tokens(decode, context, tokens) for row, tokens in own.items()}
        prefix = decode(secret.prefix) if wording is None else wording.prefix
        pieces = (
            text_added_by_each_token(decode, context, secret.suffix)
            if wording is None
            else wording.suffix_text_by_token
        )
        # Other tokens may spell the same text, and whoever reads it sees a verbatim guess.
        same = tuple(
            row
            for row, tokens in own.items()
            if tokens == secret.suffix or said[row] == "".join(pieces)
        )
        text = SecretText(secret.alias, prefix, tuple(pieces), said, same, decoded=wording is None)
        yield {"secret": secret.id, **asdict(text)}


def text_added_by_tokens(decode: Decode, context: Sequence[int], tokens: Sequence[int]) -> str:
    """What the tokens add to the text behind the context: some tokenizers drop a space that a text
    begins with."""
    return decode([*context, *tokens])[len(decode(context)) :]


def text_added_by_each_token(
    decode: Decode, context: Sequence[int], tokens: Sequence[int]
) -> list[str]:
    """What each token adds, as far as decoding tells; a character of several tokens comes with the
    last of them."""
    found, seen = [], len(decode(context))
    for count in range(1, len(tokens) + 1):
        text = decode([*context, *tokens[:count]])
        if text.endswith("\ufffd") and count < len(tokens):  # half a character is decoded as this
            text = text[:seen]
        found.append(text[seen:])
        seen = len(text)
    return found


def read_secret_texts(folder: Path) -> dict[str, SecretText]:
    """By secret id, in the order of the run. Raises AuditError where the folder holds none."""
    path = folder / TEXTS
    try:
        # `json.dumps` writes ASCII: no U+2028 of a text can split a line here.
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        why = f"no {TEXTS} in this folder: the run did not finish, or an older audit made it"
        raise AuditError(f"{folder}: {why}") from None
    except (OSError, UnicodeDecodeError) as error:
        # `from None`: a UnicodeDecodeError holds the bytes that it could not read.
        raise AuditError(f"{path}: cannot be read ({type(error).__name__})") from None
    try:
        return {
            line.pop("secret"): from_json(SecretText, line, private=True)
            for line in map(json.loads, lines)
        }
    except (AuditError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AuditError(
            f"{path}: expected what `audit run` writes there, got something else"
        ) from error
