"""The target of real text: its loss against the full softmax, and the folders that a run reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from auditor.benchmarks.lm_extraction import LMExtraction
from auditor.core.secret_randomness import keyed_random_generator
from auditor.training.finetune import causal_loss, make_untrained_gpt_neox, pack_into_blocks
from benchmarks.checks.trust.real_text import RealTextRecipe, SampledSoftmax, build

TINY = RealTextRecipe(
    members=8, known=4, nonmembers=4, layers=1, hidden=16, heads=2, block=32, batch=4, public_epochs=1, private_epochs=2
)


@pytest.fixture(scope="module")
def blocks() -> torch.Tensor:
    return torch.from_numpy(keyed_random_generator("blocks").integers(0, 97, (3, 20)))


def test_with_every_token_the_sampled_softmax_is_the_softmax(blocks: torch.Tensor) -> None:
    model = make_untrained_gpt_neox(vocab_size=97, layers=1, hidden=16, heads=2, positions=64, end=0, seed=0)
    torch.testing.assert_close(
        SampledSoftmax(97, keyed_random_generator("a"))(model, blocks), causal_loss(model, blocks)
    )


def test_the_sampled_partition_function_is_unbiased(blocks: torch.Tensor) -> None:
    """With far fewer negatives the mean over many draws comes to the full loss, from below (log is concave)."""
    model = make_untrained_gpt_neox(vocab_size=97, layers=1, hidden=16, heads=2, positions=64, end=0, seed=0)
    sampled = SampledSoftmax(10, keyed_random_generator("b"))
    values = torch.stack([sampled(model, blocks) for _ in range(400)]).detach()
    full = causal_loss(model, blocks).detach()
    assert abs(float(values.mean() - full)) < 0.002
    assert float(values.std()) > 0


def test_packing_keeps_every_token_and_ends_every_sequence() -> None:
    sequences = [(1, 2, 3), (4, 5), (6,)]
    packed = pack_into_blocks(sequences, block=4, end=0, order=keyed_random_generator("c"))
    assert packed.shape == (3, 4)
    flat = packed.flatten().tolist()[: 6 + 3]
    assert sorted(flat) == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    text = " ".join(map(str, flat))
    assert all(" ".join(map(str, (*s, 0))) in text for s in sequences)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    for part, width in (("preprefix", 6), ("prefix", 5), ("suffix", 4)):
        np.save(folder / f"val_{part}.npy", keyed_random_generator(part).integers(0, 60, (24, width)).astype(np.uint16))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")


def test_members_known_and_nonmembers_are_disjoint_and_loadable(
    arrays: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    build(arrays, tmp_path / "tokenizer", tmp_path / "out", replace(TINY, negatives=20))
    out = tmp_path / "out"
    benchmark = LMExtraction(
        str(out / "members"), vocab_size=len(tokenizer), known=str(out / "known"), nonmembers=str(out / "nonmembers")
    )
    everyone = [s.prefix + s.suffix for s in benchmark.secrets] + [p.prefix + p.suffix for p in benchmark.known]
    assert len(everyone) == len(set(everyone)) == 16
    public, target = (AutoModelForCausalLM.from_pretrained(out / part) for part in ("public", "target"))
    assert not torch.equal(public.get_input_embeddings().weight, target.get_input_embeddings().weight)
