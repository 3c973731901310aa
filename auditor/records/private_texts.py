"""Store the secrets' texts, the private part of a run folder, for `--reveal`.

Only the owner can read the file. A secret's text is stored as its owner wrote it. Guesses are
tokens, which `decode` turns into text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json
from auditor.core.nouns import Guesses, Secret, Tokens

TEXTS = "texts.jsonl"
Decode = Callable[[Sequence[int]], str]
CONTEXT = 8  # tokens before a text that affect the decoding of its first token


@dataclass(frozen=True)
class SecretText:
    """Hold the text of a secret.

    Args:
        alias: name of the secret in reports.
        prefix: text of the prefix.
        pieces: the text that each suffix token adds.
        guesses: text of the first guess, keyed by cell `target/setting/attack`.
        verbatim: cells whose first guess equals the suffix.
        decoded: True if a tokenizer decoded the text, because the data hold only token ids.
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
"""The longest extracted part of a record and the generation that holds it, by row and alias of the
record."""


def write_secret_texts(
    folder: Path,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Mapping[str, Guesses]],
    decode: Decode,
    out: Out = MappingProxyType({}),
) -> None:
    """Write texts.jsonl: the text of each secret, and each attack's first guess.

    Args:
        folder: the run folder.
        secrets: the secrets.
        guesses: guesses, keyed by cell (`target/setting/attack`), then by secret id.
        decode: function that turns tokens into text.
        out: results of attacks that draw texts without a prefix, keyed by cell, then by the alias
            of the extracted record: the extracted part, and the whole generated text, as tokens.
    """
    with (
        # Created with 0600; opening it again keeps that mode.
        disk.open_atomic_replacement(folder / TEXTS) as scratch,
        open(scratch, "w", encoding="utf-8", newline="\n") as file,
    ):
        for secret, text in itertools.chain(
            _list_secret_texts(secrets, guesses, decode), _list_extracted_records(out, decode)
        ):
            file.write(json.dumps({"secret": secret, **asdict(text)}) + "\n")


def _list_extracted_records(out: Out, decode: Decode) -> Iterator[tuple[str, SecretText]]:
    """Yield the records extracted in generations, as secrets without a prefix.

    The suffix is the extracted part, and the guess is the whole generation.
    """
    for alias in dict.fromkeys(
        alias for parts_by_alias in out.values() for alias in parts_by_alias
    ):
        parts_by_row = {}
        for row, parts_by_alias in out.items():
            if alias in parts_by_alias:
                parts_by_row[row] = parts_by_alias[alias]
        longest = max((part for part, _ in parts_by_row.values()), key=len)
        text_by_row = {}
        for row, (_, generation) in parts_by_row.items():
            text_by_row[row] = decode(generation)
        pieces = (decode(longest),)
        yield alias, SecretText(alias, "", pieces, text_by_row, tuple(parts_by_row), decoded=True)


def _list_secret_texts(
    secrets: Sequence[Secret], guesses: Mapping[str, Mapping[str, Guesses]], decode: Decode
) -> Iterator[tuple[str, SecretText]]:
    for secret in secrets:
        tokens_by_row = {}
        for row, guesses_by_id in guesses.items():
            if secret.id in guesses_by_id:
                tokens_by_row[row] = guesses_by_id[secret.id].ranked[0].suffix
        context = secret.prefix[-CONTEXT:]
        wording = secret.wording
        row_texts = {}
        for row, tokens in tokens_by_row.items():
            row_texts[row] = decode_added_text(decode, context, tokens)
        if wording is None:
            prefix = decode(secret.prefix)
            pieces = tuple(decode_token_texts(decode, context, secret.suffix))
        else:
            prefix = wording.prefix
            pieces = tuple(wording.suffix_text_by_token)
        # Different tokens may spell the same text: a reader sees a verbatim guess.
        verbatim_rows = tuple(
            row
            for row, tokens in tokens_by_row.items()
            if tokens == secret.suffix or row_texts[row] == "".join(pieces)
        )
        yield (
            secret.id,
            SecretText(
                secret.alias, prefix, pieces, row_texts, verbatim_rows, decoded=wording is None
            ),
        )


def decode_added_text(decode: Decode, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that the tokens add after the context.

    Decoding without the context would lose a leading space with some tokenizers.

    Args:
        decode: function from token ids to text.
        context: token ids before the text.
        tokens: token ids of the text.
    """
    return decode([*context, *tokens])[len(decode(context)) :]


def decode_token_texts(decode: Decode, context: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds after the context, as in `decode_added_text`.

    A character that consists of several tokens counts for the last of them.
    """
    pieces = []
    n_characters = len(decode(context))
    for count in range(1, len(tokens) + 1):
        text = decode([*context, *tokens[:count]])
        # U+FFFD: the decoding of an incomplete character
        if text.endswith("\ufffd") and count < len(tokens):
            text = text[:n_characters]
        pieces.append(text[n_characters:])
        n_characters = len(text)
    return pieces


def read_secret_texts(folder: Path) -> dict[str, SecretText]:
    """Return the texts keyed by secret id, in the run's order; raise AuditError if missing."""
    path = folder / TEXTS
    try:
        # `json.dumps` writes ASCII: a U+2028 in a text cannot split a line.
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        hint = f"no {TEXTS} in this folder: the run did not finish, or an older audit made it"
        raise AuditError(f"{folder}: {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        # `from None`: a UnicodeDecodeError contains the unreadable bytes.
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
