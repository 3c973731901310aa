"""Define the base class of user-written membership scores, which are higher for members."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
class MembershipProbe(AncestralProbe):
    """Base class of probes that score each record's membership."""

    measures = "membership"
    needs = ("likelihood",)
    least_nonmembers = roc.LEAST
    page = "how-to/membership"

    def compute_main_scores(self, observations: Sequence[Observation]) -> Floats:
        """Return the score of each record from which the main AUC is computed, (records,)."""
        raise NotImplementedError

    def select_usable_scores(self, observations: Sequence[Observation]) -> dict[str, Floats]:
        """Return the scores that can rank the records, keyed by name."""
        raise NotImplementedError

    def describe_score(self, name: str) -> str:
        """Return the title of a score."""
        raise NotImplementedError

    def check_secrets(self, secrets: Sequence[Secret]) -> None:
        if reason := explain_too_few_records(mask_members(secrets)):
            raise AuditError(
                f"--attack {self.name} {reason}: give --nonmembers FILE, records like the data"
            )

    def select_baselines(self, observations: Sequence[Observation]) -> dict[str, Floats]:
        """Return the scores of the blind classifier and of the reference model.

        Scores that cannot rank the records are left out.
        """
        baselines = {}
        for name in ("blind", "reference_alone"):
            scores = align_record_scores(name, observations)
            if not explain_unrankable_scores(scores):
                baselines[name] = scores
        return baselines

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        """Return the main AUC, for the members with each repeat count against all non-members."""
        main = self.compute_main_scores(observations)
        member = mask_members(secrets)
        widen = self.main_score_widening(observations, member)
        return {
            str(count): roc.estimate_auc(name_auc(""), main[mask], main[~member], widen=widen)
            for count, mask in mask_repeat_counts(secrets).items()
            if mask.sum() >= roc.LEAST
        }

    def main_score_widening(self, observations: Sequence[Observation], member: Bools) -> float:
        """Return the factor that widens the interval of the main AUC."""
        return 1.0

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Floats]:
        """Return each secret's scores, from which all numbers of the probe can be computed."""
        columns = {
            "": self.compute_main_scores(observations),
            **self.select_baselines(observations),
            **self.select_usable_scores(observations),
        }
        return {name_score_column(name): scores for name, scores in columns.items()}

    def membership_candidates(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, CandidateScore]:
        """Return all scores of the audited model that can rank the records, keyed by name."""
        member = mask_members(secrets)
        widen = map_auc_widening(observations, member)
        usable = self.select_usable_scores(observations)
        weights = adjusted_auc.weigh_scored_records(
            usable,
            self.select_baselines(observations),
            build_text_features(secrets, observations),
            member,
            value_column(observations, "group").astype(int),
        )
        candidates = {}
        for name, scores in usable.items():
            title = self.describe_score(name)
            candidates[name] = CandidateScore(scores, title, widen[name], weights.get(name))
        return candidates


@dataclass(frozen=True)
class MembershipScore(MembershipProbe):
    """Base class of membership scores. A subclass only defines `name` and `score_records`.

    The base class computes AUC and rates, AUC by number of copies, a baseline that does not use the
    model, and the numbers kept for each record. `membership_auc` takes the score into account,
    alongside the built-in scores.
    """

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
        results = measure_membership_score("", scores, member, note=self.describe_score(""))
        results += measure_membership_score(self.score_name, scores, member)
        for name, blind in self.select_baselines(observations).items():
            widen = map_auc_widening(observations, member)[name]
            results.append(
                roc.estimate_auc(name_auc(name), blind[member], blind[~member], widen=widen)
            )
        return results

    def compute_main_scores(self, observations: Sequence[Observation]) -> Floats:
        return value_column(observations, _SCORE)

    def select_usable_scores(self, observations: Sequence[Observation]) -> dict[str, Floats]:
        return {self.score_name: self.compute_main_scores(observations)}

    def describe_score(self, name: str) -> str:
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


def map_auc_widening(observations: Sequence[Observation], member: Bools) -> Mapping[str, float]:
    """Return the factor that widens each score's AUC interval, keyed by score name.

    The factor exceeds 1 if a score is from a classifier that learns from the other records, because
    such scores depend on each other.
    """
    cross_fit = blind_classifier.compute_cross_fit_deviation_factor(
        member, value_column(observations, "group").astype(int)
    )
    return defaultdict(lambda: 1.0, blind=cross_fit, stacked=cross_fit)


def align_record_scores(name: str, observations: Sequence[Observation]) -> Floats:
    """Return the score `name` of each record, of shape (records,); NaN if a record has none."""
    return Observed(observations).find_column(name)[0]


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
