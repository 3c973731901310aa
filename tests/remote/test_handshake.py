"""What a server does wrong is found out before it is believed, and what is left of its access is
used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Pair
from auditor.models.decoding import ANCESTRAL, GREEDY
from auditor.models.huggingface import HuggingFaceModel
from auditor.remote import handshake_checks as hands
from auditor.remote.connection import ServerConnection
from auditor.remote.handshake import Handshake, open_server_handshake
from auditor.remote.model import RemoteModel
from auditor.runs.prefix_token import resolve_prefix_token
from tests.remote.server import HABITS, Server

Served = Callable[..., tuple[Server, str]]
MakeWire = Callable[..., ServerConnection]
EVERYTHING = {"draw", "likelihood", "ranks", "likeliest"}

# habit -> what the access is, and the check that fails for it, with a word of what is told
CAUGHT: dict[str, tuple[set[str], str, str]] = {
    "silent": ({"draw"}, hands.SCORED, "the server ignores echo and logprobs"),
    "shifted": ({"draw"}, hands.SAME, "shifted by one token"),
    "short": ({"draw"}, hands.SCORED, "log-probabilities of 55 tokens came, not of 56"),
    "filled": ({"draw"}, hands.FIRST, "it has a number"),
    "copies": (EVERYTHING, hands.SEVERAL, "they are copies"),
    "seedless": (EVERYTHING, hands.SEED, "another one comes"),
    "tempered": (EVERYTHING, hands.REPORTED, "nats apart"),
    "text": (EVERYTHING, hands.IDS, "they are refused"),
    "permuted": (EVERYTHING, hands.IDS, "the server reads them as other tokens"),
    "truncates not": (EVERYTHING, hands.OBEYED["top_p"], "it is ignored"),
    "echo": ({"draw", "likelihood"}, hands.RANKED, "none come"),
    "fails": (EVERYTHING, hands.IDS, "they are refused"),
    "unechoed": ({"draw"}, hands.SCORED, "by echo, log-probabilities of 55 tokens came, not of 56"),
    "misled": (EVERYTHING - {"likeliest"}, hands.TOLD, "the ranks refer to more likely ones"),
    "strict": (EVERYTHING - {"ranks", "likeliest"}, hands.OBEYED["top_k"], "it is refused"),
}
REFUSED = {
    "counts wrong": "expected the tokenizer of 'tiny'",
}


def shaken(served: Served, wire: MakeWire, local: HuggingFaceModel, *habits: str) -> Handshake:
    _, url = served(*habits)
    return open_server_handshake(wire(url), "tiny", local.tokenizer)


class Begins:
    """A tokenizer that puts end of text before every text, as the server does."""

    def __init__(self, local: HuggingFaceModel) -> None:
        self._own = local.tokenizer

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        own = self._own(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [0, *own] if add_special_tokens else own}

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def test_every_habit_is_looked_for() -> None:
    elsewhere = {
        "forces",
        "biased",
        "spaced",
        "endless",
        "begins",
        "greedy",
        "boolean",
        "trims",
        "configured",
        "counts nothing",
    }
    assert {*CAUGHT, *REFUSED, *elsewhere} == set(HABITS)


def test_a_server_that_does_all_it_should_is_believed(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    found = shaken(served, wire, local)
    assert found.capabilities == EVERYTHING and all(check.passed for check in found.checks)
    assert (
        found.dialect.ids
        and found.dialect.several > 1
        and found.dialect.reported
        and found.room == 96
    )
    assert len(found.notes()) == 1 and "14 of 14 checks passed" in found.notes()[0]


@pytest.mark.parametrize("habit", CAUGHT)
def test_what_a_server_does_wrong_is_caught_and_told(
    served: Served, wire: MakeWire, local: HuggingFaceModel, habit: str
) -> None:
    capabilities, name, why = CAUGHT[habit]
    found = shaken(served, wire, local, habit)
    assert found.capabilities == capabilities
    (check,) = (check for check in found.checks if check.name == name)
    assert check.passed is False and why in check.observation
    assert any(name in note and why in note for note in found.notes())
    assert ("text only" in found.notes()[0]) == (capabilities == {"draw"})


@pytest.mark.parametrize("habit", REFUSED)
def test_a_server_of_which_nothing_can_be_believed_is_refused(
    served: Served, wire: MakeWire, local: HuggingFaceModel, habit: str
) -> None:
    with pytest.raises(AuditError, match=REFUSED[habit]):
        shaken(served, wire, local, habit)


def test_the_tokens_a_server_puts_before_a_text_are_known(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    for habits in (("begins",), ("begins", "text")):
        _, url = served(*habits)
        found = open_server_handshake(wire(url), "tiny", Begins(local))
        assert found.capabilities == EVERYTHING and found.dialect.adds == (0,)
        assert found.dialect.ids == ("text" not in habits)


def test_a_token_that_only_the_server_puts_before_a_text_is_known(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    _, url = served("begins", "text")  # the tokenizer names this token and puts none
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)
    assert remote.dialect.adds == (0,) == remote.prepended
    assert resolve_prefix_token("auto", remote, [Pair((5, 9), (30,))]).tokens == (0,)
    assert resolve_prefix_token("eos", remote).tokens == (0,)
    with pytest.raises(
        AuditError,
        match="expected --prefix-token auto for openai:tiny, whose server puts <end> befo",
    ):
        resolve_prefix_token("none", remote)
    begins = [Pair((0, 5, 9), (30,))]  # as a template, or a trainer's own ids, have it
    assert resolve_prefix_token("auto", remote, begins, framed=True).tokens == ()


def test_a_server_that_takes_logprobs_as_true_or_false_is_asked_so(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served("boolean", "trims")
    found = open_server_handshake(wire(url), "tiny", local.tokenizer)
    assert found.capabilities == {"draw"} and found.dialect.returned and not found.dialect.trims
    # token ids end mlx_lm.server
    assert all(isinstance(body["prompt"], str) for body in server.asked)
    assert not any("prompt_logprobs" in body or "echo" in body for body in server.asked)


def test_a_server_that_samples_by_its_generation_config_does(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    _, url = served("configured")
    found = open_server_handshake(wire(url), "tiny", local.tokenizer)
    assert found.dialect.configured and found.dialect.samples and found.dialect.top_k
    assert not any("own defaults" in note for note in found.notes())


def test_a_server_that_does_not_sample_is_asked_for_greedy_text(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    _, url = served("greedy")
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)
    (check,) = (check for check in remote.handshake.checks if check.name == hands.SAMPLES)
    assert check.passed is False and "only greedy answers are used" in check.observation
    prefixes, noise = torch.tensor([[5, 9, 30]]), torch.zeros(1, 1, 4, 3)
    greedy = (model.completions(prefixes, 4, GREEDY, noise).tokens for model in (remote, local))
    assert torch.equal(*greedy)
    with pytest.raises(
        NotApplicable,
        match="draws at random; the server of tiny gives one answer: -A temperature=0",
    ):
        remote.completions(prefixes, 4, ANCESTRAL, noise)


def test_what_is_not_echoed_is_not_scored_and_the_rest_is_as_likely_as_at_hand(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    _, url = served("begins", "unechoed", "fails")
    remote = RemoteModel(wire(url), "tiny", Begins(local))
    assert (
        remote.capabilities == {"draw", "likelihood"}
        and remote.dialect.hidden == 1
        and not remote.dialect.ids
    )
    prefixes, suffixes = (
        torch.tensor([[0, 5, 9], [0, 7, 7]]),
        torch.tensor([[1, 2, 3], [50, 60, 70]]),
    )
    truth = local.token_log_probs(prefixes, suffixes)
    torch.testing.assert_close(remote.token_log_probs(prefixes, suffixes), truth, atol=1e-4, rtol=0)
    with pytest.raises(
        NotApplicable, match="openai:tiny does not say how likely the first token of a text is"
    ):
        remote.token_log_probs(prefixes[:, :1], suffixes)


def test_a_text_with_an_end_in_it_is_not_scored_where_that_is_not_echoed(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    _, url = served("text", "strict", "endless")
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)
    (check,) = (check for check in remote.handshake.checks if check.name == hands.ENDS)
    assert check.passed is False and "likelihood" in remote.capabilities
    prefixes, suffixes = (
        torch.tensor([[5, 9, 30], [7, 7, 2]]),
        torch.tensor([[1, 2, 3], [50, 0, 0]]),
    )
    with pytest.raises(NotApplicable, match="1 of 2 texts contain the end of text"):
        remote.token_log_probs(prefixes, suffixes)
    truth = local.token_log_probs(prefixes[:1], suffixes[:1])
    torch.testing.assert_close(
        remote.token_log_probs(prefixes[:1], suffixes[:1]), truth, atol=1e-4, rtol=0
    )


def test_a_server_that_takes_text_alone_is_told_to_leave_its_own_defaults_out(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served("text", "echo")
    server.top_k = 1  # without that every sample would be greedy
    found = open_server_handshake(wire(url), "tiny", local.tokenizer)
    assert found.dialect.extended and not any("own defaults" in note for note in found.notes())


@pytest.mark.parametrize("most", [20, 5, 3])
def test_as_many_of_the_likeliest_tokens_are_asked_for_as_are_told(
    served: Served, wire: MakeWire, local: HuggingFaceModel, most: int
) -> None:
    server, url = served()
    server.told = most
    found = open_server_handshake(wire(url), "tiny", local.tokenizer)
    assert found.dialect.likeliest == (most if most >= 5 else 0) and found.dialect.ranked
    assert ("likeliest" in found.capabilities) == (most >= 5)


def test_one_bad_answer_is_an_accident(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served()
    server.faults.extend([None, None, "short", "twice"])
    assert open_server_handshake(wire(url), "tiny", local.tokenizer).capabilities == EVERYTHING


def test_a_model_that_is_not_served_is_refused_by_the_names_of_those_that_are(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served()
    with pytest.raises(AuditError, match=r"expected a model that .* serves \(tiny\), got 'large'"):
        open_server_handshake(wire(url), "large", local.tokenizer)
    assert not server.asked
