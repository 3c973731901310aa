"""Define the base class of user-written membership scores, which are higher for members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.core.secret_table import build_secret_table
from auditor.plugins.probe import (
    AncestralProbe,
    Observed,
    mask_members,
    mask_repeat_counts,
    observe_in_batches,
    value_column,
)
from auditor.plugins.view import View
from auditor.statistics import adjusted_auc, blind_classifier, roc
from auditor.statistics.metrics import name_auc, name_score_column
from auditor.statistics.strongest_score import CandidateScore, measure_membership_score

_SECRETS_AT_ONCE = 64
_SCORE = "score"
_SIZES = ("characters", "compressed_bytes")  # of the entire text, for the blind baseline


@dataclass(frozen=True)
class MembershipScore(AncestralProbe):
    """Base class of membership scores. A subclass only defines `name` and `score_records`.

    The base class computes AUC and rates, AUC by number of copies, a baseline that does not use the
    model, and the numbers kept for each record. `membership_auc` takes the score into account,
    alongside the built-in scores.
    """

    measures = "membership"
    needs = ("likelihood",)
    least_nonmembers = roc.LEAST
    page = "how-to/membership"
    quick = None

    def score_records(
        self, view: View, secrets: Sequence[Secret], prefixes: Tensor, suffixes: Tensor
    ) -> Sequence[float]:
        """Return the score of each record, (B,); higher for a member.

        `prefixes` (B, n) and `suffixes` (B, L) are the token ids of the records.
        view.target.token_log_probs(prefixes, suffixes) returns (B, L) nats.
        """
        raise NotImplementedError

    @property
    def score_name(self) -> str:
        """The score's name within metric names, such as `tail_loss` in `membership_auc_tail_loss`.

        It is the plug-in's name (`tail-loss`) with underscores.
        """
        return self.name.replace("-", "_")

    def check_secrets(self, secrets: Sequence[Secret]) -> None:
        if reason := explain_too_few_records(mask_members(secrets)):
            raise AuditError(
                f"--attack {self.name} {reason}: give --nonmembers FILE, records like the data"
            )

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            scores = self.score_records(view, batch, prefixes, suffixes)
            if len(scores) != len(batch):
                raise AuditError(
                    f"expected {self.name}.score_records to return a score for each of "
                    f"{len(batch)} records, got {len(scores)}"
                )
            return [
                Observation(s.id, {_SCORE: float(score)})
                for s, score in zip(batch, scores, strict=True)
            ]

        yield from observe_in_batches(view, secrets, _SECRETS_AT_ONCE, look)

    def add_joint_values(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Sequence[Observation]:
        """Add a baseline score to each observation, by a classifier that does not use the model.

        The classifier sees only the texts. Its score shows how well members and non-members can be
        told apart without the model.
        """
        member = mask_members(secrets)
        if explain_too_few_records(member):
            return observations
        group = blind_classifier.group_related_secrets(secrets)
        features = build_text_features(secrets, observations)
        blind = blind_classifier.predict_membership(features, member, group)
        return Observed(observations).add_columns({"blind": blind, "group": group})

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        member = mask_members(secrets)
        if reason := explain_too_few_records(member):
            raise NotApplicable(reason)
        scores = value_column(observations, _SCORE)
        if reason := explain_unrankable_scores(scores):
            raise NotApplicable(f"{self.name} {reason}")
        results = measure_membership_score("", scores, member, note=self._score_title)
        results += measure_membership_score(self.score_name, scores, member)
        blind = value_column(observations, "blind")
        if not np.isnan(blind).any():
            widen = blind_classifier.compute_cross_fit_deviation_factor(
                member, value_column(observations, "group").astype(int)
            )
            results.append(
                roc.estimate_auc(name_auc("blind"), blind[member], blind[~member], widen=widen)
            )
        return results

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        member = mask_members(secrets)
        scores = value_column(observations, _SCORE)
        return {
            str(count): roc.estimate_auc(name_auc(""), scores[mask], scores[~member])
            for count, mask in mask_repeat_counts(secrets).items()
            if mask.sum() >= roc.LEAST
        }

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Floats]:
        scores = value_column(observations, _SCORE)
        values = {name_score_column(""): scores, name_score_column(self.score_name): scores}
        blind = value_column(observations, "blind")
        if np.isnan(blind).any():
            return values
        return {**values, name_score_column("blind"): blind}

    def membership_candidates(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, CandidateScore]:
        scores = value_column(observations, _SCORE)
        blind = value_column(observations, "blind")
        controls = {}
        if not np.isnan(blind).any():
            controls["blind"] = blind
        weights = adjusted_auc.weigh_scored_records(
            {self.score_name: scores},
            controls,
            build_text_features(secrets, observations),
            mask_members(secrets),
            value_column(observations, "group").astype(int),
        )
        overlap = weights.get(self.score_name)
        return {self.score_name: CandidateScore(scores, self._score_title, overlap=overlap)}

    @property
    def _score_title(self) -> str:
        return self.title or self.name


def build_text_features(secrets: Sequence[Secret], observations: Sequence[Observation]) -> Any:
    """Return features of the texts, a sparse matrix (records, features).

    The features do not depend on the model.
    """
    lengths = [np.empty((len(secrets), 0))]
    for size in _SIZES:
        if size in observations[0].values:
            lengths.append(value_column(observations, size))
    texts = build_secret_table(secrets).texts
    return blind_classifier.build_text_features(texts, np.column_stack(lengths))


def explain_unrankable_scores(scores: Floats) -> str:
    """Return the reason if scores cannot rank the records (NaN, or all equal), otherwise ""."""
    if missing := int(np.isnan(scores).sum()):
        return f"is not a number for {missing} of {len(scores)} records"
    if (scores == scores[0]).all():
        return f"is the same for all {len(scores)} records"
    return ""


def explain_too_few_records(member: Bools) -> str:
    """Return a sentence if members or non-members are too few for a comparison, otherwise ""."""
    n_members = int(member.sum())
    n_nonmembers = int((~member).sum())
    if min(n_members, n_nonmembers) >= roc.LEAST:
        return ""
    return (
        f"needs at least {roc.LEAST} members and {roc.LEAST} non-members to distinguish, got "
        f"{n_members} and {n_nonmembers}"
    )
