"""Define the base classes of probes, which measure a model with access to the true suffixes.

A probe draws no samples. A subclass of `Probe` observes each secret; a `DistributionProbe` reads
decoding distributions and compares members with non-members.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.nouns import Observation, Secret, TokenLogProbs
from auditor.core.result import Audited, Measurement
from auditor.core.secret_table import STRINGS, SecretTable, build_secret_table
from auditor.models.base import LanguageModel, read_long_texts
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.memory import BatchSizeLimit, group_equal_shapes
from auditor.plugins.method import Method
from auditor.plugins.view import Sampling, View
from auditor.statistics.intervals import (
    compute_mean_probability,
    contain_unit_interval,
    measure_share,
    subtract_nonmember_mean,
)
from auditor.statistics.metrics import name_excess_metric, name_nonmember_metric
from auditor.statistics.strongest_score import CandidateScore, ScoredRecords

DELTA = 1e-5  # of a bound on epsilon, if neither the user nor a claim gives it


class Observed(Sequence[Observation]):
    """The observations of a probe, in the order of the secrets, stored as a column for each name.

    `facts` are the numbers of `Probe.facts`, which describe all secrets together, such as the
    number of rounds of a guessing game.
    """

    def __init__(
        self, observations: Iterable[Observation] = (), facts: Mapping[str, float] | None = None
    ) -> None:
        self.facts = dict(facts or {})
        self._ids: Sequence[str] | NDArray[Any] = ()
        # by name: the values, NaN if missing, and whether each is present
        self._columns: dict[str, tuple[array[float], bytearray]] = {}
        if isinstance(observations, Observed):
            self._ids = observations._ids
            self._columns = observations._columns
            return
        ids = []
        for i, observation in enumerate(observations):
            ids.append(observation.secret)
            for name, value in observation.values.items():
                values, present = self._columns.setdefault(name, (array("d"), bytearray()))
                _pad_column(values, present, i)
                values.append(value)
                present.append(True)
        self._ids = np.array(ids, STRINGS)
        for values, present in self._columns.values():
            _pad_column(values, present, len(self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> Observation: ...

    @overload
    def __getitem__(self, place: slice) -> Observed: ...

    def __getitem__(self, place: int | slice) -> Observation | Observed:
        if isinstance(place, slice):
            return Observed(map(self.__getitem__, range(len(self))[place]), self.facts)
        values = {}
        for name, (column, present) in self._columns.items():
            if present[place]:
                values[name] = column[place]
        return Observation(self._ids[place], values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented
        return all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values that at least one secret has."""
        return tuple(self._columns)

    def find_column(self, name: str) -> tuple[Floats, Bools]:
        """Return each secret's value (NaN if missing), and a mask of the secrets that have one.

        Both have shape (secrets,).
        """
        if name not in self._columns:
            return np.full(len(self), math.nan), np.zeros(len(self), dtype=bool)
        values, present = self._columns[name]
        column: Floats = np.asarray(memoryview(values).toreadonly())
        return column, np.asarray(memoryview(present).toreadonly()).view(bool)

    def add_columns(
        self, columns: Mapping[str, Floats | Ints], places: Ints | slice = slice(None)
    ) -> Observed:
        """Return a copy of the observations with further values for some secrets.

        columns: the values, keyed by name. Each array has shape (places,).
        places: indices of the secrets that get a value; by default all secrets.
        """
        completed = Observed(self, self.facts)
        completed._columns = dict(self._columns)
        for name, values in columns.items():
            column, present = (part.copy() for part in self.find_column(name))
            column[places] = values
            present[places] = True
            completed._columns[name] = array("d", column.tobytes()), bytearray(present)
        return completed


def _pad_column(values: array[float], present: bytearray, size: int) -> None:
    """Fill a column with missing values up to this size."""
    n_missing = size - len(values)
    values.extend(itertools.repeat(math.nan, n_missing))
    present.extend(bytes(n_missing))


