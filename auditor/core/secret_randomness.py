"""Randomness that belongs to the secret: every draw is a pure function of (seed, target, sampling
recipe, secret).

Results therefore do not depend on batch size, on the number of workers or on where a run was
interrupted.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

# uniforms a draw may use: the token; for a randomised defense also the subset size and the member
CHANNELS = 3


def keyed_random_generator(*key: str | int) -> np.random.Generator:
    """A counter-based generator for this key. Equal keys give equal streams on every machine."""
    # with the type, as 1 and "1" are two keys; the unit separator keeps ("a", "bc") from ("ab",
    # "c")
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def secret_uniform_draws(samples: int, length: int, *key: str | int) -> NDArray[np.float64]:
    """(samples, length, CHANNELS) uniforms in [0, 1) of one secret; the first k samples are those
    of a smaller run."""
    return keyed_random_generator(*key).random((samples, length, CHANNELS))
