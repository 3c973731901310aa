"""Bound the probability that a sample is within a few token edits of the secret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auditor.core.arrays import Floats
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.core.secret_table import build_secret_table
from auditor.models.base import LanguageModel
from auditor.models.decoding import Decoding
from auditor.plugins.options import Count, CountOrZero, Share
from auditor.plugins.probe import (
    DistributionProbe,
    Observed,
    mask_members,
    measure_baselined_probability,
    measure_repeat_probability,
    observe_in_batches,
    score_records,
    value_column,
)
from auditor.plugins.view import View
from auditor.statistics.extraction import (
    compute_any_sample_probability,
    compute_suffix_p_values,
)
from auditor.statistics.intervals import measure_share
from auditor.statistics.judging import compute_near_verbatim_limit
from auditor.statistics.metrics import NEAR_PROBABILITY, name_upper_bound_metric

_DISTRIBUTION_AT_ONCE = 2**22  # entries of the distribution of all live rows: 32 MiB of float64
_ROWS_AT_ONCE = 2048
_BOUNDS = ("log_p_near", "log_p_near_most", "log_p")  # observed, as in `NearVerbatimBounds`


class NearVerbatimBounds(NamedTuple):
    """Hold bounds on log P[edits(sample, suffix) <= distance], in nats, each (B,), float64.

    upper: `lower` plus the probability of all partial samples that a beam dropped, although they
    could still end within the distance.
    verbatim: log P[sample = suffix].
    """

    lower: Tensor
    upper: Tensor
    verbatim: Tensor


@dataclass(frozen=True)
class NearVerbatim(DistributionProbe):
    """Bound the probability of a sample close to the suffix (within `distance` edits; k-CBS, 2026).

    A beam search keeps the `beams` likeliest partial samples that can still end within the
    distance, and in any case the verbatim suffix. The lower bound is the sum of the probabilities
    of those that end within the distance. The upper bound adds the probability of all partial
    samples that the search dropped. If it dropped none, the bounds are equal.

    distance: the most token edits of a sample. As for near-verbatim recall, edits beyond a fifth of
    the suffix's tokens (or one token, if that is more) do not count.
    alpha: the false-positive rate of the threshold on the lower bound. Non-members set this
    threshold, which depends on the length of the suffix.
    """

    name = "near-verbatim"
    measures = "near-verbatim"
    means = ("near_verbatim_probability",)
    deep = True
    distance: CountOrZero = 5
    beams: Count = 20
    alpha: Share = 0.05

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        model, decoding = view.target, view.decoding_in_this_setting(self.sampling())

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            distance = limit_edit_distance(self.distance, suffixes.shape[1])
            bounds = bound_near_verbatim_probability(
                model, decoding, prefixes, suffixes, distance, self.beams
            )
            columns = torch.stack(bounds, dim=1).tolist()
            return [
                Observation(secret.id, dict(zip(_BOUNDS, values, strict=True)))
                for secret, values in zip(batch, columns, strict=True)
            ]

        yield from observe_in_batches(view, secrets, choose_batch_size(model, self.beams), look)

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        member = mask_members(secrets)
        width = f"within {self.distance} token edits, {self.beams} beams; one sample"
        notes = (
            f"lower bound: {width}",
            f"upper bound, with all that the beams dropped: {width}",
            "one sample",
        )
        unit = score_records(secrets).unit
        measured = list[Measurement]()
        columns = self.per_secret_values(secrets, observations).items()
        for (name, p), note in zip(columns, notes, strict=True):
            # The difference of two bounds on the same side is not a bound, so there is no excess.
            excess = name == "extraction_probability"
            measured += measure_baselined_probability(name, p, member, note, excess, unit)
        if not member.all():
            measured.append(self._measure_calibrated_share(secrets, observations))
        return measured

    def _measure_calibrated_share(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> Measurement:
        """Return the share of members whose lower bound exceeds the threshold that non-members set.

        Members and non-members have the same number of beams, so their lower bounds are comparable.
        """
        log_p = value_column(observations, "log_p_near")
        p_values = compute_member_p_values(secrets, log_p, self.alpha)
        note = (
            f"above a threshold that {len(log_p) - len(p_values)} non-members set at alpha "
            f"{self.alpha:g}, by the length of the suffix"
        )
        return measure_share("near_verbatim_conformal_share", p_values <= self.alpha, note)

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        near = compute_any_sample_probability(value_column(observations, "log_p_near"), 1)
        return measure_repeat_probability(NEAR_PROBABILITY, secrets, near)

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Floats]:
        names = (
            NEAR_PROBABILITY,
            name_upper_bound_metric(NEAR_PROBABILITY),
            "extraction_probability",
        )
        values = {}
        for name, field in zip(names, _BOUNDS, strict=True):
            log_p = value_column(observations, field)
            values[name] = compute_any_sample_probability(log_p, 1)
        return values

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        near = np.exp(value_column(observations, "log_p_near"))
        verbatim = np.exp(value_column(observations, "log_p"))
        return (
            "no soft prompt",
            "edits beyond a fifth of a suffix's tokens do not count as near",
            "a beam drops partial samples that could still end within the distance: lower bounds "
            "do not count them, upper bounds count each in full",
            "near-verbatim samples at least double the probability of "
            f"{int((near > 2 * verbatim).sum())} suffixes",
        )


def compute_member_p_values(secrets: Sequence[Secret], log_p: Floats, alpha: float) -> Floats:
    """Return the members' conformal p-values against non-members of similar length, (members,).

    log_p: (secrets,) scores.
    """
    member = mask_members(secrets)
    lengths = build_secret_table(secrets).lengths[:, 1]
    return compute_suffix_p_values(
        log_p[member], lengths[member], log_p[~member], lengths[~member], alpha
    )


def limit_edit_distance(distance: int, length: int) -> int:
    """Return the number of edits within which a sample is near a suffix of `length` tokens.

    Otherwise every sample would be near a suffix of `distance` tokens.
    """
    return min(distance, compute_near_verbatim_limit(length))


def choose_batch_size(model: LanguageModel, beams: int) -> int:
    """Return how many secrets' beams are computed in one batch."""
    rows = min(_ROWS_AT_ONCE, _DISTRIBUTION_AT_ONCE // model.vocab_size) // model.parts
    return max(1, rows // (beams + 1))


@torch.no_grad()
def bound_near_verbatim_probability(
    model: LanguageModel,
    decoding: Decoding,
    prefixes: Tensor,
    suffixes: Tensor,
    distance: int,
    beams: int,
) -> NearVerbatimBounds:
    """Bound the probability of a sample within `distance` token edits of the suffix.

    prefixes: (B, n); suffixes: (B, L). Each secret has its own beam of distinct partial samples
    (rows in the code).
    """
    count, length = suffixes.shape
    rows = model.start(prefixes, length)
    owner = torch.arange(count, device=suffixes.device)  # (rows,): the secret of each row's beam
    log_q = torch.zeros(count, dtype=torch.float64, device=suffixes.device)
    impossible = torch.full_like(log_q, -torch.inf)
    dropped = impossible  # (count,): log of the mass that the beams dropped
    # (rows, L+1): Levenshtein rows
    edits = torch.arange(length + 1, device=suffixes.device).expand(count, -1)
    verbatim = torch.ones(count, dtype=torch.bool, device=suffixes.device)
    for position in range(length):
        # (rows, V)
        children = log_q.unsqueeze(-1) + decoding.log_distribution(rows.log_probs()).double()
        row_suffixes = suffixes[owner]
        # Tokens outside the suffix all change the row alike: one row represents them. (rows, L,
        # L+1), (rows, L+1)
        known, unknown = _extend_edit_distances(edits, row_suffixes)
        near = (_bound_fewest_edits(unknown, position + 1) <= distance).unsqueeze(-1)
        near = near.expand_as(children).scatter(
            -1, row_suffixes, _bound_fewest_edits(known, position + 1) <= distance
        )
        truth = row_suffixes[:, position]
        exact = torch.where(
            verbatim, children.gather(-1, truth.unsqueeze(-1)).squeeze(-1), -torch.inf
        )
        children = torch.where(near, children, -torch.inf)
        if position + 1 == length:
            # The texts are distinct, so probabilities add up, and dropped beams only lower the sum.
            least = _sum_near_verbatim(owner, children.logsumexp(-1), count)
            most = torch.logaddexp(least, dropped).clamp(max=0.0)
            return NearVerbatimBounds(least, most, _sum_near_verbatim(owner, exact, count))
        parents, tokens = _prune_beams_keep_verbatim(children, owner, beams, exact, truth)
        # No row can still end near enough, and no verbatim path continues: the rest has probability
        # 0.
        if not len(parents):
            break
        log_q = children[parents, tokens]
        children[parents, tokens] = -torch.inf
        rest = _sum_near_verbatim(owner, children.logsumexp(-1), count)
        dropped = torch.logaddexp(dropped, rest)
        owner = owner[parents]
        verbatim = verbatim[parents] & (tokens == truth[parents])
        matches = row_suffixes[parents] == tokens.unsqueeze(-1)
        # any place of the token will do, because its rows are equal
        place = matches.int().argmax(-1)
        edits = torch.where(matches.any(-1, keepdim=True), known[parents, place], unknown[parents])
        rows.advance(parents, tokens)
    return NearVerbatimBounds(impossible, dropped, impossible)


def _extend_edit_distances(edits: Tensor, suffixes: Tensor) -> tuple[Tensor, Tensor]:
    """Return edit distances after one more token: each suffix token, or any other token.

    The result is two arrays of Levenshtein distances: (rows, L, L+1) if the next token is each of
    the suffix's tokens, and (rows, L+1) if it is none of these. edits: (rows, L+1), where edits[j]
    is the distance from a partial sample to the first j suffix tokens; suffixes: (rows, L) token
    ids.
    """
    length = suffixes.shape[1]
    equal = suffixes.unsqueeze(1) == suffixes.unsqueeze(2)  # (rows, L tokens, L places)
    other = torch.zeros_like(equal[:, :1])
    equal = torch.cat([equal, other], dim=1)  # the last token is in no place
    shorter = edits[:, None, :-1]
    deletion_base = edits[:, None, 1:]
    best = torch.minimum(
        shorter + ~equal, deletion_base + 1
    )  # substitute or match; drop the new token
    first = (edits[:, None, :1] + 1).expand(-1, length + 1, -1)
    best = torch.cat([first, best], dim=-1)
    # Missing tokens: new[j] = min over i <= j of best[i] + (j - i), a running minimum.
    ramp = torch.arange(length + 1, device=edits.device)
    new = (best - ramp).cummin(-1).values + ramp
    return new[:, :-1], new[:, -1]


def _bound_fewest_edits(edits: Tensor, position: int) -> Tensor:
    """Return the smallest number of edits with which each partial sample can end, of shape (rows,).

    edits: (rows, L+1), as in `_extend_edit_distances`. After edits[j] edits, the L - position
    tokens to come must be turned into the remaining L - j tokens of the suffix.
    """
    places = torch.arange(edits.shape[-1], device=edits.device)
    return (edits + (places - position).abs()).amin(-1)


def _prune_beams_keep_verbatim(
    children: Tensor, owner: Tensor, beams: int, exact: Tensor, truth: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the children that stay in the beams; return their (parents, tokens).

    A row is a partial sample, and a child is a row with one more token. Each secret keeps its
    `beams` likeliest children. It also keeps the child that is equal to the secret so far.

    children: (rows, V) log-probabilities of the children. owner: (rows,) the secret of each row.
    exact: (rows,) the log-probability of a row that is equal to its secret so far, -inf for other
    rows. truth: (rows,) the next token of the secret.
    """
    width = min(beams, children.shape[-1])
    values, tokens = children.topk(width, dim=-1)  # a row has at most this many of the likeliest
    parents = torch.arange(len(owner), device=owner.device).unsqueeze(-1).expand_as(tokens)
    values = values.flatten()
    tokens = tokens.flatten()
    parents = parents.flatten()
    order = values.argsort(descending=True, stable=True)
    order = order[owner[parents[order]].argsort(stable=True)]  # by secret, likeliest first
    owners = owner[parents[order]]
    first = torch.searchsorted(owners, owners)  # first row of its secret
    place = torch.arange(len(owners), device=owners.device) - first
    order = order[(place < beams) & values[order].isfinite()]
    parents = parents[order]
    tokens = tokens[order]
    row = exact.isfinite().nonzero().squeeze(-1)  # the verbatim rows whose path continues
    is_kept = torch.isin(
        row * children.shape[-1] + truth[row], parents * children.shape[-1] + tokens
    )
    return torch.cat([parents, row[~is_kept]]), torch.cat([tokens, truth[row[~is_kept]]])


def _sum_near_verbatim(owner: Tensor, log_q: Tensor, count: int) -> Tensor:
    """Return the log of the summed probabilities of each secret's partial samples, (count,).

    It is -inf for a secret without partial samples. A row is a partial sample. owner: (rows,) the
    secret of each row; log_q: (rows,) log-probabilities in nats.
    """
    total = torch.zeros(count, dtype=torch.float64, device=owner.device)
    peak = torch.full_like(total, -torch.inf).scatter_reduce(0, owner, log_q, "amax")
    safe = torch.where(peak.isfinite(), peak, 0.0)
    return safe + total.index_add(0, owner, (log_q - safe[owner]).exp()).log()