@dataclass(frozen=True)
class Probe(Method):
    """Base class of the auditor's measurements, which use the true suffixes of secrets.

    Attributes:
        of: which records the probe observes, its subjects. These are the benchmark's secrets, its
            canaries for exposure, the canaries that a coin included or excluded, or the
            `textless_subjects`.
        means: names of measurements that are means of `per_secret_values`; these may end a run
            early.
    """

    needs: ClassVar[tuple[str, ...]] = ("distribution",)
    means: ClassVar[tuple[str, ...]] = ()

    def textless_subjects(self, view: View) -> tuple[Secret, ...]:
        """Return subjects that have no text, such as gradients, with their ids and membership.

        Raise NotApplicable if there are none.
        """
        raise NotImplementedError

    def wanted_reference_models(self) -> str:
        """Return the value of the option `references`, or "" if it is not set.

        The option names further reference models.
        """
        return ""

    def check_secrets(self, secrets: Sequence[Secret]) -> None:
        """Raise AuditError, before any query, if the probe cannot observe these secrets."""

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        """Raise NotApplicable, before any query, if this run lacks an input of the probe.

        Capabilities are checked elsewhere.
        """

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        """Yield one observation per secret, in order.

        An observation must not depend on other secrets.
        """
        raise NotImplementedError

    def facts(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, float]:
        """Return numbers that describe all secrets together, such as the claimed epsilon.

        The run calls this method once for each model and setting. The method may query the model.
        All later methods find the numbers in `observations.facts`. Secrets and observations are in
        the same order.
        """
        return {}

    @property
    def queries_for_joint_values(self) -> bool:
        """True if `add_joint_values` queries the model.

        The run then stores these values, so that a resumed run or a sweep does not query again.
        """
        return False

    def add_joint_values(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> Sequence[Observation]:
        """Return the observations with values that depend on all secrets, such as a p-value.

        Calling this method with its own result must change nothing. If it queries the model,
        `queries_for_joint_values` is True.
        """
        return observations

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        """Return the numbers to report, with the main number first.

        If NAME is a number for members, NAME_nonmembers is the same number for non-members, and
        excess_NAME is the difference.
        """
        raise NotImplementedError

    def main_number_by_repeats(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, Measurement]:
        """Return the members' main number for each number of copies in training.

        The result is empty if the copies are unknown.
        """
        return {}

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> Mapping[str, Sequence[float] | Floats | Bools]:
        """Return the per-secret values of each measurement that is a mean over members.

        Two runs are compared by these values, secret by secret; a measurement that has none cannot
        be compared with a baseline.
        """
        return {}

    def membership_candidates(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> dict[str, CandidateScore]:
        """Return membership scores, keyed by name; the run selects the strongest of all probes."""
        return {}

    def epsilon_lower_bounds(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[Audited, ...]:
        """Return the proven lower bounds on epsilon, the (epsilon, delta) bound first.

        The run compares the claimed epsilons with these bounds.
        """
        return ()

    def plan_audit(self, view: View, secrets: Sequence[Secret]) -> Audited | None:
        """Return the planned epsilon audit: its delta, significance level and number of canaries.

        The run calls this method before any guess is made. Return None if the probe gives no lower
        bound on epsilon, or if it obtains the bound from games.
        """
        return None

    def claim_violations(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[str, ...]:
        """Return sentences about observed violations of the model's privacy claim, if any."""
        return ()

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        """Return sentences that a reader of the probe's results must know."""
        return ()


@dataclass(frozen=True)
class AncestralProbe(Probe):
    """Base class of probes of the model's own distribution, without temperature and truncation."""

    def sampling(self) -> Sampling:
        return Sampling(1, ANCESTRAL)


@dataclass(frozen=True)
class DistributionProbe(Probe):
    """Base class of probes of the decoding distribution.

    Defaults (top-p, T): Ethicist, Section 4.2.
    """

    temperature: float = 0.8
    top_p: float = 0.7
    top_k: int = 0
    eos: Literal["ordinary", "masked"] = "ordinary"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling()  # refuses a bad temperature, top_k or top_p

    def sampling(self) -> Sampling:
        """Return the decoding of the distribution that the probe observes, for one sample."""
        return Sampling(1, Decoding(self.temperature, self.top_k, self.top_p), self.eos)


Look = Callable[[Sequence[Secret], Tensor, Tensor], Sequence[Observation]]
"""(secrets, their prefixes (B, n), their suffixes (B, L)) -> what was seen of each."""
OfRows = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(distributions (rows, V) in nats, the token of each row) -> (rows,) each."""


def batch_equal_shapes(
    model: LanguageModel, secrets: Sequence[Secret], size: int | None
) -> Iterator[tuple[Ints, Tensor, Tensor]]:
    """Yield batches of equally long secrets: B indices, prefixes (B, n) and suffixes (B, L).

    `size` is the largest number of secrets in a batch.
    """
    table = build_secret_table(secrets)
    for part in _read_windows((model,), table):
        for indices in group_equal_shapes(table.lengths[part], size):
            yield part[indices], *_load_tokens(table, part[indices], model.device)


# the scores of a batch of secrets, and the ids of those that greedy decoding recites
GreedyBatch = tuple[list[TokenLogProbs], list[str]]


@torch.no_grad()
def score_greedily(
    model: LanguageModel, secrets: Sequence[Secret], at_once: int
) -> Iterator[GreedyBatch]:
    """Yield the scores of equally long secrets, and the ids of those that the model recites.

    A secret is recited if each token of its suffix is the most likely one. `at_once` is the largest
    number of secrets in a batch.
    """
    ids = build_secret_table(secrets).ids
    for indices, prefixes, suffixes in batch_equal_shapes(model, secrets, at_once):
        scores = list[TokenLogProbs]()
        recited = list[str]()
        # Parts of the batch: (rows, L) tokens and (rows, L, vocabulary) distributions.
        for tokens, distribution in model.teacher_forced_distributions(prefixes, suffixes):
            is_hit = (distribution.argmax(-1) == tokens).all(-1).tolist()
            part = ids[indices[: len(is_hit)]].tolist()
            indices = indices[len(is_hit) :]
            recited += itertools.compress(part, is_hit)
            log_probs = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            scores += map(TokenLogProbs, part, map(tuple, log_probs.double().tolist()))
        yield scores, recited


def _read_windows(models: Sequence[LanguageModel], secrets: SecretTable) -> Iterator[Ints]:
    """Yield the places of all secrets, in parts. The models read each text of a part only once."""
    texts = replace(secrets.texts, lengths=secrets.texts.lengths - 1)  # the last token is not read
    yield from read_long_texts(models, texts, secrets.text_numbers, secrets.lengths[:, 1])


def _load_tokens(secrets: SecretTable, places: Ints, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prefixes (B, n) and suffixes (B, L) of the secrets at `places` as tensors."""
    prefixes, suffixes = secrets.stack_tokens(places)
    return torch.tensor(prefixes, device=device), torch.tensor(suffixes, device=device)


def observe_in_batches(
    view: View, secrets: Sequence[Secret], size: int, look: Look
) -> Iterator[Observation]:
    """Yield observations of secrets, batching secrets with the same prefix and suffix length.

    `look` observes a batch. `size` is the number of secrets per batch; fewer if memory is too
    small.
    """
    # One limit for all shapes: a size that was too large for a shape is not tried on the next.
    at_once = BatchSizeLimit(view.batch_size or size)
    table = build_secret_table(secrets)
    models = [view.target]
    if view.reference is not None:
        models.append(view.reference)
    for part in _read_windows(models, table):
        for indices in group_equal_shapes(table.lengths[part]):
            # The default binds these indices: a plain closure would read those of a later
            # iteration.
            def seen(places: slice, order: Ints = part[indices]) -> Sequence[Observation]:
                batch = order[places]
                return look(tuple(table[batch]), *_load_tokens(table, batch, view.target.device))

            for _, observations in at_once.run_pieces_within_memory(len(indices), seen):
                yield from observations


def read_token_statistics(
    model: LanguageModel, prefixes: Tensor, suffixes: Tensor, at_once: int, of_rows: OfRows
) -> Iterator[list[Tensor]]:
    """Yield statistics of each suffix token, for b texts at a time.

    Each item is a list of tensors (b, L), one for each statistic. `of_rows` computes the statistics
    of n tokens from their next-token distributions (n, V) and ids (n,). `at_once` limits its
    memory: n V is at most `at_once`, or n is 1.
    """
    for batch_tokens, distribution in model.teacher_forced_distributions(prefixes, suffixes):
        # (b, L, V) -> (b L, V), a chunk at a time: the results of `of_rows` take as much memory
        # again.
        step = max(1, at_once // distribution.shape[-1])
        chunks = zip(
            distribution.flatten(0, 1).split(step), batch_tokens.flatten().split(step), strict=True
        )
        statistics = [of_rows(rows, tokens) for rows, tokens in chunks]
        yield [
            torch.cat(columns).view_as(batch_tokens) for columns in zip(*statistics, strict=True)
        ]


def observe_all_secrets(probe: Probe, view: View, secrets: Sequence[Secret]) -> Observed:
    """Return all observations of a probe for these secrets."""
    observations = order_observations(probe, view, secrets)
    # Both receive the same observations: `facts` sees no values of `add_joint_values`.
    return Observed(
        probe.add_joint_values(view, secrets, observations),
        probe.facts(view, secrets, observations),
    )


def order_observations(probe: Probe, view: View, secrets: Sequence[Secret]) -> list[Observation]:
    """Return a probe's observations in the order of the secrets."""
    by_secret = {}
    for observation in probe.observe_secrets(view, secrets):
        by_secret[observation.secret] = observation
    return [by_secret[secret.id] for secret in secrets]


def value_column(observations: Sequence[Observation], name: str) -> Floats:
    """Return a value of each secret, (secrets,). Raise KeyError if a secret has no such value."""
    values, present = Observed(observations).find_column(name)
    if not present.all():
        raise KeyError(name)
    return values


def strip_observed_prefix(prefix: str, names: Iterable[str]) -> list[str]:
    """Return the names that start with `prefix`, without the prefix."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def mask_members(secrets: Sequence[Secret]) -> Bools:
    return build_secret_table(secrets).find_column("member")


def score_records(secrets: Sequence[Secret]) -> ScoredRecords:
    """Return each record's membership, copies, and the unit (person or document) to resample.

    These are the inputs of statistics on scores.
    """
    copies = {}
    for r, mask in mask_repeat_counts(secrets).items():
        copies[str(r)] = mask
    unit = None
    if not {"user", "document"}.isdisjoint(build_secret_table(secrets).columns):
        # A record without person and document is a unit.
        units = [s.user or s.document or s.id for s in secrets]
        if len(set(units)) < len(units):
            unit = np.unique(units, return_inverse=True)[1]
    return ScoredRecords(mask_members(secrets), copies, unit)


def measure_baselined_probability(
    name: str,
    p: Floats,
    member: Bools,
    note: str,
    excess: bool = True,
    unit: Ints | None = None,
) -> list[Measurement]:
    """Return the mean probability for members and, if there are any, for non-members.

    `name` is the name of the measurement; `p` and `member` are (records,). If `excess` is True,
    also return the difference. `unit` is that of `ScoredRecords`.
    """

    def mean(name: str, side: Bools, note: str) -> Measurement:
        m = compute_mean_probability(name, p[side], note)
        if unit is None or not m.n:
            return m
        return contain_unit_interval(m, p[side], unit[side])

    member_mean = mean(name, member, note)
    if member.all():
        return [member_mean]
    floor = mean(name_nonmember_metric(name), ~member, "the baseline")
    if excess:
        return [
            member_mean,
            floor,
            subtract_nonmember_mean(name_excess_metric(name), member_mean, floor),
        ]
    return [member_mean, floor]


def measure_baselined_share(name: str, holds: Bools, member: Bools, note: str) -> list[Measurement]:
    """Return the share of members for which `holds` is true, and that of non-members if any.

    `name` is the name of the measurement; `holds` and `member` are (records,).
    """
    shares = [measure_share(name, holds[member], note)]
    if not member.all():
        shares.append(measure_share(name_nonmember_metric(name), holds[~member], "the baseline"))
    return shares


def measure_repeat_probability(
    name: str, secrets: Sequence[Secret], p: Floats
) -> dict[str, Measurement]:
    """Return the members' mean probability for each number of copies in training, if known.

    `name` is the name of the measurement; `p` is (records,).
    """
    unit = score_records(secrets).unit
    means = {}
    for r, mask in mask_repeat_counts(secrets).items():
        means[str(r)] = compute_mean_probability(name, p[mask])
        if unit is not None:
            means[str(r)] = contain_unit_interval(means[str(r)], p[mask], unit[mask])
    return means


def count_member_repeats(secrets: Sequence[Secret]) -> Ints:
    """Return each member's number of copies, (secrets,); -1 if unknown or for a non-member."""
    table = build_secret_table(secrets)
    member = table.find_column("member")
    repeats = table.find_column("repeats")
    return np.where(member, repeats, -1)


def mask_repeat_counts(secrets: Sequence[Secret]) -> dict[int, Bools]:
    """Return, for each known number of copies in ascending order, a mask of the members with it."""
    repeats = count_member_repeats(secrets)
    return {r: repeats == r for r in sorted(set(repeats.tolist()) - {-1})}
