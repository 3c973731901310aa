"""opake's functions for clipping and noise, with an optimizer of torch's; needs `pip install
opake`.

`audit dp-loop examples/dp_loop/with_opake.py`
"""

import torch
from opake.api.engine.functional import make_functional
from opake.api.engine.random import key
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from torch.nn.functional import cross_entropy

NOISE, CLIP, BATCH, STEPS, RATE = 1.0, 1.0, 8, 30, 1 / 6


def train(model, records):
    width = max(len(row["input_ids"]) for row in records)
    padded = torch.tensor(
        [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in records]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run, _ = make_functional(model)

    def loss(weights, ids):
        logits = run(weights, input_ids=ids.unsqueeze(0)).logits[0, :-1]
        return cross_entropy(logits, ids[1:], ignore_index=0)

    gradient, clipping = clipped_grad(loss, argnums=0, batch_argnums=(1,), clipping_norm=CLIP)
    noise, state = gaussian_noise(noise_multiplier=NOISE, key=key(torch.initial_seed()))
    for _ in range(STEPS):
        drawn = padded[torch.rand(len(padded)) < RATE]
        weights = tuple(p.detach() for p in model.parameters())
        summed, clipping = gradient(weights, drawn, state=clipping)
        noisy, state = noise(summed, state)
        for p, released in zip(model.parameters(), noisy.pytree, strict=True):
            p.grad = released / BATCH
        optimizer.step()
    claim = {
        "noise_multiplier": NOISE,
        "max_grad_norm": CLIP,
        "sample_rate": RATE,
        "steps": STEPS,
        "delta": 1e-3,
    }
    return model, claim
