"""Define the base class of defenses, their inputs, and the controls that explain their effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from auditor.core.errors import AuditError
from auditor.core.nouns import Claim, Tokens
from auditor.models.base import LanguageModel
from auditor.models.masked import MaskedModel
from auditor.plugins.options import Configured
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord


@dataclass(frozen=True)
class Scenario:
    """Inputs of a defense: the attacked model, models that it may use, and the queries.

    Attributes:
        target: the attacked model.
        public: a public model.
        ensemble: an `Ensemble` of private members, or None.
        queries: number of tokens that the text-only results will draw.
        answer_length: number of tokens in one answer.
        trained: a model trained by the defense.
        whole: an adapter trained like a member, but on all records of the ensemble.
        prompts: for each secret, the text before its answer, and the private record that starts
            with this text.
        corpus: the training records known to the audit, without repeats.
        beside: a model to show next to a model that was trained to forget.
    """

    target: LanguageModel
    public: LanguageModel | None
    ensemble: Any
    queries: int
    answer_length: int
    trained: TrainedModel | None = None
    whole: LanguageModel | None = None
    prompts: tuple[Prompt, ...] = ()
    corpus: Sequence[Tokens] = ()
    beside: LanguageModel | None = None


@dataclass(frozen=True)
class Prompt:
    """The text before the answer to a secret, tokenised like model input.

    Attributes:
        secret: id of the secret.
        given: tokens of the text.
        record: tokens of the private record that starts with the text; () if there is none.
    """

    secret: str
    given: Tokens
    record: Tokens = ()


@dataclass(frozen=True)
class TrainedModel:
    """A model trained to leak less, and its privacy claim (`privacy.json`), if any.

    `canaries` holds the scores of gradient canaries in the training, for an audit. `told` holds the
    trainer's notes. `tokens_after` holds the tokens that follow every record in the training; None
    if unknown.
    """

    model: LanguageModel
    privacy: PrivacyRecord | None
    canaries: GradientCanaries | None = None
    told: tuple[str, ...] = ()
    tokens_after: Tokens | None = None

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the training that a reader must know."""
        if self.privacy is None:
            return self.told
        return self.privacy.notes()


@dataclass(frozen=True)
class MaskedScenario:
    """Inputs of a defense of a masked LM.

    `target` is the attacked model, and `public` a public model. `queries` is the number of masked
    tokens in the text that has the most; the model predicts each of them.
    """

    target: MaskedModel
    public: MaskedModel | None
    queries: int


@dataclass(frozen=True)
class Defense(Configured):
    """Base class of all defenses: `protect` returns the defended model, `claim` its privacy claim.

    `needs` lists the fields of the `Scenario` that must be given besides the target: "public",
    "ensemble", "trained", "whole", "records", "corpus".
    """

    needs: ClassVar[tuple[str, ...]] = ()
    claims: ClassVar[str] = "none"  # one line for `audit list`
    # Whether it is valid only in float32, which `--dtype auto` then means.
    float32: ClassVar[bool] = False
    # Whether it is a form in which the model is deployed: `--forms` may name it.
    form: ClassVar[bool] = False

    @property
    def ensemble_folder(self) -> str:
        """Folder of adapters in the option `ensemble`; "" if the lab trains the adapters itself."""
        folder: str = getattr(self, "ensemble", "")
        return folder

    @property
    def required_member_count(self) -> int | None:
        """Required number of ensemble members; None for any number."""
        return None

    @property
    def model_folder(self) -> str:
        """Folder of a trained model in the option `model`; "" if the lab trains the model."""
        folder: str = getattr(self, "model", "")
        return folder

    def protect(self, scenario: Scenario) -> LanguageModel:
        raise NotImplementedError

    def claim(self, scenario: Scenario, n_tokens: int) -> Claim | None:
        """Return the privacy claim for `n_tokens` drawn tokens, or None if nothing is claimed."""
        return None

    def protect_masked(self, scenario: MaskedScenario) -> tuple[MaskedModel, Claim | None]:
        """Return what `protect` and `claim` return, but for a masked LM.

        Raise AuditError if the defense does not support masked LMs.
        """
        raise AuditError(
            f"expected a causal LM for {self.name}, which draws token by token, got a masked one"
        )

    def fixed_token_budget(self, scenario: Scenario) -> QueryBudget | None:
        """Return the number of tokens that may be drawn from this defense; None for no limit."""
        return None

    def budget_lots(self, scenario: Scenario) -> Mapping[str, int]:
        """Map each secret id to the privacy budget that queries about this secret use up.

        Return {} if there is only one budget. Budgets cover disjoint parts of the private data, so
        a claim for T tokens allows T tokens for each budget.
        """
        return {}

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        """Return sentences about the defense's set-up that a reader of its results must know."""
        return ()

    def cause_chain(self) -> tuple[Cause, ...]:
        """Return the steps from the undefended model to this defense, each with one change.

        A run attacks the control of each step too. So it can tell which part of the defense's
        effect each change causes. Steps that follow the defense itself use even less private data,
        and do not count toward its effect.
        """
        return ()


class BudgetedDefense(Defense):
    """Base class of defenses with the option `queries`: the number of drawn tokens epsilon covers.

    The option `on_exhaustion` is that of `QueryBudget`.
    """

    queries: int
    on_exhaustion: Literal["stop", "public"]

    def fixed_token_budget(self, scenario: Scenario) -> QueryBudget | None:
        if self.queries:
            return QueryBudget(self.queries, self.on_exhaustion)
        return None

    def count_covered_tokens(self, scenario: Scenario) -> int:
        """Return T, the number of drawn tokens that epsilon covers; 1 if the run draws none."""
        return self.queries or scenario.queries or 1

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        if self.queries or scenario.queries:
            return ()
        return (
            "no attack here draws tokens inside the claim, so epsilon is spent on one token and "
            f"private data weigh more than in service: give -D {self.name}.queries=N, the tokens "
            "to answer, or add an attack that draws",
        )


@dataclass(frozen=True)
class Cause:
    """A step in a defense's chain of controls: one change from the previous step.

    Attributes:
        name: name of the change, such as "splitting".
        changes: the change, as a phrase that can follow the name.
        row: the control that has this change and all earlier ones; None for the defense itself.
        needs: input that the user must give if the control is missing.
    """

    name: str
    # The difference, as the continuation of the name: "splitting: each adapter sees one shard
    # only".
    changes: str
    row: Defense | None = None
    needs: str = ""


@dataclass(frozen=True)
class QueryBudget:
    """A fixed number of drawn tokens.

    `on_exhaustion` says what happens after that: answers stop ("stop"), or the public model gives
    them ("public").
    """

    tokens: int
    on_exhaustion: Literal["stop", "public"]


def count_largest_lot(n_drawn: Mapping[tuple[str, str], int], lots: Mapping[str, int]) -> int:
    """Return the largest number of tokens that were drawn from any one budget (lot).

    `n_drawn` counts tokens by (recipe, secret). `lots` gives each secret's lot; if it is empty, all
    tokens count together.
    """
    tokens_by_lot: Counter[int | None] = Counter()
    for (_, secret), tokens in n_drawn.items():
        tokens_by_lot[lots.get(secret)] += tokens
    return max(tokens_by_lot.values(), default=0)
