"""Define a lab's training configuration, which determines its weights, and check its sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from auditor.benchmarks.canaries.audit_canaries import Kind
from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError

# Carlini et al. 2019; the ADP paper's canary is "My ID is 955320".
CANARY_SPACE = CanarySpace("My ID is {digits:6}")
# Prefixes end and suffixes begin at this token, whatever their length, so all lengths attack the
# same secrets.
CUT = 24
# Follow private_ (the target) or lora_ (an ensemble) in the names of fields.
TRAINING = (
    "epochs",
    "rate",
    "batch",
    "rank",
    "alpha",
)
_LEAST = {  # otherwise 1; vocab_size: every byte and the end of text
    **dict.fromkeys(("seed", "suffix_length", "nonmembers", "others"), 0),
    **dict.fromkeys(("private_rank", "audit_canaries"), 0),
    "vocab_size": 257,
}
# otherwise 10,000: larger values are typing errors
_MOST = {"seed": 2**63 - 1, "vocab_size": 100_000, "layers": 100, "hidden": 4096, "block": 512}


@dataclass(frozen=True)
class BaseLabRecipe:
    """The settings that determine the weights of a lab's models, and the lengths of secrets.

    Every lab has these settings; the defaults are those of the small lab. The recipe's hash names
    the cache.

    seed: seed of all texts and trainings.
    block, prefix_length, suffix_length: lengths in tokens. With suffix_length 0, suffixes end with
        their records.
    repeats: tuples of three numbers: how often a record occurs in the training data, how many
        attacked records occur so often, and how many records that the attacker knows do.
    others: number of private records that occur once and are not attacked.
    nonmembers: number of records that no model is trained on.
    private_*: settings for training the attacked model. With rank 0, all parameters are trained,
        otherwise an adapter of this rank.
    members: number of models in the ensemble.
    lora_*: settings for training the ensemble's members.
    canaries: pairs of a canary's digits and its number of copies.
    audit_*: settings of further canaries, for auditing epsilon; a coin decides whether each is
        included.
    """

    longest_prefix: ClassVar[int] = CUT

    seed: int = 0
    block: int = 128
    prefix_length: int = CUT
    suffix_length: int = 16
    repeats: tuple[tuple[int, int, int], ...] = (
        (1, 160, 12),
        (4, 60, 12),
        (16, 36, 6),
        (32, 24, 4),
        (64, 20, 4),
    )
    others: int = 240
    nonmembers: int = 100
    private_epochs: int = 3
    private_rate: float = 3e-3
    private_batch: int = 4
    private_rank: int = 32  # 0: train all parameters
    private_alpha: int = 64
    members: int = 16
    lora_epochs: int = 3
    lora_rate: float = 3e-3
    lora_batch: int = 4
    lora_rank: int = 32
    lora_alpha: int = 64
    canaries: tuple[tuple[str, int], ...] = (
        ("955320", 1),
        ("280146", 4),
        ("731902", 16),
        ("440817", 64),
    )
    # further records, each included by a fair coin, which `epsilon-audit` attacks
    audit_canaries: int = 0
    audit_kind: Kind = "sampled"
    audit_length: int = 8  # words of a secret, or a third of the tokens that a model samples
    audit_times: int = 1  # copies of an included canary

    @property
    def repeat_counts(self) -> tuple[int, ...]:
        """The distinct numbers of copies of attacked records."""
        return tuple(times for times, _, _ in self.repeats)

    @property
    def target_training_options(self) -> dict[str, Any]:
        """The training options of the attacked model, keyed by option.

        Models that defenses train in the lab use the same values by default; the user can override
        them.
        """
        return {
            "epochs": self.private_epochs,
            "batch": self.private_batch,
            "learning_rate": self.private_rate,
        }

    @property
    def is_target_trained_like_members(self) -> bool:
        """True if the attacked model is an adapter on all records, trained like the members."""
        return all(
            getattr(self, f"private_{name}") == getattr(self, f"lora_{name}") for name in TRAINING
        )

    def check(self) -> None:
        """Raise AuditError for invalid sizes."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = _LEAST.get(f.name, 1)
            most = _MOST.get(f.name, 10_000)
            # f.type is a string: `from __future__ import annotations` leaves annotations as they
            # are written.
            if f.type == "int" and not least <= value <= most:
                raise AuditError(
                    f"expected a lab with {f.name} from {least:,} to {most:,}, got {value}"
                )
            if f.type == "float" and not 0 < value < math.inf:
                raise AuditError(f"expected a lab with {f.name} above 0 and finite, got {value}")
        if not 1 <= self.prefix_length <= self.longest_prefix:
            raise AuditError(
                f"expected lab prefixes of 1 to {self.longest_prefix} tokens, got "
                f"{self.prefix_length}"
            )
        if not 0 < len(set(self.repeat_counts)) == len(self.repeat_counts) or not all(
            1 <= times <= 10_000 and 1 <= attacked <= 10_000 and 0 <= known <= 10_000
            for times, attacked, known in self.repeats
        ):
            raise AuditError(
                "expected lab repeats of [times, attacked, known], each with different times, no "
                f"number above 10,000, got {self.repeats}"
            )
        if self.audit_canaries and self.audit_kind == "new-tokens" and self.private_rank:
            raise AuditError(
                "expected a lab with private_rank 0 for canaries of new tokens, got "
                f"{self.private_rank}: an adapter leaves embeddings frozen, and a new token cannot "
                "be learnt"
            )
        if len(dict(self.canaries)) < len(self.canaries):
            raise AuditError(
                f"expected each of the lab's canaries once, got {len(self.canaries)} with "
                f"{len(dict(self.canaries))} different digits: copies of equal ones add up"
            )
        for digits, count in self.canaries:
            if format_lab_canary(digits) not in CANARY_SPACE or not 0 <= count <= 10_000:
                raise AuditError(
                    "expected lab canaries of six digits, inserted 0 times or more (at most "
                    f"10,000), got {digits!r} {count} times"
                )

    def first_suffix_token_index(self, text: str, offsets: Sequence[tuple[int, int]]) -> int:
        """Return the index of the first suffix token of a record.

        offsets: the character range of each token.
        """
        return CUT

    def untrained_leading_token_count(self, text: str, offsets: Sequence[tuple[int, int]]) -> int:
        """Count the leading tokens of a text that are excluded from the training loss.

        offsets: start and end of each token, in characters of the text.
        """
        return 0


@dataclass(frozen=True)
class LabRecipe(BaseLabRecipe):
    """Hold the recipe of the small lab, with its network and public text."""

    vocab_size: int = 2048
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    # gain of the last norm, fixed in the training on public text: see
    # `Lab.train_public_model`
    norm_gain: float = 4.0
    public_records: int = 1600
    public_epochs: int = 3
    public_rate: float = 4e-3
    batch: int = 16

    def check(self) -> None:
        super().check()
        if self.hidden % self.heads:
            raise AuditError(
                f"expected a lab of width hidden divisible by heads={self.heads}, got {self.hidden}"
            )


def require_small_lab_recipe(recipe: BaseLabRecipe) -> LabRecipe:
    """Return the recipe if it is the small lab's; raise AuditError for any other lab."""
    if not isinstance(recipe, LabRecipe):
        raise AuditError(
            "expected the small lab, which trains a masked LM too, got one on an existing model"
        )
    return recipe


def format_lab_canary(digits: str) -> str:
    return f"{CANARY_SPACE.common_prefix}{digits}"
