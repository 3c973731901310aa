"""MemFree decoding against a naive twin, and what it forbids: verbatim text, and nothing that
differs in a token."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from auditor.attacks.near_verbatim import bound_near_verbatim_probability
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.memfree import MemFree, split_into_ngrams
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Scenario
from tests.conftest import check_command, refuses, save_tiny

RNG = np.random.default_rng(0)
RECORDS: list[Tokens] = [tuple(RNG.integers(1, 12, 40).tolist()) for _ in range(30)]


def scenario(target: LanguageModel, records: list[Tokens] | None = None) -> Scenario:
    return Scenario(
        target,
        None,
        None,
        queries=0,
        answer_length=4,
        corpus=RECORDS if records is None else records,
    )


def naive(model: HuggingFaceModel, context: Tokens, n: int) -> torch.Tensor:
    """(V,) nats: tokens whose n-gram stands anywhere in a record crossed out, one by one."""
    distribution = model.log_probs(torch.tensor([context]), 1)[0, 0].double().exp()
    for token in range(len(distribution)):
        gram = (*context[len(context) - n + 1 :], token) if len(context) >= n - 1 else None
        if any(record[i : i + n] == gram for record in RECORDS for i in range(len(record))):
            distribution[token] = 0.0
    return (distribution / distribution.sum()).log()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_distribution_is_the_targets_without_what_would_complete_an_n_gram(
    neox: HuggingFaceModel, n: int
) -> None:
    model = MemFree(n=n).protect(scenario(neox))
    contexts = torch.tensor([record[3:13] for record in RECORDS[:4]])
    distributions = model.log_probs(contexts, 6)
    for context, found in zip(contexts.tolist(), distributions, strict=True):
        for i, distribution in enumerate(found):
            twin = naive(neox, tuple(context[: 5 + i]), n)
            torch.testing.assert_close(
                distribution.double().exp(), twin.exp(), atol=1e-6, rtol=1e-5
            )
            assert bool((twin == -math.inf).any())


def test_rows_have_the_distribution_of_the_whole_text_behind_them(neox: HuggingFaceModel) -> None:
    """Rows that split, and texts shorter than the n-gram: as teacher-forced, from the question's
    tokens on."""
    model = MemFree(n=4).protect(scenario(neox))
    prefixes = torch.tensor([RECORDS[0][:2], RECORDS[1][:2]])
    rows = model.start(prefixes, 5)
    texts = [list(prefix) for prefix in prefixes.tolist()]
    for step in range(4):
        parents = torch.tensor([0, 0, *range(len(texts))])
        tokens = torch.tensor([7, *(RECORDS[i % 2][2 + step] for i in range(len(parents) - 1))])
        rows.advance(parents, tokens)
        texts = [[*texts[p], t] for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]
        torch.testing.assert_close(
            rows.log_probs(), model.log_probs(torch.tensor(texts), 1)[:, 0], atol=1e-5, rtol=0
        )


def test_what_is_drawn_completes_no_n_gram(neox: HuggingFaceModel) -> None:
    held = {gram for record in RECORDS for gram in split_into_ngrams(record, 3)}
    prefix = RECORDS[2][:6]
    noise = draw_secret_uniforms(400, 8, 0)[None]

    def completed(model: LanguageModel) -> int:
        found = sample_candidates(model, torch.tensor([prefix]), 8, ANCESTRAL, noise)[0]
        texts = [(*prefix, *suffix) for suffix in found.suffixes.tolist()]
        return sum(gram in held for text in texts for gram in list(split_into_ngrams(text, 3))[4:])

    assert completed(neox) > 0
    for kind in (MemFree(n=3), MemFree(n=3, filter="bloom")):
        assert completed(kind.protect(scenario(neox))) == 0


def test_verbatim_text_is_impossible_and_text_one_token_beside_it_is_not(
    neox: HuggingFaceModel,
) -> None:
    model = MemFree(n=10).protect(scenario(neox))
    prefixes = torch.tensor([record[:20] for record in RECORDS[:3]])
    suffixes = torch.tensor([record[20:26] for record in RECORDS[:3]])
    assert bool((model.token_log_probs(prefixes, suffixes).sum(-1) == -math.inf).all())
    near, _, verbatim = bound_near_verbatim_probability(
        model, ANCESTRAL, prefixes, suffixes, distance=1, beams=200
    )
    assert bool((verbatim == -math.inf).all()) and bool(near.isfinite().all())
    other = suffixes.clone()
    other[:, 0] = 50  # in no record: from here on no n-gram of 10 is whole for nine tokens
    assert bool(model.token_log_probs(prefixes, other).isfinite().all())
    torch.testing.assert_close(
        model.token_log_probs(prefixes, other)[:, 1:], neox.token_log_probs(prefixes, other)[:, 1:]
    )


def test_a_bloom_filter_forbids_all_of_them_and_others_at_its_rate(neox: HuggingFaceModel) -> None:
    found = scenario(neox)
    exact, bloom = (
        MemFree(n=4).build_ngram_filter(found),
        MemFree(n=4, filter="bloom", false_positives=0.05).build_ngram_filter(found),
    )
    contexts = [tuple(map(int, row)) for row in RNG.integers(0, 61, (400, 3))]
    contexts += [gram[:-1] for record in RECORDS for gram in split_into_ngrams(record, 4)]
    more = 0
    for context in contexts:
        assert set(exact(context)) <= set(bloom(context))
        more += len(set(bloom(context)) - set(exact(context)))
    asked = 61 * len(set(contexts))
    assert 0.03 < more / (61 * len(contexts)) < 0.07 and asked > 50_000


def test_nothing_is_claimed_and_what_passes_is_said(neox: HuggingFaceModel) -> None:
    found = scenario(neox, [*RECORDS, (1, 2, 3)])
    (said,) = MemFree().remarks(found)
    assert "the 10-grams of 31 training texts" in said and "1 of them too short to have one" in said


def test_a_filter_without_a_token_left_is_refused(neox: HuggingFaceModel) -> None:
    full = scenario(neox, [(1, token) for token in range(neox.vocab_size)])
    with refuses("filter"):
        MemFree(n=2).protect(full).log_probs(torch.tensor([[5, 1]]), 1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memfree")
    save_tiny(folder / "neox")
    rows = [{"text": f"The code of door {i} is {i * i * 7}, and more."} for i in range(8)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def run(inputs: Path, out: Path, *more: str) -> list[str]:
    own = [
        "run",
        "--model",
        str(inputs / "neox"),
        "--data",
        str(inputs / "data.jsonl"),
        "-o",
        str(out),
    ]
    return [*own, "--prefix-length", "12", "--suffix-length", "6", "--defense", "memfree", *more]


def test_on_a_model_of_ones_own_it_filters_the_data(inputs: Path, tmp_path: Path) -> None:
    """Whole records, beyond what is attacked of them; the claim check says that nothing is
    claimed."""
    attacks = [
        "--attack",
        "extraction-probability",
        "--attack",
        "near-verbatim",
        "--attack",
        "claim-check",
    ]
    attacks += ["-A", "near-verbatim.top_p=1", "--setting", "white-box"]
    check_command(*run(inputs, tmp_path / "run", *attacks), code=2)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    cells = {(f["target"], f["attack"], f["setting"]): f for f in result["findings"]}

    def value(target: str, attack: str, name: str) -> float:
        measured = {
            m["name"]: m["value"] for m in cells[target, attack, "white-box"]["measurements"]
        }
        return float(measured[name])

    assert value("undefended", "extraction-probability", "extraction_probability_ancestral") > 0
    assert value("memfree", "extraction-probability", "extraction_probability_ancestral") == 0
    assert value("memfree", "near-verbatim", "near_verbatim_probability") > 0
    assert "makes no claim" in cells["memfree", "claim-check", "white-box"]["not_applicable"]
    assert any(
        "the 10-grams of " in note
        for note in cells["memfree", "near-verbatim", "white-box"]["notes"]
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-D", "n=1"], "expected n >= 2, got 1"),
        (["-D", "n=200"], "expected training records of n=200 tokens or more for memfree, got"),
        (["-D", "filter=blum"], "expected memfree.filter in ('exact', 'bloom'), got 'blum'"),
        (["-D", "false_positives=0"], "expected false_positives in (0, 1), got 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    sentence: str,
) -> None:
    check_command(
        *run(inputs, tmp_path / "run", "--attack", "extraction-probability", *options), code=2
    )
    assert sentence in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()
