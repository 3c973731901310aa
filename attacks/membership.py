"""Membership: how well scores tell the records that a model was trained on from others, beside a
blind baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.attacks.likelihood_ranking import scores_against_lower_case, zlib_compressed_byte_count
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.decoding import ANCESTRAL
from auditor.models.references import ReferenceModels
from auditor.plugins.options import require_listed_options
from auditor.plugins.probe import (
    Observed,
    Probe,
    masks_by_repeat_count,
    member_mask,
    observe_in_batches,
    read_token_statistics,
    value_column,
)
from auditor.plugins.view import Sampling, View
from auditor.statistics import blind_classifier, membership, people, roc
from auditor.statistics.membership import FALSE_POSITIVES, SCORES
from auditor.statistics.metrics import auc_name, name_score_column
from auditor.statistics.strongest_score import CandidateScore, measure_membership_score

_SECRETS_AT_ONCE = 64
# entries of the distribution whose moments are taken at once: 16 MiB of float32
_DISTRIBUTION_AT_ONCE = 2**22
_LEAST_LOG = -1e4  # nats: e^x is 0 and so is its part in a moment, which of -inf would be no number
_OF_TEXT = ("zlib", "lowercase")
_OF_REFERENCE = ("reference", "reference_ratio", "min_k_plus_calibrated", "ez_mia", "wbc")
_OF_REFERENCES = ("rmia", "lira")
_OF_DISTRIBUTION = {  # what a score takes beside the log-probabilities of the text's own tokens
    "min_k_plus": "whole distributions",
    "min_k_plus_calibrated": "whole distributions",
    "ez_mia": "the ranks of tokens",
}
_SHADOW = ("log_prob", "saw")  # of each reference model
_RATIO = "rmia_ratio"  # what RMIA ranks the population by, which takes nobody's label
_STACKED = (*(name for name in SCORES if name not in ("rmia", "stacked")), _RATIO)
_SIZES = ("characters", "compressed_bytes")  # of the whole text, for the blind baseline


@dataclass(frozen=True)
class Membership(Probe):
    """Scores that tell members from non-members: AUC, TPR at 1% and 0.1% FPR, and a baseline that
    sees no model.

    score: one that must be there, else the row does not apply; text: the suffix behind its prefix,
    or all but the first token; k: share of tokens that Min-K% looks at; references: models that saw
    some of the records, for RMIA and LiRA: a folder of them, or in the lab how many it is to train;
    lowercase: whether each text is read once more in lower case.
    """

    name: ClassVar[str] = "membership"
    page: ClassVar[str] = "how-to/membership"
    measures: ClassVar[str] = "membership"
    needs: ClassVar[tuple[str, ...]] = ("likelihood",)
    quick: ClassVar[Mapping[str, Any]] = {"lowercase": False}  # no second reading of each text
    without_reference: ClassVar[Mapping[str, Any]] = {"score": "min_k_plus"}
    # EZ-MIA takes ranks, which not all give
    without_distributions: ClassVar[Mapping[str, Any]] = {"score": "loss"}
    least_nonmembers: ClassVar[int] = roc.LEAST
    score: str = "ez_mia"
    text: Literal["suffix", "all"] = "suffix"
    k: float = 0.2
    references: str = ""
    lowercase: bool = True

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise AuditError(f"expected score in {tuple(SCORES)}, got {self.score!r}")
        require_listed_options(self)
        if not 0 < self.k <= 1:
            raise AuditError(f"expected k in (0, 1], got {self.k}")
        if self.score == "lowercase" and not self.lowercase:
            raise AuditError("expected lowercase=true beside score=lowercase, got false")
        if self.score in _OF_REFERENCES and not self.references:
            raise AuditError(
                f"expected -A membership.references= beside score={self.score}, got none"
            )

    def sampling(self) -> Sampling:
        """The distribution that it looks at, whole and as it is."""
        return Sampling(1, ANCESTRAL)

    def wanted_reference_models(self) -> str:
        return self.references

    def check_secrets(self, secrets: Sequence[Secret]) -> None:
        if said := _too_few_records_reason(member_mask(secrets)):
            raise AuditError(
                f"--attack {self.name} {said}: give --nonmembers FILE, records like the data"
            )

    # --- one secret at a time
    # ------------------------------------------------------------------------------------

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        self._usable_reference_model(view)
        if self.references and view.references is None:
            raise NotApplicable("there are no reference models here")

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        self.check_inputs(view, secrets)
        reference = self._usable_reference_model(view)
        references = (
            view.references(self.references) if self.references and view.references else None
        )

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            own, found = (
                measure_token_readings(view.target, prefixes, suffixes),
                list[Observation](),
            )
            below = measure_token_readings(reference, prefixes, suffixes) if reference else None
            others = self._reference_log_probs_and_seen_flags(references, batch, prefixes, suffixes)
            lowered = self._scores_against_lower_case(view, batch, own) if self.lowercase else []
            for i, secret in enumerate(batch):
                seen = self._scores_from_token_readings(
                    own.readings_of_text(i), below.readings_of_text(i) if below else None
                )
                seen |= self._zlib_and_lowercase(
                    view, secret, seen["loss"], lowered[i] if lowered else None
                )
                found.append(
                    Observation(
                        secret.id, {**seen, "tokens": float(len(secret.suffix)), **others[i]}
                    )
                )
            return found

        yield from observe_in_batches(
            view, [self._secret_as_scored(s) for s in secrets], _SECRETS_AT_ONCE, look
        )

    def _secret_as_scored(self, secret: Secret) -> Secret:
        """The secret as it is scored: its suffix behind its prefix, or all of it behind its first
        token."""
        if self.text == "suffix" or not secret.prefix:
            return secret
        first, *rest = secret.prefix  # nothing stands before the first token to predict it by
        return replace(secret, prefix=(first,), suffix=(*rest, *secret.suffix))

    def _usable_reference_model(self, view: View) -> LanguageModel | None:
        """The reference model, None where it is unfit or there is none. NotApplicable where the
        main score needs it."""
        found = None if view.reference_fault else view.reference
        if found is None and self.score in _OF_REFERENCE:
            why = (
                view.reference_fault
                or f"{SCORES[self.score]} needs a model that saw no private data"
            )
            way_out = (
                "give --reference MODEL, or choose a score that needs none (-A "
                "membership.score=min_k_plus)"
            )
            raise NotApplicable(f"{why}: {way_out}")
        return found

    def _scores_from_token_readings(
        self, own: TokenReadings, below: TokenReadings | None
    ) -> dict[str, float]:
        # Formulas A9; EZ-MIA and WBC by formulas C2.
        seen = {
            "loss": float(own.log_probs.mean()),
            "min_k": membership.average_lowest(own.log_probs, self.k),
        }
        if (away := own.min_k_plus_token_scores) is not None:
            seen["min_k_plus"] = membership.average_lowest(away, self.k)
        if below is None:
            return seen
        delta = own.log_probs - below.log_probs
        if away is not None and (other := below.min_k_plus_token_scores) is not None:
            seen["min_k_plus_calibrated"] = seen["min_k_plus"] - membership.average_lowest(
                other, self.k
            )
        if own.wrong is not None:
            seen["ez_mia"] = membership.score_error_zone(delta, own.wrong)
        return seen | {
            "reference": float(delta.mean()),
            "reference_ratio": -float(
                own.log_probs.mean() / below.log_probs.mean()
            ),  # both means are below 0
            "wbc": membership.score_windows(delta),
            "reference_alone": float(below.log_probs.mean()),
        }

    def _zlib_and_lowercase(
        self, view: View, secret: Secret, mean: float, lowered: float | None
    ) -> dict[str, float]:
        """Scores and sizes that take the text itself, not its tokens; nothing without a
        tokenizer."""
        if view.tokenizer is None:
            return {}
        suffix, whole = (
            view.tokenizer.decode([*head, *secret.suffix]) for head in ((), secret.prefix)
        )
        sizes = len(whole), zlib_compressed_byte_count(whole)
        # `mean` is a log-probability: signs are those of formulas A2.
        found = {
            "zlib": mean / zlib_compressed_byte_count(suffix),
            **dict(zip(_SIZES, map(float, sizes), strict=True)),
        }
        return found if lowered is None else {**found, "lowercase": lowered}

    def _scores_against_lower_case(
        self, view: View, batch: Sequence[Secret], own: TokenReadings
    ) -> list[float]:
        if view.tokenizer is None:
            return []
        pairs = [(secret.prefix, secret.suffix) for secret in batch]
        return scores_against_lower_case(view, pairs, (-own.log_probs.mean(-1)).tolist())

    def _reference_log_probs_and_seen_flags(
        self,
        references: ReferenceModels | None,
        batch: Sequence[Secret],
        prefixes: Tensor,
        suffixes: Tensor,
    ) -> list[dict[str, float]]:
        """Under each reference model, the mean log-probability of each text, and whether it was
        trained on it."""
        found: list[dict[str, float]] = [{} for _ in batch]
        pairs = zip(references.models, references.saw, strict=True) if references else ()
        for i, (model, saw) in enumerate(pairs):
            with torch.no_grad():
                means = model.token_log_probs(prefixes, suffixes).double().mean(-1).tolist()
            for one, secret, mean in zip(found, batch, means, strict=True):
                one |= {f"log_prob_{i}": mean, f"saw_{i}": float(secret.id in saw)}
        return found

    # --- all secrets together
    # ------------------------------------------------------------------------------------

    def add_joint_values(
        self, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> list[Observation]:
        """Adds the scores that take other records: RMIA's population, LiRA's deviations, a
        classifier's training."""
        member = member_mask(secrets)
        if _too_few_records_reason(member):
            return list(observations)
        texts = [secret.prefix + secret.suffix for secret in secrets]
        group = blind_classifier.fold_groups_of_secrets(secrets)
        added = self._rmia_and_lira_scores(observations, member, group)
        single = {
            name: added.get(name, _score_of_each_record(name, observations)) for name in _STACKED
        }
        fit = [
            scores
            for name, scores in single.items()
            if not self._unusable_reason(name, scores, observations)
        ]
        usable = [scores for scores in fit if np.isfinite(scores).all()]
        if usable:
            added["stacked"] = blind_classifier.combine_membership_scores(
                np.column_stack(usable), member, group
            )
        sizes = [
            value_column(observations, size) for size in _SIZES if size in observations[0].values
        ]
        lengths = np.column_stack(sizes) if sizes else np.empty((len(texts), 0))
        added["blind"] = blind_classifier.score_membership_blindly(texts, lengths, member, group)
        added["group"] = group.astype(np.float64)
        return [
            replace(
                seen,
                values={
                    **seen.values,
                    **{name: float(values[i]) for name, values in added.items()},
                },
            )
            for i, seen in enumerate(observations)
        ]

    def _rmia_and_lira_scores(
        self,
        observations: Sequence[Observation],
        member: NDArray[np.bool_],
        group: NDArray[np.int64],
    ) -> dict[str, NDArray[np.float64]]:
        count = _rmia_lira_reference_count(observations)
        if not count:
            return {}
        # (records, models) each.
        theirs, saw = (
            np.column_stack([value_column(observations, f"{x}_{i}") for i in range(count)])
            for x in _SHADOW
        )
        own = value_column(observations, "loss")
        ratio = membership.compute_rmia_log_ratio(own, theirs, saw == 1)
        mine, others = (
            membership.compute_logit_confidence(own),
            membership.compute_logit_confidence(theirs),
        )
        return {
            _RATIO: ratio,
            "rmia": membership.compute_rmia_share(ratio, ~member, group),
            "lira": membership.compute_lira_ratio(mine, others, saw == 1),
        }

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        member = member_mask(secrets)
        if said := _too_few_records_reason(member):
            raise NotApplicable(said)
        main = _score_of_each_record(self.score, observations)
        if fault := self._unusable_reason(self.score, main, observations):
            raise NotApplicable(f"{SCORES[self.score]} {fault}")
        widen = _auc_widening_by_score(observations, member)
        found = {
            **self._target_free_baseline_scores(observations),
            **self._usable_scores_by_name(observations),
        }
        measured = [
            measure_membership_score("", main, member, widen[self.score], SCORES[self.score])
        ]
        measured += [
            measure_membership_score(name, scores, member, widen[name])
            for name, scores in found.items()
        ]
        return [
            *(m for part in measured for m in part),
            *self._user_inference_aucs(secrets, observations),
        ]

    def _user_inference_aucs(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Measurement, ...]:
        """AUCs of whether a person's data is in it, from records not trained on; beside the
        reference alone."""
        if all(secret.user is None for secret in secrets):
            return ()
        chosen = (
            "reference" if "reference" in self._usable_scores_by_name(observations) else self.score
        )
        scores = {people.INFERENCE: _score_of_each_record(chosen, observations)}
        if "reference_alone" in self._target_free_baseline_scores(observations):
            scores[people.INFERENCE_CONTROL] = _score_of_each_record(
                "reference_alone", observations
            )
        return people.measure_user_inference(
            secrets, scores, f"mean of {SCORES[chosen]} over a person's records"
        )

    def _target_free_baseline_scores(
        self, observations: Sequence[Observation]
    ) -> dict[str, NDArray[np.float64]]:
        """The baselines that never ask the target: the blind classifier, and the reference model
        alone."""
        found = {
            name: _score_of_each_record(name, observations) for name in ("blind", "reference_alone")
        }
        return {
            name: scores for name, scores in found.items() if not _unrankable_scores_reason(scores)
        }

    def _usable_scores_by_name(
        self, observations: Sequence[Observation]
    ) -> dict[str, NDArray[np.float64]]:
        """The scores that rank the records, in the table's order."""
        found = {name: _score_of_each_record(name, observations) for name in SCORES}
        return {
            name: scores
            for name, scores in found.items()
            if not self._unusable_reason(name, scores, observations)
        }

    def _unusable_reason(
        self, name: str, scores: NDArray[np.float64], observations: Sequence[Observation]
    ) -> str:
        """Why a score ranks nothing; "" where it does."""
        # All differences 0. (A NaN is true: of a score that is missing, `_unrankable_scores_reason`
        # tells.)
        if name in _OF_REFERENCE and not _score_of_each_record("reference", observations).any():
            return "tells nothing: the reference is the target itself"
        return _unrankable_scores_reason(scores)

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        """The main AUC of the members of each repeat count against all non-members."""
        main, member = _score_of_each_record(self.score, observations), member_mask(secrets)
        widen = _auc_widening_by_score(observations, member)[self.score]
        return {
            str(r): roc.estimate_auc(auc_name(""), main[own], main[~member], widen=widen)
            for r, own in masks_by_repeat_count(secrets).items()
            if own.sum() >= roc.LEAST
        }

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, list[float]]:
        """Scores, of which every number of the row is worked out again."""
        main, sound = (
            _score_of_each_record(self.score, observations),
            self._usable_scores_by_name(observations),
        )
        found = {"": main, **self._target_free_baseline_scores(observations), **sound}
        return {name_score_column(name): scores.tolist() for name, scores in found.items()}

    def membership_candidates(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, CandidateScore]:
        """Return every score that ranks the records; baselines that never ask the target are
        none."""
        widen = _auc_widening_by_score(observations, member_mask(secrets))
        usable = self._usable_scores_by_name(observations)
        return {
            name: CandidateScore(scores, SCORES[name], widen[name])
            for name, scores in usable.items()
        }

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        member = member_mask(secrets)
        said = [
            "each record's stacked and blind score is by a classifier fitted to other records: no "
            "label of its own, its near-duplicates, document or person is used; its attacker knows "
            "some members and some others",
        ]
        for rate in FALSE_POSITIVES:
            if (~member).sum() < roc.count_nonmembers_for_threshold(rate):
                said.append(
                    f"no true-positive rate at {rate:.1%}: it takes "
                    f"{roc.count_nonmembers_for_threshold(rate):,} non-members, there are "
                    f"{int((~member).sum()):,}"
                )
        said += [
            f"{SCORES[name]}: {why}"
            for name, why in self._missing_score_reasons(observations).items()
        ]
        group = value_column(observations, "group").astype(int)
        if related := int((np.bincount(group)[group] > 1).sum()):
            said.append(
                f"{related} records are near-duplicates, or of one document, person or prompt: in "
                "one fold"
            )
        if "blind" not in self._target_free_baseline_scores(observations):
            said.append(
                "no blind baseline: too few unrelated records to fit a classifier, so whether "
                "members and non-members differ in kind is not known"
            )
        return (
            *said,
            *self._target_free_baseline_notes(observations, member),
            *_rmia_lira_notes(observations),
        )

    def _missing_score_reasons(self, observations: Sequence[Observation]) -> dict[str, str]:
        """Why a score is not shown, by its name."""
        found = {}
        for name in SCORES:
            if name in observations[0].values:
                if fault := self._unusable_reason(
                    name, _score_of_each_record(name, observations), observations
                ):
                    found[name] = f"not applicable: it {fault}"
            elif name == "lowercase" and not self.lowercase:
                found[name] = "not asked for (-A membership.lowercase=false)"
            elif name in _OF_TEXT:
                found[name] = "not applicable: the model came without a tokenizer"
            elif name in _OF_DISTRIBUTION and (
                name == "min_k_plus" or "reference" in observations[0].values
            ):
                found[name] = (
                    f"not applicable: it needs {_OF_DISTRIBUTION[name]}, which the target does not "
                    "give"
                )
            elif name in _OF_REFERENCE:
                found[name] = (
                    "not applicable: there is no reference that saw no private data (--reference "
                    "MODEL)"
                )
            elif name in _OF_REFERENCES:
                found[name] = (
                    "not applicable: there are no reference models (-A membership.references=)"
                )
        return found

    def _target_free_baseline_notes(
        self, observations: Sequence[Observation], member: NDArray[np.bool_]
    ) -> Iterator[str]:
        widen = _auc_widening_by_score(observations, member)
        for name, scores in self._target_free_baseline_scores(observations).items():
            m = roc.estimate_auc(auc_name(name), scores[member], scores[~member], widen=widen[name])
            if m.low <= 0.5:
                continue
            if name == "blind":
                yield (
                    "members and non-members differ in kind: without any model they are "
                    f"distinguished with AUC {m.value:.3f} ({m.low:.3f} to {m.high:.3f}), so no "
                    "membership number here means what it says"
                )
            else:
                yield (
                    f"the reference alone tells members from non-members with AUC {m.value:.3f} "
                    f"({m.low:.3f} to {m.high:.3f}): it saw some of them, or the two differ in kind"
                )


