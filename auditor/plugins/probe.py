"""Probes: the base of all, and of those of the decoding distribution, whose members' numbers stand
beside the floor.

A probe sees the answers and draws nothing. A subclass says what it observes of one secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.nouns import Observation, Secret
from auditor.core.result import Audited, Measurement
from auditor.models.base import LanguageModel
from auditor.models.decoding import Decoding
from auditor.models.memory import BatchSizeLimit, group_equal_shapes
from auditor.plugins.method import Method
from auditor.plugins.view import Sampling, View
from auditor.statistics.intervals import mean_probability, subtract_nonmember_mean
from auditor.statistics.metrics import name_excess_metric, name_nonmember_metric
from auditor.statistics.strongest_score import CandidateScore, ScoredRecords

DELTA = 1e-5  # of a bound on epsilon, where neither the user nor a claim says which


class Observed(list[Observation]):
    """What a probe saw of each secret, side by side with the secrets.

    facts: numbers of all of it, that belong to no one secret: the terms of a game, and what came of
    it.
    """

    def __init__(
        self, observations: Iterable[Observation] = (), facts: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(observations)
        self.facts = dict(facts or {})


@dataclass(frozen=True)
class Probe(Method):
    """Base of the auditor's own measurements, which see the answers.

    `of` is what it looks at: the benchmark's secrets, its canaries for exposure, those that went in
    or stayed out by a coin, or `subjects` of its own.
    """

    needs: ClassVar[tuple[str, ...]] = ("distribution",)
    # Measurements that are means of `per_secret` and take no facts: by these a row may be stopped
    # early.
    means: ClassVar[tuple[str, ...]] = ()

    def textless_subjects(self, view: View) -> tuple[Secret, ...]:
        """Its own subjects where these are no texts, such as gradients: no more than ids and
        whether each was in.

        Raises NotApplicable where there is nothing.
        """
        raise NotImplementedError

    def wanted_reference_models(self) -> str:
        """Reference models that it wants beside the one all attacks share, as `-A references=`
        names them; "": none."""
        return ""

    def check_secrets(self, secrets: Sequence[Secret]) -> None:
        """Refuses secrets that it can say nothing of, before any model is asked. Raises
        AuditError."""

    def has_subject_in(self, secrets: Sequence[Secret]) -> bool:
        """Return whether any of these records has what it looks at."""
        return True

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        """Raise NotApplicable for what this run does not give it, before any record is asked;
        capabilities aside."""

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        """Observes the secrets one by one. What is seen of a secret depends on it alone, not on its
        neighbours."""
        raise NotImplementedError

    def facts(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, float]:
        """Numbers of no one secret: the terms of the claim, or what the model answers once all
        secrets were seen.

        Asked once a row, and kept; the methods below find it in `observations.facts`. secrets,
        observations: side by side, in the same order, here and below.
        """
        return {}

    def add_joint_values(
        self, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> list[Observation]:
        """The observations, with values that it takes all secrets to tell: a p-value against the
        non-members."""
        return list(observations)

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        """The numbers of the row. The first is the main one; NAME_nonmembers and excess_NAME go
        with it."""
        raise NotImplementedError

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        """The main number by repeat count, members only; empty where no repeat count is known."""
        return {}

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, list[float]]:
        """By measurement, a number for each secret, whose mean over the members it is: runs are
        paired by these.

        A measurement left out cannot be held to a baseline.
        """
        return {}

    def membership_candidates(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, CandidateScore]:
        """Return the scores that tell members from non-members, by name: the run takes the
        strongest of all rows'."""
        return {}

    def epsilon_lower_bounds(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Audited, ...]:
        """The lower bounds of epsilon that it proves, the (epsilon, delta) one first: what a claim
        is held to."""
        return ()

    def claim_violations(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[str, ...]:
        """How the target's claim was seen to fail: sentences. Empty where it was not, or where
        nobody looked."""
        return ()

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        """What a reader must know about this row: sentences."""
        return ()


@dataclass(frozen=True)
class DistributionProbe(Probe):
    """Base of probes of the distribution that tokens are drawn from. Defaults: Ethicist, Section
    4.2 (top-p, T)."""

    temperature: float = 0.8
    top_p: float = 0.7
    top_k: int = 0
    eos: Literal["ordinary", "masked"] = "ordinary"

    def __post_init__(self) -> None:
        self.sampling()  # refuses a bad temperature, top_k or top_p

    def sampling(self) -> Sampling:
        """The recipe of the one sample whose distribution is looked at."""
        return Sampling(1, Decoding(self.temperature, self.top_k, self.top_p), self.eos)


Look = Callable[[Sequence[Secret], Tensor, Tensor], Sequence[Observation]]
"""(secrets, their prefixes (B, n), their suffixes (B, L)) -> what was seen of each."""
OfRows = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(distributions (rows, V) in nats, the token of each row) -> (rows,) each."""


def observe_in_batches(
    view: View, secrets: Sequence[Secret], size: int, look: Look
) -> Iterator[Observation]:
    """What `look` sees of secrets of one shape, `size` at once, or as many as memory holds."""
    # One limit for all shapes: a size that was too large for one is not tried on the next.
    at_once = BatchSizeLimit(view.batch_size or size)
    for indices in group_equal_shapes([(len(s.prefix), len(s.suffix)) for s in secrets]):
        # The default binds these indices: a plain closure would read those of a later turn of the
        # loop.
        def seen(some: slice, alike: Sequence[int] = indices) -> Sequence[Observation]:
            batch = [secrets[i] for i in alike[some]]
            prefixes = torch.tensor([secret.prefix for secret in batch], device=view.target.device)
            suffixes = torch.tensor([secret.suffix for secret in batch], device=view.target.device)
            return look(batch, prefixes, suffixes)

        for _, found in at_once.run_pieces_within_memory(len(indices), seen):
            yield from found


def read_token_statistics(
    model: LanguageModel, prefixes: Tensor, suffixes: Tensor, at_once: int, of_rows: OfRows
) -> Iterator[list[Tensor]]:
    """What `of_rows` tells of each token, (b, L) for a few texts at a time; it is given `at_once`
    entries at most."""
    for own, distribution in model.teacher_forced_distributions(prefixes, suffixes):
        # (b, L, V) -> (b L, V), a chunk at a time: what `of_rows` makes of it takes as much memory
        # again.
        step = max(1, at_once // distribution.shape[-1])
        chunks = zip(distribution.flatten(0, 1).split(step), own.flatten().split(step), strict=True)
        seen = [of_rows(rows, tokens) for rows, tokens in chunks]
        yield [torch.cat(columns).view_as(own) for columns in zip(*seen, strict=True)]


def observe_all_secrets(probe: Probe, view: View, secrets: Sequence[Secret]) -> Observed:
    """All that a probe sees of these secrets."""
    found = {
        observation.secret: observation for observation in probe.observe_secrets(view, secrets)
    }
    seen = [found[secret.id] for secret in secrets]
    # Both are given what was seen: `facts` finds nothing of what `complete` adds.
    return Observed(probe.add_joint_values(secrets, seen), probe.facts(view, secrets, seen))


def value_column(observations: Sequence[Observation], name: str) -> NDArray[np.float64]:
    return np.array([observation.values[name] for observation in observations], dtype=float)


def observed_names_without_prefix(prefix: str, names: Iterable[str]) -> list[str]:
    """What follows the prefix in those of the names that begin with it."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def member_mask(secrets: Sequence[Secret]) -> NDArray[np.bool_]:
    return np.array([secret.member for secret in secrets], dtype=bool)


def scored_records(secrets: Sequence[Secret]) -> ScoredRecords:
    """Return who is a member, by copies too, and whose records are resampled together: a person's,
    or a document's."""
    copies = {str(r): own for r, own in masks_by_repeat_count(secrets).items()}
    # A record of nobody, and of no document, is a unit by itself.
    units = [s.user or s.document or s.id for s in secrets]
    unit = np.unique(units, return_inverse=True)[1] if len(set(units)) < len(units) else None
    return ScoredRecords(member_mask(secrets), copies, unit)


def mean_probability_with_nonmember_baseline(
    name: str,
    p: NDArray[np.float64],
    member: NDArray[np.bool_],
    note: str = "",
    excess: bool = True,
) -> list[Measurement]:
    """Mean probability of members and, where there are any, of non-members; `excess`: their
    difference too."""
    own = mean_probability(name, p[member], note)
    if member.all():
        return [own]
    floor = mean_probability(name_nonmember_metric(name), p[~member], "the baseline")
    return (
        [own, floor, subtract_nonmember_mean(name_excess_metric(name), own, floor)]
        if excess
        else [own, floor]
    )


def mean_probability_by_repeat_count(
    name: str, secrets: Sequence[Secret], p: NDArray[np.float64]
) -> dict[str, Measurement]:
    """Mean probability of the members of each repeat count, where repeat counts are known."""
    return {
        str(r): mean_probability(name, p[own]) for r, own in masks_by_repeat_count(secrets).items()
    }


def masks_by_repeat_count(secrets: Sequence[Secret]) -> dict[int, NDArray[np.bool_]]:
    """Which secrets are members of each repeat count, rising, as far as repeat counts are known."""
    # -1, which no count is: a non-member, or a member of unknown count.
    repeats = np.array([-1 if s.repeats is None or not s.member else s.repeats for s in secrets])
    return {r: repeats == r for r in sorted(set(repeats.tolist()) - {-1})}
