"""Models behind an OpenAI-compatible API: nothing of them is loaded, and what is asked of them is
paid for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from auditor.core.disk import cache_folder
from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.models.base import LanguageModel
from auditor.models.loading import load_tokenizer_if_present
from auditor.plugins.provider import Provider, RequestedModel
from auditor.remote.answers import ServerAnswerStore
from auditor.remote.connection import ServerConnection, ServerTokenBudget
from auditor.remote.model import RemoteModel


@dataclass(frozen=True)
class OpenAI(Provider):
    """A model behind an OpenAI-compatible API (--base-url, --tokenizer), by the name that its
    server knows it by."""

    name: ClassVar[str] = "openai"
    takes: ClassVar[tuple[str, ...]] = ("base_url", "tokenizer", "max_tokens_total")
    network: ClassVar[bool] = True
    distribution: ClassVar[bool] = False

    def check(self, wanted: RequestedModel) -> None:
        """Refuses a place that no request can be sent to."""
        if not wanted.name:
            raise AuditError(f"expected --model {self.name}:NAME, got no name")
        if wanted.base_url is None:
            model = f"{self.name}:{wanted.name}"
            raise AuditError(
                f"expected --base-url URL with --model {model}, got none: it says who gets the "
                "texts"
            )
        try:
            url = urlsplit(wanted.base_url)
        except ValueError as error:
            raise AuditError(
                "expected --base-url as http://HOST:PORT/v1 or https://HOST/v1, got no URL: "
                f"{error}"
            ) from error
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise AuditError(
                "expected --base-url as http://HOST:PORT/v1 or https://HOST/v1, got "
                f"{_address_without_secrets(url)!r}"
            )
        if url.username is not None or url.password is not None:
            raise AuditError(
                "expected --base-url without a name or password, got "
                f"{_address_without_secrets(url)!r} with one: a key comes from OPENAI_API_KEY"
            )

    def load(self, wanted: RequestedModel) -> RemoteModel:
        return RemoteModel(
            ServerConnection(str(wanted.base_url), self._token_budget_of_run(wanted)),
            wanted.name,
            self._load_required_tokenizer(wanted),
        )

    def prepare_for_next_run(self, model: LanguageModel, wanted: RequestedModel) -> None:
        assert isinstance(model, RemoteModel)  # it has made no other
        model.switch_token_budget(self._token_budget_of_run(wanted))

    def _token_budget_of_run(self, wanted: RequestedModel) -> ServerTokenBudget:
        """The token budget of this run, over the store of what this server has answered in all runs
        on this machine."""
        # OpenAI.name, also in `Served`: both share the answers of one model.
        where = hashlib.sha256(
            f"{wanted.base_url} {OpenAI.name}:{wanted.name}".encode()
        ).hexdigest()[:16]
        return ServerTokenBudget(
            ServerAnswerStore(cache_folder() / "api" / f"{where}.sqlite"), wanted.run, wanted.most
        )

    def _load_required_tokenizer(self, wanted: RequestedModel) -> Any:
        name = wanted.tokenizer or wanted.name
        found = load_tokenizer_if_present(name, LoadingOptions())
        if found is None:
            beside = "" if wanted.tokenizer else f" DIR beside --model {self.name}:{wanted.name}"
            raise AuditError(
                f"expected --tokenizer{beside} with the tokenizer of the model, got none in "
                f"{name!r}"
            )
        return found

    def model_description(self, wanted: RequestedModel) -> str:
        return f"{wanted.name}, as {wanted.base_url} serves it"


@dataclass(frozen=True)
class Served(OpenAI):
    """The model that an OpenAI-compatible API serves, by its address: served:http://HOST:PORT/v1,
    #NAME of several."""

    name: ClassVar[str] = "served"
    takes: ClassVar[tuple[str, ...]] = ("tokenizer", "max_tokens_total")

    def check(self, wanted: RequestedModel) -> None:
        at = self._split_address_and_name(wanted)
        # A stand-in, which only the check for an empty name sees: `load` asks the server for the
        # name.
        super().check(replace(at, name=at.name or "the one that it serves"))

    def load(self, wanted: RequestedModel) -> RemoteModel:
        """Raises AuditError for an address without a name where several models are served, or
        none."""
        at = self._split_address_and_name(wanted)
        if not at.name:
            found = list(
                ServerConnection(
                    str(at.base_url), self._token_budget_of_run(at)
                ).served_models_by_name()
            )
            if len(found) != 1:
                said = ", ".join(found[:3]) or "none that it says"
                raise AuditError(
                    f"expected {at.base_url} to serve one model, or {wanted.name}#NAME, got {said}"
                )
            at = replace(at, name=found[0])
        return super().load(at)

    def prepare_for_next_run(self, model: LanguageModel, wanted: RequestedModel) -> None:
        # the name that the server gave at `load`: what it has answered is stored under it
        super().prepare_for_next_run(
            model,
            replace(
                self._split_address_and_name(wanted),
                name=model.name.removeprefix(f"{OpenAI.name}:"),
            ),
        )

    def _split_address_and_name(self, wanted: RequestedModel) -> RequestedModel:
        # a fragment is never sent to a server, so that # can part the name from any address
        url, _, name = wanted.name.partition("#")
        return replace(wanted, name=name, base_url=url)

    def model_description(self, wanted: RequestedModel) -> str:
        return f"what {wanted.name} serves"


def _address_without_secrets(url: SplitResult) -> str:
    # no user, and no query or fragment: some servers take a key there, and an error is kept in logs
    return f"{url.scheme}://{url.hostname or ''}{url.path}"
