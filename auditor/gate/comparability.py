"""Test if two runs can be compared, and list the obstacles.

The model family, the secrets and the attacks must be equal. The checkpoint, the seed, the defenses
and their options may differ, because runs are compared to study these.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.nouns import CellKey, Secret
from auditor.core.plan import FIELDS, list_flag_words, list_ruled_fields
from auditor.core.plan_fields import COMPARED
from auditor.core.result import AuditResult, Finding
from auditor.core.secret_table import build_secret_table
from auditor.records.table import TABLE

# Plan fields that decide which secrets are attacked and how, in addition to the fields with the
# rule COMPARED.
_ASKED_ALIKE = frozenset(
    [
        "data",
        "nonmembers",
        "limit",
        "prefix_length",
        "suffix_length",
        "known",
        "known_fraction",
        "group_column",
        "user_column",
        "knows",
        "turns",
        "template",
        "date",
        "windows",
        "canaries",
        "forget",
        "lab",
        "attack",
        "attack_options",
        "setting",
        "samples",
        "until",
        "seed",
    ]
)


def digest_comparable_secrets(secrets: Sequence[Secret]) -> str:
    """Return a SHA-256 digest of what an attacker knows about the secrets.

    The digest covers ids, prefixes, lengths, membership and repeats, and an 8-bit checksum of the
    suffixes, which misses 1 in 256 changes. A longer checksum would let anyone who knows all
    suffixes but one confirm a guess of the missing suffix.
    """
    table = build_secret_table(secrets)
    ordered = table[np.argsort(table.ids, kind="stable")]
    # never change this: digests are compared across versions of this program
    public = ((s.id, s.prefix, len(s.suffix), s.member, s.repeats) for s in ordered)
    return f"{_digest_list(public)}-{_digest_list(s.suffix for s in ordered)[:2]}"


def _digest_list(items: Iterable[Any]) -> str:
    """Return the SHA-256 digest of the text `repr(list(items))`, without building the text."""
    digest = hashlib.sha256(b"[")
    separator = ""
    for item in items:
        digest.update(f"{separator}{item!r}".encode())
        separator = ", "
    digest.update(b"]")
    return digest.hexdigest()


def check_comparable(run: RunOutcomes, base: RunOutcomes, description: str) -> None:
    """Raise AuditError if the runs cannot be compared.

    The message states the first difference, and a command that makes a comparable run.

    Args:
        run: the run.
        base: the run to compare with.
        description: noun for the run `base`, for example "baseline".
    """
    for candidate in (run, base):
        if not candidate.outcomes:
            reason = "by which runs are paired: it was removed, or nothing was measured"
            raise AuditError(f"{candidate.name} contains no {TABLE}, {reason}")
    obstacles = list(dict.fromkeys(list_comparison_obstacles(base, run)))
    if obstacles:
        remark = ""
        if len(obstacles) > 1:
            remark = f" (and {format_count(len(obstacles) - 1, 'other difference')})"
        reason = f"{base.name} is no {description} for {run.name}: {obstacles[0]}{remark}"
        if run.result.family != base.result.family:
            both = shlex.join([base.name, run.name])
            raise AuditError(
                f"{reason}; only models of one family and vocabulary are compared secret by "
                f"secret: audit export {both} --csv both.csv puts their numbers side by side"
            )
        commands = []
        for checked in (run, base):
            if checked.result.benchmark.unasked:
                commands.append(f"audit check --resume {shlex.quote(checked.name)}")
        if commands:
            raise AuditError(
                f"{reason}; checks can be compared only after all records were asked: "
                f"{'; '.join(commands)}"
            )
        raise AuditError(
            f"{reason}; a run that can be compared: "
            f"{_format_comparable_command(run.result, base.result)}"
        )


def _format_comparable_command(result: AuditResult, base: AuditResult) -> str:
    """Return the command that audits the result's model on the data and attacks of `base`."""
    asked_alike = _ASKED_ALIKE.union(list_ruled_fields(COMPARED))
    words = ["audit", "run"]
    for name, field in FIELDS.items():
        value = (base if name in asked_alike else result).plan.get(name, field.default)
        if field.has_flag and to_json(value) not in (to_json(field.default), None):
            words += list_flag_words(name, value)
    return shlex.join(words)


def list_comparison_obstacles(run: RunOutcomes, base: RunOutcomes) -> Iterator[str]:
    """Yield each difference that prevents a comparison, as a phrase with the values of both runs.

    `run` and `base` are the compared runs; the value of `run` comes first.
    """
    result = run.result
    base_result = base.result
    yield from _describe_comparison_obstacle(
        "model family", result.family or "not recorded", base_result.family or "not recorded"
    )
    data = result.benchmark
    other_data = base_result.benchmark
    # Check the text form first: a different form changes the secrets.
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
        seeds = ""
        if result.seed != base_result.seed:
            seeds = f"; seeds {result.seed} and {base_result.seed}"
        digests = (
            f"{_shorten_secrets_digest(data.digest)} against "
            f"{_shorten_secrets_digest(other_data.digest)}"
        )
        yield f"data set: other secrets (digest {digests}{seeds})"
    for name in list_ruled_fields(COMPARED):
        yield from _describe_comparison_obstacle(
            f"attack settings: {name}", result.plan.get(name), base_result.plan.get(name)
        )
    base_findings = {}
    for finding in base_result.findings:
        base_findings[finding.cell_key] = finding
    for finding in result.findings:
        if finding.cell_key in base_findings:
            yield from _list_attack_obstacles(finding, base_findings[finding.cell_key])
            yield from _list_secret_obstacles(run, base, finding.cell_key)


def _list_attack_obstacles(finding: Finding, base: Finding) -> Iterator[str]:
    """Yield differences in the options, decoding and access of an attack or probe."""
    for name in dict.fromkeys((*finding.options, *base.options)):
        yield from _describe_comparison_obstacle(
            f"attack settings: {finding.attack}.{name}",
            finding.options.get(name),
            base.options.get(name),
        )
    title = finding.cell_key.title
    yield from _describe_comparison_obstacle(
        f"decoding of {title}", finding.decoding, base.decoding
    )
    yield from _describe_comparison_obstacle(f"access of {title}", finding.access, base.access)


def _list_secret_obstacles(run: RunOutcomes, base: RunOutcomes, cell: CellKey) -> Iterator[str]:
    """Yield a phrase if both runs have results of this cell, but of different secrets.

    A cell names target, setting, and attack or probe. Different secrets are allowed if a run
    stopped early.
    """
    outcome = run.outcomes.get(cell)
    base_outcome = base.outcomes.get(cell)
    if outcome is None or base_outcome is None:
        return  # a missing measurement: the caller that reads the cell reports it
    if np.array_equal(outcome.ids, base_outcome.ids):
        return
    new = set(outcome.ids)
    old = set(base_outcome.ids)
    if (outcome.anytime or base_outcome.anytime) and (new <= old or old <= new):
        return  # one run stopped earlier than the other
    if new != old:
        yield f"secrets of {cell.title}: {len(new - old)} only here, {len(old - new)} only there"


def _describe_comparison_obstacle(description: str, value: Any, other_value: Any) -> Iterator[str]:
    if value != other_value:
        yield (
            f"{description} {_format_differing_value(value)} against "
            f"{_format_differing_value(other_value)}"
        )


def _shorten_secrets_digest(digest: str) -> str:
    public, _, answers = digest.partition("-")
    return f"{public[:8]}-{answers}"


def _format_differing_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return repr(value)
    return str(value)
