"""Parse gate rules from a TOML policy file, sentences or flags. This module reads no runs.

inconclusive = "fail"                              # report (exit 4), pass or fail; the flag wins
allow_not_applicable = true                        # attacks that never applied pass (also a flag)
rules = ["recall <= 0.05", "recall(count=16) <= 0.5", "recall(kind=email) <= 0.02",
         "forms <= full + 0.02"]                   # a deployed form leaks at most 0.02 more

[[rule]]                                           # for a target, setting or attack
rule = "recall_at_100_errors not worse than baseline by 0.02"   # or: than undefended (same run)
target = "pmixed"
setting = "text-only"

[[rule]]                                           # no capable audit contradicts the claim
rule = "epsilon_lower_bound <= claim"

[[rule]]                                           # the same rule in fields
metric = "recall"
count = 1                                          # of secrets with one copy; or kind = "email"
max = 0.01                                         # or "claim"; or max_increase, over the baseline

[require]                                          # required of the run, whatever its results
model_here = true                                  # the judged model is on this machine
max_age = 7                                        # days since it was judged
attacks = ["perplexity", "ethicist"]               # each applied to every judged target
access = "white-box"                               # access of the attacks above; or "text-only"
secrets = 300                                      # minimum that each of them attacks
nonmembers = 200
attestation = true                                 # signed by the key passed to the gate
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_toml
from auditor.core.nouns import SettingName
from auditor.gate.rulings import Treatment
from auditor.statistics.audited import MAIN
from auditor.statistics.audited import METRICS as BOUNDS
from auditor.statistics.metrics import LEAKS, RECALL, SHARES, find_metric

_PART = r"\(\s*(?:count\s*=\s*([0-9]{1,12})|kind\s*=\s*([^()=\s][^()=]*?))\s*\)"
_METRIC = re.compile(rf"([a-z][a-z0-9_.]*)(?:{_PART})?", re.IGNORECASE)
_RELATIVE = r"(not worse than (baseline|undefended)(?: by)?)"
_SENTENCE = re.compile(rf"\s*({_METRIC.pattern})\s*(?:<=|{_RELATIVE})\s*(\S*)\s*", re.IGNORECASE)
_OF_FORMS = re.compile(r"\s*forms\s*<=\s*full(?:\s*\+\s*(\S+))?\s*", re.IGNORECASE)
_FORMS = (
    "'METRIC <= NUMBER', 'METRIC not worse than baseline by NUMBER' (or undefended: of the same "
    "run) or 'forms <= full + NUMBER'"
)
HELD_TO_CLAIMS = BOUNDS[MAIN]
CLAIM = "claim"  # instead of a number: the epsilon that the target claims


@dataclass(frozen=True)
class Rule:
    """Limit on a metric, or on its increase over the baseline, in all or some judged findings.

    Args:
        metric: name of the metric.
        limit: largest allowed value or increase.
        against_baseline: whether the limit is on the increase over the baseline.
        count: repeat count; the rule then covers only secrets with this count.
        kind: kind of personal data; the metric is then its extracted share.
        target: only this target.
        setting: only this access setting.
        attack: only this attack or probe.
        of_claim: whether the limit is the target's claim; `limit` is then infinite.
        against_undefended: whether the limit is on the increase over the same run's undefended
            target.
        of_forms: whether the limit is on how much more a deployed form, such as a quantised model,
            leaks than the full model. The metric is then each finding's main number, if this is a
            share or an AUC.
    """

    metric: str
    limit: float
    against_baseline: bool = False
    count: int | None = None
    kind: str | None = None
    target: str | None = None
    setting: str | None = None
    attack: str | None = None
    of_claim: bool = False
    against_undefended: bool = False
    of_forms: bool = False

    @property
    def is_paired_difference(self) -> bool:
        """True if the rule limits the difference from the baseline run, paired by secret."""
        return self.against_baseline or self.against_undefended

    @property
    def metric_with_part(self) -> str:
        if self.kind is not None:
            return f"{self.metric}(kind={self.kind})"
        if self.count is not None:
            return f"{self.metric}(count={self.count})"
        return self.metric

    def __str__(self) -> str:
        metric = self.metric_with_part
        if self.of_forms:
            return f"forms <= full + {self.limit:g}"
        if self.against_undefended:
            return f"{metric} not worse than undefended by {self.limit:g}"
        if self.against_baseline:
            return f"{metric} not worse than baseline by {self.limit:g}"
        if self.of_claim:
            return f"{metric} <= {CLAIM}"
        return f"{metric} <= {self.limit:g}"


NO_WORSE = Rule(RECALL, 0.02, against_baseline=True)  # the default rule, with a baseline


@dataclass(frozen=True)
class Required:
    """Minimum coverage of a run, because a limit that was not tested means nothing.

    Args:
        attacks: attacks that must run on every judged target.
        access: setting of these attacks; None for any.
        secrets: minimum number of members in each required attack.
        nonmembers: minimum number of non-members in each required attack.
        attestation: whether the run must be signed.
        model_here: whether the judged model must be on this machine.
        max_age: largest number of days since the run; None for any.
    """

    attacks: tuple[str, ...] = ()
    access: SettingName | None = None
    secrets: int = 0
    nonmembers: int = 0
    attestation: bool = False
    model_here: bool = False
    max_age: float | None = None


NOTHING = Required()


@dataclass(frozen=True)
class Policy:
    rules: tuple[Rule, ...] = ()
    inconclusive: Treatment = "report"
    # pass even if a requested attack never applied
    allow_not_applicable: bool = False
    require: Required = NOTHING


@dataclass(frozen=True)
class _RuleTable:
    """The valid keys of a [[rule]] table of a policy file: a sentence (`rule`) or fields.

    `target`, `setting` and `attack` restrict the rule to some findings.
    """

    rule: str | None = None
    metric: str | None = None
    count: int | None = None
    kind: str | None = None
    max: Any = None
    max_increase: Any = None
    target: str | None = None
    setting: str | None = None
    attack: str | None = None


@dataclass(frozen=True)
class _PolicyFile:
    inconclusive: Treatment = "report"
    allow_not_applicable: bool = False
    rules: tuple[str, ...] = ()
    rule: tuple[_RuleTable, ...] = ()
    require: Required = NOTHING


def read_gate_policy(path: Path) -> Policy:
    """Read a policy file.

    Raise AuditError for a missing file, invalid TOML, unknown keys and empty rules.
    """
    raw = read_toml(path, "the policy")
    policy_file = from_json(_PolicyFile, raw, str(path))
    rules = list(map(parse_gate_rule, policy_file.rules))
    for i, table in enumerate(raw.get("rule", ()), 1):
        rules.append(_parse_rule_table(table, f"{path}: rule {i}"))
    if not rules:
        raise AuditError(
            f"{path}: expected at least one rule, got none; a gate without rules decides nothing"
        )
    _check_require_table(policy_file.require, raw.get("require", {}), f"{path}: require")
    return Policy(
        refuse_repeated_limits(rules),
        policy_file.inconclusive,
        policy_file.allow_not_applicable,
        policy_file.require,
    )


def _check_require_table(required: Required, table: Mapping[str, Any], where: str) -> None:
    """Raise AuditError for an empty name, a count below 1 or an invalid age in a [require] table.

    Args:
        required: the parsed table.
        table: the table's own values.
        where: name of the file in messages.
    """
    if not all(required.attacks):
        raise AuditError(
            f"{where}: expected attacks to be a list of names, got {list(required.attacks)!r}"
        )
    for key in {"secrets", "nonmembers"} & set(table):
        if getattr(required, key) < 1:
            raise AuditError(
                f"{where}: expected {key} to be a whole number >= 1, got {table[key]!r}"
            )
    if required.max_age is not None and not 0 < required.max_age < math.inf:
        raise AuditError(f"{where}: expected max_age in days, above 0, got {required.max_age!r}")


def parse_inconclusive_treatment(value: str) -> Treatment:
    if value not in get_args(Treatment):
        raise AuditError(f"expected --inconclusive to be report, pass or fail, got {value!r}")
    return value  # type: ignore[return-value]


def parse_gate_rule(sentence: str) -> Rule:
    """Parse a sentence: `recall(count=16) <= 0.5` or `recall not worse than baseline by 0.02`.

    Raise AuditError for any other text.
    """
    if of_forms := _OF_FORMS.fullmatch(sentence):
        rule_of_forms = _validate_rule(
            RECALL, of_forms[1] or "0", f"expected a number at the end of {sentence!r}", True
        )
        return replace(
            rule_of_forms, against_baseline=False, against_undefended=True, of_forms=True
        )
    match = _SENTENCE.fullmatch(sentence)
    if not match:
        raise AuditError(f"expected a rule such as {_FORMS}, got {sentence!r}")
    # *_: the groups of _METRIC, nested in the first group of the sentence
    name, *_, relative, reference, number = match.groups()
    if relative and not relative.lower().endswith(" by") and not number:
        number = "0"
    rule = _validate_rule(
        name, number, f"expected a number at the end of {sentence!r}", bool(relative)
    )
    if relative and reference.lower() == "undefended":
        return replace(rule, against_baseline=False, against_undefended=True)
    return rule


def parse_gate_limits(
    items: Sequence[str], flag: str = "--max", against_baseline: bool = False
) -> tuple[Rule, ...]:
    """Parse items such as `recall=0.05` and `recall(count=16)=0.5`.

    Raise AuditError for other text or a repeated limit.

    Args:
        items: the items.
        flag: name of the flag for messages.
        against_baseline: whether the limits are on the increase over the baseline.
    """
    rules = []
    for item in items:
        complaint = f"expected {flag} metric=number, got {item!r}"
        name, _, value = item.rpartition("=")  # from the right: recall(count=16) contains another =
        if not _METRIC.fullmatch(name):
            raise AuditError(complaint)
        rules.append(_validate_rule(name, value, complaint, against_baseline))
    return refuse_repeated_limits(rules)


def refuse_repeated_limits(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules unchanged. Raise AuditError if two rules limit the same number."""
    first_rules: dict[Rule, Rule] = {}
    for rule in rules:
        # rules that differ only in their limits
        first_rule = first_rules.setdefault(replace(rule, limit=0.0), rule)
        if first_rule is not rule:
            limits = f"{first_rule.limit:g} and {rule.limit:g}"
            if rule.of_claim:
                limits = f"{CLAIM} twice"
            raise AuditError(f"expected one limit for {rule.metric_with_part}, got {limits}")
    return tuple(rules)


