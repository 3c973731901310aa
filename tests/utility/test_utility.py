"""`audit utility` end to end on tiny models: the ends exact, the numbers a naive twin's, nothing private unasked."""

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

from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.models.loading import load_causal_lm
from auditor.models.masked import load_masked
from auditor.privacy.accounting import uniform_mixing_epsilon
from auditor.runs.plan import make_plan
from auditor.studies import ledger
from auditor.utility import tradeoff
from auditor.utility.measure import (
    Utility,
    UtilityPlan,
    UtilitySettings,
    measure_utility_points,
    utility_corpus_perplexity,
)
from auditor.utility.scored_models import CausalUtilitySubject, MaskedUtilitySubject, ScoringOptions
from tests.conftest import tiny

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
        f"ward {i % 7} bed {i * 37 % 97:02d} code {i * 7919 % 997:03d} {PLANTED}" + " again" * (i % 3)
        for i in range(count)
    ]


def bert(vocab_size: int, seed: int = 0) -> BertForMaskedLM:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=vocab_size, intermediate_size=32, max_position_embeddings=64, **shape)
    model = BertForMaskedLM(config)
    with torch.no_grad():  # a peaked distribution, so that mixing costs something
        model.get_output_embeddings().weight.mul_(30)
    return model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """causal, masked, public and unmasked models of one vocabulary, and data.jsonl."""
    folder = tmp_path_factory.mktemp("world")
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
    masking = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", mask_token="<mask>")
    for name, seed in (("causal", 0), ("causal-public", 1)):
        model: Any = tiny(vocab_size=len(plain), seed=seed).model
        model.save_pretrained(folder / name)
        plain.save_pretrained(folder / name)
    for name, seed, words in (("masked", 0, masking), ("masked-public", 1, masking), ("maskless", 0, plain)):
        bert(len(masking), seed).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    T5Config().save_pretrained(folder / "seq2seq")
    BertConfig().save_pretrained(folder / "nameless")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    (folder / "empty.jsonl").write_text("")
    return folder


def own(world: Path, kind: str = "masked", **more: Any) -> dict[str, Any]:
    return {"model": str(world / kind), "data": str(world / "data.jsonl"), **more}


def mixing(
    world: Path, kind: str, sweep: dict[str, Any], options: dict[str, Any] | None = None, **more: Any
) -> Utility:
    fields = {"defense": ["uniform-mixing"], "defense_options": {"uniform-mixing": options or {}}, **more}
    result, _ = measure_utility_points(
        UtilityPlan(make_plan(own(world, kind, **fields), {}), UtilitySettings(restarts=2), sweep), Silent()
    )
    return result


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_the_ends_are_exact_and_epsilon_is_the_papers(world: Path, kind: str) -> None:
    result = mixing(world, kind, {"weight": [0.0, 0.3, 1.0]})
    bare, none, some, whole = result.rows
    assert result.kind == kind and result.texts == 12 and result.restarts == (2 if kind == "masked" else 1)
    assert none.perplexity.value == pytest.approx(result.vocab_size, rel=1e-12)  # weight 0: exactly |V|
    assert none.perplexity.low == pytest.approx(none.perplexity.high, rel=1e-12) and none.epsilon == 0
    assert whole.perplexity == bare.perplexity and whole.epsilon == math.inf  # weight 1: the model itself
    assert (whole.ratio.low, whole.ratio.value, whole.ratio.high) == pytest.approx((1, 1, 1), rel=1e-12)
    assert bare.epsilon is None and bare.status == "nothing claimed"
    per_token = uniform_mixing_epsilon(0.3, result.vocab_size)
    assert some.epsilon_per_token == pytest.approx(per_token) and some.tokens == result.longest
    assert some.epsilon == pytest.approx(uniform_mixing_epsilon(0.3, result.vocab_size, result.longest))
    assert some.epsilon_mean == pytest.approx(per_token * result.mean_tokens) and result.mean_tokens < result.longest
    for row in result.rows[2:]:  # weight q + (1 - weight)/|V| >= weight q
        assert row.ratio.high <= 1 / row.at["weight"] + 1e-9
    assert some.perplexity.low < some.perplexity.value < some.perplexity.high


def test_causal_perplexity_is_a_naive_twins(world: Path) -> None:
    result = mixing(world, "causal", {"weight": [0.5]})
    model = load_causal_lm(str(world / "causal"))
    nll, count = 0.0, 0
    for text in texts():
        tokens = model.tokenizer(text)["input_ids"]  # type: ignore[misc]
        distribution = model.log_probs(torch.tensor([tokens]), len(tokens))[0].double().exp()
        for at in range(1, len(tokens)):
            nll -= math.log(0.5 * float(distribution[at - 1, tokens[at]]) + 0.5 / model.vocab_size)
            count += 1
    assert result.rows[1].perplexity.value == pytest.approx(math.exp(nll / count), rel=1e-5)


