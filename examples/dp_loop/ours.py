"""This project's own private trainers, as its tests crash-test them.

    audit dp-loop examples/dp_loop/ours.py --function dp_sgd
    audit dp-loop examples/dp_loop/ours.py --function adp_sound

Members of a PMixED ensemble claim nothing (its promise is of the draws of `--defense pmixed`), so
none is here.
"""

import copy

import torch

from auditor.models.huggingface import HuggingFaceModel
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, fit_privately
from auditor.training.rarity import compute_clipping_shares

NOISE, CLIP, BATCH, STEPS, RATE = 1.0, 1.0, 8, 30, 1 / 6
CLAIM = {
    "noise_multiplier": NOISE,
    "max_grad_norm": CLIP,
    "sample_rate": RATE,
    "steps": STEPS,
    "delta": 1e-3,
}


def fit(model, examples, shares=None):
    sampler = PoissonSampler(len(examples), RATE, f"{torch.initial_seed()}")
    recipe = PrivateRecipe(NOISE, CLIP, STEPS, BATCH, 0.05, "sgd", physical_batch=100)
    fit_privately(model, examples, sampler, recipe, pad=0, shares=shares)
    return model, CLAIM


def dp_sgd(model, records):
    return fit(model, [row["input_ids"] for row in records])


def adp_sound(model, records):
    """Clipped harder the rarer a public model finds a record, here the model before its training.

    Half of the records keep the whole clipping norm. Were all clipped harder, the test could not
    tell: no record would reach as far as the noise is calibrated for.
    """
    examples = [row["input_ids"] for row in records]
    public = HuggingFaceModel(copy.deepcopy(model))
    return fit(model, examples, compute_clipping_shares(public, examples, 0.5, 110.0, 250.0))
