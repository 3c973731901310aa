"""A tiny model whose tokens are printable characters, so that what it writes is read back as the
same tokens."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.remote.answers import ServerAnswerStore
from auditor.remote.connection import RetryPolicy, ServerConnection, ServerTokenBudget
from auditor.remote.model import RemoteModel
from tests.conftest import tiny
from tests.remote.server import Server, serving

QUICK = RetryPolicy(answer=30, connect=5, tries=4, first_wait=0.001, longest_wait=0.002)
Connect = Callable[..., RemoteModel]


def save(folder: Path, seed: int = 0) -> None:
    characters = [" ", *(c for c in string.printable if c.isprintable() and c != " ")]
    words = [
        "<end>",
        *(
            pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0]
            for c in characters
        ),
    ]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    tiny(len(words), seed=seed).model.save_pretrained(folder)


@pytest.fixture(autouse=True, scope="session")
def without_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The servers of these tests speak HTTP, and to read the machine's certificates takes a client
    longer than to ask them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save(path)
    return path


@pytest.fixture(scope="session")
def local(folder: Path) -> HuggingFaceModel:
    torch.set_num_threads(1)  # the server answers from threads of its own
    return load_causal_lm(str(folder))


@pytest.fixture
def served(local: HuggingFaceModel) -> Iterator[Callable[..., tuple[Server, str]]]:
    """Starts servers of the local model: with which habits, and which key."""
    with ExitStack() as stack:

        def start(*habits: str, key: str = "") -> tuple[Server, str]:
            server = Server(local, key=key, habits=habits)
            return server, stack.enter_context(serving(server))

        yield start


@pytest.fixture
def wire(tmp_path: Path) -> Callable[..., ServerConnection]:
    def made(
        url: str,
        most: int | None = None,
        run: str = "run",
        patience: RetryPolicy = QUICK,
        **more: Any,
    ) -> ServerConnection:
        return ServerConnection(
            url,
            ServerTokenBudget(ServerAnswerStore(tmp_path / "answers.sqlite"), run, most),
            patience,
            **more,
        )

    return made
