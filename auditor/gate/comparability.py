"""Whether two runs can be held against each other, and if not, why: the same predicate for
baselines and comparisons.

The attacked model may be another checkpoint, the seed, the defenses and their options may differ:
that is what a comparison is about. The family of the model, the secrets and the attacks may not.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.counts import counted
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Secret
from auditor.core.plan import FIELDS, flag_of_plan_field, plan_field_names_with_rule
from auditor.core.plan_fields import COMPARED
from auditor.core.result import NO_TIME, AuditResult
from auditor.records.table import TABLE

# Fields of a plan that decide which secrets are attacked and how, beside those with the rule
# COMPARED.
_ASKED_ALIKE = (
    *(
        "data",
        "nonmembers",
        "limit",
        "prefix_length",
        "suffix_length",
        "known",
        "known_fraction",
        "group_column",
    ),
    *("user_column", "knows", "turns", "template", "date", "windows", "canaries", "forget", "lab"),
    *("attack", "attack_options", "setting", "samples", "until", "seed"),
)


def comparable_secrets_digest(secrets: Sequence[Secret]) -> str:
    """SHA-256 of what an attacker is told (ids, prefixes, lengths, membership, repeats), and 8 bits
    of the answers.

    So few, because a digest of the answers would confirm a guess of the last one to whoever knows
    the others; 255 of 256 other sets of answers still differ in them.
    """
    ordered = sorted(secrets, key=lambda s: s.id)
    # never to be changed: digests are compared across versions of this program
    public = [(s.id, s.prefix, len(s.suffix), s.member, s.repeats) for s in ordered]
    answers = hashlib.sha256(repr([s.suffix for s in ordered]).encode()).hexdigest()[:2]
    return f"{hashlib.sha256(repr(public).encode()).hexdigest()}-{answers}"


def check_comparable(run: RunOutcomes, base: RunOutcomes, what: str) -> None:
    """Raises AuditError with the first difference and the command of a run without any.

    what: what the other run was to be, "baseline" for example.
    """
    for one in (run, base):
        if not one.outcomes:
            why = "by which runs are paired: it was taken away, or nothing was measured"
            raise AuditError(f"{one.name} holds no {TABLE}, {why}")
    found = list(dict.fromkeys(list_comparison_obstacles(run, base)))
    if found:
        others = f" (and {counted(len(found) - 1, 'other difference')})" if len(found) > 1 else ""
        why = f"{base.name} is no {what} for {run.name}: {found[0]}{others}"
        if run.result.family != base.result.family:
            raise AuditError(
                f"{why}; only models of one family and vocabulary are compared secret by secret"
            )
        if unfinished := [
            checked for checked in (run, base) if _n_records_not_asked(checked.result)
        ]:
            resumed = "; ".join(
                f"audit check --resume {shlex.quote(checked.name)}" for checked in unfinished
            )
            raise AuditError(f"{why}; checks are compared once no record is left to ask: {resumed}")
        raise AuditError(
            f"{why}; a run that can be compared: "
            f"{_format_comparable_command(run.result, base.result)}"
        )


def _n_records_not_asked(result: AuditResult) -> int:
    counts = result.benchmark.records.get("members")
    return 0 if counts is None else counts.not_attacked.get(NO_TIME, 0)


def _format_comparable_command(result: AuditResult, base: AuditResult) -> str:
    """Return the command that audits the result's model on the data and by the attack settings of
    `base`."""
    asked_alike = {*plan_field_names_with_rule(COMPARED), *_ASKED_ALIKE}
    words = ["audit", "run"]
    for name, field in FIELDS.items():
        value = (base if name in asked_alike else result).plan.get(name, field.default)
        # A plan read from JSON has lists in place of tuples.
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if field.said.flags is None or value in (field.default, default, None):
            continue
        words += _format_flag(flag_of_plan_field(name), value)
    return shlex.join(words)


def _format_flag(flag: str, value: Any) -> list[str]:
    """Return a value of a plan as the words of a command line."""
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [word for item in value for word in (flag, str(item))]
    if isinstance(value, dict):
        pairs = []
        for name, given in value.items():
            options = given if isinstance(given, dict) else {"": given}
            pairs += [
                f"{'.'.join(filter(None, (name, option)))}={text}"
                for option, text in options.items()
            ]
        return [word for pair in pairs for word in (flag, pair)]
    return [flag, str(value)]


def list_comparison_obstacles(run: RunOutcomes, base: RunOutcomes) -> Iterator[str]:
    """What keeps the two from being compared, as `what: mine against theirs`."""
    mine, theirs = run.result, base.result
    yield from _describe_comparison_obstacle(
        "model family", mine.family or "not recorded", theirs.family or "not recorded"
    )
    data, other_data = mine.benchmark, theirs.benchmark
    # First: another text form makes other secrets.
    if data.text_form and other_data.text_form:
        yield from _describe_comparison_obstacle(
            "text form (--template, --date)", data.text_form, other_data.text_form
        )
    for name in ("name", "members", "nonmembers", "known", "repeats"):
        yield from _describe_comparison_obstacle(
            f"data set: {name}", getattr(data, name), getattr(other_data, name)
        )
    if not (data.digest and other_data.digest):
        yield from _describe_comparison_obstacle(
            "data set", data.description, other_data.description
        )
    elif data.digest != other_data.digest:
        seeds = f"; seeds {mine.seed} and {theirs.seed}" if mine.seed != theirs.seed else ""
        digests = (
            f"{_shorten_secrets_digest(data.digest)} against "
            f"{_shorten_secrets_digest(other_data.digest)}"
        )
        yield f"data set: other secrets (digest {digests}{seeds})"
    for name in plan_field_names_with_rule(COMPARED):
        yield from _describe_comparison_obstacle(
            f"attack settings: {name}", mine.plan.get(name), theirs.plan.get(name)
        )
    others = {finding.cell_key: finding for finding in theirs.findings}
    for finding in mine.findings:
        if (other := others.get(finding.cell_key)) is not None:
            for name in dict.fromkeys((*finding.options, *other.options)):
                what = f"attack settings: {finding.attack}.{name}"
                yield from _describe_comparison_obstacle(
                    what, finding.options.get(name), other.options.get(name)
                )
            yield from _describe_comparison_obstacle(
                f"decoding of {finding.cell_key.title}", finding.decoding, other.decoding
            )
            yield from _describe_comparison_obstacle(
                f"access of {finding.cell_key.title}", finding.access, other.access
            )
            yield from _secrets_barring_run_comparison(run, base, finding.cell_key)


def _secrets_barring_run_comparison(
    run: RunOutcomes, base: RunOutcomes, row: CellKey
) -> Iterator[str]:
    mine, theirs = run.outcomes.get(row), base.outcomes.get(row)
    if mine is None or theirs is None:
        return  # one of them was not measured: that is for whoever asks about the row
    one, other = set(mine.ids), set(theirs.ids)
    if (mine.anytime or theirs.anytime) and (one <= other or other <= one):
        return  # one stopped before the other
    if one != other:
        yield f"secrets of {row.title}: {len(one - other)} only here, {len(other - one)} only there"


def _describe_comparison_obstacle(what: str, mine: Any, theirs: Any) -> Iterator[str]:
    if mine != theirs:
        yield f"{what} {_format_differing_value(mine)} against {_format_differing_value(theirs)}"


def _shorten_secrets_digest(digest: str) -> str:
    public, _, answers = digest.partition("-")
    return f"{public[:8]}-{answers}"


def _format_differing_value(value: Any) -> str:
    return "none" if value is None else repr(value) if isinstance(value, str) else str(value)