def _parse_rule_table(table: Mapping[str, Any], where: str) -> Rule:
    options = dict(table)
    for key, value in options.items():
        if value == "":
            raise AuditError(f"{where}: expected the name of a {key}, got an empty one")
    narrowed = {}
    for key in ("target", "setting", "attack"):
        if key in options:
            narrowed[key] = options.pop(key)
    if (sentence := options.pop("rule", None)) is not None:
        if options:
            raise AuditError(
                f"{where}: expected a sentence or fields, got rule and {next(iter(options))}"
            )
        return replace(parse_gate_rule(sentence), **narrowed)
    if "metric" not in options:
        raise AuditError(f"{where}: expected a metric, got none")
    limits = [key for key in ("max", "max_increase") if key in options]
    if len(limits) != 1:
        raise AuditError(
            f"{where}: expected either max or max_increase, got {' and '.join(limits) or 'neither'}"
        )
    if not _METRIC.fullmatch(table["metric"]):
        raise AuditError(
            f"{where}: expected a metric such as recall or recall(count=16), got "
            f"{table['metric']!r}"
        )
    (key,) = limits
    limit = options[key]
    complaint = f"{where}: expected {key} to be a number, got {limit!r}"
    metric = _split_rule_metric(table["metric"], options, where)
    return replace(_validate_rule(metric, limit, complaint, key == "max_increase"), **narrowed)


