"""Plans with `[utility]` on tiny masked models: the ends exact, the numbers a naive twin's, no text
in the files."""

from __future__ import annotations

import csv
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, T5Config

from auditor.core.errors import AuditError
from auditor.models.masked import load_masked
from auditor.privacy.accounting import compute_uniform_mixing_epsilon
from auditor.studies import ledger
from auditor.studies.masked_utility import (
    MaskedTexts,
    MaskingOptions,
    Utility,
    UtilityPlan,
    measure_corpus_perplexity,
    measure_utility_points,
)
from tests.conftest import check_command, tiny

Said = pytest.CaptureFixture[str]
PLANTED = "quokkaberry"
LAB = {
    "vocab_size": 300,
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "repeats": [[times, 3, 2] for times in (1, 2, 4, 8, 16)],
    "others": 0,
    "nonmembers": 4,
    "public_records": 20,
    "public_epochs": 1,
    "private_epochs": 1,
    "members": 2,
    "private_rank": 2,
    "lora_rank": 2,
    "lora_epochs": 1,
    "batch": 8,
}


class Silent:
    def stage(self, name: str) -> Any:
        return nullcontext()

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def announce(self, text: str) -> None: ...

    def show_greedy_recall(self, recall: Any) -> None: ...


def texts(count: int = 12) -> list[str]:
    return [
        f"ward {i % 7} bed {i * 37 % 97:02d} code {i * 7919 % 997:03d} {PLANTED}"
        + " again" * (i % 3)
        for i in range(count)
    ]