def _rmia_lira_notes(observations: Sequence[Observation]) -> Iterator[str]:
    if count := _rmia_lira_reference_count(observations):
        saw = np.column_stack([value_column(observations, f"saw_{i}") for i in range(count)]) == 1
        kind = "online: every record is in some and out of others"
        if not membership.has_both_model_kinds(saw):
            kind = "offline: only those that did not see a record are asked about it"
        shared = ", LiRA's deviations shared by all records" if count < membership.SHADOWS else ""
        yield f"RMIA and LiRA by {count} reference models, {kind}{shared}"


def _auc_widening_by_score(
    observations: Sequence[Observation], member: NDArray[np.bool_]
) -> Mapping[str, float]:
    """Return by score what the deviation of its AUC is multiplied by: what is learnt in folds is
    less independent."""
    learnt = blind_classifier.compute_cross_fit_deviation_factor(
        member, value_column(observations, "group").astype(int)
    )
    return defaultdict(lambda: 1.0, blind=learnt, stacked=learnt)


def _score_of_each_record(name: str, observations: Sequence[Observation]) -> NDArray[np.float64]:
    """(records,) of one score; NaN where it was not to be had."""
    return np.array([seen.values.get(name, np.nan) for seen in observations], dtype=float)


def _unrankable_scores_reason(scores: NDArray[np.float64]) -> str:
    """Why a score ranks nothing: it is not a number for somebody, or the same for all; "" where it
    does."""
    if missing := int(np.isnan(scores).sum()):
        return f"is no number for {missing} of {len(scores)} records"
    return f"is the same for all {len(scores)} records" if (scores == scores[0]).all() else ""


