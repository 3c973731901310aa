"""Measure the exposure of canaries.

Exposure depends on how the model's likelihood ranks the inserted text among all possible texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np

from auditor.core.arrays import Bools, Floats
from auditor.core.canary_space import CanarySpace
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Canary, Observation, Secret, Tokens
from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.generation import constrained, tries
from auditor.plugins.options import Count, CountOrZero, Limits, Share
from auditor.plugins.probe import (
    AncestralProbe,
    Observed,
    mask_members,
    mask_repeat_counts,
    measure_baselined_probability,
    measure_repeat_probability,
    value_column,
)
from auditor.plugins.view import View
from auditor.statistics import exposure, holm
from auditor.statistics.intervals import measure_share, scale_measurement


@dataclass(frozen=True)
class Exposure(AncestralProbe):
    """Measure the exposure of canaries in bits (Carlini et al. 2019).

    Exposure is log2|R| - log2 rank, where R is the set of texts that the canary could have been.
    The exact rank is found by a search of R. With `nodes` > 0, the search of each canary stops
    after this many inputs of the model, and the result is a certified upper bound. If R has more
    than `enumerate` texts, the rank is estimated from `draws` texts that the model generates in the
    canary's format, and from the `references`.
    `references`: the number of texts drawn uniformly, from which exposure is also extrapolated for
    comparison.
    `alpha`: the significance level at which a canary counts as exposed, with Holm's correction for
    the number of canaries.
    """

    name = "exposure"
    page = "how-to/canaries"
    measures = "exposure"
    of = "canaries"
    nodes: CountOrZero = 0
    enumerate: CountOrZero = 2_000_000
    draws: Count = 4096
    references: Annotated[int, Limits(2)] = 1000
    alpha: Share = 0.05

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        if view.tokenizer is None:
            raise NotApplicable("needs the model's tokenizer: canaries are text")
        _group_space_secrets(secrets)

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        self.check_inputs(view, secrets)
        for space, group in _group_space_secrets(secrets).items():
            yield from _CanarySpaceRanking(self, view, space).observe_canary_exposures(group)

    def add_joint_values(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Sequence[Observation]:
        """Add the Holm-adjusted p-value of each inserted canary."""
        # Adjust only the p-values of inserted canaries: a control is not a hypothesis, and would
        # only cost power.
        inserted = np.flatnonzero(mask_members(secrets))
        adjusted = holm.adjust_p_values(value_column(observations, "null_p")[inserted].tolist())
        return Observed(observations).add_columns({"holm_p": np.array(adjusted)}, inserted)

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        member = mask_members(secrets)
        most = _compute_maximum_exposure(observations)
        # As shares of the most possible bits: the interval of a mean needs numbers in [0, 1].
        bits = value_column(observations, "exposure_bits") / most
        measured = measure_baselined_probability("exposure", bits, member, _WHICH)
        fitted = value_column(observations, "extrapolated_bits") / most
        extrapolated = measure_baselined_probability(
            "exposure_extrapolated", fitted, member, _FITTED, excess=False
        )
        # An interval over canaries would not show how badly the distribution fits.
        pointwise = (replace(m, low=math.nan, high=math.nan) for m in extrapolated)
        main, *others = (scale_measurement(m, most, "bits") for m in (*measured, *pointwise))
        exposed = self._significantly_exposed_canary_mask(secrets, observations)
        share = measure_share("exposed_share", exposed, f"Holm-corrected, {self.alpha:g}")
        return [_widen_exposure_interval(main, observations, member), share, *others]

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        most = _compute_maximum_exposure(observations)
        groups = measure_repeat_probability(
            "exposure", secrets, value_column(observations, "exposure_bits") / most
        )
        masks = mask_repeat_counts(secrets)
        return {
            count: _widen_exposure_interval(
                scale_measurement(m, most, "bits"), observations, masks[int(count)]
            )
            for count, m in groups.items()
        }

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Floats]:
        # Controls were not tested and have no adjusted p-value: NaN is not below alpha.
        adjusted, _ = observations.find_column("holm_p")
        return {
            "exposure": value_column(observations, "exposure_bits"),
            "exposed_share": (adjusted <= self.alpha).astype(float),
        }

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        sizes = sorted(
            {round(2**bits) for bits in value_column(observations, "space_bits").tolist()}
        )
        exposed = self._significantly_exposed_canary_mask(secrets, observations)
        estimated = int(value_column(observations, "estimated").sum())
        sentences = [
            "each canary is scored as a separate text, among "
            f"{' or '.join(f'{n:,}' for n in sizes)}",
            f"{int(exposed.sum())} of {len(exposed)} canaries are more exposed than chance allows "
            f"(null p-value 2^-exposure, by rank among {self.references:,} random texts where "
            f"exposure is estimated; Holm-corrected, {self.alpha:g})",
            "exposure of a canary that was inserted k times is a fact about k records: compare it "
            "with a claim for groups of k, never with a record's epsilon",
        ]
        # Estimates are not exact either, and have their own sentence.
        bounded = int((value_column(observations, "exact") == 0).sum()) - estimated
        if bounded:
            sentences.append(
                f"of {bounded} canaries exposure is a certified upper bound: {self.nodes} nodes "
                "were not enough"
            )
        if estimated:
            sentences.append(
                f"the exposure of {estimated} canaries is estimated from weighted draws: their "
                "space is too large"
            )
            inserted = int(mask_members(secrets).sum())
            if inserted > self.alpha * (self.references + 1):
                needed = math.ceil(inserted / self.alpha - 1e-9) - 1
                sentences.append(
                    f"{self.references:,} random texts are too few for {inserted:,} canaries: an "
                    f"estimated exposure is significant with -A exposure.references={needed} or "
                    "more"
                )
        # Runs of versions before this check have no p-value of the fit.
        fit_p, is_checked = observations.find_column("fit_p")
        unchecked = int((~is_checked).sum())
        if unchecked:
            sentences.append(
                f"whether a skew-normal distribution fits the references of {unchecked} canaries "
                "was not checked by the version that measured them: do not trust extrapolation"
            )
        poor = int((fit_p < 0.05).sum())
        if poor:
            sentences.append(
                f"a skew-normal distribution does not fit the references of {poor} canaries: do "
                "not trust extrapolation"
            )
        return tuple(sentences)

    def _significantly_exposed_canary_mask(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> Bools:
        exposed: Bools = observations.find_column("holm_p")[0][mask_members(secrets)] <= self.alpha
        return exposed


def _group_space_secrets(secrets: Sequence[Secret]) -> dict[CanarySpace, list[Secret]]:
    """Group the canaries by the space of texts that they could have been.

    Raise NotApplicable if the space of a canary is unknown.
    """
    spaces: dict[CanarySpace, list[Secret]] = {}
    for secret in secrets:
        if (space := _get_canary(secret).space) is None:
            raise NotApplicable(
                "exposure is a rank among all texts that a canary could have been, and for these "
                "canaries they are not recorded"
            )
        spaces.setdefault(space, []).append(secret)
    return spaces


_QUICKER = "an estimate, -A exposure.enumerate=0"
_WHICH = "mean over canaries, of at most log2 of their space"
_FITTED = (
    "for comparison, without an interval: a skew-normal distribution fitted to uniform references"
)


class _CanarySpaceRanking:
    """Rank the canaries that share a space of possible texts, on one model."""

    def __init__(self, probe: Exposure, view: View, space: CanarySpace) -> None:
        self.probe = probe
        self.view = view
        self.space = space
        self.exact = space.size <= probe.enumerate
        # Keyed without the target, to measure every model by the same references.
        noise = make_keyed_generator("exposure", "references", view.seed, space.format)
        self.references = [space.draw(noise) for _ in range(probe.references)]
        encoded = tries.encode_without_special_tokens(view.tokenizer, self.references)
        self.tokens = {text: tuple(ids) for text, ids in zip(self.references, encoded, strict=True)}

    def observe_canary_exposures(self, secrets: Sequence[Secret]) -> Iterator[Observation]:
        texts = [_get_canary(secret).text for secret in secrets]
        encoded = list(map(tuple, tries.encode_without_special_tokens(self.view.tokenizer, texts)))
        if self.exact:
            exposures = self._exact_exposures(encoded)
        else:
            exposures = self._estimated_exposures(texts, encoded)
        for secret, values in zip(secrets, exposures, strict=True):
            yield Observation(secret.id, values)

    def _require_token_before_canaries(self, head: Tokens) -> Tokens:
        """Return `head`, the tokens at the start of every text in the space.

        Raise NotApplicable if a text's first token has no token before it, and so no probability.
        """
        if not (self.view.target.prefix_token or head):
            raise NotApplicable(
                "nothing precedes the first token of this format: give --prefix-token eos, "
                "for example"
            )
        return head

    def _exact_exposures(self, suffixes: Sequence[Tokens]) -> list[dict[str, float]]:
        """Return each suffix's exposure values, keyed by name, from a search of the whole space."""
        view = self.view
        tree = tries.load_or_build_trie(self.space, self.view.tokenizer)
        tries.check_model_has_trie_tokens(view.target, tree)
        context = self._require_token_before_canaries(tree.head)
        tails = [tokens[len(tree.head) :] for tokens in suffixes]
        nll = tries.compute_continuation_nlls(view.target, context, tails)
        uniform = [self.tokens[text][len(tree.head) :] for text in self.references]
        references = tries.compute_continuation_nlls(view.target, context, uniform)
        # Ties count against exposure, including those that float noise may have split.
        limits = tries.add_tie_margin(nll)
        nodes = self.probe.nodes
        # Without a budget one search serves all: a canary's count does not depend on the other
        # canaries.
        if nodes:
            groups = [[limit] for limit in limits]
        else:
            groups = [list(limits)]
        description = (
            f"exposure on {view.target_name}, exact among {self.space.size:,} texts (quicker: "
            f"{_QUICKER})"
        )
        progress = partial(view.progress, description)
        at_most = list[int]()
        unseen = list[int]()
        for group in groups:
            count = tries.count_leaves_within_nll(
                view.target, tree, context, group, nodes=nodes, progress=progress
            )
            at_most += count.at_most.tolist()
            unseen += [count.unseen] * len(group)
        distribution = exposure.fit_skew_normal(references)
        exposures = []
        for x, better, n_unseen in zip(nll.tolist(), at_most, unseen, strict=True):
            least = max(1, better)  # the canary itself may be among the unseen
            # Unseen texts may all be more likely, but at most e^nll are as likely as the canary:
            # their masses add up to 1.
            if n_unseen:
                most = max(
                    least, min(least + n_unseen, exposure.rank_upper_bound(x, self.space.size))
                )
            else:
                most = least
            estimate = exposure.RankEstimate(least, least, most)
            # For a canary that was never inserted, P(exposure >= e) <= 2^-e, as its rank is
            # uniform.
            null_p = 2.0 ** -exposure.compute_exposure(most, self.space.bits)
            values = self._compute_canary_exposure(x, estimate, null_p, references, distribution)
            exposures.append({**values, "exact": float(not n_unseen), "estimated": 0.0})
        return exposures

    def _estimated_exposures(
        self, texts: Sequence[str], suffixes: Sequence[Tokens]
    ) -> list[dict[str, float]]:
        """Return each suffix's exposure values, keyed by name; ranks are estimated from draws."""
        view = self.view
        size = self.space.size
        head = constrained.find_common_proper_prefix([*suffixes, *self.tokens.values()])
        guide = constrained.TokenGuide(self.space, view.tokenizer, head)
        context = self._require_token_before_canaries(head)
        tails = [tokens[len(head) :] for tokens in suffixes]
        uniform = [self.tokens[text][len(head) :] for text in self.references]
        for tail in (*tails, *uniform):
            guide.check_tokens_can_be_drawn(tail)
        noise = make_keyed_generator("exposure", "draws", view.seed, self.space.format)
        uniforms = noise.random((self.probe.draws, guide.get_max_tail()))
        samples = constrained.draw_constrained_texts(view.target, guide, context, uniforms)
        scored = constrained.score_constrained_texts(
            view.target, guide, context, self.references, uniform
        )
        # The uniform references are draws too: in the mixture every weight is bounded, even for
        # small q.
        draws = exposure.WeightedDraws(
            (*samples.texts, *scored.texts),
            np.concatenate([samples.nll, scored.nll]),
            np.concatenate([samples.log_q, scored.log_q]),
            np.concatenate([samples.canonical, scored.canonical]),
            len(samples.texts),
            size,
        )
        distribution = exposure.fit_skew_normal(scored.nll)
        exposures = []
        nll = tries.compute_continuation_nlls(view.target, context, tails)
        for x, limit, text in zip(
            nll.tolist(), tries.add_tie_margin(nll).tolist(), texts, strict=True
        ):
            estimate = exposure.estimate_canary_rank(limit, text, draws)
            null_p = exposure.compute_canary_p_value(x, scored.nll)
            values = self._compute_canary_exposure(x, estimate, null_p, scored.nll, distribution)
            exposures.append({**values, "exact": 0.0, "estimated": 1.0})
        return exposures

    def _compute_canary_exposure(
        self,
        nll: float,
        rank: exposure.RankEstimate,
        null_p: float,
        references: np.ndarray,
        distribution: exposure.SkewNormal,
    ) -> dict[str, float]:
        """Return a canary's exposure values, keyed by name.

        nll: of the canary, in nats; references: of the reference texts; distribution: fitted to
        these.
        null_p: p-value of the rank, if the canary was never inserted.
        """
        bits = self.space.bits
        return {
            "exposure_bits": exposure.compute_exposure(rank.rank, bits),
            # The highest rank is the least exposure.
            "exposure_low_bits": exposure.compute_exposure(rank.high, bits),
            "exposure_high_bits": exposure.compute_exposure(rank.low, bits),
            "rank": rank.rank,
            "space_bits": bits,
            "log_p": -nll,
            "null_p": min(1.0, null_p),
            "sampled_bits": exposure.estimate_sampled_exposure(nll, references),
            "extrapolated_bits": distribution.extrapolate_exposure(nll, bits),
            "fit_p": distribution.fit_p,
        }


def _get_canary(secret: Secret) -> Canary:
    assert secret.canary is not None  # callers pass only canaries
    return secret.canary


def _compute_maximum_exposure(observations: Sequence[Observation]) -> float:
    """Return the largest possible exposure, log2 of the largest canary space's size, in bits."""
    return float(value_column(observations, "space_bits").max())


def _widen_exposure_interval(m: Measurement, observations: Observed, mask: Bools) -> Measurement:
    """Widen the interval of a mean exposure, because each canary's exposure is only bounded.

    The new interval includes the mean of the canaries' lower bounds and that of their upper bounds.
    mask: the canaries that the mean is of, (canaries,).
    """
    if not mask.any() or math.isnan(m.value):
        return m
    low = float(value_column(observations, "exposure_low_bits")[mask].mean())
    high = float(value_column(observations, "exposure_high_bits")[mask].mean())
    return replace(m, low=min(m.low, low), high=max(m.high, high))
