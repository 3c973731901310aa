"""The search against brute force: every text tokenised and scored by itself, with every tokenizer
at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError
from auditor.defenses.pmixed import PMixed
from auditor.defenses.uniform_mixing import UniformMixingModel
from auditor.generation import tries
from auditor.models.base import LanguageModel
from auditor.models.cached_rows import SlotRows
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Scenario
from tests.conftest import SHARED, tiny

DIGITS = CanarySpace("My ID is {digits:3}")
WORDS = CanarySpace(
    "I like {words:2}!", (("words", ("tea", "teapots", "coffee", "cake", "cocoa", "grüße")),)
)
MIXED = CanarySpace("{who}{digits} is a code{digits}", (("who", ("Al", "Bo", "Cy")),))


@functools.cache
def bpe(merges: int) -> Any:
    """The lab's kind of tokenizer, trained on numbers of all sizes; without merges: plain bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges,
        special_tokens=["<end>"],
        show_progress=False,
        initial_alphabet=alphabet,
    )
    texts = [f"My ID is {i * 7919 % 1000} and I like tea {i % 100:02d}" for i in range(500)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def gpt2() -> Any:
    folder = SHARED / "data" / "gpt2-tokenizer"
    if not folder.is_dir():
        pytest.skip(f"needs the GPT-2 tokenizer in {folder}, which is not here")
    return AutoTokenizer.from_pretrained(folder)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "lab": lambda: bpe(150),
    "bytes": lambda: bpe(0),
    "gpt2": gpt2,
}


def brute(model: LanguageModel, tokenizer: Any, space: CanarySpace) -> dict[str, float]:
    """nll of every text, all of its tokens behind one end-of-text token: a whole forward for each,
    nothing shared."""
    rows = {text: tokenizer(text)["input_ids"] for text in space.texts()}
    found: dict[str, float] = {}
    for length in {len(ids) for ids in rows.values()}:
        texts = [text for text, ids in rows.items() if len(ids) == length]
        for start in range(0, len(texts), 64):
            some = texts[start : start + 64]
            own = torch.tensor([rows[text] for text in some])
            contexts = torch.nn.functional.pad(own[:, :-1], (1, 0))
            distribution = model.log_probs(contexts, length).double().gather(-1, own.unsqueeze(-1))
            found.update(zip(some, (-distribution.sum((1, 2))).tolist(), strict=True))
    return {text: found[text] for text in rows}


