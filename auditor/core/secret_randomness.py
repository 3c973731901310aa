"""Derive the random numbers of a secret by pure functions of (seed, target, recipe, secret).

Results therefore do not depend on batch size, number of workers, or interruptions of a run.
"""

from __future__ import annotations

import hashlib

import numpy as np

from auditor.core.arrays import Floats

# Uniforms of a draw: the token; for a randomised defense also the subset size and the member.
CHANNELS = 3


def make_keyed_generator(*key: str | int) -> np.random.Generator:
    """Return a counter-based random generator for a key.

    Equal keys give equal streams on every machine.
    """
    # With the type, because 1 and "1" are two keys; the unit separator separates ("a", "bc") from
    # ("ab", "c").
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_secret_uniforms(samples: int, length: int, *key: str | int) -> Floats:
    """Return (samples, length, CHANNELS) uniform numbers in [0, 1) for a secret.

    A larger number of samples only adds samples: the first k samples do not change. key: seed,
    target, sampling recipe and secret.
    """
    return make_keyed_generator(*key).random((samples, length, CHANNELS))
