"""Measure how well scores distinguish training records from other records.

This includes a blind baseline, which does not use the audited model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.attacks.likelihood_ranking import count_compressed_bytes, score_lower_case
from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.core.secret_table import build_secret_table
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.references import ReferenceModels
from auditor.plugins.membership_score import (
    MembershipProbe,
    align_record_scores,
    build_text_features,
    explain_too_few_records,
    explain_unrankable_scores,
    map_auc_widening,
)
from auditor.plugins.options import ShareOrAll
from auditor.plugins.probe import (
    Observed,
    mask_members,
    observe_in_batches,
    read_token_statistics,
    value_column,
)
from auditor.plugins.view import View
from auditor.statistics import blind_classifier, membership, people, roc
from auditor.statistics.membership import FALSE_POSITIVES, SCORES
from auditor.statistics.metrics import name_auc
from auditor.statistics.strongest_score import measure_membership_score

_SECRETS_AT_ONCE = 64
# entries of the distribution per batch of moments: 16 MiB of float32
_DISTRIBUTION_AT_ONCE = 2**22
_LEAST_LOG = -1e4  # nats: e^x is 0, as is its part of a moment, which -inf would turn into NaN
_OF_TEXT = ("zlib", "lowercase")
_OF_REFERENCE = ("reference", "reference_ratio", "min_k_plus_calibrated", "ez_mia", "wbc")
_OF_REFERENCES = ("rmia", "lira")
_OF_DISTRIBUTION = {  # inputs of a score besides the log-probabilities of the text's tokens
    "min_k_plus": "whole distributions",
    "min_k_plus_calibrated": "whole distributions",
    "ez_mia": "the ranks of tokens",
}
# LiRA's ratio by token losses: if models that saw each record exist, and without such models
_TOKEN_LIRA = "token_lira"
_TOKEN_LIRA_OFFLINE = "token_lira_offline"
_RATIO = "rmia_ratio"  # RMIA's ranking of the population, which uses no label
_STACKED = (*(name for name in SCORES if name not in ("rmia", "stacked")), _RATIO)


@dataclass(frozen=True)
class Membership(MembershipProbe):
    """Measure how well scores distinguish members from non-members (AUC, TPR at 1% and 0.1% FPR).

    A blind baseline does not use the audited model.

    score: the main score. If it cannot be computed, the probe does not apply.
    text: `suffix` scores the suffix given its prefix, `all` scores all but the first token.
    k: the share of tokens that Min-K% averages.
    references: a folder of models trained on some of the records, for RMIA and LiRA. In a lab, give
    the number of models to train.
    lira: whether LiRA compares each record's mean loss, or the vector of its tokens' losses.
    lowercase: whether each text is also scored in lower case.
    """

    name = "membership"
    quick: ClassVar[Mapping[str, Any]] = {"lowercase": False}  # no second reading of each text
    without_reference: ClassVar[Mapping[str, Any]] = {"score": "min_k_plus"}
    # EZ-MIA needs ranks, which not all models give
    without_distributions: ClassVar[Mapping[str, Any]] = {"score": "loss"}
    score: str = "ez_mia"
    text: Literal["suffix", "all"] = "suffix"
    k: ShareOrAll = 0.2
    references: str = ""
    lira: Literal["mean", "tokens"] = "mean"
    lowercase: bool = True

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise AuditError(f"expected score in {tuple(SCORES)}, got {self.score!r}")
        super().__post_init__()
        if self.score == "lowercase" and not self.lowercase:
            raise AuditError("expected lowercase=true with score=lowercase, got false")
        if self.score in _OF_REFERENCES and not self.references:
            raise AuditError(
                f"expected -A membership.references= with score={self.score}, got none"
            )
        if self.lira == "tokens" and not self.references:
            raise AuditError("expected -A membership.references= with lira=tokens, got none")

    def wanted_reference_models(self) -> str:
        return self.references

    # --- each secret ---

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        self._usable_reference_model(view)
        if self.references and view.references is None:
            raise NotApplicable("there are no reference models here")

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        self.check_inputs(view, secrets)
        reference = self._usable_reference_model(view)
        if self.references and view.references:
            references = view.references(self.references)
        else:
            references = None

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            readings = measure_token_readings(view.target, prefixes, suffixes)
            observed = list[Observation]()
            if reference:
                reference_readings = measure_token_readings(reference, prefixes, suffixes)
            else:
                reference_readings = None
            others = self._read_references(
                references, batch, prefixes, suffixes, readings.log_probs
            )
            if self.lowercase:
                lowered = self._score_lower_case_readings(view, batch, readings)
            else:
                lowered = []
            for i, secret in enumerate(batch):
                values = self._score_readings(
                    readings.select_suffix(i),
                    reference_readings.select_suffix(i) if reference_readings else None,
                )
                values |= self._score_text_forms(
                    view, secret, values["loss"], lowered[i] if lowered else None
                )
                observed.append(
                    Observation(
                        secret.id, {**values, "tokens": float(len(secret.suffix)), **others[i]}
                    )
                )
            return observed

        if self.text == "all":
            secrets = build_secret_table(map(self._cut_scored_secret, secrets))
        yield from observe_in_batches(view, secrets, _SECRETS_AT_ONCE, look)

    def _cut_scored_secret(self, secret: Secret) -> Secret:
        """Return the secret with all tokens but the first in its suffix."""
        if not secret.prefix:
            return secret
        first, *rest = secret.prefix  # no context predicts the first token
        return replace(secret, prefix=(first,), suffix=(*rest, *secret.suffix))

    def _usable_reference_model(self, view: View) -> LanguageModel | None:
        """Return the reference model; None if it is missing or unusable.

        Raise NotApplicable if the main score needs a reference model.
        """
        if view.reference_fault:
            usable = None
        else:
            usable = view.reference
        if usable is None and self.score in _OF_REFERENCE:
            reason = (
                view.reference_fault
                or f"{SCORES[self.score]} needs a model that saw no private data"
            )
            way_out = (
                "give --reference MODEL, or choose a score that needs none (-A "
                "membership.score=min_k_plus)"
            )
            raise NotApplicable(f"{reason}: {way_out}")
        return usable

    def _score_readings(
        self, readings: TokenReadings, smaller_model_readings: TokenReadings | None
    ) -> dict[str, float]:
        # Formulas A9; EZ-MIA and WBC by formulas C2.
        scores = {
            "loss": float(readings.log_probs.mean()),
            "min_k": membership.average_lowest(readings.log_probs, self.k),
        }
        if (standardised := readings.min_k_plus_token_scores) is not None:
            scores["min_k_plus"] = membership.average_lowest(standardised, self.k)
        if smaller_model_readings is None:
            return scores
        delta = readings.log_probs - smaller_model_readings.log_probs
        if (
            standardised is not None
            and (other := smaller_model_readings.min_k_plus_token_scores) is not None
        ):
            scores["min_k_plus_calibrated"] = scores["min_k_plus"] - membership.average_lowest(
                other, self.k
            )
        if readings.wrong is not None:
            scores["ez_mia"] = membership.score_error_zone(delta, readings.wrong)
        return scores | {
            "reference": float(delta.mean()),
            "reference_ratio": -float(
                readings.log_probs.mean() / smaller_model_readings.log_probs.mean()
            ),  # both means are below 0
            "wbc": membership.score_windows(delta),
            "reference_alone": float(smaller_model_readings.log_probs.mean()),
        }

    def _score_text_forms(
        self, view: View, secret: Secret, mean: float, lowered: float | None
    ) -> dict[str, float]:
        """Return the scores that need a record's text, not its tokens; {} without a tokenizer.

        mean: the text's mean log-probability; lowered: that of the lower-cased text, or None.
        """
        if view.tokenizer is None:
            return {}
        suffix = view.tokenizer.decode([*secret.suffix])
        text = view.tokenizer.decode([*secret.prefix, *secret.suffix])
        # `mean` is a log-probability: each score is higher for members.
        scores = {
            "zlib": mean / count_compressed_bytes(suffix),
            "characters": float(len(text)),
            "compressed_bytes": float(count_compressed_bytes(text)),
        }
        if lowered is not None:
            scores["lowercase"] = lowered
        return scores

    def _score_lower_case_readings(
        self, view: View, batch: Sequence[Secret], readings: TokenReadings
    ) -> list[float]:
        if view.tokenizer is None:
            return []
        pairs = [(secret.prefix, secret.suffix) for secret in batch]
        return score_lower_case(view, pairs, (-readings.log_probs.mean(-1)).tolist())

    def _read_references(
        self,
        references: ReferenceModels | None,
        batch: Sequence[Secret],
        prefixes: Tensor,
        suffixes: Tensor,
        log_probs: Floats,
    ) -> list[dict[str, float]]:
        """Return each text's values under the reference models, keyed by name.

        For each model, these are the text's mean log-probability, and whether the model was trained
        on the text. For `lira=tokens`, there are also LiRA's ratios, online and offline. prefixes:
        (B, n); suffixes: (B, L); log_probs: (B, L) by the target.
        """
        values_by_text: list[dict[str, float]] = [{} for _ in batch]
        if references is None:
            return values_by_text
        saw = np.zeros((len(batch), len(references.models)), dtype=bool)
        by_model = []
        for i, (model, ids) in enumerate(zip(references.models, references.saw, strict=True)):
            with torch.no_grad():
                by_model.append(model.token_log_probs(prefixes, suffixes).double().cpu())
            means = by_model[-1].mean(-1).tolist()
            for row, secret in enumerate(batch):
                saw[row, i] = secret.id in ids
                values_by_text[row] |= {
                    f"log_prob_{i}": means[row],
                    f"saw_{i}": float(saw[row, i]),
                }
        if self.lira == "mean":
            return values_by_text
        confidences = membership.compute_logit_confidence(log_probs)
        reference_confidences = membership.compute_logit_confidence(
            torch.stack(by_model, dim=1).numpy()
        )  # (B, models, L)
        for row, values in enumerate(values_by_text):
            target = confidences[row]
            scores = reference_confidences[row]
            values[_TOKEN_LIRA] = membership.compute_token_lira_ratio(target, scores, saw[row])
            outside = ~saw[row]
            values[_TOKEN_LIRA_OFFLINE] = membership.compute_token_lira_ratio(
                target, scores[outside], saw[row][outside]
            )
        return values_by_text

    # --- all secrets together ---

    def add_joint_values(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Sequence[Observation]:
        """Add those scores of a record that depend on other records.

        RMIA needs a population, LiRA needs standard deviations, and classifiers need records to
        learn from.
        """
        member = mask_members(secrets)
        if explain_too_few_records(member):
            return observations
        group = blind_classifier.group_related_secrets(secrets)
        added = self._score_references(observations, member, group)
        usable = []
        for name in _STACKED:
            scores = added.get(name, align_record_scores(name, observations))
            if np.isfinite(scores).all() and not self._unusable_reason(name, scores, observations):
                usable.append(scores)
        if usable:
            added["stacked"] = blind_classifier.predict_membership(
                blind_classifier.standardise_columns(np.column_stack(usable)), member, group
            )
        features = build_text_features(secrets, observations)
        added["blind"] = blind_classifier.predict_membership(features, member, group)
        added["group"] = group.astype(np.float64)
        return Observed(observations).add_columns(added)

    def _score_references(
        self,
        observations: Sequence[Observation],
        member: Bools,
        group: Ints,
    ) -> dict[str, Floats]:
        """Return RMIA and LiRA scores, (records,), keyed by name; {} without reference models."""
        count = _count_rmia_lira_references(observations)
        if not count:
            return {}
        reference_log_probs = _stack_reference_columns(observations, "log_prob")
        saw = _stack_reference_columns(observations, "saw")
        log_probs = value_column(observations, "loss")
        ratio = membership.compute_rmia_log_ratio(log_probs, reference_log_probs, saw == 1)
        confidences = membership.compute_logit_confidence(log_probs)
        reference_confidences = membership.compute_logit_confidence(reference_log_probs)
        if self.lira == "mean":
            lira = membership.compute_lira_ratio(confidences, reference_confidences, saw == 1)
        elif membership.has_both_model_kinds(saw == 1):
            lira = value_column(observations, _TOKEN_LIRA)
        else:
            lira = value_column(observations, _TOKEN_LIRA_OFFLINE)
        return {
            _RATIO: ratio,
            "rmia": membership.compute_rmia_share(ratio, ~member, group),
            "lira": lira,
        }

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        member = mask_members(secrets)
        if shortage := explain_too_few_records(member):
            raise NotApplicable(shortage)
        main = self.compute_main_scores(observations)
        if fault := self._unusable_reason(self.score, main, observations):
            raise NotApplicable(f"{SCORES[self.score]} {fault}")
        widen = map_auc_widening(observations, member)
        scores_by_name = {
            **self.select_baselines(observations),
            **self.select_usable_scores(observations),
        }
        measured = measure_membership_score("", main, member, widen[self.score], SCORES[self.score])
        for name, scores in scores_by_name.items():
            measured += measure_membership_score(name, scores, member, widen[name])
        return [*measured, *self._user_inference_aucs(secrets, observations)]

    def _user_inference_aucs(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Measurement, ...]:
        """Return AUCs for inferring whether any record of a person was trained on.

        Only the person's untrained records are scored. The audited model gives one AUC, the
        reference model another.
        """
        if "user" not in build_secret_table(secrets).columns:
            return ()
        if "reference" in self.select_usable_scores(observations):
            chosen = "reference"
        else:
            chosen = self.score
        scores = {people.INFERENCE: align_record_scores(chosen, observations)}
        if "reference_alone" in self.select_baselines(observations):
            scores[people.INFERENCE_CONTROL] = align_record_scores("reference_alone", observations)
        return people.measure_user_inference(
            secrets, scores, f"mean of {SCORES[chosen]} over a person's records"
        )

    def select_usable_scores(self, observations: Sequence[Observation]) -> dict[str, Floats]:
        """Return the scores that can rank the records, in the order of the table of scores."""
        usable = {}
        for name in SCORES:
            scores = align_record_scores(name, observations)
            if not self._unusable_reason(name, scores, observations):
                usable[name] = scores
        return usable

    def _unusable_reason(
        self, name: str, scores: Floats, observations: Sequence[Observation]
    ) -> str:
        """Return why a score cannot rank the records; "" if it can."""
        # All differences are 0. (NaN is true: `explain_unrankable_scores` reports a missing
        # score.)
        if name in _OF_REFERENCE and not align_record_scores("reference", observations).any():
            return "says nothing: the reference is the target itself"
        return explain_unrankable_scores(scores)

    def compute_main_scores(self, observations: Sequence[Observation]) -> Floats:
        return align_record_scores(self.score, observations)

    def describe_score(self, name: str) -> str:
        return SCORES[name]

    def main_score_widening(self, observations: Sequence[Observation], member: Bools) -> float:
        return map_auc_widening(observations, member)[self.score]

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        member = mask_members(secrets)
        sentences = [
            "each record's stacked and blind scores come from a classifier fitted to other "
            "records: no label of the record, its near-duplicates, document or person is used; "
            "such an attacker knows some members and non-members",
        ]
        for rate in FALSE_POSITIVES:
            if (~member).sum() < roc.count_threshold_nonmembers(rate):
                sentences.append(
                    f"no true-positive rate at {rate:.1%}: it takes "
                    f"{roc.count_threshold_nonmembers(rate):,} non-members, there are "
                    f"{int((~member).sum()):,}"
                )
        for name, reason in self._missing_score_reasons(observations).items():
            sentences.append(f"{SCORES[name]}: {reason}")
        group = value_column(observations, "group").astype(int)
        if related := int((np.bincount(group)[group] > 1).sum()):
            sentences.append(
                f"{related} records are near-duplicates, or of one document, person or prompt: in "
                "one fold"
            )
        if "blind" not in self.select_baselines(observations):
            sentences.append(
                "no blind baseline: too few unrelated records to fit a classifier, so whether "
                "members and non-members differ in kind is not known"
            )
        return (
            *sentences,
            *self._target_free_baseline_notes(observations, member),
            *self._list_rmia_lira_notes(observations),
        )

    def _missing_score_reasons(self, observations: Sequence[Observation]) -> dict[str, str]:
        """Return the reason why each score is missing, keyed by score name."""
        reasons = {}
        for name in SCORES:
            if name in observations[0].values:
                if fault := self._unusable_reason(
                    name, align_record_scores(name, observations), observations
                ):
                    reasons[name] = f"not applicable: it {fault}"
            elif name == "lowercase" and not self.lowercase:
                reasons[name] = "turned off (-A membership.lowercase=false)"
            elif name in _OF_TEXT:
                reasons[name] = "not applicable: the model came without a tokenizer"
            elif name in _OF_DISTRIBUTION and (
                name == "min_k_plus" or "reference" in observations[0].values
            ):
                reasons[name] = (
                    f"not applicable: it needs {_OF_DISTRIBUTION[name]}, which the target does not "
                    "give"
                )
            elif name in _OF_REFERENCE:
                reasons[name] = (
                    "not applicable: there is no reference that saw no private data (--reference "
                    "MODEL)"
                )
            elif name in _OF_REFERENCES:
                reasons[name] = (
                    "not applicable: there are no reference models (-A membership.references=)"
                )
        return reasons

    def _target_free_baseline_notes(
        self, observations: Sequence[Observation], member: Bools
    ) -> Iterator[str]:
        widen = map_auc_widening(observations, member)
        for name, scores in self.select_baselines(observations).items():
            m = roc.estimate_auc(name_auc(name), scores[member], scores[~member], widen=widen[name])
            if m.low <= 0.5:
                continue
            if name == "blind":
                yield (
                    "members and non-members differ in kind: without any model they are "
                    f"distinguished with AUC {m.value:.3f} ({m.low:.3f} to {m.high:.3f}), so no "
                    "membership number here is reliable"
                )
            else:
                yield (
                    "the reference alone distinguishes members from non-members with AUC "
                    f"{m.value:.3f} ({m.low:.3f} to {m.high:.3f}): it saw some of them, or the two "
                    "differ in kind"
                )

    def _list_rmia_lira_notes(self, observations: Sequence[Observation]) -> Iterator[str]:
        if count := _count_rmia_lira_references(observations):
            saw = _stack_reference_columns(observations, "saw") == 1
            kind = "online: for each record, some were trained on it and others were not"
            if not membership.has_both_model_kinds(saw):
                kind = "offline: for each record, only those that did not see it"
            shared = ""
            if self.lira == "tokens":
                shared = ", LiRA on the vectors of token losses"
            elif count < membership.SHADOWS:
                shared = ", LiRA's deviations shared by all records"
            yield f"RMIA and LiRA by {count} reference models, {kind}{shared}"


def _stack_reference_columns(observations: Sequence[Observation], name: str) -> Floats:
    """Return a value of each record by each reference model, of shape (records, models)."""
    models = range(_count_rmia_lira_references(observations))
    return np.column_stack([value_column(observations, f"{name}_{i}") for i in models])


def _count_rmia_lira_references(observations: Sequence[Observation]) -> int:
    if observations:
        return sum(name.startswith("saw_") for name in observations[0].values)
    return 0


# --- the shared pass ---


@dataclass(frozen=True)
class TokenReadings:
    """Hold statistics of suffix tokens under one model, in nats: (B, L), or (L,) for one suffix.

    mean, deviation: those of log p(v) if token v is drawn from the next-token distribution; None
    without distributions.
    wrong: True if the likeliest token is not the text's; None without both distributions and ranks.
    """

    log_probs: NDArray[Any]
    mean: NDArray[Any] | None = None
    deviation: NDArray[Any] | None = None
    wrong: NDArray[Any] | None = None

    def select_suffix(self, i: int) -> TokenReadings:
        """Return the statistics of the tokens of suffix i, (L,) each."""
        mean, deviation, wrong = (
            None if x is None else x[i] for x in (self.mean, self.deviation, self.wrong)
        )
        return TokenReadings(self.log_probs[i], mean, deviation, wrong)

    @property
    def min_k_plus_token_scores(self) -> Floats | None:
        if self.mean is None or self.deviation is None:
            return None
        return membership.standardise_log_probs(self.log_probs, self.mean, self.deviation)


@torch.no_grad()
def measure_token_readings(
    model: LanguageModel, prefixes: Tensor, suffixes: Tensor
) -> TokenReadings:
    """Compute the statistics of suffixes' tokens in one teacher-forced pass.

    prefixes: (B, n); suffixes: (B, L).
    """
    if not implies_capability(model.capabilities, "distribution"):
        log_probs = model.token_log_probs(prefixes, suffixes).double().cpu().numpy()
        ranked = implies_capability(model.capabilities, "ranks")
        if ranked:
            wrong = (model.token_ranks(prefixes, suffixes) > 1).cpu().numpy()
        else:
            wrong = None
        return TokenReadings(log_probs, wrong=wrong)
    parts = read_token_statistics(
        model, prefixes, suffixes, _DISTRIBUTION_AT_ONCE, _compute_token_statistics
    )
    return TokenReadings(
        *(torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    )


def _compute_token_statistics(
    distribution: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four statistics of each token, of shape (rows,) each.

    These are log p of the token, the mean and the standard deviation of log p under the next-token
    distribution, and whether some other token is more likely. distribution: (rows, V)
    log-probabilities;
    tokens: (rows,).
    """
    log_prob = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    leads = distribution.argmax(-1) == tokens
    log_p = distribution.clamp_min(_LEAST_LOG)  # a copy, overwritten below
    p = log_p.exp()
    mean = (p * log_p).sum(-1, keepdim=True)
    # about the mean, to avoid cancellation
    deviation = log_p.sub_(mean).square_().mul_(p).sum(-1).sqrt()
    return log_prob.double(), mean.squeeze(-1).double(), deviation.double(), ~leads