def test_masked_perplexity_is_a_naive_twins(world: Path) -> None:
    result = mixing(world, "masked", {"weight": [0.5]})
    model = load_masked(str(world / "masked"))
    subject = MaskedUtilitySubject(model, None, model.tokenizer, texts(), ScoringOptions(restarts=2))
    found = []
    for restart in range(2):
        nll, count = 0.0, 0
        for text in subject.texts:
            for gaps in [subject.masked_positions(text, restart)]:
                assert len(gaps) == max(1, round(0.15 * len(text.open))) == len(set(gaps))
                hidden = torch.tensor([text.tokens])
                hidden[0, gaps] = model.mask
                distribution = model.model(input_ids=hidden).logits[0, gaps].double().softmax(-1)
                for p in distribution[range(len(gaps)), [text.tokens[at] for at in gaps]].tolist():
                    nll -= math.log(0.5 * p + 0.5 / model.vocab_size)
                    count += 1
        found.append(math.exp(nll / count))
    assert found[0] != found[1]  # each restart hides other tokens
    assert result.rows[1].restarts == pytest.approx(found, rel=1e-5)
    assert result.rows[1].perplexity.value == pytest.approx(np.mean(found), rel=1e-5)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_results_do_not_depend_on_the_batch_size_and_a_texts_masks_on_nothing_else(world: Path, kind: str) -> None:
    one, many = (mixing(world, kind, {"weight": [0.5]}, batch_size=size) for size in (1, 8))
    for a, b in zip(one.rows, many.rows, strict=True):
        assert a.perplexity.value == pytest.approx(b.perplexity.value, rel=1e-5)
    assert mixing(world, kind, {"weight": [0.5]}, limit=5).texts == 5


