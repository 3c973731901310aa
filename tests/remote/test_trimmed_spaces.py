"""Servers that write an answer without its first space: which tokens were drawn is found, or said
to be unclear."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL, GREEDY
from auditor.remote import handshake_checks as hands
from auditor.remote.connection import ServerConnection
from auditor.remote.model import RemoteModel
from tests.remote.server import Server, serving

MakeWire = Callable[..., ServerConnection]
WORDS = ("amber", "birch", "cedar", "delta", "ember", "frost", "grape", "hazel")
N_RECORDS, N_WORDS = 32, 3


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2 has it: a space at every beginning, which decoding takes off
    again."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    texts = [f"Box {i:02d} holds {' '.join(WORDS)}, and the is" for i in range(N_RECORDS)] * 2
    special = ["<unk>", "<s>", "</s>"]
    letters = [chr(i) for i in range(33, 127)]
    settings = {
        "vocab_size": 220,
        "special_tokens": special,
        "initial_alphabet": letters,
        "show_progress": False,
    }
    trained.train_from_iterator(texts, trainers.BpeTrainer(**settings))
    state = json.loads(trained.to_str())["model"]
    pieces = models.BPE(
        vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]], unk_token="<unk>"
    )
    tokenizer = Tokenizer(pieces)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Reciting(LanguageModel):
    """A model that goes on with a record after exactly its tokens, and with anything else after any
    other text."""

    name, max_positions, eos = "reciting", 96, (2,)

    def __init__(self) -> None:
        self.tokenizer = sentencepiece_tokenizer()
        self.vocab_size = len(self.tokenizer)
        noise = np.random.default_rng(0)
        pairs = [
            (f"Box {i:02d} holds", " ".join(noise.choice(WORDS, N_WORDS))) for i in range(N_RECORDS)
        ]
        self.prefixes = [self.encode(prefix) for prefix, _ in pairs]
        self.records = [self.encode(f"{prefix} {suffix}") for prefix, suffix in pairs]
        # words without a record, begun anew by every other text
        self.plain = self.encode(" ".join(WORDS))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        logits = torch.zeros(len(contexts), last, self.vocab_size)
        for row, context in zip(logits, contexts.tolist(), strict=True):
            for place in range(last):
                text = context[: len(context) - last + place + 1]
                row[place, self.next_token(text)] = 12.0
        return logits.log_softmax(-1)

    def next_token(self, text: list[int]) -> int:
        record = next(
            (one for one in self.records if one[: len(text)] == text and len(one) > len(text)), None
        )
        return self.plain[sum(text) % len(self.plain)] if record is None else record[len(text)]


@pytest.fixture(scope="module")
def reciting() -> Reciting:
    return Reciting()


@pytest.fixture
def serve(reciting: Reciting, wire: MakeWire) -> Iterator[Callable[..., RemoteModel]]:
    with ExitStack() as stack:

        def start(*habits: str, tokenizer: Any = None) -> RemoteModel:
            url = stack.enter_context(serving(Server(reciting, habits=habits)))  # type: ignore[arg-type]
            return RemoteModel(wire(url), "tiny", tokenizer or reciting.tokenizer)

        yield start


def count_recited(model: LanguageModel, reciting: Reciting) -> int:
    """Return how many of the records greedy decoding gives back, token for token."""
    hits = 0
    for prefix, record in zip(reciting.prefixes, reciting.records, strict=True):
        length = len(record) - len(prefix)
        noise = torch.zeros(1, 1, length, 3)
        answer = model.completions(torch.tensor([prefix]), length, GREEDY, noise, likelihood=False)
        hits += answer.tokens[0].tolist() == record[len(prefix) :]
    return hits


def test_the_model_at_hand_gives_every_record_back(reciting: Reciting) -> None:
    assert count_recited(reciting, reciting) == N_RECORDS


@pytest.mark.parametrize(
    "habits",
    [
        ("trims", "silent"),
        ("trims", "silent", "counts nothing"),
        ("trims", "configured"),
        ("trims", "echo", "text"),
    ],
    ids=str,
)
def test_records_are_found_over_servers_that_trim_the_first_space(
    serve: Callable[..., RemoteModel], reciting: Reciting, habits: tuple[str, ...]
) -> None:
    remote = serve(*habits)
    (check,) = [check for check in remote.handshake.checks if check.name == hands.TRIMMED]
    assert check.passed is False and "none of 5 answers begins with one" in check.observation
    assert count_recited(remote, reciting) == N_RECORDS and not remote.doubts()


def test_token_ids_that_come_back_need_no_space(
    serve: Callable[..., RemoteModel], reciting: Reciting
) -> None:
    remote = serve("trims", "boolean")
    assert (
        remote.dialect.returned
        and count_recited(remote, reciting) == N_RECORDS
        and not remote.doubts()
    )


def test_ids_are_believed_if_only_the_server_writes_the_first_space(
    serve: Callable[..., RemoteModel], reciting: Reciting
) -> None:
    # llama-server writes " amber", and a tokenizer of SentencePiece's kind decodes the same ids as
    # "amber"
    remote = serve("forces", "spaced")
    assert remote.dialect.returned and count_recited(remote, reciting) == N_RECORDS


def test_a_sample_that_can_be_read_in_two_ways_is_a_doubt(
    serve: Callable[..., RemoteModel], reciting: Reciting
) -> None:
    remote = serve("trims", "silent", "counts nothing")  # nothing says how many tokens were drawn
    prefix = torch.tensor([reciting.prefixes[0]])
    remote.completions(prefix, 3, ANCESTRAL, torch.rand(1, 2, 3, 3), likelihood=False)
    (doubt,) = remote.doubts()
    assert "2 readable with and without a first space, which the server trims" in doubt.sentence
    assert remote.has_withheld_answer_by_prefix([tuple(reciting.prefixes[0])]) == [True]
