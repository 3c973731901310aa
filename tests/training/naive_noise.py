"""The noise of `auditor/training/noise.py` by its definition alone: RFC 8439 in numpy, Box-Muller
word by word."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray


def chacha20(key: bytes, nonce: bytes, blocks: int) -> bytes:
    """The key stream, 64 bytes a block (RFC 8439, 2.3 and 2.4), the counter from 0."""
    constant = np.frombuffer(b"expand 32-byte k", "<u4")
    state = np.zeros((16, blocks), np.uint32)
    state[:4], state[4:12] = constant[:, None], np.frombuffer(key, "<u4")[:, None]
    state[12], state[13:] = np.arange(blocks), np.frombuffer(nonce, "<u4")[:, None]
    x = state.copy()

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for first, second, third, bits in (
            (a, b, d, 16),
            (c, d, b, 12),
            (a, b, d, 8),
            (c, d, b, 7),
        ):
            x[first] += x[second]
            x[third] ^= x[first]
            x[third] = (x[third] << np.uint32(bits)) | (x[third] >> np.uint32(32 - bits))

    for _ in range(10):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            quarter(column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return (x + state).T.astype("<u4").tobytes()


class NaiveNoise:
    """Standard Gaussian values of one step, in the order of the parameters."""

    def __init__(self, key: str, step: int, words: int) -> None:
        secret = hashlib.sha256(b"noise\x1f" + key.encode()).digest()
        stream = chacha20(secret, step.to_bytes(12, "little"), -(-words // 8))
        self.words, self.at = np.frombuffer(stream, "<u8"), 0

    def normal(self, count: int) -> NDArray[np.float64]:
        drawn = []
        while len(drawn) < count:
            first, second = (
                (int(word) % 2**63 + 0.5) / 2**63 for word in self.words[self.at : self.at + 2]
            )
            radius = math.sqrt(-2 * math.log(first))
            drawn += [
                radius * math.cos(2 * math.pi * second),
                radius * math.sin(2 * math.pi * second),
            ]
            self.at += 2
        return np.array(drawn[:count])
