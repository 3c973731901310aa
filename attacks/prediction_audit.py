"""Bound epsilon of private prediction from below by games.

Private prediction claims that the tokens of one privacy budget do not distinguish two neighbouring
models. In each game a fair coin selects the model or its neighbour. An adversary requests as many
tokens as the claim covers, and guesses the coin from these tokens. Every game has a new budget and
a new coin, so games are independent, and Clopper-Pearson bounds on the rates of wrong guesses bound
epsilon (formulas.md B5). The bound holds for any source of tokens, because it depends only on drawn
tokens, not on the distribution that the model reports.

The adversary repeats one context, teacher-forced on a record. It is the context after which the
model and some neighbour differ most over this many tokens. The adversary has both distributions
and adds up the log-ratios of drawn tokens. Separate games, which do not count, determine the
threshold for this sum. A different adversary may do better, so a bound far below the claim does not
prove the claim.

No game releases its tokens or charges the claim. The audited model names its neighbour models; if
it has none, the public model is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from auditor.attacks.claim_check import space_suffix_positions
from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError, TargetLacks
from auditor.core.nouns import Claim, Observation, Secret
from auditor.core.result import Audited, Measurement
from auditor.core.secret_randomness import CHANNELS, make_keyed_generator
from auditor.models.base import LanguageModel, Neighbours
from auditor.models.decoding import ANCESTRAL
from auditor.plugins.options import Count, CountOrZero
from auditor.plugins.probe import (
    DELTA,
    AncestralProbe,
    Observed,
    observe_in_batches,
    strip_observed_prefix,
)
from auditor.plugins.view import View
from auditor.statistics.audited import LEVEL, audit_measurements
from auditor.statistics.composition import (
    bound_game_epsilon,
    compute_best_game_advantage,
    compute_exact_game_epsilon,
)
from auditor.statistics.games import FEWEST, audit_games, count_confusion
from auditor.statistics.one_run import check_audit_parameters

_DRAWS = 2**20  # tokens of all games together, if the number of games is not given
_AT_ONCE = 2**18  # tokens drawn at once
# probabilities of all neighbours in memory at once: 32 MiB of float64 each
_DISTRIBUTION_ELEMENTS = 2**22
_SURE = 1e6  # nats: the weight of a token that only one of the two can draw
PUBLIC = "any_two_models"  # the neighbour of a model without neighbours: the public model
_COUNTS = ("tp", "fn", "fp", "tn")
_SHARD = "shard"
_PRIVATE = "exact answers depend on the private data: do not publish"


@dataclass(frozen=True)
class PredictionAudit(AncestralProbe):
    """Bound epsilon of private prediction by a game: which of two neighbours drew the tokens?

    In a game, the guesser gets the tokens of one privacy budget.

    games: the number of games; 0 plays as many games as a million tokens allow.
    tokens: the number of tokens drawn in each game, at most the number that the claim covers. With
    fewer tokens the bound is still valid, but looser.
    relation: the neighbouring relation of the two models; empty takes the claim's main relation.
    positions: the number of evenly spaced positions of a suffix that are compared, to choose the
    context of the games; 0 compares all.
    delta: the bound's delta; 0 takes the claim's delta, or 1e-5 if there is no claim.
    level: the probability with which the bound may exceed the true epsilon.
    """

    name = "prediction-audit"
    page = "how-to/audit-an-epsilon"
    title = "audited ε of prediction"
    measures = "epsilon of tokens"
    needs = ("draw",)
    games: int = 0
    tokens: Count = 1024
    relation: str = ""
    positions: CountOrZero = 4
    delta: float = 0.0
    level: float = LEVEL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.games and self.games < FEWEST:
            raise AuditError(
                f"expected games >= {FEWEST} (0: as many as make a million tokens), got "
                f"{self.games}"
            )
        check_audit_parameters(self.delta, self.level)

    # --- distances of opponents in each secret's contexts ---

    @torch.no_grad()
    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        if (
            "distribution" not in view.target.capabilities
        ):  # the setting limits the adversary, who sees only tokens
            needed = "the distribution that tokens are scored by"
            raise TargetLacks(f"needs {needed}, which {view.target.name} does not give")
        self._game_terms(view.claim)
        for secret in secrets[:1]:
            contexts = torch.tensor([secret.prefix + secret.suffix[:1]], device=view.target.device)
            self._choose_opponents(view, contexts, 1, [0])

    @torch.no_grad()
    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        self.check_inputs(view, secrets)
        terms = self._game_terms(view.claim)
        longest = max((len(secret.suffix) for secret in secrets), default=1)
        # the model's distribution at each place, and each part's at the selected positions
        elements = (
            longest + (self.positions or longest) * view.target.parts
        ) * view.target.vocab_size
        size = max(1, _DISTRIBUTION_ELEMENTS // elements)

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            contexts = torch.cat([prefixes, suffixes[:, :-1]], dim=1)
            length = suffixes.shape[1]
            positions = space_suffix_positions(self.positions, length)
            results = list[Observation]()
            reported = _normalise_log_probs(view.target.log_probs(contexts, length)[:, positions])
            offered, _ = self._choose_opponents(view, contexts, length, positions)
            tokens = int(terms["tokens"])
            often = max(terms["delta"], 1 / terms["games"])
            # (B, positions, neighbours) nats that a game shows between the model and a neighbour.
            # An event rarer than once in all games shows nothing.
            reaches = {}
            for other in offered:
                reaches[other.relation] = bound_game_epsilon(
                    reported[..., None, :],
                    _normalise_log_probs(other.log_probs),
                    tokens,
                    often,
                )
            for i, secret in enumerate(batch):
                values = dict[str, float]()
                for relation, reach in reaches.items():
                    position, neighbour = divmod(int(reach[i].argmax()), reach.shape[-1])
                    values[f"reach_{relation}"] = float(reach[i].max())
                    values[f"position_{relation}"] = float(positions[position])
                    values[f"neighbour_{relation}"] = neighbour
                results.append(Observation(secret.id, values))
            return results

        yield from observe_in_batches(view, secrets, size, look)

    def _game_terms(self, claim: Claim | None) -> dict[str, float]:
        """Return the settings of the audit games and of the claim, keyed by name.

        A game is one guess of which of two neighbouring models drew some tokens. Examples of
        settings are the number of tokens in a game, the number of games and the claimed epsilon.
        """
        if claim is not None and claim.any_access:
            raise TargetLacks(
                "its claim is about how it was trained, not about drawn tokens: see epsilon-audit"
            )
        if claim is None or claim.queries is None:
            covered = self.tokens
        else:
            covered = min(self.tokens, max(1, claim.queries))
        delta = self.delta or (DELTA if claim is None else claim.delta)
        terms = {
            "tokens": covered,
            "games": self.games or max(FEWEST, _DRAWS // covered),
            "delta": delta,
        }
        if claim is not None:
            if self.relation in claim.epsilon:
                relation = self.relation
            else:
                relation = claim.relation
            if claim.queries is None:
                any_number = math.inf
            else:
                any_number = claim.queries
            terms |= {f"claimed_{relation}": claim.epsilon[relation], "covered": any_number}
            terms |= {f"unit_{_SHARD if claim.shard else claim.unit}": 1.0}
        return {name: float(value) for name, value in terms.items()}

    def _choose_opponents(
        self, view: View, contexts: Tensor, last: int, at: Sequence[int]
    ) -> tuple[Sequence[Neighbours], bool]:
        """Return the neighbours' distributions, and whether the public model stands in for them.

        contexts: token ids; at: the compared positions. Raise NotApplicable if no neighbour differs
        by the requested relation, such as one record added or removed.
        """
        offered = view.target.neighbour_distributions(contexts, last, at)
        stand_in = not offered
        if stand_in:
            if view.public is None:
                raise TargetLacks(
                    "needs a neighbour of the target, or --public for a model in its place"
                )
            offered = [
                Neighbours(PUBLIC, view.public.log_probs(contexts, last)[:, at].unsqueeze(-2))
            ]
        names = [neighbours.relation for neighbours in offered]
        if self.relation and self.relation not in names:
            raise TargetLacks(f"its neighbours are by {' or '.join(names)}, not by {self.relation}")
        preferred = self.relation or (view.claim.relation if view.claim is not None else "")
        return [
            candidate for candidate in offered if candidate.relation == preferred
        ] or offered, stand_in

    # --- games ---

    @torch.no_grad()
    def facts(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, float]:
        """Play the games after the most revealing context; return terms and results by name."""
        if not observations:
            return {}
        reach = {
            (i, relation): o.values[f"reach_{relation}"]
            for i, o in enumerate(observations)
            for relation in strip_observed_prefix("reach_", o.values)
        }
        # Only by distributions, before a token is drawn: the choice does not affect the bound.
        chosen, relation = max(reach, key=lambda place: reach[place])
        return self._play_games(view, secrets[chosen], observations[chosen], relation)

    def _play_games(
        self, view: View, secret: Secret, observation: Observation, relation: str
    ) -> dict[str, float]:
        """Play all games after one context; return their settings and results, keyed by name.

        The results are the counts of right and wrong guesses, and the exact epsilon and advantage
        from the distributions of the attacked model and its neighbour under `relation`.
        """
        position = int(observation.values[f"position_{relation}"])
        neighbour = int(observation.values[f"neighbour_{relation}"])
        terms = self._game_terms(view.claim)
        tokens = int(terms["tokens"])
        games = int(terms["games"])
        delta = terms["delta"]
        context = torch.tensor(
            [[*secret.prefix, *secret.suffix[:position]]], device=view.target.device
        )
        _, stand_in = self._choose_opponents(view, context, 1, [0])
        if stand_in:
            other = view.public
        else:
            other = view.target.neighbour_model(relation, neighbour)
        assert other is not None  # `_choose_opponents` guarantees it
        game = PredictionDistinguishingGame(view.target, other, context, tokens)
        guesses = count_confusion(
            *game.draw_game_scores(games, view.seed, view.target_name, self.name),
            delta,
            self.level,
        )
        exact = compute_exact_game_epsilon(*game.both_log_distributions, tokens, delta)
        return {
            **terms,
            "stand_in": float(stand_in),
            **dict(zip(_COUNTS, map(float, guesses), strict=True)),
            f"exact_{relation}": exact,
            "advantage": compute_best_game_advantage(*game.both_log_distributions, tokens),
        }

    # --- bounds ---

    def epsilon_lower_bounds(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Audited, ...]:
        relation = _choose_relation(observations)
        values = observations.facts
        tp, fn, fp, tn = (int(values[name]) for name in _COUNTS)
        # Without a claim, use the relation of the games, and a shard.
        claimed_relation = [*strip_observed_prefix("claimed_", values), relation][0]
        unit = [*strip_observed_prefix("unit_", values), _SHARD][0]
        covered = values.get("covered", math.inf)
        audit = replace(
            audit_games((tp, fn, fp, tn), values["delta"], self.level),
            relation=claimed_relation,
            unit="the whole training set" if relation == PUBLIC else unit,
            tokens=int(values["tokens"]),
            covered=int(covered) if math.isfinite(covered) else None,
            exact=values[f"exact_{relation}"],
        )
        return (audit,)

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        (audit,) = self.epsilon_lower_bounds(secrets, observations)
        exact = observations.facts[f"exact_{_choose_relation(observations)}"]
        note = f"of these very games, from both distributions; {_PRIVATE}"
        point = Measurement("epsilon_exact", exact, exact, exact, audit.canaries, "nats", note)
        return [*audit_measurements([audit]), point]

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        (audit,) = self.epsilon_lower_bounds(secrets, observations)
        values = observations.facts
        relation = _choose_relation(observations)
        tokens = int(values["tokens"])
        covered = values.get("covered", 0)
        if math.inf > covered > tokens:
            of = f" of the {covered:,.0f} that the claim covers"
        else:
            of = ""
        if values["stand_in"]:
            neighbour = "the public model in its place"
        else:
            neighbour = relation.replace("_", " ")
        sentences = [
            f"{audit.canaries:,} games that count, each of {tokens:,} drawn tokens{of}; by a fair "
            f"coin the model answered, or its neighbour ({neighbour}); {audit.right:,} guesses "
            "right",
            f"the bound is too high in at most {audit.level:.0%} of audits, and this many games "
            f"prove at most {audit.best:.2f}; exactly, these games are "
            f"{values[f'exact_{relation}']:.3g} nats apart at δ {audit.delta:g}, total variation "
            f"{values['advantage']:.3g}",
            "the auditor's own draws: they are not released, and not charged to the claim",
        ]
        if audit.relation not in (relation, PUBLIC) and f"claimed_{audit.relation}" in values:
            sentences.append(
                f"played by {relation.replace('_', ' ')}, and compared with the claim "
                f"{audit.relation}"
            )
        return (*sentences, _PRIVATE)


@dataclass(frozen=True)
class PredictionDistinguishingGame:
    """Play a game: an adversary guesses which of two models drew the tokens after a context.

    inside, outside: the two models; context: (1, n) token ids; `tokens` tokens are drawn in each
    game.
    """

    inside: LanguageModel
    outside: LanguageModel
    context: Tensor
    tokens: int

    @cached_property
    def both_log_distributions(self) -> tuple[Floats, Floats]:
        """Return the next-token log-probabilities that each model reports, in nats, (V,) each."""
        return (
            _normalise_log_probs(self.inside.log_probs(self.context, 1)[0, 0]),
            _normalise_log_probs(self.outside.log_probs(self.context, 1)[0, 0]),
        )

    @torch.no_grad()
    def draw_game_scores(self, games: int, *key: str | int) -> tuple[Floats, Bools]:
        """Return each game's score and coin, of shape (games,) each.

        A score is a sum of log-ratios in nats; a higher score means that `inside` is more likely.
        """
        # Tokens are independent, so their sum is a game's log-likelihood ratio: no test is stronger
        # (Neyman-Pearson).
        ratio = torch.from_numpy(_compute_token_log_ratios(*self.both_log_distributions))
        coins = make_keyed_generator(*key, "coins").random(games) < 0.5
        scores = np.empty(games)
        for model, side in ((self.inside, coins), (self.outside, ~coins)):
            # A stream for each side: draws of one model do not shift those of the other.
            noise = make_keyed_generator(*key, "inside" if model is self.inside else "outside")
            # `or`: perhaps no coin fell on this side.
            scores[side] = np.concatenate(
                [
                    ratio[tokens].sum(-1).numpy()
                    for tokens in self._draw_game_token_batches(model, int(side.sum()), noise)
                ]
                or [np.empty(0)]
            )
        return scores, coins

    def _draw_game_token_batches(
        self, model: LanguageModel, games: int, noise: np.random.Generator
    ) -> Iterator[Tensor]:
        """Yield batches of tokens (games, tokens), drawn as if the model served them to users."""
        # Never advance: all tokens of all games follow the single context.
        rows = model.start(self.context, 1, distribution=False)
        at_once = max(1, _AT_ONCE // self.tokens)
        for start in range(0, games, at_once):
            draws = min(at_once, games - start) * self.tokens
            uniforms = torch.from_numpy(noise.random((draws, CHANNELS))).to(model.device)
            tokens, _ = rows.draw(
                torch.zeros(draws, dtype=torch.long, device=model.device), uniforms, ANCESTRAL
            )
            yield tokens.view(-1, self.tokens).cpu()


def _normalise_log_probs(log_probs: Tensor) -> Floats:
    distribution: Floats = log_probs.double().log_softmax(-1).cpu().numpy()
    return distribution


def _compute_token_log_ratios(log_p: Floats, log_q: Floats) -> Floats:
    """Return log p - log q of each token, in nats, of shape (V,).

    The ratio is huge for a token that only one model can draw, and 0 for a token that neither can
    draw.
    """
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(log_p - log_q, nan=0.0, posinf=_SURE, neginf=-_SURE)


def _choose_relation(observations: Observed) -> str:
    """Choose the neighbouring relation of the two models in the games."""
    (relation,) = strip_observed_prefix("exact_", observations.facts)
    return relation
