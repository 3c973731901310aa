"""Compute the exact probability that one sample, or any of n samples, equals a secret.

No samples are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.attacks.near_verbatim import (
    bound_near_verbatim_probability,
    choose_batch_size,
    compute_member_p_values,
    limit_edit_distance,
)
from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.core.secret_table import build_secret_table
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.decoding import Decoding
from auditor.models.partial_distributions import PartialDistribution, decoded_log_prob_bounds
from auditor.plugins.options import Count, CountOrZero, Share
from auditor.plugins.probe import (
    DistributionProbe,
    Observed,
    mask_members,
    measure_baselined_probability,
    measure_baselined_share,
    measure_repeat_probability,
    observe_in_batches,
    read_token_statistics,
    score_records,
    value_column,
)
from auditor.plugins.view import View
from auditor.statistics.extraction import (
    compute_any_sample_probability,
    sum_windows,
)
from auditor.statistics.intervals import compute_mean_probability, measure_share
from auditor.statistics.metrics import AT_LEAST, AT_MOST
from auditor.statistics.roc import compute_conformal_threshold, count_threshold_nonmembers

_SECRETS_AT_ONCE = 64
# entries of the distribution to sort and count at once: 32 MiB of float64
_DISTRIBUTION_AT_ONCE = 2**22
_ROUNDING = 1e-12  # tolerance for float noise in an exact probability


@dataclass(frozen=True)
class ExtractionProbability(DistributionProbe):
    """Compute the exact probability of each suffix (Hayes et al. 2024).

    The model reads each suffix z once. The suffix's log-probability is log p_z = sum_t log
    q_t(z_t), which is -inf if the decoding never draws one of its tokens (formulas.md A4). If the
    model returns only its likeliest tokens, each probability has a lower and an upper bound.

    `n`: the numbers of samples for which to report the probability that any sample is right.
    `p`: a secret is (n, p)-discoverable if at least one of n samples is right with probability p or
    more.
    `alpha`: the false-positive rate of the threshold that non-members set (conformal, A7). The
    threshold depends on the length of the suffix.
    `bracket`: also compute a lower bound and upper bounds. The lower bound is on the probability of
    a sample within `near_distance` token edits of the suffix, under this decoding (the
    near-verbatim probe, with `near_beams`). The upper bounds hold for any temperature, top-k or
    top-p that a product may use (C3). They are on the probability of the whole suffix, and of each
    window of it given the text before the window.
    `windows`: the lengths of the windows, in tokens.
    `one_in`: with `bracket`, reports also give the share of secrets whose bound is at least
    1/`one_in`.
    """

    name = "extraction-probability"
    measures = "probability"
    means = ("extraction_probability", "extraction_probability_ancestral")
    quick: ClassVar[Mapping[str, Any]] = {}
    n: str = "1,10,100,1000,10000"
    p: str = "0.1,0.9"
    alpha: Share = 0.05
    bracket: bool = False
    near_distance: CountOrZero = 5
    near_beams: Count = 20
    windows: str = "8,16"
    one_in: Count = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        default = {field.name: field.default for field in fields(self)}
        for name in ("near_distance", "near_beams", "windows", "one_in"):
            if not self.bracket and getattr(self, name) != default[name]:
                raise AuditError(
                    f"{name} goes with bracket=true, got {name}={getattr(self, name)} without it"
                )
        for length in self.window_token_lengths():
            if length < 1:
                raise AuditError(f"expected windows of 1 token or more, got {length}")
        for n in self.any_of_n_sample_counts():
            if n < 1:
                raise AuditError(f"expected n >= 1, got {n}")
        for p in self.discoverability_levels():
            if not 0 < p < 1:
                raise AuditError(f"expected p in (0, 1), got {p}")

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        """Return the model capabilities that this decoding needs.

        Ancestral decoding needs only the log-probabilities of a secret's own tokens. Other
        decodings also need the likeliest tokens.
        """
        sampling = self.sampling()
        # Masking end-of-text renormalises over all other tokens, which needs the full distribution.
        if self.bracket or sampling.eos == "masked":
            return self.needs
        if sampling.decoding.is_ancestral:
            return ("likelihood",)
        return ("likeliest",)

    def any_of_n_sample_counts(self) -> list[int]:
        return _parse_extraction_option_numbers("n", self.n, int)

    def discoverability_levels(self) -> list[float]:
        return _parse_extraction_option_numbers("p", self.p, float)

    def window_token_lengths(self) -> list[int]:
        """Return the windows' lengths in tokens; [] if `bracket` is off."""
        if self.bracket:
            return _parse_extraction_option_numbers("windows", self.windows, int)
        return []

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        model, decoding = view.target, view.decoding_in_this_setting(self.sampling())

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            columns = compute_suffix_log_probs(
                model, decoding, prefixes, suffixes, self.window_token_lengths()
            )
            if self.bracket:
                distance = limit_edit_distance(self.near_distance, suffixes.shape[1])
                near = bound_near_verbatim_probability(
                    model, decoding, prefixes, suffixes, distance, self.near_beams
                )
                # the suffix is near itself
                columns["log_p_near"] = torch.maximum(near.lower.cpu(), columns["log_p"])
            observed = list[Observation]()
            for i, secret in enumerate(batch):
                values = {name: float(column[i]) for name, column in columns.items()}
                observed.append(Observation(secret.id, values))
            return observed

        if self.bracket:
            size = min(_SECRETS_AT_ONCE, choose_batch_size(model, self.near_beams))
        else:
            size = _SECRETS_AT_ONCE
        yield from observe_in_batches(view, secrets, size, look)

    def add_joint_values(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Sequence[Observation]:
        """Add each member's conformal p-value (A7).

        The p-value is the share of non-members whose suffix is at least as likely.
        """
        member = mask_members(secrets)
        if member.all() or not _has_exact_probability(observations):
            return observations
        # (1 + #{non-members as likely}) / (n + 1), only for members: a non-member is its own
        # control.
        p_values = self._member_p_values(secrets, observations)
        return Observed(observations).add_columns({"conformal_p": p_values}, np.flatnonzero(member))

    def _member_p_values(
        self, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Floats:
        return compute_member_p_values(secrets, value_column(observations, "log_p"), self.alpha)

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        member = mask_members(secrets)
        exact = _has_exact_probability(observations)
        unit = score_records(secrets).unit
        measured = list[Measurement]()
        for name, values in self.per_secret_values(secrets, observations).items():
            note = self._describe_number(name, build_secret_table(secrets).lengths[member, 1])
            if values.dtype == bool:
                measured += measure_baselined_share(name, values, member, note)
            elif name == _ANCESTRAL:
                measured.append(compute_mean_probability(name, values[member], note))
            else:
                # The difference of two upper bounds is not a bound, so there is no excess.
                excess = exact and name == "extraction_probability"
                measured += measure_baselined_probability(name, values, member, note, excess, unit)
        if member.all() or not exact:
            return measured
        return [*measured, self._conformal_extracted_share(secrets, observations)]

    def _describe_number(self, name: str, lengths: NDArray[Any]) -> str:
        """Return the note of a measurement; `lengths` are those of the members' suffixes."""
        of_lengths = suffix_lengths_note(lengths)
        width = f"within {self.near_distance} token edits, {self.near_beams} beams"
        notes = {
            "extracted_": f"and above the threshold that non-members set at alpha {self.alpha:g}",
            _ANCESTRAL: "one sample from the untruncated distribution",
            "extraction_probability": ", ".join(filter(None, ("one sample", of_lengths))),
            "expected_any_of_": of_lengths,
            "rank_bound": _CEILING,
            _NEAR: f"at least: {width}; one sample of this decoding",
            "window_bound": f"the likeliest of each secret, after the text before it; {_CEILING}",
        }
        if "_1_in_" in name:
            return ""
        return next((note for start, note in notes.items() if name.startswith(start)), "")

    def _bound_brackets(self, observations: Sequence[Observation]) -> dict[str, Floats]:
        """Return bounds on the probability of extracting each secret, keyed by measurement name.

        Each array has shape (secrets,). Keys that begin with `greedy_windows_` have no bound: they
        give the share of the suffix's windows (runs of tokens) that greedy decoding reproduces.
        """
        bounds = {
            _NEAR: compute_any_sample_probability(value_column(observations, "log_p_near"), 1)
        }
        bounds["rank_bound"] = np.exp2(-value_column(observations, "rank_bits"))
        for length in self.window_token_lengths():
            bounds[f"window_bound_{length}"] = np.exp2(
                -value_column(observations, f"window_bits_{length}")
            )
            bounds[f"greedy_windows_{length}"] = value_column(
                observations, f"greedy_windows_{length}"
            )
        return bounds

    def _mask_one_in_n(self, observations: Sequence[Observation]) -> dict[str, Bools]:
        """Mark the secrets whose probability, or a bound on it, is at least 1/`one_in`.

        Return a mask (secrets,) for the probability and for each bound, keyed by measurement name.
        """
        columns = {
            "extraction": compute_any_sample_probability(value_column(observations, "log_p"), 1),
            **self._bound_brackets(observations),
        }
        columns["near_verbatim"] = columns.pop(_NEAR)
        masks = {}
        for name, p in columns.items():
            if not name.startswith("greedy"):  # a share of windows, no probability
                masks[f"{name}_1_in_{self.one_in}"] = p * self.one_in >= 1 - _ROUNDING
        return masks

    def _mask_extracted_secrets(
        self, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, Bools]:
        """Mark the secrets that are (n, p)-discoverable and unusually likely, for each n and p.

        Return masks (secrets,) keyed by measurement name. A member is unusually likely if its
        suffix is more likely than a threshold that non-members set; the threshold depends on the
        suffix's length. A mask that would mark all discoverable secrets is omitted.
        """
        member = mask_members(secrets)
        n_nonmembers = int((~member).sum())
        too_few = n_nonmembers < count_threshold_nonmembers(self.alpha)
        if too_few or not member.any() or not _has_exact_probability(observations):
            return {}
        is_usual = np.zeros(len(secrets), dtype=bool)
        p_values = self._member_p_values(secrets, observations)
        is_usual[member] = p_values > self.alpha + _ROUNDING
        log_p = value_column(observations, "log_p")
        masks = {}
        for n, p in itertools.product(self.any_of_n_sample_counts(), self.discoverability_levels()):
            reached = _mask_discoverable_secrets(log_p, n, p)
            if (reached & is_usual).any():
                masks[f"extracted_{n}_{p:g}"] = reached & ~is_usual
        return masks

    def _conformal_extracted_share(
        self, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Measurement:
        """Return the share of members whose suffix exceeds the threshold for its length.

        Non-members set the threshold.
        """
        p_values = self._member_p_values(secrets, observations)
        controls = value_column(observations, "log_p")[~mask_members(secrets)]
        threshold = compute_conformal_threshold(controls, self.alpha)
        note = (
            f"above a threshold that {len(controls)} non-members set at alpha {self.alpha:g}, by "
            "the length of the suffix"
        )
        if len(np.unique(build_secret_table(secrets).lengths[:, 1])) == 1:
            # The ceil((1 - alpha)(n + 1))-th smallest of n controls: a conformal threshold.
            note = (
                f"log p above {threshold:.4g} nats, which {len(controls)} non-members set at alpha "
                f"{self.alpha:g}"
            )
        if math.isinf(threshold) and threshold < 0:
            note = (
                "any probability at all: this decoding draws the suffix of none of "
                f"{len(controls)} non-members"
            )
        if math.isinf(threshold) and threshold > 0:
            note = (
                f"{len(controls)} non-members are too few for a threshold at alpha {self.alpha:g}"
            )
        return measure_share("conformal_share", p_values <= self.alpha + _ROUNDING, note)

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        # The exact number, or its lower bound.
        end, log_p = _list_log_prob_columns(observations)[0]
        return measure_repeat_probability(
            f"extraction_probability{end}", secrets, compute_any_sample_probability(log_p, 1)
        )

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, NDArray[Any]]:
        numbers = dict[str, NDArray[Any]]()
        ends = _list_log_prob_columns(observations)
        counts = self.any_of_n_sample_counts()
        for end, log_p in ends:
            numbers[f"extraction_probability{end}"] = compute_any_sample_probability(log_p, 1)
        for n, (end, log_p) in itertools.product(counts, ends):
            # 1 - (1 - p)^n, by log1p, since p may be far below the resolution of
            # 1 - p.
            numbers[f"expected_any_of_{n}{end}"] = compute_any_sample_probability(log_p, n)
        for n, p, (end, log_p) in itertools.product(counts, self.discoverability_levels(), ends):
            numbers[f"discoverable_{n}_{p:g}{end}"] = _mask_discoverable_secrets(log_p, n, p)
        numbers |= self._mask_extracted_secrets(secrets, observations)
        numbers[_ANCESTRAL] = np.exp(value_column(observations, "log_p_ancestral"))
        if _has_column(observations, "rank_bits"):
            # prod_t 1/rank_t: no decoding that keeps the order of tokens makes the suffix more
            # likely (formulas C3).
            numbers["rank_bound"] = np.exp2(-value_column(observations, "rank_bits"))
        if self.bracket:
            numbers |= self._bound_brackets(observations)
            numbers |= self._mask_one_in_n(observations)
        return numbers

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        exact = _has_exact_probability(observations)
        _, most = _list_log_prob_columns(observations)[-1]
        # Use the upper bound: an impossible suffix is impossible there too.
        impossible = int(np.isneginf(most[mask_members(secrets)]).sum())
        sentences = ["no soft prompt"]
        if not exact:
            sentences.append(
                "brackets, not numbers: the target returns the likeliest tokens and not the whole "
                "distribution, so the probability after decoding is only known to lie between two "
                "bounds (and members have no threshold)"
            )
        if impossible:
            sentences.append(
                f"this decoding never draws the whole suffix of {impossible} members; another one "
                "may"
            )
        if not _has_column(observations, "rank_bits"):
            sentences.append("no rank bound: the target gives no ranks of tokens")
        if self.bracket:
            sentences += self._bracket_notes(secrets)
        return tuple(sentences)

    def _bracket_notes(self, secrets: Sequence[Secret]) -> Iterator[str]:
        yield (
            "two events: the baseline counts samples near the suffix, including the suffix, so it "
            "is never below the exact number; the ceiling counts only the suffix and says nothing "
            "about samples near it"
        )
        shortest = min(len(secret.suffix) for secret in secrets)
        for length in self.window_token_lengths():
            if length > shortest:
                yield (
                    f"if a suffix is shorter than a window of {length} tokens, its window is "
                    "the whole suffix"
                )


_CEILING = "no temperature, top-k or top-p makes one sample more likely than this"
_NEAR = "near_verbatim_probability"
_ANCESTRAL = "extraction_probability_ancestral"


def suffix_lengths_note(lengths: Sequence[int] | NDArray[Any]) -> str:
    """Return a phrase such as `suffixes of 8 to 50 tokens`; "" if all have the same length."""
    shortest = min(lengths, default=0)
    longest = max(lengths, default=0)
    if shortest < longest:
        return f"suffixes of {shortest} to {longest} tokens"
    return ""


def _has_exact_probability(observations: Sequence[Observation]) -> bool:
    return _has_column(observations, "log_p")


def _has_column(observations: Sequence[Observation], name: str) -> bool:
    return bool(Observed(observations).find_column(name)[1].all())


def _list_log_prob_columns(
    observations: Sequence[Observation],
) -> list[tuple[str, Floats]]:
    """Return pairs (ending of the measurement's name, log-probabilities).

    There is one pair if the probability is exact; its ending is "". Otherwise there are two, for
    the lower and the upper bound. Log-probabilities are in nats, (secrets,).
    """
    if _has_exact_probability(observations):
        ends = {"": "log_p"}
    else:
        ends = {AT_LEAST: "log_p_least", AT_MOST: "log_p_most"}
    return [(end, value_column(observations, name)) for end, name in ends.items()]


def _mask_discoverable_secrets(log_p: Floats, n: int, p: float) -> Bools:
    """Mark the secrets that equal any of n samples with probability at least p, as (secrets,).

    A probability that is below p only by rounding counts as p.
    """
    reached: Bools = compute_any_sample_probability(log_p, n) >= p - _ROUNDING
    return reached


@torch.no_grad()
def compute_suffix_log_probs(
    model: LanguageModel,
    decoding: Decoding,
    prefixes: Tensor,
    suffixes: Tensor,
    windows: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Compute log-probabilities and ranks of suffixes, (B,) each in float64, keyed by name.

    log_p: log-probability under the decoding, in nats. If the model returns only its likeliest
    tokens, log_p_least and log_p_most bound it instead.
    log_p_ancestral: log-probability under the model's own distribution, in nats.
    rank_bits: sum_t log2 rank_t. It is at most -log2 p under any monotone decoding, because
    q_t(z_t) <= 1/rank_t. Equally likely tokens all get the best of their ranks, because a product
    may order them so. Ranks from a server follow its order.
    window_bits_N: the smallest sum of log2 rank_t over N successive tokens.
    greedy_windows_N: the share of windows of N tokens that greedy decoding reproduces.

    prefixes: (B, n); suffixes: (B, L). windows: the lengths N; they need full distributions.
    """
    if not implies_capability(model.capabilities, "distribution"):
        if not decoding.is_ancestral:
            return _bound_suffix_log_probs(
                decoding, model.partial_distributions_of(prefixes, suffixes), suffixes
            )
        # Ancestral decoding draws from the distribution itself, so both numbers are equal.
        log_p = model.token_log_probs(prefixes, suffixes).double().sum(-1).cpu()
        columns_of_sums = {"log_p": log_p, "log_p_ancestral": log_p}
        if implies_capability(model.capabilities, "ranks"):
            columns_of_sums["rank_bits"] = (
                model.token_ranks(prefixes, suffixes).double().log2().sum(-1).cpu()
            )
        return columns_of_sums

    def of_rows(rows: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        ancestral = rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        # Ranked by id, a tied token would give no ceiling (formulas C6).
        bits = decoding.rank_ties_first(rows, tokens).double().log2()
        return decoding.score_decoded_tokens(rows, tokens), ancestral, bits

    statistics = read_token_statistics(model, prefixes, suffixes, _DISTRIBUTION_AT_ONCE, of_rows)
    # Bits stay by token, (B, L): windows need their own sums.
    sums = [(log_q.sum(-1), ancestral.sum(-1), bits) for log_q, ancestral, bits in statistics]
    log_p, ancestral, bits = (torch.cat(parts).cpu() for parts in zip(*sums, strict=True))
    columns = {"log_p": log_p, "log_p_ancestral": ancestral, "rank_bits": bits.sum(-1)}
    for length in windows:
        window_bits = sum_windows(bits.numpy(), length).min(-1)
        columns[f"window_bits_{length}"] = torch.from_numpy(window_bits)
    for length in windows:
        share = (sum_windows(bits.numpy(), length) == 0).mean(-1)
        columns[f"greedy_windows_{length}"] = torch.from_numpy(share)
    return columns


def _bound_suffix_log_probs(
    decoding: Decoding, distribution: PartialDistribution, suffixes: Tensor
) -> dict[str, Tensor]:
    """Bound the log-probabilities of suffixes (B, L) from the likeliest tokens per position.

    The keys are those of `compute_suffix_log_probs`.
    """
    least, most = decoded_log_prob_bounds(decoding, distribution)
    # Each token is bounded after the same text, so sums of bounds bound the suffix.
    bits = distribution.truncation_ranks().double().log2()
    columns = {
        "log_p_least": least,
        "log_p_most": most,
        "log_p_ancestral": distribution.log_probs.double(),
        "rank_bits": bits,
    }
    return {name: values.view(suffixes.shape).sum(-1).cpu() for name, values in columns.items()}


def _parse_extraction_option_numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Parse `1,10,100` into distinct ascending numbers; raise AuditError for any other form."""
    try:
        return sorted(set(map(kind, text.split(","))))
    except ValueError as error:
        raise AuditError(
            f"expected {name} as numbers with commas between them, got {text!r}"
        ) from error
