"""Format numbers and phrases for every report, without markup, files, terminals or torch.

Records store shares as fractions in [0, 1]; reports print percent. Intervals are two-sided 95%
unless a note says otherwise.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from auditor.core.counts import format_count
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import (
    AuditResult,
    BenchmarkRecord,
    Chain,
    ChainStep,
    Finding,
    Measurement,
    TargetRecord,
)
from auditor.reports.escaping import make_printable_line
from auditor.statistics import compare, documents, metrics
from auditor.statistics.metrics import make_label
from auditor.statistics.roc import AUC

NOTHING = "–"
OUTSIDE = "outside the claim"
ACCESS = {"draw": "Sampled tokens", "distribution": "Log-probabilities", "embeddings": "Gradients"}
MOST_OF_NAME = 80  # characters of a model's name
# Names of the lab's models, by benchmark.
LAB_MODELS = {"lab": "Built-in lab model", "lab-smollm2": "Lab's SmolLM2-135M-Instruct"}
_TINY = 1e-4
_LEAST_SHARE = 1e-8
_SUFFIX_LENGTHS = re.compile(r"suffixes of \d+ to \d+ tokens")
_RELATIONS = {"add_remove": "add/remove", "zero_out": "zero-out", "replace": "replace"}


# --- text that came from users ---


def make_result_printable(result: AuditResult) -> AuditResult:
    """Return the result with all strings cleaned, so that renderers need not clean them."""
    # Use JSON, which reaches each string in any record.
    return from_json(AuditResult, _make_strings_printable(to_json(result)))


def title_only_model(model: str | None, benchmark: str) -> str:
    """Return the title of a model that is audited without a defense: its name.

    model: a folder or hub id; None for the model of the lab that `benchmark` names.
    """
    if model:
        return shorten_model_name(model)
    return LAB_MODELS.get(benchmark, UNDEFENDED.capitalize())


def shorten_model_name(name: str) -> str:
    """Return a hub id in full, or the last two parts of a path, which identify the model.

    A long name is cut in its middle, because names of runs mostly differ at their ends.
    """
    parts = []
    for part in name.replace("\\", "/").split("/"):
        if part not in ("", "."):
            parts.append(part)
    text = "/".join(parts[-2:]) or name
    if len(text) <= MOST_OF_NAME:
        return text
    n_end = MOST_OF_NAME // 2
    return f"{text[: MOST_OF_NAME - n_end - 1]}…{text[-n_end:]}"


# Most keys are field names, which recur in every record.
_make_key_printable = functools.lru_cache(maxsize=1024)(make_printable_line)


def _make_strings_printable(value: Any) -> Any:
    if isinstance(value, str):
        return make_printable_line(value)
    if isinstance(value, Mapping):
        # Keys equal after cleaning merge, and the last value stays.
        printable = {}
        for key, item in value.items():
            printable[_make_key_printable(str(key))] = _make_strings_printable(item)
        return printable
    if isinstance(value, list):
        return list(map(_make_strings_printable, value))
    return value


def format_known_pairs(record: BenchmarkRecord) -> str:
    """Return `10 prefixes with their suffixes`: the auxiliary data."""
    return format_count(record.known, "prefix with its suffix", "prefixes with their suffixes")


def lower_first(text: str) -> str:
    """Return the text with a lower-case first letter, as inside a sentence."""
    return text[:1].lower() + text[1:]


def shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: width - 1].rstrip() + "…"


# --- numbers ---


def format_percent(value: float, like: float | None = None) -> str:
    """Return a fraction in percent, without the percent sign: `52`, `0.3`, `−47`.

    like: the fraction whose size determines the number of decimals; by default `value`, which then
    never rounds to 0 if it is a share of at most 100 million secrets.
    """
    if math.isnan(value):
        return NOTHING
    size = abs(value if like is None else like)
    # One decimal near 1 too: 99.6% must not round to 100%.
    if like is None and _LEAST_SHARE <= value < _TINY / 2:
        decimals = math.ceil(-math.log10(100 * size))
    elif 0 < size < 0.001:
        decimals = 2
    elif size < 0.1 or size >= 0.99:
        decimals = 1
    else:
        decimals = 0
    return _typeset_minus(f"{100 * value:.{decimals}f}")


def _typeset_minus(number: str) -> str:
    """Return the number with a typographic minus, but without a minus if it rounded to zero."""
    if not number.strip("-0.%"):
        return number.lstrip("-")
    return number.replace("-", "−")


def format_interval(m: Measurement) -> str:
    """Return the interval of a measurement: `[46–57]`, `[−52 to −41]`, `[10.9–11.5]`."""
    if math.isnan(m.low) or math.isnan(m.high) or m.unit == "count" or math.isinf(m.low):
        return NOTHING
    ends = [format_number(m.low, "#"), format_number(m.high, "#")]
    if m.unit in metrics.SHARES:
        # Limits have the decimals of the value before them, but an upper limit is never shown as 0.
        ends = [format_percent(m.low, m.value), format_percent(m.high, m.value)]
        if m.high > 0 and not ends[1].strip("0."):
            ends[1] = format_percent(m.high)
    text = "–".join(ends)
    if "−" in text:
        text = " to ".join(ends)
    return f"[{text}]"


def format_value(m: Measurement | None) -> str:
    """Return a value without an interval: `52%` or `11.2`."""
    if m is None or math.isnan(m.value):
        return NOTHING
    if m.unit == "count":
        return f"{m.value:,.0f}"
    if m.unit == "probability" and 0 < m.value < _TINY:
        return f"<{format_percent(_TINY)}%"  # not 0.00%: the value is not zero
    if m.unit in metrics.SHARES:
        return f"{format_percent(m.value)}%"
    return format_number(m.value, "#")


def format_measurement_value(m: Measurement | None) -> str:
    """Return a value with its interval: `52% [46–57]`, `11.2 [10.9–11.5]`, `3 points [1 to 5]`."""
    if m is None or format_interval(m) == NOTHING:
        return format_value(m)
    if metrics.find_metric(m.name).signed and m.unit in metrics.SHARES:
        return format_difference(m)
    return f"{format_value(m)} {format_interval(m)}"


def format_share(m: Measurement | None) -> str:
    """Return a share with its count: `166/320 (52% [46–57])`."""
    if m is None or math.isnan(m.value) or m.n == 0:
        return NOTHING
    return f"{m.hits:,}/{m.n:,} ({format_measurement_value(m)})"


def has_hits(shares: Mapping[str, Measurement]) -> bool:
    """Test if any of the shares is above 0."""
    return any(m.value for m in shares.values())


def describe_no_hits(title: str, measurements: Iterable[Measurement]) -> str:
    """Describe shares that are all 0: `PMixED: none, up to 60% possible.`

    The limit is the highest upper limit of the shares.
    """
    most = max(m.high for m in measurements)
    return f"{title}: none, up to {format_percent(most)}% possible."


def format_counted_share(m: Measurement) -> str:
    """Return `18/24 (75% [53–90])`, or `11.2 [10.9–11.5] of 24` if the number is no share."""
    if m.unit == "share":
        return format_share(m)
    return f"{format_measurement_value(m)} of {m.n:,}"


def format_hit_count(m: Measurement) -> str:
    """Return the number of extracted secrets, `15/80`, or `15% of 80` if this number is unknown."""
    if m.unit == "share":
        return f"{m.hits:,}/{m.n:,}"
    return f"{format_value(m)} of {m.n:,}"


def format_share_without_interval(m: Measurement) -> str:
    """Return `166/320 = 52%`, for tables with separate columns for the interval and n."""
    if m.unit != "share" or metrics.find_metric(m.name).signed or math.isnan(m.value):
        return format_value(m)
    if abs(m.value * m.n - m.hits) > 1e-6 * m.n:  # a mean of shares
        return format_value(m)
    return f"{m.hits:,}/{m.n:,} = {format_value(m)}"


def format_measurement_cells(m: Measurement) -> tuple[str, str, str]:
    """Return the cells for value, interval and n: `166/320 = 52%`, `[46–57]`, `320`."""
    return format_share_without_interval(m), format_interval(m), f"{m.n:,}"


def format_number(value: float, zeros: Literal["", "#"] = "") -> str:
    """Return a number with three significant digits: `11.2`, `0.0123`, `1,234`, `1e-5`, `∞`.

    zeros: "#" keeps trailing zeros.
    """
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 100:
        return _typeset_minus(f"{value:,.0f}")
    # `1e-05` becomes `1e-5`: its hyphen stays, all others become a minus.
    return _typeset_minus(re.sub(r"e-0*", "e−", f"{value:{zeros}.3g}")).replace("e−", "e-")


def format_relative_change(ratio: float) -> str:
    """Return a relative change in whole percent: `+90%`, `−3%`."""
    return _typeset_minus(f"{100 * ratio:+,.0f}%")


def format_duration(seconds: float) -> str:
    """Return a duration: `0.4 s`, `48 s`, `2 min 05 s` or `1 h 02 min`."""
    if not math.isfinite(seconds):
        return NOTHING
    # From 59.5 it would round to `60 s`, and from 9.95 to `10.0 s`.
    if seconds < 59.5:
        if seconds < 9.95:
            return f"{seconds:.1f} s"
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_memory(megabytes: float) -> str:
    if megabytes < 1000:
        return f"{megabytes:.0f} MB"
    return f"{megabytes / 1000:.1f} GB"


def format_metric(name: str) -> str:
    """Return the name of a measurement as reports show it."""
    return metrics.find_metric(name).title


# --- rows ---


def find_reported_target(result: AuditResult, name: str) -> TargetRecord | None:
    return next((target for target in result.targets if target.name == name), None)


def title_target(result: AuditResult, name: str) -> str:
    record = find_reported_target(result, name)
    return record.title if record else name


def title_row(result: AuditResult, finding: Finding) -> str:
    """Return the model's title, with the access if the attack is white-box: `PMixED, white-box`."""
    title = title_target(result, finding.target)
    if finding.setting == "white-box":
        return f"{title}, white-box"
    return title


