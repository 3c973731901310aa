"""Defenses: the base of all, what one may hold, and the causes that it credits with what it
changes."""

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
    """What a defense may hold: the models around the target, and the queries it will have to
    answer."""

    target: LanguageModel
    public: LanguageModel | None
    ensemble: Any  # auditor.models.ensemble.Ensemble, or None
    queries: int  # tokens the text-only row will draw
    answer_length: int  # tokens of one answer
    trained: TrainedModel | None = None
    # one adapter on all the ensemble's records, by its members' recipe
    whole: LanguageModel | None = None
    prompts: tuple[
        Prompt, ...
    ] = ()  # what it will be asked behind, and the private records that begin so
    corpus: Sequence[
        Tokens
    ] = ()  # what the target was trained on, as far as the audit is told, each record once
    beside: LanguageModel | None = None  # what is shown beside a model that was to forget


@dataclass(frozen=True)
class Prompt:
    """What a secret is asked behind, and the private record that begins so, both as a model reads a
    text.

    secret: its id. record: () for a text that is no private record.
    """

    secret: str
    given: Tokens
    record: Tokens = ()


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained to leak less, and what it promises (`privacy.json`), as far as it
    says.

    canaries: what its training kept for an audit, if it was trained for one. told: what its trainer
    said of it.
    """

    model: LanguageModel
    privacy: PrivacyRecord | None
    canaries: GradientCanaries | None = None
    told: tuple[str, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the training: sentences."""
        return self.told if self.privacy is None else self.privacy.notes()


@dataclass(frozen=True)
class MaskedScenario:
    """A `Scenario` around a masked LM. queries: how many gaps it fills at most in one text."""

    target: MaskedModel
    public: MaskedModel | None
    queries: int


@dataclass(frozen=True)
class Defense:
    """Base of all defenses. `protect` returns a model that holds others; `claim` says what it
    promises.

    `needs` names what the scenario must hold beyond the target: "public", "ensemble", "trained",
    "whole", "records", "corpus".
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what people read in a table; "": its name
    needs: ClassVar[tuple[str, ...]] = ()
    claims: ClassVar[str] = "none"  # one line for `audit list`
    # whether it is right in float32 alone: `--dtype auto` then means that
    float32: ClassVar[bool] = False
    # whether it is a form in which the model is deployed: `--forms` may name it
    form: ClassVar[bool] = False

    @property
    def ensemble_folder(self) -> str:
        """The folder of adapters that its option `ensemble` names; "": none, as in the lab, which
        trains its own."""
        folder: str = getattr(self, "ensemble", "")
        return folder

    @property
    def required_member_count(self) -> int | None:
        """How many members its ensemble must have; None: as many as there are."""
        return None

    @property
    def model_folder(self) -> str:
        """The folder of the trained model that its option `model` names; "": none, as in the lab,
        which trains one."""
        folder: str = getattr(self, "model", "")
        return folder

    def protect(self, scenario: Scenario) -> LanguageModel:
        raise NotImplementedError

    def claim(self, scenario: Scenario, spent: int) -> Claim | None:
        """What is promised, with `spent` drawn tokens accounted for; None where nothing is."""
        return None

    def protect_masked(self, scenario: MaskedScenario) -> tuple[MaskedModel, Claim | None]:
        """`protect` and `claim` in front of a masked LM. Raises AuditError for a defense that
        cannot be there."""
        raise AuditError(
            f"expected a causal LM behind {self.name}, which draws token by token, got a masked one"
        )

    def fixed_token_budget(self, scenario: Scenario) -> QueryBudget | None:
        """The fixed number of tokens this defense answers, None where it answers as many as the row
        will draw."""
        return None

    def budget_lots(self, scenario: Scenario) -> Mapping[str, int]:
        """By secret id, the number of the budget that pays for its tokens; empty where one budget
        pays for all.

        Lots hold disjoint private data, so each is accounted for alone: a claim covers T tokens of
        any one lot.
        """
        return {}

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        """What a reader of every row must know about how the defense was set up: sentences."""
        return ()

    def cause_chain(self) -> tuple[Cause, ...]:
        """Why this model leaks less than the undefended one: rows from that one on, each with one
        more change.

        A run shows these rows beside this defense's own and credits each change with its part of
        the reduction. Rows behind the defense's own are no part of its effect: they show what still
        less private data would leak.
        """
        return ()


@dataclass(frozen=True)
class Cause:
    """A step of a defense's chain: what its row changes against the row before it, and nothing
    else.

    row: the control that is shown for it; None: the defense itself. needs: what a user must give
    for a missing row.
    """

    name: str  # "splitting"
    # what is different, in words that go on from it: "splitting: each adapter sees one shard only"
    changes: str
    row: Defense | None = None
    needs: str = ""


@dataclass(frozen=True)
class QueryBudget:
    """A fixed allowance of drawn tokens and what happens when it is spent: the row stops, or the
    public answers."""

    tokens: int
    on_exhaustion: Literal["stop", "public"]


def largest_lot_token_count(drawn: Mapping[tuple[str, str], int], lots: Mapping[str, int]) -> int:
    """Tokens of the lot with the most of them; of all together where there are no lots. drawn: by
    (recipe, secret)."""
    spent: Counter[int | None] = Counter()
    for (_, secret), tokens in drawn.items():
        spent[lots.get(secret)] += tokens
    return max(spent.values(), default=0)
