"""Query a retrieval system: a user's function, or an OpenAI-compatible endpoint."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError, wrap_library_errors
from auditor.core.python_files import add_script_folder, load_python_file

Ask = Callable[[str, str | None], Any]
Index = Callable[[Sequence[Mapping[str, Any]]], Any]
Vectors = Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class Reply:
    """A system's answer, and the texts that it retrieved (None if it does not return them)."""

    answer: str
    retrieved: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RagSystem:
    """A retrieval system to audit.

    Attributes:
        label: its name in reports.
        call: asks a question.
        index: puts documents into the system's store; None if the user does this.
        stored_vectors: returns the stored vectors of documents, keyed by id.
        embed: returns vectors of texts.
    """

    label: str
    call: Ask
    index: Index | None = None
    stored_vectors: Vectors | None = None
    embed: Vectors | None = None

    def ask(self, question: str, identity: str | None) -> Reply:
        """Return the reply to a question. Raise AuditError if the system fails."""
        with wrap_library_errors(f"{self.label} failed to answer"):
            reply = self.call(question, identity)
        answer, retrieved = reply if isinstance(reply, tuple) and len(reply) == 2 else (reply, None)
        is_listed = retrieved is None or isinstance(retrieved, list | tuple)
        if not isinstance(answer, str) or not is_listed:
            raise _make_reply_error(self.label, reply)
        if retrieved is None:
            return Reply(answer)
        if not all(isinstance(text, str) for text in retrieved):
            raise _make_reply_error(self.label, retrieved[0])
        return Reply(answer, tuple(retrieved))

    def put_in(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put documents into the store, if the system has an `index`."""
        if self.index is not None:
            with wrap_library_errors(f"{self.label} failed to index"):
                self.index(rows)


def _make_reply_error(label: str, value: Any) -> AuditError:
    return AuditError(
        f"expected {label} to return (answer, list of retrieved texts), or an answer, got "
        f"{type(value).__name__}"
    )


def open_rag_system(argument: str) -> RagSystem:
    """Return the system at `FILE.py`, `FILE.py:NAME` or `http://HOST:PORT/v1#MODEL`.

    NAME is a function `ask(question, identity)`, or an object with `ask` and optionally `index`,
    `stored_vectors` and `embed`. Without a NAME, the functions in the file are used. Raise
    AuditError if there is no `ask`, or if there is `stored_vectors` but no `embed`.
    """
    if argument.startswith(("http://", "https://")):
        return RagSystem(argument, _open_endpoint(argument))
    file, name = argument, ""
    if not argument.endswith(".py"):
        file, _, name = argument.rpartition(":")
    expected = "a system as FILE.py, FILE.py:NAME or http://HOST:PORT/v1#MODEL"
    path = Path(file)
    if path.suffix != ".py":
        raise AuditError(f"expected {expected}, got {argument!r}")
    add_script_folder(path)
    with wrap_library_errors(f"cannot load {file!r}"):
        module = load_python_file(path, f"audit_rag_{path.stem}", expected)
    entry = getattr(module, name, None) if name else module
    ask = getattr(entry, "ask", entry)
    if not callable(ask):
        raise AuditError(f"expected a function {name or 'ask'!r} in {file!r}, got none")
    optional = {}
    for role in ("index", "stored_vectors", "embed"):
        optional[role] = getattr(entry, role, getattr(module, role, None))
    if optional["stored_vectors"] is not None and optional["embed"] is None:
        raise AuditError(f"expected embed(texts) next to stored_vectors(ids) in {file!r}, got none")
    return RagSystem(argument, ask, **optional)


def _open_endpoint(address: str) -> Ask:
    from auditor.core.plan_parts import LoadingOptions
    from auditor.plugins.provider import RequestedModel
    from auditor.providers.openai import Served
    from auditor.remote.answers import ServerAnswerStore
    from auditor.remote.connection import (
        MalformedAnswer,
        RequestRefused,
        ServerConnection,
        ServerRequest,
        ServerTokenBudget,
    )

    Served().check(RequestedModel(address, LoadingOptions()))
    url, _, model = address.partition("#")
    # The file only counts requests: answers of a system whose documents change are not stored.
    answers = ServerAnswerStore(find_cache_folder() / "api" / "rag.sqlite")
    connection = ServerConnection(url, ServerTokenBudget(answers, uuid.uuid4().hex, None))
    if not model:
        model = connection.get_only_model(address)

    def ask(question: str, identity: str | None) -> str:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "n": 1, "temperature": 0}
        if identity is not None:
            body["user"] = identity
        try:
            return str(connection.ask(ServerRequest(body, 0, read, stored=False))[b""])
        except (RequestRefused, MalformedAnswer) as error:
            raise AuditError(f"expected {url} to answer, but {error}") from None

    def read(answer: Any) -> Mapping[bytes, str]:
        try:
            return {b"": (answer["choices"][0].get("message") or {}).get("content") or ""}
        except (KeyError, IndexError, TypeError, AttributeError):
            raise MalformedAnswer("its answer has no message") from None

    return ask