def sort_findings(result: AuditResult) -> tuple[Finding, ...]:
    """Return the findings in report order: first the undefended model, then the result's order."""
    return tuple(sorted(result.findings, key=lambda finding: finding.target != UNDEFENDED))


def list_measured_findings(result: AuditResult, metric: str) -> list[Finding]:
    """Return the findings with this measurement, in report order."""
    return [finding for finding in sort_findings(result) if finding.measurement(metric)]


def format_decoding(finding: Finding) -> str:
    """Return the attack's decoding: `top-p 0.7, temperature 0.8`.

    Add `outside the claim` if the model's privacy claim does not cover this decoding.
    """
    if finding.claim_applies is False:
        return f"{finding.decoding}, {OUTSIDE}"
    return finding.decoding


def format_baseline_excess_cells(finding: Finding) -> tuple[str, str, str]:
    """Return three table cells: the main number, the non-members' number, and their difference.

    A missing number is `–`.
    """
    main = finding.main
    if main is None:
        return NOTHING, NOTHING, NOTHING
    floor = finding.measurement(metrics.name_nonmember_metric(main.name))
    excess = format_measurement_value(finding.measurement(metrics.name_excess_metric(main.name)))
    if main.unit == "share":
        share, baseline = format_share(main), format_share(floor)
        if finding.measurement(documents.RECALL):
            share, baseline = (cell.replace(" (", " parts (") for cell in (share, baseline))
        return share, baseline, excess
    short = metrics.find_metric(main.name).short or make_label(main.name).lower()
    return (
        f"{short} {format_bracketed_value(finding, main)}",
        format_bracketed_value(finding, floor),
        excess,
    )


