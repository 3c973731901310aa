"""Fine-tuning by hand: what a fresh model is, and that each epoch reads every batch of it once."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training.finetune import (
    compute_causal_loss,
    make_untrained_gpt_neox,
    train_packed_blocks,
)
from tests.zoo import families as zoo


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "trocr", "xlm"])
def test_the_loss_is_that_of_the_next_tokens(family: str) -> None:
    model = zoo.tiny(family)
    blocks = torch.randint(3, zoo.VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))
    log_probs = model(input_ids=blocks).logits[:, :-1].log_softmax(-1)
    expected = -log_probs.gather(-1, blocks[:, 1:, None]).mean()
    torch.testing.assert_close(compute_causal_loss(model, blocks), expected)


SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "layers": 1,
    "hidden": 8,
    "heads": 2,
    "positions": 16,
    "end": 0,
}


def test_an_untrained_model_reads_and_writes_by_one_matrix_that_its_seed_makes() -> None:
    model, again, other = (make_untrained_gpt_neox(**SIZES, seed=seed) for seed in (1, 1, 2))
    own = model.get_input_embeddings().weight
    assert own is model.get_output_embeddings().weight and own.shape == (17, 8)
    assert torch.equal(own, again.get_input_embeddings().weight)
    assert not torch.equal(own, other.get_input_embeddings().weight)
    assert (
        model.config.bos_token_id,
        model.config.eos_token_id,
        model.config.intermediate_size,
    ) == (0, 0, 32)


def test_an_epoch_reads_every_token_once_and_is_told_when_it_ends() -> None:
    """Of 10 blocks of 4 tokens, 3 a step: 4 steps an epoch, in an order of its own."""
    # and the end of each
    sequences = [tuple(range(1 + 3 * i % 14, 4 + 3 * i % 14)) for i in range(10)]
    read, epochs = list[Tensor](), list[tuple[int, int]]()

    def loss(model: Any, blocks: Tensor) -> Tensor:
        read.append(blocks)
        found: Tensor = model(input_ids=blocks, labels=blocks).loss
        return found

    train_packed_blocks(
        make_untrained_gpt_neox(**SIZES, seed=0),
        sequences,
        epochs=3,
        rate=1e-3,
        batch=3,
        block=4,
        end=0,
        order=make_keyed_generator("order"),
        loss=loss,
        progress=lambda done: epochs.append((done, len(read))),
    )
    assert epochs == [(1, 4), (2, 8), (3, 12)]
    told = np.bincount(np.concatenate(sequences), minlength=17)
    told[0] = 10
    orders = [torch.cat(read[start : start + 4]).flatten().tolist() for start in (0, 4, 8)]
    assert all(np.bincount(order, minlength=17).tolist() == told.tolist() for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_a_training_that_goes_on_drops_out_what_it_would_have(tmp_path: Path) -> None:
    sequences = [tuple(range(1, 9))] * 6
    checkpoint = TrainerCheckpoint(tmp_path / "checkpoint.pt")

    def train(stop_after: int, checkpoint: TrainerCheckpoint | None) -> dict[str, Tensor]:
        torch.manual_seed(0)  # as `audit train` does, each time
        size: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=17, **size, bos_token_id=0, eos_token_id=0))
        assert model.config.resid_pdrop > 0

        def stop(done: int) -> None:
            if done == stop_after:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            train_packed_blocks(
                model,
                sequences,
                epochs=3,
                rate=1e-2,
                batch=2,
                block=4,
                end=0,
                order=make_keyed_generator("order"),
                progress=stop,
                checkpoint=checkpoint,
            )
        return model.state_dict()

    expected = train(4, None)
    train(1, checkpoint)
    state = checkpoint.load()
    assert state is not None
    checkpoint.save({name: value for name, value in state.items() if name != "random"})
    with pytest.raises(AuditError, match="got one of another, without random: delete"):
        train(4, checkpoint)
    checkpoint.save(state)
    resumed = train(4, checkpoint)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
