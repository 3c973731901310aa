"""Derive a secret's random numbers from (seed, target, recipe, secret), by pure functions.

So results do not depend on batch size, number of workers, or interruptions of a run.
"""

from __future__ import annotations

import hashlib

import numpy as np

from auditor.core.arrays import Floats

# Uniforms of a draw: the token; for a randomised defense also the subset size and the member.
CHANNELS = 3


def make_keyed_generator(*key: str | int) -> np.random.Generator:
    """Return a counter-based random generator for a key.

    The same key gives the same stream on every machine.
    """
    # With the type, because 1 and "1" are two keys; the unit separator separates ("a", "bc") from
    # ("ab", "c").
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_secret_uniforms(samples: int, length: int, *key: str | int) -> Floats:
    """Return uniform numbers in [0, 1) for a secret, of shape (samples, length, CHANNELS).

    Each token of each sample gets CHANNELS numbers: one draws the token, and the others serve
    defenses that make random choices. The numbers of the first samples do not change if more
    samples are drawn. `key` is the seed, target, sampling recipe and secret.
    """
    return make_keyed_generator(*key).random((samples, length, CHANNELS))
