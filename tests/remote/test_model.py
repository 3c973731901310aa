"""A model over HTTP against the same model at hand: equal numbers, at the access that there is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from auditor.attacks.ethicist import Ethicist
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.likelihood_ranking import (
    LowercaseRanking,
    PerplexityRanking,
    ReferenceModelRanking,
    ZlibRanking,
)
from auditor.attacks.membership import Membership
from auditor.attacks.untargeted import Untargeted
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Query, Secret
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel, compute_text_nlls
from auditor.models.decoding import ANCESTRAL, GREEDY, Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.attack import SamplingAttack
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from auditor.remote.connection import ServerConnection
from auditor.remote.model import RemoteModel
from auditor.runs.prefix_token import wrap_prefixed_model
from tests.remote.server import Server

Served = Callable[..., tuple[Server, str]]
MakeWire = Callable[..., ServerConnection]
CLOSE = 1e-4  # nats: what log-probabilities may differ by
PREFIXES = torch.tensor([[5, 9, 30, 41], [7, 7, 2, 60], [90, 3, 14, 15]])


@pytest.fixture
def remote(served: Served, wire: MakeWire, local: HuggingFaceModel) -> RemoteModel:
    return RemoteModel(wire(served()[1]), "tiny", local.tokenizer)


def noise(samples: int, length: int) -> np.ndarray:
    return np.stack(
        [draw_secret_uniforms(samples, length, "remote", i) for i in range(len(PREFIXES))]
    )


def queries() -> list[Query]:
    return [Query(f"s{i}", tuple(prefix), 5) for i, prefix in enumerate(PREFIXES.tolist())]


def view(
    model: LanguageModel, local: HuggingFaceModel, setting: Setting = WHITE_BOX, **more: Any
) -> View:
    return View("undefended", model, setting, seed=0, tokenizer=local.tokenizer, **more)


# --- given tokens ---


@pytest.mark.parametrize("habits", [(), ("echo",), ("text",)], ids=str)
@pytest.mark.parametrize("prefix_token", [(), (11, 12)], ids=str)
def test_given_tokens_are_as_likely_as_at_hand(
    served: Served,
    wire: MakeWire,
    local: HuggingFaceModel,
    habits: tuple[str, ...],
    prefix_token: tuple[int, ...],
) -> None:
    remote = wrap_prefixed_model(
        RemoteModel(wire(served(*habits)[1]), "tiny", local.tokenizer), prefix_token
    )
    here, suffixes = (
        wrap_prefixed_model(local, prefix_token),
        torch.tensor([[1, 2, 3], [50, 60, 70], [90, 20, 10]]),
    )
    ours, theirs = (model.token_log_probs(PREFIXES, suffixes) for model in (remote, here))
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)
    texts = [tuple(row) for row in torch.cat([PREFIXES, suffixes], -1).tolist()]
    for mine, true in zip(
        compute_text_nlls(remote, texts), compute_text_nlls(here, texts), strict=True
    ):
        assert mine == pytest.approx(true, abs=7 * CLOSE)
    pairs = [(texts[0][:4], (1, 2)), (texts[0][:4], (1, 3, 9)), (texts[1][:4], (4,))]
    assert view(remote, local).mean_nll(remote, pairs) == pytest.approx(
        view(here, local).mean_nll(here, pairs), abs=CLOSE
    )
    if "ranks" in remote.capabilities:
        assert torch.equal(
            remote.token_ranks(PREFIXES, suffixes), here.token_ranks(PREFIXES, suffixes)
        )
    else:
        with pytest.raises(NotApplicable, match="needs ranks"):
            remote.token_ranks(PREFIXES, suffixes)


def test_a_text_that_would_be_read_as_other_tokens_is_not_scored(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    class Merging:
        """A tokenizer that reads two of its tokens as a third."""

        def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
            return {"input_ids": local.tokenizer(text.replace("!!", '"'), **how)["input_ids"]}

        def __len__(self) -> int:
            return len(local.tokenizer)

        def __getattr__(self, name: str) -> Any:
            return getattr(local.tokenizer, name)

    remote = RemoteModel(wire(served("text")[1]), "tiny", Merging())
    twice = local.tokenizer("!!")["input_ids"]
    with pytest.raises(NotApplicable, match="1 of 2 texts would be read as other tokens"):
        remote.token_log_probs(torch.tensor([[5, 9], [5, 9]]), torch.tensor([twice, [30, 31]]))


# --- samples ---


@pytest.mark.parametrize("habits", [(), ("tempered",), ("echo",), ("text",), ("copies",)], ids=str)
@pytest.mark.parametrize("decoding", [ANCESTRAL, Decoding(temperature=0.5, top_p=0.9)], ids=str)
def test_samples_come_with_their_log_probabilities_under_the_distribution(
    served: Served,
    wire: MakeWire,
    local: HuggingFaceModel,
    habits: tuple[str, ...],
    decoding: Decoding,
) -> None:
    remote = RemoteModel(wire(served(*habits)[1]), "tiny", local.tokenizer)
    found = sample_candidates(remote, PREFIXES, 5, decoding, noise(20, 5))
    for prefix, candidates in zip(PREFIXES, found, strict=True):
        assert candidates.counts.sum() == 20 and len(candidates.counts) > 1
        assert len(np.unique(candidates.suffixes.numpy(), axis=0)) == len(candidates.suffixes)
        truth = local.token_log_probs(
            prefix.expand(len(candidates.suffixes), -1), candidates.suffixes
        )
        assert candidates.token_log_probs is not None
        torch.testing.assert_close(candidates.token_log_probs, truth, atol=CLOSE, rtol=0)


def test_greedy_text_is_the_same_and_asked_for_once(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served()
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)
    before = len(server.asked)
    for mine, true in zip(
        *(sample_candidates(m, PREFIXES, 6, GREEDY, noise(7, 6)) for m in (remote, local)),
        strict=True,
    ):
        assert torch.equal(mine.suffixes, true.suffixes) and mine.counts.tolist() == [7]
    assert len(server.asked) - before == len(PREFIXES)


def test_a_larger_number_of_samples_holds_the_smaller_and_asks_for_the_rest(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served("seedless")
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)

    def drawn(samples: int) -> list[list[list[int]]]:
        tokens = remote.completions(
            PREFIXES, 5, ANCESTRAL, torch.from_numpy(noise(samples, 5))
        ).tokens
        return tokens.view(len(PREFIXES), samples, 5).tolist()

    few, before = drawn(10), len(server.asked)
    more = drawn(30)
    assert [own[:10] for own in more] == few
    asked = server.asked[before:]
    assert sorted(body["n"] for body in asked) == [4, 4, 4, 16, 16, 16]
    assert len({body["seed"] for body in asked}) == len(asked)


def test_what_a_server_would_put_in_place_of_the_distribution_is_turned_off(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    server, url = served()
    remote = RemoteModel(wire(url), "tiny", local.tokenizer)
    truth = remote.completions(PREFIXES, 5, ANCESTRAL, torch.from_numpy(noise(20, 5))).tokens
    os.remove(remote.asker.wire.ledger.answers.path)
    server.top_k = 2
    again = RemoteModel(wire(url), "tiny", local.tokenizer)
    assert torch.equal(
        again.completions(PREFIXES, 5, ANCESTRAL, torch.from_numpy(noise(20, 5))).tokens, truth
    )


def test_samples_that_end_early_are_filled_up_and_told(
    served: Served, wire: MakeWire, local: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteModel(wire(served("echo")[1]), "tiny", local.tokenizer)
    drawn = remote.completions(
        PREFIXES, 12, Decoding(temperature=2.0), torch.from_numpy(noise(40, 12))
    )
    ended = (drawn.tokens == 0).any(-1)
    assert ended.any() and (drawn.tokens[ended][:, -1] == 0).all()
    truth = local.token_log_probs(PREFIXES.repeat_interleave(40, 0), drawn.tokens)
    torch.testing.assert_close(drawn.log_probs, truth, atol=CLOSE, rtol=0)
    told = " ".join(remote.cost_sentences())
    early = re.search(
        r"of 120 answers: (\d+) ended before the requested length(?:, (\d+) empty)?; shorter "
        r"answers",
        told,
    )
    assert early and sum(int(n or 0) for n in early.groups()) == int(ended.sum())
    assert not remote.doubts()  # as a model ends a text now and then


@pytest.mark.parametrize(
    ("decoding", "why"),
    [
        (Decoding(top_k=5), "top_k, which the server of tiny ignores: -A top_k=0"),
        (Decoding(top_p=0.5), "top_p, which the server of tiny ignores: -A top_p=1"),
        (Decoding(forbidden=(0,)), "needs the end-of-text token masked"),
    ],
)
def test_a_decoding_that_the_server_does_not_do_is_not_applicable(
    served: Served, wire: MakeWire, local: HuggingFaceModel, decoding: Decoding, why: str
) -> None:
    remote = RemoteModel(wire(served("truncates not")[1]), "tiny", local.tokenizer)
    with pytest.raises(NotApplicable, match=why):
        sample_candidates(remote, PREFIXES, 5, decoding, noise(3, 5))


def test_greedy_answers_need_no_truncation_and_are_watched(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    # An attack with temperature=0 keeps Ethicist's top_p of 0.7, which changes no greedy answer.
    remote = RemoteModel(wire(served("truncates not")[1]), "tiny", local.tokenizer)
    for decoding in (Decoding(0, top_p=0.7), Decoding(0, top_k=5), GREEDY):
        drawn = remote.completions(PREFIXES, 5, decoding, torch.from_numpy(noise(3, 5)))
        here = local.completions(PREFIXES, 5, GREEDY, torch.from_numpy(noise(3, 5)))
        assert torch.equal(drawn.tokens, here.tokens)
        assert len(remote.asker.watch._own.new) == len(PREFIXES)
        remote.asker.watch._own.new.clear()


def test_untargeted_generations_are_drawn_at_one_temperature_or_not_at_all(
    remote: RemoteModel, local: HuggingFaceModel
) -> None:
    attack = Untargeted(generations=3, length=6, n=2)
    behind = view(wrap_prefixed_model(remote, (5,)), local)
    asked = attack.queries(behind, ())
    with pytest.raises(
        NotApplicable, match=r"draws whole texts at one temperature: give -A cooling=0"
    ):
        list(attack.guess(behind, {}, asked))
    drawn = list(replace(attack, cooling=0).guess(behind, {}, asked))
    assert [len(one.ranked[0].suffix) for one in drawn] == [6, 6, 6]
    assert all(set(one.rankings) == {"perplexity", "zlib", "lowercase"} for one in drawn)


# --- attacks and probes ---


@pytest.mark.parametrize(
    "kind", [PerplexityRanking, ZlibRanking, LowercaseRanking, ReferenceModelRanking, Ethicist]
)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_attacks_give_the_scores_of_the_model_at_hand(
    remote: RemoteModel,
    local: HuggingFaceModel,
    make_tiny: Any,
    kind: type[SamplingAttack],
    greedy: bool,
) -> None:
    """Sampled guesses are other ones, but each has the score that it has at hand."""
    attack = kind(samples=10, temperature=0.0 if greedy else 0.8)
    reference = make_tiny(local.vocab_size, seed=5)
    there, here = (view(model, local, reference=reference) for model in (remote, local))
    state = {"tuned_on": "none"}
    for guesses in attack.guess(there, state, queries()):
        query = next(query for query in queries() if query.id == guesses.secret)
        own = [g.suffix for g in guesses.ranked]
        candidates = next(iter(there.candidates([query], attack.sampling())))[0][1]
        assert candidates.token_log_probs is not None
        behind = torch.tensor(query.prefix).expand(len(candidates.suffixes), -1)
        exact = replace(
            candidates, token_log_probs=local.token_log_probs(behind, candidates.suffixes)
        )
        scores = attack.candidate_scores(here, [(query, exact)])[0].tolist()
        truth = dict(zip(map(tuple, candidates.suffixes.tolist()), scores, strict=True))
        assert [g.score for g in guesses.ranked] == pytest.approx(
            [truth[suffix] for suffix in own], abs=CLOSE, rel=1e-4
        )
        if greedy:
            (local_guess,) = next(iter(attack.guess(here, state, [query]))).ranked
            assert own == [local_guess.suffix]


def test_exact_extraction_probability_and_its_rank_bound_are_those_at_hand(
    remote: RemoteModel, local: HuggingFaceModel
) -> None:
    secrets = [Secret(f"s{i}", tuple(p), (1 + i, 2, 3)) for i, p in enumerate(PREFIXES.tolist())]
    probe = ExtractionProbability(temperature=1.0, top_p=1.0)
    there, here = (
        list(probe.observe_secrets(view(model, local), secrets)) for model in (remote, local)
    )
    for mine, true in zip(there, here, strict=True):
        assert mine.values == pytest.approx(true.values, abs=CLOSE)
    names = [[m.name for m in probe.measurements(secrets, seen)] for seen in (there, here)]
    assert names[0] == names[1] and "rank_bound" in names[0]
    with pytest.raises(NotApplicable, match="every next token; openai:tiny does not give them"):
        list(ExtractionProbability(eos="masked").observe_secrets(view(remote, local), secrets))


DECODINGS = [
    {},
    {"temperature": 1.3, "top_p": 0.95},
    {"top_k": 40},
    {"temperature": 0.5, "top_p": 1.0, "top_k": 6},
]


@pytest.mark.parametrize("prefix_token", [(), (11, 12)], ids=str)
@pytest.mark.parametrize("options", DECODINGS, ids=str)
def test_extraction_probability_by_the_likeliest_tokens_is_a_bracket_around_that_at_hand(
    remote: RemoteModel,
    local: HuggingFaceModel,
    options: dict[str, Any],
    prefix_token: tuple[int, ...],
) -> None:
    noise = np.stack([draw_secret_uniforms(1, 3, "likely", i) for i in range(len(PREFIXES))])
    likely = torch.cat(
        [own.suffixes for own in sample_candidates(local, PREFIXES, 3, Decoding(0.3), noise)]
    ).tolist()
    texts = [
        (p, s) for p, own in zip(PREFIXES.tolist(), likely, strict=True) for s in (own, [1, 2, 3])
    ]
    secrets = [Secret(f"s{i}", tuple(p), tuple(s), member=i < 4) for i, (p, s) in enumerate(texts)]
    probe = ExtractionProbability(**options)
    there, here = (
        list(probe.observe_secrets(view(wrap_prefixed_model(model, prefix_token), local), secrets))
        for model in (remote, local)
    )
    for mine, true in zip(there, here, strict=True):
        assert (
            mine.values["log_p_least"] - CLOSE
            <= true.values["log_p"]
            <= mine.values["log_p_most"] + CLOSE
        )
        assert mine.values["rank_bits"] == true.values["rank_bits"] and "log_p" not in mine.values
    assert any(mine.values["log_p_least"] > -np.inf for mine in there)
    values, truth = (
        {m.name: m.value for m in probe.measurements(secrets, seen)} for seen in (there, here)
    )
    numbers = probe.per_secret_values(secrets, there)
    for name in ("extraction_probability", "expected_any_of_10", "discoverable_100_0.1"):
        assert name not in values and name not in numbers  # a bracket is never told as a number
        assert (
            values[f"{name}_at_least"] <= truth[name] + CLOSE
            and truth[name] <= values[f"{name}_at_most"] + CLOSE
        )
        assert {f"{name}_at_least", f"{name}_at_most"} <= set(numbers)
    assert (
        next(iter(values)) == "extraction_probability_at_least" and "conformal_share" not in values
    )
    assert any(note.startswith("brackets, not numbers") for note in probe.notes(secrets, there))
    assert probe.add_joint_values(view(remote, local), secrets, there) == there


def test_without_ranks_there_is_no_bound_and_a_note(
    served: Served, wire: MakeWire, local: HuggingFaceModel
) -> None:
    secrets = [
        Secret("s0", (5, 9, 30), (1, 2, 3)),
        Secret("s1", (5, 9, 31), (1, 2, 3), member=False),
    ]
    probe = ExtractionProbability(temperature=1.0, top_p=1.0)
    remote = RemoteModel(wire(served("echo")[1]), "tiny", local.tokenizer)
    with pytest.raises(
        NotApplicable,
        match="log-probabilities of the likeliest tokens; openai:tiny does not give them",
    ):
        list(ExtractionProbability().observe_secrets(view(remote, local), secrets))
    seen = list(probe.observe_secrets(view(remote, local), secrets))
    assert "rank_bound" not in [m.name for m in probe.measurements(secrets, seen)]
    assert "rank_bound" not in probe.per_secret_values(secrets, seen)
    assert "no rank bound: the target gives no ranks of tokens" in probe.notes(secrets, seen)


@pytest.mark.parametrize("habits", [(), ("echo",)], ids=str)
def test_membership_scores_that_need_no_whole_distribution_are_those_at_hand(
    served: Served, wire: MakeWire, local: HuggingFaceModel, make_tiny: Any, habits: tuple[str, ...]
) -> None:
    tokens = torch.randint(1, 90, (20, 9), generator=torch.Generator().manual_seed(0)).tolist()
    secrets = [
        Secret(f"s{i}", tuple(row[:4]), tuple(row[4:]), member=i < 10)
        for i, row in enumerate(tokens)
    ]
    remote, probe = (
        RemoteModel(wire(served(*habits)[1]), "tiny", local.tokenizer),
        Membership(score="wbc"),
    )
    reference = make_tiny(local.vocab_size, seed=5)
    there, here = (
        list(probe.observe_secrets(view(m, local, reference=reference), secrets))
        for m in (remote, local)
    )
    missing = {"min_k_plus", "min_k_plus_calibrated"} | ({"ez_mia"} if habits else set())
    for mine, true in zip(there, here, strict=True):
        assert set(true.values) - set(mine.values) == missing
        assert mine.values == pytest.approx(
            {name: true.values[name] for name in mine.values}, abs=CLOSE, rel=1e-3
        )
    completed = probe.add_joint_values(view(remote, local), secrets, there)
    notes = probe.notes(secrets, completed)
    assert any(
        "Min-K%++: not applicable: it needs whole distributions, which the target does not give"
        in note
        for note in notes
    )
    with pytest.raises(NotApplicable, match=r"Min-K%\+\+ is not a number for 20 of 20 records"):
        Membership(score="min_k_plus").measurements(secrets, there)


def test_the_access_is_that_of_the_setting_and_the_server(
    served: Served, wire: MakeWire, local: HuggingFaceModel, remote: RemoteModel
) -> None:
    text = RemoteModel(wire(served("silent")[1]), "tiny", local.tokenizer)
    assert view(remote, local).visible_capabilities == ("draw", "likelihood", "ranks", "likeliest")
    assert (
        view(remote, local, TEXT_ONLY).visible_capabilities
        == view(text, local).visible_capabilities
        == ("draw",)
    )
    assert view(local, local).visible_capabilities == ("draw", "distribution", "embeddings")
    with pytest.raises(
        NotApplicable, match="needs log-probabilities; openai:tiny does not give them"
    ):
        list(PerplexityRanking(samples=2).guess(view(text, local), {}, queries()))
    guesses = list(Ethicist(samples=4).guess(view(text, local), {"tuned_on": "none"}, queries()))
    assert [sum(g.count for g in own.ranked) for own in guesses] == [4, 4, 4]


def test_what_an_api_does_not_give_is_said(remote: RemoteModel) -> None:
    for asked in (lambda: remote.start(PREFIXES, 3), lambda: remote.log_probs(PREFIXES, 1)):
        with pytest.raises(NotApplicable, match="every next token; openai:tiny does not give them"):
            asked()
    for prompted in (
        lambda: remote.embedding_rows(2),
        lambda: remote.token_log_probs(PREFIXES, PREFIXES, prompt=torch.zeros(1, 4)),
    ):
        with pytest.raises(NotApplicable, match="takes only tokens"):
            prompted()
    with pytest.raises(AuditError, match="but openai:tiny has 95 positions"):
        remote.check_text_fits(90, 10)
