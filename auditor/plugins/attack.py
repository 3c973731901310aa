"""Define the base classes of attacks: `Attack`, `CorpusAttack` and `SamplingAttack`.

A `SamplingAttack` ranks candidate suffixes for every prefix. Its subclasses only score each
candidate. This module implements sampling, search, shared passes and ordering.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Guess, Guesses, Pair, Query, Tokens
from auditor.generation.sample import SuffixCandidates
from auditor.generation.search import SearchResult, TreeLeaves
from auditor.models.decoding import Decoding
from auditor.plugins.method import Method
from auditor.plugins.options import Count, Limits, ShareOrAll
from auditor.plugins.view import Batch, Sampling, Search, View

# A larger number is a mistake; all candidates of a prefix are in memory together.
_Texts = Annotated[int, Limits(1, 1_000_000, "[]")]
_Candidates = Annotated[int, Limits(1, 100_000, "[]")]


@dataclass(frozen=True)
class Attack(Method):
    """Base class of all attacks, which guess the suffixes of secrets.

    Attributes:
        of_learnt: whether the attack works only on models trained on the data, not on models that
            get the data as input.
        control: name of a defense that a run adds for comparison, if it is available.
    """

    measures = "verbatim"
    of_learnt: ClassVar[bool] = False
    control: ClassVar[str] = ""

    def soft_prompt_rows(self) -> int:
        """Return the number of rows (vectors) in the attack's longest soft prompt.

        The soft prompt precedes the prefix.
        """
        return 0

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        """Raise NotApplicable, before any query, if this run lacks an input of the attack.

        `known` holds the (prefix, suffix) pairs that the attacker knows. Capabilities are checked
        elsewhere.
        """

    def fit(self, view: View, known: Sequence[Pair]) -> dict[str, Any]:
        """Tune the attack on the known pairs; return a state (tensors and JSON values).

        The run folder stores the state. Most attacks need no tuning.
        """
        return {}

    def fit_options(self) -> dict[str, Any]:
        """Return the options that affect `fit`, by default all options.

        Runs of a parameter sweep share a state if they agree in these options.
        """
        return dataclasses.asdict(self)

    def timing_stand_in(self) -> tuple[Attack, float]:
        """Return (attack, ratio), by which a run estimates the time that `fit` takes.

        `fit` of this attack takes `ratio` times as long as that of the returned attack. The default
        is this attack itself and 1.
        """
        return self, 1.0

    def queries(self, view: View, secrets: Sequence[Query]) -> Sequence[Query]:
        """Return the queries to send to the attacked model.

        By default these are the prefixes of the secrets.
        """
        return secrets

    def guess(
        self, view: View, state: dict[str, Any], queries: Sequence[Query]
    ) -> Iterator[Guesses]:
        """Yield the guesses for each query, in order.

        The guesses for a secret must not depend on other secrets. `state` is the result of `fit`.
        """
        raise NotImplementedError

    def sample_counts_by_recipe(self, view: View) -> dict[str, int]:
        """Return the number of samples per prefix, keyed by name of the sampling recipe.

        Query budgets are derived from these numbers. Attacks with the same recipe share their
        samples.
        """
        return {}

    def fitted_state_name(self, view: View) -> str:
        """Return the name of the `fit` state. Views with the same name share one state."""
        return view.target_name

    def score_is_probability(self, view: View) -> bool:
        """Return whether a guess's score is the probability that the guess is right.

        Reports check such probabilities.
        """
        return False

    def notes(self, view: View, state: dict[str, Any]) -> tuple[str, ...]:
        """Return sentences that a reader of this attack's results must know."""
        return ()


@dataclass(frozen=True)
class CorpusAttack(Attack):
    """Base class of attacks that draw texts without prefixes and search them for training data.

    The run, not the attack, has the index of the training data and judges the texts. Each generated
    text is a separate query with its own random numbers.

    Attributes:
        generations: number of texts to generate.
        length: number of tokens in each text.
        n: number of tokens in a memorised n-gram; 0 lets the run choose it.
    """

    of_learnt = True
    generations: _Texts = 1000
    length: Count = 256
    n: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.n <= self.length:
            raise AuditError(
                f"expected n in 0..{self.length}, the tokens of a generation, got {self.n}"
            )

    def generation_beginnings(self, view: View) -> list[Tokens]:
        """Return the token sequences with which generated texts start.

        The texts use them in turn.
        """
        raise NotImplementedError

    def user_chosen_beginnings(self, view: View) -> list[Tokens]:
        """Return the token sequences in the user's option `begins`.

        The report warns of those that occur in the training data, because text that follows them is
        no untargeted extraction.
        """
        return []

    def queries(self, view: View, secrets: Sequence[Query]) -> list[Query]:
        """Return one query per text to generate, with an id that identifies the text's start.

        Texts with different starts use different random numbers. If decoding is deterministic, each
        start is queried only once.
        """
        begins = self.generation_beginnings(view)
        n_generations = self.generations
        sampling = self.sampling()
        if sampling is not None and view.decoding_in_this_setting(sampling).is_point:
            n_generations = min(n_generations, len(begins))
        queries = []
        for i in range(n_generations):
            begin = begins[i % len(begins)]
            digest = hashlib.sha256(repr(begin).encode()).hexdigest()[:8]
            queries.append(Query(f"generation-{i:06d}-{digest}", begin, self.length))
        return queries


