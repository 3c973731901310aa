"""Six more ways of using Opacus, each with the claim that its own accountant makes.

audit dp-loop examples/dp_loop/opacus_ways.py --function with_epsilon
audit dp-loop examples/dp_loop/opacus_ways.py --function ghost
audit dp-loop examples/dp_loop/opacus_ways.py --function small_batches
audit dp-loop examples/dp_loop/opacus_ways.py --function shuffled
audit dp-loop examples/dp_loop/opacus_ways.py --function lora
audit dp-loop examples/dp_loop/opacus_ways.py --function weighted   # broken
"""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, WeightedRandomSampler

NOISE, CLIP, EPOCHS, DELTA = 1.0, 1.0, 5, 1e-3


def padded(rows):
    if not rows:  # a batch that Poisson sampling left empty
        return torch.zeros(0, 2, dtype=torch.long)
    return pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)


def parts(model, records, **more):
    loader = DataLoader(records, batch_size=8, collate_fn=padded, **more)
    trained = [p for p in model.parameters() if p.requires_grad]
    return {"module": model, "optimizer": torch.optim.SGD(trained, lr=0.05), "data_loader": loader}


def fit(private, optimizer, loader, criterion):
    for ids in loader:
        optimizer.zero_grad()
        if len(ids):
            logits = private(input_ids=ids).logits[:, :-1]
            shape = logits.shape
            criterion(logits.flatten(0, 1), ids[:, 1:].flatten(), shape).backward()
        optimizer.step()


def mean_by_record(logits, targets, shape):
    losses = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="none").view(
        shape[:2]
    )
    return (losses.sum(1) / targets.view(shape[:2]).ne(0).sum(1)).mean()


def claim(engine, **more):
    """What Opacus's accountant counted. The number of records is told by its noise, so it is
    public."""
    return {"engine": engine, "max_grad_norm": CLIP, "delta": DELTA, "public_size": True, **more}


def with_epsilon(model, records):
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        **parts(model, records),
        target_epsilon=4.0,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=CLIP,
    )
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, mean_by_record)
    return model, claim(engine)


def ghost(model, records):
    engine = PrivacyEngine()
    private, optimizer, criterion, loader = engine.make_private(
        **parts(model, records),
        criterion=nn.CrossEntropyLoss(ignore_index=0),
        grad_sample_mode="ghost",
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
    )
    for _ in range(EPOCHS):
        fit(
            private,
            optimizer,
            loader,
            lambda logits, targets, shape: criterion(logits, targets, shape=shape),
        )
    return model, claim(engine)


def small_batches(model, records):
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        **parts(model, records), noise_multiplier=NOISE, max_grad_norm=CLIP
    )
    for _ in range(EPOCHS):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as smaller:
            fit(private, optimizer, smaller, mean_by_record)
    return model, claim(engine)


def shuffled(model, records):
    """Without Poisson sampling. Opacus's accountant tells Poisson sampling's epsilon all the same:
    leave it out."""
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        **parts(model, records, shuffle=True),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
    )
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, mean_by_record)
    return model, claim(engine, sampling="shuffled", epsilon=None)


def lora(model, records):
    """PEFT's layers inside the model's own (Opacus's issues 820 and 827)."""
    adapted = get_peft_model(
        model,
        LoraConfig(r=4, target_modules=["query_key_value", "dense_h_to_4h"], task_type="CAUSAL_LM"),
    ).train()
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        **parts(adapted, records), noise_multiplier=NOISE, max_grad_norm=CLIP
    )
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, mean_by_record)
    return model, claim(engine)


def weighted(model, records):
    """Draws by weights, with replacement (issue 813): one record several times in a batch, which no
    clipping bounds.

    With Poisson sampling Opacus drops the sampler, but for its length, and tells the epsilon of
    what it then does.
    """
    sampler = WeightedRandomSampler(torch.linspace(1, 4, len(records)), num_samples=len(records))
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        **parts(model, records, sampler=sampler),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
    )
    for _ in range(EPOCHS):
        fit(private, optimizer, loader, mean_by_record)
    return model, claim(engine, sampling="shuffled", epsilon=None)
