"""Write remarks for readers about an attack's guesses, based only on guesses and query budget."""

from __future__ import annotations

from collections.abc import Sequence

from auditor.core.nouns import Certificate, Guesses, Secret
from auditor.core.secret_table import select_members
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.view import View


def list_guess_remarks(
    guesses: Sequence[Guesses], attacked: Sequence[Secret], benchmark: Benchmark, n_queried: int
) -> tuple[str, ...]:
    """Return remarks about an attack's guesses on one target model in one access setting.

    A remark is a sentence for the reader of a report.

    Args:
        guesses: the attack's guesses about each secret that the query budget covered.
        attacked: the secrets attacked on this target.
        benchmark: data of the run.
        n_queried: number of attacked secrets that were queried.
    """
    remarks = [
        *list_subset_remarks(attacked, benchmark),
        *_list_dependence_remarks(
            "parts of",
            [secret.document for secret in attacked if secret.document is not None],
            "documents",
        ),
        *_list_dependence_remarks(
            "of", [secret.user for secret in attacked if secret.user is not None], "people"
        ),
        *list_sampling_boundary_remarks(guesses),
    ]
    if len(guesses) < n_queried:
        remarks.append(f"the query budget covered {len(guesses)} of {n_queried} secrets")
    return (
        *remarks,
        *_list_certificate_remarks([g.certificate for g in guesses if g.certificate]),
    )


def list_sampling_boundary_remarks(guesses: Sequence[Guesses]) -> tuple[str, ...]:
    """Return a remark that counts the draws whose random number was within 1e-6 of a CDF boundary.

    A different machine may draw the neighbouring token instead. Return () if no such draws exist.
    """
    # A draw this close to a boundary of the CDF may select the neighbouring token on a different
    # machine.
    n_near = sum(g.near_boundary for g in guesses)
    n_draws = sum(g.drawn for g in guesses)
    if n_near:
        return (f"{n_near:,} of {n_draws:,} draws lay within 1e-6 of a CDF boundary",)
    return ()


def list_subset_remarks(attacked: Sequence[Secret], benchmark: Benchmark) -> tuple[str, ...]:
    """Return a remark if only some of the benchmark's secrets were attacked, otherwise ()."""
    if len(attacked) == len(benchmark.secrets):
        return ()
    n_attacked = len(select_members(attacked))
    n_members = len(select_members(benchmark.secrets))
    return (f"{n_attacked} of {n_members} members attacked, evenly spaced (--ensemble-limit)",)


def _list_dependence_remarks(
    description: str, groups: Sequence[object], name: str
) -> tuple[str, ...]:
    """Return a remark that secrets from the same document or person are not independent.

    Return () if `groups` is empty.

    Args:
        groups: document or person of each secret, as far as known.
        description: words before the number of groups, such as "parts of".
        name: noun after this number, such as "documents".
    """
    if not groups:
        return ()
    return (
        f"{len(groups):,} secrets are {description} {len(set(groups)):,} {name} and not "
        "independent: "
        f"intervals over secrets are too narrow, those over {name} are not",
    )


def list_single_sample_remarks(view: View, attack: Attack) -> tuple[str, ...]:
    """Return a remark if the attack draws one sample instead of the requested number, otherwise ().

    An attack draws only one if the setting's decoding would always give the same sample. `view` is
    the attacker's access to the target.
    """
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


def list_budget_remarks(
    view: View, attack: Attack, guesses: Sequence[Guesses], description: str = "secrets"
) -> tuple[str, ...]:
    """Return a remark that counts the guesses which the fixed query budget paid for in full.

    The budget pays for a fixed number of drawn tokens. The public model drew the tokens of the
    other guesses that the budget did not pay for. Return () if there is no budget, or if it paid
    for all guesses.

    Args:
        view: the attacker's access to the target, with the budget.
        attack: the attack.
        guesses: its guesses.
        description: plural noun for the guessed items in the remark.
    """
    if view.allowance is None:
        return ()
    allowance = view.allowance
    # No key can be missing: a secret without an allowance has no guess.
    n_paid = sum(
        all(
            allowance[recipe, g.secret] >= g.drawn
            for recipe in attack.sample_counts_by_recipe(view)
        )
        for g in guesses
    )
    if n_paid == len(guesses):
        return ()
    return (
        f"the query budget paid for {n_paid} of {len(guesses)} {description} in full; the public "
        "model "
        "answered the rest",
    )


def _list_certificate_remarks(certificates: Sequence[Certificate]) -> tuple[str, ...]:
    """Return a remark that summarises the tree searches for all secrets.

    A tree search finds every suffix whose probability reaches a threshold. The remark counts the
    secrets with such a suffix, and the secrets whose most likely suffix is proven to be the most
    likely of all. It also states the mean probability of all suffixes that were not found. Return
    () if there were no searches.
    """
    if not certificates:
        return ()
    reached = sum(c.reached for c in certificates)
    certified = sum(c.certified for c in certificates)
    leftover = sum(c.leftover for c in certificates) / len(certificates)
    return (
        f"{reached} of {len(certificates)} secrets have a suffix that reaches the threshold, "
        f"{certified} "
        f"a certified likeliest suffix; mean probability mass not found {leftover:.3f}",
    )