def format_bracketed_value(finding: Finding, m: Measurement | None) -> str:
    """Return a measurement with its interval, `52% [46–57]`.

    If the number is only known to lie between two bounds, return both with their intervals:
    `52% [46–57] to 55% [48–60]`. m: None if the number was not measured.
    """
    text = format_measurement_value(m)
    if m and (upper := finding.measurement(metrics.name_upper_bound_metric(m.name))):
        return f"{text} to {format_measurement_value(upper)}"
    return text


def select_any_sample_recall(
    finding: Finding, suffix: Literal["", "_nonmembers"] = ""
) -> dict[int, Measurement]:
    """Return the expected recall with n samples per secret, keyed by n in increasing order.

    suffix: "_nonmembers" selects the non-members' numbers. Return {} if nothing was measured.
    """
    recalls = {}
    for m in finding.measurements:
        # If `suffix` is "", names of non-members' numbers do not parse.
        numbers = metrics.EXPECTED_ANY_OF.parse_numbers(m.name.removesuffix(suffix))
        if numbers and m.name.endswith(suffix):
            recalls[int(numbers[0])] = m
    return dict(sorted(recalls.items()))


def format_suffix_lengths(m: Measurement) -> str:
    """Return `, suffixes of 8 to 50 tokens` if a probability is a mean over lengths; else ""."""
    lengths = _SUFFIX_LENGTHS.search(m.note)
    return f", {lengths[0]}" if lengths else ""


