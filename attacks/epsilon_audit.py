"""Bound epsilon from below by guessing which canaries the training data of a model included.

This needs only black-box access, except for score=gradient. A fair coin decided whether each canary
was inserted. The bound is valid for any guesses, because only the training data depend on the
coins; a poor score only lowers the bound. Therefore no baseline is subtracted. As a control, a
model trained without canaries must give no bound above 0. The bounds are computed in `audited.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Claim, Observation, Query, Secret, Tokens
from auditor.core.result import Audited, Measurement
from auditor.models.decoding import ANCESTRAL
from auditor.models.weight_changes import WeightChange
from auditor.plugins.options import Count
from auditor.plugins.probe import DELTA, Observed, Probe, value_column
from auditor.plugins.view import TEXT_ONLY, Sampling, View
from auditor.statistics.audit_power import describe_detection_power, find_audit_ceiling
from auditor.statistics.audited import (
    LEVEL,
    audit_epsilon_bounds,
    audit_measurements,
    plan_epsilon_audit,
)
from auditor.statistics.one_run import check_audit_parameters

_AT_ONCE = 256  # canaries scored per batch
_SAME = 1e-5  # nats a token: two models that differ by less everywhere are the same


@dataclass(frozen=True)
class EpsilonAudit(Probe):
    """Bound epsilon from below by guessing which canaries a coin inserted (Steinke et al. 2023).

    by: what is measured for each canary's secret. `loss` is its mean nll. `samples` needs only
    sampled tokens: it is the number of leading tokens that a completion of the prefix shares with
    the secret, averaged over `samples` draws.
    score: `loss` uses only the loss, `difference` subtracts the loss under the reference model.
    `auto` chooses `difference` if there is a reference model other than the audited model.
    `gradient` needs the weights of both models, and a training that began with the reference model.
    It explains the change of the weights by all secrets' gradients, with ridge regression; a
    secret's coefficient is its score (`models/weight_changes.py`). If the model's `training.json`
    says what follows a record, gradients are of whole records. No score reads the coins, so the
    bound is valid for each.
    delta: the bound's delta; 0 takes the claim's delta, or 1e-5 if there is no claim.
    level: the probability with which the bound may exceed the true epsilon.
    unit: `user` if all copies of a canary belong to one person (`audit canaries insert --group`),
    so that the claim protects all copies together.
    """

    name = "epsilon-audit"
    page = "how-to/audit-an-epsilon"
    title = "Epsilon audit"
    measures = "epsilon"
    of = "coins"
    by: Literal["loss", "samples"] = "loss"
    score: Literal["auto", "difference", "loss", "gradient"] = "auto"
    samples: Count = 64
    delta: float = 0.0
    level: float = LEVEL
    unit: Literal["record", "user"] = "record"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_audit_parameters(self.delta, self.level)
        if self.draws_samples and self.score == "gradient":
            raise AuditError("expected score=gradient with by=loss, got by=samples")

    @property
    def queries_for_joint_values(self) -> bool:
        return self.score == "gradient"

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        if self.by == "loss":
            return ("likelihood",)
        return ("draw",)

    @property
    def draws_samples(self) -> bool:
        return self.by == "samples"

    def sampling(self) -> Sampling:
        return Sampling(self.samples if self.draws_samples else 1, ANCESTRAL)

    # --- observations ---

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        if not view.target.prefix_token and not all(secret.prefix for secret in secrets):
            raise NotApplicable(
                "nothing precedes the first token of these canaries: give --prefix-token eos, "
                "for example"
            )
        needs_reference = self.score in ("difference", "gradient")
        if not self.draws_samples and needs_reference and view.reference is None:
            raise NotApplicable(
                f"needs a reference model for score={self.score}: --reference or --public"
            )

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        self.check_inputs(view, secrets)
        if self.draws_samples:
            yield from self._observe_canary_agreement(view, secrets)
        else:
            yield from self._observe_canary_losses(view, secrets)

    def _observe_canary_losses(
        self, view: View, secrets: Sequence[Secret]
    ) -> Iterator[Observation]:
        """Yield each secret's mean nll given its prefix, in nats per token."""
        models = {"nll": view.target}
        if self.score != "loss" and view.reference is not None:
            models["reference_nll"] = view.reference
        for start in range(0, len(secrets), _AT_ONCE):
            batch = secrets[start : start + _AT_ONCE]
            pairs = [(secret.prefix, secret.suffix) for secret in batch]
            columns = [view.mean_nll(model, pairs) for model in models.values()]
            for secret, *nll in zip(batch, *columns, strict=True):
                yield Observation(secret.id, dict(zip(models, nll, strict=True)))

    def _observe_canary_agreement(
        self, view: View, secrets: Sequence[Secret]
    ) -> Iterator[Observation]:
        """Yield how many leading tokens the secret shares with a sample, on average."""
        if view.setting is TEXT_ONLY and view.claim is not None and view.claim.queries is not None:
            raise NotApplicable(
                f"the claim is for {view.claim.queries:,} drawn tokens, and these draws would not "
                "be charged to it: prediction-audit plays this game within them"
            )
        suffixes = {secret.id: np.array(secret.suffix) for secret in secrets}
        queries = []
        for secret in secrets:
            queries.append(Query(secret.id, secret.prefix, len(secret.suffix)))
        for batch in view.candidates(queries, self.sampling()):
            for query, samples in batch:
                matches = samples.suffixes.cpu().numpy() == suffixes[query.id]
                weights = samples.counts.cpu().numpy()
                # (distinct, length): 1 up to the first different token; counts are the draws of
                # each.
                agreeing = matches.cumprod(axis=1).sum(axis=1) @ weights / weights.sum()
                yield Observation(query.id, {"agreement": float(agreeing)})

    def facts(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, float]:
        """Return the numbers with which the bound is computed and compared, keyed by name.

        `delta` is the bound's delta. `claimed` is the epsilon of the model's claim, if the claim
        covers adding or removing the audited unit. `ceiling` is the epsilon that such an audit
        proves in half of all cases if that claim is true.
        """
        claim = view.claim
        delta = self._choose_delta(claim)
        # A claim for a user holds for each record of that user.
        if (
            claim is None
            or claim.unit not in (self.unit, "user")
            or "add_remove" not in claim.epsilon
        ):
            return {"delta": delta}
        facts = {"delta": delta, "claimed": claim.epsilon["add_remove"]}
        planned = self.plan_audit(view, secrets)
        ceiling = find_audit_ceiling(planned, claim)
        if ceiling is not None and planned.best > 0:
            facts["ceiling"] = ceiling
        return facts

    def _choose_delta(self, claim: Claim | None) -> float:
        if self.delta:
            return self.delta
        if claim is not None and claim.delta > 0:
            return claim.delta
        return DELTA

    def add_joint_values(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Sequence[Observation]:
        """Add each canary's score; a higher score means more confidence that it was inserted."""
        if self.score == "gradient":
            # A resumed run has the scores of all canaries already.
            if all("score" in observation.values for observation in observations):
                return observations
            scores = self._score_canary_gradients(view, secrets)
        else:
            scores = self._canary_inclusion_scores(observations)
        return Observed(observations).add_columns({"score": scores})

    def _score_canary_gradients(self, view: View, secrets: Sequence[Secret]) -> Floats:
        assert view.reference is not None  # `check_inputs` guarantees it
        title = f"gradients of {view.target_name}"
        texts = [_choose_scored_parts(view, secret) for secret in secrets]
        return WeightChange(view.target, view.reference).score_texts(
            texts,
            view.seed,
            lambda n_done: view.progress(title, n_done, len(secrets)),
        )

    def _canary_inclusion_scores(self, observations: Sequence[Observation]) -> Floats:
        if self.draws_samples:
            return value_column(observations, "agreement")
        nll = value_column(observations, "nll")
        if not self._has_reference(observations):
            return -nll
        return value_column(observations, "reference_nll") - nll

    def _has_reference(self, observations: Sequence[Observation]) -> bool:
        """Return whether losses are compared with a reference model.

        With `score` = `auto`, this is False if the two models have the same losses.
        """
        if self.draws_samples or "reference_nll" not in observations[0].values:
            return False
        differences = np.abs(
            value_column(observations, "reference_nll") - value_column(observations, "nll")
        )
        return self.score == "difference" or not bool((differences <= _SAME).all())

    # --- bounds ---

    def epsilon_lower_bounds(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Audited, ...]:
        # Tuples, since the cache takes only hashable arguments.
        coins = tuple(secret.canary is not None and bool(secret.canary.coin) for secret in secrets)
        scores = tuple(value_column(observations, "score").tolist())
        delta = observations.facts["delta"]
        copies = self._count_unit_copies(secrets)
        return tuple(
            replace(a, unit=self.unit)
            for a in _bound_canary_epsilon(scores, coins, delta, self.level, copies)
        )

    def plan_audit(self, view: View, secrets: Sequence[Secret]) -> Audited:
        delta = self._choose_delta(view.claim)
        return plan_epsilon_audit(len(secrets), delta, self.level, self._count_unit_copies(secrets))

    def _count_unit_copies(self, secrets: Sequence[Secret]) -> int:
        """Return the number of privacy units over which the copies of one canary are spread.

        If the unit is a user, one unit has all copies. Otherwise each copy is a unit.
        """
        if self.unit == "user":
            return 1
        return self._canary_insertion_count(secrets)

    @staticmethod
    def _canary_insertion_count(secrets: Sequence[Secret]) -> int:
        """Return the number of copies of each inserted canary."""
        return max(1, *(secret.repeats or 0 for secret in secrets))

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        return audit_measurements(self.epsilon_lower_bounds(secrets, observations))

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        main = self.epsilon_lower_bounds(secrets, observations)[0]
        inside = sum(secret.member for secret in secrets)
        times = self._canary_insertion_count(secrets)
        copied = main.copies > 1
        unit = f"one {self.unit}" + (
            f", of which {main.copies} copies are a group" if copied else ""
        )
        sentences = [
            f"{main.canaries:,} canaries, {inside:,} in and {main.canaries - inside:,} out by a "
            f"fair coin each, inserted {'once' if times == 1 else f'{times} times'}; "
            f"{main.guesses:,} guessed, {main.right:,} right",
            f"scored by {self._inclusion_score_phrase(observations)}",
            f"the bound is of ε at δ {main.delta:g} for {unit}, added or removed; it is too high "
            f"in at most {main.level:.0%} of audits; {main.canaries:,} canaries prove at most "
            f"{main.best:.2f}",
        ]
        if (claimed := observations.facts.get("claimed")) is not None:
            power = describe_detection_power(main, claimed)
            sentences.append(f"against the claimed ε of {claimed:.3g}: {power}")
        if (ceiling := observations.facts.get("ceiling")) is not None:
            sentences.append(
                "if the training is as it claims, an audit whose scores see all that the finished "
                f"model shows proves about {ceiling:.2f} (median)"
            )
        return tuple(sentences)

    def _inclusion_score_phrase(self, observations: Sequence[Observation]) -> str:
        if self.draws_samples:
            return f"how far {self.samples} drawn completions agree with the secret, in tokens"
        if self.score == "gradient":
            return "regression of the weights' change on all canaries' gradients at the reference"
        if self._has_reference(observations):
            return "loss minus that under the reference model, only of the secret"
        return "loss, only of the secret"


def _choose_scored_parts(view: View, secret: Secret) -> tuple[Tokens, Tokens]:
    """Return the given tokens and the tokens with a loss, of which the gradient is taken.

    The loss is that of the training, over the whole record, if the training recorded what follows a
    record.
    """
    if view.tokens_after is None or not view.target.prefix_token:
        return secret.prefix, secret.suffix
    return (), (*secret.tokens, *view.tokens_after)


@lru_cache(maxsize=8)
def _bound_canary_epsilon(
    scores: tuple[float, ...], coins: tuple[bool, ...], delta: float, level: float, copies: int
) -> tuple[Audited, ...]:
    """Return the bounds on epsilon.

    The result is cached, because it is needed three times. scores, coins: one per canary. Raise
    NotApplicable if no bound follows from the scores.
    """
    try:
        return audit_epsilon_bounds(np.array(scores), np.array(coins), delta, level, copies)
    except AuditError as error:
        raise NotApplicable(str(error)) from error
