"""Query models behind an OpenAI-compatible API. Nothing is loaded, and requests may cost money."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.models.base import LanguageModel
from auditor.models.loading import load_tokenizer_if_present
from auditor.plugins.provider import Provider, RequestedModel

if TYPE_CHECKING:
    from auditor.remote.connection import ServerTokenBudget
    from auditor.remote.model import RemoteModel


@dataclass(frozen=True)
class OpenAI(Provider):
    """A model behind an OpenAI-compatible API (--base-url, --tokenizer), by its name on that
    server."""

    name = "openai"
    takes: ClassVar[tuple[str, ...]] = ("base_url", "tokenizer", "max_tokens_total")
    network = True
    distribution = False

    def check(self, request: RequestedModel) -> None:
        """Raise AuditError if no request can be sent to the address."""
        if not request.name:
            raise AuditError(f"expected --model {self.name}:NAME, got no name")
        if request.base_url is None:
            model = f"{self.name}:{request.name}"
            raise AuditError(
                f"expected --base-url URL with --model {model}, got none: the texts are sent to it"
            )
        try:
            url = urlsplit(request.base_url)
        except ValueError as error:
            raise AuditError(
                "expected --base-url as http://HOST:PORT/v1 or https://HOST/v1, got no URL: "
                f"{error}"
            ) from error
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise AuditError(
                "expected --base-url as http://HOST:PORT/v1 or https://HOST/v1, got "
                f"{_redact_address(url)!r}"
            )
        if url.username is not None or url.password is not None:
            raise AuditError(
                "expected --base-url without a name or password, got "
                f"{_redact_address(url)!r} with one: a key comes from OPENAI_API_KEY"
            )

    def load(self, request: RequestedModel) -> RemoteModel:
        from auditor.remote.connection import ServerConnection
        from auditor.remote.model import RemoteModel

        return RemoteModel(
            ServerConnection(str(request.base_url), self._make_token_budget(request)),
            request.name,
            self._load_required_tokenizer(request),
        )

    def prepare_for_next_run(self, model: LanguageModel, request: RequestedModel) -> None:
        from auditor.remote.model import RemoteModel

        assert isinstance(model, RemoteModel)  # this provider makes no other
        model.switch_token_budget(self._make_token_budget(request))

    def _make_token_budget(self, request: RequestedModel) -> ServerTokenBudget:
        """Return the token budget of this run.

        The budget includes a file with this server's answers to all runs on this machine.
        """
        from auditor.remote.answers import ServerAnswerStore
        from auditor.remote.connection import ServerTokenBudget

        # OpenAI.name, also in `Served`: both share the answers of one model.
        address_digest = hashlib.sha256(
            f"{request.base_url} {OpenAI.name}:{request.name}".encode()
        ).hexdigest()[:16]
        return ServerTokenBudget(
            ServerAnswerStore(find_cache_folder() / "api" / f"{address_digest}.sqlite"),
            request.run,
            request.most,
        )

    def _load_required_tokenizer(self, request: RequestedModel) -> Any:
        name = request.tokenizer or request.name
        tokenizer = load_tokenizer_if_present(name, LoadingOptions())
        if tokenizer is None:
            flag = ""
            if not request.tokenizer:
                flag = f" DIR with --model {self.name}:{request.name}"
            raise AuditError(
                f"expected --tokenizer{flag} with the tokenizer of the model, got none in {name!r}"
            )
        return tokenizer

    def describe_model(self, request: RequestedModel) -> str:
        return f"{request.name}, as {request.base_url} serves it"


@dataclass(frozen=True)
class Served(OpenAI):
    """The model that a server with an OpenAI-compatible API serves: served:http://HOST:PORT/v1.

    If the server has several models, add #NAME to the address.
    """

    name = "served"
    takes = ("tokenizer", "max_tokens_total")

    def check(self, request: RequestedModel) -> None:
        address = self._split_address(request)
        # Only the check for an empty name sees this name: `load` asks the server for the real one.
        super().check(replace(address, name=address.name or "the one that it serves"))

    def load(self, request: RequestedModel) -> RemoteModel:
        """Load the model that the server names.

        Raises:
            AuditError: if the address gives no name and the server serves several models or none.
        """
        from auditor.remote.connection import ServerConnection

        address = self._split_address(request)
        if not address.name:
            connection = ServerConnection(str(address.base_url), self._make_token_budget(address))
            address = replace(address, name=connection.get_only_model(request.name))
        return super().load(address)

    def prepare_for_next_run(self, model: LanguageModel, request: RequestedModel) -> None:
        # The server gave this name at `load`: its answers are stored under it.
        name = model.name.removeprefix(f"{OpenAI.name}:")
        super().prepare_for_next_run(model, replace(self._split_address(request), name=name))

    def _split_address(self, request: RequestedModel) -> RequestedModel:
        # A fragment is never sent to a server, so # can separate the name from any address.
        url, _, name = request.name.partition("#")
        return replace(request, name=name, base_url=url)

    def describe_model(self, request: RequestedModel) -> str:
        return f"the model that {request.name} serves"


def _redact_address(url: SplitResult) -> str:
    # Without user, query and fragment: some servers take a key there, and logs keep errors.
    return f"{url.scheme}://{url.hostname or ''}{url.path}"