def format_claim_scope(finding: Finding) -> str:
    """Return whether the claim covers the attack: `yes (why)` or `no, outside ... (why)`."""
    if finding.claim_applies is None:
        return "nothing claimed"
    answer = "yes"
    if not finding.claim_applies:
        answer = f"no, {OUTSIDE}"
    if finding.claim_reason:
        return f"{answer} ({finding.claim_reason})"
    return answer


def sort_repeats(measured: Mapping[str, Measurement]) -> list[tuple[str, Measurement]]:
    """Sort measurements by repeat count; non-numeric keys come last, unsorted."""
    return sorted(measured.items(), key=lambda item: key_repeats(item[0]))


def select_insertion_exposure(finding: Finding) -> list[tuple[str, Measurement]]:
    """Return (number of insertions, exposure) pairs in increasing order; [] if not measured."""
    return [item for item in sort_repeats(finding.by_repeats) if item[1].unit == "bits"]


def list_defense_chain_steps(
    chain: Chain, target: str, beyond: bool = False
) -> tuple[ChainStep, ...]:
    """Return the steps of a chain up to the model `target`, or the later steps if `beyond`.

    If the chain lacks this model, all steps count as leading up to it.
    """
    steps = chain.steps
    # If the chain lacks the target, take all steps.
    n_steps = next((i for i, step in enumerate(steps, 1) if step.after == target), len(steps))
    return steps[n_steps:] if beyond else steps[:n_steps]


def format_brief_chain_step_effect(step: ChainStep) -> str:
    """Return the effect of a chain's step in few words.

    `splitting −12 points [−16 to −8]` or `mixing: not significant [−3.0 to 0.7]`
    """
    assert step.difference is not None
    if is_chain_step_significant(step):
        return f"{format_chain_step_causes(step)} {format_difference(step.difference)}"
    return f"{format_chain_step_causes(step)}: not significant {format_interval(step.difference)}"


def format_chain_step_causes(step: ChainStep) -> str:
    """Return the causes of a step: `training configuration, clipping and noise`."""
    return join_names(list(step.causes))


def join_names(names: Sequence[str]) -> str:
    """Return the names as inside a sentence: `A, B and C`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def is_chain_step_significant(step: ChainStep) -> bool:
    """Return whether the interval of the step's difference excludes zero."""
    m = step.difference
    return m is not None and (m.low > 0 or m.high < 0)


MORE_LIKELY = "how much more likely members' true tokens are than non-members'"