def test_a_sweep_asks_the_model_once(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = load_causal_lm(str(world / "causal")), []
    forward = type(model).log_probs_of_input
    monkeypatch.setattr(
        type(model), "log_probs_of_input", lambda self, *a, **k: asked.append(1) or forward(self, *a, **k)
    )
    subject = CausalUtilitySubject(model, None, model.tokenizer, texts(), ScoringOptions(batch_size=64))
    wanted = UtilityPlan(make_plan({"defense": ["uniform-mixing"]}, {}), UtilitySettings(), {"weight": [0.1, 0.5, 0.9]})
    made = [point.defense for point in wanted.points_to_measure()]
    defended = [subject.protected_model_and_claim(defense, {})[0] for defense in made if defense]
    subject.nll_by_model_and_text([subject.target], lambda done, total: None)
    alone = len(asked)
    subject.target.forget()  # type: ignore[attr-defined]
    subject.nll_by_model_and_text([subject.target, *defended], lambda done, total: None)
    assert len(asked) == 2 * alone > 0


def test_what_is_given_of_a_text_is_read_and_not_predicted(world: Path) -> None:
    model = load_causal_lm(str(world / "causal"))
    some = texts()[:4]
    ids = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in some]
    given = [len(own) // 2 for own in ids]
    subject = CausalUtilitySubject(model, None, model.tokenizer, some, ScoringOptions(), given=given)
    nll, _ = subject.nll_by_model_and_text([subject.target], lambda done, total: None)
    for own, first, found in zip(ids, given, nll[0, 0], strict=True):
        with torch.no_grad():
            rows = model.model(torch.tensor([own])).logits[0].double().log_softmax(-1)
        assert found == pytest.approx(-sum(float(rows[i - 1, own[i]]) for i in range(first, len(own))), rel=1e-5)
    assert subject.predicted_token_counts.tolist() == [len(own) - first for own, first in zip(ids, given, strict=True)]


def test_perplexities_are_paired_and_know_infinity() -> None:
    rng = np.random.default_rng(0)
    nll, tokens = rng.gamma(4, 1, (2, 200)), np.full(200, 2)
    own, thrice = (
        utility_corpus_perplexity(nll, tokens),
        utility_corpus_perplexity(nll + math.log(3) * tokens, tokens, nll),
    )
    assert own.value == pytest.approx(np.exp(nll.sum(-1) / 400).mean()) and own.low < 0.97 * own.value < 0.97 * own.high
    assert (thrice.value, thrice.low, thrice.high) == pytest.approx((3, 3, 3))  # every text by as much
    possible = nll.copy()
    possible[0, 7] = math.inf
    never = utility_corpus_perplexity(possible, tokens, nll)
    assert never.value == never.high == math.inf and 0 < never.low < math.inf  # a third of the resamples lack the text


# --- the public top-k -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_smaller_support_claims_less_and_says_what_it_leaves_out(world: Path, kind: str) -> None:
    public = str(world / f"{kind}-public")
    size = load_causal_lm(str(world / "causal")).vocab_size
    cut = mixing(world, kind, {"weight": [0.5]}, {"public_top_k": 90}, public=public).rows[1]
    kept = mixing(world, kind, {"weight": [0.5]}, {"public_top_k": 90, "tail": "public"}, public=public).rows[1]
    assert cut.epsilon_per_token == kept.epsilon_per_token == pytest.approx(uniform_mixing_epsilon(0.5, 90))
    assert cut.perplexity.value == math.inf and 0 < cut.covered.low <= cut.covered.value < 1
    assert math.isfinite(kept.perplexity.value) and kept.covered.value == 1
    everything = mixing(world, kind, {"weight": [0.5]}, {"public_top_k": size}, public=public).rows[1]
    plain = mixing(world, kind, {"weight": [0.5]}).rows[1]
    assert everything.perplexity.value == pytest.approx(plain.perplexity.value, rel=1e-5)
    assert everything.epsilon == pytest.approx(plain.epsilon)


# --- the lab ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def in_the_lab(cache: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, sweep: dict[str, Any], **more: Any) -> Utility:
    monkeypatch.setenv("AUDIT_CACHE", str(cache))
    plan = make_plan({"lab_recipe": LAB, **more}, {})
    return measure_utility_points(UtilityPlan(plan, UtilitySettings(kind=kind, restarts=2), sweep), Silent())[0]


def test_pmixed_on_the_lab(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = in_the_lab(cache, monkeypatch, "auto", {"epsilon": [4, 5]}, defense=["pmixed"])
    assert [row.epsilon for row in result.rows] == [None, pytest.approx(4), pytest.approx(5)]
    assert all(row.epsilon_mean is None and row.delta == 1e-5 for row in result.rows[1:])
    assert result.rows[1].perplexity.value != result.rows[2].perplexity.value
    assert tradeoff.tradeoff_plot_lines(result)[1] == "ε"
    with pytest.raises(AuditError, match="expected a causal LM behind pmixed"):
        in_the_lab(cache, monkeypatch, "masked", {}, defense=["pmixed"])


def test_a_masked_lab_and_its_public_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "defense": ["uniform-mixing"],
        "defense_options": {"uniform-mixing": {"public_top_k": 20, "tail": "public"}},
    }
    result = in_the_lab(cache, monkeypatch, "masked", {"weight": [0.5]}, **fields)
    assert result.vocab_size == 301 and result.texts == 4  # the lab's vocabulary and a mask token
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    in_the_lab(cache, monkeypatch, "masked", {"weight": [0.5]}, **fields)
    assert len(before) >= 2 and before == {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}


PLAN = """
title = "Figure"
[utility]
kind = "masked"
restarts = 2
[sweep]
weight = [0.0, 0.5]
[[claim]]
id = "zero"
text = "weight 0: |V|"
paper = "|V|"
metric = "perplexity_over_vocabulary"
of = { weight = 0.0 }
expect = [0.999, 1.001]
[[claim]]
id = "wrong"
text = "worse than it can be"
paper = "none"
metric = "perplexity_ratio"
of = { weight = 0.5 }
expect = "> 2.5"
"""


def test_a_paper_may_measure_utility(world: Path, tmp_path: Path, said: Said) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "paper.toml").write_text('title = "Mine"\ndefense = ["uniform-mixing"]\n[scale.lab]\n')
    (folder / "figure.toml").write_text(PLAN)
    (folder / "other.toml").write_text(PLAN.replace('kind = "masked"', 'kind = "causal"'))
    flags = ["--model", str(world / "masked"), "--data", str(world / "data.jsonl"), "-o", str(tmp_path / "out")]
    assert run_command_line(["reproduce", str(folder), *flags]) == 2  # one plan asks for another kind of model
    claims = json.loads((tmp_path / "out" / "ledger.json").read_text())["claims"]
    assert [claim["verdict"] for claim in claims] == [ledger.HOLDS, ledger.REFUTED, ledger.NOT_RUN, ledger.NOT_RUN]
    assert "expected a causal LM, got" in claims[2]["note"]
    made = (tmp_path / "out" / "figure" / "utility.json").read_bytes()
    assert run_command_line(["reproduce", str(folder), *flags]) == 2
    assert (tmp_path / "out" / "figure" / "utility.json").read_bytes() == made  # measured once
    assert run_command_line(["reproduce", str(folder), *flags, "--limit", "3"]) == 2
    assert "another plan" in said.readouterr().err


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_table_plot_and_no_text(world: Path, tmp_path: Path, said: Said) -> None:
    out = tmp_path / "out"
    command = ["utility", "--model", str(world / "masked"), "--data", str(world / "data.jsonl")]
    command += ["--defense", "uniform-mixing", "--sweep", "weight=0.1:1.0:0.1", "-o", str(out)]
    assert run_command_line(command) == 0, said.readouterr().err
    names = ("utility.json", "utility.csv", "utility.md", "utility.svg", "utility.png")
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    with open(out / "utility.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["weight"] for row in rows] == ["", *(f"{i / 10}" for i in range(1, 11))]
    assert rows[-1]["epsilon"] == "inf" and float(rows[3]["epsilon_mean_not_a_guarantee"]) > 0
    assert (
        "not a guarantee" in (out / "utility.md").read_text() and "not a guarantee" in (out / "utility.svg").read_text()
    )
    shown = said.readouterr().out + "".join(path.read_text(errors="replace") for path in out.iterdir())
    assert PLANTED not in shown and "ward" not in shown
    assert tradeoff.read_utility_result(out).rows[1].at == {"weight": 0.1}


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_predictions_are_shown_when_asked_for(world: Path, tmp_path: Path, said: Said, kind: str) -> None:
    command = ["utility", "--model", str(world / kind), "--data", str(world / "data.jsonl"), "-o", str(tmp_path / "o")]
    command += ["--defense", "uniform-mixing", "--sweep", "weight=0.5,1"]
    assert run_command_line([*command, "--text", "ward 3 bed 11 code 555"]) == 0
    out = said.readouterr().out
    assert PLANTED not in out
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("true "))
    shown = {name: text.strip() for name, text in (line.split("  ", 1) for line in lines[first : first + 4])}
    assert list(shown) == ["true", "Undefended", "weight=0.5", "weight=1"]
    assert shown["true"].replace("[", "").replace("]", "") == "ward 3 bed 11 code 555" and "[" in shown["true"]
    assert shown["Undefended"] == shown["weight=1"]  # the same model, the same draws
    assert (tmp_path / "o" / "examples.md").stat().st_mode & 0o077 == 0
    assert run_command_line([*command, "--reveal", "1"]) == 0 and PLANTED in said.readouterr().out.replace(
        "[", ""
    ).replace("]", "")


