"""Texts that were read are not read again: the same distributions, by the head alone, or by the
model where it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from auditor.core.nouns import Observation, Query, Secret
from auditor.defenses.pmixed_model import EnsembleModel
from auditor.defenses.uniform_mixing import UniformMixingModel
from auditor.models import base, huggingface
from auditor.models.decoding import GREEDY
from auditor.models.ensemble import ModelEnsemble
from auditor.models.hidden_states import HiddenStateCache
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.models.lora import LoraEnsemble
from auditor.models.rows import Rows
from auditor.models.slot_cache import SlotLayer
from auditor.models.wrapping import WrappingModel
from auditor.plugins import probe
from auditor.plugins.view import WHITE_BOX, Sampling, View
from tests.conftest import tiny
from tests.models.test_ensemble import save_members
from tests.zoo import families as zoo

TEXTS = torch.arange(1, 41).view(4, 10)


@pytest.fixture(params=["neox", "gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> HuggingFaceModel:
    return tiny(kind=request.param)


def test_a_text_is_read_once_whatever_is_asked_about_it(model: HuggingFaceModel) -> None:
    plain = [model.log_probs(TEXTS, last) for last in (10, 3)]
    model.enable_hidden_state_cache()
    before = traffic.tokens
    found = [model.log_probs(TEXTS, last) for last in (10, 3)]
    assert traffic.tokens - before == TEXTS.numel()
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_texts_that_were_read_and_others_may_be_asked_for_together(model: HuggingFaceModel) -> None:
    plain = model.log_probs(TEXTS, 4)
    model.enable_hidden_state_cache()
    model.log_probs(TEXTS[1:3], 2)
    before = traffic.tokens
    torch.testing.assert_close(model.log_probs(TEXTS, 4), plain)
    assert traffic.tokens - before == TEXTS[:2].numel()


def use_cache_of_positions(monkeypatch: pytest.MonkeyPatch, model: HuggingFaceModel, n: int) -> int:
    """Bound the cache to n positions of texts of 10 tokens, and return its bytes."""
    weight = next(model.model.get_output_embeddings().parameters())
    n_bytes = n * (weight.shape[-1] * weight.itemsize + 8)  # a token id of the key has 8 bytes
    n_weights = sum(weight.nbytes for weight in model.model.parameters())
    monkeypatch.setattr(huggingface, "_WEIGHTS_PER_STATES", n_weights / (n_bytes + 1))
    monkeypatch.setattr(huggingface, "_LEAST_BYTES", 0)
    return n_bytes


def test_a_bounded_cache_holds_what_it_has_room_for(
    model: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = use_cache_of_positions(monkeypatch, model, 20)
    plain = model.log_probs(TEXTS, 10)
    with model.cache_hidden_states(True):
        before = traffic.tokens
        # Two of four texts fit. The last text is read when it is queried, and the third again.
        model.read_ahead(list(map(tuple, TEXTS.tolist())), [10] * 4)
        assert traffic.tokens - before == 20
        for n_read in (40, 60):
            torch.testing.assert_close(model.log_probs(TEXTS, 10), plain)
            assert traffic.tokens - before == n_read
        assert model.seen is not None and 0 < model.seen._bytes <= n_bytes
        model.read_ahead(list(map(tuple, (TEXTS + 1).tolist())), [10] * 4)
        assert traffic.tokens - before == 60  # there is no more room
    assert model.seen is None
    monkeypatch.setattr("auditor.models.hidden_states.measure_free_device_memory", lambda device: 0)
    with model.cache_hidden_states(True):
        torch.testing.assert_close(model.log_probs(TEXTS, 10), plain)
        assert model.seen is not None and model.seen._bytes == 0


def test_texts_queried_for_a_while_have_their_own_cache_in_a_bounded_one(
    model: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache_of_positions(monkeypatch, model, 10)
    plain = model.log_probs(TEXTS, 10)
    with model.cache_hidden_states(True):
        outer = model.seen
        model.log_probs(TEXTS[:1], 10)
        before = traffic.tokens
        with model.cache_hidden_states():
            for _ in range(2):
                torch.testing.assert_close(model.log_probs(TEXTS, 10), plain)
                assert traffic.tokens - before == 30  # all but what the run has read
        with model.cache_hidden_states(True):
            assert model.seen is outer
        assert model.seen is outer


def test_prompts_and_decoding_rows_are_answered_as_before(model: HuggingFaceModel) -> None:
    prompt = model.embedding_rows(2)

    def asked() -> list[Tensor]:
        rows = model.start(TEXTS[:, :4], 2)
        first = rows.log_probs().clone()
        rows.advance(torch.tensor([0, 0, 2, 3]), TEXTS[:, 4])
        return [first, rows.log_probs(), model.log_probs(TEXTS, 2, prompt=prompt)]

    plain = asked()
    model.enable_hidden_state_cache()
    model.log_probs(TEXTS, 2)
    for one, other in zip(asked(), plain, strict=True):
        torch.testing.assert_close(one, other)


def capped_states() -> tuple[HiddenStateCache, Callable[..., Tensor], list[int]]:
    """Of a model that caps its logits; how it answers, and of how many texts each time."""
    embedding, head, asked = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50), list[int]()
    body = torch.nn.Sequential(embedding)
    body.forward = lambda texts: (embedding(texts),)  # type: ignore[method-assign]

    def capped(
        texts: Tensor, last: int, kept: int, layers: list[SlotLayer] | None = None
    ) -> Tensor:
        asked.append(len(texts))
        return torch.tanh(head(body(texts)[0]))[:, -kept:]

    return HiddenStateCache(body, head, capped), capped, asked


def test_a_model_whose_logits_are_more_than_its_head_is_asked_each_time() -> None:
    states, capped, asked = capped_states()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(
                states.log_probs(TEXTS, 3), capped(TEXTS, 3, 3).log_softmax(-1)
            )
    assert asked == [4] * 4


def test_a_model_whose_states_do_not_fit_its_head_is_asked_each_time() -> None:
    model = HuggingFaceModel(zoo.tiny("electra"))  # projects its states before the head
    plain = model.log_probs(TEXTS, 4)
    with model.cache_hidden_states():
        model.read_ahead(list(map(tuple, TEXTS.tolist())), [4] * 4)
        torch.testing.assert_close(model.log_probs(TEXTS, 4), plain)


@pytest.mark.parametrize("family", ["opt", "llama4_text", "trocr"])
def test_the_states_before_the_head_are_found_whatever_the_body_is_called(family: str) -> None:
    model = HuggingFaceModel(zoo.tiny(family))
    plain = model.log_probs(TEXTS, 4)
    with model.cache_hidden_states():
        model.read_ahead(list(map(tuple, TEXTS.tolist())), [4] * 4)
        before = traffic.tokens
        torch.testing.assert_close(model.log_probs(TEXTS, 4), plain)
        assert traffic.tokens == before


def test_what_there_is_no_room_for_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    monkeypatch.setattr("auditor.models.hidden_states.measure_free_device_memory", lambda device: 0)
    plain = model.log_probs(TEXTS, 3)
    model.enable_hidden_state_cache()
    before = traffic.tokens
    for _ in range(2):
        torch.testing.assert_close(model.log_probs(TEXTS, 3), plain)
    assert traffic.tokens - before == 2 * TEXTS.numel()


@pytest.mark.parametrize("shared", [0, 20])  # tokens that all begin with
def test_texts_of_several_lengths_are_read_ahead_side_by_side(
    model: HuggingFaceModel, shared: int
) -> None:
    texts = [tuple(range(5, 5 + shared)) + tuple(range(i, i + i)) for i in (9, 4, 6, 7)]
    last = [3, 1, 4, 2]
    plain = [model.log_probs(torch.tensor([text]), n) for text, n in zip(texts, last, strict=True)]
    model.enable_shared_prefix_cache(least=16)
    model.enable_hidden_state_cache()
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    model.read_ahead([*texts, ()], [*last, 1])
    assert len(calls) <= 2  # what they begin with, and all of them
    for text, n, own in zip(texts, last, plain, strict=True):
        torch.testing.assert_close(model.log_probs(torch.tensor([text]), n), own)
    assert len(calls) <= 2


def test_texts_of_much_different_lengths_are_not_padded_to_one(model: HuggingFaceModel) -> None:
    lengths = (30, 32, 52, 56) * 3
    texts = [(i, *(j % 40 for j in range(1, n))) for i, n in enumerate(lengths)]
    before = traffic.tokens
    model.enable_hidden_state_cache()
    model.read_ahead(texts, [3] * len(texts))
    assert traffic.tokens - before == 6 * 32 + 6 * 56


def test_a_text_that_another_begins_with_is_read_with_it(model: HuggingFaceModel) -> None:
    """Later turns of a conversation begin with all turns before them."""
    texts = [(*range(5, end),) for end in (11, 25, 17)] + [(5, 6, 9, 9, 9), (7, 8, 9)]
    last, begun = [4, 6, 17 - 5, 2, 1], [3, 14, 8, 3, 2]
    asked = list(zip(map(torch.tensor, texts), last, begun, strict=True))
    plain = [model.log_probs(text[None], n) for text, n, _ in asked]
    starts = [model.start(text[None, :n], 2).log_probs() for text, _, n in asked]
    model.enable_hidden_state_cache()
    model.can_join_rows = True
    before = traffic.tokens
    model.read_ahead(texts, last, begun)
    assert traffic.tokens - before == 20 * 3  # padded to the longest
    for (text, n, first), log_probs, start in zip(asked, plain, starts, strict=True):
        torch.testing.assert_close(model.log_probs(text[None], n), log_probs)
        torch.testing.assert_close(model.start(text[None, :first], 2).log_probs(), start)
    assert traffic.tokens - before == 20 * 3


def test_a_model_that_remembers_nothing_reads_nothing_ahead(model: HuggingFaceModel) -> None:
    before = traffic.tokens
    model.read_ahead([(1, 2, 3), (1, 2)], [1, 1])
    assert traffic.tokens == before


def test_texts_that_no_head_explains_are_read_ahead_once_and_not_held() -> None:
    states, capped, asked = capped_states()
    states.read_ahead(
        [tuple(range(1, 40))] + [tuple(range(n)) for n in range(20, 40)],
        [2] * 21,
        torch.device("cpu"),
    )
    assert len(asked) == 1
    with torch.no_grad():
        torch.testing.assert_close(states.log_probs(TEXTS, 3), capped(TEXTS, 3, 3).log_softmax(-1))


@pytest.mark.parametrize("shared", [0, 20])  # tokens that all begin with
def test_what_was_read_ahead_is_completed_without_being_read_again(
    model: HuggingFaceModel, shared: int
) -> None:
    ends = torch.arange(1, 31).view(5, 6)
    texts = torch.cat([torch.arange(5, 5 + shared).expand(5, -1), ends], dim=1)
    prefixes, parents, tokens = texts[:, :-2], torch.tensor([0, 0, 1, 2, 3, 4, 4]), torch.arange(7)

    def asked(rows: Rows) -> list[Tensor]:
        first = rows.log_probs().clone()
        rows.advance(parents, tokens)
        return [first, rows.log_probs()]

    plain = asked(model.start(prefixes, 2))
    model.enable_shared_prefix_cache(least=16)
    model.can_join_rows = True
    model.enable_hidden_state_cache()
    model.read_ahead([tuple(text) for text in texts.tolist()], [3] * 5)
    before = traffic.tokens
    rows = model.start(prefixes, 2)
    assert traffic.tokens == before
    for one, other in zip(asked(rows), plain, strict=True):
        torch.testing.assert_close(one, other)
    assert traffic.tokens == before + len(tokens)


def test_a_beginning_that_nobody_read_ahead_is_read_with_those_beside_it(
    model: HuggingFaceModel,
) -> None:
    plain = model.start(TEXTS[:, :8], 2).log_probs().clone()
    model.can_join_rows = True
    model.enable_hidden_state_cache()
    model.read_ahead([tuple(text) for text in TEXTS[1:].tolist()], [3] * 3)
    before = traffic.tokens
    torch.testing.assert_close(model.start(TEXTS[:, :8], 2).log_probs(), plain)
    assert traffic.tokens == before + TEXTS[:, :8].numel()
    torch.testing.assert_close(model.start(TEXTS[1:, :8], 2).log_probs(), plain[1:])
    assert traffic.tokens == before + TEXTS[:, :8].numel()


def test_where_there_is_no_room_for_keys_texts_are_still_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = tiny(kind="llama"), [tuple(text) for text in TEXTS.tolist()]
    plain = model.log_probs(TEXTS, 3), model.start(TEXTS[:, :8], 2).log_probs().clone()
    states = TEXTS.numel() * model.embedding_rows(1).nbytes
    monkeypatch.setattr(
        "auditor.models.hidden_states.measure_free_device_memory", lambda device: 8 * states
    )
    model.can_join_rows = True
    model.enable_hidden_state_cache()
    model.read_ahead(texts, [3] * 4)
    before = traffic.tokens
    torch.testing.assert_close(model.log_probs(TEXTS, 3), plain[0])
    assert traffic.tokens == before
    torch.testing.assert_close(model.start(TEXTS[:, :8], 2).log_probs(), plain[1])
    assert traffic.tokens == before + TEXTS[:, :8].numel()


def test_the_head_is_computed_once_for_all_texts_that_are_read_ahead(
    model: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [tuple(range(1, length)) for length in (8, 9, 10, 11)]
    texts = [(*text, i) for i, text in enumerate(texts)]
    plain = [model.log_probs(torch.tensor([text]), 3) for text in texts]
    n_rows: list[int] = []
    model.model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: n_rows.append(inputs[0].shape[:-1].numel())
    )
    # 4 rows: one of each text, by which the first reading tests the head
    for free, expected in ((2**40, [4, 4, 12]), (2**30, [4, 4, 3, 3, 3, 3])):
        monkeypatch.setattr(
            "auditor.models.hidden_states.measure_free_device_memory", lambda _, free=free: free
        )
        model.enable_hidden_state_cache()
        model.read_ahead(texts, [3] * 4)
        found = [model.log_probs(torch.tensor([text]), 3) for text in texts]
        assert n_rows == expected
        n_rows.clear()
        for log_probs, other in zip(found, plain, strict=True):
            torch.testing.assert_close(log_probs, other)


def list_windows(texts: int, length: int) -> list[Secret]:
    """Return the windows of long texts: every fifth token from the tenth, after all before it."""
    windows = []
    for text in range(texts):
        tokens = torch.arange(length).mul(7).add(text).remainder(50).tolist()
        for begin in range(10, length, 5):
            secret = Secret(f"{text}-{begin}", tuple(tokens[:begin]), tuple(tokens[begin:][:4]))
            windows.append(secret)
    return windows


@pytest.mark.parametrize("parts", [1, 3])
def test_the_windows_of_a_long_text_share_one_pass(
    model: HuggingFaceModel, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `alone` has no other window, and is read as before
    alone = Secret("alone", tuple(range(20)), (3, 4, 5, 6))
    secrets = [*list_windows(3, 50)[:8], alone, *list_windows(3, 50)[8:]]
    n_parts = 1 + parts  # one more for `alone`
    if parts == 3:
        monkeypatch.setattr(base, "_READ_TOKENS", 50)
    plain = {}
    for secret in secrets:
        pair = torch.tensor([secret.prefix]), torch.tensor([secret.suffix])
        plain[secret.id] = model.token_log_probs(*pair)[0]
    starts = list[int]()
    read_ahead = model.read_ahead
    monkeypatch.setattr(model, "read_ahead", lambda *args: (starts.append(1), read_ahead(*args)))

    def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
        rows = model.token_log_probs(prefixes, suffixes)
        return [
            Observation(secret.id, dict(zip("abcd", row.tolist(), strict=True)))
            for secret, row in zip(batch, rows, strict=True)
        ]

    before = traffic.tokens
    view = View("t", model, WHITE_BOX, seed=0)
    seen = {o.secret: o.values for o in probe.observe_in_batches(view, secrets, 4, look)}
    n_read = traffic.tokens - before
    assert seen.keys() == plain.keys()
    for id, row in plain.items():
        torch.testing.assert_close(torch.tensor(list(seen[id].values())), row)
    assert len(starts) == n_parts - 1
    assert n_read <= 3 * 50 + len(alone.tokens) < sum(len(s.tokens) for s in secrets) / 4
    assert model.seen is None  # the weights may change again


def test_decoding_after_the_windows_of_a_long_text_reads_it_once(model: HuggingFaceModel) -> None:
    model.can_join_rows = True
    queries = [Query(s.id, s.prefix, len(s.suffix)) for s in list_windows(2, 50)]
    sampling = Sampling(1, GREEDY)

    def draw(alone: bool) -> dict[str, list[list[int]]]:
        drawn = {}
        for group in [[query] for query in queries] if alone else [queries]:
            view = View("t", model, WHITE_BOX, seed=0)
            for batch in view.candidates(group, sampling):
                for query, candidates in batch:
                    drawn[query.id] = candidates.suffixes.tolist()
        return drawn

    plain = draw(alone=True)
    before = traffic.tokens
    assert draw(alone=False) == plain
    n_decoded = sum(query.lengths[1] for query in queries)
    assert traffic.tokens - before <= 2 * 50 + n_decoded
    assert n_decoded + 3 * 50 < sum(len(query.prefix) for query in queries)  # read one by one


def test_the_losses_of_the_windows_of_a_text_take_one_pass(model: HuggingFaceModel) -> None:
    texts = [(*s.prefix, *s.suffix) for s in list_windows(3, 50)]
    given = [len(text) - 5 for text in texts]
    plain = []
    for text, first in zip(texts, given, strict=True):
        plain += base.compute_text_nlls(model, [text], [first])
    before = traffic.tokens
    together = list(base.compute_text_nlls(model, texts, given))
    assert traffic.tokens - before <= 3 * 50
    for one, other in zip(together, plain, strict=True):
        assert one == pytest.approx(other)


def test_a_model_that_caps_its_logits_tries_the_cache_once(
    model: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_READ_TOKENS", 50)  # a part for each text
    own_head = model.transformers_logits
    monkeypatch.setattr(model, "transformers_logits", lambda *args: own_head(*args).square())
    secrets = list_windows(3, 50)
    before = traffic.tokens
    batches = [pair for _, *pair in probe.batch_equal_shapes(model, secrets, 4)]
    n_tried = traffic.tokens - before
    assert sum(len(prefixes) for prefixes, _ in batches) == len(secrets)
    assert 0 < n_tried <= 50  # of the first text


class MeanModel(EnsembleModel):
    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        return distributions.exp().mean(-2).log()


@pytest.mark.parametrize("kind", ["mixed with uniform", "one base", "separate models"])
def test_windows_under_a_defense_are_those_read_one_by_one(tmp_path: Path, kind: str) -> None:
    public, secrets = tiny(), list_windows(3, 50)
    defended: WrappingModel = UniformMixingModel(public, 0.7)
    if kind == "one base":
        defended = MeanModel(LoraEnsemble(public, save_members(tiny, tmp_path, 2)), "mean")
    if kind == "separate models":
        defended = MeanModel(ModelEnsemble(public, [tiny(seed=1)]), "mean")
    plain = []
    before = traffic.tokens
    for secret in secrets:
        pair = torch.tensor([secret.prefix]), torch.tensor([secret.suffix])
        plain.append(defended.token_log_probs(*pair)[0])
    n_plain = traffic.tokens - before
    together = dict[int, Tensor]()
    for places, *pair in probe.batch_equal_shapes(defended, secrets, 4):
        together |= zip(places.tolist(), defended.token_log_probs(*pair), strict=True)
    n_read = traffic.tokens - before - n_plain
    for place, row in enumerate(plain):
        torch.testing.assert_close(together[place].float(), row.float())  # the model's precision
    if kind == "mixed with uniform":
        assert n_read <= 3 * 50 < n_plain / 4
    else:
        assert n_read <= n_plain  # no pass that answers nothing
