"""Define an attacker's access to a model in a setting, and the randomness of its queries.

An attack uses the model only through a view, so no attack needs to know of a defense. Views contain
no true suffixes of secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable, TargetLacks
from auditor.core.nouns import Claim, Query, SettingName, Tokens
from auditor.core.secret_randomness import CHANNELS, draw_secret_uniforms
from auditor.generation.sample import (
    SuffixCandidates,
    batch_lengths,
    merge_candidates,
    sample_mixed_length_batch,
)
from auditor.generation.search import beam_search, find_suffixes_above_threshold
from auditor.generation.shared_candidates import CandidatesOnDisk
from auditor.models.base import (
    LanguageModel,
    implies_capability,
    number_long_texts,
    read_long_texts,
)
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.memory import BatchSizeLimit, choose_memory_budget, group_equal_shapes
from auditor.models.references import ReferenceModels
from auditor.plugins.defense import count_largest_lot
from auditor.privacy.gradient_canaries import GradientCanaries

# Memory of decoding rows on a CPU, if no two samples of a prefix share a path. Twice as much is 9%
# slower with the lab's ensemble (its distributions outgrow the allocator's blocks). A sixteenth is
# 30% slower with any model.
_ROWS_BYTES = 2**29
_PREFIXES_AT_ONCE = 256
_STEP_TOKENS = 16  # tokens that a CPU reads in a batch in the time of a step of a tree
# A tree reads whole distributions, in more precision, instead of a nucleus.
_TREE_DISTRIBUTIONS = 4

Search = Literal["sample", "tree", "beam"]


@dataclass(frozen=True)
class Setting:
    """An attacker's access (`capabilities`) and decoding. A privacy claim applies to one setting.

    Attributes:
        name: name of the setting, such as `text-only`.
        stream: seed of random numbers in this setting, together with the run's other keys. It does
            not change if the setting is renamed.
        ancestral: whether tokens are drawn from the model's own distribution, even if the attack
            asks for another decoding.
    """

    name: SettingName
    stream: str
    capabilities: frozenset[str]
    ancestral: bool


# Inside the claim of a private prediction only sampled tokens are returned, drawn from the mixed
# distribution itself.
TEXT_ONLY = Setting("text-only", "claim", frozenset({"draw"}), ancestral=True)
_ALL = frozenset({"draw", "distribution", "embeddings", "training"})
WHITE_BOX = Setting("white-box", "worst", _ALL, ancestral=False)
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in (TEXT_ONLY, WHITE_BOX)}


@dataclass(frozen=True)
class Sampling:
    """A recipe for candidate suffixes: number of samples per prefix, decoding, and end of text.

    `search` is `sample`, `tree` or `beam`. `tree` finds all suffixes whose probability under the
    decoding reaches `threshold`. `beam` searches with width `beams`, without temperature and
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
    """Count of the tokens that this run drew from a model with a privacy claim.

    Attributes:
        drawn: number of tokens by (recipe, secret); tokens that a lost worker drew are not counted
            twice.
        spent: number of tokens charged to the claim; more than drawn if the run was resumed.
        lots: for each secret, the budget (lot) that pays for it.
    """

    drawn: dict[tuple[str, str], int] = field(default_factory=dict)
    spent: int = 0
    lots: Mapping[str, int] = field(default_factory=dict)  # from `Defense.budget_lots`

    @property
    def drawn_token_count(self) -> int:
        return count_largest_lot(self.drawn, self.lots)

    @property
    def uncharged_token_count(self) -> int:
        return max(0, self.drawn_token_count - self.spent)


Batch = list[tuple[Query, SuffixCandidates]]