def _split_rule_metric(metric: str, table: Mapping[str, Any], where: str) -> str:
    """Return a metric with its part, such as `recall(count=16)`.

    The part comes from the metric's text or from the table's fields. Raise AuditError if both state
    a part.

    Args:
        metric: the metric's text.
        table: fields of the policy file's rule.
        where: name of the file and of the rule in messages.
    """
    parts = [key for key in ("count", "kind") if key in table]
    if table.get("count", 0) < 0:
        raise AuditError(
            f"{where}: expected one whole count >= 0, got {table['count']!r} for {metric}"
        )
    if len(parts) + ("(" in metric) > 1:
        raise AuditError(
            f"{where}: expected one count or kind, got {' and '.join(parts)} for {metric}"
        )
    if not parts:
        return metric
    (part,) = parts
    full_metric = f"{metric}({part}={table[part]})"
    if not _METRIC.fullmatch(full_metric):
        expected = "a count of at most 12 digits"
        if part == "kind":
            expected = "a kind of personal data such as email"
        raise AuditError(f"{where}: expected {expected}, got {table[part]!r}")
    return full_metric


def _validate_rule(name: str, limit: Any, complaint: str, against_baseline: bool) -> Rule:
    """Build the rule for a metric.

    Raise AuditError for a rule that could not fail, however much the model leaks.

    Args:
        name: `recall`, `recall(count=16)` or `recall(kind=email)`, already validated.
        limit: a number, or `CLAIM` for the epsilon that the target claims.
        complaint: the start of error messages.
        against_baseline: whether the limit is on the change from the baseline run.
    """
    match = _METRIC.fullmatch(name)
    assert match is not None
    metric, count, kind = match[1], None if match[2] is None else int(match[2]), match[3]
    _check_gateable_metric(metric)
    if kind is not None and (metric != RECALL or against_baseline):
        explanation = (
            f"expected a limit on {RECALL}(kind={kind}) itself: only that is counted by kind"
        )
        raise AuditError(f"{explanation}, got {name!r}")
    if limit == CLAIM:
        if metric != HELD_TO_CLAIMS or against_baseline or count is not None:
            raise AuditError(
                f"{complaint}: only {HELD_TO_CLAIMS} <= {CLAIM} is compared with the claim"
            )
        return Rule(metric, math.inf, of_claim=True)
    rule = Rule(metric, _parse_limit_number(limit, complaint), against_baseline, count, kind)
    if math.isinf(rule.limit):
        raise AuditError(
            f"expected a limit for {rule.metric_with_part} that a measurement could exceed, got "
            f"{rule.limit:g}"
        )
    if find_metric(rule.metric).unit in SHARES:
        check_share_limit(rule)
    return rule


