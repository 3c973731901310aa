"""Represent an attacked target: its model, defense, privacy claim, and tokens drawn so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from auditor.core.errors import NotApplicable
from auditor.core.nouns import UNDEFENDED, Claim, Guesses, PrefixToken, Query, Secret
from auditor.core.result import Doubt, Measurement, TargetRecord
from auditor.models.base import LanguageModel, implies_capability
from auditor.plugins.attack import Attack
from auditor.plugins.defense import (
    Defense,
    QueryBudget,
    Scenario,
    TrainedModel,
    count_largest_lot,
)
from auditor.plugins.view import TEXT_ONLY, ClaimTokenMeter, Setting, View
from auditor.privacy.promises import PrivacyRecord
from auditor.runs import machine


@dataclass
class TokenSpending:
    """Counter of the tokens drawn from a target.

    Args:
        meter: counter of tokens drawn under the privacy claim.
        spent: number of tokens charged to the claim, keyed by (sampling recipe, secret id).
        seconds: seconds that this process spent on draws.
        n_drawn: number of tokens that this process drew.
    """

    meter: ClaimTokenMeter
    spent: dict[tuple[str, str], int] = field(default_factory=dict)
    seconds: float = 0.0
    n_drawn: int = 0

    def charge_claim(self, view: View, attack: Attack, answers: Sequence[Guesses]) -> None:
        """Charge each drawn token to the claim once, even if several attacks share the sample.

        Args:
            view: the attacker's access to the target.
            attack: the attack that drew the tokens.
            answers: its guesses.
        """
        for recipe in attack.sample_counts_by_recipe(view):
            for guesses in answers:
                # A fixed budget's allowance counts as spent, whether or not it is drawn.
                if view.allowance is None:
                    paid = guesses.drawn
                else:
                    paid = view.allowance[recipe, guesses.secret]
                self.spent[recipe, guesses.secret] = paid

    @property
    def milliseconds_per_token(self) -> float | None:
        if self.n_drawn:
            return 1000 * self.seconds / self.n_drawn
        return None


@dataclass
class Target:
    """Model that a run attacks, with its defense.

    Args:
        name: name of the target.
        title: title in reports.
        model: the model that attacks query.
        description: sentence about the model.
        defense: the defense; None for the undefended model.
        scenario: inputs that the defense was built from.
        training_seconds: seconds of training; None if unknown.
        secrets: secrets that are attacked on this target.
        companion: whether the target is a control, which serves only to explain a defense.
        trained: the model with the records of its training, such as a privacy promise and canaries.
        spending: counter of drawn tokens.
    """

    name: str
    title: str
    model: LanguageModel
    description: str
    defense: Defense | None = None
    scenario: Scenario | None = None
    training_seconds: float | None = None
    secrets: Sequence[Secret] = ()
    companion: bool = False
    trained: TrainedModel | None = None
    spending: TokenSpending = field(init=False)
    # claims by tokens spent: solving for a claim takes seconds
    _claims: dict[int, Claim | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spending = TokenSpending(ClaimTokenMeter(lots=self.lot_number_by_secret))

    @property
    def is_undefended(self) -> bool:
        return self.name == UNDEFENDED

    # --- the claim ---

    @cached_property
    def query_budget_of_defense(self) -> QueryBudget | None:
        if self.defense and self.scenario:
            return self.defense.fixed_token_budget(self.scenario)
        return None

    @cached_property
    def lot_number_by_secret(self) -> Mapping[str, int]:
        if self.defense and self.scenario:
            return self.defense.budget_lots(self.scenario)
        return {}

    @property
    def claim(self) -> Claim | None:
        """Privacy claim for the tokens drawn so far; None if the target claims nothing."""
        # Lots share no record, so only the largest spending of any lot counts: parallel composition
        # (McSherry 2009).
        n_tokens = count_largest_lot(self.spending.spent, self.lot_number_by_secret)
        if n_tokens not in self._claims:
            if self.defense and self.scenario:
                self._claims[n_tokens] = self.defense.claim(self.scenario, n_tokens)
            else:
                self._claims[n_tokens] = None
                if (record := self.privacy_record_of_target) is not None:
                    self._claims[n_tokens] = record.claim()
        return self._claims[n_tokens]

    @property
    def privacy_record_of_target(self) -> PrivacyRecord | None:
        """Privacy promise of this model's training; None if the training was not private."""
        if self.trained is None:
            return None
        return self.trained.privacy

    def judge_claim_coverage(self, setting: Setting) -> tuple[bool | None, str]:
        """Return whether the claim covers this access and decoding, then the reason.

        The first value is None if the target claims nothing.
        """
        claim = self.claim
        if claim is None:
            return None, "no claim is made"
        if claim.any_access:
            return True, f"{claim.access}; {claim.status}"
        if setting is TEXT_ONLY:
            return True, f"text access, ancestral; {claim.status}"
        return False, "gradients, log-probabilities, the attack's own decoding"

    def list_defense_remarks(self) -> tuple[str, ...]:
        if self.defense and self.scenario:
            return self.defense.remarks(self.scenario)
        return ()

    # --- the record ---

    def _explain_missing_perplexity(self) -> str:
        if implies_capability(self.model.capabilities, "likelihood"):
            return "no held-out perplexity: give --nonmembers FILE"
        return f"no held-out perplexity: {self.model.name} gives no log-probabilities"

    def make_target_record(
        self,
        perplexities: Sequence[Measurement],
        prefix_token: PrefixToken,
        doubts: Sequence[Doubt] = (),
    ) -> TargetRecord:
        """Return the target's record for the result file.

        Args:
            perplexities: measured perplexities, that of the model's own distribution first; empty
                if no texts are held out.
            doubts: doubts to add to the model's own doubts.
        """
        training = self.privacy_record_of_target
        return TargetRecord(
            name=self.name,
            title=self.title,
            description=self.description,
            perplexity=perplexities[0] if perplexities else None,
            other_perplexities=tuple(perplexities[1:]),
            milliseconds_per_token=self.spending.milliseconds_per_token,
            peak_memory_mb=machine.measure_peak_memory(self.model.device),
            training_seconds=self.training_seconds,
            companion=self.companion,
            claim=self.claim,
            nominal_epsilon=training.nominal_epsilon if training else None,
            notes=(
                *(self.trained.notes() if self.trained else ()),
                f"all attacks, and perplexity, use the same prefix token: {prefix_token.said}",
                *(() if perplexities else (self._explain_missing_perplexity(),)),
                *(
                    f"held-out perplexity: {perplexity.note}"
                    for perplexity in perplexities[:1]
                    if perplexity.note
                ),
                *self.model.cost_sentences(),
            ),
            doubts=(*self.model.doubts(), *doubts),
        )


