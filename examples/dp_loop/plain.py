"""DP-SGD in plain PyTorch, as a training that `audit dp-loop examples/dp_loop/plain.py` tests."""

import torch
from torch.nn.functional import cross_entropy

NOISE, CLIP, BATCH, STEPS, RATE = 1.0, 1.0, 8, 30, 1 / 6


def train(model, records):
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for _ in range(STEPS):
        total = [torch.zeros_like(p) for p in parameters]
        for record in records:
            if torch.rand(()) >= RATE:  # Poisson sampling: each record by a coin of its own
                continue
            ids = torch.tensor([record["input_ids"]])
            loss = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
            gradient = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.norm() for g in gradient]).norm()
            for whole, g in zip(total, gradient, strict=True):
                whole += g * (CLIP / norm).clamp(max=1.0)
        for p, whole in zip(parameters, total, strict=True):
            p.grad = (whole + NOISE * CLIP * torch.randn_like(p)) / BATCH
        optimizer.step()
    claim = {
        "noise_multiplier": NOISE,
        "max_grad_norm": CLIP,
        "sample_rate": RATE,
        "steps": STEPS,
        "delta": 1e-3,
    }
    return model, {**claim, "epsilon": 4.5}