@pytest.fixture
def said(capsys: Said) -> Said:
    return capsys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "W/masked", "--sweep", "weight=0.5,1.2"], r"expected weight in [0, 1], got 1.2"),
        (["--model", "W/masked", "--sweep", "wieght=0.5"], "did you mean 'weight'"),
        (["--model", "W/masked", "--sweep", "pmixed.q=0.5"], "unknown defense in the sweep of 'pmixed.q'"),
        (["--model", "W/maskless"], "expected a masked LM with a mask token"),
        (["--model", "W/seq2seq"], "an encoder-decoder (t5)"),
        (["--model", "W/causal", "--kind", "masked"], "of which transformers has no masked LM"),
        (["--model", "W/masked", "--kind", "causal"], "expected a causal LM, got 'W/masked', a masked one"),
        (["--model", "W/nameless"], "give --kind"),
        (["--model", "W/masked", "--data", "W/empty.jsonl"], "is empty: expected at least one row"),
        (["--model", "W/masked", "--mask-share", "0"], "expected --mask-share in (0, 1), got 0"),
        (["--model", "W/masked", "--restarts", "0"], "expected --restarts >= 1"),
        (["--model", "W/masked", "--kind", "maskd"], "expected --kind to be one of auto, causal, masked"),
        (["--model", "W/masked", "-D", "public_top_k=5"], "give --public"),
        (["--model", "W/masked", "-D", "tail=public"], "expected public_top_k >= 1 beside tail=public"),
        (["--model", "W/masked", "--on", "members"], "--on chooses among the lab's records"),
        (["--model", "W/masked", "--text", ""], "expected a --text of two tokens or more"),
        (["--model", "W/masked", "--sweep", "weight=0:1:0"], "a step from start towards stop"),
        (["--model", "W/nothing"], "no such folder"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    world: Path, tmp_path: Path, said: Said, arguments: list[str], message: str
) -> None:
    given = [argument.replace("W/", f"{world}/") for argument in arguments]
    data = [] if "--data" in given else ["--data", str(world / "data.jsonl")]
    out = tmp_path / "out"
    assert run_command_line(["utility", "--defense", "uniform-mixing", *given, *data, "-o", str(out)]) == 2
    error = said.readouterr().err.strip()
    assert message.replace("W/", f"{world}/") in error and error.startswith("error: ") and "\n" not in error
    assert not out.exists()