def _too_few_records_reason(member: NDArray[np.bool_]) -> str:
    """What is missing for members to be told from non-members; "" where nothing is."""
    own, others = int(member.sum()), int((~member).sum())
    if min(own, others) >= roc.LEAST:
        return ""
    return (
        f"needs at least {roc.LEAST} members and {roc.LEAST} non-members to distinguish, got "
        f"{own} and {others}"
    )


def _rmia_lira_reference_count(observations: Sequence[Observation]) -> int:
    return sum(name.startswith("saw_") for name in observations[0].values) if observations else 0


# --- the shared pass
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenReadings:
    """Suffixes read by one model: (B, L) or, of one of them, (L,). Nats.

    mean, deviation: of log p(v) with v drawn from the distribution, None of a model that gives no
    distributions; wrong:
    whether the likeliest token is another one, None of a model that gives no ranks either.
    """

    log_probs: NDArray[Any]
    mean: NDArray[Any] | None = None
    deviation: NDArray[Any] | None = None
    wrong: NDArray[Any] | None = None

    def readings_of_text(self, i: int) -> TokenReadings:
        mean, deviation, wrong = (
            None if x is None else x[i] for x in (self.mean, self.deviation, self.wrong)
        )
        return TokenReadings(self.log_probs[i], mean, deviation, wrong)

    @property
    def min_k_plus_token_scores(self) -> NDArray[np.float64] | None:
        if self.mean is None or self.deviation is None:
            return None
        return membership.standardise_log_probs(self.log_probs, self.mean, self.deviation)


