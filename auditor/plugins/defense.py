"""Define the base of defenses, their inputs, and the causes credited with their effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from auditor.core.errors import AuditError
from auditor.core.nouns import Claim, Tokens
from auditor.models.base import LanguageModel
from auditor.models.masked import MaskedModel
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord


@dataclass(frozen=True)
class Scenario:
    """The inputs of a defense: the models around the target, and the queries to answer."""

    target: LanguageModel
    public: LanguageModel | None
    ensemble: Any  # auditor.models.ensemble.Ensemble, or None
    queries: int  # tokens the text-only row will draw
    answer_length: int  # tokens of one answer
    trained: TrainedModel | None = None
    # An adapter on all the ensemble's records, by its members' recipe.
    whole: LanguageModel | None = None
    # The texts before its answers, and the private records that begin with them.
    prompts: tuple[Prompt, ...] = ()
    # The target's training records known to the audit, without repeats.
    corpus: Sequence[Tokens] = ()
    beside: LanguageModel | None = None  # shown next to a model that was to forget


@dataclass(frozen=True)
class Prompt:
    """The text before the answer to a secret, and the private record that begins with it.

    Both are tokenised as a model reads a text. secret: its id. record: () for a text that is not a
    private record.
    """

    secret: str
    given: Tokens
    record: Tokens = ()


@dataclass(frozen=True)
class TrainedModel:
    """A model trained to leak less, and its promise (`privacy.json`), if any.

    canaries: records of its training for an audit, if it was trained for an audit. told: notes of
    its trainer.
    """

    model: LanguageModel
    privacy: PrivacyRecord | None
    canaries: GradientCanaries | None = None
    told: tuple[str, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """Return sentences that a reader must know about the training."""
        return self.told if self.privacy is None else self.privacy.notes()


@dataclass(frozen=True)
class MaskedScenario:
    """A `Scenario` around a masked LM. queries: maximum number of gaps in a text."""

    target: MaskedModel
    public: MaskedModel | None
    queries: int


@dataclass(frozen=True)
class Defense:
    """Base of all defenses: `protect` returns a model around others, `claim` the promise.

    `needs` names the required parts of the scenario besides the target: "public", "ensemble",
    "trained", "whole", "records", "corpus".
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # title in tables; "": its name
    needs: ClassVar[tuple[str, ...]] = ()
    claims: ClassVar[str] = "none"  # one line for `audit list`
    # Whether it is right only in float32, the meaning of `--dtype auto` then.
    float32: ClassVar[bool] = False
    # Whether it is a form in which the model is deployed: `--forms` may name it.
    form: ClassVar[bool] = False

    @property
    def ensemble_folder(self) -> str:
        """The folder of adapters in its option `ensemble`; "" in the lab, which trains them."""
        folder: str = getattr(self, "ensemble", "")
        return folder

    @property
    def required_member_count(self) -> int | None:
        """The required number of ensemble members; None: any number."""
        return None

    @property
    def model_folder(self) -> str:
        """The folder of the trained model in its option `model`; "" if none: the lab trains it."""
        folder: str = getattr(self, "model", "")
        return folder

    def protect(self, scenario: Scenario) -> LanguageModel:
        raise NotImplementedError

    def claim(self, scenario: Scenario, n_tokens: int) -> Claim | None:
        """Return the promise, after `n_tokens` drawn tokens; None without a promise."""
        return None

    def protect_masked(self, scenario: MaskedScenario) -> tuple[MaskedModel, Claim | None]:
        """Return `protect` and `claim` for a masked LM.

        Raises AuditError if the defense does not support masked LMs.
        """
        raise AuditError(
            f"expected a causal LM behind {self.name}, which draws token by token, got a masked one"
        )

    def fixed_token_budget(self, scenario: Scenario) -> QueryBudget | None:
        """Return the fixed number of tokens that this defense answers; None: all of the row."""
        return None

    def budget_lots(self, scenario: Scenario) -> Mapping[str, int]:
        """Return the number of the budget that pays for each secret id; empty: a single budget.

        Lots have disjoint private data, so each is accounted separately: a claim covers T tokens of
        any lot.
        """
        return {}

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        """Return sentences on the set-up of the defense that a reader of every row must know."""
        return ()

    def cause_chain(self) -> tuple[Cause, ...]:
        """Return the chain of rows from the undefended model, each with one more change.

        A run shows these rows next to this defense's row and credits each change with its part of
        the reduction. Rows after the defense's row are not part of its effect: they show the
        leakage with still less private data.
        """
        return ()


@dataclass(frozen=True)
class Cause:
    """A step of a defense's chain: the only change of its row compared with the row before.

    row: the control shown for it; None: the defense itself. needs: the user input that a missing
    row requires.
    """

    name: str  # "splitting"
    # The difference, as the continuation of the name: "splitting: each adapter sees one shard
    # only".
    changes: str
    row: Defense | None = None
    needs: str = ""


@dataclass(frozen=True)
class QueryBudget:
    """A fixed allowance of drawn tokens; after it, the row stops or the public model answers."""

    tokens: int
    on_exhaustion: Literal["stop", "public"]


def count_largest_lot(n_drawn: Mapping[tuple[str, str], int], lots: Mapping[str, int]) -> int:
    """Return the tokens of the largest lot, or of all together without lots.

    n_drawn: by (recipe, secret).
    """
    tokens_by_lot: Counter[int | None] = Counter()
    for (_, secret), tokens in n_drawn.items():
        tokens_by_lot[lots.get(secret)] += tokens
    return max(tokens_by_lot.values(), default=0)
