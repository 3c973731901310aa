"""Opacus as its own tutorials use it: `audit dp-loop examples/dp_loop/with_opacus.py` finds it
broken (Opacus 1.6.0).

The loss is the mean of each record's own mean: a mean over all tokens of the batch would weigh a
record by how long the others are, and no clipping bounds that. Opacus's noise is divided by
int(len(data) * sample rate), so its size tells how many records there are; if their number is no
secret, say so in the claim: "public_size": True.
"""

import torch
from opacus import PrivacyEngine
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

NOISE, CLIP, EPOCHS = 1.0, 1.0, 5


def padded(rows):
    if not rows:  # a batch that Poisson sampling left empty
        return torch.zeros(0, 2, dtype=torch.long)
    return pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)


def train(model, records):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(records, batch_size=8, collate_fn=padded)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
    )
    steps = 0
    for _ in range(EPOCHS):
        for ids in loader:
            optimizer.zero_grad()
            if len(ids):
                logits, targets = private(input_ids=ids).logits[:, :-1], ids[:, 1:]
                losses = cross_entropy(
                    logits.transpose(1, 2), targets, ignore_index=0, reduction="none"
                )
                (losses.sum(1) / targets.ne(0).sum(1)).mean().backward()
            optimizer.step()
            steps += 1
    claim = {
        "noise_multiplier": NOISE,
        "max_grad_norm": CLIP,
        "sample_rate": 1 / len(loader),
        "steps": steps,
    }
    return model, {**claim, "delta": 1e-3}