def format_difference(m: Measurement) -> str:
    """Return a difference: `−12 points [−16 to −8]` or `−3.10 bits [−4.00 to −2.20]`."""
    return f"{format_point_difference(m)} {format_interval(m)}"


def format_compared_difference(
    difference: Measurement, before: Measurement | None, now: Measurement | None
) -> str:
    """Return the difference of two measurements, and the AUCs below 0.5 that it mirrors.

    `−0.132 AUC [−0.441 to 0.178], 0.383 counted as 0.617`
    """
    text = format_difference(difference)
    for m in (before, now):
        if m is not None and m.unit == AUC and m.value < 0.5:
            text += f", {format_value(m)} counted as {format_number(1 - m.value, '#')}"
    return text


def format_baseline_excess(m: Measurement) -> str:
    """Return `, above non-members` if the non-members' change was subtracted; otherwise ""."""
    return f", {m.note}" if m.note == compare.ABOVE else ""


def format_point_difference(m: Measurement) -> str:
    if m.unit in metrics.SHARES:
        return f"{format_percent(m.value)} points"
    return f"{format_value(m)} {m.unit}"


def key_repeats(repeats: str) -> float:
    return float(repeats) if repeats.isdecimal() else math.inf


def format_target_perplexity(result: AuditResult, target: str) -> str:
    record = find_reported_target(result, target)
    return format_value(record.perplexity if record else None)


def title_target_costs(result: AuditResult, target: str) -> str:
    """Return title, perplexity and promised epsilon: `PMixED · PPL 90.6 · ε 8 (shard)`."""
    record = find_reported_target(result, target)
    if record is None:
        return target
    parts = [record.title, f"PPL {format_value(record.perplexity)}"]
    claim = record.claim
    if (
        claim is not None and select_claimed_epsilon(claim) > 0
    ):  # 0: nothing was drawn, so it promises nothing
        parts.append(f"{'' if claim.sound else 'claimed '}ε {format_promised_epsilon(claim)}")
    return " · ".join(parts)


# --- claims ---


def format_relation(name: str) -> str:
    return _RELATIONS.get(name, name.replace("_", " "))


def select_claimed_epsilon(claim: Claim) -> float:
    """Return the epsilon, in nats, for the claim's own neighbouring relation; NaN if missing."""
    return claim.epsilon.get(claim.relation, math.nan)


def format_promised_epsilon(claim: Claim) -> str:
    """Return the claimed epsilon with its unit of protection: `8 (shard)`."""
    return f"{format_number(select_claimed_epsilon(claim))} ({claim.unit})"


def format_covered_tokens(claim: Claim) -> str:
    """Return the number of tokens that the claim covers: `1,024 drawn tokens`, or `no limit`.

    Add `, all spent` if this audit drew all of these tokens.
    """
    if claim.queries is None:
        return "any number of drawn tokens"
    tokens = format_count(claim.queries, "drawn token")
    if claim.spent_queries and claim.spent_queries >= claim.queries:
        return f"{tokens}, all spent"
    return tokens


def format_single_record_epsilon(claim: Claim) -> str:
    """Return the epsilon of a record in a shard: `for a single record in it, ε 18.9 (replace)`.

    If a record or user is added or removed, only the shard that holds its data changes, as if this
    shard were replaced (against Section 5.3 of Flemings et al. 2024). There is an exception for
    users: a new user may share records with two other users. All three must then be in one shard,
    so the two others may have to move. Return "" if no shards of records or users exist.
    """
    replaced = claim.epsilon.get("replace")
    if not claim.whole or replaced is None:
        return ""
    exception = ""
    if claim.whole == "user":
        exception = " who shares no record"
    return f"for a single {claim.whole} in it{exception}, ε {format_number(replaced)} (replace)"


def list_violation_warnings(finding: Finding) -> tuple[str, ...]:
    """Return warnings of violated claims: `VIOLATED: 3 records are in more than one shard`.

    Reports must show these warnings prominently.
    """
    return tuple(f"VIOLATED: {violation}" for violation in finding.violations)
