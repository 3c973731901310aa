"""What the auditor itself measures of a model beside the attacks: greedy recall, held-out
perplexity, true tokens.

It charges no claim: no attacker asks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.conclusions.leak_readings import KINDS
from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.nouns import Guesses, Secret, TokenLogProbs, Tokens
from auditor.core.result import Doubt, Measurement
from auditor.core.secret_randomness import CHANNELS
from auditor.generation.sample import (
    SuffixCandidates,
    batch_sampling_by_length,
    sample_mixed_length_batch,
)
from auditor.models.base import LanguageModel, compute_text_nlls, implies_capability
from auditor.models.decoding import GREEDY
from auditor.models.memory import BatchSizeLimit, group_equal_shapes
from auditor.plugins import registry
from auditor.runs.audit import Audit
from auditor.runs.target import Target
from auditor.statistics import intervals
from auditor.statistics.compare import compute_welch_interval
from auditor.statistics.metrics import name_nonmember_metric

GREEDY_AT_ONCE = 256  # prefixes
LIKELIHOOD = "likelihood"  # mean log-probability of a secret's true tokens, nats
# of the secret's whole text, drawn at temperature 1: more often than not it would be extracted
_LIKELY = 0.5


def greedy_recall_by_repeats(
    model: LanguageModel,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Guesses] = MappingProxyType({}),
) -> dict[str, Measurement]:
    """Verbatim recall of greedy decoding by repeat count ("all" where none is known); members only.

    guesses: what greedy decoding gave, if an attack has kept it of all these secrets.
    """
    members = [secret for secret in secrets if secret.member]
    hits = greedy_hits(model, members, guesses)
    groups = sorted({s.repeats for s in members}, key=lambda r: -1 if r is None else r)
    return {
        "all" if r is None else str(r): intervals.share_with_interval(
            "greedy", hits[[s.repeats == r for s in members]]
        )
        for r in groups
    }


def greedy_nonmember_recall(
    model: LanguageModel,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Guesses] = MappingProxyType({}),
) -> Measurement | None:
    """The baseline: of secrets that the model was not trained on; None where there are none."""
    others = [secret for secret in secrets if not secret.member]
    return (
        intervals.share_with_interval(
            name_nonmember_metric("greedy"), greedy_hits(model, others, guesses)
        )
        if others
        else None
    )


@torch.no_grad()
def greedy_hits(
    model: LanguageModel,
    secrets: Sequence[Secret],
    guesses: Mapping[str, Guesses] = MappingProxyType({}),
) -> NDArray[np.bool_]:
    """(secrets,): whether greedy decoding behind the prefix gives the suffix.

    It does where each token of the suffix is the likeliest behind those before it: of a model that
    gives distributions that is read off, without decoding.
    """
    if guesses and all(secret.id in guesses for secret in secrets):
        return np.array(
            [guesses[secret.id].ranked[0].suffix == secret.suffix for secret in secrets], dtype=bool
        )
    if not implies_capability(model.capabilities, "distribution"):
        return np.array(
            [
                said == secret.suffix
                for said, secret in zip(greedy_suffixes(model, secrets), secrets, strict=True)
            ]
        )
    hits = np.zeros(len(secrets), dtype=bool)
    for alike, prefixes, suffixes in _equal_shape_tensor_batches(model, secrets):
        # (rows, L) tokens and (rows, L, vocabulary) distributions, of a part of the batch at a
        # time.
        for own, distribution in model.teacher_forced_distributions(prefixes, suffixes):
            found = (distribution.argmax(-1) == own).all(-1).tolist()
            # Left to right: `hits` is indexed by the old `alike`, then `alike` is what is left of
            # it.
            hits[alike[: len(found)]], alike = found, alike[len(found) :]
    return hits


def _equal_shape_tensor_batches(
    model: LanguageModel, secrets: Sequence[Secret], size: int | None = None
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Indices, prefixes (B, n) and suffixes (B, L), batch by batch of secrets that are as long."""
    for alike in group_equal_shapes([(len(s.prefix), len(s.suffix)) for s in secrets], size):
        prefixes = torch.tensor([secrets[i].prefix for i in alike], device=model.device)
        yield alike, prefixes, torch.tensor([secrets[i].suffix for i in alike], device=model.device)


def greedy_suffixes(model: LanguageModel, secrets: Sequence[Secret]) -> list[Tokens]:
    """What greedy decoding gives behind each prefix, as many tokens as the suffix has."""
    written: list[Tokens] = [()] * len(secrets)
    at_once = BatchSizeLimit(GREEDY_AT_ONCE)
    for batch in batch_sampling_by_length(model, [(len(s.prefix), len(s.suffix)) for s in secrets]):

        def decoded(some: slice, batch: Sequence[int] = batch) -> list[SuffixCandidates]:
            # Greedy decoding reads no noise; its shape says how many tokens are wanted.
            noise = [np.zeros((1, len(secrets[i].suffix), CHANNELS)) for i in batch[some]]
            return sample_mixed_length_batch(
                model, [secrets[i].prefix for i in batch[some]], GREEDY, noise, distribution=False
            )

        for some, found in at_once.run_pieces_within_memory(len(batch), decoded):
            for i, candidates in zip(batch[some], found, strict=True):
                written[i] = tuple(candidates.suffixes[0].tolist())
    return written


