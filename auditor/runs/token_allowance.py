"""Count the tokens that attacks will draw under a privacy claim, and divide a fixed token
budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from auditor.core.errors import NotApplicable
from auditor.core.nouns import Query, Secret
from auditor.models.base import implies_capability
from auditor.plugins.attack import Attack
from auditor.plugins.defense import QueryBudget
from auditor.plugins.view import View

Draws = dict[tuple[str, str], int]  # tokens by (recipe, secret)


def plan_token_counts(view: View, attacks: Sequence[Attack], secrets: Sequence[Secret]) -> Draws:
    """Return how many tokens each (sampling recipe, secret id) will draw in this view's setting.

    Keys are ordered by attack, then by secret. Attacks with the same sampling recipe share their
    draws.
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
    """Return the attack's queries on these secrets; () if the attack does not apply to this
    target.
    """
    try:
        return attack.queries(
            view, [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]
        )
    except NotApplicable:
        return ()


def divide_query_budget(
    budget: QueryBudget, draws: Mapping[tuple[str, str], int], lots: Mapping[str, int] | None = None
) -> Draws:
    """Divide a fixed token budget over the (sampling recipe, secret id) keys in order, before any
    draw.

    The order of the queries therefore does not change the shares. With `stop`, the budget pays only
    complete answers, and no answer after the first that is too long. With `public`, the public
    model completes the answers that the budget cannot pay. lots: the lot of each secret id, if each
    lot has its own budget (`Defense.lots`).
    """
    rest_by_lot = dict[int | None, int]()
    allowance = Draws()
    for key, tokens in draws.items():
        lot = (lots or {}).get(key[1])
        rest = rest_by_lot.get(lot, budget.tokens)
        if budget.on_exhaustion == "stop" and tokens > rest:
            rest_by_lot[lot] = -1  # closed, to shorter answers too
            continue
        allowance[key] = min(tokens, rest)
        rest_by_lot[lot] = rest - allowance[key]
    return allowance