@dataclass(frozen=True)
class SamplingAttack(Attack):
    """Base class of attacks that rank candidate suffixes.

    The defaults are those of Ethicist, Section 4.2: K=100, top-p 0.7, T 0.8. With temperature 0
    (greedy decoding), one sample is drawn, because all samples would be equal.

    `search` says where the candidates come from:

    - `sample`: samples.
    - `tree`: all suffixes whose probability under the decoding is at least `threshold`.
    - `beam`: a beam search of width `beams`, without temperature and truncation.

    A tree or beam search needs log-probabilities.
    """

    samples: _Candidates = 100
    temperature: float = 0.8
    top_p: float = 0.7
    top_k: int = 0
    eos: Literal["ordinary", "masked"] = "ordinary"
    search: Search = "sample"
    threshold: ShareOrAll = 0.01
    beams: _Candidates = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling()  # refuses a bad temperature, top_k or top_p

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        if self.search == "sample":
            return self.needs
        return add_required_capability(self.needs, "distribution")

    @property
    def draws_samples(self) -> bool:
        return self.search == "sample"

    def sampling(self) -> Sampling:
        decoding = Decoding(self.temperature, self.top_k, self.top_p)
        return Sampling(self.samples, decoding, self.eos, self.search, self.threshold, self.beams)

    @property
    def has_one_candidate(self) -> bool:
        """True if sampling gives only one candidate per prefix, as with greedy decoding."""
        is_point = self.sampling().decoding.is_point
        return self.search != "beam" and (
            is_point or (self.search == "sample" and self.samples == 1)
        )

    def soft_prompt_name(self, view: View) -> str:
        """Return the name of the soft prompt in the sampling recipe, or "" if there is none."""
        return ""

    def soft_prompt(self, state: dict[str, Any]) -> Tensor | None:
        return None

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        """Return, for each query, one score per distinct candidate, of shape (distinct,).

        A higher score means more confidence.
        """
        raise NotImplementedError

    def sample_counts_by_recipe(self, view: View) -> dict[str, int]:
        if self.search != "sample":
            return {}  # reads the distribution, draws nothing
        return {
            view.sampling_recipe_name(
                self.sampling(), self.soft_prompt_name(view)
            ): view.sample_count(self.sampling())
        }

    def guess(
        self, view: View, state: dict[str, Any], queries: Sequence[Query]
    ) -> Iterator[Guesses]:
        view.require_capability(*self.required_capabilities)
        prompt = self.soft_prompt(state)
        samples = view.sample_count(self.sampling())
        for batch in view.candidates(queries, self.sampling(), prompt, self.soft_prompt_name(view)):
            for (query, candidates), score in zip(
                batch, self.candidate_scores(view, batch), strict=True
            ):
                yield rank_candidates(query, candidates, score, samples)


def add_required_capability(needs: tuple[str, ...], capability: str) -> tuple[str, ...]:
    """Return `needs` with this capability added, without duplicates."""
    if capability in needs:
        return needs
    return (*needs, capability)


def rank_candidates(
    query: Query, candidates: SuffixCandidates, score: Tensor, samples: int
) -> Guesses:
    """Return a query's candidates as guesses, in descending order of score.

    `score` has shape (distinct,). `samples` is the number of samples drawn. Among candidates with
    the same score, the most likely comes first. If likelihoods are equal or unknown, the candidate
    with the most samples comes first, and then the one that was drawn first.
    """
    if candidates.token_log_probs is None:
        nll = [0.0] * len(score)
    else:
        nll = candidates.nll.tolist()
    keys = sorted(
        range(len(score)), key=lambda i: (-float(score[i]), nll[i], -int(candidates.counts[i]), i)
    )
    likely: Sequence[tuple[float | None, float | None]] = [(None, None)] * len(keys)
    if candidates.token_log_probs is not None:  # of the whole suffix, and of its least likely token
        least = candidates.token_log_probs.double().amin(-1)
        likely = list(zip((-candidates.nll).tolist(), least.tolist(), strict=True))
    guesses = tuple(
        Guess(
            tuple(candidates.suffixes[i].tolist()),
            float(score[i]),
            int(candidates.counts[i]),
            *likely[i],
        )
        for i in keys
    )
    rows = candidates.count_forward_rows()
    near = candidates.near_boundary
    if isinstance(candidates, SearchResult):  # a search reads distributions and draws no token
        if isinstance(candidates, TreeLeaves):
            certificate = candidates.certificate
        else:
            certificate = None
        return Guesses(query.id, guesses, len(guesses), drawn=0, rows=rows, certificate=certificate)
    return Guesses(query.id, guesses, samples, samples * query.length, near, rows)


def compute_mean_nlls(candidates: SuffixCandidates) -> Tensor:
    """Return each candidate's mean negative log-likelihood, (distinct,) in nats per token."""
    return candidates.nll / candidates.suffixes.shape[1]


def list_candidate_suffixes(candidates: SuffixCandidates) -> list[tuple[int, ...]]:
    return list(map(tuple, candidates.suffixes.tolist()))


def candidate_values_tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")  # on the device of candidates