def heldout_losses(audit: Audit, target: Target) -> Mapping[str, Sequence[float]]:
    """Of each held-out text: `tokens` predicted, and the summed nll behind each kind of perplexity,
    the distribution's first.

    Empty where there are no such texts, and where the model says of none how likely it is.
    """
    texts = audit.benchmark.heldout
    if not texts or not implies_capability(target.model.capabilities, "likelihood"):
        return {}

    given = audit.benchmark.heldout_given
    if audit.population:
        return _heldout_losses_by_record(audit, target, given)

    def found_now() -> dict[str, Sequence[float]]:
        nll, tokens = zip(*compute_text_nlls(target.model, texts, given=given), strict=True)
        others = summed_nll_of_other_perplexities(
            target.model, texts, given or [1] * len(texts), audit.seed
        )
        return {"tokens": tokens, "perplexity": nll, **others}

    # The undefended model alone is the same at every point of a sweep.
    return (
        found_now()
        if target.defense
        else audit.site.shared.get_or_make(
            "perplexity", audit.sweep_cache_key_of_answers, found_now
        )
    )


def _heldout_losses_by_record(
    audit: Audit, target: Target, given: Sequence[int]
) -> Mapping[str, Sequence[float]]:
    """As `heldout_losses`, text by text of non-members: those that the run folder has are not read
    again."""
    texts, ids = (
        audit.benchmark.heldout,
        [secret.id for secret in audit.benchmark.secrets if not secret.member],
    )
    first = given or [1] * len(texts)
    journal, key = audit.folder.tokens, f"{target.name} held-out"
    done = journal.finished_secrets(key)
    missing = [i for i, id in enumerate(ids) if id not in done]
    losses = compute_text_nlls(
        target.model, [texts[i] for i in missing], given=[first[i] for i in missing]
    )
    if found := [
        TokenLogProbs(ids[i], (-nll,)) for i, (nll, _) in zip(missing, losses, strict=True)
    ]:
        journal.append(key, found)
    nll = [-done[id].log_probs[0] for id in ids]
    return {
        "tokens": [len(text) - start for text, start in zip(texts, first, strict=True)],
        "perplexity": nll,
    }


def summed_nll_of_other_perplexities(
    model: LanguageModel, texts: Sequence[Tokens], given: Sequence[int], seed: int
) -> Mapping[str, Sequence[float]]:
    """By name, the summed nll of each text. A model takes one count of given tokens at a time, so
    texts are grouped."""
    found: dict[str, list[float]] = {}
    for first in dict.fromkeys(given):
        own = [i for i, count in enumerate(given) if count == first]
        for name, nll in model.published_perplexity_nll(
            [texts[i] for i in own], seed, first
        ).items():
            for i, value in zip(own, nll, strict=True):
                found.setdefault(name, [math.nan] * len(texts))[i] = value
    return found


def perplexity_measurements(found: Mapping[str, Sequence[float]]) -> tuple[Measurement, ...]:
    """A measurement of each perplexity that `heldout_losses` found, in its order."""
    tokens = [int(count) for count in found.get("tokens", ())]
    return tuple(
        intervals.estimate_perplexity(list(zip(nll, tokens, strict=True)), name)
        for name, nll in found.items()
        if name != "tokens"
    )


def measure_true_token_likelihoods(audit: Audit, target: Target) -> RowValuesBySecret:
    """Where the model gives each member away: its true suffix token by token, for whoever mends the
    model.

    One teacher-forced pass a target. Returns the mean log-probability of each secret's tokens. What
    is found of members is kept in the run folder, but not of a companion: that is no model to mend.
    """
    folder, size = audit.folder, audit.batch_size
    done: Mapping[str, TokenLogProbs] = (
        {} if target.companion else folder.tokens.finished_secrets(target.name)
    )
    own: dict[str, float] = {}
    for some in suffix_log_prob_batches_of_target(
        target, [s for s in target.secrets if s.member and s.id not in done], size
    ):
        if target.companion:
            own |= _mean_log_prob_by_secret(some)
        else:
            folder.tokens.append(target.name, some)
    others = [secret for secret in target.secrets if not secret.member]
    seen = dict[str, TokenLogProbs]()
    if audit.population:  # a check that is resumed reads nobody again
        key = f"{target.name} non-members"
        read = folder.tokens.finished_secrets(key)
        for some in suffix_log_prob_batches_of_target(
            target, [s for s in others if s.id not in read], size
        ):
            folder.tokens.append(key, some)
        seen = {secret.id: read[secret.id] for secret in others}
    else:
        for some in suffix_log_prob_batches_of_target(target, others, size):
            seen |= {one.secret: one for one in some}
    # `done` is a view of the journal, which holds by now what was appended above.
    members = (done[secret.id] for secret in target.secrets if secret.member and secret.id in done)
    return likelihood_row_of_secrets(
        own or _mean_log_prob_by_secret(members), _mean_log_prob_by_secret(seen.values())
    )


