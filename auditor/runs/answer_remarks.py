"""What a reader must know of how a cell's secrets were answered: sentences, from guesses and the
budget alone."""

from __future__ import annotations

from collections.abc import Sequence

from auditor.core.nouns import Certificate, Guesses, Secret
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.view import View


def cell_remarks_on_guesses(
    guesses: Sequence[Guesses], attacked: Sequence[Secret], benchmark: Benchmark, asked: int
) -> tuple[str, ...]:
    """What a reader must know of a cell's guesses. asked: how many of the attacked secrets an
    answer was wanted for."""
    said = [
        *cell_remarks_on_attacked_subset(attacked, benchmark),
        *_remarks_on_secrets_not_independent(
            "parts of", [one.document for one in attacked if one.document is not None], "documents"
        ),
        *_remarks_on_secrets_not_independent(
            "of", [one.user for one in attacked if one.user is not None], "people"
        ),
        *cell_remarks_on_draws_near_cdf_boundary(guesses),
    ]
    if len(guesses) < asked:
        said.append(f"the query budget covered {len(guesses)} of {asked} secrets")
    return (
        *said,
        *_cell_remarks_on_certified_suffixes([g.certificate for g in guesses if g.certificate]),
    )


def cell_remarks_on_draws_near_cdf_boundary(guesses: Sequence[Guesses]) -> tuple[str, ...]:
    """How many draws float noise may have decided."""
    # A draw so close to where two tokens meet in the CDF may fall to the other one on another
    # machine.
    near, drawn = sum(g.near_boundary for g in guesses), sum(g.drawn for g in guesses)
    return (f"{near} of {drawn} draws lay within 1e-6 of a CDF boundary",) if near else ()


def cell_remarks_on_attacked_subset(
    attacked: Sequence[Secret], benchmark: Benchmark
) -> tuple[str, ...]:
    """That only some secrets were attacked; comparisons with other rows use the secrets attacked in
    both."""
    if len(attacked) == len(benchmark.secrets):
        return ()
    members, of = (
        sum(secret.member for secret in secrets) for secrets in (attacked, benchmark.secrets)
    )
    return (f"{members} of {of} members attacked, evenly spaced (--ensemble-limit)",)


def _remarks_on_secrets_not_independent(
    what: str, groups: Sequence[object], name: str
) -> tuple[str, ...]:
    """groups: the document or the person of each secret that has one; secrets that share one are
    not independent."""
    if not groups:
        return ()
    return (
        f"{len(groups):,} secrets are {what} {len(set(groups)):,} {name} and not independent: "
        f"intervals over secrets are too narrow, those over {name} are not",
    )


def cell_remarks_on_single_samples(view: View, attack: Attack) -> tuple[str, ...]:
    """Return that one sample was drawn in place of many, if every sample of a prefix would be the
    same."""
    sampling = attack.sampling()
    if (
        sampling is None
        or sampling.search != "sample"
        or view.sample_count(sampling) == sampling.samples
    ):
        return ()
    decoding = view.decoding_in_this_setting(sampling)
    return (
        f"1 sample of each prefix, not {sampling.samples:,}: under {decoding} decoding all are the "
        "same",
    )


def cell_remarks_on_query_budget(
    view: View, attack: Attack, guesses: Sequence[Guesses], what: str = "secrets"
) -> tuple[str, ...]:
    """How many answers a fixed budget paid for in full, where the public model answered the
    rest."""
    if view.allowance is None:
        return ()
    allowed = view.allowance
    # No key is missing: a secret that the budget leaves without an allowance has no guess.
    paid = sum(
        all(allowed[recipe, g.secret] >= g.drawn for recipe in attack.sample_counts_by_recipe(view))
        for g in guesses
    )
    if paid == len(guesses):
        return ()
    return (
        f"the query budget paid for {paid} of {len(guesses)} {what} in full; the public model "
        "answered the rest",
    )


def _cell_remarks_on_certified_suffixes(found: Sequence[Certificate]) -> tuple[str, ...]:
    """What a tree search knows for certain, over all secrets."""
    if not found:
        return ()
    reached, certified = sum(c.reached for c in found), sum(c.certified for c in found)
    leftover = sum(c.leftover for c in found) / len(found)
    return (
        f"{reached} of {len(found)} secrets have a suffix that reaches the threshold, {certified} "
        f"a certified likeliest suffix; mean probability mass not found {leftover:.3f}",
    )
