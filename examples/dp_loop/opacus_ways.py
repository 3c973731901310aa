"""Four more ways of using Opacus, each with the claim that its own accountant makes.

audit dp-loop examples/dp_loop/opacus_ways.py --function with_epsilon
audit dp-loop examples/dp_loop/opacus_ways.py --function ghost
audit dp-loop examples/dp_loop/opacus_ways.py --function small_batches
audit dp-loop examples/dp_loop/opacus_ways.py --function shuffled
"""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

NOISE, CLIP, EPOCHS, DELTA = 1.0, 1.0, 5, 1e-3


def padded(rows):
    if not rows:  # a batch that Poisson sampling left empty
        return torch.zeros(0, 2, dtype=torch.long)
    return pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)


def parts(model, records, shuffle=False):
    loader = DataLoader(records, batch_size=8, collate_fn=padded, shuffle=shuffle)
    return {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "data_loader": loader}


def fit(private, optimizer, loader, criterion):
    for ids in loader:
        optimizer.zero_grad()
        if len(ids):
            logits = private(input_ids=ids).logits[:, :-1]
            shape = logits.shape
            criterion(logits.flatten(0, 1), ids[:, 1:].flatten(), shape).backward()
        optimizer.step()


def mean_by_record(logits, targets, shape):
    losses = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="none").view(shape[:2])
    return (losses.sum(1) / targets.view(shape[:2]).ne(0).sum(1)).mean()


def claim(engine, **more):
    """What Opacus's accountant counted. The number of records is told by its noise, so it is public."""
    return {"engine": engine, "max_grad_norm": CLIP, "delta": DELTA, "public_size": True, **more}


def with_epsilon(model, records):
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        **parts(model, records), target_epsilon=4.0, target_delta=DELTA, epochs=EPOCHS, max_grad_norm=CLIP
    )
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, mean_by_record)
    return model, claim(engine)


def ghost(model, records):
    engine = PrivacyEngine()
    private, optimizer, criterion, loader = engine.make_private(
        **parts(model, records), criterion=nn.CrossEntropyLoss(ignore_index=0), grad_sample_mode="ghost",
        noise_multiplier=NOISE, max_grad_norm=CLIP,
    )  # fmt: skip
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, lambda logits, targets, shape: criterion(logits, targets, shape=shape))
    return model, claim(engine)


def small_batches(model, records):
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        **parts(model, records), noise_multiplier=NOISE, max_grad_norm=CLIP
    )
    for _ in range(EPOCHS):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as smaller:
            fit(private, optimizer, smaller, mean_by_record)
    return model, claim(engine)


def shuffled(model, records):
    """Without Poisson sampling. Opacus's accountant tells Poisson sampling's epsilon all the same: leave it out."""
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        **parts(model, records, shuffle=True), noise_multiplier=NOISE, max_grad_norm=CLIP, poisson_sampling=False
    )
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, mean_by_record)
    return model, claim(engine, sampling="shuffled", epsilon=None)
