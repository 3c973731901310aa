"""A device is held against the processor in all that an audit rests on: the check itself, and a GPU
where one is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auditor.core.plan_parts import LoadingOptions
from auditor.models.loading import load_causal_lm
from tests.conftest import save_tiny
from validation.speed import accelerator
from validation.speed.accelerator import PARTS
from validation.speed.sheet import Bench

TEXTS = torch.randint(1, 257, (24, 48), generator=torch.Generator().manual_seed(0)).tolist()


def bench(folder: Path, device: str = "cpu", shift: float = 0.0) -> Bench:
    """Of one tiny model, whose weights are moved by so much."""
    save_tiny(folder)
    model = load_causal_lm(str(folder), LoadingOptions(device=device))
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(shift * torch.randn_like(parameter))
    return Bench(model, [tuple(text) for text in TEXTS], folder)


def test_a_model_agrees_with_itself_and_with_no_other(tmp_path: Path) -> None:
    own, other = bench(tmp_path), bench(tmp_path, shift=0.05)
    assert all(one.holds for one in accelerator.compared((own, own), tmp_path, 4, PARTS))
    apart = {
        one.what for one in accelerator.compared((own, other), tmp_path, 4, PARTS) if not one.holds
    }
    assert {"exact probability", "8 samples a prefix", "a tuned soft prompt's losses"} <= apart


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_gpu_gives_what_the_processor_gives(tmp_path: Path) -> None:
    found = list(
        accelerator.compared((bench(tmp_path), bench(tmp_path, "cuda")), tmp_path, 4, PARTS)
    )
    assert len(found) == 15 and [one for one in found if not one.holds] == []