def bert(vocab_size: int, seed: int = 0) -> BertForMaskedLM:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=vocab_size, intermediate_size=32, max_position_embeddings=64, **shape
    )
    model = BertForMaskedLM(config)
    with torch.no_grad():  # a peaked distribution, so that mixing costs something
        model.get_output_embeddings().weight.mul_(30)
    return model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """causal, masked, public and unmasked models of one vocabulary, and data.jsonl."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<end>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts(), trainer)
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    masking = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", mask_token="<mask>"
    )
    model: Any = tiny(vocab_size=len(plain)).model
    model.save_pretrained(folder / "causal")
    plain.save_pretrained(folder / "causal")
    for name, seed, words in (
        ("masked", 0, masking),
        ("masked-public", 1, masking),
        ("maskless", 0, plain),
    ):
        bert(len(masking), seed).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    T5Config().save_pretrained(folder / "seq2seq")
    BertConfig().save_pretrained(folder / "nameless")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts())
    )
    (folder / "empty.jsonl").write_text("")
    return folder


def own(inputs: Path, model: str = "masked", **more: Any) -> dict[str, Any]:
    return {"model": str(inputs / model), "data": str(inputs / "data.jsonl"), **more}


def plan_mixing(sweep: dict[str, Any], options: dict[str, Any] | None = None, **more: Any) -> Any:
    fields = {
        "defense": ["uniform-mixing"],
        "defense_options": {"uniform-mixing": options or {}},
        "sweep": {f"uniform-mixing.{option}": values for option, values in sweep.items()},
        "utility": {"restarts": 2},
    }
    return UtilityPlan.from_raw_values({**fields, **more})


def mixing(
    inputs: Path, sweep: dict[str, Any], options: dict[str, Any] | None = None, **more: Any
) -> list[dict[str, Any]]:
    plan = plan_mixing(sweep, options, **own(inputs), **more)
    return [row.measured for row in measure_utility_points(plan, Silent(), command="").rows]


# --- the numbers ---


def test_the_ends_are_exact_and_epsilon_is_the_papers(inputs: Path) -> None:
    plan = plan_mixing({"weight": [0.0, 0.3, 1.0]}, **own(inputs))
    result = measure_utility_points(plan, Silent(), command="")
    size = load_masked(str(inputs / "masked")).vocab_size
    bare, none, some, whole = (row.measured for row in result.rows)
    assert "12 texts, masked 2 times" in result.notes[0]
    # weight 0: exactly |V|
    assert none["perplexity"].value == pytest.approx(size, rel=1e-12)
    assert none["perplexity_over_vocabulary"].value == pytest.approx(1, rel=1e-12)
    assert none["perplexity"].low == pytest.approx(none["perplexity"].high, rel=1e-12)
    assert none["epsilon"].value == 0
    # weight 1: the model itself
    assert whole["perplexity"] == bare["perplexity"] and whole["epsilon"].value == math.inf
    ratio = whole["perplexity_ratio"]
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1, 1, 1), rel=1e-12)
    assert "epsilon" not in bare
    per_token = compute_uniform_mixing_epsilon(0.3, size)
    model = load_masked(str(inputs / "masked"))
    masked = MaskedTexts(model, None, model.tokenizer, texts(), MaskingOptions())
    longest, mean = masked.hidden_token_counts.max(), masked.hidden_token_counts.mean()
    assert some["epsilon_per_token"].value == pytest.approx(per_token)
    assert f"T = {longest}: " in some["epsilon"].note
    whole_epsilon = compute_uniform_mixing_epsilon(0.3, size, int(longest))
    assert some["epsilon"].value == pytest.approx(whole_epsilon)
    assert some["epsilon_mean"].value == pytest.approx(per_token * mean) and mean < longest
    for row in result.rows[2:]:  # weight q + (1 - weight)/|V| >= weight q
        most = 1 / row.at["uniform-mixing.weight"] + 1e-9
        assert row.measured["perplexity_ratio"].high <= most
    assert some["perplexity"].low < some["perplexity"].value < some["perplexity"].high


def test_masked_perplexity_is_a_naive_twins(inputs: Path) -> None:
    mixed = mixing(inputs, {"weight": [0.5]})[1]["perplexity"]
    model = load_masked(str(inputs / "masked"))
    masked = MaskedTexts(model, None, model.tokenizer, texts(), MaskingOptions(restarts=2))
    found = []
    for restart in range(2):
        nll, count = 0.0, 0
        for text in masked.texts:
            for gaps in [masked.masked_positions(text, restart)]:
                assert len(gaps) == max(1, round(0.15 * len(text.open))) == len(set(gaps))
                hidden = torch.tensor([text.tokens])
                hidden[0, gaps] = model.mask
                distribution = model.model(input_ids=hidden).logits[0, gaps].double().softmax(-1)
                for p in distribution[range(len(gaps)), [text.tokens[at] for at in gaps]].tolist():
                    nll -= math.log(0.5 * p + 0.5 / model.vocab_size)
                    count += 1
        found.append(math.exp(nll / count))
    assert found[0] != found[1]  # each restart hides other tokens
    restarts = map(float, mixed.note.removeprefix("restarts ").split(", "))
    assert list(restarts) == pytest.approx(found, rel=1e-5)
    assert mixed.value == pytest.approx(np.mean(found), rel=1e-5)


def test_results_do_not_depend_on_the_batch_size_and_a_texts_masks_on_nothing_else(
    inputs: Path,
) -> None:
    one, many = (mixing(inputs, {"weight": [0.5]}, batch_size=size) for size in (1, 8))
    for a, b in zip(one, many, strict=True):
        assert a["perplexity"].value == pytest.approx(b["perplexity"].value, rel=1e-5)
    assert mixing(inputs, {"weight": [0.5]}, limit=5)[0]["perplexity"].n == 5


def test_a_sweep_asks_the_model_once(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = load_masked(str(inputs / "masked")), []
    forward = type(model).log_probs
    monkeypatch.setattr(
        type(model), "log_probs", lambda self, *a: asked.append(1) or forward(self, *a)
    )
    masked = MaskedTexts(model, None, model.tokenizer, texts(), MaskingOptions(), batch_size=64)
    defenses = plan_mixing({"weight": [0.1, 0.5, 0.9]}).list_defenses()
    defended = [masked.protect(defense)[0] for _, defense in defenses]
    masked.measure_nll([masked.target], lambda done, total: None)
    once = len(asked)
    masked.target.forget()
    masked.measure_nll([masked.target, *defended], lambda done, total: None)
    assert len(asked) == 2 * once > 0


def test_perplexities_are_paired_and_know_infinity() -> None:
    rng = np.random.default_rng(0)
    nll, tokens = rng.gamma(4, 1, (2, 200)), np.full(200, 2)
    own, thrice = (
        measure_corpus_perplexity(nll, tokens),
        measure_corpus_perplexity(nll + math.log(3) * tokens, tokens, nll),
    )
    assert (
        own.value == pytest.approx(np.exp(nll.sum(-1) / 400).mean())
        and own.low < 0.97 * own.value < 0.97 * own.high
    )
    # every text by as much
    assert (thrice.value, thrice.low, thrice.high) == pytest.approx((3, 3, 3))
    possible = nll.copy()
    possible[0, 7] = math.inf
    never = measure_corpus_perplexity(possible, tokens, nll)
    # a third of the resamples lack the text
    assert never.value == never.high == math.inf and 0 < never.low < math.inf


# --- the public top-k ---


def test_a_smaller_support_claims_less_and_says_what_it_leaves_out(inputs: Path) -> None:
    public = str(inputs / "masked-public")
    size = load_masked(public).vocab_size
    cut, kept, everything = (
        mixing(inputs, {"weight": [0.5]}, {"public_top_k": k, "tail": tail}, public=public)[1]
        for k, tail in ((90, "none"), (90, "public"), (size, "none"))
    )
    smaller = pytest.approx(compute_uniform_mixing_epsilon(0.5, 90))
    assert cut["epsilon_per_token"].value == kept["epsilon_per_token"].value == smaller
    assert cut["perplexity"].value == math.inf
    assert 0 < cut["covered"].low <= cut["covered"].value < 1
    assert math.isfinite(kept["perplexity"].value) and kept["covered"].value == 1
    plain = mixing(inputs, {"weight": [0.5]})[1]
    assert everything["perplexity"].value == pytest.approx(plain["perplexity"].value, rel=1e-5)
    assert everything["epsilon"].value == pytest.approx(plain["epsilon"].value)


# --- the lab ---


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def in_the_lab(
    cache: Path, monkeypatch: pytest.MonkeyPatch, sweep: dict[str, Any], **more: Any
) -> Utility:
    monkeypatch.setenv("AUDIT_CACHE", str(cache))
    plan = plan_mixing(sweep, lab_recipe=LAB, **more)
    return measure_utility_points(plan, Silent(), command="")


def test_a_defense_of_causal_models_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AuditError, match="expected a causal LM for pmixed"):
        in_the_lab(cache, monkeypatch, {}, defense=["pmixed"], defense_options={})


def test_a_masked_lab_and_its_public_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "defense": ["uniform-mixing"],
        "defense_options": {"uniform-mixing": {"public_top_k": 20, "tail": "public"}},
    }
    result = in_the_lab(cache, monkeypatch, {"weight": [0.5]}, **fields)
    # the lab's vocabulary and a mask token
    assert result.notes[0].startswith("4 texts") and "|V| = 301" in result.notes[0]
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    in_the_lab(cache, monkeypatch, {"weight": [0.5]}, **fields)
    assert len(before) >= 2 and before == {
        path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")
    }


PLAN = """
title = "Figure"
[utility]
restarts = 2
[sweep]
"uniform-mixing.weight" = [0.0, 0.5]
[[claim]]
id = "zero"
text = "weight 0: |V|"
paper = "|V|"
metric = "perplexity_over_vocabulary"
of = { at = 0.0 }
expect = [0.999, 1.001]
[[claim]]
id = "wrong"
text = "worse than it can be"
paper = "none"
metric = "perplexity_ratio"
of = { at = 0.5 }
expect = "> 2.5"
"""


def study(folder: Path, plan: str) -> Path:
    folder.mkdir()
    (folder / "paper.toml").write_text(
        'title = "Mine"\ndefense = ["uniform-mixing"]\n[scale.lab]\n'
    )
    (folder / "figure.toml").write_text(plan)
    return folder


def test_a_paper_may_measure_utility(inputs: Path, tmp_path: Path, capsys: Said) -> None:
    folder = study(tmp_path / "mine", PLAN)
    flags = [
        "--model",
        str(inputs / "masked"),
        "--data",
        str(inputs / "data.jsonl"),
        "-o",
        str(tmp_path / "out"),
    ]
    check_command("reproduce", folder, *flags)
    claims = json.loads((tmp_path / "out" / "ledger.json").read_text())["claims"]
    assert [claim["verdict"] for claim in claims] == [ledger.HOLDS, ledger.REFUTED]
    made = tmp_path / "out" / "figure"
    names = ("sweep.csv", "sweep.md", "utility.json", "utility.svg")
    assert sorted(path.name for path in made.iterdir()) == sorted(names)
    with open(made / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["uniform-mixing.weight"] for row in rows] == ["", "0.0", "0.5"]
    assert float(rows[2]["epsilon_mean"]) > 0
    for name in ("sweep.md", "utility.svg"):
        assert "not a guarantee" in (made / name).read_text()
    shown = capsys.readouterr().out + "".join(
        path.read_text(errors="replace") for path in made.iterdir()
    )
    assert PLANTED not in shown and "ward" not in shown
    before = (made / "utility.json").read_bytes()
    check_command("reproduce", folder, *flags)
    assert (made / "utility.json").read_bytes() == before  # measured once
    check_command("reproduce", folder, *flags, "--limit", "3", code=2)
    assert "another plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "old", "new", "message"),
    [
        (
            "masked",
            'weight" = [0.0, 0.5]',
            'weight" = [0.5, 1.2]',
            "expected weight in [0, 1], got 1.2",
        ),
        ("masked", 'weight" = [0.0, 0.5]', 'wieght" = [0.5]', "did you mean 'weight'"),
        (
            "masked",
            '"uniform-mixing.weight" = [0.0, 0.5]',
            '"pmixed.q" = [0.5]',
            "unknown defense in the sweep of 'pmixed.q'",
        ),
        ("masked", "restarts = 2", "restarts = 0", "expected restarts >= 1"),
        ("masked", "restarts = 2", "mask_share = 0.0", "expected mask_share in (0, 1)"),
        ("masked", "restarts = 2", 'on = "all"', "expected 'heldout' or 'members', got 'all'"),
        ("masked", "restarts = 2", 'on = "members"', "chooses among the lab's records"),
        ("maskless", "", "", "expected a masked LM with a mask token"),
        ("seq2seq", "", "", "an encoder-decoder (t5)"),
        ("causal", "", "", "of which transformers has no masked LM"),
        ("nameless", "", "", "which its configuration does not call one (nothing)"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    inputs: Path, tmp_path: Path, capsys: Said, model: str, old: str, new: str, message: str
) -> None:
    folder = study(tmp_path / "mine", PLAN.replace(old, new) if old else PLAN)
    flags = [
        "--model",
        str(inputs / model),
        "--data",
        str(inputs / "data.jsonl"),
        "-o",
        str(tmp_path / "out"),
    ]
    check_command("reproduce", folder, *flags, code=2)
    printed = capsys.readouterr()
    assert message in " ".join((printed.out + printed.err).split())
