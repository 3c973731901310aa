"""A part of a sequence that is read and not learnt: every loss leaves it out, and reads it all the
same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from auditor.plugins.trainer import TrainingRecord
from auditor.training import finetune, loss_masks, per_sample, side_by_side
from auditor.training.rarity import compute_log_perplexities
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
    written = loss_masks.apply_loss_mask(RECORD)
    assert written == (~7, ~3, 9, 4, ~11, 5) and loss_masks.remove_loss_mask(written) == TOKENS
    assert loss_masks.apply_loss_mask(TrainingRecord("x", TOKENS, "x")) == TOKENS
    rows = torch.tensor([written])
    assert loss_masks.remove_row_loss_masks(rows).tolist() == [
        list(TOKENS)
    ] and loss_masks.make_row_labels(rows).tolist() == [[-100, -100, 9, 4, -100, 5]]


def test_every_loss_is_of_the_learnt_tokens_alone() -> None:
    model = tiny().model.double()
    rows = torch.tensor([loss_masks.apply_loss_mask(RECORD)])
    expected = float(naive(model))
    assert float(finetune.compute_causal_loss(model, rows)) == pytest.approx(expected, abs=1e-12)
    assert float(side_by_side.compute_row_nlls(model, rows)[0]) == pytest.approx(
        expected, abs=1e-12
    )
    longer = [loss_masks.apply_loss_mask(RECORD), (1,) * 9]  # padding beside it changes nothing
    losses = per_sample.compute_padded_record_nlls(
        model, *per_sample.pad_examples(longer, 0, device="cpu")
    )
    assert float(losses[0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("trained", [False, True])
def test_a_frozen_head_reads_learnt_positions_alone_and_gradients_are_the_same(
    trained: bool,
) -> None:
    model = tiny().model.double().requires_grad_(True)
    head = model.get_output_embeddings()
    head.requires_grad_(trained)
    read: list[int] = []
    head.register_forward_hook(lambda module, given, made: read.append(given[0].shape[:2].numel()))
    weights = [p for p in model.parameters() if p is not head.weight and p.requires_grad]
    rows = torch.tensor([loss_masks.apply_loss_mask(RECORD), (~1, 2, ~3, ~4, 5, 6)])
    wanted = [[9, 4, 5], [2, 5, 6]]  # what follows positions (1, 2, 4) and (0, 3, 4)
    logits = model(input_ids=loss_masks.remove_row_loss_masks(rows)).logits
    nll = [
        -logits[row, at].log_softmax(-1)[:, wanted[row]].diagonal().mean()
        for row, at in enumerate([[1, 2, 4], [0, 3, 4]])
    ]
    for loss in (
        side_by_side.compute_row_nlls(model, rows).mean(),
        finetune.compute_causal_loss(model, rows),
        per_sample.compute_padded_record_nlls(
            model, loss_masks.remove_row_loss_masks(rows), loss_masks.make_row_labels(rows)
        ).mean(),
    ):
        assert float(loss.detach()) == pytest.approx(float(sum(nll).detach()) / 2, abs=1e-12)
        for found, own in zip(
            torch.autograd.grad(loss, weights),
            torch.autograd.grad(sum(nll) / 2, weights, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(found, own, atol=1e-12, rtol=1e-10)
    assert read == [12, *([12] * 3 if trained else [6] * 3)]


def test_nothing_to_learn_is_no_gradient_and_no_nan() -> None:
    model = tiny().model.requires_grad_(True)
    rows = ~torch.tensor([TOKENS])
    for loss in (
        finetune.compute_causal_loss(model, rows),
        side_by_side.compute_row_nlls(model, rows)[0],
        per_sample.compute_padded_record_nlls(
            model, *per_sample.pad_examples([tuple(rows[0].tolist())], 0, device="cpu")
        )[0],
    ):
        (gradient,) = torch.autograd.grad(loss, model.get_output_embeddings().weight)
        assert float(loss.detach()) == 0.0 and not gradient.any()


def test_packing_and_judging_read_all_of_it() -> None:
    packed = finetune.pack_blocks(
        [loss_masks.apply_loss_mask(RECORD)], 7, 0, np.random.default_rng(0)
    )
    assert packed.tolist() == [[~7, ~3, 9, 4, ~11, 5, 0]]
    public = tiny()
    assert compute_log_perplexities(public, [loss_masks.apply_loss_mask(RECORD)]) == pytest.approx(
        compute_log_perplexities(public, [TOKENS])
    )