def limits(
    model: LanguageModel, tokenizer: Any, space: CanarySpace, texts: list[str]
) -> tuple[tries.Trie, np.ndarray]:
    tree = tries.build_trie(space, tokenizer)
    tails = [tuple(tokenizer(text)["input_ids"][len(tree.head) :]) for text in texts]
    return tree, tries.add_tie_margin(
        tries.compute_continuation_nlls(model, (0, *tree.head), tails)
    )


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("space", [DIGITS, WORDS, MIXED], ids=["digits", "words", "mixed"])
@torch.no_grad()
def test_counts_equal_brute_force(tokenizer: str, space: CanarySpace) -> None:
    own = TOKENIZERS[tokenizer]()
    model = tiny(len(own), scale=6.0)
    nll = brute(model, own, space)
    texts = list(nll)[:: max(1, len(nll) // 12)]
    tree, asked = limits(model, own, space, texts)
    counted = tries.count_leaves_within_nll(model, tree, (0, *tree.head), asked).at_most
    values, exact = np.array(list(nll.values())), 0
    for text, at_most in zip(texts, counted.tolist(), strict=True):
        # Float noise may decide about texts within twice the tolerance; on all others both must
        # agree.
        slack = tries.add_tie_margin(np.array(nll[text])) - nll[text]
        least, most = ((values <= nll[text] + more).sum() for more in (0.0, 2 * slack))
        assert least <= at_most <= most
        exact += least == most
    assert exact >= len(texts) - 2
    assert tree.levels[0].leaves[0] == space.size == len(nll)


@pytest.mark.parametrize("space", [CanarySpace("My ID is {digits:4}")], ids=["10000"])
def test_ten_thousand_texts(space: CanarySpace) -> None:
    own, model = bpe(150), tiny(407, scale=6.0)
    tree = tries.build_trie(space, own)
    tails = [tuple(own(text)["input_ids"][len(tree.head) :]) for text in space.texts()]
    nll = tries.compute_continuation_nlls(model, (0, *tree.head), tails)
    asked = np.sort(nll)[[0, 9, 99, 999, 5000, 9999]]
    counted = tries.count_leaves_within_nll(
        model, tree, (0, *tree.head), tries.add_tie_margin(asked)
    ).at_most
    for limit, at_most in zip(asked, counted, strict=True):
        assert (
            (nll <= limit).sum()
            <= at_most
            <= (nll <= 2 * tries.add_tie_margin(limit) - limit).sum()
        )
    assert counted[0] == 1 and counted[-1] == 10_000


def test_gpt2_writes_numbers_in_tokens_of_several_lengths(shared: Path) -> None:
    own = gpt2()
    # formulas.md A8
    assert own("My ID is 955320")["input_ids"] == [
        3666,
        4522,
        318,
        860,
        2816,
        19504,
    ]
    tree = tries.build_trie(CanarySpace("My ID is {digits:4}"), own)
    assert tree.head == (3666, 4522, 318)
    assert len(tree.levels) > 1 and tree.levels[0].leaves[0] == 10_000
    assert len(tree.levels[0].leaf_token) > 0  # " 2019" is a token of its own


@pytest.mark.parametrize("max_rows", [1, 7, 60])
def test_counts_do_not_depend_on_rows_at_once_or_on_who_else_is_counted(max_rows: int) -> None:
    own, model = bpe(150), tiny(407, scale=6.0)
    tree, asked = limits(model, own, DIGITS, ["My ID is 955", "My ID is 007", "My ID is 280"])
    together = tries.count_leaves_within_nll(model, tree, (0, *tree.head), asked)
    alone = [
        tries.count_leaves_within_nll(model, tree, (0, *tree.head), [limit], max_rows=max_rows)
        for limit in asked
    ]
    assert together.at_most.tolist() == [int(count.at_most[0]) for count in alone]
    assert max(count.rows for count in alone) == together.rows <= tree.inner_node_count


def test_a_search_says_how_far_it_is_of_all_there_is_to_look_at() -> None:
    own, model, told = bpe(150), tiny(407, scale=14.0), list[tuple[int, int]]()
    tree, asked = limits(model, own, DIGITS, list(DIGITS.texts()))
    counted = tries.count_leaves_within_nll(
        model,
        tree,
        (0, *tree.head),
        [min(asked)],
        max_rows=7,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[0][
        1
    ] == tree.inner_node_count
    assert (
        told[-1] == (tree.inner_node_count, tree.inner_node_count)
        and counted.rows < tree.inner_node_count
    )


def test_leaves_have_no_forward_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = bpe(150), tiny(407, scale=6.0)
    tree = tries.build_trie(DIGITS, own)
    read: list[int] = []
    original = SlotRows._compute_next_logits
    monkeypatch.setattr(
        SlotRows,
        "_compute_next_logits",
        lambda self, t, *a: (read.append(len(t)), original(self, t, *a))[1],
    )
    counted = tries.count_leaves_within_nll(model, tree, (0, *tree.head), [1e9])
    assert (
        counted.at_most.tolist() == [1000]
        and counted.rows == tree.inner_node_count == sum(read) < 200
    )


def test_a_likely_text_cuts_most_branches_off() -> None:
    own, model = bpe(150), tiny(407, scale=14.0)
    tree, asked = limits(model, own, DIGITS, list(DIGITS.texts()))
    counted = tries.count_leaves_within_nll(model, tree, (0, *tree.head), [min(asked)])
    assert counted.at_most.tolist() == [1] and counted.rows < tree.inner_node_count / 2


@pytest.mark.parametrize("max_rows", [5, 4096])
def test_a_budget_bounds_the_count_from_both_sides(max_rows: int) -> None:
    own, model = bpe(150), tiny(407, scale=6.0)
    tree, asked = limits(model, own, DIGITS, ["My ID is 955"])
    exact = tries.count_leaves_within_nll(model, tree, (0, *tree.head), asked)
    unseen = []
    for nodes in (1, 2, *range(5, exact.rows, 17), exact.rows):
        some = tries.count_leaves_within_nll(
            model, tree, (0, *tree.head), asked, nodes=nodes, max_rows=max_rows
        )
        assert some.rows <= nodes
        assert some.at_most[0] <= exact.at_most[0] <= some.at_most[0] + some.unseen
        unseen.append(some.unseen)
    assert unseen[0] > 0 and unseen[-1] == 0


def test_ties_count() -> None:
    """Where every token is as likely as any other, a text ties with all of its length."""
    own = bpe(150)
    model = UniformMixingModel(tiny(len(own)), 0.0, 0.0)
    tree, asked = limits(model, own, DIGITS, ["My ID is 955"])
    lengths = [len(own(text)["input_ids"]) for text in DIGITS.texts()]
    at_most = sum(length <= len(own("My ID is 955")["input_ids"]) for length in lengths)
    assert tries.count_leaves_within_nll(model, tree, (0, *tree.head), asked).at_most.tolist() == [
        at_most
    ]


@torch.no_grad()
def test_defended_distributions_are_searched_as_any_other() -> None:
    own = bpe(150)
    public = tiny(len(own))
    ensemble = ModelEnsemble(public, [tiny(len(own), seed=s) for s in (1, 2)])
    scenario = Scenario(public, public, ensemble, queries=10, answer_length=4)
    space = CanarySpace("My ID is {digits:2}")
    for model in (PMixed(q=0.5).protect(scenario), UniformMixingModel(public, 0.9, 1.0)):
        nll = brute(model, own, space)
        texts = list(nll)[::9]
        tree, asked = limits(model, own, space, texts)
        counted = tries.count_leaves_within_nll(
            model, tree, (0, *tree.head), asked
        ).at_most.tolist()
        for text, at_most in zip(texts, counted, strict=True):
            least, most = (
                sum(other <= nll[text] + slack for other in nll.values()) for slack in (0.0, 1e-4)
            )
            assert least <= at_most <= most
        assert len(set(counted)) > len(texts) / 2


def test_a_tokenizer_that_cannot_tell_texts_apart_is_refused() -> None:
    words = models.WordLevel({"<end>": 0, "?": 1, "ID": 2, "0": 3, "1": 4}, unk_token="?")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)]
    )
    lacking = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(AuditError, match=r"encodes two texts of the format .* alike"):
        tries.build_trie(CanarySpace("ID {digits:2}"), lacking)
    assert (
        tries.build_trie(CanarySpace("ID {bit}", (("bit", ("0", "1")),)), lacking)
        .levels[0]
        .leaves[0]
        == 2
    )