@torch.no_grad()
def measure_token_readings(
    model: LanguageModel, prefixes: Tensor, suffixes: Tensor
) -> TokenReadings:
    """One teacher-forced pass. prefixes (B, n), suffixes (B, L)."""
    if not implies_capability(model.capabilities, "distribution"):
        log_probs = model.token_log_probs(prefixes, suffixes).double().cpu().numpy()
        ranked = implies_capability(model.capabilities, "ranks")
        wrong = (model.token_ranks(prefixes, suffixes) > 1).cpu().numpy() if ranked else None
        return TokenReadings(log_probs, wrong=wrong)
    parts = read_token_statistics(
        model, prefixes, suffixes, _DISTRIBUTION_AT_ONCE, _membership_token_statistics
    )
    return TokenReadings(
        *(torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    )


def _membership_token_statistics(
    distribution: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows,) each: log p of the token, mean and deviation of log p under the distribution, whether
    another leads."""
    own, leads = (
        distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1),
        distribution.argmax(-1) == tokens,
    )
    away = distribution.clamp_min(_LEAST_LOG)  # a copy: what follows writes over it
    p = away.exp()
    mean = (p * away).sum(-1, keepdim=True)
    # about the mean, where nothing cancels
    deviation = away.sub_(mean).square_().mul_(p).sum(-1).sqrt()
    return own.double(), mean.squeeze(-1).double(), deviation.double(), ~leads
