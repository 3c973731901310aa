"""Measure a model without attacks: greedy recall, held-out perplexity, likelihood of true tokens.

An attacker does not make these queries, so no privacy claim is charged.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from auditor.conclusions.leak_readings import KINDS
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.arrays import Bools, Floats
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED, Guesses, Secret, TokenLogProbs, Tokens
from auditor.core.result import Doubt, Measurement
from auditor.core.secret_randomness import CHANNELS
from auditor.core.secret_table import STRINGS, UNKNOWN, build_secret_table, select_members
from auditor.engines.engine import Engine
from auditor.generation.sample import (
    SuffixCandidates,
    batch_lengths,
    sample_mixed_length_batch,
)
from auditor.models.base import LanguageModel, compute_text_nlls, implies_capability
from auditor.models.decoding import GREEDY
from auditor.models.memory import BatchSizeLimit
from auditor.plugins import registry
from auditor.plugins.probe import (
    GreedyBatch,
    batch_equal_shapes,
    score_greedily,
    score_records,
)
from auditor.runs.audit import Audit, RunContext, Target
from auditor.runs.targets import Targets, sort_by_lengths
from auditor.statistics import intervals
from auditor.statistics.compare import compute_welch_interval
from auditor.statistics.metrics import name_nonmember_metric

GREEDY_AT_ONCE = 256  # prefixes
_READ_AT_ONCE = 2**14  # texts whose tokens are tensors at once
_SCORED_AT_ONCE = 64  # secrets between two writes of their scores
_SLOW = 5.0  # seconds after which the first batch's number is announced
# receives scores of a batch, and the number of hits so far
Keep = Callable[[list[TokenLogProbs], int], None]
# yields the scores of items, in batches
Score = Callable[[RunContext, Target, Sequence[Any]], Iterator[Any]]
LIKELIHOOD = "likelihood"  # mean log-probability of a secret's true tokens, nats
# probability of the complete suffix at temperature 1 above which extraction is likely
_LIKELY = 0.5


@dataclass(frozen=True)
class TargetScoring:
    """Scores of a target's secrets or texts, computed in this process or on workers.

    Args:
        target: name of the target.
        score: function that yields the scores of items, in batches.
    """

    target: str
    score: Score
    portion: ClassVar[int] = 64

    def process_items(self, place: Targets, items: Sequence[Any]) -> Iterator[Any]:
        yield from self.score(place.scene, place.find_target(self.target), items)


def _stream_scores(
    engine: Engine, target: str, score: Score, secrets: Sequence[Secret]
) -> Iterator[Any]:
    if engine.workers:
        secrets = sort_by_lengths(secrets)
    return engine.stream_results(TargetScoring(target, score), secrets)


def measure_repeat_recall(
    model: LanguageModel,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Guesses] = MappingProxyType({}),
    keep: Keep | None = None,
    engine: Engine | None = None,
) -> dict[str, Measurement]:
    """Return members' verbatim recall by greedy decoding, keyed by repeat count ("all" if unknown).

    The recall is the share of secrets whose suffix greedy decoding recites. The repeat count is the
    number of copies in the training data.

    Args:
        model: the model.
        secrets: members and non-members; only members count.
        guesses: greedy guesses, keyed by secret id, if an attack has guessed all these secrets.
        keep: receives the members' scores; see `mark_greedy_hits`.
        engine: executor of the queries, if the model is the undefended target's.
    """
    members = select_members(secrets)
    hits = mark_greedy_hits(model, members, guesses, keep, engine)
    repeats = members.find_column("repeats")
    recall = {}
    for count in np.unique(repeats).tolist():
        share = intervals.measure_share("greedy", hits[repeats == count])
        recall["all" if count == UNKNOWN else str(count)] = share
    return recall


def measure_nonmember_recall(
    model: LanguageModel,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Guesses],
    engine: Engine,
) -> Measurement | None:
    """Return the greedy recall of secrets that were not trained on, as a baseline.

    Return None if no such secrets exist.

    Args:
        model: the model.
        secrets: members and non-members; only non-members count.
        guesses: greedy guesses, keyed by secret id.
        engine: executor of the queries of the undefended target.
    """
    nonmembers = select_members(secrets, False)
    if not nonmembers:
        return None
    hits = mark_greedy_hits(model, nonmembers, guesses, engine=engine)
    return intervals.measure_share(name_nonmember_metric("greedy"), hits)


def read_texts_ahead(model: LanguageModel, secrets: Sequence[Secret]) -> None:
    """Let the model read all texts of these secrets before their suffixes are scored."""
    table = build_secret_table(secrets)
    for start in range(0, len(table), _READ_AT_ONCE):
        part = table[start : start + _READ_AT_ONCE]
        texts = part.texts
        # Without the last token, because no query follows it.
        texts = replace(texts, lengths=texts.lengths - 1)
        model.read_ahead(texts, part.lengths[:, 1].tolist())


def read_secrets_ahead(
    model: LanguageModel, secrets: Sequence[Secret], heldout_given: Iterable[int] = ()
) -> None:
    """Run the secrets' texts through the model before attacks and probes query the model.

    Args:
        heldout_given: for each non-member, the number of leading tokens that held-out perplexity
            does not score. Empty if only suffixes are scored.
    """
    # [:-1]: no query needs the distribution after the last token
    texts = [secret.tokens[:-1] for secret in secrets]
    given_counts = iter(heldout_given)
    last = []
    for secret in secrets:
        n_given = len(secret.prefix)
        if not secret.member:
            n_given = next(given_counts, n_given)
        last.append(len(secret.tokens) - n_given)
    model.read_ahead(texts, last, [len(secret.prefix) for secret in secrets])


def make_score_keeper(audit: Audit, target: Target) -> Keep:
    """Return a function that stores the scores of the target's members while they are read.

    It also reports the progress, and announces the first number if the first batch is slow.
    """
    journal = audit.folder.tokens
    stored = journal.finished_secrets(target.name)
    n_members = len(select_members(audit.benchmark.secrets))
    start = time.perf_counter()
    n_done = 0

    def keep(scores: list[TokenLogProbs], n_hits: int) -> None:
        nonlocal n_done
        journal.append(target.name, [score for score in scores if score.secret not in stored])
        if not n_done and time.perf_counter() - start > _SLOW:
            audit.site.reporter.announce(
                f"first number: {n_hits} of the first {format_count(len(scores), 'secret')} "
                "recited word for word"
            )
        n_done += len(scores)
        audit.site.reporter.progress("greedy recall", n_done, n_members)

    return keep


@torch.no_grad()
def mark_greedy_hits(
    model: LanguageModel,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Guesses] = MappingProxyType({}),
    keep: Keep | None = None,
    engine: Engine | None = None,
) -> Bools:
    """Return, for each secret, whether greedy decoding after the prefix gives the suffix.

    The result has shape (secrets,). A model with distributions needs no decoding: greedy decoding
    gives the suffix if each suffix token is the most likely one at its position.

    Args:
        guesses: greedy guesses, keyed by secret id. If they cover all secrets, the model is not
            queried.
        keep: called after each batch with its scores and the number of hits so far, but only if
            distributions are read.
        engine: executor of the queries, if the model is the undefended target's.
    """
    continuations: Sequence[Tokens] | None = None
    if guesses and all(secret.id in guesses for secret in secrets):
        continuations = [guesses[secret.id].ranked[0].suffix for secret in secrets]
    elif not implies_capability(model.capabilities, "distribution"):
        continuations = decode_greedily(model, secrets)
    if continuations is not None:
        true_suffixes = [secret.suffix for secret in secrets]
        return np.array(list(map(operator.eq, continuations, true_suffixes)), dtype=bool)
    if engine is None:
        batches = score_greedily(model, secrets, _READ_AT_ONCE)
    else:
        batches = _stream_scores(engine, UNDEFENDED, _score_target_greedily, secrets)
    hits = set[str]()
    for scores, recited in batches:
        hits.update(recited)
        if keep is not None:
            keep(scores, len(hits))
    ids = build_secret_table(secrets).ids
    return np.fromiter(map(hits.__contains__, ids), bool, len(ids))


def _score_target_greedily(
    scene: RunContext, target: Target, secrets: Sequence[Secret]
) -> Iterator[GreedyBatch]:
    yield from score_greedily(target.model, secrets, _SCORED_AT_ONCE)


def decode_greedily(model: LanguageModel, secrets: Sequence[Secret]) -> list[Tokens]:
    """Return, for each secret, the greedy continuation of its prefix, as long as the suffix."""
    decoded_suffixes: list[Tokens] = [()] * len(secrets)
    at_once = BatchSizeLimit(GREEDY_AT_ONCE)
    for batch in batch_lengths(model, [secret.lengths for secret in secrets]):

        def decoded(places: slice, batch: Sequence[int] = batch) -> list[SuffixCandidates]:
            # Greedy decoding uses no noise; the noise's shape only gives the number of tokens.
            noise = []
            prefixes = []
            for i in batch[places]:
                noise.append(np.zeros((1, len(secrets[i].suffix), CHANNELS)))
                prefixes.append(secrets[i].prefix)
            return sample_mixed_length_batch(model, prefixes, GREEDY, noise, distribution=False)

        for piece, candidates_by_row in at_once.run_pieces_within_memory(len(batch), decoded):
            for i, candidates in zip(batch[piece], candidates_by_row, strict=True):
                decoded_suffixes[i] = tuple(candidates.suffixes[0].tolist())
    return decoded_suffixes


def compute_heldout_losses(
    audit: Audit, target: Target, engine: Engine
) -> Mapping[str, Sequence[float]]:
    """Return the losses of the held-out texts, as one sequence over the texts for each key.

    A held-out text is one that the model was not trained on. Key `tokens` has the number of
    predicted tokens of each text. Each other key is the name of a perplexity and has each text's
    summed negative log-likelihood in nats; the perplexity of the model's own distribution comes
    first. Return {} if no held-out texts or likelihoods exist.
    """
    texts = audit.benchmark.heldout
    if not texts or not implies_capability(target.model.capabilities, "likelihood"):
        return {}

    given_counts = audit.benchmark.heldout_given
    if audit.population:
        return _compute_record_losses(audit, target, given_counts)

    def found_now() -> dict[str, Sequence[float]]:
        scoring = TargetScoring(target.name, _score_heldout_texts)
        places: Sequence[int] = range(len(texts))
        if engine.workers:  # equally long texts share batches
            places = sorted(places, key=list(map(len, texts)).__getitem__)
        batches = engine.stream_results(scoring, places)
        losses = [loss for _, loss in sorted(chain.from_iterable(batches))]
        nll, tokens = zip(*losses, strict=True)
        other_nlls = compute_published_nlls(
            target.model, texts, given_counts or [1] * len(texts), audit.plan.seed
        )
        return {"tokens": tokens, "perplexity": nll, **other_nlls}

    # Only the undefended model is the same at every point of a sweep.
    if target.defense:
        return found_now()
    return audit.site.shared.get_or_make("perplexity", audit.sweep_cache_key_of_answers, found_now)


def _score_heldout_texts(
    scene: RunContext, target: Target, places: Sequence[int]
) -> Iterator[list[tuple[int, tuple[float, int]]]]:
    """Yield the place, loss and number of predicted tokens of some held-out texts after others."""
    given_counts = scene.benchmark.heldout_given
    for start in range(0, len(places), _READ_AT_ONCE):
        part = places[start : start + _READ_AT_ONCE]
        texts = [scene.benchmark.heldout[place] for place in part]
        context_lengths = [given_counts[place] for place in part] if given_counts else ()
        losses = compute_text_nlls(target.model, texts, context_lengths=context_lengths)
        yield list(zip(part, losses, strict=True))


def _compute_record_losses(
    audit: Audit, target: Target, context_lengths: Sequence[int]
) -> Mapping[str, Sequence[float]]:
    """Return the losses of `compute_heldout_losses` for each non-member's text.

    Results in the run folder are reused.

    Args:
        context_lengths: for each text, the number of leading tokens that are given, not predicted.
    """
    texts = audit.benchmark.heldout
    ids = [secret.id for secret in select_members(audit.benchmark.secrets, False)]
    first = context_lengths or [1] * len(texts)
    journal = audit.folder.tokens
    key = f"{target.name} held-out"
    cached = journal.finished_secrets(key)
    missing = [i for i, id in enumerate(ids) if id not in cached]
    losses = compute_text_nlls(
        target.model, [texts[i] for i in missing], context_lengths=[first[i] for i in missing]
    )
    scores = []
    for i, (nll, _) in zip(missing, losses, strict=True):
        scores.append(TokenLogProbs(ids[i], (-nll,)))
    if scores:
        journal.append(key, scores)
    return {
        "tokens": [len(text) - start for text, start in zip(texts, first, strict=True)],
        "perplexity": [-cached[id].log_probs[0] for id in ids],
    }


def compute_published_nlls(
    model: LanguageModel, texts: Sequence[Tokens], context_lengths: Sequence[int], seed: int
) -> Mapping[str, Sequence[float]]:
    """Return the texts' losses under each perplexity that a defense's paper defines its own way.

    A loss is a text's summed negative log-likelihood in nats. The key is the perplexity's name.
    Return {} for a model without such perplexities.

    Args:
        model: the model.
        texts: token ids of each text.
        context_lengths: for each text, the number of leading tokens that are given. Only later
            tokens count.
        seed: seed of the defense's random numbers.
    """
    nll_by_name: dict[str, list[float]] = {}
    for first in dict.fromkeys(context_lengths):
        rows = [i for i, count in enumerate(context_lengths) if count == first]
        nlls = model.published_perplexity_nll([texts[i] for i in rows], seed, first)
        for name, nll in nlls.items():
            for i, value in zip(rows, nll, strict=True):
                nll_by_name.setdefault(name, [math.nan] * len(texts))[i] = value
    return nll_by_name


def measure_perplexities(nlls_by_name: Mapping[str, Sequence[float]]) -> tuple[Measurement, ...]:
    """Measure each perplexity, in the order of `nlls_by_name`.

    Args:
        nlls_by_name: results of `compute_heldout_losses`.
    """
    tokens = list(map(int, nlls_by_name.get("tokens", ())))
    perplexities = []
    for name, nll in nlls_by_name.items():
        if name != "tokens":
            texts = list(zip(nll, tokens, strict=True))
            perplexities.append(intervals.estimate_perplexity(texts, name))
    return tuple(perplexities)


def measure_true_token_likelihoods(audit: Audit, target: Target, engine: Engine) -> ValuesBySecret:
    """Score each secret's true suffix tokens, each after the true tokens before it.

    The scores show leakage that no attack found. Return each secret's mean log-probability per
    token, in nats. The run folder stores the members' scores, except those of a control model,
    which serves only to explain a defense.
    """

    def score(secrets: Sequence[Secret], journal_key: str) -> dict[str, float]:
        """Score the secrets, and store their scores under a key; "" stores nothing."""
        if not journal_key:
            batches = _stream_scores(engine, target.name, _score_suffixes, secrets)
            return _compute_mean_log_probs(chain.from_iterable(batches))
        stored = audit.folder.tokens.finished_secrets(journal_key)
        missing = secrets
        if stored:
            missing = [secret for secret in secrets if secret.id not in stored]
        for batch in _stream_scores(engine, target.name, _score_suffixes, missing):
            audit.folder.tokens.append(journal_key, batch)
        return _compute_mean_log_probs(stored.read_records(build_secret_table(secrets).ids))

    members_key = "" if target.companion else target.name
    # A resumed check reads no secret again.
    nonmembers_key = f"{target.name} non-members" if audit.population else ""
    return build_likelihood_row(
        score(select_members(target.secrets), members_key),
        score(select_members(target.secrets, False), nonmembers_key),
    )


def build_likelihood_row(
    members: Mapping[str, float], others: Mapping[str, float]
) -> ValuesBySecret:
    """Combine the mean log-probabilities per token (nats) of members and of non-members.

    Args:
        members: the members' values, keyed by secret id.
        others: the non-members' values, keyed by secret id.
    """
    ids = np.array([*members, *others], STRINGS)
    values = np.array([*members.values(), *others.values()])
    return ValuesBySecret(
        ids, np.arange(len(ids)) < len(members), (None,) * len(ids), {LIKELIHOOD: values}
    )


# the measure that distinguishes members from non-members
_ALIKE = next(kind for kind in KINDS if kind.alike).measured_by[0]


def doubt_if_members_likelier(
    title: str,
    answers: ValuesBySecret,
    methods: Collection[str] = (),
    secrets: Sequence[Secret] = (),
) -> tuple[Doubt, ...]:
    """Return a doubt if members' true tokens are more likely than non-members', otherwise ().

    A doubt is a sentence that tells why the result may hide a leak. Even if no attack extracted
    anything, such a difference means that the model knows the members, or that members and
    non-members differ in kind. A one-sided Welch test at the 2.5% level compares the mean
    log-probabilities, in nats per token.
    Dependent secrets, of one person or document, count once.

    Args:
        title: title of the target, for the doubt.
        answers: mean log-probability of each secret's true tokens.
        methods: names of the run's attacks and probes. The doubt recommends a membership probe if
            it is not among them.
        secrets: the scored secrets, with their persons and documents.
    """
    members, nonmembers = _average_by_unit(answers, secrets)
    least, _ = compute_welch_interval(members, nonmembers)
    if not least > 0:
        # NaN is no doubt either: a defense forbids a true token, or all values are equal.
        return ()
    gap = np.mean(members) - np.mean(nonmembers)
    name = registry.find_method_name(_ALIKE)
    if name in methods:
        advice = f"compare {name} with its blind baseline"
    else:
        advice = f"--attack {name} tests which one"
    return (
        Doubt(
            "likelihood",
            f"{title}: members' true tokens are more likely than non-members', by {gap:.2f} nats a "
            f"token (at least {least:.2f}): the model knows more than was extracted, or "
            f"the two kinds of records differ; {advice}.",
        ),
    )


def _average_by_unit(answers: ValuesBySecret, secrets: Sequence[Secret]) -> list[Floats]:
    """Return the mean log-probability of each person or document, first among members."""
    values = answers.values[LIKELIHOOD]
    unit = score_records(secrets).unit
    if unit is None:
        return [values[answers.member], values[~answers.member]]
    number_by_id = dict(zip(build_secret_table(secrets).ids.tolist(), unit.tolist(), strict=True))
    numbers = np.array([number_by_id[id] for id in answers.ids])
    means = []
    for side in (answers.member, ~answers.member):
        of = np.unique(numbers[side], return_inverse=True)[1]
        means.append(np.bincount(of, values[side]) / np.bincount(of))
    return means


def _compute_mean_log_probs(scored: Iterable[TokenLogProbs]) -> dict[str, float]:
    return {
        scores.secret: float(np.mean(scores.log_probs)) for scores in scored if scores.log_probs
    }


def batch_suffix_log_probs(
    target: Target, waiting: Sequence[Secret], size: int | None
) -> Iterator[list[TokenLogProbs]]:
    ids = build_secret_table(waiting).ids
    for indices, prefixes, suffixes in batch_equal_shapes(
        target.model, waiting, size or _SCORED_AT_ONCE
    ):
        with torch.no_grad():
            log_probs = target.model.token_log_probs(prefixes, suffixes).double().tolist()
        batch = []
        for i, row in zip(indices, log_probs, strict=True):
            batch.append(TokenLogProbs(ids[i], tuple(row)))
        yield batch


def _score_suffixes(
    scene: RunContext, target: Target, secrets: Sequence[Secret]
) -> Iterator[list[TokenLogProbs]]:
    yield from batch_suffix_log_probs(target, secrets, scene.plan.batch_size)


# --- answers withheld by a server ---


def list_withheld_doubts(audit: Audit, target: Target) -> Iterator[Doubt]:
    """Yield a doubt if the model's server withheld answers.

    A doubt is a sentence that tells why the result may hide a leak. It states the likelihood of the
    secrets whose answers were withheld, if known.
    """
    members = select_members(target.secrets)
    withheld = target.model.has_withheld_answer_by_prefix([secret.prefix for secret in members])
    hidden = list(compress(members, withheld))
    if not hidden:
        return
    of = f"Answers to {len(hidden):,} of {len(members):,} attacked secrets did not come through"
    if not implies_capability(target.model.capabilities, "likelihood"):
        yield Doubt(
            "answers",
            f"{of}; without log-probabilities it is unknown what the model knows about them.",
        )
        return
    probs = []
    for scores in chain.from_iterable(
        batch_suffix_log_probs(target, hidden, audit.plan.batch_size)
    ):
        probs.append(math.exp(sum(scores.log_probs)))
    likely = sum(p > _LIKELY for p in probs)
    greedy = ""
    # Greedy decoding extracts secrets whose tokens all have rank 1.
    if implies_capability(target.model.capabilities, "ranks"):
        first = 0
        for _, *pair in batch_equal_shapes(target.model, hidden, GREEDY_AT_ONCE):
            first += int((target.model.token_ranks(*pair) == 1).all(-1).sum())
        greedy = f", and greedy decoding would extract {first:,}"
    yield Doubt(
        "answers",
        f"{of}, but its log-probabilities give these answers a mean probability of "
        f"{np.mean(probs):.1%} ({likely:,} of them with more than {_LIKELY:.0%}; at temperature "
        f"1){greedy}.",
    )