def test_a_model_without_the_tokens_is_refused(neox: HuggingFaceModel) -> None:
    tree = tries.build_trie(DIGITS, bpe(150))
    with pytest.raises(
        AuditError, match=r"vocabulary mismatch: .* token \d+, but tiny neox gives .* to 61"
    ):
        tries.count_leaves_within_nll(neox, tree, (0, *tree.head), [1.0])


def test_a_large_trie_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path))
    monkeypatch.setattr(tries, "_MIN_TEXTS_CACHED", 100)
    tries.load_or_build_trie.cache_clear()
    made = tries.load_or_build_trie(DIGITS, bpe(150))
    tries.load_or_build_trie.cache_clear()
    monkeypatch.setattr(tries, "build_trie", lambda *_: pytest.fail("built again"))
    again = tries.load_or_build_trie(DIGITS, bpe(150))
    tries.load_or_build_trie.cache_clear()
    assert (
        again.head == made.head
        and again.largest == made.largest
        and again.levels[0].leaves[0] == 1000
    )
    for one, other in zip(made.levels, again.levels, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in vars(one))
    with pytest.raises(pytest.fail.Exception):
        tries.load_or_build_trie(DIGITS, bpe(151))  # another tokenizer, another trie
    tries.load_or_build_trie.cache_clear()
