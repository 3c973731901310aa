"""A part of a sequence that is read and not learnt: every loss leaves it out, and reads it all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from auditor.plugins.trainer import TrainingRecord
from auditor.training import finetune, masks, per_sample, side_by_side
from auditor.training.rarity import log_perplexities
from tests.conftest import tiny

TOKENS, LEARNT = (7, 3, 9, 4, 11, 5), (False, False, True, True, False, True)
RECORD = TrainingRecord("x", TOKENS, "x", LEARNT)


def naive(model: torch.nn.Module) -> Tensor:
    """Mean nll of the learnt tokens but the first, each from a forward of its own."""
    nll = []
    for at in range(1, len(TOKENS)):
        if LEARNT[at]:
            logits = model(input_ids=torch.tensor([TOKENS[:at]])).logits[0, -1]
            nll.append(-logits.log_softmax(-1)[TOKENS[at]])
    return torch.stack(nll).mean()


def test_a_sequence_says_what_is_learnt() -> None:
    written = masks.sequence(RECORD)
    assert written == (~7, ~3, 9, 4, ~11, 5) and masks.seen(written) == TOKENS
    assert masks.sequence(TrainingRecord("x", TOKENS, "x")) == TOKENS
    rows = torch.tensor([written])
    assert masks.read(rows).tolist() == [list(TOKENS)] and masks.labels(rows).tolist() == [[-100, -100, 9, 4, -100, 5]]


def test_every_loss_is_of_the_learnt_tokens_alone() -> None:
    model = tiny().model
    rows = torch.tensor([masks.sequence(RECORD)])
    expected = float(naive(model))
    assert float(finetune.causal_loss(model, rows)) == pytest.approx(expected, abs=1e-6)
    assert float(side_by_side.row_losses(model, rows)[0]) == pytest.approx(expected, abs=1e-6)
    longer = [masks.sequence(RECORD), (1,) * 9]  # padding beside it changes nothing
    losses = per_sample.record_losses(model, *per_sample.padded(longer, 0))
    assert float(losses[0]) == pytest.approx(expected, abs=1e-5)


def test_nothing_to_learn_is_no_gradient_and_no_nan() -> None:
    model = tiny().model.requires_grad_(True)
    rows = ~torch.tensor([TOKENS])
    for loss in (
        finetune.causal_loss(model, rows),
        side_by_side.row_losses(model, rows)[0],
        per_sample.record_losses(model, *per_sample.padded([tuple(rows[0].tolist())], 0))[0],
    ):
        (gradient,) = torch.autograd.grad(loss, model.get_output_embeddings().weight)
        assert float(loss.detach()) == 0.0 and not gradient.any()


def test_packing_and_judging_read_all_of_it() -> None:
    packed = finetune.pack([masks.sequence(RECORD)], 7, 0, np.random.default_rng(0))
    assert packed.tolist() == [[~7, ~3, 9, 4, ~11, 5, 0]]
    public = tiny()
    assert log_perplexities(public, [masks.sequence(RECORD)]) == pytest.approx(log_perplexities(public, [TOKENS]))
