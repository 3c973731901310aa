"""The Goldfish loss (Hans et al. 2024): some tokens have no loss, the same ones wherever a passage recurs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.options import require_options_at_least
from auditor.plugins.trainer import TrainingJob
from auditor.training import loss_masks
from auditor.training.variants import Variant


@dataclass(frozen=True)
class Goldfish(Variant):
    """Fine-tune with the Goldfish loss: one token in `k` has no loss, by a hash of those before it; no claim.

    mask: `hash` leaves out token i where a hash of the `width` tokens before it is 0 modulo k (Hans et al. 2024, Sec.
    3.1; k=4 and width 13 are theirs), so that a passage is masked alike wherever it recurs; `static` leaves out every
    k-th token of a record. A record's first `width` tokens have no such context and keep their loss. (The authors'
    code hashes the window that ends with the token itself; this is what the paper writes.)
    """

    name: ClassVar[str] = "goldfish"
    title: ClassVar[str] = "Goldfish loss"
    k: int = 4
    width: int = 13
    mask: Literal["hash", "static"] = "hash"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 2:
            raise AuditError(f"expected k >= 2 (k=1 would leave no token to learn), got {self.k}")
        require_options_at_least(self, 1, "width")

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        before = [loss_masks.apply_loss_mask(record) for record in job.records]
        after = [self.mask_dropped_tokens(sequence) for sequence in before]
        had, left = (sum(token >= 0 for sequence in some for token in sequence) for some in (before, after))
        if had and left == had:
            raise AuditError(
                f"expected records of more than width={self.width} tokens for the Goldfish loss, got none in which it "
                "leaves a token out"
            )
        return after, (f"the Goldfish loss leaves out {had - left:,} of {had:,} tokens ({1 - left / had:.1%})",)

    def mask_dropped_tokens(self, sequence: Tokens) -> Tokens:
        """The sequence, what has no loss under the mask written as `training.loss_masks` does."""
        dropped = set(range(self.k - 1, len(sequence), self.k))
        if self.mask == "hash":
            # Of the ids themselves: a passage is hashed alike whatever of it was masked before.
            dropped = set(self._positions_dropped_by_hash(loss_masks.remove_loss_mask(sequence)))
        return tuple(~token if i in dropped and token >= 0 else token for i, token in enumerate(sequence))

    def _positions_dropped_by_hash(self, tokens: Tokens) -> Iterator[int]:
        ids = np.array(tokens, dtype="<i8").tobytes()  # little-endian: one hash on every machine
        for i in range(self.width, len(tokens)):
            # 8 bytes an id; the window ends before token i.
            digest = hashlib.blake2b(ids[8 * (i - self.width) : 8 * i], digest_size=8).digest()
            if int.from_bytes(digest, "little") % self.k == 0:
                yield i
