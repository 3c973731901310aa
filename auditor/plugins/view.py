"""What one attacker may ask of one target in one setting, and the randomness of its questions.

An attack sees the target through a view only: no attack asks whether a defense is there. Knows
nothing of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import NotApplicable, TargetLacks
from auditor.core.nouns import Claim, Query, SettingName, Tokens
from auditor.core.secret_randomness import CHANNELS, secret_uniform_draws
from auditor.generation.sample import (
    SuffixCandidates,
    batch_sampling_by_length,
    merge_candidates,
    sample_mixed_length_batch,
)
from auditor.generation.search import beam_search, find_suffixes_above_threshold
from auditor.generation.shared_candidates import CandidatesOnDisk
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.memory import BatchSizeLimit, decoding_memory_budget, group_equal_shapes
from auditor.models.references import ReferenceModels
from auditor.plugins.defense import largest_lot_token_count
from auditor.privacy.gradient_canaries import GradientCanaries

# What decoding rows may hold at once on a processor, should no two samples of a prefix share a
# path. Twice as much is 9% slower with the lab's ensemble (its distributions outgrow the blocks
# that the allocator keeps); a sixteenth, 30% with any model.
_ROWS_BYTES = 2**29
_PREFIXES_AT_ONCE = 256
# a tree reads whole distributions, in more precision, where a draw reads a nucleus
_TREE_DISTRIBUTIONS = 4

Search = Literal["sample", "tree", "beam"]


@dataclass(frozen=True)
class Setting:
    """An access and a decoding: a privacy claim covers one of each."""

    name: SettingName
    stream: str  # in the keys of random streams, as it was when the first results were drawn
    capabilities: frozenset[str]
    # draws come from the target's own distribution, whatever decoding an attack would like
    ancestral: bool


# Inside the claim of a private prediction only sampled tokens come back, and they are drawn from
# the mixed distribution itself.
TEXT_ONLY = Setting("text-only", "claim", frozenset({"draw"}), ancestral=True)
_ALL = frozenset({"draw", "distribution", "embeddings", "training"})
WHITE_BOX = Setting("white-box", "worst", _ALL, ancestral=False)
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in (TEXT_ONLY, WHITE_BOX)}


@dataclass(frozen=True)
class Sampling:
    """A recipe for candidates: how many samples a prefix, under which decoding, end of text allowed
    or not.

    Or a search in their place: the `tree` of all suffixes whose probability under the decoding
    reaches `threshold`, or a `beam` of width `beams`, which knows neither temperature nor
    truncation.
    """

    samples: int
    decoding: Decoding
    eos: Literal["ordinary", "masked"] = "ordinary"
    search: Search = "sample"
    threshold: float = 0.01
    beams: int = 10


@dataclass
class ClaimTokenMeter:
    """Tokens of one target inside the claim: what this run really drew, and what the claim says is
    spent.

    drawn: by (recipe, secret): the same tokens drawn again, after a worker was lost with them, are
    counted once. A resumed run draws less than it spends; a run that draws more was not charged for
    the difference.
    """

    drawn: dict[tuple[str, str], int] = field(default_factory=dict)
    spent: int = 0
    lots: Mapping[str, int] = field(default_factory=dict)  # `Defense.lots`

    @property
    def drawn_token_count(self) -> int:
        return largest_lot_token_count(self.drawn, self.lots)

    @property
    def uncharged_token_count(self) -> int:
        return max(0, self.drawn_token_count - self.spent)


Batch = list[tuple[Query, SuffixCandidates]]


@dataclass
class View:
    """One attacker's access. `require_capability` refuses what the setting does not give; all else
    asks through it."""

    target_name: str
    target: LanguageModel
    setting: Setting
    seed: int
    public: LanguageModel | None = None
    reference: LanguageModel | None = None
    # what is known of it that makes it no reference: that it saw private data
    reference_fault: str = ""
    # by what `-A references=` says; None: there are none here
    references: Callable[[str], ReferenceModels] | None = None
    tokenizer: Any = None
    batch_size: int | None = None
    # tokens a (recipe, secret) may still draw; None: unlimited
    allowance: Mapping[tuple[str, str], int] | None = None
    meter: ClaimTokenMeter = field(default_factory=ClaimTokenMeter)
    claim: Claim | None = None  # what the target promises, as everybody is told; None: nothing
    # of what one answer takes long for
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    training: GradientCanaries | None = None  # what the target's training kept for an audit of it
    _shared: dict[str, CandidatesOnDisk] = field(default_factory=dict)

    def require_capability(self, *capabilities: str) -> None:
        """Raises NotApplicable where this setting, or the target, does not give one of the
        capabilities."""
        # The setting first: what it keeps back is kept back of every target.
        for capability in capabilities:
            if not implies_capability(self.setting.capabilities, capability):
                raise NotApplicable(
                    f"needs {_WORDS[capability]}; in this setting only sampled tokens come back"
                )
            if not implies_capability(self._available_capabilities, capability):
                raise TargetLacks(
                    f"needs {_WORDS[capability]}; {self.target.name} does not give them"
                )

    def has_capability(self, capability: str) -> bool:
        return all(
            implies_capability(own, capability)
            for own in (self.setting.capabilities, self._available_capabilities)
        )

    @property
    def visible_capabilities(self) -> tuple[str, ...]:
        """What this setting lets an attacker see of this target, from the least on."""
        implied = (
            ("likelihood", "ranks", "likeliest") if self.has_capability("distribution") else ()
        )
        return tuple(name for name in _WORDS if self.has_capability(name) and name not in implied)

    @property
    def _available_capabilities(self) -> frozenset[str]:
        """By the target, and by what its training kept."""
        return self.target.capabilities | (set() if self.training is None else {"training"})

    def recorded_gradient_canaries(self) -> GradientCanaries:
        """What the target's training kept of its gradient canaries. Raises NotApplicable where it
        kept nothing."""
        self.require_capability("training")
        assert self.training is not None  # `require_capability` has seen to it
        return self.training

    def decoding_in_this_setting(self, sampling: Sampling) -> Decoding:
        """The decoding really used: the attack's own, or ancestral where the setting has the target
        draw."""
        if self.setting.ancestral:
            return ANCESTRAL
        forbidden = self.target.eos if sampling.eos == "masked" else ()
        return replace(sampling.decoding, forbidden=forbidden)

    def sample_count(self, sampling: Sampling) -> int:
        """Return the samples of a prefix that are drawn: one if all of them are the same."""
        is_point = sampling.search == "sample" and self.decoding_in_this_setting(sampling).is_point
        return 1 if is_point else sampling.samples

    def decoding_description(self, sampling: Sampling) -> str:
        """How candidates come about, as a reader of the report is told; the number of samples is
        told elsewhere."""
        decoding = self.decoding_in_this_setting(sampling)
        if sampling.search == "tree":
            return f"tree to {sampling.threshold:g}, {decoding}"
        if sampling.search == "beam":
            return f"beam {sampling.beams}" + ", end of text masked" * bool(decoding.forbidden)
        return str(decoding)

    def sampling_recipe_name(self, sampling: Sampling, prompt: str) -> str:
        """The name of a pass: attacks with the same recipe share it. `prompt` names the soft
        prompt."""
        samples = f"{self.sample_count(sampling)} x " if sampling.search == "sample" else ""
        return f"{samples}{self.decoding_description(sampling)}, prompt {prompt or 'none'}"

    def queries_within_allowance(
        self, sampling: Sampling, prompt: str, queries: Sequence[Query]
    ) -> list[Query]:
        """The queries whose whole answer the budget pays for, or that are answered publicly; all
        without a budget."""
        if self.allowance is None:
            return list(queries)
        name = self.sampling_recipe_name(sampling, prompt)
        return [query for query in queries if (name, query.id) in self.allowance]

    def candidates(
        self,
        queries: Sequence[Query],
        sampling: Sampling,
        soft_prompt: Tensor | None = None,
        prompt: str = "",
    ) -> Iterator[Batch]:
        """Candidates for each query, in batches of one shape. A pass with this recipe that was run
        before is reused."""
        self.require_capability("draw" if sampling.search == "sample" else "distribution")
        sampling = replace(sampling, samples=self.sample_count(sampling))
        name = self.sampling_recipe_name(sampling, prompt)
        done = self._shared.setdefault(name, CandidatesOnDisk())
        queries = self.queries_within_allowance(sampling, prompt, queries)
        prompt_rows = 0 if soft_prompt is None else len(soft_prompt)
        rows = BatchSizeLimit(self._max_decoding_rows_in_memory(queries, prompt_rows))
        at_once = BatchSizeLimit(self.prefix_batch_size(sampling, queries, prompt_rows))
        batched = group_equal_shapes
        if sampling.search == "sample":
            batched = partial(batch_sampling_by_length, self.target, samples=sampling.samples)
        for indices in batched([(len(q.prefix), q.length) for q in queries]):
            asked = [queries[i] for i in indices]

            # The default binds this batch: a plain closure would read that of a later turn of the
            # loop.
            def find(some: slice, asked: Sequence[Query] = asked) -> None:
                # Tried again in smaller pieces where memory ran out: what was found by then is not
                # drawn again.
                fresh = [query for query in asked[some] if query.id not in done]
                if fresh:
                    found = self._candidates_of_batch(fresh, sampling, name, soft_prompt, rows)
                    for query, candidates in zip(fresh, found, strict=True):
                        done[query.id] = candidates

            for some, _ in at_once.run_pieces_within_memory(len(asked), find):
                # A sampling batch may hold several lengths; attacks are handed one shape at a time.
                for alike in group_equal_shapes(
                    [(len(query.prefix), query.length) for query in asked[some]]
                ):
                    yield [(asked[some][i], done[asked[some][i].id]) for i in alike]

    def prefix_batch_size(
        self, sampling: Sampling, queries: Sequence[Query], prompt_rows: int = 0
    ) -> int:
        """Prefixes in one pass: many, as memorised text takes few rows, but no more than memory has
        rows for."""
        # A tree divides a batch that outgrows its rows by itself.
        width = {"sample": sampling.samples, "beam": sampling.beams, "tree": 1}[sampling.search]
        return self.batch_size or max(
            1,
            min(
                _PREFIXES_AT_ONCE, self._max_decoding_rows_in_memory(queries, prompt_rows) // width
            ),
        )

    def _max_decoding_rows_in_memory(self, queries: Sequence[Query], prompt_rows: int) -> int:
        """Decoding rows that memory allows at once."""
        longest = max((len(query.prefix) + query.length for query in queries), default=1)
        row = self.target.row_bytes(
            prompt_rows + longest, distribution=self.has_capability("likelihood")
        )
        return max(1, decoding_memory_budget(self.target.device, _ROWS_BYTES) // row)

    def _candidates_of_batch(
        self,
        batch: Sequence[Query],
        sampling: Sampling,
        name: str,
        prompt: Tensor | None,
        rows: BatchSizeLimit,
    ) -> Sequence[SuffixCandidates]:
        """Candidates of each query, drawn or searched. rows: decoding rows at once."""
        model, decoding = self.target, self.decoding_in_this_setting(sampling)
        if sampling.search != "sample":
            prefixes, length = (
                torch.tensor([query.prefix for query in batch], device=model.device),
                batch[0].length,
            )
            if sampling.search == "beam":
                return beam_search(
                    model,
                    prefixes,
                    length,
                    sampling.beams,
                    forbidden=decoding.forbidden,
                    prompt=prompt,
                )
            max_rows = max(1, rows.size // _TREE_DISTRIBUTIONS)
            return find_suffixes_above_threshold(
                model,
                prefixes,
                length,
                decoding,
                sampling.threshold,
                prompt=prompt,
                max_rows=max_rows,
            )
        noise = [self._uniform_draws_of_query(query, sampling.samples, name) for query in batch]
        distribution = self.has_capability("likelihood")
        # A batch is sized for all samples of its prefixes; those of a single one may still be too
        # many for memory. Where that is wrong, prefixes are parted first: samples of one prefix
        # share what they agree in.
        size = max(1, rows.size // len(batch))
        drawn = (
            rows if len(batch) == 1 else BatchSizeLimit(size, least=size)
        ).run_pieces_within_memory(
            sampling.samples,
            lambda some: sample_mixed_length_batch(
                model,
                [query.prefix for query in batch],
                decoding,
                [own[some] for own in noise],
                prompt=prompt,
                distribution=distribution,
            ),
        )
        passes = [candidates for _, candidates in drawn]
        if self.setting is TEXT_ONLY:  # the one whose tokens a claim's budget pays for
            # the others are answered by the public model
            paid = [int((own[..., 1] >= 0).sum()) for own in noise]
            self.meter.drawn |= {
                (name, query.id): tokens for query, tokens in zip(batch, paid, strict=True)
            }
        return (
            passes[0]
            if len(passes) == 1
            else [merge_candidates(parts) for parts in zip(*passes, strict=True)]
        )

    def _uniform_draws_of_query(self, query: Query, samples: int, name: str) -> np.ndarray:
        # The number of samples is left out of the key: a run with fewer of them draws the first
        # ones of this run.
        recipe = name.split(" x ", 1)[1]
        key = (self.seed, self.target_name, self.setting.stream, recipe, query.id)
        noise = secret_uniform_draws(samples, query.length, *key)
        if self.allowance is not None:
            # Draws past the budget are answered by the public model: a subset of size zero,
            # whatever was drawn for it.
            paid = self.allowance[(name, query.id)]
            noise.reshape(-1, CHANNELS)[
                paid:, 1
            ] = -1.0  # of a contiguous array: a view, so `noise` itself changes
        return noise

    def mean_nll(self, model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
        """Mean nll in nats a token of each (prefix, suffix) under `model`, which is the target or a
        reference.

        Suffixes of one prefix are scored together: what they share is read once.
        """
        if model is self.target:
            self.require_capability("likelihood")
        behind: dict[Tokens, list[Tokens]] = {}
        for prefix, suffix in dict.fromkeys(pairs):
            behind.setdefault(prefix, []).append(suffix)
        found = {
            **_nll_of_lone_suffixes(model, behind),
            **_nll_of_shared_prefix_suffixes(model, behind),
        }
        return [found[pair] / len(pair[1]) for pair in pairs]


def _nll_of_lone_suffixes(
    model: LanguageModel, behind: Mapping[Tokens, Sequence[Tokens]]
) -> dict[tuple[Tokens, Tokens], float]:
    """Summed nll of suffixes that are alone behind their prefix, each in one pass."""
    pairs = [(prefix, suffixes[0]) for prefix, suffixes in behind.items() if len(suffixes) == 1]
    found: dict[tuple[Tokens, Tokens], float] = {}
    # A last token is predicted and never read.
    model.read_ahead(
        [(prefix + suffix)[:-1] for prefix, suffix in pairs], [len(suffix) for _, suffix in pairs]
    )
    for indices in group_equal_shapes(
        [(len(prefix), len(suffix)) for prefix, suffix in pairs], _PREFIXES_AT_ONCE
    ):
        prefixes, suffixes = (
            torch.tensor([pairs[i][side] for i in indices], device=model.device) for side in (0, 1)
        )
        with torch.no_grad():
            scores = model.token_log_probs(prefixes, suffixes)
        found.update(
            zip((pairs[i] for i in indices), (-scores.double().sum(-1)).tolist(), strict=True)
        )
    return found


def _nll_of_shared_prefix_suffixes(
    model: LanguageModel, behind: Mapping[Tokens, Sequence[Tokens]]
) -> dict[tuple[Tokens, Tokens], float]:
    """Summed nll of suffixes that share their prefix with others, as many at once as memory
    allows."""
    prefixes = [prefix for prefix, suffixes in behind.items() if len(suffixes) > 1]
    found: dict[tuple[Tokens, Tokens], float] = {}
    # By the prefix alone: `suffix_log_probs` takes suffixes of several lengths.
    for indices in group_equal_shapes([(len(prefix), 0) for prefix in prefixes], _PREFIXES_AT_ONCE):
        pairs = [(prefixes[i], suffix) for i in indices for suffix in behind[prefixes[i]]]
        longest = max(len(prefix) + len(suffix) for prefix, suffix in pairs)
        size = max(1, decoding_memory_budget(model.device, _ROWS_BYTES) // model.row_bytes(longest))
        limit = BatchSizeLimit(size)
        # Used up within this turn of the loop, so `pairs` is still its own.
        asked = limit.run_pieces_within_memory(
            len(pairs),
            lambda some: _summed_suffix_log_probs(model, pairs[some]),  # noqa: B023
        )
        for some, log_probs in asked:
            found.update(zip(pairs[some], (-x for x in log_probs), strict=True))
    return found


def _summed_suffix_log_probs(
    model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]]
) -> list[float]:
    """Summed log-probability of each suffix, the prefixes all of one length."""
    read = list(dict.fromkeys(prefix for prefix, _ in pairs))
    owner = [read.index(prefix) for prefix, _ in pairs]
    tokens = torch.tensor(read, device=model.device)
    return model.suffix_log_probs(tokens, owner, [suffix for _, suffix in pairs])


_WORDS = {
    "draw": "sampled tokens",
    "likelihood": "log-probabilities",
    "ranks": "ranks of tokens in the distribution",
    "likeliest": "log-probabilities of the likeliest tokens",
    "distribution": "log-probabilities of every next token",
    "embeddings": "gradients",
    "training": "canaries in the gradients of its training (audit train dp-sgd -D "
    "gradient_canaries=1000)",
}