Draws = dict[tuple[str, str], int]  # tokens by (recipe, secret)


def plan_token_counts(view: View, attacks: Sequence[Attack], secrets: Sequence[Secret]) -> Draws:
    """Return how many tokens each (sampling recipe, secret id) will draw in this view's setting.

    A sampling recipe is the name of a way to draw samples, with their number. Keys are ordered by
    attack, then by secret. Attacks with the same sampling recipe share their draws.

    Args:
        view: the attacker's access to the target.
        attacks: the attacks.
        secrets: the attacked secrets.
    """
    draws: Draws = {}
    for attack in attacks:
        if not all(
            implies_capability(view.setting.capabilities, name)
            for name in attack.required_capabilities
        ):
            continue
        try:
            recipes = attack.sample_counts_by_recipe(view)
        except NotApplicable:
            continue
        queries = list_attack_queries(view, attack, secrets)
        for recipe, samples in recipes.items():
            # Do not add: attacks with the same recipe, whose name includes its number of samples,
            # share a pass.
            draws.update({(recipe, query.id): samples * query.length for query in queries})
    return draws


def list_attack_queries(view: View, attack: Attack, secrets: Sequence[Secret]) -> Sequence[Query]:
    """Return the attack's queries about these secrets; () if the attack does not apply here."""
    try:
        return attack.queries(
            view, [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]
        )
    except NotApplicable:
        return ()


def divide_query_budget(
    budget: QueryBudget, draws: Mapping[tuple[str, str], int], lots: Mapping[str, int] | None = None
) -> Draws:
    """Divide a fixed budget of tokens among the samples, before any token is drawn.

    A sample is named by (sampling recipe, secret id). Samples are paid for in the order of `draws`,
    whatever the order of the queries. A `stop` budget pays for whole samples only: after the first
    one that it cannot pay for, it pays for no other. A `public` budget may pay for a part of a
    sample, and the public model completes the rest.

    Args:
        budget: number of tokens, and what happens when they are spent.
        draws: number of tokens that each sample needs.
        lots: lot of each secret id, if the secrets are divided into lots that each have their own
            budget (`Defense.lots`); None for one budget.

    Returns:
        The number of tokens that the budget pays for, keyed by sample. A sample without a key is
            not drawn.
    """
    rest_by_lot = dict[int | None, int]()
    allowance = Draws()
    for key, tokens in draws.items():
        lot = (lots or {}).get(key[1])
        rest = rest_by_lot.get(lot, budget.tokens)
        if budget.on_exhaustion == "stop" and tokens > rest:
            rest_by_lot[lot] = -1  # no later answer is paid for, even if it is shorter
            continue
        allowance[key] = min(tokens, rest)
        rest_by_lot[lot] = rest - allowance[key]
    return allowance