@dataclass
class View:
    """An attacker's access to the attacked model (`target`) in a setting.

    The setting may forbid a capability, such as reading probabilities. Every method that queries
    the target therefore calls `require_capability` first.

    Attributes:
        public: public model of the attacker.
        reference: reference model of the attacker.
        reference_fault: reason why `reference` is invalid.
        references: loads the models in the option `references`.
        batch_size: fixed batch size; None to choose it by memory.
        allowance: number of tokens that each (recipe, secret) may still draw; None for no limit.
        claim: the target's public privacy claim.
        progress: callback(description, done, total).
        training: gradient canaries from the target's training.
        tokens_after: tokens that follow every record in the target's training; None if unknown.
    """

    target_name: str
    target: LanguageModel
    setting: Setting
    seed: int
    public: LanguageModel | None = None
    reference: LanguageModel | None = None
    reference_fault: str = ""
    references: Callable[[str], ReferenceModels] | None = None
    tokenizer: Any = None
    batch_size: int | None = None
    allowance: Mapping[tuple[str, str], int] | None = None
    meter: ClaimTokenMeter = field(default_factory=ClaimTokenMeter)
    claim: Claim | None = None
    progress: Callable[[str, int, int], None] = lambda description, n_done, total: None
    training: GradientCanaries | None = None
    tokens_after: Tokens | None = None
    _shared: dict[str, CandidatesOnDisk] = field(default_factory=dict)

    def require_capability(self, *capabilities: str) -> None:
        """Raise NotApplicable if the setting or the target lacks any of the capabilities."""
        # The setting first: it restricts every target.
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
        return implies_capability(self.setting.capabilities, capability) and implies_capability(
            self._available_capabilities, capability
        )

    @property
    def visible_capabilities(self) -> tuple[str, ...]:
        """Capabilities that both this setting and the target have, weakest first."""
        implied = (
            ("likelihood", "ranks", "likeliest") if self.has_capability("distribution") else ()
        )
        return tuple(name for name in _WORDS if self.has_capability(name) and name not in implied)

    @property
    def _available_capabilities(self) -> frozenset[str]:
        """Capabilities of the target and of the record of its training."""
        return self.target.capabilities | (set() if self.training is None else {"training"})

    def recorded_gradient_canaries(self) -> GradientCanaries:
        """Return the gradient canaries from the target's training; raise NotApplicable if none."""
        self.require_capability("training")
        assert self.training is not None  # ensured by `require_capability`
        return self.training

    def decoding_in_this_setting(self, sampling: Sampling) -> Decoding:
        """Return the decoding that this setting uses.

        This is the attack's own decoding, unless the setting requires ancestral decoding. Raise
        AuditError if the end of text is to be masked and the target has none.
        """
        if self.setting.ancestral:
            return ANCESTRAL
        if sampling.eos == "ordinary":
            return sampling.decoding
        if not self.target.eos:
            raise AuditError(
                f"expected a model with an end of text for eos=masked, got {self.target.name}, "
                "which names none of its tokens as one"
            )
        return replace(sampling.decoding, forbidden=self.target.eos)

    def sample_count(self, sampling: Sampling) -> int:
        """Return the number of samples to draw for a prefix; 1 if all samples would be equal."""
        is_point = sampling.search == "sample" and self.decoding_in_this_setting(sampling).is_point
        return 1 if is_point else sampling.samples

    def decoding_description(self, sampling: Sampling) -> str:
        """Describe the source of candidates for a report, without the number of samples."""
        decoding = self.decoding_in_this_setting(sampling)
        if sampling.search == "tree":
            return f"tree to {sampling.threshold:g}, {decoding}"
        if sampling.search == "beam":
            return f"beam {sampling.beams}" + ", end of text masked" * bool(decoding.forbidden)
        return str(decoding)

    def sampling_recipe_name(self, sampling: Sampling, prompt: str) -> str:
        """Return the name of a set of samples that attacks with the same recipe share.

        `prompt` is the name of the soft prompt.
        """
        if sampling.search == "sample":
            samples = f"{self.sample_count(sampling)} x "
        else:
            samples = ""
        return f"{samples}{self.decoding_description(sampling)}, prompt {prompt or 'none'}"

    def queries_within_allowance(
        self, sampling: Sampling, prompt: str, queries: Sequence[Query]
    ) -> list[Query]:
        """Return the queries that get an answer.

        A query gets one if the target's budget pays for it or the public model answers it. Without
        a budget, return all queries.
        """
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
        """Yield batches of (query, candidates) pairs; a batch has queries of equal lengths.

        Earlier results are reused. `soft_prompt` holds the rows of the soft prompt, and `prompt`
        its name.
        """
        self.require_capability("draw" if sampling.search == "sample" else "distribution")
        sampling = replace(sampling, samples=self.sample_count(sampling))
        name = self.sampling_recipe_name(sampling, prompt)
        cache = self._shared.setdefault(name, CandidatesOnDisk())
        queries = self.queries_within_allowance(sampling, prompt, queries)
        if soft_prompt is None:
            prompt_rows = 0
        else:
            prompt_rows = len(soft_prompt)
        rows = BatchSizeLimit(self._max_decoding_rows_in_memory(queries, prompt_rows))
        at_once = BatchSizeLimit(self.prefix_batch_size(sampling, queries, prompt_rows))
        batched: Callable[..., Iterator[Any]] = group_equal_shapes
        if sampling.search == "sample":
            batched = partial(batch_lengths, self.target, samples=sampling.samples)
        has_long_texts = len(set(number_long_texts(map(attrgetter("prefix"), queries)))) < len(
            queries
        )
        for indices in batched([query.lengths for query in queries]):
            batch_queries = [queries[i] for i in indices]
            if has_long_texts:
                batch_queries.sort(key=attrgetter("prefix"))  # the windows of a text together

            # The default binds this batch: a plain closure would read that of a later iteration.
            def find(batch: slice, queries: Sequence[Query] = batch_queries) -> None:
                # Called again with smaller pieces after memory ran out: existing results are not
                # drawn again.
                fresh = [query for query in queries[batch] if query.id not in cache]
                prefixes = list(map(attrgetter("prefix"), fresh))
                numbers = number_long_texts(prefixes)
                last = np.ones(len(fresh), np.int64)
                for part in read_long_texts((self.target,), prefixes, numbers, last):
                    part_queries = list(map(fresh.__getitem__, part))
                    new_candidates = self._candidates_of_batch(
                        part_queries, sampling, name, soft_prompt, rows
                    )
                    for query, candidates in zip(part_queries, new_candidates, strict=True):
                        cache[query.id] = candidates

            for places, _ in at_once.run_pieces_within_memory(len(batch_queries), find):
                # A sampling batch may have several lengths; attacks receive one shape at a time.
                piece = batch_queries[places]
                for shape_indices in group_equal_shapes([query.lengths for query in piece]):
                    yield [(piece[i], cache[piece[i].id]) for i in shape_indices]

    def prefix_batch_size(
        self, sampling: Sampling, queries: Sequence[Query], prompt_rows: int
    ) -> int:
        """Return how many prefixes a batch may have for all its candidates to fit into memory.

        `prompt_rows` is the number of rows in the soft prompt.
        """
        # A tree splits a batch that outgrows its rows by itself.
        width = {"sample": sampling.samples, "beam": sampling.beams, "tree": 1}[sampling.search]
        return self.batch_size or max(
            1,
            min(
                _PREFIXES_AT_ONCE, self._max_decoding_rows_in_memory(queries, prompt_rows) // width
            ),
        )

    def _max_decoding_rows_in_memory(self, queries: Sequence[Query], prompt_rows: int) -> int:
        """Return the number of partial sequences (decoding rows) that fit into memory."""
        longest = max((sum(query.lengths) for query in queries), default=1)
        row = self.target.row_bytes(
            prompt_rows + longest, distribution=self.has_capability("likelihood")
        )
        return max(1, choose_memory_budget(self.target.device, _ROWS_BYTES) // row)

    def _candidates_of_batch(
        self,
        batch: Sequence[Query],
        sampling: Sampling,
        name: str,
        prompt: Tensor | None,
        rows: BatchSizeLimit,
    ) -> Sequence[SuffixCandidates]:
        """Return sampled or searched candidates for each query.

        `name` is the name of the recipe, `prompt` is the soft prompt, and `rows` limits the number
        of sequences decoded at once.
        """
        if sampling.search != "sample":
            return self._search_candidates(batch, sampling, prompt, rows.size)
        decoding = self.decoding_in_this_setting(sampling)
        noise = [self._uniform_draws_of_query(query, sampling.samples, name) for query in batch]
        distribution = self.has_capability("likelihood")
        # A batch is sized for all samples of its prefixes; those of a single prefix may still be
        # too many for memory. In that case prefixes are separated first: samples of a prefix share
        # their common beginning.
        size = max(1, rows.size // len(batch))
        passes_by_piece = (
            rows if len(batch) == 1 else BatchSizeLimit(size, minimum=size)
        ).run_pieces_within_memory(
            sampling.samples,
            lambda part: sample_mixed_length_batch(
                self.target,
                [query.prefix for query in batch],
                decoding,
                [uniforms[part] for uniforms in noise],
                prompt=prompt,
                distribution=distribution,
            ),
        )
        _, passes = zip(*passes_by_piece, strict=True)
        if self.setting is TEXT_ONLY:  # the setting whose tokens a claim's budget pays for
            # The public model answers the other draws.
            for query, uniforms in zip(batch, noise, strict=True):
                self.meter.drawn[name, query.id] = int((uniforms[..., 1] >= 0).sum())
        if len(passes) == 1:
            return passes[0]
        return list(map(merge_candidates, zip(*passes, strict=True)))

    def _search_candidates(
        self, batch: Sequence[Query], sampling: Sampling, prompt: Tensor | None, n_rows: int
    ) -> Sequence[SuffixCandidates]:
        decoding = self.decoding_in_this_setting(sampling)
        device = self.target.device
        prefixes = torch.tensor([query.prefix for query in batch], device=device)
        problem = (self.target, prefixes, batch[0].length)
        if sampling.search == "beam":
            return beam_search(
                *problem, sampling.beams, forbidden=decoding.forbidden, prompt=prompt
            )
        max_rows = max(1, n_rows // _TREE_DISTRIBUTIONS)
        return find_suffixes_above_threshold(
            *problem, decoding, sampling.threshold, prompt=prompt, max_rows=max_rows
        )

    def _uniform_draws_of_query(self, query: Query, samples: int, name: str) -> np.ndarray:
        # The key omits the number of samples: a run with fewer samples draws the first of this run.
        recipe = name.split(" x ", 1)[1]
        key = (self.seed, self.target_name, self.setting.stream, recipe, query.id)
        noise = draw_secret_uniforms(samples, query.length, *key)
        if self.allowance is not None:
            # The public model answers draws past the budget: a subset of size zero, whatever its
            # draw.
            paid = self.allowance[(name, query.id)]
            # A contiguous array gives a view, so `noise` itself changes.
            noise.reshape(-1, CHANNELS)[paid:, 1] = -1.0
        return noise

    def mean_nll(self, model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
        """Return the mean negative log-likelihood (nats per token) of each suffix given its prefix.

        `model` is the target or the reference. Suffixes of the same prefix are scored together, so
        that their common part is read once.
        """
        if model is self.target:
            self.require_capability("likelihood")
        suffixes_by_prefix: dict[Tokens, list[Tokens]] = {}
        for prefix, suffix in dict.fromkeys(pairs):
            suffixes_by_prefix.setdefault(prefix, []).append(suffix)
        lone = []
        shared = {}
        for prefix, suffixes in suffixes_by_prefix.items():
            n_saved = (len(suffixes) - 1) * len(prefix)
            if n_saved > _STEP_TOKENS * max(map(len, suffixes)):
                shared[prefix] = suffixes
            else:
                lone += [(prefix, suffix) for suffix in suffixes]
        nlls = {**_compute_unshared_nlls(model, lone), **_compute_shared_nlls(model, shared)}
        return [nlls[pair] / len(pair[1]) for pair in pairs]


def _compute_unshared_nlls(
    model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]]
) -> dict[tuple[Tokens, Tokens], float]:
    """Return the summed negative log-likelihood (nats) of suffixes that share no prefix."""
    nlls: dict[tuple[Tokens, Tokens], float] = {}
    # The last token is predicted and never read.
    model.read_ahead(
        [(prefix + suffix)[:-1] for prefix, suffix in pairs], [len(suffix) for _, suffix in pairs]
    )
    for indices in group_equal_shapes(
        [(len(prefix), len(suffix)) for prefix, suffix in pairs], _PREFIXES_AT_ONCE
    ):
        batch = [pairs[i] for i in indices]
        prefixes, suffixes = map(
            partial(torch.tensor, device=model.device), zip(*batch, strict=True)
        )
        with torch.no_grad():
            scores = model.token_log_probs(prefixes, suffixes)
        nlls.update(zip(batch, (-scores.double().sum(-1)).tolist(), strict=True))
    return nlls


def _compute_shared_nlls(
    model: LanguageModel, suffixes_by_prefix: Mapping[Tokens, Sequence[Tokens]]
) -> dict[tuple[Tokens, Tokens], float]:
    """Return the summed negative log-likelihood (nats) of suffixes that share a prefix.

    As many suffixes are scored at once as memory allows.
    """
    prefixes = list(suffixes_by_prefix)
    nlls: dict[tuple[Tokens, Tokens], float] = {}
    # Only by the prefix: `suffix_log_probs` takes suffixes of several lengths.
    for indices in group_equal_shapes([(len(prefix), 0) for prefix in prefixes], _PREFIXES_AT_ONCE):
        pairs = []
        for i in indices:
            for suffix in suffixes_by_prefix[prefixes[i]]:
                pairs.append((prefixes[i], suffix))
        longest = max(len(prefix) + len(suffix) for prefix, suffix in pairs)
        size = max(1, choose_memory_budget(model.device, _ROWS_BYTES) // model.row_bytes(longest))
        limit = BatchSizeLimit(size)
        # The results are consumed in this iteration, so the lambda reads this iteration's `pairs`.
        results = limit.run_pieces_within_memory(
            len(pairs),
            lambda batch: _list_summed_suffix_log_probs(model, pairs[batch]),  # noqa: B023
        )
        for piece, log_probs in results:
            nlls.update(zip(pairs[piece], (-x for x in log_probs), strict=True))
    return nlls


def _list_summed_suffix_log_probs(
    model: LanguageModel, pairs: Sequence[tuple[Tokens, Tokens]]
) -> list[float]:
    """Return each suffix's summed log-probability (nats); all prefixes must be equally long."""
    prefix_by_pair, suffixes = zip(*pairs, strict=True)
    prefixes = list(dict.fromkeys(prefix_by_pair))
    owner = list(map(prefixes.index, prefix_by_pair))
    tokens = torch.tensor(prefixes, device=model.device)
    return model.suffix_log_probs(tokens, owner, suffixes)


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