def _check_gateable_metric(name: str) -> None:
    """Raise AuditError for a metric that a gate cannot decide on."""
    metric = find_metric(name)
    if not metric.is_gateable:
        reason = "has no interval"
        if metric.of_model:
            reason = "is a number of the model and of no attack"
        raise AuditError(
            f"expected a metric that a gate can decide, such as {', '.join(LEAKS)} (all: "
            f"docs/reference/metrics.md), got {name}, which {reason}"
        )


def check_share_limit(rule: Rule) -> None:
    """Raise AuditError if a rule limits a share by a number that no share exceeds or reaches."""
    can_be_negative = rule.is_paired_difference or find_metric(rule.metric).signed
    if rule.limit < 0 and not can_be_negative:
        raise AuditError(
            f"expected a limit of at least 0 for {rule.metric_with_part}, which is a share, got "
            f"{rule.limit:g}"
        )
    if rule.limit > 1:
        raise AuditError(
            f"expected a limit of at most 1 for {rule.metric_with_part}, which is a share, got "
            f"{rule.limit:g}: {rule.limit:g}% is {rule.limit / 100:g}"
        )


def _parse_limit_number(value: Any, complaint: str) -> float:
    number = math.nan
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if math.isnan(number):
        raise AuditError(complaint)
    return number