def likelihood_row_of_secrets(
    members: Mapping[str, float], others: Mapping[str, float]
) -> RowValuesBySecret:
    """Rows of members and non-members from the mean log-probability of each secret's tokens, nats,
    by id."""
    ids, values = (*members, *others), np.array([*members.values(), *others.values()])
    return RowValuesBySecret(
        ids, np.arange(len(ids)) < len(members), (None,) * len(ids), {LIKELIHOOD: values}
    )


# which tells members from non-members
_ALIKE = next(kind for kind in KINDS if kind.alike).measured_by[0]


def doubt_if_members_likelier(
    title: str, answers: RowValuesBySecret, methods: Collection[str] = ()
) -> tuple[Doubt, ...]:
    """That members' true tokens are significantly more likely than non-members': the target knows
    something of them.

    One-sided Welch test at 2.5% of the mean log-probabilities, in nats a token. No measure of what
    could be extracted.
    methods: names of those that the run has, which it is not advised to add.
    """
    values = answers.values[LIKELIHOOD]
    members, others = values[answers.member], values[~answers.member]
    least, _ = compute_welch_interval(members, others)
    if not least > 0:
        # NaN, which is no doubt either, if a defense forbids a true token or all values are equal.
        return ()
    gap = np.mean(members) - np.mean(others)
    name = registry.find_method_name(_ALIKE)
    which = (
        f"compare {name} with its blind baseline"
        if name in methods
        else f"--attack {name} tests which"
    )
    return (
        Doubt(
            "likelihood",
            f"{title}: members' true tokens are more likely than non-members' by {gap:.2f} nats a "
            f"token (at least {least:.2f}): the model knows something of them that no attack "
            f"extracted, or the two differ in kind; {which}.",
        ),
    )


def _mean_log_prob_by_secret(scored: Iterable[TokenLogProbs]) -> dict[str, float]:
    return {one.secret: float(np.mean(one.log_probs)) for one in scored if one.log_probs}


def suffix_log_prob_batches_of_target(
    target: Target, waiting: Sequence[Secret], size: int | None
) -> Iterator[list[TokenLogProbs]]:
    for indices, prefixes, suffixes in _equal_shape_tensor_batches(
        target.model, waiting, size or 64
    ):
        with torch.no_grad():
            log_probs = target.model.token_log_probs(prefixes, suffixes).double().tolist()
        yield [
            TokenLogProbs(waiting[i].id, tuple(row))
            for i, row in zip(indices, log_probs, strict=True)
        ]


# --- what a server hid
# -----------------------------------------------------------------------------------------------


def doubts_on_withheld_answers(audit: Audit, target: Target) -> Iterator[Doubt]:
    """How likely the members are whose answers did not come through, or that nobody can say it;
    none where all came."""
    members = [secret for secret in target.secrets if secret.member]
    held = target.model.has_withheld_answer_by_prefix([secret.prefix for secret in members])
    hidden = [secret for secret, one in zip(members, held, strict=True) if one]
    if not hidden:
        return
    of = f"Answers to {len(hidden):,} of {len(members):,} attacked secrets did not come through"
    if not implies_capability(target.model.capabilities, "likelihood"):
        yield Doubt(
            "answers",
            f"{of}; without log-probabilities nobody can say what the model knows of them.",
        )
        return
    every = (
        one
        for some in suffix_log_prob_batches_of_target(target, hidden, audit.batch_size)
        for one in some
    )
    each = [math.exp(sum(one.log_probs)) for one in every]
    likely = sum(p > _LIKELY for p in each)
    greedy = ""
    if implies_capability(
        target.model.capabilities, "ranks"
    ):  # it would write those whose every token is the first
        batches = _equal_shape_tensor_batches(target.model, hidden, GREEDY_AT_ONCE)
        first = sum(
            int((target.model.token_ranks(*pair) == 1).all(-1).sum()) for _, *pair in batches
        )
        greedy = f", and greedy decoding would extract {first:,}"
    yield Doubt(
        "answers",
        f"{of}, but by its log-probabilities the model writes these with a mean probability of "
        f"{np.mean(each):.1%} ({likely:,} of them with more than {_LIKELY:.0%}; at temperature "
        f"1){greedy}.",
    )
