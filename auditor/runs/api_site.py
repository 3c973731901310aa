"""A model behind an API as the place of an audit: nothing of it is loaded, and what is asked of it is paid for."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, ClassVar

from auditor.core.cache import cache_folder
from auditor.core.errors import AuditError
from auditor.core.plan import API
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import LoadingOptions, tokenizer_beside
from auditor.plugins.defense import Defense
from auditor.privacy.promises import PrivacyRecord
from auditor.records.folder import RunFolder
from auditor.remote.answers import Answers
from auditor.remote.model import RemoteModel
from auditor.remote.wire import Ledger, Wire
from auditor.runs.own_site import OwnSite


class ApiSite(OwnSite):
    """What `--model openai:NAME --base-url URL` names. Models beside it are loaded here, as anywhere.

    Its weights are nobody's here to hash: what it answers to the handshake stands in for them.
    """

    in_plan: ClassVar[bool] = False  # its budget, its pace and its answers have one owner
    _run = ""

    def opened(self, folder: RunFolder) -> None:
        super().opened(folder)
        self._run = folder.identity

    @property
    def served(self) -> str:
        return str(self.plan.model).removeprefix(API)

    @cached_property
    def model(self) -> RemoteModel:
        key = (self.plan.model, self.plan.base_url, self.plan.tokenizer)
        ledger = self._ledger
        model: RemoteModel = self.shelf.get("model", key, lambda: self._connected(ledger))
        model.charge(ledger)
        return model

    def _connected(self, ledger: Ledger) -> RemoteModel:
        model = RemoteModel(Wire(str(self.plan.base_url), ledger), self.served, self._tokenizer())
        for note in model.notes:
            self.reporter.note(note)
        return model

    @cached_property
    def _ledger(self) -> Ledger:
        where = hashlib.sha256(f"{self.plan.base_url} {self.plan.model}".encode()).hexdigest()[:16]
        return Ledger(Answers(cache_folder() / "api" / f"{where}.sqlite"), self._run, self.plan.max_tokens_total)

    def _tokenizer(self) -> Any:
        name = self.plan.tokenizer or self.served
        found = tokenizer_beside(name, LoadingOptions())
        if found is None:
            what = "--tokenizer" if self.plan.tokenizer else f"--tokenizer DIR beside --model {self.plan.model}"
            raise AuditError(f"expected {what} with the tokenizer of the model, got none in {name!r}")
        return found

    @property
    def description(self) -> str:
        return f"{self.served}, as {self.plan.base_url} serves it"

    @property
    def privacy(self) -> PrivacyRecord | None:
        return None

    @property
    def canaries(self) -> None:
        return None

    def weights(self) -> dict[str, str]:
        known = {"model/answer to the handshake": self.model.identity} if "model" in self.__dict__ else {}
        return super().weights() | known

    def check(self, defense: Defense) -> None:
        raise AuditError(
            f"--defense {defense.name} stands before a model whose laws are read here, got {self.plan.model}, which is "
            "behind an API: serve the defended model, and audit that"
        )

    def is_undefended(self, control: Defense) -> bool:
        return False

    def _beside(self, kind: str, name: str | None) -> HuggingFaceModel | None:
        """A model whose law has an entry for every token of the tokenizer: how many more, nobody says of an API."""
        if name is None:
            return None
        other = self._load(kind, name)
        size = self.model.vocab_size
        if other.vocab_size < size:
            raise AuditError(
                f"expected --{kind} to share the target's {size} tokens, but {other.name} has {other.vocab_size}"
            )
        return other
